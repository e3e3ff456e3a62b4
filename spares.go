package crdbdrain

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// spares is a connector's sessions on unmarked nodes that nobody has had yet, dialled before the culls that need them, so
// that no caller waits for a dial because of a cull. There are some only while a node is marked. They are outside the
// pool's MaxOpenConns.
type spares struct {
	count   atomic.Int32 // len(ready), for the paths that must not wait
	wanted  atomic.Bool  // keep some ready
	waiting atomic.Int64 // by now(): since when a cull has been waiting for one; 0 if none is

	mu      sync.Mutex
	ready   []spare   // guarded by mu
	leaving int       // sessions that had to leave a node when last tended; guarded by mu
	dialing int       // guarded by mu
	retry   time.Time // no dial before; guarded by mu
	failed  int       // dials in a row; guarded by mu

	took  atomic.Int64 // a dial, lately; a duration
	ahead atomic.Int32 // dials to have under way beyond those that fill the spares, for the pace's sake
}

type spare struct {
	s     *session
	since time.Time
}

const (
	maxAhead    = 32
	spareUnused = time.Minute      // a spare that nobody needed for so long is closed
	spareDial   = 10 * time.Second // bounds the dial of one
	// recentUse tells, of idle sessions, those that the next burst will want again from those that it will not.
	recentUse = time.Minute
)

// takeSpare returns a spare that is fit for use, or nil, and has another dialled in its place. It does not wait for
// anything.
func (c *Connector) takeSpare() *session {
	s := c.popSpare()
	if s != nil {
		c.refill(time.Now())
	}
	return s
}

// popSpare returns a spare that is fit for use, or nil.
func (c *Connector) popSpare() *session {
	sp := &c.spares
	for sp.count.Load() > 0 {
		sp.mu.Lock()
		var s *session
		if last := len(sp.ready) - 1; last >= 0 {
			s = sp.ready[last].s
			sp.ready[last] = spare{}
			sp.ready = sp.ready[:last]
			sp.count.Store(int32(last))
		}
		sp.mu.Unlock()
		if s == nil {
			return nil
		}
		if s.fit() {
			s.reserve.Store(false)
			return s
		}
		s.discard()
	}
	return nil
}

// putSpare keeps a session ready. It is discarded where none is wanted any more.
func (c *Connector) putSpare(s *session) {
	sp := &c.spares
	s.reserve.Store(true)
	c.mu.Lock()
	closed := c.closed
	if !closed && sp.wanted.Load() && !c.shutting.Load() {
		sp.mu.Lock()
		sp.ready = append(sp.ready, spare{s, time.Now()})
		sp.count.Store(int32(len(sp.ready)))
		sp.mu.Unlock()
		s = nil
	}
	c.mu.Unlock()
	if s != nil {
		s.discard()
	}
}

// fit reports whether a session that nobody has may be handed out: open, nothing to read, on a node without a mark.
func (s *session) fit() bool {
	if s.pg.IsClosed() || s.link.words.Load() != goodbyeNone || s.w.isMarked(s) {
		return false
	}
	look := s.link.peeker.peek()
	return look == peekQuiet || look == peekUnknown
}

// tendSpares keeps the connector's spares, while it has sessions that have to leave a node, and closes them otherwise.
// Only the watchdog calls it. The dials are made in the background.
// gap is the pace's: where a dial takes longer than that, several have to be under way.
func (c *Connector) tendSpares(leaving int, t time.Time, gap time.Duration) {
	sp := &c.spares
	need := leaving > 0
	if c.cfg.spares == 0 || c.cfg.mode != modeOn {
		return
	}
	sp.mu.Lock()
	var old []*session
	kept := sp.ready[:0]
	for _, r := range sp.ready {
		switch unused := t.Sub(r.since) > spareUnused; {
		case !need || unused || !r.s.fit():
			old = append(old, r.s)
			if unused {
				sp.wanted.Store(false) // until a cull asks
			}
		default:
			kept = append(kept, r)
		}
	}
	clear(sp.ready[len(kept):])
	sp.ready = kept
	sp.count.Store(int32(len(kept)))
	if need && sp.leaving == 0 {
		sp.wanted.Store(true) // before the first cull needs one
	}
	sp.leaving = leaving
	if !need {
		sp.wanted.Store(false)
		sp.waiting.Store(0)
		sp.retry, sp.failed = time.Time{}, 0
		sp.ahead.Store(0)
	} else {
		sp.ahead.Store(int32(min(sp.took.Load()/int64(max(gap, time.Millisecond)), maxAhead)))
	}
	sp.mu.Unlock()
	for _, s := range old {
		s.discard()
	}
	c.refill(t)
}

