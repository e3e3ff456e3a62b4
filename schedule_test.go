package crdbdrain

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// TestFuzzedSchedules runs random schedules of drains, faults and lies against a pool under load, each in a bubble of
// virtual time, and checks what must hold in every one of them. By default it runs for about three seconds;
// CRDBDRAIN_ROLLS=n runs n schedules, CRDBDRAIN_SCHEDULE_SEED=seed the one of a failure.
func TestFuzzedSchedules(t *testing.T) {
	var sum scheduleCounts
	if v := os.Getenv("CRDBDRAIN_SCHEDULE_SEED"); v != "" {
		seed, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			t.Fatalf("CRDBDRAIN_SCHEDULE_SEED: %v", err)
		}
		runSchedule(t, seed, &sum)
		t.Logf("%v", &sum)
		return
	}
	n, limit := int64(1<<62), 3*time.Second
	if v := os.Getenv("CRDBDRAIN_ROLLS"); v != "" {
		var err error
		if n, err = strconv.ParseInt(v, 10, 64); err != nil {
			t.Fatalf("CRDBDRAIN_ROLLS: %v", err)
		}
		limit = 24 * time.Hour
	}
	start, seed := time.Now(), rand.Uint64()>>1
	var next atomic.Int64
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for !t.Failed() && time.Since(start) < limit {
				i := next.Add(1)
				if i > n {
					return
				}
				runSchedule(t, seed+uint64(i), &sum)
			}
		})
	}
	wg.Wait()
	took := time.Since(start).Seconds()
	t.Logf("%v; %.1f s, %.1f schedules/s", &sum, took, float64(sum.schedules.Load())/took)
	if sum.schedules.Load() < 20 {
		return // too few to say anything of them all
	}
	for what, n := range map[string]int64{"statements": sum.executed.Load(), "drains": sum.drains.Load(), "culls": sum.culled.Load(),
		"errors": sum.excused.Load(), "times at rest": sum.rests.Load()} {
		if n == 0 {
			t.Errorf("no %s: the test tests nothing", what)
		}
	}
}

// scheduleCounts are what the schedules came to.
type scheduleCounts struct {
	schedules, executed, drains, culled, paced, lost, moved, rerun, excused, rests atomic.Int64
}

func (c *scheduleCounts) String() string {
	return fmt.Sprintf("%d schedules: %d statements executed, %d drains, %d culls (%d paced), %d lost, %d moved, %d run again, %d errors that had to be, %d times at rest",
		c.schedules.Load(), c.executed.Load(), c.drains.Load(), c.culled.Load(), c.paced.Load(), c.lost.Load(), c.moved.Load(),
		c.rerun.Load(), c.excused.Load(), c.rests.Load())
}

func runSchedule(t *testing.T, seed uint64, sum *scheduleCounts) {
	defer func() {
		if r := recover(); r != nil { // a deadlock, say: of goroutines that never end
			fmt.Fprintf(os.Stderr, "CRDBDRAIN_SCHEDULE_SEED=%d: %v\n", seed, r)
			panic(r)
		}
	}()
	synctest.Test(t, func(t *testing.T) {
		s := newSchedule(seed)
		s.run()
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.failures) > 0 {
			t.Errorf("CRDBDRAIN_SCHEDULE_SEED=%d\n%s\n%s", seed, strings.Join(s.failures, "\n"), strings.Join(s.log, "\n"))
		}
		sum.schedules.Add(1)
		sum.executed.Add(int64(len(s.executed)))
		sum.drains.Add(s.drains)
		sum.excused.Add(s.excused)
		sum.paced.Add(s.pacedCulls)
		stats := s.con.Stats()
		sum.culled.Add(stats.Culled)
		sum.lost.Add(stats.Lost)
		sum.moved.Add(stats.Moved)
		sum.rerun.Add(stats.Rerun)
		if s.rest {
			sum.rests.Add(1)
		}
	})
}

