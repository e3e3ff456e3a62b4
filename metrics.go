package crdbdrain

import (
	"context"
	"fmt"
	"hash/fnv"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

const scope = "github.com/crdbdrain/crdbdrain"

// The label values. Every one is from a fixed set.
type (
	cullPoint  uint8
	cullReason uint8
	lostState  uint8
	rerunKind  uint8
)

const (
	pointReturn cullPoint = iota
	pointCheckout
	pointSweep
	numPoints
)

const (
	reasonDraining cullReason = iota
	reasonDecommissioning
	reasonRebalance
	reasonTTL
	numReasons
)

const (
	lostIdle lostState = iota
	lostActive
	numLostStates
)

const (
	rerunBegin rerunKind = iota
	rerunStatement
	rerunPrepare
	numRerunKinds
)

var (
	pointNames  = [numPoints]string{"return", "checkout", "sweep"}
	reasonNames = [numReasons]string{"draining", "decommissioning", "rebalance", "ttl"}
	lostNames   = [numLostStates]string{"idle", "active"}
	rerunNames  = [numRerunKinds]string{"begin", "statement", "prepare"}
	// refusedStates are the SQLSTATEs of crdbdrain.dial.refused; any other is "other".
	refusedStates = [...]string{stateAdminShutdown, stateTooManyConnections}
)

// Stats is what a connector has counted since it was made. The metrics have the same numbers by attribute.
type Stats struct {
	Culled    int64 // connections given up because their node was marked
	Observed  int64 // would have been culled (crdbdrain_mode=observe)
	Lost      int64 // connections that the server closed because its node drained, before they were culled
	Throttled int64 // culls that the pace put off; a connection can be put off many times
	Rerun     int64 // requests run again that the server had not executed
	Refused   int64 // dials that a draining node refused
	Moved     int64 // connections replaced in calm times: the way home after a drain, and crdbdrain_ttl
	Steered   int64 // dials made again because the connection landed on a draining node
}

// tally is Stats while it is being counted.
type tally struct {
	culled, observed, lost, throttled, rerun, refused, steered, moved atomic.Int64
}

// Stats returns what the connector has counted. It is safe for concurrent use.
func (c *Connector) Stats() Stats {
	return Stats{
		Culled:    c.tally.culled.Load(),
		Observed:  c.tally.observed.Load(),
		Lost:      c.tally.lost.Load(),
		Throttled: c.tally.throttled.Load(),
		Rerun:     c.tally.rerun.Load(),
		Refused:   c.tally.refused.Load(),
		Moved:     c.tally.moved.Load(),
		Steered:   c.tally.steered.Load(),
	}
}

// instruments is the driver's instruments with one meter provider.
type instruments struct {
	culled, lost, throttled, rerun, refused, steered metric.Int64Counter
	poll, drain                                      metric.Float64Histogram

	// The attributes are made once: a measurement allocates nothing for them.
	culledBy    [numPoints][numReasons][2]metric.MeasurementOption
	lostBy      [numLostStates]metric.MeasurementOption
	throttledBy [numPoints]metric.MeasurementOption
	rerunBy     [numRerunKinds]metric.MeasurementOption

	rejected metric.Int64Counter
	feed     feedInstruments

	mu        sync.Mutex
	watchdogs map[*watchdog]struct{}    // guarded by mu; what the observable instruments report
	ceilings  map[*ceiling]struct{}     // guarded by mu; those with a limit
	feeds     map[*FeedHandler]struct{} // guarded by mu
}

// all is the instruments of the process, one set for each meter provider.
var all struct {
	mu sync.Mutex
	of map[metric.MeterProvider]*instruments // guarded by mu
}

// instrumentsFor returns the instruments of a provider. It is called when a connector makes its first connection to
// CockroachDB: a pool that never dials, or dials PostgreSQL, makes none.
func instrumentsFor(p metric.MeterProvider) *instruments {
	if !reflect.TypeOf(p).Comparable() {
		return newInstruments(p)
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	in := all.of[p]
	if in == nil {
		in = newInstruments(p)
		if all.of == nil {
			all.of = make(map[metric.MeterProvider]*instruments)
		}
		all.of[p] = in
	}
	return in
}

// newInstruments makes the instruments, and reports every counter as zero. An error of the API leaves a no-op instrument.
func newInstruments(p metric.MeterProvider) *instruments {
	m := p.Meter(scope)
	in := &instruments{watchdogs: make(map[*watchdog]struct{}), ceilings: make(map[*ceiling]struct{}), feeds: make(map[*FeedHandler]struct{})}
	counter := func(name, unit, description string) metric.Int64Counter {
		c, _ := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
		return c
	}
	seconds := func(name, description string, bounds ...float64) metric.Float64Histogram {
		h, _ := m.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(description), metric.WithExplicitBucketBoundaries(bounds...))
		return h
	}
	in.culled = counter("crdbdrain.connection.culled", "{connection}", "Connections given up because their node was marked.")
	in.lost = counter("crdbdrain.connection.lost", "{connection}", "Connections that the server closed because its node drained, before they were culled.")
	in.throttled = counter("crdbdrain.cull.throttled", "{cull}", "Culls that the pace put off.")
	in.rerun = counter("crdbdrain.statement.rerun", "{statement}", "Requests run again that the server provably did not execute.")
	in.refused = counter("crdbdrain.dial.refused", "{dial}", "Dials that the server refused.")
	in.steered = counter("crdbdrain.dial.steered", "{dial}", "Dials made again because the connection landed on a draining node.")
	in.rejected = counter("crdbdrain.connection.rejected", "{connection}", "Connections that the ceiling refused (crdbdrain_max_connections).")
	in.poll = seconds("crdbdrain.poll.duration", "Duration of one poll of a source.", .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5)
	in.drain = seconds("crdbdrain.drain.duration", "From the first notice of a drain to the last connection gone.", .01, .1, .5, 1, 2.5, 5, 10, 30, 60, 300, 900)

	ctx := context.Background()
	with := func(kv ...attribute.KeyValue) metric.MeasurementOption {
		return metric.WithAttributeSet(attribute.NewSet(kv...))
	}
	for p, point := range pointNames {
		for r, reason := range reasonNames {
			for o, observed := range []bool{false, true} {
				in.culledBy[p][r][o] = with(attribute.String("point", point), attribute.String("reason", reason), attribute.Bool("observed", observed))
				in.culled.Add(ctx, 0, in.culledBy[p][r][o])
			}
		}
		in.throttledBy[p] = with(attribute.String("point", point))
		in.throttled.Add(ctx, 0, in.throttledBy[p])
	}
	for s, state := range lostNames {
		in.lostBy[s] = with(attribute.String("state", state))
		in.lost.Add(ctx, 0, in.lostBy[s])
	}
	for k, kind := range rerunNames {
		in.rerunBy[k] = with(attribute.String("kind", kind))
		in.rerun.Add(ctx, 0, in.rerunBy[k])
	}
	for _, state := range append(refusedStates[:], "other") {
		in.refused.Add(ctx, 0, metric.WithAttributes(attribute.String("sqlstate", state)))
	}
	in.steered.Add(ctx, 0)
	in.feed.make(m, counter, seconds)

	nodes, _ := m.Int64ObservableGauge("crdbdrain.node.count", metric.WithUnit("{node}"), metric.WithDescription("Nodes known, by state."))
	conns, _ := m.Int64ObservableUpDownCounter("crdbdrain.connection.count", metric.WithUnit("{connection}"), metric.WithDescription("Connections held, by the state of their node."))
	perNode, _ := m.Int64ObservableGauge("crdbdrain.connection.node", metric.WithUnit("{connection}"), metric.WithDescription("Connections held, by node ID (WithNodeMetric)."))
	state, _ := m.Int64ObservableGauge("crdbdrain.source.state", metric.WithDescription("1 ok, 0 off, -1 failing, -2 denied."))
	spare, _ := m.Int64ObservableGauge("crdbdrain.spare.count", metric.WithUnit("{connection}"), metric.WithDescription("Replacements dialled ahead and not yet used."))
	dials, _ := m.Int64ObservableGauge("crdbdrain.dial.count", metric.WithUnit("{dial}"), metric.WithDescription("Dials under way."))
	limit, _ := m.Int64ObservableGauge("crdbdrain.connection.limit", metric.WithUnit("{connection}"), metric.WithDescription("The ceiling (crdbdrain_max_connections)."))
	usage, _ := m.Int64ObservableGauge("crdbdrain.connection.limit.usage", metric.WithUnit("{connection}"), metric.WithDescription("Connections under the ceiling, from their dial on."))
	_, _ = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		in.mu.Lock()
		defer in.mu.Unlock()
		for w := range in.watchdogs {
			w.observe(o, nodes, conns, perNode, state, spare, dials)
		}
		for l := range in.ceilings {
			with := metric.WithAttributeSet(l.attributes)
			o.ObserveInt64(limit, l.limit.Load(), with)
			o.ObserveInt64(usage, l.used.Load(), with)
		}
		in.feed.observe(o, in.feeds)
		return nil
	}, nodes, conns, perNode, state, spare, dials, limit, usage, in.feed.clients)
	return in
}

