package crdbdraintest

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	_ "github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t testing.TB, cfg Config) *Cluster {
	t.Helper()
	c := Start(cfg)
	t.Cleanup(c.Close)
	return c
}

func connect(t testing.TB, c *Cluster, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := dial(c, dsn)
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	t.Cleanup(func() { hangUp(conn) })
	return conn
}

// hangUp closes a connection and waits for what pgx still does for it: after an
// error it dials once more, for a CancelRequest.
func hangUp(conn *pgx.Conn) {
	conn.Close(context.Background())
	<-conn.PgConn().CleanupDone()
}

func dial(c *Cluster, dsn string) (*pgx.Conn, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	cfg.DialFunc = c.Dial
	return pgx.ConnectConfig(context.Background(), cfg)
}

func as(user, dsn string) string { return strings.Replace(dsn, "//app@", "//"+user+"@", 1) }

func code(err error) string {
	var pe *pgconn.PgError
	if errors.As(err, &pe) {
		return pe.Code
	}
	return fmt.Sprint(err)
}

// wire is a client that shows what is on the wire.
type wire struct {
	t    *testing.T
	conn net.Conn
	fe   *pgproto3.Frontend
}

func newWire(t *testing.T, c *Cluster, addr string) *wire {
	t.Helper()
	conn, err := c.Dial(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{t: t, conn: conn, fe: pgproto3.NewFrontend(conn, conn)}
	t.Cleanup(func() { conn.Close() })
	w.send(&pgproto3.StartupMessage{ProtocolVersion: pgproto3.ProtocolVersion30, Parameters: map[string]string{"user": "app"}})
	return w
}

func (w *wire) send(ms ...pgproto3.FrontendMessage) {
	for _, m := range ms {
		w.fe.Send(m)
	}
	w.fe.Flush()
}

// until reads up to ReadyForQuery or the end, one letter a message; errors with
// severity and code.
func (w *wire) until() string {
	w.t.Helper()
	w.conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	var got []string
	for {
		m, err := w.fe.Receive()
		switch m := m.(type) {
		case nil:
			if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
				w.t.Errorf("read: %v", err)
			}
			return strings.Join(append(got, "EOF"), " ")
		case *pgproto3.ErrorResponse:
			got = append(got, m.Severity+":"+m.Code)
		case *pgproto3.ReadyForQuery:
			return strings.Join(append(got, "Z"+string(m.TxStatus)), " ")
		case *pgproto3.CommandComplete:
			got = append(got, string(m.CommandTag))
		case *pgproto3.ParameterStatus:
		default:
			got = append(got, strings.TrimPrefix(fmt.Sprintf("%T", m), "*pgproto3."))
		}
	}
}

func (w *wire) want(want string) {
	w.t.Helper()
	if got := w.until(); got != want {
		w.t.Errorf("on the wire: %s\n       want: %s", got, want)
	}
}

const up = "AuthenticationOk BackendKeyData ZI"

func query(sql string) *pgproto3.Query { return &pgproto3.Query{String: sql} }

func batch(sql string) []pgproto3.FrontendMessage {
	return []pgproto3.FrontendMessage{
		&pgproto3.Parse{Query: sql}, &pgproto3.Bind{}, &pgproto3.Describe{ObjectType: 'P'}, &pgproto3.Execute{}, &pgproto3.Sync{},
	}
}

var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

