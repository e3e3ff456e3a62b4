package crdbdrain

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
)

// TestExactlyOnce runs a workload against servers that end their connections at every point of a statement's life, and
// counts what they execute:
//
//   - No statement that a server has executed is ever sent again; no COMMIT is ever sent twice.
//   - A statement that no server has executed does not fail outside a transaction where the server has said goodbye and
//     the words have arrived; a BEGIN does not fail whatever ended its connection.
//   - What the application is told succeeded was executed, once. It never sees driver.ErrBadConn.
//
// A schedule is one operation of the workload and what happens to its connections. Schedules come in batches, each with a
// pool of its own in a bubble of virtual time. CRDBDRAIN_SCHEDULES is how many to run (without it, what fits into three
// seconds, 10,000 at most); a failure names the flag that runs its batch alone.
func TestExactlyOnce(t *testing.T) {
	n, limit := defaultSchedules, 3*time.Second
	if v := os.Getenv("CRDBDRAIN_SCHEDULES"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil {
			t.Fatalf("CRDBDRAIN_SCHEDULES: %v", err)
		}
		limit = time.Hour
	}
	if *exactlyOnceSeed != 0 {
		var c counts
		synctest.Test(t, func(t *testing.T) { runBatch(t, *exactlyOnceSeed, &c) })
		t.Logf("%v", &c)
		return
	}
	start, seed := time.Now(), rand.Uint64()|1
	var c counts
	var batch atomic.Uint64
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for !t.Failed() && c.schedules.Load() < int64(n) && time.Since(start) < limit {
				s := seed + 2*batch.Add(1)
				synctest.Test(t, func(t *testing.T) { runBatch(t, s, &c) })
			}
		})
	}
	wg.Wait()
	took := time.Since(start)
	t.Logf("%v; %.1f s, %.0f schedules/s", &c, took.Seconds(), float64(c.schedules.Load())/took.Seconds())
	for what, n := range map[string]int64{"connections ended": c.deaths.Load(), "statements run again": c.rerun.Load(), "errors": c.errors.Load()} {
		if n == 0 {
			t.Errorf("no %s: the test tests nothing", what)
		}
	}
}

const (
	defaultSchedules = 10_000
	batchSize        = 200
)

var exactlyOnceSeed = flag.Uint64("exactlyonce.seed", 0, "run the one batch of TestExactlyOnce with this seed")

// counts are what the batches came to.
type counts struct{ schedules, deaths, goodbyes, executed, rerun, errors, marked atomic.Int64 }

func (c *counts) String() string {
	return fmt.Sprintf("%d schedules: %d statements executed, %d connections ended (%d with a goodbye that arrived), %d run again, %d errors, %d with marks",
		c.schedules.Load(), c.executed.Load(), c.deaths.Load(), c.goodbyes.Load(), c.rerun.Load(), c.errors.Load(), c.marked.Load())
}

// world is the servers of a batch, and what they have seen.
type world struct {
	rng *rand.Rand

	mu       sync.Mutex
	conns    map[*wire]struct{} // of the application, open; guarded by mu, like all below
	nodes    int
	executed map[string]int  // statements by ID
	commits  int             // COMMITs received
	fates    []*fate         // of the requests to come, in order; nil: answered
	deaths   []death         // since the schedule began
	silent   map[*wire]bool  // ended without a word, and the client does not know yet
	log      strings.Builder // of the schedule, for failures
}

// fate is what happens to one request of the application.
type fate struct {
	kind   fateKind
	skip   int  // messages of the batch that are answered before a drain's request comes
	rows   int  // rows that are answered before the connection ends
	cut    int  // bytes of the reply that arrive, from the end where it is negative
	told   bool // a 57014 comes first
	failed bool // the write itself fails
	rst    bool // not FIN
	later  bool // the goodbye comes in a packet of its own
}

type fateKind int

const (
	drainBefore fateKind = iota // drained before the statement is executed
	drainAmid                   // drained at the deadline, after rows or the CommandComplete
	drainAfter                  // drained behind the ReadyForQuery
	cutReply                    // executed; the connection breaks anywhere in the reply
	cutRequest                  // the connection breaks before anything is executed
	cutGoodbye                  // as drainBefore, but the goodbye does not arrive whole
	numFates
)

