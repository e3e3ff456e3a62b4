package crdbdrain

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"github.com/jackc/pgx/v5"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// feedOf makes a feed of a cluster's drains, and serves it.
func feedOf(t testing.TB, c *crdbdraintest.Cluster, cfg FeedConfig) (*FeedHandler, *httptest.Server, *pool) {
	t.Helper()
	c.Grant("app", "VIEWSYSTEMTABLE")
	p := open(t, c.DSN(), "crdbdrain_sources=instances,manual&crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_cluster=feed-"+t.Name())
	p.c.registry = &watchdogs{}
	h, err := NewFeedHandler(p.c, cfg)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(h)
	t.Cleanup(func() {
		_ = h.Close()
		s.Close()
	})
	return h, s, p
}

// ask makes a request of the feed and returns the answer, its body read.
func ask(t testing.TB, method, url string, header ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

func document(t testing.TB, body string) (doc feedDocument) {
	t.Helper()
	doc, err := parseFeed([]byte(body))
	if err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return doc
}

// The document, its tag, and what waits for another one.
func TestFeedServesTheDocument(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	_, s, _ := feedOf(t, c, FeedConfig{MaxReconnectsPerSecond: 50})
	url := s.URL + "/v1/drain"
	eventually(t, "the feed is ready", func() bool { resp, _ := ask(t, "GET", s.URL+"/readyz"); return resp.StatusCode == 200 })
	resp, body := ask(t, "GET", url, headerClient, "one")
	doc := document(t, body)
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "application/json" || resp.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("%d, %v", resp.StatusCode, resp.Header)
	}
	if len(doc.Nodes) != 3 || doc.Nodes[0].State != nodeActive || doc.Fleet == nil || doc.Fleet.Clients != 1 || doc.Time.IsZero() || !strings.HasPrefix(doc.Cluster, "feed-") || doc.WindowMS != 10_000 {
		t.Errorf("%s", body)
	}
	var generic map[string]any
	if err := json.Unmarshal([]byte(body), &generic); err != nil || generic["version"] != 1.0 {
		t.Errorf("%v: %s", err, body)
	}
	etag := resp.Header.Get("ETag")
	if resp, _ := ask(t, "GET", url, "If-None-Match", etag); resp.StatusCode != 304 || resp.Header.Get("ETag") != etag {
		t.Errorf("with its tag: %d", resp.StatusCode)
	}
	if resp, _ := ask(t, "GET", url+"?wait=20ms", "If-None-Match", `"x", W/`+etag); resp.StatusCode != 304 {
		t.Errorf("with its tag among others: %d", resp.StatusCode)
	}
	for _, wait := range []string{"x", "-1s", "5d", "1e9"} {
		if resp, _ := ask(t, "GET", url+"?wait="+wait, "If-None-Match", etag); resp.StatusCode != 400 {
			t.Errorf("wait=%s: %d", wait, resp.StatusCode)
		}
	}
	if resp, _ := ask(t, "PUT", url); resp.StatusCode != 405 {
		t.Errorf("PUT: %d", resp.StatusCode)
	}
	if resp, _ := ask(t, "GET", s.URL+"/healthz"); resp.StatusCode != 200 {
		t.Errorf("healthz: %d", resp.StatusCode)
	}
	if resp, _ := ask(t, "POST", url+"/1"); resp.StatusCode != 403 {
		t.Errorf("POST without a token file: %d", resp.StatusCode)
	}

	// Somebody who waits is told at once.
	told := make(chan feedDocument)
	go func() {
		_, body := ask(t, "GET", url+"?wait=30", "If-None-Match", etag, headerClient, "two")
		doc, _ := parseFeed([]byte(body))
		told <- doc
	}()
	onlyFor(t, 50*time.Millisecond, "nothing is said", func() bool { return len(told) == 0 })
	drainFor(t, c, c.Node(2))
	select {
	case doc := <-told:
		if len(doc.Nodes) != 3 || doc.Nodes[1].State != nodeDraining || doc.Nodes[1].Source != "instances" || doc.Nodes[1].Since == nil || doc.Fleet.Clients != 2 || doc.Fleet.Client != 1 {
			t.Errorf("%+v", doc)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("nobody was told")
	}
}

// A process that follows a feed has no privilege, asks the cluster nothing but once which rule its IDs follow, and leaves a
// node as if it had.
func TestFeedClientLeavesADrainingNode(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{Settings: crdbdraintest.Settings{InitialWait: 1500 * time.Millisecond}})
	_, s, _ := feedOf(t, c, FeedConfig{})
	db := open(t, c.DSN(), "crdbdrain_cull_stagger=20ms&crdbdrain_cluster=feed-"+t.Name()+"&crdbdrain_feed="+s.URL)
	fill(t, db.DB, 9)
	w := db.c.watchdog.Load()
	eventually(t, "the feed works", func() bool { return w.status(sourceFeed).state == sourceOK && w.rule.Load() == ruleHolds })
	begin := time.Now()
	drained := make(chan crdbdraintest.DrainResult, 1)
	go func() { drained <- c.Node(1).Drain(t.Context()) }()
	eventually(t, "node 1 is marked", func() bool { m := w.marks.Load(); return m != nil && m.of[1] != nil })
	if d := time.Since(begin); d > time.Second {
		t.Errorf("the mark took %v", d)
	}
	eventually(t, "every connection has left", func() bool { return c.Node(1).Stats().Open == 0 })
	if d := <-drained; d.LostIdle+d.LostBusy > 0 {
		t.Errorf("%+v", d)
	}
	if n := dialled(c, watchdogName); n > 4 { // the feed's own, which may move; and this process's, once
		t.Errorf("%d connections of watchdogs", n)
	}
	c.Node(1).Stop()
	c.Node(1).Start()
	eventually(t, "the mark is gone", func() bool { return w.marks.Load() == nil })
	if s := db.c.Stats(); s.Culled < 3 || s.Lost != 0 { // more, where a dial has landed on node 1 again
		t.Errorf("%+v", s)
	}
}

