package crdbdraintest

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A Node is one node of a cluster. Its methods may be called concurrently,
// though two drains of one node at a time make no sense.
type Node struct {
	c        *Cluster
	id       int
	addr     string // the SQL listener's; never changes
	httpAddr string
	release  []func()
	faults   atomic.Pointer[Faults]
	hung     atomic.Pointer[chan struct{}] // not nil: hung; closed when it goes on

	mu      sync.Mutex
	version version                 // guarded by mu, like all below
	next    version                 // after the next start
	up      bool                    // the process runs
	ctx     context.Context         // of this incarnation
	cancel  context.CancelFunc      // ends ctx
	sql     net.Listener            // nil when down
	http    *http.Server            // nil when down
	step    Step                    // of the drain
	changed chan struct{}           // closed and replaced when step or the number of sessions changes
	conns   map[*session]bool       // every connection; true: counted as a session
	open    int                     // sessions
	drain   *DrainResult            // of the drain that runs or ran last; counters only
	undrain context.CancelCauseFunc // of the drain that runs
	epoch   int64
	started time.Time
	life    []liveness // what gossip has said of this node, oldest first
	stats   Stats
}

// liveness is a node's record in gossip from a moment on.
type liveness struct {
	since      time.Time
	epoch      int64
	draining   bool
	membership string // active, decommissioning, decommissioned
	live       bool
}

type version struct {
	text         string
	major, minor int
}

func parseVersion(text string) version {
	v := version{text: text}
	if _, err := fmt.Sscanf(text, "v%d.%d", &v.major, &v.minor); err != nil {
		panic(fmt.Sprintf("crdbdraintest: version %q is not like v25.2.0", text))
	}
	return v
}

func (v version) atLeast(major, minor int) bool {
	return v.major > major || v.major == major && v.minor >= minor
}

