// Package pgtest runs a real, throw-away PostgreSQL for tests.
//
// Most tests share one server per test binary and have a database each:
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestOnPostgres(t *testing.T) {
//		db := pgtest.Shared(t).CreateDatabase(t)
//		conn, err := pgx.Connect(t.Context(), db.DSN())
//		…
//		if got := db.Statements(); len(got) != 0 { … }
//	}
//
// A test that stops or reconfigures its server starts its own with [Start].
//
// Without a PostgreSQL on the machine such tests are skipped with a message that begins "no PostgreSQL:";
// with CRDBDRAIN_REQUIRE_POSTGRES=1 in the environment, as in CI, they fail instead.
// PostgreSQL refuses to run as root, so root's tests run it as the user postgres or nobody.
//
// The package starts no goroutine. A server that nobody closed ends, and its files go, when the test binary ends, however it ends.
package pgtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// startTimeout bounds initdb, a start and a stop, each by itself: a loaded machine is slow, a wait for ever hides a fault.
const startTimeout = time.Minute

// errUnavailable says that this machine has no PostgreSQL to run; the tests are skipped.
var errUnavailable = errors.New("no PostgreSQL")

// Server is a running PostgreSQL whose only purpose is a test. Its methods are safe for concurrent use.
type Server struct {
	bin   string // directory of initdb, pg_ctl and postgres
	dir   string // everything the server has; holds data/, log, and the unix socket
	port  int
	tls   bool
	owner account
	guard *guard
}

// Database is one database of a [Server].
type Database struct {
	Name   string
	server *Server
}

// Start starts a server for one test; it is gone when the test and its subtests are over.
// Each setting is a line of postgresql.conf such as "max_connections=5", and wins over this package's own.
func Start(t testing.TB, settings ...string) *Server {
	t.Helper()
	return startFor(t, false, settings)
}

// StartTLS is [Start] with TLS: over TCP the server takes TLS connections only, with a certificate for localhost and 127.0.0.1 whose
// CA is in the file [Server.CAFile]. The DSNs ask for sslmode=verify-full.
func StartTLS(t testing.TB, settings ...string) *Server {
	t.Helper()
	return startFor(t, true, settings)
}

func startFor(t testing.TB, withTLS bool, settings []string) *Server {
	t.Helper()
	s, err := start(withTLS, settings)
	check(t, err)
	t.Cleanup(func() {
		if err := s.guard.release(); err != nil {
			t.Errorf("removing PostgreSQL in %s: %v", s.dir, err)
		}
	})
	return s
}

// check ends the test if there is no server: skipped where the machine has none, failed otherwise.
func check(t testing.TB, err error) {
	t.Helper()
	switch {
	case err == nil:
	case errors.Is(err, errUnavailable):
		unavailable(t, err.Error())
	default:
		t.Fatalf("starting PostgreSQL: %v", err)
	}
}

// unavailable skips the test, or fails it where the environment says that the program must be there.
func unavailable(t testing.TB, message string) {
	t.Helper()
	if os.Getenv("CRDBDRAIN_REQUIRE_POSTGRES") == "1" {
		t.Fatal(message)
	}
	t.Skip(message)
}

// shared is the test binary's one server, started when it is first asked for.
var shared struct {
	mu      sync.Mutex // guarded by mu: all of it; held while the server starts, for whoever comes second has to wait for it
	started bool
	server  *Server
	err     error
}

// Shared returns the server that all tests of this test binary share. Do not stop or restart it.
func Shared(t testing.TB) *Server {
	t.Helper()
	shared.mu.Lock()
	if !shared.started {
		shared.server, shared.err = start(false, nil)
		shared.started = true
	}
	s, err := shared.server, shared.err
	shared.mu.Unlock()
	check(t, err)
	return s
}

// CloseShared removes the shared server, if there is one; a later [Shared] starts another.
func CloseShared() error {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	s := shared.server
	shared.started, shared.server, shared.err = false, nil, nil
	if s == nil {
		return nil
	}
	return s.guard.release()
}

// Main is a whole TestMain: it runs the tests, removes the shared server, and exits.
func Main(m *testing.M) {
	code := m.Run()
	if err := CloseShared(); err != nil {
		fmt.Fprintln(os.Stderr, "removing the shared PostgreSQL:", err)
		code = cmp.Or(code, 1)
	}
	os.Exit(code)
}

// Psql returns the path of psql. Without one the test is skipped with a message that begins "no psql:", or fails as it does without a server.
func Psql(t testing.TB) string {
	t.Helper()
	if path, err := exec.LookPath("psql"); err == nil {
		return path
	}
	for _, dir := range binDirs() {
		if path, err := exec.LookPath(filepath.Join(dir, "psql")); err == nil {
			return path
		}
	}
	unavailable(t, "no psql: neither in PATH nor beside a PostgreSQL server")
	return ""
}

// binDirs lists the directories that may hold PostgreSQL's server programs: PATH first, which usually has clients only, then where
// Debian, Red Hat and Homebrew put them, newest version first.
func binDirs() []string {
	dirs := filepath.SplitList(os.Getenv("PATH"))
	for i, dir := range dirs {
		// The programs look for their files beside themselves, and refuse to be called through a lone link to one of them.
		if path, err := filepath.EvalSymlinks(filepath.Join(dir, "postgres")); err == nil {
			dirs[i] = filepath.Dir(path)
		}
	}
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin",
		"/usr/pgsql-*/bin",
		"/opt/homebrew/opt/postgresql@*/bin",
		"/usr/local/opt/postgresql@*/bin",
	} {
		found, _ := filepath.Glob(pattern) // the patterns are well-formed
		slices.SortFunc(found, func(a, b string) int { return cmp.Compare(version(b), version(a)) })
		dirs = append(dirs, found...)
	}
	return dirs
}