// death is the end of a connection: whether the whole goodbye arrived, and the statement that was under way.
type death struct {
	goodbye, executed, unsent bool
}

// wire is both ends of one connection: what the client writes is handled at once, and the answers wait to be read.
type wire struct {
	w    *world
	node int
	app  bool // of the application: not the watchdog's, not a CancelRequest

	mu      sync.Mutex
	cond    sync.Cond
	in      []byte   // written by the client, no whole message yet; guarded by mu, like all below
	out     [][]byte // to be read by the client, a packet each
	end     error    // at the end of out, once the server has closed
	ended   bool
	closed  bool // by the client
	doomed  *fate
	started bool
	tx      byte
	stmts   map[string]string
	portal  portalState
	reply   []byte // of the batch so far
	batch   int    // messages of the batch so far
	amid    bool   // something of the batch was executed
}

type portalState struct{ sql, id string }

func (w *world) dial(_ context.Context, _, _ string) (net.Conn, error) {
	c := &wire{w: w, tx: 'I', stmts: map[string]string{}}
	c.cond.L = &c.mu
	return c, nil
}

type wireAddr struct{}

func (wireAddr) Network() string { return "tcp" }
func (wireAddr) String() string  { return "10.0.0.1:26257" }

func (*wire) LocalAddr() net.Addr              { return wireAddr{} }
func (*wire) RemoteAddr() net.Addr             { return wireAddr{} }
func (*wire) SetDeadline(time.Time) error      { return nil }
func (*wire) SetReadDeadline(time.Time) error  { return nil }
func (*wire) SetWriteDeadline(time.Time) error { return nil }

func (c *wire) Close() error {
	c.mu.Lock()
	c.closed = true
	c.cond.Broadcast()
	c.mu.Unlock()
	c.w.hungUp(c)
	return nil
}

func (w *world) forget(c *wire) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, c)
}

// hungUp takes note that the client has closed the connection.
func (w *world) hungUp(c *wire) {
	w.forget(c)
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.silent, c)
}

func (c *wire) Read(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closed:
			return 0, net.ErrClosed
		case len(c.out) > 0:
			n := copy(p, c.out[0])
			if c.out[0] = c.out[0][n:]; len(c.out[0]) == 0 {
				c.out = c.out[1:]
			}
			return n, nil
		case c.ended:
			return 0, c.end
		}
		c.cond.Wait()
	}
}

func (c *wire) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return 0, net.ErrClosed
	case c.ended:
		if c.end == io.EOF {
			c.end = syscall.ECONNRESET // the first write after a FIN is taken, and answered with an RST
			return len(p), nil
		}
		return 0, &net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EPIPE)}
	}
	if c.started && len(c.in) == 0 && c.app {
		if f := c.w.next(p); f != nil {
			c.doomed = f
			if f.kind == cutRequest && f.failed {
				c.die(death{unsent: true}, f.rst)
				return 0, &net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.ECONNRESET)}
			}
			if f.kind == drainBefore && f.failed {
				// The drain was first: its goodbye is on its way, and the request meets a closed socket.
				c.goodbye()
				return 0, &net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EPIPE)}
			}
		}
	}
	c.in = append(c.in, p...)
	for !c.ended && c.message() {
	}
	return len(p), nil
}

// next returns the fate of the request that p begins.
func (w *world) next(p []byte) *fate {
	if p[0] == 'X' {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.fates) == 0 {
		return nil
	}
	f := w.fates[0]
	w.fates = w.fates[1:]
	return f
}

// send puts bytes where the client reads them, cut into packets.
func (c *wire) send(b []byte) {
	w := c.w
	w.mu.Lock()
	defer w.mu.Unlock()
	switch w.rng.IntN(3) {
	case 0: // in one
		c.out = append(c.out, b)
	case 1: // byte by byte
		for i := range b {
			c.out = append(c.out, b[i:i+1])
		}
	default:
		for len(b) > 0 {
			n := 1 + w.rng.IntN(len(b))
			c.out = append(c.out, b[:n])
			b = b[n:]
		}
	}
	c.cond.Broadcast()
}

