package crdbdrain

import (
	"context"
	"database/sql/driver"
	"errors"
	"github.com/jackc/pgx/v5/stdlib"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// wantRefused checks the error of a connection that the ceiling refuses.
func wantRefused(t testing.TB, err error, limit string) {
	t.Helper()
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != stateTooManyConnections || errors.Is(err, driver.ErrBadConn) ||
		!strings.Contains(err.Error(), " "+limit+" connections") || !strings.Contains(err.Error(), "crdbdrain_max_connections") {
		t.Errorf("%v; want 53300, the limit of %s and its parameter", err, limit)
	}
}

// The ceiling is over all pools of the cluster in the process, counts from the dial on, and refuses at once with the
// server's own code.
func TestCeilingOverAllPools(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	m := newMeter(t)
	logs := &logTrap{}
	log := logs.logger()
	a := open(t, c.DSN(), still+"&crdbdrain_max_connections=5", WithMeterProvider(m), WithLogger(log))
	b := open(t, strings.Replace(c.DSN(), "//app", "//billing", 1), still+"&crdbdrain_max_connections=8", WithMeterProvider(m), WithLogger(log))
	fill(t, a.DB, 3)
	fill(t, b.DB, 2)
	b.SetMaxOpenConns(0)
	var held []driver.Conn
	begin := time.Now()
	dc, err := b.c.Connect(t.Context())
	wantRefused(t, err, "5") // the lower one counts
	if d := time.Since(begin); dc != nil || d > time.Second {
		t.Errorf("%v after %v", dc, d)
	}
	for range 9 {
		_, err = a.c.Connect(t.Context())
		wantRefused(t, err, "5")
	}
	if n := c.Stats().Open - dialled(c, watchdogName); n != 5 {
		t.Errorf("%d connections", n)
	}
	read := m.read(t)
	checkTable(t, read)
	if n := read["crdbdrain.connection.rejected"].total(); n != 10 {
		t.Errorf("rejected: %v", n)
	}
	if read["crdbdrain.connection.limit"].total() != 5 || read["crdbdrain.connection.limit.usage"].total() != 5 {
		t.Errorf("limit %v, usage %v", read["crdbdrain.connection.limit"], read["crdbdrain.connection.limit.usage"])
	}
	if n := logs.count("the ceiling on connections is reached", `limit="5"`); n != 1 {
		t.Errorf("%d lines:\n%s", n, logs)
	}

	// Adjusted while it is in force: raised, lowered below what there is, and taken away.
	if err := a.c.SetMaxConnections(6); err != nil {
		t.Fatal(err)
	}
	if dc, err = b.c.Connect(t.Context()); err != nil {
		t.Fatal(err)
	}
	held = append(held, dc)
	if err := b.c.SetMaxConnections(2); err != nil {
		t.Fatal(err)
	}
	_, err = a.c.Connect(t.Context())
	wantRefused(t, err, "2")
	if n := c.Stats().Open - dialled(c, watchdogName); n != 6 {
		t.Errorf("%d connections after the ceiling was lowered", n)
	}
	for range 4 { // those that there are go on
		mustExec(t, a, "UPDATE t SET x = 1")
		mustExec(t, b, "UPDATE t SET x = 1")
	}
	if err := a.c.SetMaxConnections(0); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if dc, err = a.c.Connect(t.Context()); err != nil {
			t.Fatal(err)
		}
		held = append(held, dc)
	}
	for _, n := range []int{-1, maxCeiling + 1} {
		if err := a.c.SetMaxConnections(n); err == nil {
			t.Errorf("%d is accepted", n)
		}
	}
	for _, dc := range held {
		_ = dc.Close()
	}
	l := a.c.ceiling.Load()
	_ = a.Close()
	_ = b.Close()
	if n := l.used.Load(); n != 0 {
		t.Errorf("%d places are taken after Close", n)
	}
	if ceilings.of[a.c.cfg.key] != nil {
		t.Error("the ceiling outlives its pools")
	}
}

// A connection counts from its dial on, not from its handshake: dials that hang have places.
func TestCeilingCountsDials(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	p := open(t, c.DSN(), still+"&crdbdrain_max_connections=3")
	mustExec(t, p, "UPDATE t SET x = 1")
	c.Node(1).Hang(true)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if dc, err := p.c.Connect(ctx); err == nil {
				_ = dc.Close()
				t.Error("connected to a node that hangs")
			}
		})
	}
	eventually(t, "two dials", func() bool { return p.c.dialing.Load() == 2 })
	_, err := p.c.Connect(t.Context())
	wantRefused(t, err, "3")
	cancel()
	wg.Wait()
	if n := p.c.ceiling.Load().used.Load(); n != 1 {
		t.Errorf("%d places are taken", n)
	}
	c.Node(1).Hang(false)
}

