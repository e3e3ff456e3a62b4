package crdbdrain

import (
	"context"
	"database/sql/driver"
	"errors"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
)

// stdConn is pgx's connection. Embedded under this name it does not hide its own method Conn.
type stdConn = stdlib.Conn

// conn is a connection of the pool: pgx's, and what is known of the node it is on.
//
//	Connect ──▶ connInUse ──IsValid──▶ connIdle ──ResetSession──▶ connInUse
//	                │                      │
//	                └──── Close, cull ─────┴─ sweep ──▶ connGone
//
// The states change by compare-and-swap. Whoever moves a connection to connGone closes it. The sweep can only take one
// that is idle; nothing but the pool touches one in use.
type conn struct {
	*stdConn
	connector *Connector
	pg        *pgconn.PgConn

	// Set for CockroachDB only, before Connect returns; nil and zero elsewhere.
	w      *watchdog
	link   *link
	node   *nodeInfo // of the stamp's node, for the count of its connections
	id     nodeID    // the stamp, to be read through stamp()
	asked  bool      // the stamp is the server's own answer, not the PID's
	opened time.Time // when the dial began

	state    atomic.Uint32 // conn*
	idled    atomic.Int64  // when it became idle, by now()
	returned bool          // IsValid has been called since the last ResetSession; the holder's
	ended    atomic.Bool   // counted as culled or lost
	wouldBe  atomic.Bool   // counted as a would-be cull (observe)
	single   bool          // Driver.Open's: the connector ends with it
}

const (
	connInUse = iota
	connIdle
	connGone
)

// sweepIdle is how long a connection has to have been idle before the sweep or a checkout may cull it. database/sql
// hands a connection that comes back straight to a waiting caller; if that one were culled, the caller would use up one
// of its three tries (database/sql gives up with ErrBadConn after the third).
const sweepIdle = 100 * time.Millisecond

// pingAfter is pgx's rule: a connection that was not used for longer is pinged before it is used again.
const pingAfter = time.Second

// maxPing bounds that ping, so that a half-open peer cannot eat the caller's deadline.
const maxPing = time.Second

var (
	_ driver.Conn               = (*conn)(nil)
	_ driver.ConnBeginTx        = (*conn)(nil)
	_ driver.ConnPrepareContext = (*conn)(nil)
	_ driver.ExecerContext      = (*conn)(nil)
	_ driver.QueryerContext     = (*conn)(nil)
	_ driver.Pinger             = (*conn)(nil)
	_ driver.NamedValueChecker  = (*conn)(nil)
	_ driver.SessionResetter    = (*conn)(nil)
	_ driver.Validator          = (*conn)(nil)
)

var clockStart = time.Now()

// now is the monotonic clock as a number. It is cheaper than time.Now where only a distance is asked for.
func now() int64 { return int64(time.Since(clockStart)) }

// stamp is the ID of the node that the connection is on, or 0 while the rule behind it is not verified.
func (c *conn) stamp() nodeID {
	if c.asked || c.w.rule.Load() == ruleHolds {
		return c.id
	}
	return 0
}

// IsValid is called when the connection comes back to the pool. It discards one that is closed, that is inside a
// transaction, to which the server has said goodbye, or, when the pace allows it, one whose node is marked. It waits
// for nothing.
func (c *conn) IsValid() bool {
	if c.pg.IsClosed() || c.pg.TxStatus() != 'I' {
		return false
	}
	if c.w == nil {
		return true
	}
	if c.link.words.Load() != goodbyeNone {
		c.lost(lostIdle)
		return false
	}
	if m := c.w.marks.Load(); m != nil && c.w.cull(c, m, time.Now(), pointReturn) == gone {
		c.bury()
		return false
	}
	c.returned = true
	c.idled.Store(now())
	c.state.CompareAndSwap(connInUse, connIdle)
	return true
}