// schedule is one run: a cluster, a pool, workers, and what happens to them. All of it follows from the seed, but for
// the order of what happens at one moment and the driver's own jitter.
type schedule struct {
	rng   *rand.Rand
	start time.Time

	settings  crdbdraintest.Settings
	nodes     int
	conns     int
	workers   int
	pause     time.Duration
	latency   time.Duration // of a statement
	params    string
	observe   bool
	ttl       bool
	balanced  bool // through the load balancer, whose health checks take time
	length    time.Duration
	closeAt   time.Duration // of db.Close; negative: after everything
	rest      bool          // look at it at rest
	restLoad  bool
	gossipLag atomic.Int64 // a duration: the longest so far

	cluster *crdbdraintest.Cluster
	con     *Connector
	db      *sql.DB
	running sync.WaitGroup // what events have begun
	ids     atomic.Int64

	mu         sync.Mutex
	log        []string               // guarded by mu, like all below
	failures   []string               // what does not hold
	executed   map[int64]int          // node by statement
	of         map[int]*scheduledNode // by ID
	lies       time.Time              // until when some node lied
	phantoms   time.Time              // until when one listed a node that is not there
	closed     time.Time              // when db.Close was called
	drains     int64
	excused    int64
	gaps       []gapAt // what the pace allowed
	lastCull   time.Time
	pacedCulls int64
}

type gapAt struct {
	at  time.Time
	gap time.Duration
}

// scheduledNode is the truth about one node.
type scheduledNode struct {
	n    *crdbdraintest.Node
	busy bool       // an event is under way
	op   sync.Mutex // against an Undrain between the end of a drain and that of the process

	good    time.Time // serving and answering since; zero if it is not
	away    time.Time // since when it has answered nobody; zero if it does
	faults  []fault   // kills and hangs
	removed bool      // for good
}

type fault struct{ from, to time.Time } // to is zero while it lasts

const (
	// settling is how long after a fault, or after a node has come, a statement may still meet its consequences: idle
	// connections that were reset and are not yet pinged, a load balancer that has yet to notice.
	settling = 3 * time.Second
	opLimit  = 10 * time.Second
)

func newSchedule(seed uint64) *schedule {
	rng := rand.New(rand.NewPCG(seed, 0))
	ms := func(from, to int) time.Duration { return time.Duration(from+rng.IntN(to-from+1)) * time.Millisecond }
	s := &schedule{
		rng: rng, executed: make(map[int64]int), of: make(map[int]*scheduledNode),
		settings: crdbdraintest.Settings{TransactionsTimeout: ms(1000, 3000)},
		nodes:    2 + rng.IntN(2),
		conns:    1 + rng.IntN(24),
		workers:  rng.IntN(13),
		pause:    ms(10, 150),
		latency:  ms(0, 40),
		length:   ms(5000, 25_000),
		closeAt:  -1,
	}
	if rng.IntN(3) > 0 {
		s.settings.InitialWait, s.settings.ConnectionsTimeout = ms(0, 2000), ms(0, 5000)
	}
	var p []string
	set := func(key, value string) { p = append(p, "crdbdrain_"+key+"="+value) }
	set("cluster", "schedule-"+strconv.FormatUint(seed, 10))
	set("sources", []string{"instances", "instances", "gossip", "instances,gossip", "errors"}[rng.IntN(5)])
	switch rng.IntN(4) {
	case 0: // auto
	case 1:
		set("window", ms(100, 20_000).String()) // wrong
	default:
		set("window", max(s.settings.InitialWait+s.settings.ConnectionsTimeout, 100*time.Millisecond).String())
	}
	set("spares", strconv.Itoa(rng.IntN(3)))
	set("poll_interval", ms(200, 2000).String())
	set("poll_interval_draining", ms(100, 1000).String())
	if rng.IntN(3) == 0 {
		set("cull_stagger", []string{"0", "50ms", "2s"}[rng.IntN(3)])
	}
	if rng.IntN(3) == 0 {
		set("rebalance", "off")
	}
	if s.ttl = rng.IntN(5) == 0; s.ttl {
		set("ttl", ms(1000, 10_000).String())
		set("ttl_stagger", ms(100, 1000).String())
	}
	if s.observe = rng.IntN(10) == 0; s.observe {
		set("mode", "observe")
	}
	s.params = strings.Join(p, "&")
	s.balanced = rng.IntN(2) == 0
	if rng.IntN(3) == 0 {
		s.closeAt = time.Duration(rng.Int64N(int64(s.length)))
	}
	s.rest = s.closeAt < 0 && !s.ttl && rng.IntN(4) == 0
	s.restLoad = rng.IntN(2) == 0
	return s
}

