package crdbdrain

import (
	"database/sql"
	"runtime"
	"testing"
	"time"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// heap returns the bytes in use once everything that can go has gone.
func heap() uint64 {
	var m runtime.MemStats
	for range 3 {
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// A connection costs less than 1 KiB more than pgx's.
func TestMemoryPerConnection(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector allocates")
	}
	const conns = 500
	c := crdbdraintest.Start(crdbdraintest.Config{})
	defer c.Close()
	plain, err := sql.Open("pgx", c.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	ours := open(t, c.DSN(), "")
	fill(t, ours.DB, 3) // what is once for a process
	before := heap()
	fill(t, plain, conns)
	pgx := heap() - before
	before = heap()
	fill(t, ours.DB, conns+3)
	mine := heap() - before
	per := (float64(mine) - float64(pgx)) / conns
	t.Logf("%d bytes per connection with pgx, %d with crdbdrain (the simulated server's side is in both): %.0f more", pgx/conns, mine/conns, per)
	if per > 1024 {
		t.Errorf("%.0f bytes per connection more than pgx's, want at most 1024", per)
	}
}

// idle10000 makes a watchdog that holds 10,000 idle sessions on two nodes, one of them marked.
func idle10000(tb testing.TB) (w *watchdog, m *marks) {
	tb.Helper()
	c, err := NewConnector(mustParse(tb, "postgres://u@h/d?sslmode=disable&crdbdrain_spares=0").pgx)
	if err != nil {
		tb.Fatal(err)
	}
	w = c.attach()
	tb.Cleanup(func() { _ = c.Close() })
	w.rule.Store(ruleHolds)
	long := time.Now().Add(-time.Minute)
	w.mu.Lock()
	for i := range 10_000 {
		s := &session{connector: c, w: w, id: nodeID(1 + i%2), opened: long, link: &link{}}
		s.idled.Store(now() - int64(time.Second))
		s.state.Store(sessionIdle)
		s.node = w.nodeOf(s.id)
		s.node.held[s] = struct{}{}
		s.node.count.Store(int32(len(s.node.held)))
	}
	w.mu.Unlock()
	w.note(1, sourceManual, notice{since: time.Now(), heard: time.Now(), before: time.Now()})
	return w, w.marks.Load()
}

// A look at 10,000 idle connections takes less than 5 ms.
func TestSweepOf10000(t *testing.T) {
	w, m := idle10000(t)
	var s sweeper
	best := time.Hour
	for range 5 {
		start := time.Now()
		s.list(w, m)
		best = min(best, time.Since(start))
	}
	if len(s.idle) != 5000 {
		t.Fatalf("%d idle sessions on the marked node, want 5000", len(s.idle))
	}
	t.Logf("%v", best)
	if best > 5*time.Millisecond && !raceDetector {
		t.Errorf("the list took %v, want less than 5 ms", best)
	}
}

func BenchmarkSweep10000(b *testing.B) {
	w, m := idle10000(b)
	var s sweeper
	for b.Loop() {
		s.list(w, m)
	}
}
