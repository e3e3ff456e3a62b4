package crdbdrain

import (
	"net"
	"syscall"
)

const canNarrow = true

// narrow shortens the queue of connections that wait to be accepted. When it is full, further dials are not answered:
// they stay in SYN-SENT, as with a host that is gone.
func narrow(l *net.TCPListener) error {
	raw, err := l.SyscallConn()
	if err != nil {
		return err
	}
	var listenErr error
	if err := raw.Control(func(fd uintptr) { listenErr = syscall.Listen(int(fd), 0) }); err != nil {
		return err
	}
	return listenErr
}
