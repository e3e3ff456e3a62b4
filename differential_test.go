package crdbdrain_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/XSAM/otelsql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/crdbdrain/crdbdrain"
	"github.com/crdbdrain/crdbdrain/internal/pgtest"
)

// A side is one of the two drivers that are compared, on one database, and what it has shown.
type side struct {
	t     testing.TB
	dsn   string
	name  string // of the driver
	lines []string
	fails int // lines that are errors
}

// seen records what an application can tell of a value.
func (s *side) seen(values ...any) {
	for _, v := range values {
		s.lines = append(s.lines, own.ReplaceAllString(show(v), "…"))
	}
}

// own is what two sessions never have in common: addresses in memory, and the schema of temporary tables.
var own = regexp.MustCompile(`0x[0-9a-f]{6,}|pg_temp_[0-9]+`)

// err records an error: its text, and every type and SQLSTATE in its chain. It reports whether there is one.
func (s *side) err(err error) bool {
	if err == nil {
		s.lines = append(s.lines, "no error")
		return false
	}
	s.fails++
	s.lines = append(s.lines, own.ReplaceAllString("error "+chain(err)+" "+err.Error(), "…"))
	return true
}

func chain(err error) string {
	switch e := err.(type) {
	case *pgconn.PgError:
		return fmt.Sprintf("%+v", *e)
	case interface{ Unwrap() error }:
		return fmt.Sprintf("%T > %s", err, chain(e.Unwrap()))
	case interface{ Unwrap() []error }:
		var all []string
		for _, e := range e.Unwrap() {
			all = append(all, chain(e))
		}
		return fmt.Sprintf("%T > [%s]", err, strings.Join(all, "; "))
	}
	return fmt.Sprintf("%T is ErrBadConn %t, ErrNoRows %t, DeadlineExceeded %t", err,
		errors.Is(err, driver.ErrBadConn), errors.Is(err, sql.ErrNoRows), errors.Is(err, context.DeadlineExceeded))
}

func show(v any) string {
	switch v := v.(type) {
	case nil:
		return "nil"
	case []byte:
		return fmt.Sprintf("[]byte %q", v)
	case time.Time:
		return "time " + v.UTC().Format(time.RFC3339Nano)
	case fmt.Stringer:
		return fmt.Sprintf("%T %s", v, v)
	}
	return fmt.Sprintf("%T %+v", v, v)
}

// open opens a pool of one connection. change may change the configuration.
func (s *side) open(params string, change func(*pgx.ConnConfig)) *sql.DB {
	s.t.Helper()
	var db *sql.DB
	if change == nil {
		var err error
		if db, err = sql.Open(s.name, s.dsn+params); err != nil {
			s.t.Fatal(err)
		}
	} else {
		cfg, err := pgx.ParseConfig(s.dsn + params)
		if err != nil {
			s.t.Fatal(err)
		}
		change(cfg)
		if s.name == "pgx" {
			db = stdlib.OpenDB(*cfg)
		} else {
			c, err := crdbdrain.NewConnector(cfg)
			if err != nil {
				s.t.Fatal(err)
			}
			db = sql.OpenDB(c)
		}
	}
	db.SetMaxOpenConns(1)
	s.t.Cleanup(func() { db.Close() })
	return db
}

// querier is a pool, a connection or a transaction.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// query records columns and rows of every result of a query.
func (s *side) query(q querier, text string, args ...any) {
	s.t.Helper()
	rows, err := q.QueryContext(s.t.Context(), text, args...)
	s.rows(rows, err)
}

func (s *side) rows(rows *sql.Rows, err error) {
	s.t.Helper()
	if s.err(err) {
		return
	}
	defer rows.Close()
	for {
		types, err := rows.ColumnTypes()
		s.err(err)
		for _, c := range types {
			length, hasLength := c.Length()
			precision, scale, hasScale := c.DecimalSize()
			nullable, known := c.Nullable()
			s.seen(fmt.Sprint(c.Name(), c.DatabaseTypeName(), c.ScanType(), length, hasLength, precision, scale, hasScale, nullable, known))
		}
		for rows.Next() {
			values := make([]any, len(types))
			dest := make([]any, len(types))
			for i := range values {
				dest[i] = &values[i]
			}
			if !s.err(rows.Scan(dest...)) {
				s.seen(values...)
			}
		}
		if !rows.NextResultSet() {
			break
		}
	}
	s.err(rows.Err())
}

// exec records the result of a statement.
func (s *side) exec(q querier, text string, args ...any) {
	s.t.Helper()
	r, err := q.ExecContext(s.t.Context(), text, args...)
	if s.err(err) {
		return
	}
	n, err := r.RowsAffected()
	s.seen(n)
	s.err(err)
	_, err = r.LastInsertId()
	s.seen(fmt.Sprint("LastInsertId: ", err))
}

// scan records what one row becomes in dest, pointers.
func (s *side) scan(q *sql.DB, text string, dest ...any) {
	s.t.Helper()
	if s.err(q.QueryRowContext(s.t.Context(), text).Scan(dest...)) {
		return
	}
	for _, d := range dest {
		b, err := json.Marshal(d)
		if err != nil {
			s.t.Fatal(err)
		}
		s.seen(fmt.Sprintf("%T %s", d, b))
	}
}

