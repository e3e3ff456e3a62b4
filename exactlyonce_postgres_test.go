package crdbdrain

import (
	"bufio"
	"context"
	"crypto/tls"
	"database/sql"
	"database/sql/driver"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/crdbdrain/crdbdrain/internal/pgtest"
)

// TestExactlyOncePostgreSQL is TestExactlyOnce with statements that PostgreSQL executes: behind real sockets, relays to one
// PostgreSQL say that they are nodes of CockroachDB, and end their sessions as a drain does, wherever its request comes
// among the client's messages, or without a word.
//
//   - No statement is executed twice. A sequence counts executions, also those that are rolled back.
//   - What the application is told succeeded is in the table, once; a transaction is there whole or not at all.
//   - Nothing fails but what was to be executed and met a deadline or a close without a word; nothing fails with
//     driver.ErrBadConn.
//
// CRDBDRAIN_SCHEDULES is how many operations to run; without it, what fits into three seconds.
func TestExactlyOncePostgreSQL(t *testing.T) {
	t.Parallel()
	n, limit := 1<<20, 3*time.Second
	if v := os.Getenv("CRDBDRAIN_SCHEDULES"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil {
			t.Fatalf("CRDBDRAIN_SCHEDULES: %v", err)
		}
		limit = time.Hour
	}
	d := pgtest.Shared(t).CreateDatabase(t)
	admin, err := sql.Open("pgx", d.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	if _, err := admin.Exec("CREATE TABLE runs (id text, n bigint); CREATE INDEX ON runs (id)"); err != nil {
		t.Fatal(err)
	}
	var c counts
	start := time.Now()
	var wg sync.WaitGroup
	for i := range len(execModes) {
		wg.Go(func() {
			seed := rand.Uint64()
			w := newRelays(t, d, rand.New(rand.NewPCG(seed, 0)), i%2 == int(seed%2))
			defer w.close()
			s := &shift{t: t, admin: admin, w: w, c: &c, name: fmt.Sprintf("w%d", i), r: rand.New(rand.NewPCG(seed, 1))}
			s.run(execModes[i], func() bool { return !t.Failed() && c.schedules.Load() < int64(n) && time.Since(start) < limit })
		})
	}
	wg.Wait()
	t.Logf("%v; %.1f s", &c, time.Since(start).Seconds())
	for what, n := range map[string]int64{"connections ended": c.deaths.Load(), "statements run again": c.rerun.Load(), "errors": c.errors.Load()} {
		if n == 0 {
			t.Errorf("no %s: the test tests nothing", what)
		}
	}
}

// shift is one worker: a pool of its own, with two nodes of its own, in one of pgx's modes.
type shift struct {
	t     *testing.T
	admin *sql.DB
	w     *relays
	c     *counts
	name  string // also the sequence's
	r     *rand.Rand
}

func (s *shift) run(mode string, more func() bool) {
	ctx, t := context.Background(), s.t
	if _, err := s.admin.Exec("CREATE SEQUENCE " + s.name); err != nil {
		t.Error(err)
		return
	}
	db := open(t, s.w.dsn, "crdbdrain_sources=errors&default_query_exec_mode="+mode)
	defer db.Close()
	insert := "INSERT INTO runs VALUES ($1, nextval('" + s.name + "'))"
	stmt, err := db.PrepareContext(ctx, insert+" RETURNING id")
	if err != nil {
		t.Error(err)
		return
	}
	defer stmt.Close()
	for i := 0; more(); i++ {
		if i%16 == 0 { // some connections to choose from
			s.w.plan(nil)
			s.spread(ctx, db.DB)
		}
		before := s.executions()
		s.w.plan(s.r)
		if s.r.IntN(4) == 0 {
			s.w.endIdle(s.r.IntN(2) == 0, s.r.IntN(2) == 0)
		}
		op, id := operation(s.r.IntN(int(numOperations))), fmt.Sprintf("%s.%d", s.name, i)
		o := s.operate(ctx, db.DB, stmt, op, insert, id)
		deaths, excused, log := s.w.deathsSince()
		executed := s.executions() - before
		var rows int
		if err := s.admin.QueryRow("SELECT count(*) FROM runs WHERE id = $1", id).Scan(&rows); err != nil {
			t.Error(err)
			return
		}
		fail := func(what string) {
			t.Helper()
			t.Errorf("%s: %v\n%v, %s, %s: %+v; %d executed, %d there\n%s", what, o.err, op, mode, id, o, executed, rows, log)
		}
		switch {
		case executed > o.sent:
			fail("executed more than once")
		case o.err == nil && rows != o.sent:
			fail("lost")
		case !o.parts && rows != 0 && rows != o.sent:
			fail("there in part")
		case o.err != nil && excused == 0 && !o.pinned:
			fail("an error for nothing")
		case errors.Is(o.err, driver.ErrBadConn) && !o.pinned:
			fail("driver.ErrBadConn")
		}
		if o.err != nil {
			s.c.errors.Add(1)
		}
		s.c.deaths.Add(int64(deaths))
		s.c.goodbyes.Add(int64(deaths - excused))
		s.c.executed.Add(int64(executed))
		s.c.schedules.Add(1)
	}
	s.c.rerun.Add(db.c.Stats().Rerun)
}

// spread opens three connections and puts them back.
func (s *shift) spread(ctx context.Context, db *sql.DB) {
	db.SetMaxIdleConns(3)
	for range 3 {
		conn, err := db.Conn(ctx)
		if err != nil {
			s.t.Error(err)
			return
		}
		defer conn.Close()
	}
}

func (s *shift) executions() (n int) {
	if err := s.admin.QueryRow("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM " + s.name).Scan(&n); err != nil {
		s.t.Error(err)
	}
	return n
}

// told is what an operation came to, as the application sees it.
type told struct {
	sent   int  // rows that it was to insert
	parts  bool // not all or nothing
	pinned bool // on a connection that may have a state, so that the statement is not run elsewhere
	err    error
}

// operate does one operation with an ID.
func (s *shift) operate(ctx context.Context, db *sql.DB, stmt *sql.Stmt, op operation, insert, id string) told {
	exec := func(x execer) error {
		_, err := x.ExecContext(ctx, insert, id)
		return err
	}
	query := func(x execer) error {
		return drainRows(x.QueryContext(ctx, insert+" RETURNING id", id))
	}
	switch op {
	case opExec:
		return told{sent: 1, err: exec(db)}
	case opExecPlain:
		_, err := db.ExecContext(ctx, strings.Replace(insert, "$1", "'"+id+"'", 1))
		return told{sent: 1, err: err}
	case opExecRows:
		_, err := db.ExecContext(ctx, insert+" RETURNING id", id)
		return told{sent: 1, err: err}
	case opQuery: // three rows, and a fault anywhere among them
		return told{sent: 3, err: drainRows(db.QueryContext(ctx, "INSERT INTO runs SELECT $1, nextval('"+s.name+"') FROM generate_series(1, 3) RETURNING id", id))}
	case opStmtExec:
		_, err := stmt.ExecContext(ctx, id)
		return told{sent: 1, err: err}
	case opStmtQuery:
		return told{sent: 1, err: drainRows(stmt.QueryContext(ctx, id))}
	case opPrepare:
		p, err := db.PrepareContext(ctx, insert+" -- "+id)
		if err != nil {
			return told{err: err}
		}
		defer p.Close()
		_, err = p.ExecContext(ctx, id)
		return told{sent: 1, err: err}
	case opTx:
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return told{err: err}
		}
		n := s.r.IntN(3)
		for i := range n {
			run := exec
			if s.r.IntN(2) == 0 {
				run = query
			}
			if err := run(tx); err != nil {
				_ = tx.Rollback()
				return told{sent: i + 1, err: err}
			}
		}
		return told{sent: n, err: tx.Commit()}
	case opPinned:
		conn, err := db.Conn(ctx)
		if err != nil {
			return told{err: err}
		}
		defer conn.Close()
		if err := exec(conn); err != nil {
			return told{sent: 1, err: err}
		}
		return told{sent: 2, parts: true, pinned: true, err: exec(conn)}
	}
	return told{err: db.PingContext(ctx)}
}

