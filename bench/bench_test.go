package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The scenarios scaled down: crdbdrain sees no error, and where there is a window it loses nothing; everything is closed
// at the end. Latency is not looked at: a test machine has other things to do.
func TestScenarios(t *testing.T) {
	pools := []contender{contenders[0], contenders[len(contenders)-1]}
	for _, name := range []string{"window", "no-window", "hosts"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i := slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == name })
			s := scenarios[i].quick()
			s.steady, s.home, s.workers = 600*time.Millisecond, 3*time.Second, 8
			runs, err := runAll(t.Context(), s, pools, 0, t.Logf)
			if err != nil {
				t.Fatal(err)
			}
			result := scenarioResult{scenario: s, pools: []poolResult{
				{pools[0], runs[:1]}, {pools[1], runs[1:2]}, {control, runs[2:]},
			}}
			t.Log(result.text())
			plain, our := runs[0], runs[1]
			if plain.lost() == 0 {
				t.Error("pgx lost no connection, want some: the load does not meet the drains")
			}
			if our.failed != 0 {
				t.Errorf("crdbdrain: %d errors %v, want none", our.failed, our.errors)
			}
			if s.window() > 0 && our.lost() != 0 {
				t.Errorf("crdbdrain lost %d connections, want none: %+v", our.lost(), our.drains)
			}
			if quiet := runs[2]; quiet.failed != 0 || len(quiet.roll) == 0 {
				t.Errorf("the pool where nothing was drained: %d errors, %d operations", quiet.failed, len(quiet.roll))
			}
		})
	}
}

func TestCommand(t *testing.T) {
	for _, tt := range []struct {
		args   string
		status int
		stderr string
	}{
		{"-h", exitOK, ""},
		{"-scenario nowhere", exitUsage, `unknown name "nowhere"; there are window, no-window, idle, saturated, hosts, large`},
		{"-pools mysql", exitUsage, `unknown name "mysql"; there are pgx, pgx+life, pgxpool, pgxpool+life, crdbdrain, attached`},
		{"-runs -1", exitUsage, "-runs is at least 1"},
		{"-runs many", exitUsage, "invalid value"},
		{"-quick now", exitUsage, `unexpected argument "now"`},
	} {
		var stdout, stderr bytes.Buffer
		if status := command(t.Context(), strings.Fields(tt.args), &stdout, &stderr); status != tt.status {
			t.Errorf("%s: status %d, want %d", tt.args, status, tt.status)
		}
		if !strings.Contains(stderr.String(), tt.stderr) {
			t.Errorf("%s: %q, want %q", tt.args, stderr.String(), tt.stderr)
		}
	}
}

func TestQuantile(t *testing.T) {
	var v []time.Duration
	if got := quantile(v, .5); got != 0 {
		t.Errorf("of nothing: %v, want 0", got)
	}
	for i := range 1000 {
		v = append(v, time.Duration(i+1))
	}
	for _, tt := range []struct {
		q    float64
		want time.Duration
	}{{0, 1}, {.5, 500}, {.99, 990}, {.999, 999}, {1, 1000}} {
		if got := quantile(v, tt.q); got != tt.want {
			t.Errorf("quantile %v: %d, want %d", tt.q, got, tt.want)
		}
	}
}

func TestMedian(t *testing.T) {
	if got := median([]float64{9, 1, 5}); got != 5 {
		t.Errorf("of three: %v, want 5", got)
	}
	if got := median([]float64{4, 1, 9, 2}); got != 3 {
		t.Errorf("of four: %v, want 3", got)
	}
	if got := median([]float64{1, math.Inf(1), math.Inf(1)}); !math.IsInf(got, 1) {
		t.Errorf("of one that came home and two that did not: %v, want none", got)
	}
	if got := median(nil); !math.IsNaN(got) {
		t.Errorf("of nothing: %v, want NaN", got)
	}
}

func TestVerdicts(t *testing.T) {
	for _, tt := range []struct {
		name string
		f    finding
		want verdict
	}{
		{"every run below", medianAtMost("s", "c", 1.5, 1.2, []float64{1.1, 1.2, 1.4}), holds},
		{"one run above", medianAtMost("s", "c", 1.5, 1.2, []float64{1.1, 1.2, 3}), holds},
		{"most runs above", medianAtMost("s", "c", 1.5, 1.6, []float64{1.1, 1.6, 3}), unclear},
		{"every run above", medianAtMost("s", "c", 1.5, 1.7, []float64{1.6, 1.7, 3}), fails},
		{"one error in one run", atMost("s", "c", 0, []float64{0, 0, 1}), fails},
		{"one run that did not come home", atMost("s", "c", 30, []float64{1, math.Inf(1)}), fails},
		{"no error", atMost("s", "c", 0, []float64{0, 0, 0}), holds},
	} {
		if tt.f.Verdict != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, tt.f.Verdict, tt.want)
		}
	}
}

