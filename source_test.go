package crdbdrain

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// mockAsker is an asker over go-sqlmock, which says exactly which SQL may come and what the answer is.
type mockAsker struct{ db *sql.DB }

func newMock(t *testing.T) (mockAsker, sqlmock.Sqlmock) {
	t.Helper()
	db, mock, err := sqlmock.New(sqlmock.QueryMatcherOption(sqlmock.QueryMatcherEqual))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mock.ExpectationsWereMet(); err != nil {
			t.Error(err)
		}
		_ = db.Close()
	})
	return mockAsker{db}, mock
}

func (m mockAsker) ask(ctx context.Context, sql string) (answer [][]*string, err error) {
	rows, err := m.db.QueryContext(ctx, sql)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil {
		return nil, err
	}
	for rows.Next() {
		row := make([]*string, len(columns))
		into := make([]any, len(columns))
		for i := range row {
			into[i] = &row[i]
		}
		if err := rows.Scan(into...); err != nil {
			return nil, err
		}
		answer = append(answer, row)
	}
	return answer, rows.Err()
}

// The statements are constants, spelled out here a second time: a change of what the server is asked is a decision.
const (
	wantInstancesSQL = `SELECT id, is_draining FROM system.sql_instances`
	wantGossipSQL    = `SELECT l.node_id, l.epoch, l.draining, l.membership, n.is_live FROM crdb_internal.gossip_liveness AS l JOIN crdb_internal.gossip_nodes AS n ON n.node_id = l.node_id`
)

var (
	instanceColumns = []string{"id", "is_draining"}
	gossipColumns   = []string{"node_id", "epoch", "draining", "membership", "is_live"}
)

type rowsOf [][]any

func (r rowsOf) rows(columns []string) *sqlmock.Rows {
	rows := sqlmock.NewRows(columns)
	for _, row := range r {
		values := make([]any, len(row))
		copy(values, row)
		into := make([]driver.Value, len(row))
		for i := range values {
			into[i] = values[i]
		}
		rows.AddRow(into...)
	}
	return rows
}

func TestInstancesAnswers(t *testing.T) {
	for _, tt := range []struct {
		name    string
		columns []string
		rows    rowsOf
		want    map[nodeID]nodeState
		err     string
	}{
		{"three nodes, one drains, NULL is false", instanceColumns, rowsOf{{1, false}, {2, true}, {3, nil}},
			map[nodeID]nodeState{1: {live: true}, 2: {draining: true}, 3: {live: true}}, ""},
		{"the text of other drivers", instanceColumns, rowsOf{{"7", "t"}, {"8", "f"}}, map[nodeID]nodeState{7: {draining: true}, 8: {live: true}}, ""},
		{"the largest ID", instanceColumns, rowsOf{{maxNodeID, true}}, map[nodeID]nodeState{maxNodeID: {draining: true}}, ""},
		{"empty", instanceColumns, nil, nil, "an empty answer"},
		{"ID 0", instanceColumns, rowsOf{{1, false}, {0, true}}, nil, `node ID "0" is not between 1 and 2147483647`},
		{"ID -1", instanceColumns, rowsOf{{-1, true}}, nil, `node ID "-1" is not between 1 and 2147483647`},
		{"ID 2^31", instanceColumns, rowsOf{{1 << 31, true}}, nil, `node ID "2147483648" is not between 1 and 2147483647`},
		{"ID 2^32+1", instanceColumns, rowsOf{{1<<32 + 1, true}}, nil, `node ID "4294967297" is not between 1 and 2147483647`},
		{"ID NULL", instanceColumns, rowsOf{{nil, true}}, nil, "a node ID is NULL"},
		{"ID text", instanceColumns, rowsOf{{"n1", true}}, nil, `node ID "n1" is not between 1 and 2147483647`},
		{"ID float", instanceColumns, rowsOf{{1.5, true}}, nil, `node ID "1.5" is not between 1 and 2147483647`},
		{"ID twice", instanceColumns, rowsOf{{4, false}, {4, true}}, nil, "node ID 4 comes twice"},
		{"is_draining text", instanceColumns, rowsOf{{1, "maybe"}}, nil, `column is_draining has "maybe"`},
		{"is_draining number", instanceColumns, rowsOf{{1, 1}}, nil, `column is_draining has "1"`},
		{"is_draining empty", instanceColumns, rowsOf{{1, ""}}, nil, `column is_draining has ""`},
		{"one column", []string{"id"}, rowsOf{{1}}, nil, "1 columns instead of 2"},
		{"three columns", []string{"id", "is_draining", "x"}, rowsOf{{1, true, 3}}, nil, "3 columns instead of 2"},
		{"a forged line", instanceColumns, rowsOf{{"1\nlevel=ERROR " + strings.Repeat("x", 200), true}}, nil,
			`node ID "1\nlevel=ERROR ` + strings.Repeat("x", 64-len("1\nlevel=ERROR ")) + `" is not between 1 and 2147483647`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			side, mock := newMock(t)
			mock.ExpectQuery(wantInstancesSQL).WillReturnRows(tt.rows.rows(tt.columns))
			nodes, err := askInstances(t.Context(), side)
			wantNodes(t, nodes, err, tt.want, tt.err)
		})
	}
}

