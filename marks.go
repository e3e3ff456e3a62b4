package crdbdrain

import (
	"maps"
	"slices"
	"sync/atomic"
	"time"
)

// nodeInfo is what is known of one node of the cluster.
type nodeInfo struct {
	id    nodeID
	held  map[*session]struct{} // connections with this stamp; guarded by watchdog.mu
	count atomic.Int32          // len(held), for hooks
	seen  atomic.Int64          // now(), when a connection to it was opened, or was used while a node was marked

	// Replacements that were meant to leave this marked node have landed on it again, every one: until then, by now(),
	// nothing is culled and no dial is steered. A sticky load balancer does that.
	stuckUntil atomic.Int64
	stuckTimes int // in a row; guarded by watchdog.mu

	empty chan struct{} // closed when held becomes empty; made on demand; guarded by watchdog.mu
}

// notice is what one source says of one node.
type notice struct {
	since           time.Time // first said
	calm            time.Time // when the source was last asked and said otherwise; zero: unknown
	heard           time.Time // last said, where it is news (errors)
	before          time.Time // connections opened before this are to leave
	decommissioning bool      // and not draining
	over            bool      // the server has said goodbye: no time is left
	epoch           int64     // gossip's, 0 if unknown
	until           time.Time // when it ends by itself; zero: it does not (manual)
	drained         bool      // another source has seen the drain's begin and end (manual); guarded by watchdog.mu
}

// mark says that a node is about to leave, whatever number of sources say so.
type mark struct {
	node            *nodeInfo
	source          sourceID  // that said so first
	since           time.Time // when
	calm            time.Time // when the node was last known not to drain; zero: unknown
	before          time.Time // connections opened before this are to leave
	decommissioning bool      // not draining: new connections are welcome
	over            bool
	held            int // connections that had to leave when the drain was noticed
}

func (mk *mark) reason() cullReason {
	if mk.decommissioning {
		return reasonDecommissioning
	}
	return reasonDraining
}

// marks is the set of marks. It is immutable; nil is the empty set.
type marks struct {
	of     map[nodeID]*mark
	refuge []*nodeInfo // unmarked nodes that we have had connections to
	listed time.Time   // until when a source's list of an unmarked live node is good
	from   time.Time   // the process's turn in its fleet; zero: at once
}

// somewhereToGo reports whether an unmarked node is known to be reachable: a source lists one as live, or a connection to
// one was opened or used within the last interval. Without it nothing is culled, whatever the sources say.
func (m *marks) somewhereToGo(t time.Time, interval time.Duration) bool {
	if t.Before(m.listed) {
		return true
	}
	since := now() - int64(interval)
	for _, n := range m.refuge {
		if n.seen.Load() >= since {
			return true
		}
	}
	return false
}

// overFor reports whether the server has said goodbye to the connections of this one's node and time: it closes them as
// soon as they are idle, so this one is not to be used again, however short it was idle.
func (m *marks) overFor(s *session) bool {
	mk := m.of[s.stamp()]
	return mk != nil && mk.over && s.opened.Before(mk.before)
}

// isMarked reports whether the connection's node is marked.
func (w *watchdog) isMarked(s *session) bool {
	m := w.marks.Load()
	return m != nil && m.of[s.stamp()] != nil
}

// verdict is what a cull decision came to.
type verdict uint8

const (
	keep    verdict = iota
	wait            // the pace does not allow it now: it stays eligible
	unready         // its pool has no spare in hand yet: another pool's may go
	gone            // the caller has to bury it
)