func TestEveryQueryExecMode(t *testing.T) {
	c := start(t, Config{Nodes: 1})
	ctx := t.Context()
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			cfg, _ := pgx.ParseConfig(c.DSN())
			cfg.DefaultQueryExecMode = mode
			conn, err := pgx.ConnectConfig(ctx, cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer hangUp(conn)
			for range 2 {
				var one, param int64
				var txt, node string
				var yes bool
				if err := conn.QueryRow(ctx, "SELECT 1").Scan(&one); err != nil || one != 1 {
					t.Errorf("SELECT 1: %d, %v", one, err)
				}
				if err := conn.QueryRow(ctx, "SELECT $1::INT8, $2::STRING, $3::BOOL", int64(42), "it's", true).Scan(&param, &txt, &yes); err != nil || param != 42 || txt != "it's" || !yes {
					t.Errorf("parameters: %d %q %v, %v", param, txt, yes, err)
				}
				if err := conn.QueryRow(ctx, "SHOW node_id").Scan(&node); err != nil || node != "1" {
					t.Errorf("SHOW node_id: %q, %v", node, err)
				}
				if tag, err := conn.Exec(ctx, "INSERT INTO t VALUES ($1, $2, $3)", 7, "x", time.Now()); err != nil || tag.RowsAffected() != 1 {
					t.Errorf("INSERT: %v, %v", tag, err)
				}
				if err := conn.QueryRow(ctx, "INSERT INTO t (a) VALUES ($1) RETURNING id::INT8", 7).Scan(&one); err != nil {
					t.Errorf("RETURNING: %v", err)
				}
				tx, err := conn.Begin(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := tx.Exec(ctx, "UPDATE t SET a = 1"); err != nil {
					t.Error(err)
				}
				if _, err := tx.Exec(ctx, "SELEC"); code(err) != "42601" {
					t.Errorf("nonsense: %v", err)
				}
				if _, err := tx.Exec(ctx, "SELECT 1"); code(err) != "25P02" {
					t.Errorf("in an aborted transaction: %v", err)
				}
				if err := tx.Rollback(ctx); err != nil {
					t.Error(err)
				}
				if err := conn.Ping(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	if n := c.Stats().Parses["SELECT 1"]; n == 0 {
		t.Error("no Parse counted")
	}
}

func TestDatabaseSQL(t *testing.T) {
	c := start(t, Config{Handler: func(q Query) *Result {
		if strings.HasPrefix(q.SQL, "SELECT name, balance") {
			return &Result{Columns: []string{"name", "balance"}, Rows: [][]any{{"ann", 12}, {"bob", nil}}}
		}
		return nil
	}})
	db, err := sql.Open("pgx", c.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows, err := db.Query("SELECT name, balance FROM accounts WHERE id > $1", 3)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for rows.Next() {
		var name string
		var balance sql.NullInt64
		if err := rows.Scan(&name, &balance); err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprint(name, balance.Int64))
	}
	if fmt.Sprint(got) != "[ann12 bob0]" || rows.Err() != nil {
		t.Errorf("%v %v", got, rows.Err())
	}
	st, err := db.Prepare("INSERT INTO t VALUES ($1)")
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	for i := range 10 {
		if _, err := st.Exec(i); err != nil {
			t.Fatal(err)
		}
	}
	if n := c.Stats().Statements["INSERT INTO t VALUES ($1)"]; n != 10 {
		t.Errorf("%d INSERTs counted, not 10", n)
	}
}

// A01: the signals come in the server's order, gossip last.
func TestA01Timeline(t *testing.T) {
	type signals struct {
		instance, gossip any
		ready            int
		dial             string
		idle, busy       string
	}
	ctx := t.Context()
	got := map[Step]signals{}
	var c *Cluster
	var watch, idle, busy, loser *pgx.Conn
	var tx pgx.Tx
	observe := func(n *Node, step Step) {
		if n.ID() != 2 || watch == nil {
			return
		}
		var s signals
		_ = watch.QueryRow(ctx, "SELECT is_draining FROM system.sql_instances WHERE id = 2").Scan(&s.instance)
		if err := watch.QueryRow(ctx, "SELECT draining FROM crdb_internal.gossip_liveness WHERE node_id = 2").Scan(&s.gossip); err != nil {
			t.Error(err)
		}
		res, err := http.Get(n.HTTPURL() + "/health?ready=1")
		if err != nil {
			t.Error(err)
			return
		}
		res.Body.Close()
		s.ready = res.StatusCode
		s.dial = "accepted"
		if conn, err := dial(c, n.DSN()); err != nil {
			s.dial = code(err)
		} else {
			conn.Close(ctx)
		}
		if step < Closing {
			s.idle, s.busy = "fine", "fine"
			if _, err := idle.Exec(ctx, "SELECT 1"); err != nil {
				s.idle = err.Error()
			}
			if _, err := tx.Exec(ctx, "SELECT 1"); err != nil {
				s.busy = err.Error()
			}
		}
		got[step] = s
	}
	c = start(t, Config{
		Settings: Settings{InitialWait: 30 * time.Millisecond, ConnectionsTimeout: 40 * time.Millisecond, TransactionsTimeout: 50 * time.Millisecond},
		OnStep:   observe,
	})
	defer http.DefaultClient.CloseIdleConnections()
	idle, busy, loser = connect(t, c, c.Node(2).DSN()), connect(t, c, c.Node(2).DSN()), connect(t, c, c.Node(2).DSN())
	_ = loser
	tx, _ = busy.Begin(ctx)
	watch = connect(t, c, as("root", c.Node(1).DSN()))
	r := c.Node(2).Drain(ctx)
	http.DefaultClient.CloseIdleConnections()

	want := map[Step]signals{
		Announced:  {true, false, 200, "accepted", "fine", "fine"},
		Unready:    {true, false, 503, "accepted", "fine", "fine"},
		Refusing:   {true, false, 503, "57P01", "fine", "fine"},
		Closing:    {true, false, 503, "57P01", "", ""},
		Cancelling: {true, false, 503, "57P01", "", ""},
		Departed:   {nil, false, 503, "57P01", "", ""},
		Flagged:    {nil, true, 503, "57P01", "", ""},
	}
	for step, w := range want {
		if got[step] != w {
			t.Errorf("%v: %+v\n   want %+v", step, got[step], w)
		}
	}
	if len(got) != len(want) {
		t.Errorf("steps: %v", got)
	}
	if r.InitialWait < 30*time.Millisecond || r.Connections < 40*time.Millisecond || r.Transactions < 50*time.Millisecond || r.Err != nil {
		t.Errorf("%+v", r)
	}
	if r.LostIdle != 2 || r.LostBusy != 1 {
		t.Errorf("lost %d idle and %d busy connections, want 2 and 1", r.LostIdle, r.LostBusy)
	}
}

func TestRefusedDial(t *testing.T) {
	c := start(t, Config{Nodes: 1})
	c.Node(1).Drain(t.Context())
	newWire(t, c, c.Node(1).Addr()).want("ERROR:57P01 EOF") // nothing else before it
	_, err := dial(c, c.Node(1).DSN())
	if err == nil || !strings.Contains(err.Error(), "server is not accepting clients, try another node") {
		t.Errorf("refused with %v", err)
	}
	if s := c.Stats(); s.Refused != 2 || s.Accepts != 2 {
		t.Errorf("%+v", s)
	}
}

func TestIdleConnectionGetsUnsolicited57P01(t *testing.T) {
	for name, tc := range map[string]struct {
		faults Faults
		want   string
	}{
		"server": {Faults{}, "ERROR:57P01 EOF"},
		"fatal":  {Faults{Severity: "FATAL"}, "FATAL:57P01 EOF"},
		"fin":    {Faults{DrainEnd: EndFIN}, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			c := start(t, Config{Nodes: 1, Faults: tc.faults})
			w := newWire(t, c, c.Node(1).Addr())
			w.want(up)
			w.send(query("SELECT 1"))
			w.want("RowDescription DataRow SELECT 1 ZI")
			if r := c.Node(1).Drain(t.Context()); r.LostIdle != 1 || r.LostBusy != 0 || r.Duration > 5*time.Second {
				t.Errorf("%+v", r)
			}
			w.want(tc.want)
		})
	}
}

func TestTransactionEndsBefore57P01(t *testing.T) {
	for _, extended := range []bool{false, true} {
		t.Run(fmt.Sprint("extended=", extended), func(t *testing.T) {
			c := start(t, Config{Nodes: 1})
			n := c.Node(1)
			w := newWire(t, c, n.Addr())
			w.want(up)
			w.send(query("BEGIN"))
			w.want("BEGIN ZT")
			done := make(chan DrainResult)
			go func() { done <- n.Drain(t.Context()) }()
			n.WaitStep(t.Context(), Closing)
			w.send(query("INSERT INTO t VALUES (1)"))
			w.want("INSERT 0 1 ZT")
			if extended {
				w.send(batch("COMMIT")...)
				w.want("ParseComplete BindComplete NoData COMMIT ZI")
			} else {
				w.send(query("COMMIT"))
				w.want("COMMIT ZI")
			}
			w.want("ERROR:57P01 EOF")
			if r := <-done; r.LostBusy != 1 || r.LostIdle != 0 || r.Err != nil {
				t.Errorf("%+v", r)
			}
		})
	}
}

func TestRunningStatementEndsBefore57P01(t *testing.T) {
	release := make(chan struct{})
	running := make(chan struct{}, 1)
	c := start(t, Config{Nodes: 1, Handler: func(q Query) *Result {
		if q.SQL == "SELECT 7" {
			running <- struct{}{}
			<-release
		}
		return nil
	}})
	n := c.Node(1)
	w := newWire(t, c, n.Addr())
	w.want(up)
	w.send(query("SELECT 7"), query("SELECT 8")) // the second is behind the drain's request
	<-running
	done := make(chan DrainResult)
	go func() { done <- n.Drain(t.Context()) }()
	n.WaitStep(t.Context(), Closing)
	close(release)
	w.want("RowDescription DataRow SELECT 1 ZI")
	w.want("ERROR:57P01 EOF")
	<-done
	if s := c.Stats(); s.Executed != 1 {
		t.Errorf("executed: %v", s.Statements)
	}
}

func TestDeadlineCancels(t *testing.T) {
	c := start(t, Config{Nodes: 1, Settings: Settings{TransactionsTimeout: 20 * time.Millisecond}})
	n := c.Node(1)
	running, idleTx := newWire(t, c, n.Addr()), newWire(t, c, n.Addr())
	running.want(up)
	idleTx.want(up)
	idleTx.send(query("BEGIN"))
	idleTx.want("BEGIN ZT")
	running.send(query("SELECT pg_sleep(60)"))
	for c.Stats().Statements["SELECT pg_sleep(60)"] == 0 {
		time.Sleep(time.Millisecond)
	}
	r := n.Drain(t.Context())
	running.want("ERROR:57014 ERROR:57P01 EOF")
	idleTx.want("ERROR:57P01 EOF")
	if r.LostBusy != 2 || r.Transactions > cancelGrace {
		t.Errorf("%+v", r)
	}
}

func TestDrainEndsEarly(t *testing.T) {
	c := start(t, Config{Nodes: 1, Settings: Settings{ConnectionsTimeout: time.Minute, TransactionsTimeout: time.Minute}})
	n := c.Node(1)
	conn := connect(t, c, n.DSN())
	done := make(chan DrainResult)
	go func() { done <- n.Drain(t.Context()) }()
	n.WaitStep(t.Context(), Refusing)
	conn.Close(t.Context())
	if r := <-done; r.Duration > 10*time.Second || r.LostIdle+r.LostBusy != 0 {
		t.Errorf("%+v", r)
	}
}

func TestRestartKeepsIDAndRaisesEpoch(t *testing.T) {
	c := start(t, Config{})
	ctx := t.Context()
	root := connect(t, c, as("root", c.Node(1).DSN()))
	n := c.Node(2)
	addr := n.Addr()
	epoch := func() (e int64, draining bool, instances int64) {
		if err := root.QueryRow(ctx, "SELECT epoch, draining FROM crdb_internal.gossip_liveness WHERE node_id = $1", 2).Scan(&e, &draining); err != nil {
			t.Fatal(err)
		}
		if err := root.QueryRow(ctx, "SELECT count(*) FROM system.sql_instances WHERE NOT COALESCE(is_draining, false)").Scan(&instances); err != nil {
			t.Fatal(err)
		}
		return e, draining, instances
	}
	for i := range 5 {
		if r := n.Drain(ctx); r.Err != nil {
			t.Fatal(r.Err)
		}
		if e, d, in := epoch(); e != int64(i+1) || !d || in != 2 {
			t.Errorf("after the drain: epoch %d, draining %v, %d instances", e, d, in)
		}
		n.Stop()
		if _, err := dial(c, n.DSN()); err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("dial of a node that is down: %v", err)
		}
		n.Start()
		if e, d, in := epoch(); e != int64(i+2) || d || in != 3 || n.Addr() != addr {
			t.Errorf("after the restart: epoch %d, draining %v, %d instances", e, d, in)
		}
		conn := connect(t, c, n.DSN())
		if id := conn.PgConn().PID() >> 20; id != 2 {
			t.Errorf("ID %d after the restart", id)
		}
	}
}

func TestStamps(t *testing.T) {
	pid := func(cfg Config, id int) uint32 {
		c := start(t, cfg)
		conn := connect(t, c, c.Node(1).DSN())
		if v := conn.PgConn().ParameterStatus("crdb_version"); !strings.HasPrefix(v, "CockroachDB CCL v") == !cfg.Faults.HideVersion {
			t.Errorf("crdb_version %q", v)
		}
		return conn.PgConn().PID()
	}
	if p := pid(Config{}, 1); p>>20 != 1 {
		t.Errorf("PID %#x", p)
	}
	if p := pid(Config{Version: "v21.2.0"}, 1); p != 0 {
		t.Errorf("before v22.1: PID %#x", p)
	}
	if p := pid(Config{Faults: Faults{HideVersion: true, PID: func(int) uint32 { return 0x0a140304 }}}, 1); p != 0x0a140304 {
		t.Errorf("rewritten: PID %#x", p)
	}
}

func TestStampOfLargeIDs(t *testing.T) {
	c := start(t, Config{Nodes: 1, Memory: true})
	for _, tc := range []struct {
		version string
		id      int
		want    func(pid uint32) bool
	}{
		{"v25.2.0", 2047, func(pid uint32) bool { return pid>>20 == 2047 }},
		{"v25.2.0", 2048, func(pid uint32) bool { return pid == 1<<31|2048 }},
		{"v21.2.0", 2048, func(pid uint32) bool { return pid == 0 }},
	} {
		s := &session{n: &Node{c: c, id: tc.id}, be: pgproto3.NewBackend(strings.NewReader(""), io.Discard), version: parseVersion(tc.version)}
		s.identify(&Faults{})
		if !tc.want(s.key.pid) {
			t.Errorf("%s, node %d: %#x", tc.version, tc.id, s.key.pid)
		}
	}
}

func TestJobsWait(t *testing.T) {
	var steps []Step
	c := start(t, Config{Nodes: 1, Settings: Settings{JobsTimeout: 5 * time.Millisecond}, OnStep: func(_ *Node, s Step) { steps = append(steps, s) }})
	r := c.Node(1).Drain(t.Context())
	if got := fmt.Sprint(steps); got != "[announced unready refusing jobs wait closing departed flagged]" || r.Jobs < 5*time.Millisecond {
		t.Errorf("%s %+v", got, r)
	}
}

func TestPrivilegesByVersion(t *testing.T) {
	const (
		instances = "SELECT id, is_draining FROM system.sql_instances"
		gossip    = "SELECT l.node_id, l.epoch, l.draining, l.membership, n.is_live FROM crdb_internal.gossip_liveness AS l JOIN crdb_internal.gossip_nodes AS n ON n.node_id = l.node_id"
	)
	for _, tc := range []struct {
		version, user, setup, sql string
		virtual                   bool
		want                      string
	}{
		{version: "v25.2.0", user: "app", sql: instances, want: "42501 user app does not have SELECT privilege on relation sql_instances"},
		{version: "v25.2.0", user: "viewer", sql: instances, want: "3 rows"},
		{version: "v23.1.0", user: "viewer", sql: "SELECT id FROM system.sql_instances", want: "42501 user viewer does not have SELECT privilege on relation sql_instances"},
		{version: "v24.1.0", user: "viewer", sql: instances, want: `42703 column "is_draining" does not exist`},
		{version: "v25.2.0", user: "app", sql: gossip, want: "42501 user app does not have VIEWCLUSTERMETADATA system privilege"},
		{version: "v25.2.0", user: "viewer", sql: gossip, want: "3 rows"},
		{version: "v23.1.0", user: "viewer", sql: gossip, want: "42501 only users with the admin role are allowed to read crdb_internal.gossip_liveness"},
		{version: "v23.1.0", user: "root", sql: gossip, want: "3 rows"},
		{version: "v25.2.0", user: "app", virtual: true, sql: gossip, want: "42501 user app does not have VIEWCLUSTERMETADATA system privilege"},
		{version: "v25.2.0", user: "root", virtual: true, sql: gossip, want: "0A000 operation is unsupported within a virtual cluster"},
		{version: "v22.2.0", user: "root", virtual: true, sql: gossip, want: "0A000 operation is unsupported in multi-tenancy mode"},
		{version: "v26.1.0", user: "root", sql: gossip, want: "42501 Access to crdb_internal and system is restricted."},
		{version: "v26.1.0", user: "root", sql: "SELECT crdb_internal.node_id()", want: "42501 Access to crdb_internal and system is restricted."},
		{version: "v26.1.0", user: "root", setup: "SET allow_unsafe_internals = on", sql: gossip, want: "3 rows"},
		{version: "v26.1.0", user: "app", setup: "SET allow_unsafe_internals = true", sql: gossip, want: "42501 user app does not have VIEWCLUSTERMETADATA system privilege"},
		{version: "v26.1.0", user: "app", sql: "SHOW node_id", want: "1 rows"},
		{version: "v25.4.0", user: "root", sql: gossip, want: "3 rows"},
		{version: "v25.4.0", user: "root", setup: "SET allow_unsafe_internals = off", sql: gossip, want: "42501 Access to crdb_internal and system is restricted."},
		{version: "v25.3.0", user: "root", sql: "SET allow_unsafe_internals = on", want: `42704 unrecognized configuration parameter "allow_unsafe_internals"`},
		{version: "v25.2.0", user: "app", sql: "SELECT crdb_internal.node_id()", want: "1 rows"},
		{version: "v25.2.0", user: "app", sql: "SELECT * FROM nowhere", want: `42P01 relation "nowhere" does not exist`},
		{version: "v25.2.0", user: "root", sql: "SHOW CLUSTER SETTING server.shutdown.initial_wait", want: "1 rows"},
		{version: "v25.2.0", user: "app", sql: "SHOW CLUSTER SETTING server.shutdown.initial_wait", want: "42501 only users with MODIFYCLUSTERSETTING or VIEWCLUSTERSETTING privileges are allowed to show cluster setting 'server.shutdown.initial_wait'"},
		{version: "v22.2.0", user: "root", sql: "SHOW CLUSTER SETTING server.shutdown.connections.timeout", want: `XXUUU unknown setting: "server.shutdown.connections.timeout"`},
		{version: "v22.2.0", user: "root", sql: "SHOW CLUSTER SETTING server.shutdown.connection_wait", want: "1 rows"},
	} {
		t.Run(tc.version+" "+tc.user+" "+tc.sql, func(t *testing.T) {
			c := start(t, Config{Version: tc.version, Virtual: tc.virtual})
			c.Grant("viewer", "VIEWSYSTEMTABLE")
			c.Grant("viewer", "VIEWCLUSTERMETADATA")
			for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeCacheStatement} {
				conn := connect(t, c, as(tc.user, c.Node(1).DSN()))
				if tc.setup != "" {
					if _, err := conn.Exec(t.Context(), tc.setup); err != nil {
						t.Fatal(err)
					}
				}
				rows, err := conn.Query(t.Context(), tc.sql, mode)
				n := 0
				if err == nil {
					for rows.Next() {
						if _, err := rows.Values(); err != nil {
							t.Error(err)
						}
						n++
					}
					err = rows.Err()
				}
				got := fmt.Sprintf("%d rows", n)
				var pe *pgconn.PgError
				if errors.As(err, &pe) {
					got = pe.Code + " " + pe.Message
				} else if err != nil {
					got = err.Error()
				}
				if got != tc.want {
					t.Errorf("%v: %s\nwant %s", mode, got, tc.want)
				}
			}
		})
	}
}

func TestSelect(t *testing.T) {
	c := start(t, Config{Nodes: 2, Settings: Settings{InitialWait: 4 * time.Second, ConnectionsTimeout: 90*time.Minute + 1500*time.Millisecond}})
	c.Node(2).Decommission()
	conn := connect(t, c, as("root", c.Node(1).DSN()))
	for sql, want := range map[string]string{
		"SELECT 1":                    "1",
		"select 'a''b' AS x, 2;":      "a'b,2",
		"SELECT 1+2*3, -4, 7 % 4":     "7,-4,3",
		"SELECT 1; SELECT 2":          "1;2",
		"/* a */ SELECT -- b\n 1":     "1",
		"SELECT COALESCE(NULL, 'x')":  "x",
		"SELECT 1::STRING || 'b'":     "1b",
		"SELECT NULL IS NULL":         "t",
		"SELECT version() = 'x'":      "f",
		"SELECT 3 IN (1, 2, 3), true": "t,t",
		"SELECT node_id, membership FROM crdb_internal.gossip_liveness ORDER BY node_id DESC":                                                           "2,decommissioning;1,active",
		"SELECT id::INT8 AS n, COALESCE(is_draining, false) FROM system.sql_instances":                                                                  "1,f;2,f",
		"SELECT i.id, l.draining OR l.membership <> 'active' FROM system.sql_instances i LEFT JOIN crdb_internal.gossip_liveness l ON l.node_id = i.id": "1,f;2,t",
		"SELECT node_id FROM crdb_internal.gossip_liveness JOIN crdb_internal.gossip_nodes USING (node_id) WHERE is_live AND node_id > 1 LIMIT 5":       "2",
		"SELECT n.* FROM system.sql_instances n WHERE id = 99":                                                                                          "",
		"SHOW CLUSTER SETTING server.shutdown.initial_wait":                                                                                             "00:00:04",
		"SHOW CLUSTER SETTING server.shutdown.connections.timeout":                                                                                      "01:30:01.500000",
		"SHOW CLUSTER SETTING server.shutdown.transactions.timeout":                                                                                     "00:00:00",
		"SHOW CLUSTER SETTING server.shutdown.drain_wait":                                                                                               "00:00:04",
		"SET application_name = 'x y'; SHOW application_name":                                                                                           "x y",
	} {
		res, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
		var got []string
		for _, r := range res {
			for _, row := range r.Rows {
				got = append(got, string(bytes.Join(row, []byte(","))))
			}
		}
		if s := strings.Join(got, ";"); s != want || err != nil {
			t.Errorf("%s: %q, %v; want %q", sql, s, err, want)
		}
	}
	if got := conn.PgConn().ParameterStatus("application_name"); got != "x y" {
		t.Errorf("ParameterStatus application_name %q", got)
	}
	var wait time.Duration
	if err := conn.QueryRow(t.Context(), "SHOW CLUSTER SETTING server.shutdown.connections.timeout").Scan(&wait); err != nil || wait != 90*time.Minute+1500*time.Millisecond {
		t.Errorf("binary interval: %v, %v", wait, err)
	}
	var id string
	if err := conn.QueryRow(t.Context(), "SHOW session_id").Scan(&id); err != nil || len(id) != 32 || !strings.HasSuffix(id, "00000001") {
		t.Errorf("session_id %q, %v", id, err)
	}
}

func TestCopy(t *testing.T) {
	c := start(t, Config{Nodes: 1})
	conn := connect(t, c, c.DSN())
	tag, err := conn.PgConn().CopyFrom(t.Context(), strings.NewReader("1\n2\n"), "COPY t FROM STDIN")
	if err != nil || tag.String() != "COPY 2" {
		t.Errorf("%v %v", tag, err)
	}
	var b bytes.Buffer
	if _, err := conn.PgConn().CopyTo(t.Context(), &b, "COPY t TO STDOUT"); err != nil || b.String() != "1\n" {
		t.Errorf("%q %v", b.String(), err)
	}
}

func TestCancelRequest(t *testing.T) {
	c := start(t, Config{})
	conn := connect(t, c, c.DSN())
	done := make(chan error)
	go func() {
		_, err := conn.Exec(context.Background(), "SELECT pg_sleep(60)")
		done <- err
	}()
	for c.Stats().Statements["SELECT pg_sleep(60)"] == 0 {
		time.Sleep(time.Millisecond)
	}
	if err := conn.PgConn().CancelRequest(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; code(err) != "57014" {
		t.Errorf("%v", err)
	}
	if _, err := conn.Exec(t.Context(), "SELECT 1"); err != nil {
		t.Error(err)
	}
	if n := c.Stats().CancelRequests; n != 1 {
		t.Errorf("%d CancelRequests", n)
	}
}

func TestStatementTimeout(t *testing.T) {
	c := start(t, Config{Nodes: 1})
	conn := connect(t, c, c.DSN()+"&options=-c%20statement_timeout%3D5")
	if _, err := conn.Exec(t.Context(), "SELECT pg_sleep(60)"); code(err) != "57014" {
		t.Errorf("%v", err)
	}
}

func TestHandlerEnds(t *testing.T) {
	c := start(t, Config{Nodes: 1, Handler: func(q Query) *Result {
		switch q.SQL {
		case "SELECT 'refuse'":
			return &Result{Unexecuted: true}
		case "SELECT 'fin'":
			return &Result{End: EndFIN}
		case "SELECT 'cut'":
			return &Result{Columns: []string{"a"}, Rows: [][]any{{1}}, End: EndShutdown}
		case "COMMIT":
			return &Result{Err: errQueryCanceled, End: EndShutdown}
		}
		return nil
	}})
	for _, tc := range []struct{ sql, simple, extended string }{
		{"SELECT 'refuse'", "ERROR:57P01 EOF", "ParseComplete BindComplete RowDescription ERROR:57P01 EOF"},
		{"SELECT 'fin'", "EOF", "ParseComplete BindComplete RowDescription EOF"},
		{"SELECT 'cut'", "RowDescription DataRow ERROR:57P01 EOF", "ParseComplete BindComplete RowDescription DataRow ERROR:57P01 EOF"},
		{"COMMIT", "ERROR:57014 ERROR:57P01 EOF", "ParseComplete BindComplete NoData ERROR:57014 ERROR:57P01 EOF"},
	} {
		w := newWire(t, c, c.Node(1).Addr())
		w.want(up)
		w.send(query(tc.sql))
		w.want(tc.simple)
		w = newWire(t, c, c.Node(1).Addr())
		w.want(up)
		// Without Sync: a close with unread data would be a reset.
		b := batch(tc.sql)
		w.send(b[:len(b)-1]...)
		w.want(tc.extended)
	}
	if s := c.Stats(); s.Executed != 6 || s.Statements["SELECT 'refuse'"] != 0 || s.Statements["COMMIT"] != 2 {
		t.Errorf("%v", s.Statements)
	}
}

func TestFaults(t *testing.T) {
	c := start(t, Config{Nodes: 1})
	n := c.Node(1)
	n.SetFaults(Faults{Refuse: &pgconn.PgError{Severity: "FATAL", Code: "28000", Message: "no"}})
	newWire(t, c, n.Addr()).want("FATAL:28000 EOF")
	n.SetFaults(Faults{RefuseAuthenticated: true, Refuse: &pgconn.PgError{Code: "53300", Message: "sorry, too many clients already"}})
	newWire(t, c, n.Addr()).want("AuthenticationOk ERROR:53300 EOF")
	n.SetFaults(Faults{ReadinessStatus: 500, Vars: "node_id 77\n", Parameters: map[string]string{"x": "y"},
		Ping:   &Result{Err: &pgconn.PgError{Code: "XX000", Message: "no ping"}},
		Source: func(string) *Result { return &Result{Columns: []string{"id"}, Rows: [][]any{{"seven"}}} }})
	conn := connect(t, c, as("root", n.DSN()))
	if conn.PgConn().ParameterStatus("x") != "y" {
		t.Error("no ParameterStatus x")
	}
	if err := conn.Ping(t.Context()); code(err) != "XX000" {
		t.Errorf("ping: %v", err)
	}
	var id string
	if err := conn.QueryRow(t.Context(), "SELECT id FROM system.sql_instances").Scan(&id); err != nil || id != "seven" {
		t.Errorf("%q %v", id, err)
	}
	get := func(path string) string {
		res, err := http.Get(n.HTTPURL() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, _ := io.ReadAll(res.Body)
		return fmt.Sprint(res.StatusCode, " ", string(b))
	}
	defer http.DefaultClient.CloseIdleConnections()
	if got := get("/health?ready=1") + get("/_status/vars") + get("/health"); got != "500 200 node_id 77\n200 {}" {
		t.Errorf("%q", got)
	}
	n.SetFaults(Faults{})
	if got := get("/_status/vars"); !strings.Contains(got, fmt.Sprintf("\nnode_id{advertise_addr=%q,http_addr=%q,sql_addr=%q} 1\n", n.Addr(), strings.TrimPrefix(n.HTTPURL(), "http://"), n.Addr())) {
		t.Errorf("no node_id gauge in %d bytes", len(got))
	}
}

func TestLoadBalancer(t *testing.T) {
	c := start(t, Config{LoadBalancer: LoadBalancerConfig{Interval: 10 * time.Millisecond}})
	for range 9 {
		connect(t, c, c.DSN())
	}
	for id := 1; id <= 3; id++ {
		if n := c.LoadBalancer().Routed()[id]; n != 3 {
			t.Errorf("node %d has %d of 9 connections", id, n)
		}
	}
	c.Node(2).Drain(t.Context())
	for c.LoadBalancer().Up(2) {
		time.Sleep(time.Millisecond)
	}
	for range 4 {
		connect(t, c, c.DSN())
	}
	if n := c.Node(2).Stats(); n.Accepts != 3 {
		t.Errorf("the drained node has %d accepts, not 3", n.Accepts)
	}
	c.Node(1).Kill() // the next node takes over at once
	if id := connect(t, c, c.DSN()).PgConn().PID() >> 20; id != 3 {
		t.Errorf("on node %d", id)
	}
	c.LoadBalancer().SetSticky(2)
	if _, err := dial(c, c.DSN()); code(err) != "57P01" {
		t.Errorf("sticky to a draining node: %v", err)
	}
	c.LoadBalancer().SetSticky(0)
	c.Node(2).Stop()
	c.Node(2).Start()
	n := c.AddNode()
	for !c.LoadBalancer().Up(2) || !c.LoadBalancer().Up(n.ID()) {
		time.Sleep(time.Millisecond)
	}
	for range 3 {
		connect(t, c, c.DSN())
	}
	if n.Stats().Accepts == 0 || c.Node(2).Stats().Accepts < 5 {
		t.Errorf("routed: %v", c.LoadBalancer().Routed())
	}
}

func TestKillResets(t *testing.T) {
	for _, via := range []string{"node", "load balancer"} {
		t.Run(via, func(t *testing.T) {
			c := start(t, Config{Nodes: 1})
			addr := c.Node(1).Addr()
			if via != "node" {
				addr = c.LoadBalancer().Addr()
			}
			w := newWire(t, c, addr)
			w.want(up)
			c.Node(1).Kill()
			w.conn.SetReadDeadline(time.Now().Add(5 * time.Second))
			if _, err := w.conn.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
				t.Errorf("read after a kill: %v", err)
			}
		})
	}
}

func TestHang(t *testing.T) {
	c := start(t, Config{Nodes: 1})
	n := c.Node(1)
	conn := connect(t, c, n.DSN())
	n.Hang(true)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	cfg, _ := pgx.ParseConfig(n.DSN())
	if _, err := pgx.ConnectConfig(ctx, cfg); err == nil {
		t.Error("a node that hangs answered")
	}
	if n.Stats().Accepts != 2 {
		t.Errorf("%d accepts", n.Stats().Accepts)
	}
	done := make(chan error)
	go func() {
		_, err := conn.Exec(context.Background(), "SELECT 1")
		done <- err
	}()
	select {
	case err := <-done:
		t.Errorf("answered: %v", err)
	case <-time.After(30 * time.Millisecond):
	}
	n.Hang(false)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestUndrain(t *testing.T) {
	c := start(t, Config{Nodes: 1, Settings: Settings{ConnectionsTimeout: time.Minute}})
	n := c.Node(1)
	conn := connect(t, c, n.DSN())
	done := make(chan DrainResult)
	go func() { done <- n.Drain(t.Context()) }()
	n.WaitStep(t.Context(), Refusing)
	n.Undrain()
	if r := <-done; r.Err != ErrUndrained {
		t.Errorf("%+v", r)
	}
	if _, err := conn.Exec(t.Context(), "SELECT 1"); err != nil {
		t.Error(err)
	}
	connect(t, c, n.DSN())
}

func TestDecommissionedNodeStaysInLivenessOnly(t *testing.T) {
	c := start(t, Config{})
	root := connect(t, c, as("root", c.Node(1).DSN()))
	c.Node(3).Decommission()
	c.Node(3).Drain(t.Context())
	c.Node(3).Stop()
	var liveness, joined int
	root.QueryRow(t.Context(), "SELECT count(*) FROM crdb_internal.gossip_liveness WHERE draining AND membership = 'decommissioned'").Scan(&liveness)
	root.QueryRow(t.Context(), "SELECT count(*) FROM crdb_internal.gossip_liveness JOIN crdb_internal.gossip_nodes USING (node_id)").Scan(&joined)
	if liveness != 1 || joined != 2 {
		t.Errorf("%d draining records, %d nodes", liveness, joined)
	}
}

// However a drain meets the load: what the clients know to have been executed was
// executed, and what they know not to have been executed was not.
func TestCountersAreExact(t *testing.T) {
	c := start(t, Config{Nodes: 1})
	n := c.Node(1)
	for round := range 20 {
		before := c.Stats().Executed
		var ok, refused, open atomic.Int64
		var wg sync.WaitGroup
		for i := range 8 {
			conn, err := dial(c, n.DSN())
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				defer hangUp(conn)
				mode := modes[i%len(modes)]
				for {
					_, err := conn.Exec(context.Background(), "INSERT INTO t VALUES (1)", mode)
					switch {
					case err == nil:
						ok.Add(1)
						continue
					case code(err) == "57P01":
						refused.Add(1)
					default:
						open.Add(1)
					}
					return
				}
			})
		}
		time.Sleep(time.Duration(round%4) * time.Millisecond)
		r := n.Restart(t.Context())
		wg.Wait()
		executed := int64(c.Stats().Executed - before)
		if executed < ok.Load() || executed > ok.Load()+open.Load() {
			t.Errorf("executed %d; clients saw %d done, %d refused, %d unknown", executed, ok.Load(), refused.Load(), open.Load())
		}
		if r.LostIdle+r.LostBusy != 8 {
			t.Errorf("lost %d+%d of 8", r.LostIdle, r.LostBusy)
		}
	}
}

func TestDisconnect(t *testing.T) {
	c := start(t, Config{Nodes: 1})
	n := c.Node(1)
	proxy := &pgconn.PgError{Severity: "FATAL", Code: "57P01", Message: "terminating connection due to idle timeout"}
	for _, tc := range []struct {
		r    Result
		want string
	}{
		{Result{}, "EOF"},
		{Result{Err: proxy}, "FATAL:57P01 EOF"},
		{Result{Err: errQueryCanceled, End: EndShutdown}, "ERROR:57014 ERROR:57P01 EOF"},
	} {
		idle, inTx := newWire(t, c, n.Addr()), newWire(t, c, n.Addr())
		idle.want(up)
		inTx.want(up)
		inTx.send(query("BEGIN"))
		inTx.want("BEGIN ZT")
		if got := n.Disconnect(tc.r); got != 1 {
			t.Errorf("%d sessions disconnected, not 1", got)
		}
		idle.want(tc.want)
		inTx.send(query("COMMIT"))
		inTx.want("COMMIT ZI")
		inTx.send(&pgproto3.Terminate{})
		inTx.want("EOF")
	}
	w := newWire(t, c, n.Addr())
	w.want(up)
	n.Disconnect(Result{End: EndRST})
	w.conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := w.conn.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("read after RST: %v", err)
	}
	if s := n.Stats(); s.LostIdle+s.LostBusy != 0 {
		t.Errorf("%+v", s)
	}
}

