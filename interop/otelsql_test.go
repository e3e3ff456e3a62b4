package interop

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"slices"
	"testing"

	"github.com/XSAM/otelsql"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/crdbdrain/crdbdrain"
)

// otelsql around the driver: version 0.43 or later, which forwards driver.Validator.
func Example_otelsqlOutside() {
	cluster := exampleCluster()
	defer cluster.Close()

	db, err := otelsql.Open("crdbdrain", cluster.DSN(), otelsql.WithAttributes(attribute.String("db.system.name", "cockroachdb")))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	fmt.Println(db.Ping())
	// Output: <nil>
}

// otelsql inside the driver needs one parameter; spans and metrics go to the global providers.
func Example_otelsqlInside() {
	cluster := exampleCluster()
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN()+"&crdbdrain_otelsql=on")
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	fmt.Println(db.Ping())
	// Output: <nil>
}

// plainClient is a client with database/sql alone.
func plainClient(db *sql.DB) *client {
	return &client{
		db: db,
		put: func(ctx context.Context, id int) error {
			_, err := db.ExecContext(ctx, "INSERT INTO items (id, name) VALUES ($1, $2)", id, itemName(id))
			return err
		},
		get: func(ctx context.Context, id int) (name string, err error) {
			err = db.QueryRowContext(ctx, "SELECT name FROM items WHERE id = $1", id).Scan(&name)
			return name, err
		},
	}
}

var otelsqlOutside = library{
	name: "otelsql outside",
	open: func(_ context.Context, dsn string) (*client, error) {
		db, err := otelsql.Open(driverName, dsn)
		if err != nil {
			return nil, err
		}
		return plainClient(db), nil
	},
}

var otelsqlInside = library{
	name: "otelsql inside",
	open: func(_ context.Context, dsn string) (*client, error) {
		db, err := sql.Open(driverName, dsnWith(dsn, "crdbdrain_otelsql=on"))
		if err != nil {
			return nil, err
		}
		return plainClient(db), nil
	},
}

// Outside and inside make the same spans, and pgx's connection is found under both.
func TestOtelsqlOnPostgres(t *testing.T) {
	dsn := newDatabase(t, itemsTable).DSN()
	global := otel.GetTracerProvider()
	defer otel.SetTracerProvider(global)
	var first []string
	for _, open := range []func() (*sql.DB, error){
		func() (*sql.DB, error) { return otelsql.Open("crdbdrain", dsn) },
		func() (*sql.DB, error) { return sql.Open("crdbdrain", dsn+"&crdbdrain_otelsql=on") },
	} {
		spans := tracetest.NewInMemoryExporter()
		provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
		otel.SetTracerProvider(provider)
		db, err := open()
		if err != nil {
			t.Fatal(err)
		}
		db.SetMaxOpenConns(1)
		if _, err := db.ExecContext(t.Context(), "INSERT INTO items VALUES (1, 'a') ON CONFLICT DO NOTHING"); err != nil {
			t.Fatal(err)
		}
		var name string
		if err := db.QueryRowContext(t.Context(), "SELECT name FROM items WHERE id = $1", 1).Scan(&name); err != nil || name != "a" {
			t.Errorf("%q, %v", name, err)
		}
		conn, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		err = conn.Raw(func(dc any) error {
			if _, ok := dc.(interface{ IsValid() bool }); !ok {
				t.Errorf("%T hides IsValid", dc)
			}
			pc, ok := crdbdrain.PgxConn(dc)
			if !ok {
				return fmt.Errorf("no pgx in %T", dc)
			}
			return pc.Ping(t.Context())
		})
		if err != nil {
			t.Error(err)
		}
		conn.Close()
		db.Close()
		var names []string
		for _, s := range spans.GetSpans() {
			names = append(names, s.Name)
		}
		if err := provider.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		if !slices.Contains(names, "sql.conn.exec") || !slices.Contains(names, "sql.conn.query") {
			t.Errorf("spans %q", names)
		}
		if first == nil {
			first = names
		} else if !slices.Equal(names, first) {
			t.Errorf("spans inside %q, outside %q", names, first)
		}
	}
}
