package crdbdrain

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

func refusal() *pgproto3.ErrorResponse {
	return &pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "57P01", Message: "server is not accepting clients, try another node"}
}

func refuseWith(code, message string) func(int) *pgproto3.ErrorResponse {
	return func(int) *pgproto3.ErrorResponse {
		return &pgproto3.ErrorResponse{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: code, Message: message}
	}
}

// dsnOf is a DSN with the addresses of several peers.
func dsnOf(params string, peers ...*peer) string {
	var addrs []string
	for _, p := range peers {
		addrs = append(addrs, p.ln.Addr().String())
	}
	return fmt.Sprintf("postgres://app@%s/defaultdb?sslmode=disable&crdbdrain_sources=errors%s", strings.Join(addrs, ","), params)
}

// A refused dial is tried again, a bounded number of times; then the application sees the server's 57P01, never
// driver.ErrBadConn, with which database/sql would multiply the dials by three (A07, B09, H09).
func TestA07RefusedDialsAreBounded(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	p.refuse = func(int) *pgproto3.ErrorResponse { return refusal() }
	db := open(t, p.dsn(), "")
	start := time.Now()
	err := db.Ping()
	took := time.Since(start)
	if sqlState(err) != "57P01" || errors.Is(err, driver.ErrBadConn) {
		t.Errorf("%v, want the server's 57P01", err)
	}
	if got := p.accepts(); got != 1+maxRefused {
		t.Errorf("%d dials, want %d", got, 1+maxRefused)
	}
	shortest := time.Duration(0)
	for try := range maxRefused {
		shortest += min(firstRefusal<<(2*try), lastRefusal) / 2
	}
	if took < shortest {
		t.Errorf("gave up after %v, want %v at least", took, shortest)
	}
	if got := db.c.Stats().Refused; got != 1+maxRefused {
		t.Errorf("%d refusals counted, want %d", got, 1+maxRefused)
	}
}

// The tries stay within the caller's context, and what the caller sees is the refusal, not the context's end.
func TestA07RefusedDialsEndWithTheContext(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	p.refuse = func(int) *pgproto3.ErrorResponse { return refusal() }
	db := open(t, p.dsn(), "")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	err := db.PingContext(ctx)
	if sqlState(err) != "57P01" {
		t.Errorf("%v, want the server's 57P01", err)
	}
	if ctx.Err() != nil {
		t.Error("waited for the context's end although no try could follow")
	}
	if got := p.accepts(); got < 2 || got > 4 {
		t.Errorf("%d dials in 200 ms, want 2 to 4", got)
	}
}

// A load balancer that has not noticed yet: the dial succeeds once it has.
func TestA07RefusedDialSucceedsElsewhere(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	p.refuse = func(nth int) *pgproto3.ErrorResponse {
		if nth <= 3 {
			return refusal()
		}
		return nil
	}
	db := open(t, p.dsn(), "")
	if err := db.Ping(); err != nil || p.dials() != 4 {
		t.Errorf("%v after %d dials, want none after 4", err, p.dials())
	}
}

// With several hosts the next one is dialled at once.
func TestA07NextHostAtOnce(t *testing.T) {
	t.Parallel()
	p1, p2 := startPeer(t, false), startPeer(t, false)
	p1.refuse = func(int) *pgproto3.ErrorResponse { return refusal() }
	for range 10 {
		db := open(t, dsnOf("&crdbdrain_host_order=listed", p1, p2), "")
		var waits atomic.Int32
		db.c.cfg.pgx.DialFunc = countDials(db.c.cfg.pgx.DialFunc, &waits)
		if err := db.Ping(); err != nil {
			t.Fatal(err)
		}
		if got := waits.Load(); got != 2 {
			t.Errorf("%d dials, want 2", got)
		}
	}
}

func countDials(dial pgconn.DialFunc, n *atomic.Int32) pgconn.DialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		n.Add(1)
		return dial(ctx, network, addr)
	}
}

// TestC16 counts the dials to a refusing node by sslmode: pgx makes one for each way to connect, in each of the tries.
func TestC16(t *testing.T) {
	t.Parallel()
	for mode, perTry := range map[string]int{"disable": 1, "allow": 2, "prefer": 2, "require": 1} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			p := startPeer(t, true)
			p.refuse = func(int) *pgproto3.ErrorResponse { return refusal() }
			db := open(t, fmt.Sprintf("postgres://app@%s/defaultdb?crdbdrain_sources=errors&sslmode=%s", p.ln.Addr(), mode), "")
			if err := db.Ping(); sqlState(err) != "57P01" {
				t.Errorf("%v, want 57P01", err)
			}
			if got := p.accepts(); got != perTry*(1+maxRefused) {
				t.Errorf("%d dials in %d tries, want %d in each", got, 1+maxRefused, perTry)
			}
			if got := db.c.Stats().Refused; got != 1+maxRefused {
				t.Errorf("%d refusals counted, want one for each try, %d", got, 1+maxRefused)
			}
		})
	}
}

