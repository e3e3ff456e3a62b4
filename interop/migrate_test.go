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

	"github.com/golang-migrate/migrate/v4"
	"github.com/golang-migrate/migrate/v4/database/cockroachdb"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/source/iofs"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// golang-migrate's package for CockroachDB opens lib/pq by itself; WithInstance gives it a *sql.DB instead.
func Example_golangMigrate() {
	cluster := crdbdraintest.Start(crdbdraintest.Config{Handler: answerMigrate})
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	source, err := iofs.New(fstest.MapFS{ // an embed.FS in a service
		"1_items.up.sql": {Data: []byte("CREATE TABLE items (id INT8 PRIMARY KEY, name TEXT NOT NULL)")},
	}, ".")
	if err != nil {
		log.Fatal(err)
	}
	target, err := cockroachdb.WithInstance(db, &cockroachdb.Config{DatabaseName: "defaultdb"})
	if err != nil {
		log.Fatal(err)
	}
	m, err := migrate.NewWithInstance("iofs", source, "cockroachdb", target)
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close() // and db
	fmt.Println(m.Up())
	// Output: <nil>
}

// answerMigrate says that golang-migrate's tables are there, and empty.
func answerMigrate(q crdbdraintest.Query) *crdbdraintest.Result {
	switch {
	case strings.Contains(q.SQL, "FROM information_schema.tables"):
		return &crdbdraintest.Result{Columns: []string{"count"}, Rows: [][]any{{"1"}}}
	case strings.Contains(q.SQL, "lock"), strings.HasPrefix(q.SQL, "SELECT version, dirty FROM"):
		if strings.HasPrefix(q.SQL, "SELECT") {
			return &crdbdraintest.Result{Columns: []string{"version", "dirty"}}
		}
	}
	return nil
}

// migrateOne runs one migration with tables of its own.
func migrateOne(db *sql.DB, id int) (err error) {
	text := fmt.Sprintf("INSERT INTO items (id, name) VALUES (%d, '%s')", id, itemName(id))
	source, err := iofs.New(fstest.MapFS{"1_item.up.sql": {Data: []byte(text)}}, ".")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	target, err := cockroachdb.WithInstance(db, &cockroachdb.Config{
		DatabaseName: "defaultdb", MigrationsTable: fmt.Sprintf("migrations_%d", id), LockTable: fmt.Sprintf("lock_%d", id),
	})
	if err != nil {
		return err
	}
	m, err := migrate.NewWithInstance("iofs", source, "cockroachdb", target)
	if err != nil {
		return err
	}
	return m.Up() // m.Close would close the pool
}

var migrateLibrary = library{
	name:   "golang-migrate",
	answer: answerMigrate,
	open: func(_ context.Context, dsn string) (*client, error) {
		db, err := sql.Open(driverName, dsn)
		if err != nil {
			return nil, err
		}
		return &client{db: db, put: func(_ context.Context, id int) error { return migrateOne(db, id) }}, nil
	},
}

// Its package for pgx takes an advisory lock on a connection of its own.
func TestMigrateOnPostgres(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	db, err := sql.Open(driverName, d.DSN())
	if err != nil {
		t.Fatal(err)
	}
	source, err := iofs.New(fstest.MapFS{
		"1_items.up.sql":   {Data: []byte(itemsTable + "; INSERT INTO items VALUES (1, 'a')")},
		"1_items.down.sql": {Data: []byte("DROP TABLE items")},
	}, ".")
	if err != nil {
		t.Fatal(err)
	}
	target, err := migratepgx.WithInstance(db, &migratepgx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := migrate.NewWithInstance("iofs", source, "pgx5", target)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Up(); err != nil {
		t.Error(err)
	}
	if n := count(t, d, "items"); n != 1 {
		t.Errorf("%d rows", n)
	}
	if err := m.Up(); !errors.Is(err, migrate.ErrNoChange) {
		t.Errorf("again: %v", err)
	}
	if err := m.Down(); err != nil {
		t.Error(err)
	}
	if err, err2 := m.Close(); err != nil || err2 != nil {
		t.Error(err, err2)
	}
}
