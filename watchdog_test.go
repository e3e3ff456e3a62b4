package crdbdrain

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/jackc/pgx/v5"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// logTrap keeps what the driver logs, line by line.
type logTrap struct {
	mu    sync.Mutex
	lines []string // guarded by mu
}

func (l *logTrap) logger() *slog.Logger { return slog.New(l) }

func (l *logTrap) Enabled(context.Context, slog.Level) bool { return true }
func (l *logTrap) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logTrap) WithGroup(string) slog.Handler            { return l }

func (l *logTrap) Handle(_ context.Context, r slog.Record) error {
	line := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool {
		line += fmt.Sprintf(" %s=%q", a.Key, a.Value.String())
		return true
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)
	return nil
}

// count counts the lines that have all of these words.
func (l *logTrap) count(words ...string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, line := range l.lines {
		all := true
		for _, w := range words {
			all = all && strings.Contains(line, w)
		}
		if all {
			n++
		}
	}
	return n
}

// once waits for the line with all of these words, which is written just after what it tells has become true.
func (l *logTrap) once(t testing.TB, words ...string) {
	t.Helper()
	eventually(t, strings.Join(words, " … ")+" in the log", func() bool { return l.count(words...) > 0 })
	if n := l.count(words...); n != 1 {
		t.Errorf("%d lines with %q, want 1:\n%s", n, words, l)
	}
}

func (l *logTrap) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// virtual opens a pool on a cluster in memory, for a bubble of testing/synctest. close ends everything in it.
func virtual(t *testing.T, cfg crdbdraintest.Config, dsn func(*crdbdraintest.Cluster) string, params string, opts ...Option) (c *crdbdraintest.Cluster, db *pool, end func()) {
	t.Helper()
	cfg.Memory = true
	cfg.LoadBalancer.Interval = time.Minute // its checks would be most of the work
	c = crdbdraintest.Start(cfg)
	connector := virtualConnector(t, c, dsn(c)+"&"+params, opts...)
	db = &pool{sql.OpenDB(connector), connector}
	return c, db, func() {
		_ = db.Close()
		c.Close()
	}
}

func virtualConnector(t *testing.T, c *crdbdraintest.Cluster, dsn string, opts ...Option) *Connector {
	t.Helper()
	cc, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	cc.DialFunc = c.Dial
	connector, err := NewConnector(cc, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return connector
}

// A01: the whole drain, signal by signal. Whatever gossip is worth otherwise, for a plain drain it comes too late; each of
// the early sources gets every connection off the node before the server closes any.
func TestA01WhichSignalComesInTime(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		source string
		early  bool
		since  crdbdraintest.Step // the signal's
	}{
		{"gossip", false, crdbdraintest.Flagged},
		{"instances", true, crdbdraintest.Announced},
		{"readiness", true, crdbdraintest.Unready},
	} {
		t.Run(tt.source, func(t *testing.T) {
			t.Parallel()
			const conns, initial, left = 12, 500 * time.Millisecond, 2500 * time.Millisecond
			var mu sync.Mutex
			entered := map[crdbdraintest.Step]time.Time{}
			culledAt := map[crdbdraintest.Step]int64{}
			var db *pool
			c := crdbdraintest.Start(crdbdraintest.Config{
				Settings: crdbdraintest.Settings{InitialWait: initial, ConnectionsTimeout: left, TransactionsTimeout: time.Second},
				OnStep: func(_ *crdbdraintest.Node, step crdbdraintest.Step) {
					mu.Lock()
					defer mu.Unlock()
					entered[step] = time.Now()
					culledAt[step] = db.c.Stats().Culled
				}})
			t.Cleanup(c.Close)
			c.Grant("app", "VIEWSYSTEMTABLE")
			c.Grant("app", "VIEWCLUSTERMETADATA")
			params := "crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_window=3s&crdbdrain_cull_stagger=200ms&crdbdrain_sources=" + tt.source
			if tt.source == "readiness" {
				params += "&crdbdrain_readiness=" + c.ReadinessURLs()
			}
			logs := &logTrap{}
			db = open(t, c.DSN(), params, WithLogger(logs.logger()))
			fill(t, db.DB, conns)
			eventually(t, "the rule is verified and the source answers", func() bool {
				id := map[string]sourceID{"gossip": sourceGossip, "instances": sourceInstances, "readiness": sourceReadiness}[tt.source]
				return db.wd().rule.Load() == ruleHolds && len(db.wd().status(id).nodes) == 3
			})
			on2 := db.wd().heldOn(2)
			if on2 == 0 {
				t.Fatal("no connection is on node 2")
			}
			stop := make(chan struct{})
			var traffic sync.WaitGroup
			traffic.Go(func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(10 * time.Millisecond):
						if err := oneOp(db.DB, 1); err != nil {
							t.Error(err)
						}
					}
				}
			})
			d := c.Node(2).Drain(t.Context())
			eventually(t, "the signal has come", func() bool { return db.wd().isNodeMarked(2) })
			close(stop)
			traffic.Wait()
			if !tt.early { // what the server has closed is found by the sweep, or by a caller
				eventually(t, "the losses are noticed", func() bool { return db.c.Stats().Lost == int64(on2) })
			}
			s := db.c.Stats()
			mu.Lock()
			defer mu.Unlock()
			t.Logf("%+v\n%+v\nculled by step %v", d, s, culledAt)
			if !tt.early {
				if s.Culled != 0 || d.LostIdle+d.LostBusy < on2 {
					t.Errorf("%d culled, %d closed by the server; want 0 culled, and all of node 2's closed by it", s.Culled, d.LostIdle+d.LostBusy)
				}
				return
			}
			if d.LostIdle+d.LostBusy != 0 || s.Lost != 0 {
				t.Errorf("%d idle and %d busy connections closed by the server, want none", d.LostIdle, d.LostBusy)
			}
			if s.Culled < int64(on2) {
				t.Errorf("%d culled, want all %d of node 2", s.Culled, on2)
			}
			if n := culledAt[tt.since]; n != 0 {
				t.Errorf("%d culled before the signal", n)
			}
			if d.Duration >= initial+left {
				t.Errorf("the drain took %v: its waits did not end early", d.Duration)
			}
			logs.once(t, "a node is leaving", fmt.Sprintf("source=%q", tt.source))
			logs.once(t, "the last connection has left a node", `lost="0"`, `outcome="clean"`)
		})
	}
}