func (s *schedule) note(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, fmt.Sprintf("%8.3f ", time.Since(s.start).Seconds())+fmt.Sprintf(format, args...))
}

func (s *schedule) fail(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failLocked(format, args...)
}

func (s *schedule) failLocked(format string, args ...any) {
	text := fmt.Sprintf("%8.3f FAILED ", time.Since(s.start).Seconds()) + fmt.Sprintf(format, args...)
	s.log = append(s.log, text)
	if len(s.failures) < 20 {
		s.failures = append(s.failures, text)
	}
}

func (s *schedule) run() {
	rng := s.rng
	s.start = time.Now()
	lb := crdbdraintest.LoadBalancerConfig{Interval: 150 * time.Millisecond}
	if !s.balanced {
		lb.Interval = 24 * time.Hour // nobody uses it
	}
	s.cluster = crdbdraintest.Start(crdbdraintest.Config{
		Nodes: s.nodes, Memory: true, Settings: s.settings,
		LoadBalancer: lb, Handler: s.execute, OnStep: s.step,
	})
	defer s.cluster.Close()
	for _, n := range s.cluster.Nodes() {
		s.of[n.ID()] = &scheduledNode{n: n, good: s.start.Add(-time.Hour)}
	}
	for _, privilege := range []string{"VIEWSYSTEMTABLE", "VIEWCLUSTERMETADATA", "VIEWCLUSTERSETTING"} {
		if rng.IntN(3) > 0 {
			s.note("grant %s", privilege)
			s.cluster.Grant("app", privilege)
		}
	}
	dsn := s.cluster.DSNAll()
	if s.balanced {
		dsn = s.cluster.DSN()
	}
	s.note("%d nodes, %d connections, %d workers that pause %v, %+v, %s&%s, close at %v, rest %v",
		s.nodes, s.conns, s.workers, s.pause, s.settings, dsn, s.params, s.closeAt, s.rest)
	cc, err := pgx.ParseConfig(dsn + "&" + s.params)
	if err != nil {
		s.fail("%v", err)
		return
	}
	cc.DialFunc = s.cluster.Dial
	cc.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	con, err := NewConnector(cc, WithMeterProvider(scheduleMeters{s: s}))
	if err != nil {
		s.fail("%v", err)
		return
	}
	s.con, s.db = con, sql.OpenDB(con)
	s.db.SetMaxOpenConns(s.conns)
	s.db.SetMaxIdleConns(s.conns)
	s.fill()

	stopped, stop := context.WithCancel(context.Background())
	defer stop()
	var workers sync.WaitGroup
	work := func(until context.Context, n int, pause time.Duration) {
		for i := range n {
			r := rand.New(rand.NewPCG(rng.Uint64(), uint64(i)))
			workers.Go(func() { s.work(until, r, pause) })
		}
	}
	work(stopped, s.workers, s.pause)
	sampled := make(chan struct{})
	go func() {
		defer close(sampled)
		for stopped.Err() == nil {
			s.sample()
			time.Sleep(20 * time.Millisecond)
		}
	}()

	s.events()
	if s.closeAt >= 0 {
		if d := s.closeAt - time.Since(s.start); d > 0 {
			time.Sleep(d)
		}
		s.close()
	} else if d := s.length - time.Since(s.start); d > 0 {
		time.Sleep(d)
	}
	s.running.Wait()
	if s.closeAt < 0 && rng.IntN(2) == 0 { // else it is closed under load
		stop()
		workers.Wait()
	}
	if s.rest {
		stop()
		workers.Wait()
		s.atRest(work, &workers)
	}
	if s.closeAt < 0 {
		s.close()
	}
	stop()
	workers.Wait()
	<-sampled
	time.Sleep(6 * time.Second) // closing a connection in the background is bounded by five
	s.atTheEnd()
}