// A drain at the ceiling: a pool that has every place is moved all the same, without an error, and no place is lost or
// taken twice. The spares yield to a caller.
func TestCeilingInADrain(t *testing.T) {
	for _, conns := range []int{8, 12} { // the limit is 12
		synctest.Test(t, func(t *testing.T) {
			c, p := virtualPool(t, crdbdraintest.Config{Latency: time.Millisecond, Settings: crdbdraintest.Settings{
				InitialWait: time.Second, ConnectionsTimeout: 20 * time.Second, TransactionsTimeout: 10 * time.Second}},
				conns, "crdbdrain_max_connections=12&crdbdrain_window=20s&crdbdrain_poll_interval=1s")
			defer c.Close()
			defer p.Close()
			var most atomic.Int64
			time.Sleep(2 * time.Second)
			l := startLoad(t, p.DB, 4, 20*time.Millisecond)
			stop := make(chan struct{})
			go func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(time.Millisecond):
						if n := p.c.ceiling.Load().used.Load(); n > most.Load() {
							most.Store(n)
						}
					}
				}
			}()
			for _, n := range c.Nodes() {
				if d := n.Drain(context.Background()); d.LostIdle+d.LostBusy > 0 {
					t.Errorf("%d connections: %+v", conns, d)
				}
				n.Stop()
				n.Start()
				time.Sleep(15 * time.Second)
			}
			close(stop)
			l.stop()
			if len(l.errors) > 0 || most.Load() > 12 {
				t.Errorf("%d connections: %v; at most %d places taken", conns, l.errors, most.Load())
			}
			if s := p.c.Stats(); s.Culled == 0 || s.Lost > 0 {
				t.Errorf("%d connections: %+v", conns, s)
			}
			time.Sleep(time.Second)
			w := p.c.watchdog.Load()
			w.mu.Lock()
			open := int64(w.conns)
			w.mu.Unlock()
			if n := p.c.ceiling.Load().used.Load(); n != open {
				t.Errorf("%d connections: %d places are taken by %d", conns, n, open)
			}
		})
	}
}

// The log speaks on entering and on leaving the limited state, not for each refusal.
func TestCeilingLogsEdges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true})
		defer c.Close()
		logs := &logTrap{}
		p := memPool(t, c, still+"&crdbdrain_max_connections=2&crdbdrain_cluster=edges", func(_ *pgx.ConnConfig, con *Connector) {
			if con != nil {
				con.log = logs.logger()
			}
		})
		defer p.Close()
		connect := func() driver.Conn {
			dc, err := p.c.Connect(t.Context())
			if err != nil {
				return nil
			}
			return dc
		}
		a, b := connect(), connect()
		for range 500 {
			if connect() != nil {
				t.Fatal("a third connection")
			}
			time.Sleep(100 * time.Millisecond)
		}
		_ = a.Close()
		if n := logs.count("fit under the ceiling again"); n != 0 {
			t.Errorf("%d lines of the end, at once", n)
		}
		time.Sleep(2 * calm)
		_ = b.Close()
		if n, m := logs.count("is reached"), logs.count("fit under the ceiling again", `refused="500"`); n != 1 || m != 1 {
			t.Errorf("%d lines of the beginning, %d of the end:\n%s", n, m, logs)
		}
	})
}

// Whatever happens at once, no place is lost and none is taken twice.
func TestCeilingIsExact(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Memory: true})
	p := openMem(t, c, still+"&crdbdrain_max_connections=7")
	p.SetMaxIdleConns(2)
	w := func() *watchdog { mustExec(t, p, "UPDATE t SET x = 1"); return p.dog(t) }()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var over, refused atomic.Int64
	for range 16 {
		wg.Go(func() {
			for ctx.Err() == nil {
				if err := selectOne(p.DB)(); sqlState(err) == stateTooManyConnections {
					refused.Add(1)
				}
				if p.c.ceiling.Load().used.Load() > 7 {
					over.Add(1)
				}
			}
		})
	}
	for i := range 200 {
		w.say(nodeID(i%3 + 1))
		time.Sleep(time.Millisecond)
		w.unsay(nodeID(i%3 + 1))
		if i%10 == 0 {
			c.Node(i%3 + 1).Disconnect(crdbdraintest.Result{End: crdbdraintest.EndRST})
		}
	}
	cancel()
	wg.Wait()
	if over.Load() > 0 || refused.Load() == 0 {
		t.Errorf("%d times over, %d refused", over.Load(), refused.Load())
	}
	_ = p.Close()
	if n := p.c.ceiling.Load().used.Load(); n != 0 {
		t.Errorf("%d places are taken after Close", n)
	}
}

// A storm of connection attempts at the ceiling leaves nothing behind, and logs one line.
func TestCeilingInAStorm(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1, Memory: true})
	logs := &logTrap{}
	p := openMem(t, c, still+"&crdbdrain_max_connections=4", WithLogger(logs.logger()))
	fill(t, p.DB, 4)
	storm := func(n int64) {
		failed, err := burst(100, int(n/100), func() error {
			dc, err := p.c.Connect(context.Background())
			if err == nil {
				_ = dc.Close()
			}
			return err
		})
		if failed != n {
			t.Errorf("%d of %d attempts were refused", failed, n)
		}
		wantRefused(t, err, "4")
	}
	storm(1000)
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before, goroutines, dials := heap(), runtime.NumGoroutine(), c.Stats().Accepts
	storm(10_000)
	if grown := heap() - before; grown > 256<<10 {
		t.Errorf("the heap has grown by %d KiB", grown>>10)
	}
	if n := runtime.NumGoroutine() - goroutines; n > 2 {
		t.Errorf("%d more goroutines", n)
	}
	if n := c.Stats().Accepts - dials; n != 0 {
		t.Errorf("%d dials", n)
	}
	if n := logs.count("is reached"); n != 1 {
		t.Errorf("%d lines", n)
	}
}

