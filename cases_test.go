package crdbdrain

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// C09: hosts with IPv6 addresses are hosts like any other: the watchdog dials the application's list, and a refusal at one
// of them is taken for that node's.
func TestC09IPv6Hosts(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{Nodes: 2, Settings: crdbdraintest.Settings{ConnectionsTimeout: time.Minute}})
	nodes := map[string]string{"[::1]:26257": c.Node(1).Addr(), "[fe80::1]:26258": c.Node(2).Addr()}
	var mu sync.Mutex
	dialled := map[string]int{}
	db := openWith(t, "postgres://app@[::1]:26257,[fe80::1]:26258/defaultdb?sslmode=disable&crdbdrain_sources=errors&crdbdrain_spares=0&crdbdrain_poll_interval=100ms", func(cc *pgconn.Config) {
		cc.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			mu.Lock()
			dialled[addr]++
			mu.Unlock()
			return c.Dial(ctx, network, nodes[addr]) // "" fails: an address that is none of the DSN's
		}
	})
	eventually(t, "connections to both nodes, held", func() bool {
		takeConns(t, db.DB, 1)
		return c.Node(1).Stats().Open > 0 && c.Node(2).Stats().Open > 0
	})
	eventually(t, "the rule is verified", func() bool { return db.wd().rule.Load() == ruleHolds })
	mu.Lock()
	if len(dialled) != 2 || dialled["[::1]:26257"] == 0 || dialled["[fe80::1]:26258"] == 0 {
		t.Errorf("dialled %v, want both of the DSN's addresses only", dialled)
	}
	mu.Unlock()
	if got := db.c.cfg.key; got != "[::1]:26257,[fe80::1]:26258" {
		t.Errorf("the cluster is %q", got)
	}

	db.SetMaxIdleConns(0) // each call dials
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); c.Node(2).Drain(ctx) }()
	defer func() { cancel(); <-done }()
	if err := c.Node(2).WaitStep(t.Context(), crdbdraintest.Refusing); err != nil {
		t.Fatal(err)
	}
	eventually(t, "node 2 is marked", func() bool {
		if err := db.Ping(); err != nil {
			t.Fatal(err)
		}
		return db.wd().isNodeMarked(2)
	})
	mu.Lock()
	clear(dialled)
	mu.Unlock()
	for range 20 {
		if err := db.Ping(); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if dialled["[::1]:26257"] < 20 || dialled["[fe80::1]:26258"] > 1 { // the watchdog's own connection may have tried its host
		t.Errorf("dialled %v: the marked node's host does not come last", dialled)
	}
}

// C14: options and with them the routing reach the server byte by byte, on the application's connections and on the
// watchdog's. A statement_timeout is the application's; the watchdog's statements are bounded by its poll timeout.
func TestC14OptionsReachEveryConnection(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{})
	c.Grant("app", "VIEWSYSTEMTABLE")
	const options = ` --cluster=foo-123 -c  a=b\ c -ccrdbdrain_mode=off `
	db := open(t, c.DSN(), "options=%20--cluster%3Dfoo-123%20-c%20%20a%3Db%5C%20c%20-ccrdbdrain_mode%3Doff%20&statement_timeout=77&crdbdrain_poll_timeout=3s")
	takeConns(t, db.DB, 3)
	eventually(t, "the watchdog has connected", func() bool { return dialled(c, watchdogName) > 0 })
	for _, params := range c.Stats().Startups {
		want := "77"
		if params["application_name"] == watchdogName {
			want = "3000"
		}
		if params["options"] != options || params["statement_timeout"] != want {
			t.Errorf("%v, want options %q and statement_timeout %s", params, options, want)
		}
	}
}

// F11: a cull sends a Terminate and no CancelRequest, wherever it comes from. The application's own cancellations are
// pgx's: one CancelRequest each, and none of them becomes a storm.
func TestF11CullsSendNoCancelRequest(t *testing.T) {
	t.Parallel()
	const pool, storm = 20, 30
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	p := openOn(t, c, still+"&crdbdrain_cull_stagger=0&crdbdrain_window=1h")
	fill(t, p.DB, pool)
	p.refuge(t, c)
	w := p.dog(t)
	conns := takeConns(t, p.DB, pool/2)
	w.say(1) // the idle half is swept, and the half in use is culled at its return
	within(t, 10*time.Second, "the idle ones culled", func() bool { return p.c.Stats().Culled == pool/2 })
	for _, sc := range conns {
		_ = sc.Close()
	}
	within(t, 10*time.Second, "the others culled", func() bool { return p.c.Stats().Culled == pool })
	within(t, 10*time.Second, "node 1 has seen them end", func() bool { return c.Node(1).Stats().Open == 0 })
	if n := c.Stats().CancelRequests; n != 0 {
		t.Errorf("%d culls sent %d CancelRequests", pool, n)
	}
	p.SetMaxOpenConns(storm)
	failed, _ := burst(storm, 1, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		defer cancel()
		_, err := p.ExecContext(ctx, "SELECT pg_sleep(60)")
		return err
	})
	if failed != storm {
		t.Errorf("%d of %d statements were cancelled", failed, storm)
	}
	within(t, 10*time.Second, "the cancelled ones are gone", func() bool { return c.Stats().Open == 0 })
	if n := c.Stats().CancelRequests; n == 0 || n > storm {
		t.Errorf("%d CancelRequests for %d cancelled statements", n, storm)
	}
}

