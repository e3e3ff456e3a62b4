package crdbdrain

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// hold enters a session that exists on paper, on a node, dialled at a time.
func (w *watchdog) hold(c *Connector, id nodeID, opened time.Time) *session {
	s := &session{connector: c, w: w, link: &link{}, id: id, opened: opened}
	w.add(s, &attempt{start: opened})
	return s
}

func (w *watchdog) markOf(id nodeID) *mark {
	if m := w.marks.Load(); m != nil {
		return m.of[id]
	}
	return nil
}

// trusted is bare, with the stamp's rule verified.
func trusted(t testing.TB, params string, opts ...Option) (*Connector, *watchdog) {
	t.Helper()
	c, w := bare(t, params, opts...)
	w.rule.Store(ruleHolds)
	return c, w
}

func TestAMarkHoldsWhileItsSourceRepeatsIt(t *testing.T) {
	_, w := trusted(t, "")
	draining := map[nodeID]nodeState{1: {live: true}, 2: {live: true, draining: true}}
	w.answer(sourceInstances, draining, nil)
	first := w.markOf(2)
	if first == nil || first.source != sourceInstances || first.decommissioning || first.over || w.markOf(1) != nil {
		t.Fatalf("marks after the first answer: %+v", first)
	}
	w.answer(sourceInstances, map[nodeID]nodeState{1: {live: true}, 2: {draining: true}}, nil)
	if mk := w.markOf(2); mk == nil || !mk.since.Equal(first.since) || !mk.before.Equal(first.before) {
		t.Errorf("repeated: %+v, want since and before of the first: %+v", mk, first)
	}
	w.answer(sourceInstances, nil, errEmpty)
	if w.markOf(2) == nil {
		t.Error("an empty answer, which is unknown, has taken the mark away")
	}
	// Another source's word on another node is nothing to this one.
	w.answer(sourceReadiness, map[nodeID]nodeState{3: {draining: true}}, nil)
	if w.markOf(2) == nil || w.markOf(3) == nil {
		t.Error("one source's answer has taken another's mark away")
	}
	w.answer(sourceInstances, map[nodeID]nodeState{1: {live: true}}, nil)
	if w.markOf(2) != nil || w.markOf(3) == nil {
		t.Error("absent from a complete answer of its source, the mark is still there; or the other one is not")
	}
	w.answer(sourceReadiness, map[nodeID]nodeState{3: {live: true}}, nil)
	if m := w.marks.Load(); m != nil {
		t.Errorf("%d marks, want nil", len(m.of))
	}
}

// Several sources make one mark: the earliest, for the connections before the latest, draining if any says so. A drain has
// its own beginning, however long the node has been decommissioning.
func TestSourcesMakeOneMark(t *testing.T) {
	logs := new(logTrap)
	c, w := trusted(t, "", WithLogger(logs.logger()))
	w.hold(c, 2, time.Now().Add(-time.Second))
	w.answer(sourceGossip, map[nodeID]nodeState{1: {live: true}, 2: {live: true, decommissioning: true, epoch: 1}}, nil)
	early := w.markOf(2)
	if early == nil || !early.decommissioning || early.reason() != reasonDecommissioning {
		t.Fatalf("%+v: want decommissioning", early)
	}
	time.Sleep(time.Millisecond)
	w.answer(sourceReadiness, map[nodeID]nodeState{1: {live: true}, 2: {draining: true}}, nil)
	both := w.markOf(2)
	if both.source != sourceReadiness || !both.since.After(early.since) || !both.before.After(early.before) || both.decommissioning || both.over {
		t.Errorf("%+v\nwant readiness's source, time and before, draining; first %+v", both, early)
	}
	if n := logs.count("a node is leaving"); n != 2 {
		t.Errorf("%d lines say that the node is leaving, want one for each reason:\n%s", n, logs)
	}
	time.Sleep(time.Millisecond)
	w.answer(sourceInstances, map[nodeID]nodeState{1: {live: true}, 2: {draining: true}}, nil)
	third := w.markOf(2)
	if third.source != sourceReadiness || !third.since.Equal(both.since) || !third.before.After(both.before) {
		t.Errorf("%+v\nwant readiness's source and time, instances's before; before it %+v", third, both)
	}
	time.Sleep(time.Millisecond)
	now := time.Now()
	w.note(2, sourceErrors, notice{since: now, heard: now, before: now, over: true})
	if mk := w.markOf(2); !mk.over || !mk.before.Equal(now) || !mk.since.Equal(both.since) {
		t.Errorf("%+v: want over, before %v", mk, now)
	}
	// A second, older word of the same source takes nothing back.
	w.note(2, sourceErrors, notice{since: now, heard: now, before: early.before})
	if mk := w.markOf(2); !mk.over || !mk.before.Equal(now) {
		t.Errorf("after an older word: %+v", mk)
	}
	w.note(0, sourceErrors, notice{since: now, heard: now, before: now})
	if n := len(w.marks.Load().of); n != 1 {
		t.Errorf("%d marks, want 1: an unknown node cannot be marked", n)
	}
}

