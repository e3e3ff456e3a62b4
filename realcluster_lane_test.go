package crdbdrain

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// onRealCluster is set by the build tag realcluster.
var onRealCluster bool

// TestRealCluster drains and restarts every node of a cluster under load, with a window and without. Where the cluster is,
// and how its nodes are drained, comes from the environment (docs/real-cluster.md). Without the build tag realcluster the
// cluster is a simulated one, behind the same variables and commands.
func TestRealCluster(t *testing.T) {
	getenv := os.Getenv
	if !onRealCluster {
		if _, err := exec.LookPath("bash"); err != nil {
			t.Skip("no bash: it is the simulated cluster's command line")
		}
		t.Parallel()
		getenv = simulatedEnvironment(t)
	}
	l := newLane(t, getenv)
	l.keepSettings(t)
	t.Run("a rolling restart with a window", l.withAWindow)
	t.Run("a rolling restart without a warning", l.withoutAWarning)
}

// lane is a cluster that is reached through DSN, URLs and commands alone.
type lane struct {
	dsn, drain, restart, set string
	readiness                []string
	initialWait, connections time.Duration
	strict                   bool // nothing may be unclear
}

const laneConns, laneWorkers = 30, 8

func newLane(t *testing.T, getenv func(string) string) *lane {
	must := func(name string) string {
		v := getenv(name)
		if v == "" {
			t.Fatalf("%s is not set: see docs/real-cluster.md", name)
		}
		return v
	}
	duration := func(name string, otherwise time.Duration) time.Duration {
		v := getenv(name)
		if v == "" {
			return otherwise
		}
		d, err := time.ParseDuration(v)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return d
	}
	l := &lane{
		dsn:         must("CRDBDRAIN_REAL_DSN"),
		readiness:   strings.Split(must("CRDBDRAIN_REAL_READINESS"), ","),
		drain:       must("CRDBDRAIN_REAL_DRAIN"),
		restart:     must("CRDBDRAIN_REAL_RESTART"),
		set:         must("CRDBDRAIN_REAL_SET"),
		initialWait: duration("CRDBDRAIN_REAL_INITIAL_WAIT", 8*time.Second),
		connections: duration("CRDBDRAIN_REAL_CONNECTIONS_TIMEOUT", 30*time.Second),
		strict:      !onRealCluster,
	}
	if len(l.readiness) < 2 {
		t.Fatal("CRDBDRAIN_REAL_READINESS: want at least two nodes")
	}
	return l
}

// run runs a command with sh.
func (l *lane) run(t *testing.T, command string, env ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
}

// becomes polls until something is so, for at most d.
func becomes(d time.Duration, ok func(context.Context) bool) bool {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	for !ok(ctx) {
		if !sleep(ctx, 50*time.Millisecond) {
			return false
		}
	}
	return true
}

func until(t *testing.T, d time.Duration, what string, ok func(context.Context) bool) {
	t.Helper()
	if !becomes(d, ok) {
		t.Fatalf("not within %v: %s", d, what)
	}
}

const (
	settingInitialWait  = "server.shutdown.initial_wait"
	settingConnections  = "server.shutdown.connections.timeout"
	settingTransactions = "server.shutdown.transactions.timeout"
)

// keepSettings puts the cluster's settings back in the end.
func (l *lane) keepSettings(t *testing.T) {
	t.Helper()
	db := open(t, l.dsn, "crdbdrain_mode=off")
	defer db.Close() // it would not leave a node
	for _, name := range []string{settingInitialWait, settingConnections, settingTransactions} {
		var text string
		if err := db.QueryRow("SHOW CLUSTER SETTING " + name).Scan(&text); err != nil {
			t.Fatal(err)
		}
		d, ok := parseInterval(text)
		if !ok {
			t.Fatalf("%s is %q", name, text)
		}
		t.Cleanup(func() { l.run(t, l.set, "SETTING="+name, fmt.Sprintf("VALUE=%gs", d.Seconds())) })
	}
}

