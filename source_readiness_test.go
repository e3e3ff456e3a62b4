package crdbdrain

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// httpNode is a node's HTTP endpoint that says what the test wants.
type httpNode struct {
	*httptest.Server

	mu     sync.Mutex
	id     int           // guarded by mu, like all below
	status int           // of /health?ready=1; 0: cut the connection
	body   string        // of it
	vars   string        // of /_status/vars; "" is an honest answer for id
	asked  []http.Header // of each request, with its line as "Line"
}

const honestVars = "# HELP sys_uptime Process uptime\nsys_uptime{node_id=\"99\"} 12\nnode_id_other 77\n# TYPE node_id gauge\nnode_id{advertise_addr=\"n1:26257\",http_addr=\"n1:8080\",sql_addr=\"n1:26257\"} %d\nafter 1\n"

func newHTTPNode(t testing.TB, id int) *httpNode {
	t.Helper()
	n := &httpNode{id: id, status: http.StatusOK, body: "{}"}
	n.Server = httptest.NewServer(n)
	t.Cleanup(n.Close)
	return n
}

func (n *httpNode) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n.mu.Lock()
	defer n.mu.Unlock()
	h := r.Header.Clone()
	h.Set("Line", r.Method+" "+r.RequestURI)
	n.asked = append(n.asked, h)
	switch {
	case n.status == 0:
		panic(http.ErrAbortHandler)
	case r.URL.Path == "/health":
		w.WriteHeader(n.status)
		io.WriteString(w, n.body)
	case n.vars != "":
		io.WriteString(w, n.vars)
	default:
		fmt.Fprintf(w, honestVars, n.id)
	}
}

func (n *httpNode) says(status int, body string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.status, n.body = status, body
}

func (n *httpNode) set(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
}

// lines returns the requests so far that begin so.
func (n *httpNode) lines(prefix string) (lines []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, h := range n.asked {
		if l := h.Get("Line"); strings.HasPrefix(l, prefix) {
			lines = append(lines, l)
		}
	}
	return lines
}

// readinessOf makes the source for these base URLs.
func readinessOf(t testing.TB, logs *logTrap, params string, urls ...string) *readiness {
	t.Helper()
	cfg, err := parseConfig("postgres://u:canary@127.0.0.1:1/d?crdbdrain_readiness=" + strings.Join(urls, ",") + params)
	if err != nil {
		t.Fatal(err)
	}
	r := newReadiness(cfg, logs.logger())
	t.Cleanup(r.close)
	return r
}

func pollNow(t testing.TB, r *readiness) (map[nodeID]nodeState, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	return r.poll(ctx)
}

const up, down = http.StatusOK, http.StatusServiceUnavailable

func TestReadinessAnswers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		status int
		body   string
		want   nodeState
		err    string
	}{
		{"ready", up, "{}", nodeState{live: true}, ""},
		{"draining", down, `{"error":"node is shutting down","code":14}`, nodeState{draining: true}, ""},
		{"draining, step 2", down, `{"error":"node is not accepting SQL clients"}`, nodeState{draining: true}, ""},
		{"503 without a text", down, "", nodeState{draining: true}, ""},
		{"not healthy is no drain", down, `{"error":"node is not healthy"}`, nodeState{}, ""},
		{"nor is waiting for its cluster", down, `{"error":"node is waiting for cluster initialization"}`, nodeState{}, ""},
		{"401", http.StatusUnauthorized, "", nodeState{}, "no endpoint answers: /health?ready=1 answers 401"},
		{"404", http.StatusNotFound, "404 page not found", nodeState{}, "no endpoint answers: /health?ready=1 answers 404"},
		{"500", http.StatusInternalServerError, "node is shutting down", nodeState{}, "no endpoint answers: /health?ready=1 answers 500"},
		{"302 is not followed", http.StatusFound, "", nodeState{}, "no endpoint answers: /health?ready=1 answers 302"},
		{"204", http.StatusNoContent, "", nodeState{}, "no endpoint answers: /health?ready=1 answers 204"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newHTTPNode(t, 7)
			n.says(tt.status, tt.body)
			nodes, err := pollNow(t, readinessOf(t, &logTrap{}, "", n.URL))
			want := map[nodeID]nodeState{7: tt.want}
			if tt.err != "" {
				want = nil
			}
			wantNodes(t, nodes, err, want, tt.err)
		})
	}
}

