package main

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/crdbdrain/crdbdrain"
	"github.com/crdbdrain/crdbdrain/crdbdraintest"
	"github.com/crdbdrain/crdbdrain/internal/chart"
)

var demoCommand = command{
	name:    "demo",
	summary: "a rolling restart, as pgx and crdbdrain see it",
	help: `NAME
    crdbdrain demo - a rolling restart of a simulated cluster, as pgx and
    crdbdrain see it

SYNOPSIS
    crdbdrain demo [-json] [-svg FILE]

DESCRIPTION
    Starts two simulated clusters in this process, each of three nodes behind a
    load balancer: one for database/sql with the driver pgx, one for the driver
    crdbdrain. The same load (single statements and short transactions, 16
    workers on 30 connections) runs on both at the same time, while every node
    is drained, stopped and started again, one after the other. The application
    tries nothing again by itself.

    This is done twice:

    window
        The server leaves connections alone for a while after it has said that
        it drains: server.shutdown.initial_wait=1s,
        server.shutdown.connections.timeout=4s. crdbdrain asks the nodes'
        readiness endpoints (crdbdrain_readiness), which takes no privilege.

    defaults
        The server's default settings: idle connections are closed within
        milliseconds, without a warning. crdbdrain has no parameters either.

    Progress goes to standard error, the result to standard output. It takes
    about half a minute, and needs no database, and no network but the loopback
    interface. Ctrl-C ends it.

FLAGS
    -json
        Print one line of JSON instead of the table:
        {"drivers":[...],"scenarios":[{"name":...,"drivers":[...]},...]}.
        The outer "drivers" has the sums over both scenarios, with the drain
        times in their order; its connections per node are the last scenario's.
    -svg FILE
        Also draw latency, failed operations and connections per node over
        time, a panel for each driver and scenario, and write the picture to
        FILE. A browser shows it.
    -h
        Print this text.

OUTPUT
    operations             calls of the application: a statement, or a
                           transaction of two
    errors                 operations that failed, by SQLSTATE or kind
    lost connections       closed by the server because their node drained, as
                           the server counts
    culled connections     given up in time, as the driver counts
    requests run again     what the server said it had not executed, as the
                           driver counts
    drain of node          from the start of the node's drain to its end
    steady, roll           latency of operations, failed ones included: before
                           the first drain; from then until the last node is
                           back
    connections per node   after the roll

EXIT STATUS
    0 when the demonstration ran, whatever it showed; 1 if it could not run; 130
    if it was interrupted.

NOTE
    The simulated cluster (package crdbdraintest) is made from CockroachDB's
    source and documentation: the order of its steps, its messages, its errors.
    It is not CockroachDB, and its latency is a fixed number.
`,
	run: func(ctx context.Context, args []string, stdout, stderr io.Writer) error {
		flags := flag.NewFlagSet("demo", flag.ContinueOnError)
		asJSON := flags.Bool("json", false, "")
		svgFile := flags.String("svg", "", "")
		if err := parseFlags(flags, args); err != nil {
			return err
		}
		if *svgFile != "" { // half a minute is too long to find out
			f, err := os.OpenFile(*svgFile, os.O_WRONLY|os.O_CREATE, 0o644) //nolint:gosec // a picture is for everybody
			if err != nil {
				return usageError("demo: -svg: " + err.Error())
			}
			if err := f.Close(); err != nil {
				return err
			}
		}
		d := defaultDemo
		d.progress = func(format string, args ...any) { say(stderr, format+"\n", args...) }
		r, err := d.run(ctx)
		if err != nil {
			return err
		}
		if *svgFile != "" {
			if err := os.WriteFile(*svgFile, []byte(r.svg()), 0o644); err != nil { //nolint:gosec // a picture is for everybody
				return err
			}
			say(stderr, "The picture is in %s.\n", *svgFile)
		}
		if *asJSON {
			line, err := r.json()
			if err != nil {
				return err
			}
			return write(stdout, line)
		}
		return write(stdout, r.text())
	},
}

