package pgtest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv("PGTEST_ABANDON") == "1" {
		abandon()
	}
	// The shared server still runs when goleak looks: it must not cost a goroutine.
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := CloseShared(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		os.Exit(code)
	}))
}

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func exec1(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func TestEachTestHasADatabaseAndItsLog(t *testing.T) {
	s := Shared(t)
	first, second := s.CreateDatabase(t), s.CreateDatabase(t)
	if first.Name == second.Name {
		t.Fatalf("two databases are called %s", first.Name)
	}

	tcp := connect(t, first.DSN())
	exec1(t, tcp, "CREATE TABLE t (n int)")
	exec1(t, tcp, "INSERT INTO t\nVALUES ($1)", 7)
	socket := connect(t, first.SocketDSN())
	exec1(t, socket, "SELECT n FROM t", pgx.QueryExecModeSimpleProtocol)
	exec1(t, connect(t, second.DSN()), "SELECT 'elsewhere'")

	want := []string{"CREATE TABLE t (n int)", "INSERT INTO t\nVALUES ($1)", "SELECT n FROM t"}
	if got := first.Statements(); !slices.Equal(got, want) {
		t.Errorf("statements %q, want %q", got, want)
	}
	if got := first.Sessions(); got != 2 {
		t.Errorf("%d sessions, want 2", got)
	}
	if got, want := second.Statements(), []string{"SELECT 'elsewhere'"}; !slices.Equal(got, want) {
		t.Errorf("statements of the other database %q, want %q", got, want)
	}
	if Shared(t) != s {
		t.Error("a second call started another shared server")
	}
}

func TestStopEndsSessionsAndRestartKeepsDataAndAddress(t *testing.T) {
	s := Start(t, "max_connections=7")
	conn := connect(t, s.DSN())
	var limit string
	if err := conn.QueryRow(t.Context(), "SHOW max_connections").Scan(&limit); err != nil || limit != "7" {
		t.Errorf("max_connections %q, %v; want 7", limit, err)
	}
	exec1(t, conn, "CREATE TABLE kept ()")

	if err := s.Stop(true); err != nil {
		t.Fatal(err)
	}
	_, err := conn.Exec(t.Context(), "SELECT 1")
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "57P01" {
		t.Errorf("a session of the stopped server got %v, want SQLSTATE 57P01", err)
	}
	if _, err := pgconn.Connect(t.Context(), s.DSN()); err == nil {
		t.Error("the stopped server took a connection")
	}

	for range 2 { // stopped, then running
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
		exec1(t, connect(t, s.DSN()), "TABLE kept")
	}
}

func TestSmartStopWaitsForClients(t *testing.T) {
	s := Start(t)
	conn := connect(t, s.DSN())
	stopped := make(chan error, 1)
	go func() { stopped <- s.Stop(false) }()
	for !strings.Contains(s.Log(), "received smart shutdown request") {
		select {
		case err := <-stopped:
			t.Fatalf("stopped before the client had left: %v", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
	exec1(t, conn, "SELECT 'still served'")
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
}

func TestTLS(t *testing.T) {
	s := StartTLS(t)
	for _, dsn := range []string{s.DSN(), s.CreateDatabase(t).DSN(), strings.Replace(s.DSN(), "127.0.0.1", "localhost", 1)} {
		var encrypted bool
		err := connect(t, dsn).QueryRow(t.Context(), "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").Scan(&encrypted)
		if err != nil || !encrypted {
			t.Errorf("%s: encrypted %t, %v", dsn, encrypted, err)
		}
	}
	_, err := pgconn.Connect(t.Context(), strings.Replace(s.DSN(), "verify-full", "disable", 1))
	if err == nil || !strings.Contains(err.Error(), "no encryption") {
		t.Errorf("without TLS: %v, want a refusal for want of encryption", err)
	}
}

func TestAServerIsGoneAfterItsTest(t *testing.T) {
	var s *Server
	t.Run("with a session left open", func(t *testing.T) {
		s = Start(t)
		conn, err := pgconn.Connect(t.Context(), s.DSN())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Conn().Close()
	})
	if s == nil {
		t.Skip("no PostgreSQL: see the subtest")
	}
	wantGone(t, s.dir, s.DSN())
}

// abandon is the life of a test binary that dies with its server running.
func abandon() {
	s, err := start(false, nil)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("%s %s\n", s.dir, s.DSN())
	os.Exit(3)
}

func TestAServerEndsWithATestBinaryThatDies(t *testing.T) {
	Shared(t) // skips where there is none to run
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "PGTEST_ABANDON=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Fatalf("the test binary ended with %v, want exit status 3", err)
	}
	var dir, dsn string
	if _, err := fmt.Sscan(string(out), &dir, &dsn); err != nil {
		t.Fatalf("%q: %v", out, err)
	}
	wantGone(t, dir, dsn)
}

// wantGone waits for a server's end: nobody but its guard knows when.
func wantGone(t *testing.T, dir, dsn string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is still there", dir)
		}
	}
	if _, err := pgconn.Connect(t.Context(), dsn); err == nil {
		t.Errorf("%s still takes connections", dsn)
	}
}

// recorder notes how a test ended instead of ending it.
type recorder struct {
	testing.TB
	skipped, failed string
}

func (r *recorder) Helper()                   {}
func (r *recorder) Skip(args ...any)          { r.skipped = fmt.Sprint(args...); runtime.Goexit() }
func (r *recorder) Fatal(args ...any)         { r.failed = fmt.Sprint(args...); runtime.Goexit() }
func (r *recorder) Fatalf(f string, a ...any) { r.Fatal(fmt.Sprintf(f, a...)) }

func outcome(err error) *recorder {
	r, done := &recorder{}, make(chan struct{})
	go func() {
		defer close(done)
		check(r, err)
	}()
	<-done
	return r
}

func TestAMissingServerSkipsUnlessItIsRequired(t *testing.T) {
	missing := fmt.Errorf("%w: not here", errUnavailable)
	for _, tt := range []struct {
		require         string
		err             error
		skipped, failed string
	}{
		{"", missing, "no PostgreSQL: not here", ""},
		{"1", missing, "", "no PostgreSQL: not here"},
		{"", errors.New("initdb: broken"), "", "starting PostgreSQL: initdb: broken"},
		{"1", nil, "", ""},
	} {
		t.Setenv("CRDBDRAIN_REQUIRE_POSTGRES", tt.require)
		r := outcome(tt.err)
		if r.skipped != tt.skipped || r.failed != tt.failed {
			t.Errorf("require %q, error %v: skipped %q, failed %q", tt.require, tt.err, r.skipped, r.failed)
		}
	}
}

func TestPsql(t *testing.T) {
	psql := Psql(t)
	out, err := exec.Command(psql, "--no-psqlrc", "-Atc", "SELECT 1", Shared(t).DSN()).CombinedOutput()
	if err != nil || string(out) != "1\n" {
		t.Errorf("psql: %q, %v", out, err)
	}
}
