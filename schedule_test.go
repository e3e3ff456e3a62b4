package crdbdrain

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"maps"
	"math"
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
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// TestFuzzedSchedules runs random schedules of drains, faults and lies against one pool or two under load, each in a bubble
// of virtual time, and checks what must hold in every one of them. By default it runs for about three seconds;
// CRDBDRAIN_ROLLS=n runs n schedules, CRDBDRAIN_SCHEDULE_SEED=seed the one of a failure.
func TestFuzzedSchedules(t *testing.T) {
	var sum scheduleCounts
	took := eachSeed(t, "CRDBDRAIN_SCHEDULE_SEED", "CRDBDRAIN_ROLLS", 3*time.Second, func(seed uint64) { runSchedule(t, seed, &sum) })
	t.Logf("%v; %.1f s, %.1f schedules/s", &sum, took.Seconds(), float64(sum.schedules.Load())/took.Seconds())
	if sum.schedules.Load() < 20 {
		return // too few to say anything of them all
	}
	seen := map[string]int64{"statements": sum.executed.Load(), "drains": sum.drains.Load(), "culls": sum.culled.Load(),
		"errors": sum.excused.Load()}
	if sum.schedules.Load() > 150 { // enough for what only some schedules have
		seen["times at rest"] = sum.rests.Load()
		sum.mu.Lock()
		defer sum.mu.Unlock()
		for _, what := range scheduleFeatures {
			seen[what] = sum.seen[what]
		}
	}
	for what, n := range seen {
		if n == 0 {
			t.Errorf("no %s: the test tests nothing", what)
		}
	}
}

// eachSeed calls run with one seed after another on every processor, for as long as limit. Where the variable many has a
// number it calls it so many times; where the variable one has a seed, once with that.
func eachSeed(t *testing.T, one, many string, limit time.Duration, run func(seed uint64)) (took time.Duration) {
	t.Helper()
	start := time.Now()
	if v := os.Getenv(one); v != "" {
		seed, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", one, err)
		}
		run(seed)
		return time.Since(start)
	}
	n := int64(1 << 62)
	if v := os.Getenv(many); v != "" {
		var err error
		if n, err = strconv.ParseInt(v, 10, 64); err != nil {
			t.Fatalf("%s: %v", many, err)
		}
		limit = 24 * time.Hour
	}
	seed := rand.Uint64() >> 1
	var next atomic.Int64
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for !t.Failed() && time.Since(start) < limit {
				i := next.Add(1)
				if i > n {
					return
				}
				run(seed + uint64(i))
			}
		})
	}
	wg.Wait()
	return time.Since(start)
}

// scheduleFeatures are what some schedules have, and what they come to.
var scheduleFeatures = []string{"ceilings changed", "callers refused by the ceiling", "marks by hand", "waits for a node", "shutdowns",
	"bursts", "lulls", "partitions of the watchdog", "second pools", "feeds", "lies of a feed", "suspensions", "clock jumps", "marks seen to end"}

// scheduleCounts are what the schedules came to.
type scheduleCounts struct {
	schedules, executed, drains, culled, paced, lost, moved, rerun, excused, rests atomic.Int64

	mu   sync.Mutex
	seen map[string]int64 // guarded by mu
}

func (c *scheduleCounts) String() string {
	text := fmt.Sprintf("%d schedules: %d statements executed, %d drains, %d culls (%d paced), %d lost, %d moved, %d run again, %d errors that had to be, %d times at rest",
		c.schedules.Load(), c.executed.Load(), c.drains.Load(), c.culled.Load(), c.paced.Load(), c.lost.Load(), c.moved.Load(),
		c.rerun.Load(), c.excused.Load(), c.rests.Load())
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, what := range slices.Sorted(maps.Keys(c.seen)) {
		text += fmt.Sprintf(", %d %s", c.seen[what], what)
	}
	return text
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
		for _, p := range s.pools {
			if p.con == nil {
				continue
			}
			stats := p.con.Stats()
			sum.culled.Add(stats.Culled)
			sum.lost.Add(stats.Lost)
			sum.moved.Add(stats.Moved)
			sum.rerun.Add(stats.Rerun)
		}
		if s.rest {
			sum.rests.Add(1)
		}
		sum.mu.Lock()
		defer sum.mu.Unlock()
		if sum.seen == nil {
			sum.seen = make(map[string]int64)
		}
		for what, n := range s.seen {
			sum.seen[what] += n
		}
	})
}

