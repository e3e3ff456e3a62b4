// Crdbdrain shows what the driver of the same name does.
//
// Usage:
//
//	crdbdrain demo [-json] [-svg FILE]
//	crdbdrain check [-json] DSN
//	crdbdrain watch [-interval DURATION] DSN
//	crdbdrain feed -dsn DSN [-listen ADDRESS] …
//	crdbdrain help [command]
//
// demo drains and restarts every node of a simulated cluster under load, once for pgx and once for crdbdrain, and prints
// what each of them saw. check says what will work with a DSN, and what is missing. watch shows the nodes of a cluster,
// live.
//
// The exit status is 0 after success, 1 if the command could not do its work, 2 if it was called in a way that it does
// not understand, 3 if check has found a problem, and 130 if it was interrupted.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

// command is a subcommand; each has a file of its own.
type command struct {
	name    string
	summary string // one line, for the list
	help    string // in the manner of a man page
	// run does the work. What it prints to stdout is the command's result; stderr is for progress. An error is printed
	// by main, a usageError with a hint at the help.
	run func(ctx context.Context, args []string, stdout, stderr io.Writer) error
}

var commands = []command{demoCommand, checkCommand, watchCommand, feedCommand}

const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitLimited     = 3
	exitInterrupted = 130 // 128 + SIGINT, as shells say it
)

// usageError is a call that is not understood.
type usageError string

func (e usageError) Error() string { return string(e) }

// exitStatus is the end of a command that has already said why.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// stdin is standard input, but in tests.
var stdin io.Reader = os.Stdin

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is main without the process: it returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	err := dispatch(ctx, args, stdout, stderr)
	var usage usageError
	var status exitStatus
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &status):
		return int(status)
	case errors.As(err, &usage):
		say(stderr, "crdbdrain: %s\nTry: crdbdrain help\n", err)
		return exitUsage
	case ctx.Err() != nil:
		say(stderr, "crdbdrain: interrupted\n")
		return exitInterrupted
	default:
		say(stderr, "crdbdrain: %s\n", err)
		return exitFailed
	}
}

func dispatch(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		return usageError("a command is missing; this version has " + names(commands))
	}
	name, rest := args[0], args[1:]
	switch name {
	case "help", "-h", "-help", "--help":
		return help(rest, stdout)
	}
	c, err := find(name)
	if err != nil {
		return err
	}
	err = c.run(ctx, rest, stdout, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return write(stdout, c.help)
	}
	return err
}

func find(name string) (command, error) {
	for _, c := range commands {
		if c.name == name {
			return c, nil
		}
	}
	if strings.HasPrefix(name, "-") {
		name, _, _ = strings.Cut(name, "=")
		return command{}, usageError(fmt.Sprintf("unknown flag %q before the command; flags follow it: crdbdrain demo -json", name))
	}
	if strings.ContainsAny(name, "=@") || strings.Contains(name, "://") { // not to be repeated: it may hold a password
		return command{}, usageError("a command is missing before the DSN: crdbdrain check DSN")
	}
	return command{}, usageError(fmt.Sprintf("unknown command %q; this version has %s", name, names(commands)))
}

func names(list []command) string {
	all := make([]string, 0, len(list))
	for _, c := range list {
		all = append(all, c.name)
	}
	return strings.Join(all, ", ")
}

// help prints the help of one command, or of all.
func help(args []string, stdout io.Writer) error {
	switch len(args) {
	case 0:
	case 1:
		c, err := find(args[0])
		if err != nil {
			return err
		}
		return write(stdout, c.help)
	default:
		return usageError("help takes one command")
	}
	var b strings.Builder
	b.WriteString(`NAME
    crdbdrain - see what the crdbdrain driver does when CockroachDB nodes drain

SYNOPSIS
    crdbdrain COMMAND [FLAGS]
    crdbdrain help [COMMAND]

COMMANDS
`)
	for _, c := range commands {
		fmt.Fprintf(&b, "    %-8s %s\n", c.name, c.summary)
	}
	b.WriteString(`
EXIT STATUS
    0      success
    1      the command could not do its work; the reason is on standard error
    2      the call was not understood
    3      check has found a problem
    130    interrupted

SEE ALSO
    crdbdrain help demo
    https://github.com/crdbdrain/crdbdrain
`)
	return write(stdout, b.String())
}

// parseFlags parses a command's flags, and refuses arguments after them. -h is flag.ErrHelp.
func parseFlags(flags *flag.FlagSet, args []string) error {
	flags.SetOutput(io.Discard) // run prints the error
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return usageError(fmt.Sprintf("%s: %s", flags.Name(), err))
	}
	if flags.NArg() > 0 {
		return usageError(fmt.Sprintf("%s: unexpected argument %q", flags.Name(), flags.Arg(0)))
	}
	return nil
}

// write prints a result. One that cannot be printed is a failure.
func write(w io.Writer, text string) error {
	if _, err := io.WriteString(w, text); err != nil {
		return fmt.Errorf("cannot print the result: %w", err)
	}
	return nil
}

// say prints what is nobody's result. There is nowhere to report that it could not be printed.
func say(w io.Writer, format string, args ...any) {
	var b bytes.Buffer
	fmt.Fprintf(&b, format, args...)
	_, _ = w.Write(b.Bytes())
}
