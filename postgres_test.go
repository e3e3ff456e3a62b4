package crdbdrain

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/crdbdrain/crdbdrain/internal/pgtest"
)

// with appends parameters to a DSN that has some.
func with(dsn string, params ...string) string { return dsn + "&" + strings.Join(params, "&") }

// bothDrivers opens the DSN with plain pgx and with the driver.
func bothDrivers(t testing.TB, dsn string) map[string]*sql.DB {
	t.Helper()
	dbs := map[string]*sql.DB{}
	for _, name := range []string{"pgx", "crdbdrain"} {
		db, err := sql.Open(name, dsn)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		dbs[name] = db
	}
	return dbs
}

// TestD01 runs a workload on PostgreSQL for ten polls. The server's log has what it has of plain pgx and no more: the
// application's statements and pgx's ping, one session, no watchdog.
func TestD01(t *testing.T) {
	t.Parallel()
	workload := func(db *sql.DB) {
		db.SetMaxOpenConns(1)
		for _, q := range []string{"CREATE TABLE t (i int)", "INSERT INTO t VALUES (1)"} {
			if _, err := db.Exec(q); err != nil {
				t.Fatal(err)
			}
		}
		for range 11 {
			time.Sleep(100 * time.Millisecond) // a poll's time
			if _, err := db.Exec("SELECT count(*) FROM t WHERE i = $1", 1); err != nil {
				t.Fatal(err)
			}
		}
		tx, err := db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	plain, d := pgtest.Shared(t).CreateDatabase(t), pgtest.Shared(t).CreateDatabase(t)
	workload(bothDrivers(t, plain.DSN())["pgx"])
	logs := &lockedBuffer{}
	db := open(t, with(d.DSN(), "crdbdrain_poll_interval=100ms", "crdbdrain_readiness=http://127.0.0.1:1"), "", WithLogger(logs.logger()))
	workload(db.DB)

	got, want := d.Statements(), plain.Statements()
	if !slices.Equal(got, want) || len(want) < 15 {
		t.Errorf("statements:\n%s\nof plain pgx:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if got := d.Sessions(); got != 1 {
		t.Errorf("%d sessions, want 1", got)
	}
	if log := strings.Join(d.Log(), "\n"); strings.Contains(log, watchdogName) {
		t.Errorf("a watchdog connected:\n%s", log)
	}
	if db.c.watchdog.Load() != nil {
		t.Error("a watchdog runs")
	}
	if got := string(logs.bytes()); strings.Count(got, "\n") > 1 {
		t.Errorf("log:\n%s", got)
	}
}

// PostgreSQL refuses a session for a parameter that it does not know: none of the driver's own may reach it (C01, D05).
func TestC01(t *testing.T) {
	t.Parallel()
	d := pgtest.Shared(t).CreateDatabase(t)
	params := []string{"crdbdrain_mode=on", "crdbdrain_sources=auto", "crdbdrain_readiness=http://127.0.0.1:1", "crdbdrain_unsafe_internals=on",
		"crdbdrain_poll_interval=1s", "crdbdrain_window=10s", "crdbdrain_cull_stagger=1s", "crdbdrain_rerun=on", "crdbdrain_host_order=random",
		"application_name=c01"}
	for _, dsn := range []string{with(d.DSN(), params...), keywordValue(t, d.DSN(), params...)} {
		db, err := sql.Open("crdbdrain", dsn)
		if err != nil {
			t.Fatal(err)
		}
		var name string
		if err := db.QueryRow("SHOW application_name").Scan(&name); err != nil || name != "c01" {
			t.Errorf("%v, application_name %q", err, name)
		}
		db.Close()
	}
}

// keywordValue turns a DSN in URL form into keywords and values.
func keywordValue(t testing.TB, dsn string, params ...string) string {
	t.Helper()
	rest, ok := strings.CutPrefix(dsn, "postgres://postgres@127.0.0.1:")
	port, rest, ok2 := strings.Cut(rest, "/")
	database, _, _ := strings.Cut(rest, "?")
	if !ok || !ok2 {
		t.Fatalf("DSN %q has another form", dsn)
	}
	return fmt.Sprintf("host=127.0.0.1 port=%s user=postgres dbname=%s sslmode=disable %s", port, database, strings.Join(params, " "))
}

// class is what an application can tell of an error.
func class(err error) string {
	switch {
	case err == nil:
		return "none"
	case sqlState(err) != "":
		return sqlState(err)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		strings.Contains(err.Error(), "conn closed"):
		return "the connection's end"
	}
	return err.Error()
}

// TestE07Terminations ends sessions of both drivers in the same way and compares what the application sees: on PostgreSQL
// the driver is pgx. 57P01 has severity FATAL there and another text than CockroachDB's, and says nothing about a node.
func TestE07Terminations(t *testing.T) {
	t.Parallel()
	d := pgtest.Shared(t).CreateDatabase(t)
	admin, err := sql.Open("pgx", d.DSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { admin.Close() })
	terminate := func(pid int) {
		if _, err := admin.Exec("SELECT pg_terminate_backend($1)", pid); err != nil {
			t.Errorf("terminating: %v", err)
		}
		eventually(t, "the session is gone", func() bool {
			var n int
			err := admin.QueryRow("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", pid).Scan(&n)
			return err == nil && n == 0
		})
	}
	sleeping := func(pid int) {
		eventually(t, "the statement runs", func() bool {
			var n int
			err := admin.QueryRow("SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND state = 'active' AND query LIKE '%pg_sleep%'", pid).Scan(&n)
			return err == nil && n == 1
		})
	}
	if _, err := admin.Exec("CREATE TABLE t (i int, d text)"); err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	scenarios := map[string]func(db *sql.DB) []error{
		"idle, then used": func(db *sql.DB) []error {
			pid := pidOf(t, db)
			terminate(pid)
			_, err := db.Exec("INSERT INTO t VALUES ($1)", 1)
			_, again := db.Exec("INSERT INTO t VALUES ($1)", 2)
			return []error{err, again}
		},
		"in a statement": func(db *sql.DB) []error {
			pid := pidOf(t, db)
			done := make(chan error, 1)
			go func() { _, err := db.ExecContext(ctx, "SELECT pg_sleep(60)"); done <- err }()
			sleeping(pid)
			terminate(pid)
			err := <-done
			_, again := db.Exec("INSERT INTO t VALUES ($1)", 3)
			return []error{err, again}
		},
		"in a query": func(db *sql.DB) []error {
			pid := pidOf(t, db)
			done := make(chan error, 1)
			go func() {
				rows, err := db.QueryContext(ctx, "SELECT 'x' FROM pg_sleep($1)", 60)
				done <- drainRows(rows, err)
			}()
			sleeping(pid)
			terminate(pid)
			err := <-done
			_, again := db.Exec("INSERT INTO t VALUES ($1)", 4)
			return []error{err, again}
		},
		"in a transaction": func(db *sql.DB) []error {
			tx, err := db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			var pid int
			if err := tx.QueryRow("SELECT pg_backend_pid()").Scan(&pid); err != nil {
				t.Fatal(err)
			}
			terminate(pid)
			_, err = tx.Exec("INSERT INTO t VALUES ($1)", 5)
			_, second := tx.Exec("INSERT INTO t VALUES ($1)", 6)
			rollback := tx.Rollback()
			_, again := db.Exec("INSERT INTO t VALUES ($1)", 7)
			return []error{err, second, rollback, again}
		},
		"before COMMIT": func(db *sql.DB) []error {
			tx, err := db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			var pid int
			if err := tx.QueryRow("SELECT pg_backend_pid()").Scan(&pid); err != nil {
				t.Fatal(err)
			}
			terminate(pid)
			return []error{tx.Commit(), db.Ping()}
		},
		"idle, then BEGIN": func(db *sql.DB) []error {
			terminate(pidOf(t, db))
			tx, err := db.Begin()
			if err == nil {
				_ = tx.Rollback()
			}
			return []error{err, db.Ping()}
		},
		"idle for more than a second": func(db *sql.DB) []error {
			pid := pidOf(t, db)
			terminate(pid)
			time.Sleep(1100 * time.Millisecond) // pgx pings then
			_, err := db.Exec("INSERT INTO t VALUES ($1)", 8)
			return []error{err}
		},
	}
	for name, run := range scenarios {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dbs := bothDrivers(t, d.DSN())
			got := map[string][]string{}
			for _, driverName := range []string{"pgx", "crdbdrain"} {
				dbs[driverName].SetMaxOpenConns(1)
				for _, err := range run(dbs[driverName]) {
					got[driverName] = append(got[driverName], class(err))
				}
			}
			if !slices.Equal(got["pgx"], got["crdbdrain"]) {
				t.Errorf("pgx: %q; crdbdrain: %q", got["pgx"], got["crdbdrain"])
			}
			t.Logf("%q", got["pgx"])
		})
	}
}

