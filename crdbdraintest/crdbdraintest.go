// Package crdbdraintest is a simulated CockroachDB cluster for tests, in the
// spirit of net/http/httptest: real sockets, PostgreSQL's protocol, and drains
// in the order in which the real server does them.
//
//	cluster := crdbdraintest.Start(crdbdraintest.Config{})
//	defer cluster.Close()
//
//	db, err := sql.Open("crdbdrain", cluster.DSN())
//	...
//	for _, node := range cluster.Nodes() { // a rolling restart under load
//		node.Restart(ctx)
//	}
//
// # What is real
//
// The order of a drain is CockroachDB's (pkg/server/drain.go, the same from
// v2.0 to v26.3). [Step] names its steps. A drain finishes with the SQL clients
// before it tells the rest of the cluster, so that gossip's draining flag is
// the last sign of it, not the first:
//
//	        │ sql_instances │ readiness │ new          │ idle         │ busy                │ gossip
//	step    │ .is_draining  │           │ connections  │ connections  │ connections         │ draining
//	────────┼───────────────┼───────────┼──────────────┼──────────────┼─────────────────────┼─────────
//	0       │ true          │ 200       │ accepted     │ untouched    │ untouched           │ false
//	1       │ true          │ 503       │ accepted     │ untouched    │ untouched           │ false
//	2, 2b   │ true          │ 503       │ 57P01        │ untouched    │ untouched           │ false
//	3       │ true          │ 503       │ 57P01        │ 57P01, close │ 57P01 when they end │ false
//	3b      │ true          │ 503       │ 57P01        │              │ 57014, 57P01, close │ false
//	4       │ row gone      │ 503       │ 57P01        │              │                     │ false
//	5       │ row gone      │ 503       │ 57P01        │              │                     │ true
//
// Real as well: node IDs in BackendKeyData, the parameter crdb_version, SHOW
// node_id, the tables that say which nodes drain with their privileges and
// error texts by version, the readiness endpoint and the node_id gauge over
// HTTP, CancelRequest, transaction state, the simple and the extended protocol.
//
// # What is not
//
// There is no database behind it. The nodes understand literals, parameters, a
// little arithmetic, pg_sleep, transactions, session variables, the source
// tables, and COPY; any INSERT, UPDATE, UPSERT or DELETE succeeds and touches
// one row. [Config.Handler] answers everything else. Leases, ranges and the
// time that moving them takes do not exist: steps 4 and 5 take no time.
//
// # Virtual time
//
// With [Config.Memory] the cluster uses no sockets, and can live in a bubble of
// testing/synctest: start and close it inside the bubble, give [Cluster.Dial] to
// pgx as DialFunc, and a drain of minutes takes milliseconds.
package crdbdraintest

