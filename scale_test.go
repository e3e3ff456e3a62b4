package crdbdrain

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// scale is the size of what one process sees.
type scale struct{ conns, nodes, pools int }

func (s scale) String() string {
	return fmt.Sprintf("conns=%d/nodes=%d/pools=%d", s.conns, s.nodes, s.pools)
}

// scales vary one size at a time, and end with all at their largest.
var scales = []scale{
	{1_000, 3, 1}, {10_000, 3, 1},
	{10_000, 30, 1}, {10_000, 200, 1},
	{10_000, 3, 10}, {10_000, 3, 100},
	{10_000, 200, 100},
}

// scaleConnectors returns connectors of one cluster and of a process of their own. readiness is a number of URLs.
func scaleConnectors(tb testing.TB, n, readiness int) (connectors []*Connector) {
	tb.Helper()
	var urls []string
	for i := range readiness {
		urls = append(urls, fmt.Sprintf("https://node-%d.example:8080", i))
	}
	dsn := "postgres://u@h/d?sslmode=disable&crdbdrain_cluster=scale&crdbdrain_ttl=24h"
	if readiness > 0 {
		dsn += "&crdbdrain_readiness=" + strings.Join(urls, ",")
	}
	process := &watchdogs{}
	for range n {
		c, err := NewConnector(mustParse(tb, dsn).pgx)
		if err != nil {
			tb.Fatal(err)
		}
		c.registry = process
		connectors = append(connectors, c)
	}
	return connectors
}

// paperWatchdog is a watchdog whose idle sessions have no connections, spread at random, and that has no worker.
func paperWatchdog(tb testing.TB, size scale) *watchdog {
	tb.Helper()
	connectors := scaleConnectors(tb, size.pools, 0)
	var w *watchdog
	for _, c := range connectors {
		w = c.attach()
		tb.Cleanup(func() { c.Close() })
	}
	w.rule.Store(ruleHolds)
	ended := make(chan struct{})
	close(ended)
	listed := make(map[nodeID]nodeState)
	dice := rand.New(rand.NewPCG(1, 2))
	w.mu.Lock()
	w.stop, w.done = func() {}, ended
	for i := range size.nodes {
		addr := fmt.Sprintf("10.0.%d.%d:26257", i>>8, i&0xff)
		w.addrs.learn(&attempt{addr: addr, lookups: map[string][]string{fmt.Sprintf("node-%d", i): {addr}}}, nodeID(i+1))
		listed[nodeID(i+1)] = nodeState{live: true}
	}
	w.sources[sourceInstances] = sourceStatus{state: sourceOK, nodes: listed, answered: time.Now()}
	w.mu.Unlock()
	long := time.Now().Add(-time.Minute)
	for i := range size.conns {
		s := &session{connector: connectors[dice.IntN(size.pools)], w: w, id: nodeID(1 + i%size.nodes), opened: long, link: &link{}}
		w.add(s, &attempt{})
		s.idled.Store(now() - int64(time.Second))
		s.state.Store(sessionIdle)
	}
	return w
}

// someDrain marks up to five nodes, and leaves one at least.
func (w *watchdog) someDrain(size scale) {
	for id := 1; id <= min(5, size.nodes-1); id++ {
		w.say(nodeID(id))
	}
}