// A16: a node that hangs is no drain. The watchdog is back within its timeout, says once that the sources fail, and goes
// on when the node does.
func TestA16AHangIsNoDrain(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{})
	t.Cleanup(c.Close)
	c.Grant("app", "VIEWSYSTEMTABLE")
	c.Grant("app", "VIEWCLUSTERMETADATA")
	logs := &logTrap{}
	db := open(t, c.DSNAll(), "crdbdrain_poll_interval=100ms&crdbdrain_poll_timeout=200ms&crdbdrain_readiness="+c.ReadinessURLs(), WithLogger(logs.logger()))
	fill(t, db.DB, 6)
	w := db.wd()
	polled := []sourceID{sourceInstances, sourceGossip, sourceReadiness}
	eventually(t, "every source answers", func() bool {
		return w.status(sourceInstances).state+w.status(sourceGossip).state+w.status(sourceReadiness).state == 3
	})
	for _, n := range c.Nodes() {
		n.Hang(true)
	}
	eventually(t, "every source has failed three times", func() bool {
		for _, id := range polled {
			if w.status(id).failures < 3 {
				return false
			}
		}
		return true
	})
	for _, n := range c.Nodes() {
		n.Hang(false)
	}
	eventually(t, "every source answers again", func() bool {
		return w.status(sourceInstances).state+w.status(sourceGossip).state+w.status(sourceReadiness).state == 3
	})
	if s := db.c.Stats(); s.Culled+s.Lost+s.Steered != 0 {
		t.Errorf("%+v", s)
	}
	if n := logs.count("a node is leaving"); n != 0 {
		t.Errorf("a hang is taken for a drain:\n%s", logs)
	}
	for _, id := range polled {
		logs.once(t, "source fails", fmt.Sprintf("%q", id))
		logs.once(t, "source works again", fmt.Sprintf("%q", id))
	}
}

