package interop

import (
	"context"
	"fmt"
	"log"
	"slices"
	"testing"

	"github.com/jmoiron/sqlx"

	_ "github.com/crdbdrain/crdbdrain"
)

// sqlx has a list of drivers and their bind types; for a name that it does not know it leaves the question marks in.
func Example_sqlx() {
	cluster := exampleCluster() // stands for yours
	defer cluster.Close()

	sqlx.BindDriver("crdbdrain", sqlx.DOLLAR) // once, before the first query
	db, err := sqlx.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	type item struct {
		ID   int
		Name string
	}
	if _, err := db.NamedExec("INSERT INTO items (id, name) VALUES (:id, :name)", item{7, "item 7"}); err != nil {
		log.Fatal(err)
	}
	var name string
	if err := db.Get(&name, db.Rebind("SELECT name FROM items WHERE id = ?"), 7); err != nil {
		log.Fatal(err)
	}
	fmt.Println(name)
	// Output: item 7
}

func init() { sqlx.BindDriver("crdbdrain", sqlx.DOLLAR) }

type item struct {
	ID   int    `db:"id"`
	Name string `db:"name"`
}

var sqlxLibrary = library{
	name: "sqlx",
	open: func(ctx context.Context, dsn string) (*client, error) {
		db, err := sqlx.ConnectContext(ctx, driverName, dsn)
		if err != nil {
			return nil, err
		}
		return &client{
			db: db.DB,
			put: func(ctx context.Context, id int) error {
				_, err := db.NamedExecContext(ctx, "INSERT INTO items (id, name) VALUES (:id, :name)", item{id, itemName(id)})
				return err
			},
			get: func(ctx context.Context, id int) (name string, err error) {
				err = db.GetContext(ctx, &name, db.Rebind("SELECT name FROM items WHERE id = ?"), id)
				return name, err
			},
		}, nil
	},
}

// E05: sqlx knows pgx by name and not this driver; BindDriver tells it.
func TestE05SqlxBindType(t *testing.T) {
	if got, want := sqlx.BindType("crdbdrain"), sqlx.BindType("pgx"); got != want || got != sqlx.DOLLAR {
		t.Errorf("bind type %d, pgx's is %d", got, want)
	}
}

func TestSqlxOnPostgres(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, itemsTable)
	db, err := sqlx.ConnectContext(t.Context(), driverName, d.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	want := []item{{1, "a"}, {2, "b"}, {3, "c"}}
	tx := db.MustBegin()
	if _, err := tx.NamedExec("INSERT INTO items (id, name) VALUES (:id, :name)", want); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	query, args, err := sqlx.In("SELECT id, name FROM items WHERE id IN (?) ORDER BY id", []int{1, 2, 3})
	if err != nil {
		t.Fatal(err)
	}
	var got []item
	if err := db.Select(&got, db.Rebind(query), args...); err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	named, err := db.PrepareNamed("SELECT id, name FROM items WHERE name = :name")
	if err != nil {
		t.Fatal(err)
	}
	defer named.Close()
	var one item
	if err := named.Get(&one, map[string]any{"name": "b"}); err != nil || one != want[1] {
		t.Errorf("%v, %v", one, err)
	}
}
