package crdbdrain

import (
	"bytes"
	"context"
	"crypto/tls"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
)

// faultMatrix says what becomes of a call on CockroachDB when something goes wrong (a column) at some point of its
// connection's life (a row), on a real socket. A cell is what the application sees:
//
//	ok       no error; the statement was sent once, or to another connection only
//	again    no error; what the server provably did not execute, or what leaves nothing behind, was sent to another one
//	ended    the connection's end, without a word from the server
//	timeout  the caller's context has ended
//	garbled  an answer that is none
//	refused  pgx's "server refused TLS connection"
//	57P01    an error of the server's
//
// A server that hangs reads what it is sent. One that is half-open does not: it is a host that is gone, whose kernel, or
// whose load balancer, is all that is left; a dial to it is not answered. What has no place in a protocol at some point
// (an error within a handshake) is sent all the same.
//
// "x/y" is what the driver makes of it and what plain pgx does in the same cell; where there is no slash they have to be
// the same. On PostgreSQL the driver has to be pgx in every cell.
var faultMatrix = []struct {
	at    string
	cells string // in the order of faultNames
}{
	//              FIN          RST          hang      57P01 ERROR   57P01 FATAL   57014        garbage       slow      half-open
	{"connect", "   ended        ended        timeout   again/57P01   again/57P01   57014        garbled       ok        timeout"},
	{"connect tls", "ended       ended        timeout   refused       refused       refused      refused       ok        timeout"},
	{"tls tls", "   ended        ended        timeout   garbled       garbled       garbled      garbled       ok        timeout"},
	{"auth", "      ended        ended        timeout   again/57P01   again/57P01   57014        garbled       ok        timeout"},
	{"idle", "      ok/ended     ok           timeout   ok/57P01      ok/57P01      ok/57014     ok/garbled    ok/57P01  timeout"},
	{"statement", " ended        ended        timeout   again/57P01   again/57P01   57014        garbled       ok        timeout"},
	{"rows", "      ended        ended        timeout   57P01         57P01         57014        garbled       ok        timeout"},
	{"commit", "    ended        ended        timeout   57P01/ended   57P01         57014        ended         ok        timeout"},
	{"copy", "      ended        ended        timeout   57P01/ended   57P01         57014        garbled       ok        timeout"},
	{"prepare", "   again/ended  again/ended  timeout   again/ended   again/57P01   57014        again/garbled ok        timeout"},
}

// faultNotes are the cells that do not exist, and why.
var faultNotes = map[string]string{"tls plain": "there is no handshake without TLS"}

var (
	faultStages = []string{"connect", "tls", "auth", "idle", "statement", "rows", "commit", "copy", "prepare"}
	faultNames  = []string{"FIN", "RST", "hang", "57P01 ERROR", "57P01 FATAL", "57014", "garbage", "slow", "half-open"}
)

// faultCell is a cell of the matrix on one transport.
type faultCell struct {
	at, fault  string
	tls        bool
	ours, pgxs string // expected
}

func (c faultCell) String() string {
	transport := "plain"
	if c.tls {
		transport = "tls"
	}
	return c.at + " " + transport + "/" + c.fault
}

func (c faultCell) goodbye() bool { return strings.HasPrefix(c.fault, "57P01") }

// starting says that the fault is before the connection is ready for its first request.
func (c faultCell) starting() bool { return slices.Contains(faultStages[:3], c.at) }

// atRest says that it is not in the answer to a request.
func (c faultCell) atRest() bool {
	return c.at == "idle" && c.fault != "hang" || c.fault == "half-open" && slices.Contains([]string{"idle", "statement", "commit", "prepare"}, c.at)
}

