package crdbdrain

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// What happens in a schedule (see schedule_test.go), and the connections on which it happens.

// events makes things happen until the schedule's end.
func (s *schedule) events() {
	rng := s.rng
	end := s.length
	if at := s.pools[0].closeAt; at >= 0 {
		end = at
	}
	for {
		time.Sleep(time.Duration(rng.Int64N(int64(s.tempo))))
		if time.Since(s.start) >= end {
			return
		}
		id := 1 + rng.IntN(len(s.cluster.Nodes()))
		span := time.Duration(300+rng.IntN(4000)) * time.Millisecond
		if len(s.extra) > 0 && rng.IntN(3) == 0 {
			s.extra[rng.IntN(len(s.extra))](span)
			continue
		}
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
				s.of[n.ID()] = &scheduledNode{n: n, good: time.Now(), stays: time.Now()}
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
			p, user := schedulePrivileges[rng.IntN(3)], s.pools[rng.IntN(len(s.pools))].user
			if rng.IntN(2) == 0 {
				s.note("grant %s to %s", p, user)
				s.cluster.Grant(user, p)
			} else {
				s.note("revoke %s of %s", p, user)
				s.cluster.Revoke(user, p)
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
	s.troubled = time.Now()
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
		f.to, s.troubled = time.Now(), time.Now()
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
	n.leaves, n.stays = true, time.Time{}
	s.mu.Unlock()
	s.note("decommission node %d, for good: %v", id, forGood)
	n.n.Decommission()
	s.running.Go(func() {
		defer s.release(n)
		time.Sleep(d)
		if !forGood {
			n.n.Recommission()
			s.mu.Lock()
			if n.leaves = false; n.n.Step() == crdbdraintest.Serving {
				n.stays = time.Now()
			}
			s.mu.Unlock()
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
		s.mu.Lock()
		n.stays = time.Now() // no source names it any more
		s.mu.Unlock()
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

// opened returns the pools that are open.
func (s *schedule) opened() (pools []*schedulePool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.pools {
		if p.db != nil && p.closed.IsZero() {
			pools = append(pools, p)
		}
	}
	return pools
}

// pick returns one of them, or nil. Only the goroutine that makes the events may call it.
func (s *schedule) pick() *schedulePool {
	pools := s.opened()
	if len(pools) == 0 {
		return nil
	}
	return pools[s.rng.IntN(len(pools))]
}

// setCeiling raises the ceiling, lowers it, also below the connections that there are, or takes it away.
func (s *schedule) setCeiling(time.Duration) {
	p := s.pick()
	if p == nil {
		return
	}
	n := [...]int{0, 1 + s.rng.IntN(p.conns), 1 + s.rng.IntN(2*p.conns), max(1, int(p.open.Load())-s.rng.IntN(3))}[s.rng.IntN(4)]
	s.checkCeiling(false)
	s.note("SetMaxConnections(%d) by %s", n, p.user)
	s.saw("ceilings changed")
	if err := p.con.SetMaxConnections(n); err != nil {
		s.fail("SetMaxConnections(%d): %v", n, err)
	} else if got := p.con.ceiling.Load().limit.Load(); got != int64(n) {
		s.fail("SetMaxConnections(%d): the ceiling is %d", n, got)
	}
	s.checkCeiling(false)
}

// markByHand marks a node for a while, or for as long as there are connections.
func (s *schedule) markByHand(span time.Duration) {
	p, id := s.pick(), 1+s.rng.IntN(len(s.cluster.Nodes())+1) // one more than there are
	stays := s.rng.IntN(3) == 0 && !s.rest
	s.mu.Lock()
	taken := p == nil || s.byHand[id]
	if !taken {
		s.byHand[id] = true
	}
	s.mu.Unlock()
	if taken {
		return
	}
	s.note("SetDraining(%d, true) by %s for %v, %v", id, p.user, span, stays)
	s.saw("marks by hand")
	if err := p.con.SetDraining(id, true); err != nil {
		s.fail("SetDraining(%d, true): %v", id, err)
	}
	if !p.marks(id) {
		s.fail("SetDraining(%d, true) has marked nothing", id)
	}
	if stays {
		return
	}
	s.running.Go(func() {
		time.Sleep(span)
		if pools := s.opened(); len(pools) > 0 {
			p := pools[id%len(pools)]
			s.note("SetDraining(%d, false) by %s", id, p.user)
			err := p.con.SetDraining(id, false)
			s.mu.Lock()
			closed := !p.closed.IsZero()
			s.mu.Unlock()
			if !closed && (err != nil || p.marks(id)) {
				s.fail("SetDraining(%d, false): %v, marked %v", id, err, p.marks(id))
			}
		}
		s.mu.Lock()
		s.byHand[id] = false
		s.mu.Unlock()
	})
}

// marks reports whether a node is marked by hand.
func (p *schedulePool) marks(id int) bool {
	w := p.con.watchdog.Load()
	w.mu.Lock()
	defer w.mu.Unlock()
	said := w.notices[nodeID(id)]
	return said != nil && said[sourceManual] != nil
}

// waitDrained waits until nobody is connected to a node.
func (s *schedule) waitDrained(limit time.Duration) {
	p, id := s.pick(), 1+s.rng.IntN(len(s.cluster.Nodes())+1)
	if p == nil {
		return
	}
	s.note("WaitDrained(%d) by %s for %v", id, p.user, limit)
	s.saw("waits for a node")
	s.running.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		start := time.Now()
		err := p.con.WaitDrained(ctx, id)
		took := time.Since(start)
		w := p.con.watchdog.Load()
		w.mu.Lock()
		defer w.mu.Unlock()
		s.mu.Lock()
		defer s.mu.Unlock()
		rule := w.rule.Load()
		switch {
		case took > limit:
			s.failLocked("WaitDrained(%d) took %v of %v: %v", id, took, limit, err)
		case err == nil:
			if n := w.nodes[nodeID(id)]; n != nil && rule == ruleHolds {
				for c := range n.held {
					if c.opened.Before(start) {
						s.failLocked("WaitDrained(%d): a connection is left", id)
						break
					}
				}
			}
		case errors.Is(err, context.DeadlineExceeded):
			if took < limit-minPollGap {
				s.failLocked("WaitDrained(%d) took %v of %v: %v", id, took, limit, err)
			}
		case !errors.Is(err, errClosed) || p.closed.IsZero():
			s.failLocked("WaitDrained(%d): %v", id, err)
		}
	})
}

// shutDown shuts the pool down under load.
func (p *schedulePool) shutDown() {
	s := p.s
	s.note("Shutdown of %s within %v", p.user, p.shutdown)
	s.saw("shutdowns")
	ctx, cancel := context.WithTimeout(context.Background(), p.shutdown)
	defer cancel()
	start := time.Now()
	s.mu.Lock()
	p.shut = start
	s.mu.Unlock()
	ready := p.spares()
	s.running.Go(func() {
		time.Sleep(10 * time.Millisecond)
		for c := range p.spares() {
			if ready[c] {
				s.fail("Shutdown keeps a spare")
			}
		}
	})
	sum, err := p.con.Shutdown(ctx)
	took := time.Since(start)
	s.note("%+v, %v", sum, err)
	if sum.Duration != took || took > p.shutdown || sum.Idle+sum.Returned > 0 && took < min(shutdownGrace, p.shutdown/4) {
		s.fail("Shutdown took %v of %v: %+v", took, p.shutdown, sum)
	}
	if (err == nil) != (sum.Left == 0) || err != nil && !errors.Is(err, context.DeadlineExceeded) {
		s.fail("Shutdown: %+v, %v", sum, err)
	}
	s.mu.Lock()
	p.ended = int64(sum.Idle)
	s.mu.Unlock()
	if w := p.con.watchdog.Load(); w != nil && err == nil {
		time.Sleep(time.Duration(start.UnixNano() % int64(2*time.Second)))
		w.mu.Lock()
		left := 0
		for _, n := range w.nodes {
			for c := range n.held {
				left += boolInt(c.connector == p.con && !c.reserve.Load()) // a spare that was being dialled may be here for a moment
			}
		}
		w.mu.Unlock()
		if left > 0 {
			s.fail("%d connections after Shutdown", left)
		}
	}
}

// spares returns those that are ready.
func (p *schedulePool) spares() map[*session]bool {
	sp := &p.con.spares
	sp.mu.Lock()
	defer sp.mu.Unlock()
	ready := make(map[*session]bool)
	for _, r := range sp.ready {
		ready[r.s] = true
	}
	return ready
}

// burst puts a pool under more load for a while.
func (s *schedule) burst(span time.Duration) {
	p := s.pick()
	if p == nil {
		return
	}
	n := 2 + s.rng.IntN(12)
	pause := time.Duration(2+s.rng.IntN(5)) * time.Millisecond
	s.note("%d more workers on %s for %v", n, p.user, span/4)
	s.saw("bursts")
	s.lull.Store(0)
	ctx, cancel := context.WithTimeout(s.stopped, span/4)
	p.work(ctx, n, pause)
	s.running.Go(func() {
		<-ctx.Done()
		cancel()
	})
}

// pauseLoad makes all workers pause.
func (s *schedule) pauseLoad(span time.Duration) {
	s.note("no load for %v", span)
	s.saw("lulls")
	s.lull.Store(int64(time.Since(s.start) + span))
}

// cutting is how the watchdog is cut off: its connections go silent, or are reset.
type cutting struct {
	resets bool
	over   chan struct{}
}

// cutOff keeps the watchdog, but not the application, from the cluster for a while.
func (s *schedule) cutOff(span time.Duration) {
	cut := &cutting{resets: s.rng.IntN(2) == 0, over: make(chan struct{})}
	if !s.cut.CompareAndSwap(nil, cut) {
		return
	}
	s.note("the watchdog is cut off for %v; resets: %v", 2*span, cut.resets)
	s.saw("partitions of the watchdog")
	if cut.resets {
		s.mu.Lock()
		for _, p := range s.pools {
			for _, c := range p.wires {
				if c.kind.Load() == wireSide {
					c.reset()
				}
			}
		}
		s.mu.Unlock()
	}
	s.running.Go(func() {
		time.Sleep(2 * span)
		s.cut.Store(nil)
		close(cut.over)
		s.note("the watchdog is no longer cut off")
	})
}

// suspend stops the process for a while, as far as that is possible from within: nothing is read from its connections or
// written to them, and none is opened. The cluster goes on. Afterwards what has come is there at once.
func (s *schedule) suspend(span time.Duration) {
	over := make(chan struct{})
	if !s.still.CompareAndSwap(nil, &over) {
		return
	}
	s.note("suspended for %v", span)
	s.saw("suspensions")
	s.mu.Lock()
	s.troubled = time.Now()
	s.stills = append(s.stills, fault{from: time.Now().Add(-time.Nanosecond)})
	i := len(s.stills) - 1
	s.mu.Unlock()
	s.running.Go(func() {
		time.Sleep(span)
		s.mu.Lock()
		s.troubled = time.Now()
		s.stills[i].to = time.Now()
		s.mu.Unlock()
		s.still.Store(nil)
		close(over)
		s.note("awake")
		s.wake()
	})
}

// jump sets the clock: the process takes it for a suspension.
func (s *schedule) jump(time.Duration) {
	s.note("the clock jumps")
	s.saw("clock jumps")
	s.wake()
}

// wake does what the watchdog does when it notices that the process was suspended, and looks at what is left of its marks.
func (s *schedule) wake() {
	w := s.dog()
	if w == nil {
		return
	}
	t := time.Now()
	w.mu.Lock()
	byHand := 0
	for _, said := range w.notices {
		byHand += boolInt(said[sourceManual] != nil)
	}
	w.mu.Unlock()
	w.forget()
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, said := range w.notices {
		for source, n := range said {
			switch {
			case n == nil:
			case sourceID(source) == sourceManual:
				byHand--
			case n.since.Before(t):
				s.fail("a suspended process keeps what %v said of node %d: %+v", sourceID(source), id, *n)
			}
		}
	}
	if byHand > 0 {
		s.fail("a suspended process has dropped %d marks that were made by hand", byHand)
	}
}

// scheduleFeed is a feed in memory.
type scheduleFeed struct {
	s    *schedule
	l    *memListener
	rate float64      // of reconnects; 0: any
	mode atomic.Int32 // feed*
}

const (
	feedTells   = iota
	feedHangs   // and answers nobody
	feedFails   // with a status
	feedGone    // connections are reset, dials refused
	feedDebris  // what it answers is none
	feedNothing // no nodes
	feedAll     // everything drains
	feedPhantom // a node that is not there is the only one live
	feedModes
)

var feedModeNames = [...]string{"tells", "hangs", "fails", "is gone", "answers debris", "says nothing", "says that everything drains", "says that a node that is not there is the only one live"}

func newScheduleFeed(s *schedule, rate float64) *scheduleFeed {
	return &scheduleFeed{s: s, l: newMemListener(), rate: rate}
}

// serve serves until the function is called that it returns.
func (f *scheduleFeed) serve() func() {
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: f}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(f.l)
	}()
	return func() {
		_ = server.Close()
		<-done
	}
}

func (f *scheduleFeed) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if f.mode.Load() == feedGone {
		return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
	}
	return f.l.dial(ctx, network, addr)
}

// nodes is the truth, or what it says in its place.
func (f *scheduleFeed) nodes(mode int32) (nodes []feedNode) {
	s := f.s
	if mode == feedNothing {
		return nil
	}
	for _, n := range s.cluster.Nodes() {
		s.mu.Lock()
		state, leaves, gone := nodeActive, false, true
		if node := s.of[n.ID()]; node != nil {
			leaves, gone = node.leaves, node.removed && !node.stays.IsZero()
		}
		s.mu.Unlock()
		switch {
		case gone:
			continue
		case mode >= feedAll || n.Step() >= crdbdraintest.Announced:
			state = nodeDraining
		case leaves:
			state = nodeDecommissioning
		}
		nodes = append(nodes, feedNode{ID: uint32(n.ID()), State: state})
	}
	if mode == feedPhantom {
		nodes = append(nodes, feedNode{ID: 77, State: nodeActive})
	}
	return nodes
}

func (f *scheduleFeed) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	wait, _ := time.ParseDuration(r.URL.Query().Get("wait"))
	for end := time.Now().Add(wait); ; {
		mode := f.mode.Load()
		switch mode {
		case feedHangs:
			<-r.Context().Done()
			return
		case feedFails:
			w.WriteHeader(http.StatusBadGateway)
			return
		case feedGone:
			panic(http.ErrAbortHandler)
		case feedDebris:
			_, _ = io.WriteString(w, `{"version":1,"cluster":"`)
			return
		}
		doc := feedDocument{Version: feedVersion, Cluster: f.cluster(), Instance: "one", Nodes: f.nodes(mode)}
		if f.rate > 0 {
			doc.Fleet = &feedFleet{Clients: 1, MaxReconnectsPerSecond: f.rate}
		}
		text, err := json.Marshal(doc)
		if err != nil {
			f.s.fail("%v", err)
			return
		}
		hash := fnv.New64a()
		_, _ = hash.Write(text)
		tag := fmt.Sprintf(`"%x"`, hash.Sum64())
		if r.Header.Get("If-None-Match") != tag {
			w.Header().Set("ETag", tag)
			_, _ = w.Write(text)
			return
		}
		if rest := time.Until(end); rest <= 0 {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (f *scheduleFeed) cluster() string { return f.s.pools[0].con.cfg.cluster }

// misfeed makes the feed do something else for a while than tell the truth.
func (s *schedule) misfeed(span time.Duration) {
	mode := int32(1 + s.rng.IntN(feedModes-1))
	if !s.feed.mode.CompareAndSwap(feedTells, mode) {
		return
	}
	s.note("the feed %s for %v", feedModeNames[mode], 2*span)
	until := time.Now().Add(2 * span)
	s.mu.Lock()
	if mode >= feedNothing {
		s.sawLocked("lies of a feed")
		s.feedLies = until
	}
	if mode == feedPhantom && until.After(s.phantoms) {
		s.phantoms = until
	}
	s.mu.Unlock()
	s.running.Go(func() {
		time.Sleep(2 * span)
		s.feed.mode.Store(feedTells)
		s.note("the feed tells the truth")
	})
}

// scheduleConn is a connection of the process, of which a schedule takes note.
type scheduleConn struct {
	net.Conn
	p       *schedulePool
	attempt *attempt
	link    atomic.Pointer[link]
	kind    atomic.Uint32 // wire*

	// Of the one who reads, or writes: they do not overlap until it has been greeted.
	asked    bool
	answered bool
	greeted  bool // by a server that takes it
	refused  bool // by one that drains
	broken   bool // ended by the other end, without a word that is known to be read
	requests int  // messages, or several in one packet

	mu       sync.Mutex
	deadline time.Time // guarded by mu, like all below
	closed   bool
	left     bool          // Terminate has been written
	cut      bool          // by a partition
	held     []byte        // came while everything stood still
	changed  chan struct{} // closed when the deadline changes, or with the connection, if somebody waits
}

const (
	wireFresh  = iota // nothing has been sent
	wireApp           // the application's
	wireSide          // the watchdog's
	wireCancel        // a CancelRequest
)

// hear gives the connections of a connector the link that the driver puts above them.
func hear(con *Connector) {
	after := con.cfg.pgx.AfterNetConnect
	con.cfg.pgx.AfterNetConnect = func(ctx context.Context, cc *pgconn.Config, nc net.Conn) (net.Conn, error) {
		nc, err := after(ctx, cc, nc)
		if a := attemptOf(ctx); a != nil && err == nil {
			nc.(*scheduleConn).link.Store(a.link)
		}
		return nc, err
	}
}

// goodbye reports whether the server's last words have been read.
func (c *scheduleConn) goodbye() bool {
	l := c.link.Load()
	return l != nil && l.words.Load() != goodbyeNone
}

// session returns the driver's, or nil.
func (c *scheduleConn) session() *session {
	if l := c.link.Load(); l != nil {
		return l.session.Load()
	}
	return nil
}

func (p *schedulePool) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	s := p.s
	for still := s.still.Load(); still != nil; still = s.still.Load() {
		select {
		case <-*still:
		case <-ctx.Done():
			return nil, &net.OpError{Op: "dial", Net: network, Err: ctx.Err()}
		}
	}
	s.checkCeiling(false)
	nc, err := s.cluster.Dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	c := &scheduleConn{Conn: nc, p: p, attempt: attemptOf(ctx)}
	s.mu.Lock()
	p.wires = append(p.wires, c)
	s.mu.Unlock()
	return c, nil
}

// standstill returns a channel that is closed when the connection's bytes may flow, nil if they do.
func (c *scheduleConn) standstill() <-chan struct{} {
	if still := c.p.s.still.Load(); still != nil {
		return *still
	}
	if cut := c.p.s.cut.Load(); cut != nil && c.kind.Load() == wireSide && !cut.resets {
		return cut.over
	}
	return nil
}

func (c *scheduleConn) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// stand waits until the connection's bytes may flow, to its deadline or end.
func (c *scheduleConn) stand(op string) error {
	for {
		still := c.standstill()
		if still == nil {
			return nil
		}
		c.mu.Lock()
		if c.changed == nil {
			c.changed = make(chan struct{})
		}
		changed, closed, deadline := c.changed, c.closed, c.deadline
		c.mu.Unlock()
		if closed {
			return c.opError(op, net.ErrClosed)
		}
		var late <-chan time.Time
		if !deadline.IsZero() {
			left := time.Until(deadline)
			if left <= 0 {
				return c.opError(op, os.ErrDeadlineExceeded)
			}
			late = time.After(left)
		}
		select {
		case <-still:
		case <-changed:
		case <-late:
		}
	}
}

// wakeLocked wakes those who stand. c.mu is held.
func (c *scheduleConn) wakeLocked() {
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

func (c *scheduleConn) Write(b []byte) (int, error) {
	if !c.asked {
		c.asked = true
		switch {
		case len(b) == 16 && bytes.Equal(b[4:8], []byte{0x04, 0xd2, 0x16, 0x2e}):
			c.kind.Store(wireCancel)
		case bytes.Contains(b, []byte("crdbdrain-watchdog")):
			c.kind.Store(wireSide)
			if cut := c.p.s.cut.Load(); cut != nil && cut.resets {
				c.reset()
			}
		default:
			c.kind.Store(wireApp)
			c.p.open.Add(1)
		}
	} else if len(b) == 5 && b[0] == 'X' {
		c.leave()
	} else {
		c.requests++
	}
	if err := c.stand("write"); err != nil {
		return 0, err
	}
	n, err := c.Conn.Write(b)
	return n, c.told("write", err)
}

func (c *scheduleConn) Read(b []byte) (int, error) {
	for {
		if err := c.stand("read"); err != nil {
			return 0, err
		}
		c.mu.Lock()
		n := copy(b, c.held)
		c.held = c.held[n:]
		c.mu.Unlock()
		if n > 0 {
			return n, nil
		}
		n, err := c.Conn.Read(b)
		if still := c.standstill(); still == nil || n == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
			if !c.answered && n > 0 {
				c.answered = true
				c.greeted = b[0] == 'R'
				c.refused = bytes.Contains(b[:n], []byte(noticeNotAcceptingClients))
			}
			return n, c.told("read", err)
		}
		c.mu.Lock()
		c.held = append(c.held, b[:n]...)
		c.mu.Unlock()
	}
}

// told takes note of an error of the connection.
func (c *scheduleConn) told(op string, err error) error {
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.broken = true
	}
	if c.cut {
		return c.opError(op, syscall.ECONNRESET)
	}
	return err
}

// leave takes note that the connection is being closed.
func (c *scheduleConn) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.left && c.kind.Load() == wireApp {
		c.p.open.Add(-1)
	}
	c.left = true
}