var versionDigits = regexp.MustCompile(`[0-9]+`)

func version(dir string) int {
	n, _ := strconv.Atoi(versionDigits.FindString(dir)) // 0 where there is no number: last
	return n
}

func findBin() (string, error) {
	for _, dir := range binDirs() {
		missing := slices.ContainsFunc([]string{"postgres", "initdb", "pg_ctl"}, func(program string) bool {
			_, err := exec.LookPath(filepath.Join(dir, program))
			return err != nil
		})
		if !missing {
			return filepath.Abs(dir)
		}
	}
	return "", fmt.Errorf("%w: postgres, initdb and pg_ctl are neither in PATH nor in a usual place such as /usr/lib/postgresql/*/bin", errUnavailable)
}

// start makes a cluster in a new directory and starts it.
func start(withTLS bool, settings []string) (_ *Server, err error) {
	bin, err := findBin()
	if err != nil {
		return nil, err
	}
	owner, err := findAccount()
	if err != nil {
		return nil, err
	}
	dir, err := makeDir(owner)
	if err != nil {
		return nil, err
	}
	guard, err := newGuard(owner, dir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	s := &Server{bin: bin, dir: dir, tls: withTLS, owner: owner, guard: guard}
	defer func() {
		if err != nil {
			err = errors.Join(err, guard.release())
		}
	}()

	if err := s.run("initdb", "--pgdata="+s.data(), "--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"); err != nil {
		return nil, err
	}
	if err := s.configure(settings); err != nil {
		return nil, err
	}
	// Somebody else may take the port between its choice and the server's start.
	for range 5 {
		if s.port, err = freePort(); err != nil {
			return nil, err
		}
		if err = s.startDaemon(); err == nil || !strings.Contains(err.Error(), "Address already in use") {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// configure appends to postgresql.conf, where the last line of a name wins.
func (s *Server) configure(settings []string) error {
	conf := []string{
		"listen_addresses = '127.0.0.1'",
		"unix_socket_directories = '" + s.dir + "'",
		"log_statement = all",
		"log_connections = on",
		"log_disconnections = on",
		"log_line_prefix = '%m [%p] %q{%d} '",
		"fsync = off",
		"synchronous_commit = off",
		"full_page_writes = off",
		"autovacuum = off",
		"shared_buffers = 16MB",
	}
	if s.tls {
		if err := writeCertificates(s.dir, s.owner); err != nil {
			return err
		}
		conf = append(conf,
			"ssl = on",
			"ssl_cert_file = '"+filepath.Join(s.dir, "server.crt")+"'",
			"ssl_key_file = '"+filepath.Join(s.dir, "server.key")+"'",
		)
		hba := "local   all all              trust\nhostssl all all 127.0.0.1/32 trust\n" //nolint:dupword // type, database, user
		if err := os.WriteFile(filepath.Join(s.data(), "pg_hba.conf"), []byte(hba), 0o600); err != nil {
			return err
		}
	}
	return appendFile(filepath.Join(s.data(), "postgresql.conf"), strings.Join(append(conf, settings...), "\n")+"\n")
}

func appendFile(path, text string) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = f.WriteString(text)
	return err
}

func (s *Server) data() string    { return filepath.Join(s.dir, "data") }
func (s *Server) logFile() string { return filepath.Join(s.dir, "log") }

func (s *Server) startDaemon() error {
	err := s.run("pg_ctl", "start", "--wait", "--silent", "--pgdata="+s.data(), "--log="+s.logFile(), "--options=-p "+strconv.Itoa(s.port))
	if err != nil {
		return fmt.Errorf("%w\n%s", err, s.Log())
	}
	return nil
}

// run runs one of PostgreSQL's programs as the server's owner, to its end.
func (s *Server) run(program string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, program), args...)
	cmd.WaitDelay = time.Second // the daemon must not keep us by holding on to our pipe
	s.owner.prepare(cmd, s.dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", program, args[0], err, out)
	}
	return nil
}

// freePort returns a loopback port that is free now.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	port := l.Addr().(*net.TCPAddr).Port
	return port, l.Close()
}