// raw runs f with pgx's own connection.
func (s *side) raw(db *sql.DB, f func(ctx context.Context, c *pgx.Conn) error) {
	s.t.Helper()
	conn, err := db.Conn(s.t.Context())
	if s.err(err) {
		return
	}
	defer conn.Close()
	s.err(conn.Raw(func(dc any) error {
		c, ok := crdbdrain.PgxConn(dc)
		if !ok {
			return fmt.Errorf("no connection of pgx's in %T", dc)
		}
		return f(s.t.Context(), c)
	}))
}

// runs waits until a session of the database executes a statement.
func (s *side) runs(text string) {
	s.t.Helper()
	db := (&side{t: s.t, dsn: s.dsn, name: "pgx"}).open("", nil)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		var n int
		err := db.QueryRowContext(s.t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' AND query = $1", text).Scan(&n)
		if err == nil && n > 0 {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("nobody executes %q: %v", text, err)
		}
	}
}

type failing struct{}

func (failing) Value() (driver.Value, error) { return nil, errors.New("no value") }
func (failing) Scan(any) error               { return errors.New("no scan") }

type lower string

func (l lower) Value() (driver.Value, error) { return strings.ToLower(string(l)), nil }

type rewriter struct{}

func (rewriter) RewriteQuery(_ context.Context, _ *pgx.Conn, text string, args []any) (newText string, newArgs []any, err error) {
	return text + " + 1", args, nil
}

const differentialSchema = `
CREATE TYPE mood AS ENUM ('sad', 'happy');
CREATE TYPE pair AS (a int, b text);
CREATE TABLE parents (id int PRIMARY KEY);
CREATE TABLE things (
	id int PRIMARY KEY, name varchar(10) NOT NULL UNIQUE, price numeric(6,2) CHECK (price > 0), parent int REFERENCES parents, at timestamptz);
INSERT INTO parents VALUES (1);
INSERT INTO things VALUES (1, 'one', 1.50, 1, '2020-02-03 04:05:06.789+00'), (2, 'two', NULL, NULL, NULL);`

// arguments are values as $1 of "SELECT $1::TYPE", in every mode of execution.
var arguments = []struct {
	as    string
	value any
}{
	{"int8", 7}, {"int8", int8(-7)}, {"int8", uint32(7)}, {"int8", uint64(math.MaxUint64)}, {"int4", int64(math.MaxInt64)}, {"int8", "12"}, {"int8", "x"},
	{"float8", math.Inf(-1)}, {"float8", float32(1.5)}, {"float8", 7}, {"numeric", 1.25}, {"numeric", "1.2500"},
	{"numeric", pgtype.Numeric{Int: nil, NaN: true, Valid: true}}, {"bool", true}, {"bool", "t"}, {"bool", 1},
	{"text", "ä\U0001F600"}, {"text", ""}, {"text", "a\x00b"}, {"text", "\xff"}, {"text", 7}, {"text", []byte("raw")}, {"text", lower("LOWER")},
	{"bytea", []byte{0, 1, 255}}, {"bytea", []byte(nil)}, {"bytea", []byte{}}, {"bytea", "text"},
	{"text", nil}, {"int8", (*int)(nil)}, {"text", sql.NullString{}}, {"text", sql.Null[string]{V: "x", Valid: true}}, {"int8", new(7)},
	{"timestamptz", time.Date(2020, 2, 3, 4, 5, 6, 789_000_999, time.UTC)}, {"date", time.Date(2020, 2, 3, 4, 5, 6, 0, time.FixedZone("", 3600))},
	{"timestamp", time.Date(2020, 2, 3, 4, 5, 6, 0, time.FixedZone("", 3600))}, {"timestamptz", "2020-02-03"}, {"time", "04:05:06"}, {"time", time.Now},
	{"interval", 90 * time.Second}, {"interval", pgtype.Interval{Months: 14, Days: 3, Microseconds: 5, Valid: true}},
	{"text[]", []string{"a", `b"c`, "d,e", "", "NULL"}}, {"text[]", []string{}}, {"text[]", []string(nil)}, {"int8[]", []int{1, 2}}, {"int8[]", [][]int64{{1, 2}, {3, 4}}},
	{"int8[]", pgtype.FlatArray[*int64]{new(int64(1)), nil}}, {"text[]", pgtype.Array[string]{Elements: []string{"x"}, Dims: []pgtype.ArrayDimension{{Length: 1, LowerBound: 3}}, Valid: true}},
	{"uuid[]", [][16]byte{{1}, {2}}}, {"mood[]", []string{"sad"}}, {"int8[]", []string{"x"}},
	{"int4range", pgtype.Range[pgtype.Int4]{Lower: pgtype.Int4{Int32: 1, Valid: true}, LowerType: pgtype.Inclusive, UpperType: pgtype.Unbounded, Valid: true}},
	{"int4range", "[1,5)"}, {"int4range", "x"},
	{"int4multirange", pgtype.Multirange[pgtype.Range[pgtype.Int4]]{{Lower: pgtype.Int4{Int32: 1, Valid: true}, Upper: pgtype.Int4{Int32: 3, Valid: true}, LowerType: pgtype.Inclusive, UpperType: pgtype.Exclusive, Valid: true}}},
	{"jsonb", map[string]any{"a": []int{1}, "b": nil}}, {"jsonb", struct{ A int }{1}}, {"json", json.RawMessage(`{"a": 1}`)}, {"jsonb", `{"a":1}`}, {"jsonb", "x"},
	{"jsonb", []byte(`[1]`)}, {"jsonb", []string{"a"}}, {"jsonb", make(chan int)},
	{"uuid", pgtype.UUID{Bytes: [16]byte{1, 2, 15: 16}, Valid: true}}, {"uuid", [16]byte{9}}, {"uuid", "01020000-0000-0000-0000-000000000010"}, {"uuid", "x"},
	{"inet", netip.MustParseAddr("10.0.0.1")}, {"cidr", netip.MustParsePrefix("10.0.0.0/8")}, {"inet", net.ParseIP("::1")}, {"macaddr", net.HardwareAddr{1, 2, 3, 4, 5, 6}},
	{"point", pgtype.Point{P: pgtype.Vec2{X: 1, Y: 2}, Valid: true}}, {"varbit", pgtype.Bits{Bytes: []byte{0xa0}, Len: 3, Valid: true}}, {"xid", uint32(7)},
	{"mood", "happy"}, {"mood", "angry"}, {"pair", "(1,x)"}, {"money", "12.5"}, {"int8", failing{}}, {"int8", func() {}}, {"int8", struct{ X int }{1}},
	{"int8", sql.Named("n", 7)}, {"int8", complex(1, 2)},
}