// I08: what the source sends: GET, these two paths, no credentials, no cookie, and nowhere else.
func TestI08WhatReadinessSends(t *testing.T) {
	t.Parallel()
	elsewhere := newHTTPNode(t, 9)
	var mu sync.Mutex
	var got []*http.Request
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, r.Clone(context.Background()))
		w.Header().Set("Set-Cookie", "session=canary")
		if r.URL.Path == "/base/_status/vars" && len(got) > 4 {
			http.Redirect(w, r, elsewhere.URL+"/_status/vars", http.StatusFound)
			return
		}
		if r.URL.Path == "/base/_status/vars" {
			fmt.Fprintf(w, honestVars, 4)
		}
	}))
	t.Cleanup(srv.Close)
	r := readinessOf(t, &logTrap{}, "", srv.URL+"/base/")
	for range 3 {
		if nodes, err := pollNow(t, r); err != nil || !nodes[4].live {
			t.Fatalf("%v, %v", nodes, err)
		}
	}
	// A redirect of the second path is not followed either.
	for _, target := range r.targets {
		target.node = 0
	}
	if _, err := pollNow(t, r); err == nil || err.Error() != "no endpoint answers: /_status/vars answers 302" {
		t.Errorf("error %v, want no endpoint answers: /_status/vars answers 302", err)
	}
	mu.Lock()
	defer mu.Unlock()
	paths := map[string]int{}
	for _, q := range got {
		paths[q.Method+" "+q.RequestURI]++
		for _, h := range []string{"Authorization", "Cookie", "Referer", "X-Forwarded-For"} {
			if v := q.Header.Get(h); v != "" {
				t.Errorf("header %s: %s", h, v)
			}
		}
		if ua := q.Header.Get("User-Agent"); ua != "crdbdrain" {
			t.Errorf("User-Agent %q", ua)
		}
		if q.ContentLength > 0 {
			t.Errorf("a body of %d bytes", q.ContentLength)
		}
	}
	if want := map[string]int{"GET /base/health?ready=1": 4, "GET /base/_status/vars": 2}; !maps.Equal(paths, want) {
		t.Errorf("requests %v, want %v", paths, want)
	}
	if n := len(elsewhere.lines("")); n != 0 {
		t.Errorf("%d requests followed a redirect", n)
	}
	for _, target := range r.targets {
		if target.client.Transport.(*http.Transport).Proxy != nil {
			t.Error("a proxy from the environment would be used")
		}
	}
}

// I08: the schemes and the userinfo are config.go's to refuse; no text has the secret.
func TestI08ReadinessURLs(t *testing.T) {
	for _, tt := range []struct{ value, want string }{
		{"file:///etc/passwd", "; a URL must begin with https:// or http://"},
		{"gopher://h:70/", "; a URL must begin with https:// or http://"},
		{"http://user:canary@h:8080", "; a URL must not hold a user name or password"},
		{"https://canary@h:8080", "; a URL must not hold a user name or password"},
		{"http://h:8080/?token=canary", "; a URL must not have a query or a fragment"},
		{"http:///health", "; a URL must name a host"},
		{"http://h:99999", "; a URL's port must be from 1 to 65535"},
	} {
		_, err := parseConfig("host=h user=u crdbdrain_readiness=" + tt.value)
		want := "crdbdrain: crdbdrain_readiness: want a comma list of at most 1000 base URLs, such as https://n1:8080 or https://{host}:8080" + tt.want
		if err == nil || err.Error() != want {
			t.Errorf("%s: error %v\nwant %s", tt.value, err, want)
		}
	}
}