// C16: the watchdog dials a node that refuses once a poll, and the way that the application's connections came: never in
// clear text where they have TLS.
func TestC16TheWatchdogDialsOneWay(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"disable", "allow", "prefer", "require"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			p := startPeer(t, true)
			db := open(t, fmt.Sprintf("postgres://app@%s/defaultdb?crdbdrain_sources=instances&crdbdrain_poll_interval=1h&sslmode=%s", p.ln.Addr(), mode), "")
			sc, err := db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer sc.Close()
			w := db.c.watchdog.Load()
			failures := func() int { return w.status(sourceInstances).failures }
			p.mu.Lock()
			p.refuse = func(int) *pgproto3.ErrorResponse { return refusal() }
			p.mu.Unlock()
			before := p.accepts()
			w.poke()
			eventually(t, "a poll that fails", func() bool { return failures() > 0 })
			if n := p.accepts() - before; n != 1 {
				t.Errorf("%d dials in a poll, want 1", n)
			}
		})
	}
	// Before there was a connection (a feed has none) the DSN decides.
	for way, want := range map[int32]int{wayUnknown: 2, wayClear: 1, wayTLS: 1} {
		cc, err := pgx.ParseConfig("postgres://h/d?sslmode=prefer")
		if err != nil {
			t.Fatal(err)
		}
		oneWay(&cc.Config, way)
		if n := 1 + len(cc.Fallbacks); n != want || way != wayClear && cc.TLSConfig == nil || way == wayClear && cc.TLSConfig != nil {
			t.Errorf("way %d: %d ways, the first with TLS: %v", way, n, cc.TLSConfig != nil)
		}
	}
}

// TestC17 has the first host answer what ends pgx's walk through the hosts, and what does not: the driver adds no stop
// of its own, and takes none away.
func TestC17(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"42501", "28P01", "3D000", "53300", "57P03", "28000", "XX000"} {
		var got [2]int
		var errs [2]error
		for i, driverName := range []string{"pgx", "crdbdrain"} {
			p1, p2 := startPeer(t, false), startPeer(t, false)
			p1.refuse = refuseWith(code, "no")
			params := ""
			if driverName == "pgx" {
				params = "&crdbdrain_mode=off"
			}
			db := open(t, dsnOf("&crdbdrain_host_order=listed"+params, p1, p2), "")
			errs[i] = db.Ping()
			got[i] = 10*p1.accepts() + p2.dials()
		}
		if got[0] != got[1] || sqlState(errs[0]) != sqlState(errs[1]) {
			t.Errorf("%s: pgx: %v, dials %02d; crdbdrain: %v, dials %02d", code, errs[0], got[0], errs[1], got[1])
		}
	}
}

// A failure that is not a drain's refusal is dialled once per host and call (B09, H09).
func TestB09(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ code, message string }{
		{"28000", "invalid authorization"}, {"53300", "sorry, too many clients already"}, {"57P03", "the database system is starting up"},
		{"57P01", "terminating connection due to administrator command"},
	} {
		p := startPeer(t, false)
		p.refuse = refuseWith(tt.code, tt.message)
		db := open(t, p.dsn(), "")
		for n := 1; n <= 3; n++ {
			if err := db.Ping(); sqlState(err) != tt.code || errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%v, want %s", err, tt.code)
			}
			if got := p.accepts(); got != n {
				t.Errorf("%s: %d dials by %d calls", tt.code, got, n)
			}
		}
	}
}

func TestH09ClosedPorts(t *testing.T) {
	t.Parallel()
	for hosts := 1; hosts <= 3; hosts++ {
		var addrs []string
		for range hosts {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			addrs = append(addrs, l.Addr().String())
			l.Close()
		}
		var dials atomic.Int32
		db := openWith(t, fmt.Sprintf("postgres://app@%s/defaultdb?sslmode=disable", strings.Join(addrs, ",")), func(cc *pgconn.Config) {
			cc.DialFunc = countDials(cc.DialFunc, &dials)
		})
		err := db.Ping()
		if err == nil || errors.Is(err, driver.ErrBadConn) {
			t.Errorf("%v, want the dial's own error", err)
		}
		if got := int(dials.Load()); got != hosts {
			t.Errorf("%d dials to %d closed ports, want one for each", got, hosts)
		}
	}
}

