package crdbdrain

import (
	"context"
	"database/sql/driver"
	"errors"
	"io"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
)

// stdConn is pgx's connection. Embedded under this name it does not hide its own method Conn.
type stdConn = stdlib.Conn

// session is one connection to a server: pgx's, and what is known of the node it is on. For PostgreSQL, w is nil and
// nothing below it is set.
//
//	sessionInUse ──IsValid──▶ sessionIdle ──ResetSession, first use──▶ sessionInUse
//	      │            dial ──▶ │
//	      └──── Close, cull ────┴─ sweep ──▶ sessionGone
//
// A new one is idle until its first use: database/sql hands it out without ResetSession, or, where the caller it was
// dialled for has been served otherwise, puts it into the pool without IsValid, for as long as it pleases.
//
// The states change by compare-and-swap. Whoever moves a session to sessionGone closes it. The sweep can only take one
// that is idle; nothing but the pool touches one in use.
type session struct {
	std       *stdConn // nil in a pgxpool
	pg        *pgconn.PgConn
	connector *Connector

	w      *watchdog
	link   *link
	node   *nodeInfo     // of the stamp's node, for the count of its connections
	id     nodeID        // the stamp, to be read through stamp()
	asked  bool          // the stamp is the server's own answer, not the PID's
	opened time.Time     // when the dial began
	jitter time.Duration // on top of its TTL, drawn once

	checkedOut int64 // by now(): pgx's measure of when to ping; the holder's
	prepared   bool  // it has been handed out, in a pgxpool; the holder's

	draining  chan struct{} // closed when the node is marked; made on demand; guarded by w.mu
	signalled bool          // it is closed; guarded by w.mu

	// The session that takes this one's place with its holder: at once where the watchdog has taken this one, when it comes
	// back where it is in use. Whoever swaps it out owns it.
	replacement atomic.Pointer[session]
	reserve     atomic.Bool  // it has no holder yet: a spare, or a replacement
	reason      cullReason   // why this one replaces another; written before it is one
	heldUntil   atomic.Int64 // by now(): a replacement has waited in vain for it to come back, no other is dialled for it

	placed  atomic.Bool   // it has a place under the ceiling
	leave   atomic.Uint32 // in a pgxpool: it is to be given up when it comes back, for this cullReason + 1
	state   atomic.Uint32 // session*
	idled   atomic.Int64  // when it became idle, by now()
	ended   atomic.Bool   // counted as culled or lost
	wouldBe atomic.Bool   // counted as a would-be cull (observe)
}

const (
	sessionInUse = iota
	sessionIdle
	sessionGone
)

// sweepIdle is how long a session has to have been idle before the sweep or a checkout may cull it. database/sql hands a
// connection that comes back straight to a waiting caller.
const sweepIdle = 100 * time.Millisecond

// pingAfter is pgx's rule: a connection that was not used for longer is pinged before it is used again.
const pingAfter = time.Second

// maxPing bounds that ping, so that a half-open peer cannot eat the caller's deadline. Where servers have lately been slow
// to welcome a connection they are slow, and not gone: the bound is then twice what that took, at most maxSlowPing.
const (
	maxPing     = time.Second
	maxSlowPing = 5 * time.Second
)

// clockStart is long ago, so that now is positive, also on the clock of testing/synctest, which begins in 2000: 0 can
// then stand for "never".
var clockStart = time.Now().Add(-50 * 365 * 24 * time.Hour)

// now is the monotonic clock as a number. It is cheaper than time.Now where only a distance is asked for.
func now() int64 { return int64(time.Since(clockStart)) }

// stamp is the ID of the node that the session is on, or 0 while the rule behind it is not verified.
func (s *session) stamp() nodeID {
	if s.asked || s.w.rule.Load() == ruleHolds {
		return s.id
	}
	return 0
}