// Stop stops the server and returns when it has ended: fast ends every session (FATAL 57P01, "terminating connection due to administrator
// command"); otherwise the server refuses new sessions (FATAL 57P03) and waits for the clients to leave, a minute at most.
func (s *Server) Stop(fast bool) error {
	mode := "smart"
	if fast {
		mode = "fast"
	}
	return s.run("pg_ctl", "stop", "--wait", "--silent", "--pgdata="+s.data(), "--mode="+mode, "--timeout="+strconv.Itoa(int(startTimeout.Seconds())-5))
}

// Restart stops the server fast, if it runs, and starts it again with the same data on the same port.
func (s *Server) Restart() error {
	if _, err := os.Stat(filepath.Join(s.data(), "postmaster.pid")); err == nil {
		if err := s.Stop(true); err != nil {
			return err
		}
	}
	return s.startDaemon()
}

// DSN connects to the database postgres, as its superuser of the same name, over loopback TCP.
func (s *Server) DSN() string { return s.dsn("postgres") }

// SocketDSN is [Server.DSN] through the unix socket.
func (s *Server) SocketDSN() string { return s.socketDSN("postgres") }

// Addr is the server's TCP address, host and port.
func (s *Server) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)) }

// CAFile is the path of the certificate authority's certificate of a server with TLS, in PEM.
func (s *Server) CAFile() string { return filepath.Join(s.dir, "ca.crt") }

func (s *Server) dsn(database string) string {
	query := url.Values{"sslmode": {"disable"}}
	if s.tls {
		query = url.Values{"sslmode": {"verify-full"}, "sslrootcert": {s.CAFile()}}
	}
	u := url.URL{Scheme: "postgres", User: url.User("postgres"), Host: s.Addr(), Path: database, RawQuery: query.Encode()}
	return u.String()
}

