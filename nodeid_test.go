package crdbdrain

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

func TestNodeFromPID(t *testing.T) {
	for _, tt := range []struct {
		name string
		pid  uint32
		want nodeID
	}{
		{"before v22.1", 0, 0},
		{"random bits only", 0x000fffff, 0},
		{"node 1, no random bit", 1 << 20, 1},
		{"node 1, every random bit", 1<<20 | 0xfffff, 1},
		{"node 2047, the last small one", 2047<<20 | 0x12345, 2047},
		{"node 2048, the first large one", 1<<31 | 2048, 2048},
		{"a large form of a small ID", 1<<31 | 7, 7},
		{"the largest ID", 0xffffffff, maxNodeID},
		{"top bit only", 1 << 31, 0},
		{"D13: a proxy at 10.20.3.4", 0x0a140304, 161},
		{"D13: a proxy at 172.16.0.1", 0xac100001, 739246081},
		{"D14: PostgreSQL's process 1048593", 1048593, 1},
	} {
		if got := nodeFromPID(tt.pid); got != tt.want {
			t.Errorf("%s: nodeFromPID(%#x) = %d, want %d", tt.name, tt.pid, got, tt.want)
		}
	}
}

func TestParseNodeID(t *testing.T) {
	for _, tt := range []struct {
		text string
		id   nodeID
		ok   bool
	}{
		{"1", 1, true},
		{"2047", 2047, true},
		{"2048", 2048, true},
		{"2147483647", maxNodeID, true},
		{"2147483648", 0, false},
		{"4294967297", 0, false},           // 2^32 + 1 is not node 1
		{"18446744073709551617", 0, false}, // nor is 2^64 + 1
		{"0", 0, false},                    // an external SQL pod
		{"-1", 0, false},
		{"+1", 0, false},
		{" 1", 0, false},
		{"1 ", 0, false},
		{"1.0", 0, false},
		{"1e3", 0, false},
		{"0x1", 0, false},
		{"1_0", 0, false},
		{"", 0, false},
		{"NULL", 0, false},
		{"\u0661", 0, false}, // a digit of another script
	} {
		if id, ok := parseNodeID(tt.text); id != tt.id || ok != tt.ok {
			t.Errorf("parseNodeID(%q) = %d, %v, want %d, %v", tt.text, id, ok, tt.id, tt.ok)
		}
	}
}

func TestCRDBVersion(t *testing.T) {
	for _, tt := range []struct {
		text         string
		major, minor int
		ok           bool
	}{
		{"CockroachDB CCL v25.2.0 (x86_64-pc-linux-gnu, built 2025/05/19 12:00:00, go1.23.7)", 25, 2, true},
		{"CockroachDB CCL v26.1.0-alpha.1 (aarch64-unknown-linux-gnu, built 2026/01/01 00:00:00, go1.25.5)", 26, 1, true},
		{"CockroachDB CCL v24.3.0-alpha.00000000-dev-0123456789abcdef (…)", 24, 3, true},
		{"CockroachDB OSS v2.0.7 (linux amd64, built 2018/11/13 18:00:00, go1.10)", 2, 0, true},
		{"v22.1", 22, 1, true},
		{"v25.4-rc.1", 25, 4, true},
		{"a vendor's v25.10.3", 25, 10, true},
		{"", 0, 0, false},
		{"CockroachDB", 0, 0, false},
		{"v25", 0, 0, false},
		{"v25.", 0, 0, false},
		{"v.2", 0, 0, false},
		{"v-1.2", 0, 0, false},
		{"v1.-2", 0, 0, false},
		{"v99999999999999999999.1", 0, 0, false},
		{"25.2.0", 0, 0, false},
		{"PostgreSQL 15.3 on x86_64-pc-linux-gnu", 0, 0, false},
	} {
		major, minor, ok := crdbVersion(tt.text)
		if major != tt.major || minor != tt.minor || ok != tt.ok {
			t.Errorf("crdbVersion(%q) = %d, %d, %v, want %d, %d, %v", tt.text, major, minor, ok, tt.major, tt.minor, tt.ok)
		}
	}
}