// columns are expressions: what they are called, what types they have, and what comes of them.
const columns = `SELECT 1::int2, 2::int4 AS "Four", 3::int8, 4::oid, 1.5::float4, 'NaN'::float8, 12.340::numeric, 12.340::numeric(7,3), true, 't'::text,
	'v'::varchar(10), 'c'::char(3), 'n'::name, '\x00ff'::bytea, '2020-02-03'::date, 'infinity'::date, '04:05:06.7'::time, '04:05:06+02'::timetz,
	'2020-02-03 04:05:06'::timestamp, '2020-02-03 04:05:06+02'::timestamptz, '1 mon 2 days 03:00'::interval, '01020000-0000-0000-0000-000000000010'::uuid,
	'{"a": 1}'::json, '{"a": 1}'::jsonb, '10.0.0.1/8'::inet, '10.0.0.0/8'::cidr, '01:02:03:04:05:06'::macaddr, B'101'::bit(3), B'1'::varbit,
	'[1,5)'::int4range, '{[1,5)}'::int4multirange, '{1,NULL}'::int4[], '{{a,b},{c,d}}'::text[], '(1,2)'::point, '12.5'::money, 'a b'::tsvector,
	'sad'::mood, '{sad,happy}'::mood[], '(1,x)'::pair, ROW(1, 'x'), 'things'::regclass, NULL, NULL::int4, NULL::text[]`

var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// A call is something that an application does with a pool of one connection.
type call struct {
	name  string
	fails bool // some of it fails, as it should
	run   func(s *side, db *sql.DB)
}

func query(name, text string, args ...any) call {
	return call{name: name, run: func(s *side, db *sql.DB) { s.query(db, text, args...) }}
}

func failingQuery(name, text string, args ...any) call {
	c := query(name, text, args...)
	c.fails = true
	return c
}

func failingExec(name, text string, args ...any) call {
	return call{name: name, fails: true, run: func(s *side, db *sql.DB) { s.exec(db, text, args...) }}
}

