package crdbdrain

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// virtualPool starts a cluster in memory, for a synctest bubble, and a pool of n connections on it.
func virtualPool(t *testing.T, cfg crdbdraintest.Config, n int, params string) (*crdbdraintest.Cluster, *pool) {
	t.Helper()
	cfg.Memory = true
	c := crdbdraintest.Start(cfg)
	c.Grant("app", "VIEWSYSTEMTABLE")
	cc, err := pgx.ParseConfig(c.DSN() + "&crdbdrain_sources=instances&" + params)
	if err != nil {
		t.Fatal(err)
	}
	cc.DialFunc = c.Dial
	cc.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	con, err := NewConnector(cc)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(con)
	fill(t, db, n)
	return c, &pool{db, con}
}

// mostIn returns the largest number of times within any span of d.
func mostIn(times []time.Time, d time.Duration) (most int) {
	slices.SortFunc(times, time.Time.Compare)
	for i, j := 0, 0; j < len(times); j++ {
		for times[j].Sub(times[i]) >= d {
			i++
		}
		most = max(most, j-i+1)
	}
	return most
}

// H01, H07: pools of any size leave a node within the window, and their replacements are dialled at the pace, idle and
// under load.
func TestH07EveryPoolLeavesWithinTheWindow(t *testing.T) {
	for _, conns := range []int{20, 200, 2000} {
		for _, workers := range []int{0, 8} {
			t.Run(fmt.Sprintf("%d connections, %d workers", conns, workers), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c, db := virtualPool(t, crdbdraintest.Config{Nodes: 2, Latency: time.Millisecond, Settings: crdbdraintest.Settings{
						InitialWait: time.Second, ConnectionsTimeout: 4 * time.Second, TransactionsTimeout: 10 * time.Second}},
						2*conns, windowParams)
					defer c.Close()
					defer db.Close()
					time.Sleep(time.Second) // virtual: the stamps are verified
					l := startLoad(t, db.DB, workers, 5*time.Millisecond)
					start := time.Now()
					d := c.Node(1).Drain(context.Background())
					l.stop()
					if d.LostIdle+d.LostBusy > 0 || d.Duration > 4*time.Second {
						t.Errorf("%d idle and %d busy connections lost in %v", d.LostIdle, d.LostBusy, d.Duration)
					}
					if len(l.errors) > 0 {
						t.Errorf("errors: %v", l.errors)
					}
					var dials []time.Time
					for _, at := range c.Stats().Dials {
						if at.After(start) {
							dials = append(dials, at)
						}
					}
					// The pace, the spares that come first, one dial for each of these that lands on the node again (the balancer
					// does not know yet), and the watchdog's own.
					allowed := int(float64(conns)/(5*windowShare)/10) + 1
					if most := mostIn(dials, 100*time.Millisecond); most > 2*(allowed+db.c.cfg.spares)+maxSteer {
						t.Errorf("%d dials within 100 ms, want about %d", most, allowed)
					}
					t.Logf("%v, %d dials, %+v", d.Duration, len(dials), db.c.Stats())
				})
			})
		}
	}
}

// A drain is noticed up to a poll interval late, and with the default one that is more than half of the window: the pool
// then leaves the faster. Whatever the window, and whenever in the interval the drain begins.
func TestTheDefaultPollFitsTheWindow(t *testing.T) {
	for _, tt := range []struct {
		initial, timeout time.Duration
		params           string
		nodes            int // that drain at once, of six
	}{
		{2 * time.Second, 8 * time.Second, "", 1},
		{2 * time.Second, 8 * time.Second, "", 3},
		{0, 5 * time.Second, "crdbdrain_window=5s", 1},
		{0, 2 * time.Second, "crdbdrain_window=2s", 1},
		{2 * time.Second, 8 * time.Second, "crdbdrain_poll_interval=3s", 3},
	} {
		t.Run(fmt.Sprintf("%v,%s,%d", tt.initial+tt.timeout, tt.params, tt.nodes), func(t *testing.T) {
			for phase := 0; phase < 6; phase += 2 {
				synctest.Test(t, func(t *testing.T) {
					c, db := virtualPool(t, crdbdraintest.Config{Nodes: 6, Latency: time.Millisecond, Settings: crdbdraintest.Settings{
						InitialWait: tt.initial, ConnectionsTimeout: tt.timeout, TransactionsTimeout: 10 * time.Second}}, 180, tt.params)
					defer c.Close()
					defer db.Close()
					time.Sleep(20*time.Second + time.Duration(phase)*time.Second)
					l := startLoad(t, db.DB, 4, 20*time.Millisecond)
					start := time.Now()
					results := make(chan crdbdraintest.DrainResult, tt.nodes)
					for id := 1; id <= tt.nodes; id++ {
						go func() { results <- c.Node(id).Drain(context.Background()) }()
					}
					for range tt.nodes {
						if d := <-results; d.LostIdle+d.LostBusy > 0 {
							t.Errorf("phase %d: %d idle and %d busy connections lost in %v", phase, d.LostIdle, d.LostBusy, d.Duration)
						}
					}
					took := time.Since(start)
					if l.stop(); len(l.errors) > 0 {
						t.Errorf("errors: %v", l.errors)
					}
					t.Logf("phase %d: over after %v of %v, %+v", phase, took, tt.initial+tt.timeout, db.c.Stats())
				})
			}
		})
	}
}