func TestGossipAnswers(t *testing.T) {
	for _, tt := range []struct {
		name    string
		columns []string
		rows    rowsOf
		want    map[nodeID]nodeState
		err     string
	}{
		{"every state", gossipColumns, rowsOf{
			{1, 3, false, "active", true},
			{2, 4, true, "active", true},
			{3, 5, false, "decommissioning", true},
			{4, 6, true, "decommissioned", false},
			{5, nil, nil, nil, nil},
		}, map[nodeID]nodeState{
			1: {epoch: 3, live: true},
			2: {epoch: 4, draining: true, live: true},
			3: {epoch: 5, decommissioning: true, live: true},
			4: {epoch: 6, draining: true, decommissioning: true},
			5: {},
		}, ""},
		{"empty", gossipColumns, nil, nil, "an empty answer"},
		{"membership unknown", gossipColumns, rowsOf{{1, 1, false, "retired", true}}, nil, `column membership has "retired"`},
		{"membership empty", gossipColumns, rowsOf{{1, 1, false, "", true}}, nil, `column membership has ""`},
		{"epoch text", gossipColumns, rowsOf{{1, "first", false, "active", true}}, nil, `column epoch has "first"`},
		{"epoch too large", gossipColumns, rowsOf{{1, "9223372036854775808", false, "active", true}}, nil, `column epoch has "9223372036854775808"`},
		{"draining text", gossipColumns, rowsOf{{1, 1, "no", "active", true}}, nil, `column draining has "no"`},
		{"is_live number", gossipColumns, rowsOf{{1, 1, true, "active", 2}}, nil, `column is_live has "2"`},
		{"ID 0", gossipColumns, rowsOf{{0, 1, true, "active", true}}, nil, `node ID "0" is not between 1 and 2147483647`},
		{"ID -1", gossipColumns, rowsOf{{-1, 1, true, "active", true}}, nil, `node ID "-1" is not between 1 and 2147483647`},
		{"ID 2^31", gossipColumns, rowsOf{{1 << 31, 1, true, "active", true}}, nil, `node ID "2147483648" is not between 1 and 2147483647`},
		{"ID NULL", gossipColumns, rowsOf{{nil, 1, true, "active", true}}, nil, "a node ID is NULL"},
		{"ID twice", gossipColumns, rowsOf{{1, 1, false, "active", true}, {1, 2, true, "active", true}}, nil, "node ID 1 comes twice"},
		{"two columns", instanceColumns, rowsOf{{1, true}}, nil, "2 columns instead of 5"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			side, mock := newMock(t)
			mock.ExpectQuery(wantGossipSQL).WillReturnRows(tt.rows.rows(tt.columns))
			nodes, err := askGossip(t.Context(), side)
			wantNodes(t, nodes, err, tt.want, tt.err)
		})
	}
}