func TestGossipLag(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := Start(Config{Memory: true, Nodes: 2})
		defer c.Close()
		time.Sleep(time.Minute) // the cluster is known to all
		c.Node(1).SetFaults(Faults{GossipLag: 5 * time.Second})
		root, err := dial(c, as("root", c.Node(1).DSN()))
		if err != nil {
			t.Fatal(err)
		}
		defer hangUp(root)
		c.Node(2).Drain(context.Background())
		for _, want := range []bool{false, true} {
			var got bool
			if err := root.QueryRow(context.Background(), "SELECT draining FROM crdb_internal.gossip_liveness WHERE node_id = 2").Scan(&got); err != nil || got != want {
				t.Errorf("draining %v, %v; want %v", got, err, want)
			}
			time.Sleep(6 * time.Second)
		}
	})
}

func TestUpgrade(t *testing.T) {
	c := start(t, Config{Nodes: 1, Version: "v25.4.0"})
	n := c.Node(1)
	n.SetVersion("v26.1.0")
	const sql = "SELECT id FROM system.sql_instances"
	if _, err := connect(t, c, as("root", n.DSN())).Exec(t.Context(), sql); err != nil {
		t.Errorf("before the restart: %v", err)
	}
	n.Restart(t.Context())
	if _, err := connect(t, c, as("root", n.DSN())).Exec(t.Context(), sql); code(err) != "42501" {
		t.Errorf("after it: %v", err)
	}
}