// fill makes the pool hold all its connections.
func (s *schedule) fill() {
	held := make([]*sql.Conn, s.conns)
	for i := range held {
		c, err := s.db.Conn(context.Background())
		if err != nil {
			s.fail("a dial before anything happened: %v", err)
			continue
		}
		held[i] = c
	}
	for _, c := range held {
		if c != nil {
			_ = c.Close()
		}
	}
}

// close closes the pool, and looks at how long that takes: a node that hangs may hold it up for the five seconds that
// closing connections may take, and a poll.
func (s *schedule) close() {
	s.mu.Lock()
	s.closed = time.Now()
	s.mu.Unlock()
	s.note("db.Close")
	start := time.Now()
	_ = s.db.Close()
	if took := time.Since(start); took > 20*time.Second {
		s.fail("db.Close took %v", took)
	}
	if n := s.con.spares.count.Load(); n != 0 {
		s.fail("%d spares after db.Close", n)
	}
}

// execute is the nodes' Handler: it takes note of every statement.
func (s *schedule) execute(q crdbdraintest.Query) *crdbdraintest.Result {
	if len(q.Args) != 1 {
		return nil
	}
	var id int64
	switch v := q.Args[0].(type) {
	case int64:
		id = v
	case string:
		id, _ = strconv.ParseInt(v, 10, 64)
	}
	// What it does is done when it begins; its answer may never come.
	defer func() {
		select {
		case <-time.After(s.latency):
		case <-q.Context().Done():
		}
	}()
	s.mu.Lock()
	defer s.mu.Unlock()
	if first, twice := s.executed[id]; twice {
		s.failLocked("statement %d was executed on node %d and again on node %d", id, first, q.Node)
	}
	s.executed[id] = q.Node
	return nil
}

// step is the cluster's OnStep.
func (s *schedule) step(n *crdbdraintest.Node, step crdbdraintest.Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	node := s.of[n.ID()]
	if node == nil {
		return
	}
	switch step {
	case crdbdraintest.Serving:
		node.good, node.away = time.Now(), time.Time{}
	case crdbdraintest.Announced:
		node.good = time.Time{}
		s.drains++
	case crdbdraintest.Closing:
		node.away = time.Now()
	}
}

// work is one worker: statements, prepared statements and short transactions.
func (s *schedule) work(until context.Context, r *rand.Rand, pause time.Duration) {
	for until.Err() == nil {
		if !s.op(r) {
			return
		}
		time.Sleep(pause/2 + rand.N(pause+1))
	}
}