var calls = []call{
	query("columns of a table", "SELECT *, price * 2, count(*) OVER () FROM things ORDER BY id"),
	query("no rows", "SELECT * FROM things WHERE false"),
	query("no columns", "SELECT"),
	query("an empty statement", ""),
	query("a query that returns nothing", "SET search_path TO public"),
	query("text in every format", columns, pgx.QueryResultFormats{pgx.TextFormatCode}),
	query("binary formats by type", "SELECT 1::int4, 2::int8, '{}'::jsonb", pgx.QueryResultFormatsByOID{pgtype.Int4OID: pgx.BinaryFormatCode, pgtype.JSONBOID: pgx.TextFormatCode}),
	query("NamedArgs", "SELECT @a::text, @b::int8, '@c', @a::text", pgx.NamedArgs{"a": "x", "b": 7}),
	query("NamedArgs with one missing", "SELECT @a::text, @missing::int8", pgx.NamedArgs{"a": "x"}),
	failingQuery("StrictNamedArgs with one missing", "SELECT @a::text, @missing::int8", pgx.StrictNamedArgs{"a": "x"}),
	query("NamedArgs after a mode", "SELECT @a::int8", pgx.QueryExecModeSimpleProtocol, pgx.NamedArgs{"a": 7}),
	query("a rewriter", "SELECT $1::int8", rewriter{}, 7),
	query("several arguments of a kind", "SELECT $1::int8 + $2, $1::int8::text || $3", 1, 2, "x"),
	failingQuery("too few arguments", "SELECT $1::int8, $2::int8", 1),
	failingQuery("too many arguments", "SELECT $1::int8", 1, 2),
	failingQuery("too many arguments, simple protocol", "SELECT $1::int8", pgx.QueryExecModeSimpleProtocol, 1, 2),
	failingQuery("an untyped argument", "SELECT $1", 1),
	query("many statements", "SELECT 1, 'a'; SELECT 2; SELECT 3", pgx.QueryExecModeSimpleProtocol),
	failingQuery("many statements with arguments", "SELECT $1::int8; SELECT 2", 1),

	failingExec("42601", "SELEC 1"),
	failingExec("42P01", "SELECT * FROM nowhere"),
	failingExec("42703", "SELECT nothing FROM things"),
	failingExec("42883", "SELECT nothing(1)"),
	failingExec("42P18", "PREPARE p AS SELECT $1 IS NULL; EXECUTE p"),
	failingExec("23505", "INSERT INTO things VALUES (1, 'x')"),
	failingExec("23503", "INSERT INTO things VALUES (9, 'x', 1, 99)"),
	failingExec("23502", "INSERT INTO things VALUES (9)"),
	failingExec("23514", "INSERT INTO things VALUES (9, 'x', -1)"),
	failingExec("22001", "INSERT INTO things VALUES (9, 'much too long')"),
	failingExec("22003", "INSERT INTO things VALUES (9, 'x', 12345678)"),
	failingExec("22P02", "SELECT 'x'::int"),
	failingExec("22012", "SELECT 1/0"),
	failingQuery("22012 after some rows", "SELECT 1/(3-i) FROM generate_series(1, 5) i"),
	failingExec("25006", "BEGIN READ ONLY; CREATE TABLE x ()"),
	failingExec("57014", "SET statement_timeout = 50; SELECT pg_sleep(10)"),
	failingExec("an error with everything", `DO $$ BEGIN RAISE EXCEPTION 'message' USING ERRCODE = 'CR001', DETAIL = 'detail', HINT = 'hint', COLUMN = 'c', TABLE = 't', SCHEMA = 's', DATATYPE = 'd', CONSTRAINT = 'k'; END $$`),
	failingExec("57P01 of the application's own", `DO $$ BEGIN RAISE EXCEPTION 'server is shutting down' USING ERRCODE = '57P01'; END $$`),
	failingExec("40001 of the application's own", `DO $$ BEGIN RAISE EXCEPTION 'restart' USING ERRCODE = '40001'; END $$`),

	{name: "results", run: func(s *side, db *sql.DB) {
		for _, text := range []string{
			"CREATE TEMP TABLE t (i int, d text)", "INSERT INTO t SELECT i, 'x' FROM generate_series(1, 5) i", "UPDATE t SET d = 'y' WHERE i > 2",
			"DELETE FROM t WHERE i = 1", "SELECT * FROM t", "TRUNCATE t", "", "-- nothing", "INSERT INTO t VALUES (1); INSERT INTO t VALUES (2), (3)",
			"MERGE INTO t USING (SELECT 1 AS j) u ON i = j WHEN MATCHED THEN DELETE", "VACUUM t", "DROP TABLE t",
		} {
			s.exec(db, text)
		}
		s.query(db, "INSERT INTO things (id, name) VALUES (77, 'x') RETURNING id, name, at")
		s.exec(db, "DELETE FROM things WHERE id = $1", 77)
	}},
	{name: "scans", run: func(s *side, db *sql.DB) {
		m := pgtype.NewMap()
		const literal = "SELECT 7::int8, 'x'::text, 1.5::numeric, '2020-02-03 04:05:06+00'::timestamptz, NULL::text, '\\x01'::bytea"
		s.scan(db, literal, new(int16), new(string), new(float64), new(time.Time), new(*string), new([]byte))
		s.scan(db, literal, new(string), new([]byte), new(string), new(string), new(sql.NullString), new(string))
		s.scan(db, literal, new(any), new(any), new(any), new(any), new(any), new(any))
		s.scan(db, literal, new(pgtype.Int8), new(pgtype.Text), new(pgtype.Numeric), new(pgtype.Timestamptz), new(pgtype.Text), new(sql.Null[[]byte]))
		s.scan(db, "SELECT '{1,2}'::int4[], '{a,NULL}'::text[], '[1,5)'::int4range, '{\"a\":[1]}'::jsonb, '01020000-0000-0000-0000-000000000010'::uuid",
			m.SQLScanner(new([]int)), m.SQLScanner(new([]*string)), m.SQLScanner(new(pgtype.Range[pgtype.Int4])), new(string), new(pgtype.UUID))
		s.scan(db, "SELECT true, 1::int4, 1.25::float4, 'a'::char(3), '10.0.0.1'::inet::text", new(bool), new(uint8), new(float32), new(string), new(string))
	}},
	{name: "scans that fail", fails: true, run: func(s *side, db *sql.DB) {
		var raw sql.RawBytes
		s.scan(db, "SELECT 'x'::text", new(int))
		s.scan(db, "SELECT 300::int4", new(int8))
		s.scan(db, "SELECT -1::int4", new(uint))
		s.scan(db, "SELECT NULL::text", new(string))
		s.scan(db, "SELECT 1::int4", new(time.Time))
		s.scan(db, "SELECT '{1,2}'::int4[]", new([]int))
		s.scan(db, "SELECT '{1,NULL}'::int4[]", pgtype.NewMap().SQLScanner(new([]int)))
		s.scan(db, "SELECT 1, 2", new(int))
		s.scan(db, "SELECT 1 WHERE false", new(int))
		s.scan(db, "SELECT 1", new(failing))
		s.scan(db, "SELECT 'x'::text", &raw)
	}},
	{name: "statements", run: func(s *side, db *sql.DB) {
		st, err := db.PrepareContext(s.t.Context(), "SELECT $1::int8 + 1, $2::text")
		s.err(err)
		for i := range 3 {
			rows, err := st.QueryContext(s.t.Context(), i, "x")
			s.rows(rows, err)
		}
		tx, err := db.BeginTx(s.t.Context(), nil)
		s.err(err)
		rows, err := tx.StmtContext(s.t.Context(), st).QueryContext(s.t.Context(), 9, nil)
		s.rows(rows, err)
		s.err(tx.Commit())
		s.err(st.Close())
		s.query(db, "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%+ 1, $2%' AND statement NOT LIKE '%count%'")
	}},
	{name: "statements that fail", fails: true, run: func(s *side, db *sql.DB) {
		_, err := db.PrepareContext(s.t.Context(), "SELECT FROM WHERE")
		s.err(err)
		st, err := db.PrepareContext(s.t.Context(), "SELECT $1::int8")
		s.err(err)
		for _, args := range [][]any{{}, {1, 2}, {"x"}, {make(chan int)}, {failing{}}} {
			rows, err := st.QueryContext(s.t.Context(), args...)
			s.rows(rows, err)
		}
		s.exec(db, "DEALLOCATE ALL")
		rows, err := st.QueryContext(s.t.Context(), 1)
		s.rows(rows, err)
		s.err(st.Close())
		_, err = st.ExecContext(s.t.Context(), 1)
		s.err(err)
	}},
	{name: "a plan that has become another", fails: true, run: func(s *side, db *sql.DB) {
		s.exec(db, "CREATE TEMP TABLE t (i int)")
		for range 2 {
			s.query(db, "SELECT * FROM t")
		}
		s.exec(db, "ALTER TABLE t ADD COLUMN j int")
		for range 3 {
			s.query(db, "SELECT * FROM t")
		}
	}},
	{name: "transactions", run: func(s *side, db *sql.DB) {
		for _, o := range []sql.TxOptions{
			{}, {Isolation: sql.LevelReadUncommitted}, {Isolation: sql.LevelReadCommitted}, {Isolation: sql.LevelRepeatableRead}, {Isolation: sql.LevelSnapshot},
			{Isolation: sql.LevelSerializable}, {ReadOnly: true}, {Isolation: sql.LevelSerializable, ReadOnly: true},
		} {
			tx, err := db.BeginTx(s.t.Context(), &o)
			if s.err(err) {
				continue
			}
			s.query(tx, "SELECT current_setting('transaction_isolation'), current_setting('transaction_read_only')")
			s.err(tx.Commit())
		}
		tx, err := db.BeginTx(s.t.Context(), nil)
		s.err(err)
		s.exec(tx, "INSERT INTO parents VALUES (50)")
		s.err(tx.Rollback())
		s.query(db, "SELECT count(*) FROM parents WHERE id = 50")
	}},
	{name: "transactions that fail", fails: true, run: func(s *side, db *sql.DB) {
		for _, o := range []sql.TxOptions{{Isolation: sql.LevelWriteCommitted}, {Isolation: sql.LevelLinearizable}, {Isolation: 99}} {
			_, err := db.BeginTx(s.t.Context(), &o)
			s.err(err)
		}
		tx, err := db.BeginTx(s.t.Context(), &sql.TxOptions{ReadOnly: true})
		s.err(err)
		s.exec(tx, "INSERT INTO parents VALUES (50)")
		s.exec(tx, "SELECT 1") // 25P02
		s.err(tx.Commit())     // rolls back
		s.err(tx.Commit())
		s.err(tx.Rollback())

		ctx, cancel := context.WithCancel(s.t.Context())
		tx, err = db.BeginTx(ctx, nil)
		s.err(err)
		cancel()
		for deadline := time.Now().Add(10 * time.Second); tx.Rollback() == nil && time.Now().Before(deadline); {
		}
		s.err(tx.Commit())

		// A transaction that the application leaves open on its connection is not handed to the next one.
		s.exec(db, "BEGIN; CREATE TEMP TABLE left_open ()")
		s.query(db, "SELECT to_regclass('left_open')::text")
	}},
	{name: "contexts", fails: true, run: func(s *side, db *sql.DB) {
		ended, cancel := context.WithCancel(s.t.Context())
		cancel()
		_, err := db.ExecContext(ended, "SELECT 1")
		s.err(err)
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
			s.err(db.PingContext(s.t.Context())) // the deadline is for the statement, not for a dial
			ctx, cancel := context.WithTimeout(s.t.Context(), time.Second)
			_, err := db.ExecContext(ctx, "SELECT pg_sleep(60)", mode)
			s.err(err)
			cancel()

			ctx, cancel = context.WithCancel(s.t.Context())
			done := make(chan error, 1)
			go func() { _, err := db.ExecContext(ctx, "SELECT pg_sleep(61)", mode); done <- err }()
			s.runs("SELECT pg_sleep(61)")
			cancel()
			s.err(<-done)
		}
		ctx, cancelRows := context.WithCancel(s.t.Context())
		rows, err := db.QueryContext(ctx, "SELECT i, repeat('x', 10000) FROM generate_series(1, 100000) i")
		s.err(err)
		s.seen(rows.Next())
		cancelRows()
		for rows.Next() { // until the cancellation has arrived
		}
		s.seen(errors.Is(rows.Err(), context.Canceled))
		s.err(rows.Close())
		s.query(db, "SELECT 'and on'")
	}},
	{name: "CopyFrom", fails: true, run: func(s *side, db *sql.DB) {
		s.raw(db, func(ctx context.Context, c *pgx.Conn) error {
			if _, err := c.Exec(ctx, "CREATE TEMP TABLE copied (i int PRIMARY KEY, d text, a int[], j jsonb, u uuid)"); err != nil {
				return err
			}
			into, names := pgx.Identifier{"copied"}, []string{"i", "d", "a", "j", "u"}
			n, err := c.CopyFrom(ctx, into, names, pgx.CopyFromRows([][]any{
				{1, "x", []int32{1, 2}, map[string]any{"k": 1}, [16]byte{1}}, {2, nil, nil, nil, nil},
			}))
			s.seen(n)
			s.err(err)
			n, err = c.CopyFrom(ctx, into, names[:1], pgx.CopyFromRows([][]any{{3}, {1}}))
			s.seen(n)
			s.err(err)
			n, err = c.CopyFrom(ctx, into, names[:1], pgx.CopyFromRows([][]any{{"x"}}))
			s.seen(n)
			s.err(err)
			n, err = c.CopyFrom(ctx, pgx.Identifier{"nowhere"}, names[:1], pgx.CopyFromRows(nil))
			s.seen(n)
			s.err(err)
			return nil
		})
		s.query(db, "SELECT * FROM copied ORDER BY i")
	}},
	{name: "Batch", fails: true, run: func(s *side, db *sql.DB) {
		s.raw(db, func(ctx context.Context, c *pgx.Conn) error {
			for _, last := range []string{"SELECT 3", "SELECT 1/0", "SELEC 3"} {
				b := new(pgx.Batch)
				b.Queue("SELECT $1::int8", 1).QueryRow(func(row pgx.Row) error {
					var n int
					err := row.Scan(&n)
					s.seen(n)
					return err
				})
				b.Queue("INSERT INTO parents VALUES ($1)", 60).Exec(func(tag pgconn.CommandTag) error { s.seen(tag.String()); return nil })
				b.Queue("DELETE FROM parents WHERE id = $1", 60)
				b.Queue(last)
				s.err(c.SendBatch(ctx, b).Close())
			}
			return nil
		})
	}},
	{name: "through Raw", fails: true, run: func(s *side, db *sql.DB) {
		s.raw(db, func(ctx context.Context, c *pgx.Conn) error {
			rows, err := c.Query(ctx, "SELECT id, name FROM things ORDER BY id")
			s.err(err)
			maps, err := pgx.CollectRows(rows, pgx.RowToMap)
			s.err(err)
			s.seen(maps)
			mood, err := c.LoadType(ctx, "mood")
			s.err(err)
			c.TypeMap().RegisterType(mood)
			var got []string
			s.err(c.QueryRow(ctx, "SELECT '{happy}'::mood[]::text[]").Scan(&got))
			s.seen(got)
			d, err := c.Prepare(ctx, "named", "SELECT $1::int8 AS n")
			s.err(err)
			s.seen(d.Name, d.SQL, d.ParamOIDs, d.Fields[0].Name)
			s.err(c.Deallocate(ctx, "named"))
			results, err := c.PgConn().Exec(ctx, "SELECT 1; SELECT 2, 3; SELEC").ReadAll()
			s.err(err)
			s.seen(len(results))
			s.seen(c.PgConn().ParameterStatus("server_encoding"), string(c.PgConn().TxStatus()))
			err = pgx.BeginFunc(ctx, c, func(tx pgx.Tx) error {
				lo := tx.LargeObjects()
				oid, err := lo.Create(ctx, 0)
				s.err(err)
				return lo.Unlink(ctx, oid)
			})
			s.err(err)
			if _, err := c.Exec(ctx, "LISTEN l; NOTIFY l, 'hello'"); err != nil {
				return err
			}
			n, err := c.WaitForNotification(ctx)
			s.err(err)
			s.seen(n.Channel, n.Payload)
			return errors.New("the application's own")
		})
		s.query(db, "SELECT 1")
	}},
	{name: "a connection that the application gives up", run: func(s *side, db *sql.DB) {
		conn, err := db.Conn(s.t.Context())
		s.err(err)
		_ = conn.Raw(func(any) error { return driver.ErrBadConn })
		s.seen(db.Stats().OpenConnections)
		s.query(db, "SELECT 1")
	}},
	{name: "a panic in Raw", run: func(s *side, db *sql.DB) {
		conn, err := db.Conn(s.t.Context())
		s.err(err)
		func() {
			defer func() { s.seen(recover()) }()
			_ = conn.Raw(func(any) error { panic("the application's own") })
		}()
		conn.Close()
		s.seen(db.Stats().OpenConnections)
		s.query(db, "SELECT 1")
	}},
	{name: "two transactions that do not go together", fails: true, run: func(s *side, db *sql.DB) {
		db.SetMaxOpenConns(2)
		var txs [2]*sql.Tx
		for i := range txs {
			tx, err := db.BeginTx(s.t.Context(), &sql.TxOptions{Isolation: sql.LevelSerializable})
			s.err(err)
			s.query(tx, "SELECT count(*) FROM parents")
			txs[i] = tx
		}
		for i, tx := range txs {
			s.exec(tx, "INSERT INTO parents VALUES ($1)", 70+i)
		}
		for _, tx := range txs {
			s.err(tx.Commit()) // the second: 40001
		}
		s.exec(db, "DELETE FROM parents WHERE id >= 70")
	}},
	{name: "hooks of the configuration", run: func(s *side, _ *sql.DB) {
		var tr events
		db := s.open("", func(c *pgx.ConnConfig) {
			c.Tracer = &tr
			c.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { tr.add("notice %s", n.Message) }
			c.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) { tr.add("notification %s", n.Payload) }
			c.AfterConnect = func(ctx context.Context, c *pgconn.PgConn) error {
				tr.add("after connect")
				return c.Exec(ctx, "SET application_name = 'hooked'").Close()
			}
			c.OnPgError = func(_ *pgconn.PgConn, e *pgconn.PgError) bool { tr.add("error %s", e.Code); return true }
		})
		s.query(db, "SELECT current_setting('application_name')")
		s.exec(db, "LISTEN l")
		s.exec(db, "NOTIFY l, 'hello'")
		s.exec(db, "DO $$ BEGIN RAISE NOTICE 'noted'; END $$")
		_, err := db.ExecContext(s.t.Context(), "SELECT 1/0")
		s.seen(err.Error())
		s.raw(db, func(ctx context.Context, c *pgx.Conn) error {
			b := new(pgx.Batch)
			b.Queue("SELECT 1")
			if err := c.SendBatch(ctx, b).Close(); err != nil {
				return err
			}
			_, err := c.CopyFrom(ctx, pgx.Identifier{"parents"}, []string{"id"}, pgx.CopyFromRows(nil))
			return err
		})
		s.seen(len(tr) > 15)
		s.seen([]string(tr))
	}},
	{name: "a hook that closes the connection", fails: true, run: func(s *side, _ *sql.DB) {
		db := s.open("", func(c *pgx.ConnConfig) {
			c.OnPgError = func(_ *pgconn.PgConn, e *pgconn.PgError) bool { return e.Code != "22012" }
		})
		s.exec(db, "SELECT 1/0")
		s.query(db, "SELECT 1")
	}},
	{name: "parameters of pgx", fails: true, run: func(s *side, _ *sql.DB) {
		for _, params := range []string{
			"&default_query_exec_mode=simple_protocol", "&default_query_exec_mode=exec", "&default_query_exec_mode=cache_describe", "&default_query_exec_mode=describe_exec",
			"&statement_cache_capacity=0", "&statement_cache_capacity=1", "&description_cache_capacity=0&default_query_exec_mode=cache_describe", "&timezone=Asia/Tokyo",
			"&options=-c%20search_path%3Dpg_catalog",
		} {
			db := s.open(params, nil)
			for range 2 {
				s.query(db, "SELECT $1::int8, $2::text, $3::timestamptz::text, $4::text[]", 7, "x", "2020-02-03 04:05:06+00", []string{"a"})
			}
			s.query(db, "SHOW search_path")
		}
	}},
	// DSNs that cannot be parsed are not here: the driver's errors for them are its own, and hold no secret.
	{name: "connections that are not made", fails: true, run: func(s *side, _ *sql.DB) {
		for _, dsn := range []string{
			s.dsn + "&dbname=nowhere", s.dsn + "&user=nobody_known", s.dsn + "&unknown_parameter=1", s.dsn + "&target_session_attrs=standby",
			s.dsn + "&sslmode=require", s.dsn + "&connect_timeout=1&host=127.0.0.1&port=1",
		} {
			db, err := sql.Open(s.name, dsn)
			if s.err(err) {
				continue
			}
			s.err(db.PingContext(s.t.Context()))
			db.Close()
		}
	}},
}

