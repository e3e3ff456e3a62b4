package crdbdrain

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

const insertOne = "INSERT INTO t VALUES (1)"

// idleEnds are the ways in which a server ends an idle connection.
var idleEnds = []struct {
	name  string
	words bool
	do    func(c *peerConn, done func())
}{
	{"goodbye and FIN", true, sayGoodbye},
	{"goodbye and RST", true, sayGoodbyeAndReset},
	{"FIN", false, closeQuietly},
	{"RST", false, resetQuietly},
}

// TestA04A05A06 ends an idle connection in every way, and uses it again before and after the second from which on pgx
// pings. The checkout sees it, whatever the statement: the application sees no error, and nothing is sent twice.
// Plain pgx: "unexpected EOF" after less than a second.
func TestA04A05A06(t *testing.T) {
	t.Parallel()
	needPeek(t)
	for _, withTLS := range []bool{false, true} {
		for _, idle := range []time.Duration{50 * time.Millisecond, 1200 * time.Millisecond} {
			for _, end := range idleEnds {
				t.Run(fmt.Sprintf("tls=%v/%v/%s", withTLS, idle, end.name), func(t *testing.T) {
					t.Parallel()
					p := startPeer(t, withTLS)
					db := openMarking(t, p)
					for _, op := range operations {
						if op.prepare != nil {
							continue
						}
						if err := op.run(db.DB, db.DB, op.sql, nil); err != nil {
							t.Fatal(err)
						}
						p.set(func(string, step) bool { return false }, nil)
						lost := db.c.Stats().Lost
						nodes := p.endIdle(end.do)
						if len(nodes) != 1 {
							t.Fatalf("%d idle connections, want 1", len(nodes))
						}
						time.Sleep(idle) // the case is about this time
						if err := op.run(db.DB, db.DB, op.sql, nil); err != nil {
							t.Errorf("%s: %v", op.name, err)
						}
						if got := p.arrivals(step(op.steps[0]), op.sql); op.steps == "Q" && got != 1 {
							t.Errorf("%s: on the wire %d times, want 1", op.name, got)
						}
						if db.marked(nodes[0]) != end.words {
							t.Errorf("%s: node marked: %v, want %v", op.name, db.marked(nodes[0]), end.words)
						}
						if got := db.c.Stats().Lost - lost; (got == 1) != end.words {
							t.Errorf("%s: %d lost", op.name, got)
						}
						if idle > time.Second {
							break // one is enough at this price
						}
					}
				})
			}
		}
	}
}

// hidden is a connection whose descriptor cannot be looked at, as on platforms without the look.
type hidden struct{ net.Conn }

// Where the socket cannot be looked at, the request meets the ended connection. It is run again where the server has said
// goodbye or the kernel took none of it; a FIN alone leaves it open whether it was executed.
func TestA05WithoutALook(t *testing.T) {
	t.Parallel()
	for _, end := range idleEnds {
		for _, op := range operations {
			if op.prepare != nil {
				continue
			}
			p := startPeer(t, false)
			var mu sync.Mutex
			var real []net.Conn
			db := openWith(t, p.dsn(), func(cc *pgconn.Config) {
				cc.AfterNetConnect = func(_ context.Context, _ *pgconn.Config, nc net.Conn) (net.Conn, error) {
					mu.Lock()
					defer mu.Unlock()
					real = append(real, nc)
					return hidden{nc}, nil
				}
			})
			for range 2 { // at its first checkout pgx pings a connection
				if err := op.run(db.DB, db.DB, op.sql, nil); err != nil {
					t.Fatal(err)
				}
			}
			p.set(func(string, step) bool { return false }, nil)
			p.endIdle(end.do)
			if canPeek { // until the end has come through the kernel
				mu.Lock()
				look := newPeeker(real[0])
				mu.Unlock()
				eventually(t, "the end arrives", func() bool { return look.peek() != peekQuiet })
			}
			err := op.run(db.DB, db.DB, op.sql, nil)
			if wantErr := end.name == "FIN" && !op.again; (err != nil) != wantErr {
				t.Errorf("%s, %s: %v, want an error: %v (%d dials, %d arrivals)", op.name, end.name, err, wantErr, p.dials(), p.arrivals(step(op.steps[0]), op.sql))
			}
			if errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%s, %s: %v is driver.ErrBadConn", op.name, end.name, err)
			}
			if got := db.c.Stats().Lost; (got == 1) != end.words {
				t.Errorf("%s, %s: %d lost; were the last words heard?", op.name, end.name, got)
			}
		}
	}
}