func (c *scheduleConn) Close() error {
	c.leave()
	c.mu.Lock()
	c.closed = true
	c.wakeLocked()
	c.mu.Unlock()
	return c.Conn.Close()
}

// reset is what a partition does.
func (c *scheduleConn) reset() {
	c.mu.Lock()
	c.cut = true
	c.mu.Unlock()
	_ = c.Conn.Close()
}

func (c *scheduleConn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

func (c *scheduleConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	c.deadline = t
	c.wakeLocked()
	c.mu.Unlock()
	return c.Conn.SetReadDeadline(t)
}

// scheduleMeters is a meter provider that tells the schedule of every count as it is made. It is not comparable, so that
// the driver does not keep it.
type scheduleMeters struct {
	noop.MeterProvider
	p *schedulePool
	_ []int
}

func (m scheduleMeters) Meter(string, ...metric.MeterOption) metric.Meter {
	return scheduleMeter{p: m.p}
}

type scheduleMeter struct {
	noop.Meter
	p *schedulePool
}

func (m scheduleMeter) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return scheduleCounter{p: m.p, name: name}, nil
}

type scheduleCounter struct {
	noop.Int64Counter
	p    *schedulePool
	name string
}

func (c scheduleCounter) Add(_ context.Context, n int64, opts ...metric.AddOption) {
	if n == 0 {
		return
	}
	set := metric.NewAddConfig(opts).Attributes()
	value := func(key string) string {
		v, _ := set.Value(attribute.Key(key))
		return v.String()
	}
	name := c.name
	switch name {
	case "crdbdrain.connection.culled":
		if value("observed") == "true" {
			name += "/observed"
		} else {
			name += "/" + value("reason")
		}
	case "crdbdrain.dial.refused":
		name += "/" + value("sqlstate")
	}
	p := c.p
	p.s.mu.Lock()
	p.counted[name] += n
	p.s.mu.Unlock()
	switch c.name {
	case "crdbdrain.connection.culled", "crdbdrain.connection.lost", "crdbdrain.cull.throttled":
		p.onCull(c.name, value("reason"), value("point"))
	case "crdbdrain.connection.rejected":
		p.onRejected()
	}
}

// onRejected is called when the ceiling refuses a connection.
func (p *schedulePool) onRejected() {
	l, s := p.con.ceiling.Load(), p.s
	s.mu.Lock()
	defer s.mu.Unlock()
	p.rejected = time.Now()
	if limit := l.limit.Load(); limit == 0 || l.used.Load() < limit {
		s.suspicious++ // another may have left in this moment
	}
}