// A16: nor is a node that is killed.
func TestA16AKillIsNoDrain(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{})
	t.Cleanup(c.Close)
	c.Grant("app", "VIEWSYSTEMTABLE")
	c.Grant("app", "VIEWCLUSTERMETADATA")
	logs := &logTrap{}
	db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_readiness="+c.ReadinessURLs(), WithLogger(logs.logger()))
	fill(t, db.DB, 9)
	w := db.wd()
	eventually(t, "the sources answer", func() bool { return w.rule.Load() == ruleHolds && len(w.status(sourceReadiness).nodes) == 3 })
	c.Node(2).Kill()
	killed := time.Now()
	eventually(t, "three more polls", func() bool { return w.status(sourceGossip).answered.Sub(killed) > 300*time.Millisecond })
	if m := w.marks.Load(); m != nil {
		t.Errorf("%d marks", len(m.of))
	}
	for range 9 { // the pool gets rid of the three by itself
		_ = db.PingContext(t.Context())
	}
	if s := db.c.Stats(); s.Culled+s.Lost != 0 {
		t.Errorf("%+v: a kill is neither a cull nor a loss to a drain\n%s", s, logs)
	}
	if n := logs.count("a node is leaving"); n != 0 {
		t.Errorf("a kill is taken for a drain:\n%s", logs)
	}
}

// F01: Close does not wait for a poll that hangs, and leaves no goroutine (TestMain).
func TestF01CloseWhileAPollHangs(t *testing.T) {
	var best time.Duration
	for i := range 3 { // the machine may be busy
		func() {
			c := crdbdraintest.Start(crdbdraintest.Config{})
			defer c.Close()
			c.Grant("app", "VIEWSYSTEMTABLE")
			db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_poll_timeout=1h&crdbdrain_readiness="+c.ReadinessURLs())
			fill(t, db.DB, 6)
			w := db.wd()
			eventually(t, "a poll", func() bool { return w.status(sourceInstances).state == sourceOK })
			for _, n := range c.Nodes() {
				n.Hang(true)
			}
			before := w.status(sourceInstances).answered
			time.Sleep(300 * time.Millisecond) // two intervals and more: a poll is under way
			if after := w.status(sourceInstances).answered; after.Sub(before) > 250*time.Millisecond {
				t.Fatal("the poll does not hang")
			}
			start := time.Now()
			if err := db.Close(); err != nil {
				t.Error(err)
			}
			d := time.Since(start)
			if i == 0 || d < best {
				best = d
			}
			select {
			case <-w.done:
			default:
				t.Error("the worker still runs after Close")
			}
		}()
	}
	t.Logf("Close took %v at best", best)
	if best > 100*time.Millisecond {
		t.Errorf("Close took %v at best of three, want less than 100 ms", best)
	}
}

// D02: from v26.1 on, without opt-in, each SQL source costs one denied statement, and one more at each re-probe. Stamps
// work, and nothing is set on anybody's connection.
func TestD02RestrictedInternals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		listen, logs := &ear{}, &logTrap{}
		c, db, end := virtual(t, crdbdraintest.Config{Version: "v26.1.0", Handler: listen.handle}, (*crdbdraintest.Cluster).DSN, "crdbdrain_poll_interval=5s", WithLogger(logs.logger()))
		defer end()
		c.Grant("app", "admin")
		stamps := map[nodeID]int{}
		conns := takeConns(t, db.DB, 6)
		time.Sleep(14 * time.Minute) // 168 polls, if one were made each interval
		for _, sc := range conns {
			stamps[ours(t, sc).stamp()]++
		}
		if len(stamps) != 3 || stamps[0] != 0 {
			t.Errorf("connections by stamp: %v, want 2 on each of 3 nodes", stamps)
		}
		asked := func() [2]int { return [2]int{listen.count("SELECT id", true), listen.count("SELECT l.node_id", true)} }
		if n := asked(); n != [2]int{1, 1} {
			t.Errorf("%v statements of instances and gossip in 14 minutes, want one of each", n)
		}
		// The connection that nobody asks anything any more is not kept.
		if n := c.Stats().Open; n != 6 {
			t.Errorf("%d connections, want the application's 6", n)
		}
		time.Sleep(17 * time.Minute) // re-probed after 15 to 30
		if n := asked(); n != [2]int{2, 2} {
			t.Errorf("%v statements in 31 minutes, want two of each", n)
		}
		time.Sleep(89 * time.Minute)
		if n := asked(); n[0] > 8 || n[1] > 8 || n[0] < 4 || n[1] < 4 {
			t.Errorf("%v statements in two hours, want at most one per 15 minutes each", n)
		}
		if n := listen.count("SET", true) + listen.count("SET", false); n != 0 {
			t.Errorf("SET was sent %d times", n)
		}
		for _, source := range []string{"instances", "gossip"} {
			if n := logs.count("source is denied", fmt.Sprintf("%q", source), "set crdbdrain_unsafe_internals=on"); n != 1 {
				t.Errorf("%s: %d lines with the remedy in two hours, want 1:\n%s", source, n, logs)
			}
		}
		for _, sc := range conns {
			_ = sc.Close()
		}
	})
}