// Inside a transaction too the server's words are read, although the statement could not be written: the application
// sees 57P01, and not a broken pipe or database/sql's "driver: bad connection".
func TestLastWordsBehindAFailedWrite(t *testing.T) {
	t.Parallel()
	needPeek(t)
	for _, withTLS := range []bool{false, true} {
		p := startPeer(t, withTLS)
		var real net.Conn
		db := openWith(t, p.dsn(), func(cc *pgconn.Config) {
			cc.AfterNetConnect = func(_ context.Context, _ *pgconn.Config, nc net.Conn) (net.Conn, error) {
				real = cmp.Or(real, nc)
				return nc, nil
			}
		})
		tx, err := db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		p.endIdle(sayGoodbyeAndReset)
		eventuallySees(t, newPeeker(real), peekPending) // the words; on loopback the reset comes with them
		_, err = tx.Exec(insertOne)
		if sqlState(err) != "57P01" || errors.Is(err, driver.ErrBadConn) {
			t.Errorf("tls=%v: %v, want 57P01", withTLS, err)
		}
		_ = tx.Rollback()
	}
}

// corked holds back what is written until it is let go.
type corked struct {
	net.Conn
	held *bytes.Buffer
}

func (c *corked) Write(p []byte) (int, error) {
	if c.held != nil {
		return c.held.Write(p)
	}
	return c.Conn.Write(p)
}

// Under TLS the goodbye can have been read from the socket, as a record of its own behind the answer's, without having
// been decrypted. It is heard all the same when the connection is given up, and marks the node.
func TestGoodbyeInTLSsBuffer(t *testing.T) {
	t.Parallel()
	needPeek(t)
	p := startPeer(t, true)
	db := openMarking(t, p)
	k := p.set(func(sql string, _ step) bool { return sql == insertOne }, func(c *peerConn) {
		// All that is to be sent is put together first, and then arrives as one.
		var records bytes.Buffer
		c.held.held = &records
		c.be.Send(doneMessage)
		c.be.Send(readyMessage)
		_ = c.be.Flush()
		c.be.Send(shutdown("ERROR"))
		_ = c.be.Flush()
		c.held.held = nil
		_, _ = c.raw.Write(records.Bytes())
		_ = c.raw.(*net.TCPConn).CloseWrite()
		c.awaitClose()
	})
	if _, err := db.Exec(insertOne); err != nil {
		t.Fatal(err)
	}
	if err := db.Ping(); err != nil {
		t.Fatal(err)
	}
	k.wait(t, insertOne)
	if !db.marked(k.node) || db.c.Stats().Lost != 1 {
		t.Errorf("node marked: %v, %d lost; want the mark and 1", db.marked(k.node), db.c.Stats().Lost)
	}
}

// A server that does not say that it is CockroachDB gets plain pgx: no statement is run again.
func TestNothingIsRunAgainOnOtherServers(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	p.version = ""
	db := open(t, p.dsn(), "")
	if err := db.Ping(); err != nil {
		t.Fatal(err)
	}
	k := p.set(func(sql string, _ step) bool { return sql == insertOne }, func(c *peerConn) { c.end(shutdown("ERROR")) })
	_, err := db.Exec(insertOne)
	k.wait(t, insertOne)
	if sqlState(err) != "57P01" || errors.Is(err, driver.ErrBadConn) || p.arrivals(query, insertOne) != 1 {
		t.Errorf("%v, on the wire %d times; want 57P01 and once", err, p.arrivals(query, insertOne))
	}
	if db.c.watchdog.Load() != nil {
		t.Error("a watchdog runs")
	}
}

