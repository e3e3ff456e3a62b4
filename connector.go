package crdbdrain

import (
	"context"
	"crypto/tls"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/stdlib"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
)

// Option changes what a DSN cannot say. Pass it to [NewConnector].
type Option func(*Connector)

// WithLogger makes the driver log to l: one line when something changes (a drain is noticed, a drain is over, a source
// changes its state), none while nothing does. It is silent by default.
func WithLogger(l *slog.Logger) Option {
	return func(c *Connector) {
		if l != nil {
			c.log = l
		}
	}
}

// WithMeterProvider makes the driver report its metrics to p instead of OpenTelemetry's global provider.
func WithMeterProvider(p metric.MeterProvider) Option {
	return func(c *Connector) {
		if p != nil {
			c.provider = p
		}
	}
}

// WithNodeMetric adds the gauge crdbdrain.connection.node: connections per node ID, for the nodes held now. It is off by
// default because its series come and go with the nodes of the cluster.
func WithNodeMetric() Option {
	return func(c *Connector) { c.nodeMetric = true }
}

// WithStdlibOptions passes pgx's own options on to its connector: OptionBeforeConnect, OptionAfterConnect,
// OptionResetSession and OptionShouldPing work as they do with pgx. An OptionShouldPing replaces the driver's bounded
// ping of connections that were idle for more than a second.
func WithStdlibOptions(opts ...stdlib.OptionOpenDB) Option {
	return func(c *Connector) { c.stdOpts = append(c.stdOpts, opts...) }
}

// Connector opens connections that leave a draining node. It is safe for concurrent use. Use it with [sql.OpenDB], which
// closes it when the DB is closed.
type Connector struct {
	cfg        *config
	log        *slog.Logger
	provider   metric.MeterProvider
	nodeMetric bool
	pooled     bool // its connections are a pgxpool's (AttachPool)
	stdOpts    []stdlib.OptionOpenDB

	watchdog atomic.Pointer[watchdog] // of this connector's cluster, from the first connection to CockroachDB on
	ceiling  atomic.Pointer[ceiling]  // of this connector's cluster, from the first dial on
	way      atomic.Int32             // of the last connection to CockroachDB: way*
	shutting atomic.Bool              // Shutdown has been called: no new connections
	leaving  atomic.Bool              // and its grace is over: connections that come back are closed
	returned atomic.Int64             // that came back so
	reported atomic.Bool              // the gauges have been told of the ceiling
	landed   atomic.Int32             // in a pgxpool: fresh connections on a marked node, in a row
	registry *watchdogs               // the process's
	in       atomic.Pointer[instruments]
	spares   spares
	ctx      context.Context // ends with the connector; for what it does in the background
	cancel   context.CancelFunc
	dialing  atomic.Int64 // dials under way
	welcomed atomic.Int64 // how long a server took, lately, from the connection to the end of the startup; a duration
	tally    tally
	closing  sync.WaitGroup // connections being closed in the background

	hidden atomic.Bool // said that a wrapper hides the hooks
	deaf   atomic.Bool // said that an option keeps the driver from hearing its connections

	mu     sync.Mutex
	closed bool // guarded by mu
}

var (
	_ driver.Connector = (*Connector)(nil)
	_ io.Closer        = (*Connector)(nil)
)

// NewConnector returns a connector for a config that [pgx.ParseConfig] made, for those who need what a DSN cannot say:
// pgx's hooks, a tracer, a dialer. The config is cloned. Its OnPgError, BuildFrontend, AfterNetConnect, DialFunc and LookupFunc are
// called from the driver's own; the rest is used as it is. Parameters named crdbdrain_* in its RuntimeParams are the
// driver's, as in a DSN. Nothing is dialled and nothing is started. An error names the parameter and the accepted form,
// and contains no secret.
func NewConnector(cc *pgx.ConnConfig, opts ...Option) (*Connector, error) {
	cfg, err := newConfig(cc)
	if err != nil {
		return nil, err
	}
	return newConnector(cfg, opts...), nil
}

func newConnector(cfg *config, opts ...Option) *Connector {
	c := &Connector{cfg: cfg, registry: &registry, log: slog.New(slog.DiscardHandler), provider: otel.GetMeterProvider()}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	for _, o := range opts {
		o(c)
	}
	if cfg.mode != modeOff {
		hook(cfg.pgx)
	}
	return c
}

