package crdbdrain

import (
	"context"
	"crypto/tls"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// peer is a scripted server on a real socket. It answers any statement, and does to one of them what the test says.
// Each connection it accepts is to a node of its own, numbered from 1, so that a mark meets nothing but the connection
// that earned it.
type peer struct {
	ln      net.Listener
	tls     *tls.Config
	version string // ParameterStatus crdb_version
	refuse  func(nth int) *pgproto3.ErrorResponse

	wg sync.WaitGroup

	mu       sync.Mutex
	conns    []*peerConn           // accepted; guarded by mu
	trap     *trap                 // guarded by mu
	sent     map[string]int        // arrivals of a statement, by step and text; guarded by mu
	executed map[string]int        // statements answered in full, by text; guarded by mu
	startups []map[string]string   // guarded by mu
	lifetime int                   // requests after which a connection is ended; 0: never; guarded by mu
	greet    int                   // connections to come that are ended with the packet that welcomes them; guarded by mu
	greeted  uint32                // the node of the last one; guarded by mu
	open     map[net.Conn]net.Conn // guarded by mu
}

// A step is what of a statement has arrived.
type step byte

const (
	query   step = 'Q' // all of it, in the simple protocol
	parse   step = 'P'
	execute step = 'E'
	closing step = 'C' // the end of its preparation
)

// trap does something to the first statement that fits. do ends the connection.
type trap struct {
	fits  func(sql string, at step) bool
	do    func(c *peerConn)
	times int           // how often it is still to spring
	node  uint32        // of the connection it was sprung on
	ended chan struct{} // closed once the client has closed that connection
}

type peerConn struct {
	p        *peer
	node     uint32
	app      string
	raw      net.Conn
	conn     net.Conn
	held     *corked // under TLS
	be       *pgproto3.Backend
	tx       byte
	stmts    map[string]string
	portal   string
	requests int
	ready    bool              // its startup is over; guarded by p.mu, like all below
	wake     func(c *peerConn) // what to do instead of waiting for the next request
	woken    func()            // says that it is done
}

const crdbVersion25 = "CockroachDB CCL v25.2.0 (x86_64-pc-linux-gnu)"

func startPeer(t testing.TB, withTLS bool) *peer {
	t.Helper()
	p := &peer{version: crdbVersion25, sent: map[string]int{}, executed: map[string]int{}, open: map[net.Conn]net.Conn{}}
	if withTLS {
		p.tls = testTLS()
	}
	var err error
	if p.ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	p.wg.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

var testTLS = sync.OnceValue(func() *tls.Config {
	s := httptest.NewUnstartedServer(nil)
	s.StartTLS()
	defer s.Close()
	return &tls.Config{Certificates: s.TLS.Certificates}
})

func (p *peer) accept() {
	for {
		nc, err := p.ln.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		c := &peerConn{p: p, node: uint32(len(p.conns) + 1), raw: nc, conn: nc, tx: 'I', stmts: map[string]string{}}
		p.conns = append(p.conns, c)
		p.open[nc] = nc
		p.mu.Unlock()
		p.wg.Go(func() {
			defer nc.Close()
			c.serve()
			p.mu.Lock()
			delete(p.open, nc)
			woken := c.woken
			p.mu.Unlock()
			if woken != nil {
				woken() // the client was first
			}
		})
	}
}

func (p *peer) close() {
	p.ln.Close()
	p.mu.Lock()
	for nc := range p.open {
		nc.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *peer) dsn(params ...string) string {
	mode := "disable"
	if p.tls != nil {
		mode = "require"
	}
	return fmt.Sprintf("postgres://app@%s/defaultdb?%s", p.ln.Addr(), strings.Join(append([]string{
		"sslmode=" + mode, "crdbdrain_sources=errors", "crdbdrain_poll_interval=100ms", "crdbdrain_spares=0"}, params...), "&"))
}

// dials returns how many connections were accepted, those of the watchdog and of CancelRequests left out.
func (p *peer) dials() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, s := range p.startups {
		if s["application_name"] != watchdogName {
			n++
		}
	}
	return n
}

func (p *peer) accepts() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

// arrivals returns how often a statement has reached this step.
func (p *peer) arrivals(at step, sql string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sent[string(at)+sql]
}

func (p *peer) executions(sql string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.executed[sql]
}

// set lays a trap, and forgets what has arrived so far.
func (p *peer) set(fits func(sql string, at step) bool, do func(c *peerConn)) *trap {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.sent)
	clear(p.executed)
	p.trap = &trap{fits: fits, do: do, times: 1, ended: make(chan struct{})}
	return p.trap
}

// wait waits until the client has closed the connection on which the trap was sprung.
func (k *trap) wait(t testing.TB, what string) {
	t.Helper()
	select {
	case <-k.ended:
	case <-time.After(10 * time.Second):
		t.Fatalf("%s: the statement did not arrive, or its connection was not closed", what)
	}
}

// arrived counts a statement, and springs the trap if it is laid for it.
func (c *peerConn) arrived(sql string, at step) (sprung bool) {
	p := c.p
	p.mu.Lock()
	p.sent[string(at)+sql]++
	k := p.trap
	if k == nil || c.app == watchdogName || !k.fits(sql, at) {
		p.mu.Unlock()
		return false
	}
	k.times--
	last := k.times <= 0
	if last {
		p.trap = nil
	}
	k.node = c.node
	p.mu.Unlock()
	k.do(c)
	if last {
		close(k.ended)
	}
	return true
}

func (c *peerConn) done(sql string) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.p.executed[sql]++
}

