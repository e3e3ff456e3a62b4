package crdbdrain

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
)

// AttachPool makes a pgxpool leave draining nodes: it puts the driver's hooks into a config that [pgxpool.ParseConfig] made,
// before [pgxpool.NewWithConfig] is called with it. Parameters named crdbdrain_* in its connection string are the driver's,
// as in a DSN, and are taken out. Hooks that the config has are called as well: BeforeConnect before the driver's, the
// others after it. The pool shares the cluster's watchdog with every other pool of the process. Close the connector, which
// has the counts, when the pool is closed.
//
// A pgxpool hands out pgx's own connections, so what database/sql lets the driver do behind the caller's back is not
// possible here: no connection is replaced in place, nothing is run again (crdbdrain_rerun), no spares are kept
// (crdbdrain_spares; the pool's MinIdleConns serve as such), and there is no ceiling (crdbdrain_max_connections is an
// error; the pool has MaxConns). With a window a drain costs nothing, as with database/sql. Without one, no connection that
// the server has closed is handed out, but a statement that meets the server's notice fails with its 57P01. pgxpool calls
// AfterRelease in a goroutine, so a caller in a loop may use two connections in turn. A
// connection that is to move on the way home or for crdbdrain_ttl is given up first, and dialled again on demand.
func AttachPool(pc *pgxpool.Config, opts ...Option) (*Connector, error) {
	cfg, err := newConfig(pc.ConnConfig)
	if err != nil {
		return nil, err
	}
	if cfg.maxConnections > 0 {
		return nil, configErrorf("crdbdrain_max_connections does not count a pgxpool's connections: use its MaxConns")
	}
	c := newConnector(cfg, opts...)
	pc.ConnConfig = cfg.pgx
	if cfg.mode == modeOff {
		return c, nil
	}
	cfg.spares = 0
	c.pooled = true

	beforeConnect, afterConnect, afterRelease, beforeClose := pc.BeforeConnect, pc.AfterConnect, pc.AfterRelease, pc.BeforeClose
	prepareConn, shouldPing := pc.PrepareConn, pc.ShouldPing
	if old := pc.BeforeAcquire; prepareConn == nil && old != nil { //nolint:staticcheck // the config may still have it
		prepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) { return old(ctx, conn), nil } //nolint:unparam // pgxpool's signature
	}
	if beforeConnect != nil { // the watchdog's own connection may need the password that it fetches
		c.stdOpts = append(c.stdOpts, stdlib.OptionBeforeConnect(beforeConnect))
	}
	pc.BeforeConnect = func(ctx context.Context, cc *pgx.ConnConfig) error {
		if beforeConnect != nil {
			if err := beforeConnect(ctx, cc); err != nil {
				return err
			}
		}
		if c.shutting.Load() {
			return errShutdown
		}
		c.prepareDial(cc)
		return nil
	}
	pc.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		if err := c.welcomePooled(ctx, conn); err != nil {
			return err
		}
		s := sessionIn(conn)
		if afterConnect != nil {
			if err := afterConnect(ctx, conn); err != nil {
				if s != nil {
					s.reject() // the pool closes it without BeforeClose
				}
				return err
			}
		}
		if s != nil {
			s.rest()
		}
		return nil
	}
	pc.ShouldPing = func(ctx context.Context, p pgxpool.ShouldPingParams) bool {
		s := sessionIn(p.Conn)
		if s == nil || shouldPing != nil {
			if shouldPing != nil {
				return shouldPing(ctx, p)
			}
			return p.IdleDuration > pingAfter
		}
		return false // checkout's
	}
	pc.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
		s := sessionIn(conn)
		if s != nil && !s.checkout(ctx) {
			return false, nil
		}
		if prepareConn == nil {
			return true, nil
		}
		ok, err := prepareConn(ctx, conn)
		if ok && err != nil && s != nil {
			s.rest() // it goes back into the pool, without AfterRelease
		}
		return ok, err
	}
	pc.AfterRelease = func(conn *pgx.Conn) bool {
		if afterRelease != nil && !afterRelease(conn) {
			return false
		}
		s := sessionIn(conn)
		return s == nil || s.checkin()
	}
	pc.BeforeClose = func(conn *pgx.Conn) {
		if s := sessionIn(conn); s != nil {
			s.state.Store(sessionGone)
			s.part()
		}
		if beforeClose != nil {
			beforeClose(conn)
		}
	}
	return c, nil
}

// customKey is the key of the driver's data in pgconn.PgConn.CustomData: the attempt, and then the session.
const customKey = "crdbdrain"

// sessionIn returns the session of a pool's connection, or nil where it is not to CockroachDB.
func sessionIn(conn *pgx.Conn) *session {
	s, _ := conn.PgConn().CustomData()[customKey].(*session)
	return s
}