// schedule is one run: a cluster, one pool or two, workers, and what happens to them. All of it follows from the seed, but
// for the order of what happens at one moment and the driver's own jitter.
type schedule struct {
	rng   *rand.Rand
	start time.Time

	settings  crdbdraintest.Settings
	nodes     int
	latency   time.Duration // of a statement
	params    string        // of both pools
	hand      bool          // crdbdrain_sources names manual
	balanced  bool          // through the load balancer, whose health checks take time
	length    time.Duration
	tempo     time.Duration         // longest time between two events
	extra     []func(time.Duration) // events that only some schedules have
	rest      bool                  // look at it at rest
	restLoad  bool
	feed      *scheduleFeed
	pools     []*schedulePool // the first is there from the start; it never changes
	gossipLag atomic.Int64    // a duration: the longest so far

	cluster  *crdbdraintest.Cluster
	registry *watchdogs
	stopped  context.Context // when the workers have to stop
	running  sync.WaitGroup  // what events have begun
	workers  sync.WaitGroup
	ids      atomic.Int64
	lull     atomic.Int64                  // since start, until when there is no load
	still    atomic.Pointer[chan struct{}] // nil, but while the process is suspended; closed when it goes on
	cut      atomic.Pointer[cutting]       // nil, but while the watchdog is cut off

	mu         sync.Mutex
	log        []string               // guarded by mu, like all below
	failures   []string               // what does not hold
	seen       map[string]int64       // scheduleFeatures
	executed   map[int64]int          // node by statement
	of         map[int]*scheduledNode // by ID
	lies       time.Time              // until when some node lied
	feedLies   time.Time              // and the feed
	phantoms   time.Time              // until when one listed a node that is not there
	stills     []fault                // when the process was suspended
	troubled   time.Time              // when something last was the matter that makes closing a connection take time
	alone      time.Time              // when there last was no connection
	drains     int64
	excused    int64
	gaps       []gapAt // what the pace allowed
	lastCull   time.Time
	paced      *watchdog
	pacedCulls int64
	byHand     map[int]bool                // nodes that an event is marking by hand, or has and left so
	settled    map[nodeID]time.Time        // when the last connection of before a goodbye was seen to have gone
	marked     map[nodeID]bool             // at the last look
	ceiling    struct{ limit, used int64 } // at the last look
	suspicious int                         // refusals with room left a moment later
}