// F12: no configuration is registered with pgx for a connection, a connector or a DB: its registry, which only grows,
// numbers them.
func TestF12NothingIsRegisteredWithPgx(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	number := func() (n int) {
		name := stdlib.RegisterConnConfig(&pgx.ConnConfig{})
		stdlib.UnregisterConnConfig(name)
		if _, err := fmt.Sscanf(name, "registeredConnConfig%d", &n); err != nil {
			t.Fatalf("%q: %v", name, err)
		}
		return n
	}
	before := number()
	for i := range 1000 {
		dc, err := theDriver.OpenConnector(c.DSN())
		if err != nil {
			t.Fatal(err)
		}
		if i%50 == 0 {
			one, err := dc.Connect(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			_ = one.Close()
		}
		_ = dc.(*Connector).Close()
	}
	if after := number(); after != before+1 {
		t.Errorf("%d configurations were registered", after-before-1)
	}
}

// H04: after a rolling restart the node that was last has its share again.
func TestH04TheLastRestartedNodeGetsItsShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const conns = 30
		c, db := virtualPool(t, crdbdraintest.Config{Settings: crdbdraintest.Settings{
			InitialWait: 5 * time.Second, ConnectionsTimeout: 20 * time.Second, TransactionsTimeout: 10 * time.Second}}, conns,
			"crdbdrain_poll_interval=1s&crdbdrain_window=20s")
		defer c.Close()
		defer db.Close()
		l := startLoad(t, db.DB, 3, 50*time.Millisecond)
		for _, n := range c.Nodes() {
			if r := n.Restart(t.Context()); r.LostIdle+r.LostBusy > 0 {
				t.Errorf("node %d: %+v", n.ID(), r)
			}
			if n.ID() == 3 {
				// Without the way home it would stay at next to nothing.
				if open := n.Stats().Open; open > conns/6 {
					t.Fatalf("node 3 has %d connections as it starts: the test shows nothing", open)
				}
			}
			time.Sleep(10 * time.Second)
		}
		time.Sleep(30 * time.Second)
		l.stop()
		total, counts := 0, spread(c)
		for _, n := range counts {
			total += n
		}
		if share := float64(total) / 3; float64(counts[2]) < 0.75*share {
			t.Errorf("the connections are spread %v, want a third on each node", counts)
		}
		if len(l.errors) > 0 {
			t.Error(l.errors)
		}
	})
}

// H10: the watchdog needs one connection of the role's while a SQL source works, and none once all are denied: not even
// between two polls.
func TestH10NoConnectionOnceDenied(t *testing.T) {
	for _, granted := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			const held = 3
			c, db, end := virtual(t, crdbdraintest.Config{}, (*crdbdraintest.Cluster).DSN, "")
			defer end()
			want, most := held, 1
			if granted {
				c.Grant("app", "VIEWSYSTEMTABLE")
				want++
			}
			conns := takeConns(t, db.DB, held)
			time.Sleep(time.Minute)
			before := dialled(c, watchdogName)
			if before == 0 || before > most {
				t.Errorf("granted: %v: %d connections of the watchdog in the first minute, want %d", granted, before, most)
			}
			for range 60 {
				if got := c.Stats().Open; got != want {
					t.Fatalf("granted: %v: %d sessions are open, want %d", granted, got, want)
				}
				time.Sleep(10 * time.Second)
			}
			if after := dialled(c, watchdogName); after != before {
				t.Errorf("granted: %v: %d more connections of the watchdog in ten minutes", granted, after-before)
			}
			for _, sc := range conns {
				_ = sc.Close()
			}
		})
	}
}