// A node that hangs holds up a poll; what the other nodes said in it is not old because of that.
func TestAHangingNodeDoesNotHideTheOthersReadiness(t *testing.T) {
	c := startCluster(t, crdbdraintest.Config{})
	p := open(t, c.DSN(), "crdbdrain_sources=readiness&crdbdrain_poll_interval=200ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_poll_timeout=1s&crdbdrain_readiness="+c.ReadinessURLs())
	fill(t, p.DB, 6)
	drainFor(t, c, c.Node(1))
	w := p.dog(t)
	within(t, 10*time.Second, "node 1 is marked", func() bool { return w.markOf(1) != nil })
	c.Node(3).Hang(true)
	defer c.Node(3).Hang(false)
	for range 3 {
		polled := w.answered(sourceReadiness)
		within(t, 10*time.Second, "another poll", func() bool { return w.answered(sourceReadiness) != polled })
		if w.markOf(1) == nil {
			t.Fatal("node 1 has lost its mark, and still drains")
		}
	}
}

// answered is when the source's last complete answer came.
func (w *watchdog) answered(id sourceID) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sources[id].answered
}

// An endpoint's node is learned once, and again when the endpoint has been away: another may have its address then.
func TestReadinessLearnsTheNode(t *testing.T) {
	t.Parallel()
	n, stays := newHTTPNode(t, 3), newHTTPNode(t, 5)
	logs := &logTrap{}
	r := readinessOf(t, logs, "", n.URL, stays.URL)
	want := func(what string, nodes map[nodeID]nodeState, vars int) {
		t.Helper()
		got, err := pollNow(t, r)
		nodes[5] = nodeState{live: true}
		if err != nil || !maps.Equal(got, nodes) {
			t.Errorf("%s: %+v, %v; want %+v", what, got, err, nodes)
		}
		if got := len(n.lines("GET /_status/vars")); got != vars {
			t.Errorf("%s: /_status/vars was read %d times, want %d", what, got, vars)
		}
	}
	type is = map[nodeID]nodeState
	for range 10 {
		want("ready", is{3: {live: true}}, 1)
	}
	n.says(down, "node is shutting down")
	want("not ready any more", is{3: {draining: true}}, 2)
	want("still not", is{3: {draining: true}}, 2)
	n.says(0, "")
	want("away", is{3: {draining: true}}, 2) // its last answer holds
	n.set(func() { n.status, n.body, n.id = up, "{}", 4 })
	want("back as another node", is{4: {live: true}}, 3)
	want("still so", is{4: {live: true}}, 3)
	// A draining node that does not say who it is, is who it was; a ready one has to say.
	n.set(func() { n.status, n.vars = down, "nothing" })
	want("draining, and silent", is{4: {draining: true}}, 4)
	n.says(up, "{}")
	got, err := pollNow(t, r)
	if err != nil || got[5].live != true || got[4].live {
		t.Errorf("ready, and silent: %+v, %v", got, err)
	}
	// Away for more than a minute: learned anew, also if nothing was seen to drain.
	n.set(func() { n.vars, n.id = "", 6 })
	want("back", is{6: {live: true}}, 6)
	for _, target := range r.targets {
		if target.node == 6 {
			target.asked = target.asked.Add(-2 * time.Minute)
		}
	}
	n.says(0, "")
	want("away for long", is{}, 6)
	n.set(func() { n.status, n.id = up, 8 })
	want("back as yet another", is{8: {live: true}}, 7)
	if in, out := logs.count("readiness endpoint fails", n.URL), logs.count("readiness endpoint answers again", n.URL); in != out || in > 3 {
		t.Errorf("%d lines in, %d out:\n%s", in, out, logs)
	}
	if n := logs.count(stays.URL); n != 0 {
		t.Errorf("%d lines about the endpoint that always answers:\n%s", n, logs)
	}
}