// relays are two nodes in front of one PostgreSQL. One goroutine serves a connection, a message at a time.
type relays struct {
	t       testing.TB
	tls     bool
	backend string
	dsn     string
	nodes   []net.Listener
	wg      sync.WaitGroup

	mu      sync.Mutex
	rng     *rand.Rand
	conns   map[*relay]struct{} // guarded by mu, like all below
	fates   []*fate             // of the requests to come; nil: none
	refuse  int                 // dials to be refused
	dying   map[*relay]struct{} // sessions that have ended, but for the close
	dead    sync.Cond           // one of them is closed
	deaths  int                 // since the operation began
	silent  int                 // of them, those without a word while a request was under way
	excused int                 // of them, those on which a request may fail
	log     strings.Builder
}

// relay is one connection to a node.
type relay struct {
	w      *relays
	node   uint32
	raw    *net.TCPConn
	client net.Conn // raw, or TLS over it
	in     *bufio.Reader
	server net.Conn
	out    *bufio.Reader
	app    bool        // not the watchdog's
	idle   atomic.Bool // to be ended where it waits for a request
	word   bool        // with a goodbye; written before idle is set
	rst    bool        // without a word it ends with an RST, and without TLS's own
	done   chan struct{}

	tx       byte
	fate     *fate
	batch    int    // messages since the last ReadyForQuery
	executed bool   // one of them executes something
	pending  int    // answers that PostgreSQL owes for them
	reply    []byte // of the batch so far
}