// pidOf returns the process of the pool's one session, which has been checked out before, so that pgx pings it no more.
func pidOf(t testing.TB, db *sql.DB) (pid int) {
	t.Helper()
	for range 2 {
		if err := db.QueryRow("SELECT pg_backend_pid()").Scan(&pid); err != nil {
			t.Fatal(err)
		}
	}
	return pid
}

// TestE07FastShutdown stops the server under both drivers: idle, and in a statement; then there is nothing to connect to.
func TestE07FastShutdown(t *testing.T) {
	t.Parallel()
	got := map[string][]string{}
	for _, driverName := range []string{"pgx", "crdbdrain"} {
		s := pgtest.Start(t)
		d := s.CreateDatabase(t)
		db, busy := bothDrivers(t, d.DSN())[driverName], bothDrivers(t, d.DSN())[driverName]
		pidOf(t, db)
		pid := pidOf(t, busy)
		done := make(chan error, 1)
		go func() { _, err := busy.Exec("SELECT pg_sleep(60)"); done <- err }()
		eventually(t, "the statement runs", func() bool {
			var n int
			err := db.QueryRow("SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND state = 'active' AND query LIKE '%pg_sleep%'", pid).Scan(&n)
			return err == nil && n == 1
		})
		if err := s.Stop(true); err != nil {
			t.Fatal(err)
		}
		_, idle := db.Exec("SELECT 1")
		_, refused := busy.Exec("SELECT 1")
		for _, err := range []error{<-done, idle, refused} {
			what := class(err)
			if errors.Is(err, syscall.ECONNREFUSED) {
				what = "refused"
			}
			got[driverName] = append(got[driverName], what)
		}
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
		_, idle = db.Exec("SELECT 1")
		_, again := busy.Exec("SELECT 1")
		got[driverName] = append(got[driverName], class(idle), class(again))
	}
	if !slices.Equal(got["pgx"], got["crdbdrain"]) {
		t.Errorf("pgx: %q; crdbdrain: %q", got["pgx"], got["crdbdrain"])
	}
	t.Logf("%q", got["pgx"])
}

