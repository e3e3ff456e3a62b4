package crdbdraintest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// outcome is what a statement answers.
type outcome struct {
	cols  []column // nil: no rows. Not set in the extended protocol, where Describe said it
	rows  [][]any
	tag   string
	empty bool // EmptyQueryResponse
	err   *pgconn.PgError
	end   End
}

var errAborted = &pgconn.PgError{Code: "25P02", Message: "current transaction is aborted, commands ignored until end of transaction block"}

// execute executes a statement. The error is a *pgconn.PgError, which is the
// statement's answer, or errEnd.
func (s *session) execute(st *stmt, args []any, described []column) (outcome, error) {
	if s.tx == 'E' && !st.endsTx() && st.kind != kindEmpty {
		return outcome{}, errAborted
	}
	s.n.count(func(t *Stats) {
		t.Executed++
		t.Statements[st.text]++
	})
	cfg := &s.n.c.cfg
	timeout := s.statementTimeout()
	ctx := s.ctx
	if cfg.Handler != nil || cfg.Latency > 0 || st.sleeps || timeout > 0 {
		var cancel context.CancelCauseFunc
		ctx, cancel = context.WithCancelCause(s.ctx)
		s.mu.Lock()
		s.cancelStmt = cancel
		if s.cancelled {
			cancel(errQueryCanceled)
		}
		s.mu.Unlock()
		defer func() {
			s.mu.Lock()
			s.cancelStmt = nil
			s.mu.Unlock()
			cancel(nil)
		}()
		if timeout > 0 {
			t := time.AfterFunc(timeout, func() { cancel(errStmtTimeout) })
			defer t.Stop()
		}
	}
	if cfg.Latency > 0 {
		sleep(ctx, cfg.Latency)
	}
	var res *Result
	if cfg.Handler != nil && ctx.Err() == nil {
		res = cfg.Handler(Query{
			SQL: st.text, Args: args, Node: s.n.id, User: s.user, Database: s.database,
			ApplicationName: s.vars["application_name"], InTx: s.tx != 'I', ctx: ctx,
		})
	}
	if res == nil && st.kind == kindEmpty {
		res = s.n.faults.Load().Ping
	}
	var out outcome
	var err error
	if res == nil && ctx.Err() == nil {
		out, err = s.builtin(ctx, st, args, described)
	}
	if cause := context.Cause(ctx); cause != nil {
		pe, ok := errors.AsType[*pgconn.PgError](cause)
		if !ok {
			return outcome{}, errEnd // the connection was cut
		}
		return outcome{}, pe
	}
	if res != nil {
		return s.fromHandler(ctx, st, args, described, res)
	}
	return out, err
}

// fromHandler turns the Handler's result into the answer.
func (s *session) fromHandler(ctx context.Context, st *stmt, args []any, described []column, res *Result) (outcome, error) {
	if res.Unexecuted {
		s.n.count(func(t *Stats) {
			t.Executed--
			if t.Statements[st.text]--; t.Statements[st.text] == 0 {
				delete(t.Statements, st.text)
			}
		})
		end := res.End
		if end == Keep {
			end = EndShutdown
		}
		s.end(end)
		return outcome{}, errEnd
	}
	out := outcome{rows: res.Rows, tag: res.Tag, err: res.Err, end: res.End}
	if described == nil && len(res.Columns) > 0 {
		out.cols = resultColumns(res)
	}
	if res.Err != nil {
		if st.kind == kindCommit {
			s.setTx('I') // a transaction whose COMMIT failed is over
		}
		return out, nil
	}
	if res.End != Keep {
		return out, nil // with a tag only where the Handler set one
	}
	if st.controls() { // the answer is the Handler's, the session's state is ours
		own, err := s.builtin(ctx, st, args, described)
		if err != nil {
			return outcome{}, err
		}
		if out.tag == "" {
			out.tag = own.tag
		}
	}
	if out.tag == "" {
		switch {
		case st.tag != "" && st.kind != kindSelect:
			out.tag = st.tag
		case st.kind == kindEmpty && len(res.Columns) == 0:
			out.empty = true
		default:
			out.tag = "SELECT " + strconv.Itoa(len(res.Rows))
		}
	}
	return out, nil
}

