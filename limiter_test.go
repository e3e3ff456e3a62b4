package crdbdrain

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// aMoment is some time; only distances count. It has no monotonic reading, so that jumps are the wall clock's.
var aMoment = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// drawn counts the tokens that a caller gets who asks every step from a moment on, for d.
func (p *pace) drawn(from time.Time, d, step, gap time.Duration) (n int) {
	for t := from; t.Before(from.Add(d)); t = t.Add(step) {
		if _, ok := p.take(t, gap); ok {
			n++
		}
	}
	return n
}

func TestPaceGivesOneTokenPerGap(t *testing.T) {
	var p pace
	// The first at once, then one at the end of each gap.
	if n := p.drawn(aMoment, 10*time.Second+time.Millisecond, time.Millisecond, 500*time.Millisecond); n != 21 {
		t.Errorf("%d tokens in 10 s at one per 500 ms, want 21", n)
	}
}

func TestPaceWithoutAGapNeverDenies(t *testing.T) {
	var p pace
	for range 1000 {
		k, ok := p.take(aMoment, 0)
		if !ok {
			t.Fatal("no pacing has denied")
		}
		k.giveBack(aMoment) // the zero token is none
	}
}

// F08: a clock that jumps gives no more than the one token that a calm of any length gives, and never one that is owed.
func TestF08ClockJumps(t *testing.T) {
	const gap = 500 * time.Millisecond
	for _, tt := range []struct {
		name string
		jump time.Duration
		want int // tokens at once after the jump
	}{
		{"an hour back", -time.Hour, 0},
		{"a second back", -time.Second, 0},
		{"standing still", 0, 0},
		{"an hour ahead", time.Hour, 1},
		{"a year ahead", 365 * 24 * time.Hour, 1},
		{"300 years back", math.MinInt64, 0},
		{"290 years ahead", math.MaxInt64, 1},
	} {
		var p pace
		if _, ok := p.take(aMoment, gap); !ok {
			t.Fatal("the first token is denied")
		}
		after := aMoment.Add(tt.jump)
		got := 0
		for range 100 {
			if _, ok := p.take(after, gap); ok {
				got++
			}
		}
		if got != tt.want {
			t.Errorf("%s: %d tokens at once, want %d", tt.name, got, tt.want)
		}
		// From there on it goes at the pace, whatever the clock was before: the token that is due within one gap at most.
		if n := p.drawn(after.Add(time.Millisecond), 10*time.Second, time.Millisecond, gap); n < 19 || n > 20 {
			t.Errorf("%s: %d tokens in the 10 s after it, want 20 at one per 500 ms", tt.name, n)
		}
	}

	// Back and forth many times is no way to more.
	var p pace
	n := 0
	for i := range 1000 {
		at := aMoment.Add(time.Duration(i) * time.Millisecond)
		if i%2 == 1 {
			at = at.Add(-time.Hour)
		}
		if _, ok := p.take(at, time.Hour); ok {
			n++
		}
	}
	t.Logf("%d tokens in 500 jumps of an hour each way, at one an hour", n)
	if n > 501 {
		t.Errorf("%d tokens in 500 jumps", n)
	}
}

// F09: a day without culls saves nothing up.
func TestF09CalmSavesNothingUp(t *testing.T) {
	var p pace
	const gap = 500 * time.Millisecond
	p.take(aMoment, gap)
	after := aMoment.Add(24 * time.Hour)
	if n := p.drawn(after, time.Second, time.Millisecond, gap); n != 2 {
		t.Errorf("%d culls in the first second after 24 h, want 1 at once and 1 more", n)
	}
	// Nor does a calm in which the pace was another.
	p.take(after.Add(time.Hour), time.Millisecond)
	got := 0
	for range 10 {
		if _, ok := p.take(after.Add(48*time.Hour), gap); ok {
			got++
		}
	}
	if got != 1 {
		t.Errorf("%d tokens at once after 48 h, want 1", got)
	}
}

// B15: being denied costs nothing and moves nothing: the token comes when it is due, once.
func TestB15DeniedAttemptsDoNotDelayTheToken(t *testing.T) {
	var p pace
	const gap = 500 * time.Millisecond
	p.take(aMoment, gap)
	for i := range 499 {
		for range 50 {
			if _, ok := p.take(aMoment.Add(time.Duration(i)*time.Millisecond), gap); ok {
				t.Fatalf("a token after %d ms", i)
			}
		}
	}
	got := 0
	for range 50 {
		if _, ok := p.take(aMoment.Add(gap), gap); ok {
			got++
		}
	}
	if got != 1 {
		t.Errorf("%d culls when the token appears, want exactly 1", got)
	}
}