// D02 with opt-in: the sources work, and the setting stays on the watchdog's own connection.
func TestD02OptIn(t *testing.T) {
	t.Parallel()
	listen := &ear{}
	c := crdbdraintest.Start(crdbdraintest.Config{Version: "v26.1.0", Handler: listen.handle,
		Settings: crdbdraintest.Settings{InitialWait: time.Second, ConnectionsTimeout: 2 * time.Second}})
	t.Cleanup(c.Close)
	c.Grant("app", "VIEWSYSTEMTABLE")
	c.Grant("app", "VIEWCLUSTERMETADATA")
	db := open(t, c.DSN(), "crdbdrain_unsafe_internals=on&crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_window=3s")
	fill(t, db.DB, 9)
	w := db.wd()
	eventually(t, "instances and gossip work", func() bool {
		return w.status(sourceInstances).state == sourceOK && w.status(sourceGossip).state == sourceOK
	})
	l := startLoad(t, db.DB, 4, time.Millisecond)
	if d := c.Node(1).Drain(t.Context()); d.LostIdle+d.LostBusy != 0 {
		t.Errorf("%+v", d)
	}
	l.stop()
	if len(l.errors) > 0 {
		t.Errorf("errors: %v", l.errors)
	}
	if n := listen.count("SET", false); n != 0 {
		t.Errorf("SET was sent %d times on connections of the application", n)
	}
	if n, m := listen.count(sqlUnsafeInternals, true), dialled(c, watchdogName); n == 0 || n != m {
		t.Errorf("%d × %s on %d connections of the watchdog, want once on each", n, sqlUnsafeInternals, m)
	}
	for _, p := range c.Stats().Startups {
		if _, there := p["allow_unsafe_internals"]; there {
			t.Errorf("a startup parameter: %v", p)
		}
	}
}

// D03: the grant comes while the process lives. It is noticed at the next re-probe; two lines in all.
func TestD03TheGrantArrives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		listen, logs := &ear{}, &logTrap{}
		c, db, end := virtual(t, crdbdraintest.Config{Handler: listen.handle}, (*crdbdraintest.Cluster).DSN, "crdbdrain_sources=gossip", WithLogger(logs.logger()))
		defer end()
		conns := takeConns(t, db.DB, 3)
		time.Sleep(time.Minute)
		if s := db.wd().status(sourceGossip); s.state != sourceDenied {
			t.Errorf("state %d, want denied", s.state)
		}
		c.Grant("app", "VIEWCLUSTERMETADATA")
		time.Sleep(30 * time.Minute)
		if s := db.wd().status(sourceGossip); s.state != sourceOK || len(s.nodes) != 3 {
			t.Errorf("30 minutes after the grant: %+v, want ok with 3 nodes", s)
		}
		if n := logs.count("gossip"); n != 2 || logs.count("source is denied", "GRANT SYSTEM VIEWCLUSTERMETADATA TO the role") != 1 || logs.count("INFO", "source works again") != 1 {
			t.Errorf("%d lines, want one off, one on:\n%s", n, logs)
		}
		for _, sc := range conns {
			_ = sc.Close()
		}
	})
}

// D04: a virtual cluster will never have the table: one statement, one line.
func TestD04VirtualClusters(t *testing.T) {
	for _, version := range []string{"v23.1.0", "v25.2.0"} {
		synctest.Test(t, func(t *testing.T) {
			listen, logs := &ear{}, &logTrap{}
			c, db, end := virtual(t, crdbdraintest.Config{Version: version, Virtual: true, Handler: listen.handle}, (*crdbdraintest.Cluster).DSN, "crdbdrain_sources=gossip", WithLogger(logs.logger()))
			defer end()
			c.Grant("app", "admin")
			conns := takeConns(t, db.DB, 1)
			time.Sleep(14 * time.Minute)
			if n := listen.count("SELECT l.node_id", true); n != 1 {
				t.Errorf("%s: %d statements in 14 minutes, want 1", version, n)
			}
			if n := logs.count("source is denied", "not available in a virtual cluster"); n != 1 {
				t.Errorf("%s: %d lines, want 1:\n%s", version, n, logs)
			}
			_ = conns[0].Close()
		})
	}
}

