package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestCommandLine(t *testing.T) {
	for _, tt := range []struct {
		args           string
		status         int
		stdout, stderr string // what it contains; empty: nothing is printed
	}{
		{"", exitUsage, "", "crdbdrain: a command is missing; this version has demo, check, watch, feed\nTry: crdbdrain help\n"},
		{"help", exitOK, "SYNOPSIS\n    crdbdrain COMMAND", ""},
		{"-h", exitOK, "demo     a rolling restart", ""},
		{"--help", exitOK, "EXIT STATUS", ""},
		{"help demo", exitOK, "crdbdrain demo [-json] [-svg FILE]", ""},
		{"demo -h", exitOK, "crdbdrain demo [-json] [-svg FILE]", ""},
		{"demo --help", exitOK, "crdbdrain demo [-json] [-svg FILE]", ""},
		{"help demo demo", exitUsage, "", "help takes one command"},
		{"help dmeo", exitUsage, "", `unknown command "dmeo"`},
		{"check", exitUsage, "", "check: a DSN is missing: crdbdrain check 'postgres://app@host:26257/defaultdb'"},
		{"check -h", exitOK, "EXIT STATUS\n    0 if all", ""},
		{"check host=h user=u", exitUsage, "", "check: one DSN is wanted, and there are 2 arguments; put the DSN in quotes"},
		{"check postgres://h/d -json", exitUsage, "", "check: flags come before the DSN: crdbdrain check [FLAGS] DSN"},
		{"check -timeout 0s postgres://h/d", exitUsage, "", "check: -timeout wants a duration, such as 15s"},
		{"check postgres://h/d?crdbdrain_mod=on", exitUsage, "", "check: unknown key crdbdrain_mod; did you mean crdbdrain_mode?"},
		{"watch -x", exitUsage, "", "watch: flag provided but not defined: -x"},
		{"watch -interval 1ms postgres://h/d", exitUsage, "", "watch: -interval wants a duration from 100ms to 1h"},
		{"watch -connections 0 postgres://h/d", exitUsage, "", "watch: -connections wants a number from 1 to 100"},
		{"watch mysql://h/d", exitUsage, "", "watch: unknown scheme in the DSN: want postgres"},
		{"postgres://u:s3cret@h/d", exitUsage, "", "crdbdrain: a command is missing before the DSN: crdbdrain check DSN\n"},
		{"demo -svg /nowhere/x.svg", exitUsage, "", "demo: -svg: open /nowhere/x.svg: "},
		{"help feed", exitOK, "crdbdrain feed -dsn DSN", ""},
		{"feed", exitUsage, "", "feed: a DSN is missing: -dsn, or better CRDBDRAIN_DSN in the environment"},
		{"feed -listen :1 -dsn x", exitUsage, "", "feed: -listen is no loopback address"},
		{"-json demo", exitUsage, "", `unknown flag "-json" before the command; flags follow it: crdbdrain demo -json`},
		{"demo -jsn", exitUsage, "", "demo: flag provided but not defined: -jsn"},
		{"demo -json=perhaps", exitUsage, "", `demo: invalid boolean value "perhaps"`},
		{"demo now", exitUsage, "", `demo: unexpected argument "now"`},
	} {
		t.Run(tt.args, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			status := run(t.Context(), strings.Fields(tt.args), &stdout, &stderr)
			if status != tt.status {
				t.Errorf("exit status %d, want %d", status, tt.status)
			}
			for _, out := range []struct{ name, got, want string }{
				{"stdout", stdout.String(), tt.stdout}, {"stderr", stderr.String(), tt.stderr},
			} {
				if !strings.Contains(out.got, out.want) || out.want == "" && out.got != "" {
					t.Errorf("%s: %q, want %q", out.name, out.got, out.want)
				}
			}
		})
	}
}

func TestHelpFitsATerminal(t *testing.T) {
	for _, c := range commands {
		for line := range strings.Lines(c.help) {
			if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > 80 {
				t.Errorf("help %s: a line of %d characters: %s", c.name, n, line)
			}
		}
	}
}

func TestAnInterruptedDemoEndsSoonAndCleanly(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond) // it runs the load by then
	defer cancel()
	var stdout, stderr bytes.Buffer
	begin := time.Now()
	if status := run(ctx, []string{"demo"}, &stdout, &stderr); status != exitInterrupted {
		t.Errorf("exit status %d, want %d", status, exitInterrupted)
	}
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("it took %v to end", took)
	}
	if stdout.Len() > 0 || !strings.HasSuffix(stderr.String(), "crdbdrain: interrupted\n") {
		t.Errorf("stdout %q, stderr %q", &stdout, &stderr)
	}
}

type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

func TestAResultThatCannotBePrintedIsAFailure(t *testing.T) {
	var stderr bytes.Buffer
	status := run(t.Context(), []string{"help"}, brokenPipe{}, &stderr)
	if want := "crdbdrain: cannot print the result: broken pipe\n"; status != exitFailed || stderr.String() != want {
		t.Errorf("exit status %d, %q; want %d, %q", status, &stderr, exitFailed, want)
	}
}
