package crdbdrain

import (
	"context"
	"slices"
	"time"
)

// The moves are for calm times: while no node is marked, sessions are replaced in place, one at a time, each with its
// replacement in hand. A session past its TTL goes (crdbdrain_ttl); and when a node has come back or joined, sessions go
// from nodes that have more than their share to it (crdbdrain_rebalance). Without a reason nothing moves.

const (
	deadZone    = 0.15             // around the fair share
	moveWithin  = 15 * time.Second // in which a node that has come back is to get its share
	minMoveGap  = 2 * time.Millisecond
	maxPending  = 4                // replacements that wait for the return of the session they replace
	pendingKeep = 30 * time.Second // and for how long: the session may be pinned
	pinnedFor   = 5 * time.Minute  // and is then taken to stay so; others have their turn
	moveDial    = 10 * time.Second
)

// balance is the state of the way home. It is guarded by watchdog.mu.
type balance struct {
	active bool
	from   time.Time // the fleet's share of moves begins
	joined []nodeID  // that a source has begun to list
	turn   int       // of the pools
	misses int       // dials in a row that were of no use: landed where there are enough, say
}

func (c *Connector) rebalances() bool { return c.cfg.rebalance && c.cfg.mode == modeOn }

// returned starts the way home: a node is there that was not, or was marked. w.mu is held.
func (w *watchdog) returned(id nodeID) {
	if slices.ContainsFunc(w.members, (*Connector).rebalances) {
		w.balance = balance{active: true, joined: append(w.balance.joined, id), from: w.balance.from}
		if f := w.fleet.Load(); f != nil && w.balance.from.IsZero() {
			w.balance.from = time.Now().Add(f.phase) // every process of the fleet has just heard of it
		}
		w.pokeMove()
	}
}

func (w *watchdog) pokeMove() {
	select {
	case w.wakem <- struct{}{}:
	default:
	}
}

// mover says when the next move is due. Only the watchdog's goroutine uses it; the dials are made in the background.
type mover struct {
	ttlNext, homeNext time.Time
}

// pending is a replacement in hand, which waits for the session whose place it takes to come back.
type pending struct {
	victim *session
	since  time.Time
}

