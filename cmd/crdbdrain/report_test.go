package main

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestQuantile(t *testing.T) {
	upTo := func(n int) []time.Duration {
		all := make([]time.Duration, n)
		for i := range all {
			all[i] = time.Duration(i + 1)
		}
		return all
	}
	for _, tt := range []struct {
		n    int
		q    float64
		want time.Duration
	}{
		{0, .5, 0}, {0, 1, 0},
		{1, 0, 1}, {1, .5, 1}, {1, .999, 1}, {1, 1, 1},
		{2, .5, 1}, {2, .51, 2}, {3, .5, 2}, {4, .5, 2},
		{100, .99, 99}, {101, .99, 100}, {100, .999, 100}, {100, 1, 100},
		{1000, .999, 999}, {1001, .999, 1000}, {10000, .999, 9990},
	} {
		if got := quantile(upTo(tt.n), tt.q); got != tt.want {
			t.Errorf("quantile(1…%d, %v) = %d, want %d", tt.n, tt.q, got, tt.want)
		}
	}
}

func TestErrorCode(t *testing.T) {
	shutdown := &pgconn.PgError{Severity: "ERROR", Code: "57P01", Message: "server is shutting down"}
	for _, tt := range []struct {
		err  error
		want string
	}{
		{shutdown, "57P01"},
		{fmt.Errorf("begin: %w", shutdown), "57P01"},
		{errors.Join(io.ErrUnexpectedEOF, shutdown), "57P01"},
		{fmt.Errorf("read: %w", io.ErrUnexpectedEOF), "unexpected EOF"},
		{io.EOF, "unexpected EOF"},
		{&os.SyscallError{Syscall: "read", Err: syscall.ECONNRESET}, "connection reset"},
		{&os.SyscallError{Syscall: "write", Err: syscall.EPIPE}, "connection reset"},
		{&os.SyscallError{Syscall: "connect", Err: syscall.ECONNREFUSED}, "connection refused"},
		{driver.ErrBadConn, "bad connection"},
		{pgconn.ErrConnClosed, "closed connection"},
		{context.DeadlineExceeded, "timeout"},
		{os.ErrDeadlineExceeded, "timeout"},
		{errors.New("something"), "other"},
	} {
		if got := errorCode(tt.err); got != tt.want {
			t.Errorf("errorCode(%v) = %q, want %q", tt.err, got, tt.want)
		}
	}
}

// aReport is one with a number for everything.
func aReport() *report {
	ms := func(all ...float64) []time.Duration {
		var d []time.Duration
		for _, f := range all {
			d = append(d, time.Duration(f*float64(time.Millisecond)))
		}
		return d
	}
	side := func(driver string, ops int64, errs map[string]int64, lost, culled, rerun int64, drain time.Duration, perNode ...int) *result {
		r := newResult(driver)
		r.ops, r.errors, r.lost, r.culled, r.rerun = ops, errs, lost, culled, rerun
		r.drains = []time.Duration{drain, drain, drain}
		r.roll = 3 * drain
		r.steady, r.rolling = ms(1, 2, 3), ms(2, 4, 1234.5678)
		r.perNode = map[string]int{"1": perNode[0], "2": perNode[1], "3": perNode[2]}
		return r
	}
	window, defaults := defaultDemo.scenarios[0], defaultDemo.scenarios[1]
	return &report{workers: 16, conns: 30, scenarios: []scenarioResult{
		{window, []*result{
			side("pgx", 12345, map[string]int64{"57P01": 1, "unexpected EOF": 2}, 30, 0, 0, 5*time.Second, 10, 20, 0),
			side("crdbdrain", 1234567, map[string]int64{}, 0, 31, 0, 3300*time.Millisecond, 15, 15, 0),
		}},
		{defaults, []*result{
			side("pgx", 10, map[string]int64{"unexpected EOF": 1}, 29, 0, 0, 4*time.Millisecond, 1, 2, 3),
			side("crdbdrain", 20, map[string]int64{}, 28, 1, 7, 5*time.Millisecond, 12, 12, 6),
		}},
	}}
}