func newRelays(t testing.TB, d *pgtest.Database, rng *rand.Rand, withTLS bool) *relays {
	w := &relays{t: t, tls: withTLS, backend: pgtest.Shared(t).Addr(), rng: rng, conns: map[*relay]struct{}{}, dying: map[*relay]struct{}{}}
	w.dead.L = &w.mu
	var hosts []string
	for node := range uint32(2) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		w.nodes = append(w.nodes, ln)
		hosts = append(hosts, ln.Addr().String())
		w.wg.Go(func() {
			for {
				client, err := ln.Accept()
				if err != nil {
					return
				}
				w.wg.Go(func() { w.serve(client.(*net.TCPConn), node+1) })
			}
		})
	}
	mode := "disable"
	if withTLS {
		mode = "require"
	}
	w.dsn = fmt.Sprintf("postgres://postgres@%s/%s?sslmode=%s", strings.Join(hosts, ","), d.Name, mode)
	return w
}

func (w *relays) close() {
	for _, ln := range w.nodes {
		ln.Close()
	}
	w.mu.Lock()
	for c := range w.conns {
		c.client.Close()
	}
	w.mu.Unlock()
	w.wg.Wait()
}

// plan decides what happens to the dials and requests of the next operation: nothing, without r.
func (w *relays) plan(r *rand.Rand) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.dying) > 0 {
		w.dead.Wait()
	}
	w.fates, w.refuse, w.deaths, w.silent, w.excused = nil, 0, 0, 0, 0
	w.log.Reset()
	if r == nil {
		return
	}
	for range r.IntN(4) {
		w.fates = append(w.fates, nil)
	}
	for range r.IntN(3) {
		w.fates = append(w.fates, &fate{
			kind: fateKind(r.IntN(int(numFates))), skip: r.IntN(5), rows: r.IntN(4), cut: r.IntN(400), told: r.IntN(3) == 0, failed: r.IntN(2) == 0, rst: r.IntN(2) == 0,
		})
	}
	w.refuse = r.IntN(3)
}

func (w *relays) deathsSince() (deaths, excused int, log string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.deaths, w.excused, w.log.String()
}

// endIdle ends the connections that wait for a request, and waits for it.
func (w *relays) endIdle(word, all bool) {
	w.mu.Lock()
	var ended []*relay
	for c := range w.conns {
		if c.app && !c.idle.Load() && (all || len(ended) == 0) {
			c.word, c.rst = word, w.rng.IntN(2) == 0
			c.idle.Store(true)
			_ = c.client.SetReadDeadline(time.Unix(1, 0))
			ended = append(ended, c)
		}
	}
	w.mu.Unlock()
	for _, c := range ended {
		<-c.done
	}
}

func (w *relays) serve(raw *net.TCPConn, node uint32) {
	c := &relay{w: w, node: node, raw: raw, client: raw, in: bufio.NewReader(raw), done: make(chan struct{}), tx: 'I'}
	defer close(c.done)
	defer func() {
		c.client.Close()
		w.mu.Lock()
		delete(w.dying, c)
		w.dead.Broadcast()
		w.mu.Unlock()
	}()
	if !c.start() {
		return
	}
	defer c.server.Close()
	w.mu.Lock()
	w.conns[c] = struct{}{}
	w.mu.Unlock()
	for c.message() {
	}
	w.mu.Lock()
	delete(w.conns, c)
	w.mu.Unlock()
}