// ResetSession is called when the connection is about to be used again; nothing has been sent for the new user. It
// discards one that the sweep has taken, that the server has closed or said goodbye to, or whose node is marked.
func (c *conn) ResetSession(ctx context.Context) error {
	if c.w == nil {
		return c.stdConn.ResetSession(ctx)
	}
	if !c.state.CompareAndSwap(connIdle, connInUse) && c.state.Load() == connGone {
		return driver.ErrBadConn
	}
	hidden := !c.returned // a wrapper hides IsValid: this is the only place that can cull
	c.returned = false
	if c.pg.IsClosed() {
		return driver.ErrBadConn
	}
	switch look := c.link.peeker.peek(); {
	case c.link.words.Load() != goodbyeNone:
		c.lost(lostIdle)
		return driver.ErrBadConn
	case look == peekClosed:
		if c.w.isMarked(c) {
			c.lost(lostIdle)
		}
		return driver.ErrBadConn
	case look == peekPending:
		// A notice, or the last words: a ping reads them and tells which.
		if !c.ping(ctx) {
			if c.link.words.Load() != goodbyeNone || c.w.isMarked(c) {
				c.lost(lostIdle)
			}
			return driver.ErrBadConn
		}
	}
	if m := c.w.marks.Load(); m != nil && (hidden || m.overFor(c) || now()-c.idled.Load() >= int64(sweepIdle)) &&
		c.w.cull(c, m, time.Now(), pointCheckout) == gone {
		c.bury()
		return driver.ErrBadConn
	}
	err := c.stdConn.ResetSession(ctx)
	if err != nil && c.link.words.Load() != goodbyeNone {
		c.lost(lostIdle)
	}
	return err
}

// shouldPing is pgx's rule for its ping at checkout. The ping is made here, within a bound of its own; after one that
// failed the connection is closed, and pgx's ping says so at once.
func (c *conn) shouldPing(ctx context.Context, p stdlib.ShouldPingParams) bool {
	return p.IdleDuration > pingAfter && !c.ping(ctx)
}

// ping reports whether the server answers within a second, or half of what is left of ctx if that is less: enough has
// to be left to go elsewhere.
func (c *conn) ping(ctx context.Context) bool {
	bound := maxPing
	if deadline, ok := ctx.Deadline(); ok {
		bound = min(bound, time.Until(deadline)/2)
	}
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	return c.pg.Ping(ctx) == nil
}

// bury ends a connection that a cull has taken.
func (c *conn) bury() {
	c.w.remove(c)
	c.connector.closeLater(c.stdConn)
}

// Close closes the connection as pgx does. One that was culled or lost is closed in the background, within five seconds
// (stdlib.Conn.Close), so that the caller that returned it does not wait; Connector.Close waits.
func (c *conn) Close() error {
	if c.single {
		defer c.connector.Close() //nolint:errcheck // always nil
	}
	if c.state.Swap(connGone) == connGone {
		return nil // whoever took it closes it
	}
	if c.w == nil {
		return c.stdConn.Close()
	}
	if c.link.words.Load() != goodbyeNone {
		c.lost(lostActive) // heard in the middle of rows, say
	}
	c.w.remove(c)
	if c.ended.Load() {
		c.connector.closeLater(c.stdConn)
		return nil
	}
	return c.stdConn.Close()
}

// discard closes a connection that nobody has had yet, in the background. It is neither a cull nor lost.
func (c *conn) discard() {
	c.ended.Store(true)
	_ = c.Close()
}

// lost counts the connection as closed by the server because its node drained. Only the first count of a connection's
// end counts.
func (c *conn) lost(state lostState) {
	if c.ended.CompareAndSwap(false, true) {
		c.w.countLost(c, state)
	}
}

// rerunError is driver.ErrBadConn to database/sql, which then runs the request on another connection, and the server's
// own error to an application that gets to see it (a pinned sql.Conn is not run again).
type rerunError struct{ error }

func (e *rerunError) Is(target error) bool { return target == driver.ErrBadConn }
func (e *rerunError) Unwrap() error        { return e.error }

// request is what has to be known of a request before it is sent.
type request struct{ outside bool } // outside a transaction

