package crdbdrain

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pool is a database/sql pool on the driver, and its connector's counts.
type pool struct {
	*sql.DB
	c *Connector
}

// open opens a pool on a simulated cluster. params are appended to the DSN's query.
func open(t testing.TB, dsn, params string, opts ...Option) *pool {
	t.Helper()
	if params != "" {
		sep := "?"
		if strings.Contains(dsn, "?") {
			sep = "&"
		}
		dsn += sep + params
	}
	cc, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	if os.Getenv("CRDBDRAIN_TEST_LOG") != "" {
		opts = append(opts, WithLogger(slog.New(slog.NewTextHandler(os.Stderr, nil))))
	}
	c, err := NewConnector(cc, opts...)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(c)
	t.Cleanup(func() { _ = db.Close() })
	return &pool{db, c}
}

// load runs single statements and short transactions on n workers until stop is called, and counts errors by text.
type load struct {
	stop func() *load
	ops  atomic.Int64

	mu     sync.Mutex
	errors map[string]int // guarded by mu
}

func startLoad(t testing.TB, db *sql.DB, workers int, pause time.Duration) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{errors: make(map[string]int)}
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			for n := i; ctx.Err() == nil; n++ {
				if err := oneOp(db, n); err != nil {
					l.mu.Lock()
					l.errors[err.Error()]++
					l.mu.Unlock()
				}
				l.ops.Add(1)
				if pause > 0 {
					time.Sleep(pause)
				}
			}
		})
	}
	var once sync.Once
	l.stop = func() *load {
		once.Do(func() { cancel(); wg.Wait() })
		return l
	}
	t.Cleanup(func() { l.stop() })
	return l
}