// D05: a server without the variable answers 42704 to SET, and its tables need none.
func TestD05ServersWithoutTheVariable(t *testing.T) {
	t.Parallel()
	listen, logs := &ear{}, &logTrap{}
	c := crdbdraintest.Start(crdbdraintest.Config{Version: "v25.3.0", Handler: listen.handle})
	t.Cleanup(c.Close)
	c.Grant("app", "VIEWSYSTEMTABLE")
	db := open(t, c.DSN(), "crdbdrain_unsafe_internals=on&crdbdrain_sources=instances&crdbdrain_poll_interval=100ms", WithLogger(logs.logger()))
	fill(t, db.DB, 3)
	eventually(t, "instances works", func() bool { return db.wd().status(sourceInstances).state == sourceOK })
	if listen.count(sqlUnsafeInternals, true) != 1 {
		t.Error("SET was not tried: the test shows nothing")
	}
	if logs.String() != "" {
		t.Errorf("it is logged:\n%s", logs)
	}
}

// A version without the column is not asked at all.
func TestInstancesIsOffBeforeV243(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		listen, logs := &ear{}, &logTrap{}
		c, db, end := virtual(t, crdbdraintest.Config{Version: "v24.2.1", Handler: listen.handle}, (*crdbdraintest.Cluster).DSN, "", WithLogger(logs.logger()))
		defer end()
		c.Grant("app", "admin")
		conns := takeConns(t, db.DB, 1)
		time.Sleep(time.Minute)
		if n := listen.count("SELECT id", true); n != 0 {
			t.Errorf("%d statements", n)
		}
		if s, g := db.wd().status(sourceInstances), db.wd().status(sourceGossip); s.state != sourceOff || g.state != sourceOK {
			t.Errorf("instances %d, gossip %d; want off and ok", s.state, g.state)
		}
		_ = conns[0].Close()
	})
}

// D10: the node of the watchdog's own connection drains with a warning: the connection moves before the server closes it.
func TestD10TheWatchdogsConnectionMovesFirst(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{Settings: crdbdraintest.Settings{InitialWait: 500 * time.Millisecond, ConnectionsTimeout: 3 * time.Second}})
	t.Cleanup(c.Close)
	c.Grant("app", "VIEWSYSTEMTABLE")
	db := open(t, c.DSN(), "crdbdrain_sources=instances&crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_window=3s")
	fill(t, db.DB, 3)
	w := db.wd()
	eventually(t, "instances works", func() bool { return w.status(sourceInstances).state == sourceOK })
	on := watchdogNode(t, c)
	d := on.Drain(t.Context())
	if d.LostIdle+d.LostBusy != 0 {
		t.Errorf("%+v: a connection was lost, the watchdog's or the pool's", d)
	}
	if s := w.status(sourceInstances); s.state != sourceOK {
		t.Errorf("%+v: want ok", s)
	}
}

// watchdogNode returns the node that the watchdog's connection is on, if it has made just one.
func watchdogNode(t *testing.T, c *crdbdraintest.Cluster) (on *crdbdraintest.Node) {
	t.Helper()
	for _, n := range c.Nodes() {
		for _, p := range n.Stats().Startups {
			if p["application_name"] == watchdogName {
				if on != nil {
					t.Fatal("more than one connection of the watchdog")
				}
				on = n
			}
		}
	}
	return on
}

// D10 without a warning: the goodbye on the watchdog's connection marks the node, the last answer is kept, and the next
// poll goes elsewhere.
func TestD10TheWatchdogHearsAGoodbye(t *testing.T) {
	t.Parallel()
	hold := make(chan struct{}) // gossip does not hear of it before the test is over
	c := crdbdraintest.Start(crdbdraintest.Config{OnStep: func(_ *crdbdraintest.Node, step crdbdraintest.Step) {
		if step == crdbdraintest.Departed {
			<-hold
		}
	}})
	t.Cleanup(c.Close)
	t.Cleanup(func() { close(hold) })
	c.Grant("app", "VIEWCLUSTERMETADATA")
	c.LoadBalancer().SetSticky(2)
	logs := &logTrap{}
	db := open(t, c.DSN(), "crdbdrain_sources=gossip&crdbdrain_poll_interval=100ms&crdbdrain_spares=0", WithLogger(logs.logger()))
	first := takeConns(t, db.DB, 1)[0]
	w := db.wd()
	eventually(t, "gossip works", func() bool { return w.status(sourceGossip).state == sourceOK && w.rule.Load() == ruleHolds })
	c.LoadBalancer().SetSticky(1)
	takeConns(t, db.DB, 1)
	db.SetMaxIdleConns(-1)
	_ = first.Close()
	eventually(t, "only the watchdog is on node 2", func() bool { return c.Node(2).Stats().Open == 1 })
	if on := watchdogNode(t, c); on.ID() != 2 {
		t.Fatalf("the watchdog is on node %d", on.ID())
	}
	go c.Node(2).Drain(context.Background())
	eventually(t, "node 2 is marked", func() bool { return w.isNodeMarked(2) })
	if mk := w.markOf(2); mk == nil || mk.source != sourceErrors || !mk.over {
		t.Errorf("mark %+v: want errors, over", mk)
	}
	before := w.status(sourceGossip).answered
	eventually(t, "gossip goes on", func() bool { return w.status(sourceGossip).answered.After(before) })
	if s := w.status(sourceGossip); len(s.nodes) != 3 {
		t.Errorf("%d nodes, want 3", len(s.nodes))
	}
	if n := logs.count("source fails"); n != 0 {
		t.Errorf("a stale connection is a failure of the source:\n%s", logs)
	}
}