func TestPassword(t *testing.T) {
	c := start(t, Config{Nodes: 1, Password: "hun@ter2"})
	connect(t, c, c.DSN())
	if _, err := dial(c, strings.Replace(c.DSN(), "hun", "fun", 1)); code(err) != "28P01" {
		t.Errorf("wrong password: %v", err)
	}
}

func TestPSQL(t *testing.T) {
	psql, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("psql is not installed")
	}
	c := start(t, Config{})
	cmd := exec.CommandContext(t.Context(), psql, "-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", c.Node(2).DSN())
	cmd.Stdin = strings.NewReader("SELECT 1;\nSHOW node_id;\nBEGIN;\nINSERT INTO t VALUES (1);\nCOMMIT;\nSELECT 'done';\n")
	out, err := cmd.CombinedOutput()
	if want := "1\n2\nBEGIN\nINSERT 0 1\nCOMMIT\ndone\n"; err != nil || string(out) != want {
		t.Errorf("psql: %v\n%s", err, out)
	}
}

func TestThousandsOfConnections(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a while")
	}
	c := start(t, Config{Nodes: 1, Memory: true})
	n := c.Node(1)
	for range 3000 {
		conn, err := dial(c, n.DSN())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { hangUp(conn) })
	}
	if r := n.Drain(t.Context()); r.LostIdle != 3000 || r.Duration > 5*time.Second {
		t.Errorf("%+v", r)
	}
}

