package chart

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// wellFormed fails if a picture is not XML, or has a number that is none.
func wellFormed(t *testing.T, text string) {
	t.Helper()
	for d := xml.NewDecoder(strings.NewReader(text)); ; {
		if _, err := d.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
	}
	if strings.Contains(text, "NaN") || strings.Contains(text, "Inf") || strings.Contains(text, "%!") {
		t.Errorf("not a number in\n%s", text)
	}
}

func TestWhateverWasMeasured(t *testing.T) {
	ms := time.Millisecond
	full := Run{
		Title: "a <b> & c", Words: "it's", Bad: true,
		Drains:  []Drain{{Node: 1, Took: time.Second, Start: 500 * ms, End: 1500 * ms, Up: 1800 * ms}},
		Samples: []Sample{{End: 203 * ms, Took: 3 * ms}, {End: 2900 * ms, Took: 2 * time.Second, Failed: true}, {End: 1200 * ms}},
		Open:    []Open{{100 * ms, []int{2, 1, 0}}, {4500 * ms, []int{0, 1, 2}}},
	}
	for _, runs := range [][]Run{nil, {{}}, {full}, {full, {}, full, full}} {
		p := Picture{Title: "<t>", Foot: "&", Runs: runs}
		text := p.SVG()
		wellFormed(t, text)
		if n := strings.Count(text, `class="title"`); n != len(runs) {
			t.Errorf("%d panels, want %d", n, len(runs))
		}
	}
}

// Failures that follow each other within a second are one cross with their number; drains that are close lose the word.
func TestWhatIsClose(t *testing.T) {
	at := func(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }
	r := Run{Open: []Open{{at(0), []int{1}}, {at(60), []int{1}}}}
	for _, s := range []float64{10, 10.5, 11.2, 30} {
		r.Samples = append(r.Samples, Sample{End: at(s), Took: at(.1), Failed: true})
	}
	for i, s := range []float64{10, 11, 40} {
		r.Drains = append(r.Drains, Drain{Node: i + 1, Took: at(float64(i + 1)), Start: at(s), End: at(s + 1), Up: at(s + 1)})
	}
	p := Picture{Runs: []Run{r}}
	text := p.SVG()
	for _, want := range []string{`>3</text>`, `>1</text>`, `>1.0 s</text>`, `>node 2: 2.0 s</text>`, `>node 3: 3.0 s</text>`} {
		if strings.Count(text, want) != 1 {
			t.Errorf("%d times %s in\n%s", strings.Count(text, want), want, text)
		}
	}
}

func TestQuantile(t *testing.T) {
	var v []time.Duration
	for i := range 1000 {
		v = append(v, time.Duration(i+1))
	}
	for q, want := range map[float64]time.Duration{0: 1, .5: 500, .99: 990, 1: 1000} {
		if got := quantile(v, q); got != want {
			t.Errorf("%v: %s", q, fmt.Sprintf("%d, want %d", got, want))
		}
	}
}