// cull decides, at a return, a checkout or a sweep, whether the connection is to be given up now, and if so takes it from
// the state that the caller expects it in. A token is spent only on a connection that goes, and each counts once.
func (w *watchdog) cull(s *session, m *marks, t time.Time, point cullPoint) verdict {
	id := s.stamp()
	mk := m.of[id]
	if mk == nil {
		if id != 0 && point != pointSweep { // a sweep whose list is older than the marks is no use
			s.node.seen.Store(now())
		}
		return keep
	}
	sp := &s.connector.spares
	if s.wouldBe.Load() {
		return keep
	}
	// A younger connection was kept although its node was marked: there was nowhere else. Or the node is back, and the
	// source will say so. It goes only when there is a replacement in hand.
	younger := !s.opened.Before(mk.before)
	if younger && (mk.decommissioning || sp.count.Load() == 0 || t.Sub(s.opened) < 2*w.cfg.Load().pollIntervalDraining) {
		return keep
	}
	if !m.somewhereToGo(t, w.interval()) {
		if t.Sub(mk.since) > w.interval() { // until then connections that were opened longer ago may not have been used since
			w.nowhereToGo()
		}
		return keep
	}
	if mk.node.stuckUntil.Load() > now() || w.fullUntil.Load() > now() {
		return keep
	}
	var token token
	// What the server has said goodbye on is not paced: it closes the connection now, if we do not.
	if younger || !mk.over && !w.lastCall(s, mk, t, point) {
		if t.Before(m.from) {
			w.countThrottled(s, point) // it is the turn of the fleet's other processes
			return wait
		}
		gap := w.gap(m, t)
		inHand := point == pointSweep && s.replacement.Load() != nil
		if !inHand && w.spared(s, point) && sp.awaits(gap) {
			return unready
		}
		var ok bool
		if token, ok = w.pace.take(t, gap); !ok {
			w.countThrottled(s, point)
			return wait
		}
		sp.waiting.Store(0)
	}
	from := uint32(sessionInUse)
	if point == pointSweep {
		from = sessionIdle
	}
	if s.connector.cfg.mode == modeObserve {
		// The sweep's list may be older than the session's end, or its use.
		if s.state.Load() == from && s.wouldBe.CompareAndSwap(false, true) {
			w.countCulled(s, mk, point, true)
		} else {
			token.giveBack(t)
		}
		return keep
	}
	if !s.state.CompareAndSwap(from, sessionGone) {
		token.giveBack(t) // in use again
		return keep
	}
	if look := s.link.peeker.peek(); look == peekClosed || look == peekPending {
		token.giveBack(t)
		s.lost(lostIdle) // the server was first: what an idle connection of a draining node has to read is the notice
		return gone
	}
	if s.ended.CompareAndSwap(false, true) {
		w.countCulled(s, mk, point, false)
	}
	return gone
}

// lastCall reports whether a connection that comes back, and goes again for as long as it was in use, would come back too
// late for the window. It goes whatever the pace says, which keeps the others: where all come back at once, as in batches,
// a token for each time would let one go each time, and the server would close the rest together. A fleet's rate holds.
func (w *watchdog) lastCall(s *session, mk *mark, t time.Time, point cullPoint) bool {
	if point != pointReturn || mk.decommissioning || s.checkedOut == 0 || w.fleet.Load() != nil {
		return false
	}
	begin, window := mk.since, w.window()
	if !mk.calm.IsZero() && mk.calm.Before(begin) {
		begin = mk.calm
	}
	into, used := t.Sub(begin), time.Duration(now()-s.checkedOut)
	return into < window && into+used > time.Duration(float64(window)*lastShare)
}

// spared reports whether somebody would have to wait for a dial if the session were culled without a spare in hand: the
// next caller, or, of a session that was idle, the next burst.
func (w *watchdog) spared(s *session, point cullPoint) bool {
	return s.connector.cfg.spares > 0 && s.connector.cfg.mode == modeOn && (point != pointSweep || s.recent())
}

// recent reports whether an idle session was used not long ago, so that the next burst will want one in its place.
func (s *session) recent() bool { return now()-s.idled.Load() < int64(recentUse) }

// gap is the time between two culls that gets every connection off the marked nodes in time.
func (w *watchdog) gap(m *marks, t time.Time) time.Duration {
	nodes := make([]leaving, 0, 8)
	for _, mk := range m.of {
		if !mk.over && !mk.decommissioning {
			nodes = append(nodes, need(int(mk.node.count.Load()), mk.held, t, mk.since, mk.calm, w.window()))
		}
	}
	return max(gap(w.cfg.Load().cullStagger, nodes), w.fleetGap())
}

// shouldSteer reports whether a fresh connection has landed on a draining node, and dialling again may reach another.
func (w *watchdog) shouldSteer(s *session) bool {
	m := w.marks.Load()
	if m == nil {
		return false
	}
	mk := m.of[s.stamp()]
	return mk != nil && !mk.decommissioning && mk.node.stuckUntil.Load() <= now() &&
		m.somewhereToGo(time.Now(), w.interval())
}

