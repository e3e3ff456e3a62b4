package crdbdrain

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// readiness asks each node's HTTP endpoint whether it is ready. It needs no SQL privilege and no authentication, and it
// is the first signal of a drain that everybody can have: /health?ready=1 answers 503 from the start of initial_wait on
// (cockroachdb pkg/server/drain.go). Which node an endpoint belongs to is the value of the gauge node_id in
// /_status/vars; it is read once, and again when the endpoint has been away.
type readiness struct {
	urls    []*url.URL
	tls     *tls.Config
	keep    time.Duration // how long an endpoint's last answer holds while it fails
	log     *slog.Logger
	lookup  func(ctx context.Context, host string) ([]string, error)
	targets map[string]*target // by URL and address; touched by one poll at a time
}

// target is one address of one URL.
type target struct {
	url    *url.URL
	client *http.Client
	node   nodeID
	state  nodeState
	asked  time.Time // last good answer
	failed bool      // the last poll failed, and the log knows
}

const (
	maxHeaders       = 64 << 10 // of a feed's answers too
	maxReadinessBody = 4 << 10
	maxVarsBody      = 16 << 20
	maxTargets       = 1000
	targetsAtOnce    = 16
)

// Readiness also answers 503 for reasons that are no drain (cockroachdb pkg/server).
var notDraining = []string{"node is waiting for cluster initialization", "node is not healthy"}

func newReadiness(cfg *config, log *slog.Logger) *readiness {
	r := &readiness{keep: 3 * cfg.pollInterval, log: log, lookup: net.DefaultResolver.LookupHost, targets: make(map[string]*target)}
	r.tls = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: cfg.roots}
	for _, s := range cfg.readiness {
		if u, err := url.Parse(s); err == nil { // config.go has parsed it before
			r.urls = append(r.urls, u)
		}
	}
	return r
}

func (r *readiness) close() {
	for _, t := range r.targets {
		t.client.CloseIdleConnections()
	}
}

// poll asks every address of every URL. It fails only if none answers: an endpoint that is away is what a node that
// restarts looks like.
func (r *readiness) poll(ctx context.Context) (map[nodeID]nodeState, error) {
	targets, err := r.resolve(ctx)
	if len(targets) == 0 {
		return nil, err
	}
	errs := make([]error, len(targets))
	var group errgroup.Group
	group.SetLimit(targetsAtOnce)
	for i, t := range targets {
		group.Go(func() error {
			errs[i] = t.poll(ctx)
			return nil
		})
	}
	_ = group.Wait()
	if overslept(ctx) {
		return nil, context.DeadlineExceeded // which nobody hears of
	}
	nodes := make(map[nodeID]nodeState, len(targets))
	answered := false
	now := time.Now()
	for i, t := range targets {
		if errs[i] == nil {
			answered = true
		}
		// What this poll was told is not old, however long it waited for the other nodes.
		if t.node != 0 && (errs[i] == nil || now.Sub(t.asked) <= r.keep) {
			state, other := t.state, nodes[t.node]    // two URLs may lead to one node
			state.live = state.live && errs[i] == nil // an old answer holds a mark; it is no proof of life
			state.draining, state.live = state.draining || other.draining, state.live || other.live
			nodes[t.node] = state
		}
	}
	if !answered {
		return nil, fmt.Errorf("no endpoint answers: %w", errs[0])
	}
	for i, t := range targets {
		r.edge(t, errs[i])
	}
	return nodes, nil
}

// edge logs a target that fails among others that do not, once.
func (r *readiness) edge(t *target, err error) {
	switch {
	case err != nil && !t.failed:
		r.log.Info("crdbdrain: readiness endpoint fails", "url", t.url.String(), "error", redact(err))
	case err == nil && t.failed:
		r.log.Info("crdbdrain: readiness endpoint answers again", "url", t.url.String(), "node", uint32(t.node))
	}
	t.failed = err != nil
}

// resolve returns a target for each address that the URLs' names have now.
func (r *readiness) resolve(ctx context.Context) (targets []*target, err error) {
	current := make(map[string]*target)
	for _, u := range r.urls {
		addrs := []string{u.Hostname()}
		if net.ParseIP(u.Hostname()) == nil {
			var lookupErr error
			if addrs, lookupErr = r.lookup(ctx, u.Hostname()); lookupErr != nil {
				err = errors.Join(err, lookupErr)
				for key, t := range r.targets { // keep those of the last time
					if t.url == u {
						current[key] = t
						targets = append(targets, t)
					}
				}
				continue
			}
		}
		for _, addr := range addrs {
			key := u.String() + " " + addr
			if current[key] != nil || len(current) == maxTargets {
				continue
			}
			t := r.targets[key]
			if t == nil {
				t = r.newTarget(u, addr)
			}
			current[key] = t
			targets = append(targets, t)
		}
	}
	for key, t := range r.targets {
		if current[key] == nil {
			t.client.CloseIdleConnections()
		}
	}
	r.targets = current
	return targets, err
}

