package main

import (
	"context"
	"database/sql/driver"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// load is a closed loop: each worker waits for its operation, pauses, and does the next. What becomes of an operation is
// kept by time, so that it can be told afterwards what was steady and what met the roll.
type load struct {
	p      pool
	begin  time.Time
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu      sync.Mutex
	samples []sample       // guarded by mu
	errors  map[string]int // by code; guarded by mu
}

// sample is one operation; times are counted from the load's begin.
type sample struct {
	at, took time.Duration
	failed   bool
}

func (s sample) end() time.Duration { return s.at + s.took }

// opTimeout is the deadline of an operation, like that of a service's call.
const opTimeout = 10 * time.Second

func startLoad(s scenario, p pool) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{p: p, begin: time.Now(), cancel: cancel, errors: make(map[string]int)}
	for i := range s.workers {
		l.done.Go(func() {
			var seen []sample
			for n := i; pause(ctx, s.think/2+rand.N(s.think)); n++ {
				seen = append(seen, l.one(n))
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			l.samples = append(l.samples, seen...)
		})
	}
	return l
}

// one is one operation.
func (l *load) one(n int) sample {
	ctx, cancel := context.WithTimeout(context.Background(), opTimeout)
	defer cancel()
	at := time.Now()
	err := l.p.run(ctx, n)
	took := time.Since(at)
	if err != nil {
		l.mu.Lock()
		l.errors[errorCode(err)]++
		l.mu.Unlock()
	}
	return sample{at.Sub(l.begin), took, err != nil}
}

// burst is n operations at once, on top of the workers'.
func (l *load) burst(n int) {
	seen := make([]sample, n)
	var wg sync.WaitGroup
	for i := range seen {
		wg.Go(func() { seen[i] = l.one(i) })
	}
	wg.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.samples = append(l.samples, seen...)
}

// stop ends the load. Operations that have begun come to their end.
func (l *load) stop() {
	l.cancel()
	l.done.Wait()
}

// errorCode names an error: its SQLSTATE, or a few fixed words.
func errorCode(err error) string {
	var pgErr *pgconn.PgError
	var netErr net.Error
	switch {
	case errors.As(err, &pgErr):
		return pgErr.Code
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return "unexpected EOF"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "connection reset"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.Is(err, driver.ErrBadConn):
		return "bad connection"
	case errors.Is(err, pgconn.ErrConnClosed):
		return "closed connection"
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &netErr) && netErr.Timeout():
		return "timeout"
	}
	return "other"
}
