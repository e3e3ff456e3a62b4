package crdbdrain

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/metric/noop"
	"golang.org/x/sync/errgroup"
)

// CheckVerdict is what a check comes to.
type CheckVerdict string

// The verdicts.
const (
	CheckOK      CheckVerdict = "ok"      // all that is configured works, and the pool can leave a node in time
	CheckLimited CheckVerdict = "limited" // it connects, but something that is configured, or that a drain needs, is missing
	CheckFailed  CheckVerdict = "failed"  // it does not connect
)

// CheckReport says what will work with a configuration, from where it was asked. It contains no password and no token. Its
// JSON is stable: fields are added, none is renamed or changes its meaning.
type CheckReport struct {
	Verdict  CheckVerdict   `json:"verdict"`
	Hosts    []CheckHost    `json:"hosts"`  // the DSN's, in its order
	Server   CheckServer    `json:"server"` // of the first host that could be connected to
	Stamp    CheckStamp     `json:"stamp"`
	Sources  []CheckSource  `json:"sources"`
	Window   CheckWindow    `json:"window"`
	Findings []CheckFinding `json:"findings"` // problems first
}

// CheckHost is one host of the DSN.
type CheckHost struct {
	Host    string `json:"host"`
	Node    int    `json:"node,omitempty"`    // that answered; a load balancer's can be another one each time
	Version string `json:"version,omitempty"` // of CockroachDB
	TLS     string `json:"tls,omitempty"`     // the protocol's version, or "none"
	Error   string `json:"error,omitempty"`
	Remedy  string `json:"remedy,omitempty"`
}

// CheckServer is the server.
type CheckServer struct {
	// Product is "CockroachDB", "PostgreSQL", "unknown", or empty if nothing could be connected to.
	Product string `json:"product"`
	Version string `json:"version,omitempty"` // as the server says it
	// Hidden says that it is CockroachDB, and that a pooler keeps its crdb_version from the driver.
	Hidden bool   `json:"hidden,omitempty"`
	User   string `json:"user,omitempty"`
}

// CheckStamp says whether the driver can tell which node a connection is on.
type CheckStamp struct {
	// Rule is "holds" (BackendKeyData tells), "asked" (a proxy is in the path; each new connection is asked once), or
	// "unknown": nothing is culled by node.
	Rule   string `json:"rule"`
	Node   int    `json:"node,omitempty"` // by SHOW node_id
	Detail string `json:"detail"`
}

// CheckSource is one source of drains.
type CheckSource struct {
	Source string `json:"source"`
	State  string `json:"state"` // ok, off, failing, denied; as in the metric crdbdrain.source.state
	// Early says that the source tells of a drain before the node closes connections.
	Early     bool            `json:"early"`
	Wanted    bool            `json:"wanted"` // configured by name: that it does not work is a problem
	Nodes     []int           `json:"nodes,omitempty"`
	Leaving   []int           `json:"leaving,omitempty"` // those of Nodes that drain or are being decommissioned
	Endpoints []CheckEndpoint `json:"endpoints,omitempty"`
	Detail    string          `json:"detail,omitempty"`
	Remedy    string          `json:"remedy,omitempty"` // the GRANT, SET or parameter that it lacks
}

// CheckEndpoint is one readiness endpoint: an address of a URL.
type CheckEndpoint struct {
	URL    string `json:"url"`
	Node   int    `json:"node,omitempty"`
	State  string `json:"state"` // ready, draining, not ready, failing
	Error  string `json:"error,omitempty"`
	Remedy string `json:"remedy,omitempty"`
}

// CheckWindow is how long a draining node leaves connections alone. Times are in milliseconds.
type CheckWindow struct {
	Known                 bool  `json:"known"` // the role may see the server's settings
	InitialWaitMS         int64 `json:"initial_wait_ms"`
	ConnectionsTimeoutMS  int64 `json:"connections_timeout_ms"`
	TransactionsTimeoutMS int64 `json:"transactions_timeout_ms"`
	TotalMS               int64 `json:"total_ms"` // initial_wait + connections.timeout; 0: nobody can leave in time
	// UsedMS is what the driver counts on, and Origin why: "crdbdrain_window", "server", "feed", or "assumed".
	UsedMS int64  `json:"used_ms"`
	Origin string `json:"origin"`
	Detail string `json:"detail,omitempty"`
	Remedy string `json:"remedy,omitempty"`
}

// CheckFinding is something to repair (level "problem", for which the verdict is limited or failed) or to think about
// ("advice").
type CheckFinding struct {
	Level  string `json:"level"`
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"` // what to type or set
}

