// Package crdbdrain is a database/sql driver for CockroachDB that makes node drains invisible.
//
// Every rolling upgrade, restart, decommission and scale-in of a CockroachDB cluster drains nodes: a draining node closes
// its SQL connections. A service on another driver then sees errors (57P01, unexpected EOF, driver: bad connection) and
// stalls while its pool reconnects. With this one the pool leaves the node first, at a bounded pace, and what the server
// cuts off without a word is survived where it provably can be.
//
// # Open
//
//	import _ "github.com/crdbdrain/crdbdrain"
//
//	db, err := sql.Open("crdbdrain", "postgres://app@lb.example:26257/defaultdb?sslmode=verify-full&crdbdrain_readiness=https://n1:8080,https://n2:8080,https://n3:8080")
//
// The DSN is pgx's in all its forms (URL, keyword/value, service file, environment), with the driver's own parameters
// added; they never reach the server. Everything pgx can do still works: the driver wraps
// [github.com/jackc/pgx/v5/stdlib], and the connection that [database/sql.Conn.Raw] shows has its method
// Conn() *pgx.Conn. Those who need pgx's hooks, a tracer or a dialer use [NewConnector] with [database/sql.OpenDB].
// On PostgreSQL, and behind a pooler that hides CockroachDB, the driver is pgx and sends no query of its own.
//
// # Parameters
//
//	crdbdrain_mode                    on        observe: everything but the culls, which are counted as would-be; off: plain pgx
//	crdbdrain_sources                 auto      comma list of instances, gossip, readiness, feed, manual, errors; auto: every one that is configured and permitted
//	crdbdrain_readiness               none      comma list of the nodes' HTTP base URLs; {host} stands for each host of the DSN; a name stands for all its addresses
//	crdbdrain_unsafe_internals        off       on: the watchdog's own connection may SET allow_unsafe_internals (v26.1 and later need it for instances and gossip; the server audits it)
//	crdbdrain_poll_interval           5s        at least 100ms, ±20 % at random
//	crdbdrain_poll_interval_draining  1s        the same, while any node is marked
//	crdbdrain_poll_timeout            2s        one poll, dial included
//	crdbdrain_cull_stagger            500ms     longest gap between culls; 0: no pacing
//	crdbdrain_window                  auto      how long the server leaves connections alone (initial_wait + connections.timeout); auto: what its settings say where they may be read, else 10s
//	crdbdrain_spares                  2         replacements dialled ahead while a node drains, outside MaxOpenConns; 0: none
//	crdbdrain_rerun                   on        off: surface the error instead of running again what the server provably did not execute
//	crdbdrain_rebalance               on        off: do not move a fair share back when a node has returned or joined
//	crdbdrain_ttl                     0         replace connections older than this (up to a tenth more at random), at most one every
//	crdbdrain_ttl_stagger             6s
//	crdbdrain_feed                    none      URL of a drain feed: this process then asks the cluster nothing
//	crdbdrain_feed_token_file         none      its bearer token; read for every request
//	crdbdrain_max_connections         0         ceiling over all pools of the cluster in the process; 0: none
//	crdbdrain_host_order              random    with more than one host; listed: in the DSN's order. Hosts known to be marked nodes come last
//	crdbdrain_cluster                 none      a name that makes several DSNs one cluster; default: the set of hosts and the routing option
//	crdbdrain_otelsql                 off       on: spans and query metrics of XSAM/otelsql
//
// # How a drain is noticed
//
// CockroachDB tells the rest of the cluster that a node drains ("draining" in gossip) only after the node has closed its
// last SQL connection (pkg/server/drain.go), so the obvious signal comes too late. Earlier ones, first to last:
//
//	instances   system.sql_instances.is_draining   the moment the drain starts      v24.3+, VIEWSYSTEMTABLE
//	readiness   /health?ready=1 answers 503        the start of initial_wait        no privilege; the nodes' HTTP addresses
//	errors      57P01 on a new connection          after initial_wait               always on
//	errors      57P01 on an existing connection    after connections.timeout        always on
//	gossip      draining in gossip_liveness        after the last connection        decommissioning: minutes to hours early
//
// With the server's default settings (both 0s) all of these come within milliseconds, and no client can leave in time.
// What the driver does then: it never hands out a connection that the server has closed, and runs again, on another
// node, a statement that the server's own shutdown notice shows was not executed.
//
// # Several pools, several processes
//
// All pools of one cluster in a process share one watchdog: one poll an interval, made with a role that may. One
// process can poll for all others ([NewFeedHandler], the command crdbdrain feed), and pace what they do together.
// [Connector.SetDraining] marks a node by hand, [Connector.WaitDrained] is the barrier of a roll script, and
// [Connector.Shutdown] empties a pool before its process ends.
//
// # What it never does
//
// It does not send a statement again that may have run, close a connection in use, retry the body of a transaction, or
// send SQL of its own on an application's connection (behind a proxy that hides the node, one SHOW node_id when the
// connection is opened). It culls nothing when it knows no other node to go to.
//
// # Limits
//
// A transaction that is still open when transactions.timeout is over fails. An autocommit statement whose connection
// ends without a word (EOF, reset) fails, because it may have run. The server facts come from CockroachDB's source and
// documentation; the driver is tested on a simulated cluster made from them ([github.com/crdbdrain/crdbdrain/crdbdraintest])
// and on PostgreSQL.
package crdbdrain

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"io"
	"time"

	"github.com/XSAM/otelsql"
)

// Driver is the database/sql driver, registered as "crdbdrain". It has no state.
type Driver struct{}

var (
	_ driver.Driver        = (*Driver)(nil)
	_ driver.DriverContext = (*Driver)(nil)
)

var theDriver = &Driver{}

func init() { sql.Register("crdbdrain", theDriver) }

// Open opens one connection, within a minute. [sql.Open] uses OpenConnector instead.
func (d *Driver) Open(dsn string) (driver.Conn, error) {
	c, err := d.OpenConnector(dsn)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	dc, err := c.Connect(ctx)
	if err != nil {
		if closer, ok := c.(io.Closer); ok {
			_ = closer.Close()
		}
		return nil, err
	}
	if one, ok := unwrap(dc).(*conn); ok {
		one.single = true
	}
	return dc, nil
}

// OpenConnector reads the DSN; an error names the parameter and the accepted form, and contains no secret. It dials
// nothing and starts nothing. An empty DSN is pgx's defaults and environment.
func (d *Driver) OpenConnector(dsn string) (driver.Connector, error) {
	cfg, err := parseConfig(dsn)
	if err != nil {
		return nil, err
	}
	c := newConnector(cfg)
	if cfg.otelsql {
		return otelsql.WrapDriver(connectorDriver{theDriver, c}).(driver.DriverContext).OpenConnector("") //nolint:forcetypeassert // connectorDriver is one
	}
	return c, nil
}

// connectorDriver lets otelsql, which wraps drivers, wrap one connector.
type connectorDriver struct {
	*Driver
	connector *Connector
}

func (d connectorDriver) OpenConnector(string) (driver.Connector, error) { return d.connector, nil }