// die ends the connection after what has been sent.
func (c *wire) die(d death, rst bool) {
	c.ended, c.end = true, io.EOF
	if rst {
		c.end = &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}
	}
	c.cond.Broadcast()
	c.w.mu.Lock()
	c.w.deaths = append(c.w.deaths, d)
	if !d.goodbye && !d.unsent {
		c.w.silent[c] = true
	}
	fmt.Fprintf(&c.w.log, " [node %d ends: %+v rst=%v]", c.node, d, rst)
	c.w.mu.Unlock()
	c.w.forget(c)
}

// goodbye is a drain's end of the connection: what has been produced, the goodbye behind it, in one packet or two.
func (c *wire) goodbye() {
	words, f := stream(goodbyeMessage), c.doomed
	b := c.reply
	c.reply = nil
	whole := f == nil || f.kind != cutGoodbye
	if !whole {
		words = words[:f.cut%len(words)]
	}
	if f != nil && f.later || f == nil {
		c.send(b)
		c.send(words)
	} else {
		c.send(append(slices.Clip(b), words...))
	}
	c.die(death{goodbye: whole, executed: c.amid}, f != nil && f.rst)
}

// message handles one whole message of c.in, if there is one.
func (c *wire) message() bool {
	if !c.started {
		return c.startup()
	}
	if len(c.in) < 5 {
		return false
	}
	n := 1 + int(binary.BigEndian.Uint32(c.in[1:]))
	if len(c.in) < n {
		return false
	}
	kind, body := c.in[0], c.in[5:n]
	c.in = c.in[n:]
	c.handle(kind, body)
	return true
}

func (c *wire) startup() bool {
	if len(c.in) < 8 || len(c.in) < int(binary.BigEndian.Uint32(c.in)) {
		return false
	}
	var m pgproto3.StartupMessage
	if err := m.Decode(c.in[4:]); err != nil { // a CancelRequest
		c.ended, c.end = true, io.EOF
		c.cond.Broadcast()
		return false
	}
	c.in, c.started = nil, true
	c.app = m.Parameters["application_name"] != watchdogName
	c.w.mu.Lock()
	c.w.nodes++
	c.node = 1 + c.w.nodes%2000
	if c.app {
		c.w.conns[c] = struct{}{}
	}
	c.w.mu.Unlock()
	c.send(stream(&pgproto3.AuthenticationOk{},
		&pgproto3.ParameterStatus{Name: "client_encoding", Value: "UTF8"},
		&pgproto3.ParameterStatus{Name: "standard_conforming_strings", Value: "on"},
		&pgproto3.ParameterStatus{Name: "crdb_version", Value: crdbVersion25},
		&pgproto3.BackendKeyData{ProcessID: uint32(c.node)<<20 | 7, SecretKey: []byte{0, 0, 0, 1}},
		&pgproto3.ReadyForQuery{TxStatus: 'I'}))
	return true
}

func (c *wire) add(m ...pgproto3.BackendMessage) { c.reply = append(c.reply, stream(m...)...) }

// handle is the server. A drain's request, a deadline or a failure comes where the connection's fate says.
func (c *wire) handle(kind byte, body []byte) {
	f := c.doomed
	if f != nil && (f.kind == drainBefore || f.kind == cutGoodbye || f.kind == cutRequest) {
		// Before the statement is executed, after up to skip messages that execute nothing.
		if kind == 'Q' || kind == 'E' || kind == 'S' || c.batch >= f.skip {
			if f.kind == cutRequest {
				c.send(c.reply)
				c.die(death{}, f.rst)
			} else {
				c.goodbye()
			}
			return
		}
	}
	c.batch++
	text := func(b []byte) (string, []byte) {
		i := slices.Index(b, 0)
		return string(b[:i]), b[i+1:]
	}
	switch kind {
	case 'Q':
		sql, _ := text(body)
		c.execute(portalState{sql, statementID(sql)}, true)
		c.sync()
	case 'P':
		name, rest := text(body)
		sql, _ := text(rest)
		c.stmts[name] = sql
		c.add(&pgproto3.ParseComplete{})
	case 'B':
		var m pgproto3.Bind
		if err := m.Decode(body); err != nil {
			panic(err)
		}
		c.portal = portalState{sql: c.stmts[m.PreparedStatement]}
		c.portal.id = statementID(c.portal.sql)
		if len(m.Parameters) > 0 {
			c.portal.id = string(m.Parameters[0])
		}
		c.add(&pgproto3.BindComplete{})
	case 'D':
		sql := c.portal.sql
		if body[0] == 'S' {
			name, _ := text(body[1:])
			sql = c.stmts[name]
			c.add(&pgproto3.ParameterDescription{ParameterOIDs: slices.Repeat([]uint32{25}, strings.Count(sql, "$"))})
		}
		if returnsRows(sql) {
			c.add(oneColumn())
		} else {
			c.add(&pgproto3.NoData{})
		}
	case 'E':
		c.execute(c.portal, false)
	case 'C':
		c.add(&pgproto3.CloseComplete{})
	case 'S':
		c.sync()
	case 'X':
		c.ended, c.end = true, io.EOF
		c.cond.Broadcast()
		c.w.forget(c)
	}
}

