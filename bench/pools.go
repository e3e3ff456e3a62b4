package main

import (
	"context"
	"database/sql"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/crdbdrain/crdbdrain"
	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// contender is one of the pools that are compared.
type contender struct {
	name string
	open func(s scenario, c *crdbdraintest.Cluster) (pool, error)
}

const (
	plainPgx = "pgx"
	ours     = "crdbdrain"
)

var contenders = []contender{
	{plainPgx, func(s scenario, c *crdbdraintest.Cluster) (pool, error) { return openPgx(s, c, 0) }},
	{"pgx+life", func(s scenario, c *crdbdraintest.Cluster) (pool, error) { return openPgx(s, c, s.lifetime+s.jitter) }},
	{"pgxpool", func(s scenario, c *crdbdraintest.Cluster) (pool, error) { return openPgxpool(s, c, false) }},
	{"pgxpool+life", func(s scenario, c *crdbdraintest.Cluster) (pool, error) { return openPgxpool(s, c, true) }},
	{ours, openOurs},
}

// attached is pgxpool with the driver's hooks. It is there where -pools names it.
var attached = contender{"attached", openAttached}

// control is pgx on a cluster that nothing happens to.
var control = contender{"undrained", contenders[0].open}

// pool is what the load wants of a pool.
type pool interface {
	// run is one operation: a statement, or every third time a transaction of two. Nothing is tried again.
	run(ctx context.Context, n int) error
	// hold takes a connection, until release is called.
	hold(ctx context.Context) (release func(), err error)
	stats() crdbdrain.Stats
	close()
}

// parse makes pgx's config for a cluster, on which a dial takes as long as a real one.
func parse(s scenario, c *crdbdraintest.Cluster, params string) (*pgx.ConnConfig, error) {
	cfg, err := pgx.ParseConfig(dsn(s, c) + params)
	if err != nil {
		return nil, err
	}
	cfg.DialFunc = slowDial(s)
	return cfg, nil
}

func dsn(s scenario, c *crdbdraintest.Cluster) string {
	if s.hosts {
		return c.DSNAll()
	}
	return c.DSN()
}

func slowDial(s scenario) func(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := d.DialContext(ctx, network, addr)
		if err == nil && !pause(ctx, s.dial) {
			_ = nc.Close()
			return nil, ctx.Err()
		}
		return nc, err
	}
}

// sqlPool is a database/sql pool, on pgx or on crdbdrain.
type sqlPool struct {
	db        *sql.DB
	connector *crdbdrain.Connector // nil for pgx
}

func openPgx(s scenario, c *crdbdraintest.Cluster, lifetime time.Duration) (pool, error) {
	cfg, err := parse(s, c, "")
	if err != nil {
		return nil, err
	}
	var opts []stdlib.OptionOpenDB
	if s.hosts { // pgx tries them in order, and would have all its connections on the first node
		opts = append(opts, stdlib.OptionBeforeConnect(stdlib.RandomizeHostOrderFunc))
	}
	db := stdlib.OpenDB(*cfg, opts...)
	db.SetConnMaxLifetime(lifetime)
	return newSQLPool(s, db, nil), nil
}

func openOurs(s scenario, c *crdbdraintest.Cluster) (pool, error) {
	cfg, err := parse(s, c, strings.Replace(s.params, "READINESS", c.ReadinessURLs(), 1))
	if err != nil {
		return nil, err
	}
	connector, err := crdbdrain.NewConnector(cfg)
	if err != nil {
		return nil, err
	}
	return newSQLPool(s, sql.OpenDB(connector), connector), nil
}

func newSQLPool(s scenario, db *sql.DB, connector *crdbdrain.Connector) *sqlPool {
	db.SetMaxOpenConns(s.conns)
	db.SetMaxIdleConns(s.conns)
	return &sqlPool{db, connector}
}

func (p *sqlPool) run(ctx context.Context, n int) error {
	if n%3 != 0 {
		var one int
		return p.db.QueryRowContext(ctx, "SELECT 1").Scan(&one)
	}
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // nothing after Commit
	for _, change := range []int{-1, 1} {
		if _, err := tx.ExecContext(ctx, update, change, n+change); err != nil {
			return err
		}
	}
	return tx.Commit()
}

const update = "UPDATE accounts SET balance = balance + $1 WHERE id = $2"

func (p *sqlPool) hold(ctx context.Context) (func(), error) {
	c, err := p.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	return func() { _ = c.Close() }, nil
}

func (p *sqlPool) stats() crdbdrain.Stats {
	if p.connector == nil {
		return crdbdrain.Stats{}
	}
	return p.connector.Stats()
}

func (p *sqlPool) close() { _ = p.db.Close() }

type pgxPool struct{ *pgxpool.Pool }

func openPgxpool(s scenario, c *crdbdraintest.Cluster, lifetime bool) (pool, error) {
	cfg, err := pgxpool.ParseConfig(dsn(s, c))
	if err != nil {
		return nil, err
	}
	cfg.ConnConfig.DialFunc = slowDial(s)
	if s.hosts {
		cfg.BeforeConnect = stdlib.RandomizeHostOrderFunc
	}
	cfg.MaxConns = int32(s.conns)
	if lifetime {
		cfg.MaxConnLifetime, cfg.MaxConnLifetimeJitter = s.lifetime, s.jitter
		cfg.HealthCheckPeriod = s.lifetime / 6 // a minute by default, for lifetimes of half an hour
	}
	p, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		return nil, err
	}
	return pgxPool{p}, nil
}

// attachedPool is a pgxpool and the connector that AttachPool returned.
type attachedPool struct {
	pgxPool
	connector *crdbdrain.Connector
}

func openAttached(s scenario, c *crdbdraintest.Cluster) (pool, error) {
	cfg, err := pgxpool.ParseConfig(dsn(s, c) + strings.Replace(s.params, "READINESS", c.ReadinessURLs(), 1))
	if err != nil {
		return nil, err
	}
	cfg.ConnConfig.DialFunc = slowDial(s)
	cfg.MaxConns = int32(s.conns)
	connector, err := crdbdrain.AttachPool(cfg)
	if err != nil {
		return nil, err
	}
	p, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		return nil, err
	}
	return attachedPool{pgxPool{p}, connector}, nil
}

func (p attachedPool) stats() crdbdrain.Stats { return p.connector.Stats() }

func (p attachedPool) close() {
	p.pgxPool.close()
	_ = p.connector.Close()
}

func (p pgxPool) run(ctx context.Context, n int) error {
	if n%3 != 0 {
		var one int
		return p.QueryRow(ctx, "SELECT 1").Scan(&one)
	}
	tx, err := p.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(ctx) //nolint:errcheck // nothing after Commit
	for _, change := range []int{-1, 1} {
		if _, err := tx.Exec(ctx, update, change, n+change); err != nil {
			return err
		}
	}
	return tx.Commit(ctx)
}

func (p pgxPool) hold(ctx context.Context) (func(), error) {
	c, err := p.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	return c.Release, nil
}

func (pgxPool) stats() crdbdrain.Stats { return crdbdrain.Stats{} }

func (p pgxPool) close() { p.Close() }

// startCluster is crdbdraintest.Start, which panics where it cannot listen.
func startCluster(s scenario) (c *crdbdraintest.Cluster, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the simulated cluster does not start: %v", p)
		}
	}()
	return crdbdraintest.Start(crdbdraintest.Config{Nodes: s.nodes, Latency: s.latency, Settings: s.settings}), nil
}

// pause waits, and reports false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
