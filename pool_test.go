package crdbdrain

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/goleak"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// still keeps the watchdog from polling while a test marks nodes by hand, and from dialling spares.
const still = "crdbdrain_sources=errors&crdbdrain_poll_interval=1h&crdbdrain_spares=0"

// raceDetector says whether the tests run under it; bounds on time mean nothing then.
var raceDetector = func() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}()

// within waits until a condition holds, and fails after d.
func within(t testing.TB, d time.Duration, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(d); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", d, what)
		}
	}
}

// onlyFor fails unless a condition holds all the time for d.
func onlyFor(t testing.TB, d time.Duration, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(d); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if !holds() {
			t.Fatalf("no longer: %s", what)
		}
	}
}

// dog is the watchdog of the pool's cluster, with the stamps' rule taken as verified, as its first poll would.
func (p *pool) dog(t testing.TB) *watchdog {
	t.Helper()
	w := p.c.watchdog.Load()
	if w == nil {
		t.Fatal("the pool has no connection to CockroachDB")
	}
	w.rule.CompareAndSwap(ruleUnknown, ruleHolds)
	return w
}

// say marks nodes by hand, as a manual source does.
func (w *watchdog) say(ids ...nodeID) {
	for _, id := range ids {
		t := time.Now()
		w.note(id, sourceManual, notice{since: t, heard: t, before: t})
	}
}

// unsay takes such marks back.
func (w *watchdog) unsay(ids ...nodeID) {
	w.mu.Lock()
	for _, id := range ids {
		if said := w.notices[id]; said != nil {
			said[sourceManual] = nil
		}
	}
	events := w.remark(time.Now())
	w.mu.Unlock()
	w.tell(events)
}

// drainFor begins a drain that leaves connections alone until the test ends.
func drainFor(t testing.TB, c *crdbdraintest.Cluster, n *crdbdraintest.Node) {
	c.SetSettings(crdbdraintest.Settings{InitialWait: time.Hour})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { n.Drain(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
}

// openOn opens a pool whose first connections all go to the nodes in the order given, the first that takes them.
func openOn(t testing.TB, c *crdbdraintest.Cluster, params string, opts ...Option) *pool {
	t.Helper()
	return open(t, c.DSNAll(), "crdbdrain_host_order=listed&"+params, opts...)
}

// refuge makes the pool know node 2, by a connection that node 1 would not take.
func (p *pool) refuge(t testing.TB, c *crdbdraintest.Cluster) {
	t.Helper()
	c.Node(1).SetFaults(crdbdraintest.Faults{Refuse: &pgconn.PgError{Code: "57P03", Message: "the server is starting up"}})
	defer c.Node(1).SetFaults(crdbdraintest.Faults{})
	dc, err := p.c.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer dc.Close()
	if id := dc.(*conn).s.id; id != 2 {
		t.Fatalf("a connection to node %d", id)
	}
}

// openMem opens a pool on a cluster without sockets. Such clusters share their addresses, so each gets a name.
func openMem(t testing.TB, c *crdbdraintest.Cluster, params string, opts ...Option) *pool {
	t.Helper()
	cc, err := pgx.ParseConfig(c.DSNAll() + "&" + params + fmt.Sprintf("&crdbdrain_cluster=%p", c))
	if err != nil {
		t.Fatal(err)
	}
	cc.DialFunc = c.Dial
	con, err := NewConnector(cc, opts...)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(con)
	t.Cleanup(func() { _ = db.Close() })
	return &pool{db, con}
}

func startCluster(t testing.TB, cfg crdbdraintest.Config) *crdbdraintest.Cluster {
	t.Helper()
	c := crdbdraintest.Start(cfg)
	t.Cleanup(c.Close)
	return c
}

// burst makes calls from many workers at once and returns how many failed, and one of the errors.
func burst(workers, calls int, call func() error) (failed int64, sample error) {
	var wg sync.WaitGroup
	var bad atomic.Int64
	var one atomic.Pointer[error]
	for range workers {
		wg.Go(func() {
			for range calls {
				if err := call(); err != nil {
					bad.Add(1)
					one.Store(&err)
				}
			}
		})
	}
	wg.Wait()
	if e := one.Load(); e != nil {
		sample = *e
	}
	return bad.Load(), sample
}

func selectOne(db *sql.DB) func() error {
	return func() error {
		var one int
		return db.QueryRowContext(context.Background(), "SELECT 1").Scan(&one)
	}
}

func mustExec(t testing.TB, db interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}, query string) {
	t.Helper()
	if _, err := db.ExecContext(context.Background(), query); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// drvConnector is a driver of nothing, for the mechanics of database/sql: every connection is always to be culled, at one
// of the two places.
type drvConnector struct {
	atReset, atReturn bool
	opened            atomic.Int64
}

func (d *drvConnector) Connect(context.Context) (driver.Conn, error) {
	d.opened.Add(1)
	return &drvConn{d: d}, nil
}
func (d *drvConnector) Driver() driver.Driver { return theDriver }

type drvConn struct{ d *drvConnector }

func (c *drvConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("unused") }
func (c *drvConn) Close() error                        { return nil }
func (c *drvConn) Begin() (driver.Tx, error)           { return nil, errors.New("unused") }
func (c *drvConn) IsValid() bool                       { return !c.d.atReturn }
func (c *drvConn) ResetSession(context.Context) error {
	if c.d.atReset {
		return driver.ErrBadConn
	}
	return nil
}

func (c *drvConn) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	time.Sleep(100 * time.Microsecond)
	return driver.RowsAffected(1), nil
}

// B01, B02: a cull at checkout uses up database/sql's tries, a cull at return does not. The driver culls at return, and at
// checkout only what has been idle for a while, so no ErrBadConn reaches a caller, not even when every replacement lands
// on the marked node.
func TestB01NoBadConnReachesACaller(t *testing.T) {
	for _, tt := range []struct {
		name     string
		d        *drvConnector
		surfaces bool
	}{
		{"culled in ResetSession", &drvConnector{atReset: true}, true},
		{"culled in IsValid", &drvConnector{atReturn: true}, false},
	} {
		db := sql.OpenDB(tt.d)
		db.SetMaxOpenConns(4)
		failed, err := burst(64, 20, func() error {
			_, err := db.ExecContext(context.Background(), "x")
			return err
		})
		db.Close()
		t.Logf("%s: %d of 1280 calls got %v", tt.name, failed, err)
		if got := errors.Is(err, driver.ErrBadConn); got != tt.surfaces {
			t.Errorf("%s: %d of 1280 calls failed with %v; want driver.ErrBadConn to surface: %v", tt.name, failed, err, tt.surfaces)
		}
	}

	c := startCluster(t, crdbdraintest.Config{Latency: 100 * time.Microsecond})
	p := open(t, c.DSN(), still+"&crdbdrain_cull_stagger=0")
	fill(t, p.DB, 4)
	w := p.dog(t)
	c.LoadBalancer().SetSticky(1) // every replacement lands on node 1
	w.say(1)
	failed, err := burst(64, 20, selectOne(p.DB))
	if failed > 0 {
		t.Errorf("%d of 1280 calls failed: %v", failed, err)
	}
	if s := p.c.Stats(); s.Culled == 0 {
		t.Error("nothing was culled: the test shows nothing")
	}
	// A replacement that lands on the marked node again is kept, or culls and dials would never end.
	if accepts := c.Node(1).Stats().Accepts; accepts > 4+2*4*(1+maxSteer) {
		t.Errorf("node 1 accepted %d connections for a pool of 4", accepts)
	}
}

// B02: with every connection's node marked in turn and no pacing, 0 of 1280 calls fail.
func TestB02CullAtReturnCostsNoCall(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Latency: 200 * time.Microsecond})
	p := open(t, c.DSN(), still+"&crdbdrain_cull_stagger=0")
	fill(t, p.DB, 4)
	w := p.dog(t)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for id := nodeID(1); ctx.Err() == nil; id = id%3 + 1 {
			w.say(id)
			time.Sleep(3 * time.Millisecond) // lets the load run
			w.unsay(id)
		}
	})
	failed, err := burst(64, 20, selectOne(p.DB))
	cancel()
	wg.Wait()
	s := p.c.Stats()
	if failed > 0 {
		t.Errorf("%d of 1280 calls failed: %v", failed, err)
	}
	if s.Culled < 4 || s.Lost > 0 {
		t.Errorf("culled %d, lost %d; want some culled, none lost", s.Culled, s.Lost)
	}
}