// statementID finds the ID in a statement: s and digits, in quotes.
func statementID(sql string) string {
	_, rest, ok := strings.Cut(sql, "'")
	if !ok {
		return ""
	}
	id, _, _ := strings.Cut(rest, "'")
	return id
}

// execute executes a statement, and produces its answer as far as the connection's fate lets it.
func (c *wire) execute(p portalState, describe bool) {
	f, w := c.doomed, c.w
	w.mu.Lock()
	rows := 0
	if returnsRows(p.sql) {
		rows = w.rng.IntN(4)
	}
	tag := "INSERT 0 1"
	switch {
	case p.sql == sqlShowNodeID:
		rows, tag = 1, "SHOW"
	case rows > 0 || returnsRows(p.sql):
		tag = fmt.Sprintf("SELECT %d", rows)
	case p.sql == "begin":
		tag, c.tx = "BEGIN", 'T'
	case p.sql == "commit":
		tag, c.tx = "COMMIT", 'I'
		w.commits++
	case p.sql == "rollback":
		tag, c.tx = "ROLLBACK", 'I'
	}
	if p.id != "" {
		w.executed[p.id]++
		fmt.Fprintf(&w.log, " [node %d executes %s]", c.node, p.id)
	}
	c.amid = true
	w.mu.Unlock()

	if describe && returnsRows(p.sql) {
		c.add(oneColumn())
	}
	value := "x"
	if p.sql == sqlShowNodeID {
		value = strconv.Itoa(c.node)
	}
	for i := range rows {
		if f != nil && f.kind == drainAmid && i == f.rows {
			break
		}
		c.add(oneRow(value))
	}
	if f != nil && f.kind == drainAmid {
		// The deadline of a drain: what was produced comes first, and an executed statement has produced something or is
		// told that it was cancelled.
		if f.told || rows == 0 || f.rows == 0 {
			c.add(cancelMessage)
		} else if f.rows >= rows {
			c.add(&pgproto3.CommandComplete{CommandTag: []byte(tag)})
		}
		c.goodbye()
		return
	}
	if strings.HasPrefix(p.sql, "--") {
		c.add(&pgproto3.EmptyQueryResponse{})
		return
	}
	c.add(&pgproto3.CommandComplete{CommandTag: []byte(tag)})
}

// sync is the end of a request.
func (c *wire) sync() {
	if c.ended {
		return
	}
	c.add(&pgproto3.ReadyForQuery{TxStatus: c.tx})
	f := c.doomed
	switch {
	case f == nil || f.kind == drainAmid: // the latter has had nothing to end: a batch that only describes
		c.send(c.reply)
		c.reply = nil
	case f.kind == drainAfter && c.tx == 'I':
		c.amid = false // what it did has been told
		c.goodbye()
		return
	case f.kind == drainAfter:
		c.send(c.reply) // in a transaction: its end comes first
		c.reply = nil
	default: // cutReply
		n := f.cut % (len(c.reply) + 1)
		c.send(c.reply[:n])
		c.die(death{executed: c.amid}, f.rst)
		return
	}
	c.doomed, c.batch, c.amid = nil, 0, false
}

// idle ends connections while nobody uses them.
func (w *world) idle(how *fate, all bool) {
	w.mu.Lock()
	var conns []*wire
	for c := range w.conns {
		if len(conns) == 0 || all {
			conns = append(conns, c)
		}
	}
	w.mu.Unlock()
	for _, c := range conns {
		c.mu.Lock()
		if !c.ended && !c.closed {
			c.doomed, c.reply, c.amid = how, nil, false
			if how.kind == drainBefore || how.kind == cutGoodbye {
				c.goodbye()
			} else {
				c.die(death{}, how.rst)
			}
		}
		c.mu.Unlock()
	}
}