// A node that is decommissioned first keeps being dialled; its drain is for the connections of that time too.
func TestADrainAfterADecommissionIsANewOne(t *testing.T) {
	c, w := trusted(t, "")
	w.hold(c, 1, time.Now())
	gossip := func(draining bool) map[nodeID]nodeState {
		return map[nodeID]nodeState{1: {live: true}, 2: {live: true, decommissioning: true, draining: draining}}
	}
	w.answer(sourceGossip, gossip(false), nil)
	time.Sleep(time.Millisecond)
	young := w.hold(c, 2, time.Now())
	if mk := w.markOf(2); !mk.decommissioning || young.opened.Before(mk.before) {
		t.Fatalf("%+v: want a decommissioning, for connections from before it", mk)
	}
	time.Sleep(time.Millisecond)
	w.answer(sourceGossip, gossip(true), nil)
	mk := w.markOf(2)
	if mk.decommissioning || !young.opened.Before(mk.before) || mk.held != 1 || !mk.since.After(young.opened) {
		t.Errorf("%+v: want a drain, for the one connection there is", mk)
	}
	// The drain is withdrawn: who had to leave has to.
	w.answer(sourceGossip, gossip(false), nil)
	if back := w.markOf(2); !back.decommissioning || !back.before.Equal(mk.before) {
		t.Errorf("%+v: want a decommissioning again, as of the drain: %+v", back, mk)
	}
}

// The pace looks at when a node was last known not to drain.
func TestAMarkKnowsTheCalmBeforeIt(t *testing.T) {
	well, leaves := map[nodeID]nodeState{1: {live: true}, 2: {live: true}}, map[nodeID]nodeState{1: {live: true}, 2: {live: true, draining: true}}
	for _, tt := range []struct {
		name   string
		source sourceID
		before map[nodeID]nodeState
		known  bool
	}{
		{"instances", sourceInstances, well, true},
		{"readiness", sourceReadiness, well, true},
		{"a feed, which is not asked now and then", sourceFeed, well, false},
		{"the first answer", sourceInstances, nil, false},
		{"a node that was not listed", sourceInstances, map[nodeID]nodeState{1: {live: true}}, false},
	} {
		_, w := trusted(t, "")
		asked := time.Now()
		if tt.before != nil {
			w.answer(tt.source, tt.before, nil)
			w.mu.Lock()
			asked = w.sources[tt.source].asked
			w.mu.Unlock()
		}
		time.Sleep(time.Millisecond)
		w.answer(tt.source, leaves, nil)
		if mk := w.markOf(2); tt.known && !mk.calm.Equal(asked) || !tt.known && !mk.calm.IsZero() {
			t.Errorf("%s: %+v, asked at %v before", tt.name, mk, asked)
		}
	}
}

// The watchdog's own connection tells that a node is back like any other: where every node is marked and no caller dials, it
// is the only one, and would dial anew at each poll.
func TestTheWatchdogsDialClearsAMark(t *testing.T) {
	c, w := trusted(t, "")
	w.hold(c, 2, time.Now())
	goodbye := time.Now()
	w.note(2, sourceErrors, notice{since: goodbye, heard: goodbye, before: goodbye, over: true})
	w.take(pollResult{dialled: []*sideConn{{node: 2, opened: goodbye.Add(-time.Millisecond)}}})
	if w.markOf(2) == nil {
		t.Error("a dial from before the goodbye has taken the mark away")
	}
	w.take(pollResult{dialled: []*sideConn{{node: 2, opened: goodbye.Add(time.Millisecond)}}})
	if w.markOf(2) != nil {
		t.Error("the node has accepted the watchdog's connection since, and is marked")
	}
}