// schedulePool is one pool of a schedule.
type schedulePool struct {
	s *schedule

	user     string
	conns    int
	load     int // workers
	pause    time.Duration
	params   string // its own
	observe  bool
	ttl      bool
	shutdown time.Duration // how long Shutdown may take, before db.Close; 0: without
	closeAt  time.Duration // of db.Close; negative: after everything

	con *Connector
	db  *sql.DB

	open atomic.Int64 // the application's connections that neither end has begun to close

	closed   time.Time        // when db.Close was called; guarded by s.mu, like all below
	shut     time.Time        // when Shutdown was called
	ended    int64            // connections that it closed while idle
	wires    []*scheduleConn  // every connection that there was
	counted  map[string]int64 // metrics
	rejected time.Time        // when the ceiling last refused one
	refused  int64            // callers that it refused
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

	good    time.Time   // serving and answering since; zero if it is not
	away    time.Time   // since when it has answered nobody; zero if it does
	faults  []fault     // kills and hangs
	removed bool        // for good
	stays   time.Time   // since when it has been leaving by no source's truth; zero while it is
	leaves  bool        // decommissioning
	cuts    []time.Time // when its drains ran out of time
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
	few := rng.Float64() // most schedules are short: many short ones find more than a few long ones
	s := &schedule{
		rng: rng, registry: &watchdogs{},
		executed: make(map[int64]int), of: make(map[int]*scheduledNode), seen: make(map[string]int64),
		byHand: make(map[int]bool), settled: make(map[nodeID]time.Time), marked: make(map[nodeID]bool),
		settings: crdbdraintest.Settings{TransactionsTimeout: ms(1000, 3000)},
		nodes:    2 + rng.IntN(2),
		latency:  ms(0, 40),
		length:   1500*time.Millisecond + time.Duration(few*few*few*float64(23*time.Second)),
		tempo:    ms(500, 4000),
	}
	if rng.IntN(3) > 0 {
		s.settings.InitialWait, s.settings.ConnectionsTimeout = ms(0, 2000), ms(0, 5000)
	}
	var p []string
	set := func(key, value string) { p = append(p, "crdbdrain_"+key+"="+value) }
	set("cluster", "schedule-"+strconv.FormatUint(seed, 10))
	sources := []string{"instances", "instances", "gossip", "instances,gossip", "errors"}[rng.IntN(5)]
	switch rng.IntN(4) {
	case 0: // auto
	case 1:
		set("window", ms(100, 20_000).String()) // wrong
	default:
		set("window", max(s.settings.InitialWait+s.settings.ConnectionsTimeout, 100*time.Millisecond).String())
	}
	set("poll_interval", ms(200, 2000).String())
	set("poll_interval_draining", ms(100, 1000).String())
	if rng.IntN(3) == 0 {
		set("cull_stagger", []string{"0", "50ms", "2s"}[rng.IntN(3)])
	}
	s.balanced = rng.IntN(2) == 0

	// Each of these only in some schedules.
	some := func(events ...func(time.Duration)) bool {
		if rng.IntN(4) > 0 {
			return false
		}
		s.extra = append(s.extra, events...)
		return true
	}
	limited := some(s.setCeiling, s.setCeiling)
	if s.hand = some(s.markByHand, s.markByHand, s.waitDrained); s.hand {
		sources += ",manual"
	}
	some(s.burst, s.pauseLoad)
	some(s.cutOff)
	some(s.suspend, s.suspend, s.jump)
	if some(s.misfeed, s.misfeed) {
		s.feed = newScheduleFeed(s, []float64{0, 0, 5, 50}[rng.IntN(4)])
		sources += ",feed"
		set("feed", "http://127.0.0.1:1")
	}
	set("sources", sources)
	s.params = strings.Join(p, "&")
	second := some()

	for i, user := range []string{"app", "other"} {
		if i > 0 && !second {
			break
		}
		p = p[:0]
		pool := &schedulePool{
			s: s, user: user, counted: make(map[string]int64),
			conns: 1 + rng.IntN(1+rng.IntN(24)), load: rng.IntN(1 + rng.IntN(13)), pause: ms(10, 150), closeAt: -1,
		}
		set("spares", strconv.Itoa(rng.IntN(3)))
		if rng.IntN(3) == 0 {
			set("rebalance", "off")
		}
		if pool.ttl = rng.IntN(5) == 0; pool.ttl {
			set("ttl", ms(1000, 10_000).String())
			set("ttl_stagger", ms(100, 1000).String())
		}
		if pool.observe = rng.IntN(10) == 0; pool.observe {
			set("mode", "observe")
		}
		if limited && rng.IntN(3) > 0 {
			set("max_connections", strconv.Itoa(1+rng.IntN(2*pool.conns)))
		}
		if rng.IntN(3) == 0 {
			pool.closeAt = time.Duration(rng.Int64N(int64(s.length)))
		}
		if rng.IntN(4) == 0 {
			pool.shutdown = ms(200, 15_000)
		}
		pool.params = strings.Join(p, "&")
		s.pools = append(s.pools, pool)
	}
	first := s.pools[0]
	s.rest = first.closeAt < 0 && !slices.ContainsFunc(s.pools, func(p *schedulePool) bool { return p.ttl }) && rng.IntN(8) == 0
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

// sawLocked takes note of one of scheduleFeatures.
func (s *schedule) sawLocked(what string) { s.seen[what]++ }

func (s *schedule) saw(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sawLocked(what)
}

func (s *schedule) run() {
	rng, first := s.rng, s.pools[0]
	s.start = time.Now()
	lb := crdbdraintest.LoadBalancerConfig{Interval: 250 * time.Millisecond}
	if !s.balanced {
		lb.Interval = 24 * time.Hour // nobody uses it
	}
	s.cluster = crdbdraintest.Start(crdbdraintest.Config{
		Nodes: s.nodes, Memory: true, Settings: s.settings,
		LoadBalancer: lb, Handler: s.execute, OnStep: s.step,
	})
	defer s.cluster.Close()
	for _, n := range s.cluster.Nodes() {
		s.of[n.ID()] = &scheduledNode{n: n, good: s.start.Add(-time.Hour), stays: s.start}
	}
	for _, user := range []string{"app", "other"} {
		for _, privilege := range schedulePrivileges {
			if rng.IntN(3) > 0 {
				s.note("grant %s to %s", privilege, user)
				s.cluster.Grant(user, privilege)
			}
		}
	}
	if s.feed != nil {
		s.saw("feeds")
		s.registry.dialFeed = s.feed.dial
		defer s.feed.serve()()
	}
	var stop context.CancelFunc
	s.stopped, stop = context.WithCancel(context.Background())
	defer stop()
	s.note("%d nodes, %+v, %s", s.nodes, s.settings, s.params)
	if !first.begin() {
		return
	}
	sampled := make(chan struct{})
	go func() {
		defer close(sampled)
		s.watch(s.stopped)
	}()
	for _, p := range s.pools[1:] {
		from := time.Duration(rng.Int64N(int64(s.length))) * time.Duration(rng.IntN(2))
		s.running.Go(func() {
			time.Sleep(from)
			s.mu.Lock()
			over := !first.closed.IsZero()
			s.mu.Unlock()
			if over || !p.begin() {
				return
			}
			s.saw("second pools")
			if p.closeAt >= 0 {
				time.Sleep(p.closeAt - time.Since(s.start))
				p.close()
			}
		})
	}

	s.events()
	if first.closeAt >= 0 {
		time.Sleep(first.closeAt - time.Since(s.start))
		first.close()
	} else {
		time.Sleep(s.length - time.Since(s.start))
	}
	s.running.Wait()
	if first.closeAt < 0 && rng.IntN(2) == 0 || s.rest { // else it is closed under load
		stop()
		s.workers.Wait()
	}
	if s.rest {
		s.atRest()
	}
	for _, p := range s.pools {
		if p.db != nil && p.closeAt < 0 {
			p.close()
		}
	}
	stop()
	s.workers.Wait()
	<-sampled
	time.Sleep(16 * time.Second) // closing a connection in the background is bounded, by pgx by fifteen
	synctest.Wait()              // what they did last has been done before what comes
	s.atTheEnd()
}

var schedulePrivileges = []string{"VIEWSYSTEMTABLE", "VIEWCLUSTERMETADATA", "VIEWCLUSTERSETTING"}

// begin opens the pool and puts it under load.
func (p *schedulePool) begin() bool {
	s := p.s
	dsn := s.cluster.DSNAll()
	if s.balanced {
		dsn = s.cluster.DSN()
	}
	s.note("pool of %s: %d connections, %d workers that pause %v, %s&%s, Shutdown in %v, close at %v, rest %v",
		p.user, p.conns, p.load, p.pause, dsn, p.params, p.shutdown, p.closeAt, s.rest)
	cc, err := pgx.ParseConfig(dsn + "&" + s.params + "&" + p.params)
	if err != nil {
		s.fail("%v", err)
		return false
	}
	cc.User, cc.DialFunc = p.user, p.dial
	cc.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	con, err := NewConnector(cc, WithMeterProvider(scheduleMeters{p: p}))
	if err != nil {
		s.fail("%v", err)
		return false
	}
	con.registry = s.registry
	hear(con)
	db := sql.OpenDB(con)
	db.SetMaxOpenConns(p.conns)
	db.SetMaxIdleConns(p.conns)
	s.mu.Lock()
	p.con, p.db = con, db
	s.mu.Unlock()
	p.fill()
	p.work(s.stopped, p.load, p.pause)
	return true
}

// work starts workers.
func (p *schedulePool) work(until context.Context, n int, pause time.Duration) {
	s := p.s
	for i := range n {
		r := rand.New(rand.NewPCG(uint64(s.ids.Add(1)), uint64(i)))
		s.workers.Go(func() {
			for until.Err() == nil {
				if lull := time.Duration(s.lull.Load()) - time.Since(s.start); lull > 0 {
					time.Sleep(lull)
				} else if !p.op(r) {
					return
				}
				time.Sleep(pause/2 + rand.N(pause+1))
			}
		})
	}
}

// fill makes the pool hold all its connections.
func (p *schedulePool) fill() {
	held := make([]*sql.Conn, p.conns)
	for i := range held {
		start := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), opLimit)
		c, err := p.db.Conn(ctx)
		if err != nil {
			p.judge(ctx, "a first connection", start, 0, 0, err)
		}
		cancel()
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
func (p *schedulePool) close() {
	s := p.s
	if p.shutdown > 0 {
		p.shutDown()
	}
	s.mu.Lock()
	p.closed = time.Now()
	s.mu.Unlock()
	s.note("db.Close of %s", p.user)
	start := time.Now()
	_ = p.db.Close()
	if took := time.Since(start); took > 20*time.Second {
		s.fail("db.Close took %v", took)
	}
	if n := p.con.spares.count.Load(); n != 0 {
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
		if !node.leaves {
			node.stays = time.Now()
		}
	case crdbdraintest.Announced:
		node.good, node.stays = time.Time{}, time.Time{}
		s.drains++
	case crdbdraintest.Cancelling:
		node.cuts = append(node.cuts, time.Now())
	case crdbdraintest.Closing:
		node.away = time.Now()
	}
}

// judge takes note of how something ended that a caller did, and reports false once the pool is closed.
func (p *schedulePool) judge(ctx context.Context, what string, start time.Time, node int, id int64, err error) bool {
	s := p.s
	s.mu.Lock()
	defer s.mu.Unlock()
	executed := id != 0 && s.executed[id] != 0
	if err == nil {
		if id != 0 && !executed {
			s.failLocked("%s: statement %d succeeded and was not executed", what, id)
		}
		return true
	}
	if !p.closed.IsZero() && strings.Contains(err.Error(), "database is closed") {
		return false
	}
	why := s.excuse(ctx, start, node)
	var pg *pgconn.PgError
	switch {
	case errors.As(err, &pg) && pg.Code == stateTooManyConnections && strings.HasPrefix(pg.Message, "crdbdrain: this process has"):
		// It is refused at once, and was counted.
		if p.refused++; p.refused <= p.counted["crdbdrain.connection.rejected"] && !p.rejected.Before(start) && node == 0 {
			why = "the ceiling"
			s.sawLocked("callers refused by the ceiling")
		}
	case !p.shut.IsZero() && (errors.Is(err, errShutdown) || errors.Is(err, driver.ErrBadConn) && node == 0):
		why = "Shutdown"
	}
	if why == "" {
		s.failLocked("%s of %s, begun %v ago, on node %d (0: outside a transaction), executed %v: %v", what, p.user, time.Since(start), node, executed, err)
	} else {
		s.excused++
	}
	return true
}

// op does one thing, and reports false once the pool is closed.
func (p *schedulePool) op(r *rand.Rand) bool {
	s := p.s
	ctx, cancel := context.WithTimeout(context.Background(), opLimit)
	defer cancel()
	start := time.Now()
	done := func(what string, node int, id int64, err error) bool { return p.judge(ctx, what, start, node, id, err) }
	switch kind := r.IntN(6); kind {
	case 0, 1:
		id, got := s.ids.Add(1), int64(0)
		err := p.db.QueryRowContext(ctx, "SELECT $1::INT8", id).Scan(&got)
		if err == nil && got != id {
			s.fail("statement %d got %d", id, got)
		}
		return done("query", 0, id, err)
	case 2:
		id := s.ids.Add(1)
		_, err := p.db.ExecContext(ctx, "UPDATE accounts SET balance = 1 WHERE id = $1", id)
		return done("update", 0, id, err)
	case 3:
		// On a connection of its own: database/sql closes a statement of several connections under the locks of those that
		// are in use, and who waits for a lock keeps virtual time from going on.
		c, err := p.db.Conn(ctx)
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
		tx, err := p.db.BeginTx(ctx, nil)
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
func (s *schedule) excuse(ctx context.Context, start time.Time, node int) string {
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
	for _, f := range s.stills {
		if !f.to.IsZero() && f.to.Before(start) {
			continue
		}
		if ctx.Err() != nil {
			return "the process was suspended for a part of its time"
		}
		for id, n := range s.of {
			if node == 0 || node > 0 && id != node {
				continue
			}
			if slices.ContainsFunc(n.cuts, func(cut time.Time) bool {
				return cut.After(f.from) && (f.to.IsZero() || cut.Before(f.to.Add(settling)))
			}) {
				return fmt.Sprintf("node %d's drain ended while the process was suspended", id)
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

// watch looks at the schedule again and again, whenever nothing moves.
func (s *schedule) watch(until context.Context) {
	for i := 0; until.Err() == nil; i++ {
		s.sample()
		synctest.Wait()
		s.checkCeiling(true)
		if i%5 == 0 {
			s.checkMarks()
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// dog returns the watchdog, or nil where there is none any more.
func (s *schedule) dog() *watchdog {
	for _, p := range s.opened() {
		if w := p.con.watchdog.Load(); w != nil {
			return w
		}
	}
	return nil
}

// sample takes note of what the pace allows now.
func (s *schedule) sample() {
	w := s.dog()
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

// checkCeiling checks that there are not more places than the ceiling allows. Where there are more because it has been
// lowered, there must not be more of them. Nothing moves in a quiet moment: then every connection has a place, too.
func (s *schedule) checkCeiling(quiet bool) {
	first := s.pools[0]
	l := first.con.ceiling.Load()
	if l == nil {
		return
	}
	placed := int64(0)
	if w := s.dog(); w != nil && quiet {
		w.mu.Lock()
		for _, n := range w.nodes {
			for c := range n.held {
				placed += int64(boolInt(c.placed.Load() && c.connector.ceiling.Load() == l))
			}
		}
		w.mu.Unlock()
	}
	most := func(limit int64) int64 {
		if limit == 0 {
			return math.MaxInt64
		}
		return limit
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	limit, used := l.limit.Load(), l.used.Load()
	bound := max(most(limit), s.ceiling.used)
	if limit != s.ceiling.limit {
		bound = max(bound, most(s.ceiling.limit)) // taken before it was lowered
	}
	if used > bound {
		s.failLocked("%d places under a ceiling of %d, and there were %d", used, limit, s.ceiling.used)
	}
	s.ceiling.limit, s.ceiling.used = limit, used
	if !quiet {
		return
	}
	if used < placed {
		s.failLocked("%d places, and %d connections have one", used, placed)
	}
	open, t := int64(0), time.Now()
	for _, p := range s.pools {
		open += p.open.Load()
		if !p.closed.IsZero() || !p.shut.IsZero() {
			return
		}
	}
	if open > used && t.Sub(s.troubled) > 20*time.Second && s.still.Load() == nil {
		s.failLocked("%d connections are open in %d places", open, used)
	}
}

// checkMarks checks that no mark outlives its drain: what a source says by one poll after that drain is over, or, where the
// source fails, by the time for which its last answer holds; what the server said in its last words by errorsKeep, once no
// connection of that time is left. Marks made by hand are markByHand's.
func (s *schedule) checkMarks() {
	w := s.dog()
	if w == nil {
		return
	}
	t := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.conns == 0 || s.still.Load() != nil {
		s.alone = t // nobody polls
		return
	}
	cfg, lag := w.cfg.Load(), time.Duration(s.gossipLag.Load())
	tick := 2*max(cfg.pollInterval, cfg.pollIntervalDraining) + cfg.pollTimeout + 500*time.Millisecond // until the worker looks again
	for id := range s.marked {
		if w.notices[id] == nil {
			delete(s.marked, id)
			s.sawLocked("marks seen to end")
		}
	}
	for id, said := range w.notices {
		s.marked[id] = true
		for source, n := range said {
			if n == nil || sourceID(source) == sourceManual {
				continue
			}
			var over time.Time
			var bound time.Duration
			if sourceID(source) == sourceErrors {
				if left := w.older(id, &mark{before: n.before}); left > 0 {
					delete(s.settled, id)
					continue
				}
				if s.settled[id].IsZero() {
					s.settled[id] = t
				}
				over, bound = maxTime(maxTime(n.heard.Add(errorsKeep), s.settled[id]), s.alone), tick
			} else {
				over = maxTime(s.lies, s.feedLies)
				if node := s.of[int(id)]; node != nil {
					if node.stays.IsZero() {
						continue
					}
					over = maxTime(over, node.stays)
				}
				over = maxTime(over, s.alone).Add(lag)
				bound = w.keepOf(sourceID(source)) + tick
				if st := &w.sources[source]; st.state == sourceOK && st.answered.After(over.Add(cfg.pollTimeout)) {
					bound = 0
				}
			}
			if late := t.Sub(over); late > bound {
				s.failLocked("%v's mark of node %d is there %v after its drain: %+v", sourceID(source), id, late, *n)
			}
		}
	}
}

// longestUse is how long a schedule's load has a connection, but for suspensions.
const longestUse = 3 * time.Second

// onCull is called for every connection that is culled, lost or put off, at that moment and by the one who does it.
func (p *schedulePool) onCull(name, reason, point string) {
	s := p.s
	s.sample()
	if name != "crdbdrain.connection.culled" || reason == "rebalance" || reason == "ttl" {
		return
	}
	w := p.con.watchdog.Load()
	m := w.marks.Load()
	t := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if m == nil {
		return // withdrawn at this moment
	}
	over, unmarked, reachable := false, false, false
	longest := longestUse // that may end now
	for _, f := range slices.Backward(s.stills) {
		if f.to.IsZero() {
			longest += t.Sub(f.from)
		} else if t.Sub(f.to) < longest {
			longest += f.to.Sub(f.from)
		}
	}
	grace := w.keep() + w.cfg.Load().pollTimeout + time.Duration(s.gossipLag.Load()) + time.Second
	if s.feed != nil {
		grace += 2 * feedWait // for so long its word is good
	}
	for _, mk := range m.of {
		begin := mk.since
		if !mk.calm.IsZero() && mk.calm.Before(begin) {
			begin = mk.calm
		}
		into, window := t.Sub(begin), w.window()
		// One that comes back may not have the time to come back again.
		last := point == "return" && !mk.decommissioning && into < window && into+longest > window*9/10
		over = over || mk.over || last
	}
	for id, n := range s.of {
		if m.of[nodeID(id)] != nil {
			continue
		}
		unmarked = unmarked || n.away.IsZero() || !n.removed || t.Sub(n.away) < grace // gossip may not have heard
		reachable = reachable || n.away.IsZero() || t.Sub(n.away) < grace
	}
	liars := t.Before(maxTime(s.lies, s.feedLies).Add(grace))
	if !liars && !reachable || !unmarked && !t.Before(s.phantoms.Add(grace)) {
		s.failLocked("a cull, and no unmarked node is reachable")
	}
	if over {
		return // such a cull may not have been paced
	}
	s.pacedCulls++
	if s.paced != w {
		s.paced, s.lastCull = w, time.Time{} // the second pool's, if it has come after the first had gone
	}
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

// atRest looks at the pools when nothing has happened for long.
func (s *schedule) atRest() {
	s.note("rest")
	pools := s.opened()
	stopped, stop := context.WithCancel(context.Background())
	loaded := false
	for _, p := range pools {
		if s.restLoad {
			p.work(stopped, p.load, 3*time.Second)
			loaded = loaded || p.load > 0
		}
	}
	time.Sleep(2 * time.Minute) // the way home, what the sources said last, what they are asked again
	var before []Stats
	for _, p := range pools {
		before = append(before, p.con.Stats())
	}
	dials := func() (n [2]int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, p := range s.pools {
			for _, c := range p.wires {
				n[boolInt(c.kind.Load() == wireSide)]++
			}
		}
		return n
	}
	dialled := dials()
	time.Sleep(time.Minute)
	for i, p := range pools {
		if after := p.con.Stats(); after != before[i] {
			s.fail("at rest: %s: %+v, and a minute later %+v", p.user, before[i], after)
		}
	}
	var m *marks
	w := s.dog()
	if w != nil {
		m = w.marks.Load()
	}
	if n := dials(); n[0] != dialled[0] || n[1] != dialled[1] {
		s.fail("%d dials at rest, and %d of the watchdog", n[0]-dialled[0], n[1]-dialled[1])
	}
	// Without load nothing proves that there is somewhere to go, and a mark stays for as long as it has connections. Those
	// that nobody uses stay in a pool that only observes, whatever the server has done; where a pool has all places under the
	// ceiling, and another one's callers cannot connect to prove it; and where the server's last words, found on them long
	// after, mark every node.
	if m != nil && loaded {
		l := s.pools[0].con.ceiling.Load()
		kept := l != nil && l.limit.Load() > 0 && l.used.Load() >= l.limit.Load() || len(m.refuge) == 0 ||
			slices.ContainsFunc(pools, func(p *schedulePool) bool { return p.observe })
		for id, mk := range m.of {
			w.mu.Lock()
			left := w.older(id, mk)
			w.mu.Unlock()
			if n := s.of[int(id)]; (n == nil || !n.removed) && !(left > 0 && kept) {
				s.fail("node %d is marked at rest, and %d connections are to leave it: %+v", id, left, *mk)
			}
		}
	}
	stop()
	s.workers.Wait()
	if l := s.pools[0].con.ceiling.Load(); l != nil {
		open, used := int64(0), l.used.Load()
		for _, p := range pools {
			open += p.open.Load()
		}
		if used != open {
			s.fail("at rest: %d connections are open in %d places", open, used)
		}
	}
}

// atTheEnd looks at what is left after the last db.Close.
func (s *schedule) atTheEnd() {
	stats := s.cluster.Stats()
	if stats.Open != 0 {
		s.fail("%d sessions are open after db.Close", stats.Open)
	}
	if l := s.pools[0].con.ceiling.Load(); l != nil && l.used.Load() != 0 {
		s.fail("%d places after db.Close", l.used.Load())
	}
	said, others, refused := 0, 0, 0
	for _, p := range s.pools {
		if p.con == nil {
			continue
		}
		if n := p.con.spares.count.Load(); n != 0 {
			s.fail("%d spares are left", n)
		}
		p.account()
		for _, c := range p.wires {
			switch {
			case c.greeted && c.goodbye():
				said++
			case c.greeted:
				others++
			}
			refused += boolInt(c.refused)
		}
		if w := p.con.watchdog.Load(); w != nil {
			w.mu.Lock()
			conns := w.conns
			w.mu.Unlock()
			if conns != 0 {
				s.fail("the watchdog counts %d connections", conns)
			}
			s.registry.mu.Lock()
			if s.registry.of[w.key] != nil {
				s.fail("the watchdog is registered")
			}
			s.registry.mu.Unlock()
		}
	}
	// To some the server said goodbye when they were leaving, and nobody heard it.
	if lost := stats.LostIdle + stats.LostBusy; said > lost || lost > said+others || refused > stats.Refused {
		s.fail("the server closed %d connections, %d heard it, and there were %d others; it refused %d dials, %d heard it", lost, said, others, stats.Refused, refused)
	}
}

// account holds what a pool has counted against what came over its connections, when all of them have ended: every cull,
// loss, move and refusal was counted once.
func (p *schedulePool) account() {
	s, st := p.s, p.con.Stats()
	s.mu.Lock()
	defer s.mu.Unlock()
	var ended, unused, wouldBe, said, broken int64
	refused := make(map[*attempt]bool)
	for _, c := range p.wires {
		if c.kind.Load() == wireSide {
			continue
		}
		if c.refused {
			refused[c.attempt] = true
		}
		x := c.session()
		if x == nil {
			continue // none, or it ended before it was one
		}
		if x.connector != p.con {
			s.failLocked("a connection of %s is another pool's", p.user)
		}
		if x.ended.Load() {
			ended++
			unused += int64(boolInt(c.requests == 0))
		}
		wouldBe += int64(boolInt(x.wouldBe.Load()))
		if c.goodbye() {
			said++
			if !x.ended.Load() {
				s.failLocked("the server said goodbye on a connection of %s, and nobody has counted it", p.user)
			}
		} else if c.broken {
			broken++
		}
	}
	// One that is discarded before anybody has had it is nobody's count, but for those that landed on a marked node.
	counted := st.Culled + st.Lost + st.Moved + st.Steered + p.ended
	if counted > ended || ended-counted > max(unused-st.Steered, 0) {
		s.failLocked("%s: %+v and %d by Shutdown, of %d connections that ended so, %d of them unused", p.user, st, p.ended, ended, unused)
	}
	if st.Lost > said+broken || st.Observed != wouldBe || p.observe && st.Culled > 0 || !p.observe && st.Observed > 0 {
		s.failLocked("%s: %+v; %d heard the server's goodbye, %d broke, %d would have been culled", p.user, st, said, broken, wouldBe)
	}
	if st.Refused != int64(len(refused)) {
		s.failLocked("%s: %d refused, %d dials were", p.user, st.Refused, len(refused))
	}
	byMetrics := Stats{
		Culled:    p.counted["crdbdrain.connection.culled/draining"] + p.counted["crdbdrain.connection.culled/decommissioning"],
		Observed:  p.counted["crdbdrain.connection.culled/observed"],
		Lost:      p.counted["crdbdrain.connection.lost"],
		Throttled: p.counted["crdbdrain.cull.throttled"],
		Rerun:     p.counted["crdbdrain.statement.rerun"],
		Refused:   p.counted["crdbdrain.dial.refused/57P01"],
		Moved:     p.counted["crdbdrain.connection.culled/rebalance"] + p.counted["crdbdrain.connection.culled/ttl"],
		Steered:   p.counted["crdbdrain.dial.steered"],
	}
	if byMetrics != st {
		s.failLocked("%s: %+v by the statistics, %+v by the metrics", p.user, st, byMetrics)
	}
	if s.suspicious > 3 {
		s.failLocked("the ceiling has refused %d callers, and was not full", s.suspicious)
	}
}