func FuzzCRDBVersion(f *testing.F) {
	f.Add("CockroachDB CCL v25.2.0 (x86_64-pc-linux-gnu, built 2025/05/19 12:00:00, go1.23.7)", 25, 2)
	f.Add("v", 0, 0)
	f.Add("v1.", 1<<30, 7)
	f.Fuzz(func(t *testing.T, text string, a, b int) {
		major, minor, ok := crdbVersion(text)
		if major < 0 || minor < 0 || !ok && (major != 0 || minor != 0) {
			t.Errorf("crdbVersion(%q) = %d, %d, %v", text, major, minor, ok)
		}
		if a < 0 || b < 0 {
			return
		}
		// The first version in the text counts, whatever follows.
		if major, minor, ok := crdbVersion(fmt.Sprintf("CockroachDB v%d.%d.0 %s", a, b, text)); major != a || minor != b || !ok {
			t.Errorf("v%d.%d before %q is read as %d, %d, %v", a, b, text, major, minor, ok)
		}
	})
}

// said is a statement that a node was sent, and by whom.
type said struct {
	sql, app string
	node     int
}

// ear is a Handler that remembers every statement.
type ear struct {
	answer func(crdbdraintest.Query) *crdbdraintest.Result // may be nil

	mu   sync.Mutex
	said []said // guarded by mu
}

func (e *ear) handle(q crdbdraintest.Query) *crdbdraintest.Result {
	e.mu.Lock()
	e.said = append(e.said, said{q.SQL, q.ApplicationName, q.Node})
	e.mu.Unlock()
	if e.answer == nil {
		return nil
	}
	return e.answer(q)
}

// count counts the statements that begin so, of the watchdog or of everybody else.
func (e *ear) count(prefix string, ofWatchdog bool) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for _, s := range e.said {
		if strings.HasPrefix(s.sql, prefix) && (s.app == watchdogName) == ofWatchdog {
			n++
		}
	}
	return n
}

const watchdogName = "crdbdrain-watchdog"

// eventually waits until ok returns true, and fails with what it waited for after 15 seconds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// take takes n connections of the pool at the same time, and returns them to it at the test's end.
func takeConns(t testing.TB, db *sql.DB, n int) []*sql.Conn {
	t.Helper()
	conns := make([]*sql.Conn, n)
	for i := range conns {
		c, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		conns[i] = c
	}
	return conns
}

// ours returns the driver's connection under a database/sql one.
func ours(t testing.TB, c *sql.Conn) (s *session) {
	t.Helper()
	if err := c.Raw(func(raw any) error { s = raw.(*conn).s; return nil }); err != nil {
		t.Fatal(err)
	}
	return s
}

func (p *pool) wd() *watchdog { return p.c.watchdog.Load() }

// status returns the state of a source.
func (w *watchdog) status(id sourceID) sourceStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sources[id]
}

func (w *watchdog) isNodeMarked(id nodeID) bool {
	m := w.marks.Load()
	return m != nil && m.of[id] != nil
}

// heldOn counts the connections to a node.
func (w *watchdog) heldOn(id nodeID) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.nodeOf(id).held)
}

func proxyPID(int) uint32 { return 0x0a140304 } // 10.20.3.4, "node 161"

// gossipRows is a Faults.Source: both gossip tables, nodes 1 to 3 well, and one more that drains.
func gossipRows(draining int64) func(table string) *crdbdraintest.Result {
	return func(table string) *crdbdraintest.Result {
		var r crdbdraintest.Result
		switch table {
		case "crdb_internal.gossip_liveness":
			r.Columns = []string{"node_id", "epoch", "draining", "membership"}
		case "crdb_internal.gossip_nodes":
			r.Columns = []string{"node_id", "is_live"}
		default:
			return nil
		}
		for _, id := range []int64{1, 2, 3, draining} {
			row := []any{id, int64(1), id == draining, "active"}
			if len(r.Columns) == 2 {
				row = []any{id, true}
			}
			r.Rows = append(r.Rows, row)
		}
		return &r
	}
}

