package crdbdrain

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

const (
	soakConns   = 15 // in each of the two pools
	soakWorkers = 8  // on each
	soakWindow  = 5 * time.Second
	soakUpdate  = "UPDATE soak SET n = n + 1 WHERE id = $1"
)

var soakSettings = crdbdraintest.Settings{ // soakWindow in all
	InitialWait: 300 * time.Millisecond, ConnectionsTimeout: 4700 * time.Millisecond, TransactionsTimeout: 10 * time.Second}

// The rounds of a soak, in turn.
var soakRounds = []struct {
	name string
	run  func(*soak) (lost int)
}{
	{"roll with a window", (*soak).rollWithWindow},
	{"roll without one", (*soak).rollWithoutWindow},
	{"drain withdrawn", (*soak).undrain},
	{"decommission", (*soak).decommission},
	{"kill", (*soak).kill},
}

// TestSoak restarts the nodes of a cluster under full load again and again, with everything that the driver does in the
// background switched on: two pools, every source, spares, the way home, a TTL, a ceiling. After every round the load
// stops, and the test counts: no error and no lost connection where there is a window, no error where there is none, every
// statement executed once, every loss and refusal that the server counted counted once by the driver, and as many
// goroutines, descriptors, bytes, metric series and places under the ceiling as after the first round.
//
//	CRDBDRAIN_SOAK=2h go test -race -run '^TestSoak$' -v -timeout 3h .
//
// Without the variable it makes one turn of the rounds, in about 15 s.
func TestSoak(t *testing.T) {
	lasts := time.Duration(0)
	if text := os.Getenv("CRDBDRAIN_SOAK"); text != "" {
		var err error
		if lasts, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	s := newSoak(t)
	start := time.Now()
	first := s.atRest()
	t.Logf("at the start: %v", first)
	for i := 0; !t.Failed() && (i < len(soakRounds) || time.Since(start) < lasts); i++ {
		s.round(i)
		now := s.atRest()
		if i == 0 {
			first = now // what is once for a process has been made
		}
		t.Logf("round %d, %s: %s; %v", i+1, soakRounds[i%len(soakRounds)].name, s.line, now)
		now.compare(t, first, s.restarts)
	}
	t.Logf("%v, %d rounds, %d restarts: %d operations, %d errors in kills and %d else, %+v; %d lost without a window, %d with one; at first %v, at last %v",
		time.Since(start).Round(time.Second), s.rounds, s.restarts, s.ops, s.killErrors, s.errors, s.stats(), s.lostWithout, s.lostWith, first, s.atRest())
}

// soak is a cluster, the pools on it, and what has been seen.
type soak struct {
	*testing.T
	c     *crdbdraintest.Cluster
	pools []*pool
	meter meter
	spy   soakSpy
	next  int // node

	line                                      string // of the last round
	rounds, restarts, ops, errors, killErrors int
	lostWith, lostWithout                     int // by the server, the watchdog's connections among them
	load                                      *soakLoad
}

func newSoak(t *testing.T) *soak {
	s := &soak{T: t, c: startCluster(t, crdbdraintest.Config{Settings: soakSettings, Latency: time.Millisecond}), meter: newMeter(t)}
	s.c.Grant("app", "VIEWSYSTEMTABLE")
	s.c.Grant("app", "VIEWCLUSTERMETADATA")
	for _, ttl := range []string{"0", "5s"} {
		cc, err := pgx.ParseConfig(s.c.DSN() + "&crdbdrain_poll_interval=200ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_window=" + soakWindow.String() +
			"&crdbdrain_cull_stagger=50ms&crdbdrain_max_connections=100&crdbdrain_ttl_stagger=250ms&crdbdrain_ttl=" + ttl + "&crdbdrain_readiness=" + s.c.ReadinessURLs())
		if err != nil {
			t.Fatal(err)
		}
		cc.DialFunc = s.spy.dial
		con, err := NewConnector(cc, WithMeterProvider(s.meter), WithNodeMetric())
		if err != nil {
			t.Fatal(err)
		}
		db := sql.OpenDB(con)
		t.Cleanup(func() { db.Close() })
		s.pools = append(s.pools, &pool{db, con})
	}
	s.fill()
	return s
}

func (s *soak) fill() {
	for _, p := range s.pools {
		fill(s, p.DB, soakConns)
	}
}

// round makes one round under load, and counts what came of it.
func (s *soak) round(i int) {
	r := soakRounds[i%len(soakRounds)]
	before, statsBefore, spyBefore := s.c.Stats(), s.stats(), s.spy.counts()
	s.load = startSoakLoad(s.pools)
	s.work()
	begin := time.Now()
	lost := r.run(s)
	took := time.Since(begin)
	s.work()
	s.load.stop()
	s.settle()
	after, stats, spy := s.c.Stats(), s.stats(), s.spy.counts()
	l := s.load

	s.rounds++
	s.ops += int(l.ops.Load())
	killed := 0
	for _, e := range l.errors {
		var pg *pgconn.PgError
		if r.name == "kill" && e.started.Before(l.noticed) && !errors.As(e.err, &pg) {
			killed++ // a connection that ended in the middle, or a dial to the node, before the load balancer had noticed
			continue
		}
		s.errors++
		s.Errorf("%s: %v after the round's begin: %v", r.name, e.started.Sub(begin), e.err)
	}
	s.killErrors += killed
	// Every statement that was acknowledged has been executed once; one that a kill cut off may have been, once.
	executed, acked := after.Statements[soakUpdate]-before.Statements[soakUpdate], int(l.acked.Load())
	if executed < acked || executed > acked+2*killed {
		s.Errorf("%s: %d updates executed, %d acknowledged, %d errors", r.name, executed, acked, killed)
	}
	// What the server closed was lost by a pool, or was the watchdog's own, or was on its way out already: the goodbyes crossed.
	server := after.LostIdle + after.LostBusy - before.LostIdle - before.LostBusy
	side := spy.lost - spyBefore.lost
	counted := int(stats.Lost - statsBefore.Lost)
	leaving := int(stats.Culled + stats.Moved + stats.Steered - statsBefore.Culled - statsBefore.Moved - statsBefore.Steered)
	crossed := server - side - counted
	if lost != server || crossed < 0 || crossed > leaving+2*s.pools[0].c.cfg.spares {
		s.Errorf("%s: the drains closed %d connections, the server counted %d, %d of them the watchdog's; the pools counted %d, %d others were leaving",
			r.name, lost, server, side, counted, leaving)
	}
	if r.name == "roll without one" {
		s.lostWithout += lost
	} else {
		s.lostWith += lost
		if lost > 0 || counted > 0 {
			s.Errorf("%s: %d lost by the server, %d by the driver", r.name, lost, counted)
		}
	}
	// Each refusal that a client heard was counted once; one that it did not hear was cut off.
	refused, heard := after.Refused-before.Refused, spy.refused-spyBefore.refused
	if counted := int(stats.Refused-statsBefore.Refused) + spy.sideRefused - spyBefore.sideRefused; counted != heard || heard > refused || refused-heard > spy.mute-spyBefore.mute {
		s.Errorf("%s: the server refused %d dials, %d were told, %d of the watchdog's; the pools counted %d, %d ended without a word", r.name, refused, heard,
			spy.sideRefused-spyBefore.sideRefused, counted, spy.mute-spyBefore.mute)
	}
	s.metrics()
	s.line = fmt.Sprintf("%v, %d operations, slowest %v, %d errors, lost %d+%d (%d the watchdog's, %d crossed), culled %d, moved %d, rerun %d, refused %d, steered %d",
		took.Round(time.Millisecond), l.ops.Load(), time.Duration(l.slowest.Load()).Round(time.Millisecond), len(l.errors), counted, server-counted, side, crossed,
		stats.Culled-statsBefore.Culled, stats.Moved-statsBefore.Moved, stats.Rerun-statsBefore.Rerun, refused, stats.Steered-statsBefore.Steered)
}

// work waits until the load has done some.
func (s *soak) work() {
	before := s.load.ops.Load()
	within(s, 20*time.Second, "500 operations", func() bool { return s.load.ops.Load() >= before+500 })
}

// stats is both pools'.
func (s *soak) stats() (sum Stats) {
	for _, p := range s.pools {
		one := p.c.Stats()
		sum.Culled += one.Culled
		sum.Observed += one.Observed
		sum.Lost += one.Lost
		sum.Throttled += one.Throttled
		sum.Rerun += one.Rerun
		sum.Refused += one.Refused
		sum.Moved += one.Moved
		sum.Steered += one.Steered
	}
	return sum
}

// metrics holds the metrics against the statistics. The TTL goes on at rest: they are read until nothing moves meanwhile.
func (s *soak) metrics() {
	var all map[string]series
	var differ string
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		stats := s.stats()
		all, differ = s.meter.read(s), ""
		culled := all["crdbdrain.connection.culled"]
		for what, pair := range map[string][2]float64{
			"culled":    {culled.total("reason=draining") + culled.total("reason=decommissioning"), float64(stats.Culled)},
			"moved":     {culled.total("reason=rebalance") + culled.total("reason=ttl"), float64(stats.Moved)},
			"lost":      {all["crdbdrain.connection.lost"].total(), float64(stats.Lost)},
			"throttled": {all["crdbdrain.cull.throttled"].total(), float64(stats.Throttled)},
			"rerun":     {all["crdbdrain.statement.rerun"].total(), float64(stats.Rerun)},
			"refused":   {all["crdbdrain.dial.refused"].total("sqlstate=57P01"), float64(stats.Refused)},
			"steered":   {all["crdbdrain.dial.steered"].total(), float64(stats.Steered)},
			"rejected":  {all["crdbdrain.connection.rejected"].total(), 0},
		} {
			if pair[0] != pair[1] {
				differ += fmt.Sprintf(" %s: %v by the metrics, %v by the statistics;", what, pair[0], pair[1])
			}
		}
		if differ == "" || time.Now().After(deadline) {
			break
		}
	}
	if differ != "" {
		s.Error(differ)
	}
	checkTable(s, all)
}

