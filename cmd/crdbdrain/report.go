package main

import (
	"context"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/crdbdrain/crdbdrain/internal/chart"
)

// report is what a demonstration has shown.
type report struct {
	workers, conns int
	scenarios      []scenarioResult
}

type scenarioResult struct {
	scenario
	drivers []*result // in the order of drivers
}

// result is what one driver has seen in one scenario, or in all of them.
type result struct {
	driver              string
	ops                 int64
	errors              map[string]int64 // by code
	lost, culled, rerun int64
	drains              []time.Duration
	roll                time.Duration   // all nodes
	steady, rolling     []time.Duration // latencies, sorted
	perNode             map[string]int

	// For the picture, counted from the load's begin.
	samples []chart.Sample
	shown   []chart.Drain
	open    []chart.Open
}

func newResult(driver string) *result {
	return &result{driver: driver, errors: make(map[string]int64), perNode: make(map[string]int)}
}

func (r *result) failed() int64 {
	var n int64
	for _, k := range r.errors {
		n += k
	}
	return n
}

// total sums a driver's results over the scenarios. The connections per node are the last one's: each scenario has a
// cluster of its own.
func (r *report) total(i int) *result {
	sum := newResult(drivers[i])
	for _, s := range r.scenarios {
		d := s.drivers[i]
		sum.ops += d.ops
		for code, n := range d.errors {
			sum.errors[code] += n
		}
		sum.lost += d.lost
		sum.culled += d.culled
		sum.rerun += d.rerun
		sum.drains = append(sum.drains, d.drains...)
		sum.roll += d.roll
		sum.steady = append(sum.steady, d.steady...)
		sum.rolling = append(sum.rolling, d.rolling...)
		sum.perNode = d.perNode
	}
	slices.Sort(sum.steady)
	slices.Sort(sum.rolling)
	return sum
}

// quantile returns the smallest of the sorted values that at least the share q of them does not exceed (nearest rank);
// 0 if there is none.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(math.Ceil(q*float64(len(sorted)) - 1e-9)) // 0.999 × 1000 is a little more than 999
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// quantiles are those that are reported. The maximum is the last.
var quantiles = []struct {
	name string
	q    float64
}{{"p50", .5}, {"p99", .99}, {"p99.9", .999}, {"max", 1}}

// errorCode names an error: its SQLSTATE, or a few fixed words. An error that is several is called by the first of
// these that it has.
func errorCode(err error) string {
	var pgErr *pgconn.PgError
	var netErr net.Error
	switch {
	case errors.As(err, &pgErr):
		return pgErr.Code
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return "unexpected EOF"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "connection reset"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.Is(err, driver.ErrBadConn):
		return "bad connection"
	case errors.Is(err, pgconn.ErrConnClosed):
		return "closed connection"
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &netErr) && netErr.Timeout():
		return "timeout"
	}
	return "other"
}

// The JSON's shape. What reads it: .ci/checkdemo.go, and whoever draws it.
type (
	jsonReport struct {
		Drivers   []jsonDriver   `json:"drivers"`
		Scenarios []jsonScenario `json:"scenarios"`
	}
	jsonScenario struct {
		Name    string       `json:"name"`
		Drivers []jsonDriver `json:"drivers"`
	}
	jsonDriver struct {
		Driver             string           `json:"driver"`
		Ops                int64            `json:"ops"`
		Errors             int64            `json:"errors"`
		ErrorsByCode       map[string]int64 `json:"errors_by_code"`
		Lost               int64            `json:"lost"`
		Culled             int64            `json:"culled"`
		Rerun              int64            `json:"rerun"`
		DrainSeconds       []float64        `json:"drain_seconds"`
		RollSeconds        float64          `json:"roll_seconds"`
		SteadyMS           jsonLatency      `json:"steady_ms"`
		RollMS             jsonLatency      `json:"roll_ms"`
		ConnectionsPerNode map[string]int   `json:"connections_per_node"`
	}
	jsonLatency struct {
		P50  float64 `json:"p50"`
		P99  float64 `json:"p99"`
		P999 float64 `json:"p99.9"`
		Max  float64 `json:"max"`
	}
)