// attempt is one dial: pgx calls the hooks below with a context that carries it.
type attempt struct {
	start   time.Time
	lookups map[string][]string // addresses by host name, as pgx resolved them
	addr    string              // dialled last
	refused []string            // addresses that refused because their node drains
	refusal func()              // called at each; nil in database/sql's dials, which look afterwards
	link    *link               // made last

	connected time.Time // when that connection was there
	encrypted bool      // that connection has TLS
}

type attemptKey struct{}

func attemptOf(ctx context.Context) *attempt {
	a, _ := ctx.Value(attemptKey{}).(*attempt)
	return a
}

// hook chains the driver's own hooks to those of a config, which is the driver's clone.
func hook(cc *pgx.ConnConfig) {
	lookup, dial, after := cc.LookupFunc, cc.DialFunc, cc.AfterNetConnect
	cc.LookupFunc = func(ctx context.Context, host string) ([]string, error) {
		addrs, err := lookup(ctx, host)
		if a := attemptOf(ctx); a != nil && err == nil {
			if a.lookups == nil {
				a.lookups = make(map[string][]string)
			}
			a.lookups[host] = addrs
		}
		return addrs, err
	}
	cc.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if a := attemptOf(ctx); a != nil {
			a.addr = addr
		}
		return dial(ctx, network, addr)
	}
	cc.AfterNetConnect = func(ctx context.Context, pc *pgconn.Config, nc net.Conn) (net.Conn, error) {
		_, encrypted := nc.(*tls.Conn)
		if after != nil {
			var err error
			if nc, err = after(ctx, pc, nc); err != nil {
				return nc, err
			}
		}
		if a := attemptOf(ctx); a != nil {
			a.link, a.encrypted, a.connected = &link{conn: nc, peeker: newPeeker(nc)}, encrypted, time.Now()
		}
		return nc, nil
	}
}

// listen puts the attempt's link between pgx and the connection, in a config that is for this attempt alone. pgx keeps
// the connection itself, which it needs for what belongs to TLS (channel binding), and which is its users' to see.
func (a *attempt) listen(cc *pgconn.Config) {
	build, onError := cc.BuildFrontend, cc.OnPgError
	cc.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
		l := a.link
		if l == nil { // an OptionBeforeConnect has put its own AfterNetConnect into the place of the driver's
			return build(r, w)
		}
		l.r, l.w = r, w
		return build(l, l)
	}
	cc.OnPgError = func(pc *pgconn.PgConn, e *pgconn.PgError) bool {
		keep := onError == nil || onError(pc, e)
		l := a.link
		if l == nil {
			return keep
		}
		if !isGoodbye(e.Code, e.Message) {
			l.first = e
			return keep
		}
		// The notice has severity ERROR, on which pgx would wait for a ReadyForQuery that never comes, and report
		// "unexpected EOF" in its place.
		if e.Message == noticeNotAcceptingClients {
			a.refused = append(a.refused, a.addr)
			if a.refusal != nil {
				a.refusal()
			}
		}
		bye := *e
		l.bye = &bye
		if l.first != nil && l.words.Load() == goodbyeErrored {
			*e = *l.first // pgx keeps the first error of a request in most of its protocols; keep it in all
		}
		return false
	}
}

const (
	// maxSteer is how often a connection that lands on a marked node is dialled again before it is kept: while a node is
	// "unready" (server.shutdown.initial_wait) it still accepts, and a load balancer may not have noticed yet.
	maxSteer = 3
	// maxRefused is how often a dial that a draining node refused is tried again, and the waits between the tries: 5, 20,
	// 80 ms, and then 320 ms, each shortened by up to half at random. The first try behind a load balancer usually lands
	// elsewhere. Until it notices the drain, which can take 8 s, each has the same odds: with two nodes one dial in two
	// thousand does not find the other in eleven tries.
	maxRefused   = 10
	firstRefusal = 5 * time.Millisecond
	lastRefusal  = 320 * time.Millisecond
)