// shouldPing is pgx's rule for its ping at checkout. The ping is made here, within a bound of its own. After one that
// failed, also by an answer that is an error (a console's), the connection is closed, so that pgx's ping says so at once
// and does not ask again.
func (s *session) shouldPing(ctx context.Context, p stdlib.ShouldPingParams) bool {
	if s.w == nil {
		return p.IdleDuration > pingAfter // PostgreSQL: the ping is pgx's own
	}
	if p.IdleDuration <= pingAfter || s.ping(ctx) {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), maxPing)
	defer cancel()
	_ = s.pg.Close(ctx)
	return true
}

// ping reports whether the server answers within maxPing, or half of what is left of ctx if that is less: enough has to
// be left to go elsewhere.
func (s *session) ping(ctx context.Context) bool {
	bound := max(maxPing, min(2*time.Duration(s.connector.welcomed.Load()), maxSlowPing))
	if deadline, ok := ctx.Deadline(); ok {
		bound = min(bound, time.Until(deadline)/2)
	}
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	return s.pg.Ping(ctx) == nil
}

// lost counts the session as closed by the server because its node drained. Only the first count of its end counts.
func (s *session) lost(state lostState) {
	if s.ended.CompareAndSwap(false, true) {
		s.w.countLost(s, state)
	}
}

// dead looks, before anything is sent for a new user, whether the server has closed the session or said goodbye on it.
func (s *session) dead(ctx context.Context) bool {
	if s.pg.IsClosed() {
		return true
	}
	alive := true
	switch look := s.link.peeker.peek(); {
	case s.link.words.Load() != goodbyeNone:
		alive = false
	case look == peekClosed:
		alive = false
		s.link.hearOut()
	case look == peekPending:
		alive = s.ping(ctx) // a notice, or the last words: a ping reads them and tells which
	}
	if !alive && (s.link.words.Load() != goodbyeNone || s.w.isMarked(s)) {
		s.lost(lostIdle)
	}
	return !alive
}

// bury ends a session whose state is sessionGone. It is closed in the background, within five seconds (stdlib.Conn.Close),
// so that the caller that returned it does not wait; Connector.Close waits.
func (s *session) bury() error {
	s.connector.giveUp(s)
	if s.w == nil {
		return s.std.Close()
	}
	if s.link.words.Load() != goodbyeNone {
		s.lost(lostActive) // heard in the middle of rows, say
	}
	s.w.remove(s)
	if s.std == nil {
		s.connector.hangUpLater(s)
	} else {
		s.connector.closeLater(s.std)
	}
	return nil
}

// discard closes a session that nobody has had yet, in the background. It is neither a cull nor lost.
func (s *session) discard() {
	if s.state.Swap(sessionGone) != sessionGone {
		s.ended.Store(true)
		_ = s.bury()
	}
	s.dropReplacement()
}

// conn is what database/sql holds: a session, which is replaced in place where that is safe and nothing else would keep
// a drain from the caller. database/sql gives up after the third connection that turns out to be bad, and in a full pool
// whose connections end at once that can happen.
type conn struct {
	*stdConn // the session's
	s        *session

	// These belong to the connection's holder.
	returned  bool // IsValid has been called since the last ResetSession
	untouched bool // nothing has been sent since the checkout, and nobody has had the *pgx.Conn
	mended    int  // replacements since the checkout
	cut       bool // since the checkout, a statement runs again whose connection ended without a word while it was prepared
	uses      int  // requests
	hooked    bool // IsValid or ResetSession has been called
	single    bool // Driver.Open's: the connector ends with it
}

// manyUses is how many requests a connection serves without either hook before a wrapper is taken to hide both.
const manyUses = 100

// maxMend bounds the replacements for one use of a connection.
const maxMend = 5

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

func newConn(s *session) *conn {
	if s.w != nil {
		s.idled.Store(now())
		s.state.Store(sessionIdle)
	}
	return &conn{stdConn: s.std, s: s, untouched: true}
}

