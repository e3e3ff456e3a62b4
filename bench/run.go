package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/crdbdrain/crdbdrain"
	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// run is what one pool has been through, once. Times are counted from the load's begin.
type run struct {
	ops, failed   int
	errors        map[string]int // by code
	drains        []drain
	steady, roll  []time.Duration // latencies, sorted
	steadyFor     time.Duration
	steadyDials   int           // connections that nodes accepted while it was steady,
	rollDials     int           // between the start of a node's drain and its return,
	homeDials     int           // and from its return until the next drain or the end of the watch
	even          time.Duration // from the end of the roll until every node had its share; -1: it did not come to that
	spread        []int         // connections per node at the end of the watch
	lowest        int           // fewest connections at any time of the roll
	driver        crdbdrain.Stats
	samples       []sample
	open          []openConn // sampled
	begin         time.Time
	steadyAt      time.Duration
	rollAt, endAt time.Duration // of the roll; for the drawing, like the three above
}

// drain is one node's.
type drain struct {
	node            int
	held            int // connections on it when it began
	lost            int // closed by the server
	took            time.Duration
	start, end      time.Duration
	down, up, back  time.Duration // process ended, started again, and in the load balancer again
	busiest100      int           // most connections accepted by the others in any 100 ms of the drain
	windowRemaining time.Duration // until connections.timeout, when the last one had left; negative: none
}

type openConn struct {
	at    time.Duration
	nodes []int
}

// runAll puts every pool through the scenario once: side by side, so that whatever else the machine does hits them alike;
// or one after the other, in an order that rotates from run to run.
func runAll(ctx context.Context, s scenario, pools []contender, nth int, say func(string, ...any)) ([]*run, error) {
	if !s.apart {
		// One more: pgx on a cluster where nothing is drained. What it sees while the others roll is the machine's noise.
		if slices.Contains(names(pools), ours) {
			pools = append(slices.Clip(pools), control)
		}
		runs := make([]*run, len(pools))
		homeward := make(chan struct{}) // closed when ours has found home: the others are watched for as long
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		var wg sync.WaitGroup
		var mu sync.Mutex
		var failure error // the first
		if !slices.Contains(names(pools), ours) {
			close(homeward)
		}
		// Every pool is full before the first load begins.
		ready := make(chan struct{})
		var opening sync.WaitGroup
		for i, c := range pools {
			opening.Add(1)
			wg.Go(func() {
				if c.name == ours {
					defer close(homeward)
				}
				var err error
				if runs[i], err = runOne(ctx, s, c, say, opening.Done, ready, homeward); err != nil {
					mu.Lock()
					defer mu.Unlock()
					if failure == nil {
						failure = fmt.Errorf("%s: %w", c.name, err)
					}
					cancel()
				}
			})
		}
		opening.Wait()
		close(ready)
		wg.Wait()
		if failure != nil {
			return nil, failure
		}
		if last := len(runs) - 1; pools[last].name == control.name {
			o := runs[slices.IndexFunc(pools, func(c contender) bool { return c.name == ours })]
			ahead := o.begin.Sub(runs[last].begin)
			runs[last].rollAt, runs[last].endAt = o.rollAt+ahead, o.endAt+ahead
			runs[last].sort()
		}
		return runs, nil
	}
	runs := make([]*run, len(pools))
	now := make(chan struct{})
	close(now)
	for i := range pools {
		k := (i + nth) % len(pools)
		var err error
		if runs[k], err = runOne(ctx, s, pools[k], say, func() {}, now, now); err != nil {
			return nil, fmt.Errorf("%s: %w", pools[k].name, err)
		}
	}
	return runs, nil
}

// minWatch is how long a pool is watched after the roll at least, unless it is even before.
const minWatch = 5 * time.Second

// runOne puts one pool through the scenario.
func runOne(ctx context.Context, s scenario, c contender, say func(string, ...any), opened func(), ready, homeward <-chan struct{}) (*run, error) {
	var once sync.Once
	defer once.Do(opened)
	cluster, err := startCluster(s)
	if err != nil {
		return nil, err
	}
	defer cluster.Close()
	p, err := c.open(s, cluster)
	if err != nil {
		return nil, err
	}
	defer p.close()
	if err := fill(ctx, p, s.conns); err != nil {
		return nil, fmt.Errorf("the pool does not fill: %w", err)
	}
	once.Do(opened)
	<-ready

	r := &run{even: -1}
	l := startLoad(s, p)
	r.begin = l.begin
	defer l.stop()
	watcher := watchOpen(cluster, l.begin)
	defer watcher.stop()
	since := func() time.Duration { return time.Since(l.begin) }

	if !pause(ctx, s.warm) {
		return nil, ctx.Err()
	}
	r.steadyAt = since()
	for range 3 {
		if !pause(ctx, s.steady/3) {
			return nil, ctx.Err()
		}
		if s.burst > 0 && since() < r.steadyAt+s.steady*9/10 {
			l.burst(s.burst)
		}
	}
	r.rollAt = since()
	nodes := cluster.Nodes()[:s.drained]
	if c.name == control.name {
		nodes = nil
		select {
		case <-homeward:
		case <-ctx.Done():
		}
	}
	for _, n := range nodes {
		d, err := drainOne(ctx, s, cluster, n, l)
		if err != nil {
			return nil, err
		}
		r.drains = append(r.drains, d)
		say("  %-12s node %d drained in %.2f s, %d of %d connections closed by the server", c.name, n.ID(), d.took.Seconds(), d.lost, d.held)
		if !pause(ctx, s.settle) {
			return nil, ctx.Err()
		}
	}
	r.endAt = since()

	// The way home.
	home := false
	for (since() < r.endAt+s.home || since() < s.until) && ctx.Err() == nil {
		if isEven(openOn(cluster)) {
			if r.even < 0 {
				r.even = since() - r.endAt
			}
		} else {
			r.even = -1
		}
		if since() < s.until {
			pause(ctx, 50*time.Millisecond)
			continue
		}
		if r.even >= 0 && since() > r.endAt+r.even+time.Second {
			break // and it has stayed so
		}
		select {
		case <-homeward:
			home = since() > r.endAt+minWatch
		default:
		}
		if home && r.even < 0 && c.name != ours && c.name != attached.name {
			break
		}
		pause(ctx, 50*time.Millisecond)
	}
	r.spread = openOn(cluster)
	finished := since()
	l.stop()
	r.open = watcher.stop()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}

	r.samples, r.errors, r.driver = l.samples, l.errors, p.stats()
	r.sort()
	r.countDials(accepts(cluster, l.begin), finished)
	r.lowest = s.conns * 2
	for _, o := range r.open {
		if o.at >= r.rollAt && o.at < r.endAt {
			r.lowest = min(r.lowest, sum(o.nodes))
		}
	}
	return r, nil
}