func (s *Server) socketDSN(database string) string {
	query := url.Values{"host": {s.dir}, "port": {strconv.Itoa(s.port)}, "sslmode": {"disable"}}
	u := url.URL{Scheme: "postgres", User: url.User("postgres"), Path: "/" + database, RawQuery: query.Encode()}
	return u.String()
}

// Log returns the server's log so far: every connection, every executed statement (but not a Parse, Bind or Describe by itself), every error.
// A statement stands in it before its client has the answer; an end of a session may come a moment after the client has closed it.
func (s *Server) Log() string {
	text, err := os.ReadFile(s.logFile())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "reading the log: " + err.Error()
	}
	return string(text)
}

var databases atomic.Int64

// CreateDatabase makes an empty database, named after the test. It goes with the server.
func (s *Server) CreateDatabase(t testing.TB) *Database {
	t.Helper()
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, strings.ToLower(t.Name()))
	name = fmt.Sprintf("%.40s_%d", name, databases.Add(1)) // PostgreSQL cuts a name at 63 bytes

	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	conn, err := pgconn.Connect(ctx, s.SocketDSN())
	if err != nil {
		t.Fatalf("connecting to create a database: %v\n%s", err, s.Log())
	}
	defer conn.Close(ctx)
	// template0 cannot have sessions, which would stand in the way of a copy.
	if err := conn.Exec(ctx, `CREATE DATABASE "`+name+`" TEMPLATE template0`).Close(); err != nil {
		t.Fatalf("creating database %s: %v", name, err)
	}
	return &Database{Name: name, server: s}
}

// DSN connects to the database over loopback TCP.
func (d *Database) DSN() string { return d.server.dsn(d.Name) }

// SocketDSN connects to the database through the unix socket.
func (d *Database) SocketDSN() string { return d.server.socketDSN(d.Name) }

// Log returns the entries of the server's log that belong to the database's sessions, without their prefix, continuation lines included:
// "LOG:  connection authorized: …", "LOG:  statement: SELECT 1", "LOG:  execute <unnamed>: SELECT $1", "DETAIL:  …".
func (d *Database) Log() []string {
	var entries []string
	mine := false
	for line := range strings.Lines(d.server.Log()) {
		line = strings.TrimSuffix(line, "\n")
		if rest, continued := strings.CutPrefix(line, "\t"); continued {
			if mine {
				entries[len(entries)-1] += "\n" + rest
			}
			continue
		}
		var entry string
		_, entry, mine = strings.Cut(line, "] {"+d.Name+"} ")
		if mine {
			entries = append(entries, entry)
		}
	}
	return entries
}

var statement = regexp.MustCompile(`(?s)^LOG:  (?:statement|execute [^:]*): (.*)$`)

// Statements returns the text of every statement that was executed in the database, in order.
func (d *Database) Statements() []string {
	var texts []string
	for _, entry := range d.Log() {
		if m := statement.FindStringSubmatch(entry); m != nil {
			texts = append(texts, m[1])
		}
	}
	return texts
}

// Sessions returns how many sessions the database has had, those that have ended included.
func (d *Database) Sessions() int {
	n := 0
	for _, entry := range d.Log() {
		if strings.HasPrefix(entry, "LOG:  connection authorized: ") {
			n++
		}
	}
	return n
}

// environment is the environment of PostgreSQL's programs: the test's without what would change them.
func environment(home string) []string {
	vars := map[string]string{}
	for _, v := range os.Environ() {
		name, value, _ := strings.Cut(v, "=")
		if !strings.HasPrefix(name, "PG") && !strings.HasPrefix(name, "LC_") && name != "LANG" && name != "LANGUAGE" {
			vars[name] = value
		}
	}
	vars["HOME"], vars["LC_ALL"] = home, "C"
	vars["PATH"] += string(filepath.ListSeparator) + "/usr/bin" + string(filepath.ListSeparator) + "/bin" // for the guard's own needs
	env := make([]string, 0, len(vars))
	for _, name := range slices.Sorted(maps.Keys(vars)) {
		env = append(env, name+"="+vars[name])
	}
	return env
}