// claim takes the session, new in the pool, from the sweep for its first user, or replaces it where the sweep was first.
// Its error is driver.ErrBadConn to database/sql.
func (c *conn) claim(ctx context.Context) error {
	if c.s.w == nil || c.s.state.Load() == sessionInUse {
		return nil
	}
	s := c.follow()
	if s.state.CompareAndSwap(sessionIdle, sessionInUse) || s.state.Load() == sessionInUse {
		return nil
	}
	return c.mend(ctx)
}

// Conn returns pgx's connection, for callers of [database/sql.Conn.Raw].
func (c *conn) Conn() *pgx.Conn {
	c.untouched = false
	ctx, cancel := context.WithTimeout(context.Background(), moveDial)
	defer cancel()
	if err := c.claim(ctx); err != nil {
		<-c.s.pg.CleanupDone() // it is closed, and its user will hear it
	}
	return c.stdConn.Conn()
}

// IsValid is called when the connection comes back to the pool. It discards one that is closed, that is inside a
// transaction, to which the server has said goodbye, or, when the pace allows it, one whose node is marked. It waits
// for nothing.
func (c *conn) IsValid() bool {
	s := c.follow()
	if s.w != nil && s.state.Load() != sessionInUse && !s.state.CompareAndSwap(sessionIdle, sessionInUse) {
		return false // never used, and swept
	}
	if s.pg.IsClosed() || s.pg.TxStatus() != 'I' {
		return false
	}
	if s.connector.leaving.Load() { // Shutdown
		s.connector.returned.Add(1)
		return false
	}
	if s.w == nil {
		return true
	}
	if s.link.words.Load() != goodbyeNone {
		s.lost(lostIdle)
		return false
	}
	if m := s.w.marks.Load(); m != nil && s.w.cull(s, m, time.Now(), pointReturn) == gone {
		_ = s.bury()
		return false
	}
	if r := s.replacement.Load(); r != nil && r.reason >= reasonRebalance { // a cull's is for the sweep to give
		s = c.takeOver()
	}
	c.returned, c.hooked = true, true
	s.idled.Store(now())
	s.state.CompareAndSwap(sessionInUse, sessionIdle)
	return true
}

// takeOver puts the session's replacement into its place, if it is fit for use, and returns the session that it then has.
func (c *conn) takeOver() *session {
	s := c.s
	r := s.replacement.Swap(nil)
	if r == nil || !r.state.CompareAndSwap(sessionIdle, sessionInUse) {
		return s // taken back, or swept meanwhile
	}
	if !r.fit() || !s.state.CompareAndSwap(sessionInUse, sessionGone) {
		r.discard()
		return s
	}
	s.ended.Store(true)
	s.w.countMoved(s, r.reason, pointReturn)
	_ = s.bury()
	r.reserve.Store(false)
	c.s, c.stdConn = r, r.std
	return r
}

// ResetSession is called when the connection is about to be used again; nothing has been sent for the new user. It
// discards one that the sweep has taken, that the server has closed or said goodbye to, or whose node is marked.
func (c *conn) ResetSession(ctx context.Context) error {
	s := c.follow()
	if s.w == nil {
		return c.stdConn.ResetSession(ctx)
	}
	// A wrapper that hides IsValid leaves this as the only place that can cull. A connection that was not idle for long
	// has come straight from another caller: the pool is full, and this may be the caller's last try.
	hidden := !c.returned
	t := now()
	idle := time.Duration(t - s.idled.Load())
	handed := hidden || idle < sweepIdle
	c.returned, c.untouched, c.mended, c.cut, c.hooked = false, true, 0, false, true

	bad := !s.state.CompareAndSwap(sessionIdle, sessionInUse) && s.state.Load() == sessionGone
	if !bad && s.pg.TxStatus() != 'I' {
		return driver.ErrBadConn // whoever had it left a transaction open, and a wrapper hides IsValid
	}
	if !bad && s.dead(ctx) {
		bad = true
	} else if m := s.w.marks.Load(); !bad && m != nil && (hidden || !handed || m.overFor(s)) {
		if s.w.cull(s, m, time.Now(), pointCheckout) == gone {
			bad = true
			_ = s.bury()
		}
	}
	if !bad {
		err := c.reset(ctx, t)
		if err == nil || !errors.Is(err, driver.ErrBadConn) {
			return err
		}
		if s.link.words.Load() != goodbyeNone {
			s.lost(lostIdle) // pgx's ping has heard it
		}
	}
	if handed {
		return c.mend(ctx)
	}
	return driver.ErrBadConn
}

