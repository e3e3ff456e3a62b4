package crdbdrain

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// E13: "crdbdrain" is registered once, and nothing of pgx's names is taken or registered again.
func TestE13Registration(t *testing.T) {
	names := sql.Drivers()
	for name, want := range map[string]int{"crdbdrain": 1, "pgx": 1, "pgx/v5": 1} {
		n := 0
		for _, d := range names {
			if d == name {
				n++
			}
		}
		if n != want {
			t.Errorf("%q is registered %d times in %v", name, n, names)
		}
	}
	if n := len(slices.DeleteFunc(names, func(d string) bool { return !strings.Contains(d, "crdb") })); n != 1 {
		t.Errorf("%d names of ours", n)
	}
	db, err := sql.Open("pgx", "host=127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if db.Driver() != stdlib.GetDefaultDriver() {
		t.Errorf("pgx is %T", db.Driver())
	}
	ours, err := sql.Open("crdbdrain", "host=127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	if ours.Driver() != driver.Driver(theDriver) {
		t.Errorf("crdbdrain is %T", ours.Driver())
	}
}

// E02: wrappers open a DB with an empty DSN only to ask for its driver, and may never close it. Nothing starts before the
// first connection, so there is nothing to leak.
func TestE02ThrowawayOpens(t *testing.T) {
	before := goleak.IgnoreCurrent()
	dogs := len(registry.of)
	goroutines := runtime.NumGoroutine()
	dbs := make([]*sql.DB, 0, 500)
	for range 500 {
		c, err := theDriver.OpenConnector("")
		if err != nil {
			t.Fatal(err)
		}
		if c.Driver() != driver.Driver(theDriver) {
			t.Fatalf("driver %T", c.Driver())
		}
		db, err := sql.Open("crdbdrain", "") // database/sql itself starts one goroutine for it, until Close
		if err != nil {
			t.Fatal(err)
		}
		if db.Driver() != driver.Driver(theDriver) {
			t.Fatalf("driver %T", db.Driver())
		}
		dbs = append(dbs, db)
	}
	if n := runtime.NumGoroutine() - goroutines; n > len(dbs) {
		t.Errorf("%d goroutines for %d opens, more than database/sql's own", n, len(dbs))
	}
	for _, db := range dbs {
		db.Close()
	}
	goleak.VerifyNone(t, before)
	if n := len(registry.of); n != dogs {
		t.Errorf("%d watchdogs, %d before", n, dogs)
	}
}

// Driver.Open opens one connection without a connector that somebody could close: everything ends with the connection, or
// with the failure to open it.
func TestDriverOpenLeavesNothingBehind(t *testing.T) {
	before := goleak.IgnoreCurrent()
	dogs := len(registry.of)
	c := crdbdraintest.Start(crdbdraintest.Config{Nodes: 1})
	refusing := crdbdraintest.Start(crdbdraintest.Config{Nodes: 1, Password: "x"})
	defer func() {
		c.Close()
		refusing.Close()
		goleak.VerifyNone(t, before)
	}()
	for _, params := range []string{"", "&crdbdrain_otelsql=on", "&crdbdrain_mode=off", "&crdbdrain_mode=observe"} {
		dc, err := theDriver.Open(c.DSN() + params)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := dc.(driver.ExecerContext).ExecContext(t.Context(), "UPDATE t SET x = 1", nil); err != nil {
			t.Error(err)
		}
		if n := len(registry.of); n != dogs && params == "&crdbdrain_mode=off" {
			t.Errorf("%s: a watchdog", params)
		}
		for range 2 {
			if err := dc.Close(); err != nil {
				t.Errorf("%s: %v", params, err)
			}
		}
		if n := len(registry.of); n != dogs {
			t.Errorf("%s: the connection is closed, and its watchdog is not", params)
		}
		if dc, err := theDriver.Open(strings.Replace(refusing.DSN(), ":x@", ":y@", 1) + params); err == nil {
			t.Errorf("%s: a wrong password opens %T", params, dc)
		}
		if n := len(registry.of); n != dogs {
			t.Errorf("%s: a failed Open leaves a watchdog", params)
		}
	}
	within(t, time.Second, "the server has seen them close", func() bool { return c.Stats().Open == 0 })
	if _, err := theDriver.Open("crdbdrain_mode=maybe"); err == nil {
		t.Error("a wrong parameter opens")
	}
}

