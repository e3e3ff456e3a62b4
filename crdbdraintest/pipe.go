package crdbdraintest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// A network is where a cluster listens: sockets or memory.
type network interface {
	// reserve returns an address of a node's service that stays the cluster's
	// until release is called, whether or not something listens there.
	reserve(host string, port int) (addr string, release func(), err error)
	listen(addr string) (net.Listener, error)
	dial(ctx context.Context, network, addr string) (net.Conn, error)
}

type socketNetwork struct{}

func (socketNetwork) reserve(string, int) (string, func(), error) { return reservePort() }

// listen tries for a while: where ports cannot be reserved, a connection of
// someone else may have taken the port of a node that was down.
func (socketNetwork) listen(addr string) (net.Listener, error) {
	var l net.Listener
	var err error
	for range 100 {
		if l, err = net.Listen("tcp", addr); err == nil || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	return l, err
}

func (socketNetwork) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, addr)
}

// memoryNetwork connects by address. All that blocks in it blocks on condition
// variables and timers, which testing/synctest knows.
type memoryNetwork struct {
	mu        sync.Mutex
	listeners map[string]*memoryListener // guarded by mu
	clients   int                        // guarded by mu
}

func newMemoryNetwork() *memoryNetwork {
	return &memoryNetwork{listeners: map[string]*memoryListener{}}
}

func (m *memoryNetwork) reserve(host string, port int) (string, func(), error) {
	return fmt.Sprintf("%s:%d", host, port), func() {}, nil
}

func (m *memoryNetwork) listen(addr string) (net.Listener, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.listeners[addr] != nil {
		return nil, &net.OpError{Op: "listen", Net: "tcp", Err: syscall.EADDRINUSE}
	}
	l := &memoryListener{net: m, addr: memoryAddr(addr), accept: make(chan net.Conn, 1024), done: make(chan struct{})}
	m.listeners[addr] = l
	return l, nil
}

func (m *memoryNetwork) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	fail := func(err error) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: memoryAddr(addr), Err: err}
	}
	if err := ctx.Err(); err != nil {
		return fail(err)
	}
	m.mu.Lock()
	l := m.listeners[addr]
	m.clients++
	local := memoryAddr(fmt.Sprintf("10.1.0.1:%d", 1024+m.clients))
	m.mu.Unlock()
	if l == nil {
		return fail(syscall.ECONNREFUSED)
	}
	client, server := memoryPipe(local, memoryAddr(addr))
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return fail(syscall.ECONNREFUSED)
	}
	select {
	case l.accept <- server:
		return client, nil
	default: // the backlog is full
		return fail(syscall.ETIMEDOUT)
	}
}

type memoryAddr string

func (memoryAddr) Network() string  { return "tcp" }
func (a memoryAddr) String() string { return string(a) }

type memoryListener struct {
	net    *memoryNetwork
	addr   memoryAddr
	accept chan net.Conn
	done   chan struct{}

	mu     sync.Mutex
	closed bool // guarded by mu
}

func (l *memoryListener) Addr() net.Addr { return l.addr }

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.done:
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.addr, Err: net.ErrClosed}
	}
}

func (l *memoryListener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	l.net.mu.Lock()
	delete(l.net.listeners, string(l.addr))
	l.net.mu.Unlock()
	close(l.done)
	for { // what waits in the backlog is reset
		select {
		case c := <-l.accept:
			c.(*memoryConn).SetLinger(0)
			c.Close()
		default:
			return nil
		}
	}
}

// memoryPipe returns the two ends of a buffered connection. Writes never block.
func memoryPipe(a, b memoryAddr) (*memoryConn, *memoryConn) {
	ab, ba := newMemoryHalf(), newMemoryHalf()
	return &memoryConn{in: ba, out: ab, local: a, remote: b}, &memoryConn{in: ab, out: ba, local: b, remote: a}
}

