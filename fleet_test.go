package crdbdrain

import (
	"context"
	"database/sql"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// memPool opens a pool on a cluster in memory, in a process of its own where it has a registry of its own.
func memPool(t testing.TB, c *crdbdraintest.Cluster, params string, change func(*pgx.ConnConfig, *Connector)) *pool {
	t.Helper()
	cc, err := pgx.ParseConfig(c.DSN() + "&" + params)
	if err != nil {
		t.Fatal(err)
	}
	cc.DialFunc = c.Dial
	cc.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	if change != nil {
		change(cc, nil)
	}
	con, err := NewConnector(cc)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(nil, con)
	}
	return &pool{sql.OpenDB(con), con}
}

// asked says how often the nodes have been asked for a source's rows.
func asked(c *crdbdraintest.Cluster, statement string) int { return c.Stats().Statements[statement] }

// F04: a hundred pools, of several users, databases and settings, one of them without a privilege, are one watchdog: it
// asks once an interval, with the role that may.
func TestF04AHundredPoolsOnePoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true})
		defer c.Close()
		for _, user := range []string{"orders", "billing"} {
			c.Grant(user, "VIEWSYSTEMTABLE")
			c.Grant(user, "VIEWCLUSTERMETADATA")
		}
		users := []string{"guest", "orders", "billing"} // the one without a privilege comes first
		var pools []*pool
		for i := range 100 {
			p := memPool(t, c, fmt.Sprintf("crdbdrain_poll_interval=5s&crdbdrain_cluster=hundred&crdbdrain_spares=%d", i%3), func(cc *pgx.ConnConfig, _ *Connector) {
				if cc != nil {
					cc.User, cc.Database = users[i%3], fmt.Sprintf("db%d", i%5)
				}
			})
			defer p.Close()
			mustExec(t, p, "UPDATE t SET x = 1")
			pools = append(pools, p)
		}
		w := pools[0].c.watchdog.Load()
		for _, p := range pools {
			if p.c.watchdog.Load() != w {
				t.Fatal("two watchdogs")
			}
		}
		time.Sleep(30 * time.Second)
		before := c.Stats()
		time.Sleep(100 * time.Second)
		after := c.Stats()
		for _, statement := range []string{sqlInstances, sqlGossip} {
			if n := after.Statements[statement] - before.Statements[statement]; n < 100/6 || n > 100/4 {
				t.Errorf("%q was asked %d times in 20 intervals", statement, n)
			}
		}
		if s := w.status(sourceInstances).state; s != sourceOK {
			t.Errorf("instances is %d", s)
		}
		if n := dialled(c, watchdogName); n != 2 { // the guest's, which is denied, and then the other's
			t.Errorf("%d connections of the watchdog, want 2", n)
		}
		if n := after.Accepts - before.Accepts; n != 0 {
			t.Errorf("%d dials at rest", n)
		}
		// With the last member of the role that may ask, the sources are denied; it does not ask under a closed connector's name.
		for i, p := range pools {
			if users[i%3] != "guest" {
				p.Close()
			}
		}
		time.Sleep(time.Minute)
		if n := c.Stats().Open; n != 34 { // guests' connections, and none of the watchdog's
			t.Errorf("%d connections are open, want 34", n)
		}
	})
}

// The roles are asked one after the other; a denial is nobody's trouble while another role is left.
func TestARoleThatMayAsksForTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true})
		defer c.Close()
		c.Grant("reader", "VIEWSYSTEMTABLE")
		logs := &logTrap{}
		as := func(user string) *pool {
			p := memPool(t, c, "crdbdrain_poll_interval=5s&crdbdrain_cluster=roles", func(cc *pgx.ConnConfig, con *Connector) {
				if cc != nil {
					cc.User = user
				} else {
					con.log = logs.logger()
				}
			})
			mustExec(t, p, "UPDATE t SET x = 1")
			return p
		}
		guest := as("guest")
		defer guest.Close()
		time.Sleep(10 * time.Second)
		w := guest.c.watchdog.Load()
		if s := w.status(sourceInstances).state; s != sourceDenied {
			t.Fatalf("instances is %d", s)
		}
		reader := as("reader")
		time.Sleep(10 * time.Second)
		if s := w.status(sourceInstances).state; s != sourceOK {
			t.Errorf("instances is %d with a role that may", s)
		}
		if s := w.status(sourceGossip).state; s != sourceDenied {
			t.Errorf("gossip is %d", s)
		}
		reader.Close()
		time.Sleep(20 * time.Minute) // the guest is asked again, and denied again
		time.Sleep(15 * time.Minute)
		if s := w.status(sourceInstances).state; s != sourceDenied {
			t.Errorf("instances is %d again", s)
		}
		if n := logs.count("source is denied", "instances"); n != 2 {
			t.Errorf("%d lines, want one for each time that nobody may", n)
		}
	})
}