func shutdown(severity string) *pgproto3.ErrorResponse {
	return &pgproto3.ErrorResponse{Severity: severity, SeverityUnlocalized: severity, Code: "57P01", Message: "server is shutting down"}
}

// end sends what there is, closes the server's side, and waits for the client to close its own.
func (c *peerConn) end(messages ...pgproto3.BackendMessage) {
	for _, m := range messages {
		c.be.Send(m)
	}
	_ = c.be.Flush()
	if half, ok := c.conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
	c.awaitClose()
}

// endIdle does something to every idle connection of the application that is to end it, and returns their nodes once it
// has been done: do calls done then, and may go on to wait for the client.
func (p *peer) endIdle(do func(c *peerConn, done func())) (nodes []uint32) {
	return p.endSome(func(int) bool { return true }, do)
}

// openNow returns how many connections the application has that are not about to end.
func (p *peer) openNow() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		if p.open[c.raw] != nil && c.ready && c.app != watchdogName && c.wake == nil {
			n++
		}
	}
	return n
}

// endSome is endIdle for some of the connections, counted from 0. One that is busy ends behind its answer.
func (p *peer) endSome(some func(i int) bool, do func(c *peerConn, done func())) (nodes []uint32) {
	var wg sync.WaitGroup
	i := -1
	p.mu.Lock()
	for _, c := range p.conns {
		if p.open[c.raw] == nil || !c.ready || c.app == watchdogName || c.wake != nil {
			continue
		}
		if i++; !some(i) {
			continue
		}
		wg.Add(1)
		c.woken = sync.OnceFunc(wg.Done)
		c.wake = func(c *peerConn) { do(c, c.woken) }
		nodes = append(nodes, c.node)
		_ = c.raw.SetReadDeadline(time.Unix(1, 0))
	}
	p.mu.Unlock()
	wg.Wait()
	return nodes
}

// sayGoodbye sends an unsolicited goodbye and closes, as a drain does to an idle connection.
func sayGoodbye(c *peerConn, done func()) {
	c.be.Send(shutdown("ERROR"))
	_ = c.be.Flush()
	closeQuietly(c, done)
}

// closeQuietly closes without a word, with a FIN.
func closeQuietly(c *peerConn, done func()) {
	_ = c.conn.(interface{ CloseWrite() error }).CloseWrite()
	done()
	c.awaitClose()
}

// resetQuietly closes without a word, with an RST.
func resetQuietly(c *peerConn, done func()) {
	c.reset()
	done()
}

// sayGoodbyeAndReset sends a goodbye, and has it followed by an RST.
func sayGoodbyeAndReset(c *peerConn, done func()) {
	c.be.Send(shutdown("ERROR"))
	_ = c.be.Flush()
	resetQuietly(c, done)
}

func (c *peerConn) awaitClose() {
	_ = c.conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	_, _ = io.Copy(io.Discard, c.conn)
}

// reset ends the connection with an RST.
func (c *peerConn) reset() {
	_ = c.raw.(*net.TCPConn).SetLinger(0)
	_ = c.raw.Close()
}

func (c *peerConn) startup() bool {
	c.be = pgproto3.NewBackend(c.conn, c.conn)
	for {
		m, err := c.be.ReceiveStartupMessage()
		if err != nil {
			return false
		}
		switch m := m.(type) {
		case *pgproto3.SSLRequest:
			if c.p.tls == nil {
				_, _ = c.conn.Write([]byte{'N'})
				continue
			}
			_, _ = c.conn.Write([]byte{'S'})
			c.held = &corked{Conn: c.raw}
			c.conn = tls.Server(c.held, c.p.tls)
			c.be = pgproto3.NewBackend(c.conn, c.conn)
			continue
		case *pgproto3.StartupMessage:
			c.p.mu.Lock()
			c.app = m.Parameters["application_name"]
			c.p.startups = append(c.p.startups, maps.Clone(m.Parameters))
			nth, refuse := len(c.p.startups), c.p.refuse
			c.p.mu.Unlock()
			if refuse != nil {
				if e := refuse(nth); e != nil {
					c.end(e)
					return false
				}
			}
		default:
			return false
		}
		break
	}
	c.be.Send(&pgproto3.AuthenticationOk{})
	for _, kv := range [][2]string{{"client_encoding", "UTF8"}, {"standard_conforming_strings", "on"}, {"crdb_version", c.p.version}} {
		if kv[1] != "" {
			c.be.Send(&pgproto3.ParameterStatus{Name: kv[0], Value: kv[1]})
		}
	}
	c.be.Send(&pgproto3.BackendKeyData{ProcessID: c.node<<20 | 7, SecretKey: []byte{0, 0, 0, 1}})
	c.be.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	c.p.mu.Lock()
	c.ready = true
	greet := c.p.greet > 0 && c.app != watchdogName
	if greet {
		c.p.greet--
		c.p.greeted = c.node
	}
	c.p.mu.Unlock()
	if greet {
		c.end(shutdown("ERROR"))
		return false
	}
	return c.be.Flush() == nil
}