// step does what is due, and returns when to come again; 0 when there is nothing to do.
func (mv *mover) step(w *watchdog, t time.Time) (next time.Duration) {
	again := func(at time.Time) {
		if d := max(at.Sub(t), minMoveGap); next == 0 || d < next {
			next = d
		}
	}
	waiting := w.sweepPending(t)
	if waiting > 0 {
		again(t.Add(time.Second))
	}
	ready := waiting < maxPending && w.marks.Load() == nil
	if stagger := w.cfg.Load().ttlStagger; w.hasTTL() {
		if ready && !t.Before(mv.ttlNext) {
			if victim := w.oldest(t); victim != nil {
				mv.ttlNext = t.Add(max(stagger, w.fleetGap()))
				if victim.connector.pooled {
					victim.giveWay(reasonTTL)
				} else {
					w.move(victim.connector, nil, victim, 1)
				}
			}
		}
		again(maxTime(mv.ttlNext, t.Add(min(stagger, time.Second))))
	}
	if t.Before(mv.homeNext) {
		again(mv.homeNext)
	} else if p, ok := w.plan(); ok {
		if ready && p.c != nil && p.c.pooled {
			w.giveBack(p.c)
		} else if ready && p.c != nil {
			w.move(p.c, p.hosts, nil, p.atOnce)
		}
		mv.homeNext = t.Add(p.gap)
		again(mv.homeNext)
	}
	return next
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// sweepPending forgets replacements that have found their place, gives up those that have waited too long or whose own
// node is marked now (a drain would wait for them, and they for nobody), and returns how many are waiting.
func (w *watchdog) sweepPending(t time.Time) int {
	w.mu.Lock()
	var late []*session
	w.pending = slices.DeleteFunc(w.pending, func(p pending) bool {
		r := p.victim.replacement.Load()
		if r == nil || p.victim.state.Load() == sessionGone {
			return true // it is where it belongs, or its holder has closed it
		}
		waited := t.Sub(p.since) >= pendingKeep
		if !waited && !(r.w != nil && r.w.isMarked(r)) {
			return false
		}
		if waited {
			p.victim.heldUntil.Store(now() + int64(pinnedFor))
		}
		if r = p.victim.replacement.Swap(nil); r != nil {
			late = append(late, r)
		}
		return true
	})
	waiting := len(w.pending)
	w.mu.Unlock()
	for _, r := range late {
		r.discard()
	}
	return waiting
}

// move dials a replacement in the background, atOnce at a time, for the victim or, on the way home, for one that is too
// many where it is.
func (w *watchdog) move(c *Connector, hosts map[string]bool, victim *session, atOnce int32) {
	if w.moving.Add(1) > atOnce {
		w.moving.Add(-1)
		return
	}
	started := c.background(func() {
		defer w.pokeMove()
		defer w.moving.Add(-1)
		ctx, cancel := context.WithTimeout(context.WithValue(c.ctx, preferKey{}, hosts), moveDial)
		defer cancel()
		r, err := c.connect(ctx, nil, true)
		if err != nil {
			w.missed()
			return
		}
		r.reserve.Store(true)
		v, reason := victim, reasonTTL
		if v == nil && r.w != nil {
			v, reason = w.surplus(c, r), reasonRebalance
		}
		if r.w == nil || v == nil || !r.fit() || !v.replaceWith(r, reason) {
			r.discard()
			return
		}
		w.mu.Lock()
		w.pending = append(w.pending, pending{v, time.Now()})
		w.mu.Unlock()
	})
	if !started {
		w.moving.Add(-1)
	}
}

// replaceWith puts r into the session's place: at once where it is idle, when it comes back otherwise.
func (s *session) replaceWith(r *session, reason cullReason) bool {
	r.reason = reason // of its being here
	r.idled.Store(now())
	r.state.Store(sessionIdle)
	if !s.replacement.CompareAndSwap(nil, r) {
		return false
	}
	if s.state.CompareAndSwap(sessionIdle, sessionGone) {
		s.ended.Store(true)
		s.w.countMoved(s, reason, pointSweep)
		_ = s.bury()
		r.reserve.Store(false)
	} else if s.state.Load() == sessionGone && s.replacement.CompareAndSwap(r, nil) {
		return false // closed meanwhile
	}
	return true
}

// movable reports whether the session may be replaced: somebody's or the pool's, nothing waits to take its place, and
// nothing has lately waited in vain.
func (s *session) movable() bool {
	return s.state.Load() != sessionGone && !s.reserve.Load() && s.replacement.Load() == nil && s.heldUntil.Load() <= now() && s.leave.Load() == 0
}

// ttl returns how long the connector keeps a connection; 0: as long as it lasts.
func (c *Connector) ttl() time.Duration {
	if c.cfg.mode != modeOn {
		return 0
	}
	return c.cfg.ttl
}

func (w *watchdog) hasTTL() bool {
	return slices.ContainsFunc(w.connectors(), func(c *Connector) bool { return c.ttl() > 0 })
}

// oldest returns the session that is longest past its TTL.
func (w *watchdog) oldest(t time.Time) (victim *session) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.nodes {
		for s := range n.held {
			if ttl := s.connector.ttl(); ttl > 0 && s.movable() && t.Sub(s.opened) > ttl+s.jitter &&
				(victim == nil || s.opened.Before(victim.opened)) && slices.Contains(w.members, s.connector) { // not a closed pool's
				victim = s
			}
		}
	}
	return victim
}

// plan is a move that would help: a session of c should go to one of hosts, where there are several to choose from.
// Without c there is nothing to do for now.
type plan struct {
	c     *Connector
	hosts map[string]bool
	gap   time.Duration

	atOnce int32 // dials
}

// heldBy counts the sessions of some of the members by node. w.mu is held.
func (w *watchdog) heldBy(members ...*Connector) map[*Connector]map[nodeID]int {
	held := make(map[*Connector]map[nodeID]int, len(members))
	for _, c := range members {
		held[c] = make(map[nodeID]int)
	}
	alone := len(w.members) == 1 // the usual: there is nothing to tell apart, but for the few in reserve
	for id, n := range w.nodes {
		switch {
		case id == 0:
		case alone && len(n.held) > 0:
			held[members[0]][id] = len(n.held)
		case !alone:
			for s := range n.held {
				if counts := held[s.connector]; counts != nil && s.stamp() == id && s.state.Load() != sessionGone && !s.reserve.Load() {
					counts[id]++
				}
			}
		}
	}
	return held
}

// heldOf is heldBy for one connector, and nil where it is no member any more. w.mu is held.
func (w *watchdog) heldOf(c *Connector) map[nodeID]int {
	if !slices.Contains(w.members, c) {
		return nil
	}
	return w.heldBy(c)[c]
}