// keptMarked takes note that a connection had to be kept on a marked node after every attempt to reach another.
func (w *watchdog) keptMarked(s *session) {
	if !w.shouldSteer(s) {
		return
	}
	w.mu.Lock()
	n := s.node
	n.stuckTimes++
	times := n.stuckTimes
	w.mu.Unlock()
	n.stuckUntil.Store(now() + int64(time.Second<<min(times-1, 6)))
	if times == 1 {
		w.log.Warn("crdbdrain: dials land on a draining node again and again; culls pause", "node", uint32(n.id))
	}
}

// full takes note that a server refused a connection because it has too many (53300): replacements do not fit, so
// nothing is culled for a while, the longer the more often it happens in a row.
func (w *watchdog) full() {
	wait := min(firstFull<<min(w.fullTimes.Add(1)-1, 8), maxFull)
	w.fullUntil.Store(now() + int64(wait))
}

const (
	firstFull = 500 * time.Millisecond
	maxFull   = 30 * time.Second
)

// heardGoodbye marks the node of a connection on which the server has sent its shutdown notice. The server says so in
// steps 3 and 3b of its drain: there is no time left. It may have said so long ago, on a connection that was idle, and
// have restarted since; but it said so after it last answered here, so the connections opened before that are meant.
func (w *watchdog) heardGoodbye(s *session) {
	w.noticed.Store(now()) // whichever node it is
	t := time.Now()
	before := s.opened.Add(1)                // the connection itself
	if idled := s.idled.Load(); idled != 0 { // a replacement's is that of the session before it
		before = maxTime(before, clockStart.Add(time.Duration(idled)))
	}
	// The application's logger is for the worker to call: database/sql may be reading here with a lock of its own held, as
	// when it deallocates the statements of idle connections.
	w.mu.Lock()
	w.untold = append(w.untold, w.noteLocked(s.stamp(), sourceErrors, notice{since: t, heard: t, before: before, over: true})...)
	w.mu.Unlock()
	w.poke()
}

// tellQueued tells what heardGoodbye has left to the worker.
func (w *watchdog) tellQueued() {
	w.mu.Lock()
	events := w.untold
	w.untold = nil
	w.mu.Unlock()
	w.tell(events)
}

// heardRefusals marks the nodes of addresses that refused a dial because their node drains, where an address is known to
// be one node: a load balancer's is not.
func (w *watchdog) heardRefusals(a *attempt) {
	w.noticed.Store(now())
	for _, addr := range a.refused {
		w.mu.Lock()
		id := w.addrs.nodeAt(addr)
		w.mu.Unlock()
		t := time.Now()
		w.note(id, sourceErrors, notice{since: t, heard: t, before: t})
	}
	w.poke()
}

// note adds one source's notice of one node.
func (w *watchdog) note(id nodeID, source sourceID, n notice) {
	w.mu.Lock()
	events := w.noteLocked(id, source, n)
	w.mu.Unlock()
	w.tell(events)
}

// noteLocked is note with w.mu held.
func (w *watchdog) noteLocked(id nodeID, source sourceID, n notice) []event {
	if id == 0 {
		return nil
	}
	said := w.notices[id]
	if said == nil {
		said = new([numSources]*notice)
		w.notices[id] = said
	}
	if old := said[source]; old != nil {
		if source == sourceErrors && old.over && !n.before.After(old.before) {
			// One of many connections that the server ends at once: it says nothing new.
			again := *old
			again.heard = n.heard
			said[source] = &again
			return nil
		}
		n.since = old.since
		n.over = n.over || old.over
		if old.before.After(n.before) {
			n.before = old.before
		}
	}
	said[source] = &n
	return w.remark(time.Now())
}

// event is something to log and count once the lock is released.
type event func()

func (w *watchdog) tell(events []event) {
	for _, e := range events {
		e()
	}
}