func (c *peerConn) serve() {
	if !c.startup() {
		return
	}
	for {
		m, err := c.be.Receive()
		if err != nil {
			c.p.mu.Lock()
			wake := c.wake
			c.p.mu.Unlock()
			if wake != nil {
				wake(c)
			}
			return
		}
		switch m := m.(type) {
		case *pgproto3.Query:
			if c.arrived(m.String, query) {
				return
			}
			c.describe(m.String)
			c.answer(m.String)
			if c.finish() {
				return
			}
		case *pgproto3.Parse:
			c.stmts[m.Name] = m.Query
			if c.arrived(m.Query, parse) {
				return
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
			if !c.describe(sql) {
				c.be.Send(&pgproto3.NoData{})
			}
		case *pgproto3.Execute:
			if c.arrived(c.portal, execute) {
				return
			}
			c.answer(c.portal)
		case *pgproto3.Close:
			if c.arrived(c.stmts[m.Name], closing) {
				return
			}
			c.be.Send(&pgproto3.CloseComplete{})
		case *pgproto3.Sync:
			if c.finish() {
				return
			}
		case *pgproto3.Terminate:
			return
		}
	}
}

// finish ends a request, and the connection where its time has come.
func (c *peerConn) finish() (ended bool) {
	c.be.Send(&pgproto3.ReadyForQuery{TxStatus: c.tx})
	_ = c.be.Flush()
	c.requests++
	c.p.mu.Lock()
	lifetime := c.p.lifetime
	c.p.mu.Unlock()
	if lifetime == 0 || c.requests < lifetime || c.tx != 'I' || c.app == watchdogName {
		return false
	}
	c.end(shutdown("ERROR"))
	return true
}

func oneColumn() *pgproto3.RowDescription {
	return &pgproto3.RowDescription{Fields: []pgproto3.FieldDescription{{Name: []byte("c"), DataTypeOID: 25, DataTypeSize: -1, TypeModifier: -1}}}
}

func oneRow(value string) *pgproto3.DataRow {
	return &pgproto3.DataRow{Values: [][]byte{[]byte(value)}}
}

func returnsRows(sql string) bool {
	return strings.HasPrefix(sql, "SELECT") || sql == sqlShowNodeID
}

func (c *peerConn) describe(sql string) bool {
	if !returnsRows(sql) {
		return false
	}
	c.be.Send(oneColumn())
	return true
}

func (c *peerConn) answer(sql string) {
	c.done(sql)
	word, _, _ := strings.Cut(sql, " ")
	tag := strings.ToUpper(word)
	switch {
	case sql == sqlShowNodeID:
		c.be.Send(oneRow(fmt.Sprint(c.node)))
		tag = "SHOW"
	case returnsRows(sql):
		c.be.Send(oneRow("1"))
		tag = "SELECT 1"
	case tag == "--":
		c.be.Send(&pgproto3.EmptyQueryResponse{})
		return
	case tag == "BEGIN":
		c.tx = 'T'
	case tag == "COMMIT", tag == "ROLLBACK":
		c.tx = 'I'
	case tag == "INSERT":
		tag = "INSERT 0 1"
	}
	c.be.Send(&pgproto3.CommandComplete{CommandTag: []byte(tag)})
}

// openMarking opens a pool on the peer and waits until the watchdog has verified that PIDs tell the node: only then can
// a goodbye mark one.
func openMarking(t testing.TB, p *peer, params ...string) *pool {
	t.Helper()
	db := open(t, p.dsn(params...), "")
	db.SetMaxOpenConns(2)
	if err := db.Ping(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the stamp's rule is verified", func() bool {
		w := db.c.watchdog.Load()
		return w != nil && w.rule.Load() == ruleHolds
	})
	return db
}

// openWith opens a pool with a config that a DSN cannot say.
func openWith(t testing.TB, dsn string, change func(cc *pgconn.Config)) *pool {
	t.Helper()
	cc, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	change(&cc.Config)
	c, err := NewConnector(cc)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(c)
	t.Cleanup(func() { _ = db.Close() })
	return &pool{db, c}
}

// marked reports whether the node is marked.
func (p *pool) marked(node uint32) bool {
	w := p.c.watchdog.Load()
	if w == nil {
		return false
	}
	m := w.marks.Load()
	return m != nil && m.of[nodeID(node)] != nil
}