// sort tells the operations apart: steady, or of the roll, which they are if they have met it at all.
func (r *run) sort() {
	r.ops, r.failed, r.steady, r.roll = 0, 0, nil, nil
	for _, x := range r.samples {
		r.ops++
		if x.failed {
			r.failed++
		}
		switch {
		case x.at >= r.steadyAt && x.end() < r.rollAt:
			r.steady = append(r.steady, x.took)
		case x.end() >= r.rollAt && x.at < r.endAt:
			r.roll = append(r.roll, x.took)
		}
	}
	slices.Sort(r.steady)
	slices.Sort(r.roll)
	r.steadyFor = r.rollAt - r.steadyAt
}

// drainOne drains and restarts one node.
func drainOne(ctx context.Context, s scenario, c *crdbdraintest.Cluster, n *crdbdraintest.Node, l *load) (d drain, err error) {
	since := func() time.Duration { return time.Since(l.begin) }
	d.node, d.held, d.start = n.ID(), n.Stats().Open, since()
	result := n.Drain(ctx)
	if result.Err != nil {
		return d, result.Err
	}
	d.end = since()
	d.took, d.lost = result.Duration, result.LostIdle+result.LostBusy
	d.windowRemaining = s.window() - result.InitialWait - result.Connections
	if !pause(ctx, s.linger) {
		return d, ctx.Err()
	}
	d.down = since()
	n.Stop()
	if s.burst > 0 {
		l.burst(s.burst)
	}
	if !pause(ctx, s.down) {
		return d, ctx.Err()
	}
	n.Start()
	d.up = since()
	for !c.LoadBalancer().Up(n.ID()) {
		if !pause(ctx, 10*time.Millisecond) {
			return d, ctx.Err()
		}
	}
	d.back = since()
	return d, nil
}

// countDials sorts the dials by what they were for.
func (r *run) countDials(dials []time.Duration, finished time.Duration) {
	for _, t := range dials {
		switch {
		case t < r.steadyAt || t > finished:
		case t < r.rollAt:
			r.steadyDials++
		case slices.ContainsFunc(r.drains, func(d drain) bool { return t >= d.start && t < d.up }):
			r.rollDials++
		default:
			r.homeDials++
		}
	}
	for i := range r.drains {
		d := &r.drains[i]
		first := 0
		for last, t := range dials {
			if t < d.start || t > d.end {
				first = last + 1
				continue
			}
			for dials[first] < t-100*time.Millisecond {
				first++
			}
			d.busiest100 = max(d.busiest100, last-first+1)
		}
	}
}

// accepts is when the nodes accepted a connection.
func accepts(c *crdbdraintest.Cluster, begin time.Time) (dials []time.Duration) {
	for _, t := range c.Stats().Dials {
		dials = append(dials, t.Sub(begin))
	}
	slices.Sort(dials)
	return dials
}

// openOn is the connections on each node.
func openOn(c *crdbdraintest.Cluster) (open []int) {
	for _, n := range c.Nodes() {
		open = append(open, n.Stats().Open)
	}
	return open
}

// evenWithin is how far from its share a node's connections may be.
const evenWithin = 0.25

func isEven(open []int) bool {
	share := float64(sum(open)) / float64(len(open))
	for _, n := range open {
		if float64(n) < share*(1-evenWithin) || float64(n) > share*(1+evenWithin) {
			return false
		}
	}
	return true
}

func sum(list []int) (total int) {
	for _, n := range list {
		total += n
	}
	return total
}

// fill opens n connections, so that the pool holds n. It dials 32 at a time, and half as many more when one pool is
// filled while others are.
func fill(ctx context.Context, p pool, n int) error {
	var (
		wg      sync.WaitGroup
		mu      sync.Mutex
		held    []func()
		failure error
	)
	turns := make(chan struct{}, 32)
	for range n {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			release, err := p.hold(ctx)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failure = err
				return
			}
			held = append(held, release)
		})
	}
	wg.Wait()
	for _, release := range held {
		release()
	}
	return failure
}

// openWatcher samples the connections per node.
type openWatcher struct {
	end  chan struct{}
	done chan struct{}
	once sync.Once
	seen []openConn
}

func watchOpen(c *crdbdraintest.Cluster, begin time.Time) *openWatcher {
	w := &openWatcher{end: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(w.done)
		t := time.NewTicker(100 * time.Millisecond)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				w.seen = append(w.seen, openConn{time.Since(begin), openOn(c)})
			case <-w.end:
				return
			}
		}
	}()
	return w
}

func (w *openWatcher) stop() []openConn {
	w.once.Do(func() { close(w.end) })
	<-w.done
	return w.seen
}