// A proxy's value in BackendKeyData looks like node 161. That node drains, and nobody is on it.
func TestD13ProxyRewritesBackendKeyData(t *testing.T) {
	t.Parallel()
	listen := &ear{}
	c := crdbdraintest.Start(crdbdraintest.Config{Handler: listen.handle,
		Settings: crdbdraintest.Settings{InitialWait: 3 * time.Second, ConnectionsTimeout: 3 * time.Second},
		Faults:   crdbdraintest.Faults{PID: proxyPID, Source: gossipRows(161)}})
	defer c.Close()
	c.Grant("app", "VIEWCLUSTERMETADATA")
	c.Grant("app", "VIEWSYSTEMTABLE")
	logs := &logTrap{}
	db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_cull_stagger=20ms", WithLogger(logs.logger()))
	fill(t, db.DB, 6)
	w := db.wd()
	eventually(t, "the rule is known not to hold, and gossip's mark on 161 is there", func() bool {
		return w.rule.Load() == ruleAsk && w.isNodeMarked(161)
	})
	polls := listen.count("SELECT l.node_id", true)
	eventually(t, "five more polls", func() bool {
		_ = db.PingContext(t.Context())
		return listen.count("SELECT l.node_id", true) >= polls+5
	})
	if s := db.c.Stats(); s.Culled+s.Lost+s.Steered != 0 {
		t.Errorf("%+v: a wrong stamp has culled", s)
	}
	// The watchdog's own connection has no reason to move either: its PID is as wrong.
	if n := dialled(c, watchdogName); n != 1 {
		t.Errorf("the watchdog dialled %d times, want 1", n)
	}
	if n := logs.count("BackendKeyData does not tell"); n != 1 {
		t.Errorf("%d lines say so, want 1:\n%s", n, logs)
	}

	// From here on each new connection is asked, and culls work.
	db.SetMaxIdleConns(0) // closes the six
	before := listen.count("SHOW node_id", false)
	db.SetMaxOpenConns(9)
	fresh := takeConns(t, db.DB, 9)
	asked := map[nodeID]int{}
	for _, sc := range fresh {
		asked[ours(t, sc).stamp()]++
	}
	if asked[1]+asked[2]+asked[3] != 9 || asked[1]*asked[2]*asked[3] == 0 { // the balancer may have skipped one
		t.Errorf("stamps by node: %v, want 9 on 1, 2 and 3", asked)
	}
	if n := listen.count("SHOW node_id", false) - before; n != 9 {
		t.Errorf("SHOW node_id was asked %d times of 9 connections", n)
	}
	go c.Node(2).Drain(t.Context())
	eventually(t, "node 2 is marked", func() bool { return w.isNodeMarked(2) })
	db.SetMaxIdleConns(9)
	for _, sc := range fresh {
		_ = sc.Close()
	}
	eventually(t, "the three connections to node 2 are culled", func() bool { return db.c.Stats().Culled == 3 })
}

// dialled counts the connections that were made under an application_name.
func dialled(c *crdbdraintest.Cluster, app string) int {
	n := 0
	for _, p := range c.Stats().Startups {
		if p["application_name"] == app {
			n++
		}
	}
	return n
}

// PostgreSQL's process 1048593 looks like node 1, and a pooler hides crdb_version: both are pgx with nothing added.
func TestD14D15NoVersionNoStampNoQuery(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{Faults: crdbdraintest.Faults{
		HideVersion: true, PID: func(int) uint32 { return 1048593 }}})
	defer c.Close()
	c.Grant("app", "admin")
	db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_unsafe_internals=on")
	fill(t, db.DB, 6)
	for range 50 { // 10 poll intervals
		if _, err := db.ExecContext(t.Context(), "SELECT 1"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if db.wd() != nil {
		t.Error("there is a watchdog")
	}
	for _, sc := range takeConns(t, db.DB, 6) {
		if dc := ours(t, sc); dc.w != nil || dc.id != 0 {
			t.Errorf("stamp %d, watchdog %p: want none", dc.id, dc.w)
		}
	}
	s := c.Stats()
	delete(s.Statements, "-- ping") // pgx's, of a connection that was idle for a second
	if len(s.Statements) != 1 || s.Statements["SELECT 1"] != 50 {
		t.Errorf("statements at the server: %v, want 50 × SELECT 1 only", s.Statements)
	}
	if s.Accepts != 6 {
		t.Errorf("%d connections, want 6", s.Accepts)
	}
}

// On external SQL pods SHOW node_id is 0: no connection has a stamp, and nothing is culled, whatever a source says.
func TestExternalSQLPodsHaveNoStamp(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{Virtual: true, Settings: crdbdraintest.Settings{InitialWait: 1500 * time.Millisecond}})
	defer c.Close()
	c.Grant("app", "VIEWSYSTEMTABLE")
	logs := &logTrap{}
	db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_cull_stagger=1ms", WithLogger(logs.logger()))
	fill(t, db.DB, 9)
	w := db.wd()
	eventually(t, "the rule is off", func() bool { return w.rule.Load() == ruleOff })
	drained := make(chan crdbdraintest.DrainResult)
	go func() { drained <- c.Node(1).Drain(t.Context()) }()
	eventually(t, "instances says that node 1 drains", func() bool { return w.isNodeMarked(1) })
	if d := <-drained; d.LostIdle < 3 {
		t.Errorf("%+v: want the node to close at least 3 idle connections (the watchdog's may be one more)", d)
	}
	if s := db.c.Stats(); s.Culled+s.Steered != 0 {
		t.Errorf("%+v: culled without a stamp", s)
	}
	for _, sc := range takeConns(t, db.DB, 9) {
		if id := ours(t, sc).stamp(); id != 0 {
			t.Errorf("stamp %d, want none", id)
		}
	}
	if n := logs.count("no way to tell which node a connection is on"); n != 1 {
		t.Errorf("%d lines say so, want 1:\n%s", n, logs)
	}
}

