package crdbdrain

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// Shutdown leaves the pool alone for a second, closes idle connections one after the other and busy ones when they come
// back, opens none, and ends within its bound.
func TestShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, p := virtualPool(t, crdbdraintest.Config{}, 20, "")
		defer c.Close()
		defer p.Close()
		time.Sleep(time.Minute)
		tx, err := p.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		var sum ShutdownSummary
		done := make(chan error, 1)
		begin := time.Now()
		go func() {
			var err error
			sum, err = p.c.Shutdown(context.Background())
			done <- err
		}()
		time.Sleep(shutdownGrace - time.Millisecond)
		if n := p.Stats().OpenConnections; n != 20 {
			t.Errorf("%d connections in the time of grace", n)
		}
		if err := selectOne(p.DB)(); err != nil {
			t.Errorf("in the time of grace: %v", err)
		}
		if _, err := p.c.Connect(t.Context()); !errors.Is(err, errShutdown) {
			t.Errorf("a new connection: %v", err)
		}
		var opens []int
		for range 19 {
			opens = append(opens, c.Stats().Open)
			time.Sleep(shutdownGap)
		}
		for i, n := range opens {
			if want := 21 - i; n > want+1 || n < want-2 { // the watchdog's is one of them
				t.Errorf("after %d gaps %d are open: %v", i, n, opens)
				break
			}
		}
		select {
		case err := <-done:
			t.Fatalf("over with a transaction open: %v", err)
		case <-time.After(5 * time.Second):
		}
		mustExec(t, tx, "UPDATE t SET x = 1")
		if err := tx.Commit(); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		if sum.Idle != 19 || sum.Returned != 1 || sum.Left != 0 || sum.Duration > time.Since(begin) {
			t.Errorf("%+v", sum)
		}
		if err := selectOne(p.DB)(); !errors.Is(err, errShutdown) {
			t.Errorf("afterwards: %v", err)
		}
	})
}

// A thousand idle connections take no longer than twelve seconds, a transaction that never ends no longer than the context.
func TestShutdownIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, p := virtualPool(t, crdbdraintest.Config{}, 1000, "")
		defer c.Close()
		defer p.Close()
		time.Sleep(10 * time.Second)
		begin := time.Now()
		if sum, err := p.c.Shutdown(context.Background()); err != nil || sum.Idle != 1000 {
			t.Errorf("%+v, %v", sum, err)
		}
		if d := time.Since(begin); d > shutdownGrace+shutdownLimit+time.Second || d < shutdownGrace+5*time.Second {
			t.Errorf("it took %v", d)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		c, p := virtualPool(t, crdbdraintest.Config{}, 4, "")
		defer c.Close()
		defer p.Close()
		time.Sleep(10 * time.Second)
		tx, err := p.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		begin := time.Now()
		sum, err := p.c.Shutdown(ctx)
		if !errors.Is(err, context.DeadlineExceeded) || sum.Left != 1 || sum.Idle != 3 || time.Since(begin) > 3100*time.Millisecond {
			t.Errorf("%+v, %v after %v", sum, err, time.Since(begin))
		}
		mustExec(t, tx, "UPDATE t SET x = 1") // it is still its holder's
		if err := tx.Commit(); err != nil {
			t.Error(err)
		}
	})
}

// A connection that comes back does not make its caller wait for its close, not even when the server does not answer.
func TestReturnDoesNotWaitForAClose(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	p := open(t, c.DSN(), still)
	p.SetMaxIdleConns(0) // every return is a close
	sc, err := p.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, sc, "UPDATE t SET x = 1")
	c.Node(1).Hang(true)
	begin := time.Now()
	_ = sc.Close()
	if d := time.Since(begin); d > 500*time.Millisecond {
		t.Errorf("the return took %v", d)
	}
	c.Node(1).Hang(false)
}

