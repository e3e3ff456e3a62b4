package main

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/crdbdrain/crdbdrain"
)

var watchCommand = command{
	name:    "watch",
	summary: "the nodes of a cluster, their marks, and a few connections, live",
	help: `NAME
    crdbdrain watch - the nodes of a cluster, their marks, and a few
    connections, live

SYNOPSIS
    crdbdrain watch [-interval DURATION] [-connections N] DSN

DESCRIPTION
    Opens a small pool with the DSN and shows what the driver knows: each node,
    whether it is marked (draining, decommissioning), since when and by which
    source, and how many of this pool's connections it has. During a drain the
    connections leave the node as an application's do; when it is back, some
    return. They are idle but for a moment, so they hold up no drain.

    On a terminal the table is drawn again at each interval. Elsewhere (a file,
    a pipe, Windows, TERM=dumb) each change is one line.

    It sees what its own role and parameters let it see: crdbdrain check says
    what is missing. The connections of other processes are not shown.

FLAGS
    -interval DURATION
        Time between two looks, by default 1s, at least 100ms. The sources are
        polled as often, if the DSN has no crdbdrain_poll_interval.
    -connections N
        Size of the pool, from 1 to 100, by default 6.
    -h
        Print this text.

OUTPUT
    node           CockroachDB's node ID; ? stands for the connections whose
                   node is not known
    state          active, draining, decommissioning; "not live" is a node that
                   a source lists, and that does not serve
    since          of the mark, by this machine's clock
    source         that said so first: instances, readiness, feed, errors (the
                   server's own notice), gossip, manual
    connections    of this pool, spares included

EXIT STATUS
    0 after Ctrl-C or SIGTERM; 1 if it cannot connect at the start, or there is
    nothing to watch (PostgreSQL, a pooler that hides CockroachDB); 2 if the
    call or the DSN is not understood. Once it runs it goes on when the cluster
    cannot be reached, and says so.

SEE ALSO
    crdbdrain help check
`,
	run: func(ctx context.Context, args []string, stdout, _ io.Writer) error {
		flags := flag.NewFlagSet("watch", flag.ContinueOnError)
		w := watch{out: stdout, terminal: isTerminal(stdout), clock: time.Now}
		flags.DurationVar(&w.interval, "interval", time.Second, "")
		flags.IntVar(&w.conns, "connections", 6, "")
		dsn, err := parseDSN(flags, args)
		switch {
		case err != nil:
			return err
		case w.interval < 100*time.Millisecond || w.interval > time.Hour:
			return usageError("watch: -interval wants a duration from 100ms to 1h, such as 1s")
		case w.conns < 1 || w.conns > 100:
			return usageError("watch: -connections wants a number from 1 to 100")
		}
		if err := w.run(ctx, dsn); ctx.Err() == nil {
			return err
		}
		return nil // Ctrl-C is how it ends
	},
}

// isTerminal reports whether what is printed is drawn on a screen that understands cursor movements.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || runtime.GOOS == "windows" || os.Getenv("TERM") == "dumb" || os.Getenv("TERM") == "" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// watch is one call of the command.
type watch struct {
	out      io.Writer
	terminal bool
	interval time.Duration
	conns    int
	clock    func() time.Time

	title   string
	events  eventLog
	shown   map[int]string // by node, for lines
	trouble string
	drawn   bool
}