// faultCells is the matrix with both transports. Rows that name TLS are for TLS alone; the others are for what is left.
func faultCells(t testing.TB) (cells []faultCell) {
	t.Helper()
	for _, withTLS := range []bool{false, true} {
		for _, at := range faultStages {
			row := slices.IndexFunc(faultMatrix, func(r struct{ at, cells string }) bool { return r.at == at })
			if withTLS {
				if i := slices.IndexFunc(faultMatrix, func(r struct{ at, cells string }) bool { return r.at == at+" tls" }); i >= 0 {
					row = i
				}
			}
			if row < 0 {
				if faultNotes[at+" plain"] == "" {
					t.Fatalf("the matrix has no row for %s, and no reason why", at)
				}
				continue
			}
			expected := strings.Fields(faultMatrix[row].cells)
			if len(expected) != len(faultNames) {
				t.Fatalf("row %s of the matrix has %d cells, want %d", faultMatrix[row].at, len(expected), len(faultNames))
			}
			for i, fault := range faultNames {
				ours, pgxs, differ := strings.Cut(expected[i], "/")
				if !differ {
					pgxs = ours
				}
				cells = append(cells, faultCell{at: at, fault: fault, tls: withTLS, ours: ours, pgxs: pgxs})
			}
		}
	}
	return cells
}

// TestFaultMatrix does everything that can go wrong, everywhere, to plain pgx, to the driver on CockroachDB, and to the
// driver on PostgreSQL. With -v it prints the matrix as it came out. Whatever happens: the server gets to execute no
// statement twice, nobody sees driver.ErrBadConn, the call ends in time, the pool works afterwards, and no goroutine and
// no socket is left.
func TestFaultMatrix(t *testing.T) {
	t.Parallel()
	needPeek(t)
	var mu sync.Mutex
	seen := map[faultCell]map[string]string{}
	t.Run("cells", func(t *testing.T) {
		for _, cell := range faultCells(t) {
			t.Run(cell.String(), func(t *testing.T) {
				t.Parallel()
				if cell.at == "connect" && cell.fault == "half-open" && !canNarrow {
					t.Skip("a dial that nobody answers can be had on Linux only")
				}
				got := runFaultCell(t, cell)
				mu.Lock()
				defer mu.Unlock()
				seen[cell] = got
			})
		}
	})
	t.Logf("what the application sees; pgx's in brackets where it differs\n%s", faultTable(t, seen))
}

// faultTable is the matrix as it came out.
func faultTable(t testing.TB, seen map[faultCell]map[string]string) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "\t%s\n", strings.Join(faultNames, "\t"))
	line := ""
	for _, cell := range faultCells(t) {
		name, _, _ := strings.Cut(cell.String(), "/")
		if name != line {
			if line != "" {
				fmt.Fprintln(w)
			}
			fmt.Fprint(w, name)
			line = name
		}
		got := seen[cell]
		text := got["crdbdrain"]
		switch {
		case got == nil:
			text = "-"
		case text != got["pgx"] && !(text == "again" && got["pgx"] == "ok"):
			text += " (" + got["pgx"] + ")"
		}
		fmt.Fprintf(w, "\t%s", text)
	}
	fmt.Fprintln(w)
	_ = w.Flush()
	for name, why := range faultNotes {
		fmt.Fprintf(&b, "%s: not applicable, %s\n", name, why)
	}
	return b.String()
}

// runFaultCell runs one cell with both drivers, at the same time, and checks all of it.
func runFaultCell(t *testing.T, cell faultCell) map[string]string {
	worlds := []string{"pgx", "crdbdrain", "on PostgreSQL"}
	results := make([]faultResult, len(worlds))
	var wg sync.WaitGroup
	for i, world := range worlds {
		wg.Go(func() { results[i] = runFault(t, cell, world) })
	}
	wg.Wait()
	got := map[string]string{}
	for i, world := range worlds {
		got[world] = results[i].outcome
		want := cell.pgxs
		if world == "crdbdrain" {
			want = cell.ours
		}
		if got[world] != want {
			t.Errorf("%s: %s, want %s (%v; %d dials)", world, got[world], want, results[i].err, results[i].dials)
		}
	}
	if plain, ours := results[0], results[2]; plain.dials != ours.dials || plain.text != ours.text {
		t.Errorf("on PostgreSQL: %d dials, %q; pgx: %d dials, %q", ours.dials, ours.text, plain.dials, plain.text)
	}
	if plain, ours := results[0], results[1]; cell.ours == cell.pgxs && (plain.dials != ours.dials || plain.text != ours.text) {
		t.Errorf("crdbdrain: %d dials, %q; pgx: %d dials, %q", ours.dials, ours.text, plain.dials, plain.text)
	}
	return got
}