// refill dials what is missing.
func (c *Connector) refill(t time.Time) {
	sp := &c.spares
	sp.mu.Lock()
	dial := 0
	if sp.leaving > 0 && sp.wanted.Load() && !t.Before(sp.retry) && !c.shutting.Load() {
		dial = sp.missing(c.cfg.spares)
		if w := c.watchdog.Load(); dial > 0 && w != nil && w.fleet.Load() != nil {
			dial = boolInt(w.spareTurn(t))
		}
		sp.dialing += dial
	}
	sp.mu.Unlock()
	for range dial {
		if !c.dialSpare() {
			sp.mu.Lock()
			sp.dialing--
			sp.mu.Unlock()
		}
	}
}

// missing is how many dials there are to begin, of a connector that is to have so many spares ready: in a pace that dials
// do not keep, as many more as are needed to keep it, though not more than sessions that have to leave. sp.mu is held.
func (sp *spares) missing(spares int) int {
	most := max(spares, min(spares+int(sp.ahead.Load()), sp.leaving))
	return max(0, most-len(sp.ready)-sp.dialing)
}

// spareTurn takes the process's turn to dial a spare: every process of the fleet has just heard of the drain, and whatever
// the number of its pools, each dials one in a gap. It reports whether it is its turn.
func (w *watchdog) spareTurn(t time.Time) bool {
	if m := w.marks.Load(); m != nil && t.Before(m.from) {
		return false
	}
	n, next := now(), w.spareNext.Load()
	return n >= next && w.spareNext.CompareAndSwap(next, n+int64(w.fleetGap()))
}

// dialSpare dials one spare in the background.
func (c *Connector) dialSpare() bool {
	return c.background(func() {
		ctx, cancel := context.WithTimeout(c.ctx, spareDial)
		defer cancel()
		start := time.Now()
		s, err := c.connect(ctx, nil, true)
		ok := err == nil && s.w != nil && s.stamp() != 0 && s.fit()
		sp := &c.spares
		sp.mu.Lock()
		sp.dialing--
		if ok {
			sp.failed = 0
			sp.took.Store(int64(time.Since(start)))
		} else {
			// The server is full, or every dial lands on a marked node: there is nowhere to go for now.
			// Or the ceiling leaves no room: it does as soon as a cull makes some.
			sp.retry = time.Now().Add(min(250*time.Millisecond<<min(sp.failed, 7), 30*time.Second))
			sp.failed++
		}
		sp.mu.Unlock()
		switch {
		case ok:
			c.putSpare(s)
			if sp.waiting.Load() != 0 {
				s.w.pokeSweep()
			}
		case err == nil:
			s.discard()
		}
	})
}

// awaits reports whether a cull should rather wait for a spare, which it then asks for. It waits no longer than a part of
// the pace's gap: the window does not wait.
func (sp *spares) awaits(gap time.Duration) bool {
	if sp.count.Load() > 0 {
		return false
	}
	sp.wanted.Store(true)
	t := now()
	since := sp.waiting.Load()
	if since == 0 {
		sp.waiting.CompareAndSwap(0, t)
		return true
	}
	return t-since < int64(gap/4)
}
