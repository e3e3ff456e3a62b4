package crdbdrain

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// lockedBuffer collects a log.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) bytes() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Clone(l.b.Bytes())
}

func (l *lockedBuffer) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// lines returns the lines that contain text.
func (l *lockedBuffer) lines(text string) (with []string) {
	for line := range strings.Lines(string(l.bytes())) {
		if strings.Contains(line, text) {
			with = append(with, line)
		}
	}
	return with
}

// meter is an OpenTelemetry SDK that is read by hand.
type meter struct {
	*sdkmetric.MeterProvider
	reader *sdkmetric.ManualReader
}

func newMeter(t testing.TB) meter {
	t.Helper()
	r := sdkmetric.NewManualReader()
	p := sdkmetric.NewMeterProvider(sdkmetric.WithReader(r))
	t.Cleanup(func() { _ = p.Shutdown(context.Background()) })
	return meter{p, r}
}

// point is one series of one metric.
type point struct {
	attrs attribute.Set
	value float64 // of a histogram: how many measurements
	sum   float64 // of a histogram
}

// series is one metric as an exporter sees it.
type series struct {
	kind, unit string
	text       string
	points     []point
}

func (m meter) read(t testing.TB) map[string]series {
	t.Helper()
	var rm metricdata.ResourceMetrics
	if err := m.reader.Collect(context.Background(), &rm); err != nil {
		t.Fatal(err)
	}
	all := make(map[string]series)
	for _, sm := range rm.ScopeMetrics {
		if sm.Scope.Name != scope {
			t.Errorf("scope %q", sm.Scope.Name)
		}
		for _, m := range sm.Metrics {
			if _, twice := all[m.Name]; twice {
				t.Errorf("%s comes twice", m.Name)
			}
			s := series{unit: m.Unit, text: m.Description}
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				s.kind = "up-down counter"
				if d.IsMonotonic {
					s.kind = "counter"
				}
				for _, p := range d.DataPoints {
					s.points = append(s.points, point{attrs: p.Attributes, value: float64(p.Value)})
				}
			case metricdata.Gauge[int64]:
				s.kind = "gauge"
				for _, p := range d.DataPoints {
					s.points = append(s.points, point{attrs: p.Attributes, value: float64(p.Value)})
				}
			case metricdata.Histogram[float64]:
				s.kind = "histogram"
				for _, p := range d.DataPoints {
					s.points = append(s.points, point{attrs: p.Attributes, value: float64(p.Count), sum: p.Sum})
				}
			default:
				t.Errorf("%s is a %T", m.Name, m.Data)
			}
			all[m.Name] = s
		}
	}
	return all
}

// total sums the points that have all the attributes given, as key=value.
func (s series) total(attrs ...string) (sum float64) {
points:
	for _, p := range s.points {
		for _, a := range attrs {
			k, v, _ := strings.Cut(a, "=")
			if got, ok := p.attrs.Value(attribute.Key(k)); !ok || got.String() != v {
				continue points
			}
		}
		sum += p.value
	}
	return sum
}