func resultColumns(res *Result) []column {
	cols := make([]column, len(res.Columns))
	for i, name := range res.Columns {
		cols[i] = column{name: name, oid: oidText}
		for _, r := range res.Rows {
			if i < len(r) && r[i] != nil {
				cols[i].oid = typeOf(r[i])
				break
			}
		}
	}
	return cols
}

// builtin is the answer of a node without a Handler.
func (s *session) builtin(ctx context.Context, st *stmt, args []any, described []column) (outcome, error) {
	one := func(name string, oid uint32, v any) (outcome, error) {
		o := outcome{rows: [][]any{{v}}, tag: "SHOW 1"}
		if described == nil {
			o.cols = []column{{name, oid}}
		}
		return o, nil
	}
	switch st.kind {
	case kindEmpty:
		return outcome{empty: true}, nil
	case kindBegin:
		if s.tx != 'I' {
			return outcome{}, &pgconn.PgError{Code: "25001", Message: "there is already a transaction in progress"}
		}
		s.setTx('T')
		return outcome{tag: st.tag}, nil
	case kindCommit:
		tag := "COMMIT"
		switch s.tx {
		case 'I':
			return outcome{}, &pgconn.PgError{Code: "25P01", Message: "there is no transaction in progress"}
		case 'E':
			tag = "ROLLBACK"
		}
		s.setTx('I')
		return outcome{tag: tag}, nil
	case kindRollback:
		if s.tx == 'I' {
			return outcome{}, &pgconn.PgError{Code: "25P01", Message: "there is no transaction in progress"}
		}
		s.setTx('I')
		return outcome{tag: "ROLLBACK"}, nil
	case kindSavepoint, kindRollbackTo, kindRelease:
		if s.tx == 'I' {
			return outcome{}, &pgconn.PgError{Code: "25P01", Message: "there is no transaction in progress"}
		}
		if st.kind == kindRollbackTo {
			s.setTx('T')
		}
		return outcome{tag: st.tag}, nil
	case kindSet:
		err := s.set(st.name, st.value)
		if err == nil && st.name == "application_name" {
			s.send(&pgproto3.ParameterStatus{Name: st.name, Value: st.value})
		}
		return outcome{tag: st.tag}, err
	case kindReset:
		delete(s.vars, st.name)
		return outcome{tag: st.tag}, nil
	case kindDiscard:
		s.vars, s.stmts, s.portals = nil, nil, nil
		return outcome{tag: st.tag}, nil
	case kindDeallocate:
		if st.name == "all" {
			clear(s.stmts)
		} else {
			delete(s.stmts, st.name)
		}
		return outcome{tag: st.tag}, nil
	case kindShow:
		v, err := s.show(st.name)
		if err != nil {
			return outcome{}, err
		}
		return one(st.name, oidText, v)
	case kindShowSetting:
		d, err := s.clusterSetting(st.name)
		if err != nil {
			return outcome{}, err
		}
		return one(st.name, oidInterval, d)
	case kindCopyIn:
		return s.copyIn()
	case kindCopyOut:
		return s.copyOut(), nil
	case kindDML:
		out := outcome{tag: st.tag}
		if len(st.list) > 0 {
			row := make([]any, len(st.list))
			for i, c := range st.list {
				row[i] = convert(c.oid, "1")
			}
			out.rows = [][]any{row}
			if described == nil {
				out.cols = st.list
			}
		}
		return out, nil
	case kindDDL:
		return outcome{tag: st.tag}, nil
	case kindSelect:
		if st.err != nil {
			return outcome{}, st.err
		}
		return s.selectRows(ctx, st.sel, args, described)
	}
	return outcome{}, st.syntaxError()
}