// settings sets the drain timeouts, and waits until every node knows.
func (l *lane) settings(t *testing.T, initialWait, connections time.Duration) {
	t.Helper()
	want := map[string]time.Duration{settingInitialWait: initialWait, settingConnections: connections, settingTransactions: 10 * time.Second}
	for name, d := range want {
		l.run(t, l.set, "SETTING="+name, fmt.Sprintf("VALUE=%gs", d.Seconds()))
	}
	l.everyNode(t, "the settings are known", func(ctx context.Context, c *sql.Conn) bool {
		for name, d := range want {
			var text string
			if err := c.QueryRowContext(ctx, "SHOW CLUSTER SETTING "+name).Scan(&text); err != nil {
				t.Logf("SHOW CLUSTER SETTING %s: %v", name, err)
				return false
			}
			if got, ok := parseInterval(text); !ok || got != d {
				return false
			}
		}
		return true
	})
}

// everyNode dials until a fresh connection to each node has been ok.
func (l *lane) everyNode(t *testing.T, what string, ok func(context.Context, *sql.Conn) bool) {
	t.Helper()
	db, err := sql.Open("crdbdrain", l.with("crdbdrain_sources=errors&crdbdrain_host_order=random"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	db.SetMaxIdleConns(-1)
	told := make(map[string]bool)
	until(t, 2*time.Minute, "on every node: "+what, func(ctx context.Context) bool {
		c, err := db.Conn(ctx)
		if err != nil {
			return false
		}
		defer c.Close()
		var node string
		if err := c.QueryRowContext(ctx, "SHOW node_id").Scan(&node); err == nil && (ok == nil || ok(ctx, c)) {
			told[node] = true
		}
		return len(told) == len(l.readiness)
	})
}

func (l *lane) with(params string) string {
	sep := "?"
	if strings.Contains(l.dsn, "?") {
		sep = "&"
	}
	return l.dsn + sep + params
}

// bounce drains a node, restarts it, and waits until every node takes connections. It returns how long the drain took.
func (l *lane) bounce(t *testing.T, node int) time.Duration {
	t.Helper()
	start := time.Now()
	l.run(t, l.drain, "NODE="+strconv.Itoa(node))
	took := time.Since(start)
	l.run(t, l.restart, "NODE="+strconv.Itoa(node))
	l.everyNode(t, "connections are taken", nil)
	return took
}

// With a window nothing is lost and nothing fails, though the role has no privilege; and every node gets its share again.
func (l *lane) withAWindow(t *testing.T) {
	l.settings(t, l.initialWait, l.connections)
	window := l.initialWait + l.connections
	db := open(t, l.with(fmt.Sprintf("crdbdrain_sources=readiness&crdbdrain_readiness=%s&crdbdrain_window=%v&crdbdrain_poll_interval=%v",
		strings.Join(l.readiness, ","), window, min(5*time.Second, window/10))), "")
	ledger := openLedger(t, db.DB)
	fill(t, db.DB, laneConns)
	stop := ledger.load(laneWorkers)
	for i := range l.readiness {
		before := db.c.Stats()
		took := l.bounce(t, i+1)
		t.Logf("node %d: the drain took %v; culled %d", i+1, took, db.c.Stats().Culled-before.Culled)
	}
	var spread []int
	var spreadErr error
	// Within a quarter of its share, or a connection: the pool keeps what its load needs, which may be less than before.
	home := becomes(90*time.Second, func(ctx context.Context) bool {
		if spread, spreadErr = l.spread(ctx, db.DB); spreadErr != nil {
			return false
		}
		total := 0
		for _, n := range spread {
			total += n
		}
		share := float64(total) / float64(len(l.readiness))
		slack := max(1, share/4)
		return len(spread) == len(l.readiness) && float64(slices.Min(spread)) >= share-slack && float64(slices.Max(spread)) <= share+slack
	})
	stop()
	s := db.c.Stats()
	t.Logf("%v; connections per node %v; %+v", ledger, spread, s)
	if !home {
		t.Errorf("after 90 s the connections are spread %v (%v)", spread, spreadErr)
	}
	if s.Lost > 0 {
		t.Errorf("the server closed %d connections that had not left in time", s.Lost)
	}
	if s.Culled == 0 {
		t.Error("nothing has left a draining node: no drain was noticed")
	}
	ledger.check(t, true)
}

// Without a warning the server closes what is idle at once. Nothing fails but a write whose connection ended without a word.
func (l *lane) withoutAWarning(t *testing.T) {
	l.settings(t, 0, 0)
	db := open(t, l.with("crdbdrain_sources=errors"), "")
	ledger := openLedger(t, db.DB)
	fill(t, db.DB, laneConns)
	stop := ledger.load(laneWorkers)
	for i := range l.readiness {
		t.Logf("node %d: the drain took %v", i+1, l.bounce(t, i+1))
	}
	stop()
	t.Logf("%v; %+v", ledger, db.c.Stats())
	if s := db.c.Stats(); s.Lost == 0 {
		t.Error("no connection was closed by the server: it has not drained")
	}
	ledger.check(t, l.strict)
}

// spread returns the number of the pool's connections on each node that has some.
func (l *lane) spread(ctx context.Context, db *sql.DB) (counts []int, err error) {
	perNode := make(map[string]int)
	for range db.Stats().OpenConnections {
		c, err := db.Conn(ctx)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		var node string
		if err := c.QueryRowContext(ctx, "SHOW node_id").Scan(&node); err != nil {
			return nil, err
		}
		perNode[node]++
	}
	for _, n := range perNode {
		counts = append(counts, n)
	}
	return counts, nil
}

// ledger is a load that knows what it has written: each worker counts in a row of its own.
type ledger struct {
	db *sql.DB

	mu       sync.Mutex
	ops      int            // guarded by mu
	written  map[int]int    // guarded by mu; by worker
	unclear  map[int]int    // writes of which nobody can say whether they were made; guarded by mu
	repeated int            // reads whose connection ended without a word, and which the application made again; guarded by mu
	errors   map[string]int // guarded by mu
}

const (
	ledgerRead  = "SELECT n::INT8 FROM crdbdrain_lane WHERE id = $1"
	ledgerWrite = "UPDATE crdbdrain_lane SET n = n + 1 WHERE id = $1"
)

func openLedger(t *testing.T, db *sql.DB) *ledger {
	t.Helper()
	for _, q := range []string{"DROP TABLE IF EXISTS crdbdrain_lane", "CREATE TABLE crdbdrain_lane (id INT8 PRIMARY KEY, n INT8 NOT NULL)"} {
		if _, err := db.Exec(q); err != nil {
			t.Fatal(err)
		}
	}
	for i := range laneWorkers {
		if _, err := db.Exec("INSERT INTO crdbdrain_lane (id, n) VALUES ($1, 0)", i); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if _, err := db.Exec("DROP TABLE crdbdrain_lane"); err != nil {
			t.Error(err)
		}
	})
	return &ledger{db: db, written: make(map[int]int), unclear: make(map[int]int), errors: make(map[string]int)}
}

// load starts the workers. stop waits for them, and may be called again.
func (g *ledger) load(workers int) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			for n := i; ctx.Err() == nil; n++ {
				g.one(i, n%3)
				sleep(ctx, 2*time.Millisecond)
			}
		})
	}
	return func() { cancel(); wg.Wait() }
}

