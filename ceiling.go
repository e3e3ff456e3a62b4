package crdbdrain

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// ceiling is the limit on connections over all pools of one cluster in the process (crdbdrain_max_connections). A
// connection has a place from its dial on until it begins to be closed. Without a limit it only counts.
type ceiling struct {
	key        string
	attributes attribute.Set

	limit    atomic.Int64 // 0: none
	used     atomic.Int64
	rejected atomic.Int64
	reported atomic.Int64 // of rejected, when the limited state was entered
	limited  atomic.Bool  // the log has said that connections are being refused
	refusal  atomic.Int64 // now(), of the latest
	looked   atomic.Int64 // now(), when the idle connections were last looked at

	mu      sync.Mutex
	members []*Connector // guarded by mu
	byHand  bool         // SetMaxConnections has been called: it outweighs the DSNs; guarded by mu
}

// calm is how long nothing has to have been refused for the limited state to be over.
const calm = 10 * time.Second

// deadLook is the shortest time between two looks at the idle connections for the sake of a place.
const deadLook = 250 * time.Millisecond

// ceilingSet is the ceilings of the process, by cluster. Its lock is taken at a connector's first dial, when its limit is
// changed, and when it is closed.
type ceilingSet struct {
	mu sync.Mutex
	of map[string]*ceiling // guarded by mu
}

var ceilings ceilingSet