func wantNodes(t *testing.T, nodes map[nodeID]nodeState, err error, want map[nodeID]nodeState, text string) {
	t.Helper()
	switch {
	case text == "" && err != nil:
		t.Errorf("error %q", err)
	case text != "" && (err == nil || err.Error() != text):
		t.Errorf("error %v\n want %s", err, text)
	case !maps.Equal(nodes, want):
		t.Errorf("nodes %+v\n want %+v", nodes, want)
	}
}

// An error of the source is handed on as it is: sqlstate.go decides what it means.
func TestSourcesHandErrorsOn(t *testing.T) {
	for name, want := range transient {
		side, mock := newMock(t)
		mock.ExpectQuery(wantInstancesSQL).WillReturnError(want)
		if _, err := askInstances(t.Context(), side); !errors.Is(err, want) {
			t.Errorf("instances, %s: %v", name, err)
		}
		if errors.Is(want, io.EOF) {
			continue // sqlmock's rows end so
		}
		mock.ExpectQuery(wantGossipSQL).WillReturnRows(rowsOf{{1, 1, true, "active", true}}.rows(gossipColumns).RowError(0, want))
		if nodes, err := askGossip(t.Context(), side); !errors.Is(err, want) || nodes != nil {
			t.Errorf("gossip, %s in the middle of rows: %v, %v", name, nodes, err)
		}
	}
}

func TestVerifyRule(t *testing.T) {
	for _, tt := range []struct {
		name  string
		rows  rowsOf
		err   error
		stamp nodeID
		rule  uint32
		node  nodeID
	}{
		{"the same", rowsOf{{"3"}}, nil, 3, ruleHolds, 3},
		{"D13 a proxy", rowsOf{{"3"}}, nil, 161, ruleAsk, 3},
		{"before v22.1", rowsOf{{"3"}}, nil, 0, ruleAsk, 3},
		{"an external SQL pod", rowsOf{{"0"}}, nil, 3, ruleOff, 0},
		{"words", rowsOf{{"three"}}, nil, 3, ruleOff, 0},
		{"NULL", rowsOf{{nil}}, nil, 3, ruleOff, 0},
		{"two rows", rowsOf{{"3"}, {"3"}}, nil, 3, ruleOff, 0},
		{"no row", nil, nil, 3, ruleOff, 0},
		{"not known here", nil, pgError("42704", `unrecognized configuration parameter "node_id"`), 3, ruleOff, 0},
		{"not allowed", nil, pgError("42501", "no"), 3, ruleOff, 0},
		{"not understood", nil, pgError("42601", "syntax error"), 3, ruleOff, 0},
		{"not built", nil, pgError("0A000", "unimplemented"), 3, ruleOff, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			side, mock := newMock(t)
			if q := mock.ExpectQuery("SHOW node_id"); tt.err != nil {
				q.WillReturnError(tt.err)
			} else {
				q.WillReturnRows(tt.rows.rows([]string{"node_id"}))
			}
			if rule, node := verifyRule(t.Context(), side, tt.stamp); rule != tt.rule || node != tt.node {
				t.Errorf("rule %d on node %d, want %d on %d", rule, node, tt.rule, tt.node)
			}
		})
	}
	// D07: what passes decides nothing, or one bad moment would turn culling by node off for the life of the process.
	for name, err := range transient {
		side, mock := newMock(t)
		mock.ExpectQuery("SHOW node_id").WillReturnError(err)
		if rule, node := verifyRule(t.Context(), side, 3); rule != ruleUnknown || node != 0 {
			t.Errorf("%s: rule %d on node %d, want to ask again", name, rule, node)
		}
	}
}

var bares atomic.Int64

