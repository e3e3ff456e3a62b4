package interop

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/cockroach-go/v2/crdb"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// The driver never retries a transaction's body; crdb.ExecuteTx does, where the server asks for it.
func Example_cockroachGo() {
	cluster := exampleCluster()
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	err = crdb.ExecuteTx(context.Background(), db, nil, func(tx *sql.Tx) error {
		_, err := tx.Exec("INSERT INTO items (id, name) VALUES ($1, $2)", 7, "item 7")
		return err
	})
	fmt.Println(err)
	// Output: <nil>
}

var cockroachGoLibrary = library{
	name: "cockroach-go",
	open: func(_ context.Context, dsn string) (*client, error) {
		db, err := sql.Open(driverName, dsn)
		if err != nil {
			return nil, err
		}
		inTx := func(ctx context.Context, f func(tx *sql.Tx) error) error { return crdb.ExecuteTx(ctx, db, nil, f) }
		return &client{
			db: db,
			put: func(ctx context.Context, id int) error {
				return inTx(ctx, func(tx *sql.Tx) error {
					_, err := tx.ExecContext(ctx, "INSERT INTO items (id, name) VALUES ($1, $2)", id, itemName(id))
					return err
				})
			},
			get: func(ctx context.Context, id int) (name string, err error) {
				err = inTx(ctx, func(tx *sql.Tx) error {
					return tx.QueryRowContext(ctx, "SELECT name FROM items WHERE id = $1", id).Scan(&name)
				})
				return name, err
			},
		}, nil
	},
}

// E15: ExecuteTx finds the SQLSTATE in the driver's errors: a transaction that the server asks to retry is retried on
// the same connection, any other error comes back as it is.
func TestE15ExecuteTx(t *testing.T) {
	const insert = "INSERT INTO items (id, name) VALUES ($1, $2)"
	for _, tt := range []struct {
		code  string
		fails int32 // how often, before it works
		runs  int32
	}{
		{"40001", 2, 3},
		{"23505", 100, 1},
	} {
		t.Run(tt.code, func(t *testing.T) {
			var calls atomic.Int32
			cluster := startCluster(func(q crdbdraintest.Query) *crdbdraintest.Result {
				if q.SQL == insert && calls.Add(1) <= tt.fails {
					return &crdbdraintest.Result{Err: &pgconn.PgError{Code: tt.code, Message: "restart transaction: no"}}
				}
				return nil
			}, crdbdraintest.LoadBalancerConfig{})
			defer cluster.Close()
			db, err := sql.Open(driverName, cluster.DSN())
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			err = crdb.ExecuteTx(t.Context(), db, nil, func(tx *sql.Tx) error {
				_, err := tx.Exec(insert, 1, "a")
				return err
			})
			if calls.Load() != tt.runs {
				t.Errorf("the body ran %d times, want %d", calls.Load(), tt.runs)
			}
			if tt.runs > 1 {
				if err != nil {
					t.Error(err)
				}
			} else if pgErr := (*pgconn.PgError)(nil); !errors.As(err, &pgErr) || pgErr.Code != tt.code {
				t.Errorf("%v", err)
			}
			if n := cluster.Stats().Accepts; n != 1 {
				t.Errorf("%d connections", n)
			}
			if n := cluster.Stats().Statements["ROLLBACK TO SAVEPOINT cockroach_restart"]; n != int(tt.runs)-1 {
				t.Errorf("%d retries", n)
			}
		})
	}
}