// start passes the beginning of a session on, as CockroachDB tells it.
func (c *relay) start() bool {
	var length [4]byte
	if _, err := io.ReadFull(c.in, length[:]); err != nil {
		return false
	}
	body := make([]byte, binary.BigEndian.Uint32(length[:])-4)
	if _, err := io.ReadFull(c.in, body); err != nil {
		return false
	}
	if (&pgproto3.SSLRequest{}).Decode(body) == nil {
		_, _ = c.raw.Write([]byte{'S'})
		c.client = tls.Server(c.raw, testTLS())
		c.in.Reset(c.client)
		return c.start()
	}
	var m pgproto3.StartupMessage
	if err := m.Decode(body); err != nil { // a CancelRequest
		return false
	}
	c.app = m.Parameters["application_name"] != watchdogName
	w := c.w
	w.mu.Lock()
	refused := c.app && w.refuse > 0
	if refused {
		w.refuse--
		fmt.Fprintf(&w.log, "node %d refuses a dial\n", c.node)
	}
	random := w.rng.Uint32() >> 12
	w.mu.Unlock()
	if refused {
		_, _ = c.client.Write(stream(&pgproto3.ErrorResponse{Severity: "ERROR", Code: "57P01", Message: noticeNotAcceptingClients}))
		return false
	}
	var err error
	if c.server, err = net.Dial("tcp", w.backend); err != nil {
		w.t.Error(err)
		return false
	}
	c.out = bufio.NewReader(c.server)
	_, _ = c.server.Write(append(length[:], body...))
	for {
		b, err := frame(c.out)
		if err != nil {
			c.server.Close()
			return false
		}
		switch b[0] {
		case 'R': // trusted
			b = append(b, stream(&pgproto3.ParameterStatus{Name: "crdb_version", Value: crdbVersion25})...)
		case 'K':
			b = stream(&pgproto3.BackendKeyData{ProcessID: c.node<<20 | random, SecretKey: []byte{0, 0, 0, 1}})
		}
		_, _ = c.client.Write(b)
		if b[0] == 'Z' {
			return true
		}
	}
}

// frame reads one message.
func frame(r *bufio.Reader) ([]byte, error) {
	head, err := r.Peek(5)
	if err != nil {
		return nil, err
	}
	b := make([]byte, 1+binary.BigEndian.Uint32(head[1:]))
	_, err = io.ReadFull(r, b)
	return b, err
}

// message serves one message of the client, and reports whether the session goes on.
func (c *relay) message() bool {
	if _, err := c.in.Peek(1); err != nil {
		if c.batch == 0 && c.tx == 'I' && c.idle.Load() {
			return c.end(c.word, false, "idle")
		}
		if c.idle.Load() {
			return c.end(false, true, "idle, and at work")
		}
		return false
	}
	b, err := frame(c.in)
	if err != nil {
		return c.end(false, true, "idle, and written to")
	}
	kind := b[0]
	switch {
	case kind == 'X':
		return false
	case kind == 'Q' && strings.HasPrefix(string(b[5:]), sqlShowNodeID):
		_, _ = c.client.Write(stream(oneColumn(), oneRow(strconv.Itoa(int(c.node))), &pgproto3.CommandComplete{CommandTag: []byte("SHOW")}, readyMessage))
		return true
	}
	if c.batch == 0 && c.app {
		c.fate = c.w.next()
	}
	executes := kind == 'Q' || kind == 'E'
	if f := c.fate; f != nil && (executes || kind == 'S' || c.batch >= f.skip) {
		switch {
		case f.kind == drainBefore && c.tx == 'I':
			c.collect()
			return c.end(true, false, "before it executes anything")
		case f.kind == cutGoodbye && c.tx == 'I':
			c.collect()
			words := stream(goodbyeMessage)
			c.reply = append(c.reply, words[:f.cut%len(words)]...)
			return c.end(false, c.asked(kind), "before it executes anything, with half a goodbye")
		case f.kind == cutRequest:
			c.collect()
			return c.end(false, c.asked(kind), "before it executes anything, without a word")
		}
	}
	c.batch++
	switch kind {
	case 'P', 'B', 'C', 'E':
		c.pending++
	case 'D':
		c.pending++
		if b[5] == 'S' {
			c.pending++
		}
	}
	if f := c.fate; f != nil && f.kind == drainAmid && executes {
		return c.deadline(b)
	}
	c.executed = c.executed || executes
	if _, err := c.server.Write(b); err != nil {
		return false
	}
	if kind != 'Q' && kind != 'S' {
		return true
	}
	c.finish(true)
	c.pending, c.batch = 0, 0
	f := c.fate
	executed := c.executed
	c.executed = false
	if f != nil && f.kind == cutReply {
		whole := len(c.reply)
		c.reply = c.reply[:f.cut%(whole+1)]
		return c.end(false, executed || c.tx != 'I' || len(c.reply) == whole, "in the reply")
	}
	if f != nil && f.kind != cutRequest && c.tx == 'I' { // a drain whose request has waited for the transaction's end
		return c.end(true, false, "behind the reply")
	}
	_, _ = c.client.Write(c.reply)
	c.reply = nil
	return true
}