// oneOp is a statement, or every third time a short transaction. A user's call has a deadline.
func oneOp(db *sql.DB, n int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if n%3 != 0 {
		var one int
		return db.QueryRowContext(ctx, "SELECT 1").Scan(&one)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer tx.Rollback()
	for range 2 {
		if _, err := tx.ExecContext(ctx, "UPDATE accounts SET balance = balance + 1 WHERE id = $1", n); err != nil {
			return fmt.Errorf("update: %w", err)
		}
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// fill opens n connections at once, so that the pool holds n.
func fill(t testing.TB, db *sql.DB, n int) {
	t.Helper()
	db.SetMaxOpenConns(n)
	db.SetMaxIdleConns(n)
	conns := make([]*sql.Conn, n)
	for i := range conns {
		c, err := db.Conn(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = c
	}
	for _, c := range conns {
		_ = c.Close()
	}
}

const windowParams = "crdbdrain_poll_interval=300ms&crdbdrain_poll_interval_draining=200ms&crdbdrain_window=5s"

// A rolling restart with a window is invisible, with one early source and no privilege for it, under load and idle.
func TestRollingRestartWithAWindowLosesNothing(t *testing.T) {
	t.Parallel()
	for _, source := range []string{"readiness", "instances"} {
		for _, workers := range []int{16, 2} {
			t.Run(fmt.Sprintf("%s/%d workers", source, workers), func(t *testing.T) {
				t.Parallel()
				c := crdbdraintest.Start(crdbdraintest.Config{Settings: crdbdraintest.Settings{
					InitialWait: time.Second, ConnectionsTimeout: 4 * time.Second, TransactionsTimeout: 10 * time.Second}})
				defer c.Close()
				params := windowParams + "&crdbdrain_sources=" + source
				if source == "readiness" {
					params += "&crdbdrain_readiness=" + c.ReadinessURLs()
				} else {
					c.Grant("app", "VIEWSYSTEMTABLE")
				}
				db := open(t, c.DSN(), params)
				fill(t, db.DB, 30)
				l := startLoad(t, db.DB, workers, time.Millisecond)
				time.Sleep(time.Second)
				for _, n := range c.Nodes() {
					d := n.Drain(context.Background())
					n.Stop()
					t.Logf("node %d: %v", n.ID(), d)
					if d.LostIdle+d.LostBusy > 0 {
						t.Errorf("node %d closed %d idle and %d busy connections", n.ID(), d.LostIdle, d.LostBusy)
					}
					if limit := 4 * time.Second; d.Duration > limit {
						t.Errorf("node %d: the drain took %v, want less than %v", n.ID(), d.Duration, limit)
					}
					n.Start()
					time.Sleep(1500 * time.Millisecond)
				}
				l.stop()
				t.Logf("%d operations, %+v", l.ops.Load(), db.c.Stats())
				if len(l.errors) > 0 {
					t.Errorf("errors: %v", l.errors)
				}
			})
		}
	}
}

// With the server's defaults there is no warning; what the server did not execute is run again.
func TestUnannouncedDrains(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ workers, conns int }{{32, 30}, {64, 9}} {
		t.Run(fmt.Sprintf("%d workers on %d", tt.workers, tt.conns), func(t *testing.T) {
			t.Parallel()
			c := crdbdraintest.Start(crdbdraintest.Config{})
			defer c.Close()
			db := open(t, c.DSN(), "")
			fill(t, db.DB, tt.conns)
			l := startLoad(t, db.DB, tt.workers, 0)
			for range 3 {
				for _, n := range c.Nodes() {
					time.Sleep(300 * time.Millisecond)
					d := n.Drain(context.Background())
					n.Stop()
					n.Start()
					t.Logf("node %d: %v", n.ID(), d)
				}
			}
			l.stop()
			t.Logf("%d operations, %+v", l.ops.Load(), db.c.Stats())
			if len(l.errors) > 0 {
				t.Errorf("errors: %v", l.errors)
			}
		})
	}
}

// spread returns the number of sessions on each node, without the watchdog's.
func spread(c *crdbdraintest.Cluster) (counts []int) {
	for _, n := range c.Nodes() {
		counts = append(counts, n.Stats().Open)
	}
	return counts
}

// After a roll every node has its share again, and then nothing moves.
func TestTheWayHome(t *testing.T) {
	t.Parallel()
	for _, hosts := range []string{"load balancer", "several hosts"} {
		t.Run(hosts, func(t *testing.T) {
			t.Parallel()
			c := crdbdraintest.Start(crdbdraintest.Config{Settings: crdbdraintest.Settings{
				InitialWait: 500 * time.Millisecond, ConnectionsTimeout: 2 * time.Second, TransactionsTimeout: 10 * time.Second}})
			defer c.Close()
			dsn := c.DSN()
			if hosts == "several hosts" {
				dsn = c.DSNAll()
			}
			db := open(t, dsn, "crdbdrain_poll_interval=200ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_window=2500ms&crdbdrain_readiness="+c.ReadinessURLs())
			fill(t, db.DB, 30)
			l := startLoad(t, db.DB, 8, time.Millisecond)
			time.Sleep(500 * time.Millisecond)
			d := c.Node(3).Drain(context.Background())
			t.Log(d)
			c.Node(3).Stop()
			time.Sleep(time.Second)
			c.Node(3).Start()
			// Within a quarter of its share: the pool keeps what its load needs, which may be less than before.
			even := func() bool {
				total, counts := 0, spread(c)
				for _, n := range counts {
					total += n
				}
				for _, n := range counts {
					if share := float64(total) / 3; float64(n) < 0.75*share || float64(n) > 1.25*share {
						return false
					}
				}
				return true
			}
			start := time.Now()
			for !even() {
				if time.Since(start) > 30*time.Second {
					t.Fatalf("after 30 s the connections are spread %v %+v", spread(c), db.c.Stats())
				}
				time.Sleep(50 * time.Millisecond)
			}
			t.Logf("even after %v: %v", time.Since(start), spread(c))
			time.Sleep(2 * time.Second)
			before := db.c.Stats().Moved
			time.Sleep(2 * time.Second)
			if after := db.c.Stats().Moved; after != before {
				t.Errorf("%d connections moved at rest", after-before)
			}
			l.stop()
			t.Logf("%d operations, %+v, %v", l.ops.Load(), db.c.Stats(), spread(c))
			if len(l.errors) > 0 {
				t.Errorf("errors: %v", l.errors)
			}
		})
	}
}
