package crdbdrain

import (
	"context"
	"crypto/tls"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// An endpoint that does not answer holds a mark by its last answer, but does not vouch for its node: the server's goodbye,
// which came since, stands.
func TestAnOldReadinessAnswerRefutesNothing(t *testing.T) {
	a, b := newHTTPNode(t, 1), newHTTPNode(t, 2)
	r := readinessOf(t, &logTrap{}, "", a.URL, b.URL)
	_, w := trusted(t, "")
	poll := func() {
		t.Helper()
		asked := time.Now()
		nodes, err := pollNow(t, r)
		if err != nil {
			t.Fatal(err)
		}
		w.take(pollResult{answers: []answer{{source: sourceReadiness, nodes: nodes, asked: asked}}})
	}
	poll()
	now := time.Now()
	w.note(2, sourceErrors, notice{since: now, heard: now, before: now, over: true})
	b.says(0, "")
	time.Sleep(time.Millisecond)
	poll()
	if w.markOf(2) == nil {
		t.Error("an endpoint that is away has taken the goodbye's mark away")
	}
	b.says(up, "")
	poll()
	if w.markOf(2) != nil {
		t.Error("the node is ready again, and still marked")
	}
}

// A poll ends with its slowest source. A goodbye that comes between a source's answer and that end stands.
func TestAGoodbyeDuringAPollStands(t *testing.T) {
	_, w := trusted(t, "")
	asked := time.Now()
	time.Sleep(time.Millisecond)
	heard := time.Now()
	w.note(2, sourceErrors, notice{since: heard, heard: heard, before: heard, over: true})
	w.take(pollResult{answers: []answer{{source: sourceInstances, asked: asked, took: time.Microsecond,
		nodes: map[nodeID]nodeState{1: {live: true}, 2: {live: true}}}}})
	if w.markOf(2) == nil {
		t.Error("an answer of before the goodbye has taken its mark away")
	}
}

// A replacement takes over since when the session before it was idle. Its goodbye is meant for itself all the same.
func TestTheGoodbyeOfAReplacement(t *testing.T) {
	c, w := trusted(t, "")
	s := w.hold(c, 2, time.Now())
	s.idled.Store(now() - int64(time.Minute))
	w.heardGoodbye(s)
	if mk := w.markOf(2); mk == nil || !s.opened.Before(mk.before) {
		t.Errorf("%+v does not mean the connection itself, opened %v", mk, s.opened)
	}
}

// The watchdog's own connection may find out late that the server has said goodbye. Connections of after its last answer
// can be to the restarted node.
func TestALateGoodbyeToTheWatchdogSparesTheRestartedNode(t *testing.T) {
	c, w := trusted(t, "")
	answered := time.Now()
	time.Sleep(time.Millisecond)
	fresh := w.hold(c, 2, time.Now())
	w.take(pollResult{goodbye: 2, before: answered})
	if m := w.marks.Load(); m == nil || m.of[2] == nil {
		t.Fatal("not marked")
	} else if m.overFor(fresh) {
		t.Error("a connection of after the restart is to leave at once")
	}
}

// A sweep that has a spare in hand for the connection does not wait for another.
func TestASweepWithTheLastSpareInHandDoesNotWait(t *testing.T) {
	c, w := trusted(t, "")
	s := w.hold(c, 2, time.Now())
	s.pg = nil
	s.idled.Store(now())
	s.state.Store(sessionIdle)
	w.hold(c, 1, time.Now())
	time.Sleep(time.Millisecond)
	w.answer(sourceInstances, map[nodeID]nodeState{1: {live: true}, 2: {live: true, draining: true}}, nil)
	if v := w.cull(s, w.marks.Load(), time.Now(), pointSweep); v != unready {
		t.Fatalf("without a spare: %d, want to wait for one", v)
	}
	s.replacement.Store(&session{})
	if v := w.cull(s, w.marks.Load(), time.Now(), pointSweep); v != gone {
		t.Errorf("with a spare in hand: %d, want gone", v)
	}
}

// A pool whose spare is still being dialled does not hold up the others.
func TestASweepGoesOnWithAnotherPool(t *testing.T) {
	c, w := trusted(t, "")
	cfg, err := parseConfig("host=h user=u sslmode=disable crdbdrain_spares=0 crdbdrain_cluster=" + c.cfg.cluster)
	if err != nil {
		t.Fatal(err)
	}
	other := newConnector(cfg)
	if registry.join(other) != w {
		t.Fatal("not one watchdog")
	}
	t.Cleanup(func() { registry.leave(other, w) })
	c.spares.dialing = c.cfg.spares // and they take long
	idle := func(c *Connector, since time.Duration) *session {
		s := w.hold(c, 2, time.Now())
		client, server := net.Pipe()
		_ = server.Close()
		s.link.conn = client
		s.idled.Store(now() - int64(since))
		s.state.Store(sessionIdle)
		return s
	}
	waits, goes := idle(c, 2*time.Second), idle(other, time.Second)
	w.hold(c, 1, time.Now())
	time.Sleep(time.Millisecond)
	w.answer(sourceInstances, map[nodeID]nodeState{1: {live: true}, 2: {live: true, draining: true}}, nil)
	var sw sweeper
	if next := sw.sweep(w); next <= 0 || next > listAgain {
		t.Errorf("the next look is after %v", next)
	}
	if waits.state.Load() != sessionIdle || goes.state.Load() != sessionGone {
		t.Errorf("the pool that waits for its spare: state %d, the other one: %d; want idle and gone", waits.state.Load(), goes.state.Load())
	}
	other.closing.Wait()
}

// A passing error of the first SHOW node_id does not lose what the PID tells, which would make the next answer look like a
// proxy's.
func TestTheRuleAfterAPassingError(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	cn, w := bare(t, "")
	cfg, err := parseConfig(c.DSN())
	if err != nil {
		t.Fatal(err)
	}
	cn.cfg.pgx = cfg.pgx
	hook(cn.cfg.pgx)
	p := newPoller(w)
	defer p.close()
	ended, cancel := context.WithCancel(t.Context())
	q := question{rule: ruleUnknown, cfg: w.cfg.Load()}
	side, err := dialSide(t.Context(), q, cn)
	if err != nil {
		t.Fatal(err)
	}
	p.sides[cn.role()] = side
	cancel()
	var r pollResult
	if p.askSQL(ended, q, asking{by: cn}, &r); r.rule != ruleUnknown || p.sides[cn.role()] == nil || side.pg.IsClosed() {
		t.Fatalf("the first time: %+v", r)
	}
	if p.askSQL(t.Context(), q, asking{by: cn}, &r); r.rule != ruleHolds {
		t.Errorf("the second time: rule %d, want %d", r.rule, ruleHolds)
	}
}

// What the application does with a connection of its own is not for the watchdog's.
func TestTheWatchdogsConnectionIsNotTheApplications(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	var calls atomic.Int32
	p := open(t, c.DSN(), "crdbdrain_sources=instances,gossip&crdbdrain_poll_interval=100ms", WithStdlibOptions(
		stdlib.OptionAfterConnect(func(context.Context, *pgx.Conn) error { calls.Add(1); return nil })))
	fill(t, p.DB, 1)
	w := p.dog(t)
	eventually(t, "the rule is known", func() bool { return w.rule.Load() == ruleHolds })
	if n := calls.Load(); n != 1 {
		t.Errorf("%d calls of OptionAfterConnect for one connection", n)
	}
}

// A session that is in use for good does not keep the others from being replaced.
func TestAPinnedSessionLetsOthersMove(t *testing.T) {
	c, w := trusted(t, "crdbdrain_ttl=1s")
	long := time.Now().Add(-time.Hour)
	pinned, other := w.hold(c, 1, long), w.hold(c, 1, long.Add(time.Minute))
	if v := w.oldest(time.Now()); v != pinned {
		t.Fatal("the oldest is not the first")
	}
	r := w.hold(c, 1, time.Now())
	pinned.replacement.Store(r)
	w.mu.Lock()
	w.pending = append(w.pending, pending{pinned, time.Now().Add(-pendingKeep)})
	w.mu.Unlock()
	r.state.Store(sessionGone) // nothing to close
	if n := w.sweepPending(time.Now()); n != 0 || pinned.replacement.Load() != nil {
		t.Fatalf("%d still pending", n)
	}
	if v := w.oldest(time.Now()); v != other {
		t.Error("the one that is pinned is tried again, before the others")
	}
}

// On the way home, the replacement that has just been dialled does not count as one more: the last of a node's share
// would never come.
func TestTheLastOfAShareComesHome(t *testing.T) {
	c, w := trusted(t, "")
	for id, n := range map[nodeID]int{1: 7, 2: 7, 3: 4} {
		for range n {
			w.hold(c, id, time.Now())
		}
	}
	r := w.hold(c, 3, time.Now())
	r.reserve.Store(true)
	if w.surplus(c, r) == nil {
		t.Error("7, 7 and 4: nothing to move")
	}
}

// pgx binds SCRAM to the TLS connection, which has to be what it gets: with anything in its place it would authenticate
// without, in silence (channel_binding=prefer, the default) or not at all (require).
func TestPgxKeepsTheTLSConnection(t *testing.T) {
	cc, err := pgx.ParseConfig("host=h user=u sslmode=require")
	if err != nil {
		t.Fatal(err)
	}
	hook(cc)
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	nc := tls.Client(a, &tls.Config{ServerName: "h"})
	at := &attempt{}
	got, err := cc.AfterNetConnect(context.WithValue(t.Context(), attemptKey{}, at), &cc.Config, nc)
	if err != nil || got != net.Conn(nc) || at.link == nil {
		t.Errorf("%T, %v, link %p; want the connection itself, and a link", got, err, at.link)
	}
}

// The server's goodbye takes the pace from the connections that it was meant for, not from those that were opened since.
func TestYoungerConnectionsLeaveAtThePace(t *testing.T) {
	c, w := trusted(t, "")
	before := time.Now().Add(-time.Minute)
	w.hold(c, 1, time.Now())
	old, young := w.hold(c, 2, before.Add(-time.Second)), [2]*session{w.hold(c, 2, before.Add(time.Second)), w.hold(c, 2, before.Add(time.Second))}
	c.spares.count.Store(1)
	w.note(2, sourceErrors, notice{since: time.Now(), heard: time.Now(), before: before, over: true})
	m, now := w.marks.Load(), time.Now()
	if v := w.cull(young[0], m, now, pointReturn); v != gone {
		t.Errorf("the first young one: %d, want gone", v)
	}
	if v := w.cull(young[1], m, now, pointReturn); v != wait {
		t.Errorf("the second young one: %d, want to wait", v)
	}
	if v := w.cull(old, m, now, pointReturn); v != gone {
		t.Errorf("one that was meant: %d, want gone", v)
	}
}

// An OptionBeforeConnect may replace what the driver hears the server by. The connection is then pgx's alone.
func TestHooksReplacedBeforeConnect(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	for name, change := range map[string]func(*pgx.ConnConfig){
		"AfterNetConnect": func(cc *pgx.ConnConfig) { cc.AfterNetConnect = nil },
		"BuildFrontend": func(cc *pgx.ConnConfig) {
			cc.BuildFrontend = pgproto3.NewFrontend
		},
	} {
		p := open(t, c.DSN(), "crdbdrain_sources=errors", WithStdlibOptions(
			stdlib.OptionBeforeConnect(func(_ context.Context, cc *pgx.ConnConfig) error { change(cc); return nil })))
		if err := p.PingContext(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := p.ExecContext(t.Context(), "no such statement"); err != nil {
			t.Logf("%s: %v", name, err)
		}
		if p.c.watchdog.Load() != nil {
			t.Errorf("%s: the driver takes it for a connection that it hears", name)
		}
	}
}

// A sweep with a list of before neither takes what is in use for a would-be cull, nor a marked node that is back for used.
func TestASweepWithAnOldList(t *testing.T) {
	c, w := trusted(t, "crdbdrain_mode=observe crdbdrain_spares=0")
	w.hold(c, 1, time.Now())
	used := w.hold(c, 2, time.Now()) // in use
	time.Sleep(time.Millisecond)
	w.answer(sourceInstances, map[nodeID]nodeState{1: {live: true}, 2: {live: true, draining: true}}, nil)
	w.cull(used, w.marks.Load(), time.Now(), pointSweep)
	if s := c.Stats(); s.Observed != 0 || used.wouldBe.Load() {
		t.Errorf("%+v: a session in use is swept", s)
	}
	other := w.hold(c, 1, time.Now())
	seen := other.node.seen.Load()
	w.cull(other, w.marks.Load(), time.Now(), pointSweep)
	if other.node.seen.Load() != seen {
		t.Error("a sweep counts as use of an unmarked node")
	}
	// Used again, and back: a caller may be waiting for it.
	used.state.Store(sessionIdle)
	used.idled.Store(now() - int64(time.Second))
	var sw sweeper
	sw.list(w, w.marks.Load())
	sw.listed = time.Now()
	if len(sw.idle) != 1 {
		t.Fatalf("%d sessions are listed, want one", len(sw.idle))
	}
	used.idled.Store(now())
	sw.sweep(w)
	if used.wouldBe.Load() {
		t.Error("a session that was used since it was listed is swept")
	}
	used.idled.Store(now() - int64(time.Second))
	sw = sweeper{}
	sw.sweep(w)
	if !used.wouldBe.Load() {
		t.Error("a session that has been idle for a second is not swept")
	}
}

// A spare that was being dialled when Shutdown began is not kept.
func TestShutdownKeepsNoLateSpare(t *testing.T) {
	c, w := trusted(t, "")
	s := w.hold(c, 1, time.Now())
	client, server := net.Pipe()
	_ = server.Close()
	s.link.conn = client
	c.spares.wanted.Store(true)
	c.shutting.Store(true)
	c.putSpare(s)
	c.closing.Wait()
	if n := c.spares.count.Load(); n != 0 || s.state.Load() != sessionGone {
		t.Errorf("%d spares, state %d: want none, and gone", n, s.state.Load())
	}
}

// What waits to take the place of a session that is discarded goes with it: a spare whose dial took longer than the TTL can
// be chosen to give way before it is one.
func TestDiscardDropsTheReplacement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true})
		defer c.Close()
		p := memPool(t, c, "crdbdrain_cluster=discard", nil)
		var s [2]*session
		for i := range s {
			var err error
			if s[i], err = p.c.connect(t.Context(), nil, true); err != nil {
				t.Fatal(err)
			}
		}
		if !s[0].replaceWith(s[1], reasonTTL) {
			t.Fatal("not replaced")
		}
		s[0].discard()
		p.Close()
		time.Sleep(6 * time.Second)
		if n := c.Stats().Open; n != 0 {
			t.Errorf("%d connections are open", n)
		}
		_ = s[1].bury()
	})
}