// A pinned connection's first statement is run again on another session; a later one is not, for the session's state may
// be missed: the application sees the server's error.
func TestPinnedConnections(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	db := openMarking(t, p)
	for first := range 2 {
		c, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if first == 1 {
			if _, err := c.ExecContext(t.Context(), "SET x = 1"); err != nil {
				t.Fatal(err)
			}
		}
		k := p.set(func(sql string, _ step) bool { return sql == insertOne }, func(c *peerConn) { c.end(shutdown("ERROR")) })
		_, err = c.ExecContext(t.Context(), insertOne)
		k.wait(t, insertOne)
		if first == 0 && (err != nil || p.arrivals(query, insertOne) != 2) {
			t.Errorf("the first statement: %v, on the wire %d times; want no error and 2", err, p.arrivals(query, insertOne))
		}
		if first == 1 && (sqlState(err) != "57P01" || p.arrivals(query, insertOne) != 1) {
			t.Errorf("a later statement: %v, on the wire %d times; want 57P01 and once", err, p.arrivals(query, insertOne))
		}
		_ = c.Close()
	}
}

// What a caller left behind does not reach the next one: a connection inside a transaction is not valid.
func TestIsValidInsideATransaction(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	db := openMarking(t, p)
	dc, err := db.c.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer dc.Close()
	c := dc.(*conn)
	tx, err := c.BeginTx(t.Context(), driver.TxOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if c.IsValid() {
		t.Error("valid inside a transaction")
	}
	if err := c.ResetSession(t.Context()); !errors.Is(err, driver.ErrBadConn) {
		t.Errorf("a checkout inside a transaction: %v, want driver.ErrBadConn", err)
	}
	if err := tx.Commit(); err != nil || !c.IsValid() {
		t.Errorf("commit: %v; valid: %v", err, c.IsValid())
	}
}

// A statement that is refused because of what it is goes back as it is, and costs no connection (E15).
func TestE15OrdinaryErrorsAreKept(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"40001", "23505", "40003", "57014"} {
		c := crdbdraintest.Start(crdbdraintest.Config{Nodes: 1, Handler: func(q crdbdraintest.Query) *crdbdraintest.Result {
			if q.SQL != insertOne {
				return nil
			}
			return &crdbdraintest.Result{Err: &pgconn.PgError{Code: code, Message: "no"}}
		}})
		db := open(t, c.DSN(), "crdbdrain_sources=errors")
		_, err := db.Exec(insertOne)
		var pgErr *pgconn.PgError
		var state interface{ SQLState() string }
		if !errors.As(err, &pgErr) || pgErr.Code != code || !errors.As(err, &state) || state.SQLState() != code {
			t.Errorf("%v, want SQLSTATE %s", err, code)
		}
		if _, err := db.Exec("INSERT INTO u VALUES (1)"); err != nil {
			t.Error(err)
		}
		if got := db.Stats().OpenConnections; got != 1 {
			t.Errorf("%d connections, want the one", got)
		}
		db.Close()
		c.Close()
	}
}

