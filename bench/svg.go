package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/crdbdrain/crdbdrain/internal/chart"
)

// drawRoll draws one rolling restart, as pgx and as crdbdrain see it at the same time.
func drawRoll(ctx context.Context, file string, say func(string, ...any)) error {
	s := scenarios[0]
	s.warm, s.steady, s.settle = 500*time.Millisecond, 3*time.Second, 1500*time.Millisecond
	s.think = 12 * time.Millisecond
	s.until = 33 * time.Second
	pools := []contender{contenders[0], contenders[len(contenders)-1]}
	runs, err := runAll(ctx, s, pools, 0, say)
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(drawing(names(pools), runs[:len(pools)])), 0o644) //nolint:gosec // a picture is for everybody
}

// drawing is the picture: a panel for each run, with one scale of time.
func drawing(titles []string, runs []*run) string {
	p := chart.Picture{
		Title: "A rolling restart of three nodes, with pgx and with crdbdrain",
		Foot:  "Simulated cluster, a window of 5 s. Both at the same time on one machine: a bump that both show is the machine’s.",
	}
	for i, r := range runs {
		c := chart.Run{Title: titles[i], Words: r.inWords(), Bad: r.failed > 0}
		for _, d := range r.drains {
			c.Drains = append(c.Drains, chart.Drain{Node: d.node, Took: d.took, Start: d.start, End: d.end, Up: d.up})
		}
		for _, s := range r.samples {
			c.Samples = append(c.Samples, chart.Sample{End: s.end(), Took: s.took, Failed: s.failed})
		}
		for _, o := range r.open {
			c.Open = append(c.Open, chart.Open{At: o.at, Nodes: o.nodes})
		}
		p.Runs = append(p.Runs, c)
	}
	return p.SVG()
}

// inWords is a run in a sentence or two.
func (r *run) inWords() string {
	return fmt.Sprintf("%s of %s operations failed; the server closed %d connections.", grouped(fmt.Sprint(r.failed)), grouped(fmt.Sprint(r.ops)), r.lost())
}