// demo is one demonstration. The tests run one that is ten times as fast.
type demo struct {
	workers, conns int
	latency        time.Duration // of a statement, at the server
	think          time.Duration // mean pause of a worker between two operations, so that latency is not a lack of CPU
	warmUp         time.Duration // not measured
	steady         time.Duration // measured before the first drain
	linger         time.Duration // how long a drained node lives on; a real one moves its leases
	down           time.Duration // how long a node is down
	settle         time.Duration // between a node's return and the next drain
	balancer       crdbdraintest.LoadBalancerConfig
	scenarios      []scenario
	progress       func(format string, args ...any)
}

// scenario is a way in which the server drains.
type scenario struct {
	name, title string
	label       string // for progress
	settings    crdbdraintest.Settings
	window      time.Duration // what the settings leave; 0: nothing
	params      string        // of crdbdrain; READINESS stands for the nodes' URLs
}

var defaultDemo = demo{
	workers:  16,
	conns:    30,
	latency:  1500 * time.Microsecond,
	think:    4 * time.Millisecond,
	warmUp:   500 * time.Millisecond,
	steady:   2500 * time.Millisecond,
	linger:   300 * time.Millisecond,
	down:     300 * time.Millisecond,
	settle:   500 * time.Millisecond,
	balancer: crdbdraintest.LoadBalancerConfig{Interval: 100 * time.Millisecond, Fall: 2, Rise: 1},
	scenarios: []scenario{
		{
			name: "window", title: "window of 5 s", label: "With a window of 5 s",
			settings: crdbdraintest.Settings{
				InitialWait: time.Second, ConnectionsTimeout: 4 * time.Second, TransactionsTimeout: 10 * time.Second,
			},
			window: 5 * time.Second,
			params: "&crdbdrain_readiness=READINESS&crdbdrain_window=5s&crdbdrain_poll_interval=300ms&crdbdrain_poll_interval_draining=200ms",
		},
		{name: "defaults", title: "server's defaults", label: "With the server's defaults", settings: crdbdraintest.DefaultSettings()},
	},
}

const (
	driverPgx       = "pgx"
	driverCrdbdrain = "crdbdrain"
)

var drivers = []string{driverPgx, driverCrdbdrain}

// run runs the scenarios one after the other, and in each the drivers side by side.
func (d *demo) run(ctx context.Context) (*report, error) {
	r := &report{workers: d.workers, conns: d.conns}
	d.progress("Two simulated clusters of three nodes, one for pgx and one for crdbdrain.")
	for _, s := range d.scenarios {
		d.progress("%s, every node is drained and restarted:", s.label)
		results, err := d.runScenario(ctx, s)
		if err != nil {
			return nil, err
		}
		r.scenarios = append(r.scenarios, scenarioResult{scenario: s, drivers: results})
	}
	return r, nil
}

func (d *demo) runScenario(ctx context.Context, s scenario) (results []*result, err error) {
	var sides []*side
	defer func() {
		for _, x := range sides {
			x.close()
		}
	}()
	for _, driver := range drivers {
		x, err := d.newSide(ctx, s, driver)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", driver, err)
		}
		sides = append(sides, x)
	}
	// Both loads run until both rolls are over, so that neither roll has the machine for itself.
	loads := make([]*load, len(sides))
	for i, x := range sides {
		loads[i] = startLoad(x.cluster, x.db, d.workers, d.think)
	}
	var wg sync.WaitGroup
	for i, x := range sides {
		wg.Go(func() { d.roll(ctx, x, loads[i]) })
	}
	wg.Wait()
	for i, x := range sides {
		x.result.open = loads[i].watched()
		x.result.perNode = perNode(x.cluster)
		loads[i].stop(x.result)
		if x.connector != nil {
			stats := x.connector.Stats()
			x.result.culled, x.result.rerun = stats.Culled, stats.Rerun
		}
		results = append(results, x.result)
	}
	return results, ctx.Err()
}

