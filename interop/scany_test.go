package interop

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"testing"

	"github.com/georgysavva/scany/v2/sqlscan"
)

// scany reads rows into structs; sqlscan is its package for database/sql.
func Example_scany() {
	cluster := exampleCluster()
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	var item struct{ Name string }
	if err := sqlscan.Get(context.Background(), db, &item, "SELECT name FROM items WHERE id = $1", 7); err != nil {
		log.Fatal(err)
	}
	fmt.Println(item.Name)
	// Output: item 7
}

var scanyLibrary = library{
	name: "scany",
	open: func(_ context.Context, dsn string) (*client, error) {
		db, err := sql.Open(driverName, dsn)
		if err != nil {
			return nil, err
		}
		return &client{
			db: db,
			put: func(ctx context.Context, id int) error {
				_, err := db.ExecContext(ctx, "INSERT INTO items (id, name) VALUES ($1, $2)", id, itemName(id))
				return err
			},
			get: func(ctx context.Context, id int) (string, error) {
				var got struct{ Name string }
				err := sqlscan.Get(ctx, db, &got, "SELECT name FROM items WHERE id = $1", id)
				return got.Name, err
			},
		}, nil
	},
}

func TestScanyOnPostgres(t *testing.T) {
	t.Parallel()
	db, err := sql.Open(driverName, newDatabase(t, itemsTable, "INSERT INTO items VALUES (1, 'a'), (2, 'b')").DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var rows []struct {
		item
		Next *string
	}
	err = sqlscan.Select(t.Context(), db, &rows, "SELECT id, name, lead(name) OVER (ORDER BY id) AS next FROM items ORDER BY id")
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 2 || rows[0].Name != "a" || rows[0].Next == nil || *rows[0].Next != "b" || rows[1].Next != nil {
		t.Errorf("%+v", rows)
	}
	var none item
	if err := sqlscan.Get(t.Context(), db, &none, "SELECT id, name FROM items WHERE id = 3"); !sqlscan.NotFound(err) {
		t.Errorf("no row: %v", err)
	}
}
