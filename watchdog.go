package crdbdrain

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// watchdog is the one background worker for a cluster in a process: it polls the sources, owns the marks, paces the
// culls, and sweeps idle connections. Its goroutine runs while there are connections to CockroachDB, and no caller ever
// waits for it.
type watchdog struct {
	key      string
	dialFeed func(ctx context.Context, network, addr string) (net.Conn, error)

	cfg atomic.Pointer[config] // what its members' settings come to (common); changed with mu held
	log *slog.Logger

	marks   atomic.Pointer[marks] // nil: no node is marked. The one thing that the hot path looks at
	rule    atomic.Uint32         // rule*: whether the PIDs of this cluster tell the node
	pace    pace
	askNext atomic.Int64 // by now(): until then new connections are not asked for their node
	nowhere atomic.Bool  // said that there is nowhere to go
	noticed atomic.Int64 // now(), when a source last said that a node leaves
	learned atomic.Int64 // the window by the server's settings, a duration; 0: not known
	fleet   atomic.Pointer[fleetShare]

	spareNext atomic.Int64 // by now(): the process's next turn in its fleet to dial a spare

	fullUntil atomic.Int64 // by now(): servers have too many connections, nothing is culled
	fullTimes atomic.Int32 // in a row

	wake  chan struct{} // a source has something new: poll
	wakes chan struct{} // the marks have changed: sweep
	wakem chan struct{} // a node has come back, or a move is over: move

	moving atomic.Int32 // replacements being dialled for moves

	mu        sync.Mutex
	members   []*Connector                    // guarded by mu
	pinned    int                             // feeds, for whom the worker runs without connections; guarded by mu
	changed   map[chan struct{}]struct{}      // told when the marks or a source's answer change; guarded by mu
	conns     int                             // guarded by mu
	nodes     map[nodeID]*nodeInfo            // guarded by mu; 0 has the connections without a stamp
	notices   map[nodeID]*[numSources]*notice // guarded by mu
	drains    map[nodeID]*drain               // guarded by mu
	cleared   map[nodeID]int64                // gossip's epoch at which the node came back; guarded by mu
	addrs     addrBook                        // guarded by mu
	balance   balance                         // guarded by mu
	pending   []pending                       // guarded by mu
	untold    []event                         // guarded by mu; for the worker to tell
	sources   [numSources]sourceStatus        // guarded by mu
	barred    map[role]time.Time              // roles that could not connect, and until when to prefer others; guarded by mu
	mute      bool                            // the worker has no connection of its own; guarded by mu
	overslept bool                            // the last poll was; guarded by mu
	stop      context.CancelFunc              // nil while no worker runs; guarded by mu
	done      chan struct{}                   // closed when the worker has ended; guarded by mu
}

const (
	ruleUnknown = iota
	ruleHolds   // BackendKeyData tells the node
	ruleAsk     // it does not, but SHOW node_id does: each new connection is asked
	ruleOff     // nothing tells: stamps are unknown and nothing is culled by node
)

// watchdogs is the watchdogs of the process, by cluster. Its lock is taken when a connector makes its first connection and
// when it is closed.
type watchdogs struct {
	mu sync.Mutex
	of map[string]*watchdog // guarded by mu

	dialFeed func(ctx context.Context, network, addr string) (net.Conn, error) // nil, but in tests
}

var registry watchdogs

// join makes the connector a member of its cluster's watchdog: there is one, whatever the users, databases and settings.
func (r *watchdogs) join(c *Connector) *watchdog {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := c.cfg.key
	w := r.of[key]
	if w == nil {
		w = &watchdog{
			key: key, dialFeed: r.dialFeed,
			wake: make(chan struct{}, 1), wakes: make(chan struct{}, 1), wakem: make(chan struct{}, 1),
			nodes:   make(map[nodeID]*nodeInfo),
			notices: make(map[nodeID]*[numSources]*notice),
			drains:  make(map[nodeID]*drain),
			cleared: make(map[nodeID]int64),
		}
		w.log = slog.New(members{w})
		if r.of == nil {
			r.of = make(map[string]*watchdog)
		}
		r.of[key] = w
	}
	w.mu.Lock()
	w.members = append(w.members, c)
	w.cfg.Store(common(w.members))
	w.mu.Unlock()
	c.instruments().watch(w)
	return w
}

