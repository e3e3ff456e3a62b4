package crdbdraintest

import (
	"fmt"
	"syscall"
)

// reservePort binds a port of the loopback interface without listening on it.
// Linux lets a listener with SO_REUSEADDR (Go sets it) bind it as well, gives
// it to nobody else, and refuses connections to it while nothing listens: just
// what the port of a node that is down should do.
func reservePort() (string, func(), error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", nil, err
	}
	fail := func(err error) (string, func(), error) {
		syscall.Close(fd)
		return "", nil, err
	}
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return fail(err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return fail(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		return fail(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port), func() { syscall.Close(fd) }, nil
}