// begin is called before a request is sent.
func (c *conn) begin() request {
	if c.w == nil {
		return request{}
	}
	c.link.begin()
	return request{outside: c.pg.TxStatus() == 'I'}
}

// settle decides what becomes of a request that failed: it is run again (rerunError) only when the server provably did
// not execute it, and surfaces as it is otherwise.
//   - The shutdown notice came with nothing before it that execution could have produced, outside a transaction.
//   - The kernel did not take a byte of the request, outside a transaction.
//   - A BEGIN or a Prepare outside a transaction got no answer: neither leaves anything behind when the session ends.
func (c *conn) settle(ctx context.Context, err error, r request, kind rerunKind) error {
	if c.w == nil || err == nil || !c.pg.IsClosed() {
		return err
	}
	words := c.link.words.Load()
	if words != goodbyeNone || c.w.isMarked(c) && ctx.Err() == nil {
		c.lost(lostActive)
	}
	if errors.Is(err, driver.ErrBadConn) || !c.connector.cfg.rerun || !r.outside || ctx.Err() != nil {
		return err
	}
	if words == goodbyeClean || c.link.unsent.Load() || kind != rerunStatement && !pgconn.Timeout(err) && noAnswer(err, words) {
		c.connector.countRerun(kind)
		return &rerunError{err}
	}
	return err
}

// noAnswer reports whether err is the connection's end and not an answer of the server's to the request.
func noAnswer(err error, words uint32) bool {
	return words != goodbyeNone || sqlState(err) == ""
}

func (c *conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	r := c.begin()
	res, err := c.stdConn.ExecContext(ctx, query, args)
	return res, c.settle(ctx, err, r, rerunStatement)
}

func (c *conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	r := c.begin()
	rows, err := c.stdConn.QueryContext(ctx, query, args)
	return rows, c.settle(ctx, err, r, rerunStatement)
}

func (c *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	r := c.begin()
	tx, err := c.stdConn.BeginTx(ctx, opts)
	return tx, c.settle(ctx, err, r, rerunBegin)
}

func (c *conn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	r := c.begin()
	s, err := c.stdConn.PrepareContext(ctx, query)
	if err != nil || c.w == nil {
		return s, c.settle(ctx, err, r, rerunPrepare)
	}
	return &stmt{stdStmt: s.(*stdStmt), conn: c}, nil //nolint:forcetypeassert // what stdlib.Conn returns
}

// Begin and Prepare are for callers that use the connection through Raw, or through a wrapper that knows no contexts.

func (c *conn) Begin() (driver.Tx, error) { return c.BeginTx(context.Background(), driver.TxOptions{}) }

func (c *conn) Prepare(query string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), query)
}

func (c *conn) Ping(ctx context.Context) error {
	r := c.begin()
	return c.settle(ctx, c.stdConn.Ping(ctx), r, rerunStatement)
}

// stdStmt is pgx's prepared statement.
type stdStmt = stdlib.Stmt

// stmt is pgx's prepared statement, run by conn's rules.
type stmt struct {
	*stdStmt
	conn *conn
}

var (
	_ driver.Stmt             = (*stmt)(nil)
	_ driver.StmtExecContext  = (*stmt)(nil)
	_ driver.StmtQueryContext = (*stmt)(nil)
)

func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	r := s.conn.begin()
	res, err := s.stdStmt.ExecContext(ctx, args)
	return res, s.conn.settle(ctx, err, r, rerunStatement)
}

func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	r := s.conn.begin()
	rows, err := s.stdStmt.QueryContext(ctx, args)
	return rows, s.conn.settle(ctx, err, r, rerunStatement)
}

// Close deallocates the statement. database/sql calls it on idle connections too, so it has to take the connection from
// the sweep while it does; where the sweep was first, the session and its statements are gone already.
func (s *stmt) Close() error {
	c := s.conn
	if c.state.CompareAndSwap(connIdle, connInUse) {
		defer c.state.CompareAndSwap(connInUse, connIdle)
	} else if c.state.Load() == connGone || c.ended.Load() {
		return nil
	}
	return s.stdStmt.Close()
}