// one is a write, a read, or a transaction of two writes. A 40001 is run again, as every application has to.
func (g *ledger) one(worker, kind int) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	written, wrote := 0, false
	attempt := func() (err error) {
		written, wrote = 0, false
		switch kind {
		case 0:
			wrote = true
			if _, err = g.db.ExecContext(ctx, ledgerWrite, worker); err == nil {
				written = 1
			}
			return err
		case 1:
			var n int
			return g.db.QueryRowContext(ctx, ledgerRead, worker).Scan(&n)
		}
		tx, err := g.db.BeginTx(ctx, nil)
		if err != nil {
			return fmt.Errorf("begin: %w", err)
		}
		defer tx.Rollback()
		for range 2 {
			if _, err := tx.ExecContext(ctx, ledgerWrite, worker); err != nil {
				return fmt.Errorf("in a transaction: %w", err)
			}
		}
		wrote = true
		if err := tx.Commit(); err != nil {
			return fmt.Errorf("commit: %w", err)
		}
		written = 2
		return nil
	}
	err := attempt()
	for sqlState(err) == "40001" && ctx.Err() == nil {
		err = attempt()
	}
	repeated := 0
	if kind == 1 && err != nil && sqlState(err) == "" && ctx.Err() == nil {
		repeated, err = 1, attempt()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ops++
	g.written[worker] += written
	g.repeated += repeated
	switch {
	case err == nil:
	case wrote && (sqlState(err) == "" || sqlState(err) == "40003"):
		g.unclear[worker] += 1 + kind/2 // one write, or a transaction's two
	default:
		g.errors[err.Error()]++
	}
}

func (g *ledger) String() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return fmt.Sprintf("%d operations, %d reads made again, %d unclear writes, errors %v", g.ops, g.repeated, len(g.unclear), g.errors)
}