func (r *readiness) newTarget(u *url.URL, addr string) *target {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	dialAddr := net.JoinHostPort(addr, port)
	dialer := &net.Dialer{}
	return &target{url: u, client: &http.Client{
		Transport: &http.Transport{ // no proxy from the environment: the endpoint is a node
			DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
				return dialer.DialContext(ctx, network, dialAddr)
			},
			TLSClientConfig:     r.tls.Clone(),
			MaxIdleConnsPerHost: 1,

			MaxResponseHeaderBytes: maxHeaders,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// poll asks one node, and learns which it is.
func (t *target) poll(ctx context.Context) (err error) {
	before := t.state
	defer func() {
		if err != nil {
			t.away()
		}
	}()
	if t.state, err = t.ready(ctx); err != nil {
		t.state = before
		return err
	}
	switch {
	case t.node == 0:
		if t.node, err = t.nodeID(ctx); err != nil {
			return err
		}
	case before.draining != t.state.draining:
		// Ready again: the node has restarted, and another may have its address. Not ready any more: better be sure; where
		// it does not say, it is the one that it was.
		id, idErr := t.nodeID(ctx)
		if idErr == nil {
			t.node = id
		} else if !t.state.draining {
			t.node = 0
			return idErr
		}
	}
	t.asked = time.Now()
	return nil
}

// away forgets, when the last answer has grown old, which node the endpoint was.
func (t *target) away() {
	if time.Since(t.asked) > time.Minute {
		t.node = 0
	}
}

func (t *target) get(ctx context.Context, path, query string) (*http.Response, error) {
	u := *t.url
	u.Path = strings.TrimSuffix(u.Path, "/") + path
	u.RawQuery = query
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("User-Agent", "crdbdrain")
	return t.client.Do(req)
}

// ready asks whether the node is ready.
func (t *target) ready(ctx context.Context) (nodeState, error) {
	resp, err := t.get(ctx, "/health", "ready=1")
	if err != nil {
		return nodeState{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxReadinessBody))
	if err != nil {
		return nodeState{}, err
	}
	switch resp.StatusCode {
	case http.StatusOK:
		return nodeState{live: true}, nil
	case http.StatusServiceUnavailable:
		for _, text := range notDraining {
			if strings.Contains(string(body), text) {
				return nodeState{}, nil
			}
		}
		return nodeState{draining: true}, nil
	}
	return nodeState{}, fmt.Errorf("/health?ready=1 answers %d", resp.StatusCode)
}

// nodeID reads the node's ID from /_status/vars, up to that line: the text is large.
func (t *target) nodeID(ctx context.Context) (nodeID, error) {
	resp, err := t.get(ctx, "/_status/vars", "")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("/_status/vars answers %d", resp.StatusCode)
	}
	body := &io.LimitedReader{R: resp.Body, N: maxVarsBody}
	lines := bufio.NewReaderSize(body, 64<<10)
	for {
		line, err := lines.ReadSlice('\n')
		// The end of an answer that was cut off is no line: node 12 would pass for node 1.
		if err == nil || err == io.EOF && body.N > 0 {
			if id, ok := nodeIDGauge(string(line)); ok {
				return id, nil
			}
		}
		if err == io.EOF {
			return 0, errors.New("/_status/vars has no usable gauge node_id")
		}
		if err != nil {
			return 0, fmt.Errorf("/_status/vars: %w", err)
		}
	}
}

// nodeIDGauge reads a line such as
//
//	node_id{advertise_addr="n1:26257",http_addr="n1:8080",sql_addr="n1:26257"} 1
func nodeIDGauge(line string) (nodeID, bool) {
	rest, ok := strings.CutPrefix(line, "node_id")
	if !ok || rest == "" || !strings.ContainsRune("{ \t", rune(rest[0])) {
		return 0, false
	}
	if rest[0] == '{' {
		end := strings.LastIndexByte(rest, '}')
		if end < 0 {
			return 0, false
		}
		rest = rest[end+1:]
	}
	words := strings.FieldsFunc(rest, func(r rune) bool { return strings.ContainsRune(" \t\r\n", r) })
	if len(words) == 0 || strings.Trim(words[0], "0123456789.eE+") != "" { // a timestamp may follow
		return 0, false
	}
	f, err := strconv.ParseFloat(words[0], 64)
	if err != nil || f < 1 || f > maxNodeID || f != float64(nodeID(f)) {
		return 0, false
	}
	return nodeID(f), true
}