func (w *watch) run(ctx context.Context, dsn string) error {
	bounded, cancel := context.WithTimeout(ctx, 15*time.Second)
	r, err := crdbdrain.Check(bounded, dsn)
	cancel()
	switch {
	case r == nil:
		return usageError("watch: " + strings.TrimPrefix(err.Error(), "crdbdrain: "))
	case err != nil:
		return fmt.Errorf("%s; crdbdrain check DSN says more", strings.TrimPrefix(err.Error(), "crdbdrain: "))
	case r.Server.Product != "CockroachDB" || r.Server.Hidden:
		return fmt.Errorf("there is nothing to watch: %s", r.Findings[0].Text)
	}
	w.title = w.head(r)
	cfg, err := pgx.ParseConfig(pgxDSN(dsn))
	if err != nil {
		return usageError("watch: the DSN is malformed")
	}
	if _, set := cfg.RuntimeParams["crdbdrain_poll_interval"]; !set {
		cfg.RuntimeParams["crdbdrain_poll_interval"] = w.interval.String()
	}
	if _, set := cfg.RuntimeParams["application_name"]; !set {
		cfg.RuntimeParams["application_name"] = "crdbdrain-watch"
	}
	connector, err := crdbdrain.NewConnector(cfg, crdbdrain.WithLogger(slog.New(&w.events)))
	if err != nil {
		return usageError("watch: " + strings.TrimPrefix(err.Error(), "crdbdrain: "))
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	db.SetMaxOpenConns(w.conns)
	db.SetMaxIdleConns(w.conns)
	for {
		trouble := ""
		// All are taken at once and given back: that is where the driver gives up those that have to leave.
		bounded, cancel := context.WithTimeout(ctx, max(2*time.Second, w.interval))
		if err := fill(bounded, db, w.conns); err != nil {
			trouble = "cannot connect: " + strings.Join(strings.Fields(err.Error()), " ")
		}
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		if err := w.show(connector.Nodes(), connector.Stats(), trouble); err != nil {
			return err
		}
		if !pause(ctx, w.interval) {
			return nil
		}
	}
}

// pgxDSN writes the schemes that are the driver's own as pgx knows them. The driver has read the DSN before.
func pgxDSN(dsn string) string {
	if scheme, rest, ok := strings.Cut(dsn, "://"); ok && (scheme == "crdbdrain" || scheme == "cockroachdb" || scheme == "cockroach") {
		return "postgres://" + rest
	}
	return dsn
}

// head is what does not change: the server, and the sources at the start.
func (w *watch) head(r *crdbdrain.CheckReport) string {
	var sources []string
	for _, s := range r.Sources {
		if s.State != "off" {
			sources = append(sources, s.Source+" "+s.State)
		}
	}
	version, _, _ := strings.Cut(r.Server.Version, " (")
	return version + "; sources: " + strings.Join(sources, ", ")
}

func (w *watch) show(nodes []crdbdrain.Node, stats crdbdrain.Stats, trouble string) error {
	if w.terminal {
		return w.draw(nodes, stats, trouble)
	}
	return w.lines(nodes, trouble)
}

const stamp = "15:04:05.000"

// lines prints a line for each change.
func (w *watch) lines(nodes []crdbdrain.Node, trouble string) error {
	var b strings.Builder
	now := w.clock().Format(stamp)
	if w.shown == nil {
		w.shown = make(map[int]string)
		fmt.Fprintf(&b, "%s %s\n", now, w.title)
	}
	for _, e := range w.events.take() {
		fmt.Fprintln(&b, e)
	}
	if trouble != w.trouble {
		text := trouble
		if text == "" {
			text = "connects again"
		}
		fmt.Fprintf(&b, "%s %s\n", now, text)
		w.trouble = trouble
	}
	listed := make(map[int]bool)
	for _, n := range nodes {
		listed[n.ID] = true
		text := state(n)
		if n.Source != "" {
			text += " since " + n.Since.Format(stamp) + " (" + n.Source + ")"
		}
		text += ", " + plural(n.Connections, "connection")
		if w.shown[n.ID] != text {
			fmt.Fprintf(&b, "%s node %s %s\n", now, nodeName(n), text)
			w.shown[n.ID] = text
		}
	}
	for id := range w.shown {
		if !listed[id] {
			if id != 0 {
				fmt.Fprintf(&b, "%s node %d gone\n", now, id)
			}
			delete(w.shown, id)
		}
	}
	if b.Len() == 0 {
		return nil
	}
	return write(w.out, b.String())
}

// maxEvents is how many of the last events the table shows.
const maxEvents = 8

// draw draws the table over the one before.
func (w *watch) draw(nodes []crdbdrain.Node, stats crdbdrain.Stats, trouble string) error {
	const erase, below = "\x1b[K\n", "\x1b[J"
	var b strings.Builder
	if !w.drawn {
		b.WriteString("\x1b[2J")
		w.drawn = true
	}
	now := w.clock()
	b.WriteString("\x1b[H")
	line := func(format string, args ...any) { b.WriteString(clip(fmt.Sprintf(format, args...)) + erase) }
	line("%s  %s", now.Format(time.TimeOnly), w.title)
	line("%s", trouble)
	line("%4s  %-15s  %8s  %-9s  %s", "node", "state", "since", "source", "connections")
	for _, n := range nodes {
		since := ""
		if !n.Since.IsZero() {
			since = now.Sub(n.Since).Round(time.Second).String()
		}
		line("%4s  %-15s  %8s  %-9s  %4d %s", nodeName(n), state(n), since, n.Source, n.Connections, strings.Repeat("#", min(n.Connections, 30)))
	}
	line("")
	line("culled %d, lost %d, run again %d, dials steered %d, refused %d, moved %d", stats.Culled, stats.Lost, stats.Rerun, stats.Steered, stats.Refused, stats.Moved)
	line("")
	for _, e := range w.events.last(maxEvents) {
		line("%s", e)
	}
	b.WriteString(below)
	return write(w.out, b.String())
}

// clip keeps a line within the width of common terminals, so that it does not wrap.
func clip(line string) string {
	if r := []rune(line); len(r) > 110 {
		return string(r[:109]) + "…"
	}
	return line
}

func nodeName(n crdbdrain.Node) string {
	if n.ID == 0 {
		return "?"
	}
	return fmt.Sprint(n.ID)
}

func state(n crdbdrain.Node) string {
	if n.State == "active" && !n.Live {
		return "not live"
	}
	return n.State
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// eventLog keeps the driver's log as lines, the latest hundred.
type eventLog struct {
	mu   sync.Mutex
	kept []string // guarded by mu
}

// Enabled is part of slog.Handler.
func (l *eventLog) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

// WithAttrs is part of slog.Handler; the driver does not use it.
func (l *eventLog) WithAttrs([]slog.Attr) slog.Handler { return l }

// WithGroup is part of slog.Handler; the driver does not use it.
func (l *eventLog) WithGroup(string) slog.Handler { return l }

// Handle keeps a record.
func (l *eventLog) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", r.Time.Format(stamp), strings.TrimPrefix(r.Message, "crdbdrain: "))
	sep := ": "
	r.Attrs(func(a slog.Attr) bool {
		fmt.Fprintf(&b, "%s%s %s", sep, a.Key, strings.Join(strings.Fields(a.Value.String()), " "))
		sep = ", "
		return true
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept = append(l.kept, b.String())
	l.kept = l.kept[max(0, len(l.kept)-100):]
	return nil
}

// take returns what was not taken before.
func (l *eventLog) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	kept := l.kept
	l.kept = nil
	return kept
}

// last returns the latest n.
func (l *eventLog) last(n int) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.kept[max(0, len(l.kept)-n):]...)
}