// BenchmarkScale is what the watchdog does, by the size of what it looks after. All of it but the poll, the join and the
// memory is done with watchdog.mu held, so that the time is for how long a new connection, a lost one and a cull may wait.
// Up to five nodes drain where that matters.
func BenchmarkScale(b *testing.B) {
	for _, op := range []struct {
		name string
		run  func(*testing.B, *watchdog, scale)
	}{
		// One goodbye, heard on one connection, of a node that is known to drain.
		{"mark", func(b *testing.B, w *watchdog, size scale) {
			w.someDrain(size)
			s := w.anySession()
			for b.Loop() {
				w.heardGoodbye(s)
				w.tellQueued()
			}
		}},
		// The list of idle connections to sweep; every 50 ms while a node is marked.
		{"sweep", func(b *testing.B, w *watchdog, size scale) {
			w.someDrain(size)
			m := w.marks.Load()
			var sw sweeper
			for b.Loop() {
				sw.list(w, m)
			}
		}},
		// A new connection, and the end of one.
		{"add and remove", func(b *testing.B, w *watchdog, size scale) {
			w.someDrain(size)
			s := &session{connector: w.members[0], w: w, id: nodeID(size.nodes), opened: time.Now(), link: &link{}}
			for b.Loop() {
				w.add(s, &attempt{})
				w.remove(s)
			}
		}},
		// Before every dial while a node is marked: which hosts come last.
		{"order of hosts", func(b *testing.B, w *watchdog, size scale) {
			w.someDrain(size)
			for b.Loop() {
				w.markedHosts()
			}
		}},
		// The way home's look for a move, where there is none to find.
		{"plan", func(b *testing.B, w *watchdog, _ scale) {
			for b.Loop() {
				w.balance.active = true
				w.plan()
			}
		}},
		// The way home's choice of a connection to replace.
		{"surplus", func(b *testing.B, w *watchdog, _ scale) {
			s := w.anySession()
			for b.Loop() {
				w.surplus(s.connector, s)
			}
		}},
		// The TTL's look for the oldest connection.
		{"oldest", func(b *testing.B, w *watchdog, _ scale) {
			for b.Loop() {
				w.oldest(time.Now())
			}
		}},
		// A source's answer, as before.
		{"answer", func(b *testing.B, w *watchdog, size scale) {
			w.someDrain(size)
			nodes := w.sources[sourceInstances].nodes
			for b.Loop() {
				t := time.Now()
				w.mu.Lock()
				w.untold = w.apply(sourceInstances, nodes, t, t)
				w.mu.Unlock()
				w.tellQueued()
			}
		}},
		// A reading of the metrics.
		{"metrics", func(b *testing.B, w *watchdog, size scale) {
			w.someDrain(size)
			w.members[0].nodeMetric = true
			for b.Loop() {
				w.observe(scaleObserver{}, nil, nil, nil, nil, nil, nil)
			}
		}},
		{"Nodes", func(b *testing.B, w *watchdog, _ scale) {
			for b.Loop() {
				w.members[0].Nodes()
			}
		}},
	} {
		for _, size := range scales {
			b.Run(op.name+"/"+size.String(), func(b *testing.B) {
				w := paperWatchdog(b, size)
				b.ReportAllocs()
				b.ResetTimer()
				op.run(b, w, size)
				b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N), "µs/op")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// anySession returns one of node 1.
func (w *watchdog) anySession() *session {
	w.mu.Lock()
	defer w.mu.Unlock()
	for s := range w.nodes[1].held {
		return s
	}
	return nil
}

type scaleObserver struct{ noop.Observer }

func (scaleObserver) ObserveInt64(_ metric.Int64Observable, _ int64, opts ...metric.ObserveOption) {
	if set := metric.NewObserveConfig(opts).Attributes(); !set.HasValue(attribute.Key("crdbdrain.cluster")) {
		panic("no cluster")
	}
}

// BenchmarkScaleGoodbyes is a drain without a warning: every connection to one of three nodes hears the goodbye and ends.
func BenchmarkScaleGoodbyes(b *testing.B) {
	for _, conns := range []int{1_000, 3_000, 10_000, 30_000} {
		size := scale{conns, 3, 1}
		b.Run(size.String(), func(b *testing.B) {
			lost, took := 0, time.Duration(0)
			for b.Loop() {
				w := paperWatchdog(b, size)
				var all []*session
				w.mu.Lock()
				for s := range w.nodes[1].held {
					all = append(all, s)
				}
				w.mu.Unlock()
				start := time.Now()
				for _, s := range all {
					w.heardGoodbye(s)
					w.remove(s)
				}
				w.tellQueued()
				took += time.Since(start)
				lost += len(all)
			}
			b.ReportMetric(float64(took.Microseconds())/float64(lost), "µs/connection")
			b.ReportMetric(float64(took.Milliseconds())/float64(b.N), "ms/drain")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkScaleJoin is the start of a process: pools that make their first connection, each with every node's readiness
// URL.
func BenchmarkScaleJoin(b *testing.B) {
	for _, size := range []scale{{0, 3, 10}, {0, 3, 100}, {0, 30, 100}, {0, 200, 10}, {0, 200, 100}} {
		b.Run(fmt.Sprintf("nodes=%d/pools=%d", size.nodes, size.pools), func(b *testing.B) {
			took := time.Duration(0)
			for b.Loop() {
				connectors := scaleConnectors(b, size.pools, size.nodes)
				start := time.Now()
				for _, c := range connectors {
					c.attach()
				}
				took += time.Since(start)
				for _, c := range connectors {
					c.Close()
				}
			}
			b.ReportMetric(float64(took.Microseconds())/float64(b.N)/float64(size.pools), "µs/pool")
			b.ReportMetric(float64(took.Microseconds())/float64(b.N)/1000, "ms/process")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkScalePoll is one poll of both SQL sources, the simulated server's work included.
func BenchmarkScalePoll(b *testing.B) {
	for _, nodes := range []int{3, 30, 200} {
		for _, pools := range []int{1, 100} {
			b.Run(fmt.Sprintf("nodes=%d/pools=%d", nodes, pools), func(b *testing.B) {
				c := startCluster(b, crdbdraintest.Config{Memory: true, Nodes: nodes})
				c.Grant("app", "VIEWSYSTEMTABLE")
				c.Grant("app", "VIEWCLUSTERMETADATA")
				process := &watchdogs{}
				var w *watchdog
				for range pools {
					p := memPool(b, c, "crdbdrain_poll_interval=1h&crdbdrain_poll_timeout=1m&crdbdrain_cluster=scale", func(_ *pgx.ConnConfig, con *Connector) {
						if con != nil {
							con.registry = process
						}
					})
					b.Cleanup(func() { p.Close() })
					mustExec(b, p, "UPDATE t SET x = 1")
					w = p.c.watchdog.Load()
				}
				p := newPoller(w)
				defer p.close()
				poll := func() {
					r := p.poll(context.Background(), w.ask(time.Now()))
					w.take(r)
					if len(r.answers) != 2 || r.answers[0].err != nil || len(r.answers[0].nodes) != nodes {
						b.Fatalf("%+v", r)
					}
				}
				poll()
				statements := asked(c, sqlInstances)
				for b.Loop() {
					poll()
				}
				if n := asked(c, sqlInstances) - statements; n < b.N {
					b.Errorf("%d statements for %d polls", n, b.N)
				}
				b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N), "µs/op")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkScaleMemory is what the driver keeps for a connection, without pgx's part.
func BenchmarkScaleMemory(b *testing.B) {
	for _, size := range scales {
		b.Run(size.String(), func(b *testing.B) {
			per := 0.0
			for b.Loop() {
				before := heap()
				w := paperWatchdog(b, size)
				per = float64(heap()-before) / float64(size.conns)
				runtime.KeepAlive(w)
			}
			b.ReportMetric(per, "B/connection")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// fullScale reports whether CRDBDRAIN_SCALE asks for the sizes of docs/scale.md.
func fullScale() bool { return os.Getenv("CRDBDRAIN_SCALE") != "" }

// Pools in one process, whose connections are on many nodes: five nodes drain at once. All leave within the window, nothing
// is lost, no call fails, the dials keep the pace, and the cluster is asked once an interval for all pools.
// CRDBDRAIN_SCALE=1 makes it 100 pools, 10,000 connections and 200 nodes.
func TestScaleFiveDrainsAtOnce(t *testing.T) {
	sizes := []scale{{conns: 240, nodes: 12, pools: 6}}
	if fullScale() {
		sizes = []scale{{10_000, 200, 100}}
	}
	for _, size := range sizes {
		t.Run(size.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { fiveDrainsAtOnce(t, size) })
		})
	}
}

func fiveDrainsAtOnce(t *testing.T, size scale) {
	const drains, window = 5, 10 * time.Second
	c := crdbdraintest.Start(crdbdraintest.Config{Memory: true, Nodes: size.nodes, Latency: time.Millisecond,
		LoadBalancer: crdbdraintest.LoadBalancerConfig{Interval: 500 * time.Millisecond}, Settings: crdbdraintest.Settings{
			InitialWait: 2 * time.Second, ConnectionsTimeout: 8 * time.Second, TransactionsTimeout: 10 * time.Second}})
	defer c.Close()
	c.Grant("app", "VIEWSYSTEMTABLE")
	pools := scalePools(t, c, size)
	defer func() {
		for _, p := range pools {
			p.Close()
		}
	}()
	time.Sleep(5 * time.Second) // virtual: the stamps are verified
	w := pools[0].dog(t)
	var loads []*load
	for _, p := range pools {
		loads = append(loads, startLoad(t, p.DB, 1, 100*time.Millisecond))
	}
	polls, start := asked(c, sqlInstances), time.Now()
	held := 0
	results := make(chan crdbdraintest.DrainResult, drains)
	for id := 1; id <= drains; id++ {
		held += c.Node(id).Stats().Open
		go func() { results <- c.Node(id).Drain(context.Background()) }()
	}
	longest := time.Duration(0)
	for range drains {
		d := <-results
		longest = max(longest, d.Duration)
		if d.LostIdle+d.LostBusy > 0 || d.Duration > window {
			t.Errorf("%d idle and %d busy connections lost in %v", d.LostIdle, d.LostBusy, d.Duration)
		}
	}
	took := time.Since(start)
	var dials []time.Time
	for _, at := range c.Stats().Dials {
		if at.After(start) {
			dials = append(dials, at)
		}
	}
	// As in H07: the pace, the spares that every pool dials first, and the dials that land on a draining node.
	most, allowed := mostIn(dials, 100*time.Millisecond), int(float64(held)/(window.Seconds()*windowShare)/10)+1
	if most > 2*allowed+size.pools*(pools[0].c.cfg.spares+maxSteer) {
		t.Errorf("%d dials within 100 ms, want about %d, and the spares of %d pools", most, allowed, size.pools)
	}
	if n := asked(c, sqlInstances) - polls; float64(n) > took.Seconds()/0.8+2 {
		t.Errorf("%d polls in %v, want one a second", n, took)
	}
	for id := 1; id <= drains; id++ {
		c.Node(id).Stop()
		c.Node(id).Start()
	}
	time.Sleep(time.Minute)
	var sum Stats
	for i, p := range pools {
		if l := loads[i].stop(); len(l.errors) > 0 {
			t.Errorf("errors: %v", l.errors)
		}
		s := p.c.Stats()
		sum.Culled, sum.Lost, sum.Moved, sum.Steered = sum.Culled+s.Culled, sum.Lost+s.Lost, sum.Moved+s.Moved, sum.Steered+s.Steered
	}
	if sum.Lost > 0 || sum.Culled == 0 || w.marks.Load() != nil {
		t.Errorf("%d lost, %d culled, marks %v", sum.Lost, sum.Culled, w.marks.Load())
	}
	back := 0
	for id := 1; id <= drains; id++ {
		back += c.Node(id).Stats().Open
	}
	t.Logf("%d connections on %d draining nodes, the last one left after %v, at most %d dials in 100 ms and %d in all; %d culled, %d lost, %d steered; a minute later the nodes have %d again, by %d moves",
		held, drains, longest.Round(time.Millisecond), most, len(dials), sum.Culled, sum.Lost, sum.Steered, back, sum.Moved)
}

// scalePools opens a process's pools on a cluster, and fills them.
func scalePools(t testing.TB, c *crdbdraintest.Cluster, size scale) (pools []*pool) {
	t.Helper()
	process := &watchdogs{}
	for range size.pools {
		p := memPool(t, c, "crdbdrain_sources=instances&crdbdrain_poll_interval=1s&crdbdrain_window=10s&crdbdrain_cluster=scale", func(_ *pgx.ConnConfig, con *Connector) {
			if con != nil {
				con.registry = process
			}
		})
		fill(t, p.DB, size.conns/size.pools)
		pools = append(pools, p)
	}
	return pools
}

// The way home of several pools: 30 connections each, three nodes, of which one comes back, for all of them together.
// CRDBDRAIN_SCALE=1 makes it up to 100 pools.
func TestScaleWayHome(t *testing.T) {
	sizes := []int{1, 3}
	if fullScale() {
		sizes = []int{1, 10, 100}
	}
	for _, pools := range sizes {
		t.Run(fmt.Sprintf("%d pools", pools), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				size := scale{30 * pools, 3, pools}
				c := crdbdraintest.Start(crdbdraintest.Config{Memory: true, Settings: crdbdraintest.Settings{
					InitialWait: 2 * time.Second, ConnectionsTimeout: 8 * time.Second, TransactionsTimeout: 10 * time.Second}})
				defer c.Close()
				c.Grant("app", "VIEWSYSTEMTABLE")
				all := scalePools(t, c, size)
				defer func() {
					for _, p := range all {
						p.Close()
					}
				}()
				time.Sleep(5 * time.Second)
				if d := c.Node(3).Drain(context.Background()); d.LostIdle+d.LostBusy > 0 {
					t.Errorf("%d idle and %d busy connections lost", d.LostIdle, d.LostBusy)
				}
				c.Node(3).Stop()
				time.Sleep(10 * time.Second)
				for _, p := range all {
					fill(t, p.DB, 30) // a pool opens what has left only when it is wanted
				}
				start := time.Now()
				c.Node(3).Start()
				for c.Node(3).Stats().Open < size.conns/4 {
					if time.Since(start) > time.Hour {
						t.Fatalf("after an hour the connections are spread %v", spread(c))
					}
					time.Sleep(100 * time.Millisecond)
				}
				took := time.Since(start)
				t.Logf("%d pools: %v until the spread is %v", pools, took, spread(c))
				if limit := 2 * moveWithin; took > limit {
					t.Errorf("the way home of %d pools took %v, want at most %v", pools, took, limit)
				}
			})
		})
	}
}

// Over sockets: pools whose connections are on many nodes, under load, and five nodes that drain at once; and how long
// somebody who wants the watchdog's lock meanwhile waits for it. CRDBDRAIN_SCALE=7000 makes it 7,000 connections (two
// descriptors each), 100 pools and 200 nodes.
func TestScaleSockets(t *testing.T) {
	size, window, interval := scale{conns: 200, nodes: 8, pools: 4}, 5*time.Second, 200*time.Millisecond
	if fullScale() {
		n, err := strconv.Atoi(os.Getenv("CRDBDRAIN_SCALE"))
		if err != nil || n < 1000 {
			t.Skip("CRDBDRAIN_SCALE is not a number of connections")
		}
		size, window, interval = scale{conns: n, nodes: 200, pools: 100}, 20*time.Second, time.Second
	}
	const drains = 5
	c := startCluster(t, crdbdraintest.Config{Nodes: size.nodes, LoadBalancer: crdbdraintest.LoadBalancerConfig{Interval: time.Minute}, Settings: crdbdraintest.Settings{
		InitialWait: time.Second, ConnectionsTimeout: window - time.Second, TransactionsTimeout: 10 * time.Second}})
	c.Grant("app", "VIEWSYSTEMTABLE")
	before := heap()
	var pools []*pool
	for range size.pools {
		p := open(t, c.DSNAll(), fmt.Sprintf("crdbdrain_sources=instances&crdbdrain_poll_interval=%v&crdbdrain_window=%v", interval, window))
		fill(t, p.DB, size.conns/size.pools)
		pools = append(pools, p)
	}
	memory := float64(heap()-before) / float64(size.conns)
	w := pools[0].c.watchdog.Load()
	within(t, time.Minute, "the stamps are verified", func() bool { return w.rule.Load() == ruleHolds })
	var loads []*load
	for _, p := range pools[:4] {
		loads = append(loads, startLoad(t, p.DB, 2, time.Millisecond))
	}
	// The watchdog's lock, as somebody else sees it.
	ctx, cancel := context.WithCancel(t.Context())
	var probe sync.WaitGroup
	wait := func() (longest func() time.Duration) {
		var mu sync.Mutex
		var most time.Duration
		probe.Go(func() {
			for ctx.Err() == nil {
				start := time.Now()
				w.mu.Lock()
				took := time.Since(start)
				w.mu.Unlock()
				mu.Lock()
				most = max(most, took)
				mu.Unlock()
				time.Sleep(200 * time.Microsecond)
			}
		})
		return func() time.Duration {
			mu.Lock()
			defer mu.Unlock()
			d := most
			most = 0
			return d
		}
	}()
	time.Sleep(time.Second) // of load, for the probe
	atRest := wait()
	results := make(chan crdbdraintest.DrainResult, drains)
	held := 0
	for id := 1; id <= drains; id++ {
		held += c.Node(id).Stats().Open
		go func() { results <- c.Node(id).Drain(context.Background()) }()
	}
	longest, lost := time.Duration(0), 0
	for range drains {
		d := <-results
		longest, lost = max(longest, d.Duration), lost+d.LostIdle+d.LostBusy
	}
	withWindow := wait()
	if lost > 0 || longest > window {
		t.Errorf("%d connections lost in %v", lost, longest)
	}
	c.SetSettings(crdbdraintest.Settings{TransactionsTimeout: 10 * time.Second})
	for id := drains + 1; id < drains+3; id++ {
		c.Node(id).Drain(context.Background())
	}
	for _, p := range pools {
		fill(t, p.DB, size.conns/size.pools) // looks at every connection
	}
	without := wait()
	cancel()
	probe.Wait()
	for _, l := range loads {
		if l.stop(); len(l.errors) > 0 {
			t.Errorf("errors: %v", l.errors)
		}
	}
	t.Logf("%v: %.0f bytes a connection, both ends; %d connections left five nodes in %v; the longest wait for the watchdog's lock was %v at rest, %v in the drains with a window, %v in two without",
		size, memory, held, longest, atRest, withWindow, without)
}