// hiding is a connector whose connections show only some of the optional interfaces, as old wrappers of drivers do.
type hiding struct {
	*Connector
	wrap func(driver.Conn) driver.Conn
}

func (h hiding) Connect(ctx context.Context) (driver.Conn, error) {
	dc, err := h.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return h.wrap(dc), nil
}

type resetOnly struct {
	driver.Conn
	driver.SessionResetter
}

func hideIsValid(dc driver.Conn) driver.Conn {
	return resetOnly{dc, dc.(driver.SessionResetter)}
}

func hideBoth(dc driver.Conn) driver.Conn { return struct{ driver.Conn }{dc} }

func (p *pool) hidden(t testing.TB, wrap func(driver.Conn) driver.Conn) *pool {
	t.Helper()
	db := sql.OpenDB(hiding{p.c, wrap})
	t.Cleanup(func() { _ = db.Close() })
	return &pool{db, p.c}
}

// B03: one caller culls at most two connections: database/sql tries two of the pool and then a new one. Every cull is
// counted, and none is made without a token.
func TestB03OneCallerCullsAtMostTwo(t *testing.T) {
	same := func(dc driver.Conn) driver.Conn { return dc }
	for _, tt := range []struct {
		name, stagger string
		wrap          func(driver.Conn) driver.Conn
		culls         int64
	}{
		{"no pacing", "0", same, 2},
		{"one token", "24h", same, 1}, // the second connection is put off, and used
		// The connection may have come straight from another caller: it is replaced in place.
		{"no pacing, IsValid hidden", "0", hideIsValid, 1},
		{"one token, IsValid hidden", "24h", hideIsValid, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := startCluster(t, crdbdraintest.Config{Nodes: 2})
			p := openOn(t, c, still+"&crdbdrain_window=24h&crdbdrain_cull_stagger="+tt.stagger).hidden(t, tt.wrap)
			fill(t, p.DB, 10)
			p.refuge(t, c)
			w := p.dog(t)
			w.stopWorker() // or its sweep would cull as well
			time.Sleep(sweepIdle)
			dials := c.Node(2).Stats().Accepts
			w.say(1)
			mustExec(t, p, "UPDATE t SET x = 1")
			s := p.c.Stats()
			dials = c.Node(2).Stats().Accepts - dials
			left := c.Node(1).Stats().Open
			if s.Culled != tt.culls || s.Lost != 0 || dials > 1 {
				t.Errorf("%+v, %d dials; want %d culled, at most 1 dial", s, dials, tt.culls)
			}
			within(t, time.Second, "the culled connections closed, and no other", func() bool {
				left = c.Node(1).Stats().Open
				return left == 10-int(s.Culled)
			})
		})
	}
}

// stopWorker ends the watchdog's goroutine for the rest of the test.
func (w *watchdog) stopWorker() {
	w.mu.Lock()
	stop, done := w.stop, w.done
	w.mu.Unlock()
	stop()
	<-done
}

// B04: with no traffic at all the sweep closes what idles on a marked node, at the pace, sending nothing but Terminate
// (F11); then the pool works on as if nothing had been.
func TestB04IdleConnectionsLeaveWithoutTraffic(t *testing.T) {
	t.Parallel()
	const stagger = 40 * time.Millisecond
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	c.Grant("app", "VIEWSYSTEMTABLE")
	p := openOn(t, c, "crdbdrain_sources=instances&crdbdrain_spares=0&crdbdrain_poll_interval=100ms&crdbdrain_window=1h&crdbdrain_cull_stagger=40ms")
	fill(t, p.DB, 10)
	p.refuge(t, c)
	drainFor(t, c, c.Node(1))

	var ends []time.Time
	begin, last := time.Now(), int64(0)
	within(t, 10*stagger+5*time.Second, "every idle connection of node 1 culled", func() bool {
		for n := p.c.Stats().Culled; last < n; last++ {
			ends = append(ends, time.Now())
		}
		return last == 10
	})
	t.Logf("10 culls in %v", time.Since(begin))
	for i := 2; i < len(ends); i++ {
		if d := ends[i].Sub(ends[i-2]); d < stagger { // two gaps, read off by polling
			t.Errorf("culls %d to %d came within %v at a pace of %v", i-1, i+1, d, stagger)
		}
	}
	within(t, time.Second, "the server has seen them close", func() bool { return c.Node(1).Stats().Open <= 1 }) // the watchdog's may be there
	if failed, err := burst(64, 20, selectOne(p.DB)); failed > 0 {
		t.Errorf("afterwards %d of 1280 calls failed: %v", failed, err)
	}
	if s := p.c.Stats(); s.Culled != 10 || s.Lost != 0 {
		t.Errorf("%+v, want 10 culled", s)
	}
	if n := c.Stats().CancelRequests; n != 0 {
		t.Errorf("culls sent %d CancelRequests", n)
	}
}