// A feed that had missed a node and lists it again tells of its return, although the question was sent before a dial was
// refused: it waits for news. What the feed says of a node that it has listed all along is no news of it.
func TestAFeedTellsOfANodesReturn(t *testing.T) {
	live := nodeState{live: true}
	_, w := trusted(t, "")
	said := func(nodes map[nodeID]nodeState) {
		w.take(pollResult{answers: []answer{{source: sourceFeed, nodes: nodes, asked: time.Now().Add(-10 * time.Second)}}})
	}
	goodbye := func(id nodeID) {
		w.note(id, sourceErrors, notice{since: time.Now(), heard: time.Now(), before: time.Now()})
	}
	said(map[nodeID]nodeState{1: live, 2: live, 3: {draining: true}})
	said(map[nodeID]nodeState{1: live, 2: live})
	goodbye(2)
	goodbye(3)
	said(map[nodeID]nodeState{1: live, 2: live, 3: live})
	if w.markOf(2) == nil || w.markOf(3) != nil {
		t.Errorf("node 2, which the feed has listed all along, is marked: %v; node 3, which is back: %v", w.markOf(2) != nil, w.markOf(3) != nil)
	}
}

// However long a dial takes, no more spares are dialled than there are connections that have to leave.
func TestNoMoreSparesThanHaveToLeave(t *testing.T) {
	for _, tt := range []struct {
		leaving int
		want    int
	}{{1, 2}, {5, 5}, {100, 2 + maxAhead}} {
		c, w := trusted(t, "crdbdrain_spares=2")
		w.hold(c, 1, time.Now())
		c.spares.took.Store(int64(time.Second))
		c.spares.retry = time.Now().Add(time.Hour) // they are counted, not made
		c.tendSpares(tt.leaving, time.Now(), time.Millisecond)
		c.spares.mu.Lock()
		got := c.spares.missing(c.cfg.spares)
		c.spares.mu.Unlock()
		if got != tt.want {
			t.Errorf("%d have to leave: %d dials, want %d", tt.leaving, got, tt.want)
		}
	}
}