// op does one thing, and reports false once the pool is closed.
func (s *schedule) op(r *rand.Rand) bool {
	ctx, cancel := context.WithTimeout(context.Background(), opLimit)
	defer cancel()
	start := time.Now()
	done := func(what string, node int, id int64, err error) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		executed := id != 0 && s.executed[id] != 0
		if err == nil {
			if id != 0 && !executed {
				s.failLocked("%s: statement %d succeeded and was not executed", what, id)
			}
			return true
		}
		if !s.closed.IsZero() && strings.Contains(err.Error(), "database is closed") {
			return false
		}
		if why := s.excuse(start, node); why == "" {
			s.failLocked("%s, begun %v ago, on node %d (0: outside a transaction), executed %v: %v", what, time.Since(start), node, executed, err)
		} else {
			s.excused++
		}
		return true
	}
	switch kind := r.IntN(6); kind {
	case 0, 1:
		id, got := s.ids.Add(1), int64(0)
		err := s.db.QueryRowContext(ctx, "SELECT $1::INT8", id).Scan(&got)
		if err == nil && got != id {
			s.fail("statement %d got %d", id, got)
		}
		return done("query", 0, id, err)
	case 2:
		id := s.ids.Add(1)
		_, err := s.db.ExecContext(ctx, "UPDATE accounts SET balance = 1 WHERE id = $1", id)
		return done("update", 0, id, err)
	case 3:
		// On a connection of its own: database/sql closes a statement of several connections under the locks of those that
		// are in use, and who waits for a lock keeps virtual time from going on.
		c, err := s.db.Conn(ctx)
		if err != nil {
			return done("connection", 0, 0, err)
		}
		defer c.Close()
		st, err := c.PrepareContext(ctx, "UPDATE accounts SET balance = 2 WHERE id = $1")
		if err != nil {
			return done("prepare", 0, 0, err)
		}
		defer st.Close()
		id := s.ids.Add(1)
		_, err = st.ExecContext(ctx, id)
		return done("prepared update", 0, id, err)
	default:
		tx, err := s.db.BeginTx(ctx, nil)
		if err != nil {
			return done("begin", 0, 0, err)
		}
		defer tx.Rollback()
		start = time.Now()
		node := -1 // not known yet
		for range 1 + r.IntN(2) {
			id := s.ids.Add(1)
			_, err := tx.ExecContext(ctx, "UPDATE accounts SET balance = 3 WHERE id = $1", id)
			s.mu.Lock()
			if on := s.executed[id]; on != 0 {
				if node > 0 && on != node {
					s.failLocked("a transaction on node %d went on on node %d", node, on)
				}
				node = on
			}
			s.mu.Unlock()
			if !done("update in a transaction", node, id, err) || err != nil {
				return true
			}
			time.Sleep(time.Duration(r.IntN(60)) * time.Millisecond)
		}
		if r.IntN(5) == 0 {
			return done("rollback", node, 0, tx.Rollback())
		}
		return done("commit", node, 0, tx.Commit())
	}
}

// excuse returns why a failure of something begun at start had to be, or "". A transaction's node is positive, or
// negative where it is not known; a statement outside a transaction has none. s.mu is held.
func (s *schedule) excuse(start time.Time, node int) string {
	now := time.Now()
	for id, n := range s.of {
		if node > 0 && id != node {
			continue
		}
		for _, f := range n.faults {
			if f.from.Before(now) && (f.to.IsZero() || f.to.Add(settling).After(start)) {
				return fmt.Sprintf("node %d", id)
			}
		}
	}
	if node != 0 {
		return "" // a drain lets a transaction of this length end
	}
	for id, n := range s.of {
		if known := s.balanced || id <= s.nodes; known && !n.good.IsZero() && n.good.Add(settling).Before(start) {
			return ""
		}
	}
	return "there was no node to go to"
}

// events makes things happen until the schedule's end.
func (s *schedule) events() {
	rng := s.rng
	end := s.length
	if s.closeAt >= 0 {
		end = s.closeAt
	}
	for {
		time.Sleep(time.Duration(rng.Int64N(int64(4 * time.Second))))
		if time.Since(s.start) >= end {
			return
		}
		id := 1 + rng.IntN(len(s.cluster.Nodes()))
		span := time.Duration(300+rng.IntN(4000)) * time.Millisecond
		switch rng.IntN(16) {
		default:
			s.drain(id, span, rng.IntN(2) == 0)
		case 0:
			s.drain(id, span, true)
			s.drain(1+id%len(s.cluster.Nodes()), span, true)
		case 1:
			s.disturb(id, "kill", span, func(n *crdbdraintest.Node) { n.Kill() }, (*crdbdraintest.Node).Start)
		case 2:
			s.disturb(id, "hang", span, func(n *crdbdraintest.Node) { n.Hang(true) }, func(n *crdbdraintest.Node) { n.Hang(false) })
		case 3, 4:
			s.undrain(id)
		case 5:
			s.decommission(id, span, rng.IntN(2) == 0)
		case 6:
			if len(s.cluster.Nodes()) < 4 {
				s.note("a node joins")
				n := s.cluster.AddNode()
				s.mu.Lock()
				s.of[n.ID()] = &scheduledNode{n: n, good: time.Now()}
				s.mu.Unlock()
			}
		case 7, 8:
			s.lie(span, rng.IntN(4))
		case 9:
			lag := time.Duration(rng.IntN(5000)) * time.Millisecond
			s.note("gossip lags by %v", lag)
			s.gossipLag.Store(max(s.gossipLag.Load(), int64(lag)))
			for _, n := range s.cluster.Nodes() {
				n.SetFaults(crdbdraintest.Faults{GossipLag: lag})
			}
		case 10:
			p := []string{"VIEWSYSTEMTABLE", "VIEWCLUSTERMETADATA", "VIEWCLUSTERSETTING"}[rng.IntN(3)]
			if rng.IntN(2) == 0 {
				s.note("grant %s", p)
				s.cluster.Grant("app", p)
			} else {
				s.note("revoke %s", p)
				s.cluster.Revoke("app", p)
			}
		}
	}
}