// B04: a connection that database/sql dialled for a caller who was served otherwise is put into the pool without a call of
// IsValid, and handed out later without ResetSession. The sweep finds it all the same, and its first user notices nothing.
func TestB04ConnectionsThatNobodyHasUsedLeaveToo(t *testing.T) {
	for _, use := range []struct {
		name string
		do   func(*pool) error
	}{
		{"a statement", func(p *pool) error { return selectOne(p.DB)() }},
		{"a transaction", func(p *pool) error {
			tx, err := p.Begin()
			if err != nil {
				return err
			}
			return tx.Commit()
		}},
		{"a prepared statement", func(p *pool) error {
			st, err := p.Prepare("UPDATE t SET x = $1")
			if err != nil {
				return err
			}
			_, err = st.Exec(1)
			return errors.Join(err, st.Close())
		}},
		{"a ping", func(p *pool) error { return p.PingContext(context.Background()) }},
		{"pgx's own connection", func(p *pool) error {
			conn, err := p.Conn(context.Background())
			if err != nil {
				return err
			}
			defer conn.Close()
			return conn.Raw(func(dc any) error {
				_, err := dc.(interface{ Conn() *pgx.Conn }).Conn().Exec(context.Background(), "UPDATE t SET x = 1")
				return err
			})
		}},
		{"no use", func(p *pool) error {
			conn, err := p.Conn(context.Background())
			if err != nil {
				return err
			}
			return conn.Close()
		}},
	} {
		t.Run(use.name, func(t *testing.T) {
			c := startCluster(t, crdbdraintest.Config{Nodes: 2})
			p := openOn(t, c, still+"&crdbdrain_cull_stagger=0")
			p.refugeAndNeverUsed(t, c)
			w := p.dog(t)
			w.unsay(1) // it is back
			w.say(2)
			within(t, 5*time.Second, "the sweep of a connection that nobody has used", func() bool { return p.c.Stats().Culled == 2 })
			within(t, time.Second, "the connection closed", func() bool { return c.Node(2).Stats().Open == 0 })
			if err := use.do(p); err != nil {
				t.Error(err)
			}
			if s := p.c.Stats(); s.Culled != 2 || s.Lost != 0 || s.Rerun != 0 {
				t.Errorf("%+v, want 2 culled", s)
			}
			mustExec(t, p, "UPDATE t SET x = 1")
		})
	}
}

// refugeAndNeverUsed leaves node 1 marked, and the pool with one connection, on node 2, that has not been used: a caller
// waits in a full pool, the connection that comes back is culled, database/sql dials another, and the caller gives up.
func (p *pool) refugeAndNeverUsed(t testing.TB, c *crdbdraintest.Cluster) {
	t.Helper()
	fill(t, p.DB, 1)
	p.refuge(t, c)
	conn, err := p.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, giveUp := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if other, err := p.Conn(ctx); err == nil {
			t.Error("the caller was served")
			_ = other.Close()
		}
	})
	within(t, 5*time.Second, "a caller waiting", func() bool { return p.DB.Stats().WaitCount == 1 })
	p.dog(t).say(1)
	c.Node(2).Hang(true) // the dial takes as long as that
	accepts := c.Node(2).Stats().Accepts
	_ = conn.Close()
	within(t, 5*time.Second, "the dial of another", func() bool { return c.Node(2).Stats().Accepts > accepts && p.c.Stats().Culled == 1 })
	giveUp()
	wg.Wait()
	c.Node(2).Hang(false)
	within(t, 5*time.Second, "the connection in the pool", func() bool { return p.DB.Stats().Idle == 1 && c.Node(2).Stats().Open == 1 })
}

// B07: a connection that is held is left alone, hooks or no hooks, and leaves when it is given back.
func TestB07PinnedConnectionLeavesAtItsReturn(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	p := openOn(t, c, still)
	pinned, err := p.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p.refuge(t, c)
	w := p.dog(t)
	w.say(1)
	for range 100 {
		mustExec(t, pinned, "UPDATE t SET x = 1")
		w.pokeSweep()
	}
	onlyFor(t, 2*sweepIdle, "nothing culled while the connection is held", func() bool { return p.c.Stats() == (Stats{}) })
	if n := c.Node(1).Stats().Statements["UPDATE t SET x = 1"]; n != 100 {
		t.Errorf("node 1 saw %d of 100 statements", n)
	}
	pinned.Close()
	if s := p.c.Stats(); s.Culled != 1 {
		t.Errorf("%+v after its return, want 1 culled", s)
	}
	within(t, time.Second, "the connection closed", func() bool { return c.Node(1).Stats().Open == 0 })
}

// A11: nothing breaks a transaction on a marked node; its connection leaves after COMMIT.
func TestA11TransactionOnAMarkedNodeCommits(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	p := openOn(t, c, still+"&crdbdrain_cull_stagger=0")
	tx, err := p.Begin()
	if err != nil {
		t.Fatal(err)
	}
	p.refuge(t, c)
	w := p.dog(t)
	w.say(1)
	for range 3 {
		mustExec(t, tx, "UPDATE t SET x = 1")
		w.pokeSweep()
	}
	onlyFor(t, 2*sweepIdle, "nothing culled inside the transaction", func() bool { return p.c.Stats().Culled == 0 })
	if err := tx.Commit(); err != nil {
		t.Fatalf("COMMIT: %v", err)
	}
	if s := p.c.Stats(); s.Culled != 1 || s.Lost != 0 || s.Rerun != 0 {
		t.Errorf("%+v after COMMIT, want 1 culled", s)
	}
	s := c.Node(1).Stats()
	if s.Statements["UPDATE t SET x = 1"] != 3 || s.Statements["commit"] != 1 {
		t.Errorf("node 1 executed %v", s.Statements)
	}
}

// A replacement that waits for the session it is to replace, which is in use, does not hold up a drain of its own node.
func TestReplacementInHandLeavesAMarkedNode(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	p := openOn(t, c, still)
	pinned, err := p.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer pinned.Close()
	mustExec(t, pinned, "UPDATE t SET x = 1")
	w := p.dog(t)
	var victim *session
	_ = pinned.Raw(func(dc any) error { victim = dc.(*conn).s; return nil })
	r, err := p.c.connect(t.Context(), nil, false)
	if err != nil {
		t.Fatal(err)
	}
	// As if it were on node 2.
	r.reserve.Store(true)
	w.remove(r)
	r.id = 2
	w.add(r, &attempt{})
	if !victim.replaceWith(r, reasonRebalance) {
		t.Fatal("not taken")
	}
	w.mu.Lock()
	w.pending = append(w.pending, pending{victim, time.Now()})
	w.mu.Unlock()
	w.say(2)
	within(t, 3*time.Second, "the replacement closed", func() bool { return c.Node(1).Stats().Open == 1 })
	mustExec(t, pinned, "UPDATE t SET x = 1")
	if s := p.c.Stats(); s.Culled+s.Lost != 0 {
		t.Errorf("%+v", s)
	}
}