// D16: the role's statement_timeout hits the watchdog: passing errors, said once, and no decision about stamps.
func TestD16TheUsersStatementTimeout(t *testing.T) {
	t.Parallel()
	cfg := crdbdraintest.Config{Handler: func(q crdbdraintest.Query) *crdbdraintest.Result {
		select {
		case <-q.Context().Done():
		case <-time.After(30 * time.Millisecond):
		}
		return nil
	}}
	t.Run("in options", func(t *testing.T) {
		t.Parallel()
		c := crdbdraintest.Start(cfg)
		t.Cleanup(c.Close)
		c.Grant("app", "admin")
		logs := &logTrap{}
		db := open(t, c.DSN(), "options=-c%20statement_timeout%3D1&crdbdrain_sources=instances&crdbdrain_poll_interval=100ms", WithLogger(logs.logger()))
		takeConns(t, db.DB, 1)
		w := db.wd()
		eventually(t, "three failures", func() bool { return w.status(sourceInstances).failures >= 3 })
		if s := w.status(sourceInstances); s.state != sourceFailing {
			t.Errorf("state %d, want failing", s.state)
		}
		if r := w.rule.Load(); r != ruleUnknown {
			t.Errorf("rule %d: a statement that was cancelled has decided it", r)
		}
		if n := logs.count("source fails", "57014"); n != 1 || strings.Count(logs.String(), "\n") != 0 {
			t.Errorf("%d lines, want 1 and no other:\n%s", n, logs)
		}
	})
	t.Run("as a parameter", func(t *testing.T) {
		t.Parallel()
		c := crdbdraintest.Start(cfg)
		t.Cleanup(c.Close)
		c.Grant("app", "admin")
		db := open(t, c.DSN(), "statement_timeout=1&crdbdrain_sources=instances&crdbdrain_poll_interval=100ms&crdbdrain_poll_timeout=3s")
		takeConns(t, db.DB, 1)
		w := db.wd()
		eventually(t, "instances works", func() bool { return w.status(sourceInstances).state == sourceOK && w.rule.Load() == ruleHolds })
		for _, p := range c.Stats().Startups {
			if want := map[bool]string{true: "3000", false: "1"}[p["application_name"] == watchdogName]; p["statement_timeout"] != want {
				t.Errorf("statement_timeout %q of %q, want %q", p["statement_timeout"], p["application_name"], want)
			}
		}
	})
}

// D17: what the server sees of the watchdog: its own name, one statement per source and interval, constants only.
func TestD17WhatTheServerSees(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		listen := &ear{}
		c, db, end := virtual(t, crdbdraintest.Config{Handler: listen.handle}, (*crdbdraintest.Cluster).DSN, "application_name=x%27%3B%20DROP%20TABLE%20t%3B--")
		defer end()
		c.Grant("app", "admin")
		conns := takeConns(t, db.DB, 3)
		time.Sleep(10 * time.Minute)
		for sql, n := range c.Stats().Statements {
			switch sql {
			case sqlInstances, sqlGossip: // every 5 s ±20 %
				if n < 110 || n > 130 {
					t.Errorf("%d polls in 10 minutes, want about 120: %s", n, sql)
				}
			case sqlShowNodeID:
				if n != 1 {
					t.Errorf("%s %d times, want 1", sql, n)
				}
			default:
				if strings.HasPrefix(sql, "SHOW CLUSTER SETTING server.shutdown.") && n <= 2 {
					continue // crdbdrain_window=auto
				}
				t.Errorf("%d × %q is none of the watchdog's constants", n, sql)
			}
		}
		if n := len(c.Stats().Parses); n != 0 {
			t.Errorf("%d statements with the extended protocol", n)
		}
		if n := dialled(c, watchdogName); n != 1 {
			t.Errorf("%d connections of the watchdog, want 1", n)
		}
		if n := listen.count("", false); n != 0 {
			t.Errorf("%d statements on connections of the application", n)
		}
		for _, sc := range conns {
			_ = sc.Close()
		}
	})
}