// side is one driver's cluster and pool.
type side struct {
	cluster   *crdbdraintest.Cluster
	db        *sql.DB
	connector *crdbdrain.Connector // nil for pgx
	result    *result
	label     string // for progress
}

func (d *demo) newSide(ctx context.Context, s scenario, driver string) (x *side, err error) {
	x = &side{result: newResult(driver), label: fmt.Sprintf("  %-9s", driver)}
	defer func() {
		if err != nil {
			x.close()
		}
	}()
	if x.cluster, err = startCluster(crdbdraintest.Config{
		Latency: d.latency, Settings: s.settings, LoadBalancer: d.balancer,
	}); err != nil {
		return nil, err
	}
	if driver == driverPgx {
		x.db, err = sql.Open("pgx", x.cluster.DSN())
	} else {
		// sql.Open("crdbdrain", dsn) does the same; the connector is for its counts.
		dsn := x.cluster.DSN() + strings.Replace(s.params, "READINESS", x.cluster.ReadinessURLs(), 1)
		var cfg *pgx.ConnConfig
		if cfg, err = pgx.ParseConfig(dsn); err != nil {
			return nil, err
		}
		if x.connector, err = crdbdrain.NewConnector(cfg); err != nil {
			return nil, err
		}
		x.db = sql.OpenDB(x.connector)
	}
	if err != nil {
		return nil, err
	}
	x.db.SetMaxOpenConns(d.conns)
	x.db.SetMaxIdleConns(d.conns)
	return x, fill(ctx, x.db, d.conns)
}

func (x *side) close() {
	if x.db != nil {
		_ = x.db.Close()
	}
	if x.cluster != nil {
		x.cluster.Close()
	}
}

// startCluster is crdbdraintest.Start, which panics where it cannot listen.
func startCluster(cfg crdbdraintest.Config) (c *crdbdraintest.Cluster, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the simulated cluster does not start: %v", p)
		}
	}()
	return crdbdraintest.Start(cfg), nil
}

// fill opens n connections at once, so that the pool holds n.
func fill(ctx context.Context, db *sql.DB, n int) error {
	conns := make([]*sql.Conn, 0, n)
	defer func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}()
	for range n {
		c, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		conns = append(conns, c)
	}
	return nil
}

// roll drains and restarts every node of one side, and says to its load what is going on. It stops when ctx ends.
func (d *demo) roll(ctx context.Context, x *side, l *load) {
	if !pause(ctx, d.warmUp) {
		return
	}
	l.phase.Store(phaseSteady)
	if !pause(ctx, d.steady) {
		return
	}
	l.phase.Store(phaseRoll)
	defer l.phase.Store(phaseUnmeasured)
	begin := time.Now()
	for _, n := range x.cluster.Nodes() {
		shown := chart.Drain{Node: n.ID(), Start: time.Since(l.begin)}
		drain := n.Drain(ctx)
		if drain.Err != nil {
			return
		}
		shown.Took, shown.End = drain.Duration, time.Since(l.begin)
		lost := int64(drain.LostIdle + drain.LostBusy)
		x.result.drains = append(x.result.drains, drain.Duration)
		x.result.lost += lost
		d.progress("%s node %d drained in %.2f s, %s", x.label, n.ID(), drain.Duration.Seconds(), closedByServer(lost))
		if !pause(ctx, d.linger) {
			return
		}
		n.Stop()
		if !pause(ctx, d.down) {
			return
		}
		n.Start()
		shown.Up = time.Since(l.begin)
		x.result.shown = append(x.result.shown, shown)
		for !x.cluster.LoadBalancer().Up(n.ID()) {
			if !pause(ctx, 10*time.Millisecond) {
				return
			}
		}
		if !pause(ctx, d.settle) {
			return
		}
	}
	x.result.roll = time.Since(begin)
}