// H12: a pool of one with callers waiting: one cull at the return, and the callers get the replacement.
func TestH12PoolOfOne(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 2, Latency: 2 * time.Millisecond})
	p := openOn(t, c, still+"&crdbdrain_cull_stagger=0")
	fill(t, p.DB, 1)
	p.refuge(t, c)
	w, dials := p.dog(t), c.Node(2).Stats().Accepts
	started, release := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		conn, err := p.Conn(context.Background())
		if err != nil {
			t.Error(err)
			close(started)
			return
		}
		close(started)
		<-release
		_ = conn.Close()
	})
	<-started
	var failed int64
	var err error
	wg.Go(func() { failed, err = burst(16, 4, selectOne(p.DB)) })
	within(t, 5*time.Second, "16 callers waiting", func() bool { return p.DB.Stats().WaitCount >= 16 })
	w.say(1)
	close(release)
	wg.Wait()
	if failed > 0 {
		t.Errorf("%d of 64 calls failed: %v", failed, err)
	}
	if s := p.c.Stats(); s.Culled != 1 {
		t.Errorf("%+v, want 1 culled", s)
	}
	if n := c.Node(2).Stats().Accepts - dials; n != 1 {
		t.Errorf("%d dials to node 2, want 1", n)
	}
}

// B10, G07: every connection of a marked node ends exactly once, as one cull, whichever of the three places takes it.
func TestB10EveryConnectionIsCountedOnce(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Memory: true})
	p := openMem(t, c, still+"&crdbdrain_cull_stagger=0")
	fill(t, p.DB, 1000)
	w := p.dog(t)
	before := c.Node(1).Stats().Open + c.Node(2).Stats().Open
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for ctx.Err() == nil {
				conns := make([]*sql.Conn, 8)
				for i := range conns {
					conn, err := p.Conn(context.Background())
					if err != nil {
						t.Errorf("checkout: %v", err)
						continue
					}
					conns[i] = conn
				}
				for _, conn := range conns {
					if conn != nil {
						_ = conn.Close()
					}
				}
			}
		})
	}
	w.say(1, 2)
	within(t, 30*time.Second, "no connection left on nodes 1 and 2", func() bool {
		return c.Node(1).Stats().Open+c.Node(2).Stats().Open == 0
	})
	cancel()
	wg.Wait()
	s := p.c.Stats()
	ended := c.Node(1).Stats().Accepts + c.Node(2).Stats().Accepts - int(s.Steered)
	if s.Culled != int64(ended) || s.Culled < int64(before) || s.Lost != 0 || s.Throttled != 0 {
		t.Errorf("%+v; nodes 1 and 2 held %d connections before, and %d ended", s, before, ended)
	}
	if n := c.Stats().CancelRequests; n != 0 {
		t.Errorf("%d CancelRequests", n)
	}
	w.mu.Lock()
	held := len(w.nodes[1].held) + len(w.nodes[2].held)
	conns := w.conns
	w.mu.Unlock()
	if open := c.Node(3).Stats().Open; held != 0 || conns != open {
		t.Errorf("the watchdog holds %d connections, %d of them on nodes 1 and 2; node 3 has %d", conns, held, open)
	}
}

// B10, B15, F09: one token, one cull. Decisions for the same moment from many goroutines spend one; those put off stay
// eligible, and a decision that culls nothing spends nothing.
func TestB10TokensEqualCulls(t *testing.T) {
	p, w, conns := paperPool(t, "crdbdrain_cull_stagger=500ms&crdbdrain_window=24h", 200, 1, 2)
	w.say(1)
	m := w.marks.Load()
	at := time.Now().Add(24 * time.Hour) // a long calm saves up nothing
	for tick := range 50 {
		var culled atomic.Int64
		var wg sync.WaitGroup
		for part := range 4 {
			wg.Go(func() {
				for i := part; i < len(conns); i += 4 {
					switch w.cull(conns[i], m, at, pointReturn) {
					case gone:
						culled.Add(1)
						w.remove(conns[i])
					case keep:
						if conns[i].id == 1 && conns[i].state.Load() != sessionGone {
							t.Error("a connection on the marked node is kept")
						}
					}
				}
			})
		}
		wg.Wait()
		if n := culled.Load(); n != 1 {
			t.Fatalf("tick %d: %d culls for one token", tick, n)
		}
		at = at.Add(501 * time.Millisecond)
	}
	s := p.c.Stats()
	if s.Culled != 50 || s.Lost != 0 {
		t.Errorf("%+v, want 50 culled", s)
	}
	for _, c := range conns {
		if c.id == 2 && c.ended.Load() {
			t.Error("a connection on an unmarked node was culled")
		}
	}
}

// Hooks read the clock before they ask for a token, and may be stopped in between. Readings that come out of order make no
// tokens.
func TestB10StaleReadingsMakeNoTokens(t *testing.T) {
	var p pace
	const gap = 500 * time.Millisecond
	start := time.Now()
	n := 0
	for i := range 100 {
		for _, at := range []time.Time{start, start.Add(time.Duration(i) * time.Millisecond)} {
			if _, ok := p.take(at, gap); ok {
				n++
			}
		}
	}
	if n != 1 {
		t.Errorf("%d tokens within 100 ms at one per %v", n, gap)
	}
}

// paperPool is a connector and its watchdog with connections that exist on paper only, in turn on the nodes given.
func paperPool(t testing.TB, params string, n int, nodes ...nodeID) (*pool, *watchdog, []*session) {
	t.Helper()
	cc, err := pgx.ParseConfig("postgres://app@127.0.0.1:1/d?crdbdrain_poll_interval=24h&crdbdrain_sources=errors&crdbdrain_spares=0&" + params)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewConnector(cc)
	if err != nil {
		t.Fatal(err)
	}
	w := &watchdog{
		log: c.log, members: []*Connector{c}, stop: func() {},
		wake: make(chan struct{}, 1), wakes: make(chan struct{}, 1),
		nodes:   make(map[nodeID]*nodeInfo),
		notices: make(map[nodeID]*[numSources]*notice),
		drains:  make(map[nodeID]*drain),
		cleared: make(map[nodeID]int64),
	}
	w.cfg.Store(c.cfg)
	w.rule.Store(ruleHolds)
	conns := make([]*session, n)
	for i := range conns {
		conns[i] = paperConn(c, w, nodes[i%len(nodes)])
	}
	return &pool{nil, c}, w, conns
}

