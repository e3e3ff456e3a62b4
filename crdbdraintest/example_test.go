package crdbdraintest_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"sync"
	"time"

	_ "github.com/crdbdrain/crdbdrain"
	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// Orders is the service under test: it takes a *sql.DB, as services do.
type Orders struct{ db *sql.DB }

func (o *Orders) Place(ctx context.Context, customer int) error {
	_, err := o.db.ExecContext(ctx, "INSERT INTO orders (customer) VALUES ($1)", customer)
	return err
}

// A service under load while every node of the cluster is drained and restarted,
// one after the other.
func Example() {
	cluster := crdbdraintest.Start(crdbdraintest.Config{
		Settings: crdbdraintest.Settings{
			InitialWait:         20 * time.Millisecond,
			ConnectionsTimeout:  100 * time.Millisecond,
			TransactionsTimeout: time.Second,
		},
		LoadBalancer: crdbdraintest.LoadBalancerConfig{Interval: 5 * time.Millisecond},
	})
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	orders := &Orders{db}

	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var mu sync.Mutex
	placed, failed := 0, 0
	for i := range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				err := orders.Place(context.Background(), i)
				mu.Lock()
				if err == nil {
					placed++
				} else {
					failed++
				}
				mu.Unlock()
			}
		})
	}

	for _, node := range cluster.Nodes() {
		node.Restart(ctx)
		for !cluster.LoadBalancer().Up(node.ID()) {
			time.Sleep(time.Millisecond)
		}
	}
	stop()
	wg.Wait()

	executed := cluster.Stats().Statements["INSERT INTO orders (customer) VALUES ($1)"]
	fmt.Println("orders were placed:", placed > 0)
	fmt.Println("orders that failed:", failed)
	fmt.Println("each placed order was executed once:", executed == placed)
	// Output:
	// orders were placed: true
	// orders that failed: 0
	// each placed order was executed once: true
}

// A Handler answers what the built-in SQL does not, and is the statement
// running: it decides how long that takes.
func ExampleConfig_handler() {
	cluster := crdbdraintest.Start(crdbdraintest.Config{
		Nodes: 1,
		Handler: func(q crdbdraintest.Query) *crdbdraintest.Result {
			if q.SQL == "SELECT name, balance::INT8 FROM accounts WHERE id = $1" {
				return &crdbdraintest.Result{
					Columns: []string{"name", "balance"},
					Rows:    [][]any{{"account " + fmt.Sprint(q.Args[0]), 250}},
				}
			}
			return nil // the built-in answer
		},
	})
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	var name string
	var balance int
	if err := db.QueryRow("SELECT name, balance::INT8 FROM accounts WHERE id = $1", 7).Scan(&name, &balance); err != nil {
		log.Fatal(err)
	}
	fmt.Println(name, balance)
	// Output: account 7 250
}
