package main

import (
	"bytes"
	"encoding/json"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/crdbdrain/crdbdrain"
	"github.com/crdbdrain/crdbdrain/crdbdraintest"
	"github.com/crdbdrain/crdbdrain/internal/pgtest"
)

// windowed is a cluster whose settings leave a window.
func windowed(t *testing.T, cfg crdbdraintest.Config) *crdbdraintest.Cluster {
	t.Helper()
	cfg.Settings = crdbdraintest.Settings{InitialWait: 300 * time.Millisecond, ConnectionsTimeout: 20 * time.Second, TransactionsTimeout: 10 * time.Second}
	c := crdbdraintest.Start(cfg)
	t.Cleanup(c.Close)
	return c
}

// The exit status and the text, for scripts and for people.
func TestCheckCommand(t *testing.T) {
	plain := windowed(t, crdbdraintest.Config{})
	admin := windowed(t, crdbdraintest.Config{})
	admin.Grant("app", "admin")
	locked := windowed(t, crdbdraintest.Config{Password: "s3cret"})
	proxied := windowed(t, crdbdraintest.Config{Faults: crdbdraintest.Faults{PID: func(int) uint32 { return 0x0a140304 }}})
	proxied.Grant("app", "admin")
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	for _, tt := range []struct {
		name, dsn string
		status    int
		text      []string // parts of it, on one line each
	}{
		{"privileged", admin.DSN(), exitOK, []string{
			"verdict   ok: all that is configured works",
			"source    instances  ok       nodes 1, 2, 3",
			"stamp     holds: BackendKeyData tells a connection's node",
			"window    20.3s: initial_wait 300ms + connections.timeout 20s; then",
			"ADVICE",
		}},
		{"without privileges", plain.DSN(), exitLimited, []string{
			"verdict   limited: it connects, but see PROBLEMS",
			"source    instances  denied   the role may not read system.sql_instances",
			"-> GRANT SYSTEM VIEWSYSTEMTABLE TO app",
			"source    gossip     denied   the role may not read",
			"window    not known: the role may not see the server's settings",
			"PROBLEMS",
			"  - no early source works",
		}},
		{"readiness", plain.DSN() + "&crdbdrain_readiness=" + plain.ReadinessURLs(), exitOK, []string{
			"verdict   ok: all that is configured works; whether the server leaves a window",
			"source    readiness  ok       nodes 1, 2, 3",
			plain.Node(1).HTTPURL() + "  ready, node 1",
		}},
		{"a proxy", proxied.DSN(), exitOK, []string{"stamp     asked: BackendKeyData says node 161, SHOW node_id says", "a proxy or pooler is in the path"}},
		{"nobody there", "postgres://app:s3cret@" + closed.Addr().String() + "/db?sslmode=disable", exitFailed, []string{
			"verdict   failed: it does not connect", "server    not known", "-> nothing listens there: check host and port",
		}},
		{"a wrong password", strings.Replace(locked.DSN(), "s3cret", "s3cretx", 1), exitFailed, []string{"28P01", "-> the user or the password is wrong"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var stdout, stderr bytes.Buffer
			if status := run(t.Context(), []string{"check", tt.dsn}, &stdout, &stderr); status != tt.status || stderr.Len() > 0 {
				t.Errorf("exit status %d, want %d; %s", status, tt.status, &stderr)
			}
			for _, want := range tt.text {
				if !strings.Contains(stdout.String(), want) {
					t.Errorf("no %q in\n%s", want, &stdout)
				}
			}
			if strings.Contains(stdout.String(), "s3cret") {
				t.Errorf("the password is in\n%s", &stdout)
			}
			for line := range strings.Lines(stdout.String()) {
				if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > textWidth && strings.Count(strings.TrimSpace(line), " ") > 4 {
					t.Errorf("a line of %d characters: %s", n, line)
				}
			}
			var again bytes.Buffer
			if status := run(t.Context(), []string{"check", "-json", tt.dsn}, &again, &stderr); status != tt.status {
				t.Errorf("-json: exit status %d, want %d", status, tt.status)
			}
			var r crdbdrain.CheckReport
			d := json.NewDecoder(&again)
			d.DisallowUnknownFields()
			if err := d.Decode(&r); err != nil || len(r.Sources) != 5 || len(r.Hosts) != 1 {
				t.Errorf("-json: %v, %+v", err, r)
			}
		})
	}
}

// On PostgreSQL there is nothing to check but that.
func TestCheckCommandOnPostgres(t *testing.T) {
	t.Parallel()
	db := pgtest.Shared(t).CreateDatabase(t)
	var stdout, stderr bytes.Buffer
	if status := run(t.Context(), []string{"check", db.DSN()}, &stdout, &stderr); status != exitLimited {
		t.Errorf("exit status %d, want %d; %s", status, exitLimited, &stderr)
	}
	for _, want := range []string{"server    PostgreSQL ", "this is PostgreSQL: the driver is plain pgx here"} {
		if !strings.Contains(stdout.String(), want) {
			t.Errorf("no %q in\n%s", want, &stdout)
		}
	}
	stdout.Reset()
	status := run(t.Context(), []string{"watch", db.DSN()}, &stdout, &stderr)
	if want := "crdbdrain: there is nothing to watch: this is PostgreSQL"; status != exitFailed || !strings.HasPrefix(stderr.String(), want) {
		t.Errorf("watch: exit status %d, %q, want %d, %q", status, &stderr, exitFailed, want)
	}
}

// A DSN can be given on standard input, where no other user sees it.
func TestCheckReadsTheDSN(t *testing.T) {
	c := windowed(t, crdbdraintest.Config{})
	defer func(r interface{ Read([]byte) (int, error) }) { stdin = r }(stdin)
	for text, want := range map[string]int{c.DSN() + "\n": exitLimited, "": exitUsage, c.DSN() + "\n" + c.DSN(): exitUsage, c.DSN() + strings.Repeat(" ", 64<<10) + "x": exitUsage} {
		stdin = strings.NewReader(text)
		var stdout, stderr bytes.Buffer
		if status := run(t.Context(), []string{"check", "-"}, &stdout, &stderr); status != want {
			t.Errorf("%.200q: exit status %d, want %d; %s", text, status, want, &stderr)
		}
	}
}