// Tokens: who may read, who may mark, and what happens when the file changes.
func TestFeedTokens(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	read, mark := filepath.Join(t.TempDir(), "read"), filepath.Join(t.TempDir(), "mark")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(read, "# comment\n\nhunter2\nsecond\n")
	write(mark, "scripts-own\n")
	h, s, p := feedOf(t, c, FeedConfig{TokenFile: read, MarkTokenFile: mark})
	url := s.URL + "/v1/drain"
	eventually(t, "the feed is ready", func() bool { resp, _ := ask(t, "GET", s.URL+"/readyz"); return resp.StatusCode == 200 })
	for header, want := range map[string]int{
		"": 401, "Bearer": 401, "Bearer ": 401, "Bearer wrong": 401, "Basic hunter2": 401, "Bearer # comment": 401, "Bearer scripts-own": 401,
		"Bearer hunter2": 200, "bearer second": 200,
	} {
		resp, body := ask(t, "GET", url, "Authorization", header)
		if resp.StatusCode != want {
			t.Errorf("%q: %d, want %d", header, resp.StatusCode, want)
		}
		if strings.Contains(body, "hunter2") {
			t.Errorf("%q: %s", header, body)
		}
	}
	write(read, "third, with a space\nthird\n")
	eventually(t, "the file is read again", func() bool { return h.read.allows("Bearer third") })
	if h.read.allows("Bearer hunter2") {
		t.Error("a token that is gone still opens")
	}
	if err := os.Remove(read); err != nil {
		t.Fatal(err)
	}
	h.read.looked = time.Time{}
	if !h.read.allows("Bearer third") {
		t.Error("without the file the tokens of before do not count")
	}

	// Marks by hand.
	token := []string{"Authorization", "Bearer scripts-own"}
	for _, tt := range []struct {
		method, path string
		want         int
	}{
		{"POST", "/2?for=1h", 200}, {"POST", "/x", 400}, {"POST", "/0", 400}, {"POST", "/77", 404},
		{"POST", "/2?for=0s", 400}, {"POST", "/2?for=48h", 400}, {"POST", "/2?for=x", 400},
	} {
		if resp, body := ask(t, tt.method, url+tt.path, token...); resp.StatusCode != tt.want {
			t.Errorf("%s %s: %d %s, want %d", tt.method, tt.path, resp.StatusCode, body, tt.want)
		}
	}
	if resp, _ := ask(t, "POST", url+"/2", "Authorization", "Bearer third"); resp.StatusCode != 401 {
		t.Errorf("a reader marks a node: %d", resp.StatusCode)
	}
	state := func(id int) string {
		_, body := ask(t, "GET", url, "Authorization", "Bearer third")
		return document(t, body).Nodes[id-1].State
	}
	eventually(t, "node 2 is marked", func() bool { return state(2) == nodeDraining })
	if resp, _ := ask(t, "DELETE", url+"/2", token...); resp.StatusCode != 204 {
		t.Errorf("DELETE: %d", resp.StatusCode)
	}
	eventually(t, "node 2 is no longer marked", func() bool { return state(2) == nodeActive })
	if resp, _ := ask(t, "POST", url+"/3?for=1s", token...); resp.StatusCode != 200 {
		t.Errorf("POST: %d", resp.StatusCode)
	}
	eventually(t, "node 3 is marked", func() bool { return state(3) == nodeDraining })
	eventually(t, "the mark has expired", func() bool { return state(3) == nodeActive })
	_ = p

	for _, cfg := range []FeedConfig{
		{TokenFile: read}, {MarkTokenFile: t.TempDir()}, {MaxReconnectsPerSecond: -1}, {MaxReconnectsPerSecond: 1e-9}, {MaxReconnectsPerSecond: 1e12},
	} {
		if h, err := NewFeedHandler(p.c, cfg); err == nil {
			_ = h.Close()
			t.Errorf("%+v is accepted", cfg)
		}
	}
}