// H11: the driver keeps no name's addresses: each dial looks it up, and the next one goes where the name then points.
func TestH11EachDialLooksUpTheName(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{Nodes: 2})
	var mu sync.Mutex
	lookups, points := 0, 1
	db := openWith(t, "postgres://app@db.example:26257/defaultdb?sslmode=disable&"+still, func(cc *pgconn.Config) {
		cc.LookupFunc = func(context.Context, string) ([]string, error) {
			mu.Lock()
			defer mu.Unlock()
			lookups++
			return []string{fmt.Sprintf("192.0.2.%d", points)}, nil
		}
		cc.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			var id int
			if _, err := fmt.Sscanf(addr, "192.0.2.%d:26257", &id); err != nil {
				return nil, fmt.Errorf("dialled %s", addr)
			}
			return c.Dial(ctx, network, c.Node(id).Addr())
		}
	})
	db.SetMaxIdleConns(0) // each call dials
	for i, id := range []int{1, 1, 2, 2, 1} {
		mu.Lock()
		points = id
		mu.Unlock()
		before := appDials(c.Node(id))
		if err := db.Ping(); err != nil {
			t.Fatal(err)
		}
		if got := appDials(c.Node(id)) - before; got != 1 {
			t.Errorf("call %d: %d dials to node %d, to which the name points", i+1, got, id)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	watchdogs := dialled(c, watchdogName)
	if lookups < 5 || lookups > 5+max(watchdogs, 1) {
		t.Errorf("%d lookups for 5 dials and %d of the watchdog", lookups, watchdogs)
	}
}

// appDials counts a node's connections but the watchdog's.
func appDials(n *crdbdraintest.Node) (dials int) {
	for _, params := range n.Stats().Startups {
		if params["application_name"] != watchdogName {
			dials++
		}
	}
	return dials
}

// I01: whatever fails on the way to a connection, no text of the error, of the log or of what a crash would print has the
// password in it, which is the server's to know alone.
func TestI01FailingConnectionsKeepTheSecret(t *testing.T) {
	t.Parallel()
	const canary = "hun%40ter2"
	good, refusing, other := startPeer(t, false), startPeer(t, false), startPeer(t, false)
	refusing.refuse = refuseWith("28P01", "password authentication failed for user app")
	other.refuse = refuseWith("57P01", noticeNotAcceptingClients)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = closed.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts by its kernel alone
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for name, tt := range map[string]struct{ addr, params string }{
		"a closed port":        {closed.Addr().String(), "sslmode=disable"},
		"a server without TLS": {good.ln.Addr().String(), "sslmode=require"},
		"authentication":       {refusing.ln.Addr().String(), "sslmode=disable"},
		"a drain":              {other.ln.Addr().String(), "sslmode=disable"},
		"silence":              {silent.Addr().String(), "sslmode=disable"},
		"no such name":         {"h.invalid:1", "sslmode=disable"},
	} {
		var log lockedBuffer
		db := open(t, "postgres://app:"+canary+"@"+tt.addr+"/defaultdb?"+tt.params, "crdbdrain_poll_interval=100ms", WithLogger(log.logger()))
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		err := db.PingContext(ctx)
		cancel()
		if err == nil {
			t.Errorf("%s: no error", name)
			continue
		}
		printed := string(log.bytes())
		for e := err; e != nil; e = errors.Unwrap(e) {
			printed += fmt.Sprintf("%v\n%+v\n%#v\n", e, e, e)
		}
		printed += fmt.Sprintf("%v\n%+v\n%#v\n", db.c, db.c, db.c)
		for _, secret := range []string{"hun@ter2", canary, "ter2"} {
			if strings.Contains(printed, secret) {
				t.Errorf("%s: %q in %s", name, secret, printed)
			}
		}
	}
}

// I07: nothing that stands in a DSN can add a parameter to the StartupMessage: it is refused, or it is a value.
func TestI07NothingIsInjectedAtStartup(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	base := c.DSN()
	known := []string{"user", "database", "application_name", "options"}
	opened := 0
	for _, value := range []string{
		"x%00user%00root", "%00", "x%00", "x%0auser%0aroot", "x%01y", "x%7fy", "x%c2%85y", "x%ffy",
		"x user=root", "x'; user=root", "x%26user%3Droot", "%25%30%30user%25%30%30root", "x%5c0user%5c0root",
	} {
		for _, key := range []string{"application_name", "options", "crdbdrain_cluster"} {
			value := strings.ReplaceAll(value, " ", "%20")
			dc, err := theDriver.OpenConnector(base + "&" + key + "=" + value)
			if err != nil {
				continue
			}
			before := len(c.Stats().Startups)
			one, err := dc.Connect(t.Context())
			if err == nil {
				opened++
				_ = one.Close()
			}
			_ = dc.(*Connector).Close()
			for _, params := range c.Stats().Startups[before:] {
				if params["user"] != "app" {
					t.Errorf("%s=%s: the user is %q", key, value, params["user"])
				}
				for name, text := range params {
					if !slices.Contains(known, name) || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) {
						t.Errorf("%s=%s: parameter %q is %q", key, value, name, text)
					}
				}
			}
		}
	}
	if opened == 0 {
		t.Error("no DSN at all is accepted: the test shows nothing")
	}
}