// faultResult is what one driver made of a cell.
type faultResult struct {
	outcome string
	err     error
	text    string // of err, without what is different each time
	dials   int    // by the call
}

const (
	faultInsert  = "INSERT INTO t VALUES ($1)"
	faultSelect  = "SELECT c FROM t WHERE c > $1"
	faultCopy    = "COPY t FROM STDIN"
	faultPrepare = "INSERT INTO p VALUES ($1)"

	// faultDeadline is the caller's where nothing is ever answered; faultSlack is what the call may take on top of its
	// deadline on a busy machine.
	faultDeadline = 300 * time.Millisecond
	faultSlack    = 3 * time.Second
)

// faultRun is one driver's go at a cell.
type faultRun struct {
	t     testing.TB
	cell  faultCell
	world string
	s     *faultServer
	db    *sql.DB
	c     *Connector // nil for pgx
}

func (r *faultRun) fail(format string, args ...any) { r.t.Errorf(r.world+": "+format, args...) }

// mustWork reports an error of something that the fault is not to touch.
func (r *faultRun) mustWork(what string, err error) {
	if err != nil {
		r.fail("%s: %v", what, err)
	}
}

// poll waits until a condition holds; a test's other goroutines may not end it.
func (r *faultRun) poll(what string, holds func() bool) {
	for deadline := time.Now().Add(15 * time.Second); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.fail("waited in vain: %s", what)
			return
		}
	}
}

