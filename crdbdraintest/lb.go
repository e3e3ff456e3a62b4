package crdbdraintest

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"maps"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"
)

// A LoadBalancer spreads TCP connections over the nodes in turn, as HAProxy
// does in CockroachDB's documentation. It knows what its health checks tell it,
// when they tell it: it sends connections to a node that is unready until enough
// checks have failed. A node that cannot be connected to is passed over at
// once. If no node is left the connection is closed.
type LoadBalancer struct {
	c        *Cluster
	listener net.Listener
	release  func()

	mu     sync.Mutex
	next   int                   // guarded by mu, like all below
	sticky int                   // node ID, or 0
	health map[int]*health       // by node ID
	routed map[int]int           // by node ID
	conns  map[net.Conn]struct{} // both sides of every connection
	closed bool
}

type health struct {
	up         bool
	fall, rise int // checks in a row
}

func newLoadBalancer(c *Cluster) *LoadBalancer {
	addr, release, err := c.net.reserve("10.0.255.1", 26257)
	if err != nil {
		panic("crdbdraintest: no address for the load balancer: " + err.Error())
	}
	l, err := c.net.listen(addr)
	if err != nil {
		panic("crdbdraintest: the load balancer cannot listen: " + err.Error())
	}
	b := &LoadBalancer{
		c:        c,
		listener: l,
		release:  release,
		health:   map[int]*health{},
		routed:   map[int]int{},
		conns:    map[net.Conn]struct{}{},
	}
	for _, n := range c.Nodes() {
		b.health[n.id] = &health{up: true}
	}
	c.wg.Add(2)
	go b.accept()
	go b.check()
	return b
}

// Addr returns the load balancer's host:port.
func (b *LoadBalancer) Addr() string { return b.listener.Addr().String() }

// SetSticky sends every connection to one node, whatever its health; 0 ends
// that.
func (b *LoadBalancer) SetSticky(nodeID int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sticky = nodeID
}

// Routed returns how many connections each node was sent, by node ID.
func (b *LoadBalancer) Routed() map[int]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.routed)
}

// Up reports whether the health checks have a node in.
func (b *LoadBalancer) Up(nodeID int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.health[nodeID]
	return h != nil && h.up
}

func (b *LoadBalancer) close() {
	b.listener.Close()
	b.mu.Lock()
	b.closed = true
	for c := range b.conns {
		c.Close()
	}
	b.mu.Unlock()
	b.release()
}

func (b *LoadBalancer) accept() {
	defer b.c.wg.Done()
	for {
		conn, err := b.listener.Accept()
		if err != nil {
			if b.c.ctx.Err() != nil || isClosed(err) {
				return
			}
			sleep(b.c.ctx, 5*time.Millisecond) // out of descriptors, say
			continue
		}
		b.c.wg.Add(1)
		go b.serve(conn)
	}
}

// track makes a connection end with the load balancer.
func (b *LoadBalancer) track(c net.Conn) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		c.Close()
		return false
	}
	b.conns[c] = struct{}{}
	return true
}

func (b *LoadBalancer) untrack(c net.Conn) {
	c.Close()
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.conns, c)
}

func (b *LoadBalancer) serve(client net.Conn) {
	defer b.c.wg.Done()
	if !b.track(client) {
		return
	}
	defer b.untrack(client)
	server := b.connect()
	if server == nil {
		return
	}
	if !b.track(server) {
		return
	}
	defer b.untrack(server)
	done := make(chan struct{})
	b.c.wg.Add(1)
	go func() {
		defer b.c.wg.Done()
		defer close(done)
		forward(server, client)
	}()
	forward(client, server)
	<-done
}

// forward copies until src ends, and ends dst in the same way.
func forward(dst, src net.Conn) {
	_, err := io.Copy(dst, src)
	if errors.Is(err, syscall.ECONNRESET) {
		if l, ok := dst.(interface{ SetLinger(int) error }); ok {
			l.SetLinger(0)
		}
		dst.Close()
		return
	}
	if w, ok := dst.(interface{ CloseWrite() error }); ok {
		w.CloseWrite()
	}
}

// connect connects to the next node that accepts.
func (b *LoadBalancer) connect() net.Conn {
	tried := map[int]bool{}
	for {
		n := b.pick(tried)
		if n == nil {
			return nil
		}
		tried[n.id] = true
		ctx, cancel := context.WithTimeout(b.c.ctx, time.Second)
		conn, err := b.c.net.dial(ctx, "tcp", n.addr)
		cancel()
		if err == nil {
			b.mu.Lock()
			b.routed[n.id]++
			b.mu.Unlock()
			return conn
		}
	}
}

func (b *LoadBalancer) pick(tried map[int]bool) *Node {
	nodes := b.c.Nodes()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sticky > 0 && b.sticky <= len(nodes) {
		if tried[b.sticky] {
			return nil
		}
		return nodes[b.sticky-1]
	}
	for range nodes {
		n := nodes[b.next%len(nodes)]
		b.next++
		if h := b.health[n.id]; h != nil && h.up && !tried[n.id] {
			return n
		}
	}
	return nil
}

// check runs the health checks, all nodes at a time.
func (b *LoadBalancer) check() {
	defer b.c.wg.Done()
	cfg := b.c.cfg.LoadBalancer
	ticker := time.NewTicker(cfg.Interval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-b.c.ctx.Done():
			return
		}
		var wg sync.WaitGroup
		for _, n := range b.c.Nodes() {
			wg.Go(func() {
				ok := b.probe(n, cfg.Interval)
				b.mu.Lock()
				defer b.mu.Unlock()
				h := b.health[n.id]
				if h == nil {
					h = &health{}
					b.health[n.id] = h
				}
				if ok {
					h.rise, h.fall = h.rise+1, 0
					h.up = h.up || h.rise >= cfg.Rise
				} else {
					h.fall, h.rise = h.fall+1, 0
					h.up = h.up && h.fall < cfg.Fall
				}
			})
		}
		wg.Wait()
	}
}

// probe asks a node for its readiness, without keeping the connection.
func (b *LoadBalancer) probe(n *Node, timeout time.Duration) bool {
	ctx, cancel := context.WithTimeout(b.c.ctx, timeout)
	defer cancel()
	raw, err := b.c.net.dial(ctx, "tcp", n.httpAddr)
	if err != nil {
		return false
	}
	defer raw.Close()
	defer context.AfterFunc(ctx, func() { raw.SetDeadline(time.Unix(1, 0)) })()
	conn := raw
	if b.c.cfg.TLS != nil {
		conn = tls.Client(raw, &tls.Config{InsecureSkipVerify: true}) // as HAProxy's "verify none"
	}
	if _, err := io.WriteString(conn, "GET /health?ready=1 HTTP/1.0\r\n\r\n"); err != nil {
		return false
	}
	status, err := bufio.NewReader(conn).ReadString('\n')
	return err == nil && strings.Contains(status, " 200 ")
}