// bare returns a watchdog without a worker, for a cluster of its own.
func bare(t testing.TB, params string, opts ...Option) (*Connector, *watchdog) {
	t.Helper()
	cfg, err := parseConfig(fmt.Sprintf("host=h user=u sslmode=disable crdbdrain_cluster=bare-%d %s", bares.Add(1), params))
	if err != nil {
		t.Fatal(err)
	}
	c := newConnector(cfg, opts...)
	w := registry.join(c)
	w.mu.Lock()
	w.stop = func() {} // it says that one runs
	w.mu.Unlock()
	t.Cleanup(func() { registry.leave(c, w) })
	return c, w
}

func (w *watchdog) answer(id sourceID, nodes map[nodeID]nodeState, err error) {
	w.take(pollResult{answers: []answer{{source: id, role: w.connectors()[0].role(), nodes: nodes, err: err, asked: time.Now()}}})
}

// sources returns which are asked.
func (q question) sources() (s sourceSet) {
	for _, a := range q.sql {
		for _, id := range a.due {
			s |= 1 << id
		}
	}
	if q.readiness {
		s |= 1 << sourceReadiness
	}
	return s
}

// F08: a poll that ends long after its time is over met a process that stood still: it says nothing, and is made again. Where
// that goes on it is the server that does not answer.
func TestF08APollThroughAStandstill(t *testing.T) {
	logs := new(logTrap)
	_, w := bare(t, "", WithLogger(logs.logger()))
	late := func(err error) bool {
		return w.take(pollResult{overslept: true, answers: []answer{{source: sourceInstances, role: w.connectors()[0].role(), err: err, asked: time.Now()}}})
	}
	w.answer(sourceInstances, map[nodeID]nodeState{1: {live: true}, 2: {live: true, draining: true}}, nil)
	if !late(context.DeadlineExceeded) || logs.count("source fails") != 0 || w.markOf(2) == nil {
		t.Errorf("the standstill is taken for a failure:\n%s", logs)
	}
	if late(context.DeadlineExceeded); logs.count("source fails") != 1 {
		t.Errorf("the second one in a row is no standstill:\n%s", logs)
	}
	w.answer(sourceInstances, map[nodeID]nodeState{1: {live: true}, 2: {live: true}}, nil)
	if !late(context.DeadlineExceeded) || logs.count("source fails") != 1 {
		t.Errorf("the next standstill is taken for a failure:\n%s", logs)
	}

	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(-2*standstill))
	defer cancel()
	early, cancelEarly := context.WithDeadline(t.Context(), time.Now().Add(-time.Millisecond))
	defer cancelEarly()
	if !overslept(ctx) || overslept(early) || overslept(t.Context()) {
		t.Error("which poll has overslept?")
	}
}

// D07: a passing error keeps what is known, backs off, and is forgotten with the next answer.
func TestD07TransientErrorsKeepTheLastAnswer(t *testing.T) {
	for name, err := range transient {
		t.Run(name, func(t *testing.T) {
			logs := &logTrap{}
			_, w := bare(t, "", WithLogger(logs.logger()))
			two := map[nodeID]nodeState{1: {live: true}, 2: {live: true, draining: true}}
			w.answer(sourceGossip, two, nil)
			for i := range 5 {
				w.answer(sourceGossip, nil, err)
				s := w.status(sourceGossip)
				if s.state != sourceFailing || s.failures != i+1 || !maps.Equal(s.nodes, two) {
					t.Fatalf("after %d failures: %+v", i+1, s)
				}
				if !w.isNodeMarked(2) {
					t.Fatalf("after %d failures the mark is gone", i+1)
				}
				if s.due.After(time.Now()) {
					t.Errorf("while a node drains the source is not asked before %v from now", time.Until(s.due))
				}
			}
			w.answer(sourceGossip, two, nil)
			if s := w.status(sourceGossip); s.state != sourceOK || s.failures != 0 || !s.due.IsZero() {
				t.Errorf("after an answer: %+v", s)
			}
			if n := logs.count("source fails"); n != 1 {
				t.Errorf("%d lines for 5 failures, want 1:\n%s", n, logs)
			}
			if n := logs.count("source works again"); n != 1 {
				t.Errorf("%d lines for the recovery, want 1:\n%s", n, logs)
			}
		})
	}
}