// json is the report as one line.
func (r *report) json() (string, error) {
	out := jsonReport{Drivers: []jsonDriver{}, Scenarios: []jsonScenario{}}
	for i := range drivers {
		out.Drivers = append(out.Drivers, r.total(i).json())
	}
	for _, s := range r.scenarios {
		js := jsonScenario{Name: s.name}
		for _, d := range s.drivers {
			js.Drivers = append(js.Drivers, d.json())
		}
		out.Scenarios = append(out.Scenarios, js)
	}
	line, err := json.Marshal(out)
	if err != nil {
		return "", err
	}
	return string(line) + "\n", nil
}

func (r *result) json() jsonDriver {
	seconds := make([]float64, 0, len(r.drains))
	for _, d := range r.drains {
		seconds = append(seconds, round(d.Seconds()))
	}
	latency := func(sorted []time.Duration) jsonLatency {
		ms := func(q float64) float64 { return round(milliseconds(quantile(sorted, q))) }
		return jsonLatency{P50: ms(.5), P99: ms(.99), P999: ms(.999), Max: ms(1)}
	}
	return jsonDriver{
		Driver: r.driver, Ops: r.ops, Errors: r.failed(), ErrorsByCode: r.errors,
		Lost: r.lost, Culled: r.culled, Rerun: r.rerun, DrainSeconds: seconds, RollSeconds: round(r.roll.Seconds()),
		SteadyMS: latency(r.steady), RollMS: latency(r.rolling), ConnectionsPerNode: r.perNode,
	}
}

// round keeps three decimals: microseconds of a millisecond, milliseconds of a second.
func round(f float64) float64 { return math.Round(f*1000) / 1000 }

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// text is the report as a table, and in words.
func (r *report) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\nEvery node drained and restarted under load (%d workers, %d connections)\n\n", r.workers, r.conns)
	b.WriteString(r.table())
	b.WriteByte('\n')
	for _, p := range r.words() {
		b.WriteString(wrap(p, 79))
	}
	return b.String()
}

// row is a line of the table: a label, and a cell for each column.
type row struct {
	label string
	cells []string
}

func (r *report) table() string {
	var columns []*result
	top := row{}
	for _, s := range r.scenarios {
		columns = append(columns, s.drivers...)
		top.cells = append(top.cells, s.title)
	}
	each := func(label string, cell func(*result) string) row {
		line := row{label: label}
		for _, c := range columns {
			line.cells = append(line.cells, cell(c))
		}
		return line
	}
	onlyDriver := func(n func(*result) int64) func(*result) string {
		return func(c *result) string {
			if c.driver == driverPgx {
				return "-"
			}
			return thousands(n(c))
		}
	}
	rows := []row{
		each("", func(c *result) string { return c.driver }),
		each("operations", func(c *result) string { return thousands(c.ops) }),
		each("errors", func(c *result) string { return thousands(c.failed()) }),
	}
	for _, code := range r.codes() {
		rows = append(rows, each("  "+code, func(c *result) string { return thousands(c.errors[code]) }))
	}
	rows = append(rows,
		each("lost connections", func(c *result) string { return thousands(c.lost) }),
		each("culled connections", onlyDriver(func(c *result) int64 { return c.culled })),
		each("requests run again", onlyDriver(func(c *result) int64 { return c.rerun })),
	)
	drains := 0
	for _, c := range columns {
		drains = max(drains, len(c.drains))
	}
	for i := range drains {
		rows = append(rows, each(fmt.Sprintf("drain of node %d, s", i+1), func(c *result) string {
			if i >= len(c.drains) {
				return "-"
			}
			return strconv.FormatFloat(c.drains[i].Seconds(), 'f', 2, 64)
		}))
	}
	for _, phase := range []struct {
		name string
		of   func(*result) []time.Duration
	}{
		{"steady", func(c *result) []time.Duration { return c.steady }},
		{"roll", func(c *result) []time.Duration { return c.rolling }},
	} {
		for _, q := range quantiles {
			rows = append(rows, each(fmt.Sprintf("%s %s, ms", phase.name, q.name), func(c *result) string {
				return strconv.FormatFloat(milliseconds(quantile(phase.of(c), q.q)), 'f', 1, 64)
			}))
		}
	}
	rows = append(rows, each("connections per node", func(c *result) string {
		var counts []string
		for _, id := range slices.Sorted(maps.Keys(c.perNode)) {
			counts = append(counts, strconv.Itoa(c.perNode[id]))
		}
		return strings.Join(counts, "/")
	}))
	return render(top, rows)
}