// watchCeiling makes the gauges report a ceiling, and reports whether they did not yet.
func (in *instruments) watchCeiling(l *ceiling) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	_, known := in.ceilings[l]
	in.ceilings[l] = struct{}{}
	return !known
}

func (in *instruments) unwatchCeiling(l *ceiling) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.ceilings, l)
}

func (in *instruments) watch(w *watchdog) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.watchdogs[w] = struct{}{}
}

func (in *instruments) unwatch(w *watchdog) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.watchdogs, w)
}

// label names the cluster in metrics: as crdbdrain_cluster does, or by a digest; host names do not belong into labels.
func (c *config) label() string {
	if c.cluster != "" {
		return c.cluster
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(c.key))
	return fmt.Sprintf("%08x", h.Sum32())
}

// observe reports what the watchdog knows.
func (w *watchdog) observe(o metric.Observer, nodes, conns, perNode, state, spare, dials metric.Int64Observable) {
	cluster := attribute.String("crdbdrain.cluster", w.cfg.Load().label())
	w.mu.Lock()
	defer w.mu.Unlock()
	of := map[nodeID]*mark{}
	if m := w.marks.Load(); m != nil {
		of = m.of
	}
	known := make(map[nodeID]struct{}, len(w.nodes))
	for id := range of {
		known[id] = struct{}{}
	}
	var held struct{ active, draining, unknown int64 }
	perNodeWanted := false
	spares, dialing := int64(0), int64(0)
	for _, m := range w.members {
		perNodeWanted = perNodeWanted || m.nodeMetric
		spares += int64(m.spares.count.Load())
		dialing += m.dialing.Load()
	}
	o.ObserveInt64(spare, spares, metric.WithAttributes(cluster))
	o.ObserveInt64(dials, dialing, metric.WithAttributes(cluster))
	for id, n := range w.nodes {
		count := int64(len(n.held))
		switch {
		case id == 0 || w.rule.Load() == ruleUnknown:
			held.unknown += count
		case of[id] != nil:
			held.draining += count
		default:
			held.active += count
		}
		if id != 0 && count > 0 {
			known[id] = struct{}{}
			if perNodeWanted {
				o.ObserveInt64(perNode, count, metric.WithAttributes(cluster, attribute.Int64("node.id", int64(id))))
			}
		}
	}
	for id := range w.sources {
		for node := range w.sources[id].nodes {
			known[node] = struct{}{}
		}
	}
	var count struct{ active, draining, decommissioning int64 }
	for id := range known {
		switch mk := of[id]; {
		case mk == nil:
			count.active++
		case mk.decommissioning:
			count.decommissioning++
		default:
			count.draining++
		}
	}
	node := func(n int64, s string) {
		o.ObserveInt64(nodes, n, metric.WithAttributes(cluster, attribute.String("state", s)))
	}
	node(count.active, "active")
	node(count.draining, "draining")
	node(count.decommissioning, "decommissioning")
	conn := func(n int64, s string) {
		o.ObserveInt64(conns, n, metric.WithAttributes(cluster, attribute.String("node.state", s)))
	}
	conn(held.active, "active")
	conn(held.draining, "draining")
	conn(held.unknown, "unknown")
	for _, id := range []sourceID{sourceInstances, sourceGossip, sourceReadiness, sourceFeed} {
		o.ObserveInt64(state, int64(w.sources[id].state), metric.WithAttributes(cluster, attribute.String("source", id.String())))
	}
	o.ObserveInt64(state, int64(sourceOK), metric.WithAttributes(cluster, attribute.String("source", sourceErrors.String())))
}