// Before v22.1 BackendKeyData is 0; SHOW node_id answers.
func TestBeforeV221EachNewConnectionIsAsked(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{Version: "v22.0.0"})
	defer c.Close()
	db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_sources=errors")
	first := takeConns(t, db.DB, 1)[0]
	w := db.wd()
	eventually(t, "the rule is known not to hold", func() bool { return w.rule.Load() == ruleAsk })
	if id := ours(t, first).stamp(); id != 0 {
		t.Errorf("the first connection has stamp %d, want none", id)
	}
	stamps := map[nodeID]int{}
	for _, sc := range takeConns(t, db.DB, 6) {
		stamps[ours(t, sc).stamp()]++
	}
	if stamps[1] != 2 || stamps[2] != 2 || stamps[3] != 2 {
		t.Errorf("stamps by node: %v, want 2 on each of 1, 2, 3", stamps)
	}
}

// A stamp that cannot be had is no reason to fail a connection, and no error path leaves a socket open.
func TestB18AFailedStampLeaksNoSocket(t *testing.T) {
	t.Parallel()
	var mode string // what an application's connection is told when it is asked
	var mu sync.Mutex
	listen := &ear{answer: func(q crdbdraintest.Query) *crdbdraintest.Result {
		mu.Lock()
		defer mu.Unlock()
		if q.SQL != sqlShowNodeID || q.ApplicationName == watchdogName {
			return nil
		}
		switch mode {
		case "denied":
			return &crdbdraintest.Result{Err: &pgconn.PgError{Code: "42501", Message: "no"}}
		case "words":
			return &crdbdraintest.Result{Columns: []string{"node_id"}, Rows: [][]any{{"one"}}}
		case "rows":
			return &crdbdraintest.Result{Columns: []string{"node_id"}, Rows: [][]any{{"1"}, {"2"}}}
		case "goodbye":
			mode = "denied" // once
			return &crdbdraintest.Result{Unexecuted: true}
		}
		return nil
	}}
	c := crdbdraintest.Start(crdbdraintest.Config{Handler: listen.handle, Faults: crdbdraintest.Faults{PID: proxyPID}})
	defer c.Close()
	db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_sources=errors")
	db.SetMaxIdleConns(0)
	first := takeConns(t, db.DB, 1)[0]
	w := db.wd()
	eventually(t, "the rule is known not to hold", func() bool { return w.rule.Load() == ruleAsk })
	_ = first.Close()
	for _, m := range []string{"denied", "words", "rows", "goodbye"} {
		mu.Lock()
		mode = m
		mu.Unlock()
		sc, err := db.Conn(t.Context())
		if err != nil {
			t.Errorf("%s: Conn: %v", m, err)
			continue
		}
		if id := ours(t, sc).stamp(); id != 0 {
			t.Errorf("%s: stamp %d, want none", m, id)
		}
		if _, err := sc.ExecContext(t.Context(), "SELECT 1"); err != nil {
			t.Errorf("%s: %v", m, err)
		}
		_ = sc.Close()
	}
	_ = db.Close()
	eventually(t, "every session has ended after Close", func() bool { return c.Stats().Open == 0 })

	// An OptionAfterConnect that fails is where plain pgx leaves the socket open.
	boom := errors.New("boom")
	failing := open(t, c.DSN(), "crdbdrain_sources=errors", WithStdlibOptions(
		stdlib.OptionAfterConnect(func(context.Context, *pgx.Conn) error { return boom })))
	before := c.Stats().Accepts
	for range 5 {
		if err := failing.PingContext(t.Context()); !errors.Is(err, boom) {
			t.Errorf("Ping: %v, want %v", err, boom)
		}
	}
	if n := c.Stats().Accepts - before; n != 5 {
		t.Errorf("%d dials for 5 pings", n)
	}
	eventually(t, "none of 5 sockets is left", func() bool { return c.Stats().Open == 0 })
}