// Connect opens a connection. A connection that lands on a marked node is closed and dialled again, at most three times,
// and then kept. A dial that a draining node refuses (57P01), or that ends without a word while a node drains, is tried
// again, at most ten times, within ctx. Any other failure is pgx's own error after pgx's own dials; it is never
// [driver.ErrBadConn].
func (c *Connector) Connect(ctx context.Context) (driver.Conn, error) {
	if c.cfg.mode == modeOff {
		return stdlib.GetConnector(*c.cfg.pgx, c.stdOpts...).Connect(ctx)
	}
	if !c.shutting.Load() {
		if s := c.takeSpare(); s != nil {
			return newConn(s), nil
		}
	}
	s, err := c.connect(ctx, nil, false)
	if err != nil {
		return nil, err
	}
	return newConn(s), nil
}

// connect opens a session by Connect's rules, in the place that another one, which has ended, had under the ceiling, or,
// without one, in a place of its own. ahead: nobody waits for it.
func (c *Connector) connect(ctx context.Context, instead *session, ahead bool) (s *session, err error) {
	if instead == nil || !instead.placed.CompareAndSwap(true, false) {
		if c.shutting.Load() {
			return nil, errShutdown
		}
		if err := c.enter(ahead); err != nil {
			return nil, err
		}
	}
	defer func() {
		if s == nil { // also where a hook of the application has panicked
			c.ceiling.Load().leave()
		}
	}()
	if s, err = c.dialOn(ctx); err != nil {
		return nil, err
	}
	s.placed.Store(true)
	return s, nil
}

// dialOn dials until it has a session that is worth having.
func (c *Connector) dialOn(ctx context.Context) (*session, error) {
	s, err := c.dial(ctx)
	for try := 0; err != nil && try < maxRefused && (isRefusal(err) || c.cutByDrain(err)); try++ {
		wait := min(firstRefusal<<(2*try), lastRefusal)
		if !sleep(ctx, wait-rand.N(wait/2)) {
			return nil, err
		}
		s, err = c.dial(ctx)
	}
	if err != nil {
		return nil, err
	}
	for range maxSteer {
		if s.w == nil || !s.w.shouldSteer(s) {
			return s, nil
		}
		if !c.ceiling.Load().take() { // for a moment there are two
			return s, nil
		}
		other, err := func() (*session, error) {
			defer c.ceiling.Load().leave()
			return c.dial(ctx)
		}()
		if err != nil {
			return s, nil //nolint:nilerr // a connection to a marked node is better than none
		}
		c.countSteered()
		s.discard()
		s = other
	}
	if s.w != nil {
		s.w.keptMarked(s)
	}
	return s, nil
}

// cutByDrain reports whether a dial ended without a word while a node drains or has just drained: a load balancer sends
// dials to a node whose process has ended until its health check notices, and the peer accepts and closes. Without a
// drain that is an outage, and none of the driver's business.
func (c *Connector) cutByDrain(err error) bool {
	w := c.watchdog.Load()
	if w == nil || w.marks.Load() == nil && now()-w.noticed.Load() > int64(afterDrain) {
		return false
	}
	for _, e := range flatten(err) {
		if sqlState(e) == "" && (errors.Is(e, io.EOF) || errors.Is(e, io.ErrUnexpectedEOF) || peerGone(e)) {
			return true
		}
	}
	return false
}

// afterDrain is how long after the last notice of a drain a dial that is cut is taken to be its consequence. Load
// balancers are told to notice a node's end within about 8 s.
const afterDrain = 10 * time.Second