// loggersOf returns the connectors' loggers, each once.
func loggersOf(connectors []*Connector) (loggers []*slog.Logger) {
	for _, c := range connectors {
		if !slices.Contains(loggers, c.log) {
			loggers = append(loggers, c.log)
		}
	}
	return loggers
}

// common is what the settings of one cluster's connectors come to, for what concerns the cluster as a whole: every source
// that one of them names, the shortest interval and window, the longest stagger. What concerns a connection (mode, spares,
// rerun, rebalance, TTL) stays its connector's own.
func common(members []*Connector) *config {
	cfg := *members[0].cfg
	for _, m := range members[1:] {
		o := m.cfg
		cfg.sources |= o.sources
		if len(cfg.readiness) == 0 {
			cfg.roots = o.roots
		}
		cfg.readiness = union(cfg.readiness, o.readiness)
		if cfg.feed == "" {
			cfg.feed, cfg.feedTokenFile, cfg.feedRoots = o.feed, o.feedTokenFile, o.feedRoots // its own certificates
		}
		cfg.pollInterval = min(cfg.pollInterval, o.pollInterval)
		cfg.pollAuto = cfg.pollAuto || o.pollAuto
		cfg.pollIntervalDraining = min(cfg.pollIntervalDraining, o.pollIntervalDraining)
		cfg.pollTimeout = max(cfg.pollTimeout, o.pollTimeout)
		cfg.cullStagger = max(cfg.cullStagger, o.cullStagger)
		switch {
		case cfg.ttl == 0:
			cfg.ttl, cfg.ttlStagger = o.ttl, o.ttlStagger
		case o.ttl > 0:
			cfg.ttlStagger = max(cfg.ttlStagger, o.ttlStagger)
		}
		if cfg.window == 0 || o.window != 0 && o.window < cfg.window {
			cfg.window = o.window
		}
	}
	return &cfg
}

// union appends what a lacks of b.
func union(a, b []string) []string {
	a = slices.Clip(a)
	for _, s := range b {
		if !slices.Contains(a, s) {
			a = append(a, s)
		}
	}
	return a
}

// members is the handler of the watchdog's log: each logger of its connectors gets a line once. It must not be used with
// w.mu held.
type members struct{ w *watchdog }

func (h members) Enabled(context.Context, slog.Level) bool { return true }
func (h members) WithAttrs([]slog.Attr) slog.Handler       { return h } // the watchdog uses neither
func (h members) WithGroup(string) slog.Handler            { return h }

func (h members) Handle(ctx context.Context, r slog.Record) error {
	var errs []error
	for _, l := range loggersOf(h.w.connectors()) {
		if l.Enabled(ctx, r.Level) {
			errs = append(errs, l.Handler().Handle(ctx, r.Clone()))
		}
	}
	return errors.Join(errs...)
}

// leave takes the connector out. With the last one the watchdog ends: its worker has stopped when leave returns.
func (r *watchdogs) leave(c *Connector, w *watchdog) {
	r.mu.Lock()
	w.mu.Lock()
	w.members = slices.DeleteFunc(w.members, func(m *Connector) bool { return m == c })
	last := len(w.members) == 0
	if !last {
		w.cfg.Store(common(w.members))
		w.forgetRoles()
	}
	watched := slices.ContainsFunc(w.members, func(m *Connector) bool { return m.instruments() == c.instruments() })
	var done chan struct{}
	if last {
		if w.stop != nil {
			w.stop()
			w.stop, done = nil, w.done
		}
		w.pending = nil    // what they wait for is still in use, and closes them
		w.marks.Store(nil) // connections still in use go on without
	}
	w.mu.Unlock()
	if last && r.of[w.key] == w {
		delete(r.of, w.key)
	}
	if !watched {
		c.instruments().unwatch(w)
	}
	r.mu.Unlock()
	if done != nil {
		<-done
	}
}

