package crdbdrain

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// link is the plaintext stream of one connection, above TLS, between pgx's protocol reader and the connection. It hears
// the server's last words: which kinds of reply came since the last request, and whether the server said goodbye. That
// decides whether a statement that met a shutdown was executed.
//
// The server fact it relies on (cockroachdb pkg/sql/conn_executor.go, DrainRequest; pkg/sql/pgwire/server.go): outside a
// transaction, a drain ends the session in the order of its messages. What was executed has sent its output before the
// 57P01, what stands behind it is never executed. So if nothing came before the 57P01, or only messages that Parse, Bind
// and Describe answer, nothing of the request was executed.
type link struct {
	r    io.Reader // pgx's, of conn
	w    io.Writer // pgx's, of conn
	conn net.Conn

	session atomic.Pointer[session] // set once the server is known to be CockroachDB
	peeker  *peeker                 // nil where the socket cannot be looked at

	stray  atomic.Bool   // replied, as the request before left it: no ReadyForQuery has been read since
	wrote  atomic.Bool   // since the request began, the kernel took a byte of it
	unsent atomic.Bool   // a write failed before the kernel took a byte of the request
	asked  atomic.Bool   // since the request began, something was written that the server may execute
	words  atomic.Uint32 // goodbye*
	ran    atomic.Uint32 // how often a reply came that execution may have produced, after none
	began  uint32        // ran, when the request began; the holder's

	// The reader's place in the stream of messages.
	mu      sync.Mutex
	head    [5]byte // guarded by mu, like all below
	have    int     // bytes of head read
	left    uint32  // bytes of the body to come
	fields  errorFields
	err     bool // an error came since the last ReadyForQuery
	replied bool // since the request began, a reply came that execution may have produced

	bye   *pgconn.PgError // the goodbye, once pgx has seen it; pgx's goroutine's
	first *pgconn.PgError // the last error but the goodbye that pgx has seen; pgx's goroutine's
}

const (
	goodbyeNone    = iota
	goodbyeClean   // the shutdown notice came, with nothing before it that execution could have produced
	goodbyeReplied // the shutdown notice came after such a reply
	goodbyeErrored // the shutdown notice came after the request's own error (57014 from a drain's deadline)
)

var _ io.ReadWriter = (*link)(nil)

// begin says that a request is about to be written. Replies to earlier ones no longer count.
func (l *link) begin() {
	if l.stray.Load() {
		l.mu.Lock()
		l.replied = false
		l.stray.Store(false)
		l.mu.Unlock()
	}
	clearFlag(&l.wrote)
	clearFlag(&l.asked)
	l.began = l.ran.Load()
}

// nothingRan reports whether the request, in all its round trips so far, got no reply that execution may have produced.
func (l *link) nothingRan() bool { return l.ran.Load() == l.began }

// clearFlag spares the store, which costs several times the load, where there is nothing to clear.
func clearFlag(b *atomic.Bool) {
	if b.Load() {
		b.Store(false)
	}
}

func setFlag(b *atomic.Bool) {
	if !b.Load() {
		b.Store(true)
	}
}

// Write lets a write that failed because the peer is gone pass for a success on CockroachDB, so that pgx goes on to read:
// what the server said before it closed is still there (on Linux even after an RST), and where it is not, the read fails
// with the peer's close.
func (l *link) Write(p []byte) (int, error) {
	if !onlyPrepares(p) {
		setFlag(&l.asked)
	}
	n, err := l.w.Write(p)
	if n > 0 {
		setFlag(&l.wrote)
	}
	if err != nil && l.session.Load() != nil && peerGone(err) {
		if !l.wrote.Load() {
			l.unsent.Store(true)
		}
		return len(p), nil
	}
	return n, err
}

// onlyPrepares reports whether nothing of what is written executes anything: Parse, Describe, Close, Flush, Sync, and the
// Terminate that pgx writes in the background when a read has failed. pgx prepares a statement in a round trip of its own
// before it first executes it, and writes whole messages.
func onlyPrepares(p []byte) bool {
	for len(p) > 0 {
		switch p[0] {
		case 'P', 'D', 'C', 'H', 'S', 'X':
		default:
			return false
		}
		if len(p) < 5 {
			return false
		}
		n := 1 + uint64(binary.BigEndian.Uint32(p[1:]))
		if n < 5 || n > uint64(len(p)) {
			return false
		}
		p = p[n:]
	}
	return true
}

func peerGone(err error) bool {
	return errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.ECONNABORTED)
}