func (w *world) randomFate() *fate {
	r := w.rng
	return &fate{
		kind: fateKind(r.IntN(int(numFates))), skip: r.IntN(4), rows: r.IntN(4), cut: r.IntN(400),
		told: r.IntN(3) == 0, failed: r.IntN(4) == 0, rst: r.IntN(2) == 0, later: r.IntN(2) == 0,
	}
}

// operation is one of the workload.
type operation int

const (
	opExec operation = iota
	opExecPlain
	opExecRows
	opQuery
	opStmtExec
	opStmtQuery
	opPrepare
	opTx
	opPinned
	opPing
	numOperations
)

func (o operation) String() string {
	return [...]string{"Exec", "Exec without arguments", "Exec of rows", "Query", "Stmt.Exec", "Stmt.Query", "Prepare", "transaction", "pinned connection", "Ping"}[o]
}

// outcome is what the application was told.
type outcome struct {
	id   string // "": a BEGIN, a Prepare, a Ping, a checkout
	err  error
	inTx bool
}

// runBatch runs a batch of schedules on one pool.
func runBatch(t *testing.T, seed uint64, c *counts) {
	w := &world{rng: rand.New(rand.NewPCG(seed, 0)), conns: map[*wire]struct{}{}, silent: map[*wire]bool{}, executed: map[string]int{}}
	r := rand.New(rand.NewPCG(seed, 1))
	mode := execModes[r.IntN(len(execModes))]
	// A bubble's watchdog is its own: the cluster has another name in each.
	cc, err := pgx.ParseConfig(fmt.Sprintf("postgres://app@10.0.0.1:26257/defaultdb?sslmode=disable&crdbdrain_sources=errors&default_query_exec_mode=%s&crdbdrain_cluster=%d", mode, seed))
	if err != nil {
		t.Fatal(err)
	}
	cc.DialFunc = w.dial
	connector, err := NewConnector(cc)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	db.SetMaxIdleConns(1 + r.IntN(3))
	ctx := context.Background()
	stmt, err := db.PrepareContext(ctx, "INSERT INTO p VALUES ($1)")
	if err != nil {
		t.Fatal(err)
	}
	defer stmt.Close()
	sel, err := db.PrepareContext(ctx, "SELECT c FROM p WHERE c = $1")
	if err != nil {
		t.Fatal(err)
	}
	defer sel.Close()
	if marks := r.IntN(2) == 0; marks {
		time.Sleep(6 * time.Second) // of virtual time: the watchdog has verified the stamps' rule, and goodbyes mark nodes
		c.marked.Add(batchSize)
	}
	for i := range batchSize {
		// What is to happen: to the idle connections, to the requests of the operation.
		w.mu.Lock()
		w.deaths, w.fates = nil, nil
		silent := len(w.silent) > 0 // a connection has ended, or will, without a word: it may have taken the request
		w.log.Reset()
		for range r.IntN(3) {
			w.fates = append(w.fates, nil)
		}
		for range r.IntN(3) {
			w.fates = append(w.fates, w.randomFate())
			if r.IntN(2) == 0 {
				w.fates = append(w.fates, nil)
			}
		}
		idle, all := w.randomFate(), r.IntN(2) == 0
		w.mu.Unlock()
		if r.IntN(4) == 0 {
			w.idle(idle, all)
		}
		if r.IntN(16) == 0 {
			time.Sleep(time.Duration(r.IntN(3000)) * time.Millisecond)
		}
		op := operation(r.IntN(int(numOperations)))
		commits := w.commitsSoFar()
		outcomes, commitErr := runOperation(ctx, db, stmt, sel, op, i, r)

		w.mu.Lock()
		deaths, log := slices.Clone(w.deaths), w.log.String()
		sent := w.commits - commits
		fail := func(format string, args ...any) {
			t.Helper()
			t.Errorf("%s\nschedule %d, %v, %s:%s\nrun it again: go test -run '^TestExactlyOnce$' -exactlyonce.seed=%d .",
				fmt.Sprintf(format, args...), i, op, mode, log, seed)
		}
		for _, d := range deaths {
			c.deaths.Add(1)
			if d.goodbye {
				c.goodbyes.Add(1)
			}
			silent = silent || !d.goodbye && !d.unsent
		}
		for _, o := range outcomes {
			n := w.executed[o.id]
			switch {
			case o.id == "":
			case n > 1:
				fail("%s was executed %d times; the application was told: %v", o.id, n, o.err)
			case o.err == nil && n != 1:
				fail("%s was executed %d times, and the application was told that it succeeded", o.id, n)
			case o.err != nil && n == 0 && !o.inTx && !silent:
				fail("%s was not executed, every server said goodbye, and the application was told: %v", o.id, o.err)
			}
			if o.id == "" && o.err != nil { // BEGIN, Prepare, Ping: they leave nothing behind
				fail("%v", o.err)
			}
			if o.err != nil {
				c.errors.Add(1)
				if errors.Is(o.err, driver.ErrBadConn) {
					fail("the application was told: %v", o.err)
				}
			}
			c.executed.Add(int64(n))
		}
		if sent > 1 {
			fail("%d COMMITs were sent for one transaction", sent)
		}
		if commitErr != nil && errors.Is(commitErr, driver.ErrBadConn) {
			fail("COMMIT: %v", commitErr)
		}
		w.mu.Unlock()
		c.schedules.Add(1)
		if t.Failed() {
			return
		}
	}
	c.rerun.Add(connector.Stats().Rerun)
}

