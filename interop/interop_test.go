// Package interop runs other people's libraries on the driver: each on a real PostgreSQL, and on a simulated cluster whose
// nodes are drained and restarted under its load. The Example functions are what a user of the library copies.
package interop

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"

	"github.com/crdbdrain/crdbdrain"
	"github.com/crdbdrain/crdbdrain/crdbdraintest"
	"github.com/crdbdrain/crdbdrain/internal/pgtest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("gorm.io/gorm/internal/lru.NewLRU[...].func1")) // gorm never ends its cache of prepared statements
}

// driverName is the driver under the libraries. With CRDBDRAIN_INTEROP_DRIVER=pgx every drain test has to fail: the table
// in README.md is made with it.
var driverName = func() string {
	if name := os.Getenv("CRDBDRAIN_INTEROP_DRIVER"); name != "" {
		return name
	}
	return "crdbdrain"
}()

// dsnWith appends the driver's own parameters to a DSN that has some, unless the driver is another one.
func dsnWith(dsn string, params ...string) string {
	if driverName != "crdbdrain" {
		return dsn
	}
	return strings.Join(append([]string{dsn}, params...), "&")
}

// openConnector opens a connector of the driver under test.
func openConnector(dsn string) (driver.Connector, error) {
	if driverName != "crdbdrain" {
		return stdlib.GetDefaultDriver().(driver.DriverContext).OpenConnector(dsn)
	}
	return (&crdbdrain.Driver{}).OpenConnector(dsn)
}

// A library is one that is tried: how a service opens it, and what the servers have to have for it.
type library struct {
	name    string
	open    func(ctx context.Context, dsn string) (*client, error)
	prepare func(ctx context.Context, db *sql.DB) error       // what PostgreSQL needs apart from the table items
	answer  func(q crdbdraintest.Query) *crdbdraintest.Result // on the simulated cluster, before its answer for items
	lb      crdbdraintest.LoadBalancerConfig                  // of the simulated cluster
	table   string                                            // that put inserts into; items if empty
}

// A client is an open library. Both functions are called concurrently.
type client struct {
	db  *sql.DB
	put func(ctx context.Context, id int) error           // inserts one row, "item ID" into items if it has no table of its own
	get func(ctx context.Context, id int) (string, error) // reads the name back; nil where the library has no such thing
	end func() error                                      // closes everything, db included; db.Close if nil
}

func (c *client) close() error {
	if c.end != nil {
		return c.end()
	}
	return c.db.Close()
}

// use is one turn of a load: a row is written, and read back.
func (c *client) use(ctx context.Context, id int) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := c.put(ctx, id); err != nil {
		return fmt.Errorf("writing %d: %w", id, err)
	}
	if c.get == nil {
		return nil
	}
	name, err := c.get(ctx, id)
	if err != nil {
		return fmt.Errorf("reading %d: %w", id, err)
	}
	if name != itemName(id) {
		return fmt.Errorf("item %d is %q", id, name)
	}
	return nil
}

func itemName(id int) string { return fmt.Sprintf("item %d", id) }

var libraries = []library{
	bunLibrary, cockroachGoLibrary, entLibrary, gooseLibrary, gormLibrary, migrateLibrary, otelsqlOutside, otelsqlInside,
	riverLibrary, scanyLibrary, sqlcLibrary, sqlxLibrary, squirrelLibrary, hidesValidator, hidesResetter,
}

const itemsTable = "CREATE TABLE items (id INT8 PRIMARY KEY, name TEXT NOT NULL)"