// take reserves a node for an event.
func (s *schedule) take(id int) *scheduledNode {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.of[id]
	if n == nil || n.busy || n.removed {
		return nil
	}
	n.busy = true
	return n
}

func (s *schedule) release(n *scheduledNode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n.busy = false
}

// drain drains a node, and restarts it.
func (s *schedule) drain(id int, down time.Duration, soon bool) {
	n := s.take(id)
	if n == nil {
		return
	}
	s.note("drain node %d, down for %v", id, down)
	s.running.Go(func() {
		defer s.release(n)
		r := n.n.Drain(context.Background())
		s.note("node %d has drained: %+v", id, r)
		if !soon {
			time.Sleep(down)
		}
		time.Sleep(600 * time.Millisecond) // the load balancer has to have noticed
		n.op.Lock()
		defer n.op.Unlock()
		if n.n.Step() != crdbdraintest.Flagged {
			return // undrained
		}
		n.n.Stop()
		time.Sleep(down)
		n.n.Start()
		s.note("node %d is back", id)
	})
}

func (s *schedule) undrain(id int) {
	n := s.of[id]
	if n.op.TryLock() {
		defer n.op.Unlock()
		if n.n.Step() != crdbdraintest.Serving {
			s.note("undrain node %d", id)
			n.n.Undrain()
		}
	}
}

// disturb does something bad to a node for a while.
func (s *schedule) disturb(id int, what string, d time.Duration, begin, end func(*crdbdraintest.Node)) {
	n := s.take(id)
	if n == nil {
		return
	}
	s.note("%s node %d for %v", what, id, d)
	s.mu.Lock()
	n.good, n.away = time.Time{}, time.Now()
	n.faults = append(n.faults, fault{from: time.Now().Add(-time.Nanosecond)})
	f := &n.faults[len(n.faults)-1]
	s.mu.Unlock()
	begin(n.n)
	s.running.Go(func() {
		defer s.release(n)
		time.Sleep(d)
		end(n.n)
		s.mu.Lock()
		n.good, n.away = time.Now(), time.Time{}
		f.to = time.Now()
		s.mu.Unlock()
		s.note("node %d is back", id)
	})
}

// decommission takes a node out for good, where two are left, or changes its mind.
func (s *schedule) decommission(id int, d time.Duration, forGood bool) {
	n := s.take(id)
	if n == nil {
		return
	}
	s.mu.Lock()
	left := 0
	for _, other := range s.of {
		if !other.removed {
			left++
		}
	}
	forGood = forGood && left > 2
	n.removed = forGood
	s.mu.Unlock()
	s.note("decommission node %d, for good: %v", id, forGood)
	n.n.Decommission()
	s.running.Go(func() {
		defer s.release(n)
		time.Sleep(d)
		if !forGood {
			n.n.Recommission()
			s.note("node %d is recommissioned", id)
			return
		}
		r := n.n.Drain(context.Background())
		s.note("node %d has drained: %+v", id, r)
		time.Sleep(600 * time.Millisecond)
		n.op.Lock()
		defer n.op.Unlock()
		for n.n.Step() != crdbdraintest.Flagged { // undrained
			n.n.Drain(context.Background())
			time.Sleep(600 * time.Millisecond)
		}
		n.n.Stop()
		s.note("node %d is gone", id)
	})
}