// instruments returns those of the connector's provider.
func (c *Connector) instruments() *instruments {
	in := c.in.Load()
	if in == nil {
		in = instrumentsFor(c.provider)
		c.in.Store(in)
	}
	return in
}

func (w *watchdog) countCulled(s *session, mk *mark, point cullPoint, observed bool) {
	in := s.connector.instruments()
	if observed {
		s.connector.tally.observed.Add(1)
		in.culled.Add(context.Background(), 1, in.culledBy[point][mk.reason()][1])
		return
	}
	s.connector.tally.culled.Add(1)
	in.culled.Add(context.Background(), 1, in.culledBy[point][mk.reason()][0])
	w.drainCount(s, func(d *drain) { d.culled++ })
}

func (w *watchdog) countMoved(s *session, reason cullReason, point cullPoint) {
	s.connector.tally.moved.Add(1)
	in := s.connector.instruments()
	in.culled.Add(context.Background(), 1, in.culledBy[point][reason][0])
}

func (w *watchdog) countThrottled(s *session, point cullPoint) {
	s.connector.tally.throttled.Add(1)
	in := s.connector.instruments()
	in.throttled.Add(context.Background(), 1, in.throttledBy[point])
}

func (w *watchdog) countLost(s *session, state lostState) {
	s.connector.tally.lost.Add(1)
	in := s.connector.instruments()
	in.lost.Add(context.Background(), 1, in.lostBy[state])
	w.drainCount(s, func(d *drain) { d.lost++ })
}

