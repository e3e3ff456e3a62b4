package crdbdrain

import (
	"net"
	"syscall"
)

// peeked is what one non-blocking look at an idle connection's socket saw.
type peeked uint8

const (
	peekUnknown peeked = iota // the socket cannot be looked at: pgx's ping rule stands alone
	peekQuiet                 // open, nothing to read: as an idle connection should be
	peekPending               // something to read: a notice that is harmless, or the server's last words
	peekClosed                // closed or reset by the peer
)

// peeker looks at a socket's receive queue without taking from it. The descriptor's bytes are looked at, under TLS too.
// The RawConn and the closure are kept: asking for them at each look would allocate. RawConn.Control is used, not Read:
// Read waits for the descriptor's read lock, which pgx's background reader can hold on an idle connection for good.
// Only the connection's owner may call peek.
type peeker struct {
	raw    syscall.RawConn
	look   func(fd uintptr)
	result peeked
	buf    [1]byte
}

// newPeeker returns nil where nc has no descriptor (an in-memory connection, a wrapper that hides it).
func newPeeker(nc net.Conn) *peeker {
	for range 8 {
		if sc, ok := nc.(syscall.Conn); ok {
			raw, err := sc.SyscallConn()
			if err != nil || !canPeek {
				return nil
			}
			p := &peeker{raw: raw}
			p.look = func(fd uintptr) { p.result = peekFD(fd, &p.buf) }
			return p
		}
		inner, ok := nc.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		nc = inner.NetConn()
	}
	return nil
}

func (p *peeker) peek() peeked {
	if p == nil {
		return peekUnknown
	}
	p.result = peekUnknown
	if err := p.raw.Control(p.look); err != nil {
		return peekClosed // the descriptor is closed on our side
	}
	return p.result
}

// apart is peek for those who do not own the connection. It allocates.
func (p *peeker) apart() (result peeked) {
	if p == nil {
		return peekUnknown
	}
	var buf [1]byte
	if err := p.raw.Control(func(fd uintptr) { result = peekFD(fd, &buf) }); err != nil {
		return peekClosed
	}
	return result
}
