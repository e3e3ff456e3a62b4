package interop

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgtype"
)

// What sqlc makes for engine postgresql and database/sql, by hand: queries on anything that executes them.

type dbtx interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	PrepareContext(context.Context, string) (*sql.Stmt, error)
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

type queries struct{ db dbtx }

func newQueries(db dbtx) *queries { return &queries{db} }

func (q *queries) withTx(tx *sql.Tx) *queries { return &queries{tx} }

const createItem = `-- name: CreateItem :exec
INSERT INTO items (id, name) VALUES ($1, $2)`

type createItemParams struct {
	ID   int64
	Name string
}

func (q *queries) createItem(ctx context.Context, arg createItemParams) error {
	_, err := q.db.ExecContext(ctx, createItem, arg.ID, arg.Name)
	return err
}

const getItemName = `SELECT name FROM items WHERE id = $1`

func (q *queries) getItemName(ctx context.Context, id int64) (string, error) {
	var name string
	err := q.db.QueryRowContext(ctx, getItemName, id).Scan(&name)
	return name, err
}

const listItems = `-- name: ListItems :many
SELECT id, name FROM items WHERE id = ANY($1::bigint[]) ORDER BY id`

func (q *queries) listItems(ctx context.Context, ids []int64) ([]item, error) {
	rows, err := q.db.QueryContext(ctx, listItems, ids)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var items []item
	for rows.Next() {
		var i item
		if err := rows.Scan(&i.ID, &i.Name); err != nil {
			return nil, err
		}
		items = append(items, i)
	}
	return items, rows.Err()
}

// sqlc's code takes a *sql.DB, or a transaction of it.
func Example_sqlc() {
	cluster := exampleCluster()
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	q := newQueries(db) // New(db) of the generated package
	if err := q.createItem(context.Background(), createItemParams{7, "item 7"}); err != nil {
		log.Fatal(err)
	}
	name, err := q.getItemName(context.Background(), 7)
	fmt.Println(name, err)
	// Output: item 7 <nil>
}

var sqlcLibrary = library{
	name: "sqlc",
	open: func(_ context.Context, dsn string) (*client, error) {
		db, err := sql.Open(driverName, dsn)
		if err != nil {
			return nil, err
		}
		q := newQueries(db)
		return &client{
			db: db,
			put: func(ctx context.Context, id int) error {
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				if err := q.withTx(tx).createItem(ctx, createItemParams{int64(id), itemName(id)}); err != nil {
					return err
				}
				return tx.Commit()
			},
			get: func(ctx context.Context, id int) (string, error) { return q.getItemName(ctx, int64(id)) },
		}, nil
	},
}

func TestSqlcOnPostgres(t *testing.T) {
	t.Parallel()
	db, err := sql.Open(driverName, newDatabase(t, itemsTable, "INSERT INTO items VALUES (1, 'a'), (2, 'b'), (3, 'c')").DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	got, err := newQueries(db).listItems(t.Context(), []int64{1, 3})
	if want := []item{{1, "a"}, {3, "c"}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	// A column that is an array: pgtype's types are scanned through database/sql with its Map.
	var names []string
	if err := db.QueryRow("SELECT array_agg(name ORDER BY id) FROM items").Scan(pgtype.NewMap().SQLScanner(&names)); err != nil || !slices.Equal(names, []string{"a", "b", "c"}) {
		t.Errorf("%q, %v", names, err)
	}
}