// add enters a fresh connection, and starts the worker with the first one.
func (w *watchdog) add(s *session, a *attempt) {
	w.mu.Lock()
	id := s.stampCandidate()
	n := w.nodeOf(id)
	s.node = n
	n.held[s] = struct{}{}
	n.count.Store(int32(len(n.held)))
	n.seen.Store(now())
	w.fullTimes.Store(0)
	w.conns++
	if d := w.drains[id]; d != nil && !d.done && s.stamp() == id && s.opened.Before(d.mark.before) {
		d.left++ // its dial had begun when the drain was noticed
	}
	events := w.cameBack(s.stamp(), s.opened)
	w.addrs.learn(a, id)
	if stamp := s.stamp(); stamp != 0 {
		if m := w.marks.Load(); m != nil && m.of[stamp] == nil {
			for _, mk := range m.of { // there is a way to another node after all
				mk.node.stuckTimes = 0
				mk.node.stuckUntil.Store(0)
			}
			if !slices.Contains(m.refuge, n) {
				events = append(events, w.remark(time.Now())...)
			}
		}
	}
	events = append(events, w.start()...)
	w.mu.Unlock()
	w.tell(events)
}

// start starts the worker if it does not run. w.mu is held.
func (w *watchdog) start() (events []event) {
	if w.stop != nil || len(w.members) == 0 {
		return nil
	}
	events = w.expire(time.Now()) // of a time when there were no connections
	ctx, cancel := context.WithCancel(context.Background())
	before, done := w.done, make(chan struct{})
	w.stop, w.done = cancel, done
	go w.run(ctx, before, done)
	return events
}

// stampCandidate is the ID under which the connection is entered: what the PID says, until the rule is known not to hold.
func (s *session) stampCandidate() nodeID {
	if s.asked || s.w.rule.Load() <= ruleHolds {
		return s.id
	}
	return 0
}

// remove takes a connection out that has ended or is about to.
func (w *watchdog) remove(s *session) {
	w.mu.Lock()
	n := s.node
	if _, held := n.held[s]; !held {
		w.mu.Unlock()
		return
	}
	delete(n.held, s)
	n.count.Store(int32(len(n.held)))
	w.conns--
	n.tellEmpty()
	var events []event
	if d := w.drains[n.id]; d != nil && !d.done && s.stamp() == n.id && s.opened.Before(d.mark.before) {
		if d.left--; d.left <= 0 {
			events = append(events, w.drainOver(d, time.Now(), ""))
		}
	}
	w.mu.Unlock()
	w.tell(events)
}

// poke asks for a poll before its time.
func (w *watchdog) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *watchdog) pokeSweep() {
	select {
	case w.wakes <- struct{}{}:
	default:
	}
}

// window is how long a draining node is taken to leave connections alone.
func (w *watchdog) window() time.Duration {
	return cmp.Or(w.cfg.Load().window, time.Duration(w.learned.Load()), defaultWindow)
}

// defaultPollInterval is the poll interval where none is given and the window is not short. A drain has to be noticed while
// it leaves time: the default is never more than half of the window, where the window is one that polls can be made for.
const (
	defaultPollInterval = 5 * time.Second
	minAutoPollInterval = time.Second
)

// interval is the time between two polls while no node is marked, for a window.
func (c *config) interval(window time.Duration) time.Duration {
	if !c.pollAuto || window < minAutoPollInterval {
		return c.pollInterval
	}
	return min(c.pollInterval, max(window/2, minAutoPollInterval))
}

func (w *watchdog) interval() time.Duration { return w.cfg.Load().interval(w.window()) }

// keep is how long a source's last answer holds while it fails.
func (w *watchdog) keep() time.Duration { return 3 * w.interval() }

// keepOf is keep for a source. A feed is let wait for news.
func (w *watchdog) keepOf(id sourceID) time.Duration {
	if id == sourceFeed {
		return 2*feedWait + w.keep()
	}
	return w.keep()
}

// minPollGap is the shortest time between two polls, however often the errors source asks for one.
const minPollGap = 100 * time.Millisecond