func paperConn(c *Connector, w *watchdog, id nodeID) *session {
	s := &session{connector: c, w: w, link: &link{}, id: id, opened: time.Now()}
	w.add(s, &attempt{})
	return s
}

// B11: a hook waits for nothing: with 500 goroutines giving back connections of a marked node against a pace that lets
// almost none go, 99 % of the calls of IsValid take less than 50 µs, and a change of the marks does not stall.
func TestB11HooksDoNotWait(t *testing.T) {
	cl := startCluster(t, crdbdraintest.Config{Nodes: 2, Memory: true})
	p := openMem(t, cl, still+"&crdbdrain_host_order=listed&crdbdrain_cull_stagger=500ms&crdbdrain_window=24h")
	p.DB.SetMaxIdleConns(1)
	mustExec(t, p, "UPDATE t SET x = 1")
	p.refuge(t, cl)
	w := p.dog(t)
	conns := make([]*conn, 500)
	for i := range conns {
		dc, err := p.c.Connect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = dc.(*conn)
		defer dc.Close()
	}
	w.say(1)
	// Each call is timed by itself; what the scheduler does to 500 goroutines between two calls is not the hook's.
	const rounds = 40
	took := make([][]time.Duration, len(conns))
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i, c := range conns {
		wg.Go(func() {
			<-start
			for range rounds {
				t0 := time.Now()
				kept := c.IsValid()
				took[i] = append(took[i], time.Since(t0))
				if !kept {
					return
				}
				c.s.state.CompareAndSwap(sessionIdle, sessionInUse)
			}
		})
	}
	var slowest time.Duration
	changes := 0
	stop := make(chan struct{})
	var changer sync.WaitGroup
	changer.Go(func() {
		<-start
		for {
			select {
			case <-stop:
				return
			default:
			}
			t0 := time.Now()
			w.say(3)
			w.unsay(3)
			slowest = max(slowest, time.Since(t0))
			changes++
			time.Sleep(time.Millisecond) // lets the others run
		}
	})
	close(start)
	wg.Wait()
	close(stop)
	changer.Wait()
	all := slices.Concat(took...)
	slices.Sort(all)
	p99 := all[len(all)*99/100]
	t.Logf("%d calls of IsValid: median %v, p99 %v, max %v; %d changes of the marks, slowest %v; %+v",
		len(all), all[len(all)/2], p99, all[len(all)-1], changes, slowest, p.c.Stats())
	if !raceDetector && p99 > 50*time.Microsecond {
		t.Errorf("99 %% of the calls of IsValid take up to %v, want less than 50µs", p99)
	}
	if slowest > 500*time.Millisecond {
		t.Errorf("a change of the marks took %v under load", slowest)
	}
	if s := p.c.Stats(); s.Throttled == 0 || s.Culled > 3 {
		t.Errorf("%+v, want most put off", s)
	}
}

// B14: prepared statements outlive the culls of the connections that hold them. Closing one, which reaches into idle
// connections, does not meet the sweep on the same connection.
func TestB14PreparedStatementsOutliveCulls(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Latency: 200 * time.Microsecond})
	p := open(t, c.DSN(), still+"&crdbdrain_cull_stagger=0")
	fill(t, p.DB, 12)
	w := p.dog(t)
	stmt, err := p.Prepare("UPDATE t SET x = $1")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for id := nodeID(1); ctx.Err() == nil; id = id%3 + 1 {
			w.say(id)
			time.Sleep(5 * time.Millisecond) // lets the load run
			w.unsay(id)
		}
	})
	failed, err := burst(64, 20, func() error {
		_, err := stmt.Exec(1)
		return err
	})
	cancel()
	wg.Wait()
	if failed > 0 {
		t.Errorf("%d of 1280 calls failed: %v", failed, err)
	}
	s := c.Stats()
	if n := s.Statements["UPDATE t SET x = $1"]; n != 1280 {
		t.Errorf("executed %d times instead of 1280", n)
	}
	if culled := p.c.Stats().Culled; culled == 0 || s.Parses["UPDATE t SET x = $1"] < 2 {
		t.Errorf("%d culls, %d Parse messages: the test shows nothing", culled, s.Parses["UPDATE t SET x = $1"])
	}

	// Statements are closed on idle connections while the sweep takes the same ones.
	for round := range 5 {
		stmts := make([]*sql.Stmt, 20)
		for i := range stmts {
			if stmts[i], err = p.Prepare(fmt.Sprintf("UPDATE t%d SET x = $1", i)); err != nil {
				t.Fatal(err)
			}
			if failed, err := burst(8, 1, func() error { _, err := stmts[i].Exec(1); return err }); failed > 0 {
				t.Fatal(err)
			}
		}
		within(t, 5*time.Second, "idle connections old enough for the sweep", func() bool { return idleFor(w, sweepIdle) >= 3 })
		before := p.c.Stats().Culled
		id := nodeID(round%3 + 1)
		w.say(id)
		for _, s := range stmts {
			wg.Go(func() {
				if err := s.Close(); err != nil {
					t.Errorf("close of a statement: %v", err)
				}
			})
		}
		wg.Wait()
		within(t, 5*time.Second, "the node's connections swept", func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return len(w.nodes[id].held) == 0 && p.c.Stats().Culled >= before
		})
		w.unsay(id)
		mustExec(t, p, "UPDATE t SET x = 1")
	}
	if err := stmt.Close(); err != nil {
		t.Error(err)
	}
}

// idleFor counts the idle connections that were last used longer ago than d.
func idleFor(w *watchdog, d time.Duration) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, node := range w.nodes {
		for c := range node.held {
			if c.state.Load() == sessionIdle && now()-c.idled.Load() > int64(d) {
				n++
			}
		}
	}
	return n
}