// check holds the table against what the workers know: nothing that was acknowledged is missing, nothing was made twice.
func (g *ledger) check(t *testing.T, strict bool) {
	t.Helper()
	if len(g.errors) > 0 {
		t.Errorf("errors: %v", g.errors)
	}
	if strict && (len(g.unclear) > 0 || g.repeated > 0) {
		t.Errorf("%v unclear writes, %d reads made again", g.unclear, g.repeated)
	}
	for i, written := range g.written {
		var n int
		if err := g.db.QueryRow(ledgerRead, i).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n < written || n > written+g.unclear[i] {
			t.Errorf("worker %d: the table says %d writes; %d were acknowledged, and %d are unclear", i, n, written, g.unclear[i])
		}
	}
}

// simulatedEnvironment starts a simulated cluster, and returns the variables that tell where it is.
func simulatedEnvironment(t *testing.T) func(string) string {
	var rows sync.Map // by id: what little of a database the ledger needs
	c := crdbdraintest.Start(crdbdraintest.Config{Handler: func(q crdbdraintest.Query) *crdbdraintest.Result {
		row := func() *int64 {
			n, _ := rows.LoadOrStore(q.Args[0], new(int64))
			return n.(*int64) //nolint:forcetypeassert // nothing else is stored
		}
		switch {
		case q.SQL == ledgerWrite:
			*row()++ // its worker's alone, which waits for the answer
		case q.SQL == ledgerRead:
			return &crdbdraintest.Result{Columns: []string{"n"}, Rows: [][]any{{*row()}}}
		case strings.HasPrefix(q.SQL, "CREATE TABLE"):
			rows.Clear()
		}
		return nil
	}})
	t.Cleanup(c.Close)
	c.Grant("app", "VIEWCLUSTERSETTING")
	control := newControl(t, c)
	command := func(line string) string {
		return fmt.Sprintf(`bash -c 'exec 3<>/dev/tcp/127.0.0.1/%d; echo "%s" >&3; read -r answer <&3; echo "$answer"; [ "$answer" = ok ]'`, control, line)
	}
	env := map[string]string{
		"CRDBDRAIN_REAL_DSN":                 c.DSN(),
		"CRDBDRAIN_REAL_READINESS":           c.ReadinessURLs(),
		"CRDBDRAIN_REAL_DRAIN":               command("drain $NODE"),
		"CRDBDRAIN_REAL_RESTART":             command("restart $NODE"),
		"CRDBDRAIN_REAL_SET":                 command("set $SETTING $VALUE"),
		"CRDBDRAIN_REAL_INITIAL_WAIT":        "1s",
		"CRDBDRAIN_REAL_CONNECTIONS_TIMEOUT": "3s",
	}
	return func(name string) string { return env[name] }
}

// newControl returns the port on which the simulated cluster takes commands, a line each, and answers ok: the counterpart
// of cockroach's command line.
func newControl(t *testing.T, c *crdbdraintest.Cluster) (port int) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	t.Cleanup(func() { listener.Close(); served.Wait() })
	settings := crdbdraintest.DefaultSettings()
	obey := func(command, arg, value string) error {
		switch command {
		case "drain", "restart":
			id, err := strconv.Atoi(arg)
			if err != nil {
				return err
			}
			if command == "drain" {
				return c.Node(id).Drain(context.Background()).Err
			}
			c.Node(id).Stop()
			c.Node(id).Start()
			return nil
		case "set":
			field := map[string]*time.Duration{
				settingInitialWait:  &settings.InitialWait,
				settingConnections:  &settings.ConnectionsTimeout,
				settingTransactions: &settings.TransactionsTimeout,
			}[arg]
			d, err := time.ParseDuration(value)
			if err != nil || field == nil {
				return fmt.Errorf("unknown setting or value: %s %s", arg, value)
			}
			*field = d
			c.SetSettings(settings)
			return nil
		}
		return fmt.Errorf("unknown command %q", command)
	}
	served.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			line, _ := bufio.NewReader(conn).ReadString('\n')
			words := append(strings.Fields(line), "", "", "")
			answer := "ok"
			if err := obey(words[0], words[1], words[2]); err != nil {
				answer = err.Error()
			}
			fmt.Fprintln(conn, answer)
			conn.Close()
		}
	})
	return listener.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // it listens on TCP
}
