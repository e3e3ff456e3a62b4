// Package chart draws what rolling restarts did to latency and connections, as SVG: the picture of the demo command and of
// the benchmarks.
package chart

import (
	"encoding/xml"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Picture is a panel for each run, one below the other, with one scale of time.
type Picture struct {
	Title string // for those who do not see it
	Foot  string // a line below
	Runs  []Run
}

// Run is what one driver saw. Times are counted from the run's begin.
type Run struct {
	Title   string
	Words   string // what came of it, in a sentence or two
	Bad     bool   // the words are bad news
	Drains  []Drain
	Samples []Sample
	Open    []Open // in the order of time
}

// Drain is the restart of one node: drained from Start to End, up again at Up.
type Drain struct {
	Node           int           // from 1 on
	Took           time.Duration // the drain alone
	Start, End, Up time.Duration
}

// Sample is one operation.
type Sample struct {
	End, Took time.Duration
	Failed    bool
}

// Open is how many connections each node has at a time.
type Open struct {
	At    time.Duration
	Nodes []int
}

const (
	drawWidth   = 840
	plotLeft    = 78
	plotRight   = drawWidth - 12
	latencyTall = 108
	plotGap     = 22
	connsTall   = 84
	panelTall   = 30 + 16 + latencyTall + plotGap + connsTall + 36
	labelWide   = 84 // of a drain
	bin         = 250 * time.Millisecond
)

// The colours are told apart by colour-blind eyes too (Okabe and Ito), with lighter ones on dark.
const drawStyle = `
  text { font: 12px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .bg { fill: #ffffff } .soft { fill: #59636e } .title { font-size: 14px; font-weight: 600 }
  .grid { stroke: #d1d9e0; stroke-width: 1 } .axis { stroke: #59636e; stroke-width: 1 }
  .line { fill: none; stroke-width: 1.8; stroke-linejoin: round }
  .p50 { stroke: #59636e } .p99 { stroke: #1f2328 } .err { stroke: #cf222e; stroke-width: 1.6; fill: none } .errt { fill: #cf222e }
  .n1 { stroke: #0072b2 } .n2 { stroke: #c77700 } .n3 { stroke: #009068 }
  .b1 { fill: #0072b2 } .b2 { fill: #c77700 } .b3 { fill: #009068 } .band { opacity: .13 } .gone { opacity: .3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .bg { fill: #0d1117 } .soft { fill: #9198a1 } .grid { stroke: #30363d } .axis { stroke: #9198a1 }
    .p50 { stroke: #9198a1 } .p99 { stroke: #f0f6fc } .err { stroke: #ff7b72 } .errt { fill: #ff7b72 }
    .n1 { stroke: #56b4e9 } .n2 { stroke: #f0a830 } .n3 { stroke: #2ec99a }
    .b1 { fill: #56b4e9 } .b2 { fill: #f0a830 } .b3 { fill: #2ec99a } .band { opacity: .18 } .gone { opacity: .4 }
  }
`

// SVG returns the picture. It follows the reader's light or dark mode.
func (p *Picture) SVG() string {
	runs := p.Runs
	end := time.Second
	most := 1
	for _, r := range runs {
		for _, o := range r.Open {
			end = max(end, o.At)
			most = max(most, slices.Max(o.Nodes))
		}
	}
	most = (most + 4) / 5 * 5
	var b svg
	head := 46
	tall := head + len(runs)*panelTall + 22
	b.f(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-labelledby="t d">`, drawWidth, tall, drawWidth, tall)
	b.f(`<title id="t">%s</title>`, escape(p.Title))
	var words []string
	for _, r := range runs {
		words = append(words, fmt.Sprintf("%s: %s", r.Title, r.Words))
	}
	b.f(`<desc id="d">%s</desc>`, escape(strings.Join(words, " ")))
	b.f(`<style>%s</style>`, drawStyle)
	b.f(`<rect class="bg" width="%d" height="%d"/>`, drawWidth, tall)

	// What the lines are, once for both.
	x := plotLeft
	key := func(line, text string, wide int) {
		b.f(`<path class="line %s" d="M%d 16h20"/>`, line, x)
		b.f(`<text class="soft" x="%d" y="20">%s</text>`, x+26, text)
		x += 26 + wide
	}
	key("p99", "p99", 36)
	key("p50", "p50", 36)
	b.cross(float64(x+6), 16)
	b.f(`<text class="soft" x="%d" y="20">failed operations</text>`, x+16)
	x += 134
	for n := 1; n <= 3; n++ {
		key(fmt.Sprintf("n%d", n), fmt.Sprintf("node %d", n), 56)
	}
	b.f(`<rect class="b1 band" x="%d" y="9" width="20" height="14"/><text class="soft" x="%d" y="20">drains</text>`, x, x+26)
	x += 74
	b.f(`<rect class="b1 gone" x="%d" y="9" width="20" height="14"/><text class="soft" x="%d" y="20">is down</text>`, x, x+26)

	for i, r := range runs {
		b.panel(head+i*panelTall, &r, end, most)
	}
	b.f(`<text class="soft" x="%d" y="%d">%s</text>`, plotLeft, tall-10, escape(p.Foot))
	b.f(`</svg>`)
	return b.String()
}

func escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // a Builder does not fail
	return b.String()
}

// quantile returns the smallest of the sorted values that at least the share q of them does not exceed; there is one.
func quantile(sorted []time.Duration, q float64) time.Duration {
	rank := int(math.Ceil(q*float64(len(sorted)) - 1e-9))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

type svg struct{ strings.Builder }

func (b *svg) f(format string, args ...any) { _, _ = fmt.Fprintf(b, format+"\n", args...) }

func (b *svg) cross(x, y float64) {
	b.f(`<path class="err" d="M%.1f %.1fl7 7m0 -7l-7 7"/>`, x-3.5, y-3.5)
}

// panel draws one run, from y downwards.
func (b *svg) panel(y int, r *Run, end time.Duration, most int) {
	atX := func(t time.Duration) float64 {
		return plotLeft + float64(min(max(t, 0), end))/float64(end)*(plotRight-plotLeft)
	}
	top := y + 30 + 16
	connsTop := top + latencyTall + plotGap
	bottom := connsTop + connsTall

	class := "soft"
	if r.Bad {
		class = "errt"
	}
	b.f(`<text class="title" x="%d" y="%d">%s <tspan class="%s" font-weight="400" dx="6">%s</tspan></text>`, plotLeft, y+14, escape(r.Title), class, escape(r.Words))

	// The drains.
	for i, d := range r.Drains {
		class := fmt.Sprintf("b%d", d.Node)
		label := fmt.Sprintf("node %d: %.1f s", d.Node, d.Took.Seconds())
		if i+1 < len(r.Drains) && atX(r.Drains[i+1].Start)-atX(d.Start) < labelWide {
			label = fmt.Sprintf("%.1f s", d.Took.Seconds()) // the colour tells the node
		}
		b.f(`<rect class="%s band" x="%.1f" y="%d" width="%.1f" height="%d"/>`, class, atX(d.Start), top, atX(d.End)-atX(d.Start), bottom-top)
		b.f(`<rect class="%s gone" x="%.1f" y="%d" width="%.1f" height="%d"/>`, class, atX(d.End), top, atX(d.Up)-atX(d.End), bottom-top)
		b.f(`<text class="%s" x="%.1f" y="%d">%s</text>`, class, atX(d.Start), top-5, label)
	}

	// Latency, on a logarithmic scale from 1 ms to 1 s.
	const decades = 3
	latencyY := func(d time.Duration) float64 {
		log := math.Log10(math.Max(float64(d)/float64(time.Millisecond), 1))
		return float64(top) + latencyTall*(1-math.Min(log, decades)/decades)
	}
	for i, label := range []string{"1 ms", "10 ms", "100 ms", "1 s"} {
		gy := float64(top) + latencyTall*(1-float64(i)/decades)
		b.f(`<path class="grid" d="M%d %.1fH%d"/><text class="soft" x="%d" y="%.1f" text-anchor="end">%s</text>`, plotLeft, gy, plotRight, plotLeft-6, gy+4, label)
	}
	bins := make(map[int][]time.Duration)
	last := 0
	for _, s := range r.Samples {
		i := int(s.End / bin)
		bins[i] = append(bins[i], s.Took)
		last = max(last, i)
	}
	for _, q := range []struct {
		class string
		q     float64
	}{{"p50", .5}, {"p99", .99}} {
		var path strings.Builder
		for i := range last { // the last one is not full
			took := bins[i]
			if len(took) < 2 {
				continue
			}
			slices.Sort(took)
			_, _ = fmt.Fprintf(&path, "%.1f,%.1f ", atX(time.Duration(i)*bin+bin/2), latencyY(quantile(took, q.q)))
		}
		b.f(`<polyline class="line %s" points="%s"/>`, q.class, strings.TrimSpace(path.String()))
	}
	// Failures come together: one cross for those that follow each other within a second, with their number.
	var failed []time.Duration
	for _, s := range r.Samples {
		if s.Failed {
			failed = append(failed, s.End)
		}
	}
	slices.Sort(failed)
	for len(failed) > 0 {
		n := 1
		for n < len(failed) && failed[n]-failed[n-1] < time.Second {
			n++
		}
		x, y := atX(failed[n/2]), float64(top)+14
		b.cross(x, y)
		b.f(`<text class="errt" x="%.1f" y="%.1f">%d</text>`, x+7, y+4, n)
		failed = failed[n:]
	}

	// Connections per node.
	connsY := func(n int) float64 { return float64(bottom) - connsTall*float64(n)/float64(most) }
	step := 5
	if most > 20 {
		step = 10
	}
	for n := 0; n <= most; n += step {
		b.f(`<path class="grid" d="M%d %.1fH%d"/><text class="soft" x="%d" y="%.1f" text-anchor="end">%d</text>`, plotLeft, connsY(n), plotRight, plotLeft-6, connsY(n)+4, n)
	}
	if len(r.Open) > 0 {
		for node := range r.Open[0].Nodes {
			var path strings.Builder
			before := -1
			for i, o := range r.Open {
				n := o.Nodes[node]
				if n == before && i < len(r.Open)-1 {
					continue
				}
				if before >= 0 {
					_, _ = fmt.Fprintf(&path, "%.1f,%.1f ", atX(o.At), connsY(before))
				}
				_, _ = fmt.Fprintf(&path, "%.1f,%.1f ", atX(o.At), connsY(n))
				before = n
			}
			b.f(`<polyline class="line n%d" points="%s"/>`, node%3+1, strings.TrimSpace(path.String()))
		}
	}
	b.f(`<text class="soft" transform="translate(16 %d) rotate(-90)" text-anchor="middle">latency</text>`, top+latencyTall/2)
	b.f(`<text class="soft" transform="translate(16 %d) rotate(-90)" text-anchor="middle">connections</text>`, connsTop+connsTall/2)
	b.f(`<path class="axis" d="M%d %dH%d"/>`, plotLeft, bottom, plotRight)
	for t := time.Duration(0); t <= end; t += 5 * time.Second {
		anchor := "middle"
		if atX(t) > plotRight-14 {
			anchor = "end"
		}
		b.f(`<text class="soft" x="%.1f" y="%d" text-anchor="%s">%d s</text>`, atX(t), bottom+16, anchor, int(t.Seconds()))
	}
}