// columns returns the columns of a statement's result, nil if it has none.
func (s *session) columns(st *stmt, params []uint32) ([]column, error) {
	switch st.kind {
	case kindShow:
		if _, err := s.show(st.name); err != nil {
			return nil, err
		}
		return []column{{st.name, oidText}}, nil
	case kindShowSetting:
		if _, err := s.clusterSetting(st.name); err != nil {
			return nil, err
		}
		return []column{{st.name, oidInterval}}, nil
	case kindDML:
		return st.list, nil
	case kindSelect:
		err := st.err
		if err == nil {
			var cols []column
			if cols, err = s.selectColumns(st.sel, params); err == nil {
				return cols, nil
			}
		}
		if s.n.c.cfg.Handler != nil && (err.Code == "42P01" || err.Code == "42601" || err.Code == "42883") {
			return st.list, nil // the Handler may know it
		}
		return nil, err
	case kindOther:
		if s.n.c.cfg.Handler == nil {
			return nil, st.syntaxError()
		}
	}
	return nil, nil
}

// Session variables.

var sessionVars = map[string]string{
	"application_name": "", "bytea_output": "hex", "client_encoding": "UTF8", "client_min_messages": "notice",
	"cost_scans_with_default_col_size": "off", "database": "defaultdb", "datestyle": "ISO, MDY",
	"default_transaction_isolation": "serializable", "default_transaction_priority": "normal",
	"default_transaction_quality_of_service": "regular", "default_transaction_read_only": "off",
	"default_transaction_use_follower_reads": "off", "extra_float_digits": "1", "idle_in_session_timeout": "0",
	"idle_in_transaction_session_timeout": "0", "idle_session_timeout": "0", "intervalstyle": "postgres", "is_superuser": "off",
	"lock_timeout": "0", "max_identifier_length": "128", "role": "none", "search_path": `"$user", public`,
	"serial_normalization": "rowid", "server_encoding": "UTF8", "server_version": "13.0.0", "server_version_num": "130000",
	"standard_conforming_strings": "on", "statement_timeout": "0", "synchronous_commit": "on", "timezone": "UTC",
	"tracing": "off", "transaction_isolation": "serializable", "transaction_priority": "normal", "transaction_read_only": "off",
	"transaction_timeout": "0",
}

// setVars takes the startup parameters over. Unknown ones are ignored, as by the
// server; "options" holds more of them.
func (s *session) setVars(params map[string]string) {
	fields := strings.Fields(params["options"])
	for i := 0; i < len(fields); i++ {
		f := fields[i]
		if f == "-c" && i+1 < len(fields) {
			i++
			f = "-c" + fields[i]
		}
		name, value, ok := strings.Cut(strings.TrimLeft(strings.TrimPrefix(f, "-c"), "-"), "=")
		if ok {
			_ = s.set(strings.ToLower(name), value)
		}
	}
	for name, value := range params {
		switch name {
		case "user", "database", "options":
		default:
			_ = s.set(strings.ToLower(name), value)
		}
	}
}

func unknownVar(name string) *pgconn.PgError {
	return &pgconn.PgError{Code: "42704", Message: fmt.Sprintf("unrecognized configuration parameter %q", name)}
}

func (s *session) set(name, value string) error {
	if name == "allow_unsafe_internals" {
		if !s.version.atLeast(25, 4) {
			return unknownVar(name)
		}
		switch strings.ToLower(value) {
		case "on", "true", "yes", "1", "t":
			value = "on"
		case "off", "false", "no", "0", "f":
			value = "off"
		default:
			return &pgconn.PgError{Code: "22023", Message: fmt.Sprintf("parameter %q requires a Boolean value", name)}
		}
	} else if _, ok := sessionVars[name]; !ok && !strings.Contains(name, ".") && name != "transaction" && name != "session" {
		return unknownVar(name)
	}
	if s.vars == nil {
		s.vars = map[string]string{}
	}
	s.vars[name] = value
	return nil
}

func (s *session) show(name string) (string, error) {
	switch name {
	case "node_id":
		if s.n.c.cfg.Virtual {
			return "0", nil
		}
		return strconv.Itoa(s.n.id), nil
	case "session_id":
		return s.id, nil
	case "crdb_version":
		return s.version.long(), nil
	case "session_user":
		return s.user, nil
	case "allow_unsafe_internals":
		if !s.version.atLeast(25, 4) {
			return "", unknownVar(name)
		}
		if s.unsafeInternals() {
			return "on", nil
		}
		return "off", nil
	}
	if v, ok := s.vars[name]; ok {
		return v, nil
	}
	if v, ok := sessionVars[name]; ok {
		return v, nil
	}
	return "", unknownVar(name)
}

