package crdbdrain

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
	"github.com/crdbdrain/crdbdrain/internal/pgtest"
)

// attach opens a pgxpool with the driver's hooks, and n connections in it.
func attach(t testing.TB, dsn, params string, n int32, change func(*pgxpool.Config)) (*pgxpool.Pool, *Connector) {
	t.Helper()
	pc, err := pgxpool.ParseConfig(dsn + "&" + params)
	if err != nil {
		t.Fatal(err)
	}
	pc.MaxConns = n
	if change != nil {
		change(pc)
	}
	c, err := AttachPool(pc)
	if err != nil {
		t.Fatal(err)
	}
	p, err := pgxpool.NewWithConfig(t.Context(), pc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Close()
		_ = c.Close()
	})
	var held []*pgxpool.Conn
	for range n {
		conn, err := p.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
	}
	for _, conn := range held {
		conn.Release()
	}
	return p, c
}

// poolLoad runs statements and short transactions until stop is called, and counts errors by text.
func poolLoad(t testing.TB, p *pgxpool.Pool, workers int) (ops *atomic.Int64, stop func() map[string]int) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ops = &atomic.Int64{}
	var mu sync.Mutex
	errs := make(map[string]int)
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			for n := i; ctx.Err() == nil; n++ {
				if err := poolOp(p, n); err != nil {
					mu.Lock()
					errs[err.Error()]++
					mu.Unlock()
				}
				ops.Add(1)
				time.Sleep(2 * time.Millisecond)
			}
		})
	}
	var once sync.Once
	stop = func() map[string]int {
		once.Do(func() { cancel(); wg.Wait() })
		return errs
	}
	t.Cleanup(func() { stop() })
	return ops, stop
}

func poolOp(p *pgxpool.Pool, n int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if n%3 != 0 {
		var one int
		return p.QueryRow(ctx, "SELECT 1").Scan(&one)
	}
	return pgx.BeginFunc(ctx, p, func(tx pgx.Tx) error {
		for range 2 {
			if _, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance + 1 WHERE id = $1", n); err != nil {
				return err
			}
		}
		return nil
	})
}

// With a window a pgxpool leaves every node in time, through a load balancer and with several hosts, and is spread over
// the nodes again afterwards.
func TestAttachPoolRollingRestart(t *testing.T) {
	for _, several := range []bool{false, true} {
		t.Run(fmt.Sprintf("several hosts %v", several), func(t *testing.T) {
			t.Parallel()
			c := startCluster(t, crdbdraintest.Config{Latency: time.Millisecond, Settings: crdbdraintest.Settings{
				InitialWait: time.Second, ConnectionsTimeout: 4 * time.Second, TransactionsTimeout: 10 * time.Second}})
			dsn := c.DSN()
			if several {
				dsn = c.DSNAll()
			}
			p, con := attach(t, dsn, "crdbdrain_readiness="+c.ReadinessURLs()+"&crdbdrain_window=5s&crdbdrain_poll_interval=300ms&crdbdrain_poll_interval_draining=200ms", 18, nil)
			eventually(t, "the sources work", func() bool {
				w := con.watchdog.Load()
				return w.status(sourceReadiness).state == sourceOK && w.rule.Load() == ruleHolds
			})
			ops, stop := poolLoad(t, p, 8)
			for _, n := range c.Nodes() {
				if d := n.Restart(t.Context()); d.LostIdle+d.LostBusy > 0 || d.Duration > 4500*time.Millisecond {
					t.Errorf("node %d: %d idle and %d busy connections lost in %v", n.ID(), d.LostIdle, d.LostBusy, d.Duration)
				}
				eventually(t, "the load balancer has it in again", func() bool { return c.LoadBalancer().Up(n.ID()) })
				eventually(t, "its mark is gone", func() bool { return con.watchdog.Load().marks.Load() == nil })
			}
			if errs := stop(); len(errs) > 0 {
				t.Errorf("errors in %d operations: %v", ops.Load(), errs)
			}
			if s := con.Stats(); s.Culled == 0 || s.Lost > 0 {
				t.Errorf("%+v", s)
			}
			t.Logf("%d operations, %+v", ops.Load(), con.Stats())
		})
	}
}