// events is what pgx's hooks and tracers are told.
type events []string

func (e *events) add(format string, args ...any) { *e = append(*e, fmt.Sprintf(format, args...)) }

func (e *events) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	e.add("query %s %v", d.SQL, d.Args)
	return ctx
}

func (e *events) TraceQueryEnd(_ context.Context, _ *pgx.Conn, d pgx.TraceQueryEndData) {
	e.add("query end %s %v", d.CommandTag, d.Err)
}

func (e *events) TracePrepareStart(ctx context.Context, _ *pgx.Conn, d pgx.TracePrepareStartData) context.Context {
	e.add("prepare %s", d.SQL)
	return ctx
}

func (e *events) TracePrepareEnd(_ context.Context, _ *pgx.Conn, d pgx.TracePrepareEndData) {
	e.add("prepare end %t %v", d.AlreadyPrepared, d.Err)
}

func (e *events) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	e.add("batch %d", d.Batch.Len())
	return ctx
}

func (e *events) TraceBatchQuery(_ context.Context, _ *pgx.Conn, d pgx.TraceBatchQueryData) {
	e.add("batch query %s %v", d.SQL, d.Err)
}

func (e *events) TraceBatchEnd(_ context.Context, _ *pgx.Conn, d pgx.TraceBatchEndData) {
	e.add("batch end %v", d.Err)
}