// The waits between failures grow to a bound, each ±20 % at random.
func TestFailuresBackOff(t *testing.T) {
	_, w := bare(t, "crdbdrain_poll_interval=5s")
	for i, seconds := range []int{5, 10, 20, 30, 30, 30} {
		want := time.Duration(seconds) * time.Second
		w.answer(sourceGossip, nil, errors.New("down"))
		if d := time.Until(w.status(sourceGossip).due); d > want*12/10 || d < want*8/10-time.Second {
			t.Errorf("failure %d: %v to the next try, want %v ±20 %%", i+1, d, want)
		}
	}
	// An interval longer than the bound is not shortened.
	_, w = bare(t, "crdbdrain_poll_interval=2m")
	w.answer(sourceGossip, nil, errors.New("down"))
	if d := time.Until(w.status(sourceGossip).due); d < 95*time.Second || d > 145*time.Second {
		t.Errorf("%v to the next try, want 2 min ±20 %%", d)
	}
}

// A denial latches one source and no other, with a line that names the remedy, and is asked again in 15 to 30 minutes.
func TestDenialsLatchOneSource(t *testing.T) {
	for code, err := range map[string]error{
		"42501": pgError("42501", "user app does not have VIEWCLUSTERMETADATA system privilege"),
		"0A000": pgError("0A000", "operation is unsupported within a virtual cluster"),
		"42P01": pgError("42P01", "relation does not exist"),
		"3F000": pgError("3F000", "schema does not exist"),
		"42883": pgError("42883", "unknown function"),
		"42703": pgError("42703", "column does not exist"),
	} {
		t.Run(code, func(t *testing.T) {
			logs := &logTrap{}
			_, w := bare(t, "", WithLogger(logs.logger()))
			for range 3 {
				w.answer(sourceGossip, nil, err)
				s := w.status(sourceGossip)
				if d := time.Until(s.denied[w.connectors()[0].role()]); s.state != sourceDenied || d < 15*time.Minute-time.Second || d > 30*time.Minute {
					t.Errorf("state %d, asked again in %v; want denied, 15 to 30 min", s.state, d)
				}
			}
			if s := w.status(sourceInstances); s.state != sourceOff || !s.due.IsZero() {
				t.Errorf("instances: %+v, want untouched", s)
			}
			reason, _ := denial(sourceGossip, err)
			if n := logs.count("WARN", "source is denied", `source="gossip"`, fmt.Sprintf("%q", reason)); n != 1 {
				t.Errorf("%d lines with the remedy, want 1:\n%s", n, logs)
			}
			if due := w.ask(time.Now()).sources(); due.has(sourceGossip) || !due.has(sourceInstances) {
				t.Errorf("due: %b, want instances without gossip", due)
			}
			if !w.ask(time.Now().Add(31 * time.Minute)).sources().has(sourceGossip) {
				t.Error("not due after 31 minutes")
			}
		})
	}
}