// shares adds to a connector's sessions by node the nodes that can have some and have none. w.mu is held.
func (w *watchdog) shares(held map[nodeID]int) (counts map[nodeID]int, share float64) {
	counts = held
	total := 0
	for _, n := range held {
		total += n
	}
	for id, n := range w.nodes {
		if id != 0 && now()-n.seen.Load() < int64(errorsKeep) {
			counts[id] += 0
		}
	}
	listed := false
	for id := range w.sources {
		for node, state := range w.sources[id].nodes {
			// An ID that we never reached counts only when it is new.
			if state.live && !state.leaving() && (!sourceID(id).listsOthers() || w.nodes[node] != nil || slices.Contains(w.balance.joined, node)) {
				counts[node] += 0
			}
			listed = true
		}
	}
	if !listed { // nobody tells whether it is back: a few dials will
		for _, id := range w.balance.joined {
			counts[id] += 0
		}
	}
	return counts, float64(total) / float64(max(len(counts), 1))
}

// helps reports whether a session should go from a node that has from of them to one that has to: one of the two is out of
// the dead zone around the share, the other on the other side of it, and afterwards they differ by less.
func helps(from, to int, share float64) bool {
	few, many := float64(to), float64(from)
	return from-to >= 2 && few < share && many > share && (few < share*(1-deadZone) || many > share*(1+deadZone))
}

// plan looks for a move that would help.
func (w *watchdog) plan() (p plan, ok bool) {
	if w.marks.Load() != nil {
		return p, false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.balance.active || w.rule.Load() == ruleUnknown || w.rule.Load() == ruleOff {
		return p, false
	}
	if early := time.Until(w.balance.from); early > 0 {
		return plan{gap: early}, true // the turn of others
	}
	held := w.heldBy(w.members...)
	type lack struct {
		c   *Connector
		aim []nodeID
	}
	var lacks []lack
	missing, nodes := 0, 0
	for _, c := range w.members {
		if !c.rebalances() {
			continue
		}
		counts, share := w.shares(held[c])
		most := 0
		for _, n := range counts {
			most = max(most, n)
		}
		l := lack{c: c}
		for id, n := range counts {
			if helps(most, n, share) {
				missing += max(int(share), 1) // as if it had none: the last ones come no slower than the first
				l.aim = append(l.aim, id)
			}
		}
		if len(l.aim) > 0 {
			lacks = append(lacks, l)
		}
		nodes = len(counts)
	}
	if len(lacks) > 0 && w.balance.misses <= 10*nodes {
		l := lacks[w.balance.turn%len(lacks)] // the pools in turn
		w.balance.turn++
		// Through a load balancer only every so-manieth dial lands where it should. Where none does, for long, moving on
		// would only be churn.
		dials := missing
		hosts := w.addrs.hostsOf(l.aim)
		if len(hosts) == 0 {
			dials *= nodes
		}
		return plan{
			c: l.c, hosts: hosts,
			gap:    max(min(w.cfg.Load().cullStagger, max(moveWithin/time.Duration(dials), minMoveGap)), w.fleetGap()),
			atOnce: int32(min(max(missing/10, 1), 8)),
		}, true
	}
	w.balance = balance{}
	return p, false
}

// surplus returns the session to be replaced by r, which has landed on a node, or nil if that does not help.
func (w *watchdog) surplus(c *Connector, r *session) (victim *session) {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer func() {
		if w.balance.misses++; victim != nil {
			w.balance.misses = 0
		}
	}()
	held := w.heldOf(c)
	if held == nil {
		return nil // closed
	}
	counts, share := w.shares(held)
	id := r.stamp()
	if id != 0 && len(w.members) == 1 { // r itself has been counted: it is to take a place, not to make one
		counts[id]--
		share -= 1 / float64(len(counts))
	}
	if id == 0 || w.marks.Load() != nil {
		return nil
	}
	most, idle := 0, false
	for from, n := range w.nodes {
		if counts[from] < most || !helps(counts[from], counts[id], share) {
			continue
		}
		for s := range n.held {
			if s == r || s.connector != c || s.stamp() != from || !s.movable() {
				continue
			}
			if now := s.state.Load() == sessionIdle; victim == nil || counts[from] > most || now && !idle {
				victim, most, idle = s, counts[from], now
			}
			if idle {
				break
			}
		}
	}
	return victim
}

// missed takes note of a dial for the way home that failed.
func (w *watchdog) missed() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.balance.misses++
}