func (w *world) commitsSoFar() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.commits
}

func runOperation(ctx context.Context, db *sql.DB, stmt, sel *sql.Stmt, op operation, i int, r *rand.Rand) (outcomes []outcome, commitErr error) {
	told := func(id string, err error, inTx bool) error {
		outcomes = append(outcomes, outcome{id: id, err: err, inTx: inTx})
		return err
	}
	id := func(n int) string { return fmt.Sprintf("s%d.%d", i, n) }
	exec := func(x execer, id string) error {
		_, err := x.ExecContext(ctx, "INSERT INTO t VALUES ($1)", id)
		return err
	}
	query := func(x execer, id string) error {
		rows, err := x.QueryContext(ctx, "SELECT c FROM t WHERE c = $1", id)
		return drainRows(rows, err)
	}
	switch op {
	case opExec:
		told(id(0), exec(db, id(0)), false)
	case opExecPlain:
		_, err := db.ExecContext(ctx, "INSERT INTO t VALUES ('"+id(0)+"')")
		told(id(0), err, false)
	case opExecRows:
		_, err := db.ExecContext(ctx, "SELECT c FROM t WHERE c = $1", id(0))
		told(id(0), err, false)
	case opQuery:
		told(id(0), query(db, id(0)), false)
	case opStmtExec:
		_, err := stmt.ExecContext(ctx, id(0))
		told(id(0), err, false)
	case opStmtQuery:
		rows, err := sel.QueryContext(ctx, id(0))
		told(id(0), drainRows(rows, err), false)
	case opPrepare:
		s, err := db.PrepareContext(ctx, fmt.Sprintf("INSERT INTO q VALUES ($1) -- %d", i))
		if told("", err, false) == nil {
			_, err = s.ExecContext(ctx, id(0))
			told(id(0), err, false)
			_ = s.Close()
		}
	case opTx:
		tx, err := db.BeginTx(ctx, nil)
		if told("", err, false) != nil {
			return outcomes, nil
		}
		for n := range r.IntN(3) {
			run := exec
			if r.IntN(2) == 0 {
				run = query
			}
			if told(id(n), run(tx, id(n)), true) != nil {
				_ = tx.Rollback()
				return outcomes, nil
			}
		}
		commitErr = tx.Commit()
	case opPinned:
		// A pinned connection's statement is run again only where the connection has no state that could be missed.
		conn, err := db.Conn(ctx)
		if told("", err, false) != nil {
			return outcomes, nil
		}
		defer conn.Close()
		if told(id(0), exec(conn, id(0)), false) == nil {
			if err := exec(conn, id(1)); err == nil || !errors.Is(err, driver.ErrBadConn) {
				told(id(1), err, true)
			}
		}
	case opPing:
		told("", db.PingContext(ctx), false)
	}
	return outcomes, commitErr
}