// errNotAgain is the answer to a dial that is only there in case that a draining node refuses the one before it.
var errNotAgain = errors.New("not dialled again: nobody has refused for a drain")

// prepareDial puts an attempt's hooks into the config of one dial, which is the pool's copy for it.
func (c *Connector) prepareDial(cc *pgx.ConnConfig) {
	a := &attempt{start: time.Now()}
	w := c.watchdog.Load()
	var marked, prefer map[string]bool
	if w != nil {
		marked, prefer = w.markedHosts(), w.lackingHosts(c)
	}
	orderHosts(&cc.Config, c.cfg.hostOrder, marked, prefer)
	a.refusal = func() {
		if w := c.watchdog.Load(); w != nil {
			w.heardRefusals(&attempt{refused: a.refused[len(a.refused)-1:]})
		}
		c.countRefused(&attempt{refused: a.refused[len(a.refused)-1:]}, nil)
	}
	// The dial is pgx's own, so trying again means more hosts to try: the same ones, while a node drains.
	hosts := append([]*pgconn.FallbackConfig{{Host: cc.Host, Port: cc.Port, TLSConfig: cc.TLSConfig}}, cc.Fallbacks...)
	variants := 0 // of one host: with TLS and without
	for _, h := range hosts {
		if h.Host == hosts[0].Host && h.Port == hosts[0].Port {
			variants++
		}
	}
	if w != nil && (w.marks.Load() != nil || now()-w.noticed.Load() < int64(afterDrain)) {
		for range maxRefused {
			cc.Fallbacks = append(cc.Fallbacks, hosts...)
		}
	}
	a.listen(&cc.Config)
	in := func(ctx context.Context) context.Context { return context.WithValue(ctx, attemptKey{}, a) }
	lookup, dial, after, connected := cc.LookupFunc, cc.DialFunc, cc.AfterNetConnect, cc.AfterConnect
	cc.LookupFunc = func(ctx context.Context, host string) ([]string, error) { return lookup(in(ctx), host) }
	dialled, again := make(map[string]int), 0
	var done atomic.Bool // what is dialled from then on is a cancel request
	cc.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if done.Load() {
			return dial(ctx, network, addr)
		}
		if dialled[addr] >= variants {
			// Only a refusal of the dial before this one is a reason to dial an address again.
			if len(a.refused) <= again {
				return nil, errNotAgain
			}
			wait := min(firstRefusal<<(2*again), lastRefusal)
			again = len(a.refused)
			if !sleep(ctx, wait-rand.N(wait/2)) {
				return nil, ended(ctx)
			}
		}
		dialled[addr]++
		return dial(in(ctx), network, addr)
	}
	cc.AfterNetConnect = func(ctx context.Context, pc *pgconn.Config, nc net.Conn) (net.Conn, error) {
		return after(in(ctx), pc, nc)
	}
	cc.AfterConnect = func(ctx context.Context, pg *pgconn.PgConn) error {
		pg.CustomData()[customKey] = a
		done.Store(true)
		if connected != nil {
			return connected(ctx, pg)
		}
		return nil
	}
}

// welcomePooled makes a session of a pool's new connection.
func (c *Connector) welcomePooled(ctx context.Context, conn *pgx.Conn) error {
	pg := conn.PgConn()
	a, ok := pg.CustomData()[customKey].(*attempt)
	if !ok {
		return nil // a user's BeforeConnect has its own way to connect
	}
	delete(pg.CustomData(), customKey)
	s := &session{pg: pg, connector: c, opened: a.start, jitter: rand.N(c.cfg.ttl/10 + 1)}
	if err := c.welcome(ctx, s, a); err != nil || s.w == nil {
		return err
	}
	pg.CustomData()[customKey] = s
	return nil
}

// checkout is ResetSession's part in a pgxpool: it reports whether the connection may be handed out. If not, the pool
// closes it and tries another.
func (s *session) checkout(ctx context.Context) bool {
	if !s.state.CompareAndSwap(sessionIdle, sessionInUse) && s.state.Load() == sessionGone {
		return false // swept
	}
	t := now()
	idle := time.Duration(t - s.idled.Load())
	if s.dead(ctx) || idle > pingAfter && !s.ping(ctx) {
		if s.link.words.Load() != goodbyeNone {
			s.lost(lostIdle)
		}
		return s.reject()
	}
	s.checkedOut = t
	m := s.w.marks.Load()
	if m == nil {
		s.prepared = true
		return true
	}
	if !s.prepared { // it has just been dialled
		s.prepared = true
		switch mk := m.of[s.stamp()]; {
		case mk == nil:
			s.connector.landed.Store(0)
		case s.opened.Before(mk.since) || !s.w.shouldSteer(s):
		case s.connector.landed.Add(1) <= maxSteer:
			s.connector.countSteered()
			s.ended.Store(true)
			return s.reject()
		default:
			s.w.keptMarked(s)
		}
	}
	if idle >= sweepIdle || m.overFor(s) {
		return s.w.cull(s, m, time.Now(), pointCheckout) != gone || s.reject()
	}
	return true
}