// execer is what *sql.DB, *sql.Conn and *sql.Tx have in common.
type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// operations are the ways in which a statement reaches the server. prepare runs before the trap is laid. at is the step
// at which a statement of the extended protocol is caught.
var operations = []struct {
	name    string
	sql     string
	steps   string // of query, parse, execute
	noTx    bool   // makes no sense in a transaction
	again   bool   // leaves nothing behind when its session ends: run again whatever was answered
	prepare func(x execer, sql string) (*sql.Stmt, error)
	run     func(db *sql.DB, x execer, sql string, s *sql.Stmt) error
}{
	{name: "Exec", sql: "INSERT INTO t VALUES ($1)", steps: "QPE", run: func(_ *sql.DB, x execer, q string, _ *sql.Stmt) error {
		_, err := x.ExecContext(context.Background(), q, "a")
		return err
	}},
	{name: "Exec without arguments", sql: "INSERT INTO t VALUES (1)", steps: "Q", run: func(_ *sql.DB, x execer, q string, _ *sql.Stmt) error {
		_, err := x.ExecContext(context.Background(), q)
		return err
	}},
	{name: "Query", sql: "SELECT c FROM t WHERE c = $1", steps: "QPE", run: func(_ *sql.DB, x execer, q string, _ *sql.Stmt) error {
		rows, err := x.QueryContext(context.Background(), q, "a")
		return drainRows(rows, err)
	}},
	{name: "QueryRow", sql: "SELECT c FROM u WHERE c = $1", steps: "QPE", run: func(_ *sql.DB, x execer, q string, _ *sql.Stmt) error {
		// QueryRow hides an error that comes after the first row, by database/sql's design; Query is there for it.
		var s string
		return x.QueryRowContext(context.Background(), q, "a").Scan(&s)
	}},
	{name: "Prepare", sql: "INSERT INTO p VALUES ($1)", steps: "P", again: true, run: func(_ *sql.DB, x execer, q string, _ *sql.Stmt) error {
		s, err := x.PrepareContext(context.Background(), q)
		if err == nil {
			err = s.Close()
		}
		return err
	}},
	{name: "Exec again", sql: "INSERT INTO c VALUES ($1)", steps: "QE", prepare: func(x execer, q string) (*sql.Stmt, error) {
		_, err := x.ExecContext(context.Background(), q, "a") // from now on its description or statement is cached
		return nil, err
	}, run: func(_ *sql.DB, x execer, q string, _ *sql.Stmt) error {
		_, err := x.ExecContext(context.Background(), q, "a")
		return err
	}},
	{name: "Stmt.Exec", sql: "INSERT INTO s VALUES ($1)", steps: "E", prepare: prepareOn, run: func(_ *sql.DB, _ execer, _ string, s *sql.Stmt) error {
		_, err := s.ExecContext(context.Background(), "a")
		return err
	}},
	{name: "Stmt.Query", sql: "SELECT c FROM s WHERE c = $1", steps: "E", prepare: prepareOn, run: func(_ *sql.DB, _ execer, _ string, s *sql.Stmt) error {
		rows, err := s.QueryContext(context.Background(), "a")
		return drainRows(rows, err)
	}},
	{name: "Ping", sql: "-- ping", steps: "Q", noTx: true, again: true, run: func(db *sql.DB, _ execer, _ string, _ *sql.Stmt) error {
		return db.Ping()
	}},
	{name: "Begin", sql: "begin", steps: "Q", noTx: true, again: true, run: func(db *sql.DB, _ execer, _ string, _ *sql.Stmt) error {
		tx, err := db.Begin()
		if err == nil {
			err = tx.Commit()
		}
		return err
	}},
}

func prepareOn(x execer, sql string) (*sql.Stmt, error) {
	return x.PrepareContext(context.Background(), sql)
}

func drainRows(rows *sql.Rows, err error) error {
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			return err
		}
	}
	return rows.Err()
}

// earlierReplies are what the server can have sent before its goodbye. nothing says that execution cannot have.
var earlierReplies = []struct {
	name     string
	messages []pgproto3.BackendMessage
	nothing  bool
	code     string // of the error that the application is to see, 57P01 if empty
}{
	{name: "nothing", nothing: true},
	{name: "ParseComplete", messages: []pgproto3.BackendMessage{&pgproto3.ParseComplete{}}, nothing: true},
	{name: "BindComplete", messages: []pgproto3.BackendMessage{&pgproto3.BindComplete{}}, nothing: true},
	{name: "RowDescription", messages: []pgproto3.BackendMessage{oneColumn()}, nothing: true},
	{name: "NoData", messages: []pgproto3.BackendMessage{&pgproto3.ParameterDescription{}, &pgproto3.NoData{}}, nothing: true},
	{name: "DataRow", messages: []pgproto3.BackendMessage{oneColumn(), oneRow("1")}},
	{name: "CommandComplete", messages: []pgproto3.BackendMessage{&pgproto3.CommandComplete{CommandTag: []byte("INSERT 0 1")}}},
	{name: "EmptyQueryResponse", messages: []pgproto3.BackendMessage{&pgproto3.EmptyQueryResponse{}}},
	{name: "PortalSuspended", messages: []pgproto3.BackendMessage{&pgproto3.PortalSuspended{}}},
	{name: "CopyOutResponse", messages: []pgproto3.BackendMessage{&pgproto3.CopyOutResponse{}}},
	{name: "NoticeResponse", messages: []pgproto3.BackendMessage{&pgproto3.NoticeResponse{Severity: "NOTICE", Code: "00000", Message: "working"}}},
	{name: "57014", messages: []pgproto3.BackendMessage{&pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "57014", Message: "query execution canceled"}}, code: "57014"},
}

var execModes = []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"}

// TestA03 goes through every way in which a statement can meet the server's goodbye. Outside a transaction, and with
// nothing before it that execution could have produced, the application sees nothing and the statement is executed once,
// elsewhere. Otherwise it sees the server's SQLSTATE, and the statement is not sent again.
func TestA03(t *testing.T) {
	t.Parallel()
	for _, withTLS := range []bool{false, true} {
		for _, mode := range execModes {
			for _, inTx := range []bool{false, true} {
				t.Run(fmt.Sprintf("tls=%v/%s/tx=%v", withTLS, mode, inTx), func(t *testing.T) {
					t.Parallel()
					matrixA03(t, withTLS, mode, inTx)
				})
			}
		}
	}
}

