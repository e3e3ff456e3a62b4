package interop

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// goose takes a dialect and a *sql.DB.
func Example_goose() {
	cluster := crdbdraintest.Start(crdbdraintest.Config{Handler: answerGoose})
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	migrations := fstest.MapFS{ // an embed.FS in a service
		"00001_items.sql": {Data: []byte("-- +goose Up\nCREATE TABLE items (id INT8 PRIMARY KEY, name TEXT NOT NULL);")},
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations)
	if err != nil {
		log.Fatal(err)
	}
	results, err := provider.Up(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(results), "migration")
	// Output: 1 migration
}

// answerGoose says that goose's table is there, and that nothing has been applied.
func answerGoose(q crdbdraintest.Query) *crdbdraintest.Result {
	switch {
	case strings.Contains(q.SQL, "FROM pg_tables"):
		return &crdbdraintest.Result{Columns: []string{"exists"}, Rows: [][]any{{"true"}}}
	case strings.HasPrefix(q.SQL, "SELECT max(version_id)"):
		return &crdbdraintest.Result{Columns: []string{"max"}, Rows: [][]any{{"0"}}}
	case strings.HasPrefix(q.SQL, "SELECT version_id"):
		return &crdbdraintest.Result{Columns: []string{"version_id", "is_applied"}, Rows: [][]any{{"0", "true"}}}
	}
	return nil
}

// Each turn is a migration of its own, with a table of versions of its own.
var gooseLibrary = library{
	name:   "goose",
	answer: answerGoose,
	open: func(_ context.Context, dsn string) (*client, error) {
		db, err := sql.Open(driverName, dsn)
		if err != nil {
			return nil, err
		}
		return &client{
			db: db,
			put: func(ctx context.Context, id int) error {
				insert := fmt.Sprintf("-- +goose Up\nINSERT INTO items (id, name) VALUES (%d, '%s');", id, itemName(id))
				p, err := goose.NewProvider(goose.DialectPostgres, db, fstest.MapFS{"00001_item.sql": {Data: []byte(insert)}},
					goose.WithTableName(fmt.Sprintf("goose_%d", id)))
				if err != nil {
					return err
				}
				applied, err := p.Up(ctx)
				if err == nil && len(applied) != 1 {
					return fmt.Errorf("%d migrations", len(applied))
				}
				return err
			},
		}, nil
	},
}

func TestGooseOnPostgres(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	db, err := sql.Open(driverName, d.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	locker, err := lock.NewPostgresSessionLocker()
	if err != nil {
		t.Fatal(err)
	}
	migrations := fstest.MapFS{
		"00001_items.sql": {Data: []byte("-- +goose Up\n" + itemsTable + ";\nINSERT INTO items VALUES (1, 'a');\n-- +goose Down\nDROP TABLE items;")},
		"00002_index.sql": {Data: []byte("-- +goose NO TRANSACTION\n-- +goose Up\nCREATE INDEX CONCURRENTLY i ON items (name);\n-- +goose Down\nDROP INDEX i;")},
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, migrations, goose.WithSessionLocker(locker))
	if err != nil {
		t.Fatal(err)
	}
	if r, err := p.Up(t.Context()); err != nil || len(r) != 2 {
		t.Errorf("%v, %v", r, err)
	}
	if n := count(t, d, "items"); n != 1 {
		t.Errorf("%d rows", n)
	}
	if v, err := p.GetDBVersion(t.Context()); err != nil || v != 2 {
		t.Errorf("version %d, %v", v, err)
	}
	if r, err := p.DownTo(t.Context(), 0); err != nil || len(r) != 2 {
		t.Errorf("%v, %v", r, err)
	}
}

// E09: a migration holds its connection for as long as it takes. A connection in use stays, its idle neighbours leave its
// draining node, and it leaves as soon as it is given back.
func TestE09AMigrationOutlastsTheNotice(t *testing.T) {
	begun, finish := make(chan *crdbdraintest.Node, 1), make(chan struct{})
	var cluster *crdbdraintest.Cluster
	cluster = startCluster(func(q crdbdraintest.Query) *crdbdraintest.Result {
		if strings.HasPrefix(q.SQL, "CREATE INDEX") {
			begun <- cluster.Node(q.Node)
			<-finish
		}
		return answerGoose(q)
	}, crdbdraintest.LoadBalancerConfig{})
	defer cluster.Close()
	db, err := sql.Open(driverName, dsnWith(cluster.DSN(), drainParams(cluster)...))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	fill(t, db, 9)
	p, err := goose.NewProvider(goose.DialectPostgres, db, fstest.MapFS{"00001_index.sql": {Data: []byte("-- +goose Up\nCREATE INDEX i ON items (name);")}})
	if err != nil {
		t.Fatal(err)
	}
	up := make(chan error, 1)
	go func() { _, err := p.Up(context.Background()); up <- err }()
	node := <-begun
	drained := make(chan crdbdraintest.DrainResult, 1)
	go func() { drained <- node.Drain(context.Background()) }()
	deadline := time.Now().Add(10 * time.Second)
	for node.Stats().Open != 1 && node.Step() < crdbdraintest.Closing && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	if n, step := node.Stats().Open, node.Step(); n != 1 || step >= crdbdraintest.Closing {
		t.Errorf("%d connections in step %v, want the migration's one before its idle neighbours are closed", n, step)
	}
	close(finish)
	if err := <-up; err != nil {
		t.Error(err)
	}
	if d := <-drained; d.LostIdle+d.LostBusy > 0 {
		t.Errorf("%d idle and %d busy connections were closed", d.LostIdle, d.LostBusy)
	}
}

// E09: where the server has no advisory locks the application's query fails with 42883, and nothing else happens: no
// connection is given up for it, and the sources, to whom 42883 says that a table is not there, do not hear of it.
func TestE09NoAdvisoryLocks(t *testing.T) {
	cluster := startCluster(func(q crdbdraintest.Query) *crdbdraintest.Result {
		if strings.Contains(q.SQL, "pg_advisory_lock") {
			return &crdbdraintest.Result{Err: &pgconn.PgError{Code: "42883", Message: "unknown function: pg_advisory_lock()"}}
		}
		return answerGoose(q)
	}, crdbdraintest.LoadBalancerConfig{})
	defer cluster.Close()
	db, err := sql.Open(driverName, dsnWith(cluster.DSN(), drainParams(cluster)...))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	fill(t, db, 9)
	dials := cluster.Stats().Accepts
	locker, err := lock.NewPostgresSessionLocker()
	if err != nil {
		t.Fatal(err)
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, fstest.MapFS{"00001_items.sql": {Data: []byte("-- +goose Up\n" + itemsTable + ";")}},
		goose.WithSessionLocker(locker))
	if err != nil {
		t.Fatal(err)
	}
	_, err = p.Up(t.Context())
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "42883" {
		t.Errorf("%v, want SQLSTATE 42883", err)
	}
	if s := db.Stats(); s.OpenConnections != 9 {
		t.Errorf("%+v, want the 9 connections", s)
	}
	if n := cluster.Stats().Accepts; n != dials {
		t.Errorf("%d new dials", n-dials)
	}
	node := cluster.Node(1)
	drained := make(chan crdbdraintest.DrainResult, 1)
	go func() { drained <- node.Drain(context.Background()) }()
	select {
	case d := <-drained:
		if d.LostIdle+d.LostBusy > 0 {
			t.Errorf("%d connections were lost: the drain was not noticed", d.LostIdle+d.LostBusy)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the drain does not end")
	}
}