// reset does what pgx's ResetSession does, which is asked itself only where it has options: it reads the clock once more.
func (c *conn) reset(ctx context.Context, t int64) error {
	s := c.s
	before := s.checkedOut
	s.checkedOut = t
	if len(s.connector.stdOpts) > 0 {
		return c.stdConn.ResetSession(ctx)
	}
	if t-before > int64(pingAfter) && !s.ping(ctx) {
		return driver.ErrBadConn
	}
	return nil
}

// mend replaces a session that has ended with a new one, before anything was sent on the new user's behalf. Where that
// fails, the caller's database/sql goes on as it does with a bad connection, and has the reason at its last try.
func (c *conn) mend(ctx context.Context) error {
	if c.mended++; c.mended > maxMend {
		return driver.ErrBadConn
	}
	s := c.s.connector.takeSpare()
	if s == nil {
		var err error
		// The session has ended: its place under the ceiling is its successor's.
		if s, err = c.s.connector.connect(ctx, c.s, false); err != nil {
			return &rerunError{err}
		}
	}
	if c.s.state.Swap(sessionGone) != sessionGone {
		_ = c.s.bury()
	}
	c.s.dropReplacement()
	c.s, c.stdConn = s, s.std
	return nil
}

// Close closes the connection as pgx does.
func (c *conn) Close() error {
	if c.single {
		defer c.s.connector.Close()
	}
	s := c.follow()
	if c.uses > manyUses && !c.hooked && s.w != nil && s.state.Load() == sessionInUse && !s.pg.IsClosed() {
		s.connector.hooksHidden()
	}
	defer s.dropReplacement()
	if s.state.Swap(sessionGone) == sessionGone {
		return nil // whoever took it closes it
	}
	return s.bury()
}

// dropReplacement closes the replacement of a session that has ended by itself.
func (s *session) dropReplacement() {
	if r := s.replacement.Swap(nil); r != nil {
		r.discard()
	}
}

// follow goes over to the session that the sweep has put into this one's place, if it has.
func (c *conn) follow() *session {
	for c.s.state.Load() == sessionGone {
		r := c.s.replacement.Swap(nil)
		if r == nil {
			break
		}
		r.reserve.Store(false)
		c.s, c.stdConn = r, r.std
	}
	return c.s
}

// rerunError is driver.ErrBadConn to database/sql, which then runs the request on another connection, and the server's
// own error to an application that gets to see it (a pinned sql.Conn is not run again).
type rerunError struct{ error }

func (e *rerunError) Is(target error) bool { return target == driver.ErrBadConn }
func (e *rerunError) Unwrap() error        { return e.error }

// saidError is pgx's error together with the server's, which pgx has dropped.
type saidError struct {
	err  error
	said *pgconn.PgError
}

func (e *saidError) Error() string   { return e.err.Error() + ": " + e.said.Error() }
func (e *saidError) Unwrap() []error { return []error{e.err, e.said} }

// errAgain tells a request to run again: its session has been replaced.
var errAgain = errors.New("crdbdrain: again")

// request is what has to be known of a request before it is sent.
type request struct {
	outside bool // a transaction
	first   bool // since the checkout: the session has no state that the holder could miss
}

// begin is called before a request is sent. Its error is claim's.
func (c *conn) begin(ctx context.Context) (request, error) {
	if c.s.w == nil {
		return request{}, nil
	}
	if c.s.state.Load() != sessionInUse {
		if err := c.claim(ctx); err != nil {
			return request{}, err
		}
	}
	s := c.s
	if s.w == nil {
		return request{}, nil // no longer CockroachDB
	}
	c.uses++
	r := request{outside: s.pg.TxStatus() == 'I', first: c.untouched}
	c.untouched = false
	s.link.begin()
	return r, nil
}