// A whole drain with an hour of timeouts, in virtual time.
func TestVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := Start(Config{Memory: true, Settings: Settings{InitialWait: 20 * time.Minute, ConnectionsTimeout: 20 * time.Minute, TransactionsTimeout: 20 * time.Minute},
			LoadBalancer: LoadBalancerConfig{Interval: 10 * time.Second}})
		defer c.Close()
		ctx := context.Background()
		open := func(dsn string) *pgx.Conn {
			conn, err := dial(c, dsn)
			if err != nil {
				t.Fatal(err)
			}
			return conn
		}
		c.LoadBalancer().SetSticky(2)
		idle, busy := open(c.DSN()), open(c.Node(2).DSN())
		c.LoadBalancer().SetSticky(0)
		tx, err := busy.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		r := c.Node(2).Drain(ctx)
		if r.Duration != time.Hour || r.LostIdle != 1 || r.LostBusy != 1 {
			t.Errorf("%+v", r)
		}
		if _, err := tx.Exec(ctx, "SELECT 1"); err == nil {
			t.Error("the transaction survived the deadline")
		}
		if _, err := idle.Exec(ctx, "SELECT 1"); err == nil {
			t.Error("the idle connection survived")
		}
		if conn := open(c.DSN()); conn.PgConn().PID()>>20 == 2 {
			t.Error("the load balancer sends to the drained node")
		} else {
			conn.Close(ctx)
		}
		hangUp(idle)
		hangUp(busy)
	})
}

func BenchmarkSelect1(b *testing.B) {
	for name, memory := range map[string]bool{"sockets": false, "memory": true} {
		b.Run(name, func(b *testing.B) {
			c := start(b, Config{Nodes: 1, Memory: memory})
			conn := connect(b, c, c.Node(1).DSN())
			b.ReportAllocs()
			for b.Loop() {
				if _, err := conn.Exec(context.Background(), "SELECT 1"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