// Connections that are all in use and come back at the same moment, as in batches, leave within the window too, though at
// each of those moments there is one token: what would not come back in time goes without.
func TestConnectionsThatComeBackTogetherLeaveInTime(t *testing.T) {
	for _, tt := range []struct{ batch, initial, timeout time.Duration }{
		{time.Second, 2 * time.Second, 8 * time.Second},
		{600 * time.Millisecond, 2 * time.Second, 4 * time.Second},
		{2 * time.Second, 5 * time.Second, 10 * time.Second},
		{3 * time.Second, 2 * time.Second, 8 * time.Second},
	} {
		t.Run(fmt.Sprintf("%v of %v", tt.batch, tt.initial+tt.timeout), func(t *testing.T) {
			for phase := range 3 {
				synctest.Test(t, func(t *testing.T) {
					c, db := virtualPool(t, crdbdraintest.Config{Nodes: 3, Settings: crdbdraintest.Settings{
						InitialWait: tt.initial, ConnectionsTimeout: tt.timeout, TransactionsTimeout: 10 * time.Second}}, 30,
						"crdbdrain_window="+(tt.initial+tt.timeout).String())
					defer c.Close()
					defer db.Close()
					time.Sleep(20*time.Second + time.Duration(phase)*time.Second)
					done := make(chan struct{})
					over := make(chan struct{})
					go func() {
						defer close(over)
						for {
							var batch sync.WaitGroup
							for range 30 {
								batch.Go(func() {
									if _, err := db.Exec(fmt.Sprintf("SELECT pg_sleep(%g)", tt.batch.Seconds())); err != nil {
										t.Errorf("phase %d: %v", phase, err)
									}
								})
							}
							batch.Wait()
							select {
							case <-done:
								return
							default:
							}
						}
					}()
					time.Sleep(5 * time.Second)
					if d := c.Node(1).Drain(context.Background()); d.LostIdle+d.LostBusy > 0 {
						t.Errorf("phase %d: %d idle and %d busy connections lost in %v; %+v", phase, d.LostIdle, d.LostBusy, d.Duration, db.c.Stats())
					}
					close(done)
					<-over
				})
			}
		})
	}
}

// At rest nothing moves, for as long as nothing happens.
func TestNothingMovesAtRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := virtualPool(t, crdbdraintest.Config{}, 31, "")
		defer c.Close()
		defer db.Close()
		time.Sleep(time.Minute)
		before := c.Stats().Accepts
		time.Sleep(10 * time.Minute)
		if s := db.c.Stats(); s != (Stats{}) {
			t.Errorf("%+v", s)
		}
		if n := c.Stats().Accepts - before; n != 0 {
			t.Errorf("%d dials at rest", n)
		}
	})
}