// sleep waits for d, and reports false if ctx ends first or would.
func sleep(ctx context.Context, d time.Duration) bool {
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= d {
		return false
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// dial opens one session through pgx, stamps it and enters it with the watchdog.
func (c *Connector) dial(ctx context.Context) (*session, error) {
	c.dialing.Add(1)
	defer c.dialing.Add(-1)
	a := &attempt{start: time.Now()}
	w := c.watchdog.Load()
	var marked map[string]bool
	if w != nil {
		marked = w.markedHosts()
	}
	cc := *c.cfg.pgx
	prefer, _ := ctx.Value(preferKey{}).(map[string]bool)
	orderHosts(&cc.Config, c.cfg.hostOrder, marked, prefer)
	a.listen(&cc.Config)
	s := &session{connector: c, opened: a.start, jitter: rand.N(c.cfg.ttl/10 + 1)}
	opts := append([]stdlib.OptionOpenDB{stdlib.OptionShouldPing(s.shouldPing)}, c.stdOpts...)
	std, err := stdlib.GetConnector(cc, opts...).Connect(context.WithValue(ctx, attemptKey{}, a))
	if w != nil && len(a.refused) > 0 {
		w.heardRefusals(a)
	}
	if len(a.refused) > 0 || err != nil {
		c.countRefused(a, err)
	}
	if err != nil {
		if w != nil && sqlState(err) == stateTooManyConnections {
			w.full()
		}
		if a.link != nil {
			_ = a.link.conn.Close() // pgx leaves the socket open when an OptionAfterConnect fails
		}
		return nil, err
	}
	s.std = std.(*stdConn) //nolint:forcetypeassert // what stdlib's connector returns
	s.pg = s.std.Conn().PgConn()
	if err := c.welcome(ctx, s, a); err != nil {
		if errors.Is(err, errUnanswered) {
			return c.dial(ctx) // which does not ask
		}
		return nil, err
	}
	return s, nil
}

// errUnanswered says that a new connection had to be closed because SHOW node_id was not answered in time.
var errUnanswered = errors.New("crdbdrain: SHOW node_id was not answered in time")

// askAgain is how long no new connection is asked after that.
const askAgain = time.Minute

// welcome stamps a new session and enters it with the watchdog, where it is to CockroachDB.
func (c *Connector) welcome(ctx context.Context, s *session, a *attempt) (err error) {
	l := a.link
	if s.pg.ParameterStatus("crdb_version") == "" {
		return nil // PostgreSQL, or a pooler that hides CockroachDB
	}
	if l == nil || l.r == nil {
		if c.deaf.CompareAndSwap(false, true) {
			c.log.Warn("crdbdrain: an OptionBeforeConnect replaces AfterNetConnect or BuildFrontend, so the driver hears nothing of its connections and is plain pgx: set them in the config for NewConnector")
		}
		return nil
	}
	w := c.attach()
	if w == nil {
		return nil // closed meanwhile
	}
	s.link = l
	c.welcomed.Store(int64(time.Since(a.connected)))
	way := int32(wayClear)
	if a.encrypted {
		way = wayTLS
	}
	c.way.Store(way)
	s.id = nodeFromPID(s.pg.PID())
	if w.rule.Load() == ruleAsk && now() >= w.askNext.Load() {
		if s.id, err = askNodeID(ctx, s.pg); s.pg.IsClosed() {
			if ctx.Err() == nil && pgconn.Timeout(err) {
				w.askNext.Store(now() + int64(askAgain))
				return errUnanswered
			}
			return fmt.Errorf("crdbdrain: the connection was lost while its node was asked for: %w", err)
		}
		s.asked = err == nil
	}
	s.w = w
	w.add(s, a)
	a.lookups = nil // the hooks keep the attempt
	l.session.Store(s)
	if l.words.Load() != goodbyeNone { // said in the packet that welcomed us, before there was anybody to tell
		w.heardGoodbye(s)
	}
	return nil
}

// askNodeID asks the server for its node ID, on a connection that nobody has yet. It is for clusters behind a proxy that
// puts its own values into BackendKeyData.
func askNodeID(ctx context.Context, pg *pgconn.PgConn) (nodeID, error) {
	ctx, cancel := context.WithTimeout(ctx, maxPing)
	defer cancel()
	results, err := pg.Exec(ctx, sqlShowNodeID).ReadAll()
	if err != nil {
		return 0, err
	}
	if len(results) == 1 && len(results[0].Rows) == 1 && len(results[0].Rows[0]) == 1 {
		if id, ok := parseNodeID(string(results[0].Rows[0][0])); ok {
			return id, nil
		}
	}
	return 0, errors.New("no node ID")
}

// preferKey is the context key of the hosts that a dial should try first.
type preferKey struct{}

// orderHosts puts the hosts into the order in which pgx is to try them: at random (crdbdrain_host_order), those known to
// be a marked node last, preferred ones first. The variants of one host (sslmode=prefer has two) stay together and in order.
func orderHosts(cc *pgconn.Config, order hostOrder, marked, prefer map[string]bool) {
	if len(cc.Fallbacks) == 0 {
		return
	}
	hosts := []*pgconn.FallbackConfig{{Host: cc.Host, Port: cc.Port, TLSConfig: cc.TLSConfig}}
	hosts = append(hosts, cc.Fallbacks...)
	var groups [][]*pgconn.FallbackConfig
	for _, h := range hosts {
		i := slices.IndexFunc(groups, func(g []*pgconn.FallbackConfig) bool { return g[0].Host == h.Host && g[0].Port == h.Port })
		if i < 0 {
			groups = append(groups, nil)
			i = len(groups) - 1
		}
		groups[i] = append(groups[i], h)
	}
	if order == hostOrderRandom {
		rand.Shuffle(len(groups), func(i, j int) { groups[i], groups[j] = groups[j], groups[i] })
	}
	rank := func(g []*pgconn.FallbackConfig) int {
		key := hostKey(g[0].Host, g[0].Port)
		return boolInt(marked[key]) - boolInt(prefer[key])
	}
	slices.SortStableFunc(groups, func(a, b []*pgconn.FallbackConfig) int { return rank(a) - rank(b) })
	hosts = slices.Concat(groups...)
	cc.Host, cc.Port, cc.TLSConfig = hosts[0].Host, hosts[0].Port, hosts[0].TLSConfig
	cc.Fallbacks = hosts[1:]
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

func hostKey(host string, port uint16) string {
	return host + ":" + strconv.Itoa(int(port))
}

// hostsOf returns which hosts of the config the attempt resolved an address for, as hostKey.
func (a *attempt) hostsOf(addr string) []string {
	ip, port, err := net.SplitHostPort(addr)
	if err != nil {
		return []string{addr}
	}
	var hosts []string
	for host, addrs := range a.lookups {
		if slices.Contains(addrs, ip) || slices.Contains(addrs, addr) {
			hosts = append(hosts, host+":"+port)
		}
	}
	return hosts
}

// attach returns the watchdog of the connector's cluster, or nil once the connector is closed.
func (c *Connector) attach() *watchdog {
	if w := c.watchdog.Load(); w != nil {
		return w
	}
	c.instruments() // they come from the application's meter provider: not under a lock
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	if w := c.watchdog.Load(); w != nil {
		return w
	}
	w := c.registry.join(c)
	c.watchdog.Store(w)
	return w
}

// background runs f in a goroutine that Close waits for. It reports false, and runs nothing, once the connector is closed.
func (c *Connector) background(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.closing.Go(f)
	return true
}

// closeLater closes a connection in the background: a Terminate, no CancelRequest, five seconds at most.
func (c *Connector) closeLater(std *stdConn) {
	if !c.background(func() { _ = std.Close() }) {
		_ = std.Close()
	}
}

// Close ends what the connector runs in the background: it leaves the cluster's watchdog, which stops with its last
// connector, and waits, at most five seconds, for connections that are being closed. Connections in use go on working.
// It can be called more than once. [sql.DB.Close] calls it.
func (c *Connector) Close() error {
	c.mu.Lock()
	first := !c.closed
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	if w := c.watchdog.Load(); w != nil && first {
		c.registry.leave(c, w)
		c.tendSpares(0, time.Now(), 0)
	}
	if first {
		ceilings.leave(c)
	}
	c.closing.Wait()
	return nil
}

// hooksHidden says once that a wrapper of the driver keeps the pool from asking it.
func (c *Connector) hooksHidden() {
	if c.hidden.CompareAndSwap(false, true) {
		c.log.Warn("crdbdrain: a wrapper of the driver hides driver.Validator and driver.SessionResetter; connections cannot leave a draining node")
	}
}

// Driver returns the driver that is registered as "crdbdrain".
func (c *Connector) Driver() driver.Driver { return theDriver }

// redact is the text of an error for the log: pgx's connect errors name user and database, which are not secrets, and
// never the password. Newlines would let a server forge lines, and escapes paint on a terminal.
func redact(err error) string {
	s := strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }), " ")
	return strings.ToValidUTF8(s[:min(len(s), 512)], "")
}