// settle decides what becomes of a request that failed. It is run again only when the server provably did not execute
// it, and surfaces as it is otherwise:
//   - The shutdown notice came with nothing before it that execution could have produced, outside a transaction.
//   - The kernel did not take a byte of the request, outside a transaction.
//   - A BEGIN or a Prepare outside a transaction got no answer: neither leaves anything behind when the session ends.
//   - The connection ended without an answer while pgx was still preparing the statement, the first since the checkout and
//     outside a transaction. That counts once: it may be the statement that brings down what prepares it, and one node
//     after the other.
//
// The first request since the checkout runs again here, on a new session (errAgain); any other by database/sql, which
// knows whether the connection is pinned (rerunError).
func (c *conn) settle(ctx context.Context, err error, r request, kind rerunKind) error {
	s := c.s
	if s.w == nil || err == nil || !s.pg.IsClosed() {
		return err
	}
	words := s.link.words.Load()
	if words != goodbyeNone || ctx.Err() == nil && s.w.isMarked(s) {
		s.lost(lostActive)
	}
	if ctx.Err() != nil {
		return err
	}
	said := err
	if bye := s.link.bye; bye != nil && sqlState(err) == "" && !errors.Is(err, driver.ErrBadConn) {
		// pgx has lost it: it closes statements that it no longer caches before it sends the request, in a pipeline of their own.
		said = &saidError{err, bye}
	}
	if !s.connector.cfg.rerun || !r.outside {
		return said
	}
	again := errors.Is(err, driver.ErrBadConn) || // pgx had not sent it
		// The notice may stand behind the ReadyForQuery of a reply that pgx has refused: it has to be the answer, or the only one.
		words == goodbyeClean && (sqlState(err) == stateAdminShutdown || s.link.nothingRan()) || s.link.unsent.Load() ||
		kind != rerunStatement && !pgconn.Timeout(err) && (words != goodbyeNone || sqlState(err) == "")
	if !again && !c.cut && r.first && words == goodbyeNone && !s.link.asked.Load() && s.link.nothingRan() {
		again = peerGone(err) || errors.Is(err, io.ErrUnexpectedEOF)
		c.cut = again
	}
	if !again {
		return said
	}
	s.connector.countRerun(kind)
	if r.first && c.mend(ctx) == nil {
		c.s.link.begin()
		return errAgain
	}
	return &rerunError{said}
}

func (c *conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	r, err := c.begin(ctx)
	if err != nil {
		return nil, err
	}
	for {
		res, err := c.stdConn.ExecContext(ctx, query, args)
		if err == nil {
			return res, nil
		}
		if err = c.settle(ctx, err, r, rerunStatement); !errors.Is(err, errAgain) {
			return res, err
		}
	}
}

func (c *conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	r, err := c.begin(ctx)
	if err != nil {
		return nil, err
	}
	for {
		rows, err := c.stdConn.QueryContext(ctx, query, args)
		if err == nil {
			return rows, nil
		}
		if err = c.settle(ctx, err, r, rerunStatement); !errors.Is(err, errAgain) {
			return rows, err
		}
	}
}

func (c *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	r, err := c.begin(ctx)
	if err != nil {
		return nil, err
	}
	for {
		tx, err := c.stdConn.BeginTx(ctx, opts)
		if err == nil {
			return tx, nil
		}
		if err = c.settle(ctx, err, r, rerunBegin); !errors.Is(err, errAgain) {
			return tx, err
		}
	}
}

func (c *conn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	r, err := c.begin(ctx)
	if err != nil {
		return nil, err
	}
	for {
		st, err := c.stdConn.PrepareContext(ctx, query)
		if err = c.settle(ctx, err, r, rerunPrepare); errors.Is(err, errAgain) {
			continue
		}
		if err != nil || c.s.w == nil {
			return st, err
		}
		// A session in its place would lack nothing but the statement, and stmt prepares that again.
		c.untouched = r.first
		return &stmt{stdStmt: st.(*stdStmt), conn: c, s: c.s, query: query}, nil //nolint:forcetypeassert // what stdlib.Conn returns
	}
}