// Gossip is late with the restart too. A connection that the node accepts tells earlier, and the stale record, which has
// the epoch of before, does not mark it again.
func TestARestartedNodeIsNotMarkedAgainByStaleGossip(t *testing.T) {
	c, w := trusted(t, "")
	draining := func(epoch int64) map[nodeID]nodeState {
		return map[nodeID]nodeState{1: {live: true, epoch: 9}, 2: {draining: true, live: true, epoch: epoch}}
	}
	well := func(epoch int64) map[nodeID]nodeState {
		return map[nodeID]nodeState{1: {live: true, epoch: 9}, 2: {live: true, epoch: epoch}}
	}
	old := w.hold(c, 2, time.Now())
	w.answer(sourceGossip, draining(3), nil)
	if w.markOf(2) == nil {
		t.Fatal("not marked")
	}
	fresh := w.hold(c, 2, time.Now())
	if w.markOf(2) != nil {
		t.Error("the node has accepted a connection, and is still marked")
	}
	for range 3 {
		w.answer(sourceGossip, draining(3), nil)
		if w.markOf(2) != nil {
			t.Fatal("marked again by the record of before")
		}
	}
	w.answer(sourceGossip, well(4), nil)
	w.answer(sourceGossip, draining(4), nil)
	if w.markOf(2) == nil {
		t.Error("the next drain is not noticed")
	}
	if w.older(2, w.markOf(2)) != 2 {
		t.Errorf("%d connections are to leave, want both", w.older(2, w.markOf(2)))
	}
	// The goodbye is heard before gossip says anything, the node restarts, and only then the record of before comes.
	w.answer(sourceGossip, well(5), nil)
	t0 := time.Now()
	w.note(2, sourceErrors, notice{since: t0, heard: t0, before: t0, over: true})
	time.Sleep(time.Millisecond)
	fresh2 := w.hold(c, 2, time.Now())
	for _, answer := range []map[nodeID]nodeState{well(5), draining(5), draining(5), well(6)} {
		w.answer(sourceGossip, answer, nil)
		if w.markOf(2) != nil {
			t.Errorf("marked by gossip's %+v, of the time before", answer[2])
		}
	}
	w.answer(sourceGossip, draining(6), nil)
	if mk := w.markOf(2); mk == nil || !fresh2.opened.Before(mk.before) {
		t.Error("the drain after that is not noticed")
	}
	// What has been cleared is forgotten with the drain.
	w.answer(sourceGossip, well(7), nil)
	if n := len(w.cleared); n != 0 {
		t.Errorf("%d nodes are still remembered as back", n)
	}
	for _, s := range []*session{old, fresh, fresh2} {
		w.remove(s)
	}
}

// A node still accepts in step 1: a connection to it does not refute the sources that speak then.
func TestAConnectionRefutesOnlyTheLateSignals(t *testing.T) {
	c, w := trusted(t, "")
	for _, id := range []sourceID{sourceInstances, sourceReadiness} {
		w.answer(id, map[nodeID]nodeState{1: {live: true}, 2: {draining: true}}, nil)
		w.hold(c, 2, time.Now())
		if w.markOf(2) == nil {
			t.Errorf("a connection has taken away what %s says", id)
		}
		w.answer(id, map[nodeID]nodeState{1: {live: true}, 2: {live: true}}, nil)
	}
	w.answer(sourceGossip, map[nodeID]nodeState{1: {live: true}, 2: {decommissioning: true, live: true}}, nil)
	w.hold(c, 2, time.Now())
	if w.markOf(2) == nil {
		t.Error("a connection has taken a decommission away")
	}
	w.answer(sourceGossip, map[nodeID]nodeState{1: {live: true}, 2: {live: true}}, nil)

	// The server's goodbye: only a dial that began after it counts.
	dialled := time.Now()
	time.Sleep(time.Millisecond)
	t0 := time.Now()
	w.note(2, sourceErrors, notice{since: t0, heard: t0, before: t0, over: true})
	w.hold(c, 2, dialled)
	if w.markOf(2) == nil {
		t.Error("a dial that began before the goodbye has refuted it")
	}
	time.Sleep(time.Millisecond)
	w.hold(c, 2, time.Now())
	if w.markOf(2) != nil {
		t.Error("a dial that began after the goodbye has not refuted it")
	}
}

// The goodbye stood in an idle connection's buffer while its node restarted. It is read now, and means only what was
// open when the server last answered there.
func TestAGoodbyeHeardLateSparesFreshConnections(t *testing.T) {
	c, w := trusted(t, "crdbdrain_cull_stagger=0")
	w.hold(c, 1, time.Now()) // somewhere to go
	old, companion := w.hold(c, 2, time.Now()), w.hold(c, 2, time.Now())
	old.idled.Store(now())
	time.Sleep(2 * time.Millisecond)
	fresh := w.hold(c, 2, time.Now())
	w.heardGoodbye(old)
	m := w.marks.Load()
	if m == nil || m.of[2] == nil {
		t.Fatal("not marked")
	}
	for _, tt := range []struct {
		name string
		s    *session
		want verdict
	}{{"fresh", fresh, keep}, {"of the time before", companion, gone}} {
		if got := w.cull(tt.s, m, time.Now(), pointReturn); got != tt.want {
			t.Errorf("the %s connection: verdict %d, want %d", tt.name, got, tt.want)
		}
	}
	if n := w.older(2, m.of[2]); n != 2 {
		t.Errorf("%d connections are to leave, want 2", n)
	}
}