// metricTable is design section 6: names, kinds, units and every value that an attribute may have. A value in slashes is a
// pattern.
var metricTable = map[string]struct {
	kind, unit string
	attrs      map[string][]string
	zeros      int // series that are exported as zero from the start
}{
	"crdbdrain.node.count":             {"gauge", "{node}", map[string][]string{"state": {"active", "draining", "decommissioning"}, "crdbdrain.cluster": {clusterLabel}}, 0},
	"crdbdrain.connection.count":       {"up-down counter", "{connection}", map[string][]string{"node.state": {"active", "draining", "unknown"}, "crdbdrain.cluster": {clusterLabel}}, 0},
	"crdbdrain.connection.node":        {"gauge", "{connection}", map[string][]string{"node.id": {`/[0-9]+/`}, "crdbdrain.cluster": {clusterLabel}}, 0},
	"crdbdrain.connection.culled":      {"counter", "{connection}", map[string][]string{"point": pointNames[:], "reason": reasonNames[:], "observed": {"true", "false"}}, len(pointNames) * len(reasonNames) * 2},
	"crdbdrain.connection.lost":        {"counter", "{connection}", map[string][]string{"state": {"idle", "active"}}, 2},
	"crdbdrain.cull.throttled":         {"counter", "{cull}", map[string][]string{"point": pointNames[:]}, len(pointNames)},
	"crdbdrain.statement.rerun":        {"counter", "{statement}", map[string][]string{"kind": {"begin", "statement", "prepare"}}, 3},
	"crdbdrain.dial.refused":           {"counter", "{dial}", map[string][]string{"sqlstate": {"57P01", "53300", "other"}}, 3},
	"crdbdrain.dial.steered":           {"counter", "{dial}", nil, 1},
	"crdbdrain.source.state":           {"gauge", "", map[string][]string{"source": {"instances", "gossip", "readiness", "errors", "feed"}, "crdbdrain.cluster": {clusterLabel}}, 0},
	"crdbdrain.poll.duration":          {"histogram", "s", map[string][]string{"source": {"instances", "gossip", "readiness", "feed"}, "error.type": {`/[0-9A-Z]{2}/`, "other"}}, 0},
	"crdbdrain.drain.duration":         {"histogram", "s", map[string][]string{"outcome": {"clean", "forced"}}, 0},
	"crdbdrain.spare.count":            {"gauge", "{connection}", map[string][]string{"crdbdrain.cluster": {clusterLabel}}, 0},
	"crdbdrain.connection.limit":       {"gauge", "{connection}", map[string][]string{"crdbdrain.cluster": {clusterLabel}}, 0},
	"crdbdrain.dial.count":             {"gauge", "{dial}", map[string][]string{"crdbdrain.cluster": {clusterLabel}}, 0},
	"crdbdrain.connection.limit.usage": {"gauge", "{connection}", map[string][]string{"crdbdrain.cluster": {clusterLabel}}, 0},
	"crdbdrain.feed.clients":           {"gauge", "{client}", map[string][]string{"crdbdrain.cluster": {clusterLabel}}, 0},
	"crdbdrain.feed.requests":          {"counter", "{request}", map[string][]string{"status": {`/[0-9]{3}/`, "other"}}, 11},
	"crdbdrain.feed.notify.duration":   {"histogram", "s", nil, 0},
	"crdbdrain.connection.rejected":    {"counter", "{connection}", map[string][]string{"crdbdrain.cluster": {clusterLabel}}, 0},
}

const clusterLabel = `/[0-9a-f]{8}|[A-Za-z0-9_.-]+/`

// extra are the metrics of what a pool need not have: a ceiling, a feed.
var extra = []string{
	"crdbdrain.connection.limit", "crdbdrain.connection.limit.usage", "crdbdrain.connection.rejected",
	"crdbdrain.feed.clients", "crdbdrain.feed.requests", "crdbdrain.feed.notify.duration",
}

// check holds what was read against the table (G06).
func checkTable(t testing.TB, all map[string]series) {
	t.Helper()
	for name, s := range all {
		want, ok := metricTable[name]
		if !ok {
			t.Errorf("%s is not in the table", name)
			continue
		}
		if s.kind != want.kind || s.unit != want.unit || s.text == "" {
			t.Errorf("%s: %s in %q, described as %q; want a %s in %q", name, s.kind, s.unit, s.text, want.kind, want.unit)
		}
		for _, p := range s.points {
			for _, kv := range p.attrs.ToSlice() {
				if !slices.ContainsFunc(want.attrs[string(kv.Key)], func(v string) bool { return fits(kv.Value.String(), v) }) {
					t.Errorf("%s has %s=%q", name, kv.Key, kv.Value.String())
				}
			}
		}
	}
}

func fits(value, pattern string) bool {
	if p, ok := strings.CutPrefix(pattern, "/"); ok {
		return regexp.MustCompile(`^(` + strings.TrimSuffix(p, "/") + `)$`).MatchString(value)
	}
	return value == pattern
}

// G06: names, units, kinds and attributes are those of the table, and every counter is there as zero from the first
// connection on, so that its first increase is seen as one.
func TestG06Instruments(t *testing.T) {
	m := newMeter(t)
	c := startCluster(t, crdbdraintest.Config{Memory: true})
	p := openMem(t, c, still, WithMeterProvider(m), WithNodeMetric())
	if all := m.read(t); len(all) != 0 {
		t.Errorf("before the first connection there are %v", slices.Collect(maps.Keys(all)))
	}
	mustExec(t, p, "UPDATE t SET x = 1")
	p.dog(t)
	all := m.read(t)
	checkTable(t, all)
	for name, want := range metricTable {
		s, ok := all[name]
		if !ok && want.kind != "histogram" && !slices.Contains(extra, name) {
			t.Errorf("no %s", name)
		}
		if want.kind != "counter" || !ok {
			continue
		}
		if len(s.points) != want.zeros || s.total() != 0 {
			t.Errorf("%s starts with %d series and a sum of %v, want %d zeros", name, len(s.points), s.total(), want.zeros)
		}
	}
	if n := all["crdbdrain.connection.count"]; n.total("node.state=active") != 1 || n.total() != 1 {
		t.Errorf("one connection is counted as %+v", n.points)
	}
}