// memListener is a listener in memory, for a bubble's HTTP.
type memListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newMemListener() *memListener {
	return &memListener{conns: make(chan net.Conn), done: make(chan struct{})}
}

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *memListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

func (l *memListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case l.conns <- theirs:
		return ours, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// fleetSize is the number of simulated processes.
func fleetSize(t testing.TB, small int) int {
	if s := os.Getenv("CRDBDRAIN_FLEET"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return small
}

// A fleet of processes that follow a feed: the cluster is polled once an interval for all of them, and the nodes restart
// one after the other without an error or a lost connection, within the rate of reconnects that the feed grants.
// CRDBDRAIN_FLEET=500 makes it 500 processes.
func TestFleetOnAFeed(t *testing.T) {
	n := fleetSize(t, 40)
	const conns, maxRate = 3, 100
	polls := func(c *crdbdraintest.Cluster, d time.Duration) float64 {
		before := asked(c, sqlInstances)
		time.Sleep(d)
		return float64(asked(c, sqlInstances)-before) / d.Seconds()
	}
	synctest.Test(t, func(t *testing.T) {
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true, Latency: time.Millisecond, Settings: crdbdraintest.Settings{
			InitialWait: 2 * time.Second, ConnectionsTimeout: 30 * time.Second, TransactionsTimeout: 10 * time.Second}})
		defer c.Close()
		c.Grant("feeder", "VIEWSYSTEMTABLE")
		c.Grant("app", "VIEWSYSTEMTABLE") // so that "without a feed" is what it would be

		l := newMemListener()
		feeder := memPool(t, c, "crdbdrain_sources=instances&crdbdrain_poll_interval=5s&crdbdrain_window=30s&crdbdrain_cluster=fleet", func(cc *pgx.ConnConfig, con *Connector) {
			if cc != nil {
				cc.User = "feeder"
			} else {
				con.registry = &watchdogs{}
			}
		})
		defer feeder.Close()
		h, err := NewFeedHandler(feeder.c, FeedConfig{MaxReconnectsPerSecond: maxRate})
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		server := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
		go server.Serve(l)
		defer server.Close()

		start := func(params string) (pools []*pool, loads []*load) {
			for range n {
				p := memPool(t, c, params+"&crdbdrain_poll_interval=5s&crdbdrain_cluster=fleet", func(_ *pgx.ConnConfig, con *Connector) {
					if con != nil {
						con.registry = &watchdogs{dialFeed: l.dial}
					}
				})
				fill(t, p.DB, conns)
				pools = append(pools, p)
				loads = append(loads, startLoad(t, p.DB, 1, 200*time.Millisecond))
			}
			return pools, loads
		}
		stop := func(pools []*pool, loads []*load) (errs int, s Stats) {
			for i, p := range pools {
				loads[i].stop()
				for e, k := range loads[i].errors {
					errs += k
					t.Logf("process %d: %d times %s", i, k, e)
				}
				one := p.c.Stats()
				s.Lost, s.Culled, s.Moved = s.Lost+one.Lost, s.Culled+one.Culled, s.Moved+one.Moved
				_ = p.Close()
			}
			return errs, s
		}

		pools, loads := start("crdbdrain_sources=instances")
		time.Sleep(10 * time.Second)
		each := polls(c, time.Minute)
		stop(pools, loads)

		pools, loads = start("crdbdrain_feed=http://127.0.0.1:1")
		time.Sleep(10 * time.Second)
		fed := polls(c, time.Minute)
		if want := 1.0 / 5; fed < want*0.8 || fed > want*1.25 {
			t.Errorf("%.2f polls a second with a feed, want one in 5 s", fed)
		}
		if want := float64(n) / 5; each < want*0.8 || each > want*1.25 {
			t.Errorf("%.1f polls a second without a feed, want %d in 5 s: the comparison is of nothing", each, n)
		}
		for _, node := range c.Nodes() {
			begin := time.Now()
			d := node.Drain(context.Background())
			if d.LostIdle+d.LostBusy > 0 {
				t.Errorf("node %d: %d idle and %d busy connections lost", node.ID(), d.LostIdle, d.LostBusy)
			}
			var dials []time.Time
			for _, at := range c.Stats().Dials {
				if at.After(begin) {
					dials = append(dials, at)
				}
			}
			// The balancer still sends dials to a node that is unready; such a dial is made again. And the feed's own.
			if most := mostIn(dials, time.Second); most > maxRate+maxRate/20+maxSteer {
				t.Errorf("node %d: %d dials within a second, the feed grants %d", node.ID(), most, maxRate)
			}
			t.Logf("node %d: drained in %v, %d dials, at most %d in a second", node.ID(), d.Duration, len(dials), mostIn(dials, time.Second))
			node.Stop()
			time.Sleep(2 * time.Second)
			node.Start()
			time.Sleep(30 * time.Second)
		}
		errs, s := stop(pools, loads)
		if errs > 0 || s.Lost > 0 || s.Culled == 0 {
			t.Errorf("%d errors, %+v", errs, s)
		}
		t.Logf("%d processes: %.2f polls a second without a feed, %.2f with one; %d errors, %+v", n, each, fed, errs, s)
	})
}

