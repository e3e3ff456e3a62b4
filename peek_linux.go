package crdbdrain

import (
	"syscall"
	"unsafe"
)

const canPeek = true

// peekFD is recv(fd, buf, 1, MSG_PEEK|MSG_DONTWAIT) without the sockaddr that syscall.Recvfrom allocates, and without
// telling the scheduler: the call does not block.
func peekFD(fd uintptr, buf *[1]byte) peeked {
	for {
		n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(buf)), 1,
			syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
		switch {
		case errno == syscall.EINTR:
			continue
		case errno == syscall.EAGAIN:
			return peekQuiet
		case errno == syscall.ENOTSOCK:
			return peekUnknown
		case errno != 0 || n == 0:
			return peekClosed
		default:
			return peekPending
		}
	}
}
