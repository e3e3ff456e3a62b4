package crdbdrain_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"log/slog"
	"os"

	"github.com/jackc/pgx/v5"

	"github.com/crdbdrain/crdbdrain"
	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// Changing the driver's name is all that a service has to do.
func Example() {
	cluster := crdbdraintest.Start(crdbdraintest.Config{}) // stands for yours
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN()+"&crdbdrain_readiness="+cluster.ReadinessURLs())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	var one int
	if err := db.QueryRow("SELECT 1").Scan(&one); err != nil {
		log.Fatal(err)
	}
	fmt.Println(one)
	// Output: 1
}

// A connector is for those who need pgx's hooks, a tracer, a logger or a meter provider.
func ExampleNewConnector() {
	cluster := crdbdraintest.Start(crdbdraintest.Config{})
	defer cluster.Close()

	cfg, err := pgx.ParseConfig(cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	connector, err := crdbdrain.NewConnector(cfg, crdbdrain.WithLogger(slog.New(slog.NewTextHandler(os.Stderr, nil))))
	if err != nil {
		log.Fatal(err)
	}
	db := sql.OpenDB(connector)
	defer db.Close()

	if err := db.Ping(); err != nil {
		log.Fatal(err)
	}
	fmt.Println("lost:", connector.Stats().Lost)
	// Output: lost: 0
}

// What pgx can do and database/sql cannot is reached through Raw.
func ExamplePgxConn() {
	cluster := crdbdraintest.Start(crdbdraintest.Config{})
	defer cluster.Close()
	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	ctx := context.Background()
	conn, err := db.Conn(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	err = conn.Raw(func(driverConn any) error {
		pgxConn, ok := crdbdrain.PgxConn(driverConn)
		if !ok {
			return fmt.Errorf("%T is no connection of pgx's", driverConn)
		}
		batch := new(pgx.Batch)
		batch.Queue("SELECT 1")
		batch.Queue("SELECT 2")
		return pgxConn.SendBatch(ctx, batch).Close()
	})
	fmt.Println(err)
	// Output: <nil>
}

// A long-lived holder of a connection learns that its node is about to leave, and can finish in good order.
func ExampleDraining() {
	cluster := crdbdraintest.Start(crdbdraintest.Config{})
	defer cluster.Close()
	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	ctx := context.Background()
	conn, err := db.Conn(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	leave := crdbdrain.Draining(ctx, conn)

	work := make(chan string, 1)
	work <- "a change"
	for done := false; !done; {
		select {
		case <-leave:
			done = true // finish, close conn, and take another
		case w := <-work:
			fmt.Println(w)
			done = true // the example's work is done
		}
	}
	// Output: a change
}