// lie makes the source tables of every node say something else for a while.
func (s *schedule) lie(d time.Duration, kind int) {
	name := [...]string{"everything drains", "nothing", "garbage", "a node that is not there is the only one live"}[kind]
	s.note("the sources say for %v: %s", d, name)
	s.mu.Lock()
	if until := time.Now().Add(d); until.After(s.lies) {
		s.lies = until
	}
	if until := time.Now().Add(d); kind == 3 && until.After(s.phantoms) {
		s.phantoms = until
	}
	s.mu.Unlock()
	r := rand.New(rand.NewPCG(s.rng.Uint64(), 1))
	garbage := r.IntN(4)
	source := func(table string) *crdbdraintest.Result {
		instances := table == "system.sql_instances"
		res := &crdbdraintest.Result{Columns: []string{"node_id", "epoch", "draining", "membership", "is_live"}}
		if instances {
			res.Columns = []string{"id", "is_draining"}
		}
		row := func(id any, draining, live bool) {
			if instances {
				res.Rows = append(res.Rows, []any{id, draining})
			} else {
				res.Rows = append(res.Rows, []any{id, int64(1), draining, "active", live})
			}
		}
		switch kind {
		case 0:
			for id := range 4 {
				row(int64(id+1), true, true)
			}
		case 1:
		case 2:
			switch garbage {
			case 0:
				for _, id := range []int64{-1, 0, 1 << 40, 2, 2} {
					row(id, true, false)
				}
			case 1:
				row("x'; DROP TABLE accounts; --", true, true)
			case 2:
				res.Columns = res.Columns[:1]
				res.Rows = [][]any{{int64(1)}, {nil}}
			default:
				rows := maxRows + 1
				if table != "system.sql_instances" {
					rows = 100 // the simulated join is a nested loop
				}
				for id := range rows {
					row(int64(id+1), true, true)
				}
			}
		default:
			for id := range 4 {
				row(int64(id+1), true, true)
			}
			row(int64(77), false, true)
		}
		return res
	}
	for _, n := range s.cluster.Nodes() {
		n.SetFaults(crdbdraintest.Faults{Source: source})
	}
	s.running.Go(func() {
		time.Sleep(d)
		for _, n := range s.cluster.Nodes() {
			n.SetFaults(crdbdraintest.Faults{})
		}
		s.note("the sources tell the truth")
	})
}

// sample takes note of what the pace allows now.
func (s *schedule) sample() {
	w := s.con.watchdog.Load()
	if w == nil {
		return
	}
	if m := w.marks.Load(); m != nil {
		t := time.Now()
		gap := w.gap(m, t)
		s.mu.Lock()
		s.gaps = append(s.gaps, gapAt{t, gap})
		s.mu.Unlock()
	}
}

// onCull is called for every connection that is culled, lost or put off, at that moment and by the one who does it.
func (s *schedule) onCull(name, reason string) {
	s.sample()
	if name != "crdbdrain.connection.culled" || reason == "rebalance" || reason == "ttl" {
		return
	}
	w := s.con.watchdog.Load()
	m := w.marks.Load()
	t := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if m == nil {
		return // withdrawn at this moment
	}
	over, unmarked, reachable := false, false, false
	grace := w.keep() + w.cfg.Load().pollTimeout + time.Duration(s.gossipLag.Load()) + time.Second
	for _, mk := range m.of {
		over = over || mk.over
	}
	for id, n := range s.of {
		if m.of[nodeID(id)] != nil {
			continue
		}
		unmarked = unmarked || n.away.IsZero() || !n.removed
		reachable = reachable || n.away.IsZero() || t.Sub(n.away) < grace
	}
	liars := t.Before(s.lies.Add(grace))
	if !liars && !reachable || !unmarked && !t.Before(s.phantoms.Add(grace)) {
		s.failLocked("a cull, and no unmarked node is reachable")
	}
	if over {
		return // such a cull may not have been paced
	}
	s.pacedCulls++
	if least := s.leastGap(s.lastCull.Add(-50*time.Millisecond), t); !s.lastCull.IsZero() && t.Sub(s.lastCull) < least*9/10 {
		s.failLocked("a cull %v after the one before, and the pace allows one in %v", t.Sub(s.lastCull), least)
	}
	s.lastCull = t
	s.gaps = slices.DeleteFunc(s.gaps, func(g gapAt) bool { return t.Sub(g.at) > 50*time.Millisecond })
}