// checkin is IsValid's part in a pgxpool: it reports whether the connection goes back into the pool. If not, the pool
// closes it.
func (s *session) checkin() bool {
	if s.link.words.Load() != goodbyeNone {
		s.lost(lostIdle)
		return s.reject()
	}
	if s.connector.leaving.Load() {
		s.connector.returned.Add(1)
		return s.reject()
	}
	if m := s.w.marks.Load(); m != nil && s.w.cull(s, m, time.Now(), pointReturn) == gone {
		return s.reject()
	}
	if reason := s.leave.Load(); reason != 0 && s.ended.CompareAndSwap(false, true) {
		s.w.countMoved(s, cullReason(reason-1), pointReturn)
		return s.reject()
	}
	s.rest()
	return true
}

// rest is for a session that is in the pool from now on, and may be swept.
func (s *session) rest() {
	s.idled.Store(now())
	s.state.CompareAndSwap(sessionInUse, sessionIdle)
}

// reject takes the session out; the pool closes the connection. It returns false, for the hooks.
func (s *session) reject() bool {
	s.state.Store(sessionGone)
	s.part()
	return false
}

// part takes the session out of the watchdog, once or more often.
func (s *session) part() {
	if s.link.words.Load() != goodbyeNone {
		s.lost(lostActive)
	}
	s.w.remove(s)
}

// reap takes out the sessions of pgxpools that have been closed by somebody else: those that were hijacked.
func (w *watchdog) reap() {
	var closed []*session
	w.mu.Lock()
	if slices.ContainsFunc(w.members, func(m *Connector) bool { return m.pooled }) {
		for _, n := range w.nodes {
			for s := range n.held {
				select {
				case <-s.pg.CleanupDone():
					if s.connector.pooled {
						closed = append(closed, s)
					}
				default:
				}
			}
		}
	}
	w.mu.Unlock()
	for _, s := range closed {
		s.reject()
	}
}

// hangUpLater closes, in the background, a connection that a pgxpool holds as idle: with a Terminate, but not through pgx,
// which the pool may be closing at the same moment.
func (c *Connector) hangUpLater(s *session) {
	hangUp := func() {
		_ = s.link.conn.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = s.link.conn.Write([]byte{'X', 0, 0, 0, 4})
		_ = s.link.conn.Close()
	}
	if !c.background(hangUp) {
		hangUp()
	}
}

// giveWay gives a pool's session up: at once where it is idle, when it comes back otherwise.
func (s *session) giveWay(reason cullReason) {
	s.leave.Store(uint32(reason) + 1)
	if s.state.CompareAndSwap(sessionIdle, sessionGone) {
		if s.ended.CompareAndSwap(false, true) {
			s.w.countMoved(s, reason, pointSweep)
		}
		_ = s.bury()
	}
}

// giveBack is a move on the way home in a pgxpool: a session of the node that has the most goes, and the next dial, which
// the pool makes on demand, may land where one is missing.
func (w *watchdog) giveBack(c *Connector) {
	w.mu.Lock()
	var victim *session
	if held := w.heldOf(c); held != nil {
		counts, share := w.shares(held)
		least := 0
		for id, n := range counts {
			if least == 0 || n < counts[nodeID(least)] {
				least = int(id)
			}
		}
		most := 0
		for id, n := range w.nodes {
			if counts[id] < most || !helps(counts[id], counts[nodeID(least)], share) {
				continue
			}
			for s := range n.held {
				if s.connector == c && s.stamp() == id && s.movable() && (victim == nil || counts[id] > most || s.state.Load() == sessionIdle) {
					victim, most = s, counts[id]
				}
			}
		}
		w.balance.misses++
	}
	w.mu.Unlock()
	if victim != nil {
		victim.giveWay(reasonRebalance)
	}
}

// lackingHosts returns the hosts of nodes that have too few of the connector's sessions, while the way home is under way.
func (w *watchdog) lackingHosts(c *Connector) map[string]bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	held := w.heldOf(c)
	if !w.balance.active || held == nil {
		return nil
	}
	counts, share := w.shares(held)
	most := 0
	for _, n := range counts {
		most = max(most, n)
	}
	var aim []nodeID
	for id, n := range counts {
		if helps(most, n, share) {
			aim = append(aim, id)
		}
	}
	return w.addrs.hostsOf(aim)
}
