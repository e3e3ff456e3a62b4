package crdbdrain

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"reflect"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// E08: whatever pgx's connection and statement can do, ours can do with the same signatures; a method that is not
// forwarded is lost without a word.
func TestE08MethodSets(t *testing.T) {
	for _, tt := range []struct{ ours, pgx reflect.Type }{
		{reflect.TypeFor[*conn](), reflect.TypeFor[*stdlib.Conn]()},
		{reflect.TypeFor[*stmt](), reflect.TypeFor[*stdlib.Stmt]()},
	} {
		if tt.pgx.NumMethod() < 4 {
			t.Fatalf("%v has %d methods: the test shows nothing", tt.pgx, tt.pgx.NumMethod())
		}
		for m := range tt.pgx.Methods() {
			got, ok := tt.ours.MethodByName(m.Name)
			if !ok {
				t.Errorf("%v has no %s", tt.ours, m.Name)
				continue
			}
			if !sameSignature(got.Type, m.Type) {
				t.Errorf("%v.%s is %v, not %v", tt.ours, m.Name, got.Type, m.Type)
			}
		}
	}
	// Every optional interface of a connection, and what pgx answers to it.
	for _, i := range []reflect.Type{
		reflect.TypeFor[driver.Conn](),
		reflect.TypeFor[driver.ConnBeginTx](),
		reflect.TypeFor[driver.ConnPrepareContext](),
		reflect.TypeFor[driver.ExecerContext](),
		reflect.TypeFor[driver.QueryerContext](),
		reflect.TypeFor[driver.Pinger](),
		reflect.TypeFor[driver.NamedValueChecker](),
		reflect.TypeFor[driver.SessionResetter](),
		reflect.TypeFor[driver.Validator](), // ours; pgx has none
	} {
		if !reflect.TypeFor[*conn]().Implements(i) {
			t.Errorf("a connection is no %v", i)
		}
	}
	// What neither has must not appear: database/sql would use it in place of what pgx does.
	for _, i := range []reflect.Type{reflect.TypeFor[driver.ColumnConverter](), reflect.TypeFor[driver.NamedValueChecker]()} { //nolint:staticcheck // deprecated, which is why a test has to ask
		if got, want := reflect.TypeFor[*stmt]().Implements(i), reflect.TypeFor[*stdlib.Stmt]().Implements(i); got != want {
			t.Errorf("a statement is a %v: %v, pgx's: %v", i, got, want)
		}
	}
}

// sameSignature compares method types but for the receiver.
func sameSignature(a, b reflect.Type) bool {
	if a.NumIn() != b.NumIn() || a.NumOut() != b.NumOut() || a.IsVariadic() != b.IsVariadic() {
		return false
	}
	for i := 1; i < a.NumIn(); i++ {
		if a.In(i) != b.In(i) {
			return false
		}
	}
	for i := range a.NumOut() {
		if a.Out(i) != b.Out(i) {
			return false
		}
	}
	return true
}

// E08: rows are pgx's own, so that every column type question has pgx's answer; Raw shows pgx's connection.
func TestE08RowsAndRawArePgxsOwn(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	p := open(t, c.DSN(), still)
	conn, err := p.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	err = conn.Raw(func(dc any) error {
		rows, err := dc.(driver.QueryerContext).QueryContext(t.Context(), "SELECT 1", nil)
		if err != nil {
			return err
		}
		defer rows.Close()
		if _, ok := rows.(*stdlib.Rows); !ok {
			t.Errorf("rows of a query are %T", rows)
		}
		rows.Close()
		st, err := dc.(driver.ConnPrepareContext).PrepareContext(t.Context(), "SELECT $1::INT8")
		if err != nil {
			return err
		}
		defer st.Close()
		rows, err = st.(driver.StmtQueryContext).QueryContext(t.Context(), []driver.NamedValue{{Ordinal: 1, Value: int64(7)}})
		if err != nil {
			return err
		}
		defer rows.Close()
		if _, ok := rows.(*stdlib.Rows); !ok {
			t.Errorf("rows of a statement are %T", rows)
		}
		if st.NumInput() != 1 {
			t.Errorf("NumInput %d", st.NumInput())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	err = conn.Raw(func(dc any) error {
		px := dc.(interface{ Conn() *pgx.Conn }).Conn()
		var n int
		return errors.Join(px.QueryRow(t.Context(), "SELECT 7").Scan(&n), px.Ping(t.Context()))
	})
	if err != nil {
		t.Errorf("pgx's own connection: %v", err)
	}
	rows, err := conn.QueryContext(t.Context(), "SELECT 1::INT8 AS n, 'x'::STRING AS s")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	types, err := rows.ColumnTypes()
	if err != nil {
		t.Fatal(err)
	}
	if len(types) != 2 || types[0].DatabaseTypeName() != "INT8" || types[1].DatabaseTypeName() != "TEXT" || types[0].ScanType() != reflect.TypeFor[int64]() {
		t.Errorf("column types %+v %+v", types[0], types[1])
	}
}

// The calls without a context work as those with one: wrappers that know no contexts use them.
func TestE08CallsWithoutContext(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Nodes: 1})
	p := open(t, c.DSN(), still)
	p.SetMaxOpenConns(1)
	wrapped := p.hidden(t, hideBoth)
	for range 2 {
		tx, err := wrapped.Begin()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec("UPDATE t SET x = $1", 1); err != nil {
			t.Error(err)
		}
		if err := tx.Commit(); err != nil {
			t.Error(err)
		}
	}
	s := c.Node(1).Stats().Statements
	if s["begin"] != 2 || s["commit"] != 2 || s["UPDATE t SET x = $1"] != 2 {
		t.Errorf("executed %v", s)
	}
	var one int
	if err := wrapped.QueryRow("SELECT 1").Scan(&one); err != nil || one != 1 {
		t.Errorf("%d, %v", one, err)
	}
	if err := wrapped.PingContext(context.Background()); err != nil {
		t.Error(err)
	}
	if _, err := wrapped.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelSerializable}); err == nil {
		t.Error("options of a transaction were dropped without an error") // database/sql says so by itself
	}
}
