package crdbdrain

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// pace is the token bucket of culls, one for a cluster and process: it spreads them, so that the replacements do not
// stampede. Its burst is one: a long calm saves nothing up. No caller ever waits for a token.
type pace struct {
	mu      sync.Mutex
	limiter *rate.Limiter // guarded by mu; its own lock does not cover changing the limit and taking a token together
	latest  time.Time     // guarded by mu; the last moment at which a token was asked for
}

// maxStale is how old a caller's reading of the clock may be: the scheduler can stop it between the reading and its use.
const maxStale = 500 * time.Millisecond

// token is one that was taken, to be given back if it turns out not to be needed. The zero token is none.
type token struct{ *rate.Reservation }

func (k token) giveBack(now time.Time) {
	if k.Reservation != nil {
		k.CancelAt(now)
	}
}

// take takes a token if there is one at now. gap is the time between two tokens; 0 is no pacing. A caller who meets
// another gets none: in a queue for the lock, hundreds of returning connections would wait for milliseconds.
func (p *pace) take(now time.Time, gap time.Duration) (token, bool) {
	if gap <= 0 {
		return token{}, true
	}
	if !p.mu.TryLock() {
		return token{}, false
	}
	defer p.mu.Unlock()
	age := p.latest.Sub(now)
	if age > 0 && age < maxStale {
		now = p.latest // the limiter would go back with the reading, and count the time since a second time
	}
	p.latest = now
	if p.limiter == nil || age >= maxStale {
		p.limiter = rate.NewLimiter(rate.Every(gap), 1)
		if age >= maxStale { // the clock has been set back
			p.limiter.AllowN(now, 1)
		}
	}
	if l := rate.Every(gap); l != p.limiter.Limit() {
		p.limiter.SetLimitAt(now, l)
	}
	// A reservation that is cancelled at once would do, but for a token that is given back meanwhile: it would be lost.
	if p.limiter.TokensAt(now) < 1-1e-9 {
		return token{}, false
	}
	return token{p.limiter.ReserveN(now, 1)}, true
}

// until returns how long after now there is a token, at most gap. The limiter's burst of one keeps nothing for who comes
// late: who comes when the token does loses nothing.
func (p *pace) until(now time.Time, gap time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if gap <= 0 || p.limiter == nil {
		return 0
	}
	return min(max(time.Duration((1-p.limiter.TokensAt(now))*float64(gap)), 0), gap)
}

// windowShare is the part of the window in which the connections are to leave, from when the drain is noticed. The rest is
// for what delays them: the poll that notices the drain, a statement that is still running, the server noticing that the
// last one has gone. Where the poll alone takes more than a fifth of the window they have to hurry: calmShare is the part
// in which they are to leave from when the node was last known not to drain.
const (
	windowShare = 0.6
	calmShare   = 0.8
)

// defaultWindow is what crdbdrain_window=auto stands for where the server's settings are not known.
const defaultWindow = 10 * time.Second

// minWindow stands for a shorter window: there is then no time, but still an order.
const minWindow = 100 * time.Millisecond

// leaving is a marked node's need: connections that have to leave, and the time they have.
type leaving struct {
	conns int
	left  time.Duration
	least float64 // culls per second that spread evenly those of the beginning
}

// lastShare is the part of the window in which a connection that is in use has to come back.
const lastShare = 0.9

// need returns what a node needs at now that had held connections when it was noticed and has conns. calm is when it was
// last known not to drain; zero if never. Once the time is used up, the rest leaves at a tenth of the window: late, but
// still not at once.
func need(conns, held int, now, noticed, calm time.Time, window time.Duration) leaving {
	share := func(of float64) time.Duration { return time.Duration(float64(window) * of) }
	target := noticed.Add(share(windowShare))
	if hurry := calm.Add(share(calmShare)); !calm.IsZero() && hurry.Before(target) {
		target = hurry
	}
	n := leaving{conns, max(target.Sub(now), window/10), 0}
	if conns > 0 || now.Before(target) {
		n.least = float64(held) / max(target.Sub(noticed), window/10).Seconds()
	}
	return n
}

// gap returns the time between two culls: the stagger, or less where the connections would otherwise not all have left
// their nodes in the time that is left. The last ones leave no slower than the first: what is left of the time does not
// fall below a tenth of the window, and the need, measured by it alone, would die away and never end. A node that is left
// before its time leaves its part of the pace to the others, which have been slower meanwhile. A stagger of 0 is no pacing.
func gap(stagger time.Duration, nodes []leaving) time.Duration {
	perSecond, conns := 0.0, 0
	for _, n := range nodes {
		conns += max(n.conns, 0)
		perSecond += max(float64(n.conns)/max(n.left, time.Millisecond).Seconds(), n.least)
	}
	if conns == 0 || perSecond == 0 {
		return stagger
	}
	return min(stagger, time.Duration(float64(time.Second)/perSecond))
}