func matrixA03(t *testing.T, withTLS bool, mode string, inTx bool) {
	p := startPeer(t, withTLS)
	db := openMarking(t, p, "default_query_exec_mode="+mode)
	nth := 0
	for _, op := range operations {
		if inTx && op.noTx {
			continue
		}
		for _, at := range []step(op.steps) {
			if simple := mode == "simple_protocol"; len(op.steps) > 1 && simple != (at == query) {
				continue
			}
			for _, severity := range []string{"ERROR", "FATAL"} {
				for _, reply := range earlierReplies {
					if withTLS && (severity == "FATAL" || reply.name != "nothing" && reply.name != "BindComplete" && reply.name != "CommandComplete" && reply.name != "57014") {
						continue // the plaintext stream is the same
					}
					if op.name == "QueryRow" && reply.name == "DataRow" {
						continue // Scan has its row
					}
					name := fmt.Sprintf("%s at %c, %s after %s", op.name, at, severity, reply.name)
					text := op.sql
					if !op.noTx {
						nth++
						text += fmt.Sprintf(" -- %d", nth) // in no cache
					}
					again := !inTx && (reply.nothing || op.again)
					lost := db.c.Stats().Lost

					var x execer = db.DB
					var tx *sql.Tx
					var err error
					if inTx {
						if tx, err = db.Begin(); err != nil {
							t.Fatalf("%s: %v", name, err)
						}
						x = tx
					}
					var s *sql.Stmt
					if op.prepare != nil {
						if s, err = op.prepare(x, text); err != nil {
							t.Fatalf("%s: %v", name, err)
						}
					}
					var caught string
					k := p.set(func(sql string, step step) bool {
						if step != at || sql != text && !(mode == "simple_protocol" && sameStatement(sql, text)) {
							return false
						}
						caught = sql
						return true
					}, func(c *peerConn) { c.end(append(slices.Clone(reply.messages), shutdown(severity))...) })

					err = op.run(db.DB, x, text, s)
					k.wait(t, name)
					if tx != nil {
						_ = tx.Rollback()
					}
					if s != nil {
						_ = s.Close()
					}
					switch {
					case again && err != nil:
						t.Errorf("%s: %v, want no error", name, err)
					case !again && err == nil:
						t.Errorf("%s: no error, though it may have been executed", name)
					case !again:
						var pgErr *pgconn.PgError
						want := "57P01"
						if reply.code != "" {
							want = reply.code
						}
						if !errors.As(err, &pgErr) || pgErr.Code != want {
							t.Errorf("%s: %v, want SQLSTATE %s", name, err, want)
						}
						if errors.Is(err, driver.ErrBadConn) {
							t.Errorf("%s: %v is driver.ErrBadConn", name, err)
						}
					}
					times := 1
					if again {
						times = 2
					}
					arrivals := times
					if again && mode == "cache_describe" && at == parse && !op.again {
						arrivals++ // once to be described, once to be executed
					}
					if got := p.arrivals(at, caught); got != arrivals {
						t.Errorf("%s: on the wire %d times, want %d", name, got, arrivals)
					}
					if got := p.executions(caught); op.name != "Prepare" && got != times-1 {
						t.Errorf("%s: executed elsewhere %d times, want %d", name, got, times-1)
					}
					if !db.marked(k.node) {
						t.Errorf("%s: node %d is not marked", name, k.node)
					}
					if got := db.c.Stats().Lost - lost; got != 1 {
						t.Errorf("%s: %d connections lost, want 1", name, got)
					}
				}
			}
		}
	}
}

// sameStatement compares a statement with one whose arguments pgx has written into it.
func sameStatement(got, want string) bool {
	before, after, _ := strings.Cut(want, "$1")
	return strings.HasPrefix(got, before) && strings.HasSuffix(got, after)
}

// TestA09 ends the connection under a COMMIT: it is on the wire exactly once, and the error is never one on which
// database/sql, or anybody, would run it again.
func TestA09(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		end  func(c *peerConn)
		code string
	}{
		{"FIN", func(c *peerConn) { c.end() }, ""},
		{"RST", (*peerConn).reset, ""},
		{"57P01", func(c *peerConn) { c.end(shutdown("ERROR")) }, "57P01"},
		{"57014 and 57P01", func(c *peerConn) {
			c.end(&pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "57014", Message: "query execution canceled"}, shutdown("ERROR"))
		}, "57014"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := startPeer(t, false)
			db := openMarking(t, p)
			tx, err := db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec("INSERT INTO t VALUES ($1)", "a"); err != nil {
				t.Fatal(err)
			}
			k := p.set(func(sql string, _ step) bool { return sql == "commit" }, tt.end)
			err = tx.Commit()
			k.wait(t, "COMMIT")
			if err == nil || errors.Is(err, driver.ErrBadConn) {
				t.Errorf("COMMIT: %v, want an error that is not driver.ErrBadConn", err)
			}
			if got := sqlState(err); got != tt.code {
				t.Errorf("COMMIT: %v, want SQLSTATE %q", err, tt.code)
			}
			if pgconn.SafeToRetry(err) {
				t.Errorf("COMMIT: %v says that it is safe to retry", err)
			}
			if got := p.arrivals(query, "commit"); got != 1 {
				t.Errorf("%d COMMITs on the wire, want 1", got)
			}
			if db.marked(k.node) != (tt.code != "") {
				t.Errorf("node %d marked: %v", k.node, db.marked(k.node))
			}
		})
	}
}