const (
	levelProblem = "problem"
	levelAdvice  = "advice"

	productCockroachDB = "CockroachDB"
	productPostgreSQL  = "PostgreSQL"

	// checkDial bounds a dial of the check where ctx does not.
	checkDial   = 10 * time.Second
	dialsAtOnce = 16
	// balancerNotices is how long a load balancer takes to notice that a node is unready, with the settings that
	// CockroachDB's documentation shows for HAProxy: inter 2s, fall 3, and the last check's own time.
	balancerNotices = 8 * time.Second

	sqlVersion    = "SELECT version()"
	sqlBackendPID = "SELECT pg_backend_pid()"

	notCockroachDB = "the server does not show itself as CockroachDB"
)

// Check says what will work with a DSN, from here: the server, whether the driver can tell a connection's node, each source
// of drains with the privilege or parameter that it lacks, and the window that the server's settings leave. It opens one
// connection to each host, asks each source once as the driver would, and closes everything; it takes at most the poll
// timeout and ten seconds, or as long as ctx lets it.
//
// The error says that the DSN is malformed, and the report is nil; or that no host could be connected to, and the report has
// what could be found out all the same. It never contains a secret.
func Check(ctx context.Context, dsn string) (*CheckReport, error) {
	cfg, err := parseConfig(dsn)
	if err != nil {
		return nil, err
	}
	c := newConnector(cfg)
	defer c.Close()
	return c.Check(ctx)
}

// Check is the function of that name for a connector, with its pgx config and options. It has no effect on the connector and
// its pools.
func (c *Connector) Check(ctx context.Context) (*CheckReport, error) {
	// A connector and a watchdog of its own, which nobody else sees and whose worker never runs.
	probe := &Connector{
		cfg: c.cfg, log: slog.New(slog.DiscardHandler), provider: noop.NewMeterProvider(), stdOpts: c.stdOpts,
		registry: &watchdogs{dialFeed: c.registry.dialFeed},
	}
	probe.ctx, probe.cancel = context.WithCancel(context.Background())
	defer probe.Close()
	k := &checker{cfg: c.cfg, probe: probe, r: &CheckReport{
		Server: CheckServer{User: c.cfg.pgx.User}, Stamp: CheckStamp{Rule: "unknown"}, Findings: []CheckFinding{},
	}}
	var readiness, feed CheckSource
	var apart sync.WaitGroup
	apart.Go(func() { readiness = k.readiness(ctx) })
	apart.Go(func() { feed = k.feed(ctx) })
	side, err := k.connect(ctx)
	var instances, gossip CheckSource
	if err == nil {
		k.server(ctx, side)
		instances, gossip = k.sql(ctx, side)
		k.settings(ctx, side)
		side.close()
	} else {
		instances = CheckSource{Source: sourceInstances.String(), State: "failing", Detail: "no connection"}
		gossip = CheckSource{Source: sourceGossip.String(), State: "failing", Detail: "no connection"}
		k.r.Window.Detail = "no connection"
	}
	apart.Wait()
	errorsSource := CheckSource{Source: sourceErrors.String(), State: "ok", Detail: "always on: the server's own 57P01, when the node closes its connections"}
	if k.r.Server.Product != productCockroachDB || k.r.Server.Hidden {
		errorsSource.State, errorsSource.Detail = "off", notCockroachDB
	}
	if err != nil {
		errorsSource.Detail = "no connection"
	}
	k.r.Sources = []CheckSource{instances, readiness, feed, gossip, errorsSource}
	k.judge(err)
	return k.r, err
}

type checker struct {
	cfg   *config
	probe *Connector
	r     *CheckReport
}

func (k *checker) problem(text, remedy string) {
	k.r.Findings = append(k.r.Findings, CheckFinding{levelProblem, text, remedy})
}

func (k *checker) advise(text, remedy string) {
	k.r.Findings = append(k.r.Findings, CheckFinding{levelAdvice, text, remedy})
}

// connect dials every host, and returns the first connection in the DSN's order.
func (k *checker) connect(ctx context.Context) (*sideConn, error) {
	hosts := k.cfg.hosts()
	k.r.Hosts = make([]CheckHost, len(hosts))
	sides, errs := make([]*sideConn, len(hosts)), make([]error, len(hosts))
	var group errgroup.Group
	group.SetLimit(dialsAtOnce)
	for i, h := range hosts {
		group.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, checkDial)
			defer cancel()
			out := &k.r.Hosts[i]
			out.Host = h.String()
			if sides[i], errs[i] = k.dial(ctx, h); errs[i] != nil {
				out.Error, out.Remedy = redact(errs[i]), connectRemedy(errs[i])
				return nil
			}
			pg := sides[i].pg
			out.TLS = "none"
			if c, ok := pg.Conn().(*tls.Conn); ok {
				out.TLS = tls.VersionName(c.ConnectionState().Version)
			}
			if text := pg.ParameterStatus("crdb_version"); text != "" {
				out.Version = shortVersion(text)
				_, node := verifyRule(ctx, sides[i], sides[i].node)
				out.Node = int(node)
			}
			return nil
		})
	}
	_ = group.Wait()
	var first *sideConn
	for _, side := range sides {
		switch {
		case side == nil:
		case first == nil:
			first = side
		default:
			side.close()
		}
	}
	if first == nil {
		return nil, fmt.Errorf("crdbdrain: cannot connect: %s", redact(errors.Join(errs...)))
	}
	return first, nil
}