func (e *events) TraceCopyFromStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceCopyFromStartData) context.Context {
	e.add("copy %v", d.TableName)
	return ctx
}

func (e *events) TraceCopyFromEnd(_ context.Context, _ *pgx.Conn, d pgx.TraceCopyFromEndData) {
	e.add("copy end %v", d.Err)
}

func (e *events) TraceConnectStart(ctx context.Context, _ pgx.TraceConnectStartData) context.Context {
	e.add("connect")
	return ctx
}

func (e *events) TraceConnectEnd(_ context.Context, d pgx.TraceConnectEndData) {
	e.add("connect end %v", d.Err)
}

// E07: on PostgreSQL an application cannot tell the driver from pgx: what it gets for each call is the same, value for
// value, error for error, column type for column type.
func TestE07Differential(t *testing.T) {
	t.Parallel()
	d := pgtest.Shared(t).CreateDatabase(t)
	admin := (&side{t: t, dsn: d.DSN(), name: "pgx"}).open("", nil)
	if _, err := admin.ExecContext(t.Context(), differentialSchema); err != nil {
		t.Fatal(err)
	}
	all := slices.Clone(calls)
	for _, mode := range modes {
		all = append(all, call{name: fmt.Sprintf("arguments, %v", mode), fails: true, run: func(s *side, db *sql.DB) {
			for _, a := range arguments {
				s.seen(a.as)
				s.query(db, "SELECT $1::"+a.as, mode, a.value)
			}
		}}, query(fmt.Sprintf("columns, %v", mode), columns, mode))
	}
	for _, c := range all {
		t.Run(c.name, func(t *testing.T) {
			sides := [2]*side{{name: "pgx"}, {name: "crdbdrain"}}
			for _, s := range sides {
				s.t, s.dsn = t, d.DSN()
				c.run(s, s.open("", nil))
			}
			want, got := sides[0], sides[1]
			if (want.fails > 0) != c.fails || len(want.lines) == 0 {
				t.Errorf("%d of pgx's %d lines are errors: the call shows something else than it should:\n%s", want.fails, len(want.lines), strings.Join(want.lines, "\n"))
			}
			for i := range max(len(want.lines), len(got.lines)) {
				w, g := "nothing", "nothing"
				if i < len(want.lines) {
					w = want.lines[i]
				}
				if i < len(got.lines) {
					g = got.lines[i]
				}
				if w != g {
					t.Errorf("line %d:\npgx:       %s\ncrdbdrain: %s", i, w, g)
				}
			}
			if testing.Verbose() {
				t.Log("\n" + strings.Join(want.lines, "\n"))
			}
		})
	}
}