// Without news of the cluster the feed says so, and does not repeat what it knew.
func TestFeedWithoutNews(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	h, s, p := feedOf(t, c, FeedConfig{})
	eventually(t, "the feed is ready", func() bool { resp, _ := ask(t, "GET", s.URL+"/readyz"); return resp.StatusCode == 200 })
	w := p.c.watchdog.Load()
	c.Revoke("app", "VIEWSYSTEMTABLE")
	eventually(t, "the source is denied", func() bool { return w.status(sourceInstances).state == sourceDenied })
	eventually(t, "the last answer is too old", func() bool { resp, _ := ask(t, "GET", s.URL+"/readyz"); return resp.StatusCode == 503 })
	if resp, body := ask(t, "GET", s.URL+"/v1/drain"); resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	_ = h
}

// Shutdown: not ready at once, those who wait are let go one after the other, within its bound.
func TestFeedShutdown(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	h, s, _ := feedOf(t, c, FeedConfig{})
	eventually(t, "the feed is ready", func() bool { resp, _ := ask(t, "GET", s.URL+"/readyz"); return resp.StatusCode == 200 })
	resp, _ := ask(t, "GET", s.URL+"/v1/drain")
	etag := resp.Header.Get("ETag")
	const waiting = 20
	var wg sync.WaitGroup
	var ends sync.Map
	for i := range waiting {
		wg.Go(func() {
			resp, _ := ask(t, "GET", s.URL+"/v1/drain?wait=60s", "If-None-Match", etag, headerClient, strconv.Itoa(i))
			if resp.StatusCode != 304 || !resp.Close {
				t.Errorf("%d, %v", resp.StatusCode, resp.Header)
			}
			ends.Store(i, time.Now())
		})
	}
	eventually(t, "they wait", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		n := 0
		for _, e := range h.clients {
			n += e.waiting
		}
		return n == waiting
	})
	begin := time.Now()
	done := make(chan error, 1)
	go func() { done <- h.Shutdown(t.Context()) }()
	eventually(t, "it is not ready", func() bool { resp, _ := ask(t, "GET", s.URL+"/readyz"); return resp.StatusCode == 503 })
	if resp, _ := ask(t, "GET", s.URL+"/v1/drain"); resp.StatusCode != 503 {
		t.Errorf("a new client gets %d", resp.StatusCode)
	}
	wg.Wait()
	if err := <-done; err != nil {
		t.Error(err)
	}
	first, last := time.Hour, time.Duration(0)
	ends.Range(func(_, at any) bool {
		d := at.(time.Time).Sub(begin)
		first, last = min(first, d), max(last, d)
		return true
	})
	if last > shutdownSpread+2*time.Second || last-first < shutdownSpread/4 {
		t.Errorf("they went between %v and %v", first, last)
	}

	// With a bound.
	h2, s2, _ := feedOf(t, startCluster(t, crdbdraintest.Config{}), FeedConfig{})
	eventually(t, "the feed is ready", func() bool { resp, _ := ask(t, "GET", s2.URL+"/readyz"); return resp.StatusCode == 200 })
	wg.Go(func() { ask(t, "GET", s2.URL+"/v1/drain?wait=60s", "If-None-Match", etag, headerClient, "x") })
	eventually(t, "it waits", func() bool { h2.mu.Lock(); defer h2.mu.Unlock(); return len(h2.clients) == 1 })
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	begin = time.Now()
	_ = h2.Shutdown(ctx)
	if d := time.Since(begin); d > 2*time.Second {
		t.Errorf("it took %v", d)
	}
	wg.Wait()
}