// TestA11 drains the node of a connection that is inside a transaction. Nothing breaks the transaction; its connection is
// given up when it comes back.
func TestA11(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{Settings: crdbdraintest.Settings{
		InitialWait: 2 * time.Second, ConnectionsTimeout: time.Minute, TransactionsTimeout: time.Minute}})
	defer c.Close()
	c.Grant("app", "VIEWSYSTEMTABLE")
	db := open(t, c.DSN(), "crdbdrain_sources=instances&crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_cull_stagger=1ms")
	fill(t, db.DB, 6)
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	var id int
	if err := tx.QueryRow("SHOW node_id").Scan(&id); err != nil {
		t.Fatal(err)
	}
	drained := make(chan crdbdraintest.DrainResult, 1)
	go func() { drained <- c.Node(id).Drain(context.Background()) }()
	eventually(t, "the node is marked", func() bool { return db.marked(uint32(id)) })
	eventually(t, "the idle connections have left", func() bool { return c.Node(id).Stats().Open <= 2 }) // the transaction's, and perhaps the watchdog's
	culled := db.c.Stats().Culled
	for range 3 {
		if _, err := tx.Exec("UPDATE accounts SET balance = balance + 1 WHERE id = $1", 1); err != nil {
			t.Fatalf("in the transaction: %v", err)
		}
	}
	if err := tx.Commit(); err != nil {
		t.Fatalf("COMMIT: %v", err)
	}
	eventually(t, "the transaction's connection is given up", func() bool { return db.c.Stats().Culled > culled })
	if d := <-drained; d.LostIdle+d.LostBusy != 0 {
		t.Errorf("%+v, want nothing lost", d)
	}
	if got := c.Node(id).Stats().CancelRequests; got != 0 {
		t.Errorf("%d CancelRequests, want none (F11)", got)
	}
}

// TestA19 closes 20 idle connections at once, without a warning: they are lost, none of them is culled, and no caller
// notices.
func TestA19(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	db := openMarking(t, p)
	fill(t, db.DB, 20)
	if nodes := p.endIdle(sayGoodbye); len(nodes) != 20 {
		t.Fatalf("%d idle connections, want 20", len(nodes))
	}
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			if _, err := db.Exec(insertOne); err != nil {
				t.Errorf("%v", err)
			}
		})
	}
	wg.Wait()
	eventually(t, "every one of them is counted", func() bool {
		for range 20 { // those at the bottom of the pool's stack are seen when they are used, or by the sweep
			if _, err := db.Exec(insertOne); err != nil {
				t.Errorf("%v", err)
			}
		}
		for _, c := range takeSome(t, db.DB, 20) {
			c.Close()
		}
		return db.c.Stats().Lost >= 20
	})
	if s := db.c.Stats(); s.Lost != 20 || s.Culled != 0 {
		t.Errorf("lost %d, culled %d; want 20 and none", s.Lost, s.Culled)
	}
	if got := p.executions(insertOne); got < 40 {
		t.Errorf("%d statements executed, want 40 at least", got)
	}
}

// takeSome takes n connections at the same time.
func takeSome(t testing.TB, db *sql.DB, n int) []*sql.Conn {
	t.Helper()
	conns := make([]*sql.Conn, 0, n)
	for range n {
		c, err := db.Conn(context.Background())
		if err != nil {
			t.Errorf("%v", err)
			continue
		}
		conns = append(conns, c)
	}
	return conns
}

// TestB01 has half of a small pool's connections die at once, again and again, under 64 goroutines: database/sql gives up
// after three connections that turn out to be bad, and no caller is to see that.
func TestB01(t *testing.T) {
	t.Parallel()
	for conns := 4; conns <= 9; conns++ {
		t.Run(fmt.Sprintf("%d connections", conns), func(t *testing.T) {
			t.Parallel()
			p := startPeer(t, false)
			db := openMarking(t, p)
			fill(t, db.DB, conns)
			var mu sync.Mutex
			errs := map[string]int{}
			badConns := 0
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			for i := range 64 {
				wg.Go(func() {
					for n := i; ctx.Err() == nil; n++ {
						var err error
						if n%2 == 0 {
							_, err = db.ExecContext(t.Context(), insertOne)
						} else {
							var one string
							err = db.QueryRowContext(t.Context(), "SELECT $1", "1").Scan(&one)
						}
						if err != nil {
							mu.Lock()
							errs[err.Error()]++
							if errors.Is(err, driver.ErrBadConn) {
								badConns++
							}
							mu.Unlock()
						}
					}
				})
			}
			ended := 0
			for round := 0; round < 20 || round < 200 && db.c.Stats().Lost < 20; round++ { // a loss counts once somebody has met it
				eventually(t, "the pool is full again", func() bool { return p.openNow() >= conns/2 })
				ended += len(p.endSome(func(i int) bool { return i%2 == round%2 }, sayGoodbye))
			}
			cancel()
			wg.Wait()
			if len(errs) > 0 || badConns > 0 {
				t.Errorf("%d times driver.ErrBadConn; errors: %v", badConns, errs)
			}
			if ended < 20 || db.c.Stats().Lost < 20 {
				t.Errorf("%d connections ended, %d lost: the test tests nothing", ended, db.c.Stats().Lost)
			}
		})
	}
}