func TestGiveBack(t *testing.T) {
	var p pace
	const gap = time.Second
	for i := range 5 { // as often as one likes
		k, ok := p.take(aMoment, gap)
		if !ok {
			t.Fatalf("the token that was given back %d times is gone", i)
		}
		k.giveBack(aMoment)
	}
	k, _ := p.take(aMoment, gap)
	if _, ok := p.take(aMoment, gap); ok {
		t.Error("two tokens at once")
	}
	k.giveBack(aMoment)
	k.giveBack(aMoment) // twice is once
	got := 0
	for range 3 {
		if _, ok := p.take(aMoment, gap); ok {
			got++
		}
	}
	if got != 1 {
		t.Errorf("%d tokens after one was given back twice, want 1", got)
	}
}

// A shorter gap takes effect at once; what has been waited for so far counts by the old one.
func TestPaceChangesUnderway(t *testing.T) {
	var p pace
	p.take(aMoment, 10*time.Second)
	half := aMoment.Add(5 * time.Second)
	for _, tt := range []struct {
		after time.Duration
		want  bool
	}{{0, false}, {49 * time.Millisecond, false}, {51 * time.Millisecond, true}, {100 * time.Millisecond, false}, {152 * time.Millisecond, true}} {
		if _, ok := p.take(half.Add(tt.after), 100*time.Millisecond); ok != tt.want {
			t.Errorf("%v after the gap became 100 ms, half of 10 s gone: %v, want %v", tt.after, ok, tt.want)
		}
	}
}