// asked reports whether the client has asked for something to be executed, which a cut without a word leaves open to it:
// in this message or in what stands behind it, up to its Sync.
func (c *relay) asked(kind byte) bool {
	for kind != 'S' {
		if kind == 'Q' || kind == 'E' {
			return true
		}
		b, err := frame(c.in)
		if err != nil {
			return true
		}
		kind = b[0]
	}
	return c.tx != 'I'
}

func (w *relays) next() *fate {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.fates) == 0 {
		return nil
	}
	f := w.fates[0]
	w.fates = w.fates[1:]
	return f
}

// collect takes PostgreSQL's answers to what it has been sent.
func (c *relay) collect() {
	if c.pending == 0 {
		return
	}
	_, _ = c.server.Write(requestOf(&pgproto3.Flush{}))
	for c.pending > 0 {
		b, err := frame(c.out)
		if err != nil {
			c.w.t.Errorf("reading from PostgreSQL: %v", err)
			return
		}
		c.reply = append(c.reply, b...)
		switch b[0] {
		case 'D':
		case 'E':
			c.pending = 0
		default:
			c.pending--
		}
	}
}

// finish takes PostgreSQL's answers up to ReadyForQuery.
func (c *relay) finish(keep bool) {
	for {
		b, err := frame(c.out)
		if err != nil {
			c.w.t.Errorf("reading from PostgreSQL: %v", err)
			return
		}
		if keep {
			c.reply = append(c.reply, b...)
		}
		if b[0] == 'Z' {
			c.tx = b[5]
			return
		}
	}
}

// deadline ends the session at the statement b, as a drain that has waited long enough: what it has produced so far comes
// before the goodbye, and it may have been committed, rolled back, or cancelled before it began.
func (c *relay) deadline(b []byte) bool {
	f := c.fate
	if f.told && f.failed {
		c.pending-- // never executed
		if b[0] == 'Q' {
			c.pending = 0
		}
		c.collect()
		c.reply = append(c.reply, stream(cancelMessage)...)
		return c.end(true, true, "cancelled")
	}
	kept := len(c.reply)
	if b[0] == 'E' {
		c.pending--
		c.collect()
		c.pending, kept = 1, len(c.reply)
	}
	_, _ = c.server.Write(b)
	if b[0] == 'E' {
		c.collect()
	} else {
		c.finish(true)
		c.reply = c.reply[:len(c.reply)-6] // without the ReadyForQuery
	}
	if f.told {
		c.reply = append(c.reply[:kept], stream(cancelMessage)...)
	} else if f.rows > 0 {
		// The first rows of it; what was executed has produced something.
		rows := 0
		for n := kept; n < len(c.reply); n += 1 + int(binary.BigEndian.Uint32(c.reply[n+1:])) {
			if c.reply[n] == 'D' {
				if rows++; rows > f.rows {
					c.reply = c.reply[:n]
					break
				}
			}
		}
	}
	if b[0] == 'E' && f.rst { // it is committed
		_, _ = c.server.Write(requestOf(&pgproto3.Sync{}))
		c.finish(false)
	}
	return c.end(true, true, "at the deadline")
}

// end ends the session: what there is of a reply, then perhaps the goodbye. It returns false.
func (c *relay) end(word, excused bool, when string) bool {
	w := c.w
	w.mu.Lock()
	w.dying[c] = struct{}{}
	w.deaths++
	if !word && when != "idle" {
		w.silent++
	}
	if excused || w.silent > 1 { // what is prepared is prepared once more, not again
		w.excused++
	}
	fmt.Fprintf(&w.log, "node %d ends a session, with a goodbye: %v; %s; %+v\n", c.node, word, when, c.fate)
	w.mu.Unlock()
	if word {
		c.reply = append(c.reply, stream(goodbyeMessage)...)
	}
	_, _ = c.client.Write(c.reply)
	if !word && (c.rst || c.fate != nil && c.fate.rst) {
		_ = c.raw.SetLinger(0)
		c.raw.Close()
	}
	return false
}

// requestOf encodes a message of the client.
func requestOf(m pgproto3.FrontendMessage) []byte {
	b, err := m.Encode(nil)
	if err != nil {
		panic(err)
	}
	return b
}
