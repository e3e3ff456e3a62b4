package crdbdraintest

import (
	"context"
	"errors"
	"time"
)

// ErrUndrained is DrainResult.Err of a drain that Undrain cancelled.
var ErrUndrained = errors.New("crdbdraintest: the drain was cancelled")

// cancelGrace is how long a node waits for cancelled sessions at the deadline
// (pkg/sql/pgwire/server.go, cancelMaxWait).
const cancelGrace = time.Second

// Drain drains the node in the server's order and returns when step 5 is done.
// The process stays up then, draining and refusing, until Stop. A node that is
// draining or down already is left alone, with a zero result.
//
// If ctx ends first the drain stops where it is: the node keeps the signals it
// has given so far, as with an operator who interrupts it.
func (n *Node) Drain(ctx context.Context) DrainResult {
	set := n.c.currentSettings()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	n.mu.Lock()
	if !n.up || n.step != Serving || n.undrain != nil {
		n.mu.Unlock()
		return DrainResult{}
	}
	incarnation := n.ctx
	n.undrain = cancel
	counters := &DrainResult{}
	n.drain = counters
	n.mu.Unlock()
	stop := context.AfterFunc(incarnation, func() { cancel(errDown) })
	defer stop()

	var r DrainResult
	begin := time.Now()
	last := begin
	lap := func(d *time.Duration) {
		now := time.Now()
		*d = now.Sub(last)
		last = now
	}
	err := func() error {
		// Step 0 and step 1, a fixed sleep.
		if err := n.enter(ctx, incarnation, Announced); err != nil {
			return err
		}
		if err := n.enter(ctx, incarnation, Unready); err != nil {
			return err
		}
		err := sleep(ctx, set.InitialWait)
		lap(&r.InitialWait)
		if err != nil {
			return err
		}
		// Step 2 refuses connections whatever the timeout, and ends early.
		if err := n.enter(ctx, incarnation, Refusing); err != nil {
			return err
		}
		err = n.awaitEmpty(ctx, set.ConnectionsTimeout)
		lap(&r.Connections)
		if err != nil {
			return err
		}
		if set.JobsTimeout > 0 {
			if err := n.enter(ctx, incarnation, JobsWait); err != nil {
				return err
			}
			err = sleep(ctx, set.JobsTimeout)
			lap(&r.Jobs)
			if err != nil {
				return err
			}
		}
		// Step 3 puts a drain request into every session's queue; 3b cancels what is
		// left, and cuts what is left of that.
		if err := n.enter(ctx, incarnation, Closing); err != nil {
			return err
		}
		err = n.awaitEmpty(ctx, set.TransactionsTimeout)
		if err == nil {
			if left := n.sessions(); len(left) > 0 {
				err = n.enter(ctx, incarnation, Cancelling)
				if err == nil {
					for _, s := range left {
						s.cancelSession()
					}
					err = n.awaitEmpty(ctx, cancelGrace)
				}
				for _, s := range n.sessions() {
					n.lost(s.cutByDrain())
				}
			}
		}
		lap(&r.Transactions)
		if err != nil {
			return err
		}
		// Steps 4 and 5. Only now does gossip hear of it.
		if err := n.enter(ctx, incarnation, Departed); err != nil {
			return err
		}
		err = n.enter(ctx, incarnation, Flagged)
		lap(&r.Rest)
		return err
	}()
	r.Err = err
	r.Duration = time.Since(begin)

	n.mu.Lock()
	defer n.mu.Unlock()
	r.LostIdle, r.LostBusy = counters.LostIdle, counters.LostBusy
	if n.drain == counters {
		n.undrain = nil
	}
	return r
}

// Undrain cancels the drain, running or complete: all signals are taken back,
// and connections are accepted again. Connections that are lost stay lost.
func (n *Node) Undrain() {
	n.mu.Lock()
	if !n.up || n.step == Serving {
		n.mu.Unlock()
		return
	}
	if n.undrain != nil {
		n.undrain(ErrUndrained)
	}
	n.step = Serving
	n.gossipLocked(func(l *liveness) { l.draining = false })
	n.changedLocked()
	n.mu.Unlock()
	for _, s := range n.sessions() {
		s.withdrawDrain()
	}
	n.onStep(Serving)
}

// Step returns how far the node's drain has come.
func (n *Node) Step() Step {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.step
}

// WaitStep returns nil as soon as the node's drain has come to this step or
// further. WaitStep(ctx, Serving) waits for the node to be up and not draining.
func (n *Node) WaitStep(ctx context.Context, step Step) error {
	for {
		n.mu.Lock()
		done, changed := n.step >= step, n.changed
		if step == Serving {
			done = n.up && n.step == Serving
		}
		n.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// enter is the next step of the drain of one incarnation of the node.
func (n *Node) enter(ctx, incarnation context.Context, step Step) error {
	n.mu.Lock()
	err := context.Cause(ctx)
	if err == nil && (!n.up || n.ctx != incarnation) {
		err = errDown
	}
	if err != nil {
		n.mu.Unlock()
		return err
	}
	n.step = step
	switch step {
	case Closing:
		for s, admitted := range n.conns {
			if admitted {
				s.requestDrain()
			}
		}
	case Flagged:
		n.gossipLocked(func(l *liveness) { l.draining = true })
	}
	n.changedLocked()
	n.mu.Unlock()
	n.onStep(step)
	return nil
}

func (n *Node) onStep(step Step) {
	if f := n.c.cfg.OnStep; f != nil {
		f(n, step)
	}
}

// sessions returns the sessions of now.
func (n *Node) sessions() []*session {
	n.mu.Lock()
	defer n.mu.Unlock()
	var all []*session
	for s, admitted := range n.conns {
		if admitted {
			all = append(all, s)
		}
	}
	return all
}

// lost counts a connection that the drain closed.
func (n *Node) lost(lost, busy bool) {
	if !lost {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if busy {
		n.stats.LostBusy++
	} else {
		n.stats.LostIdle++
	}
	if n.drain != nil {
		if busy {
			n.drain.LostBusy++
		} else {
			n.drain.LostIdle++
		}
	}
}

// awaitEmpty waits until the node has no session, for at most d. Only the end of
// ctx is an error.
func (n *Node) awaitEmpty(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		n.mu.Lock()
		open, changed := n.open, n.changed
		n.mu.Unlock()
		if open == 0 {
			return context.Cause(ctx)
		}
		select {
		case <-changed:
		case <-timer.C:
			return context.Cause(ctx)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