// TestB08 resets or closes the connection under a statement, without a word: it may have been executed, so it is not sent
// again and the application sees the raw error.
func TestB08(t *testing.T) {
	t.Parallel()
	for _, end := range []struct {
		name string
		do   func(c *peerConn)
	}{{"FIN", func(c *peerConn) { c.end() }}, {"RST", (*peerConn).reset}} {
		t.Run(end.name, func(t *testing.T) {
			t.Parallel()
			p := startPeer(t, false)
			db := openMarking(t, p)
			for _, op := range operations {
				if op.again {
					continue
				}
				for _, inTx := range []bool{false, true} {
					at := execute
					if op.steps == "Q" {
						at = query
					}
					var x execer = db.DB
					var tx *sql.Tx
					var s *sql.Stmt
					var err error
					if inTx {
						if tx, err = db.Begin(); err != nil {
							t.Fatal(err)
						}
						x = tx
					}
					if op.prepare != nil {
						if s, err = op.prepare(x, op.sql); err != nil {
							t.Fatal(err)
						}
					}
					k := p.set(func(sql string, step step) bool { return sql == op.sql && step == at }, end.do)
					err = op.run(db.DB, x, op.sql, s)
					k.wait(t, op.name)
					if err == nil || errors.Is(err, driver.ErrBadConn) {
						t.Errorf("%s, in a transaction: %v: %v, want the connection's raw error", op.name, inTx, err)
					}
					if got := p.arrivals(at, op.sql); got != 1 {
						t.Errorf("%s, in a transaction: %v: on the wire %d times, want 1", op.name, inTx, got)
					}
					if tx != nil {
						_ = tx.Rollback()
					}
					if s != nil {
						_ = s.Close()
					}
				}
			}
		})
	}
}

// A BEGIN or a Prepare that gets no answer leaves nothing behind: it is run again, whatever ended its connection.
func TestBeginAndPrepareWithoutAnAnswerAreRunAgain(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	db := openMarking(t, p)
	for _, op := range operations {
		if !op.again {
			continue
		}
		for name, end := range map[string]func(c *peerConn){"FIN": func(c *peerConn) { c.end() }, "RST": (*peerConn).reset} {
			at := step(op.steps[0])
			k := p.set(func(sql string, step step) bool { return sql == op.sql && step == at }, end)
			err := op.run(db.DB, db.DB, op.sql, nil)
			k.wait(t, op.name)
			if err != nil || p.arrivals(at, op.sql) != 2 {
				t.Errorf("%s, %s: %v, on the wire %d times; want no error and 2", op.name, name, err, p.arrivals(at, op.sql))
			}
		}
	}
}

// A statement whose connection ends while pgx is still preparing it has not been sent: it is run again, on another
// connection, also where the server has said nothing. In a transaction, or behind a reply that preparing has not, it is not.
func TestAStatementCutWhileItIsPrepared(t *testing.T) {
	t.Parallel()
	const sql = "INSERT INTO t VALUES ($1)"
	notice := &pgproto3.NoticeResponse{Severity: "NOTICE", Code: "00000", Message: "x"}
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec"} {
		for _, tt := range []struct {
			name  string
			end   func(c *peerConn)
			inTx  bool
			off   bool
			times int // prepared
		}{
			{name: "FIN", end: func(c *peerConn) { c.end() }, times: 2},
			{name: "RST", end: (*peerConn).reset, times: 2},
			{name: "FIN behind a part of the answer", end: func(c *peerConn) { c.end(&pgproto3.ParseComplete{}) }, times: 2},
			{name: "FIN behind a notice", end: func(c *peerConn) { c.end(notice) }, times: 1},
			{name: "FIN behind a CommandComplete", end: func(c *peerConn) { c.end(doneMessage) }, times: 1},
			{name: "another 57P01", end: func(c *peerConn) {
				c.end(&pgproto3.ErrorResponse{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P01", Message: "terminating connection due to administrator command"})
			}, times: 1},
			{name: "FIN in a transaction", end: func(c *peerConn) { c.end() }, inTx: true, times: 1},
			{name: "FIN, nothing is run again", end: func(c *peerConn) { c.end() }, off: true, times: 1},
		} {
			p := startPeer(t, false)
			params := []string{"default_query_exec_mode=" + mode}
			if tt.off {
				params = append(params, "crdbdrain_rerun=off")
			}
			db := openMarking(t, p, params...)
			k := p.set(func(s string, at step) bool { return s == sql && at == parse }, tt.end)
			var x execer = db.DB
			if tt.inTx {
				tx, err := db.Begin()
				if err != nil {
					t.Fatal(err)
				}
				defer tx.Rollback()
				x = tx
			}
			_, err := x.ExecContext(t.Context(), sql, "a")
			k.wait(t, tt.name)
			if (err == nil) != (tt.times == 2) || errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%s, %s: %v", mode, tt.name, err)
			}
			prepared := p.arrivals(parse, sql)
			if mode == "cache_describe" {
				prepared -= p.executions(sql) // it is parsed again
			}
			if prepared != tt.times || p.executions(sql) != tt.times-1 {
				t.Errorf("%s, %s: prepared %d times, want %d; executed %d times", mode, tt.name, prepared, tt.times, p.executions(sql))
			}
		}
	}
}