// B16: what the pool closes by itself (MaxIdleConns, ConnMaxLifetime) is no cull, on a marked node or not, and spends no
// token.
func TestB16ThePoolsOwnClosesAreNoCulls(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	p := openOn(t, c, still+"&crdbdrain_cull_stagger=24h&crdbdrain_window=24h")
	holdMany := func() {
		conns := make([]*sql.Conn, 20)
		for i := range conns {
			conn, err := p.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			conns[i] = conn
		}
		for _, conn := range conns {
			conn.Close()
		}
	}
	holdMany() // keeps 2 and closes 18
	if s := p.c.Stats(); s != (Stats{}) {
		t.Errorf("without a mark: %+v", s)
	}
	p.refuge(t, c)
	p.dog(t).say(1)
	p.SetMaxIdleConns(0) // closes the other 2
	if s := p.c.Stats(); s.Culled > 0 || s.Lost > 0 {
		t.Errorf("the pool's close of idle connections on a marked node: %+v", s)
	}
	p.dog(t).unsay(1)
	p.SetMaxIdleConns(2)
	holdMany()
	p.dog(t).say(1)
	p.SetConnMaxLifetime(time.Nanosecond)
	for range 3 {
		mustExec(t, p, "UPDATE t SET x = 1")
	}
	within(t, 5*time.Second, "connections past their lifetime closed", func() bool { return c.Node(1).Stats().Open == 0 })
	s, st := p.c.Stats(), p.DB.Stats()
	if st.MaxIdleClosed == 0 || st.MaxLifetimeClosed == 0 {
		t.Errorf("%+v: the test shows nothing", st)
	}
	if s.Culled > 1 || s.Lost > 0 { // the bucket has one token for a day
		t.Errorf("%+v with a token a day", s)
	}
}

// B19: an application's connection carries the application's statements, and nothing of the driver's.
func TestB19OnlyTheApplicationsStatements(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := make(map[string]int)
	c := startCluster(t, crdbdraintest.Config{Handler: func(q crdbdraintest.Query) *crdbdraintest.Result {
		if q.ApplicationName != "crdbdrain-watchdog" {
			mu.Lock()
			defer mu.Unlock()
			seen[q.SQL]++
		}
		return nil
	}})
	c.Grant("app", "VIEWSYSTEMTABLE")
	p := open(t, c.DSN(), "crdbdrain_unsafe_internals=on&crdbdrain_poll_interval=100ms&crdbdrain_cull_stagger=5ms&crdbdrain_readiness="+c.ReadinessURLs())
	fill(t, p.DB, 9)
	l := startLoad(t, p.DB, 4, time.Millisecond)
	drainFor(t, c, c.Node(1))
	within(t, 10*time.Second, "node 1's connections culled", func() bool { return p.c.Stats().Culled >= 2 })
	l.stop()
	if len(l.errors) > 0 {
		t.Error(l.errors)
	}
	mu.Lock()
	defer mu.Unlock()
	for sql, n := range seen {
		switch sql {
		case "SELECT 1", "begin", "commit", "rollback", "UPDATE accounts SET balance = balance + 1 WHERE id = $1":
		case "-- ping": // pgx's own, of connections that were idle for a second or never reset
		default:
			t.Errorf("%q was sent %d times", sql, n)
		}
	}
}

// F02: Close twice, and with a connection in use: it goes on working, and is closed when it is given back.
func TestF02CloseWithAConnectionInUse(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	p := openOn(t, c, still+"&crdbdrain_cull_stagger=0")
	fill(t, p.DB, 5)
	conn, err := p.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p.refuge(t, c)
	w := p.dog(t)
	for range 2 {
		if err := p.DB.Close(); err != nil {
			t.Error(err)
		}
		if err := p.c.Close(); err != nil {
			t.Error(err)
		}
	}
	mustExec(t, conn, "UPDATE t SET x = 1")
	w.say(1) // a late notice finds nobody
	mustExec(t, conn, "UPDATE t SET x = 1")
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	within(t, time.Second, "every connection closed", func() bool { return c.Stats().Open == 0 })
	if err := conn.PingContext(t.Context()); !errors.Is(err, sql.ErrConnDone) {
		t.Errorf("%v after Close", err)
	}
	// A connector that is closed still dials, without a watchdog's life behind it.
	dc, err := p.c.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if v, ok := dc.(driver.Validator); !ok || !v.IsValid() {
		t.Error("not valid")
	}
	if err := dc.(driver.SessionResetter).ResetSession(t.Context()); err != nil {
		t.Error(err)
	}
	if err := dc.Close(); err != nil {
		t.Error(err)
	}
}

// Connector.Close waits for the connections that are being closed in the background, and does not take long.
func TestCloseWaitsForBackgroundCloses(t *testing.T) {
	before := goleak.IgnoreCurrent()
	c := crdbdraintest.Start(crdbdraintest.Config{Nodes: 2})
	defer func() {
		c.Close()
		goleak.VerifyNone(t, before)
	}()
	p := openOn(t, c, still+"&crdbdrain_cull_stagger=0")
	fill(t, p.DB, 30)
	p.refuge(t, c)
	within(t, 5*time.Second, "30 idle connections", func() bool { return idleFor(p.dog(t), sweepIdle) == 30 })
	c.Node(1).Hang(true) // it reads no Terminate
	p.dog(t).say(1)
	within(t, 5*time.Second, "30 culls", func() bool { return p.c.Stats().Culled == 30 })
	start := time.Now()
	if err := p.DB.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("Close took %v", took)
	}
	c.Node(1).Hang(false)
	within(t, time.Second, "the server has seen them close", func() bool { return c.Node(1).Stats().Open == 0 })
}

// F10: marks that come and go, stamps, statistics and hooks do not race.
func TestF10MarksAndHooksDoNotRace(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Memory: true})
	p := openMem(t, c, still+"&crdbdrain_cull_stagger=1ms")
	fill(t, p.DB, 30)
	w := p.dog(t)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 7))
			for ctx.Err() == nil {
				id := nodeID(r.IntN(4) + 1)
				w.say(id)
				w.pokeSweep()
				p.c.Stats()
				w.markedHosts()
				w.unsay(id)
			}
		})
	}
	failed, err := burst(100, 20, selectOne(p.DB))
	cancel()
	wg.Wait()
	if failed > 0 {
		t.Errorf("%d of 2000 calls failed: %v", failed, err)
	}
}

// E01: where a wrapper hides IsValid, connections are culled at checkout, at the pace.
func TestE01WrapperThatHidesIsValid(t *testing.T) {
	const stagger = 20 * time.Millisecond
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	p := openOn(t, c, still+"&crdbdrain_cull_stagger=20ms&crdbdrain_window=24h").hidden(t, hideIsValid)
	fill(t, p.DB, 10)
	p.refuge(t, c)
	start := time.Now()
	p.dog(t).say(1)
	l := startLoad(t, p.DB, 4, time.Millisecond)
	within(t, 10*stagger+10*time.Second, "node 1's connections in use culled", func() bool { return p.c.Stats().Culled >= 4 })
	took := time.Since(start)
	l.stop()
	s := p.c.Stats()
	if most := int64(took/stagger) + 1; s.Culled > most+1 {
		t.Errorf("%d culls in %v at a pace of %v", s.Culled, took, stagger)
	}
	if len(l.errors) > 0 {
		t.Error(l.errors)
	}
}

