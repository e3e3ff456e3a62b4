package crdbdrain

import (
	"context"
	"database/sql"
	"database/sql/driver"

	"github.com/jackc/pgx/v5"
)

// unwrapDepth bounds how many wrappers unwrap looks through.
const unwrapDepth = 16

// unwrap looks through wrappers that show what they wrap by a method Raw() driver.Conn, as XSAM/otelsql does.
func unwrap(driverConn any) any {
	for range unwrapDepth {
		w, ok := driverConn.(interface{ Raw() driver.Conn })
		if !ok {
			break
		}
		driverConn = w.Raw()
	}
	return driverConn
}

// PgxConn returns the pgx connection of a driver connection, as [sql.Conn.Raw] shows it: this driver's, pgx's own, or
// one that wrappers such as XSAM/otelsql hold. ok is false for any other.
func PgxConn(driverConn any) (pc *pgx.Conn, ok bool) {
	c, ok := unwrap(driverConn).(interface{ Conn() *pgx.Conn })
	if !ok {
		return nil, false
	}
	return c.Conn(), true
}

// Draining returns a channel that is closed when the node of a long-lived connection is marked: a changefeed, a listener,
// a holder of advisory locks can then finish in good order and go elsewhere. It is closed already if the node is marked
// now. Nothing else happens to the connection: one that is in use is never closed by the driver. The channel stays open,
// for ever, if ctx has ended, on PostgreSQL, where stamps are unknown, and for connections of other drivers. It is safe
// for concurrent use; the connection must not be in use meanwhile, as with any method of [sql.Conn].
func Draining(ctx context.Context, sc *sql.Conn) <-chan struct{} {
	var s *session
	if ctx.Err() == nil {
		_ = sc.Raw(func(driverConn any) error {
			if c, ok := unwrap(driverConn).(*conn); ok {
				if err := c.claim(ctx); err != nil {
					return err
				}
				c.untouched = false // its session is watched from now on
				s = c.s
			}
			return nil
		})
	}
	if s == nil || s.w == nil {
		return make(chan struct{})
	}
	return s.w.watch(s)
}

// watch returns the session's channel, which remark closes.
func (w *watchdog) watch(s *session) <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s.draining == nil {
		s.draining = make(chan struct{})
		if m := w.marks.Load(); m != nil {
			w.signal(m.of)
		}
	}
	return s.draining
}

// signal closes the channels of sessions that have to leave. w.mu is held.
func (w *watchdog) signal(of map[nodeID]*mark) {
	for id, mk := range of {
		for s := range mk.node.held {
			if s.draining != nil && !s.signalled && s.stamp() == id {
				s.signalled = true
				close(s.draining)
			}
		}
	}
}
