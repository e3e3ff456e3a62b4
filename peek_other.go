//go:build !linux && !darwin && !freebsd && !netbsd && !openbsd && !dragonfly

package crdbdrain

// The platform has no non-blocking look at a socket (Windows has none for Go's overlapped sockets): pgx's ping of
// connections that were idle for more than a second stands alone.
const canPeek = false

func peekFD(uintptr, *[1]byte) peeked { return peekUnknown }
