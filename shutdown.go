package crdbdrain

import (
	"context"
	"fmt"
	"time"
)

// ShutdownSummary is what [Connector.Shutdown] came to.
type ShutdownSummary struct {
	Idle     int // connections that were closed while idle
	Returned int // that were in use, and closed when they came back
	Left     int // that are still in use
	Duration time.Duration
}

const (
	// shutdownGrace is how long the pool is left alone after Shutdown was called, or a quarter of what is left of its
	// context if that is less: those who send work to this process have to hear first that it is leaving.
	shutdownGrace = time.Second
	shutdownGap   = 100 * time.Millisecond // longest time between two idle connections' ends
	shutdownLimit = 12 * time.Second       // and of all of them
	shutdownLook  = 20 * time.Millisecond
)

var errShutdown = configError("the connector is shutting down and opens no new connections")

// Shutdown empties the connector's pool in good order, for a process that is about to end: it opens no new connection from
// now on, leaves the pool alone for a second, closes idle connections one after the other (the gap is the window divided by
// their number, and at most 0.1 s; all within 12 s) instead of all at once, and those in use when they come back. It returns
// when none is left, or when ctx ends, then with ctx's error and the number of connections still in use. Nothing in use is
// closed. A request that finds no connection gets an error, so stop the work first. [sql.DB.Close] comes after it, and
// stays immediate. On PostgreSQL idle connections are left to DB.Close. It is safe for concurrent use.
func (c *Connector) Shutdown(ctx context.Context) (sum ShutdownSummary, err error) {
	start, before := time.Now(), c.returned.Load()
	c.shutting.Store(true)
	c.tendSpares(0, start, 0)
	grace := shutdownGrace
	if deadline, ok := ctx.Deadline(); ok {
		grace = min(grace, time.Until(deadline)/4)
	}
	tick := time.NewTimer(grace)
	defer tick.Stop()
	gap := time.Duration(0)
wait:
	for {
		select {
		case <-ctx.Done():
			break wait
		case <-tick.C:
		}
		c.leaving.Store(true)
		dials := c.dialing.Load() // first: what has been dialled by then is open
		idle, n, left := c.open()
		if left == 0 && dials == 0 {
			break
		}
		if n > 0 && gap == 0 {
			gap = min(c.watchdog.Load().window()/time.Duration(n), shutdownGap, shutdownLimit/time.Duration(n))
		}
		next := shutdownLook
		if idle != nil && idle.state.CompareAndSwap(sessionIdle, sessionGone) {
			sum.Idle++
			idle.ended.Store(true)
			_ = idle.bury()
			idle.dropReplacement()
			next = gap
		}
		tick.Reset(next)
	}
	_, _, sum.Left = c.open()
	sum.Returned, sum.Duration = int(c.returned.Load()-before), time.Since(start)
	c.log.Info("crdbdrain: shut down", "idle", sum.Idle, "returned", sum.Returned, "left", sum.Left, "duration", sum.Duration)
	if sum.Left > 0 {
		return sum, fmt.Errorf("crdbdrain: %d connections are still in use: %w", sum.Left, ctx.Err())
	}
	return sum, nil
}

// open returns the connector's session that has been idle longest, how many are idle, and how many there are.
func (c *Connector) open() (longest *session, idle, all int) {
	w := c.watchdog.Load()
	if w == nil {
		return nil, 0, 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.nodes {
		for s := range n.held {
			if s.connector != c || s.reserve.Load() || s.state.Load() == sessionGone {
				continue
			}
			all++
			if s.state.Load() != sessionIdle {
				continue
			}
			idle++
			if longest == nil || s.idled.Load() < longest.idled.Load() {
				longest = s
			}
		}
	}
	return longest, idle, all
}
