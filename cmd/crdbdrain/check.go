package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/crdbdrain/crdbdrain"
)

var checkCommand = command{
	name:    "check",
	summary: "what will work with a DSN, from here",
	help: `NAME
    crdbdrain check - what will work with a DSN, from here

SYNOPSIS
    crdbdrain check [-json] [-timeout DURATION] DSN

DESCRIPTION
    Connects to each host of the DSN once, as the driver would, and reports:

    server    CockroachDB or PostgreSQL, its version, and whether a pooler or
              proxy hides something that the driver needs
    stamp     whether the driver can tell which node a connection is on
    sources   each source of drains, whether it works, and the exact GRANT, SET
              or parameter that it lacks
    window    how long the server leaves connections alone once it drains
              (server.shutdown.initial_wait + connections.timeout), against what
              the load balancer and the driver need
    DSN       sslmode, timeouts, and what else is worth a thought

    Run it from where the application runs, with the application's DSN: the
    answers depend on the role, the network, and the crdbdrain_* parameters.
    Nothing is changed. The sources are asked once; from v26.1 on the server
    writes questions to its internal tables to its audit log.

    Put the DSN in quotes, for a shell takes & and ? to mean something else:

        crdbdrain check 'postgres://app@lb:26257/defaultdb?sslmode=verify-full'

    A password does not have to be in the DSN, where other users of the machine
    may see it: PGPASSWORD, PGPASSFILE and ~/.pgpass work as with psql. It never
    is in the report. The DSN - is read from standard input, one line.

FLAGS
    -json
        Print the report as one line of JSON: {"verdict":"ok"|"limited"|
        "failed","hosts":[...],"server":{...},"stamp":{...},"sources":[...],
        "window":{...},"findings":[...]}. Fields may be added; none is renamed.
    -timeout DURATION
        End after so long, by default 15s.
    -h
        Print this text.

EXIT STATUS
    0 if all that is configured works, an early source works, and the server
    leaves a window, as far as the role may see it; 3 if it connects and
    something of that is missing (the PROBLEMS of the report; on PostgreSQL,
    too, where the driver is plain pgx); 1 if it does not connect; 2 if the call
    or the DSN is not understood; 130 if it was interrupted.

SEE ALSO
    crdbdrain help watch
`,
	run: func(ctx context.Context, args []string, stdout, stderr io.Writer) error {
		flags := flag.NewFlagSet("check", flag.ContinueOnError)
		asJSON := flags.Bool("json", false, "")
		timeout := flags.Duration("timeout", 15*time.Second, "")
		dsn, err := parseDSN(flags, args)
		if err != nil {
			return err
		}
		if *timeout <= 0 {
			return usageError("check: -timeout wants a duration, such as 15s")
		}
		bounded, cancel := context.WithTimeout(ctx, *timeout)
		defer cancel()
		r, failed := crdbdrain.Check(bounded, dsn)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if r == nil {
			return usageError("check: " + strings.TrimPrefix(failed.Error(), "crdbdrain: "))
		}
		text := checkText(r)
		if *asJSON {
			line, err := json.Marshal(r)
			if err != nil {
				return err
			}
			text = string(line) + "\n"
		}
		if err := write(stdout, text); err != nil {
			return err
		}
		switch r.Verdict {
		case crdbdrain.CheckOK:
			return nil
		case crdbdrain.CheckFailed:
			return exitStatus(exitFailed) // the report says why
		default:
			return exitStatus(exitLimited)
		}
	},
}

// parseDSN parses a command's flags and its one argument. A DSN is never repeated in an error: it may hold a password.
func parseDSN(flags *flag.FlagSet, args []string) (dsn string, err error) {
	name := flags.Name()
	example := fmt.Sprintf("crdbdrain %s 'postgres://app@host:26257/defaultdb'", name)
	flags.SetOutput(io.Discard)
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return "", err
	} else if err != nil {
		return "", usageError(fmt.Sprintf("%s: %s", name, err))
	}
	switch n := flags.NArg(); {
	case n == 0:
		return "", usageError(name + ": a DSN is missing: " + example)
	case n > 1 && strings.HasPrefix(flags.Arg(n-1), "-"):
		return "", usageError(name + ": flags come before the DSN: crdbdrain " + name + " [FLAGS] DSN")
	case n > 1:
		return "", usageError(fmt.Sprintf("%s: one DSN is wanted, and there are %d arguments; put the DSN in quotes: %s", name, n, example))
	case flags.Arg(0) == "-":
		return readDSN(stdin)
	}
	return flags.Arg(0), nil
}

// readDSN reads a DSN from standard input.
func readDSN(r io.Reader) (string, error) {
	const maxDSN = 64 << 10
	text, err := io.ReadAll(io.LimitReader(r, maxDSN+1))
	if err != nil {
		return "", fmt.Errorf("cannot read the DSN: %w", err)
	}
	if len(text) > maxDSN {
		return "", usageError(fmt.Sprintf("what is on standard input is longer than %d bytes: one line with a DSN is wanted", maxDSN))
	}
	dsn := strings.TrimSpace(string(text))
	if dsn == "" || strings.Contains(dsn, "\n") {
		return "", usageError("one line with a DSN is wanted on standard input")
	}
	return dsn, nil
}