// G06, G07: a drain with a window and one without, as metrics, statistics and log lines tell them. They agree with each
// other and with what the server saw.
func TestG07CulledLostAndThrottledAddUp(t *testing.T) {
	t.Parallel()
	m := newMeter(t)
	var log lockedBuffer
	c := startCluster(t, crdbdraintest.Config{Settings: crdbdraintest.Settings{ConnectionsTimeout: time.Hour}})
	c.Grant("app", "VIEWSYSTEMTABLE")
	p := openOn(t, c, "crdbdrain_sources=instances,gossip&crdbdrain_poll_interval=100ms&crdbdrain_window=1h&crdbdrain_cull_stagger=20ms&crdbdrain_spares=0",
		WithMeterProvider(m), WithLogger(log.logger()))
	p.refuge(t, c)
	fill(t, p.DB, 12)

	// With a window: every connection leaves by a cull.
	d := c.Node(1).Drain(t.Context())
	if d.LostIdle+d.LostBusy != 0 {
		t.Fatalf("the drain closed %+v", d)
	}
	within(t, 5*time.Second, "12 culls", func() bool { return p.c.Stats().Culled == 12 })
	within(t, 5*time.Second, "a line for the drain's end", func() bool { return len(log.lines("has left a node")) == 1 })
	all := m.read(t)
	checkTable(t, all)
	if culled := all["crdbdrain.connection.culled"]; culled.total("observed=false", "reason=draining") != 12 || culled.total() != 12 {
		t.Errorf("culled: %+v", culled.points)
	}
	s := p.c.Stats()
	if n := all["crdbdrain.cull.throttled"].total(); n != float64(s.Throttled) || n == 0 {
		t.Errorf("throttled %v times by the metric, %d by the statistics", n, s.Throttled)
	}
	if n := all["crdbdrain.connection.lost"].total() + float64(s.Lost); n != 0 {
		t.Errorf("%v lost", n)
	}
	if dur := all["crdbdrain.drain.duration"]; dur.total("outcome=clean") != 1 || dur.total() != 1 {
		t.Errorf("drain durations: %+v", dur.points)
	}
	if n := all["crdbdrain.connection.count"]; n.total() != 0 {
		t.Errorf("connections: %+v", n.points)
	}
	checkLine(t, &log, "a node is leaving", "level=INFO", "node=1", "reason=draining", "source=instances", "connections=12")
	checkLine(t, &log, "has left a node", "level=INFO", "node=1", "culled=12", "lost=0", "outcome=clean")
	if n := all["crdbdrain.source.state"]; n.total("source=instances") != 1 || n.total("source=gossip") != -2 || n.total("source=errors") != 1 || n.total("source=readiness") != 0 {
		t.Errorf("source states: %+v", n.points)
	}
	if n := all["crdbdrain.poll.duration"]; n.total("source=instances") < 1 || n.total("source=gossip", "error.type=42") != 1 {
		t.Errorf("polls: %+v", n.points)
	}

	// Without one: what the server closes first is lost, and only that.
	before := p.c.Stats()
	c.SetSettings(crdbdraintest.Settings{TransactionsTimeout: 10 * time.Second})
	fill(t, p.DB, 12) // on node 2
	d = c.Node(2).Drain(t.Context())
	mustExec(t, p, "UPDATE t SET x = 1") // the first look at one of them tells of all
	within(t, 10*time.Second, "12 connections culled or lost", func() bool {
		s := p.c.Stats()
		return s.Culled+s.Lost-before.Culled-before.Lost >= 12
	})
	within(t, 5*time.Second, "a second line for a drain's end", func() bool { return len(log.lines("has left a node")) == 2 })
	s = p.c.Stats()
	// The server may have closed the watchdog's own connection as well, and spares of the drain before.
	if others := d.LostIdle + d.LostBusy - int(s.Lost-before.Lost); others < 0 || others > 1+p.c.cfg.spares || s.Culled+s.Lost-before.Culled-before.Lost != 12 {
		t.Errorf("%+v after %+v; the server closed %d idle and %d busy of 12 connections", s, before, d.LostIdle, d.LostBusy)
	}
	all = m.read(t)
	checkTable(t, all)
	if n := all["crdbdrain.connection.lost"]; n.total() != float64(s.Lost) || n.total("state=idle") < 1 {
		t.Errorf("lost: %+v; %+v", n.points, s)
	}
	if n := all["crdbdrain.drain.duration"]; n.total("outcome=forced") != 1 || n.total("outcome=clean") != 1 {
		t.Errorf("drain durations: %+v", n.points)
	}
	if n := all["crdbdrain.statement.rerun"].total(); n != float64(s.Rerun) {
		t.Errorf("rerun %v times by the metric, %d by the statistics", n, s.Rerun)
	}
}

