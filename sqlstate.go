package crdbdrain

import (
	"errors"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs that decide something here.
const (
	stateAdminShutdown        = "57P01"
	stateTooManyConnections   = "53300"
	stateInsufficientPrivs    = "42501"
	stateFeatureNotSupported  = "0A000"
	stateUndefinedTable       = "42P01"
	stateInvalidSchema        = "3F000"
	stateUndefinedFunction    = "42883"
	stateUndefinedColumn      = "42703"
	stateUndefinedObject      = "42704"
	noticeShuttingDown        = "server is shutting down"
	noticeNotAcceptingClients = "server is not accepting clients, try another node"
)

// isGoodbye reports whether a server's error is CockroachDB's own notice that this node drains: on an existing
// connection (it is then the connection's end, whatever its severity, which is ERROR: cockroachdb pkg/sql/pgwire,
// conn_executor.go) or on a new one. Other 57P01s, a proxy's idle timeout or PostgreSQL's administrator command, say
// nothing about a node.
func isGoodbye(code, message string) bool {
	return code == stateAdminShutdown && (message == noticeShuttingDown || message == noticeNotAcceptingClients)
}

// isRefusal reports whether err is a draining node's refusal of a new connection.
func isRefusal(err error) bool {
	var pgErr *pgconn.PgError
	for _, e := range flatten(err) {
		if errors.As(e, &pgErr) && isGoodbye(pgErr.Code, pgErr.Message) {
			return true
		}
	}
	return false
}

// flatten returns the errors that were joined into err: pgx joins one per host it tried, and errors.As stops at the
// first that fits the type.
func flatten(err error) []error {
	for e := err; e != nil; {
		if joined, ok := e.(interface{ Unwrap() []error }); ok {
			return joined.Unwrap()
		}
		e = errors.Unwrap(e)
	}
	return []error{err}
}

// sqlState returns the SQLSTATE in err's chain, or "".
func sqlState(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// denial explains an error of a SQL source that repeating the question will not change, and names the remedy. ok is
// false for everything else: timeouts, shutdowns, serialization failures, a full server, a lost connection. Those are
// tried again.
func denial(id sourceID, err error) (reason string, ok bool) {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return "", false
	}
	switch pgErr.Code {
	case stateInsufficientPrivs:
		switch {
		case strings.Contains(pgErr.Message, "crdb_internal and system is restricted"):
			// v26.1 and later, for every role, admin and root included.
			return "the server restricts crdb_internal and system: set " + keyPrefix + "unsafe_internals=on to let the watchdog's own connection use allow_unsafe_internals, or use " + keyPrefix + "readiness", true
		case id == sourceInstances:
			return "the role may not read system.sql_instances: GRANT SYSTEM VIEWSYSTEMTABLE TO the role (v23.2 and later; before, admin)", true
		default:
			return "the role may not read crdb_internal.gossip_liveness: GRANT SYSTEM VIEWCLUSTERMETADATA TO the role (v23.2 and later; before, admin)", true
		}
	case stateFeatureNotSupported:
		// The same SQLSTATE stands for "cached plan must not change result type" and other passing conditions.
		if strings.Contains(pgErr.Message, "virtual cluster") || strings.Contains(pgErr.Message, "multi-tenancy") {
			return "not available in a virtual cluster: use " + keyPrefix + "readiness or rely on errors", true
		}
	case stateUndefinedTable, stateInvalidSchema, stateUndefinedFunction:
		return "this server does not have the table", true
	case stateUndefinedColumn:
		return "this server's version does not have the column yet (is_draining: v24.3)", true
	}
	return "", false
}