// With several refusing hosts, each try dials each of them once.
func TestH09Refused(t *testing.T) {
	t.Parallel()
	p1, p2, p3 := startPeer(t, false), startPeer(t, false), startPeer(t, false)
	for _, p := range []*peer{p1, p2, p3} {
		p.refuse = func(int) *pgproto3.ErrorResponse { return refusal() }
	}
	db := open(t, dsnOf("", p1, p2, p3), "")
	if err := db.Ping(); sqlState(err) != "57P01" || errors.Is(err, driver.ErrBadConn) {
		t.Errorf("%v, want 57P01", err)
	}
	for i, p := range []*peer{p1, p2, p3} {
		if got := p.accepts(); got != 1+maxRefused {
			t.Errorf("host %d: %d dials, want %d", i+1, got, 1+maxRefused)
		}
	}
}

// TestH03 opens connections to three hosts: each gets a third of them, give or take 10 %, not the first all. Chance alone
// fails it once in a million times.
func TestH03(t *testing.T) {
	t.Parallel()
	peers := []*peer{startPeer(t, false), startPeer(t, false), startPeer(t, false)}
	db := open(t, dsnOf("", peers...), "")
	db.SetMaxIdleConns(-1) // each call opens its own
	for range 600 {
		if err := db.Ping(); err != nil {
			t.Fatal(err)
		}
	}
	for i, p := range peers {
		if got := p.dials(); got < 140 || got > 260 {
			t.Errorf("host %d got %d of 600 connections, want a third", i+1, got)
		}
	}
}

// The refusal is no answer to another statement: it marks nothing where the address is not known to be one node.
func TestRefusalsMarkNoLoadBalancer(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	db := openMarking(t, p)
	takeConns(t, db.DB, 1) // on node 1, through the "load balancer"
	var refused atomic.Bool
	p.mu.Lock()
	p.refuse = func(int) *pgproto3.ErrorResponse {
		if refused.CompareAndSwap(false, true) {
			return refusal()
		}
		return nil
	}
	p.mu.Unlock()
	if err := db.Ping(); err != nil {
		t.Fatal(err)
	}
	if w := db.c.watchdog.Load(); !refused.Load() || w.marks.Load() != nil {
		t.Errorf("refused: %v, marks: %+v", refused.Load(), w.marks.Load())
	}
}

// The caller's hooks go on being called.
func TestHooksAreChained(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	var lookups, dials, nets, pgErrors atomic.Int32
	db := openWith(t, p.dsn(), func(cc *pgconn.Config) {
		lookup, dial := cc.LookupFunc, cc.DialFunc
		cc.LookupFunc = func(ctx context.Context, host string) ([]string, error) {
			lookups.Add(1)
			return lookup(ctx, host)
		}
		cc.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials.Add(1)
			return dial(ctx, network, addr)
		}
		cc.AfterNetConnect = func(_ context.Context, _ *pgconn.Config, nc net.Conn) (net.Conn, error) {
			nets.Add(1)
			return nc, nil
		}
		cc.OnPgError = func(*pgconn.PgConn, *pgconn.PgError) bool {
			pgErrors.Add(1)
			return true // even so, a goodbye closes the connection
		}
	})
	const insert = "INSERT INTO t VALUES (1)"
	if err := db.Ping(); err != nil {
		t.Fatal(err)
	}
	k := p.set(func(sql string, _ step) bool { return sql == insert }, func(c *peerConn) { c.end(shutdown("ERROR")) })
	if _, err := db.Exec(insert); err != nil {
		t.Error(err)
	}
	k.wait(t, insert)
	if lookups.Load() < 2 || dials.Load() < 2 || nets.Load() < 2 || pgErrors.Load() != 1 {
		t.Errorf("lookups %d, dials %d, connections %d, errors %d", lookups.Load(), dials.Load(), nets.Load(), pgErrors.Load())
	}
}

// While a node is marked, a dial that lands on it is made again until it lands elsewhere.
func TestDialsAreSteered(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	p := open(t, c.DSN(), still)
	fill(t, p.DB, 4)
	w := p.dog(t)
	w.say(1)
	for range 8 { // the load balancer takes the nodes in turn
		dc, err := p.c.Connect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer dc.Close()
		if id := dc.(*conn).s.id; id != 2 {
			t.Errorf("a connection to node %d", id)
		}
	}
	if s := p.c.Stats(); s.Steered == 0 {
		t.Error("no dial landed on node 1: the test shows nothing")
	}
}