// An unreachable source: failing once, marks kept for three intervals, then dropped.
func TestAnUnreachableSourceLosesItsMarksAfterThreeIntervals(t *testing.T) {
	logs := &logTrap{}
	_, w := bare(t, "crdbdrain_poll_interval=5s", WithLogger(logs.logger()))
	w.answer(sourceGossip, map[nodeID]nodeState{1: {live: true}, 2: {draining: true}}, nil)
	w.answer(sourceInstances, map[nodeID]nodeState{1: {live: true}, 3: {draining: true}}, nil)
	start := w.status(sourceGossip).answered
	for range 20 {
		w.answer(sourceGossip, nil, &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("unreachable")})
	}
	at := func(d time.Duration) {
		w.mu.Lock()
		w.sources[sourceInstances].answered = start.Add(d)
		events := w.expire(start.Add(d))
		w.mu.Unlock()
		w.tell(events)
	}
	at(15 * time.Second)
	if !w.isNodeMarked(2) || !w.isNodeMarked(3) {
		t.Error("a mark is gone after three intervals to the dot")
	}
	at(15*time.Second + time.Millisecond)
	if w.isNodeMarked(2) || !w.isNodeMarked(3) {
		t.Error("after more than three intervals node 2 is still marked, or 3, whose source answers, is not")
	}
	if s := w.status(sourceGossip); s.nodes != nil || s.state != sourceFailing {
		t.Errorf("%+v: want failing, without nodes", s)
	}
	if n := logs.count("source fails"); n != 1 {
		t.Errorf("%d lines for 20 failures, want 1:\n%s", n, logs)
	}
}

// hostile starts a cluster whose tables answer as the test says, and returns a pool on it that polls them.
func hostile(t *testing.T, source func(table string) *crdbdraintest.Result, params string) (*pool, *logTrap) {
	t.Helper()
	c := crdbdraintest.Start(crdbdraintest.Config{Faults: crdbdraintest.Faults{Source: source}})
	t.Cleanup(c.Close)
	c.Grant("app", "admin")
	logs := &logTrap{}
	db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&"+params, WithLogger(logs.logger()))
	fill(t, db.DB, 6)
	return db, logs
}