// unsafeInternals reports whether crdb_internal and system are open: always
// before v25.4, by default before v26.1.
func (s *session) unsafeInternals() bool {
	if !s.version.atLeast(25, 4) {
		return true
	}
	if v, ok := s.vars["allow_unsafe_internals"]; ok {
		return v == "on"
	}
	return !s.version.atLeast(26, 1)
}

// statementTimeout is the session's statement_timeout; a bare number is in
// milliseconds.
func (s *session) statementTimeout() time.Duration {
	v := strings.ReplaceAll(s.vars["statement_timeout"], " ", "")
	if v == "" {
		return 0
	}
	if ms, err := strconv.Atoi(v); err == nil {
		return time.Duration(ms) * time.Millisecond
	}
	d, _ := time.ParseDuration(v)
	return d
}

// clusterSetting answers SHOW CLUSTER SETTING. Names: renamed in v23.2, the old
// ones still accepted; connection_wait since v22.1.
func (s *session) clusterSetting(name string) (time.Duration, error) {
	if !s.n.c.granted(s.user, "VIEWCLUSTERSETTING", "MODIFYCLUSTERSETTING") {
		return 0, &pgconn.PgError{Code: "42501", Message: fmt.Sprintf("only users with MODIFYCLUSTERSETTING or VIEWCLUSTERSETTING privileges are allowed to show cluster setting '%s'", name)}
	}
	set := s.n.c.currentSettings()
	since := [2]int{23, 2}
	var d time.Duration
	switch name {
	case "server.shutdown.initial_wait":
		d = set.InitialWait
	case "server.shutdown.connections.timeout":
		d = set.ConnectionsTimeout
	case "server.shutdown.transactions.timeout":
		d = set.TransactionsTimeout
	case "server.shutdown.jobs.timeout":
		if d = set.JobsTimeout; d == 0 {
			d = 10 * time.Second
		}
	case "server.shutdown.lease_transfer_iteration.timeout":
		d = 5 * time.Second
	case "server.shutdown.drain_wait":
		d, since = set.InitialWait, [2]int{}
	case "server.shutdown.connection_wait":
		d, since = set.ConnectionsTimeout, [2]int{22, 1}
	case "server.shutdown.query_wait":
		d, since = set.TransactionsTimeout, [2]int{}
	case "server.shutdown.jobs_wait":
		if d, since = set.JobsTimeout, [2]int{}; d == 0 {
			d = 10 * time.Second
		}
	case "server.shutdown.lease_transfer_wait":
		d, since = 5*time.Second, [2]int{}
	default:
		since = [2]int{1 << 30, 0}
	}
	if !s.version.atLeast(since[0], since[1]) {
		return 0, &pgconn.PgError{Code: "XXUUU", Message: fmt.Sprintf("unknown setting: %q", name)}
	}
	return d, nil
}

// restricted is the gate in front of crdb_internal and system, for admins too.
func (s *session) restricted() *pgconn.PgError {
	if s.unsafeInternals() {
		return nil
	}
	return &pgconn.PgError{
		Code:    "42501",
		Message: "Access to crdb_internal and system is restricted.",
		Hint:    "These interfaces are unsupported in production applications. To proceed, set the session variable allow_unsafe_internals = true.",
	}
}

// table is a source table as a session sees it.
type table struct {
	cols []column
	rows [][]any
}