// dial connects to one host by the ways that sslmode allows, in its order and with pgx's reasons to stop. The watchdog
// itself follows the application's connections, of which there are none here.
func (k *checker) dial(ctx context.Context, h hostPort) (*sideConn, error) {
	var errs []error
	for _, way := range ways(&k.cfg.pgx.Config, h) {
		one := *k.cfg
		one.pgx = one.pgx.Copy()
		one.pgx.Host, one.pgx.Port, one.pgx.TLSConfig, one.pgx.Fallbacks = way.Host, way.Port, way.TLSConfig, nil
		side, err := dialSideOnce(ctx, question{cfg: k.cfg}, &Connector{cfg: &one, stdOpts: k.probe.stdOpts})
		if err == nil {
			return side, nil
		}
		errs = append(errs, err)
		switch state := sqlState(err); {
		case state == "28P01", state == "3D000", state == stateInsufficientPrivs, state == "28000" && way.TLSConfig != nil:
			return nil, err
		}
	}
	return nil, errors.Join(errs...)
}

// ways returns the variants, with TLS or without, by which a config dials a host.
func ways(cc *pgconn.Config, h hostPort) []*pgconn.FallbackConfig {
	all := append([]*pgconn.FallbackConfig{{Host: cc.Host, Port: cc.Port, TLSConfig: cc.TLSConfig}}, cc.Fallbacks...)
	return slices.DeleteFunc(all, func(f *pgconn.FallbackConfig) bool { return (hostPort{f.Host, f.Port}) != h })
}

// shortVersion is "v25.2.0" of "CockroachDB CCL v25.2.0 (x86_64-pc-linux-gnu, …)".
func shortVersion(text string) string {
	for field := range strings.FieldsSeq(text) {
		if len(field) > 1 && field[0] == 'v' && field[1] >= '0' && field[1] <= '9' {
			return clean(field)
		}
	}
	return clean(text)
}

// clean makes a server's text fit for a report.
func clean(s string) string { return redact(errors.New(s)) }

// connectRemedy says what to type so that a dial succeeds; empty where the error says it all.
func connectRemedy(err error) string {
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	var dns *net.DNSError
	text := err.Error()
	for _, e := range flatten(err) {
		switch sqlState(e) {
		case "28P01":
			return "the user or the password is wrong: check them in the DSN, PGPASSWORD or the passfile"
		case "28000":
			return "the server does not let this user in from here: check the user, sslcert and sslkey, and the server's HBA rules"
		case "3D000":
			return "the database does not exist: check its name in the DSN"
		case stateTooManyConnections:
			return "the server has too many connections (server.max_connections_per_gateway)"
		case stateAdminShutdown:
			return "the node drains: try again when it is back"
		}
		switch {
		case errors.As(e, &unknown), strings.Contains(text, "certificate signed by unknown authority"):
			return "sslrootcert=FILE with the cluster's CA certificate (ca.crt)"
		case errors.As(e, &name):
			return "sslmode=verify-full takes a name that is in the server's certificate: use it as host"
		case strings.Contains(text, "server refused TLS connection"):
			return "the server has no TLS: sslmode=disable, if the network may be trusted"
		case errors.As(e, &dns):
			return "the host's name cannot be resolved: check it in the DSN"
		case errors.Is(e, syscall.ECONNREFUSED):
			return "nothing listens there: check host and port (26257 is CockroachDB's)"
		case errors.Is(e, context.DeadlineExceeded):
			return "no answer: check host, port and firewalls"
		}
	}
	return ""
}