// node is the next one in turn.
func (s *soak) node() *crdbdraintest.Node {
	s.next = s.next%len(s.c.Nodes()) + 1
	return s.c.Node(s.next)
}

// restart ends the process of a node that has been drained, and waits until dials reach its successor.
func (s *soak) restart(n *crdbdraintest.Node) {
	n.Stop()
	n.Start()
	s.restarts++
	within(s, 10*time.Second, "the load balancer sees the node", func() bool { return s.c.LoadBalancer().Up(n.ID()) })
}

func (s *soak) rollWithWindow() (lost int) {
	for range s.c.Nodes() {
		n := s.node()
		d := n.Drain(context.Background())
		if d.Err != nil || d.Duration > soakWindow {
			s.Errorf("node %d: the drain took %v: %v", n.ID(), d.Duration, d.Err)
		}
		lost += d.LostIdle + d.LostBusy
		s.restart(n)
		s.unmarked()
	}
	return lost
}

func (s *soak) rollWithoutWindow() (lost int) {
	s.c.SetSettings(crdbdraintest.Settings{TransactionsTimeout: soakSettings.TransactionsTimeout})
	defer s.c.SetSettings(soakSettings)
	for range s.c.Nodes() {
		n := s.node()
		d := n.Drain(context.Background())
		if d.Err != nil {
			s.Errorf("node %d: %v", n.ID(), d.Err)
		}
		lost += d.LostIdle + d.LostBusy
		s.restart(n)
		// The load finds its way back before the next node goes.
		within(s, 10*time.Second, "a connection to the node", func() bool { return n.Stats().Open > 0 })
		s.work()
	}
	return lost
}