// Marks by hand, and the barrier for roll scripts.
func TestSetDrainingAndWaitDrained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, p := virtualPool(t, crdbdraintest.Config{}, 30, "crdbdrain_sources=instances,manual")
		defer c.Close()
		defer p.Close()
		time.Sleep(time.Minute)
		for _, node := range []int{0, -1, maxNodeID + 1} {
			if p.c.SetDraining(node, true) == nil || p.c.WaitDrained(t.Context(), node) == nil {
				t.Errorf("node %d is accepted", node)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if err := p.c.WaitDrained(ctx, 2); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("without a mark: %v", err)
		}
		cancel()
		tx, err := p.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.c.SetDraining(2, true); err != nil {
			t.Fatal(err)
		}
		drained := make(chan error, 1)
		go func() { drained <- p.c.WaitDrained(context.Background(), 2) }()
		time.Sleep(12 * time.Second)
		busy := c.Node(2).Stats().Open
		if err := tx.Commit(); err != nil {
			t.Error(err)
		}
		if err := <-drained; err != nil {
			t.Error(err)
		}
		time.Sleep(time.Second)                             // Terminate
		if n := c.Node(2).Stats().Open; n > 1 || busy > 2 { // the watchdog's may be one
			t.Errorf("%d connections, %d before the transaction's end", n, busy)
		}
		if m := p.c.watchdog.Load().marks.Load(); m == nil || m.of[2] == nil || m.of[2].source != sourceManual {
			t.Errorf("the marks: %+v", m)
		}
		if err := p.c.SetDraining(2, false); err != nil {
			t.Error(err)
		}
		if err := p.c.SetDraining(2, false); err != nil {
			t.Errorf("a second time: %v", err)
		}
		if p.c.watchdog.Load().marks.Load() != nil {
			t.Error("the mark is still there")
		}
		if err := p.c.WaitDrained(t.Context(), 77); err != nil {
			t.Errorf("a node without connections: %v", err)
		}
		if s := p.c.Stats(); s.Culled < 9 || s.Lost > 0 {
			t.Errorf("%+v", s)
		}
	})
}

// A mark by hand does not outlive the drain that it was made for.
func TestAManualMarkEndsWithItsDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, p := virtualPool(t, crdbdraintest.Config{Settings: crdbdraintest.Settings{
			InitialWait: 2 * time.Second, ConnectionsTimeout: 20 * time.Second, TransactionsTimeout: 10 * time.Second}}, 12, "crdbdrain_sources=instances,manual&crdbdrain_poll_interval=1s")
		defer c.Close()
		defer p.Close()
		time.Sleep(5 * time.Second)
		if err := p.c.SetDraining(2, true); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		w := p.c.watchdog.Load()
		if m := w.marks.Load(); m == nil || m.of[2] == nil {
			t.Error("the mark went before the drain began")
		}
		c.Node(2).Drain(context.Background())
		c.Node(2).Stop()
		time.Sleep(2 * time.Second)
		c.Node(2).Start()
		time.Sleep(5 * time.Second)
		if m := w.marks.Load(); m != nil {
			t.Errorf("it is back, and still marked: %+v", m.of[2])
		}
	})
}

// A connection that is being dialled is one that is left.
func TestShutdownWaitsForDials(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	p := open(t, c.DSN(), still)
	mustExec(t, p, "UPDATE t SET x = 1")
	c.Node(1).Hang(true)
	connected := make(chan error, 1)
	go func() {
		dc, err := p.c.Connect(context.Background())
		if err == nil {
			_ = dc.Close()
		}
		connected <- err
	}()
	eventually(t, "it is being dialled", func() bool { return p.c.dialing.Load() == 1 })
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	done := make(chan error, 1)
	go func() { _, err := p.c.Shutdown(ctx); done <- err }()
	eventually(t, "the idle one is closed", func() bool { _, _, n := p.c.open(); return n == 0 })
	onlyFor(t, 3*shutdownGap, "Shutdown waits", func() bool { return len(done) == 0 })
	c.Node(1).Hang(false)
	if err := <-connected; err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// To wait for a node that there is no connection to leaves nothing behind.
func TestWaitDrainedLeavesNothing(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	p := open(t, c.DSN(), still)
	mustExec(t, p, "UPDATE t SET x = 1")
	w := p.dog(t)
	for node := 100; node < 200; node++ {
		if err := p.c.WaitDrained(t.Context(), node); err != nil {
			t.Fatal(err)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.nodes); n > 2 { // the connection's, and 0
		t.Errorf("%d nodes are known", n)
	}
}

// A process that slept takes what the sources said for stale, not what somebody marked by hand. After Close nothing is
// marked, and there is an error.
func TestAManualMarkSurvivesASuspension(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	p := open(t, c.DSN(), "crdbdrain_sources=instances,manual&crdbdrain_poll_interval=1h&crdbdrain_spares=0")
	mustExec(t, p, "UPDATE t SET x = 1")
	w := p.dog(t)
	if err := p.c.SetDraining(1, true); err != nil {
		t.Fatal(err)
	}
	w.note(2, sourceInstances, notice{since: time.Now(), before: time.Now()})
	w.forget()
	if m := w.marks.Load(); m == nil || m.of[1] == nil || m.of[2] != nil {
		t.Errorf("the marks: %+v", m)
	}
	_ = p.Close()
	if err := p.c.SetDraining(1, true); !errors.Is(err, errClosed) {
		t.Errorf("SetDraining after Close: %v", err)
	}
	if h, err := NewFeedHandler(p.c, FeedConfig{}); err == nil {
		_ = h.Close()
		t.Error("a feed of a connector that is closed")
	}
}