// hostileFeeds are answers that a feed must not give. Each is a failing source, and moves nothing.
var hostileFeeds = map[string]http.HandlerFunc{
	"500":                func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) },
	"401":                func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(401) },
	"a redirect":         func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) },
	"304 at once":        func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(304) },
	"nothing":            func(http.ResponseWriter, *http.Request) {},
	"HTML":               func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>hello</html>") },
	"half a document":    text(`{"version":1,"cluster":"x","nodes":[{"id":1,"state":"active"}`),
	"two documents":      text(`{"version":1,"cluster":"C","nodes":[{"id":1,"state":"active"}]}{"version":1}`),
	"a brace too many":   text(`{"version":1,"cluster":"C","nodes":[{"id":1,"state":"draining"},{"id":2,"state":"active"}]}}`),
	"another version":    text(`{"version":2,"cluster":"C","nodes":[{"id":1,"state":"draining"},{"id":2,"state":"active"}]}`),
	"another cluster":    text(`{"version":1,"cluster":"other","nodes":[{"id":1,"state":"draining"},{"id":2,"state":"active"}]}`),
	"no nodes":           text(`{"version":1,"cluster":"C","nodes":[]}`),
	"a node twice":       text(`{"version":1,"cluster":"C","nodes":[{"id":1,"state":"draining"},{"id":1,"state":"active"}]}`),
	"node 0":             text(`{"version":1,"cluster":"C","nodes":[{"id":0,"state":"draining"},{"id":2,"state":"active"}]}`),
	"node 1.5":           text(`{"version":1,"cluster":"C","nodes":[{"id":1.5,"state":"draining"}]}`),
	"node -1":            text(`{"version":1,"cluster":"C","nodes":[{"id":-1,"state":"draining"}]}`),
	"a state of its own": text(`{"version":1,"cluster":"C","nodes":[{"id":1,"state":"burning"}]}`),
	"old news":           text(`{"version":1,"cluster":"C","age_ms":3600000,"nodes":[{"id":1,"state":"draining"},{"id":2,"state":"active"}]}`),
	"a negative age":     text(`{"version":1,"cluster":"C","age_ms":-1,"nodes":[{"id":1,"state":"draining"},{"id":2,"state":"active"}]}`),
	"a window of a year": text(`{"version":1,"cluster":"C","window_ms":31536000000,"nodes":[{"id":1,"state":"draining"},{"id":2,"state":"active"}]}`),
	"a fleet of nobody":  text(`{"version":1,"cluster":"C","fleet":{"clients":0,"client":0,"max_reconnects_per_second":1},"nodes":[{"id":1,"state":"draining"},{"id":2,"state":"active"}]}`),
	"a rate of nothing":  text(`{"version":1,"cluster":"C","fleet":{"clients":1,"client":0,"max_reconnects_per_second":1e-300},"nodes":[{"id":1,"state":"draining"},{"id":2,"state":"active"}]}`),
	"a document too long": func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"version":1,"cluster":"C","nodes":[{"id":1,"state":"draining"},{"id":2,"state":"active"}],"x":"`)
		_, _ = w.Write(bytes.Repeat([]byte("x"), maxFeedBody))
		_, _ = io.WriteString(w, `"}`)
	},
	"too many nodes": func(w http.ResponseWriter, _ *http.Request) {
		var b strings.Builder
		for i := range maxRows + 1 {
			fmt.Fprintf(&b, `,{"id":%d,"state":"draining"}`, i+1)
		}
		fmt.Fprintf(w, `{"version":1,"cluster":"C","nodes":[%s]}`, b.String()[1:])
	},
	"silence": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
	"a trickle": func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			_, _ = io.WriteString(w, " ")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
	},
	"the connection's end": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
}

func text(s string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, s) }
}

func TestHostileFeeds(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	for name, serve := range hostileFeeds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := httptest.NewServer(serve)
			defer s.Close()
			logs := &logTrap{}
			p := open(t, c.DSN(), "crdbdrain_poll_timeout=200ms&crdbdrain_poll_interval=100ms&crdbdrain_cluster=C&crdbdrain_feed="+s.URL, WithLogger(logs.logger()))
			p.c.registry = &watchdogs{}
			fill(t, p.DB, 6)
			w := p.dog(t)
			eventually(t, "the source fails", func() bool { return w.status(sourceFeed).state == sourceFailing })
			eventually(t, "it has failed thrice", func() bool { return w.status(sourceFeed).failures >= 2 })
			if w.marks.Load() != nil {
				t.Error("a node is marked")
			}
			if failed, err := burst(4, 20, selectOne(p.DB)); failed > 0 {
				t.Error(err)
			}
			if n := logs.count("source fails", `"feed"`); n != 1 {
				t.Errorf("%d lines, want 1:\n%s", n, logs)
			}
			if s := p.c.Stats(); s != (Stats{}) {
				t.Errorf("%+v", s)
			}
		})
	}
}