// WaitDrained's error has the number of connections that are left when it gives up.
func TestWaitDrainedCountsWhatIsLeft(t *testing.T) {
	c, w := trusted(t, "")
	gone := w.hold(c, 1, time.Now())
	w.hold(c, 1, time.Now())
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error)
	go func() { result <- c.WaitDrained(ctx, 1) }()
	eventually(t, "it waits", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.nodes[1].empty != nil
	})
	w.remove(gone)
	cancel()
	if err := <-result; err == nil || !strings.Contains(err.Error(), ": 1 connections are left") {
		t.Errorf("%v, want that one is left", err)
	}
}

// A connection that was not used within the last interval is no sign that there is nowhere to go, at first.
func TestNowhereToGoIsNotSaidTooEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logs := &logTrap{}
		c, w := trusted(t, "crdbdrain_poll_interval=5s crdbdrain_sources=errors,manual", WithLogger(logs.logger()))
		s := w.hold(c, 1, time.Now())
		w.hold(c, 2, time.Now())
		time.Sleep(time.Minute)
		if err := c.SetDraining(1, true); err != nil {
			t.Fatal(err)
		}
		said := func() int {
			w.cull(s, w.marks.Load(), time.Now(), pointReturn)
			return logs.count("nothing is culled")
		}
		if n := said(); n != 0 {
			t.Errorf("%d lines in the first moment", n)
		}
		time.Sleep(6 * time.Second)
		if n := said(); n != 1 {
			t.Errorf("%d lines after more than an interval, want 1", n)
		}
	})
}
