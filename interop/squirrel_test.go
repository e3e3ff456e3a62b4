package interop

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"testing"

	sq "github.com/Masterminds/squirrel"
)

// squirrel writes the statements; Dollar is the form of parameters that the server knows.
func Example_squirrel() {
	cluster := exampleCluster()
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	builder := sq.StatementBuilder.PlaceholderFormat(sq.Dollar).RunWith(db)

	if _, err := builder.Insert("items").Columns("id", "name").Values(7, "item 7").Exec(); err != nil {
		log.Fatal(err)
	}
	var name string
	if err := builder.Select("name").From("items").Where(sq.Eq{"id": 7}).QueryRow().Scan(&name); err != nil {
		log.Fatal(err)
	}
	fmt.Println(name)
	// Output: item 7
}

// With squirrel's cache of prepared statements, which live for as long as the pool: they are prepared again on each
// connection that takes another's place.
var squirrelLibrary = library{
	name: "squirrel",
	open: func(_ context.Context, dsn string) (*client, error) {
		db, err := sql.Open(driverName, dsn)
		if err != nil {
			return nil, err
		}
		cache := sq.NewStmtCache(db)
		builder := sq.StatementBuilder.PlaceholderFormat(sq.Dollar).RunWith(cache)
		return &client{
			db: db,
			put: func(ctx context.Context, id int) error {
				_, err := builder.Insert("items").Columns("id", "name").Values(id, itemName(id)).ExecContext(ctx)
				return err
			},
			get: func(ctx context.Context, id int) (name string, err error) {
				err = builder.Select("name").From("items").Where(sq.Eq{"id": id}).QueryRowContext(ctx).Scan(&name)
				return name, err
			},
			end: func() error {
				if err := cache.Clear(); err != nil {
					return err
				}
				return db.Close()
			},
		}, nil
	},
}

func TestSquirrelOnPostgres(t *testing.T) {
	t.Parallel()
	db, err := sql.Open(driverName, newDatabase(t, itemsTable).DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	builder := sq.StatementBuilder.PlaceholderFormat(sq.Dollar).RunWith(db)
	insert := builder.Insert("items").Columns("id", "name").Suffix("ON CONFLICT (id) DO UPDATE SET name = excluded.name RETURNING name")
	for _, name := range []string{"a", "b"} {
		var got string
		if err := insert.Values(1, name).QueryRow().Scan(&got); err != nil || got != name {
			t.Errorf("%q, %v", got, err)
		}
	}
	var n int
	err = builder.Select("count(*)").From("items").Where(sq.Or{sq.Eq{"id": []int{1, 2}}, sq.Like{"name": "z%"}}).QueryRow().Scan(&n)
	if err != nil || n != 1 {
		t.Errorf("%d, %v", n, err)
	}
}