// A feed that says that every node drains, and one that offers a node that does not exist, empty no pool; a feed that
// restarts is followed again, and its clients hear of what happened meanwhile.
func TestLyingFeed(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	var answer atomic.Value
	answer.Store(`{"version":1,"cluster":"C","nodes":[{"id":1,"state":"draining"},{"id":2,"state":"draining"},{"id":3,"state":"draining"},{"id":4,"state":"active"}]}`)
	var requests atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		requests.Add(1)
		_, _ = io.WriteString(w, answer.Load().(string))
	}))
	defer s.Close()
	p := open(t, c.DSN(), "crdbdrain_poll_timeout=200ms&crdbdrain_cull_stagger=1ms&crdbdrain_cluster=C&crdbdrain_feed="+s.URL)
	p.c.registry = &watchdogs{}
	fill(t, p.DB, 6)
	w := p.dog(t)
	eventually(t, "the nodes are marked", func() bool { m := w.marks.Load(); return m != nil && len(m.of) == 3 })
	before := requests.Load()
	begin := time.Now()
	onlyFor(t, 500*time.Millisecond, "the pool is whole", func() bool { return c.Stats().Open >= 6 && p.c.Stats().Culled == 0 })
	// It answers at once, whatever it is asked to wait, and with something new each time: it is not asked more often than a
	// source that is polled at the shortest interval.
	if n, most := requests.Load()-before, int64(time.Since(begin)/(minPollGap*4/5))+2; n > most {
		t.Errorf("%d requests in %v", n, time.Since(begin))
	}
	if failed, err := burst(4, 20, selectOne(p.DB)); failed > 0 {
		t.Error(err)
	}
	answer.Store(`{"version":1,"cluster":"C","nodes":[{"id":1,"state":"active"},{"id":2,"state":"active"},{"id":3,"state":"active"}]}`)
	eventually(t, "the marks are gone", func() bool { return w.marks.Load() == nil })
}

// The feed goes away and comes back at the same address.
func TestFeedClientReconnects(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	serve := func(l net.Listener, state string) *http.Server {
		s := &http.Server{ReadHeaderTimeout: time.Minute, Handler: text(`{"version":1,"cluster":"C","nodes":[{"id":1,"state":"active"},{"id":2,"state":"` + state + `"}]}`)}
		go s.Serve(l)
		return s
	}
	s := serve(l, "active")
	p := open(t, c.DSN(), "crdbdrain_poll_timeout=500ms&crdbdrain_cluster=C&crdbdrain_feed=http://"+addr)
	p.c.registry = &watchdogs{}
	fill(t, p.DB, 6)
	w := p.dog(t)
	eventually(t, "the feed works", func() bool { return w.status(sourceFeed).state == sourceOK })
	_ = s.Close()
	eventually(t, "the feed fails", func() bool { return w.status(sourceFeed).state == sourceFailing })
	if l, err = net.Listen("tcp", addr); err != nil {
		t.Fatal(err)
	}
	s = serve(l, "draining")
	defer s.Close()
	eventually(t, "node 2 is marked", func() bool { m := w.marks.Load(); return m != nil && m.of[2] != nil })
}

// With a token file and TLS.
func TestFeedClientTLSAndToken(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("hunter2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var seen atomic.Value
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen.Store(r.Header.Get("Authorization"))
		_, _ = io.WriteString(w, `{"version":1,"cluster":"C","nodes":[{"id":1,"state":"active"},{"id":2,"state":"active"}]}`)
	}))
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	for _, trusted := range []bool{true, false} {
		p := open(t, c.DSN(), "crdbdrain_poll_timeout=500ms&crdbdrain_cluster=C&crdbdrain_feed="+s.URL+"&crdbdrain_feed_token_file="+token)
		p.c.registry = &watchdogs{}
		if trusted {
			p.c.cfg.feedRoots = s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
		}
		seen.Store("")
		fill(t, p.DB, 3)
		w := p.dog(t)
		if trusted {
			eventually(t, "the feed works", func() bool { return w.status(sourceFeed).state == sourceOK })
			if got := seen.Load(); got != "Bearer hunter2" {
				t.Errorf("it was sent %q", got)
			}
		} else {
			eventually(t, "the feed fails", func() bool { return w.status(sourceFeed).state == sourceFailing })
			if got := seen.Load(); got != "" {
				t.Errorf("a server with a certificate of nobody's was sent %q", got)
			}
		}
		_ = p.Close()
	}
}

