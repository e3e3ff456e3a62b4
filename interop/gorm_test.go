package interop

import (
	"context"
	"errors"
	"fmt"
	"log"
	"slices"
	"testing"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
)

// E16: gorm's dialect is chosen by its dialector, the driver by DriverName (or by Conn, which takes a *sql.DB).
func Example_gorm() {
	cluster := exampleCluster()
	defer cluster.Close()

	db, err := gorm.Open(postgres.New(postgres.Config{DriverName: "crdbdrain", DSN: cluster.DSN()}), &gorm.Config{})
	if err != nil {
		log.Fatal(err)
	}
	sqlDB, err := db.DB() // for SetMaxOpenConns and the like
	if err != nil {
		log.Fatal(err)
	}
	defer sqlDB.Close()

	type Item struct {
		ID   int
		Name string
	}
	if err := db.Create(&Item{7, "item 7"}).Error; err != nil {
		log.Fatal(err)
	}
	var it Item
	if err := db.Select("name").Take(&it, 7).Error; err != nil {
		log.Fatal(err)
	}
	fmt.Println(it.Name)
	// Output: item 7
}

// Item is gorm's model; the table is items.
type Item struct {
	ID   int
	Name string
}

func openGorm(dsn string) (*gorm.DB, error) {
	return gorm.Open(postgres.New(postgres.Config{DriverName: driverName, DSN: dsn}), &gorm.Config{
		Logger: logger.Discard, PrepareStmt: true, TranslateError: true,
	})
}

var gormLibrary = library{
	name: "gorm",
	open: func(_ context.Context, dsn string) (*client, error) {
		g, err := openGorm(dsn)
		if err != nil {
			return nil, err
		}
		db, err := g.DB()
		if err != nil {
			return nil, err
		}
		return &client{
			db: db,
			put: func(ctx context.Context, id int) error { // gorm wraps it in a transaction
				return g.WithContext(ctx).Create(&Item{id, itemName(id)}).Error
			},
			get: func(ctx context.Context, id int) (string, error) {
				var it Item
				err := g.WithContext(ctx).Select("name").Take(&it, id).Error
				return it.Name, err
			},
		}, nil
	},
}

// GormThing has columns whose values the server makes.
type GormThing struct {
	ID     int               `gorm:"primaryKey"`
	Name   string            `gorm:"uniqueIndex"`
	Labels map[string]string `gorm:"type:jsonb;serializer:json"`
}

func TestGormOnPostgres(t *testing.T) {
	t.Parallel()
	g, err := openGorm(newDatabase(t).DSN())
	if err != nil {
		t.Fatal(err)
	}
	db, err := g.DB()
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for range 2 { // the second time it compares the columns
		if err := g.AutoMigrate(&GormThing{}); err != nil {
			t.Fatal(err)
		}
	}
	things := []GormThing{{Name: "a", Labels: map[string]string{"k": "v"}}, {Name: "b"}}
	if err := g.Create(&things).Error; err != nil || things[0].ID == 0 || things[1].ID == 0 {
		t.Errorf("%v, %+v", err, things)
	}
	if err := g.Create(&GormThing{Name: "a"}).Error; !errors.Is(err, gorm.ErrDuplicatedKey) {
		t.Errorf("a duplicate: %v", err)
	}
	roll := errors.New("roll back")
	err = g.Transaction(func(tx *gorm.DB) error {
		inner := tx.Transaction(func(tx *gorm.DB) error { // a savepoint
			if err := tx.Create(&GormThing{Name: "dropped"}).Error; err != nil {
				return err
			}
			return roll
		})
		if !errors.Is(inner, roll) {
			return fmt.Errorf("inner: %w", inner)
		}
		return tx.Create(&GormThing{Name: "c"}).Error
	})
	if err != nil {
		t.Error(err)
	}
	var names []string
	if err := g.Model(&GormThing{}).Order("name").Pluck("name", &names).Error; err != nil || !slices.Equal(names, []string{"a", "b", "c"}) {
		t.Errorf("%q, %v", names, err)
	}
	var one GormThing
	if err := g.Where("labels->>'k' = ?", "v").Take(&one).Error; err != nil || one.Labels["k"] != "v" {
		t.Errorf("%+v, %v", one, err)
	}
}
