package crdbdraintest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A Cluster is a simulated cluster. Its methods may be called concurrently.
type Cluster struct {
	cfg    Config
	net    network
	lb     *LoadBalancer
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // every goroutine of the cluster
	secret atomic.Uint64

	mu       sync.Mutex
	settings Settings                   // guarded by mu
	nodes    []*Node                    // guarded by mu; nodes[i] has ID i+1
	grants   map[string]map[string]bool // guarded by mu; user → privileges
	keys     map[cancelKey]*session     // guarded by mu; who a CancelRequest means
	closed   bool                       // guarded by mu
}

type cancelKey struct {
	pid    uint32
	secret uint32
}

// Start starts a cluster. Like httptest.NewServer it panics if it cannot
// listen, or if the configuration makes no sense.
func Start(cfg Config) *Cluster {
	if cfg.Nodes == 0 {
		cfg.Nodes = 3
	}
	if cfg.Version == "" {
		cfg.Version = "v25.2.0"
	}
	if cfg.Settings == (Settings{}) {
		cfg.Settings = DefaultSettings()
	}
	if cfg.LoadBalancer.Interval == 0 {
		cfg.LoadBalancer.Interval = 100 * time.Millisecond
	}
	if cfg.LoadBalancer.Fall == 0 {
		cfg.LoadBalancer.Fall = 2
	}
	if cfg.LoadBalancer.Rise == 0 {
		cfg.LoadBalancer.Rise = 1
	}
	c := &Cluster{
		cfg:      cfg,
		settings: cfg.Settings,
		grants:   map[string]map[string]bool{},
		keys:     map[cancelKey]*session{},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if cfg.Memory {
		c.net = newMemoryNetwork()
	} else {
		c.net = socketNetwork{}
	}
	c.Grant("root", "admin")
	for range cfg.Nodes {
		c.AddNode()
	}
	c.lb = newLoadBalancer(c)
	return c
}

// Close ends everything: nodes, load balancer, connections, running drains. It
// returns when every goroutine of the cluster has ended, so a Handler that
// does not heed Query.Context holds it up.
func (c *Cluster) Close() {
	c.mu.Lock()
	c.closed = true
	nodes := c.nodes
	c.mu.Unlock()
	c.cancel()
	c.lb.close()
	for _, n := range nodes {
		n.close()
	}
	c.wg.Wait()
}

// AddNode starts one more node, with the next ID. The load balancer takes it in
// after its first successful health checks.
func (c *Cluster) AddNode() *Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := newNode(c, len(c.nodes)+1)
	c.nodes = append(c.nodes[:len(c.nodes):len(c.nodes)], n)
	return n
}

// Node returns the node with this ID. It panics if there is none.
func (c *Cluster) Node(id int) *Node {
	nodes := c.Nodes()
	if id < 1 || id > len(nodes) {
		panic("crdbdraintest: no node " + strconv.Itoa(id))
	}
	return nodes[id-1]
}

// Nodes returns all nodes, also those that are down, in the order of their IDs.
func (c *Cluster) Nodes() []*Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nodes[:len(c.nodes):len(c.nodes)]
}

// LoadBalancer returns the load balancer that DSN names.
func (c *Cluster) LoadBalancer() *LoadBalancer { return c.lb }

// DSN returns a connection string for user app, through the load balancer.
func (c *Cluster) DSN() string { return c.dsn(c.lb.Addr()) }

// DSNAll returns a connection string with every node's address, without the
// load balancer.
func (c *Cluster) DSNAll() string {
	var addrs []string
	for _, n := range c.Nodes() {
		addrs = append(addrs, n.Addr())
	}
	return c.dsn(strings.Join(addrs, ","))
}

func (c *Cluster) dsn(hosts string) string {
	user := url.User("app")
	if c.cfg.Password != "" {
		user = url.UserPassword("app", c.cfg.Password)
	}
	mode := "disable"
	if c.cfg.TLS != nil {
		mode = "require"
	}
	return fmt.Sprintf("postgres://%s@%s/defaultdb?sslmode=%s", user, hosts, mode)
}

// ReadinessURLs returns the base URLs of the nodes' HTTP servers, with commas
// between them.
func (c *Cluster) ReadinessURLs() string {
	var urls []string
	for _, n := range c.Nodes() {
		urls = append(urls, n.HTTPURL())
	}
	return strings.Join(urls, ",")
}

// SetSettings changes the drain timeouts, for drains that begin later. Zero
// means zero, and a negative value counts as zero.
func (c *Cluster) SetSettings(s Settings) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settings = s
}

func (c *Cluster) currentSettings() Settings {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.settings
}

// Grant gives a user a privilege: "admin", "VIEWSYSTEMTABLE",
// "VIEWCLUSTERMETADATA", "VIEWCLUSTERSETTING" or "MODIFYCLUSTERSETTING". User
// root is an admin; every other user, app included, begins without any.
func (c *Cluster) Grant(user, privilege string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.grants[user] == nil {
		c.grants[user] = map[string]bool{}
	}
	c.grants[user][strings.ToUpper(privilege)] = true
}

// Revoke takes a privilege away.
func (c *Cluster) Revoke(user, privilege string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.grants[user], strings.ToUpper(privilege))
}

// granted reports whether the user is an admin or has one of the privileges.
func (c *Cluster) granted(user string, privileges ...string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.grants[user]
	if g["ADMIN"] {
		return true
	}
	for _, p := range privileges {
		if g[p] {
			return true
		}
	}
	return false
}

// Stats returns the sum of all nodes' counters.
func (c *Cluster) Stats() Stats {
	sum := Stats{Statements: map[string]int{}, Parses: map[string]int{}}
	for _, n := range c.Nodes() {
		sum.add(n.Stats())
	}
	return sum
}

// Dial connects to an address of the cluster. It fits pgx's DialFunc and
// http.Transport's DialContext. With Config.Memory nothing else connects;
// without it, this is a plain dial.
func (c *Cluster) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	return c.net.dial(ctx, network, addr)
}

// register makes a session reachable for CancelRequests.
func (c *Cluster) register(k cancelKey, s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.keys[k] = s
}

func (c *Cluster) unregister(k cancelKey, s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.keys[k] == s {
		delete(c.keys, k)
	}
}

// cancelRequest cancels the running statement of the session with this key. The
// key names the node, which is how a CancelRequest finds it through any node
// (pkg/sql/pgwire/pgwirecancel).
func (c *Cluster) cancelRequest(k cancelKey) {
	c.mu.Lock()
	s := c.keys[k]
	c.mu.Unlock()
	if s != nil {
		s.cancelStatement(errQueryCanceled)
	}
}

var errDown = errors.New("crdbdraintest: the node is down")