// H05: connections past their TTL are replaced one per stagger, and the jitter is drawn once.
func TestH05PacedTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := virtualPool(t, crdbdraintest.Config{}, 20, "crdbdrain_ttl=10m&crdbdrain_ttl_stagger=6s")
		defer c.Close()
		defer db.Close()
		time.Sleep(10*time.Minute - 10*time.Second)
		if s := db.c.Stats(); s.Moved != 0 {
			t.Fatalf("%d moved before their time", s.Moved)
		}
		start := time.Now()
		for time.Since(start) < 4*time.Minute {
			before := db.c.Stats().Moved
			time.Sleep(6 * time.Second)
			if n := db.c.Stats().Moved - before; n > 2 { // one at each end of the span
				t.Errorf("%d moved within one stagger", n)
			}
		}
		if s := db.c.Stats(); s.Moved != 20 || s.Culled != 0 || s.Lost != 0 {
			t.Errorf("%+v, want 20 moved", s)
		}
		if open := c.Stats().Open; open != 21 { // with the watchdog's own
			t.Errorf("%d sessions are open, want 21", open)
		}
		for range 30 { // the pool has noticed nothing
			if err := oneOp(db.DB, 1); err != nil {
				t.Error(err)
			}
		}
	})
}

// Spares are there before the first cull, serve the callers, and are gone after the drain.
func TestSparesComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := virtualPool(t, crdbdraintest.Config{Settings: crdbdraintest.Settings{
			InitialWait: time.Second, ConnectionsTimeout: 4 * time.Second}}, 30, windowParams)
		defer c.Close()
		defer db.Close()
		time.Sleep(time.Second)
		l := startLoad(t, db.DB, 20, time.Millisecond)
		most := int32(0)
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.Node(2).Drain(context.Background())
		}()
		for open := true; open; {
			select {
			case <-done:
				open = false
			case <-time.After(10 * time.Millisecond):
				most = max(most, db.c.spares.count.Load())
			}
		}
		l.stop()
		c.Node(2).Stop()
		c.Node(2).Start()
		time.Sleep(5 * time.Second)
		if most != 2 {
			t.Errorf("at most %d spares during the drain, want 2", most)
		}
		if n := db.c.spares.count.Load(); n != 0 {
			t.Errorf("%d spares are left", n)
		}
		if len(l.errors) > 0 {
			t.Errorf("errors: %v", l.errors)
		}
	})
}

// A node that joins gets its share.
func TestANodeThatJoinsGetsItsShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := virtualPool(t, crdbdraintest.Config{}, 30, "crdbdrain_poll_interval=1s")
		defer c.Close()
		defer db.Close()
		time.Sleep(5 * time.Second)
		n := c.AddNode()
		l := startLoad(t, db.DB, 10, 5*time.Millisecond)
		time.Sleep(30 * time.Second)
		l.stop()
		if got := n.Stats().Open; got < 5 || got > 10 {
			t.Errorf("the new node has %d of %v, want about a quarter", got, spread(c))
		}
		if len(l.errors) > 0 {
			t.Errorf("errors: %v", l.errors)
		}
	})
}

// Draining tells the holder of a connection when its node is marked; the connection stays as it is.
func TestDrainingTellsTheHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := virtualPool(t, crdbdraintest.Config{Settings: crdbdraintest.Settings{
			InitialWait: time.Second, ConnectionsTimeout: 10 * time.Second}}, 3, windowParams)
		defer c.Close()
		defer db.Close()
		time.Sleep(time.Second)
		ctx := context.Background()
		held := make(map[int]*sql.Conn)
		told := make(map[int]<-chan struct{})
		for range 3 {
			sc, err := db.Conn(ctx)
			if err != nil {
				t.Fatal(err)
			}
			defer sc.Close()
			var id int
			if err := sc.QueryRowContext(ctx, "SHOW node_id").Scan(&id); err != nil {
				t.Fatal(err)
			}
			held[id], told[id] = sc, Draining(ctx, sc)
		}
		go c.Node(2).Drain(ctx)
		select {
		case <-told[2]:
		case <-time.After(time.Second):
			t.Fatal("nobody tells")
		}
		select {
		case <-told[1]:
			t.Error("node 1 does not drain")
		case <-told[3]:
			t.Error("node 3 does not drain")
		default:
		}
		select {
		case <-Draining(ctx, held[2]):
		default:
			t.Error("a second look does not tell")
		}
		if _, err := held[2].ExecContext(ctx, "SELECT 1"); err != nil {
			t.Errorf("the connection is not as it was: %v", err)
		}
		_ = held[2].Close()
		time.Sleep(5 * time.Second)
		if s := db.c.Stats(); s.Culled != 1 || s.Lost != 0 {
			t.Errorf("%+v, want the one that came back culled", s)
		}
	})
}
