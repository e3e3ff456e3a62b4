package crdbdrain

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func pgError(code, message string) error { return &pgconn.PgError{Code: code, Message: message} }

func TestDenial(t *testing.T) {
	const restricted = "Access to crdb_internal and system is restricted."
	for _, tt := range []struct {
		name   string
		source sourceID
		err    error
		want   string // "" is not denied
	}{
		{"D02 v26.1", sourceInstances, pgError("42501", restricted), "the server restricts crdb_internal and system: set crdbdrain_unsafe_internals=on to let the watchdog's own connection use allow_unsafe_internals, or use crdbdrain_readiness"},
		{"D02 v26.1", sourceGossip, pgError("42501", restricted), "the server restricts crdb_internal and system: set crdbdrain_unsafe_internals=on to let the watchdog's own connection use allow_unsafe_internals, or use crdbdrain_readiness"},
		{"D03 instances", sourceInstances, pgError("42501", "user app does not have SELECT privilege on relation sql_instances"), "the role may not read system.sql_instances: GRANT SYSTEM VIEWSYSTEMTABLE TO the role (v23.2 and later; before, admin)"},
		{"D03 gossip", sourceGossip, pgError("42501", "user app does not have VIEWCLUSTERMETADATA system privilege"), "the role may not read crdb_internal.gossip_liveness: GRANT SYSTEM VIEWCLUSTERMETADATA TO the role (v23.2 and later; before, admin)"},
		{"D03 up to v23.1", sourceGossip, pgError("42501", "only users with the admin role are allowed to read crdb_internal.gossip_liveness"), "the role may not read crdb_internal.gossip_liveness: GRANT SYSTEM VIEWCLUSTERMETADATA TO the role (v23.2 and later; before, admin)"},
		{"D04", sourceGossip, pgError("0A000", "operation is unsupported within a virtual cluster"), "not available in a virtual cluster: use crdbdrain_readiness or rely on errors"},
		{"D04 older", sourceGossip, pgError("0A000", "unimplemented: operation is unsupported in multi-tenancy mode"), "not available in a virtual cluster: use crdbdrain_readiness or rely on errors"},
		{"42P01", sourceInstances, pgError("42P01", `relation "system.sql_instances" does not exist`), "this server does not have the table"},
		{"3F000", sourceGossip, pgError("3F000", `schema "crdb_internal" does not exist`), "this server does not have the table"},
		{"42883", sourceGossip, pgError("42883", "unknown function"), "this server does not have the table"},
		{"42703", sourceInstances, pgError("42703", `column "is_draining" does not exist`), "this server's version does not have the column yet (is_draining: v24.3)"},
		{"wrapped", sourceInstances, fmt.Errorf("connect: %w", pgError("42P01", "")), "this server does not have the table"},

		{"no error", sourceGossip, nil, ""},
		{"0A000 of another kind", sourceInstances, pgError("0A000", "cached plan must not change result type"), ""},
		{"28P01", sourceInstances, pgError("28P01", "password authentication failed"), ""},
		{"syntax", sourceInstances, pgError("42601", "at or near"), ""},
	} {
		reason, denied := denial(tt.source, tt.err)
		if reason != tt.want || denied != (tt.want != "") {
			t.Errorf("%s: denial = %q, %v; want %q", tt.name, reason, denied, tt.want)
		}
	}
}

// transient is D07's list: errors that pass.
var transient = map[string]error{
	"40001":         pgError("40001", "restart transaction"),
	"57014":         pgError("57014", "query execution canceled due to statement timeout"),
	"57P01":         pgError("57P01", noticeShuttingDown),
	"57P01 refused": pgError("57P01", noticeNotAcceptingClients),
	"53300":         pgError("53300", "sorry, too many clients already"),
	"08006":         pgError("08006", "connection failure"),
	"25P02":         pgError("25P02", "current transaction is aborted"),
	"55000":         pgError("55000", "object not in prerequisite state"),
	"XXUUU":         pgError("XXUUU", "something"),
	"EOF":           io.EOF,
	"cut":           fmt.Errorf("read: %w", io.ErrUnexpectedEOF),
	"deadline":      context.DeadlineExceeded,
	"cancelled":     context.Canceled,
	"net timeout":   &net.OpError{Op: "read", Net: "tcp", Err: os.ErrDeadlineExceeded},
	"reset":         &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET},
	"refused":       fmt.Errorf("connect: %w", &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}),
	"empty":         errEmpty,
}

func TestD07TransientErrorsAreNoDenial(t *testing.T) {
	for name, err := range transient {
		for _, id := range []sourceID{sourceInstances, sourceGossip, sourceReadiness} {
			if reason, denied := denial(id, err); denied {
				t.Errorf("%s latches %s off: %s", name, id, reason)
			}
		}
	}
}

func TestIsGoodbye(t *testing.T) {
	for _, tt := range []struct {
		code, message string
		want          bool
	}{
		{"57P01", "server is shutting down", true},
		{"57P01", "server is not accepting clients, try another node", true},
		{"57P01", "terminating connection due to administrator command", false}, // PostgreSQL
		{"57P01", "terminating connection due to idle timeout", false},          // a proxy
		{"57P01", "", false},
		{"57P01", "Server is shutting down", false},
		{"57014", "server is shutting down", false},
		{"", "", false},
	} {
		if got := isGoodbye(tt.code, tt.message); got != tt.want {
			t.Errorf("isGoodbye(%q, %q) = %v", tt.code, tt.message, got)
		}
	}
}

func TestIsRefusal(t *testing.T) {
	refused := pgError("57P01", noticeNotAcceptingClients)
	other := pgError("28P01", "password authentication failed")
	for _, tt := range []struct {
		name string
		err  error
		want bool
	}{
		{"nil", nil, false},
		{"alone", refused, true},
		{"wrapped", fmt.Errorf("server error: %w", refused), true},
		{"of two hosts, the second", fmt.Errorf("failed to connect: %w", errors.Join(other, fmt.Errorf("h2: %w", refused))), true},
		{"of two hosts, behind a dial error", errors.Join(syscall.ECONNREFUSED, refused), true},
		{"another error", other, false},
		{"another 57P01", pgError("57P01", "terminating connection due to administrator command"), false},
		{"closed", io.ErrUnexpectedEOF, false},
	} {
		if got := isRefusal(tt.err); got != tt.want {
			t.Errorf("%s: isRefusal = %v", tt.name, got)
		}
	}
}

func TestSQLState(t *testing.T) {
	for want, err := range map[string]error{
		"40001": fmt.Errorf("a: %w", fmt.Errorf("b: %w", pgError("40001", ""))),
		"":      io.EOF,
		"57P01": errors.Join(io.EOF, pgError("57P01", "")),
	} {
		if got := sqlState(err); got != want {
			t.Errorf("sqlState(%v) = %q, want %q", err, got, want)
		}
	}
	if got := sqlState(nil); got != "" {
		t.Errorf("sqlState(nil) = %q", got)
	}
}

// What a server says cannot forge a line of the log or fill it.
func TestRedactKeepsOneShortLine(t *testing.T) {
	got := redact(fmt.Errorf("a\nlevel=ERROR msg=forged\r\tb %s", strings.Repeat("x", 5000)))
	if strings.ContainsAny(got, "\n\r\t") || len(got) > 512 || !strings.HasPrefix(got, "a level=ERROR msg=forged b xxx") {
		t.Errorf("%d bytes: %q", len(got), got)
	}
}