// FuzzFeed: whatever a feed sends is refused or within its bounds.
func FuzzFeed(f *testing.F) {
	f.Add([]byte(`{"version":1,"cluster":"C","instance":"i","sequence":1,"time":"2026-11-30T08:00:00Z","age_ms":5,"window_ms":10000,"nodes":[{"id":1,"state":"draining","source":"instances","since":"2026-11-30T08:00:00Z"}],"fleet":{"clients":2,"client":1,"max_reconnects_per_second":10}}`))
	f.Add([]byte(`{"version":1,"nodes":[{"id":1,"state":"active"}]}`))
	f.Add([]byte(`[]`))
	f.Fuzz(func(t *testing.T, body []byte) {
		doc, err := parseFeed(body)
		if err != nil {
			if len(err.Error()) > 300 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		nodes, err := doc.states()
		if err != nil || len(nodes) == 0 || len(nodes) > maxRows || nodes[0] != (nodeState{}) {
			t.Errorf("%v, %v", nodes, err)
		}
		share, err := doc.Fleet.share()
		if err != nil || share != nil && (share.gap < 0 || share.gap > maxFleetGap || share.phase < 0 || share.phase > share.gap) {
			t.Errorf("%+v, %v", share, err)
		}
		if doc.WindowMS < 0 || doc.WindowMS > 24*3600*1000 || doc.AgeMS < 0 {
			t.Errorf("%+v", doc)
		}
	})
}

// BenchmarkFeedClients measures a feed with many clients that wait: memory for each, and the time from a mark to the last
// one's answer. The clients are in the same process, and counted out: their memory is read before the feed knows them.
func BenchmarkFeedClients(b *testing.B) {
	clients := fleetSize(b, 10_000)
	c := startCluster(b, crdbdraintest.Config{})
	h, s, p := feedOf(b, c, FeedConfig{MaxReconnectsPerSecond: 1000})
	s.Close()
	l := newMemListener()
	server := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	go server.Serve(l)
	defer server.Close()
	eventually(b, "the feed is ready", func() bool { _, _, ok := h.fresh(); return ok })
	var conns []net.Conn
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range clients {
		conn, err := l.dial(b.Context(), "", "")
		if err != nil {
			b.Fatal(err)
		}
		conns = append(conns, conn)
	}
	waiting := func() int {
		h.mu.Lock()
		defer h.mu.Unlock()
		n := 0
		for _, e := range h.clients {
			n += e.waiting
		}
		return n
	}
	request := func(i int, etag string) {
		if _, err := fmt.Fprintf(conns[i], "GET /v1/drain?wait=60s HTTP/1.1\r\nHost: feed\r\nCrdbdrain-Client: %d\r\nIf-None-Match: %s\r\n\r\n", i, etag); err != nil {
			b.Error(err)
		}
	}
	h.mu.Lock()
	etag := h.state.etag
	h.mu.Unlock()
	var last time.Duration
	marked := false
	for b.Loop() {
		b.StopTimer()
		for i := range conns {
			request(i, etag)
		}
		eventually(b, "all of them wait", func() bool { return waiting() == clients })
		runtime.GC()
		runtime.ReadMemStats(&after)
		var wg sync.WaitGroup
		var told atomic.Int64
		for _, conn := range conns {
			wg.Go(func() {
				buf := make([]byte, 2048)
				n, err := conn.Read(buf)
				for err == nil && !bytes.Contains(buf[:n], []byte("max_reconnects_per_second")) {
					var more int
					more, err = conn.Read(buf[n:])
					n += more
				}
				if err != nil || !bytes.HasPrefix(buf, []byte("HTTP/1.1 200")) {
					b.Errorf("%v: %s", err, buf[:n])
				}
				told.Add(1)
			})
		}
		b.StartTimer()
		start := time.Now()
		marked = !marked
		if err := p.c.SetDraining(2, marked); err != nil {
			b.Fatal(err)
		}
		wg.Wait()
		last = time.Since(start)
		b.StopTimer()
		h.mu.Lock()
		etag = h.state.etag
		h.mu.Unlock()
		b.StartTimer()
	}
	b.ReportMetric(float64(after.HeapInuse+after.StackInuse-before.HeapInuse-before.StackInuse)/float64(clients)/1024, "KiB/client")
	b.ReportMetric(last.Seconds()*1000, "ms/mark-to-last")
	for _, conn := range conns {
		_ = conn.Close()
	}
}

// The schema in the documentation has the fields of the document, and no other.
func TestFeedSchema(t *testing.T) {
	text, err := os.ReadFile("docs/feed.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	type object struct {
		Properties map[string]object
		Items      *object
	}
	var schema object
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		of     any
		schema object
	}{{feedDocument{}, schema}, {feedNode{}, *schema.Properties["nodes"].Items}, {feedFleet{}, schema.Properties["fleet"]}} {
		var want []string
		for f := range reflect.TypeOf(tt.of).Fields() {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			want = append(want, name)
		}
		got := slices.Sorted(maps.Keys(tt.schema.Properties))
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%T: the schema has %v, the document %v", tt.of, got, want)
		}
	}
}