// The last answer of an endpoint that fails holds for three intervals.
func TestReadinessKeepsTheLastAnswerForThreeIntervals(t *testing.T) {
	t.Parallel()
	n, stays := newHTTPNode(t, 3), newHTTPNode(t, 5)
	r := readinessOf(t, &logTrap{}, "&crdbdrain_poll_interval=10s", n.URL, stays.URL)
	n.says(down, "")
	if nodes, err := pollNow(t, r); err != nil || !nodes[3].draining {
		t.Fatalf("%v, %v", nodes, err)
	}
	n.Close()
	for _, tt := range []struct {
		ago  time.Duration
		want bool
	}{{0, true}, {29 * time.Second, true}, {31 * time.Second, false}} {
		for _, target := range r.targets {
			if target.node == 3 {
				target.asked = time.Now().Add(-tt.ago)
			}
		}
		nodes, err := pollNow(t, r)
		if _, there := nodes[3]; err != nil || there != tt.want {
			t.Errorf("%v after its last answer: %+v, %v", tt.ago, nodes, err)
		}
	}
}

func TestReadinessHostileVars(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, vars, want string }{
		{"no gauge", "sys_uptime 1\n", "/_status/vars has no usable gauge node_id"},
		{"a page of HTML", "<html>node_id 1</html>", "/_status/vars has no usable gauge node_id"},
		{"node 0", "node_id 0\n", "/_status/vars has no usable gauge node_id"},
		{"node -1", "node_id{} -1\n", "/_status/vars has no usable gauge node_id"},
		{"node 2^31", "node_id{} 2147483648\n", "/_status/vars has no usable gauge node_id"},
		{"node NaN", "node_id{} NaN\n", "/_status/vars has no usable gauge node_id"},
		{"half a node", "node_id{} 1.5\n", "/_status/vars has no usable gauge node_id"},
		{"a line of 100 kB", strings.Repeat("x", 100<<10) + "\nnode_id 3\n", "/_status/vars: bufio: buffer full"},
		{"the gauge behind 16 MB", strings.Repeat("metric_of_another_kind{store=\"1\"} 123456789\n", 17<<20/44) + "node_id 3\n", "/_status/vars has no usable gauge node_id"},
		{"the gauge cut off at 16 MB", strings.Repeat(strings.Repeat("#", 1023)+"\n", maxVarsBody>>10-1) + strings.Repeat("#", 1023-len("node_id 1")) + "\nnode_id 12\n", "/_status/vars has no usable gauge node_id"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newHTTPNode(t, 3)
			n.vars = tt.vars
			nodes, err := pollNow(t, readinessOf(t, &logTrap{}, "", n.URL))
			wantNodes(t, nodes, err, nil, "no endpoint answers: "+tt.want)
		})
	}
}

// A node that dies while it answers is not another one: of "node_id 12" the half is "node_id 1".
func TestReadinessHalfAGauge(t *testing.T) {
	t.Parallel()
	whole, _, _ := strings.Cut(fmt.Sprintf(honestVars, 12), "\nafter")
	for _, tt := range []struct {
		name string
		vars string
		cut  bool
		want nodeID
	}{
		{"whole", whole + "\n", false, 12},
		{"whole, and no newline at the end", whole, false, 12},
		{"cut off behind the line", whole + "\n", true, 12},
		{"cut off in the number", whole[:len(whole)-1], true, 0},
		{"cut off behind the number", whole, true, 0},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/_status/vars" {
				_, _ = io.WriteString(w, tt.vars)
				if tt.cut {
					_ = http.NewResponseController(w).Flush()
					panic(http.ErrAbortHandler)
				}
			}
		}))
		r := readinessOf(t, &logTrap{}, "", srv.URL)
		nodes, err := pollNow(t, r)
		if tt.want != 0 {
			wantNodes(t, nodes, err, map[nodeID]nodeState{tt.want: {live: true}}, "")
		} else {
			wantNodes(t, nodes, err, nil, "no endpoint answers: /_status/vars: unexpected EOF")
		}
		srv.Close()
	}
}