// A statement that brings down every node that prepares it meets two of them, and with database/sql's own tries three.
func TestWhatEndsNodesDoesNotMeetThemAll(t *testing.T) {
	t.Parallel()
	const sql = "SELECT c FROM t WHERE c = $1"
	for _, op := range []struct {
		name string
		run  func(db *pool) error
	}{
		{"Query", func(db *pool) error { return drainRows(db.QueryContext(t.Context(), sql, "a")) }},
		{"Exec", func(db *pool) error { _, err := db.ExecContext(t.Context(), sql, "a"); return err }},
	} {
		for name, end := range map[string]func(c *peerConn){"FIN": func(c *peerConn) { c.end() }, "RST": (*peerConn).reset} {
			p := startPeer(t, false)
			db := openMarking(t, p)
			k := p.set(func(s string, at step) bool { return s == sql && at == parse }, end)
			p.mu.Lock()
			k.times = 100
			p.mu.Unlock()
			if err := op.run(db); err == nil || errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%s, %s: %v", op.name, name, err)
			}
			if n := p.arrivals(parse, sql); n < 2 || n > 3 {
				t.Errorf("%s, %s: prepared %d times, want 2 or 3", op.name, name, n)
			}
		}
	}
}

// A caller can meet several connections that end under its statement, one after the other: database/sql gives up after
// the third, the driver goes on. A statement that is prepared first on the connection is no different.
func TestOneStatementMeetsManyDyingConnections(t *testing.T) {
	t.Parallel()
	for _, op := range operations {
		for times := 2; times <= 5; times++ {
			p := startPeer(t, false)
			db := openMarking(t, p)
			var s *sql.Stmt
			var err error
			if op.prepare != nil {
				if s, err = op.prepare(db.DB, op.sql); err != nil {
					t.Fatal(err)
				}
			}
			at := execute
			if !strings.ContainsRune(op.steps, 'E') {
				at = step(op.steps[0])
			}
			k := p.set(func(sql string, step step) bool { return sql == op.sql && step == at }, func(c *peerConn) { c.end(shutdown("ERROR")) })
			p.mu.Lock()
			k.times = times
			p.mu.Unlock()
			if err := op.run(db.DB, db.DB, op.sql, s); err != nil {
				t.Errorf("%s, %d connections: %v", op.name, times, err)
				continue
			}
			if got := p.arrivals(at, op.sql); got != times+1 {
				t.Errorf("%s, %d connections: on the wire %d times, want %d", op.name, times, got, times+1)
			}
			if s != nil {
				_ = s.Close()
			}
		}
	}
}