// selfish is a wrapper that shows itself as what it wraps; wrapper is a decent one.
type selfish struct{ driver.Conn }

func (s selfish) Raw() driver.Conn { return s }

type wrapper struct{ driver.Conn }

func (w wrapper) Raw() driver.Conn { return w.Conn }

// E03, E04: what Raw shows is not *stdlib.Conn, and PgxConn finds pgx's connection in ours, in pgx's own and under
// otelsql, also under several wrappers; what holds none, and a wrapper that shows itself, is answered and not looped on.
func TestE03E04PgxConnOfWrappers(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Shared(t).CreateDatabase(t).DSN()
	twice, err := otelsql.Open("crdbdrain", dsn+"&crdbdrain_otelsql=on")
	if err != nil {
		t.Fatal(err)
	}
	dbs := map[string]*sql.DB{"otelsql over otelsql": twice}
	for name, o := range map[string][2]string{"crdbdrain": {"crdbdrain", dsn}, "pgx": {"pgx", dsn}, "otelsql inside": {"crdbdrain", dsn + "&crdbdrain_otelsql=on"}} {
		if dbs[name], err = sql.Open(o[0], o[1]); err != nil {
			t.Fatal(err)
		}
	}
	if dbs["otelsql outside"], err = otelsql.Open("crdbdrain", dsn); err != nil {
		t.Fatal(err)
	}
	for name, db := range dbs {
		t.Run(name, func(t *testing.T) {
			defer db.Close()
			conn, err := db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			err = conn.Raw(func(dc any) error {
				if _, ok := dc.(*stdlib.Conn); ok != (name == "pgx") {
					t.Errorf("%T", dc)
				}
				if c, ok := crdbdrain.PgxConn(wrapper{selfish{dc.(driver.Conn)}}); ok {
					t.Errorf("%v in a wrapper that shows itself", c)
				}
				var pid uint32
				for _, w := range []any{dc, wrapper{dc.(driver.Conn)}, wrapper{wrapper{wrapper{dc.(driver.Conn)}}}} {
					c, ok := crdbdrain.PgxConn(w)
					if !ok {
						return fmt.Errorf("nothing in %T", w)
					}
					if pid != 0 && c.PgConn().PID() != pid {
						t.Error("another connection")
					}
					if pid = c.PgConn().PID(); pid == 0 {
						t.Error("no connection to a server")
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	for _, none := range []any{nil, 7, (*sql.DB)(nil), wrapper{}, struct{ driver.Conn }{}} {
		if c, ok := crdbdrain.PgxConn(none); ok {
			t.Errorf("%v in %T", c, none)
		}
	}
}