func (l *link) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	l.hear(p[:n])
	return n, err
}

// hearOut reads what is left of a connection that the peer has closed and nobody will use again: TLS, or pgx's background
// reader, may have taken the last words from the socket.
func (l *link) hearOut() {
	_ = l.conn.SetReadDeadline(time.Now().Add(time.Millisecond)) // it does not block, the socket is at its end
	var b [512]byte
	for {
		if _, err := l.Read(b[:]); err != nil {
			return
		}
	}
}

// hear takes note of what the server says, and marks the node when it says goodbye.
func (l *link) hear(p []byte) {
	before := l.words.Load()
	l.follow(p)
	if before == goodbyeNone && l.words.Load() != goodbyeNone {
		if s := l.session.Load(); s != nil {
			s.w.heardGoodbye(s)
		}
	}
}

// follow follows the stream of backend messages: type byte, length (which counts itself), body.
func (l *link) follow(p []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(p) > 0 {
		if l.have == 0 {
			// The usual: whole messages, of which only the kinds matter.
			for len(p) >= len(l.head) && p[0] != 'E' {
				whole := 1 + uint64(max(binary.BigEndian.Uint32(p[1:]), 4))
				if uint64(len(p)) < whole {
					break
				}
				l.message(p[0])
				p = p[whole:]
			}
			if len(p) == 0 {
				break
			}
		}
		if l.have < len(l.head) {
			n := copy(l.head[l.have:], p)
			l.have += n
			p = p[n:]
			if l.have < len(l.head) {
				break
			}
			length := binary.BigEndian.Uint32(l.head[1:])
			l.left = max(length, 4) - 4 // pgx refuses a shorter one
			l.fields.reset()
		} else {
			n := uint32(min(uint64(l.left), uint64(len(p))))
			if l.head[0] == 'E' {
				l.fields.add(p[:n])
			}
			l.left -= n
			p = p[n:]
		}
		if l.left == 0 {
			l.have = 0
			l.message(l.head[0])
		}
	}
	if l.replied != l.stray.Load() {
		l.stray.Store(l.replied)
	}
}

// message takes note of one whole message from the server. l.mu is held.
func (l *link) message(kind byte) {
	switch kind {
	case '1', '2', '3', 't', 'T', 'n':
		// ParseComplete, BindComplete, CloseComplete, ParameterDescription, RowDescription, NoData: none of them executes
		// anything, and what was executed before them has been answered before.
	case 'Z':
		// ReadyForQuery: the request is over, and what it did has been told.
		l.err = false
		l.replied = false
		clearFlag(&l.wrote)
	case 'E':
		if l.fields.ended && isGoodbye(l.fields.code, l.fields.message) {
			l.goodbye()
			return
		}
		l.err = true
		l.reply()
	default:
		l.reply()
	}
}

// reply takes note of a reply that execution may have produced. l.mu is held.
func (l *link) reply() {
	if !l.replied {
		l.replied = true
		l.ran.Add(1)
	}
}

// goodbye takes note of the server's shutdown notice. l.mu is held.
func (l *link) goodbye() {
	said := uint32(goodbyeClean)
	switch {
	case l.err:
		said = goodbyeErrored
	case l.replied:
		said = goodbyeReplied
	}
	l.words.CompareAndSwap(goodbyeNone, said)
}

// errorFields reads the SQLSTATE and the message out of an ErrorResponse's body as it comes in. Where a field comes
// twice the last counts, as for pgx, so all of the body is read, however long it is.
type errorFields struct {
	code, message string // of a longer text the first maxErrorField bytes
	ended         bool   // the terminator came
	field         byte   // whose value is being read; 0 between two
	value         []byte // what has come of it
}

// maxErrorField is how much of a field is kept: enough to tell that it is not the notice's.
const maxErrorField = 64

func (f *errorFields) reset() { *f = errorFields{value: f.value[:0]} }

func (f *errorFields) add(p []byte) {
	for len(p) > 0 && !f.ended {
		if f.field == 0 {
			f.field, f.value = p[0], f.value[:0]
			f.ended = f.field == 0
			p = p[1:]
			continue
		}
		value, rest, whole := bytes.Cut(p, []byte{0})
		f.value = append(f.value, value[:min(len(value), maxErrorField-len(f.value))]...)
		if whole {
			switch f.field {
			case 'C':
				f.code = string(f.value)
			case 'M':
				f.message = string(f.value)
			}
			f.field = 0
		}
		p = rest
	}
}