// Dials are counted by what they were for, and the busiest 100 ms of a drain is found.
func TestCountDials(t *testing.T) {
	ms := time.Millisecond
	r := &run{steadyAt: 100 * ms, rollAt: 200 * ms, endAt: 1000 * ms, drains: []drain{{start: 200 * ms, end: 500 * ms, up: 600 * ms}}}
	r.countDials([]time.Duration{50 * ms, 150 * ms, 200 * ms, 310 * ms, 350 * ms, 400 * ms, 405 * ms, 411 * ms, 550 * ms, 700 * ms, 1500 * ms, 3000 * ms}, 2000*ms)
	if r.steadyDials != 1 || r.rollDials != 7 || r.homeDials != 2 {
		t.Errorf("steady %d, roll %d, home %d; want 1, 7, 2", r.steadyDials, r.rollDials, r.homeDials)
	}
	if got := r.drains[0].busiest100; got != 4 { // 310 to 405, or 350 to 411
		t.Errorf("busiest 100 ms: %d, want 4", got)
	}
}

func TestGrouped(t *testing.T) {
	for in, want := range map[string]string{"0": "0", "999": "999", "1000": "1,000", "1234567": "1,234,567", "1235.3": "1,235.3"} {
		if got := grouped(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

// The drawing is well-formed, whatever was measured.
func TestDrawing(t *testing.T) {
	ms := time.Millisecond
	r := &run{ops: 3, failed: 1, steadyAt: 100 * ms, rollAt: 500 * ms, endAt: 4000 * ms,
		drains:  []drain{{node: 1, held: 2, lost: 1, took: time.Second, start: 500 * ms, end: 1500 * ms, up: 1800 * ms, back: 1900 * ms}},
		samples: []sample{{at: 200 * ms, took: 3 * ms}, {at: 900 * ms, took: 2 * time.Second, failed: true}, {at: 1200 * ms, took: 0}},
		open:    []openConn{{100 * ms, []int{2, 1, 0}}, {4500 * ms, []int{0, 1, 2}}},
	}
	for _, runs := range [][]*run{{r, r}, {{}, {}}} {
		text := drawing([]string{"pgx", "crdbdrain"}, runs)
		d := xml.NewDecoder(strings.NewReader(text))
		for {
			_, err := d.Token()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("%v in\n%s", err, text)
			}
		}
		if strings.Contains(text, "NaN") || strings.Contains(text, "Inf") {
			t.Errorf("not a number in\n%s", text)
		}
	}
}

// The report says the same in JSON and in the table, and nothing that JSON cannot say.
func TestReport(t *testing.T) {
	s := scenarios[0]
	fake := func(failed int, even time.Duration) *run {
		return &run{ops: 10, failed: failed, errors: map[string]int{}, steady: []time.Duration{time.Millisecond}, roll: []time.Duration{2 * time.Millisecond},
			steadyFor: time.Second, steadyDials: 1, rollDials: 12, even: even, spread: []int{5, 5, 5}, drains: []drain{{node: 1, held: 10, took: 3 * time.Second}}}
	}
	result := scenarioResult{scenario: s}
	for _, c := range contenders {
		result.pools = append(result.pools, poolResult{c, []*run{fake(0, time.Second), fake(0, -1)}})
	}
	result.pools = append(result.pools, poolResult{control, []*run{fake(0, -1), fake(0, -1)}})
	r := &report{runs: 2, scenarios: []scenarioResult{result}}
	findings := r.check()
	line, err := r.json(findings)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(line, "\n") != 1 {
		t.Errorf("not one line: %q", line)
	}
	var got jsonReport
	if err := json.Unmarshal([]byte(line), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Scenarios) != 1 || len(got.Scenarios[0].Pools) != len(contenders)+1 || len(got.Criteria) != len(findings) {
		t.Errorf("something is missing: %s", line)
	}
	for _, f := range findings {
		want := holds
		switch f.Criterion {
		case "even again after, s": // not in the second run
			want = fails
		case "p99.9 in the roll ÷ steady": // twice, but so it is where nothing was drained
			want = unclear
		}
		if f.Verdict != want {
			t.Errorf("%+v, want that it %s", f, want)
		}
	}
	if text := result.text(); !strings.Contains(text, "had to move") || strings.Contains(text, "NaN") {
		t.Errorf("table:\n%s", text)
	}
}