// BenchmarkHundredPools is load on a hundred pools of one cluster, for a profile of what they contend for:
//
//	go test -run '^$' -bench HundredPools -mutexprofile mutex.out . && go tool pprof -top crdbdrain.test mutex.out
func BenchmarkHundredPools(b *testing.B) {
	c := startCluster(b, crdbdraintest.Config{Memory: true})
	c.Grant("app", "VIEWSYSTEMTABLE")
	var pools []*pool
	for range 100 {
		p := memPool(b, c, "crdbdrain_poll_interval=100ms&crdbdrain_cluster=bench", nil)
		defer p.Close()
		fill(b, p.DB, 4)
		pools = append(pools, p)
	}
	var next atomic.Int64
	b.SetParallelism(50)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		p := pools[next.Add(1)%100]
		for pb.Next() {
			if err := selectOne(p.DB)(); err != nil {
				b.Error(err)
			}
		}
	})
}

// What several connectors' settings come to: every source, the shortest interval and window, the longest stagger, of TTLs
// those that there are.
func TestCommonSettings(t *testing.T) {
	with := func(params string) *Connector {
		cfg, err := parseConfig("host=h user=u " + params)
		if err != nil {
			t.Fatal(err)
		}
		return newConnector(cfg)
	}
	a := with("crdbdrain_sources=instances crdbdrain_poll_interval=10s crdbdrain_ttl_stagger=9s crdbdrain_cull_stagger=1s")
	b := with("crdbdrain_sources=readiness crdbdrain_readiness=http://n1:8080 crdbdrain_poll_interval=2s crdbdrain_window=30s crdbdrain_ttl=5m crdbdrain_ttl_stagger=1s")
	c := with("crdbdrain_sources=readiness,feed crdbdrain_readiness=http://n1:8080,http://n2:8080 crdbdrain_feed=http://f crdbdrain_window=20s crdbdrain_ttl=9m crdbdrain_ttl_stagger=2s")
	for _, members := range [][]*Connector{{a, b, c}, {c, b, a}, {b, a, c}} {
		cfg := common(members)
		if want := sourceSet(1<<sourceInstances | 1<<sourceReadiness | 1<<sourceFeed | 1<<sourceErrors); cfg.sources != want {
			t.Errorf("sources %b, want %b", cfg.sources, want)
		}
		if len(cfg.readiness) != 2 || cfg.feed != "http://f" {
			t.Errorf("%v, %q", cfg.readiness, cfg.feed)
		}
		if cfg.pollInterval != 2*time.Second || cfg.pollIntervalDraining != time.Second || cfg.window != 20*time.Second || cfg.cullStagger != time.Second || cfg.ttlStagger != 2*time.Second {
			t.Errorf("interval %v, window %v, stagger %v, TTL stagger %v", cfg.pollInterval, cfg.window, cfg.cullStagger, cfg.ttlStagger)
		}
	}
	if a.cfg.pollInterval != 10*time.Second || len(b.cfg.readiness) != 1 {
		t.Error("a connector's own settings have changed")
	}
}