// server finds out what the server is, and whether a connection's node can be told.
func (k *checker) server(ctx context.Context, side *sideConn) {
	ctx, cancel := context.WithTimeout(ctx, k.cfg.pollTimeout)
	defer cancel()
	s := &k.r.Server
	if text := side.pg.ParameterStatus("crdb_version"); text != "" {
		s.Product, s.Version = productCockroachDB, clean(text)
		k.stamp(ctx, side)
		return
	}
	s.Product, s.Version = "unknown", clean(side.pg.ParameterStatus("server_version"))
	if text := askText(ctx, side, sqlVersion); text != "" {
		s.Version = clean(text)
		switch {
		case strings.Contains(text, "CockroachDB"):
			s.Product, s.Hidden = productCockroachDB, true
		case strings.HasPrefix(text, productPostgreSQL):
			s.Product = productPostgreSQL
		}
	}
	k.r.Stamp.Detail = notCockroachDB
	switch {
	case s.Hidden:
		k.problem("a pooler or proxy keeps the parameter crdb_version from the driver, which is plain pgx then: no drain is noticed",
			"connect to CockroachDB, or to a TCP load balancer in front of it, and not through the pooler")
	case s.Product == productPostgreSQL:
		k.problem("this is PostgreSQL: the driver is plain pgx here, sends nothing of its own, and no crdbdrain_* parameter has an effect", "")
		if pid := askText(ctx, side, sqlBackendPID); pid != "" && pid != strconv.FormatUint(uint64(side.pg.PID()), 10) {
			k.advise("a pooler or proxy is in the path: the process ID of the connection is not that of the server's process", "")
		}
	default:
		k.problem("the server does not send crdb_version: the driver is plain pgx here", "")
	}
}

// askText is a question with one text for an answer; empty if there is none.
func askText(ctx context.Context, side asker, sql string) string {
	rows, err := side.ask(ctx, sql)
	if err != nil || len(rows) != 1 || len(rows[0]) != 1 || rows[0][0] == nil {
		return ""
	}
	return *rows[0][0]
}

func (k *checker) stamp(ctx context.Context, side *sideConn) {
	out := &k.r.Stamp
	said := nodeFromPID(side.pg.PID())
	rule, node := verifyRule(ctx, side, said)
	out.Node = int(node)
	early := side.versionKnown && side.major < 22
	switch {
	case rule == ruleHolds:
		out.Rule, out.Detail = "holds", "BackendKeyData tells a connection's node, as SHOW node_id confirms; no question is asked"
	case rule == ruleAsk && early:
		out.Rule, out.Detail = "asked", "BackendKeyData does not tell the node before v22.1: each new connection is asked once with SHOW node_id"
	case rule == ruleAsk:
		out.Rule, out.Detail = "asked", fmt.Sprintf("BackendKeyData says %s, SHOW node_id says %d: each new connection is asked once", orNone(said), node)
		k.advise("a proxy or pooler is in the path that puts its own values into BackendKeyData: each new connection takes one round trip more, and all of a pooler's server connections must stay with their client (session pooling)", "")
	case rule == ruleOff:
		out.Detail = "SHOW node_id tells no node, as with external SQL pods (CockroachDB Cloud Basic and Standard): nothing is culled by node"
		k.problem("the driver cannot tell which node a connection is on, so it culls nothing by node; what the server cuts off is still survived where it can be", "")
	default:
		out.Detail = "SHOW node_id was not answered: nothing is culled by node until it is"
		k.problem("SHOW node_id was not answered", "")
	}
}

func orNone(id nodeID) string {
	if id == 0 {
		return "no node"
	}
	return "node " + strconv.FormatUint(uint64(id), 10)
}

// wanted reports whether a source was asked for by name.
func (k *checker) wanted(id sourceID) bool {
	switch id {
	case sourceReadiness:
		return k.cfg.sources.has(id) && len(k.cfg.readiness) > 0
	case sourceFeed:
		return k.cfg.sources.has(id) && k.cfg.feed != ""
	}
	return k.cfg.sources.has(id) && !k.cfg.auto
}

// off says why a source is not asked; empty if it is.
func (k *checker) off(id sourceID) (detail, remedy string) {
	switch {
	case k.cfg.mode == modeOff:
		return "crdbdrain_mode is off", "crdbdrain_mode=on"
	case k.wanted(id):
	case id == sourceReadiness && len(k.cfg.readiness) == 0:
		return "crdbdrain_readiness is not set", k.readinessRemedy()
	case id == sourceFeed && k.cfg.feed == "":
		return "crdbdrain_feed is not set", ""
	case !k.cfg.sources.has(id) && k.cfg.auto:
		return "the feed asks the cluster in its place", ""
	case !k.cfg.sources.has(id):
		return "crdbdrain_sources does not name it", "crdbdrain_sources=auto"
	}
	return "", ""
}

func (k *checker) readinessRemedy() string {
	scheme := "http"
	if k.cfg.pgx.TLSConfig != nil {
		scheme = "https"
	}
	if len(k.cfg.hosts()) > 1 {
		return "crdbdrain_readiness=" + scheme + "://{host}:8080"
	}
	return fmt.Sprintf("crdbdrain_readiness=%s://NODE1:8080,%[1]s://NODE2:8080,… (each node's own address, not the load balancer's)", scheme)
}

