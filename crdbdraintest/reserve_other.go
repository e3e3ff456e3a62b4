//go:build !linux

package crdbdraintest

import "net"

// reservePort finds a free port of the loopback interface. It is not kept free
// while nothing listens on it.
func reservePort() (string, func(), error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	defer l.Close()
	return l.Addr().String(), func() {}, nil
}