// D19: the cluster is upgraded to v26.1 under a living process, and back.
func TestD19TheVersionChangesUnderALivingProcess(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{Version: "v25.4.0"})
	t.Cleanup(c.Close)
	c.Grant("app", "VIEWSYSTEMTABLE")
	logs := &logTrap{}
	db := open(t, c.DSN(), "crdbdrain_sources=instances&crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms", WithLogger(logs.logger()))
	fill(t, db.DB, 6)
	w := db.wd()
	is := func(state sourceState) func() bool {
		return func() bool {
			if err := db.PingContext(t.Context()); err != nil {
				t.Error(err)
			}
			return w.status(sourceInstances).state == state
		}
	}
	eventually(t, "instances works on v25.4", is(sourceOK))
	upgrade := func(version string) {
		for _, n := range c.Nodes() {
			n.SetVersion(version)
			n.Restart(t.Context())
			eventually(t, "the load balancer has it in again", func() bool { return c.LoadBalancer().Up(n.ID()) })
		}
	}
	upgrade("v26.1.0")
	eventually(t, "instances is denied on v26.1", is(sourceDenied))
	upgrade("v25.4.1")
	w.unfail() // the re-probe
	eventually(t, "instances works again", is(sourceOK))
	logs.once(t, "source is denied", "restricts crdb_internal and system")
	logs.once(t, "source works again")
}

// F04: a hundred pools of one DSN share one watchdog with one connection. Nothing of it is left after the last Close.
func TestF04ManyPoolsOneWatchdog(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{})
	t.Cleanup(c.Close)
	c.Grant("app", "VIEWSYSTEMTABLE")
	var dbs []*pool
	for range 100 {
		db := open(t, c.DSN(), "crdbdrain_sources=instances&crdbdrain_poll_interval=100ms")
		if err := db.PingContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		dbs = append(dbs, db)
	}
	w := dbs[0].wd()
	for _, db := range dbs {
		if db.wd() != w {
			t.Fatal("two watchdogs")
		}
	}
	eventually(t, "instances works", func() bool { return w.status(sourceInstances).state == sourceOK })
	answered := w.status(sourceInstances).answered
	for _, db := range dbs[:99] {
		_ = db.Close()
	}
	eventually(t, "the last one's polls go on", func() bool { return w.status(sourceInstances).answered.Sub(answered) > 300*time.Millisecond })
	if n := dialled(c, watchdogName); n != 1 {
		t.Errorf("%d connections of the watchdog, want 1", n)
	}
	_ = dbs[99].Close()
	eventually(t, "no connection is left", func() bool { return c.Stats().Open == 0 })
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if registry.of[w.key] != nil {
		t.Error("the watchdog is still registered")
	}
}

// The worker ends with the last connection, and begins again with the next.
func TestTheWorkerEndsWithTheLastConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		listen := &ear{}
		c, db, end := virtual(t, crdbdraintest.Config{Handler: listen.handle}, (*crdbdraintest.Cluster).DSN, "crdbdrain_sources=instances")
		defer end()
		c.Grant("app", "admin")
		for round := range 3 {
			sc := takeConns(t, db.DB, 1)[0]
			time.Sleep(time.Minute)
			polls := listen.count("SELECT id", true)
			if polls < 10*(round+1) {
				t.Errorf("round %d: %d polls", round, polls)
			}
			db.SetMaxIdleConns(-1)
			_ = sc.Close()
			time.Sleep(10 * time.Second)
			if n := c.Stats().Open; n != 0 {
				t.Errorf("round %d: %d connections are left", round, n)
			}
			polls = listen.count("SELECT id", true)
			time.Sleep(time.Hour)
			if n := listen.count("SELECT id", true); n != polls {
				t.Errorf("round %d: %d polls without a connection", round, n-polls)
			}
		}
	})
}