// Without a window no connection that the server has closed is handed out. A statement that meets the notice keeps its
// SQLSTATE, where pgx has "unexpected EOF".
func TestAttachPoolUnannouncedDrain(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Settings: crdbdraintest.DefaultSettings()})
	p, con := attach(t, c.DSN(), "crdbdrain_poll_interval=1s", 18, nil)
	con.watchdog.Load().rule.CompareAndSwap(ruleUnknown, ruleHolds)
	// Idle ones: every one of the node's is closed, and nobody notices.
	c.Node(1).Drain(t.Context())
	w := con.watchdog.Load()
	eventually(t, "the load balancer has passed the ends on", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		for s := range w.nodes[1].held {
			if look := s.link.peeker.peek(); look == peekQuiet {
				return false
			}
		}
		return true
	})
	if failed, err := burst(18, 5, func() error { return poolOp(p, 1) }); failed > 0 {
		t.Errorf("%d calls failed: %v", failed, err)
	}
	if s := con.Stats(); s.Lost == 0 {
		t.Errorf("%+v: nothing was lost, the test shows nothing", s)
	}
	c.Node(1).Stop()
	c.Node(1).Start()
	eventually(t, "the load balancer has it in again", func() bool { return c.LoadBalancer().Up(1) })
	_, stop := poolLoad(t, p, 16)
	time.Sleep(50 * time.Millisecond)
	c.Node(2).Drain(t.Context())
	time.Sleep(50 * time.Millisecond)
	for text := range stop() {
		if !strings.Contains(text, "57P01") {
			t.Errorf("%q", text)
		}
	}
}

// Fresh connections that land on a marked node are given up for others, a bounded number of times.
func TestAttachPoolSteers(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	p, con := attach(t, c.DSN(), still+"&crdbdrain_cull_stagger=1ms", 6, nil)
	w := con.watchdog.Load()
	w.rule.CompareAndSwap(ruleUnknown, ruleHolds)
	w.say(1)
	for range 60 {
		if err := poolOp(p, 1); err != nil {
			t.Error(err)
		}
		time.Sleep(3 * time.Millisecond)
	}
	eventually(t, "node 1 is empty", func() bool { return c.Node(1).Stats().Open == 0 })
	c.LoadBalancer().SetSticky(1)
	before := c.Node(1).Stats().Accepts
	p.Reset()
	for range 60 {
		if err := poolOp(p, 1); err != nil {
			t.Error(err)
		}
	}
	if n := c.Node(1).Stats().Accepts - before; n > 2*(maxSteer+1)+6 {
		t.Errorf("%d dials to a node that the load balancer sticks to", n)
	}
}

// A pool's session past its TTL, and one that is too many where it is, are given up at the pace.
func TestAttachPoolMoves(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	p, con := attach(t, c.DSN(), "crdbdrain_sources=errors&crdbdrain_ttl=1s&crdbdrain_ttl_stagger=50ms", 6, nil)
	eventually(t, "all are replaced", func() bool {
		if err := poolOp(p, 3); err != nil {
			t.Error(err)
		}
		return con.Stats().Moved >= 6
	})
	if s := con.Stats(); s.Culled+s.Lost > 0 {
		t.Errorf("%+v", s)
	}

	c = startCluster(t, crdbdraintest.Config{Nodes: 2})
	p, con = attach(t, c.DSNAll(), "crdbdrain_sources=errors&crdbdrain_cull_stagger=20ms", 12, nil)
	w := con.watchdog.Load()
	w.rule.CompareAndSwap(ruleUnknown, ruleHolds)
	w.say(1)
	_, stop := poolLoad(t, p, 12)
	eventually(t, "node 1 is empty", func() bool { return c.Node(1).Stats().Open == 0 })
	w.unsay(1)
	eventually(t, "both have their share", func() bool {
		a, b := c.Node(1).Stats().Open, c.Node(2).Stats().Open
		return a >= 2 && b >= 2 && max(a, b) <= 2*min(a, b)
	})
	if errs := stop(); len(errs) > 0 {
		t.Error(errs)
	}
}

