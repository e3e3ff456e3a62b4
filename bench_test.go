package crdbdrain

import (
	"context"
	"database/sql"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// quiet keeps the watchdog from polling while something is measured.
const quiet = "crdbdrain_sources=errors&crdbdrain_poll_interval=24h"

// pair is the same pool twice: through pgx, and through the driver.
func pair(tb testing.TB, c *crdbdraintest.Cluster) (plain *sql.DB, ours *pool) {
	tb.Helper()
	cc, err := pgx.ParseConfig(c.Node(1).DSN())
	if err != nil {
		tb.Fatal(err)
	}
	plain = stdlib.OpenDB(*cc)
	tb.Cleanup(func() { _ = plain.Close() })
	ours = open(tb, c.Node(1).DSN(), quiet)
	for _, db := range []*sql.DB{plain, ours.DB} {
		fill(tb, db, 1)
		checkoutReturn(tb, db)() // the first reset pings
	}
	return plain, ours
}

func checkoutReturn(tb testing.TB, db *sql.DB) func() {
	ctx := context.Background()
	return func() {
		conn, err := db.Conn(ctx)
		if err != nil {
			tb.Fatal(err)
		}
		_ = conn.Close()
	}
}

// G08: checkout and return cost no allocation more than with pgx, while no node is marked.
func TestG08CheckoutAndReturnAllocateNothingMore(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector allocates")
	}
	plain, ours := pair(t, startCluster(t, crdbdraintest.Config{Nodes: 1}))
	want := testing.AllocsPerRun(2000, checkoutReturn(t, plain))
	got := testing.AllocsPerRun(2000, checkoutReturn(t, ours.DB))
	if got > want {
		t.Errorf("%v allocations for checkout and return, with pgx %v", got, want)
	}
}

// G08: the hooks themselves allocate nothing.
func TestG08HooksAllocateNothing(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector allocates")
	}
	c := hookedConn(t)
	ctx := context.Background()
	if n := testing.AllocsPerRun(2000, func() { c.IsValid() }); n > 0 {
		t.Errorf("IsValid: %v allocations", n)
	}
	if n := testing.AllocsPerRun(2000, func() { c.s.link.peeker.peek() }); n > 0 {
		t.Errorf("the look at the socket: %v allocations", n)
	}
	if n := testing.AllocsPerRun(2000, func() {
		if !c.IsValid() || c.ResetSession(ctx) != nil {
			t.Error("the connection is bad")
		}
	}); n > 0 {
		t.Errorf("IsValid and ResetSession: %v allocations", n)
	}
}

// hookedConn is a connection to a node, and nobody's.
func hookedConn(tb testing.TB) *conn {
	tb.Helper()
	p := open(tb, startCluster(tb, crdbdraintest.Config{Nodes: 1}).DSN(), quiet)
	dc, err := p.c.Connect(context.Background())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = dc.Close() })
	c := dc.(*conn)
	c.IsValid()
	if err := c.ResetSession(context.Background()); err != nil { // the first pings
		tb.Fatal(err)
	}
	return c
}

// BenchmarkCheckoutReturn is sql.DB.Conn and its Close while no node is marked: with pgx, and with the driver.
func BenchmarkCheckoutReturn(b *testing.B) {
	plain, ours := pair(b, startCluster(b, crdbdraintest.Config{Nodes: 1}))
	for _, bb := range []struct {
		name string
		db   *sql.DB
	}{{"pgx", plain}, {"crdbdrain", ours.DB}} {
		b.Run(bb.name, func(b *testing.B) {
			b.ReportAllocs()
			use := checkoutReturn(b, bb.db)
			for b.Loop() {
				use()
			}
		})
	}
}

// BenchmarkIsValidAndMarkCheck is what a return costs while no node is marked, and the part of a checkout that asks for
// marks.
func BenchmarkIsValidAndMarkCheck(b *testing.B) {
	c := hookedConn(b)
	b.ReportAllocs()
	for b.Loop() {
		if !c.IsValid() || c.s.w.marks.Load() != nil {
			b.Fatal("the connection is bad")
		}
		c.s.state.CompareAndSwap(sessionIdle, sessionInUse)
	}
}

// BenchmarkCheckoutPeek is the look at the socket that a checkout takes.
func BenchmarkCheckoutPeek(b *testing.B) {
	c := hookedConn(b)
	if c.s.link.peeker == nil {
		b.Skip("this platform has no way to look at a socket")
	}
	b.ReportAllocs()
	for b.Loop() {
		if look := c.s.link.peeker.peek(); look != peekQuiet {
			b.Fatal(look)
		}
	}
}

// blind takes the look at the socket away from the pool's one connection.
func blind(tb testing.TB, p *pool) {
	pinned, err := p.Conn(context.Background())
	if err != nil {
		tb.Fatal(err)
	}
	defer pinned.Close()
	_ = pinned.Raw(func(dc any) error {
		dc.(*conn).s.link.peeker = nil
		return nil
	})
}

// BenchmarkSelect1 is SELECT 1 through a simulated node on the loopback, with pgx and with the driver in turn, in small
// blocks so that what else the machine does meets all alike. The ratios are those of the medians of the single calls to
// pgx's: of the driver as it is, and without the look at the socket that each checkout takes.
func BenchmarkSelect1(b *testing.B) {
	c := startCluster(b, crdbdraintest.Config{Nodes: 1})
	plain, ours := pair(b, c)
	_, blinded := pair(b, c)
	blind(b, blinded)
	const block = 50
	took := [3][]time.Duration{}
	dbs := [3]*sql.DB{plain, ours.DB, blinded.DB}
	for round := 0; b.Loop(); round++ {
		for i := range dbs {
			which := (i + round) % len(dbs) // who goes first changes
			call := selectOne(dbs[which])
			for range block {
				start := time.Now()
				if err := call(); err != nil {
					b.Fatal(err)
				}
				took[which] = append(took[which], time.Since(start))
			}
		}
	}
	var medians [3]float64
	for i := range took {
		slices.Sort(took[i])
		medians[i] = float64(took[i][len(took[i])/2])
	}
	b.ReportMetric(0, "ns/op") // of three blocks: it says nothing
	b.ReportMetric(medians[0], "pgx-ns")
	b.ReportMetric(medians[1], "crdbdrain-ns")
	b.ReportMetric(medians[1]/medians[0], "ratio")
	b.ReportMetric(medians[2]/medians[0], "ratio-without-peek")
}
