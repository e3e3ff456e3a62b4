package main

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// A demo about ten times as fast as the real one.
func TestDemo(t *testing.T) {
	d := defaultDemo
	d.workers, d.conns = 8, 18
	d.warmUp, d.steady = 150*time.Millisecond, 300*time.Millisecond
	d.linger, d.down, d.settle = 50*time.Millisecond, 50*time.Millisecond, 100*time.Millisecond
	d.balancer.Interval, d.balancer.Fall = 50*time.Millisecond, 3 // a busy machine answers late
	d.scenarios = []scenario{
		{
			name: "window", title: "window of 0.8 s", label: "With a window of 0.8 s", window: 800 * time.Millisecond,
			settings: crdbdraintest.Settings{
				InitialWait: 200 * time.Millisecond, ConnectionsTimeout: 600 * time.Millisecond, TransactionsTimeout: 5 * time.Second,
			},
			params: "&crdbdrain_readiness=READINESS&crdbdrain_window=800ms&crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms",
		},
		defaultDemo.scenarios[1],
	}
	var mu sync.Mutex
	var progress []string
	d.progress = func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		progress = append(progress, fmt.Sprintf(format, args...))
	}
	r, err := d.run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Log(r.text())

	line, err := r.json()
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(line, "\n") != 1 || !strings.HasSuffix(line, "\n") {
		t.Errorf("not one line: %q", line)
	}
	var got jsonReport
	if err := json.Unmarshal([]byte(line), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Drivers) != 2 || len(got.Scenarios) != 2 {
		t.Fatalf("%d drivers and %d scenarios, want 2 and 2: %s", len(got.Drivers), len(got.Scenarios), line)
	}
	pgx, drain := got.Drivers[0], got.Drivers[1]
	if pgx.Driver != "pgx" || drain.Driver != "crdbdrain" {
		t.Errorf("drivers %q and %q", pgx.Driver, drain.Driver)
	}
	if drain.Errors != 0 || len(drain.ErrorsByCode) != 0 {
		t.Errorf("crdbdrain: %d errors %v, want none", drain.Errors, drain.ErrorsByCode)
	}
	if pgx.Lost == 0 {
		t.Error("pgx lost no connection, want some: the load does not meet the drains")
	}
	if drain.Culled == 0 {
		t.Error("crdbdrain culled no connection, want some")
	}
	for _, x := range got.Drivers {
		if x.Ops == 0 || len(x.DrainSeconds) != 6 || x.RollSeconds <= 0 || len(x.ConnectionsPerNode) != 3 {
			t.Errorf("%s: something is missing: %+v", x.Driver, x)
		}
		for _, l := range []jsonLatency{x.SteadyMS, x.RollMS} {
			if !slices.IsSorted([]float64{l.P50, l.P99, l.P999, l.Max}) || l.P50 < 1 {
				t.Errorf("%s: latencies %+v", x.Driver, l)
			}
		}
	}
	for i, x := range got.Drivers {
		a, b := got.Scenarios[0].Drivers[i], got.Scenarios[1].Drivers[i]
		if x.Ops != a.Ops+b.Ops || x.Lost != a.Lost+b.Lost || x.Errors != a.Errors+b.Errors || x.Culled != a.Culled+b.Culled {
			t.Errorf("%s is not the sum of its scenarios: %s", x.Driver, line)
		}
	}
	nodes := 0
	for _, p := range progress {
		if strings.Contains(p, "drained in") {
			nodes++
		}
	}
	if nodes != 12 {
		t.Errorf("%d lines of progress about nodes, want 12: %q", nodes, progress)
	}

	picture := r.svg()
	for x := xml.NewDecoder(strings.NewReader(picture)); ; {
		if _, err := x.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, picture)
		}
	}
	for _, want := range []string{"pgx, window of 0.8 s", "crdbdrain, window of 0.8 s", "pgx, server's defaults", "crdbdrain, server's defaults"} {
		if !strings.Contains(picture, strings.ReplaceAll(want, "'", "&#39;")) {
			t.Errorf("no panel %s", want)
		}
	}
	for _, s := range r.scenarios {
		for _, d := range s.drivers {
			if len(d.shown) != 3 || int64(len(d.samples)) != d.ops || len(d.open) < 5 {
				t.Errorf("%s, %s: %d drains, %d of %d operations, %d counts of connections", d.driver, s.name, len(d.shown), len(d.samples), d.ops, len(d.open))
			}
			for _, x := range d.shown {
				if x.Start <= 0 || x.End < x.Start || x.Up < x.End || x.Took <= 0 {
					t.Errorf("%s, %s: %+v", d.driver, s.name, x)
				}
			}
		}
	}
}