func closedByServer(n int64) string {
	if n == 1 {
		return "1 connection closed by the server"
	}
	return fmt.Sprintf("%d connections closed by the server", n)
}

// perNode is how the cluster's connections are spread.
func perNode(c *crdbdraintest.Cluster) map[string]int {
	open := make(map[string]int)
	for _, n := range c.Nodes() {
		open[strconv.Itoa(n.ID())] = n.Stats().Open
	}
	return open
}

// pause waits, and reports false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// The phases of a load.
const (
	phaseUnmeasured = iota // counted, but its latency is not
	phaseSteady
	phaseRoll
)

// load is a closed loop: each worker waits for its operation, pauses, and does the next.
type load struct {
	begin  time.Time
	phase  atomic.Int32
	cancel context.CancelFunc
	done   sync.WaitGroup
	seen   []seen // one per worker

	open    []chart.Open // sampled by a goroutine of its own, which ends with unwatch
	unwatch context.CancelFunc
	watch   sync.WaitGroup
}

// seen is what one worker has seen.
type seen struct {
	samples []sample
	errors  map[string]int64
}

// sample is one operation.
type sample struct {
	chart.Sample
	phase int32
}

// watchEvery is how often the connections per node are counted for the picture.
const watchEvery = 50 * time.Millisecond

func startLoad(c *crdbdraintest.Cluster, db *sql.DB, workers int, think time.Duration) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{begin: time.Now(), cancel: cancel, seen: make([]seen, workers)}
	for i := range workers {
		l.done.Go(func() {
			s := &l.seen[i]
			s.errors = make(map[string]int64)
			for n := i; pause(ctx, think/2+rand.N(think)); n++ {
				phase, begin := l.phase.Load(), time.Now()
				err := operation(db, n)
				if phase == phaseSteady && l.phase.Load() == phaseRoll {
					phase = phaseRoll // it met the first drain
				}
				s.samples = append(s.samples, sample{chart.Sample{End: time.Since(l.begin), Took: time.Since(begin), Failed: err != nil}, phase})
				if err != nil {
					s.errors[errorCode(err)]++
				}
			}
		})
	}
	watch, unwatch := context.WithCancel(context.Background())
	l.unwatch = unwatch
	l.watch.Go(func() {
		for {
			o := chart.Open{At: time.Since(l.begin)}
			for _, n := range c.Nodes() {
				o.Nodes = append(o.Nodes, n.Stats().Open)
			}
			l.open = append(l.open, o)
			if !pause(watch, watchEvery) {
				return
			}
		}
	})
	return l
}

// watched ends the count of connections and returns it.
func (l *load) watched() []chart.Open {
	l.unwatch()
	l.watch.Wait()
	return l.open
}

// stop ends the load, and adds what it has seen to a result. Operations that have begun come to their end.
func (l *load) stop(r *result) {
	l.cancel()
	l.done.Wait()
	for _, s := range l.seen {
		r.ops += int64(len(s.samples))
		for code, n := range s.errors {
			r.errors[code] += n
		}
		for _, x := range s.samples {
			r.samples = append(r.samples, x.Sample)
			switch x.phase {
			case phaseSteady:
				r.steady = append(r.steady, x.Took)
			case phaseRoll:
				r.rolling = append(r.rolling, x.Took)
			}
		}
	}
	slices.Sort(r.steady)
	slices.Sort(r.rolling)
}

// operation is a statement, or every third time a transaction of two. Like a service's call it has a deadline, and it
// tries nothing again.
func operation(db *sql.DB, n int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if n%3 != 0 {
		var one int
		return db.QueryRowContext(ctx, "SELECT 1").Scan(&one)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // nothing after Commit
	for _, change := range []int{-1, 1} {
		if _, err := tx.ExecContext(ctx, "UPDATE accounts SET balance = balance + $1 WHERE id = $2", change, n+change); err != nil {
			return err
		}
	}
	return tx.Commit()
}
