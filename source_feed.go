package crdbdrain

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// feedDocument is what a feed says, as JSON: GET /v1/drain. A change that an older client would misread gets another
// version number and another path; fields may be added at any time.
type feedDocument struct {
	Version  int        `json:"version"`  // 1
	Cluster  string     `json:"cluster"`  // its name: crdbdrain_cluster of the feed's DSN, or a digest of its hosts
	Instance string     `json:"instance"` // of the feed: another after a restart, and in each replica
	Sequence uint64     `json:"sequence"` // of the instance: grows with every change
	Time     time.Time  `json:"time"`     // when the feed sent it
	AgeMS    int64      `json:"age_ms"`   // how long before that a source last answered the feed
	WindowMS int64      `json:"window_ms,omitempty"`
	Nodes    []feedNode `json:"nodes"`
	Fleet    *feedFleet `json:"fleet,omitempty"`
}

type feedNode struct {
	ID     uint32     `json:"id"`
	State  string     `json:"state"`            // active, draining, decommissioning
	Source string     `json:"source,omitempty"` // that said so first
	Since  *time.Time `json:"since,omitempty"`
}

// feedFleet tells a client its share of what the fleet may do.
type feedFleet struct {
	Clients                int     `json:"clients"`                   // that follow this feed
	Client                 int     `json:"client"`                    // which of them this one is, from 0 on
	MaxReconnectsPerSecond float64 `json:"max_reconnects_per_second"` // of all together
}

const (
	feedVersion = 1
	feedPath    = "/v1/drain"

	nodeActive          = "active"
	nodeDraining        = "draining"
	nodeDecommissioning = "decommissioning"

	maxFeedBody  = 1 << 20
	maxTokenFile = 64 << 10
	maxETag      = 256

	// feedWait is how long a client lets the feed wait for news. A feed that has gone without a word is noticed after that
	// and the poll timeout.
	feedWait = 10 * time.Second
	// feedPause is the shortest time between two questions to a feed that answers at once with nothing new.
	feedPause    = time.Second
	firstBackoff = 250 * time.Millisecond
	maxFleet     = 1_000_000
)

// headerClient is the request header by which a feed counts its clients: a random number of each process.
const headerClient = "Crdbdrain-Client"

// fleetShare is a process's part of what a fleet may do together: one reconnect every gap, the first one phase after the
// news that all of them get at the same moment.
type fleetShare struct {
	gap, phase time.Duration
}

// share returns what the feed grants, or nil: no limit.
func (f *feedFleet) share() (*fleetShare, error) {
	if f == nil || f.MaxReconnectsPerSecond == 0 {
		return nil, nil //nolint:nilnil // no limit is no error
	}
	if f.Clients < 1 || f.Clients > maxFleet || f.Client < 0 || f.Client >= f.Clients || !(f.MaxReconnectsPerSecond >= minFleetRate && f.MaxReconnectsPerSecond <= maxFleet) {
		return nil, fmt.Errorf("client %d of %d with %g reconnects a second", f.Client, f.Clients, f.MaxReconnectsPerSecond)
	}
	gap := time.Duration(float64(f.Clients) / f.MaxReconnectsPerSecond * float64(time.Second))
	gap = min(gap, maxFleetGap)
	return &fleetShare{gap: gap, phase: time.Duration(float64(gap) * float64(f.Client) / float64(f.Clients))}, nil
}

const (
	minFleetRate = 0.01
	// maxFleetGap bounds what a feed can do: slow this process down, not nail it to a node.
	maxFleetGap = time.Minute
)

// fleetGap is the shortest time between two reconnects of this process that a feed has asked for; 0 if none has.
func (w *watchdog) fleetGap() time.Duration {
	if f := w.fleet.Load(); f != nil {
		return f.gap
	}
	return 0
}

// feedClient follows a feed: its goroutine asks, lets the feed wait until there is news, and asks again.
type feedClient struct {
	w         *watchdog
	url       string
	tokenFile string
	cluster   string // crdbdrain_cluster: the feed has to be of this one
	client    *http.Client
	id        string
	cancel    context.CancelFunc
	done      chan struct{}

	// Of the goroutine.
	etag     string
	last     feedDocument
	heard    time.Time // when the feed had heard what is the last document
	pinned   string    // the cluster that the feed was of at first
	failures int       // in a row
}

// followFeed starts, stops or leaves alone the client of the feed, as the settings say.
func (w *watchdog) followFeed(ctx context.Context, f *feedClient) *feedClient {
	cfg := w.cfg.Load()
	wanted := ""
	if cfg.sources.has(sourceFeed) {
		wanted = cfg.feed
	}
	if f != nil {
		if f.url == wanted && f.tokenFile == cfg.feedTokenFile {
			return f
		}
		f.stop()
		w.fleet.Store(nil)
	}
	if wanted == "" {
		return nil
	}
	f = newFeedClient(w, cfg)
	ctx, f.cancel = context.WithCancel(ctx)
	go f.run(ctx)
	return f
}