// The config's own hooks are called, and decide as they did.
func TestAttachPoolKeepsHooks(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	var calls [6]atomic.Int64
	refuse := errors.New("not today")
	var deny atomic.Bool
	p, con := attach(t, c.DSN(), still, 3, func(pc *pgxpool.Config) {
		pc.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { calls[0].Add(1); return nil }
		pc.AfterConnect = func(context.Context, *pgx.Conn) error { calls[1].Add(1); return nil }
		pc.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
			calls[2].Add(1)
			if deny.Load() {
				return true, refuse
			}
			return true, nil
		}
		pc.AfterRelease = func(*pgx.Conn) bool { calls[3].Add(1); return !deny.Load() }
		pc.BeforeClose = func(*pgx.Conn) { calls[4].Add(1) }
		pc.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { calls[5].Add(1); return false }
	})
	if err := poolOp(p, 1); err != nil {
		t.Fatal(err)
	}
	deny.Store(true)
	if err := poolOp(p, 1); !errors.Is(err, refuse) {
		t.Errorf("%v", err)
	}
	deny.Store(false)
	p.Reset()
	eventually(t, "the connections are closed", func() bool { return c.Stats().Open == 0 })
	for i := range calls {
		if calls[i].Load() == 0 {
			t.Errorf("hook %d was not called", i)
		}
	}
	w := con.watchdog.Load()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.conns != 0 {
		t.Errorf("the watchdog has %d connections", w.conns)
	}
}

func TestAttachPoolRefuses(t *testing.T) {
	for params, want := range map[string]string{
		"crdbdrain_max_connections=5": "MaxConns",
		"crdbdrain_mod=on":            "unknown key",
	} {
		pc, err := pgxpool.ParseConfig("postgres://u:hunter2@h/d?" + params)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := AttachPool(pc); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", params, err)
		}
	}
}

// On PostgreSQL, and with crdbdrain_mode=off, it is a pgxpool.
func TestAttachPoolOnPostgres(t *testing.T) {
	dsn := pgtest.Start(t).DSN()
	sep := "?"
	if strings.Contains(dsn, "?") {
		sep = "&"
	}
	for _, mode := range []string{"on", "off"} {
		p, con := attach(t, dsn+sep+"application_name=attached", "crdbdrain_mode="+mode, 4, nil)
		if err := pgx.BeginFunc(t.Context(), p, func(tx pgx.Tx) error {
			var n int
			return tx.QueryRow(t.Context(), "SELECT 40 + $1::int", 2).Scan(&n)
		}); err != nil {
			t.Error(err)
		}
		_, err := p.Exec(t.Context(), "SELECT 1/0")
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || pgErr.Code != "22012" {
			t.Errorf("%v", err)
		}
		if con.watchdog.Load() != nil {
			t.Errorf("mode=%s: a watchdog", mode)
		}
	}
}

// held counts the connections that the watchdog knows, and those of them that are idle.
func (w *watchdog) held() (all, idle int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.nodes {
		for s := range n.held {
			all++
			if s.state.Load() == sessionIdle {
				idle++
			}
		}
	}
	return all, idle
}

// A cancel request goes to an address that has been dialled, and is dialled all the same.
func TestAttachPoolCancelRequest(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	p, _ := attach(t, c.DSN(), still, 1, nil)
	conn, err := p.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if err := conn.Conn().PgConn().CancelRequest(t.Context()); err != nil {
		t.Error(err)
	}
}

// Connections that pgxpool closes without a word, or lets go, do not stay with the watchdog for ever.
func TestAttachPoolForgets(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	var refuse atomic.Bool
	p, con := attach(t, c.DSN(), "crdbdrain_sources=errors&crdbdrain_poll_interval=100ms", 2, func(pc *pgxpool.Config) {
		pc.AfterConnect = func(context.Context, *pgx.Conn) error {
			if refuse.Load() {
				return errors.New("not today")
			}
			return nil
		}
	})
	w := con.watchdog.Load()
	conn, err := p.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	hijacked := conn.Hijack()
	p.Reset()
	eventually(t, "the other one is closed", func() bool { all, _ := w.held(); return all == 1 })
	refuse.Store(true)
	for range 5 {
		if err := poolOp(p, 1); err == nil {
			t.Error("AfterConnect's error is gone")
		}
	}
	if all, _ := w.held(); all != 1 {
		t.Errorf("%d connections, want the one that was hijacked", all)
	}
	_ = hijacked.Close(t.Context())
	eventually(t, "it is forgotten", func() bool { all, _ := w.held(); return all == 0 })
}

