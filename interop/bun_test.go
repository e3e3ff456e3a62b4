package interop

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"slices"
	"testing"

	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"
)

// E16: bun takes a *sql.DB and a dialect.
func Example_bun() {
	cluster := exampleCluster()
	defer cluster.Close()

	sqlDB, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	db := bun.NewDB(sqlDB, pgdialect.New())
	defer db.Close()

	type Item struct {
		ID   int `bun:",pk"`
		Name string
	}
	ctx := context.Background()
	if _, err := db.NewInsert().Model(&Item{7, "item 7"}).Exec(ctx); err != nil {
		log.Fatal(err)
	}
	var name string
	if err := db.NewSelect().Model((*Item)(nil)).Column("name").Where("id = ?", 7).Scan(ctx, &name); err != nil {
		log.Fatal(err)
	}
	fmt.Println(name)
	// Output: item 7
}

type bunItem struct {
	bun.BaseModel `bun:"table:items"`
	ID            int `bun:",pk"`
	Name          string
}

var bunLibrary = library{
	name: "bun",
	open: func(_ context.Context, dsn string) (*client, error) {
		sqlDB, err := sql.Open(driverName, dsn)
		if err != nil {
			return nil, err
		}
		db := bun.NewDB(sqlDB, pgdialect.New())
		return &client{
			db: sqlDB,
			put: func(ctx context.Context, id int) error {
				return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
					_, err := tx.NewInsert().Model(&bunItem{ID: id, Name: itemName(id)}).Exec(ctx)
					return err
				})
			},
			get: func(ctx context.Context, id int) (name string, err error) {
				err = db.NewSelect().Model((*bunItem)(nil)).Column("name").Where("id = ?", id).Scan(ctx, &name)
				return name, err
			},
			end: db.Close,
		}, nil
	},
}

func TestBunOnPostgres(t *testing.T) {
	t.Parallel()
	sqlDB, err := sql.Open(driverName, newDatabase(t).DSN())
	if err != nil {
		t.Fatal(err)
	}
	db := bun.NewDB(sqlDB, pgdialect.New())
	defer db.Close()
	type thing struct {
		bun.BaseModel `bun:"table:things"`
		ID            int64             `bun:",pk,autoincrement"`
		Tags          []string          `bun:",array"`
		Labels        map[string]string `bun:"type:jsonb"`
		Nothing       *string
	}
	ctx := t.Context()
	if _, err := db.NewCreateTable().Model((*thing)(nil)).Exec(ctx); err != nil {
		t.Fatal(err)
	}
	in := &thing{Tags: []string{"a", `b"c`}, Labels: map[string]string{"k": "v"}}
	if _, err := db.NewInsert().Model(in).Exec(ctx); err != nil || in.ID == 0 {
		t.Fatalf("ID %d, %v", in.ID, err)
	}
	out := &thing{ID: in.ID}
	if err := db.NewSelect().Model(out).WherePK().Scan(ctx); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(out.Tags, in.Tags) || out.Labels["k"] != "v" || out.Nothing != nil {
		t.Errorf("%+v", out)
	}
	n, err := db.NewUpdate().Model(out).Set("nothing = ?", "x").WherePK().Exec(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if rows, err := n.RowsAffected(); err != nil || rows != 1 {
		t.Errorf("%d rows, %v", rows, err)
	}
}
