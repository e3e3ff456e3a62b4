//go:build unix

package pgtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
)

// account is the user that PostgreSQL runs as; the zero value is the test's own user.
type account struct {
	credential *syscall.Credential
}

// findAccount returns the test's own user, or an unprivileged one where that is root.
func findAccount() (account, error) {
	if os.Geteuid() != 0 {
		return account{}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			continue
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			continue
		}
		return account{&syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, nil
	}
	return account{}, fmt.Errorf("%w: root cannot run it, and there is neither a user postgres nor nobody", errUnavailable)
}

// prepare makes cmd run as the account, in dir, out of reach of a Ctrl-C that is meant for the tests.
func (a account) prepare(cmd *exec.Cmd, dir string) {
	cmd.Dir = dir
	cmd.Env = environment(dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: a.credential}
}

// own gives a file to the account.
func (a account) own(path string) error {
	if a.credential == nil {
		return nil
	}
	return os.Chown(path, int(a.credential.Uid), int(a.credential.Gid))
}

// makeDir makes a directory that the account owns and can reach, with a name short enough for a unix socket in it (104 bytes on macOS).
func makeDir(a account) (string, error) {
	var failures []error
	for _, base := range []string{os.TempDir(), "/tmp", "/var/tmp"} {
		dir, err := os.MkdirTemp(base, "pgtest-")
		if err != nil {
			failures = append(failures, err)
			continue
		}
		if len(dir) > 80 {
			err = fmt.Errorf("%s: too long for a unix socket", dir)
		} else if err = a.own(dir); err == nil {
			probe := exec.Command("/bin/sh", "-c", ": >probe")
			a.prepare(probe, dir)
			if err = probe.Run(); err == nil {
				err = os.Remove(filepath.Join(dir, "probe"))
			}
		}
		if err == nil {
			return dir, nil
		}
		failures = append(failures, fmt.Errorf("%s: %w", dir, err), os.RemoveAll(dir))
	}
	return "", fmt.Errorf("no directory that PostgreSQL's user can use: %w", errors.Join(failures...))
}

// guard is a process that outlives the test binary if it must: when its standard input ends, because it is released or because the test
// binary is gone, a panic or a timeout included, it ends the server and removes its directory.
type guard struct {
	mu   sync.Mutex
	cmd  *exec.Cmd // guarded by mu; nil once released
	held *os.File  // guarded by mu
}

// guardScript waits for the server to remove its postmaster.pid rather than for the end of the process, which in a container without an
// init may stay a zombie for ever.
const guardScript = `
read -r _
pid=$(sed -n 1p data/postmaster.pid 2>/dev/null)
if [ -n "$pid" ] && kill -QUIT "$pid" 2>/dev/null; then
	n=0
	while [ -e data/postmaster.pid ] && [ $n -lt 100 ]; do
		sleep 0.05
		n=$((n + 1))
	done
fi
cd / && rm -rf "$1"
`

func newGuard(a account, dir string) (*guard, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("/bin/sh", "-c", guardScript, "pgtest-guard", dir)
	cmd.Stdin = r
	a.prepare(cmd, dir)
	err = cmd.Start()
	_ = r.Close() // the guard has its own copy
	if err != nil {
		_ = w.Close()
		return nil, err
	}
	return &guard{cmd: cmd, held: w}, nil
}

// release ends the server and removes its directory. A second call does nothing.
func (g *guard) release() error {
	g.mu.Lock()
	cmd, held := g.cmd, g.held
	g.cmd, g.held = nil, nil
	g.mu.Unlock()
	if cmd == nil {
		return nil
	}
	return errors.Join(held.Close(), cmd.Wait())
}
