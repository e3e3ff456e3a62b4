package interop

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/crdbdrain/crdbdrain"
	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// bare is what wrappers of drivers usually forward: all but the two hooks of the pool.
type bare interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.Pinger
	driver.NamedValueChecker
}

type (
	withoutValidator struct {
		bare
		driver.SessionResetter
	}
	withoutResetter struct {
		bare
		driver.Validator
	}
	withoutBoth struct{ bare }
)

// wrapping is a connector whose connections wrap puts something around.
type wrapping struct {
	driver.Connector
	wrap func(driver.Conn) driver.Conn
}

func (w wrapping) Connect(ctx context.Context) (driver.Conn, error) {
	dc, err := w.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return w.wrap(dc), nil
}

func wrapped(name string, wrap func(driver.Conn) driver.Conn) library {
	return library{name: name, open: func(_ context.Context, dsn string) (*client, error) {
		c, err := openConnector(dsn)
		if err != nil {
			return nil, err
		}
		return plainClient(sql.OpenDB(wrapping{c, wrap})), nil
	}}
}

// E01: with one of the hooks hidden the pool still leaves in time: at checkout and by the sweep without Validator (otelsql
// before 0.43), at return and by the sweep without SessionResetter.
var (
	hidesValidator = wrapped("wrapper without Validator", func(dc driver.Conn) driver.Conn {
		return withoutValidator{dc.(bare), dc.(driver.SessionResetter)}
	})
	hidesResetter = wrapped("wrapper without SessionResetter", func(dc driver.Conn) driver.Conn {
		if v, ok := dc.(driver.Validator); ok {
			return withoutResetter{dc.(bare), v}
		}
		return withoutBoth{dc.(bare)} // pgx has none
	})
)

// E01: with both hidden nothing can be culled, which one line in the log says; the calls still do not fail.
func TestE01WrapperWithoutBoth(t *testing.T) {
	cluster := startCluster(nil, crdbdraintest.LoadBalancerConfig{})
	defer cluster.Close()
	cfg, err := pgx.ParseConfig(strings.Join(append([]string{cluster.DSN()}, drainParams(cluster)...), "&"))
	if err != nil {
		t.Fatal(err)
	}
	logs := new(lockedBuilder)
	connector, err := crdbdrain.NewConnector(cfg, crdbdrain.WithLogger(slog.New(slog.NewTextHandler(logs, nil))))
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(wrapping{connector, func(dc driver.Conn) driver.Conn { return withoutBoth{dc.(bare)} }})
	defer db.Close()
	defer connector.Close() // the wrapper hides it from db
	c := plainClient(db)
	db.SetMaxOpenConns(9)
	db.SetMaxIdleConns(9)
	var conns [9]*sql.Conn
	for i := range conns {
		if conns[i], err = db.Conn(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := conns[i].PingContext(t.Context()); err != nil { // one that was never used is the driver's to take
			t.Fatal(err)
		}
	}
	for _, conn := range conns {
		conn.Close()
	}
	turns := 0
	turn := func() {
		turns++
		if err := c.use(t.Context(), turns); err != nil {
			t.Errorf("turn %d: %v", turns, err)
		}
	}
	node := cluster.Node(1)
	held := node.Stats().Open
	drained := make(chan crdbdraintest.DrainResult, 1)
	go func() { drained <- node.Drain(context.Background()) }()
	var d crdbdraintest.DrainResult
	for done := false; !done; turn() {
		select {
		case d = <-drained:
			done = true
		case <-time.After(2 * time.Millisecond):
		}
	}
	for range 200 {
		turn() // on the connection that was given back last: many calls, and neither hook
	}
	if s := connector.Stats(); s.Culled != 0 || d.LostIdle+d.LostBusy != held || held == 0 {
		t.Errorf("%+v, %d of %d lost: want no culls and the whole node's lost", s, d.LostIdle+d.LostBusy, held)
	}
	db.Close() // the driver is sure when the connection is closed
	if n := strings.Count(logs.String(), "hides driver.Validator"); n != 1 {
		t.Errorf("%d lines say so, want 1:\n%s", n, logs.String())
	}
}

type lockedBuilder struct {
	mu sync.Mutex
	b  strings.Builder // guarded by mu
}

func (l *lockedBuilder) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuilder) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