// A hook of the application that panics, and is recovered from, takes no place with it.
func TestCeilingSurvivesAPanic(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	var boom atomic.Bool
	p := open(t, c.DSN(), still+"&crdbdrain_max_connections=3", WithStdlibOptions(stdlib.OptionBeforeConnect(func(context.Context, *pgx.ConnConfig) error {
		if boom.Load() {
			panic("boom")
		}
		return nil
	})))
	mustExec(t, p, "UPDATE t SET x = 1")
	boom.Store(true)
	func() {
		defer func() { _ = recover() }()
		_, _ = p.c.Connect(t.Context())
	}()
	if n := p.c.ceiling.Load().used.Load(); n != 1 {
		t.Errorf("%d places are taken by one connection", n)
	}
}

// With a pool its limit goes, and with the last one the gauges: what is dialled afterwards does not bring them back.
func TestCeilingAfterClose(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	m := newMeter(t)
	a := open(t, c.DSN(), still+"&crdbdrain_max_connections=2", WithMeterProvider(m))
	b := open(t, strings.Replace(c.DSN(), "//app", "//billing", 1), still+"&crdbdrain_max_connections=8", WithMeterProvider(m))
	mustExec(t, a, "UPDATE t SET x = 1")
	mustExec(t, b, "UPDATE t SET x = 1")
	_ = a.Close()
	if n := b.c.ceiling.Load().limit.Load(); n != 8 {
		t.Errorf("the limit is %d without the pool that had 2", n)
	}
	_ = b.Close()
	dc, err := b.c.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = dc.Close()
	if err := b.c.SetMaxConnections(9); !errors.Is(err, errClosed) {
		t.Errorf("SetMaxConnections after Close: %v", err)
	}
	in := b.c.instruments()
	in.mu.Lock()
	defer in.mu.Unlock()
	if n := len(in.ceilings); n != 0 {
		t.Errorf("%d ceilings are reported", n)
	}
}

// Where the ceiling has room for one spare of two, the one is kept: it is not given up for the dial of the other, again and
// again. And a spare that does not fit is no refusal.
func TestCeilingLeavesSparesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, p := virtualPool(t, crdbdraintest.Config{Latency: time.Millisecond, Settings: crdbdraintest.Settings{InitialWait: time.Hour}},
			11, "crdbdrain_max_connections=12&crdbdrain_poll_interval=1s")
		defer c.Close()
		defer p.Close()
		tx, err := p.BeginTx(t.Context(), nil) // its node keeps a connection, so spares are wanted
		if err != nil {
			t.Fatal(err)
		}
		node := 0
		for _, n := range c.Nodes() {
			if n.Stats().Open > 0 && p.busyOn(nodeID(n.ID())) {
				node = n.ID()
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		drained := make(chan struct{})
		go func() { defer close(drained); c.Node(node).Drain(ctx) }()
		time.Sleep(15 * time.Second)
		if n := p.c.spares.count.Load(); n != 1 {
			t.Errorf("%d spares, want the one that fits", n)
		}
		before := c.Stats().Accepts
		time.Sleep(10 * time.Second)
		if n := c.Stats().Accepts - before; n > 1 {
			t.Errorf("%d dials in 10 s in which nothing happened", n)
		}
		if n := p.c.ceiling.Load().rejected.Load(); n != 0 {
			t.Errorf("%d refusals, and nobody was refused", n)
		}
		_ = tx.Rollback()
		cancel()
		<-drained
	})
}

// busyOn reports whether a connection to the node is in use.
func (p *pool) busyOn(id nodeID) bool {
	w := p.c.watchdog.Load()
	w.mu.Lock()
	defer w.mu.Unlock()
	for s := range w.nodeOf(id).held {
		if s.state.Load() == sessionInUse {
			return true
		}
	}
	return false
}

// Connections that the server has ended, of a pool that has no load, do not keep the ceiling from another pool's callers.
func TestDeadConnectionsFillTheCeiling(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	const params = "crdbdrain_sources=errors&crdbdrain_max_connections=8&crdbdrain_cluster=dead"
	quiet, busy := open(t, c.DSN(), params), open(t, c.DSN(), params)
	fill(t, quiet.DB, 8)
	for _, n := range c.Nodes() { // without a window
		n.Drain(t.Context())
		n.Stop()
		n.Start()
		eventually(t, "the load balancer sees the node", func() bool { return c.LoadBalancer().Up(n.ID()) })
	}
	var one int
	eventually(t, "a caller gets a place", func() bool { return busy.QueryRow("SELECT 1").Scan(&one) == nil })
	if s := quiet.c.Stats(); s.Lost == 0 {
		t.Errorf("%+v", s)
	}
}