func TestGap(t *testing.T) {
	const stagger = 500 * time.Millisecond
	for _, tt := range []struct {
		name    string
		stagger time.Duration
		nodes   []leaving
		want    time.Duration
	}{
		{"no node", stagger, nil, stagger},
		{"no connection", stagger, []leaving{{conns: 0, left: time.Second}}, stagger},
		{"a negative number", stagger, []leaving{{conns: -3, left: time.Second}}, stagger},
		{"time enough", stagger, []leaving{{conns: 2, left: 10 * time.Second}}, stagger},
		{"just enough", stagger, []leaving{{conns: 20, left: 10 * time.Second}}, stagger},
		{"H07: 128 in 4 s", stagger, []leaving{{128, 4 * time.Second, 100 / 6.0}}, 31250 * time.Microsecond},
		{"the last one of 60 in 6 s", stagger, []leaving{{1, time.Second, 60 / 6.0}}, 100 * time.Millisecond},
		{"none of 60 is left", stagger, []leaving{{0, time.Second, 60 / 6.0}}, stagger},
		{"a node left early leaves its part to the others", stagger, []leaving{{10, time.Second, 10}, {0, time.Second, 40}}, 20 * time.Millisecond},
		{"two nodes share the pace", stagger, []leaving{{conns: 10, left: time.Second}, {conns: 10, left: time.Second}}, 50 * time.Millisecond},
		{"the slow one adds little", stagger, []leaving{{conns: 10, left: time.Second}, {conns: 1, left: 10 * time.Second}}, 99009900 * time.Nanosecond},
		{"no time left", stagger, []leaving{{conns: 10, left: 0}}, 100 * time.Microsecond},
		{"less than none", stagger, []leaving{{conns: 10, left: -time.Hour}}, 100 * time.Microsecond},
		{"no pacing", 0, []leaving{{conns: 10, left: time.Second}}, 0},
		{"a stagger shorter than the need", time.Millisecond, []leaving{{conns: 10, left: time.Second}}, time.Millisecond},
	} {
		if got := gap(tt.stagger, tt.nodes); got != tt.want {
			t.Errorf("%s: gap = %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestNeed(t *testing.T) {
	const window = 10 * time.Second
	for _, tt := range []struct {
		name        string
		after, calm time.Duration // of the notice; before it
		conns       int
		left        time.Duration
		least       float64
	}{
		{"the clock went back: slower, no more", -time.Hour, 0, 60, time.Hour + 6*time.Second, 10},
		{"just noticed", 0, 0, 60, 6 * time.Second, 10},
		{"on the way", 4 * time.Second, 0, 20, 2 * time.Second, 10},
		{"almost over", 5500 * time.Millisecond, 0, 5, time.Second, 10},
		{"late", time.Hour, 0, 1, time.Second, 10},
		{"left early", 4 * time.Second, 0, 0, 2 * time.Second, 10},
		{"left", 6 * time.Second, 0, 0, time.Second, 0},
		{"a poll of 1 s is within the margin", 0, time.Second, 60, 6 * time.Second, 10},
		{"one of 5 s is not", 0, 5 * time.Second, 60, 3 * time.Second, 20},
		{"one of 5 s, on the way", time.Second, 5 * time.Second, 40, 2 * time.Second, 20},
		{"noticed too late", 0, 9 * time.Second, 60, time.Second, 60},
	} {
		calm := time.Time{}
		if tt.calm > 0 {
			calm = aMoment.Add(-tt.calm)
		}
		if got := need(tt.conns, 60, aMoment.Add(tt.after), aMoment, calm, window); got != (leaving{tt.conns, tt.left, tt.least}) {
			t.Errorf("%s: %+v, want %v left, at least %v", tt.name, got, tt.left, tt.least)
		}
	}
}

// H01, H07: however many connections a node has, they leave within 60 % of the window, spread evenly: in no 500 ms more
// than the pace allows, and never faster than the need.
func TestH01H07ConnectionsLeaveInTime(t *testing.T) {
	const window, stagger, step = 5 * time.Second, 500 * time.Millisecond, 500 * time.Microsecond
	for _, conns := range []int{1, 2, 5, 20, 200, 2000} {
		var p pace
		left := conns
		var took []time.Duration
		for at := time.Duration(0); at < 2*window && left > 0; at += step {
			t := aMoment.Add(at)
			if _, ok := p.take(t, gap(stagger, []leaving{need(left, conns, t, aMoment, time.Time{}, window)})); ok {
				left--
				took = append(took, at)
			}
		}
		if left > 0 {
			t.Errorf("%d connections: %d are left after two windows", conns, left)
			continue
		}
		last := took[len(took)-1]
		t.Logf("%d connections: the last left after %v", conns, last)
		if limit := 3*time.Second + 100*time.Millisecond; last > limit {
			t.Errorf("%d connections: the last left after %v, want at most 60 %% of %v", conns, last, window)
		}
		// 3 s for all of them, or one per stagger: in half a second a sixth, the one that was saved up, and rounding.
		most := max(conns/6, 1) + 1 + conns/100
		for i := range took {
			n := 0
			for _, at := range took[i:] {
				if at < took[i]+500*time.Millisecond {
					n++
				}
			}
			if n > most {
				t.Errorf("%d connections: %d culls in the 500 ms from %v on, want at most %d", conns, n, took[i], most)
				break
			}
		}
	}
}

// Several nodes at once: which node's connection goes next is chance, and some node is left before its time. Together they
// are left in time all the same.
func TestSeveralNodesAreLeftInTime(t *testing.T) {
	const window, stagger, step, each = 10 * time.Second, 500 * time.Millisecond, time.Millisecond, 50
	for seed := range uint64(20) {
		rng, p := rand.New(rand.NewPCG(seed, 0)), pace{}
		left := []int{each, each, each, each, each}
		for at, all := time.Duration(0), each*len(left); all > 0; at += step {
			now := aMoment.Add(at)
			var needs []leaving
			for _, n := range left {
				needs = append(needs, need(n, each, now, aMoment, time.Time{}, window))
			}
			if _, ok := p.take(now, gap(stagger, needs)); !ok {
				continue
			}
			next := rng.IntN(all)
			for i := range left {
				if next -= left[i]; next < 0 {
					left[i]--
					break
				}
			}
			if all--; at > 6200*time.Millisecond {
				t.Fatalf("seed %d: after %v the nodes still have %v", seed, at, left)
			}
		}
	}
}

// H07's arithmetic the other way: what the pace would be without the window is 50 s for 100 connections.
func TestH07TheStaggerAloneIsTooSlow(t *testing.T) {
	var p pace
	if n := p.drawn(aMoment, 25*time.Second, time.Millisecond, 500*time.Millisecond); n != 50 {
		t.Errorf("%d culls in 25 s at the stagger alone, want 50 of 100", n)
	}
	var q pace
	const window = 30 * time.Second
	got, last := 0, time.Duration(0)
	for at := time.Duration(0); at < window && got < 100; at += time.Millisecond {
		now := aMoment.Add(at)
		if _, ok := q.take(now, gap(500*time.Millisecond, []leaving{need(100-got, 100, now, aMoment, time.Time{}, window)})); ok {
			got, last = got+1, at
		}
	}
	if got != 100 || last < 17*time.Second || last > 18500*time.Millisecond {
		t.Errorf("%d culls of 100, the last after %v; want all, within 18 s of a window of 30 s", got, last)
	}
}