// source returns a table: section "who is draining" of the server's facts.
func (s *session) source(name string) (table, *pgconn.PgError) {
	var t table
	schema, _, _ := strings.Cut(name, ".")
	if schema != "system" && schema != "crdb_internal" {
		return t, &pgconn.PgError{Code: "42P01", Message: fmt.Sprintf("relation %q does not exist", name)}
	}
	if err := s.restricted(); err != nil {
		return t, err
	}
	c := s.n.c
	switch name {
	case "system.sql_instances":
		privileges := []string{"VIEWSYSTEMTABLE"}
		if !s.version.atLeast(23, 2) {
			privileges = nil
		}
		if !c.granted(s.user, privileges...) {
			return t, &pgconn.PgError{Code: "42501", Message: fmt.Sprintf("user %s does not have SELECT privilege on relation sql_instances", s.user)}
		}
		if !s.version.atLeast(22, 1) {
			return t, &pgconn.PgError{Code: "42P01", Message: fmt.Sprintf("relation %q does not exist", name)}
		}
		t.cols = []column{{"id", oidInt8}, {"addr", oidText}, {"session_id", oidBytes}, {"locality", oidText}, {"sql_addr", oidText}, {"crdb_region", oidBytes}, {"binary_version", oidText}}
		draining := s.version.atLeast(24, 3)
		if draining {
			t.cols = append(t.cols, column{"is_draining", oidBool})
		}
		for _, r := range c.instances() {
			row := []any{r.id, r.addr, []byte(fmt.Sprintf("session-%d", r.id)), nil, r.addr, []byte{0x80}, r.version}
			if draining {
				row = append(row, r.draining)
			}
			t.rows = append(t.rows, row)
		}
	case "crdb_internal.gossip_liveness", "crdb_internal.gossip_nodes":
		// The privilege check comes first.
		if s.version.atLeast(23, 2) {
			if !c.granted(s.user, "VIEWCLUSTERMETADATA") {
				return t, &pgconn.PgError{Code: "42501", Message: fmt.Sprintf("user %s does not have VIEWCLUSTERMETADATA system privilege", s.user)}
			}
		} else if !c.granted(s.user) {
			return t, &pgconn.PgError{Code: "42501", Message: "only users with the admin role are allowed to read " + name}
		}
		if c.cfg.Virtual {
			text := "operation is unsupported within a virtual cluster"
			if !s.version.atLeast(23, 2) {
				text = "operation is unsupported in multi-tenancy mode"
			}
			return t, &pgconn.PgError{Code: "0A000", Message: text}
		}
		at := time.Now().Add(-s.n.faults.Load().GossipLag)
		if name == "crdb_internal.gossip_liveness" {
			t.cols = []column{{"node_id", oidInt8}, {"epoch", oidInt8}, {"expiration", oidText}, {"draining", oidBool}, {"decommissioning", oidBool}, {"membership", oidText}, {"updated_at", oidTimestamp}}
		} else {
			t.cols = []column{{"node_id", oidInt8}, {"network", oidText}, {"address", oidText}, {"advertise_address", oidText}, {"sql_network", oidText}, {"sql_address", oidText}, {"advertise_sql_address", oidText}, {"attrs", oidText}, {"locality", oidText}, {"cluster_name", oidText}, {"server_version", oidText}, {"build_tag", oidText}, {"started_at", oidTimestamp}, {"is_live", oidBool}, {"ranges", oidInt8}, {"leases", oidInt8}}
		}
		for _, n := range c.Nodes() {
			l, ok := n.livenessAt(at)
			if !ok {
				continue
			}
			if name == "crdb_internal.gossip_liveness" {
				expiration := l.since
				if l.live {
					expiration = at.Add(6 * time.Second)
				}
				t.rows = append(t.rows, []any{int64(n.id), l.epoch, fmt.Sprintf("%d.%09d,0", expiration.Unix(), expiration.Nanosecond()), l.draining, l.membership != "active", l.membership, l.since.UTC()})
				continue
			}
			if l.membership == "decommissioned" {
				continue
			}
			n.mu.Lock()
			started, v := n.started, n.version
			n.mu.Unlock()
			t.rows = append(t.rows, []any{int64(n.id), "tcp", n.addr, n.addr, "tcp", n.addr, n.addr, "[]", "", "", fmt.Sprintf("%d.%d", v.major, v.minor), v.text, started.UTC(), l.live, int64(10), int64(3)})
		}
	default:
		return t, &pgconn.PgError{Code: "42P01", Message: fmt.Sprintf("relation %q does not exist", name)}
	}
	if f := s.n.faults.Load().Source; f != nil {
		if res := f(name); res != nil {
			if res.Err != nil {
				return t, res.Err
			}
			t.rows = res.Rows
			if len(res.Columns) > 0 {
				t.cols = resultColumns(res)
			}
		}
	}
	return t, nil
}
