package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// report is what a call of the command has measured.
type report struct {
	runs      int
	scenarios []scenarioResult
}

type scenarioResult struct {
	scenario
	pools []poolResult
}

type poolResult struct {
	contender
	runs []*run
}

func (s *scenarioResult) pool(name string) *poolResult {
	for i := range s.pools {
		if s.pools[i].name == name {
			return &s.pools[i]
		}
	}
	return nil
}

// each is a number of every run.
func (p *poolResult) each(f func(*run) float64) (values []float64) {
	for _, r := range p.runs {
		values = append(values, f(r))
	}
	return values
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	v := slices.Sorted(slices.Values(values))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
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

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func steadyMS(q float64) func(*run) float64 {
	return func(r *run) float64 { return milliseconds(quantile(r.steady, q)) }
}

func rollMS(q float64) func(*run) float64 {
	return func(r *run) float64 { return milliseconds(quantile(r.roll, q)) }
}

func (r *run) lost() (n int) {
	for _, d := range r.drains {
		n += d.lost
	}
	return n
}

// held is the connections that had to move: those on each node when its drain began.
func (r *run) held() (n int) {
	for _, d := range r.drains {
		n += d.held
	}
	return n
}

func (r *run) perHour() float64 { return float64(r.steadyDials) / r.steadyFor.Hours() }

func (p *poolResult) total(f func(*run) int) (n int) {
	for _, r := range p.runs {
		n += f(r)
	}
	return n
}

func (p *poolResult) errors() map[string]int {
	all := make(map[string]int)
	for _, r := range p.runs {
		for code, n := range r.errors {
			all[code] += n
		}
	}
	return all
}

// row is a line of the table.
type row struct {
	label string
	text  func(*poolResult) string
	rolls bool // means nothing where no node is drained
}

func rows() []row {
	med := func(label, format string, f func(*run) float64) row {
		return row{label: label, text: func(p *poolResult) string { return grouped(fmt.Sprintf(format, median(p.each(f)))) }}
	}
	roll := func(label string, text func(*poolResult) string) row { return row{label, text, true} }
	count := func(label string, f func(*run) int) row {
		return row{label: label, text: func(p *poolResult) string { return grouped(fmt.Sprint(p.total(f))) }}
	}
	all := []row{
		count("operations, all runs", func(r *run) int { return r.ops }),
		count("errors, all runs", func(r *run) int { return r.failed }),
		count("lost, all runs", (*run).lost),
		roll("drain of a node, s", func(p *poolResult) string { return fmt.Sprintf("%.2f", median(p.drainSeconds())) }),
		roll("longest", func(p *poolResult) string { return fmt.Sprintf("%.2f", slices.Max(p.drainSeconds())) }),
	}
	for _, q := range quantiles {
		all = append(all, med("steady "+q.name+", ms", "%.1f", steadyMS(q.q)))
	}
	for _, q := range quantiles {
		all = append(all, med("roll "+q.name+", ms", "%.1f", rollMS(q.q)))
	}
	medRoll := func(label string, f func(*run) float64) row {
		return roll(label, med(label, "%.0f", f).text)
	}
	return append(all,
		med("opened per hour, steady", "%.0f", (*run).perHour),
		medRoll("had to move", func(r *run) float64 { return float64(r.held()) }),
		medRoll("opened for it", func(r *run) float64 { return float64(r.rollDials) }),
		medRoll("opened afterwards", func(r *run) float64 { return float64(r.homeDials) }),
		medRoll("fewest open in the roll", func(r *run) float64 { return float64(r.lowest) }),
		roll("even again after, s", func(p *poolResult) string {
			if v := median(p.each(evenSeconds)); !math.IsInf(v, 0) {
				return fmt.Sprintf("%.1f", v)
			}
			return "never"
		}),
		roll("spread then (last run)", func(p *poolResult) string {
			spread := p.runs[len(p.runs)-1].spread
			if len(spread) > 3 {
				return fmt.Sprintf("%d–%d", slices.Min(spread), slices.Max(spread))
			}
			return strings.ReplaceAll(strings.Trim(fmt.Sprint(spread), "[]"), " ", "/")
		}),
	)
}

// evenSeconds is how long it took until every node had its share again; infinite if it never came to that.
func evenSeconds(r *run) float64 {
	if r.even < 0 {
		return math.Inf(1)
	}
	return r.even.Seconds()
}

func (p *poolResult) drainSeconds() (seconds []float64) {
	for _, r := range p.runs {
		for _, d := range r.drains {
			seconds = append(seconds, d.took.Seconds())
		}
	}
	return seconds
}

var quantiles = []struct {
	name string
	q    float64
}{{"p50", .5}, {"p99", .99}, {"p99.9", .999}, {"max", 1}}

// text is a scenario's table.
func (s *scenarioResult) text() string {
	const label, column = 24, 14
	var b strings.Builder
	where := "side by side"
	if s.apart {
		where = "one after the other"
	}
	_, _ = fmt.Fprintf(&b, "\n%s: %s (%s)\n%*s", s.name, s.title, where, label, "")
	for _, p := range s.pools {
		_, _ = fmt.Fprintf(&b, "%*s", column, p.name)
	}
	b.WriteByte('\n')
	for _, r := range rows() {
		_, _ = fmt.Fprintf(&b, "%-*s", label, r.label)
		for i := range s.pools {
			text := "–"
			if p := &s.pools[i]; !r.rolls || p.name != control.name {
				text = r.text(p)
			}
			_, _ = fmt.Fprintf(&b, "%*s", column, text)
		}
		b.WriteByte('\n')
	}
	for i := range s.pools {
		if codes := s.pools[i].errors(); len(codes) > 0 {
			var list []string
			for _, code := range slices.Sorted(maps.Keys(codes)) {
				list = append(list, fmt.Sprintf("%s %d", code, codes[code]))
			}
			_, _ = fmt.Fprintf(&b, "%s's errors: %s\n", s.pools[i].name, strings.Join(list, ", "))
		}
	}
	return b.String()
}

// grouped puts commas between the thousands.
func grouped(n string) string {
	whole, rest, _ := strings.Cut(n, ".")
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if rest != "" {
		return whole + "." + rest
	}
	return whole
}

// The JSON's shape.
type (
	jsonReport struct {
		Runs      int            `json:"runs"`
		Scenarios []jsonScenario `json:"scenarios"`
		Criteria  []finding      `json:"criteria"`
	}
	jsonScenario struct {
		Name  string     `json:"name"`
		Title string     `json:"title"`
		Pools []jsonPool `json:"pools"`
	}
	jsonPool struct {
		Name   string         `json:"name"`
		Errors int            `json:"errors"`
		ByCode map[string]int `json:"errors_by_code"`
		Lost   int            `json:"lost"`
		Runs   []jsonRun      `json:"runs"`
	}
	jsonRun struct {
		Ops          int                `json:"ops"`
		Errors       int                `json:"errors"`
		Drains       []jsonDrain        `json:"drains"`
		SteadyMS     map[string]float64 `json:"steady_ms"`
		RollMS       map[string]float64 `json:"roll_ms"`
		OpenedHourly float64            `json:"opened_per_hour_steady"`
		HadToMove    int                `json:"had_to_move"`
		OpenedRoll   int                `json:"opened_roll"`
		OpenedHome   int                `json:"opened_afterwards"`
		FewestOpen   int                `json:"fewest_open_in_the_roll"`
		EvenSeconds  *float64           `json:"even_again_seconds"` // null: never
		Spread       []int              `json:"connections_per_node"`
	}
	jsonDrain struct {
		Node         int     `json:"node"`
		Held         int     `json:"held"`
		Lost         int     `json:"lost"`
		Seconds      float64 `json:"seconds"`
		Opened100Max int     `json:"most_opened_in_100ms"`
	}
)

// json is the report as one line.
func (r *report) json(findings []finding) (string, error) {
	out := jsonReport{Runs: r.runs, Criteria: findings}
	for _, s := range r.scenarios {
		js := jsonScenario{Name: s.name, Title: s.title}
		for _, p := range s.pools {
			jp := jsonPool{Name: p.name, ByCode: p.errors(), Lost: p.total((*run).lost), Errors: p.total(func(r *run) int { return r.failed })}
			for _, x := range p.runs {
				jp.Runs = append(jp.Runs, x.json())
			}
			js.Pools = append(js.Pools, jp)
		}
		out.Scenarios = append(out.Scenarios, js)
	}
	line, err := json.Marshal(out)
	return string(line) + "\n", err
}

func (r *run) json() jsonRun {
	j := jsonRun{
		Ops: r.ops, Errors: r.failed, SteadyMS: make(map[string]float64), RollMS: make(map[string]float64),
		OpenedHourly: math.Round(r.perHour()), HadToMove: r.held(), OpenedRoll: r.rollDials, OpenedHome: r.homeDials,
		FewestOpen: r.lowest, Spread: r.spread,
	}
	for _, q := range quantiles {
		j.SteadyMS[q.name], j.RollMS[q.name] = round(steadyMS(q.q)(r)), round(rollMS(q.q)(r))
	}
	for _, d := range r.drains {
		j.Drains = append(j.Drains, jsonDrain{d.node, d.held, d.lost, round(d.took.Seconds()), d.busiest100})
	}
	if r.even >= 0 {
		s := round(r.even.Seconds())
		j.EvenSeconds = &s
	}
	return j
}

// round keeps three decimals.
func round(f float64) float64 { return math.Round(f*1000) / 1000 }

// A latency that is over its limit by the median of the runs, but not in all of them, is unclear: the machine's noise is
// then larger than what is asked for. So is one that grew no more than that of a pool where nothing was drained.

type verdict string

const (
	holds   verdict = "holds"
	fails   verdict = "FAILS"
	unclear verdict = "unclear"
)

// finding is a criterion and what became of it.
type finding struct {
	Scenario  string    `json:"scenario"`
	Criterion string    `json:"criterion"`
	Value     float64   `json:"value"`
	Runs      []float64 `json:"runs,omitempty"` // lowest and highest of the runs
	Limit     float64   `json:"limit"`
	Undrained float64   `json:"undrained,omitempty"` // the same, meanwhile, of a pool where nothing was drained
	Verdict   verdict   `json:"verdict"`
}

// atMost is a criterion on every value: the highest counts.
func atMost(scenario, criterion string, limit float64, values []float64) finding {
	f := finding{Scenario: scenario, Criterion: criterion, Value: slices.Max(values), Limit: limit, Verdict: holds}
	if f.Value > limit {
		f.Verdict = fails
	}
	return f.tidy()
}

// medianAtMost is a criterion on the median. value is that, which need not be the median of the values of the runs.
func medianAtMost(scenario, criterion string, limit, value float64, values []float64) finding {
	f := finding{Scenario: scenario, Criterion: criterion, Value: value, Limit: limit, Verdict: holds}
	f.Runs = []float64{slices.Min(values), slices.Max(values)}
	if value > limit {
		f.Verdict = fails
		if f.Runs[0] <= limit {
			f.Verdict = unclear
		}
	}
	return f.tidy()
}

func rollOverSteady(r *run) float64 { return rollMS(.999)(r) / steadyMS(.999)(r) }

// against takes into account what happened meanwhile to a pool where nothing was drained.
func against(quiet *poolResult, f finding) finding {
	if quiet == nil {
		return f
	}
	f.Undrained = round(median(quiet.each(rollMS(.999))) / median(quiet.each(steadyMS(.999))))
	if f.Verdict == fails && f.Undrained*maxSteadyOverPgx > f.Limit {
		f.Verdict = unclear
	}
	return f
}

// tidy makes the numbers fit for JSON.
func (f finding) tidy() finding {
	tidy := func(v float64) float64 {
		if math.IsInf(v, 0) || math.IsNaN(v) {
			return 9999
		}
		return round(v)
	}
	f.Value, f.Limit = tidy(f.Value), tidy(f.Limit)
	for i := range f.Runs {
		f.Runs[i] = tidy(f.Runs[i])
	}
	return f
}

const (
	maxRollOverSteady = 1.5
	maxSteadyOverPgx  = 1.05
	maxOpenedPerMove  = 1.5
	maxHomeSeconds    = 30
	spares            = 2 // crdbdrain_spares
)

// check compares what crdbdrain has done with the criteria.
func (r *report) check() (findings []finding) {
	for i := range r.scenarios {
		s := &r.scenarios[i]
		p := s.pool(ours)
		if p == nil {
			continue
		}
		add := func(f finding) { findings = append(findings, f) }
		add(atMost(s.name, "errors", 0, p.each(func(r *run) float64 { return float64(r.failed) })))
		if s.window() == 0 {
			continue
		}
		add(atMost(s.name, "connections lost", 0, p.each(func(r *run) float64 { return float64(r.lost()) })))
		if s.name == "window" {
			quiet := s.pool(control.name)
			add(against(quiet, medianAtMost(s.name, "p99.9 in the roll ÷ steady", maxRollOverSteady,
				median(p.each(rollMS(.999)))/median(p.each(steadyMS(.999))), p.each(rollOverSteady))))
			if quiet != nil {
				var ratios []float64
				for i, x := range p.runs {
					ratios = append(ratios, rollMS(.999)(x)/rollMS(.999)(quiet.runs[i]))
				}
				add(medianAtMost(s.name, "p99.9 in the roll ÷ undrained, then", maxRollOverSteady, median(ratios), ratios))
			}
			if plain := s.pool(plainPgx); plain != nil {
				var ratios []float64
				for i, x := range p.runs {
					ratios = append(ratios, steadyMS(.999)(x)/steadyMS(.999)(plain.runs[i]))
				}
				add(medianAtMost(s.name, "steady p99.9 ÷ pgx's", maxSteadyOverPgx,
					median(p.each(steadyMS(.999)))/median(plain.each(steadyMS(.999))), ratios))
			}
			opened := p.each(func(r *run) float64 { return float64(r.rollDials) / float64(r.held()) })
			add(medianAtMost(s.name, "opened for the roll ÷ had to move", maxOpenedPerMove, median(opened), opened))
		}
		if s.name == "large" {
			var left, busiest, pace []float64
			for _, x := range p.runs {
				for _, d := range x.drains {
					left = append(left, d.took.Seconds())
					busiest = append(busiest, float64(d.busiest100))
					perSecond := float64(d.held) / (paceShare * s.window().Seconds())
					// The spares come first, and as many dials are under way as the pace needs while one takes its time.
					pace = append(pace, perSecond/10+spares+math.Ceil(perSecond*s.dial.Seconds()))
				}
			}
			add(atMost(s.name, "last connection off the node, s", s.window().Seconds(), left))
			add(atMost(s.name, "opened in any 100 ms", slices.Min(pace), busiest))
			continue
		}
		var late []float64
		for _, x := range p.runs {
			for _, d := range x.drains {
				late = append(late, d.took.Seconds()-s.drainLimit(d).Seconds())
			}
		}
		add(atMost(s.name, "drain − (initial_wait + 1 s + n × pace), s", 0, late))
		add(atMost(s.name, "even again after, s", maxHomeSeconds, p.each(evenSeconds)))
	}
	return findings
}

// paceShare is the part of the window in which crdbdrain lets the connections leave.
const paceShare = 0.6

// drainLimit is initial_wait + 1 s + n × pace.
func (s *scenario) drainLimit(d drain) time.Duration {
	pace := min(s.stagger, time.Duration(float64(s.window())*paceShare/float64(max(d.held, 1))))
	return s.settings.InitialWait + time.Second + time.Duration(d.held)*pace
}

func findingsText(findings []finding) string {
	if len(findings) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("\ncrdbdrain against the criteria: the median, [lowest–highest run]\n")
	for _, f := range findings {
		value := fmt.Sprintf("%.4g", f.Value)
		if len(f.Runs) > 0 {
			value += fmt.Sprintf(" [%.4g–%.4g]", f.Runs[0], f.Runs[1])
		}
		_, _ = fmt.Fprintf(&b, "%-8s %-10s %-44s %-22s at most %.4g", f.Verdict, f.Scenario, f.Criterion, value, f.Limit)
		if f.Undrained > 0 {
			_, _ = fmt.Fprintf(&b, " (undrained: %.4g)", f.Undrained)
		}
		if f.Verdict == holds && len(f.Runs) > 0 && f.Runs[1] > f.Limit {
			b.WriteString("; not in every run")
		}
		b.WriteByte('\n')
	}
	if i := slices.IndexFunc(findings, func(f finding) bool { return f.Verdict == unclear }); i >= 0 {
		b.WriteString("unclear: over the limit by the median, but not in every run, or in a pool where nothing was drained as well:\nthe machine's noise is larger than the margin.\n")
	}
	return b.String()
}