func TestSomewhereToGo(t *testing.T) {
	const interval = 5 * time.Second
	seen := func(ago time.Duration) *nodeInfo {
		n := &nodeInfo{id: 1}
		n.seen.Store(now() - int64(ago))
		return n
	}
	t0 := time.Now()
	for _, tt := range []struct {
		name string
		m    *marks
		want bool
	}{
		{"nothing known", &marks{}, false},
		{"a connection just now", &marks{refuge: []*nodeInfo{seen(0)}}, true},
		{"within the last interval", &marks{refuge: []*nodeInfo{seen(interval - time.Second)}}, true},
		{"before it", &marks{refuge: []*nodeInfo{seen(interval + time.Second)}}, false},
		{"one of two", &marks{refuge: []*nodeInfo{seen(time.Hour), seen(time.Second)}}, true},
		{"a source lists one", &marks{listed: t0.Add(time.Second)}, true},
		{"a source listed one", &marks{listed: t0}, false},
	} {
		if got := tt.m.somewhereToGo(t0, interval); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

// What counts as a source's list of a live unmarked node.
func TestListed(t *testing.T) {
	for _, tt := range []struct {
		name   string
		source sourceID
		nodes  map[nodeID]nodeState
		want   bool
	}{
		{"gossip", sourceGossip, map[nodeID]nodeState{2: {draining: true}, 7: {live: true}}, true},
		{"readiness", sourceReadiness, map[nodeID]nodeState{2: {draining: true}, 7: {live: true}}, true},
		{"instances, a node that was reached", sourceInstances, map[nodeID]nodeState{2: {draining: true}, 1: {live: true}}, true},
		{"instances, a row without a node", sourceInstances, map[nodeID]nodeState{2: {draining: true}, 7: {live: true}}, false},
		{"not live", sourceGossip, map[nodeID]nodeState{2: {draining: true}, 7: {}}, false},
		{"draining itself", sourceGossip, map[nodeID]nodeState{2: {draining: true}, 7: {live: true, draining: true}}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, w := trusted(t, "crdbdrain_poll_interval=5s")
			one := w.hold(c, 1, time.Now())
			w.answer(tt.source, tt.nodes, nil)
			one.node.seen.Store(now() - int64(time.Hour)) // it proves nothing by itself any more
			m := w.marks.Load()
			answered := w.status(tt.source).answered
			if got := m.somewhereToGo(answered.Add(15*time.Second-1), 5*time.Second); got != tt.want {
				t.Errorf("somewhere to go just before three intervals are over: %v, want %v", got, tt.want)
			}
			if m.somewhereToGo(answered.Add(15*time.Second), 5*time.Second) {
				t.Error("the list is still good after three intervals")
			}
		})
	}
}

// The server's own words expire after a minute, but not while a connection of their time is left.
func TestTheServersWordsExpire(t *testing.T) {
	c, w := trusted(t, "")
	s := w.hold(c, 2, time.Now())
	t0 := time.Now()
	w.note(2, sourceErrors, notice{since: t0, heard: t0, before: t0, over: true})
	at := func(d time.Duration) bool {
		w.mu.Lock()
		events := w.expire(t0.Add(d))
		w.mu.Unlock()
		w.tell(events)
		return w.markOf(2) != nil
	}
	if !at(2 * time.Minute) {
		t.Error("the mark is gone, a connection is not")
	}
	w.remove(s)
	if !at(errorsKeep) {
		t.Error("the mark is gone before its time")
	}
	if at(errorsKeep + time.Millisecond) {
		t.Error("the mark outlives its time, no connection is there")
	}
	// A node that nobody is on is forgotten after a while.
	w.mu.Lock()
	w.nodes[2].seen.Store(now() - int64(2*time.Minute))
	w.mu.Unlock()
	at(time.Hour)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.nodes[2] != nil {
		t.Error("the node is still remembered")
	}
}

func TestAddrBook(t *testing.T) {
	var b addrBook
	learn := func(addr string, id nodeID) {
		b.learn(&attempt{addr: addr}, id)
	}
	want := func(addr string, id nodeID) {
		t.Helper()
		if got := b.nodeAt(addr); got != id {
			t.Errorf("nodeAt(%s) = %d, want %d", addr, got, id)
		}
	}
	want("10.0.0.1:1", 0)
	learn("10.0.0.1:1", 1)
	want("10.0.0.1:1", 0) // the only address there is may be a load balancer's
	learn("10.0.0.2:1", 2)
	want("10.0.0.1:1", 1)
	want("10.0.0.2:1", 2)
	learn("10.0.0.3:1", 2) // two addresses for one node: one of them, at least, is not the node's
	want("10.0.0.2:1", 0)
	want("10.0.0.3:1", 0)
	want("10.0.0.1:1", 1)
	learn("10.0.0.1:1", 3) // one address for two nodes: a load balancer
	want("10.0.0.1:1", 0)
	learn("10.0.0.1:1", 3)
	learn("10.0.0.1:1", 3)
	want("10.0.0.1:1", 0) // for good
	learn("", 4)
	learn("10.0.0.4:1", 0)
	if len(b.nodes) != 3 {
		t.Errorf("%d addresses, want 3: %v", len(b.nodes), b.nodes)
	}
}

// refusing starts three nodes of which node 2 refuses connections, and leaves those it has alone, until the test ends.
func refusing(t *testing.T, dsn func(*crdbdraintest.Cluster) string, sticky int) (*crdbdraintest.Cluster, *pool, *logTrap) {
	t.Helper()
	c := crdbdraintest.Start(crdbdraintest.Config{Settings: crdbdraintest.Settings{ConnectionsTimeout: time.Minute}})
	t.Cleanup(c.Close)
	logs := &logTrap{}
	db := open(t, dsn(c), "crdbdrain_sources=errors&crdbdrain_poll_interval=2s&crdbdrain_cull_stagger=10ms", WithLogger(logs.logger()))
	for {
		fill(t, db.DB, 12)
		if c.Node(1).Stats().Open > 0 && c.Node(2).Stats().Open > 1 && c.Node(3).Stats().Open > 0 {
			break
		}
		db.SetMaxIdleConns(0)
	}
	eventually(t, "the rule is verified", func() bool { return db.wd().rule.Load() == ruleHolds })
	c.LoadBalancer().SetSticky(sticky)
	go c.Node(2).Drain(context.Background())
	if err := c.Node(2).WaitStep(t.Context(), crdbdraintest.Refusing); err != nil {
		t.Fatal(err)
	}
	return c, db, logs
}

// With the nodes' own addresses in the DSN, a refused dial marks the node behind the address, and its connections leave
// in the window.
func TestARefusedDialMarksTheNodeAtTheAddress(t *testing.T) {
	t.Parallel()
	c, db, logs := refusing(t, (*crdbdraintest.Cluster).DSNAll, 0)
	db.SetMaxOpenConns(0)
	var extra []interface{ Close() error }
	eventually(t, "a dial is refused, and the connections leave node 2", func() bool {
		if len(extra) < 200 && c.Node(2).Stats().Refused == 0 {
			sc, err := db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			extra = append(extra, sc)
		} else {
			for _, sc := range extra {
				_ = sc.Close()
			}
			extra = nil
		}
		return c.Node(2).Stats().Open == 0
	})
	if s := db.c.Stats(); s.Lost != 0 || s.Culled == 0 || s.Refused == 0 {
		t.Errorf("%+v: want culls after a refusal, nothing lost", s)
	}
	logs.once(t, "a node is leaving", `node="2"`, `source="errors"`)
	if n := logs.count("a node is leaving"); n != 1 {
		t.Errorf("other nodes are marked too:\n%s", logs)
	}
}

// Through a load balancer a refusal names no node.
func TestARefusedDialThroughALoadBalancerMarksNothing(t *testing.T) {
	t.Parallel()
	c, db, logs := refusing(t, (*crdbdraintest.Cluster).DSN, 2)
	db.SetMaxOpenConns(0)
	takeConns(t, db.DB, 12) // so that the next one has to be dialled
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if _, err := db.Conn(ctx); !isRefusal(err) {
		t.Errorf("Conn: %v, want the server's refusal", err)
	}
	if n := c.Node(2).Stats().Refused; n < 2 || n > 1+maxRefused {
		t.Errorf("%d dials were refused, want more than 1, at most %d", n, 1+maxRefused)
	}
	if m := db.wd().marks.Load(); m != nil {
		t.Errorf("marks: %v\n%s", m.of, logs)
	}
	if s := db.c.Stats(); s.Culled != 0 || s.Refused == 0 {
		t.Errorf("%+v: want refusals, no cull", s)
	}
}

// A12: every dial lands on the draining node again: one node, or a load balancer that sticks to it.
func TestA12ReplacementsLandOnTheSameNode(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name          string
		nodes, sticky int
	}{{"one node", 1, 0}, {"a sticky load balancer", 3, 1}} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			const maxOpen, workers = 4, 64
			c := crdbdraintest.Start(crdbdraintest.Config{Nodes: tt.nodes, Settings: crdbdraintest.Settings{InitialWait: time.Minute}})
			t.Cleanup(c.Close)
			c.Grant("app", "VIEWSYSTEMTABLE")
			c.Grant("app", "VIEWCLUSTERMETADATA") // gossip lists the other nodes: there seems to be somewhere to go
			c.LoadBalancer().SetSticky(tt.sticky)
			logs := &logTrap{}
			db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_cull_stagger=20ms&crdbdrain_window=2s&crdbdrain_spares=0", WithLogger(logs.logger()))
			fill(t, db.DB, maxOpen)
			db.SetMaxIdleConns(2) // as by default: the pool itself closes and dials all the time
			eventually(t, "the rule is verified", func() bool { return db.wd().rule.Load() == ruleHolds })
			db.SetMaxIdleConns(maxOpen)
			fill(t, db.DB, maxOpen)
			l := startLoad(t, db.DB, workers, 0)
			before := c.Stats().Accepts
			go c.Node(1).Drain(context.Background())
			eventually(t, "node 1 is marked", func() bool { return db.wd().isNodeMarked(1) })
			time.Sleep(1500 * time.Millisecond) // three windows' worth of culls, were they not to stop
			l.stop()
			if len(l.errors) > 0 {
				t.Errorf("errors of %d operations: %v", l.ops.Load(), l.errors)
			}
			s := db.c.Stats()
			opened := c.Stats().Accepts - before
			t.Logf("%d operations, %d dials, %+v", l.ops.Load(), opened, s)
			// A replacement is dialled once, and steered three times before it is kept. The watchdog's own connection tries
			// as often to move.
			if int(s.Steered) > 3*maxOpen {
				t.Errorf("%d steered dials, want at most 3 for each of %d connections", s.Steered, maxOpen)
			}
			if culled := int(s.Culled); culled > 2*maxOpen {
				t.Errorf("%d culls with nowhere to go, want at most %d", culled, 2*maxOpen)
			}
			if n := logs.count("culls pause"); n > 1 {
				t.Errorf("%d lines, want 1:\n%s", n, logs)
			}
			if n := logs.count("nothing is culled"); n > 1 {
				t.Errorf("%d lines, want 1:\n%s", n, logs)
			}
		})
	}
}