// Behind a proxy that hides the node each new connection is asked for it. A server that does not answer in time costs that
// connection, and for a minute none is asked: it does not keep anybody from connecting (B18, D13).
func TestANodeThatDoesNotSayItsIDIsNotAsked(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	db := openMarking(t, p)
	db.SetMaxOpenConns(0)
	w := db.c.watchdog.Load()
	w.rule.Store(ruleAsk)
	p.set(func(sql string, _ step) bool { return sql == sqlShowNodeID }, (*peerConn).awaitClose)
	connect := func() *session {
		t.Helper()
		dc, err := db.c.Connect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = dc.Close() })
		return dc.(*conn).s
	}
	start := time.Now()
	s := connect()
	if took := time.Since(start); s.stamp() != 0 || took < maxPing {
		t.Errorf("connected after %v, with the stamp %d; want none, after %v", took, s.stamp(), maxPing)
	}
	connect()
	if n := p.arrivals(query, sqlShowNodeID); n != 1 {
		t.Errorf("asked %d times, want once", n)
	}
	w.askNext.Store(now())
	if s := connect(); s.stamp() == 0 {
		t.Error("not asked a minute later")
	}
}

// slowReads delays what is read from it.
type slowReads struct {
	net.Conn
	by *atomic.Int64
}

func (c slowReads) Read(p []byte) (int, error) {
	time.Sleep(time.Duration(c.by.Load()))
	return c.Conn.Read(p)
}

// Servers that are slow to answer, since they have too much to do, are not taken for peers that are gone: more dials are the
// last thing that they need.
func TestSlowServersAreNotGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true})
		defer c.Close()
		defer time.Sleep(time.Minute) // pgx closes what has not answered in the background
		var slow, dials atomic.Int64
		p := memPool(t, c, "crdbdrain_cluster=slow&crdbdrain_sources=errors", func(cc *pgx.ConnConfig, _ *Connector) {
			if cc != nil {
				cc.AfterNetConnect = func(_ context.Context, pc *pgconn.Config, nc net.Conn) (net.Conn, error) {
					if pc.RuntimeParams["application_name"] != watchdogName {
						dials.Add(1)
					}
					return slowReads{nc, &slow}, nil
				}
			}
		})
		defer p.Close()
		slow.Store(int64(1200 * time.Millisecond))
		fill(t, p.DB, 4)
		time.Sleep(10 * time.Second)
		for range 4 {
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
			if _, err := p.ExecContext(ctx, "UPDATE t SET x = 1"); err != nil {
				t.Error(err)
			}
			cancel()
			time.Sleep(2 * time.Second)
		}
		if n := dials.Load(); n != 4 {
			t.Errorf("%d dials, want none but the first 4", n)
		}
	})
}

// An option that puts its own hook into the place of the driver's leaves pgx, and one line that says so.
func TestAnOptionThatMakesTheDriverDeafIsNamed(t *testing.T) {
	t.Parallel()
	p := startPeer(t, false)
	cc, err := pgx.ParseConfig(p.dsn())
	if err != nil {
		t.Fatal(err)
	}
	logs := &logTrap{}
	c, err := NewConnector(cc, WithLogger(logs.logger()), WithStdlibOptions(stdlib.OptionBeforeConnect(func(_ context.Context, cc *pgx.ConnConfig) error {
		cc.AfterNetConnect = nil
		return nil
	})))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 2 {
		dc, err := c.Connect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_ = dc.Close()
	}
	if n := logs.count("replaces AfterNetConnect"); n != 1 {
		t.Errorf("%d lines, want 1", n)
	}
}

// A connection that was handed over dead, and whose replacement every node refuses, is a bad one to database/sql; at its last
// try the caller has the reason.
func TestARefusedReplacementHasItsReason(t *testing.T) {
	t.Parallel()
	needPeek(t)
	p := startPeer(t, false)
	var draining atomic.Bool
	p.refuse = func(int) *pgproto3.ErrorResponse {
		if draining.Load() {
			return refusal()
		}
		return nil
	}
	db := open(t, p.dsn(), "")
	dc, err := db.c.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer dc.Close()
	c := dc.(*conn)
	if _, err := c.ExecContext(t.Context(), "UPDATE t SET x = 1", nil); err != nil || !c.IsValid() {
		t.Fatal(err)
	}
	draining.Store(true)
	p.endIdle(sayGoodbye)
	eventually(t, "the goodbye arrives", func() bool { return c.s.link.peeker.peek() != peekQuiet })
	c.returned = false // as where IsValid is hidden: every connection may then have been handed over
	if err := c.ResetSession(t.Context()); !errors.Is(err, driver.ErrBadConn) || sqlState(err) != "57P01" {
		t.Errorf("%v, want driver.ErrBadConn with the node's 57P01", err)
	}
}