func TestText(t *testing.T) {
	const want = `
Every node drained and restarted under load (16 workers, 30 connections)

                             window of 5 s    server's defaults
                            pgx  crdbdrain       pgx  crdbdrain
operations               12,345  1,234,567        10         20
errors                        3          0         1          0
  unexpected EOF              2          0         1          0
  57P01                       1          0         0          0
lost connections             30          0        29         28
culled connections            -         31         -          1
requests run again            -          0         -          7
drain of node 1, s         5.00       3.30      0.00       0.01
drain of node 2, s         5.00       3.30      0.00       0.01
drain of node 3, s         5.00       3.30      0.00       0.01
steady p50, ms              2.0        2.0       2.0        2.0
steady p99, ms              3.0        3.0       3.0        3.0
steady p99.9, ms            3.0        3.0       3.0        3.0
steady max, ms              3.0        3.0       3.0        3.0
roll p50, ms                4.0        4.0       4.0        4.0
roll p99, ms             1234.6     1234.6    1234.6     1234.6
roll p99.9, ms           1234.6     1234.6    1234.6     1234.6
roll max, ms             1234.6     1234.6    1234.6     1234.6
connections per node    10/20/0    15/15/0     1/2/3    12/12/6

With a window the server closed 30 of pgx's connections and none of
crdbdrain's, which had left in time; the application saw 3 errors with pgx and
no error with crdbdrain. A drain is over as soon as the last connection is
gone: after 5.0 s on average with pgx, 3.3 s with crdbdrain.
With the server's defaults nobody can leave in time: it closed 29 of pgx's
connections and 28 of crdbdrain's; the application saw 1 error with pgx and no
error with crdbdrain, which hands out no connection that the server has closed,
and runs again what the server has said it did not execute (7 this time).
The cluster is simulated (package crdbdraintest, made from CockroachDB's source
and documentation): what it shows is the order and the messages of a drain, not
CockroachDB's speed.
`
	if got := aReport().text(); got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}

func TestJSON(t *testing.T) {
	got, err := aReport().json()
	if err != nil {
		t.Fatal(err)
	}
	latencies := `"steady_ms":{"p50":2,"p99":3,"p99.9":3,"max":3},"roll_ms":{"p50":4,"p99":1234.568,"p99.9":1234.568,"max":1234.568}`
	want := strings.ReplaceAll(`{"drivers":[`+
		`{"driver":"pgx","ops":12355,"errors":4,"errors_by_code":{"57P01":1,"unexpected EOF":3},"lost":59,"culled":0,"rerun":0,"drain_seconds":[5,5,5,0.004,0.004,0.004],"roll_seconds":15.012,LATENCIES,"connections_per_node":{"1":1,"2":2,"3":3}},`+
		`{"driver":"crdbdrain","ops":1234587,"errors":0,"errors_by_code":{},"lost":28,"culled":32,"rerun":7,"drain_seconds":[3.3,3.3,3.3,0.005,0.005,0.005],"roll_seconds":9.915,LATENCIES,"connections_per_node":{"1":12,"2":12,"3":6}}],`+
		`"scenarios":[{"name":"window","drivers":[`+
		`{"driver":"pgx","ops":12345,"errors":3,"errors_by_code":{"57P01":1,"unexpected EOF":2},"lost":30,"culled":0,"rerun":0,"drain_seconds":[5,5,5],"roll_seconds":15,LATENCIES,"connections_per_node":{"1":10,"2":20,"3":0}},`+
		`{"driver":"crdbdrain","ops":1234567,"errors":0,"errors_by_code":{},"lost":0,"culled":31,"rerun":0,"drain_seconds":[3.3,3.3,3.3],"roll_seconds":9.9,LATENCIES,"connections_per_node":{"1":15,"2":15,"3":0}}]},`+
		`{"name":"defaults","drivers":[`+
		`{"driver":"pgx","ops":10,"errors":1,"errors_by_code":{"unexpected EOF":1},"lost":29,"culled":0,"rerun":0,"drain_seconds":[0.004,0.004,0.004],"roll_seconds":0.012,LATENCIES,"connections_per_node":{"1":1,"2":2,"3":3}},`+
		`{"driver":"crdbdrain","ops":20,"errors":0,"errors_by_code":{},"lost":28,"culled":1,"rerun":7,"drain_seconds":[0.005,0.005,0.005],"roll_seconds":0.015,LATENCIES,"connections_per_node":{"1":12,"2":12,"3":6}}]}]}`+
		"\n", "LATENCIES", latencies)
	if got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}

func TestThousands(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 7: "7", 999: "999", 1000: "1,000", 123456: "123,456", 1234567: "1,234,567", -1: "-1", -123: "-123", -1234: "-1,234"} {
		if got := thousands(n); got != want {
			t.Errorf("thousands(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestWrap(t *testing.T) {
	if got, want := wrap("one two  three\nfour", 9), "one two\nthree\nfour\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, want := wrap("longerthanthat x", 5), "longerthanthat\nx\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