// H06, F13: a thousand processes that are deployed together do not poll together.
func TestH06F13FirstPollsAreSpread(t *testing.T) {
	// Twenty bubbles of fifty: in one of a thousand the race detector fails by itself (golang/go issue 78156).
	const fleet, at = 1000, 50
	buckets := map[int]int{}
	total := 0
	for range fleet / at {
		synctest.Test(t, func(t *testing.T) {
			c := crdbdraintest.Start(crdbdraintest.Config{Memory: true, LoadBalancer: crdbdraintest.LoadBalancerConfig{Interval: time.Minute}})
			defer c.Close()
			for i := range at {
				// Clusters of their own are processes of their own.
				connector := virtualConnector(t, c, c.Node(1+i%3).DSN()+fmt.Sprintf("&crdbdrain_sources=errors&crdbdrain_cluster=process-%d", i))
				db := sql.OpenDB(connector)
				defer db.Close()
				if err := db.PingContext(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			start := time.Now()
			time.Sleep(6 * time.Second)
			for _, at := range c.Stats().Dials {
				if d := at.Sub(start); d > 0 {
					buckets[int(d/(100*time.Millisecond))]++
					total++
				}
			}
		})
	}
	if total != fleet {
		t.Errorf("%d first polls, want %d", total, fleet)
	}
	for b, n := range buckets {
		if n > fleet/20 {
			t.Errorf("%d of %d first polls within the 100 ms from %v on", n, fleet, time.Duration(b)*100*time.Millisecond)
		}
		if b > 50 {
			t.Errorf("%d first polls after an interval", n)
		}
	}
}

func TestJitter(t *testing.T) {
	for _, d := range []time.Duration{1, 4, 5, 100 * time.Millisecond, 5 * time.Second, 24 * time.Hour} {
		low, high := d*100, time.Duration(0)
		for range 1000 {
			j := jitter(d)
			low, high = min(low, j), max(high, j)
		}
		if low < d-d/5 || high > d-d/5+2*d/5 || d >= 5 && low == high {
			t.Errorf("jitter(%v) is from %v to %v, want ±20 %%", d, low, high)
		}
	}
}

// ahead sets the wall clock of a time.Time ahead of its monotonic one, as a suspended machine does, which keeps the second
// only while it runs. The seconds of the wall clock begin at bit 30 of the first word (time.Time's documentation of wall).
func ahead(t time.Time, seconds int64) time.Time {
	*(*uint64)(unsafe.Pointer(&t)) += uint64(seconds << 30)
	return t
}

func TestSuspended(t *testing.T) {
	start := time.Now()
	wall := func(d time.Duration) time.Time { return start.Round(0).Add(d) } // without a monotonic reading
	for _, tt := range []struct {
		name          string
		before, after time.Time
		want          bool
	}{
		{"a second later", start, start.Add(time.Second), false},
		{"an hour later, both clocks agree", start, start.Add(time.Hour), false},
		{"the same moment", start, start, false},
		{"the machine slept for a minute", start, ahead(start.Add(time.Second), 60), true},
		{"for 11 seconds", start, ahead(start.Add(5*time.Second), 11), true},
		{"for 10 seconds", start, ahead(start.Add(5*time.Second), 10), false},
		{"F08: the wall clock went an hour back", start, ahead(start.Add(time.Second), -3600), false},
		{"no monotonic reading: nothing to compare", wall(0), wall(time.Hour), false},
	} {
		if got := suspended(tt.before, tt.after); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

// After a suspend every mark is of another time: gone until a source repeats it, and repeated it is there again.
func TestForget(t *testing.T) {
	_, w := trusted(t, "")
	draining := map[nodeID]nodeState{1: {live: true}, 2: {draining: true}}
	w.answer(sourceInstances, draining, nil)
	t0 := time.Now()
	w.note(3, sourceErrors, notice{since: t0, heard: t0, before: t0, over: true})
	w.forget()
	if m := w.marks.Load(); m != nil {
		t.Errorf("%d marks after a suspend", len(m.of))
	}
	w.answer(sourceInstances, nil, errEmpty)
	if w.marks.Load() != nil {
		t.Error("an error has brought a mark back")
	}
	w.answer(sourceInstances, draining, nil)
	if !w.isNodeMarked(2) || w.isNodeMarked(3) {
		t.Error("the source has repeated its mark on 2 (and nobody that on 3)")
	}
}