func newFeedClient(w *watchdog, cfg *config) *feedClient {
	return &feedClient{
		w: w, url: cfg.feed, tokenFile: cfg.feedTokenFile, cluster: cfg.cluster,
		id:   strconv.FormatUint(rand.Uint64(), 16),
		done: make(chan struct{}),
		client: &http.Client{
			Transport: &http.Transport{
				DialContext:         w.dialFeed,
				TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: cfg.feedRoots},
				TLSHandshakeTimeout: cfg.pollTimeout,
				MaxIdleConnsPerHost: 1,
				ForceAttemptHTTP2:   true,

				MaxResponseHeaderBytes: maxHeaders,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// stop ends the client and waits for it. It may be called on nil.
func (f *feedClient) stop() {
	if f == nil {
		return
	}
	f.cancel()
	<-f.done
}

func (f *feedClient) run(ctx context.Context) {
	defer close(f.done)
	defer f.client.CloseIdleConnections()
	backoff := firstBackoff
	for ctx.Err() == nil {
		start := time.Now()
		news, err := f.ask(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			backoff = firstBackoff
			f.failures = 0
			// A feed that lets nobody wait is asked like a source that is polled.
			pause := minPollGap
			if !news {
				pause = feedPause
			}
			if rest := pause - time.Since(start); rest > 0 && !sleep(ctx, jitter(rest)) {
				return
			}
			continue
		}
		// The first failure may be the end of a connection, or of one of several replicas: it is nobody's trouble yet.
		if f.failures++; f.failures > 1 {
			f.w.take(pollResult{answers: []answer{{source: sourceFeed, err: err, asked: start, took: time.Since(start)}}})
		}
		wait := backoff
		var after retryAfter
		if errors.As(err, &after) {
			wait = max(wait, min(after.wait, maxBackoff))
		}
		if !sleep(ctx, wait/2+rand.N(wait/2+1)) {
			return
		}
		f.client.CloseIdleConnections() // an HTTP/2 connection outlives a peer that has gone without a word
		backoff = min(2*backoff, maxBackoff)
	}
}

// retryAfter is a refusal that says when to come again.
type retryAfter struct {
	error
	wait time.Duration
}

// ask asks once, and takes over what there is to know. news reports whether the document is another than before.
func (f *feedClient) ask(ctx context.Context) (news bool, err error) {
	wait := jitter(feedWait)
	if f.etag == "" {
		wait = 0
	}
	timeout := f.w.cfg.Load().pollTimeout
	ctx, cancel := context.WithTimeout(ctx, wait+timeout)
	defer cancel()
	asked := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url+feedPath+"?wait="+url.QueryEscape(wait.Round(time.Millisecond).String()), nil)
	if err != nil {
		return false, err
	}
	req.Header.Set("User-Agent", "crdbdrain")
	req.Header.Set("Accept", "application/json")
	req.Header.Set(headerClient, f.id)
	if f.etag != "" {
		req.Header.Set("If-None-Match", f.etag)
	}
	if f.tokenFile != "" {
		token, err := readToken(f.tokenFile)
		if err != nil {
			return false, err
		}
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := f.client.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusNotModified:
		if f.etag == "" {
			return false, errors.New("answers 304 to an unconditional request")
		}
		f.takeOver(f.last, time.Now())
		return false, nil
	case http.StatusOK:
	default:
		err := fmt.Errorf("answers %d", resp.StatusCode)
		if resp.StatusCode == http.StatusUnauthorized || resp.StatusCode == http.StatusForbidden {
			err = fmt.Errorf("answers %d: it does not accept the token of crdbdrain_feed_token_file", resp.StatusCode)
		}
		if s, convErr := strconv.Atoi(resp.Header.Get("Retry-After")); convErr == nil && s > 0 {
			err = retryAfter{err, time.Duration(min(s, 3600)) * time.Second}
		}
		return false, err
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxFeedBody+1))
	if err != nil {
		return false, err
	}
	doc, err := parseFeed(body)
	if err != nil {
		return false, err
	}
	if err := f.check(doc); err != nil {
		return false, err
	}
	// Behind a load balancer each answer may be another replica's. One that has asked the cluster before the replica did
	// whose answer is the last one here knows nothing of what has happened since.
	heard := time.Now().Add(-time.Duration(doc.AgeMS) * time.Millisecond)
	if doc.Instance != f.last.Instance && heard.Before(f.heard) {
		return false, nil
	}
	etag := resp.Header.Get("ETag")
	if len(etag) > maxETag || hasControl(etag) {
		etag = ""
	}
	// What the feed says was so when it was asked, or became so since.
	if etag != "" && etag == f.etag {
		asked = time.Now()
	}
	news = !slices.EqualFunc(doc.Nodes, f.last.Nodes, func(a, b feedNode) bool { return a.ID == b.ID && a.State == b.State })
	f.etag, f.last, f.pinned, f.heard = etag, doc, doc.Cluster, heard
	f.takeOver(doc, asked)
	return news, nil
}

// readToken reads the bearer token: the first line of the file. It is read for every request, so that it can be changed.
func readToken(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("crdbdrain_feed_token_file: %w", err)
	}
	defer file.Close()
	tokens, err := readTokens(file)
	if err != nil {
		return "", fmt.Errorf("crdbdrain_feed_token_file: %w", err)
	}
	if len(tokens) == 0 {
		return "", errors.New("crdbdrain_feed_token_file: no token")
	}
	return tokens[0], nil
}

