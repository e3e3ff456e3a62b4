package interop

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverdatabasesql"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

type jobArgs struct {
	ID int `json:"id"`
}

func (jobArgs) Kind() string { return "item" }

// river's driver for database/sql takes a *sql.DB.
func Example_river() {
	cluster := crdbdraintest.Start(crdbdraintest.Config{Handler: answerRiver})
	defer cluster.Close()

	db, err := sql.Open("crdbdrain", cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	client, err := river.NewClient(riverdatabasesql.New(db), &river.Config{}) // without queues: it only inserts jobs
	if err != nil {
		log.Fatal(err)
	}
	n, err := client.InsertManyFast(context.Background(), []river.InsertManyParams{{Args: jobArgs{7}}})
	fmt.Println(n, err)
	// Output: 1 <nil>
}

// answerRiver is what a server says of itself, and of a notification.
func answerRiver(q crdbdraintest.Query) *crdbdraintest.Result {
	switch {
	case strings.Contains(q.SQL, "server_version_num"):
		return &crdbdraintest.Result{Columns: []string{"product", "version_num", "yb"}, Rows: [][]any{{"CockroachDB CCL v25.2.0", 130000, false}}}
	case strings.Contains(q.SQL, "pg_notify"):
		return &crdbdraintest.Result{Columns: []string{"pg_notify"}, Rows: [][]any{{""}}}
	}
	return nil
}

var quiet = slog.New(slog.DiscardHandler)

var riverLibrary = library{
	name:    "river",
	table:   "river_job",
	answer:  answerRiver,
	prepare: migrateRiver,
	open: func(ctx context.Context, dsn string) (*client, error) {
		db, err := sql.Open(driverName, dsn)
		if err != nil {
			return nil, err
		}
		c, err := river.NewClient(riverdatabasesql.New(db), &river.Config{Logger: quiet})
		if err != nil {
			return nil, err
		}
		return &client{
			db: db,
			put: func(ctx context.Context, id int) error {
				n, err := c.InsertManyFast(ctx, []river.InsertManyParams{{Args: jobArgs{id}}})
				if err == nil && n != 1 {
					return fmt.Errorf("%d jobs", n)
				}
				return err
			},
		}, nil
	},
}

func migrateRiver(ctx context.Context, db *sql.DB) error {
	m, err := rivermigrate.New(riverdatabasesql.New(db), &rivermigrate.Config{Logger: quiet})
	if err != nil {
		return err
	}
	_, err = m.Migrate(ctx, rivermigrate.DirectionUp, nil)
	return err
}

type jobWorker struct {
	river.WorkerDefaults[jobArgs]
	worked chan int
}

func (w *jobWorker) Work(_ context.Context, job *river.Job[jobArgs]) error {
	w.worked <- job.Args.ID
	return nil
}

// On PostgreSQL jobs are inserted, worked and completed.
func TestRiverOnPostgres(t *testing.T) {
	t.Parallel()
	db, err := sql.Open(driverName, newDatabase(t).DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := migrateRiver(t.Context(), db); err != nil {
		t.Fatal(err)
	}
	worker := &jobWorker{worked: make(chan int, 1)}
	workers := river.NewWorkers()
	river.AddWorker(workers, worker)
	c, err := river.NewClient(riverdatabasesql.New(db), &river.Config{
		Logger: quiet, Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2}},
		FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 50 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	completed, cancel := c.Subscribe(river.EventKindJobCompleted)
	defer cancel()
	if err := c.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.InsertTx(t.Context(), tx, jobArgs{7}, nil); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	timeout := time.After(20 * time.Second)
	select {
	case id := <-worker.worked:
		if id != 7 {
			t.Errorf("job %d", id)
		}
	case <-timeout:
		t.Error("the job was not worked")
	}
	select {
	case <-completed:
	case <-timeout:
		t.Error("the job was not completed")
	}
	if err := c.Stop(context.Background()); err != nil {
		t.Error(err)
	}
}