// checkLine wants one line of the log that contains text, and holds all the rest.
func checkLine(t testing.TB, log *lockedBuffer, text string, parts ...string) {
	t.Helper()
	lines := log.lines(text)
	if len(lines) != 1 {
		t.Errorf("%d lines with %q, want 1:\n%s", len(lines), text, log.bytes())
		return
	}
	for _, part := range parts {
		if !slices.Contains(strings.Fields(lines[0]), part) {
			t.Errorf("no %q in %s", part, lines[0])
		}
	}
}

// G01: no node ID labels a metric unless asked for, and then only nodes with a connection now have a series, however many
// there have been.
func TestG01NodeSeriesAreThoseHeldNow(t *testing.T) {
	for _, opts := range [][]Option{nil, {WithNodeMetric()}} {
		m := newMeter(t)
		c := startCluster(t, crdbdraintest.Config{Memory: true})
		p := openMem(t, c, still, append(opts, WithMeterProvider(m))...)
		fill(t, p.DB, 12)
		w := p.dog(t)
		nodes := func() (ids []string) {
			for _, pt := range m.read(t)["crdbdrain.connection.node"].points {
				id, _ := pt.attrs.Value("node.id")
				ids = append(ids, id.String())
			}
			slices.Sort(ids)
			return ids
		}
		want := func(ids ...string) {
			t.Helper()
			if opts == nil {
				ids = nil
			}
			if got := nodes(); !slices.Equal(got, ids) {
				t.Errorf("series for nodes %v, want %v", got, ids)
			}
		}
		w.mu.Lock()
		var held []string
		for id, n := range w.nodes {
			if len(n.held) > 0 {
				held = append(held, fmt.Sprint(id))
			}
		}
		w.mu.Unlock()
		slices.Sort(held)
		want(held...)
		// Autoscaling: thousands of nodes come and go.
		for id := nodeID(100); id < 5100; id++ {
			w.remove(paperConn(p.c, w, id))
		}
		want(held...)
		last := paperConn(p.c, w, 9999)
		want(append(slices.Clone(held), "9999")...)
		w.remove(last)
		for name, s := range m.read(t) {
			if len(s.points) > 50 {
				t.Errorf("%s has %d series", name, len(s.points))
			}
		}
		p.DB.Close()
		if s := m.read(t)["crdbdrain.connection.node"]; len(s.points) > 0 {
			t.Errorf("after Close: %+v", s.points)
		}
	}
}