// newNode makes a node and starts it. c.mu is held.
func newNode(c *Cluster, id int) *Node {
	n := &Node{
		c:       c,
		id:      id,
		changed: make(chan struct{}),
		next:    parseVersion(c.cfg.Version),
		stats:   Stats{Statements: map[string]int{}, Parses: map[string]int{}},
	}
	n.faults.Store(&c.cfg.Faults)
	host := fmt.Sprintf("10.0.%d.%d", id>>8, id&0xff) // in memory only
	for _, a := range []struct {
		addr *string
		port int
	}{{&n.addr, 26257}, {&n.httpAddr, 8080}} {
		addr, release, err := c.net.reserve(host, a.port)
		if err != nil {
			panic("crdbdraintest: no address for a node: " + err.Error())
		}
		*a.addr = addr
		n.release = append(n.release, release)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.startLocked()
	return n
}

// startLocked starts the node's process. n.mu is held.
func (n *Node) startLocked() {
	sqlListener, err := n.c.net.listen(n.addr)
	if err != nil {
		panic("crdbdraintest: a node cannot listen: " + err.Error())
	}
	httpListener, err := n.c.net.listen(n.httpAddr)
	if err != nil {
		panic("crdbdraintest: a node cannot listen: " + err.Error())
	}
	n.version = n.next
	n.up = true
	n.ctx, n.cancel = context.WithCancel(n.c.ctx)
	n.sql = sqlListener
	n.http = n.newHTTPServer()
	n.conns = map[*session]bool{}
	n.open = 0
	n.step = Serving
	n.drain, n.undrain = nil, nil
	n.epoch++
	n.started = time.Now()
	n.gossipLocked(func(l *liveness) { l.epoch, l.draining, l.live = n.epoch, false, true })
	n.changedLocked()
	ctx, srv := n.ctx, n.http
	n.c.wg.Add(2)
	go n.accept(ctx, sqlListener)
	go func() {
		defer n.c.wg.Done()
		n.serveHTTP(srv, httpListener)
	}()
}

// gossipLocked publishes a change of this node's liveness record. n.mu is held.
func (n *Node) gossipLocked(change func(*liveness)) {
	l := liveness{membership: "active"}
	if len(n.life) > 0 {
		l = n.life[len(n.life)-1]
	}
	change(&l)
	l.since = time.Now()
	n.life = append(n.life, l)
}

// changedLocked wakes those who wait for the node. n.mu is held.
func (n *Node) changedLocked() {
	close(n.changed)
	n.changed = make(chan struct{})
}

// ID returns the node's ID, which it keeps for ever.
func (n *Node) ID() int { return n.id }

// Addr returns host:port of the SQL listener, which the node keeps for ever.
func (n *Node) Addr() string { return n.addr }

// DSN returns a connection string for user app, straight to this node.
func (n *Node) DSN() string { return n.c.dsn(n.addr) }

// HTTPURL returns the base URL of the node's HTTP server, without a slash at
// the end.
func (n *Node) HTTPURL() string {
	if n.c.cfg.TLS != nil {
		return "https://" + n.httpAddr
	}
	return "http://" + n.httpAddr
}

// Stats returns the node's counters.
func (n *Node) Stats() Stats {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.stats.clone()
	s.Open = n.open
	return s
}

// SetFaults replaces the node's faults, at once.
func (n *Node) SetFaults(f Faults) { n.faults.Store(&f) }

// SetVersion gives the node another version from its next start on, as a
// rolling upgrade does.
func (n *Node) SetVersion(v string) {
	next := parseVersion(v)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.next = next
}

// Stop ends the process: listeners and connections are closed. A node that was
// decommissioning is decommissioned then: it leaves gossip_nodes, and its
// liveness record stays for ever with draining set.
func (n *Node) Stop() {
	n.mu.Lock()
	decommissioned := n.life[len(n.life)-1].membership == "decommissioning"
	n.mu.Unlock()
	n.down(false)
	if decommissioned {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.gossipLocked(func(l *liveness) { l.membership, l.draining = "decommissioned", true })
	}
}

// Kill ends the process without a drain, and resets its connections. Its row in
// system.sql_instances and its liveness record stay as they were.
func (n *Node) Kill() { n.down(true) }

// down ends the process and waits until nothing of it is left but statements
// whose Handler does not end.
func (n *Node) down(rst bool) {
	n.mu.Lock()
	if !n.up {
		n.mu.Unlock()
		return
	}
	n.up = false
	sqlListener, srv, cancel := n.sql, n.http, n.cancel
	n.sql, n.http = nil, nil
	var conns []*session
	for s := range n.conns {
		conns = append(conns, s)
	}
	n.gossipLocked(func(l *liveness) { l.live = false })
	n.changedLocked()
	n.mu.Unlock()

	sqlListener.Close()
	srv.Close()
	for _, s := range conns {
		s.cut(rst)
	}
	cancel()
}

// Start starts a node that is down: same ID, same addresses, the next epoch, a
// new row in system.sql_instances, no drain. It does nothing if the node is up,
// and panics if it has been decommissioned, for such a node may not rejoin.
func (n *Node) Start() {
	if n.c.ctx.Err() != nil {
		return
	}
	if n.restartProcess() {
		n.onStep(Serving)
	}
}

func (n *Node) restartProcess() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.up {
		return false
	}
	if n.life[len(n.life)-1].membership == "decommissioned" {
		panic("crdbdraintest: node " + strconv.Itoa(n.id) + " has been decommissioned and cannot rejoin; see Cluster.AddNode")
	}
	n.startLocked()
	return true
}

// Restart is Drain, the end of the process, and Start. If the drain does not
// complete because the context ended, the node is restarted all the same.
func (n *Node) Restart(ctx context.Context) DrainResult {
	r := n.Drain(ctx)
	n.down(false)
	n.Start()
	return r
}

// Disconnect ends the sessions that are idle outside a transaction, without a
// drain, as an idle timeout or a proxy does: with r.Err, if not nil, and then as
// r.End says, EndFIN if it is Keep. It returns how many sessions it ends; they
// are not counted as lost.
func (n *Node) Disconnect(r Result) int {
	count := 0
	for _, s := range n.sessions() {
		if s.disconnect(r) {
			count++
		}
	}
	return count
}