// join returns the ceiling of the connector's cluster.
func (cs *ceilingSet) join(c *Connector) *ceiling {
	if l := c.ceiling.Load(); l != nil {
		return l
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.ceiling.Load(); l != nil {
		return l
	}
	if c.closed {
		l := &ceiling{} // what is dialled after Close belongs to no pool
		c.ceiling.Store(l)
		return l
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	l := cs.of[c.cfg.key]
	if l == nil {
		l = &ceiling{key: c.cfg.key, attributes: attribute.NewSet(attribute.String("crdbdrain.cluster", c.cfg.label()))}
		if cs.of == nil {
			cs.of = make(map[string]*ceiling)
		}
		cs.of[c.cfg.key] = l
	}
	l.mu.Lock()
	l.members = append(l.members, c)
	if !l.byHand {
		l.limit.Store(lowest(l.members))
	}
	l.mu.Unlock()
	c.ceiling.Store(l)
	return l
}

// lowest is the limit that several DSNs come to: the lowest counts; 0 if none has one.
func lowest(members []*Connector) (limit int64) {
	for _, m := range members {
		if n := int64(m.cfg.maxConnections); n > 0 && (limit == 0 || n < limit) {
			limit = n
		}
	}
	return limit
}

// leave takes the connector out. With the last one, the cluster's ceiling is forgotten.
func (cs *ceilingSet) leave(c *Connector) {
	l := c.ceiling.Load()
	if l == nil {
		return
	}
	cs.mu.Lock()
	l.mu.Lock()
	l.members = slices.DeleteFunc(l.members, func(m *Connector) bool { return m == c })
	last := len(l.members) == 0
	if !l.byHand {
		l.limit.Store(lowest(l.members))
	}
	l.mu.Unlock()
	if last && cs.of[l.key] == l {
		delete(cs.of, l.key)
	}
	cs.mu.Unlock()
	if in := c.in.Load(); in != nil && !slices.ContainsFunc(l.connectors(), func(m *Connector) bool { return m.in.Load() == in }) {
		in.unwatchCeiling(l)
	}
}

// SetMaxConnections changes the ceiling of the connector's cluster in this process (crdbdrain_max_connections), from now
// on and for all its pools; 0 is none. A ceiling below the connections that there are refuses new ones and closes none. It
// is safe for concurrent use. The error says why nothing was done.
func (c *Connector) SetMaxConnections(n int) error {
	switch {
	case n < 0 || n > maxCeiling:
		return configErrorf("%d connections: want a whole number from 0 to %d", n, maxCeiling)
	case c.cfg.mode == modeOff:
		return configErrorf("crdbdrain_mode is off")
	}
	l := ceilings.join(c)
	l.mu.Lock()
	member := slices.Contains(l.members, c)
	if member {
		l.limit.Store(int64(n))
		l.byHand = true
	}
	l.mu.Unlock()
	if !member {
		return errClosed
	}
	l.report(c)
	return nil
}

// report makes the gauges report the ceiling, unless the connector has left it.
func (l *ceiling) report(c *Connector) {
	in := c.instruments() // they come from the application's meter provider: not under a lock
	l.mu.Lock()
	fresh := slices.Contains(l.members, c) && in.watchCeiling(l)
	l.mu.Unlock()
	if fresh {
		in.rejected.Add(context.Background(), 0, metric.WithAttributeSet(l.attributes))
	}
	c.reported.Store(true)
}

const maxCeiling = 1 << 20

// errNoRoom is for a dial that nobody waits for: it takes no spare's place, and its refusal is nobody's trouble.
var errNoRoom = configError("no room under crdbdrain_max_connections")

// enter takes a place for a connection that is about to be dialled: ahead, when nobody waits for it (a spare, a move).
func (c *Connector) enter(ahead bool) error {
	l := ceilings.join(c)
	if c.cfg.maxConnections > 0 && !c.reported.Load() {
		l.report(c)
	}
	for !l.take() {
		if ahead {
			return errNoRoom
		}
		// A spare that a pool has in reserve is worth less than a connection that a caller waits for.
		if !l.dropSpare() && !l.dropDead() {
			c.instruments().rejected.Add(context.Background(), 1, metric.WithAttributeSet(l.attributes))
			return l.refuse()
		}
	}
	l.settle()
	return nil
}

// take takes a place if there is one.
func (l *ceiling) take() bool {
	for {
		used, limit := l.used.Load(), l.limit.Load()
		if limit > 0 && used >= limit {
			return false
		}
		if l.used.CompareAndSwap(used, used+1) {
			return true
		}
	}
}

// leave gives a place back.
func (l *ceiling) leave() {
	l.used.Add(-1)
	l.settle()
}

// giveUp gives the session's place back, once.
func (c *Connector) giveUp(s *session) {
	if s.placed.CompareAndSwap(true, false) {
		c.ceiling.Load().leave()
	}
}

// dropSpare closes a spare of one of the pools, and reports whether there was one.
func (l *ceiling) dropSpare() bool {
	for _, c := range l.connectors() {
		if s := c.popSpare(); s != nil {
			s.discard()
			return true
		}
	}
	return false
}

// dropDead gives up the idle sessions that the server has ended, or has said something on that nobody has heard, and reports
// whether there was one. Their pools look at them when they hand them out the next time, which can be long after: until then
// they would have their places. It looks once in a while, since each refusal asks.
func (l *ceiling) dropDead() (dropped bool) {
	t, last := now(), l.looked.Load()
	if t-last < int64(deadLook) || !l.looked.CompareAndSwap(last, t) {
		return false
	}
	for _, c := range l.connectors() {
		w := c.watchdog.Load()
		if w == nil {
			continue
		}
		for _, s := range w.idle(c) {
			if look := s.link.peeker.apart(); look != peekClosed && look != peekPending || !s.state.CompareAndSwap(sessionIdle, sessionGone) {
				continue
			}
			s.link.hearOut()
			if s.link.words.Load() != goodbyeNone || w.isMarked(s) {
				s.lost(lostIdle)
			}
			_ = s.bury()
			s.dropReplacement()
			dropped = true
		}
	}
	return dropped
}

// idle returns a connector's idle sessions that the pool holds.
func (w *watchdog) idle(c *Connector) (idle []*session) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.nodes {
		for s := range n.held {
			if s.connector == c && s.state.Load() == sessionIdle && !s.reserve.Load() {
				idle = append(idle, s)
			}
		}
	}
	return idle
}

func (l *ceiling) connectors() []*Connector {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.members)
}

// refuse counts a refusal, and returns what the caller gets: the server's own code for too many connections, so that
// whoever handles one handles the other.
func (l *ceiling) refuse() error {
	limit := l.limit.Load()
	n := l.rejected.Add(1)
	l.refusal.Store(now())
	if l.limited.CompareAndSwap(false, true) {
		l.reported.Store(n - 1)
		for _, log := range loggersOf(l.connectors()) {
			log.Warn("crdbdrain: the ceiling on connections is reached; new ones are refused", "limit", limit, "connections", l.used.Load())
		}
	}
	return &pgconn.PgError{
		Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: stateTooManyConnections,
		Message: "crdbdrain: this process has the " + strconv.FormatInt(limit, 10) + " connections to the cluster that " + keyPrefix + "max_connections allows",
	}
}

// settle ends the limited state once nothing has been refused for a while.
func (l *ceiling) settle() {
	if l.limited.Load() && now()-l.refusal.Load() > int64(calm) && l.limited.CompareAndSwap(true, false) {
		for _, log := range loggersOf(l.connectors()) {
			log.Info("crdbdrain: new connections fit under the ceiling again", "limit", l.limit.Load(), "refused", l.rejected.Load()-l.reported.Load())
		}
	}
}