func (s *soak) undrain() (lost int) {
	n := s.node()
	done := make(chan crdbdraintest.DrainResult)
	go func() { done <- n.Drain(context.Background()) }()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := n.WaitStep(ctx, crdbdraintest.Refusing); err != nil {
		s.Error(err)
	}
	n.Undrain()
	d := <-done
	if !errors.Is(d.Err, crdbdraintest.ErrUndrained) {
		s.Errorf("node %d: %v, want a drain that was withdrawn", n.ID(), d.Err)
	}
	s.unmarked()
	return d.LostIdle + d.LostBusy
}

// decommission drains a node that the pools have left long ago. The operator then changes their mind: a simulated cluster
// that grew by a node each time would be what grows.
func (s *soak) decommission() (lost int) {
	n := s.node()
	n.Decommission()
	w := s.dog()
	within(s, 20*time.Second, "the pools have left the node", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		d := w.drains[nodeID(n.ID())]
		return d != nil && d.done
	})
	d := n.Drain(context.Background())
	n.Recommission()
	s.restart(n)
	s.unmarked()
	return d.LostIdle + d.LostBusy
}

// kill ends a node without a drain. Nothing can hide that from the calls under way; those that begin after the load
// balancer has noticed must not see it.
func (s *soak) kill() (lost int) {
	n := s.node()
	n.Kill()
	within(s, 10*time.Second, "the load balancer misses the node", func() bool { return !s.c.LoadBalancer().Up(n.ID()) })
	s.load.noticed = time.Now()
	s.work()
	s.restart(n)
	return 0
}

func (s *soak) dog() *watchdog { return s.pools[0].dog(s) }

// unmarked waits until the driver knows that no node drains.
func (s *soak) unmarked() {
	w := s.dog()
	within(s, 20*time.Second, "no node is marked", func() bool { return w.marks.Load() == nil })
}