// leastGap returns the shortest time between two culls that the pace allowed since then. s.mu is held.
func (s *schedule) leastGap(since, t time.Time) time.Duration {
	least := time.Duration(1<<63 - 1)
	for _, g := range s.gaps {
		if !g.at.Before(since) && !g.at.After(t) {
			least = min(least, g.gap)
		}
	}
	return least
}

// atRest looks at the pool when nothing has happened for long.
func (s *schedule) atRest(work func(context.Context, int, time.Duration), workers *sync.WaitGroup) {
	s.note("rest")
	stopped, stop := context.WithCancel(context.Background())
	if s.restLoad {
		work(stopped, s.workers, 3*time.Second)
	}
	time.Sleep(2 * time.Minute) // the way home, what the sources said last, what they are asked again
	before, accepts := s.con.Stats(), s.cluster.Stats().Accepts
	time.Sleep(2 * time.Minute)
	if after := s.con.Stats(); after != before {
		s.fail("at rest: %+v, and two minutes later %+v", before, after)
	}
	if n := s.cluster.Stats().Accepts - accepts; n > 0 {
		s.fail("%d dials at rest", n)
	}
	// Without load nothing proves that there is somewhere to go, and a mark stays for as long as it has connections.
	if w := s.con.watchdog.Load(); w != nil && s.restLoad && s.workers > 0 {
		if m := w.marks.Load(); m != nil {
			for id, mk := range m.of {
				if n := s.of[int(id)]; n == nil || !n.removed {
					s.fail("node %d is marked at rest: %+v", id, *mk)
				}
			}
		}
	}
	stop()
	workers.Wait()
}

// atTheEnd looks at what is left after db.Close.
func (s *schedule) atTheEnd() {
	if n := s.cluster.Stats().Open; n != 0 {
		s.fail("%d sessions are open after db.Close", n)
	}
	if n := s.con.spares.count.Load(); n != 0 {
		s.fail("%d spares are left", n)
	}
	opened := int64(s.cluster.Stats().Accepts)
	if st := s.con.Stats(); st.Culled+st.Lost+st.Moved > opened || s.observe && st.Culled+st.Moved > 0 || !s.observe && st.Observed > 0 {
		s.fail("%+v of %d connections", st, opened)
	}
	if w := s.con.watchdog.Load(); w != nil {
		w.mu.Lock()
		conns := w.conns
		w.mu.Unlock()
		if conns != 0 {
			s.fail("the watchdog counts %d connections", conns)
		}
		registry.mu.Lock()
		if registry.of[w.key] != nil {
			s.fail("the watchdog is registered")
		}
		registry.mu.Unlock()
	}
}

// scheduleMeters is a meter provider that tells the schedule of every count as it is made. It is not comparable, so that
// the driver does not keep it.
type scheduleMeters struct {
	noop.MeterProvider
	s *schedule
	_ []int
}

func (p scheduleMeters) Meter(string, ...metric.MeterOption) metric.Meter {
	return scheduleMeter{s: p.s}
}

type scheduleMeter struct {
	noop.Meter
	s *schedule
}

func (m scheduleMeter) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	switch name {
	case "crdbdrain.connection.culled", "crdbdrain.connection.lost", "crdbdrain.cull.throttled":
		return scheduleCounter{s: m.s, name: name}, nil
	}
	return noop.Int64Counter{}, nil
}

type scheduleCounter struct {
	noop.Int64Counter
	s    *schedule
	name string
}

func (c scheduleCounter) Add(_ context.Context, n int64, opts ...metric.AddOption) {
	if n == 0 {
		return
	}
	set := metric.NewAddConfig(opts).Attributes()
	reason, _ := set.Value(attribute.Key("reason"))
	c.s.onCull(c.name, reason.AsString())
}