import (
	"context"
	"crypto/tls"
	"maps"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Config describes a cluster. The zero value is a useful one: three nodes of
// v25.2.0 with the server's default settings, on loopback sockets, without TLS.
type Config struct {
	// Nodes is the number of nodes, 3 if zero. Their IDs begin with 1.
	Nodes int

	// Version is the CockroachDB version of every node, "v25.2.0" if empty. It
	// decides what BackendKeyData holds (nothing before v22.1), which columns and
	// settings exist, which privileges the tables want, whether internals are
	// restricted (v26.1), and the texts of errors. See Node.SetVersion.
	Version string

	// Settings are the cluster's drain timeouts. If the whole value is zero, it
	// means DefaultSettings(); Cluster.SetSettings takes zeros literally.
	Settings Settings

	// TLS makes the nodes answer SSLRequest with 'S' and serve readiness over
	// HTTPS. The DSNs then say sslmode=require. Nil: 'N' and HTTP. Connections
	// without TLS are accepted either way.
	TLS *tls.Config

	// Password, if not empty, is asked of every user in clear text; a wrong one
	// is answered with 28P01.
	Password string

	// Handler sees every statement that a node executes, before the built-in
	// answer; nil means "answer it yourself". It is the statement running: it may
	// block, until Query.Context ends. It is called concurrently, one call per
	// connection at a time.
	Handler func(Query) *Result

	// Latency is the service time of each statement, 0 by default.
	Latency time.Duration

	// Virtual makes the nodes external SQL pods of a virtual cluster (CockroachDB
	// Cloud Basic and Standard): SHOW node_id is 0, crdb_internal.node_id() is
	// NULL, and the gossip tables answer 0A000.
	Virtual bool

	// Memory replaces sockets by buffered pipes in memory, which only
	// Cluster.Dial reaches. Addresses are made up (10.0.0.ID).
	Memory bool

	// LoadBalancer configures the load balancer behind Cluster.DSN.
	LoadBalancer LoadBalancerConfig

	// Faults is what every node does wrong; see Node.SetFaults.
	Faults Faults

	// OnStep is called when a node has entered a step of its drain, and the drain
	// waits for it. In Closing, every session has been told by then, and idle ones
	// are about to close. It is called with Serving when the node starts again or
	// its drain is cancelled. It must not wait for a method of the same node that
	// ends the drain.
	OnStep func(*Node, Step)
}

// Settings are the drain timeouts, cluster settings under server.shutdown.
type Settings struct {
	// InitialWait is server.shutdown.initial_wait: how long a node that is unready
	// still accepts connections. The server's default is 0s.
	InitialWait time.Duration
	// ConnectionsTimeout is server.shutdown.connections.timeout: how long a node
	// that refuses connections leaves the existing ones alone. It ends early when
	// none is left. The server's default is 0s.
	ConnectionsTimeout time.Duration
	// TransactionsTimeout is server.shutdown.transactions.timeout: how long busy
	// connections may run on after the idle ones have been closed. It ends early
	// when none is left. The server's default is 10s.
	TransactionsTimeout time.Duration
	// JobsTimeout is server.shutdown.jobs.timeout. It has an effect only where
	// changefeeds run on the node, so its zero value means that none does.
	JobsTimeout time.Duration
}

// DefaultSettings returns the server's defaults: 0s, 0s, 10s, and no
// changefeeds. There is no warning window with them.
func DefaultSettings() Settings {
	return Settings{TransactionsTimeout: 10 * time.Second}
}

// A Step is how far the drain of a node has come. Steps only go up, until the
// node starts again or its drain is cancelled.
type Step int

const (
	// Serving: no drain.
	Serving Step = iota
	// Announced is step 0: system.sql_instances.is_draining is true (v24.3+).
	Announced
	// Unready is step 1: readiness answers 503, connections are still accepted.
	Unready
	// Refusing is step 2: new connections are refused, the others left alone.
	Refusing
	// JobsWait is step 2b, which only exists with Settings.JobsTimeout.
	JobsWait
	// Closing is step 3: idle connections are closed, busy ones when they end. The
	// drain's request is in every session's queue when the step is entered.
	Closing
	// Cancelling is step 3b, the deadline. It is skipped when no session is left.
	Cancelling
	// Departed is step 4: the row in system.sql_instances is gone.
	Departed
	// Flagged is step 5: gossip says draining. The drain is complete.
	Flagged
)

var stepNames = [...]string{"serving", "announced", "unready", "refusing", "jobs wait", "closing", "cancelling", "departed", "flagged"}

// String returns the step's name in lower case.
func (s Step) String() string {
	if s < 0 || int(s) >= len(stepNames) {
		return "unknown step"
	}
	return stepNames[s]
}

// DrainResult says how a drain went.
type DrainResult struct {
	// Duration is that of the whole drain.
	Duration time.Duration
	// InitialWait, Connections, Jobs, Transactions and Rest are the durations of
	// steps 0–1, 2, 2b, 3 with 3b, and 4–5.
	InitialWait, Connections, Jobs, Transactions, Rest time.Duration
	// LostIdle and LostBusy are the connections that the drain closed: those that
	// were idle when step 3 began, and those that were executing or in a
	// transaction. Connections that left by themselves are not lost.
	LostIdle, LostBusy int
	// Err is nil if the drain completed: the context's error, or ErrUndrained.
	Err error
}

// Stats are counters of a node since it was created, restarts included, or
// their sum over the cluster.
type Stats struct {
	// Accepts is the number of connections accepted by the SQL listener,
	// CancelRequests among them.
	Accepts int
	// Refused is the number of startups refused with an error.
	Refused int
	// Open is the number of sessions now.
	Open int
	// LostIdle and LostBusy are those of all drains; see DrainResult.
	LostIdle, LostBusy int
	// Executed is the number of statements whose execution began; it is the sum
	// of Statements. A statement is either executed and counted or neither, also
	// when a drain begins at the same moment.
	Executed int
	// CancelRequests is the number of CancelRequests received.
	CancelRequests int
	// Statements counts executed statements by their text, as received. The
	// statements of one simple query count one by one, without the semicolons.
	Statements map[string]int
	// Parses counts Parse messages by their text.
	Parses map[string]int
	// Startups are the parameters of every StartupMessage, in order.
	Startups []map[string]string
	// Dials are the times of Accepts, in order.
	Dials []time.Time
}

func (s *Stats) add(o Stats) {
	s.Accepts += o.Accepts
	s.Refused += o.Refused
	s.Open += o.Open
	s.LostIdle += o.LostIdle
	s.LostBusy += o.LostBusy
	s.Executed += o.Executed
	s.CancelRequests += o.CancelRequests
	for k, v := range o.Statements {
		s.Statements[k] += v
	}
	for k, v := range o.Parses {
		s.Parses[k] += v
	}
	s.Startups = append(s.Startups, o.Startups...)
	s.Dials = append(s.Dials, o.Dials...)
}

func (s *Stats) clone() Stats {
	c := *s
	c.Statements = maps.Clone(s.Statements)
	c.Parses = maps.Clone(s.Parses)
	c.Startups = append([]map[string]string(nil), s.Startups...)
	c.Dials = append([]time.Time(nil), s.Dials...)
	return c
}

// A Query is a statement that a node is about to execute.
type Query struct {
	// SQL is the statement's text as received, without a final semicolon if it
	// was one of several in a simple query.
	SQL string
	// Args are the parameters, as int64, float64, bool, string, nil, or []byte
	// where the format is binary and the type none of these.
	Args []any
	// Node is the ID of the node that executes it.
	Node int
	// User, Database and ApplicationName are the session's.
	User, Database, ApplicationName string
	// InTx says that it is inside an explicit transaction.
	InTx bool

	ctx context.Context
}

// Context ends when the statement is cancelled (CancelRequest, the deadline of a
// drain, statement_timeout) or its session is gone. The answer is then 57014
// whatever the Handler returns.
func (q Query) Context() context.Context {
	if q.ctx == nil {
		return context.Background()
	}
	return q.ctx
}

// A Result is what a node answers to a statement.
type Result struct {
	// Columns are the names of the result's columns; none means that the
	// statement returns no rows. Types are inferred from the first value that is
	// not nil: int and int64 (INT8), bool, float64, time.Time, []byte, and string.
	//
	// In the extended protocol clients ask for the columns before they execute. A
	// node then describes the statement by its select list or RETURNING clause,
	// where an expression of unknown type is text unless it has a cast (id::INT8).
	Columns []string
	// Rows are the rows, each with one value per column.
	Rows [][]any
	// Tag is the command tag; if empty, "SELECT n", or what suits the statement.
	Tag string
	// Err, if not nil, is sent after the rows instead of the command tag. Severity
	// is ERROR unless set.
	Err *pgconn.PgError
	// End says what happens to the connection after that.
	End End
	// Unexecuted says that the session ends before the statement is executed,
	// which therefore is not counted: the drain's request came first. Nothing but
	// End is then looked at, with EndShutdown in place of Keep.
	Unexecuted bool
}

// An End is a way to end a connection.
type End int

const (
	// Keep does not end it.
	Keep End = iota
	// EndShutdown sends 57P01 "server is shutting down" and closes.
	EndShutdown
	// EndFIN closes without a word.
	EndFIN
	// EndRST resets.
	EndRST
)

// Faults are deviations from what a good node on a direct connection does. The
// zero value has none.
type Faults struct {
	// PID replaces the first integer of BackendKeyData, as a proxy does.
	PID func(nodeID int) uint32
	// HideVersion leaves the parameter crdb_version out, as a pooler does.
	HideVersion bool
	// Parameters are additional ParameterStatus messages at startup.
	Parameters map[string]string
	// Refuse, if not nil, answers every startup, before authentication or, if
	// RefuseAuthenticated is set, after it (53300 comes there).
	Refuse              *pgconn.PgError
	RefuseAuthenticated bool
	// Severity replaces ERROR in the 57P01 messages of a drain.
	Severity string
	// DrainEnd replaces the 57P01 at the end of a connection that a drain closes.
	DrainEnd End
	// Ping answers empty statements ("-- ping").
	Ping *Result
	// GossipLag delays what this node learns from gossip.
	GossipLag time.Duration
	// Source replaces the rows of a table ("system.sql_instances",
	// "crdb_internal.gossip_liveness", "crdb_internal.gossip_nodes") where it
	// does not return nil. It is called after the checks of privileges.
	Source func(table string) *Result
	// ReadinessStatus and ReadinessBody replace the answer of /health?ready=1
	// where the status is not 0.
	ReadinessStatus int
	ReadinessBody   string
	// Vars replaces the answer of /_status/vars where it is not empty.
	Vars string
}

// LoadBalancerConfig configures the load balancer.
type LoadBalancerConfig struct {
	// Interval is the time between two health checks of a node, 100ms if zero. A
	// check is a request to /health?ready=1, and fails after one interval.
	Interval time.Duration
	// Fall is the number of failed checks that take a node out, 2 if zero.
	Fall int
	// Rise is the number of successful checks that bring it back, 1 if zero.
	Rise int
}