// readTokens reads a file of tokens. One that is too large is not taken in part: a piece of a token would pass for a token.
func readTokens(file *os.File) ([]string, error) {
	text, err := io.ReadAll(io.LimitReader(file, maxTokenFile+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxTokenFile {
		return nil, fmt.Errorf("%s is larger than %d bytes", file.Name(), maxTokenFile)
	}
	return parseTokens(text), nil
}

// parseTokens reads a file of tokens, one a line. Empty lines and those that begin with # are none, nor is what would not
// fit into a header.
func parseTokens(text []byte) (tokens []string) {
	for line := range strings.Lines(strings.TrimPrefix(string(text), "\ufeff")) { // some editors begin with a byte order mark
		line = strings.TrimSpace(line)
		if line != "" && line[0] != '#' && !strings.ContainsFunc(line, func(r rune) bool { return r <= ' ' || r > '~' }) {
			tokens = append(tokens, line)
		}
	}
	return tokens
}

// parseFeed reads a document. It is taken whole or not at all.
func parseFeed(body []byte) (doc feedDocument, err error) {
	if len(body) > maxFeedBody {
		return doc, fmt.Errorf("more than %d bytes", maxFeedBody)
	}
	if err := json.Unmarshal(body, &doc); err != nil {
		return doc, errors.New("malformed JSON")
	}
	if doc.Version != feedVersion {
		return doc, fmt.Errorf("version %d; this client knows %d", doc.Version, feedVersion)
	}
	if _, err := doc.states(); err != nil {
		return doc, err
	}
	if _, err := doc.Fleet.share(); err != nil {
		return doc, err
	}
	if doc.AgeMS < 0 || doc.WindowMS < 0 || time.Duration(doc.WindowMS)*time.Millisecond > 24*time.Hour || doc.WindowMS > 1<<40 {
		return doc, errors.New("a time is out of range")
	}
	return doc, nil
}

// states returns what the document says of each node.
func (doc *feedDocument) states() (map[nodeID]nodeState, error) {
	if len(doc.Nodes) == 0 {
		return nil, errEmpty
	}
	if len(doc.Nodes) > maxRows {
		return nil, fmt.Errorf("more than %d nodes", maxRows)
	}
	nodes := make(map[nodeID]nodeState, len(doc.Nodes))
	for _, n := range doc.Nodes {
		if n.ID < 1 || n.ID > maxNodeID {
			return nil, fmt.Errorf("node ID %d is not between 1 and %d", n.ID, maxNodeID)
		}
		if _, twice := nodes[nodeID(n.ID)]; twice {
			return nil, fmt.Errorf("node ID %d comes twice", n.ID)
		}
		switch n.State {
		case nodeActive:
			nodes[nodeID(n.ID)] = nodeState{live: true}
		case nodeDraining:
			nodes[nodeID(n.ID)] = nodeState{draining: true}
		case nodeDecommissioning:
			nodes[nodeID(n.ID)] = nodeState{decommissioning: true, live: true}
		default:
			return nil, fmt.Errorf("node state %s", quote(&n.State))
		}
	}
	return nodes, nil
}

// check refuses a document that is of another cluster, or of another time.
func (f *feedClient) check(doc feedDocument) error {
	if want := f.cluster; want != "" && doc.Cluster != want {
		return fmt.Errorf("is of cluster %s; crdbdrain_cluster is %s", quote(&doc.Cluster), quote(&want))
	}
	if f.pinned != "" && doc.Cluster != f.pinned {
		return fmt.Errorf("is of cluster %s; it was of %s", quote(&doc.Cluster), quote(&f.pinned))
	}
	if age := time.Duration(doc.AgeMS) * time.Millisecond; doc.AgeMS > 1<<40 || age > f.w.keep()+maxFeedAge {
		return errors.New("has heard nothing of the cluster for too long")
	}
	if doc.Instance == f.last.Instance && doc.Instance != "" && doc.Sequence < f.last.Sequence {
		return errors.New("is older than the answer before")
	}
	return nil
}

// maxFeedAge is how much older than its own keep a client lets a feed's knowledge be: the feed's intervals may be longer.
const maxFeedAge = time.Minute

// takeOver makes the document the source's answer.
func (f *feedClient) takeOver(doc feedDocument, asked time.Time) {
	nodes, err := doc.states()
	if err != nil {
		return // parseFeed has looked
	}
	if share, err := doc.Fleet.share(); err == nil {
		f.w.fleet.Store(share)
	}
	r := pollResult{answers: []answer{{source: sourceFeed, nodes: nodes, asked: asked}}}
	if doc.WindowMS > 0 {
		r.window = max(time.Duration(doc.WindowMS)*time.Millisecond, minWindow) // as askWindow: no feed sets a pace beyond all order
	}
	f.w.take(r)
}