// found fills in a source's answer.
func (s *CheckSource) found(nodes map[nodeID]nodeState) {
	s.State = "ok"
	for _, id := range slices.Sorted(maps.Keys(nodes)) {
		s.Nodes = append(s.Nodes, int(id))
		if nodes[id].leaving() {
			s.Leaving = append(s.Leaving, int(id))
		}
	}
}

// readiness asks every endpoint.
func (k *checker) readiness(ctx context.Context) CheckSource {
	s := CheckSource{Source: sourceReadiness.String(), State: "off", Early: true, Wanted: k.wanted(sourceReadiness)}
	if s.Detail, s.Remedy = k.off(sourceReadiness); s.Detail != "" {
		return s
	}
	ctx, cancel := context.WithTimeout(ctx, k.cfg.pollTimeout)
	defer cancel()
	r := newReadiness(k.cfg, k.probe.log)
	defer r.close()
	targets, err := r.resolve(ctx)
	errs := make([]error, len(targets))
	var group errgroup.Group
	group.SetLimit(targetsAtOnce)
	for i, t := range targets {
		group.Go(func() error {
			errs[i] = t.poll(ctx)
			return nil
		})
	}
	_ = group.Wait()
	if err != nil {
		s.Endpoints = append(s.Endpoints, CheckEndpoint{State: "failing", Error: redact(err), Remedy: connectRemedy(err)})
	}
	nodes, failed := make(map[nodeID]nodeState), len(s.Endpoints)
	for i, t := range targets {
		e := CheckEndpoint{URL: t.url.String(), Node: int(t.node)}
		switch {
		case errs[i] != nil:
			failed++
			e.State, e.Error, e.Remedy = "failing", redact(errs[i]), endpointRemedy(errs[i])
		case t.state.draining:
			e.State = nodeDraining
		case t.state.live:
			e.State = "ready"
		default:
			e.State = "not ready"
		}
		if errs[i] == nil {
			nodes[t.node] = nodeState{draining: nodes[t.node].draining || t.state.draining}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	s.found(nodes)
	switch {
	case failed == len(s.Endpoints):
		s.State, s.Detail = "failing", "no endpoint answers"
	case failed > 0:
		s.Detail = fmt.Sprintf("%d of %d endpoints do not answer", failed, len(s.Endpoints))
	case len(nodes) < len(targets):
		s.Detail = fmt.Sprintf("%d endpoints lead to %d nodes: each is to be a node's own address, not a load balancer's", len(targets), len(nodes))
	}
	return s
}

// endpointRemedy says what to type so that an endpoint answers.
func endpointRemedy(err error) string {
	text := err.Error()
	switch {
	case strings.Contains(text, "HTTP response to HTTPS client"):
		return "the endpoint has no TLS: http:// in place of https://"
	case strings.Contains(text, "/health?ready=1 answers 400"), strings.Contains(text, "malformed HTTP response"):
		return "the endpoint has TLS: https:// in place of http://"
	case strings.Contains(text, "answers 404"):
		return "the URL is not a CockroachDB node's HTTP address (--http-addr, port 8080 by default)"
	case strings.Contains(text, "/_status/vars"):
		return "/_status/vars has to be let through: it tells which node it is"
	case strings.Contains(text, "connection refused"):
		return "nothing listens there: check the node's --http-addr (port 8080 by default)"
	}
	return connectRemedy(err)
}

// feed asks a feed once.
func (k *checker) feed(ctx context.Context) CheckSource {
	s := CheckSource{Source: sourceFeed.String(), State: "off", Early: true, Wanted: k.wanted(sourceFeed)}
	if s.Detail, s.Remedy = k.off(sourceFeed); s.Detail != "" {
		return s
	}
	w := k.probe.attach()
	f := newFeedClient(w, k.cfg)
	defer f.client.CloseIdleConnections()
	if _, err := f.ask(ctx); err != nil {
		s.State, s.Detail, s.Remedy = "failing", redact(err), connectRemedy(err)
		return s
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s.found(w.sources[sourceFeed].nodes)
	return s
}

// sql asks the SQL sources, as the watchdog would.
func (k *checker) sql(ctx context.Context, side *sideConn) (instances, gossip CheckSource) {
	for _, id := range []sourceID{sourceInstances, sourceGossip} {
		s := CheckSource{Source: id.String(), State: "off", Early: id == sourceInstances, Wanted: k.wanted(id)}
		s.Detail, s.Remedy = k.off(id)
		switch {
		case s.Detail != "":
		case k.r.Server.Product != productCockroachDB || k.r.Server.Hidden:
			s.Detail = notCockroachDB
		case id == sourceInstances && side.versionKnown && (side.major < 24 || side.major == 24 && side.minor < 3):
			s.Detail = "system.sql_instances has is_draining from v24.3 on"
		default:
			k.ask(ctx, side, id, &s)
		}
		if id == sourceInstances {
			instances = s
		} else {
			gossip = s
		}
	}
	return instances, gossip
}

func (k *checker) ask(ctx context.Context, side *sideConn, id sourceID, s *CheckSource) {
	ctx, cancel := context.WithTimeout(ctx, k.cfg.pollTimeout)
	defer cancel()
	ask := askInstances
	if id == sourceGossip {
		ask = askGossip
	}
	nodes, err := ask(ctx, side)
	if err == nil {
		s.found(nodes)
		if id == sourceGossip {
			s.Detail = "early for a decommission; for a plain drain it comes after the last connection is gone"
		}
		return
	}
	reason, denied := denial(id, err)
	if !denied {
		s.State, s.Detail = "failing", redact(err)
		return
	}
	s.State = "denied"
	s.Detail, _, _ = strings.Cut(reason, ": ")
	if sqlState(err) != stateInsufficientPrivs {
		s.Remedy = k.readinessRemedy()
		return
	}
	s.Remedy = grant(id, k.cfg.pgx.User, side)
	if !strings.Contains(err.Error(), "crdb_internal and system is restricted") {
		return
	}
	if !k.cfg.unsafeInternals {
		s.Remedy = "crdbdrain_unsafe_internals=on (audited by the server), and if the role lacks it " + s.Remedy
		return
	}
	// The parameter is set already. What did the server say to it?
	s.Detail, s.Remedy = "the server restricts crdb_internal and system although crdbdrain_unsafe_internals is on", k.readinessRemedy()
	if _, err := side.ask(ctx, sqlUnsafeInternals); err != nil {
		s.Detail += ": " + redact(err)
	}
}

// grant is the statement that gives a role what a source takes.
func grant(id sourceID, user string, side *sideConn) string {
	if side.versionKnown && (side.major < 23 || side.major == 23 && side.minor < 2) {
		return "GRANT admin TO " + quoteRole(user)
	}
	privilege := "VIEWCLUSTERMETADATA"
	if id == sourceInstances {
		privilege = "VIEWSYSTEMTABLE"
	}
	return "GRANT SYSTEM " + privilege + " TO " + quoteRole(user)
}

// quoteRole writes a role's name as SQL.
func quoteRole(user string) string {
	if user != "" && strings.Trim(user, "abcdefghijklmnopqrstuvwxyz0123456789_") == "" && strings.IndexAny(user, "0123456789") != 0 {
		return user
	}
	return `"` + strings.ReplaceAll(user, `"`, `""`) + `"`
}

// sqlSettings asks for the settings of a drain, under their names of v23.2 and later, and of before.
var sqlSettings = [3][2]string{
	{sqlWindow[0][0], sqlWindow[1][0]},
	{sqlWindow[0][1], sqlWindow[1][1]},
	{"SHOW CLUSTER SETTING server.shutdown.transactions.timeout", "SHOW CLUSTER SETTING server.shutdown.query_wait"},
}

// settings reads the server's window.
func (k *checker) settings(ctx context.Context, side *sideConn) {
	w := &k.r.Window
	if k.r.Server.Product != productCockroachDB || k.r.Server.Hidden {
		w.Detail = notCockroachDB
		return
	}
	ctx, cancel := context.WithTimeout(ctx, k.cfg.pollTimeout)
	defer cancel()
	for i, into := range []*int64{&w.InitialWaitMS, &w.ConnectionsTimeoutMS, &w.TransactionsTimeoutMS} {
		for j, sql := range sqlSettings[i] {
			rows, err := side.ask(ctx, sql)
			if err == nil && len(rows) == 1 && len(rows[0]) == 1 && rows[0][0] != nil {
				if d, ok := parseInterval(*rows[0][0]); ok {
					*into = d.Milliseconds()
					break
				}
			}
			if err != nil && sqlState(err) != stateInsufficientPrivs && j == 0 {
				continue // an older server
			}
			*w = CheckWindow{Detail: "the server's settings cannot be read"}
			switch {
			case sqlState(err) == stateInsufficientPrivs:
				w.Detail = "the role may not see the server's settings"
				w.Remedy = "GRANT SYSTEM VIEWCLUSTERSETTING TO " + quoteRole(k.cfg.pgx.User)
			case err != nil:
				w.Detail += ": " + redact(err)
			}
			return
		}
	}
	w.Known, w.TotalMS = true, w.InitialWaitMS+w.ConnectionsTimeoutMS
}

// judge holds what was found against what a drain takes, and comes to the verdict.
func (k *checker) judge(failed error) {
	r := k.r
	cockroach := r.Server.Product == productCockroachDB && !r.Server.Hidden
	if k.cfg.mode == modeOff {
		k.problem("crdbdrain_mode is off: the driver is plain pgx", "crdbdrain_mode=on")
	}
	for _, h := range r.Hosts {
		switch {
		case h.Error == "":
		case strings.Contains(h.Error, noticeNotAcceptingClients):
			k.advise(h.Host+" drains: the driver tries the other hosts", "")
		case failed == nil:
			k.problem(h.Host+" does not connect: "+h.Error, h.Remedy)
		default:
			k.problem("cannot connect: "+h.Error, h.Remedy)
		}
	}
	if cockroach && k.cfg.mode != modeOff {
		k.judgeSources()
		k.judgeWindow()
		if k.cfg.mode == modeObserve {
			k.advise("crdbdrain_mode is observe: nothing is culled, only counted", "crdbdrain_mode=on")
		}
	}
	k.judgePath()
	slices.SortStableFunc(r.Findings, func(a, b CheckFinding) int { return cmp.Compare(b.Level, a.Level) }) // problems first
	switch {
	case failed != nil:
		r.Verdict = CheckFailed
	case slices.ContainsFunc(r.Findings, func(f CheckFinding) bool { return f.Level == levelProblem }):
		r.Verdict = CheckLimited
	default:
		r.Verdict = CheckOK
	}
}

func (k *checker) source(id sourceID) *CheckSource {
	i := slices.IndexFunc(k.r.Sources, func(s CheckSource) bool { return s.Source == id.String() })
	return &k.r.Sources[i]
}

func (k *checker) works(id sourceID) bool { return k.source(id).State == "ok" }

// early reports whether a source that works tells in time.
func (k *checker) early() bool {
	return slices.ContainsFunc(k.r.Sources, func(s CheckSource) bool { return s.Early && s.State == "ok" })
}

func (k *checker) judgeSources() {
	known := make(map[int]bool)
	for i := range k.r.Sources {
		s := &k.r.Sources[i]
		if s.Wanted && s.State != "ok" {
			k.problem(fmt.Sprintf("source %s is configured and does not work (%s): %s", s.Source, s.State, s.Detail), s.Remedy)
		}
		for _, e := range s.Endpoints {
			if e.Error != "" && s.State == "ok" {
				k.problem(strings.TrimSpace("readiness endpoint "+e.URL)+" does not answer: "+e.Error, e.Remedy)
			}
		}
		if s.State == "ok" && s.Source == sourceReadiness.String() && len(s.Nodes) < len(s.Endpoints) && !strings.Contains(s.Detail, "do not answer") {
			k.advise("readiness: "+s.Detail, "")
		}
		if s.Source == sourceGossip.String() { // the other lists may have rows for nodes to come
			for _, id := range s.Nodes {
				known[id] = true
			}
		}
	}
	for _, h := range k.r.Hosts {
		if h.Node != 0 {
			known[h.Node] = true
		}
	}
	if !k.early() {
		remedy := k.readinessRemedy() + ", which takes no privilege"
		if s := k.source(sourceInstances); s.State == "denied" && s.Remedy != "" {
			remedy += "; or " + s.Remedy
		}
		k.problem("no early source works: a drain is noticed when the node closes its connections, not before", remedy)
	}
	if ready := k.source(sourceReadiness); ready.State == "ok" && !k.works(sourceInstances) && !k.works(sourceFeed) && len(ready.Nodes) > 0 {
		var missing []string
		for _, id := range slices.Sorted(maps.Keys(known)) {
			if !slices.Contains(ready.Nodes, id) && !slices.ContainsFunc(ready.Endpoints, func(e CheckEndpoint) bool { return e.Error != "" }) {
				missing = append(missing, strconv.Itoa(id))
			}
		}
		if len(missing) > 0 {
			k.problem("crdbdrain_readiness has no endpoint of node "+strings.Join(missing, ", ")+": its drain is not noticed in time", "add the URL to crdbdrain_readiness")
		}
	}
}

func (k *checker) judgeWindow() {
	w := &k.r.Window
	total := time.Duration(w.TotalMS) * time.Millisecond
	initial := time.Duration(w.InitialWaitMS) * time.Millisecond
	sqlWorks := k.works(sourceInstances) || k.works(sourceGossip)
	used := k.cfg.window
	w.Origin = "crdbdrain_window"
	if used == 0 {
		used, w.Origin = defaultWindow, "assumed"
		if wd := k.probe.watchdog.Load(); wd != nil && wd.learned.Load() > 0 {
			used, w.Origin = time.Duration(wd.learned.Load()), "feed"
		}
		if w.Known && sqlWorks {
			used, w.Origin = max(total, minWindow), "server"
		}
	}
	w.UsedMS = used.Milliseconds()
	switch {
	case !w.Known:
		if k.cfg.window == 0 && w.Origin == "assumed" {
			k.advise(fmt.Sprintf("the window is not known (%s): the driver counts on %v", w.Detail, used),
				joinRemedies(w.Remedy, "crdbdrain_window=DURATION, which is initial_wait + connections.timeout"))
		}
		return
	case total == 0:
		w.Detail = "no window: a draining node closes its idle connections within milliseconds, and nobody can leave in time"
		w.Remedy = "SET CLUSTER SETTING server.shutdown.initial_wait = '8s'; SET CLUSTER SETTING server.shutdown.connections.timeout = '30s'"
		k.problem("the server's settings leave no window (initial_wait and connections.timeout are 0s): connections are lost in every drain, and only what the server did not execute is run again", w.Remedy)
		return
	}
	if initial < balancerNotices && len(k.cfg.hosts()) == 1 {
		k.advise(fmt.Sprintf("initial_wait is %v: if the host is a load balancer it sends new connections to a node that refuses them until its health check has failed, with HAProxy's inter 2s fall 3 for %v", initial, balancerNotices),
			fmt.Sprintf("SET CLUSTER SETTING server.shutdown.initial_wait = '%v'", balancerNotices))
	}
	if used > total && k.early() {
		text := fmt.Sprintf("the driver counts on a window of %v (%s), the server leaves %v: the pool would leave too slowly", used, w.Origin, total)
		k.problem(text, fmt.Sprintf("crdbdrain_window=%v", total))
	} else if w.Origin == "assumed" && used < total {
		k.advise(fmt.Sprintf("the driver counts on a window of %v, the server leaves %v: the pool leaves faster than it has to (the driver reads the settings only where instances or gossip works)", used, total),
			fmt.Sprintf("crdbdrain_window=%v", total))
	}
	polled := k.works(sourceInstances) || k.works(sourceReadiness)
	switch interval := k.cfg.interval(used); {
	case !polled || k.works(sourceFeed):
	case interval+interval/5 >= total:
		k.problem(fmt.Sprintf("crdbdrain_poll_interval is %v, the window %v: a drain can be over before it is noticed", interval, total), shorterPoll(total))
	case 2*interval > total:
		k.advise(fmt.Sprintf("crdbdrain_poll_interval is %v, more than half of the window of %v: little of it is left for the pool", interval, total), shorterPoll(total))
	}
}

func shorterPoll(window time.Duration) string {
	return fmt.Sprintf("crdbdrain_poll_interval=%v", max((window/4).Truncate(100*time.Millisecond), 100*time.Millisecond))
}

func joinRemedies(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; or " + b
}

// judgePath looks at what the DSN says of the way to the server, and of the process.
func (k *checker) judgePath() {
	cc := &k.cfg.pgx.Config
	var tcp []hostPort
	for _, h := range k.cfg.hosts() {
		if !h.unix() {
			tcp = append(tcp, h)
		}
	}
	if len(tcp) > 0 {
		variants := ways(cc, tcp[0])
		first := variants[0].TLSConfig
		const full = "sslmode=verify-full&sslrootcert=FILE"
		switch {
		case len(variants) > 1 && first == nil:
			k.advise("sslmode=allow tries clear text first, and dials each host twice where that is refused, by a draining node too", full)
		case len(variants) > 1:
			k.advise("sslmode=prefer (the default) falls back to clear text, which somebody in the path can bring about, verifies nothing, and dials each host twice where a dial is refused, by a draining node too", full)
		case first == nil:
			if !slices.ContainsFunc(tcp, func(h hostPort) bool { return !isLoopback(h.host) }) {
				break // it does not leave the machine
			}
			k.advise("the connection is in clear text, the password included (sslmode=disable)", full)
		case first.InsecureSkipVerify && first.VerifyPeerCertificate == nil && first.VerifyConnection == nil:
			k.advise("sslmode=require encrypts and verifies nothing: whoever is in the path can be the server", full)
		case first.InsecureSkipVerify:
			k.advise("sslmode=verify-ca does not verify the host's name: every certificate of that CA can be the server", "sslmode=verify-full")
		}
	}
	if k.r.Server.Product == productPostgreSQL && len(k.cfg.hosts()) > 1 && k.cfg.hostOrder == hostOrderRandom {
		k.advise("several hosts of PostgreSQL have an order that matters (a primary, its standbys); the driver tries them at random", "crdbdrain_host_order=listed")
	}
	if cc.ConnectTimeout == 0 {
		k.advise("connect_timeout is not set: a dial to a host that does not answer takes as long as the caller's context lets it", "connect_timeout=5")
	}
	if k.r.Server.Product == productCockroachDB {
		k.advise("database/sql keeps 2 idle connections by default, and closes and dials the others over and over", "db.SetMaxIdleConns(n) with the n of db.SetMaxOpenConns(n)")
	}
}