// runFault runs one cell with one driver.
func runFault(t testing.TB, cell faultCell, world string) (res faultResult) {
	s := startFaultServer(t, cell, world != "on PostgreSQL")
	r := &faultRun{t: t, cell: cell, world: world, s: s}
	// From here on, every goroutine that is started bears the cell's name, and so does every one that it starts.
	name := cell.String() + ", " + world
	pprof.SetGoroutineLabels(pprof.WithLabels(context.Background(), pprof.Labels("fault", name)))
	defer func() {
		pprof.SetGoroutineLabels(context.Background())
		r.poll("every goroutine of the driver ends", func() bool { return !strings.Contains(goroutineLabels(), strconv.Quote(name)) })
	}()
	defer func() { r.poll("every socket is closed", s.allClosed) }()

	var err error
	if world == "pgx" {
		r.db, err = sql.Open("pgx", s.dsn())
	} else {
		var c driver.Connector
		c, err = theDriver.OpenConnector(s.dsn() + "&crdbdrain_sources=errors&crdbdrain_poll_interval=100ms&crdbdrain_spares=0")
		if err == nil {
			r.c = c.(*Connector)
			r.db = sql.OpenDB(c)
		}
	}
	if err != nil {
		r.fail("%v", err)
		return res
	}
	defer func() { r.mustWork("db.Close", r.db.Close()) }()
	defer s.release()

	silent := cell.fault == "hang" || cell.fault == "half-open"
	timeout, bound := time.Minute, faultSlack
	if silent {
		timeout, bound = faultDeadline, faultDeadline+faultSlack
	}
	call := r.prepare()
	if t.Failed() {
		return res
	}
	s.arm(r)
	dials := s.dials()
	s.mu.Lock()
	if silent && !s.struck { // on a busy machine it may take a while to come to the fault
		timeout = time.Minute
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if silent {
		s.onStrike = func() { time.AfterFunc(faultDeadline, cancel) }
	}
	s.mu.Unlock()
	start := time.Now()
	res.err = call(ctx)
	took := time.Since(start)
	res.dials = s.dials() - dials
	res.outcome = faultOutcome(res.err)
	res.text = res.outcome // which of several timers ended a call is chance, and so is whether a read or a write meets an RST
	if res.outcome != "timeout" && res.outcome != "ended" {
		res.text = faultNoise.ReplaceAllString(fmt.Sprint(res.err), "…")
	}

	s.mu.Lock()
	struck, node, executed, sent := s.struck, s.node, s.executed, s.sent
	s.mu.Unlock()
	if res.outcome == "ok" && (sent > 1 || cell.starting() && res.dials > 1) {
		res.outcome = "again"
	}
	if took > bound {
		r.fail("the call took %v", took)
	}
	if !struck {
		r.fail("nothing went wrong: the cell shows nothing")
	}
	if errors.Is(res.err, driver.ErrBadConn) {
		r.fail("%v is driver.ErrBadConn", res.err)
	}
	if executed > 1 || res.err == nil && executed != 1 {
		r.fail("the server may have executed the statement %d times; the call: %v", executed, res.err)
	}
	if world == "crdbdrain" {
		// Before there is a BackendKeyData a goodbye names no node.
		want := !cell.starting() && (cell.goodbye() || cell.at == "idle" && cell.fault == "slow")
		if got := (&pool{r.db, r.c}).marked(node); got != want {
			r.fail("node %d marked: %v, want %v", node, got, want)
		}
	}
	s.release()
	_, err = r.db.Exec("INSERT INTO afterwards VALUES (1)")
	r.mustWork("the pool afterwards", err)
	return res
}

// faultNoise is what differs between two runs of a cell: addresses, and the text of the 57P01.
var faultNoise = regexp.MustCompile(`127\.0\.0\.1:[0-9]+|` + noticeShuttingDown + "|" + noticeNotAcceptingClients + "|" + faultTerminating)

// faultTerminating is what PostgreSQL says with 57P01: CockroachDB's texts are its own.
const faultTerminating = "terminating connection due to administrator command"

// goroutineLabels is the profile of all goroutines, with their labels.
func goroutineLabels() string {
	var b bytes.Buffer
	_ = pprof.Lookup("goroutine").WriteTo(&b, 1)
	return b.String()
}

// faultOutcome is the matrix's word for an error.
func faultOutcome(err error) string {
	var netErr net.Error
	switch what := class(err); {
	case err == nil:
		return "ok"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.As(err, &netErr) && netErr.Timeout(),
		errors.Is(err, net.ErrClosed): // pgx's watcher of the context was faster than its writer
		return "timeout"
	case what == "the connection's end":
		return "ended"
	case strings.Contains(what, "server refused TLS connection"):
		return "refused"
	case strings.Contains(what, "unknown message type"), strings.Contains(what, "first record does not look like a TLS handshake"):
		return "garbled"
	default:
		return what
	}
}

// prepare returns the call that the fault is to meet, with its connection opened and all that can be cached cached. pgx
// has looked after the connection within the last second, and will not ping it.
func (r *faultRun) prepare() (call func(context.Context) error) {
	insert := func(ctx context.Context) error {
		_, err := r.db.ExecContext(ctx, faultInsert, "a")
		return err
	}
	if r.cell.starting() {
		return insert
	}
	ctx := context.Background()
	r.mustWork("before the fault", insert(ctx))
	if r.world == "crdbdrain" { // only where PIDs are known to tell the node can a goodbye mark one
		r.poll("the stamp's rule is verified", func() bool {
			w := r.c.watchdog.Load()
			return w != nil && w.rule.Load() == ruleHolds
		})
	}
	call = insert
	switch r.cell.at {
	case "rows":
		call = func(ctx context.Context) error {
			rows, err := r.db.QueryContext(ctx, faultSelect, "a")
			return drainRows(rows, err)
		}
		r.mustWork("before the fault", call(ctx))
	case "prepare":
		call = func(ctx context.Context) error {
			st, err := r.db.PrepareContext(ctx, faultPrepare)
			if err != nil {
				return err
			}
			defer st.Close()
			_, err = st.ExecContext(ctx, "a")
			return err
		}
	case "copy":
		call = func(ctx context.Context) error {
			c, err := r.db.Conn(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			return c.Raw(func(dc any) error {
				px, ok := PgxConn(dc)
				if !ok {
					return fmt.Errorf("%T is no connection of pgx's", dc)
				}
				_, err := px.PgConn().CopyFrom(ctx, r.s.data(), faultCopy)
				return err
			})
		}
	}
	r.mustWork("before the fault", insert(ctx))
	if r.cell.at == "commit" {
		ctx, cancel := context.WithCancel(ctx) // COMMIT is bounded by BEGIN's
		tx, err := r.db.BeginTx(ctx, nil)
		r.mustWork("before the fault", err)
		if err != nil {
			cancel()
			return insert
		}
		_, err = tx.Exec(faultInsert, "a")
		r.mustWork("before the fault", err)
		call = func(within context.Context) error {
			defer cancel()
			defer context.AfterFunc(within, cancel)()
			return tx.Commit()
		}
	}
	return call
}

// faultServer is a server on a real socket that does one thing wrong, once, to one connection. Every connection is to a
// node of its own.
type faultServer struct {
	cell faultCell
	crdb bool
	ln   *net.TCPListener
	tls  *tls.Config
	over chan struct{} // closed when the call is over: who did not read, or accept, goes on

	releaseOnce sync.Once
	wg          sync.WaitGroup

	mu       sync.Mutex
	armed    bool // the fault is still to come; guarded by mu, like all below
	counting bool // the call has begun
	conns    []*faultConn
	open     int
	app      int    // connections but the watchdog's and those of CancelRequests
	onStrike func() // called when the fault happens; may be nil
	struck   bool   // the fault has happened …
	node     uint32 // … to the connection with this one
	sent     int    // how often the statement of the cell has arrived since
	executed int    // how often it has, or may have been, executed
}

type faultConn struct {
	s    *faultServer
	node uint32
	raw  *net.TCPConn
	slow *slowConn // raw, or slower
	conn net.Conn  // slow, or TLS on top of it
	be   *pgproto3.Backend

	tx     byte
	stmts  map[string]string
	portal string
	mute   bool // nothing is answered any more
	failed bool // skip to Sync

	idle bool   // between two requests; guarded by s.mu, like all below
	wake func() // says that the fault has happened to it at rest
	app  bool   // the application is at the other end, as far as is known
	seen bool   // it is one of s.app
}

// slowConn writes byte by byte while it is slow.
type slowConn struct {
	*net.TCPConn
	slow atomic.Bool
}

func (c *slowConn) Write(p []byte) (int, error) {
	if !c.slow.Load() {
		return c.TCPConn.Write(p)
	}
	for i := range p {
		if _, err := c.TCPConn.Write(p[i : i+1]); err != nil {
			return i, err
		}
		time.Sleep(20 * time.Microsecond)
	}
	return len(p), nil
}

func startFaultServer(t testing.TB, cell faultCell, crdb bool) *faultServer {
	s := &faultServer{cell: cell, crdb: crdb, over: make(chan struct{}), armed: cell.starting(), counting: cell.starting()}
	if cell.tls {
		s.tls = testTLS()
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Error(err)
		return nil
	}
	s.ln = ln.(*net.TCPListener)
	var fillers []net.Conn
	if cell.at == "connect" && cell.fault == "half-open" {
		fillers = s.fillQueue(t)
	}
	s.wg.Go(func() {
		if fillers != nil {
			<-s.over
			for _, c := range fillers {
				_ = c.Close()
			}
		}
		for {
			nc, err := s.ln.Accept()
			if err != nil {
				return
			}
			c := &faultConn{s: s, raw: nc.(*net.TCPConn), tx: 'I', stmts: map[string]string{}, app: true}
			c.slow = &slowConn{TCPConn: c.raw}
			c.conn = c.slow
			s.mu.Lock()
			s.conns = append(s.conns, c)
			c.node = uint32(len(s.conns))
			s.open++
			s.mu.Unlock()
			s.wg.Go(func() {
				c.serve()
				_ = c.raw.Close()
				s.mu.Lock()
				s.open--
				s.mu.Unlock()
			})
		}
	})
	t.Cleanup(func() {
		s.release()
		_ = s.ln.Close()
		s.mu.Lock()
		for _, c := range s.conns {
			_ = c.raw.Close()
		}
		s.mu.Unlock()
		s.wg.Wait()
	})
	return s
}

// fillQueue fills the queue of connections to be accepted, so that the next dial is not answered.
func (s *faultServer) fillQueue(t testing.TB) (fillers []net.Conn) {
	if err := narrow(s.ln); err != nil {
		t.Error(err)
	}
	for range 10 {
		c, err := net.DialTimeout("tcp", s.ln.Addr().String(), 100*time.Millisecond)
		if err != nil {
			s.struck = true // as every dial from now on
			return fillers
		}
		fillers = append(fillers, c)
	}
	t.Error("the queue of connections to be accepted does not fill")
	return fillers
}

func (s *faultServer) dsn() string {
	mode := "disable"
	if s.cell.tls {
		mode = "require"
	}
	return "postgres://app:secret@" + s.ln.Addr().String() + "/defaultdb?sslmode=" + mode
}

// data is what a COPY copies: more than the sockets' buffers hold where the server does not read.
func (s *faultServer) data() io.Reader {
	if s.cell.fault == "half-open" {
		return endless{}
	}
	return strings.NewReader("1\n2\n")
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// dials returns how many connections the application has made.
func (s *faultServer) dials() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.app
}

func (s *faultServer) allClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open == 0
}

// release lets everybody go on who waits for the end of the call.
func (s *faultServer) release() { s.releaseOnce.Do(func() { close(s.over) }) }

// arm makes the fault happen to the next one who comes to its point, or to the connection at rest, now.
func (s *faultServer) arm(r *faultRun) {
	if s.cell.starting() {
		return // it was from the beginning
	}
	if !s.cell.atRest() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.armed, s.counting = true, true
		return
	}
	woken := make(chan struct{})
	r.poll("one idle connection", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, c := range s.conns {
			if c.idle && c.app {
				s.armed, s.counting = true, true
				c.wake = sync.OnceFunc(func() { close(woken) })
				_ = c.raw.SetReadDeadline(time.Unix(1, 0))
				return true
			}
		}
		return false
	})
	select {
	case <-woken:
	case <-time.After(15 * time.Second):
		r.fail("the fault does not happen")
	}
}