// run is the worker.
func (w *watchdog) run(ctx context.Context, before <-chan struct{}, done chan<- struct{}) {
	defer close(done)
	if before != nil {
		<-before
	}
	p := newPoller(w)
	results := make(chan pollResult, 1)
	polling := false
	// The first poll comes at a random time within an interval: a fleet that was deployed together does not poll together.
	poll := time.NewTimer(rand.N(w.interval()))
	sweep := time.NewTimer(time.Hour)
	sweep.Stop()
	feed := w.followFeed(ctx, nil)
	var moves mover
	move := time.NewTimer(0)
	defer poll.Stop()
	defer sweep.Stop()
	defer move.Stop()
	defer func() {
		if polling {
			<-results
		}
		p.close()
		feed.stop()
		w.tellQueued()
	}()
	var sw sweeper
	var lastPoll time.Time
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
			w.tellQueued()
			poll.Reset(max(0, minPollGap-time.Since(lastPoll)))
			continue
		case <-w.wakes:
			sweep.Reset(0)
			continue
		case <-w.wakem:
			move.Reset(0)
			continue
		case <-move.C:
			if next := moves.step(w, time.Now()); next > 0 {
				move.Reset(next)
			}
			continue
		case <-sweep.C:
			if next := sw.sweep(w); next > 0 {
				sweep.Reset(next)
			}
			continue
		case r := <-results:
			polling = false
			again := w.take(r)
			interval := w.interval()
			if w.marks.Load() != nil {
				interval = w.cfg.Load().pollIntervalDraining
			}
			if again {
				interval = minPollGap
			}
			poll.Reset(jitter(interval))
			continue
		case <-poll.C:
		}
		t := time.Now()
		if suspended(last, t) {
			// The process slept while the cluster went on: its marks are of another time.
			w.forget()
		}
		last = t
		w.reap()
		w.mu.Lock()
		events := w.expire(t)
		idle := w.conns == 0 && w.pinned == 0
		if idle && w.stop != nil {
			w.stop()
			w.stop = nil // the next connection starts another worker
		}
		w.mu.Unlock()
		w.tell(events)
		if idle {
			return
		}
		if polling {
			continue // its result sets the timer again
		}
		feed = w.followFeed(ctx, feed)
		polling, lastPoll = true, t
		ask := w.ask(t)
		go func() { results <- p.poll(ctx, ask) }()
	}
}

// jitter varies an interval by up to 20 % either way.
func jitter(d time.Duration) time.Duration {
	return d - d/5 + rand.N(2*d/5+1)
}

// suspended reports whether the wall clock has run ahead of the monotonic one between two readings: the machine slept
// (or somebody set its clock).
func suspended(before, after time.Time) bool {
	mono := after.Sub(before)
	wall := after.Round(0).Sub(before.Round(0))
	return wall-mono > 10*time.Second
}

// forget drops all notices, until a source repeats them. Nobody repeats a mark made by hand: it stays.
func (w *watchdog) forget() {
	w.mu.Lock()
	for _, said := range w.notices {
		*said = [numSources]*notice{sourceManual: said[sourceManual]}
	}
	for id := range w.sources {
		w.sources[id].nodes = nil
	}
	w.fleet.Store(nil) // expire drops it with the feed's answer
	events := append(w.remark(time.Now()), w.tellChanged)
	w.mu.Unlock()
	w.tell(events)
}

// nowhereToGo says once that every node known is marked.
func (w *watchdog) nowhereToGo() {
	if w.nowhere.CompareAndSwap(false, true) {
		w.log.Warn("crdbdrain: no node without a mark is known to be reachable; nothing is culled")
	}
}

// sweeper gives up idle connections on marked nodes, oldest use first: those at the bottom of database/sql's stack, which
// no caller will see for long.
type sweeper struct {
	idle    []*session
	listed  time.Time
	scratch []*session
	need    map[*Connector]int  // so many of theirs have to leave
	unready map[*Connector]bool // and these no spare in hand
}

// listAgain is how long a list of idle connections serves; slowSweep is the time between looks when there is none, and
// minSweepGap when there are many.
const (
	listAgain   = 50 * time.Millisecond
	slowSweep   = 250 * time.Millisecond
	minSweepGap = 100 * time.Microsecond
)

