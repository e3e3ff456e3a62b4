package main

import (
	"bytes"
	"context"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crdbdrain/crdbdrain"
	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// screen is what a command has printed so far.
type screen struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// shows waits until what was printed after offset matches, and returns how much was printed up to there.
func (s *screen) shows(t *testing.T, offset int, pattern string) int {
	t.Helper()
	re := regexp.MustCompile(pattern)
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if at := re.FindStringIndex(s.String()[offset:]); at != nil {
			return offset + at[1]
		}
	}
	t.Fatalf("waited in vain for %s in\n%s", pattern, s.String()[offset:])
	return 0
}

// A drain, line by line: the mark, the connections that leave, the end, the return; and Ctrl-C ends it with status 0.
func TestWatchPrintsADrain(t *testing.T) {
	t.Parallel()
	c := windowed(t, crdbdraintest.Config{})
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	var out, stderr screen
	status := make(chan int)
	dsn := strings.Replace(c.DSN(), "postgres://", "cockroachdb://", 1) + "&crdbdrain_window=1s&crdbdrain_readiness=" + c.ReadinessURLs()
	go func() {
		status <- run(ctx, []string{"watch", "-interval", "100ms", "-connections", "3", dsn}, &out, &stderr)
	}()
	at := out.shows(t, 0, `(?m)^\d\d:\d\d:\d\d\.\d{3} CockroachDB CCL v25\.2\.0; sources: instances denied, readiness ok, gossip denied, errors ok$`)
	out.shows(t, at, `node 1 active, \d connection`)
	out.shows(t, at, `node 2 active, [1-3] connection`)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		c.Node(2).Restart(ctx)
	}()
	at = out.shows(t, at, `a node is leaving: node 2, `)
	at = out.shows(t, at, `(?m)node 2 draining since \d\d:\d\d:\d\d\.\d{3} \(readiness\), 0 connections$`)
	out.shows(t, at, `node 2 active, \d connection`)
	<-drained
	interrupt()
	if got := <-status; got != exitOK {
		t.Errorf("exit status %d, want 0; %s", got, &stderr)
	}
	if strings.Contains(out.String(), "\x1b") {
		t.Error("cursor movements where there is no terminal")
	}
	lost := 0
	for _, n := range c.Nodes() {
		lost += n.Stats().LostIdle + n.Stats().LostBusy
	}
	if lost > 0 {
		t.Errorf("the watch itself lost %d connections", lost)
	}
}

// A cluster that cannot be reached any more is said once, and once when it is back.
func TestWatchGoesOnWithoutTheCluster(t *testing.T) {
	t.Parallel()
	c := windowed(t, crdbdraintest.Config{Nodes: 1})
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	var out, stderr screen
	status := make(chan int)
	go func() { status <- run(ctx, []string{"watch", "-interval", "100ms", c.Node(1).DSN()}, &out, &stderr) }()
	at := out.shows(t, 0, `node 1 active, 6 connections`)
	c.Node(1).Kill()
	at = out.shows(t, at, `cannot connect: `)
	c.Node(1).Start()
	out.shows(t, at, `connects again`)
	interrupt()
	if got := <-status; got != exitOK {
		t.Errorf("exit status %d, want 0", got)
	}
	if n := strings.Count(out.String(), "cannot connect: "); n != 1 {
		t.Errorf("said %d times\n%s", n, &out)
	}
}

// On a terminal the table is drawn over the one before.
func TestWatchDraws(t *testing.T) {
	t.Parallel()
	now := time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
	var out bytes.Buffer
	w := watch{out: &out, terminal: true, clock: func() time.Time { return now }, title: "CockroachDB"}
	nodes := []crdbdrain.Node{
		{ID: 0, State: "unknown", Live: true, Connections: 1},
		{ID: 1, State: "active", Live: true, Connections: 3},
		{ID: 2, State: "draining", Source: "readiness", Since: now.Add(-12 * time.Second)},
		{ID: 3, State: "active"},
	}
	if err := w.show(nodes, crdbdrain.Stats{Culled: 4}, ""); err != nil {
		t.Fatal(err)
	}
	want := "\x1b[2J\x1b[H" + strings.Join([]string{
		"07:08:09  CockroachDB",
		"",
		"node  state               since  source     connections",
		"   ?  unknown                                  1 #",
		"   1  active                                   3 ###",
		"   2  draining              12s  readiness     0 ",
		"   3  not live                                 0 ",
		"",
		"culled 4, lost 0, run again 0, dials steered 0, refused 0, moved 0",
		"", "",
	}, "\x1b[K\n") + "\x1b[J"
	if out.String() != want {
		t.Errorf("%q\nwant %q", out.String(), want)
	}
	out.Reset()
	if err := w.show(nodes, crdbdrain.Stats{}, "cannot connect"); err != nil || !strings.HasPrefix(out.String(), "\x1b[H07:08:09") || !strings.Contains(out.String(), "\ncannot connect\x1b[K") {
		t.Errorf("%v, %q", err, out.String())
	}
	for line := range strings.Lines(clip(strings.Repeat("x", 500))) {
		if len([]rune(line)) != 110 {
			t.Errorf("%d characters", len([]rune(line)))
		}
	}
}