// here reports whether the fault is to happen here and now, and counts it.
func (c *faultConn) here(at string) bool {
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.armed || s.cell.at != at || !c.app {
		return false
	}
	c.countLocked()
	s.armed = false
	s.struck, s.node = true, c.node
	if s.onStrike != nil {
		s.onStrike()
	}
	return true
}

// arrived counts the cell's statement. begun says that its execution has, or may have, begun.
func (c *faultConn) arrived(sql string, begun bool) {
	s := c.s
	if want := map[string]string{"rows": faultSelect, "commit": "commit", "copy": faultCopy, "prepare": faultPrepare}[s.cell.at]; want != sql && (want != "" || sql != faultInsert) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.counting:
	case begun:
		s.executed++
	default:
		s.sent++
	}
}

// strike does the cell's fault to the connection, and calls done when it has. It reports whether the connection goes on.
func (c *faultConn) strike(done func()) (goesOn bool) {
	starting := c.s.cell.starting()
	switch c.s.cell.fault {
	case "FIN":
		c.closeWrite()
	case "RST":
		_ = c.raw.SetLinger(0)
		_ = c.raw.Close()
	case "hang":
		if !starting {
			c.mute = true
			return true
		}
	case "57P01 ERROR", "57P01 FATAL":
		e := shutdown(strings.TrimPrefix(c.s.cell.fault, "57P01 "))
		switch {
		case !c.s.crdb:
			e.Message = faultTerminating
		case starting:
			e.Message = noticeNotAcceptingClients
		}
		c.send(e)
		c.closeWrite()
	case "57014":
		c.send(&pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "57014", Message: "query execution canceled"})
		if !starting {
			done()
			return true
		}
		c.closeWrite()
	case "garbage":
		_, _ = c.conn.Write([]byte("\x99\x00\x00\x00\x08\xde\xad\xbe\xef"))
	case "slow":
		c.slow.slow.Store(true)
		if c.s.cell.at != "idle" {
			return true
		}
		done() // it goes on while the call is made
		e := shutdown("ERROR")
		if !c.s.crdb {
			e.Message = faultTerminating
		}
		c.send(e)
		c.closeWrite()
	case "half-open":
		done()
		<-c.s.over
	}
	done()
	// The rest is silence. pgx waits a while for the server's close when it gives up a connection.
	ended := make(chan struct{})
	c.s.wg.Go(func() {
		select {
		case <-c.s.over:
			_ = c.raw.CloseWrite()
		case <-ended:
		}
	})
	_, _ = io.Copy(io.Discard, c.raw)
	close(ended)
	return false
}