func TestFeedHead(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	_, s, _ := feedOf(t, c, FeedConfig{})
	eventually(t, "the feed is ready", func() bool { resp, _ := ask(t, "GET", s.URL+"/readyz"); return resp.StatusCode == 200 })
	if resp, _ := ask(t, "HEAD", s.URL+"/v1/drain"); resp.StatusCode != 200 || resp.Header.Get("ETag") == "" {
		t.Errorf("%d, %v", resp.StatusCode, resp.Header)
	}
}

// stuckWriter is a client that does not read.
type stuckWriter struct {
	http.ResponseWriter
	begun, release chan struct{}
}

func (w stuckWriter) Write(p []byte) (int, error) {
	close(w.begun)
	<-w.release
	return len(p), nil
}

// Shutdown's bound is one, also where a client does not read; and it makes nobody wait longer than they asked for.
func TestFeedShutdownIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true})
		defer c.Close()
		c.Grant("app", "VIEWSYSTEMTABLE")
		p := memPool(t, c, "crdbdrain_sources=instances&crdbdrain_cluster=bounded", nil)
		defer p.Close()
		h, err := NewFeedHandler(p.c, FeedConfig{})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/v1/drain", nil))
		waited := make(chan time.Duration)
		const clients = 20
		for range clients {
			go func() {
				r := httptest.NewRequest(http.MethodGet, "/v1/drain?wait=100ms", nil)
				r.Header.Set("If-None-Match", rec.Header().Get("ETag"))
				begin := time.Now()
				h.ServeHTTP(httptest.NewRecorder(), r)
				waited <- time.Since(begin)
			}()
		}
		stuck := stuckWriter{httptest.NewRecorder(), make(chan struct{}), make(chan struct{})}
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			h.ServeHTTP(stuck, httptest.NewRequest(http.MethodGet, "/v1/drain", nil))
		}()
		<-stuck.begun
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		begin, done := time.Now(), make(chan error, 1)
		go func() { done <- h.Shutdown(ctx) }()
		for range clients {
			if d := <-waited; d > 100*time.Millisecond {
				t.Errorf("100ms became %v", d)
			}
		}
		select {
		case err := <-done:
			if d := time.Since(begin); !errors.Is(err, context.DeadlineExceeded) || d != 5*time.Second {
				t.Errorf("%v after %v", err, d)
			}
		case <-time.After(time.Minute):
			t.Error("it waits for a client that does not read")
		}
		close(stuck.release)
		<-gone
	})
}

// followed opens a pool that follows a feed, in a bubble.
func followed(t *testing.T, c *crdbdraintest.Cluster, serve http.Handler, logs *logTrap) *pool {
	t.Helper()
	l := newMemListener()
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: serve}
	go server.Serve(l)
	t.Cleanup(func() { _ = server.Close() })
	p := memPool(t, c, "crdbdrain_cull_stagger=0&crdbdrain_cluster=C&crdbdrain_feed=http://127.0.0.1:1", func(_ *pgx.ConnConfig, con *Connector) {
		if con != nil {
			con.registry, con.log = &watchdogs{dialFeed: l.dial}, logs.logger()
		}
	})
	fill(t, p.DB, 6)
	return p
}