// A15: when every node drains nothing is culled, which is said once. When there is a node to go to, the culls begin, at
// their pace.
func TestA15EverythingDrains(t *testing.T) {
	t.Parallel()
	const stagger = 50 * time.Millisecond
	c := crdbdraintest.Start(crdbdraintest.Config{Settings: crdbdraintest.Settings{InitialWait: time.Minute}})
	t.Cleanup(c.Close)
	c.Grant("app", "VIEWSYSTEMTABLE")
	c.Grant("app", "VIEWCLUSTERMETADATA")
	logs := &logTrap{}
	db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_cull_stagger=50ms&crdbdrain_window=1h", WithLogger(logs.logger()))
	fill(t, db.DB, 9)
	w := db.wd()
	eventually(t, "the rule is verified", func() bool { return w.rule.Load() == ruleHolds })
	for _, n := range c.Nodes() {
		go n.Drain(context.Background())
		_ = n.WaitStep(t.Context(), crdbdraintest.Unready)
	}
	eventually(t, "all three are marked", func() bool { return w.isNodeMarked(1) && w.isNodeMarked(2) && w.isNodeMarked(3) })
	before := db.c.Stats().Culled // between the first mark and the last there was somewhere to go
	settled := time.Now()
	for time.Since(settled) < time.Second {
		if err := db.PingContext(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := db.c.Stats().Culled - before; n != 0 {
		t.Errorf("%d culls with every node marked", n)
	}
	if n := logs.count("no node without a mark is known to be reachable; nothing is culled"); n != 1 {
		t.Errorf("%d lines say that there is nowhere to go, want 1:\n%s", n, logs)
	}
	c.AddNode()
	added := time.Now()
	eventually(t, "every connection is on node 4", func() bool {
		if n, most := db.c.Stats().Culled-before, int64(time.Since(added)/stagger)+2; n > most {
			t.Errorf("%d culls in %v, at most one per %v", n, time.Since(added), stagger)
		}
		if err := db.PingContext(t.Context()); err != nil {
			t.Error(err)
		}
		return c.Node(1).Stats().Open+c.Node(2).Stats().Open+c.Node(3).Stats().Open == 0
	})
	if s := db.c.Stats(); s.Lost != 0 {
		t.Errorf("%+v", s)
	}
}

// A node restarts with the same ID while gossip lags behind: its fresh connections stay.
func TestARestartedNodeKeepsItsFreshConnections(t *testing.T) {
	t.Parallel()
	const lag = 700 * time.Millisecond
	c := crdbdraintest.Start(crdbdraintest.Config{Faults: crdbdraintest.Faults{GossipLag: lag}})
	t.Cleanup(c.Close)
	c.Grant("app", "VIEWCLUSTERMETADATA")
	db := open(t, c.DSN(), "crdbdrain_sources=gossip&crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_cull_stagger=0&crdbdrain_spares=0")
	fill(t, db.DB, 9)
	w := db.wd()
	eventually(t, "gossip answers", func() bool { return len(w.status(sourceGossip).nodes) == 3 })
	_ = c.Node(1).Drain(t.Context())
	time.Sleep(lag / 2)
	c.Node(1).Stop()
	c.Node(1).Start()
	restarted := time.Now()

	// Fresh connections to node 1, while gossip still says nothing, then that the node drains, then that it is back.
	var fresh []*session
	db.SetMaxOpenConns(0)
	db.SetMaxIdleConns(1000)
	for len(fresh) < 3 {
		for _, sc := range takeConns(t, db.DB, 12) {
			if s := ours(t, sc); s.stamp() == 1 && s.opened.After(restarted) {
				fresh = append(fresh, s)
			}
			defer sc.Close()
		}
	}
	seen := false
	for time.Since(restarted) < lag+500*time.Millisecond {
		w.mu.Lock()
		seen = seen || w.sources[sourceGossip].nodes[1].draining
		w.mu.Unlock()
		if w.isNodeMarked(1) && w.markOf(1) != nil {
			for _, s := range fresh {
				if mk := w.markOf(1); mk != nil && s.opened.Before(mk.before) {
					t.Fatalf("a fresh connection is to leave: %+v", mk)
				}
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
	if !seen {
		t.Error("gossip never said that node 1 drains: the test shows nothing")
	}
	for _, s := range fresh {
		if s.pg.IsClosed() || s.ended.Load() {
			t.Error("a fresh connection was given up")
		}
	}
}

// The same from the application's side: after an unannounced restart the pool does not shed what it has just opened.
func TestALateGoodbyeDoesNotCullFreshConnections(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{})
	t.Cleanup(c.Close)
	db := open(t, c.Node(2).DSN(), "crdbdrain_sources=errors&crdbdrain_poll_interval=100ms&crdbdrain_cull_stagger=0&crdbdrain_spares=0&crdbdrain_cluster=late-goodbye")
	other := open(t, c.Node(1).DSN(), "crdbdrain_sources=errors&crdbdrain_poll_interval=100ms&crdbdrain_cull_stagger=0&crdbdrain_spares=0&crdbdrain_cluster=late-goodbye")
	takeConns(t, other.DB, 1) // somewhere to go
	fill(t, db.DB, 4)
	w := db.wd()
	if w != other.wd() {
		t.Fatal("two watchdogs for one cluster")
	}
	eventually(t, "the rule is verified", func() bool { return w.rule.Load() == ruleHolds })
	idle := takeConns(t, db.DB, 4)
	for _, sc := range idle {
		_ = sc.Close()
	}
	c.Node(2).Restart(t.Context())
	fresh := open(t, c.Node(2).DSN(), "crdbdrain_sources=errors&crdbdrain_poll_interval=100ms&crdbdrain_cull_stagger=0&crdbdrain_spares=0&crdbdrain_cluster=late-goodbye")
	fill(t, fresh.DB, 5)
	// Now the pool reads what the server said on its idle connections.
	for range 10 {
		if err := db.PingContext(t.Context()); err != nil {
			t.Error(err)
		}
		for range 5 {
			if err := fresh.PingContext(t.Context()); err != nil {
				t.Error(err)
			}
		}
		other.c.watchdog.Load().nodeSeen(1)
		time.Sleep(20 * time.Millisecond)
	}
	if s := db.c.Stats(); s.Lost == 0 {
		t.Errorf("%+v: no goodbye was heard, the test shows nothing", s)
	}
	if s := fresh.c.Stats(); s.Culled+s.Lost != 0 {
		t.Errorf("the fresh connections: %+v, want none culled", s)
	}
}

// nodeSeen says that a connection to the node has just been used.
func (w *watchdog) nodeSeen(id nodeID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nodeOf(id).seen.Store(now())
}

// A decommission takes the connections there are, at pace, and lets new ones be.
func TestADecommissionThroughGossipCullsEarly(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{LoadBalancer: crdbdraintest.LoadBalancerConfig{Interval: time.Second}})
	t.Cleanup(c.Close)
	c.Grant("app", "VIEWCLUSTERMETADATA")
	logs := &logTrap{}
	db := open(t, c.DSN(), "crdbdrain_sources=gossip&crdbdrain_poll_interval=1s&crdbdrain_poll_interval_draining=100ms&crdbdrain_cull_stagger=50ms&crdbdrain_window=1s&crdbdrain_spares=0", WithLogger(logs.logger()))
	fill(t, db.DB, 12)
	w := db.wd()
	eventually(t, "gossip answers", func() bool { return len(w.status(sourceGossip).nodes) == 3 })
	var mu sync.Mutex
	var at []time.Time
	held := int64(w.heldOn(2))
	if held < 3 {
		t.Fatalf("%d of 12 connections are on node 2", held)
	}
	c.Node(2).Decommission()
	culled := int64(0)
	eventually(t, "its connections are culled", func() bool {
		if n := db.c.Stats().Culled; n > culled {
			mu.Lock()
			for range n - culled {
				at = append(at, time.Now())
			}
			mu.Unlock()
			culled = n
		}
		return culled == held
	})
	if d, least := at[held-1].Sub(at[0]), time.Duration(held-1)*40*time.Millisecond; d < least {
		t.Errorf("%d culls in %v at one per 50 ms: no window makes a decommission faster", held, d)
	}
	// New ones are welcome there, and stay.
	db.SetMaxOpenConns(24)
	db.SetMaxIdleConns(24)
	conns := takeConns(t, db.DB, 24)
	on2 := 0
	for _, sc := range conns {
		if ours(t, sc).stamp() == 2 {
			on2++
		}
		_ = sc.Close()
	}
	if on2 == 0 {
		t.Error("no new connection landed on node 2")
	}
	polled := w.status(sourceGossip).answered
	eventually(t, "five more polls", func() bool {
		_ = db.PingContext(t.Context())
		return w.status(sourceGossip).answered.Sub(polled) > 500*time.Millisecond
	})
	if s := db.c.Stats(); s.Culled != held || s.Steered != 0 || s.Lost != 0 {
		t.Errorf("%+v: want %d culls and no more, no steering", s, held)
	}
	if n := logs.count("a node is leaving", `reason="decommissioning"`, `source="gossip"`, fmt.Sprintf("connections=%q", fmt.Sprint(held))); n != 1 {
		t.Errorf("%d lines, want 1:\n%s", n, logs)
	}
	// When it drains at last, it is a drain like any other.
	if d := c.Node(2).Drain(t.Context()); d.Err != nil {
		t.Error(d.Err)
	}
	c.Node(2).Stop()
	if err := db.PingContext(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestMarkedHostsComeLast(t *testing.T) {
	_, w := trusted(t, "")
	w.mu.Lock()
	w.addrs.learn(&attempt{addr: "10.0.0.1:26257", lookups: map[string][]string{"n1": {"10.0.0.1"}}}, 1)
	w.addrs.learn(&attempt{addr: "10.0.0.2:26257", lookups: map[string][]string{"n2": {"10.0.0.2"}}}, 2)
	w.mu.Unlock()
	if m := w.markedHosts(); m != nil {
		t.Errorf("no mark: %v", m)
	}
	w.answer(sourceReadiness, map[nodeID]nodeState{1: {live: true}, 2: {draining: true}}, nil)
	m := w.markedHosts()
	if m["n1:26257"] || !m["n2:26257"] {
		t.Fatalf("marked hosts: %v, want n2:26257", m)
	}
	cc := mustParse(t, "postgres://u@n1,n2,n3:26257/d?sslmode=disable").pgx
	for range 20 {
		copied := cc.Config.Copy()
		copied.Port, copied.Fallbacks[0].Port, copied.Fallbacks[1].Port = 26257, 26257, 26257
		orderHosts(copied, hostOrderRandom, m, nil)
		if last := copied.Fallbacks[1].Host; last != "n2" {
			t.Fatalf("the last host is %s, want n2", last)
		}
		if hosts := []string{copied.Host, copied.Fallbacks[0].Host}; !slices.Contains(hosts, "n1") || !slices.Contains(hosts, "n3") {
			t.Fatalf("hosts %v", hosts)
		}
	}
}