// Every connection says goodbye right behind its first answer, as in a drain under load: connections are dead when they
// come back, and each costs a waiting caller a try. Nobody notices.
func TestB01ConnectionsComeBackDead(t *testing.T) {
	t.Parallel()
	for _, conns := range []int{4, 9} {
		p := startPeer(t, false)
		db := openMarking(t, p)
		fill(t, db.DB, conns)
		p.mu.Lock()
		p.lifetime = 1
		p.mu.Unlock()
		const each = 8
		var wg sync.WaitGroup
		for i := range 64 {
			wg.Go(func() {
				for n := range each {
					q := fmt.Sprintf("INSERT INTO t VALUES (%d)", i*each+n)
					if _, err := db.Exec(q); err != nil {
						t.Errorf("%d connections: %v", conns, err)
					}
					if got := p.executions(q); got != 1 {
						t.Errorf("%d connections: %s executed %d times", conns, q, got)
					}
				}
			})
		}
		wg.Wait()
		if t.Failed() {
			return
		}
	}
}

// A connection that comes straight from another caller may be the last that database/sql tries: if it has died meanwhile,
// it is replaced in place. One that was idle for longer is left to database/sql, which has tries left.
func TestDeadConnectionIsReplacedInPlace(t *testing.T) {
	t.Parallel()
	needPeek(t)
	p := startPeer(t, false)
	db := openMarking(t, p)
	dc, err := db.c.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := dc.(*conn)
	defer c.Close()
	if _, err := c.ExecContext(t.Context(), insertOne, nil); err != nil {
		t.Fatal(err)
	}
	dead := c.s
	p.endIdle(sayGoodbye)
	eventuallySees(t, dead.link.peeker, peekPending)
	if !c.IsValid() {
		t.Fatal("the goodbye has not been read yet: the connection goes back")
	}
	if err := c.ResetSession(t.Context()); err != nil || c.s == dead {
		t.Fatalf("%v; replaced: %v", err, c.s != dead)
	}
	if _, err := c.ExecContext(t.Context(), insertOne, nil); err != nil {
		t.Error(err)
	}
	if got := db.c.Stats(); got.Lost != 1 || got.Rerun != 0 {
		t.Errorf("%+v, want 1 lost and nothing run again", got)
	}
}

