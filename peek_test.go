package crdbdrain

import (
	"context"
	"crypto/tls"
	"database/sql/driver"
	"errors"
	"net"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// socketPair returns the two ends of a connection.
func socketPair(t testing.TB, network string) (client, server net.Conn) {
	t.Helper()
	addr := "127.0.0.1:0"
	if network == "unix" {
		addr = filepath.Join(t.TempDir(), "s")
	}
	l, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	client, err = net.Dial(network, l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	server = <-accepted
	t.Cleanup(func() { client.Close(); server.Close() })
	return client, server
}

// overTLS puts TLS on a pair.
func overTLS(t testing.TB, client, server net.Conn) (c, s *tls.Conn) {
	t.Helper()
	s = tls.Server(server, testTLS())
	c = tls.Client(client, &tls.Config{InsecureSkipVerify: true})
	done := make(chan error, 1)
	go func() {
		err := s.Handshake()
		if err == nil {
			_, err = s.Write([]byte("x"))
		}
		done <- err
	}()
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err != nil { // the session tickets come before the first byte
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return c, s
}

func needPeek(t testing.TB) {
	if !canPeek {
		t.Skip("no look at a socket on " + runtime.GOOS)
	}
}

// eventuallySees waits until the peek sees it: what the peer has done takes its time through the kernel.
func eventuallySees(t testing.TB, p *peeker, want peeked) {
	t.Helper()
	var got peeked
	eventually(t, "the peek sees it", func() bool { got = p.peek(); return got == want })
}

func TestPeek(t *testing.T) { // not parallel: it counts allocations
	needPeek(t)
	for _, network := range []string{"tcp", "unix", "tcp under TLS"} {
		open := func(t *testing.T) (p *peeker, client, server, raw net.Conn) {
			name := network
			if network == "tcp under TLS" {
				name = "tcp"
			}
			client, server = socketPair(t, name)
			raw = server
			if network == "tcp under TLS" {
				client, server = overTLS(t, client, server)
			}
			// As in a connection's life: under the link, whatever the client wraps.
			p = newPeeker(client)
			if p == nil {
				t.Fatal("no peeker")
			}
			if got := p.peek(); got != peekQuiet {
				t.Fatalf("a healthy connection: %d, want quiet", got)
			}
			return p, client, server, raw
		}
		t.Run(network+"/FIN", func(t *testing.T) {
			p, _, _, raw := open(t)
			raw.Close()
			eventuallySees(t, p, peekClosed)
		})
		t.Run(network+"/RST", func(t *testing.T) {
			p, _, _, raw := open(t)
			if tcp, ok := raw.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0)
			}
			raw.Close()
			eventuallySees(t, p, peekClosed)
			if got := p.peek(); got != peekClosed { // the kernel reports a reset once
				t.Errorf("the second look: %d, want closed", got)
			}
		})
		t.Run(network+"/pending", func(t *testing.T) {
			p, client, server, _ := open(t)
			if _, err := server.Write([]byte("E")); err != nil {
				t.Fatal(err)
			}
			eventuallySees(t, p, peekPending)
			if got := p.peek(); got != peekPending {
				t.Errorf("the second look: %d, want pending", got)
			}
			var b [1]byte
			if n, err := client.Read(b[:]); n != 1 || err != nil || b[0] != 'E' {
				t.Errorf("the byte was taken: %d %q %v", n, b, err)
			}
			if got := p.peek(); got != peekQuiet {
				t.Errorf("after the read: %d, want quiet", got)
			}
		})
		t.Run(network+"/pending, then FIN", func(t *testing.T) {
			p, _, server, raw := open(t)
			if _, err := server.Write([]byte("E")); err != nil {
				t.Fatal(err)
			}
			raw.Close()
			eventuallySees(t, p, peekPending) // the last words come first
		})
		t.Run(network+"/closed by ourselves", func(t *testing.T) {
			p, client, _, _ := open(t)
			client.Close()
			if got := p.peek(); got != peekClosed {
				t.Errorf("%d, want closed", got)
			}
		})
		t.Run(network+"/a reader waits", func(t *testing.T) {
			// pgx's background reader can be blocked in a read on an idle connection for good, and holds the
			// descriptor's read lock then.
			p, client, server, _ := open(t)
			reading := make(chan struct{})
			read := make(chan struct{})
			go func() {
				defer close(read)
				close(reading)
				_, _ = client.Read(make([]byte, 1))
			}()
			<-reading
			for range 1000 {
				if got := p.peek(); got != peekQuiet {
					t.Fatalf("%d, want quiet", got)
				}
			}
			server.Close()
			<-read
			eventuallySees(t, p, peekClosed)
		})
		t.Run(network+"/allocations", func(t *testing.T) {
			p, _, _, _ := open(t)
			if got := testing.AllocsPerRun(1000, func() { p.peek() }); got != 0 && runtime.GOOS == "linux" {
				t.Errorf("%v allocations a look, want none", got)
			}
		})
	}
}

// ringOfConns is a wrapper whose NetConn goes round in circles.
type ringOfConns struct{ net.Conn }

func (r ringOfConns) NetConn() net.Conn { return r }

// Where there is no descriptor, nothing is known.
func TestPeekWithoutADescriptor(t *testing.T) {
	t.Parallel()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	for name, nc := range map[string]net.Conn{
		"in memory": a, "a wrapper that hides it": struct{ net.Conn }{a},
		"TLS in memory": tls.Client(a, &tls.Config{ServerName: "x"}),
		"a ring":        ringOfConns{a},
	} {
		p := newPeeker(nc)
		if p != nil || p.peek() != peekUnknown {
			t.Errorf("%s: %v, %d; want none and unknown", name, p, p.peek())
		}
	}
}

// slowWriter makes pgx's writes slow, once asked to, so that pgx starts its background reader.
type slowWriter struct {
	net.Conn
	slow *atomic.Bool
}

func (s slowWriter) NetConn() net.Conn { return s.Conn }

func (s slowWriter) Write(p []byte) (int, error) {
	if s.slow.Load() {
		time.Sleep(30 * time.Millisecond) // pgx takes a write of more than 15 ms to be blocked
	}
	return s.Conn.Write(p)
}

// pgx's background reader stays blocked in a read of the idle connection. A checkout is not held up by it, and the
// server's last words, which it may have taken, are nobody's to notice.
func TestCheckoutWithPgxsBackgroundReader(t *testing.T) {
	t.Parallel()
	needPeek(t)
	for _, withTLS := range []bool{false, true} {
		p := startPeer(t, withTLS)
		var slow atomic.Bool
		db := openWith(t, p.dsn(), func(cc *pgconn.Config) {
			cc.AfterNetConnect = func(_ context.Context, _ *pgconn.Config, nc net.Conn) (net.Conn, error) {
				return slowWriter{nc, &slow}, nil
			}
		})
		dc, err := db.c.Connect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer dc.Close()
		c := dc.(*conn)
		slow.Store(true)
		if _, err := c.ExecContext(t.Context(), "INSERT INTO t VALUES (1)", nil); err != nil {
			t.Fatal(err)
		}
		slow.Store(false)
		for range 100 {
			if !c.IsValid() {
				t.Fatal("not valid")
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			if err := c.ResetSession(ctx); err != nil {
				t.Fatalf("a checkout with the background reader at work: %v", err)
			}
			cancel()
		}
		if !c.IsValid() {
			t.Fatal("not valid")
		}
		p.endIdle(sayGoodbye)
		eventually(t, "the goodbye is there, or the reader has taken it", func() bool { return c.s.link.peeker.peek() != peekQuiet })
		// What pgx's reader has taken from the socket no look at the socket shows: the statement is then the one to meet it.
		dead := c.s
		if err := c.ResetSession(t.Context()); err == nil {
			if _, err := c.ExecContext(t.Context(), "INSERT INTO t VALUES (2)", nil); err != nil || c.s == dead {
				t.Errorf("a statement after the goodbye: %v; on another session: %v", err, c.s != dead)
			}
		} else if !errors.Is(err, driver.ErrBadConn) {
			t.Error(err)
		}
	}
}

func BenchmarkPeek(b *testing.B) {
	needPeek(b)
	for _, network := range []string{"tcp", "unix", "tcp under TLS"} {
		b.Run(network, func(b *testing.B) {
			name := network
			if network == "tcp under TLS" {
				name = "tcp"
			}
			client, server := socketPair(b, name)
			if network == "tcp under TLS" {
				client, _ = overTLS(b, client, server)
			}
			p := newPeeker(client)
			b.ReportAllocs()
			for b.Loop() {
				if p.peek() != peekQuiet {
					b.Fatal("not quiet")
				}
			}
		})
	}
}