// Answers that no honest server gives, over the wire: each is refused whole, with a text that says why, and culls nothing.
func TestHostileAnswersOverTheWire(t *testing.T) {
	t.Parallel()
	instances := func(columns []string, rows ...[]any) func(string) *crdbdraintest.Result {
		return func(table string) *crdbdraintest.Result {
			if table != "system.sql_instances" {
				return nil
			}
			return &crdbdraintest.Result{Columns: columns, Rows: rows}
		}
	}
	var many, enough [][]any
	for i := range 10_001 {
		many = append(many, []any{int64(i + 1), true})
	}
	enough = many[:10_000]
	for _, tt := range []struct {
		name   string
		source func(string) *crdbdraintest.Result
		want   string
	}{
		{"10,001 rows", instances(instanceColumns, many...), "more than 10000 rows"},
		{"ID 0", instances(instanceColumns, []any{int64(0), true}, []any{int64(1), true}), `node ID "0" is not between 1 and 2147483647`},
		{"ID -1", instances(instanceColumns, []any{int64(-1), true}), `node ID "-1" is not between 1 and 2147483647`},
		{"ID 2^31", instances(instanceColumns, []any{int64(1 << 31), true}), `node ID "2147483648" is not between 1 and 2147483647`},
		{"ID NULL", instances(instanceColumns, []any{nil, true}), "a node ID is NULL"},
		{"the same ID twice", instances(instanceColumns, []any{int64(1), true}, []any{int64(1), false}), "node ID 1 comes twice"},
		{"another type", instances(instanceColumns, []any{"n1", true}), `node ID "n1" is not between 1 and 2147483647`},
		{"a text where a bool belongs", instances(instanceColumns, []any{int64(1), "yes"}), `column is_draining has "yes"`},
		{"empty", instances(instanceColumns), "an empty answer"},
		{"a message of 2 MB", instances(instanceColumns, []any{int64(1), strings.Repeat("x", 2<<20)}), "invalid body length: expected at most 1048576, but got 2097163"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			db, logs := hostile(t, tt.source, "crdbdrain_sources=instances&crdbdrain_cull_stagger=0")
			w := db.wd()
			eventually(t, "three failures", func() bool { return w.status(sourceInstances).failures >= 3 })
			if n := logs.count("source fails", `source="instances"`); n != 1 {
				t.Errorf("%d lines, want 1:\n%s", n, logs)
			}
			quoted := strings.ReplaceAll(tt.want, `"`, `\"`)
			if logs.count("source fails", quoted) != 1 {
				t.Errorf("no line has %q:\n%s", tt.want, logs)
			}
			if s := w.status(sourceInstances); s.nodes != nil || w.marks.Load() != nil {
				t.Errorf("something was taken from it: %v", s.nodes)
			}
			if s := db.c.Stats(); s.Culled+s.Lost != 0 {
				t.Errorf("%+v", s)
			}
			if err := db.PingContext(t.Context()); err != nil {
				t.Errorf("the application notices: %v", err)
			}
		})
	}
	t.Run("10,000 rows are taken", func(t *testing.T) {
		t.Parallel()
		db, logs := hostile(t, instances(instanceColumns, enough...), "crdbdrain_sources=instances")
		w := db.wd()
		eventually(t, "an answer", func() bool { return len(w.status(sourceInstances).nodes) == 10_000 })
		// I05: every node drains, says a server: nothing is culled.
		polled := w.status(sourceInstances).answered
		eventually(t, "another", func() bool { return w.status(sourceInstances).answered.After(polled) })
		if s := db.c.Stats(); s.Culled != 0 {
			t.Errorf("%+v: culled with nowhere to go", s)
		}
		if n := logs.count("nothing is culled"); n > 1 {
			t.Errorf("%d lines, want one at most", n)
		}
	})
	t.Run("a table with other columns", func(t *testing.T) {
		t.Parallel()
		db, logs := hostile(t, instances([]string{"name", "state"}, []any{"n1", "fine"}), "crdbdrain_sources=instances")
		eventually(t, "denied", func() bool { return db.wd().status(sourceInstances).state == sourceDenied })
		logs.once(t, "source is denied", "does not have the column yet")
	})
	t.Run("membership that nobody knows", func(t *testing.T) {
		t.Parallel()
		db, logs := hostile(t, func(table string) *crdbdraintest.Result {
			if table != "crdb_internal.gossip_liveness" {
				return nil
			}
			return &crdbdraintest.Result{Columns: []string{"node_id", "epoch", "draining", "membership"},
				Rows: [][]any{{int64(1), int64(1), true, "retired\nlevel=ERROR"}}}
		}, "crdbdrain_sources=gossip")
		eventually(t, "failing", func() bool { return db.wd().status(sourceGossip).state == sourceFailing })
		logs.once(t, `column membership has \"retired\\nlevel=ERROR\"`)
	})
}

// D07 over the wire: each code in turn, then rows. The source is failing, never denied, and works again.
func TestD07TransientErrorsOverTheWire(t *testing.T) {
	t.Parallel()
	codes := []string{"40001", "57014", "53300", "08006", "25P02", "55000", "XXUUU", "0A000"}
	var asked atomic.Int64
	db, logs := hostile(t, func(table string) *crdbdraintest.Result {
		if table != "system.sql_instances" {
			return nil
		}
		if i := int(asked.Add(1)) - 1; i < len(codes) {
			return &crdbdraintest.Result{Err: &pgconn.PgError{Code: codes[i], Message: "cached plan must not change result type, say"}}
		}
		return nil
	}, "crdbdrain_sources=instances")
	w := db.wd()
	denied := false
	eventually(t, "it works after all of them", func() bool {
		s := w.status(sourceInstances)
		denied = denied || s.state == sourceDenied
		s.due = time.Time{}
		w.mu.Lock()
		if w.sources[sourceInstances].state == sourceFailing {
			w.sources[sourceInstances].due = time.Time{} // without the backoff
		}
		w.mu.Unlock()
		return s.state == sourceOK && int(asked.Load()) > len(codes)
	})
	if denied {
		t.Error("it was denied in between")
	}
	logs.once(t, "source fails")
	logs.once(t, "source works again")
}