func (c *faultConn) send(messages ...pgproto3.BackendMessage) {
	for _, m := range messages {
		c.be.Send(m)
	}
	_ = c.be.Flush()
}

// closeWrite sends what a server sends that closes: TLS's own end, and a FIN.
func (c *faultConn) closeWrite() {
	if t, ok := c.conn.(*tls.Conn); ok {
		_ = t.CloseWrite()
	}
	_ = c.raw.CloseWrite()
}

func (c *faultConn) startup() bool {
	c.be = pgproto3.NewBackend(c.conn, c.conn)
	if c.here("connect") && !c.strike(func() {}) {
		return false
	}
	var params map[string]string
	for params == nil {
		m, err := c.be.ReceiveStartupMessage()
		if err != nil {
			return false
		}
		switch m := m.(type) {
		case *pgproto3.SSLRequest:
			if _, err := c.conn.Write([]byte{'S'}); err != nil || c.s.tls == nil {
				return false
			}
			if c.here("tls") {
				if fault := c.s.cell.fault; fault != "slow" && fault != "half-open" {
					_, _ = c.conn.Read(make([]byte, 4096)) // the ClientHello, or its beginning
				}
				if !c.strike(func() {}) {
					return false
				}
			}
			c.conn = tls.Server(c.slow, c.s.tls)
			c.be = pgproto3.NewBackend(c.conn, c.conn)
		case *pgproto3.StartupMessage:
			params = m.Parameters
		default: // a CancelRequest
			c.is(false)
			return false
		}
	}
	c.is(params["application_name"] != watchdogName)
	c.send(&pgproto3.AuthenticationCleartextPassword{})
	_ = c.be.SetAuthType(pgproto3.AuthTypeCleartextPassword)
	here := c.here("auth")
	if !here || c.s.cell.fault != "half-open" {
		if m, err := c.be.Receive(); err != nil || *m.(*pgproto3.PasswordMessage) != (pgproto3.PasswordMessage{Password: "secret"}) {
			return false
		}
	}
	if here && !c.strike(func() {}) {
		return false
	}
	c.be.Send(&pgproto3.AuthenticationOk{})
	c.be.Send(&pgproto3.ParameterStatus{Name: "client_encoding", Value: "UTF8"})
	c.be.Send(&pgproto3.ParameterStatus{Name: "standard_conforming_strings", Value: "on"})
	if c.s.crdb {
		c.be.Send(&pgproto3.ParameterStatus{Name: "crdb_version", Value: crdbVersion25})
	}
	c.be.Send(&pgproto3.BackendKeyData{ProcessID: c.node<<20 | 7, SecretKey: []byte{0, 0, 0, 1}})
	return c.ready()
}

