// Bench puts five pools through the same drains of a simulated cluster, side by side, and prints what each has seen: pgx
// under database/sql, pgx with ConnMaxLifetime, pgxpool, pgxpool with MaxConnLifetime and jitter, and crdbdrain.
//
//	cd bench && go run .                  # every scenario, five runs: about half an hour
//	cd bench && go run . -quick           # scaled down, under a minute
//	cd bench && go run . -scenario window -runs 3 -check
//	cd bench && go run . -svg ../docs/roll.svg
//
// The exit status is 0 after success, 1 if it could not run or, with -check, if a criterion does not hold, 2 if it was
// called in a way that it does not understand, and 130 if it was interrupted.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
)

const usage = `NAME
    bench - five pools in the same drains of a simulated CockroachDB cluster

SYNOPSIS
    go run . [-scenario NAMES] [-pools NAMES] [-runs N] [-apart] [-quick]
             [-check] [-json]
    go run . -svg FILE

FLAGS
    -scenario NAMES
        Comma list of scenarios; all of them by default:
%s
    -pools NAMES
        Comma list of pools; all of them by default: %s.
        Besides, "attached": pgxpool with the driver's hooks.
    -runs N
        Runs of each scenario, 5 by default. The table shows medians over them.
    -apart
        One pool at a time, in an order that rotates from run to run, instead of
        all of them side by side.
    -quick
        One run of window, no-window and hosts with a window of 2 s, in less
        than a minute. Its latencies mean little.
    -check
        Exit with status 1 if a criterion does not hold for crdbdrain. The
        criteria are printed with or without it.
    -json
        Print one line of JSON instead of the tables, every run included.
    -svg FILE
        Draw one rolling restart with pgx and with crdbdrain, and nothing else.

Progress goes to standard error. It needs no database, and no network but the
loopback interface; "large" needs 12,000 file descriptors.
`

const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130 // 128 + SIGINT, as shells say it
)

func main() {
	// The collector's pauses are not what is measured; they are the same for all either way.
	debug.SetGCPercent(400)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	code := command(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

type usageError string

func (e usageError) Error() string { return string(e) }

// errCriteria says that -check has found something.
var errCriteria = errors.New("a criterion does not hold")

// command is main without the process: it returns the exit status.
func command(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	err := bench(ctx, args, stdout, stderr)
	var unknown usageError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, flag.ErrHelp):
		_, _ = io.WriteString(stdout, help())
		return exitOK
	case errors.As(err, &unknown):
		_, _ = fmt.Fprintf(stderr, "bench: %s\nTry: go run . -h\n", err)
		return exitUsage
	case ctx.Err() != nil:
		_, _ = io.WriteString(stderr, "bench: interrupted\n")
		return exitInterrupted
	default:
		_, _ = fmt.Fprintf(stderr, "bench: %s\n", err)
		return exitFailed
	}
}

func help() string {
	var list strings.Builder
	for _, s := range scenarios {
		_, _ = fmt.Fprintf(&list, "            %-10s %s\n", s.name, s.title)
	}
	return fmt.Sprintf(usage, strings.TrimRight(list.String(), "\n"), strings.Join(names(contenders), ", "))
}

func bench(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	var (
		scenarioNames = flags.String("scenario", "", "")
		poolNames     = flags.String("pools", "", "")
		runs          = flags.Int("runs", 0, "")
		apart         = flags.Bool("apart", false, "")
		quick         = flags.Bool("quick", false, "")
		check         = flags.Bool("check", false, "")
		asJSON        = flags.Bool("json", false, "")
		svgFile       = flags.String("svg", "", "")
	)
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return usageError(err.Error())
	}
	if flags.NArg() > 0 {
		return usageError(fmt.Sprintf("unexpected argument %q", flags.Arg(0)))
	}
	if *runs < 0 {
		return usageError("-runs is at least 1")
	}
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(stderr, format+"\n", args...) }
	if *svgFile != "" {
		return drawRoll(ctx, *svgFile, say)
	}

	all, n := scenarios, 5
	if *quick {
		all, n = quickScenarios(), 1
	}
	chosen, err := pick(all, *scenarioNames, func(s scenario) string { return s.name })
	if err != nil {
		return err
	}
	pools := contenders
	if *poolNames != "" {
		pools, err = pick(append(slices.Clip(contenders), attached), *poolNames, func(c contender) string { return c.name })
	}
	if err != nil {
		return err
	}
	if *runs > 0 {
		n = *runs
	}

	r := &report{runs: n}
	for _, s := range chosen {
		s.apart = s.apart || *apart
		result := scenarioResult{scenario: s}
		for _, c := range pools {
			result.pools = append(result.pools, poolResult{contender: c})
		}
		for i := range n {
			say("%s: run %d of %d", s.name, i+1, n)
			runs, err := runAll(ctx, s, pools, i, say)
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			if len(runs) > len(result.pools) {
				result.pools = append(result.pools, poolResult{contender: control})
			}
			for k := range runs {
				result.pools[k].runs = append(result.pools[k].runs, runs[k])
			}
		}
		r.scenarios = append(r.scenarios, result)
		if !*asJSON {
			if _, err := io.WriteString(stdout, result.text()+"\n"); err != nil {
				return err
			}
		}
	}
	findings := r.check()
	out := findingsText(findings)
	if *asJSON {
		if out, err = r.json(findings); err != nil {
			return err
		}
	}
	if _, err := io.WriteString(stdout, out); err != nil {
		return err
	}
	if *check && slices.ContainsFunc(findings, func(f finding) bool { return f.Verdict == fails }) {
		return errCriteria
	}
	return nil
}

func names(list []contender) (all []string) {
	for _, c := range list {
		all = append(all, c.name)
	}
	return all
}

// pick returns those of all that a comma list names, in the order of all; everything for an empty list.
func pick[T any](all []T, list string, name func(T) string) (chosen []T, err error) {
	if list == "" {
		return all, nil
	}
	wanted := strings.Split(list, ",")
	for _, x := range all {
		if i := slices.Index(wanted, name(x)); i >= 0 {
			chosen = append(chosen, x)
			wanted = slices.Delete(wanted, i, i+1)
		}
	}
	if len(wanted) > 0 {
		var known []string
		for _, x := range all {
			known = append(known, name(x))
		}
		return nil, usageError(fmt.Sprintf("unknown name %q; there are %s", wanted[0], strings.Join(known, ", ")))
	}
	return chosen, nil
}