func (c *conn) Ping(ctx context.Context) error {
	r, err := c.begin(ctx)
	if err != nil {
		return err
	}
	for {
		err := c.stdConn.Ping(ctx)
		if err == nil {
			return nil
		}
		if err = c.settle(ctx, err, r, rerunStatement); !errors.Is(err, errAgain) {
			return err
		}
	}
}

// Begin and Prepare are for callers that use the connection through Raw, or through a wrapper that knows no contexts.

func (c *conn) Begin() (driver.Tx, error) { return c.BeginTx(context.Background(), driver.TxOptions{}) }

func (c *conn) Prepare(query string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), query)
}

// stdStmt is pgx's prepared statement.
type stdStmt = stdlib.Stmt

// stmt is pgx's prepared statement, run by conn's rules.
type stmt struct {
	*stdStmt
	conn  *conn
	s     *session // that it was prepared on
	query string
}

var (
	_ driver.Stmt             = (*stmt)(nil)
	_ driver.StmtExecContext  = (*stmt)(nil)
	_ driver.StmtQueryContext = (*stmt)(nil)
)

// renew prepares the statement again where the connection's session has been replaced. It is a request of its own, and
// leaves the one to come the first.
func (st *stmt) renew(ctx context.Context) error {
	if err := st.conn.claim(ctx); err != nil { // under a wrapper that hides ResetSession the sweep may have been here
		return err
	}
	for st.s != st.conn.s {
		untouched := st.conn.untouched
		fresh, err := st.conn.PrepareContext(ctx, st.query)
		if err != nil {
			return err
		}
		other, ok := fresh.(*stmt)
		if !ok {
			return driver.ErrBadConn // no longer CockroachDB
		}
		st.stdStmt, st.s = other.stdStmt, other.s
		st.conn.untouched = untouched
	}
	return nil
}

// again is renew for a request that is to run again, as the first one of a new session: where that one ends too, it is
// replaced in its turn.
func (st *stmt) again(ctx context.Context) error {
	st.conn.untouched = true
	err := st.renew(ctx)
	st.conn.untouched = false
	return err
}

func (st *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	if err := st.renew(ctx); err != nil {
		return nil, err
	}
	r, err := st.conn.begin(ctx)
	if err != nil {
		return nil, err
	}
	for {
		res, err := st.stdStmt.ExecContext(ctx, args)
		if err == nil {
			return res, nil
		}
		if err = st.conn.settle(ctx, err, r, rerunStatement); !errors.Is(err, errAgain) {
			return res, err
		}
		if err := st.again(ctx); err != nil {
			return nil, err
		}
	}
}

func (st *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	if err := st.renew(ctx); err != nil {
		return nil, err
	}
	r, err := st.conn.begin(ctx)
	if err != nil {
		return nil, err
	}
	for {
		rows, err := st.stdStmt.QueryContext(ctx, args)
		if err == nil {
			return rows, nil
		}
		if err = st.conn.settle(ctx, err, r, rerunStatement); !errors.Is(err, errAgain) {
			return rows, err
		}
		if err := st.again(ctx); err != nil {
			return nil, err
		}
	}
}

// Close deallocates the statement. database/sql calls it on idle connections too, so it has to take the session from the
// sweep while it does; where the session has ended, its statements have too.
func (st *stmt) Close() error {
	s := st.s
	if s != st.conn.s {
		return nil
	}
	if s.state.CompareAndSwap(sessionIdle, sessionInUse) {
		defer s.state.CompareAndSwap(sessionInUse, sessionIdle)
	} else if s.state.Load() == sessionGone || s.ended.Load() {
		return nil
	}
	return st.stdStmt.Close()
}