// remark makes the set of marks anew from the notices, and starts and ends drains. w.mu is held.
func (w *watchdog) remark(t time.Time) (events []event) {
	of := make(map[nodeID]*mark, len(w.notices))
	for id, said := range w.notices {
		var mk *mark
		for source, n := range said {
			if n == nil {
				continue
			}
			if mk == nil {
				mk = &mark{node: w.nodeOf(id)}
			}
			// A drain has its own beginning: the node may have been decommissioned for hours.
			graver := mk.since.IsZero() || mk.decommissioning && !n.decommissioning
			if graver || n.decommissioning == mk.decommissioning && n.since.Before(mk.since) {
				mk.since, mk.source, mk.decommissioning = n.since, sourceID(source), n.decommissioning
			}
			mk.calm = maxTime(mk.calm, n.calm)
			mk.before = maxTime(mk.before, n.before)
			mk.over = mk.over || n.over
		}
		if mk == nil {
			delete(w.notices, id)
			continue
		}
		of[id] = mk
	}
	for id, d := range w.drains {
		if of[id] == nil {
			if !d.done {
				events = append(events, w.drainOver(d, t, "withdrawn"))
			}
			delete(w.drains, id)
			w.returned(id)
			n := w.nodeOf(id)
			n.stuckTimes = 0
			n.stuckUntil.Store(0)
		}
	}
	for id, mk := range of {
		d := w.drains[id]
		if d == nil || d.mark.decommissioning && !mk.decommissioning {
			fresh := &drain{node: id, source: mk.source, since: mk.since, held: w.older(id, mk)}
			if d != nil && !d.done { // a decommissioning that has become a drain: what it has done so far is not told elsewhere
				fresh.culled, fresh.lost = d.culled, d.lost
			}
			d = fresh
			w.drains[id] = d
			events = append(events, w.drainNoticed(d, mk))
			d.done = d.held == 0
		}
		d.mark, mk.held = mk, d.held
		if d.left = w.older(id, mk); d.left == 0 && !d.done {
			events = append(events, w.drainOver(d, t, ""))
		}
	}
	events = append(events, w.tellChanged)
	if len(of) == 0 {
		if w.marks.Swap(nil) != nil {
			w.pokeSweep() // for the spares
		}
		w.nowhere.Store(false)
		return events
	}
	w.noticed.Store(now())
	m := &marks{of: of, listed: w.listed(of), from: w.turn(of, t)}
	for id, n := range w.nodes {
		if of[id] == nil && id != 0 {
			m.refuge = append(m.refuge, n)
		}
	}
	w.marks.Store(m)
	w.signal(of)
	w.pokeSweep()
	w.pokeMove()
	return events
}

// turn returns when the process may begin to leave the nodes: where a feed has told its part of what the fleet may do, one
// phase after a node is newly marked, of which every process of the fleet has heard at the same moment. w.mu is held.
func (w *watchdog) turn(of map[nodeID]*mark, t time.Time) (from time.Time) {
	before := w.marks.Load()
	if before != nil {
		from = before.from
	}
	f := w.fleet.Load()
	if f == nil {
		return time.Time{}
	}
	for id := range of {
		if before == nil || before.of[id] == nil {
			return t.Add(f.phase)
		}
	}
	return from
}

// watchChanges and unwatch enter and take out a channel that is told, without waiting, when the marks or a source's answer
// change.
func (w *watchdog) watchChanges(ch chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.changed == nil {
		w.changed = make(map[chan struct{}]struct{})
	}
	w.changed[ch] = struct{}{}
}

func (w *watchdog) unwatchChanges(ch chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.changed, ch)
}