// Driver.Open behind a proxy that hides the node asks the new connection; where that fails, nothing is left either.
func TestDriverOpenThatFailsAfterTheDialLeavesNothingBehind(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1, Handler: func(q crdbdraintest.Query) *crdbdraintest.Result {
		if q.SQL == sqlShowNodeID && q.ApplicationName != "crdbdrain-watchdog" {
			return &crdbdraintest.Result{End: crdbdraintest.EndFIN, Unexecuted: true}
		}
		return nil
	}, Faults: crdbdraintest.Faults{PID: func(int) uint32 { return 170<<20 | 1 }}})
	c.Grant("app", "VIEWSYSTEMTABLE")
	const params = "crdbdrain_poll_interval=100ms"
	p := open(t, c.DSN(), params)
	mustExec(t, p, "UPDATE t SET x = 1")
	w := p.c.watchdog.Load()
	within(t, 5*time.Second, "the rule refuted", func() bool { return w.rule.Load() == ruleAsk })
	if _, err := theDriver.Open(c.DSN() + "&" + params); err == nil {
		t.Error("a connection that was lost while it was asked is handed out")
	} else if errors.Is(err, driver.ErrBadConn) {
		t.Errorf("%v", err)
	}
	w.mu.Lock()
	members := len(w.members)
	w.mu.Unlock()
	if members != 1 {
		t.Errorf("%d connectors with the watchdog, want the pool's", members)
	}
	p.DB.Close()
	if registry.count(w) != 0 {
		t.Error("the watchdog outlives the pool: the failed Open holds it")
	}
}

// crdbdrain_mode=off is plain pgx: its connections, no hooks, no watchdog.
func TestModeOffIsPlainPgx(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	p := open(t, c.DSN(), "crdbdrain_mode=off")
	conn, err := p.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.Raw(func(dc any) error {
		std, ok := dc.(*stdlib.Conn)
		if !ok {
			t.Fatalf("the connection is %T", dc)
		}
		if _, plain := std.Conn().PgConn().Conn().(*net.TCPConn); !plain {
			t.Error("the stream is not pgx's own")
		}
		return nil
	})
	if p.c.watchdog.Load() != nil {
		t.Error("there is a watchdog")
	}
	if n := c.Stats().Accepts; n != 1 {
		t.Errorf("%d connections", n)
	}
}

// crdbdrain_otelsql=on: the wrapper forwards what culls need, and closes the connector with the DB.
func TestOtelsqlForwardsWhatCullsNeed(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	db, err := sql.Open("crdbdrain", c.DSN()+"&"+still+"&crdbdrain_otelsql=on&crdbdrain_cull_stagger=0")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	fill(t, db, 10)
	w := theOnlyWatchdogOf(t, c)
	w.rule.Store(ruleHolds)
	before := c.Node(1).Stats().Open
	if before < 3 || c.Node(2).Stats().Open == 0 {
		t.Fatalf("%d connections on node 1", before)
	}
	w.say(1)
	if failed, err := burst(16, 20, selectOne(db)); failed > 0 {
		t.Errorf("%d of 320 calls failed: %v", failed, err)
	}
	w.mu.Lock()
	connector := w.members[0]
	w.mu.Unlock()
	within(t, 5*time.Second, "node 1's connections culled", func() bool { return connector.Stats().Culled >= int64(before) })
	if s := connector.Stats(); s.Lost != 0 {
		t.Errorf("%+v", s)
	}
	db.Close()
	if registry.count(w) != 0 {
		t.Error("the watchdog outlives the DB")
	}
	within(t, time.Second, "every connection closed", func() bool { return c.Stats().Open == 0 })
}

// theOnlyWatchdogOf returns the watchdog of a cluster with sockets, by its load balancer's address.
func theOnlyWatchdogOf(t testing.TB, c *crdbdraintest.Cluster) *watchdog {
	t.Helper()
	registry.mu.Lock()
	defer registry.mu.Unlock()
	for key, w := range registry.of {
		if strings.Contains(key, c.LoadBalancer().Addr()) {
			return w
		}
	}
	t.Fatal("no watchdog")
	return nil
}

// pings counts the empty statements that a server gets from an application.
func pingCluster(t testing.TB, hide bool, answer *crdbdraintest.Result) (*crdbdraintest.Cluster, func() int) {
	t.Helper()
	c := startCluster(t, crdbdraintest.Config{Nodes: 1, Faults: crdbdraintest.Faults{HideVersion: hide, Ping: answer}})
	return c, func() int { return c.Stats().Statements["-- ping"] }
}