// codes are all codes of errors, the most frequent first.
func (r *report) codes() []string {
	sum := make(map[string]int64)
	for i := range drivers {
		for code, n := range r.total(i).errors {
			sum[code] += n
		}
	}
	return slices.SortedFunc(maps.Keys(sum), func(a, b string) int {
		if sum[a] != sum[b] {
			return int(sum[b] - sum[a])
		}
		return strings.Compare(a, b)
	})
}

// render aligns the rows: labels to the left, cells to the right. Each title of top stands over two columns.
func render(top row, rows []row) string {
	const gap = 2
	label := 0
	var widths []int
	for _, r := range rows {
		label = max(label, utf8.RuneCountInString(r.label))
		for i, cell := range r.cells {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for i, title := range top.cells {
		missing := utf8.RuneCountInString(title) - widths[2*i] - gap - widths[2*i+1]
		widths[2*i] += max(missing, 0)
	}
	var b strings.Builder
	line := func(l row, span int) {
		fmt.Fprintf(&b, "%-*s", label, l.label)
		for i, cell := range l.cells {
			width := 0
			for _, w := range widths[i*span : (i+1)*span] {
				width += gap + w
			}
			if i*span%2 == 0 {
				width += gap // a wider gap before each pair
			}
			fmt.Fprintf(&b, "%*s", width, cell)
		}
		b.WriteByte('\n')
	}
	line(top, 2)
	for _, r := range rows {
		line(r, 1)
	}
	return b.String()
}

// words says what is to be seen.
func (r *report) words() []string {
	var all []string
	for _, s := range r.scenarios {
		p, c := s.drivers[0], s.drivers[1]
		lost, left := fmt.Sprintf("%d of pgx's connections and %d of crdbdrain's", p.lost, c.lost), ""
		if c.lost == 0 {
			lost, left = fmt.Sprintf("%d of pgx's connections and none of crdbdrain's", p.lost), ", which had left in time"
		}
		saw := fmt.Sprintf("the application saw %s with pgx and %s with crdbdrain", errorsSeen(p), errorsSeen(c))
		if s.window > 0 {
			all = append(all, fmt.Sprintf(
				"With a window the server closed %s%s; %s. A drain is over as soon as the last connection is gone: after %.1f s on average with pgx, %.1f s with crdbdrain.",
				lost, left, saw, mean(p.drains), mean(c.drains)))
			continue
		}
		all = append(all, fmt.Sprintf(
			"With the server's defaults nobody can leave in time: it closed %s; %s, which hands out no connection that the server has closed, and runs again what the server has said it did not execute (%d this time).",
			lost, saw, c.rerun))
	}
	return append(all, "The cluster is simulated (package crdbdraintest, made from CockroachDB's source and documentation): what it shows is the order and the messages of a drain, not CockroachDB's speed.")
}

// svg is the report as a picture: a panel for each driver in each scenario.
func (r *report) svg() string {
	p := chart.Picture{
		Title: "A rolling restart of three nodes, with pgx and with crdbdrain",
		Foot:  "Simulated clusters. Both drivers at the same time on one machine: a bump that both show is the machine’s.",
	}
	for _, s := range r.scenarios {
		for _, d := range s.drivers {
			p.Runs = append(p.Runs, chart.Run{
				Title:  d.driver + ", " + s.title,
				Words:  fmt.Sprintf("%s in %s operations; %s", errorsSeen(d), thousands(d.ops), closedByServer(d.lost)),
				Bad:    d.failed() > 0,
				Drains: d.shown, Samples: d.samples, Open: d.open,
			})
		}
	}
	return p.SVG()
}

func errorsSeen(r *result) string {
	switch n := r.failed(); n {
	case 0:
		return "no error"
	case 1:
		return "1 error"
	default:
		return thousands(n) + " errors"
	}
}

func mean(all []time.Duration) float64 {
	if len(all) == 0 {
		return 0
	}
	var sum time.Duration
	for _, d := range all {
		sum += d
	}
	return sum.Seconds() / float64(len(all))
}

// thousands writes 12345 as 12,345.
func thousands(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// wrap breaks a paragraph into lines.
func wrap(text string, width int) string {
	var b strings.Builder
	used := 0
	for _, word := range strings.Fields(text) {
		n := utf8.RuneCountInString(word)
		switch {
		case used == 0:
		case used+1+n > width:
			b.WriteByte('\n')
			used = 0
		default:
			b.WriteByte(' ')
			used++
		}
		b.WriteString(word)
		used += n
	}
	b.WriteByte('\n')
	return b.String()
}