// Behind a load balancer that alternates between two replicas, of which one has not asked the cluster again yet: what the
// other has heard stays heard.
func TestFeedReplicasAlternate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true})
		defer c.Close()
		logs := &logTrap{}
		var drain atomic.Bool
		var n, asked atomic.Int64 // asked: when the slow replica has asked the cluster
		start := time.Now()
		p := followed(t, c, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			replica, age, state := n.Add(1)%2, time.Duration(0), nodeActive
			if replica == 1 {
				age = time.Since(start) - time.Duration(asked.Load())
			} else if drain.Load() {
				state = nodeDraining
			}
			w.Header().Set("ETag", fmt.Sprintf(`"%s"`, state))
			fmt.Fprintf(w, `{"version":1,"cluster":"C","instance":"%d","sequence":1,"age_ms":%d,"nodes":[{"id":1,"state":"%s"},{"id":2,"state":"active"}]}`, replica, age.Milliseconds(), state)
		}), logs)
		defer p.Close()
		time.Sleep(20 * time.Second)
		w := p.c.watchdog.Load()
		asked.Store(int64(time.Since(start)))
		time.Sleep(time.Second)
		drain.Store(true)
		time.Sleep(10 * time.Second)
		if m := w.marks.Load(); m == nil || m.of[1] == nil {
			t.Error("node 1 is not marked")
		}
		if n := logs.count("no longer leaving"); n > 0 {
			t.Errorf("the mark has gone %d times", n)
		}
		asked.Store(int64(time.Since(start))) // it has asked again, and the drain is over
		drain.Store(false)
		time.Sleep(3 * time.Second)
		if m := w.marks.Load(); m != nil {
			t.Error("node 1 is still marked")
		}
	})
}

// A feed that sends no tag, or whose proxy removes it, is asked once a second, not without a pause.
func TestFeedWithoutTag(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := crdbdraintest.Start(crdbdraintest.Config{Memory: true})
		defer c.Close()
		var requests atomic.Int64
		p := followed(t, c, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			requests.Add(1)
			text(`{"version":1,"cluster":"C","nodes":[{"id":1,"state":"active"},{"id":2,"state":"active"}]}`)(w, r)
		}), &logTrap{})
		defer p.Close()
		time.Sleep(time.Minute)
		if n := requests.Load(); n > 60*5/4+1 || n < 40 {
			t.Errorf("%d requests in a minute", n)
		}
	})
}

// That the watchdog cannot connect is logged once, whatever a feed says meanwhile.
func TestFeedIsNoConnection(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	logs := &logTrap{}
	p := open(t, c.DSN(), still, WithLogger(logs.logger()))
	mustExec(t, p, "UPDATE t SET x = 1")
	w := p.c.watchdog.Load()
	for range 3 {
		w.take(pollResult{errs: map[role]error{p.c.role(): errors.New("no")}})
		w.take(pollResult{answers: []answer{{source: sourceFeed, nodes: map[nodeID]nodeState{1: {live: true}}, asked: time.Now()}}})
	}
	if n := logs.count("the watchdog cannot connect"); n != 1 {
		t.Errorf("%d lines:\n%s", n, logs)
	}
}

// tarpit is a listener whose first connection hears nothing any more once it is stuck.
type tarpit struct {
	net.Listener
	accepted atomic.Int64
	stuck    atomic.Bool
}

type tarpitConn struct {
	net.Conn
	of    *tarpit
	first bool
}

func (l *tarpit) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &tarpitConn{c, l, l.accepted.Add(1) == 1}, nil
}

func (c *tarpitConn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.first || !c.of.stuck.Load() {
			return n, err
		}
	}
}

// An HTTP/2 connection whose other end has gone without a word is given up with the question that got no answer.
func TestFeedClientLeavesADeadConnection(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	var served atomic.Int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 2 {
			t.Error(r.Proto)
		}
		served.Add(1)
		text(`{"version":1,"cluster":"C","nodes":[{"id":1,"state":"active"},{"id":2,"state":"active"}]}`)(w, r)
	}))
	l := &tarpit{Listener: s.Listener}
	s.Listener = l
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	p := open(t, c.DSN(), "crdbdrain_poll_timeout=200ms&crdbdrain_cluster=C&crdbdrain_feed="+s.URL)
	p.c.registry = &watchdogs{}
	p.c.cfg.feedRoots = s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	fill(t, p.DB, 3)
	w := p.dog(t)
	eventually(t, "the feed works", func() bool { return w.status(sourceFeed).state == sourceOK })
	l.stuck.Store(true)
	eventually(t, "it is asked on another connection", func() bool { return l.accepted.Load() > 1 })
	before := served.Load()
	eventually(t, "and answers", func() bool { return served.Load() > before })
	_ = p.Close()
}