// stateClass is the class of a SQLSTATE, its first two characters, and "other" where there is none: a server can send
// any text in its place.
func stateClass(state string) string {
	if len(state) != 5 || strings.Trim(state, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ") != "" {
		return "other"
	}
	return state[:2]
}

func (w *watchdog) countPoll(a answer) {
	if a.off != "" || a.source == sourceFeed && a.err == nil {
		return // nothing was asked, or a feed has answered when it had news
	}
	kind := ""
	if a.err != nil {
		kind = stateClass(sqlState(a.err))
	}
	w.mu.Lock()
	var in *instruments
	if len(w.members) > 0 {
		in = w.members[0].instruments()
	}
	w.mu.Unlock()
	if in == nil {
		return
	}
	kv := []attribute.KeyValue{attribute.String("source", a.source.String())}
	if kind != "" {
		kv = append(kv, attribute.String("error.type", kind))
	}
	in.poll.Record(context.Background(), a.took.Seconds(), metric.WithAttributes(kv...))
}

func (c *Connector) countRerun(kind rerunKind) {
	c.tally.rerun.Add(1)
	in := c.instruments()
	in.rerun.Add(context.Background(), 1, in.rerunBy[kind])
}

func (c *Connector) countSteered() {
	c.tally.steered.Add(1)
	c.instruments().steered.Add(context.Background(), 1)
}

// countRefused counts a Connect call's refusals: by a draining node, or with another SQLSTATE.
func (c *Connector) countRefused(a *attempt, err error) {
	state := sqlState(err)
	if len(a.refused) > 0 {
		state = stateAdminShutdown
		c.tally.refused.Add(1)
	}
	if state == "" || c.watchdog.Load() == nil && state != stateAdminShutdown {
		return // not a server's answer, or no server that is known to be CockroachDB
	}
	name := "other"
	for _, s := range refusedStates {
		if s == state {
			name = s
		}
	}
	c.instruments().refused.Add(context.Background(), 1, metric.WithAttributes(attribute.String("sqlstate", name)))
}

// drain is one node's drain as this process sees it.
type drain struct {
	node   nodeID
	source sourceID
	since  time.Time
	mark   *mark
	held   int // connections that had to leave when it was noticed
	left   int // of them still there
	culled int
	lost   int
	done   bool // logged
}

// drainCount counts something of a connection's drain.
func (w *watchdog) drainCount(s *session, count func(*drain)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if d := w.drains[s.stamp()]; d != nil {
		count(d)
	}
}

// drainNoticed is the event that logs a drain's begin. w.mu is held.
func (w *watchdog) drainNoticed(d *drain, mk *mark) event {
	node, source, held, kind := d.node, d.source.String(), d.held, reasonNames[mk.reason()]
	needed, window := time.Duration(held)*w.fleetGap(), w.window()
	return func() {
		w.log.Info("crdbdrain: a node is leaving", "node", uint32(node), "reason", kind, "source", source, "connections", held)
		if needed > window && !mk.decommissioning {
			w.log.Warn("crdbdrain: at the rate that the feed grants the connections do not leave in the window; the server closes the rest",
				"node", uint32(node), "connections", held, "needed", needed, "window", window)
		}
	}
}

// drainOver is the event that logs a drain's end. w.mu is held.
func (w *watchdog) drainOver(d *drain, t time.Time, withdrawn string) event {
	d.done = true
	node, took, culled, lost, left := d.node, t.Sub(d.since), d.culled, d.lost, d.left
	var in *instruments
	if len(w.members) > 0 {
		in = w.members[0].instruments()
	}
	return func() {
		if withdrawn != "" {
			w.log.Info("crdbdrain: a node is no longer leaving", "node", uint32(node), "culled", culled, "lost", lost, "connections", left, "duration", took)
			return
		}
		outcome := "clean"
		if lost > 0 {
			outcome = "forced"
		}
		w.log.Info("crdbdrain: the last connection has left a node", "node", uint32(node), "culled", culled, "lost", lost, "duration", took, "outcome", outcome)
		if in != nil {
			in.drain.Record(context.Background(), took.Seconds(), metric.WithAttributes(attribute.String("outcome", outcome)))
		}
	}
}