// Decommission sets the node's membership to decommissioning, which gossip
// tells at once. Operators do it minutes to hours before they drain the node.
func (n *Node) Decommission() { n.setMembership("decommissioning") }

// Recommission sets the membership back to active.
func (n *Node) Recommission() { n.setMembership("active") }

func (n *Node) setMembership(m string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.gossipLocked(func(l *liveness) { l.membership = m })
}

// Hang freezes the process, or lets it go on where it was. While it hangs,
// connections are still accepted, by its kernel, but nothing is answered, over
// SQL or HTTP.
func (n *Node) Hang(hang bool) {
	if !hang {
		if ch := n.hung.Swap(nil); ch != nil {
			close(*ch)
		}
		return
	}
	ch := make(chan struct{})
	n.hung.CompareAndSwap(nil, &ch)
}

// gate blocks while the node hangs. It reports whether to go on.
func (n *Node) gate(ctx context.Context) bool {
	for {
		ch := n.hung.Load()
		if ch == nil {
			return true
		}
		select {
		case <-*ch:
		case <-ctx.Done():
			return false
		}
	}
}

// close ends the node for good.
func (n *Node) close() {
	n.down(false)
	for _, release := range n.release {
		release()
	}
}

// accept serves a SQL listener until it is closed.
func (n *Node) accept(ctx context.Context, l net.Listener) {
	defer n.c.wg.Done()
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || isClosed(err) {
				return
			}
			sleep(ctx, 5*time.Millisecond) // out of descriptors, say
			continue
		}
		s := newSession(ctx, n, conn)
		n.mu.Lock()
		if !n.up || n.ctx != ctx {
			n.mu.Unlock()
			s.cut(false)
			continue
		}
		n.conns[s] = false
		n.stats.Accepts++
		n.stats.Dials = append(n.stats.Dials, time.Now())
		n.c.wg.Add(1)
		n.mu.Unlock()
		go s.run()
	}
}

// admit makes a connection a session, unless the node is past accepting any.
// From here on drains know of it.
func (n *Node) admit(s *session) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, ok := n.conns[s]; !ok {
		return false
	}
	if n.step >= Refusing {
		n.stats.Refused++
		return false
	}
	n.conns[s] = true
	n.open++
	return true
}

// forget is the end of a connection.
func (n *Node) forget(s *session) {
	n.mu.Lock()
	defer n.mu.Unlock()
	session, ok := n.conns[s]
	if !ok {
		return
	}
	delete(n.conns, s)
	if session {
		if n.open--; n.open == 0 {
			n.changedLocked()
		}
	}
}

func (n *Node) count(f func(*Stats)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f(&n.stats)
}

// sqlInstance is a row of system.sql_instances.
type sqlInstance struct {
	id       int64
	addr     string
	version  string
	draining any // nil or bool
}

// instances returns the rows of system.sql_instances. A node that was killed
// keeps its row.
func (c *Cluster) instances() []sqlInstance {
	var rows []sqlInstance
	for _, n := range c.Nodes() {
		n.mu.Lock()
		if n.step < Departed && n.started != (time.Time{}) && n.life[len(n.life)-1].membership != "decommissioned" {
			r := sqlInstance{id: int64(n.id), addr: n.addr, version: fmt.Sprintf("%d.%d", n.version.major, n.version.minor)}
			if n.step >= Announced {
				r.draining = true
			}
			rows = append(rows, r)
		}
		n.mu.Unlock()
	}
	return rows
}

// livenessAt returns what gossip said of the node at a moment, if anything.
func (n *Node) livenessAt(t time.Time) (liveness, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := len(n.life) - 1; i >= 0; i-- {
		if !n.life[i].since.After(t) {
			return n.life[i], true
		}
	}
	return liveness{}, false
}

func isClosed(err error) bool { return strings.Contains(err.Error(), net.ErrClosed.Error()) }