// sweep culls what the pace allows now, and returns when to look again; 0 when no node is marked.
func (s *sweeper) sweep(w *watchdog) time.Duration {
	m := w.marks.Load()
	t := time.Now()
	if m == nil {
		*s = sweeper{} // it keeps nothing that has ended
		for _, c := range w.connectors() {
			c.tendSpares(0, t, 0)
		}
		return 0
	}
	if len(s.idle) == 0 || t.Sub(s.listed) > listAgain {
		s.list(w, m)
		s.listed = t
		// The gap is the process's: each of the pools that need spares has its part of it.
		gap := w.gap(m, t) * time.Duration(max(len(s.need), 1))
		for _, c := range w.connectors() {
			c.tendSpares(s.need[c], t, gap)
		}
	}
	if len(s.idle) == 0 {
		return w.turnWithin(slowSweep, m, t)
	}
	clear(s.unready)
	left := s.idle[:0]
	for i, c := range s.idle {
		if c.idled.Load() > now()-int64(sweepIdle) { // used since it was listed
			continue
		}
		if s.unready[c.connector] {
			left = append(left, c)
			continue
		}
		var r *session
		if w.spared(c, pointSweep) {
			// The next burst will want it: a spare takes its place in the pool.
			if r = c.connector.popSpare(); r != nil {
				r.reserve.Store(true)
				r.idled.Store(c.idled.Load())
				r.state.Store(sessionIdle)
				if !c.replacement.CompareAndSwap(nil, r) {
					c.connector.putSpare(r)
					r = nil
				}
			}
		}
		v := w.cull(c, m, t, pointSweep)
		if v == gone {
			_ = c.bury()
			if r != nil {
				r.reserve.Store(false)
				c.connector.refill(t)
			}
			continue
		}
		if r != nil && c.replacement.CompareAndSwap(r, nil) {
			r.state.Store(sessionInUse)
			c.connector.putSpare(r)
		}
		if v == wait {
			s.idle = append(left, s.idle[i:]...)
			if t.Before(m.from) {
				return w.turnWithin(slowSweep, m, t)
			}
			return w.turnWithin(min(max(w.pace.until(t, w.gap(m, t)), minSweepGap), listAgain), m, t)
		}
		if v == unready {
			left = append(left, c)
			if s.unready[c.connector] = true; len(s.unready) >= len(s.need) {
				left = append(left, s.idle[i+1:]...)
				break
			}
		}
	}
	s.idle = left
	if len(left) > 0 { // a spare that arrives wakes the sweep, but the culls do not wait for it for long
		return w.turnWithin(min(max(w.gap(m, t)/4, time.Millisecond), 25*time.Millisecond), m, t)
	}
	return w.turnWithin(listAgain, m, t)
}

// turnWithin shortens d to the process's next turn in its fleet: at the same moment every process would be late alike.
func (w *watchdog) turnWithin(d time.Duration, m *marks, t time.Time) time.Duration {
	if w.fleet.Load() == nil {
		return d
	}
	sooner := func(at time.Time) {
		if left := at.Sub(t); left > 0 {
			d = min(d, left)
		}
	}
	sooner(m.from)
	sooner(t.Add(time.Duration(w.spareNext.Load() - now())))
	return d
}

// connectors returns the members.
func (w *watchdog) connectors() []*Connector {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.members)
}

// list collects the sessions that may be swept, and the connectors that have some that have to leave.
func (s *sweeper) list(w *watchdog, m *marks) {
	old := now() - int64(sweepIdle)
	s.scratch = s.scratch[:0]
	if s.need == nil {
		s.need, s.unready = make(map[*Connector]int), make(map[*Connector]bool)
	}
	clear(s.need)
	w.mu.Lock()
	for id, mk := range m.of {
		for c := range mk.node.held {
			if c.stamp() != id {
				continue
			}
			if !mk.decommissioning || c.opened.Before(mk.before) {
				s.need[c.connector]++
			}
			// A replacement that waits for its place is nobody's yet: sweepPending gives it up.
			if c.state.Load() == sessionIdle && c.idled.Load() <= old && c.opened.Before(mk.before) && !c.wouldBe.Load() && !c.reserve.Load() {
				s.scratch = append(s.scratch, c)
			}
		}
	}
	w.mu.Unlock()
	s.idle = s.scratch
	slices.SortFunc(s.idle, func(a, b *session) int { return cmp.Compare(a.idled.Load(), b.idled.Load()) })
}