// E14: consoles and poolers that reject "-- ping". The driver pings when pgx does, and no more often; the option that
// decides it is honoured.
func TestE14Pings(t *testing.T) {
	reject := &crdbdraintest.Result{Err: &pgconn.PgError{Code: "08P01", Message: "invalid command '-- ping', use SHOW HELP;"}}
	never := WithStdlibOptions(stdlib.OptionShouldPing(func(context.Context, stdlib.ShouldPingParams) bool { return false }))
	use := func(t *testing.T, db *sql.DB) {
		t.Helper()
		db.SetMaxOpenConns(1)
		for range 5 {
			mustExec(t, db, "UPDATE t SET x = 1")
		}
	}
	for _, tt := range []struct {
		name   string
		hide   bool // CockroachDB
		answer *crdbdraintest.Result
	}{
		{"PostgreSQL", true, nil},
		{"a console that rejects pings", true, reject},
		{"CockroachDB", false, nil},
		{"CockroachDB behind one that rejects pings", false, reject},
	} {
		t.Run(tt.name, func(t *testing.T) {
			plain, plainPings := pingCluster(t, tt.hide, tt.answer)
			cc, err := pgx.ParseConfig(plain.DSN())
			if err != nil {
				t.Fatal(err)
			}
			db := stdlib.OpenDB(*cc)
			defer db.Close()
			use(t, db)

			c, pings := pingCluster(t, tt.hide, tt.answer)
			use(t, open(t, c.DSN(), still).DB)
			if pings() != plainPings() || c.Stats().Accepts != plain.Stats().Accepts {
				t.Errorf("%d pings and %d dials; pgx: %d and %d", pings(), c.Stats().Accepts, plainPings(), plain.Stats().Accepts)
			}

			c, pings = pingCluster(t, tt.hide, tt.answer)
			use(t, open(t, c.DSN(), still, never).DB)
			if pings() != 0 || c.Stats().Accepts != 1 {
				t.Errorf("%d pings and %d dials with an OptionShouldPing that says no", pings(), c.Stats().Accepts)
			}
		})
	}
}

// countingTracer counts what it is told, by statement.
type countingTracer struct {
	connects atomic.Int64
	mu       sync.Mutex
	queries  map[string]int // guarded by mu
}

func (c *countingTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.queries == nil {
		c.queries = make(map[string]int)
	}
	c.queries[d.SQL]++
	return ctx
}
func (c *countingTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (c *countingTracer) TraceConnectStart(ctx context.Context, _ pgx.TraceConnectStartData) context.Context {
	c.connects.Add(1)
	return ctx
}
func (c *countingTracer) TraceConnectEnd(context.Context, pgx.TraceConnectEndData) {}

// E17: the application's tracer sees the application's connections and statements, and nothing of the watchdog's. So do
// its other hooks that are about a session.
func TestE17TracerNeverSeesTheWatchdog(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	c.Grant("app", "admin")
	cc, err := pgx.ParseConfig(c.DSN() + "&crdbdrain_poll_interval=100ms&crdbdrain_unsafe_internals=on&crdbdrain_spares=0")
	if err != nil {
		t.Fatal(err)
	}
	var tracer countingTracer
	var after, validated atomic.Int64
	cc.Tracer = &tracer
	cc.AfterConnect = func(context.Context, *pgconn.PgConn) error { after.Add(1); return nil }
	cc.ValidateConnect = func(context.Context, *pgconn.PgConn) error { validated.Add(1); return nil }
	con, err := NewConnector(cc)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(con)
	defer db.Close()
	mustExec(t, db, "UPDATE t SET x = 1")
	within(t, 10*time.Second, "five polls of both sources", func() bool {
		s := c.Stats().Statements
		return s[sqlInstances] >= 5 && s[sqlGossip] >= 5
	})
	if n := tracer.connects.Load(); n != 1 {
		t.Errorf("the tracer saw %d connections, want the application's", n)
	}
	if after.Load() != 1 || validated.Load() != 1 {
		t.Errorf("AfterConnect called %d times, ValidateConnect %d", after.Load(), validated.Load())
	}
	tracer.mu.Lock()
	defer tracer.mu.Unlock()
	if len(tracer.queries) != 1 || tracer.queries["UPDATE t SET x = 1"] != 1 {
		t.Errorf("the tracer saw %v", tracer.queries)
	}
}

// WithStdlibOptions: pgx's own hooks run on the application's connections.
func TestStdlibOptionsRun(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	var before, after, reset atomic.Int64
	p := open(t, c.DSN(), still, WithStdlibOptions(
		stdlib.OptionBeforeConnect(func(context.Context, *pgx.ConnConfig) error { before.Add(1); return nil }),
		stdlib.OptionAfterConnect(func(context.Context, *pgx.Conn) error { after.Add(1); return nil }),
		stdlib.OptionResetSession(func(context.Context, *pgx.Conn) error { reset.Add(1); return nil }),
	))
	p.SetMaxOpenConns(1)
	for range 3 {
		mustExec(t, p, "UPDATE t SET x = 1")
	}
	if before.Load() != 1 || after.Load() != 1 || reset.Load() != 2 {
		t.Errorf("BeforeConnect %d, AfterConnect %d, ResetSession %d; want 1, 1, 2", before.Load(), after.Load(), reset.Load())
	}
}

// A Connector is closed by sql.DB.Close, which asks for io.Closer; closing one that never connected is nothing.
func TestCloseOfAnUnusedConnector(t *testing.T) {
	cc, err := pgx.ParseConfig("postgres://app@127.0.0.1:1/d")
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewConnector(cc)
	if err != nil {
		t.Fatal(err)
	}
	var closer io.Closer = c
	for range 3 {
		if err := closer.Close(); err != nil {
			t.Error(err)
		}
	}
	if s := c.Stats(); s != (Stats{}) {
		t.Errorf("%+v", s)
	}
}
