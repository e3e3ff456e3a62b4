package crdbdrain

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
)

// logTrap keeps what the driver logs, line by line.
type logTrap struct {
	mu    sync.Mutex
	lines []string // guarded by mu
}

func (l *logTrap) logger() *slog.Logger { return slog.New(l) }

func (l *logTrap) Enabled(context.Context, slog.Level) bool { return true }
func (l *logTrap) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logTrap) WithGroup(string) slog.Handler            { return l }

func (l *logTrap) Handle(_ context.Context, r slog.Record) error {
	line := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool {
		line += fmt.Sprintf(" %s=%q", a.Key, a.Value.String())
		return true
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)
	return nil
}

// count counts the lines that have all of these words.
func (l *logTrap) count(words ...string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, line := range l.lines {
		all := true
		for _, w := range words {
			all = all && strings.Contains(line, w)
		}
		if all {
			n++
		}
	}
	return n
}

func (l *logTrap) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}