// However many pools a process has, it dials its spares at the rate that the feed grants the process.
func TestFleetRateIsTheProcesss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true, Latency: time.Millisecond, Settings: crdbdraintest.Settings{InitialWait: time.Hour}})
		defer c.Close()
		c.Grant("app", "VIEWSYSTEMTABLE")
		process := &watchdogs{}
		var w *watchdog
		for range 20 {
			p := memPool(t, c, "crdbdrain_sources=instances&crdbdrain_poll_interval=1s&crdbdrain_window=60s&crdbdrain_cluster=many", func(_ *pgx.ConnConfig, con *Connector) {
				if con != nil {
					con.registry = process
				}
			})
			defer p.Close()
			fill(t, p.DB, 3)
			w = p.c.watchdog.Load()
		}
		time.Sleep(5 * time.Second)
		w.fleet.Store(&fleetShare{gap: time.Second})
		begin := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		drained := make(chan struct{})
		go func() { defer close(drained); c.Node(1).Drain(ctx) }()
		time.Sleep(10 * time.Second)
		var dials []time.Time
		for _, at := range c.Stats().Dials {
			if at.After(begin) {
				dials = append(dials, at)
			}
		}
		// A spare each second, which may land on the node that is unready and be made again; and the watchdog's own.
		if n := mostIn(dials, time.Second); n > 2*(1+maxSteer) || len(dials) < 5 {
			t.Errorf("%d dials within a second, %d in all", n, len(dials))
		}
		cancel()
		<-drained
	})
}

// That one role cannot connect is no failure of the sources, where another role asks them.
func TestARoleThatCannotConnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true})
		defer c.Close()
		c.Grant("reader", "VIEWSYSTEMTABLE")
		c.Grant("reader", "VIEWCLUSTERMETADATA")
		logs := &logTrap{}
		var barred, down atomic.Bool
		as := func(user string) *pool {
			p := memPool(t, c, "crdbdrain_poll_interval=5s&crdbdrain_cluster=barred", func(cc *pgx.ConnConfig, con *Connector) {
				if con != nil {
					con.log = logs.logger()
					return
				}
				cc.User = user
				dial := cc.DialFunc
				cc.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
					if user == "expired" && barred.Load() || down.Load() {
						return nil, net.ErrClosed
					}
					return dial(ctx, network, addr)
				}
			})
			mustExec(t, p, "UPDATE t SET x = 1")
			return p
		}
		first := as("expired")
		defer first.Close()
		barred.Store(true)
		second := as("reader")
		defer second.Close()
		time.Sleep(10 * time.Minute)
		w := second.c.watchdog.Load()
		if n := logs.count("source fails"); n > 0 || w.status(sourceInstances).state != sourceOK {
			t.Errorf("%d lines of failures; instances is %d", n, w.status(sourceInstances).state)
		}
		down.Store(true)
		for _, n := range c.Nodes() {
			n.Disconnect(crdbdraintest.Result{End: crdbdraintest.EndRST})
		}
		mustFail := func() bool { return w.status(sourceInstances).state == sourceFailing }
		time.Sleep(time.Minute)
		if !mustFail() {
			t.Errorf("nobody can connect, and instances is %d", w.status(sourceInstances).state)
		}
	})
}