// settle fills the pools, and waits until nothing is under way: what the server has open is what the pools hold, each with
// its place under the ceiling, and the watchdog's own.
func (s *soak) settle() {
	for _, n := range s.c.Nodes() {
		within(s, 10*time.Second, "the load balancer sees every node", func() bool { return s.c.LoadBalancer().Up(n.ID()) })
	}
	s.unmarked()
	s.fill() // looks at every connection: a pool keeps those that have ended until then
	var u soakUnrest
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		if u = s.unrest(); u.none() {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("the pools do not come to rest: %+v", u)
		}
	}
}

// soakUnrest is what there is of connections, and what is on its way.
type soakUnrest struct {
	inPools, held, placed, atServer, sides int
	pending, moving, spares, dialing       int
}

func (u soakUnrest) none() bool {
	return u.held == u.inPools && u.placed == u.inPools && u.atServer == u.inPools+u.sides && u.pending+u.moving+u.spares+u.dialing == 0
}

func (s *soak) unrest() (u soakUnrest) {
	w := s.dog()
	w.mu.Lock()
	u.held, u.pending = w.conns, len(w.pending)
	w.mu.Unlock()
	u.moving, u.placed = int(w.moving.Load()), int(s.pools[0].c.ceiling.Load().used.Load())
	for _, p := range s.pools {
		u.inPools += p.DB.Stats().OpenConnections
		u.spares += int(p.c.spares.count.Load())
		u.dialing += int(p.c.dialing.Load())
	}
	u.atServer, u.sides = s.c.Stats().Open, s.spy.counts().sides
	return u
}

// soakRest is what there is when nothing happens and both pools are full.
type soakRest struct {
	goroutines, descriptors, series int
	heap                            int64
}

func (r soakRest) String() string {
	return fmt.Sprintf("%d goroutines, %d descriptors, %d KiB, %d series", r.goroutines, r.descriptors, r.heap>>10, r.series)
}

func (s *soak) atRest() (r soakRest) {
	s.settle()
	r.heap = int64(heap()) - simulatorHeap(s.c) // which also closes what nobody refers to any more: pipes of io.Copy
	// HTTP connections come and go with the nodes: the fewest of half a second is what stays.
	r.goroutines, r.descriptors = runtime.NumGoroutine(), descriptors()
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if s.unrest().none() {
			r.goroutines, r.descriptors = min(r.goroutines, runtime.NumGoroutine()), min(r.descriptors, descriptors())
		}
	}
	for name, m := range s.meter.read(s) {
		if name != "crdbdrain.poll.duration" && name != "crdbdrain.drain.duration" { // these begin with their first measurement
			r.series += len(m.points)
		}
	}
	return r
}

// compare holds a rest against the first one's. The tolerances are for what differs from one rest to the next without
// growing: of goroutines and descriptors, HTTP connections of readiness and the load balancer's checks (three nodes, two
// clients, four goroutines and two descriptors each); of the heap, buffers of closed connections that sync.Pools still have,
// caches of 30 connections that are full or not (30 × 16 KiB), and for each restart what the simulated node keeps of it.
// A leak of one goroutine or descriptor, or of 10 KiB, a round shows within two hundred rounds.
func (r soakRest) compare(t testing.TB, first soakRest, restarts int) {
	t.Helper()
	if r.goroutines > first.goroutines+24 {
		t.Errorf("%d goroutines after %d at first", r.goroutines, first.goroutines)
	}
	if r.descriptors > first.descriptors+12 {
		t.Errorf("%d descriptors after %d at first", r.descriptors, first.descriptors)
	}
	if r.heap > first.heap+1<<20+int64(restarts)<<10 {
		t.Errorf("%d bytes of heap after %d at first", r.heap, first.heap)
	}
	if r.series != first.series {
		t.Errorf("%d metric series after %d at first", r.series, first.series)
	}
}

// descriptors returns how many the process has open, and -1 where the system does not tell.
func descriptors() int {
	open, err := os.ReadDir("/dev/fd")
	if err != nil {
		return -1
	}
	return len(open)
}

// simulatorHeap measures what the simulated cluster keeps for its Stats, which have every dial that there ever was: it
// makes a second one of each.
func simulatorHeap(c *crdbdraintest.Cluster) int64 {
	stats := c.Stats()
	before := heap()
	startups := make([]map[string]string, 0, len(stats.Startups))
	for _, params := range stats.Startups {
		again := make(map[string]string)
		for k, v := range params {
			again[strings.Clone(k)] = strings.Clone(v)
		}
		startups = append(startups, again)
	}
	dials := append(make([]time.Time, 0, len(stats.Dials)), stats.Dials...)
	after := heap()
	runtime.KeepAlive(startups)
	runtime.KeepAlive(dials)
	runtime.KeepAlive(stats)
	return int64(after) - int64(before)
}

