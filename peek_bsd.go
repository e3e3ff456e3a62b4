//go:build darwin || freebsd || netbsd || openbsd || dragonfly

package crdbdrain

import "syscall"

const canPeek = true

// peekFD is recv(fd, buf, 1, MSG_PEEK|MSG_DONTWAIT). syscall.Recvfrom allocates here; the systems have no supported raw
// system call.
func peekFD(fd uintptr, buf *[1]byte) peeked {
	for {
		n, _, err := syscall.Recvfrom(int(fd), buf[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return peekQuiet
		case err == syscall.ENOTSOCK:
			return peekUnknown
		case err != nil || n == 0:
			return peekClosed
		default:
			return peekPending
		}
	}
}