// On PostgreSQL the library's SQL is executed: what was written is there, once.
func TestPostgres(t *testing.T) {
	for _, lib := range libraries {
		t.Run(lib.name, func(t *testing.T) {
			t.Parallel()
			d := newDatabase(t, itemsTable)
			c, err := lib.open(t.Context(), d.DSN())
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := c.close(); err != nil {
					t.Error(err)
				}
			}()
			if lib.prepare != nil {
				if err := lib.prepare(t.Context(), c.db); err != nil {
					t.Fatal(err)
				}
			}
			const workers, each = 4, 5
			var wg sync.WaitGroup
			for w := range workers {
				wg.Go(func() {
					for i := range each {
						if err := c.use(t.Context(), w*each+i+1); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			if n := count(t, d, lib.tableName()); n != workers*each {
				t.Errorf("%d rows, want %d", n, workers*each)
			}
		})
	}
}

func (lib library) tableName() string {
	if lib.table == "" {
		return "items"
	}
	return lib.table
}

// newDatabase makes an empty database on a real PostgreSQL and executes statements in it.
func newDatabase(t testing.TB, statements ...string) *pgtest.Database {
	t.Helper()
	d := pgtest.Shared(t).CreateDatabase(t)
	db := plain(t, d)
	for _, s := range statements {
		if _, err := db.ExecContext(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
	return d
}

// plain opens a database with pgx: what a test makes sure of is not left to what it tests.
func plain(t testing.TB, d *pgtest.Database) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", d.DSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func count(t testing.TB, d *pgtest.Database, table string) (n int) {
	t.Helper()
	if err := plain(t, d).QueryRowContext(t.Context(), "SELECT count(*) FROM "+table).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// How the simulated cluster drains: with a window, of which readiness tells at its beginning.
const (
	initialWait        = 500 * time.Millisecond
	connectionsTimeout = 2500 * time.Millisecond
)

func drainParams(c *crdbdraintest.Cluster) []string {
	return []string{
		"crdbdrain_sources=readiness", "crdbdrain_readiness=" + c.ReadinessURLs(), "crdbdrain_window=3s",
		"crdbdrain_poll_interval=200ms", "crdbdrain_poll_interval_draining=100ms",
	}
}

func startCluster(answer func(crdbdraintest.Query) *crdbdraintest.Result, lb crdbdraintest.LoadBalancerConfig) *crdbdraintest.Cluster {
	return crdbdraintest.Start(crdbdraintest.Config{
		Settings: crdbdraintest.Settings{InitialWait: initialWait, ConnectionsTimeout: connectionsTimeout, TransactionsTimeout: 5 * time.Second},
		Handler: func(q crdbdraintest.Query) *crdbdraintest.Result {
			if answer != nil {
				if r := answer(q); r != nil {
					return r
				}
			}
			return answerItems(q)
		},
		LoadBalancer: lb,
	})
}

var idInSQL = regexp.MustCompile(`\bid"? = (\d+)`)

// answerItems answers a query for one item's name, which the simulated nodes do not store.
func answerItems(q crdbdraintest.Query) *crdbdraintest.Result {
	if !strings.HasPrefix(q.SQL, "SELECT") || !strings.Contains(q.SQL, "items") {
		return nil
	}
	var id string
	if len(q.Args) > 0 {
		id = fmt.Sprint(q.Args[0])
	} else if m := idInSQL.FindStringSubmatch(q.SQL); m != nil {
		id = m[1] // bun writes its arguments into the text
	}
	return &crdbdraintest.Result{Columns: []string{"name"}, Rows: [][]any{{"item " + id}}}
}

// A rolling restart under the library's load is invisible: no call fails, no connection is lost, and every row is
// written once. It has to fail where nobody leaves the draining nodes (CRDBDRAIN_INTEROP_DRIVER=pgx).
func TestRollingRestart(t *testing.T) {
	slots := make(chan struct{}, 4) // what two cores bear without being late for the window
	var wg sync.WaitGroup
	for _, lib := range libraries {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			t.Run(lib.name, func(t *testing.T) { rollingRestart(t, lib) })
		})
	}
	wg.Wait()
}

func rollingRestart(t *testing.T, lib library) {
	cluster := startCluster(lib.answer, lib.lb)
	defer cluster.Close()
	c, err := lib.open(t.Context(), dsnWith(cluster.DSN(), drainParams(cluster)...))
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	fill(t, c.db, 9)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	var turns, done, failed atomic.Int64
	for range 3 {
		wg.Go(func() {
			for ctx.Err() == nil {
				id := int(turns.Add(1))
				if err := c.use(context.WithoutCancel(ctx), id); err != nil && failed.Add(1) <= 3 {
					t.Error(err)
				}
				done.Add(1)
				time.Sleep(5 * time.Millisecond) // the load's think time
			}
		})
	}
	for _, n := range cluster.Nodes() {
		before := done.Load()
		within(t, 10*time.Second, "the load is under way", func() bool { return done.Load() >= before+10 })
		held := n.Stats().Open
		if held == 0 {
			t.Errorf("node %d has no connection to lose", n.ID())
		}
		d := n.Drain(t.Context())
		if lost := d.LostIdle + d.LostBusy; lost > 0 {
			t.Errorf("node %d closed %d idle and %d busy connections of %d", n.ID(), d.LostIdle, d.LostBusy, held)
		}
		if d.Err != nil {
			t.Error(d.Err)
		}
		n.Stop()
		n.Start()
		within(t, 10*time.Second, "the load balancer has the node again", func() bool { return cluster.LoadBalancer().Up(n.ID()) })
	}
	stop()
	wg.Wait()
	if n := failed.Load(); n > 0 {
		t.Errorf("%d of %d turns failed", n, turns.Load())
	} else if n := inserts(cluster, lib.tableName()); n != turns.Load() {
		t.Errorf("%d rows were written by %d turns", n, turns.Load())
	}
}

// inserts counts the INSERT statements into a table that were executed on all nodes.
func inserts(c *crdbdraintest.Cluster, table string) (n int64) {
	for text, times := range c.Stats().Statements {
		_, into, _ := strings.Cut(text, "INSERT INTO ")
		if strings.HasPrefix(strings.TrimLeft(into, `"`), table) {
			n += int64(times)
		}
	}
	return n
}

// fill opens n connections at once, so that the pool holds n.
func fill(t testing.TB, db *sql.DB, n int) {
	t.Helper()
	db.SetMaxOpenConns(n)
	db.SetMaxIdleConns(n)
	conns := make([]*sql.Conn, n)
	for i := range conns {
		c, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = c
	}
	for _, c := range conns {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// within fails the test if something does not come true in time.
func within(t testing.TB, limit time.Duration, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after %v still not: %s", limit, what)
		}
	}
}

// exampleCluster stands for the cluster of whoever copies an example.
func exampleCluster() *crdbdraintest.Cluster {
	return crdbdraintest.Start(crdbdraintest.Config{Handler: answerItems})
}