func TestNodeIDGauge(t *testing.T) {
	for _, tt := range []struct {
		line string
		id   nodeID
	}{
		{`node_id{advertise_addr="n1:26257",http_addr="n1:8080",sql_addr="n1:26257"} 1`, 1},
		{`node_id 12`, 12},
		{`node_id{} 3 1700000000000`, 3}, // with a timestamp
		{`node_id{a="}"} 4`, 4},
		{"node_id\t5\t1700000000000\r\n", 5},
		{`node_id 0x1p4`, 0},
		{"node_id 1\v2", 0},
		{`node_id{a="b} 5"} 6`, 6},
		{`node_id{} 2.147483647e+09`, maxNodeID},
		{`node_id{} 1e+00`, 1},
		{`node_id{} 2147483648`, 0},
		{`node_id{} +Inf`, 0},
		{`node_id{} 0.5`, 0},
		{`node_id{} -1`, 0},
		{`node_id{`, 0},
		{`node_id`, 0},
		{`node_id_other 1`, 0},
		{`# TYPE node_id gauge`, 0},
		{`x{node_id="1"} 2`, 0},
		{``, 0},
	} {
		if id, ok := nodeIDGauge(tt.line); id != tt.id || ok != (tt.id != 0) {
			t.Errorf("nodeIDGauge(%q) = %d, %v; want %d", tt.line, id, ok, tt.id)
		}
	}
}