// memoryHalf is one direction of a connection.
type memoryHalf struct {
	mu       sync.Mutex
	cond     sync.Cond
	buf      []byte      // guarded by mu, like all below
	off      int         // what of buf has been read
	eof      bool        // the writer closed
	gone     bool        // the reader closed; writes fail
	reset    bool        // the connection was reset; reads fail when buf is empty
	deadline time.Time   // of reads
	timer    *time.Timer // wakes readers at the deadline
}

func newMemoryHalf() *memoryHalf {
	h := &memoryHalf{}
	h.cond.L = &h.mu
	return h
}

type memoryConn struct {
	in, out       *memoryHalf
	local, remote memoryAddr

	mu     sync.Mutex
	closed bool // guarded by mu
	linger bool // guarded by mu; Close resets
}

func (c *memoryConn) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: "tcp", Source: c.local, Addr: c.remote, Err: err}
}

func (c *memoryConn) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

func (c *memoryConn) Read(p []byte) (int, error) {
	h := c.in
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		switch {
		case h.gone:
			return 0, c.opError("read", net.ErrClosed)
		case !h.deadline.IsZero() && !time.Now().Before(h.deadline):
			return 0, c.opError("read", os.ErrDeadlineExceeded)
		case len(p) == 0:
			return 0, nil
		case h.off < len(h.buf):
			n := copy(p, h.buf[h.off:])
			if h.off += n; h.off == len(h.buf) {
				h.buf, h.off = h.buf[:0], 0
			}
			return n, nil
		case h.reset:
			return 0, c.opError("read", syscall.ECONNRESET)
		case h.eof:
			return 0, io.EOF
		}
		h.cond.Wait()
	}
}

func (c *memoryConn) Write(p []byte) (int, error) {
	if c.isClosed() {
		return 0, c.opError("write", net.ErrClosed)
	}
	h := c.out
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.reset:
		return 0, c.opError("write", syscall.ECONNRESET)
	case h.gone: // as over TCP, the first write after the peer's close meets a reset
		h.reset = true
		return len(p), nil
	case h.eof:
		return 0, c.opError("write", syscall.EPIPE)
	}
	h.buf = append(h.buf, p...)
	h.cond.Broadcast()
	return len(p), nil
}

// Close closes both directions: the peer reads what was written, then EOF, or a
// reset if there was unread data or SetLinger(0) was called.
func (c *memoryConn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return c.opError("close", net.ErrClosed)
	}
	c.closed = true
	rst := c.linger
	c.mu.Unlock()

	c.in.mu.Lock()
	c.in.gone = true
	unread := c.in.off < len(c.in.buf)
	if rst || unread {
		c.in.reset = true
	}
	if c.in.timer != nil {
		c.in.timer.Stop()
	}
	c.in.cond.Broadcast()
	c.in.mu.Unlock()

	c.out.mu.Lock()
	c.out.eof = true
	if rst || unread {
		c.out.reset = true
	}
	c.out.cond.Broadcast()
	c.out.mu.Unlock()
	return nil
}

// CloseWrite is TCP's half-close.
func (c *memoryConn) CloseWrite() error {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.out.eof = true
	c.out.cond.Broadcast()
	return nil
}

// SetLinger(0) makes Close a reset.
func (c *memoryConn) SetLinger(sec int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.linger = sec == 0
	return nil
}

func (c *memoryConn) LocalAddr() net.Addr  { return c.local }
func (c *memoryConn) RemoteAddr() net.Addr { return c.remote }

func (c *memoryConn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

func (c *memoryConn) SetReadDeadline(t time.Time) error {
	h := c.in
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gone {
		return c.opError("set", net.ErrClosed)
	}
	h.deadline = t
	if h.timer != nil {
		h.timer.Stop()
		h.timer = nil
	}
	if !t.IsZero() {
		if d := time.Until(t); d > 0 {
			h.timer = time.AfterFunc(d, func() {
				h.mu.Lock()
				defer h.mu.Unlock()
				h.cond.Broadcast()
			})
		}
	}
	h.cond.Broadcast()
	return nil
}

func (c *memoryConn) SetWriteDeadline(time.Time) error { return nil }
