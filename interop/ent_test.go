package interop

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"testing"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"entgo.io/ent/dialect/sql/schema"
	"entgo.io/ent/schema/field"
)

// E16: ent takes its dialect's name and a *sql.DB. A generated client takes the driver: ent.NewClient(ent.Driver(drv)).
func Example_ent() {
	cluster := exampleCluster()
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	drv := entsql.OpenDB(dialect.Postgres, db)
	defer drv.Close()

	// What generated code does:
	query, args := entsql.Dialect(dialect.Postgres).Select("name").From(entsql.Table("items")).Where(entsql.EQ("id", 7)).Query()
	var rows entsql.Rows
	if err := drv.Query(context.Background(), query, args, &rows); err != nil {
		log.Fatal(err)
	}
	defer rows.Close()
	name, err := entsql.ScanString(rows)
	fmt.Println(name, err)
	// Output: item 7 <nil>
}

var entLibrary = library{
	name: "ent",
	open: func(_ context.Context, dsn string) (*client, error) {
		db, err := sql.Open(driverName, dsn)
		if err != nil {
			return nil, err
		}
		drv := entsql.OpenDB(dialect.Postgres, db)
		return &client{
			db: db,
			put: func(ctx context.Context, id int) error {
				tx, err := drv.Tx(ctx)
				if err != nil {
					return err
				}
				query, args := entsql.Dialect(dialect.Postgres).Insert("items").Columns("id", "name").Values(id, itemName(id)).Query()
				if err := tx.Exec(ctx, query, args, nil); err != nil {
					_ = tx.Rollback()
					return err
				}
				return tx.Commit()
			},
			get: func(ctx context.Context, id int) (string, error) {
				query, args := entsql.Dialect(dialect.Postgres).Select("name").From(entsql.Table("items")).Where(entsql.EQ("id", id)).Query()
				var rows entsql.Rows
				if err := drv.Query(ctx, query, args, &rows); err != nil {
					return "", err
				}
				defer rows.Close()
				return entsql.ScanString(rows)
			},
			end: drv.Close,
		}, nil
	},
}

// The migration that a generated client runs reads the catalog and compares.
func TestEntOnPostgres(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	db, err := sql.Open(driverName, d.DSN())
	if err != nil {
		t.Fatal(err)
	}
	drv := entsql.OpenDB(dialect.Postgres, db)
	defer drv.Close()
	id := &schema.Column{Name: "id", Type: field.TypeInt, Increment: true}
	things := &schema.Table{
		Name:       "things",
		Columns:    []*schema.Column{id, {Name: "name", Type: field.TypeString, Unique: true}, {Name: "labels", Type: field.TypeJSON, Nullable: true}},
		PrimaryKey: []*schema.Column{id},
	}
	m, err := schema.NewMigrate(drv)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := m.Create(t.Context(), things); err != nil {
			t.Fatal(err)
		}
	}
	query, args := entsql.Dialect(dialect.Postgres).Insert("things").Columns("name", "labels").Values("a", []byte(`{"k":"v"}`)).Returning("id").Query()
	var rows entsql.Rows
	if err := drv.Query(t.Context(), query, args, &rows); err != nil {
		t.Fatal(err)
	}
	if n, err := entsql.ScanInt(rows); err != nil || n != 1 {
		t.Errorf("ID %d, %v", n, err)
	}
	rows.Close()
	if n := count(t, d, "things"); n != 1 {
		t.Errorf("%d rows", n)
	}
}