// tellChanged is an event.
func (w *watchdog) tellChanged() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for ch := range w.changed {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// older counts the connections that have to leave because of the mark. w.mu is held.
func (w *watchdog) older(id nodeID, mk *mark) int {
	left := 0
	for c := range w.nodeOf(id).held {
		if c.stamp() == id && c.opened.Before(mk.before) {
			left++
		}
	}
	return left
}

// nodeOf returns the entry of a node. w.mu is held.
func (w *watchdog) nodeOf(id nodeID) *nodeInfo {
	n := w.nodes[id]
	if n == nil {
		n = &nodeInfo{id: id, held: make(map[*session]struct{})}
		w.nodes[id] = n
	}
	return n
}

// listed returns until when a source's word that an unmarked node is live is good: its last answer holds for three
// intervals. A list of SQL instances tells nothing of a node that we never reached; its table keeps rows for later.
// w.mu is held.
func (w *watchdog) listed(of map[nodeID]*mark) (until time.Time) {
	for id := range w.sources {
		s := &w.sources[id]
		for node, state := range s.nodes {
			if of[node] != nil || !state.live || sourceID(id).listsOthers() && w.nodes[node] == nil {
				continue
			}
			if good := s.answered.Add(w.keepOf(sourceID(id))); good.After(until) {
				until = good
			}
		}
	}
	return until
}

// apply takes over a source's complete answer: nodes that it no longer names lose its notice. w.mu is held.
func (w *watchdog) apply(source sourceID, nodes map[nodeID]nodeState, asked, t time.Time) []event {
	s := &w.sources[source]
	changed := !maps.Equal(s.nodes, nodes)
	for id, state := range nodes {
		if _, known := s.nodes[id]; len(s.nodes) > 0 && !known && state.live {
			w.returned(id) // it has joined, or was away
		}
	}
	before := *s
	s.nodes, s.asked, s.answered = nodes, asked, t
	for id, said := range w.notices {
		// A node that says that it is ready, or is listed as not draining, has restarted since it said goodbye. (Not so in
		// gossip, where it only drains at the very end, nor by a feed, which may know it from gossip; but where the feed has
		// known of the drain, or of the node's end, it is told of the return.)
		over := said[source] != nil && !nodes[id].leaving()
		back := nodes[id].live && !nodes[id].leaving()
		_, listed := before.nodes[id]
		again := source == sourceFeed && len(before.nodes) > 0 && !listed
		refutes := source == sourceReadiness || source == sourceInstances || source == sourceFeed && over
		if n := said[sourceErrors]; n != nil && back && (again || refutes && n.heard.Before(asked)) {
			said[sourceErrors] = nil
			changed = true
		}
		if n := said[sourceManual]; n != nil && source != sourceGossip {
			// The drain for which somebody has marked the node by hand: seen to begin, to end, and the node is back.
			n.drained = n.drained || over && !said[source].since.Before(n.since)
			if n.drained && back {
				said[sourceManual] = nil
				changed = true
			}
		}
		if over {
			said[source] = nil
			changed = true
		}
	}
	if source == sourceGossip {
		// The record of before may still be on its way: only a later epoch, or the node's end, says that it is not.
		maps.DeleteFunc(w.cleared, func(id nodeID, epoch int64) bool {
			state, listed := nodes[id]
			return !listed || state.epoch > epoch
		})
	}
	for id, state := range nodes {
		if !state.leaving() {
			continue
		}
		if epoch, back := w.cleared[id]; back && source == sourceGossip && state.draining && state.epoch <= epoch {
			continue // the node has come back since, and gossip has not caught up
		}
		said := w.notices[id]
		if said == nil {
			said = new([numSources]*notice)
			w.notices[id] = said
		}
		n := notice{since: t, heard: t, before: t, decommissioning: !state.draining, epoch: state.epoch}
		if was, known := before.nodes[id]; known && !was.draining && state.draining && source != sourceFeed {
			n.calm = before.asked // a feed is not asked now and then, but answers when there is news
		}
		if old := said[source]; old != nil {
			if old.decommissioning == n.decommissioning {
				continue
			}
			if n.decommissioning { // the drain has been withdrawn
				n.since, n.before = old.since, old.before
			}
		}
		said[source] = &n
		changed = true
	}
	if !changed && w.marks.Load() == nil {
		return nil
	}
	return w.remark(t)
}

// listsOthers reports whether the source's list may have nodes that are of no use to us: system.sql_instances keeps rows
// for instances to come, and a feed can be mistaken.
func (id sourceID) listsOthers() bool { return id == sourceInstances || id == sourceFeed }

// expire drops what has outlived its evidence: the last answer of a source that has failed for three intervals, and the
// server's own words after errorsKeep, once no connection of that time is left. w.mu is held.
func (w *watchdog) expire(t time.Time) []event {
	changed := false
	for id := range w.sources {
		s := &w.sources[id]
		if s.nodes == nil || t.Sub(s.answered) <= w.keepOf(sourceID(id)) {
			continue
		}
		s.nodes = nil
		if sourceID(id) == sourceFeed {
			w.fleet.Store(nil) // nobody shares anything out any more
		}
		for _, said := range w.notices {
			changed = changed || said[id] != nil
			said[id] = nil
		}
	}
	for _, said := range w.notices {
		if n := said[sourceManual]; n != nil && !n.until.IsZero() && t.After(n.until) {
			said[sourceManual] = nil
			changed = true
		}
	}
	for id, said := range w.notices {
		if n := said[sourceErrors]; n != nil && t.Sub(n.heard) > errorsKeep && w.older(id, &mark{before: n.before}) == 0 {
			said[sourceErrors] = nil
			changed = true
		}
	}
	for id, n := range w.nodes { // IDs are never used again: forget the nodes of yesterday
		if len(n.held) == 0 && n.empty == nil && w.notices[id] == nil && now()-n.seen.Load() > int64(errorsKeep) {
			delete(w.nodes, id)
		}
	}
	if !changed {
		return nil
	}
	return w.remark(t)
}

// errorsKeep is how long the server's own words mark a node that no connection is left on. When it is over, the way home
// tries whether the node is back.
const errorsKeep = 20 * time.Second

// cameBack takes note that a node has accepted a connection whose dial began after its notices: it has restarted. That
// refutes the server's goodbye and gossip's "draining", after which a server accepts nothing; not the earlier signals,
// during which it still accepts (cockroachdb pkg/server/drain.go). w.mu is held.
func (w *watchdog) cameBack(id nodeID, opened time.Time) (events []event) {
	said := w.notices[id]
	if said == nil {
		return nil
	}
	changed := false
	if n := said[sourceErrors]; n != nil && opened.After(n.heard) {
		if known, listed := w.sources[sourceGossip].nodes[id]; listed && n.over {
			w.cleared[id] = known.epoch // gossip has yet to hear of that drain
		}
		if m := said[sourceManual]; m != nil && n.over && !n.heard.Before(m.since) {
			said[sourceManual] = nil // the drain it was made for is over
		}
		said[sourceErrors] = nil
		changed = true
	}
	if n := said[sourceGossip]; n != nil && !n.decommissioning && opened.After(n.heard) {
		w.cleared[id] = n.epoch
		said[sourceGossip] = nil
		changed = true
	}
	if changed {
		events = w.remark(time.Now())
	}
	return events
}

// addrBook remembers which node answered at which address.
type addrBook struct {
	nodes map[string]nodeID   // 0: more than one
	addrs map[nodeID]int      // how many addresses are this node's alone
	hosts map[string][]string // addresses by host:port of the DSN
}

const maxAddrs = 4096

func (b *addrBook) learn(a *attempt, id nodeID) {
	if a.addr == "" || id == 0 {
		return
	}
	if b.nodes == nil || len(b.nodes) > maxAddrs {
		b.nodes, b.addrs, b.hosts = make(map[string]nodeID), make(map[nodeID]int), make(map[string][]string)
	}
	switch old, known := b.nodes[a.addr]; {
	case !known:
		b.nodes[a.addr] = id
		b.addrs[id]++
	case old != id && old != 0:
		b.nodes[a.addr] = 0
		b.addrs[old]--
	}
	for _, host := range a.hostsOf(a.addr) {
		if !slices.Contains(b.hosts[host], a.addr) {
			b.hosts[host] = append(b.hosts[host], a.addr)
		}
	}
}

// hostsOf returns the hosts of the DSN that have an address of one of the nodes.
func (b *addrBook) hostsOf(nodes []nodeID) map[string]bool {
	hosts := make(map[string]bool)
	for host, addrs := range b.hosts {
		for _, addr := range addrs {
			if id := b.nodeAt(addr); id != 0 && slices.Contains(nodes, id) {
				hosts[host] = true
			}
		}
	}
	return hosts
}

// nodeAt returns the node at an address, or 0 where it is not known to be just one: one that another address answers for
// too, or the only address there is, may be a load balancer's.
func (b *addrBook) nodeAt(addr string) nodeID {
	if id := b.nodes[addr]; len(b.nodes) > 1 && b.addrs[id] == 1 {
		return id
	}
	return 0
}

// markedHosts returns the hosts of the DSN all of whose known addresses are marked nodes.
func (w *watchdog) markedHosts() map[string]bool {
	m := w.marks.Load()
	if m == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	marked := make(map[string]bool)
	for host, addrs := range w.addrs.hosts {
		marked[host] = !slices.ContainsFunc(addrs, func(addr string) bool { return m.of[w.addrs.nodeAt(addr)] == nil })
	}
	return marked
}