// A connection that the server ends between two uses is not handed out, however short the time between them was: where
// the server has said nothing, nobody could tell whether the next statement was executed.
func TestAnEndRightAfterTheReturnIsSeen(t *testing.T) {
	t.Parallel()
	needPeek(t)
	for _, end := range idleEnds {
		for _, rerun := range []string{"on", "off"} {
			p := startPeer(t, false)
			db := openMarking(t, p, "crdbdrain_rerun="+rerun)
			dc, err := db.c.Connect(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			c := dc.(*conn)
			for range 2 { // at its first checkout pgx pings a connection
				if _, err := c.ExecContext(t.Context(), insertOne, nil); err != nil || !c.IsValid() || c.ResetSession(t.Context()) != nil {
					t.Fatal(err)
				}
			}
			if !c.IsValid() {
				t.Fatal("not valid")
			}
			p.endIdle(end.do)
			eventually(t, "the end arrives", func() bool { return c.s.link.peeker.peek() != peekQuiet })
			dead := c.s
			c.s.idled.Store(now()) // it came back this very moment
			if err := c.ResetSession(t.Context()); err != nil || c.s == dead {
				t.Errorf("%s, rerun %s: %v, replaced %v", end.name, rerun, err, c.s != dead)
			}
			if _, err := c.ExecContext(t.Context(), insertOne, nil); err != nil {
				t.Errorf("%s, rerun %s: %v", end.name, rerun, err)
			}
			_ = c.Close()
		}
	}
}

// A half-open peer costs the caller at most a second, or half of its deadline if that is less, and the call succeeds
// elsewhere.
func TestPingIsBounded(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ deadline, atMost time.Duration }{
		{2 * time.Second, time.Second},
		{10 * time.Second, time.Second},
		{1200 * time.Millisecond, 600 * time.Millisecond},
	} {
		t.Run(tt.deadline.String(), func(t *testing.T) {
			t.Parallel()
			c := crdbdraintest.Start(crdbdraintest.Config{})
			defer c.Close()
			db := open(t, c.DSN(), "crdbdrain_sources=errors")
			db.SetMaxOpenConns(1)
			var id int
			if err := db.QueryRow("SHOW node_id").Scan(&id); err != nil {
				t.Fatal(err)
			}
			c.Node(id).Hang(true)
			defer c.Node(id).Hang(false)
			time.Sleep(1200 * time.Millisecond) // idle for longer than pgx leaves without a ping; the load balancer has noticed
			ctx, cancel := context.WithTimeout(t.Context(), tt.deadline)
			defer cancel()
			start := time.Now()
			if err := db.QueryRowContext(ctx, "SHOW node_id").Scan(&id); err != nil {
				t.Fatalf("%v after %v", err, time.Since(start))
			}
			if took, slack := time.Since(start), 400*time.Millisecond; took < tt.atMost-50*time.Millisecond || took > tt.atMost+slack {
				t.Errorf("the call took %v, want %v for the ping and little more", took, tt.atMost)
			}
		})
	}
}

// The server says 57P01 on a connection that nobody has used yet: the first user does not notice, and the node is marked.
func TestGoodbyeToAFreshConnection(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	db := openMarking(t, p)
	takeConns(t, db.DB, 1)
	p.mu.Lock()
	p.greet = 1
	p.mu.Unlock()
	if _, err := db.Exec(insertOne); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	node := p.greeted
	p.mu.Unlock()
	if node == 0 || !db.marked(node) {
		t.Errorf("node %d marked: %v", node, db.marked(node))
	}
}

// IsValid refuses by itself, and does not leave it to the next checkout: a connection that does not go back into the pool
// frees its place for a better one at once.
func TestIsValidRefuses(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	p := open(t, c.DSN(), still)
	take := func() *conn {
		t.Helper()
		dc, err := p.c.Connect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		cn := dc.(*conn)
		t.Cleanup(func() { _ = cn.Close() })
		if _, err := cn.ExecContext(t.Context(), "UPDATE t SET x = 1", nil); err != nil {
			t.Fatal(err)
		}
		return cn
	}
	if cn := take(); !cn.IsValid() {
		t.Error("a good one is refused")
	}
	cn := take()
	if _, err := cn.ExecContext(t.Context(), "BEGIN", nil); err != nil {
		t.Fatal(err)
	}
	if cn.IsValid() {
		t.Error("one inside a transaction goes back")
	}
	cn = take()
	cn.s.link.words.Store(goodbyeClean)
	if cn.IsValid() || p.c.Stats().Lost != 1 {
		t.Errorf("one that the server has said goodbye on goes back; %+v", p.c.Stats())
	}
	cn = take()
	_ = cn.s.pg.Close(t.Context())
	if cn.IsValid() {
		t.Error("one that is closed goes back")
	}
}
