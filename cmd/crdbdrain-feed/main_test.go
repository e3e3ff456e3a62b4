package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The metrics are there from the start, at /metrics and at an OTLP receiver.
func TestMetrics(t *testing.T) {
	c := crdbdraintest.Start(crdbdraintest.Config{})
	defer c.Close()
	c.Grant("app", "VIEWSYSTEMTABLE")
	var pushed atomic.Int64
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if body, err := io.ReadAll(r.Body); err == nil && len(body) > 0 {
			pushed.Add(1)
		}
	}))
	defer receiver.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.URL)
	t.Setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan int, 1)
	var stderr bytes.Buffer
	go func() {
		done <- run(ctx, []string{"-otlp", "-dsn", c.DSN() + "&crdbdrain_poll_interval=100ms", "-listen", addr}, io.Discard, &stderr)
	}()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	want := []string{
		`crdbdrain_feed_requests_total{`, `status="200"`, `status="503"`, `crdbdrain_source_state{`, `crdbdrain_node_count{`,
		`crdbdrain_poll_duration_seconds_bucket{`, `crdbdrain_connection_culled_total{`,
	}
	var body string
	for deadline := time.Now().Add(15 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		missing := ""
		if resp, err := client.Get("http://" + addr + "/metrics"); err == nil {
			text, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			body = string(text)
		}
		for _, w := range want {
			if !strings.Contains(body, w) {
				missing = w
			}
		}
		if missing == "" && pushed.Load() > 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is missing, %d pushed:\n%s", missing, pushed.Load(), body)
		}
	}
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("exit status %d: %s", code, &stderr)
	}
}

func TestCommandLine(t *testing.T) {
	for _, tt := range []struct {
		args           string
		code           int
		stdout, stderr string
	}{
		{"-h", 0, "-otlp", ""},
		{"", 2, "", "a DSN is missing"},
		{"-dsn x now", 2, "", `unexpected argument "now"`},
		{"-nothing", 2, "", "not defined: -nothing"},
		{"-dsn postgres://u:hunter2@h:x/d", 1, "", "cannot parse the DSN"},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), strings.Fields(tt.args), &stdout, &stderr); code != tt.code || !strings.Contains(stdout.String(), tt.stdout) ||
			!strings.Contains(stderr.String(), tt.stderr) || strings.Contains(stderr.String(), "hunter2") {
			t.Errorf("%q: %d, %q, %q", tt.args, code, &stdout, &stderr)
		}
	}
}