// F12, G02: opening again and again leaves nothing behind: not with pgx, not in the registry, not with the meter.
func TestG02OpeningAgainAndAgainLeavesNothing(t *testing.T) {
	m := newMeter(t)
	c := startCluster(t, crdbdraintest.Config{Memory: true, Nodes: 1})
	cycle := func(n int) {
		for i := range n {
			p := openMem(t, c, still, WithMeterProvider(m))
			if i%10 == 0 {
				mustExec(t, p, "UPDATE t SET x = 1")
			}
			p.DB.Close()
			if _, err := theDriver.OpenConnector(c.DSN()); err != nil {
				t.Fatal(err)
			}
		}
	}
	inUse := func() uint64 {
		runtime.GC()
		runtime.GC()
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	sizes := func() (dogs, sets, watched int) {
		registry.mu.Lock()
		defer registry.mu.Unlock()
		all.mu.Lock()
		defer all.mu.Unlock()
		for _, in := range all.of {
			in.mu.Lock()
			watched += len(in.watchdogs)
			in.mu.Unlock()
		}
		return len(registry.of), len(all.of), watched
	}
	cycle(100)
	dogs, sets, watched := sizes()
	before := inUse()
	cycle(1000)
	after := inUse()
	if d, s, w := sizes(); d != dogs || s != sets || w != watched {
		t.Errorf("%d watchdogs, %d sets of instruments, %d watchdogs observed; before 1000 opens: %d, %d, %d", d, s, w, dogs, sets, watched)
	}
	t.Logf("heap: %d bytes, after 1000 more opens %d", before, after)
	// The testing package keeps a cleanup for each; a leaked connector with its config is over 10 kB.
	if after > before+5<<20 {
		t.Errorf("the heap grew from %d to %d bytes in 1000 opens", before, after)
	}
	if s := m.read(t)["crdbdrain.connection.count"]; s.total() != 0 {
		t.Errorf("after every Close: %+v", s.points)
	}
}

// Two connectors with meters of their own share a watchdog: each meter sees it for as long as its connector is open.
func TestG02EachMeterIsLeftWithItsConnector(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Memory: true, Nodes: 1})
	m1, m2 := newMeter(t), newMeter(t)
	p1, p2 := openMem(t, c, still, WithMeterProvider(m1)), openMem(t, c, still, WithMeterProvider(m2))
	mustExec(t, p1, "UPDATE t SET x = 1")
	mustExec(t, p2, "UPDATE t SET x = 1")
	p1.DB.Close()
	if s := m1.read(t)["crdbdrain.connection.count"]; len(s.points) != 0 {
		t.Errorf("the first meter, whose connector is closed, still has %+v", s.points)
	}
	if s := m2.read(t)["crdbdrain.connection.count"]; s.total() != 1 {
		t.Errorf("the second has %+v", s.points)
	}
	p2.DB.Close()
	if s := m2.read(t)["crdbdrain.connection.count"]; len(s.points) != 0 {
		t.Errorf("after Close the second has %+v", s.points)
	}
}

// G05: an hour of failing polls is one line at its beginning and one at its end; every poll is measured.
func TestG05AnHourOfFailingPollsIsOneLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMeter(t)
		var log lockedBuffer
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true, Nodes: 2})
		defer c.Close()
		c.Grant("app", "admin")
		p := openMem(t, c, "crdbdrain_sources=instances,gossip", WithMeterProvider(m), WithLogger(log.logger()))
		defer p.DB.Close()
		fill(t, p.DB, 4)
		time.Sleep(time.Minute)
		if b := log.bytes(); len(b) > 0 {
			t.Errorf("a minute without trouble: %s", b)
		}
		fail := crdbdraintest.Faults{Source: func(string) *crdbdraintest.Result {
			return &crdbdraintest.Result{Err: &pgconn.PgError{Code: "40001", Message: "restart transaction"}}
		}}
		for _, n := range c.Nodes() {
			n.SetFaults(fail)
		}
		time.Sleep(time.Hour)
		for _, source := range []string{"instances", "gossip"} {
			checkLine(t, &log, "source="+source, "level=WARN")
			if n := m.read(t)["crdbdrain.poll.duration"].total("source="+source, "error.type=40"); n < 100 || n > 720 {
				t.Errorf("%v failing polls of %s in an hour", n, source)
			}
			if n := m.read(t)["crdbdrain.source.state"].total("source=" + source); n != -1 {
				t.Errorf("state of %s: %v", source, n)
			}
		}
		if n := len(log.lines("")); n != 2 {
			t.Errorf("%d lines in an hour:\n%s", n, log.bytes())
		}
		for _, n := range c.Nodes() {
			n.SetFaults(crdbdraintest.Faults{})
		}
		time.Sleep(2 * time.Minute)
		if n := len(log.lines("works again")); n != 2 {
			t.Errorf("%d lines when the sources work again:\n%s", n, log.bytes())
		}
		if n := len(log.lines("")); n != 4 {
			t.Errorf("%d lines in all:\n%s", n, log.bytes())
		}
	})
}

