//go:build !unix

package pgtest

import (
	"fmt"
	"os/exec"
	"runtime"
)

type account struct{}

func findAccount() (account, error) {
	return account{}, fmt.Errorf("%w: this package cannot run it on %s", errUnavailable, runtime.GOOS)
}

func (account) prepare(*exec.Cmd, string)      {}
func (account) own(string) error               { return nil }
func makeDir(account) (string, error)          { return "", errUnavailable }
func newGuard(account, string) (*guard, error) { return nil, errUnavailable }

type guard struct{}

func (*guard) release() error { return nil }