// An endless body is not read to its end, and one that hangs is given up with the poll.
func TestReadinessBoundsWhatItReads(t *testing.T) {
	t.Parallel()
	hang := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			w.WriteHeader(down)
			for r.Context().Err() == nil {
				if _, err := io.WriteString(w, strings.Repeat("node is shutting down ", 1000)); err != nil {
					return
				}
			}
			return
		}
		io.WriteString(w, "x 1\n")
		w.(http.Flusher).Flush()
		select {
		case <-hang:
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(srv.Close)
	t.Cleanup(func() { close(hang) })
	r := readinessOf(t, &logTrap{}, "", srv.URL)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := r.poll(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.HasPrefix(err.Error(), "no endpoint answers: /_status/vars: ") {
		t.Errorf("error %v, want /_status/vars and the deadline", err)
	}
	if d := time.Since(start); d > 3*time.Second {
		t.Errorf("the poll took %v", d)
	}
}

// HTTPS is verified with the DSN's sslrootcert; a certificate of somebody else is refused.
func TestReadinessVerifiesHTTPS(t *testing.T) {
	t.Parallel()
	n := &httpNode{id: 2, status: up, body: "{}"}
	n.Server = httptest.NewUnstartedServer(n)
	n.Config.ErrorLog = discardLog()
	n.StartTLS()
	t.Cleanup(n.Close)
	root := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(root, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: n.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []string{"verify-full", "verify-ca", "require"} {
		nodes, err := pollNow(t, readinessOf(t, &logTrap{}, "&sslmode="+mode+"&sslrootcert="+url.QueryEscape(root), n.URL))
		if err != nil || !nodes[2].live {
			t.Errorf("sslmode=%s with the root: %v, %v", mode, nodes, err)
		}
	}
	for _, mode := range []string{"require", "disable"} {
		_, err := pollNow(t, readinessOf(t, &logTrap{}, "&sslmode="+mode, n.URL))
		if err == nil || !strings.Contains(err.Error(), "x509: certificate signed by unknown authority") {
			t.Errorf("sslmode=%s without the root: %v, want x509: certificate signed by unknown authority", mode, err)
		}
	}
	// The name counts too, whatever sslmode says of the database's.
	r := readinessOf(t, &logTrap{}, "&sslmode=require&sslrootcert="+url.QueryEscape(root), strings.Replace(n.URL, "127.0.0.1", "elsewhere.test", 1))
	r.lookup = func(context.Context, string) ([]string, error) { return []string{"127.0.0.1"}, nil }
	if _, err := pollNow(t, r); err == nil || !strings.Contains(err.Error(), "elsewhere.test") || !strings.Contains(err.Error(), "x509") {
		t.Errorf("a certificate of another name: %v", err)
	}
}

// A DNS name stands for all its addresses, as they are now.
func TestReadinessNameStandsForItsAddresses(t *testing.T) {
	t.Parallel()
	first := newHTTPNode(t, 1)
	_, port, _ := net.SplitHostPort(first.Listener.Addr().String())
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.2", port))
	if err != nil {
		t.Skip("no second loopback address here: ", err)
	}
	second := &httpNode{id: 2, status: down}
	second.Server = &httptest.Server{Listener: l, Config: &http.Server{Handler: second, ReadHeaderTimeout: time.Second}}
	second.Start()
	t.Cleanup(second.Close)

	logs := &logTrap{}
	r := readinessOf(t, logs, "", "http://crdb.test:"+port)
	addrs, lookupErr := []string{"127.0.0.1", "127.0.0.2"}, error(nil)
	r.lookup = func(_ context.Context, host string) ([]string, error) {
		if host != "crdb.test" {
			t.Errorf("looked up %q", host)
		}
		return addrs, lookupErr
	}
	both := map[nodeID]nodeState{1: {live: true}, 2: {draining: true}}
	for range 3 {
		if nodes, err := pollNow(t, r); err != nil || !maps.Equal(nodes, both) {
			t.Fatalf("%+v, %v; want %+v", nodes, err, both)
		}
	}
	lookupErr = &net.DNSError{Err: "server misbehaving", Name: "crdb.test", IsTemporary: true}
	if nodes, err := pollNow(t, r); err != nil || !maps.Equal(nodes, both) {
		t.Errorf("while the name server fails: %+v, %v; want the addresses of before", nodes, err)
	}
	addrs, lookupErr = []string{"127.0.0.2"}, nil
	if nodes, err := pollNow(t, r); err != nil || !maps.Equal(nodes, map[nodeID]nodeState{2: {draining: true}}) {
		t.Errorf("one address has gone: %+v, %v", nodes, err)
	}
	if n := len(first.lines("GET /_status/vars")) + len(second.lines("GET /_status/vars")); n != 2 {
		t.Errorf("/_status/vars was read %d times, want once of each", n)
	}
	// Never resolved: the error says so.
	r = readinessOf(t, logs, "", "http://crdb.test:"+port)
	r.lookup = func(context.Context, string) ([]string, error) {
		return nil, &net.DNSError{Err: "no such host", Name: "crdb.test", IsNotFound: true}
	}
	if _, err := pollNow(t, r); err == nil || err.Error() != "lookup crdb.test: no such host" {
		t.Errorf("error %v, want lookup crdb.test: no such host", err)
	}
	// A name with more addresses than anybody has nodes.
	r.lookup = func(context.Context, string) (many []string, _ error) {
		for i := range 5000 {
			many = append(many, "10.1."+strconv.Itoa(i/250)+"."+strconv.Itoa(i%250))
		}
		return many, nil
	}
	if targets, err := r.resolve(t.Context()); err != nil || len(targets) != maxTargets {
		t.Errorf("%d targets, %v; want %d", len(targets), err, maxTargets)
	}
	// An IP address is not looked up.
	r = readinessOf(t, logs, "", "http://[::1]:8080", "http://10.0.0.1")
	r.lookup = func(_ context.Context, host string) ([]string, error) { return nil, errors.New("looked up " + host) }
	targets, err := r.resolve(t.Context())
	var keys []string
	for key := range r.targets {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	if want := []string{"http://10.0.0.1 10.0.0.1", "http://[::1]:8080 ::1"}; err != nil || len(targets) != 2 || !slices.Equal(keys, want) {
		t.Errorf("%q, %v; want %q", keys, err, want)
	}
}

// Two URLs lead to one node: it drains if either says so, and no longer when neither does, also while one of them fails.
func TestReadinessTwoURLsOneNode(t *testing.T) {
	t.Parallel()
	a, b := newHTTPNode(t, 1), newHTTPNode(t, 1)
	r := readinessOf(t, &logTrap{}, "", a.URL, b.URL)
	for _, tt := range []struct {
		name string
		a, b int
		want nodeState
	}{
		{"both ready", up, up, nodeState{live: true}},
		{"one drains", down, up, nodeState{draining: true, live: true}},
		{"one ready, one away", up, 0, nodeState{live: true}},
		{"the other drains", up, down, nodeState{draining: true, live: true}},
		{"both ready again", up, up, nodeState{live: true}},
	} {
		a.says(tt.a, "")
		b.says(tt.b, "")
		if nodes, err := pollNow(t, r); err != nil || !maps.Equal(nodes, map[nodeID]nodeState{1: tt.want}) {
			t.Errorf("%s: %+v, %v; want %+v", tt.name, nodes, err, tt.want)
		}
	}
}

// On the simulated cluster: a role without any privilege, three drains and restarts, and the marks come and go.
func TestReadinessFollowsADrainAndARestart(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{Settings: crdbdraintest.Settings{InitialWait: 200 * time.Millisecond}})
	t.Cleanup(c.Close)
	logs := &logTrap{}
	db := open(t, c.DSN(), "crdbdrain_sources=readiness&crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_readiness="+c.ReadinessURLs(), WithLogger(logs.logger()))
	fill(t, db.DB, 3)
	w := db.wd()
	eventually(t, "three nodes are ready", func() bool {
		s := w.status(sourceReadiness)
		return s.nodes[1].live && s.nodes[2].live && s.nodes[3].live
	})
	for _, n := range c.Nodes() {
		go n.Drain(context.Background())
		eventually(t, "it is marked", func() bool { return w.isNodeMarked(nodeID(n.ID())) })
		_ = n.WaitStep(t.Context(), crdbdraintest.Flagged)
		n.Stop()
		n.Start()
		eventually(t, "readiness has taken its mark back", func() bool {
			_ = db.PingContext(t.Context())
			w.mu.Lock()
			defer w.mu.Unlock()
			said := w.notices[nodeID(n.ID())]
			return said == nil || said[sourceReadiness] == nil
		})
	}
	if n := logs.count("a node is leaving", `source="readiness"`); n != 3 {
		t.Errorf("%d lines for 3 drains, want 3:\n%s", n, logs)
	}
	if n := logs.count("source "); n != 0 {
		t.Errorf("%d lines of a source's state: no source has changed it\n%s", n, logs)
	}
	// A node that is up but not healthy is no drain.
	c.Node(1).SetFaults(crdbdraintest.Faults{ReadinessStatus: down, ReadinessBody: `{"error":"node is not healthy"}`})
	eventually(t, "node 1 is not live", func() bool { s := w.status(sourceReadiness); return s.state == sourceOK && !s.nodes[1].live })
	if w.isNodeMarked(1) {
		t.Error("an unhealthy node is taken for a draining one")
	}
}

// Readiness of a cluster with TLS, over the wire of a whole pool: untrusted, it fails once and nothing is culled.
func TestReadinessUnreachableFailsOnce(t *testing.T) {
	t.Parallel()
	c := crdbdraintest.Start(crdbdraintest.Config{})
	t.Cleanup(c.Close)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := "http://" + l.Addr().String()
	_ = l.Close()
	logs := &logTrap{}
	db := open(t, c.DSN(), "crdbdrain_sources=readiness&crdbdrain_poll_interval=100ms&crdbdrain_readiness="+dead, WithLogger(logs.logger()))
	fill(t, db.DB, 3)
	eventually(t, "four failures", func() bool { return db.wd().status(sourceReadiness).failures >= 4 })
	if n := logs.count("source fails", `source="readiness"`, "no endpoint answers", "connection refused"); n != 1 {
		t.Errorf("%d lines, want 1:\n%s", n, logs)
	}
	if n := strings.Count(logs.String(), "connection refused"); n != 1 {
		t.Errorf("the same failure is logged %d times:\n%s", n, logs)
	}
}

func discardLog() *log.Logger { return log.New(io.Discard, "", 0) }