// TestB14 uses a statement that was prepared once from 64 goroutines, while the sessions that hold it end: it is prepared
// again where it is needed, and works. Sessions that end while idle for a moment are pgx's weak spot, so none does here
// but those that the pool itself closes.
func TestB14(t *testing.T) {
	t.Parallel()
	d := pgtest.Shared(t).CreateDatabase(t)
	for name, db := range bothDrivers(t, d.DSN()) {
		db.SetMaxOpenConns(8)
		db.SetMaxIdleConns(1) // the pool closes connections all the time, and the statement with them
		if _, err := db.Exec("CREATE TABLE IF NOT EXISTS t (i int)"); err != nil {
			t.Fatal(err)
		}
		s, err := db.Prepare("INSERT INTO t VALUES ($1)")
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i := range 64 {
			wg.Go(func() {
				for range 5 {
					if _, err := s.Exec(i); err != nil {
						t.Errorf("%s: %v", name, err)
					}
				}
			})
		}
		wg.Wait()
		if err := s.Close(); err != nil {
			t.Errorf("%s: closing the statement: %v", name, err)
		}
		var n int
		if err := db.QueryRow("SELECT count(*) FROM t").Scan(&n); err != nil || n%320 != 0 || n == 0 {
			t.Errorf("%s: %d rows, %v; want 320 from each driver", name, n, err)
		}
	}
}