// What runs again has to be prepared again, and meets the next connection's end there: with a goodbye or without a word.
// That is the statement's connection's business too, not a try of database/sql's, which may be at its last.
func TestAStatementThatIsPreparedAgainMeetsTheNextEnd(t *testing.T) {
	t.Parallel()
	const sql = "SELECT c FROM t WHERE c = $1"
	for name, end := range map[string]func(c *peerConn){
		"goodbye": func(c *peerConn) { c.end(shutdown("ERROR")) }, "FIN": func(c *peerConn) { c.end() }, "RST": (*peerConn).reset,
	} {
		for how, run := range map[string]func(st *stmt) error{
			"Query": func(st *stmt) error {
				rows, err := st.QueryContext(t.Context(), []driver.NamedValue{{Ordinal: 1, Value: "a"}})
				if err == nil {
					err = rows.Close()
				}
				return err
			},
			"Exec": func(st *stmt) error {
				_, err := st.ExecContext(t.Context(), []driver.NamedValue{{Ordinal: 1, Value: "a"}})
				return err
			},
		} {
			p := startPeer(t, false)
			db := openMarking(t, p)
			dc, err := db.c.Connect(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			c := dc.(*conn)
			st, err := c.PrepareContext(t.Context(), sql)
			if err != nil {
				t.Fatal(err)
			}
			met := 0
			k := p.set(func(s string, at step) bool {
				if s != sql || (at != execute || met > 0) && (at != parse || met == 0) {
					return false
				}
				met++
				return true
			}, func(c *peerConn) {
				if p.arrivals(parse, sql) == 0 {
					c.end(shutdown("ERROR"))
				} else {
					end(c)
				}
			})
			p.mu.Lock()
			k.times = 3
			p.mu.Unlock()
			if err := run(st.(*stmt)); err != nil {
				t.Errorf("%s, %s: %v", how, name, err)
			}
			if prepared, executed := p.arrivals(parse, sql), p.arrivals(execute, sql); prepared != 3 || executed != 2 {
				t.Errorf("%s, %s: prepared again %d times, executed %d, want 3 and 2", how, name, prepared, executed)
			}
			if c.untouched {
				t.Errorf("%s, %s: the connection passes for untouched", how, name)
			}
			_ = c.Close()
		}
	}
}

// With crdbdrain_rerun=off nothing is run again, and the application sees the server's error.
func TestRerunOff(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	db := openMarking(t, p, "crdbdrain_rerun=off")
	const insert = "INSERT INTO t VALUES (1)"
	k := p.set(func(sql string, _ step) bool { return sql == insert }, func(c *peerConn) { c.end(shutdown("ERROR")) })
	_, err := db.Exec(insert)
	k.wait(t, "INSERT")
	if sqlState(err) != "57P01" || errors.Is(err, driver.ErrBadConn) || p.arrivals(query, insert) != 1 {
		t.Errorf("%v, on the wire %d times; want 57P01 and once", err, p.arrivals(query, insert))
	}
}

// A 57P01 with another text (a proxy's idle timeout, an administrator) says nothing about a drain: nothing is run again,
// no node is marked.
func TestOtherShutdownsAreNotRunAgain(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	db := openMarking(t, p)
	const insert = "INSERT INTO t VALUES (1)"
	for _, e := range []*pgproto3.ErrorResponse{
		{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P01", Message: "terminating connection due to administrator command"},
		{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P01", Message: "terminating connection due to idle timeout"},
		{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "08006", Message: "server is shutting down"},
	} {
		k := p.set(func(sql string, _ step) bool { return sql == insert }, func(c *peerConn) { c.end(e) })
		_, err := db.Exec(insert)
		k.wait(t, e.Message)
		if sqlState(err) != e.Code || errors.Is(err, driver.ErrBadConn) || p.arrivals(query, insert) != 1 {
			t.Errorf("%s %q: %v, on the wire %d times; want %s and once", e.Code, e.Message, err, p.arrivals(query, insert), e.Code)
		}
		if db.marked(k.node) {
			t.Errorf("%s %q marks the node", e.Code, e.Message)
		}
	}
}

// A reply that pgx gives up on is a reply, even where the server's goodbye to the idle connection has come in the same
// packet: the statement was executed, and is not sent again.
func TestGoodbyeBehindAReplyThatPgxRefuses(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	db := openWith(t, p.dsn("default_query_exec_mode=simple_protocol"), func(cc *pgconn.Config) { cc.MaxProtocolMessageBodyLen = 1000 })
	if err := db.Ping(); err != nil {
		t.Fatal(err)
	}
	const query1 = "SELECT long FROM t"
	k := p.set(func(sql string, _ step) bool { return sql == query1 }, func(c *peerConn) {
		c.end(oneColumn(), oneRow(strings.Repeat("x", 2000)), &pgproto3.CommandComplete{CommandTag: []byte("SELECT 1")},
			&pgproto3.ReadyForQuery{TxStatus: 'I'}, shutdown("ERROR"))
	})
	rows, err := db.Query(query1)
	err = drainRows(rows, err)
	k.wait(t, query1)
	var tooLong *pgproto3.ExceededMaxBodyLenErr
	if !errors.As(err, &tooLong) || p.arrivals(query, query1) != 1 {
		t.Errorf("%v, on the wire %d times; want the refused reply and once", err, p.arrivals(query, query1))
	}
}

// Before a request pgx closes the statements that it no longer caches. A drain that this meets is no different from one that
// the request itself meets, which has not been sent yet: pgx loses the server's notice there, and the driver does not.
func TestGoodbyeToStatementsThatPgxCloses(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	db := openMarking(t, p, "statement_cache_capacity=1")
	db.SetMaxOpenConns(1)
	for name, before := range map[string][]pgproto3.BackendMessage{"at once": nil, "after CloseComplete": {&pgproto3.CloseComplete{}}} {
		for _, pinned := range []bool{false, true} {
			sc, err := db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			const old, evicts, next = "UPDATE a SET x = $1", "UPDATE b SET x = $1", "UPDATE c SET x = $1"
			for _, sql := range []string{old, evicts} {
				if _, err := sc.ExecContext(t.Context(), sql, "1"); err != nil {
					t.Fatal(err)
				}
			}
			exec := sc.ExecContext
			if !pinned {
				exec = db.ExecContext
				_ = sc.Close()
			}
			k := p.set(func(sql string, at step) bool { return sql == old && at == closing },
				func(c *peerConn) { c.end(append(before, shutdown("ERROR"))...) })
			_, err = exec(t.Context(), next, "1")
			k.wait(t, name)
			switch {
			case !pinned && (err != nil || p.executions(next) != 1):
				t.Errorf("%s: %v, executed %d times; want no error and once", name, err, p.executions(next))
			case pinned && (sqlState(err) != "57P01" || p.executions(next) != 0):
				t.Errorf("%s, pinned: %v, executed %d times; want 57P01 and never", name, err, p.executions(next))
			}
			_ = sc.Close()
		}
	}
	off := open(t, p.dsn("statement_cache_capacity=1", "crdbdrain_rerun=off"), "")
	off.SetMaxOpenConns(1)
	for _, sql := range []string{"UPDATE a SET x = $1", "UPDATE b SET x = $1"} {
		if _, err := off.Exec(sql, "1"); err != nil {
			t.Fatal(err)
		}
	}
	k := p.set(func(_ string, at step) bool { return at == closing }, func(c *peerConn) { c.end(shutdown("ERROR")) })
	_, err := off.Exec("UPDATE c SET x = $1", "1")
	k.wait(t, "off")
	if sqlState(err) != "57P01" || errors.Is(err, driver.ErrBadConn) {
		t.Errorf("crdbdrain_rerun=off: %v, want 57P01", err)
	}
}