// soakLoad is the load of one round.
type soakLoad struct {
	ops, acked, slowest atomic.Int64
	noticed             time.Time // in a kill, when the load balancer had noticed
	stop                func()

	mu     sync.Mutex
	errors []soakError // guarded by mu until stop has returned
}

type soakError struct {
	started time.Time
	err     error
}

func startSoakLoad(pools []*pool) *soakLoad {
	l := &soakLoad{}
	ctx, cancel := context.WithCancel(context.Background())
	var workers sync.WaitGroup
	for _, p := range pools {
		for i := range soakWorkers {
			workers.Go(func() {
				for n := i; ctx.Err() == nil; n++ {
					started := time.Now()
					if err := l.op(p.DB, n); err != nil {
						l.mu.Lock()
						l.errors = append(l.errors, soakError{started, err})
						l.mu.Unlock()
					}
					l.ops.Add(1)
					for took := int64(time.Since(started)); ; {
						if old := l.slowest.Load(); took <= old || l.slowest.CompareAndSwap(old, took) {
							break
						}
					}
				}
			})
		}
	}
	l.stop = func() { cancel(); workers.Wait() }
	return l
}

// op is a query, an update, or a transaction of two updates.
func (l *soakLoad) op(db *sql.DB, n int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	switch n % 3 {
	case 0:
		var one int
		return db.QueryRowContext(ctx, "SELECT 1").Scan(&one)
	case 1:
		if _, err := db.ExecContext(ctx, soakUpdate, n); err != nil {
			return fmt.Errorf("update: %w", err)
		}
		l.acked.Add(1)
		return nil
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer tx.Rollback()
	for range 2 {
		if _, err := tx.ExecContext(ctx, soakUpdate, n); err != nil {
			return fmt.Errorf("update in a transaction: %w", err)
		}
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	l.acked.Add(2)
	return nil
}

// soakSpy hears what the server says on every connection, and knows the watchdog's own, which no statistics count.
type soakSpy struct {
	refused, sideRefused, lost, mute, sides atomic.Int64
}

type soakCounts struct {
	refused     int // dials that heard that the node accepts no clients
	sideRefused int // of these, the watchdog's
	lost        int // connections of the watchdog on which the server said goodbye
	mute        int // connections that ended before the server had said anything
	sides       int // connections of the watchdog that are open
}

func (s *soakSpy) counts() soakCounts {
	return soakCounts{int(s.refused.Load()), int(s.sideRefused.Load()), int(s.lost.Load()), int(s.mute.Load()), int(s.sides.Load())}
}

func (s *soakSpy) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &spiedConn{TCPConn: c.(*net.TCPConn), spy: s}, nil
}

// spiedConn is a connection with a spy. Its reads and writes do not overlap until it has been greeted.
type spiedConn struct {
	*net.TCPConn
	spy *soakSpy

	asked, answered atomic.Bool
	side            atomic.Bool // the watchdog's
	terminated      atomic.Bool // by us
	lost, closed    sync.Once
}

func (c *spiedConn) Write(p []byte) (int, error) {
	if !c.asked.Swap(true) && bytes.Contains(p, []byte(watchdogName)) {
		c.side.Store(true)
		c.spy.sides.Add(1)
	}
	if len(p) == 5 && p[0] == 'X' {
		c.terminated.Store(true)
	}
	return c.TCPConn.Write(p)
}

func (c *spiedConn) Read(p []byte) (int, error) {
	n, err := c.TCPConn.Read(p)
	said := p[:max(n, 0)]
	if n > 0 && !c.answered.Swap(true) && bytes.Contains(said, []byte(noticeNotAcceptingClients)) {
		c.spy.refused.Add(1)
		if c.side.Load() {
			c.spy.sideRefused.Add(1)
		}
	} else if n > 0 && c.side.Load() && (c.terminated.Load() || bytes.Contains(said, []byte(noticeShuttingDown))) {
		// To a Terminate a server answers nothing: what is there to read then it said before.
		c.lost.Do(func() { c.spy.lost.Add(1) })
	}
	return n, err
}

func (c *spiedConn) Close() error {
	c.closed.Do(func() {
		if c.side.Load() {
			c.spy.sides.Add(-1)
		}
		if !c.answered.Load() {
			c.spy.mute.Add(1)
		}
	})
	return c.TCPConn.Close()
}