// E01: where a wrapper hides both hooks, the driver cannot tell when a connection is idle, and culls nothing.
func TestE01WrapperThatHidesBothHooks(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	p := openOn(t, c, still+"&crdbdrain_cull_stagger=0").hidden(t, hideBoth)
	p.SetMaxIdleConns(10)
	var held [10]*sql.Conn
	for i := range held {
		conn, err := p.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		mustExec(t, conn, "UPDATE t SET x = 1") // from the first use on
		held[i] = conn
	}
	for _, conn := range held {
		_ = conn.Close()
	}
	p.refuge(t, c)
	p.dog(t).say(1)
	failed, err := burst(8, 20, selectOne(p.DB))
	if failed > 0 {
		t.Errorf("%d of 160 calls failed: %v", failed, err)
	}
	onlyFor(t, 2*sweepIdle, "nothing culled", func() bool { return p.c.Stats().Culled == 0 })
	if n := c.Node(1).Stats().Open; n != 10 {
		t.Errorf("%d connections on node 1, want 10", n)
	}
}

// H01: 200 connections of one node, all busy: their replacements are dialled at the pace of the culls.
func TestH01NoStampede(t *testing.T) {
	t.Parallel()
	const stagger = 20 * time.Millisecond
	c := startCluster(t, crdbdraintest.Config{Nodes: 2, Latency: time.Millisecond})
	p := openOn(t, c, still+"&crdbdrain_cull_stagger=20ms&crdbdrain_window=24h")
	fill(t, p.DB, 200)
	p.refuge(t, c)
	w := p.dog(t)
	l := startLoad(t, p.DB, 64, 0)
	w.say(1)
	within(t, 200*stagger+20*time.Second, "every connection left node 1", func() bool { return c.Node(1).Stats().Open == 0 })
	l.stop()
	if len(l.errors) > 0 {
		t.Error(l.errors)
	}
	dials := c.Node(2).Stats().Dials[1:] // the first was the refuge's
	const window = 500 * time.Millisecond
	most, limit := 0, int(window/stagger)+1+5 // a dial is up to a few gaps later than its cull
	for i, j := 0, 0; j < len(dials); j++ {
		for dials[j].Sub(dials[i]) > window {
			i++
		}
		most = max(most, j-i+1)
	}
	s := p.c.Stats()
	t.Logf("%d dials to node 2, at most %d in any %v; %+v", len(dials), most, window, s)
	if most > limit {
		t.Errorf("%d dials within %v at a pace of %v, want at most %d", most, window, stagger, limit)
	}
	if s.Culled != 200 || s.Lost != 0 {
		t.Errorf("%+v, want 200 culled", s)
	}
}

// lying makes a node's system.sql_instances say that nodes 1 to n of 3 drain.
func lying(c *crdbdraintest.Cluster, n int) {
	for _, node := range c.Nodes() {
		node.SetFaults(crdbdraintest.Faults{Source: func(table string) *crdbdraintest.Result {
			if table != "system.sql_instances" {
				return nil
			}
			r := &crdbdraintest.Result{Columns: []string{"id", "is_draining"}}
			for id := 1; id <= 3; id++ {
				r.Rows = append(r.Rows, []any{int64(id), id <= n})
			}
			return r
		}})
	}
}

// I05: a source that says every node drains empties nothing; one that spares a single node moves the pool at the pace.
func TestI05OneBadReadingDoesNotEmptyThePool(t *testing.T) {
	t.Parallel()
	const stagger = 200 * time.Millisecond
	c := startCluster(t, crdbdraintest.Config{})
	c.Grant("app", "VIEWSYSTEMTABLE")
	var log lockedBuffer
	p := open(t, c.DSN(), "crdbdrain_sources=instances&crdbdrain_spares=0&crdbdrain_poll_interval=100ms&crdbdrain_window=24h&crdbdrain_cull_stagger=200ms", WithLogger(log.logger()))
	fill(t, p.DB, 12)
	l := startLoad(t, p.DB, 4, time.Millisecond)
	lying(c, 3)
	within(t, 5*time.Second, "all three nodes marked", func() bool {
		m := p.c.watchdog.Load().marks.Load()
		return m != nil && len(m.of) == 3
	})
	onlyFor(t, 600*time.Millisecond, "nothing culled", func() bool { return p.c.Stats().Culled == 0 })
	if n := bytes.Count(log.bytes(), []byte("nothing is culled")); n != 1 {
		t.Errorf("said %d times that there is nowhere to go, want once:\n%s", n, log.bytes())
	}

	lying(c, 2)
	start := time.Now()
	within(t, 10*time.Second, "a few culls", func() bool { return p.c.Stats().Culled >= 4 })
	if took := time.Since(start); took < 3*stagger {
		t.Errorf("4 culls within %v at a pace of %v", took, stagger)
	}
	l.stop()
	if len(l.errors) > 0 {
		t.Error(l.errors)
	}
}

// observe: nothing is culled, and each connection that would be is counted once.
func TestObserveCountsEachConnectionOnce(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	p := openOn(t, c, still+"&crdbdrain_mode=observe&crdbdrain_cull_stagger=0")
	fill(t, p.DB, 20)
	p.refuge(t, c)
	p.dog(t).say(1)
	l := startLoad(t, p.DB, 8, 0)
	within(t, 10*time.Second, "20 would-be culls", func() bool { return p.c.Stats().Observed == 20 })
	onlyFor(t, 3*sweepIdle, "20 would-be culls", func() bool { return p.c.Stats().Observed == 20 })
	l.stop()
	s := p.c.Stats()
	if s.Culled != 0 || s.Lost != 0 || len(l.errors) > 0 {
		t.Errorf("%+v, errors %v", s, l.errors)
	}
	if open := c.Node(1).Stats().Open; open != 20 {
		t.Errorf("%d of 20 connections are still on node 1", open)
	}
}