// A PrepareConn that fails puts the connection back into the pool: there it is idle, for a sweep to take.
func TestAttachPoolPrepareConnFails(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	refuse := errors.New("not today")
	var deny atomic.Bool
	p, con := attach(t, c.DSN(), still, 1, func(pc *pgxpool.Config) {
		pc.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
			if deny.Load() {
				return true, refuse
			}
			return true, nil
		}
	})
	eventually(t, "it is back", func() bool { return p.Stat().IdleConns() == 1 })
	deny.Store(true)
	if _, err := p.Acquire(t.Context()); !errors.Is(err, refuse) {
		t.Fatal(err)
	}
	if all, idle := con.watchdog.Load().held(); all != 1 || idle != 1 {
		t.Errorf("%d connections, %d idle", all, idle)
	}
}

// The config's AfterConnect has the connection while it runs: no sweep takes it away.
func TestAttachPoolAfterConnectIsAUse(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	in, out := make(chan *pgx.Conn), make(chan struct{})
	var slow atomic.Bool
	p, con := attach(t, c.DSN(), still+"&crdbdrain_cull_stagger=0", 3, func(pc *pgxpool.Config) {
		pc.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			if !slow.CompareAndSwap(true, false) {
				return nil
			}
			in <- conn
			<-out
			_, err := conn.Exec(ctx, "SELECT 1")
			return err
		}
	})
	release := sync.OnceFunc(func() { close(out) })
	t.Cleanup(release)
	w := con.watchdog.Load()
	w.rule.CompareAndSwap(ruleUnknown, ruleHolds)
	p.Reset()
	slow.Store(true)
	acquired := make(chan error, 1)
	go func() {
		conn, err := p.Acquire(t.Context())
		if err == nil {
			conn.Release()
		}
		acquired <- err
	}()
	conn := <-in
	w.say(nodeFromPID(conn.PgConn().PID()))
	onlyFor(t, 2*sweepIdle+slowSweep, "it is open", func() bool { return !conn.IsClosed() && con.Stats().Culled == 0 })
	release()
	if err := <-acquired; err != nil {
		t.Error(err)
	}
}

// A connection that was in use for long, and idle for a moment, is not pinged.
func TestAttachPoolPingsWhatWasIdle(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	p, _ := attach(t, c.DSN(), still, 1, nil)
	conn, err := p.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(pingAfter + 50*time.Millisecond)
	conn.Release()
	eventually(t, "it is back", func() bool { return p.Stat().IdleConns() == 1 })
	before := asked(c, "-- ping")
	if conn, err = p.Acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	conn.Release()
	if n := asked(c, "-- ping") - before; n != 0 {
		t.Errorf("%d pings", n)
	}
}

// The watchdog's own connection is made as BeforeConnect, which fetches a password say, makes the pool's.
func TestAttachPoolBeforeConnectOfTheWatchdog(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	c.Grant("fetched", "VIEWSYSTEMTABLE")
	_, con := attach(t, c.DSN(), "crdbdrain_sources=instances&crdbdrain_poll_interval=100ms", 1, func(pc *pgxpool.Config) {
		pc.BeforeConnect = func(_ context.Context, cc *pgx.ConnConfig) error { cc.User = "fetched"; return nil }
	})
	eventually(t, "the source works", func() bool { return con.watchdog.Load().status(sourceInstances).state == sourceOK })
}

// A connection is looked at however short it was idle: nothing runs again in a pgxpool.
func TestAttachPoolLooksAtEveryConnection(t *testing.T) {
	needPeek(t)
	peer := startPeer(t, false)
	p, _ := attach(t, peer.dsn(), "connect_timeout=10", 1, nil)
	c, err := p.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := sessionIn(c.Conn())
	c.Release()
	eventually(t, "it is back", func() bool { return s.state.Load() == sessionIdle })
	peer.endIdle(sayGoodbye)
	eventually(t, "the goodbye arrives", func() bool { return s.link.peeker.apart() != peekQuiet })
	s.idled.Store(now())
	if s.checkout(t.Context()) {
		t.Error("a connection that the server has closed is handed out")
	}
}