const (
	textWidth  = 79
	labelWidth = 10 // of the report's first column
)

// checkText is the report for people.
func checkText(r *crdbdrain.CheckReport) string {
	var b strings.Builder
	// item prints a label, a text beside it, and what to type.
	item := func(label, text, remedy string) {
		b.WriteString(hang(fmt.Sprintf("%-*s", labelWidth, label), text))
		if remedy != "" {
			b.WriteString(hang(strings.Repeat(" ", labelWidth)+"-> ", remedy))
		}
	}
	verdict := map[crdbdrain.CheckVerdict]string{
		crdbdrain.CheckOK:      "ok: all that is configured works, and the pool can leave a draining node in time",
		crdbdrain.CheckLimited: "limited: it connects, but see PROBLEMS",
		crdbdrain.CheckFailed:  "failed: it does not connect",
	}[r.Verdict]
	if r.Verdict == crdbdrain.CheckOK && !r.Window.Known {
		verdict = "ok: all that is configured works; whether the server leaves a window is not known"
	}
	item("verdict", verdict, "")
	b.WriteByte('\n')
	server := "not known"
	switch {
	case r.Server.Product == "":
	case strings.HasPrefix(r.Server.Version, r.Server.Product):
		server = r.Server.Version
	default:
		server = strings.TrimSpace(r.Server.Product + " " + r.Server.Version)
	}
	item("server", server, "")
	for _, h := range r.Hosts {
		if h.Error != "" {
			item("host", h.Host+": "+h.Error, h.Remedy)
			continue
		}
		text := h.Host
		if h.Node != 0 {
			text += fmt.Sprintf(", node %d", h.Node)
		}
		if h.Version != "" {
			text += ", " + h.Version
		}
		if h.TLS == "none" {
			text += ", no TLS"
		} else {
			text += ", " + h.TLS
		}
		item("host", text, "")
	}
	if r.Stamp.Detail != "" {
		item("stamp", r.Stamp.Rule+": "+r.Stamp.Detail, "")
	}
	b.WriteByte('\n')
	for _, s := range r.Sources {
		text := s.Detail
		if len(s.Nodes) > 0 {
			text = numbered(s.Nodes)
			if len(s.Leaving) > 0 {
				text += "; leaving: " + numbered(s.Leaving)
			}
			if s.Detail != "" {
				text += "; " + s.Detail
			}
		}
		item(fmt.Sprintf("%-*s%-11s%-9s", labelWidth, "source", s.Source, s.State), text, s.Remedy)
		for _, e := range s.Endpoints {
			line := strings.TrimSpace(e.URL + "  " + e.State)
			if e.Node != 0 {
				line += fmt.Sprintf(", node %d", e.Node)
			}
			if e.Error != "" {
				line += ": " + e.Error
			}
			item("", line, e.Remedy)
		}
	}
	b.WriteByte('\n')
	item("window", windowText(&r.Window), r.Window.Remedy)
	for _, part := range []struct{ level, title string }{{"problem", "PROBLEMS"}, {"advice", "ADVICE"}} {
		title := "\n" + part.title + "\n"
		for _, f := range r.Findings {
			if f.Level != part.level {
				continue
			}
			b.WriteString(title)
			title = ""
			b.WriteString(hang("  - ", f.Text))
			if f.Remedy != "" {
				b.WriteString(hang("    -> ", f.Remedy))
			}
		}
	}
	return b.String()
}

func windowText(w *crdbdrain.CheckWindow) string {
	ms := func(n int64) string { return (time.Duration(n) * time.Millisecond).String() }
	text := "not known: " + w.Detail
	if w.Known {
		text = fmt.Sprintf("%s: initial_wait %s + connections.timeout %s; then transactions.timeout %s", ms(w.TotalMS), ms(w.InitialWaitMS), ms(w.ConnectionsTimeoutMS), ms(w.TransactionsTimeoutMS))
		if w.TotalMS == 0 {
			text = fmt.Sprintf("none: initial_wait and connections.timeout are 0s; transactions.timeout %s", ms(w.TransactionsTimeoutMS))
		}
	}
	if w.Origin != "" {
		text += fmt.Sprintf("; the driver counts on %s (%s)", ms(w.UsedMS), w.Origin)
	}
	return text
}

// numbered is "node 3" or "nodes 1, 2, 3"; of many, their number.
func numbered(ids []int) string {
	list := strings.Trim(strings.ReplaceAll(fmt.Sprint(ids), " ", ", "), "[]")
	switch {
	case len(ids) == 1:
		return "node " + list
	case len(ids) > 12:
		return fmt.Sprintf("%d nodes", len(ids))
	}
	return "nodes " + list
}

// hang wraps a text with a label before its first line, and the others below the text.
func hang(label, text string) string {
	if len([]rune(label+text)) <= textWidth {
		return strings.TrimRight(label+text, " ") + "\n"
	}
	lines := strings.SplitAfter(strings.TrimSuffix(wrap(text, textWidth-len(label)), "\n"), "\n")
	return label + strings.Join(lines, strings.Repeat(" ", len(label))) + "\n"
}