// is tells whether the application is at the other end.
func (c *faultConn) is(app bool) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.app = app; app {
		c.countLocked()
	}
}

// countLocked counts the connection as the application's. s.mu is held.
func (c *faultConn) countLocked() {
	if !c.seen {
		c.seen = true
		c.s.app++
	}
}

func (c *faultConn) ready() bool {
	c.failed = false
	if c.mute {
		return true
	}
	c.setIdle(true)
	c.be.Send(&pgproto3.ReadyForQuery{TxStatus: c.tx})
	return c.be.Flush() == nil
}

func (c *faultConn) setIdle(idle bool) (wake func()) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.idle = idle
	wake, c.wake = c.wake, nil
	return wake
}

func (c *faultConn) serve() {
	if !c.startup() {
		return
	}
	for {
		m, err := c.be.Receive()
		wake := c.setIdle(false)
		if err != nil {
			if wake == nil || !c.here(c.s.cell.at) {
				return
			}
			_ = c.raw.SetReadDeadline(time.Time{})
			if !c.strike(wake) {
				return
			}
			continue
		}
		if _, sync := m.(*pgproto3.Sync); c.failed && !sync {
			continue
		}
		switch m := m.(type) {
		case *pgproto3.Query:
			if !c.request(m.String) || !c.ready() {
				return
			}
		case *pgproto3.Parse:
			c.stmts[m.Name] = m.Query
			if m.Query == faultPrepare {
				c.arrived(m.Query, false)
				if c.here("prepare") {
					if !c.strike(func() {}) {
						return
					}
					if c.failed = c.s.cell.fault == "57014"; c.failed {
						continue
					}
				}
			}
			c.be.Send(&pgproto3.ParseComplete{})
		case *pgproto3.Bind:
			c.portal = c.stmts[m.PreparedStatement]
			c.be.Send(&pgproto3.BindComplete{})
		case *pgproto3.Describe:
			sql := c.portal
			if m.ObjectType == 'S' {
				sql = c.stmts[m.Name]
				c.be.Send(&pgproto3.ParameterDescription{ParameterOIDs: slices.Repeat([]uint32{25}, strings.Count(sql, "$"))})
			}
			if returnsRows(sql) {
				c.be.Send(oneColumn())
			} else {
				c.be.Send(&pgproto3.NoData{})
			}
		case *pgproto3.Execute:
			if !c.request(c.portal) {
				return
			}
		case *pgproto3.Close:
			c.be.Send(&pgproto3.CloseComplete{})
		case *pgproto3.Sync:
			if !c.ready() {
				return
			}
		case *pgproto3.Terminate:
			return
		}
	}
}