// Several pools on one cluster share a watchdog: one connection of its own, one poll an interval.
func TestPoolsShareAWatchdog(t *testing.T) {
	t.Parallel()
	const interval = 200 * time.Millisecond
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	c.Grant("app", "VIEWSYSTEMTABLE")
	pools := make([]*pool, 5)
	for i := range pools {
		pools[i] = open(t, c.DSN(), "crdbdrain_sources=instances&crdbdrain_spares=0&crdbdrain_poll_interval=200ms&crdbdrain_cull_stagger=0")
		fill(t, pools[i].DB, 4)
	}
	w := pools[0].c.watchdog.Load()
	for _, p := range pools {
		if p.c.watchdog.Load() != w {
			t.Fatal("the pools do not share a watchdog")
		}
	}
	polls := func() int { return c.Stats().Statements[sqlInstances] }
	within(t, 5*time.Second, "the first poll", func() bool { return polls() > 0 })
	start, first := time.Now(), polls()
	within(t, 10*time.Second, "ten polls", func() bool { return polls() >= first+10 })
	if took := time.Since(start); took < 10*interval*8/10-interval {
		t.Errorf("10 polls in %v at an interval of %v", took, interval)
	}
	own := 0
	for _, params := range c.Stats().Startups {
		if params["application_name"] == "crdbdrain-watchdog" {
			own++
		}
	}
	if own != 1 {
		t.Errorf("%d connections of the watchdog's own, want 1", own)
	}
	// A drain moves all of them, and each counts its own.
	drainFor(t, c, c.Node(1))
	within(t, 10*time.Second, "every pool has left node 1", func() bool {
		for _, p := range pools {
			if p.c.Stats().Culled == 0 {
				return false
			}
		}
		return c.Node(1).Stats().Open == 0
	})
	for _, p := range pools[1:] {
		_ = p.DB.Close()
	}
	first = polls()
	within(t, 5*time.Second, "polls go on for the last pool", func() bool { return polls() > first })
	_ = pools[0].DB.Close()
	if n := registry.count(w); n != 0 {
		t.Error("the watchdog outlives its last pool")
	}
}

// count says how often the registry has a watchdog.
func (r *watchdogs) count(w *watchdog) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, other := range r.of {
		if other == w {
			n++
		}
	}
	return n
}

// FuzzCulls runs random marks, uses, returns, sweeps and dials in made-up time against the rules: no more than one cull in
// a gap, none without a node to go to, none of a connection in use but at its own return, none twice, none of an unmarked
// node.
func FuzzCulls(f *testing.F) {
	f.Add([]byte{0, 1, 40, 80, 120, 160, 200, 240, 3, 7, 11})
	f.Add(bytes.Repeat([]byte{0, 9, 130, 77, 201, 5, 64, 255}, 40))
	r := rand.New(rand.NewPCG(1, 2))
	for range 8 {
		b := make([]byte, 400)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, ops []byte) {
		const stagger, nodes = 100 * time.Millisecond, 4
		p, w, conns := paperPool(t, "crdbdrain_cull_stagger=100ms&crdbdrain_window=24h", 12, 1, 2, 3, 4)
		at := time.Now()
		var lastCull time.Time
		culls := int64(0)
		marked := func(id nodeID) bool { m := w.marks.Load(); return m != nil && m.of[id] != nil }
		for i, op := range ops {
			c := conns[i%len(conns)]
			arg := nodeID(op>>3)%nodes + 1
			state := c.state.Load()
			try := func(point cullPoint) {
				m := w.marks.Load()
				if m == nil {
					return
				}
				v := w.cull(c, m, at, point)
				if v != gone {
					if c.state.Load() != state {
						t.Fatalf("verdict %d changed the state from %d to %d", v, state, c.state.Load())
					}
					return
				}
				culls++
				switch {
				case !marked(c.id):
					t.Fatalf("culled on node %d, which is not marked", c.id)
				case len(m.of) == nodes:
					t.Fatal("culled with every node marked")
				case state == sessionGone:
					t.Fatal("culled twice")
				case point == pointSweep && state != sessionIdle:
					t.Fatal("swept in use")
				case !c.opened.Before(m.of[c.id].before):
					t.Fatal("culled a connection younger than its node's mark")
				case !lastCull.IsZero() && at.Sub(lastCull) < stagger-time.Millisecond:
					t.Fatalf("two culls within %v", at.Sub(lastCull))
				}
				lastCull = at
				w.remove(c)
			}
			switch op & 7 {
			case 0:
				w.say(arg)
			case 1:
				w.unsay(arg)
			case 2, 3:
				if state == sessionInUse {
					if try(pointReturn); c.state.Load() == sessionInUse {
						c.state.Store(sessionIdle)
					}
				}
			case 4:
				if state == sessionIdle {
					c.state.Store(sessionInUse)
					state = sessionInUse
					try(pointCheckout)
				}
			case 5:
				try(pointSweep)
			case 6:
				at = at.Add(time.Duration(op) * time.Millisecond)
			case 7:
				if state == sessionGone {
					conns[i%len(conns)] = paperConn(p.c, w, arg)
				}
			}
		}
		if s := p.c.Stats(); s.Culled != culls || s.Lost != 0 {
			t.Fatalf("%+v for %d culls", s, culls)
		}
		held := 0
		for _, n := range w.nodes {
			held += len(n.held)
			if int(n.count.Load()) != len(n.held) {
				t.Fatalf("node %d counts %d of %d connections", n.id, n.count.Load(), len(n.held))
			}
		}
		living := 0
		for _, c := range conns {
			if c.state.Load() != sessionGone {
				living++
			}
		}
		if held != living || w.conns != living {
			t.Fatalf("%d held, %d counted, %d living", held, w.conns, living)
		}
	})
}

// E01: a wrapper that hides both hooks is told of once; connections that the pool asks about are not taken for such.
func TestE01HiddenHooksAreToldOfOnce(t *testing.T) {
	for _, tt := range []struct {
		name string
		wrap func(driver.Conn) driver.Conn
		want int
	}{
		{"both hidden", hideBoth, 1},
		{"IsValid hidden", hideIsValid, 0},
		{"nothing hidden", func(dc driver.Conn) driver.Conn { return dc }, 0},
	} {
		c := startCluster(t, crdbdraintest.Config{Nodes: 1})
		logs := new(logTrap)
		p := openOn(t, c, still, WithLogger(logs.logger())).hidden(t, tt.wrap)
		for range 2 {
			p.SetMaxOpenConns(1)
			for range manyUses {
				mustExec(t, p, "UPDATE t SET x = 1")
			}
			p.SetMaxIdleConns(0) // closes it
			p.SetMaxIdleConns(1)
		}
		_ = p.Close()
		if n := logs.count("hides driver.Validator"); n != tt.want {
			t.Errorf("%s: %d lines say so, want %d:\n%s", tt.name, n, tt.want, logs)
		}
	}
}