// I01, I03: texts that come from outside stay outside: no password in a log line; no host, user, message or application
// name in a label; no line that a server could forge.
func TestI01I03NothingForeignInLabelsOrLines(t *testing.T) {
	t.Parallel()
	const canary = "hunter2"
	m := newMeter(t)
	var log lockedBuffer
	c := startCluster(t, crdbdraintest.Config{Password: canary})
	c.Grant("app", "admin")
	forged := "region=a\nlevel=ERROR msg=forged \x1b[31m" + strings.Repeat("ä", 600)
	answers := []crdbdraintest.Result{
		{Err: &pgconn.PgError{Code: "40001", Message: forged, Detail: forged}},
		{Err: &pgconn.PgError{Code: "x\ny canary", Message: forged}},
		{Err: &pgconn.PgError{Code: "99999", Message: forged}},
		{Columns: []string{"a", "b", "c", "d", "e"}, Rows: [][]any{{forged, forged, forged, forged, forged}}},
		{Columns: []string{"node_id", "epoch", "draining", "membership", "is_live"}, Rows: [][]any{{int64(1), int64(1), false, forged, true}}},
	}
	p := open(t, c.DSN(), "application_name=appcanary&crdbdrain_sources=instances,gossip&crdbdrain_poll_interval=100ms&crdbdrain_poll_timeout=500ms",
		WithMeterProvider(m), WithLogger(log.logger()))
	fill(t, p.DB, 6)
	failing := func() float64 {
		n := 0.0
		for _, pt := range m.read(t)["crdbdrain.poll.duration"].points {
			if pt.attrs.HasValue("error.type") {
				n += pt.value
			}
		}
		return n
	}
	w := p.c.watchdog.Load()
	for _, a := range answers {
		for _, n := range c.Nodes() {
			n.SetFaults(crdbdraintest.Faults{Source: func(string) *crdbdraintest.Result { return &a }})
		}
		w.poke()
		n := failing()
		within(t, 10*time.Second, "a failing poll", func() bool { return failing() > n })
		for _, n := range c.Nodes() {
			n.SetFaults(crdbdraintest.Faults{})
		}
		w.unfail()
		n = m.read(t)["crdbdrain.poll.duration"].total()
		within(t, 10*time.Second, "a poll that works", func() bool { return m.read(t)["crdbdrain.poll.duration"].total()-failing() > n-failing() })
	}
	for _, n := range c.Nodes() {
		n.Hang(true)
	}
	n := failing()
	within(t, 10*time.Second, "polls that hang", func() bool { return failing() > n })
	for _, n := range c.Nodes() {
		n.Hang(false)
		n.Kill()
	}
	n = failing()
	within(t, 10*time.Second, "polls that are refused", func() bool { return failing() > n })

	out := string(log.bytes())
	if len(log.lines("source fails")) == 0 {
		t.Error("no source has failed: the test shows nothing")
	}
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, "time=") || strings.Contains(line, "\x1b") || len(line) > 1200 {
			t.Errorf("a forged or endless line: %q", line)
		}
	}
	for _, secret := range []string{canary, "appcanary", "RuntimeParams", "&{", "0x"} {
		if strings.Contains(out, secret) {
			t.Errorf("%q in the log:\n%s", secret, out)
		}
	}
	all := m.read(t)
	checkTable(t, all)
	for name, s := range all {
		for _, pt := range s.points {
			for _, kv := range pt.attrs.ToSlice() {
				for _, foreign := range []string{canary, "canary", "127.0.0.1", "localhost", "forged", "defaultdb", "\n"} {
					if strings.Contains(kv.Value.String(), foreign) {
						t.Errorf("%s has the label %s=%q", name, kv.Key, kv.Value.String())
					}
				}
			}
		}
	}
}

// unfail makes every source due now, as its backoff would in a while.
func (w *watchdog) unfail() {
	w.mu.Lock()
	for id := range w.sources {
		w.sources[id].due = time.Time{}
		clear(w.sources[id].denied)
	}
	w.mu.Unlock()
	w.poke()
}

// The last words of log lines: redact makes one line of any text, and never cuts a character.
func TestI03RedactedErrorsAreOneLine(t *testing.T) {
	for _, text := range []string{"a\nb", "a\r\n\tb", "a\u0085b", "a\u2028b", "x" + strings.Repeat("ä", 400), "a\xffb", "a\x00b", ""} {
		s := redact(fmt.Errorf("%s", text))
		if strings.ContainsAny(s, "\n\r\u0085\u2028") || len(s) > 512 || !isUTF8(s) {
			t.Errorf("%q becomes %q", text, s)
		}
	}
}

func isUTF8(s string) bool { return strings.ToValidUTF8(s, "") == s }