// request executes a statement, or does the cell's fault to it. It reports whether the connection goes on.
func (c *faultConn) request(sql string) bool {
	cell := c.s.cell
	if sql != faultPrepare { // which has arrived with its Parse
		c.arrived(sql, false)
	}
	at := ""
	switch {
	case sql == faultInsert && cell.at == "idle": // nothing happens to an idle connection of a server that hangs
		at = "idle"
	case sql == faultInsert:
		at = "statement"
	case sql == "commit":
		at = "commit"
	}
	here := at != "" && c.here(at)
	if !here || at != "statement" || !cell.goodbye() { // a drain comes between two statements: this one is not begun
		c.arrived(sql, true)
	}
	if here {
		if !c.strike(func() {}) {
			return false
		}
		if c.failed = cell.fault == "57014"; c.failed {
			c.tx = 'I'
			return true
		}
	}
	word, _, _ := strings.Cut(sql, " ")
	tag := strings.ToUpper(word)
	switch {
	case sql == faultCopy:
		return c.copyIn()
	case sql == faultSelect:
		c.send(oneRow("1"), oneRow("2"))
		if c.here("rows") {
			if !c.strike(func() {}) {
				return false
			}
			if c.failed = cell.fault == "57014"; c.failed {
				return true
			}
		}
		c.be.Send(oneRow("3"))
		tag = "SELECT 3"
	case sql == sqlShowNodeID:
		c.be.Send(oneColumn())
		c.be.Send(oneRow(fmt.Sprint(c.node)))
	case tag == "--":
		c.be.Send(&pgproto3.EmptyQueryResponse{})
		return true
	case tag == "BEGIN":
		c.tx = 'T'
	case tag == "COMMIT", tag == "ROLLBACK":
		c.tx = 'I'
	case tag == "INSERT":
		tag = "INSERT 0 1"
	}
	c.be.Send(&pgproto3.CommandComplete{CommandTag: []byte(tag)})
	return true
}

// copyIn is COPY … FROM STDIN. The fault comes in its middle.
func (c *faultConn) copyIn() bool {
	c.send(&pgproto3.CopyInResponse{})
	if c.s.cell.fault == "half-open" && c.here("copy") {
		return c.strike(func() {})
	}
	for {
		m, err := c.be.Receive()
		if err != nil {
			return false
		}
		switch m.(type) {
		case *pgproto3.CopyData:
			if c.here("copy") {
				if !c.strike(func() {}) {
					return false
				}
				if c.s.cell.fault == "57014" {
					return true // and what the client has sent by then is ignored
				}
			}
		case *pgproto3.CopyDone:
			c.be.Send(&pgproto3.CommandComplete{CommandTag: []byte("COPY 2")})
			return true
		default:
			return false
		}
	}
}
