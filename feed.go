package crdbdrain

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// FeedConfig is how a drain feed behaves. The zero value lets everybody read and nobody mark.
type FeedConfig struct {
	// TokenFile holds the bearer tokens that may read the feed, one a line; empty lines and those that begin with # are
	// none. It is 64 KiB at most, and is read again when it has changed. Empty: no token is asked for.
	TokenFile string
	// MarkTokenFile holds, in the same form, the bearer tokens that may mark nodes by hand. Empty: nobody may.
	MarkTokenFile string
	// MaxReconnectsPerSecond is how many connections all clients of this feed together may give up and replace in a second
	// because of a drain. Each gets its part, and its turn. 0: no limit. With several replicas of a feed, whose clients are
	// spread over them, each gets its part of the whole. What cannot leave in time at this rate, the server closes.
	MaxReconnectsPerSecond float64
}

// FeedHandler serves what one process knows of a cluster's drains to all others, which then need no privilege in the
// database and do not poll it (crdbdrain_feed):
//
//	GET    /v1/drain          the document, as JSON; If-None-Match and ?wait=10s (at most 60s) wait for another one
//	POST   /v1/drain/{node}   mark a node by hand, for ?for=10m (at most 24h): for scripts that know before the server does
//	DELETE /v1/drain/{node}   take that mark back
//	GET    /healthz           200 while the process lives
//	GET    /readyz            200 while there is something to tell: 503 without news of the cluster, and from Shutdown on
//
// It keeps no state that matters: two behind any load balancer are enough, but a POST concerns the replica that gets it. It
// is safe for concurrent use. Serve it with net/http over TLS, without a WriteTimeout below 70 s.
type FeedHandler struct {
	c        *Connector
	w        *watchdog
	in       *instruments
	mux      *http.ServeMux
	instance string
	rate     float64
	read     *tokenFile // nil: everybody
	mark     *tokenFile // nil: nobody

	changed chan struct{} // told by the watchdog
	closing chan struct{} // closed by Shutdown
	done    chan struct{} // closed by Close
	ended   chan struct{} // closed when run has ended

	requests sync.WaitGroup

	mu      sync.Mutex
	state   *feedState             // guarded by mu; nil: nothing to tell yet
	closed  bool                   // by Close; guarded by mu
	shut    bool                   // by Shutdown; guarded by mu
	clients map[string]*fleetEntry // guarded by mu
	order   []string               // of clients, by their numbers; guarded by mu
	swept   time.Time              // guarded by mu
}

// feedState is what the feed says until something changes. It is immutable.
type feedState struct {
	etag string
	head []byte        // the document up to what differs from answer to answer
	made time.Time     //
	next chan struct{} // closed when there is another state
}

// fleetEntry is a client of the feed.
type fleetEntry struct {
	number  int
	waiting int
	seen    time.Time
}

const (
	maxFeedWait     = 60 * time.Second
	clientGone      = 3 * feedWait // not seen for so long: it is gone
	maxClients      = 100_000
	manualDefault   = 10 * time.Minute
	manualMost      = 24 * time.Hour
	shutdownSpread  = 3 * time.Second // in which Shutdown lets the waiting clients go
	feedRetryAfter  = "1"
	maxClientHeader = 64
)

// NewFeedHandler makes a feed of what the connector's watchdog knows. The watchdog runs from now on until Close, whether or
// not the connector has connections. The error names what is wrong with the configuration.
func NewFeedHandler(c *Connector, cfg FeedConfig) (*FeedHandler, error) {
	if c.cfg.mode == modeOff {
		return nil, configErrorf("crdbdrain_mode is off: there is nothing to feed")
	}
	if c.cfg.enabled()|c.cfg.sources&(1<<sourceFeed) == 0 {
		return nil, configErrorf("crdbdrain_sources has nothing that could be fed: want instances, gossip or readiness")
	}
	if r := cfg.MaxReconnectsPerSecond; r != 0 && !(r >= minFleetRate && r <= maxFleet) {
		return nil, configErrorf("MaxReconnectsPerSecond is %g: want 0 or %g to %d", r, minFleetRate, maxFleet)
	}
	h := &FeedHandler{
		c: c, rate: cfg.MaxReconnectsPerSecond,
		instance: strconv.FormatUint(rand.Uint64(), 16),
		changed:  make(chan struct{}, 1), closing: make(chan struct{}), done: make(chan struct{}), ended: make(chan struct{}),
		clients: make(map[string]*fleetEntry),
	}
	for _, t := range []struct {
		path string
		to   **tokenFile
	}{{cfg.TokenFile, &h.read}, {cfg.MarkTokenFile, &h.mark}} {
		if t.path == "" {
			continue
		}
		*t.to = &tokenFile{path: t.path}
		if err := (*t.to).load(); err != nil {
			return nil, configErrorf("%v", err)
		}
	}
	if h.w = c.attach(); h.w == nil || c.ctx.Err() != nil {
		return nil, errClosed
	}
	h.in = c.instruments()
	h.mux = http.NewServeMux()
	h.mux.HandleFunc("GET "+feedPath, h.authorized(h.read, h.serveDrain))
	h.mux.HandleFunc("POST "+feedPath+"/{node}", h.authorized(h.mark, h.serveMark))
	h.mux.HandleFunc("DELETE "+feedPath+"/{node}", h.authorized(h.mark, h.serveUnmark))
	h.mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	h.mux.HandleFunc("GET /readyz", h.serveReady)
	h.w.watchChanges(h.changed)
	h.w.pin(1)
	h.in.watchFeed(h)
	go h.run()
	return h, nil
}

// pin keeps the worker running without connections, or no longer does.
func (w *watchdog) pin(n int) {
	w.mu.Lock()
	w.pinned += n
	events := w.start()
	w.mu.Unlock()
	w.tell(events)
	w.poke()
}

// run makes another state when the watchdog knows something else.
func (h *FeedHandler) run() {
	defer close(h.ended)
	sequence := uint64(0)
	for {
		if s, ok := h.w.feedState(h.instance, sequence+1, h.rate); ok {
			h.mu.Lock()
			if h.state == nil || h.state.etag != s.etag {
				sequence++
				if h.state != nil {
					close(h.state.next)
				}
				h.state = s
			}
			h.mu.Unlock()
		}
		select {
		case <-h.changed:
		case <-h.done:
			return
		case <-h.c.ctx.Done():
			return
		}
	}
}

// heard returns when a polled source, or the feed that this one repeats, last gave a complete answer. w.mu is held.
func (w *watchdog) heard() (at time.Time) {
	for _, id := range []sourceID{sourceInstances, sourceGossip, sourceReadiness, sourceFeed} {
		if s := &w.sources[id]; s.nodes != nil && s.answered.After(at) {
			at = s.answered
		}
	}
	return at
}

// feedState makes the document of what the watchdog knows. It is not ok while no source has answered.
func (w *watchdog) feedState(instance string, sequence uint64, rate float64) (s *feedState, ok bool) {
	doc := feedDocument{Version: feedVersion, Cluster: w.cfg.Load().label(), Instance: instance, Sequence: sequence, WindowMS: w.window().Milliseconds()}
	w.mu.Lock()
	if w.heard().IsZero() {
		w.mu.Unlock()
		return nil, false
	}
	states := make(map[nodeID]feedNode)
	for id := range w.sources {
		for node, state := range w.sources[id].nodes {
			if state.live {
				states[node] = feedNode{ID: uint32(node), State: nodeActive}
			}
		}
	}
	if m := w.marks.Load(); m != nil {
		for node, mk := range m.of {
			n := feedNode{ID: uint32(node), State: nodeDraining, Source: mk.source.String(), Since: &mk.since}
			if mk.decommissioning {
				n.State = nodeDecommissioning
			}
			states[node] = n
		}
	}
	w.mu.Unlock()
	for _, n := range states {
		doc.Nodes = append(doc.Nodes, n)
	}
	slices.SortFunc(doc.Nodes, func(a, b feedNode) int { return cmp.Compare(a.ID, b.ID) })
	if len(doc.Nodes) == 0 || len(doc.Nodes) > maxRows {
		return nil, false
	}
	// Replicas that know the same have the same tag: a client that goes from one to another is not told anything twice.
	sum := sha256.New()
	_, _ = fmt.Fprintf(sum, "%d %q %d %g", doc.Version, doc.Cluster, doc.WindowMS, rate)
	for _, n := range doc.Nodes {
		_, _ = fmt.Fprintf(sum, " %d %s", n.ID, n.State)
	}
	head, err := json.Marshal(struct {
		*feedDocument
		// These differ from answer to answer.
		Time  struct{} `json:"time,omitzero"`
		AgeMS struct{} `json:"age_ms,omitzero"`
		Fleet struct{} `json:"fleet,omitzero"`
	}{feedDocument: &doc})
	if err != nil {
		return nil, false
	}
	return &feedState{
		etag: `"` + hex.EncodeToString(sum.Sum(nil)[:12]) + `"`,
		head: head[:len(head)-1],
		made: time.Now(), next: make(chan struct{}),
	}, true
}

// ServeHTTP answers one request.
func (h *FeedHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rec := &statusRecorder{ResponseWriter: w, status: http.StatusOK}
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	h.mux.ServeHTTP(rec, r)
	h.in.feed.count(rec.status)
}

// statusRecorder remembers the status for the metric.
type statusRecorder struct {
	http.ResponseWriter
	status int
}

func (r *statusRecorder) WriteHeader(status int) {
	r.status = status
	r.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (r *statusRecorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// authorized lets a request through that has one of the file's tokens.
func (h *FeedHandler) authorized(tokens *tokenFile, serve http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		switch {
		case tokens == nil && r.PathValue("node") != "":
			http.Error(w, "marking nodes by hand is not enabled here", http.StatusForbidden)
			return
		case tokens != nil && !tokens.allows(r.Header.Get("Authorization")):
			w.Header().Set("WWW-Authenticate", `Bearer realm="crdbdrain"`)
			http.Error(w, "a bearer token is needed", http.StatusUnauthorized)
			return
		}
		h.mu.Lock()
		closed := h.closed || h.shut
		if !closed {
			h.requests.Add(1)
		}
		h.mu.Unlock()
		if closed {
			h.unavailable(w, "shutting down")
			return
		}
		defer h.requests.Done()
		serve(w, r)
	}
}

// unavailable sends the client away: to another replica, if there is one.
func (h *FeedHandler) unavailable(w http.ResponseWriter, why string) {
	w.Header().Set("Connection", "close")
	w.Header().Set("Retry-After", feedRetryAfter)
	http.Error(w, why, http.StatusServiceUnavailable)
}

// fresh returns the state, and how long ago the cluster was heard; false if that is too long.
func (h *FeedHandler) fresh() (s *feedState, age time.Duration, ok bool) {
	h.mu.Lock()
	s = h.state
	h.mu.Unlock()
	h.w.mu.Lock()
	heard := h.w.heard()
	h.w.mu.Unlock()
	age = max(time.Since(heard), 0)
	return s, age, s != nil && !heard.IsZero() && age <= h.w.keepOf(sourceFeed) && h.c.ctx.Err() == nil
}

func (h *FeedHandler) serveReady(w http.ResponseWriter, _ *http.Request) {
	h.mu.Lock()
	shut := h.shut || h.closed
	h.mu.Unlock()
	if _, _, ok := h.fresh(); shut || !ok {
		http.Error(w, "not ready", http.StatusServiceUnavailable)
		return
	}
	_, _ = io.WriteString(w, "ok\n")
}

func (h *FeedHandler) serveDrain(w http.ResponseWriter, r *http.Request) {
	wait, err := parseWait(r.URL.Query().Get("wait"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	id := r.Header.Get(headerClient)
	if !h.arrive(id) {
		h.unavailable(w, "too many clients")
		return
	}
	defer h.depart(id)
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(wait + 10*time.Second)) // a server may have a shorter one
	end := time.Now().Add(wait)
	timer := time.NewTimer(wait)
	defer timer.Stop()
	closing := h.closing
	waited := false
	for {
		s, age, ok := h.fresh()
		if !ok {
			h.unavailable(w, "nothing is known of the cluster")
			return
		}
		if !matches(r.Header.Get("If-None-Match"), s.etag) {
			if waited {
				h.in.feed.told(time.Since(s.made))
			}
			h.send(w, s, age, id)
			return
		}
		waited = true
		select {
		case <-s.next:
			continue
		case <-timer.C:
		case <-r.Context().Done():
			return
		case <-h.done:
			h.unavailable(w, "shutting down")
			return
		case <-closing:
			// Not all at once: each goes to another replica.
			closing = nil
			timer.Reset(min(rand.N(shutdownSpread), time.Until(end)))
			w.Header().Set("Connection", "close")
			continue
		}
		if _, _, ok := h.fresh(); !ok {
			h.unavailable(w, "nothing is known of the cluster")
			return
		}
		w.Header().Set("ETag", s.etag)
		w.WriteHeader(http.StatusNotModified)
		return
	}
}

// send writes the document.
func (h *FeedHandler) send(w http.ResponseWriter, s *feedState, age time.Duration, id string) {
	h.mu.Lock()
	clients, number := len(h.order), 0
	if e := h.clients[id]; e != nil {
		number = e.number
	}
	h.mu.Unlock()
	body := slices.Grow(slices.Clone(s.head), 200)
	body = append(body, `,"time":"`...)
	body = time.Now().UTC().AppendFormat(body, time.RFC3339Nano)
	body = append(body, `","age_ms":`...)
	body = strconv.AppendInt(body, age.Milliseconds(), 10)
	if h.rate > 0 && clients > 0 {
		body = fmt.Appendf(body, `,"fleet":{"clients":%d,"client":%d,"max_reconnects_per_second":%g}`, clients, number, h.rate)
	}
	body = append(body, "}\n"...)
	w.Header().Set("ETag", s.etag)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	_, _ = w.Write(body)
}

// parseWait reads how long a client is ready to wait, a duration or a number of seconds.
func parseWait(v string) (time.Duration, error) {
	if v == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(v)
	if n, intErr := strconv.ParseUint(v, 10, 16); intErr == nil {
		d, err = time.Duration(n)*time.Second, nil
	}
	if err != nil || d < 0 {
		return 0, configErrorf("wait: want a duration, such as 10s")
	}
	return min(d, maxFeedWait), nil
}

// matches reports whether a client has the state already.
func matches(ifNoneMatch, etag string) bool {
	for tag := range strings.SplitSeq(ifNoneMatch, ",") {
		if strings.TrimPrefix(strings.TrimSpace(tag), "W/") == etag {
			return true
		}
	}
	return false
}

// arrive counts a client in. It reports false where there are too many.
func (h *FeedHandler) arrive(id string) bool {
	if id == "" || len(id) > maxClientHeader {
		return true // not one of ours: a person's, say
	}
	t := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	if t.Sub(h.swept) > time.Second {
		h.swept = t
		h.sweepClients(t)
	}
	e := h.clients[id]
	if e == nil {
		if len(h.order) == maxClients {
			return false
		}
		e = &fleetEntry{number: len(h.order)}
		h.clients[id] = e
		h.order = append(h.order, id)
	}
	e.waiting++
	e.seen = t
	return true
}

func (h *FeedHandler) depart(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if e := h.clients[id]; e != nil {
		e.waiting--
		e.seen = time.Now()
	}
}

// sweepClients forgets those that are gone; the last ones get their numbers. h.mu is held.
func (h *FeedHandler) sweepClients(t time.Time) {
	for i := 0; i < len(h.order); {
		id := h.order[i]
		if e := h.clients[id]; e.waiting > 0 || t.Sub(e.seen) < clientGone {
			i++
			continue
		}
		last := len(h.order) - 1
		h.order[i] = h.order[last]
		h.clients[h.order[i]].number = i
		h.order = h.order[:last]
		delete(h.clients, id)
	}
}

// nodeAndTime reads the parameters of a mark by hand.
func (h *FeedHandler) nodeAndTime(r *http.Request) (node int, until time.Time, status int, err error) {
	id, ok := parseNodeID(r.PathValue("node"))
	if !ok {
		return 0, until, http.StatusBadRequest, configErrorf("the path ends with a node ID, between 1 and %d", maxNodeID)
	}
	last := manualDefault
	if v := r.URL.Query().Get("for"); v != "" {
		if last, err = time.ParseDuration(v); err != nil || last < time.Second || last > manualMost {
			return 0, until, http.StatusBadRequest, configErrorf("for: want a duration from 1s to 24h")
		}
	}
	if !h.w.knows(id) {
		return 0, until, http.StatusNotFound, configErrorf("the cluster has no node %d", id)
	}
	return int(id), time.Now().Add(last), 0, nil
}

// knows reports whether a source lists the node, or it is marked.
func (w *watchdog) knows(id nodeID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.notices[id] != nil {
		return true
	}
	for i := range w.sources {
		if _, listed := w.sources[i].nodes[id]; listed {
			return true
		}
	}
	return false
}

func (h *FeedHandler) serveMark(w http.ResponseWriter, r *http.Request) {
	node, until, status, err := h.nodeAndTime(r)
	if err == nil {
		status, err = http.StatusConflict, h.c.setDraining(node, true, until)
	}
	if err != nil {
		http.Error(w, err.Error(), status)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = fmt.Fprintf(w, "{\"node\":%d,\"state\":%q,\"until\":%q}\n", node, nodeDraining, until.UTC().Format(time.RFC3339))
}

func (h *FeedHandler) serveUnmark(w http.ResponseWriter, r *http.Request) {
	node, _, status, err := h.nodeAndTime(r)
	if err == nil {
		status, err = http.StatusConflict, h.c.SetDraining(node, false)
	}
	if err != nil {
		http.Error(w, err.Error(), status)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// Shutdown lets the feed's clients go, in good order: /readyz answers 503 at once, clients that wait are answered over the
// next three seconds, new ones are sent away. It then closes the handler. ctx bounds it; the error is ctx's.
func (h *FeedHandler) Shutdown(ctx context.Context) error {
	h.mu.Lock()
	if !h.shut {
		h.shut = true
		close(h.closing)
	}
	h.mu.Unlock()
	gone := make(chan struct{})
	go func() {
		h.requests.Wait()
		close(gone)
	}()
	select {
	case <-gone:
		return h.Close()
	case <-ctx.Done():
		_ = h.Close() // it does not wait for a client that does not read
		return ctx.Err()
	}
}

// Close ends the feed at once: clients that wait are answered 503. It can be called more than once. It does not close the
// connector.
func (h *FeedHandler) Close() error {
	h.mu.Lock()
	first := !h.closed
	h.closed = true
	if first {
		close(h.done)
	}
	h.mu.Unlock()
	if first {
		h.w.unwatchChanges(h.changed)
		h.w.pin(-1)
		h.in.unwatchFeed(h)
	}
	<-h.ended
	return nil
}

// tokenFile is a file of bearer tokens. It is looked at again at most once a second, and read when it has changed.
type tokenFile struct {
	path string

	mu      sync.Mutex
	looked  time.Time
	changed time.Time
	size    int64
	sums    [][sha256.Size]byte
}

// load reads the file. While it cannot be read, the tokens are those of before.
func (f *tokenFile) load() error {
	file, err := os.Open(f.path)
	if err != nil {
		return err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	tokens, err := readTokens(file)
	if err != nil {
		return err
	}
	if len(tokens) == 0 {
		return configErrorf("%s has no token", f.path)
	}
	var sums [][sha256.Size]byte
	for _, t := range tokens {
		sums = append(sums, sha256.Sum256([]byte(t)))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sums, f.changed, f.size = sums, info.ModTime(), info.Size()
	return nil
}

// allows reports whether an Authorization header has one of the tokens.
func (f *tokenFile) allows(header string) bool {
	scheme, token, ok := strings.Cut(header, " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return false
	}
	f.mu.Lock()
	t := time.Now()
	look, changed, size := t.Sub(f.looked) > time.Second, f.changed, f.size
	if look {
		f.looked = t // others go on with what there is
	}
	f.mu.Unlock()
	if look {
		if info, err := os.Stat(f.path); err == nil && (!info.ModTime().Equal(changed) || info.Size() != size) {
			_ = f.load()
		}
	}
	f.mu.Lock()
	sums := f.sums
	f.mu.Unlock()
	sum := sha256.Sum256([]byte(strings.TrimSpace(token)))
	found := 0
	for i := range sums {
		found |= subtle.ConstantTimeCompare(sums[i][:], sum[:])
	}
	return found == 1
}

// feedInstruments is the metrics of feeds.
type feedInstruments struct {
	clients  metric.Int64ObservableGauge
	requests metric.Int64Counter
	notify   metric.Float64Histogram
	by       map[int]metric.MeasurementOption
	other    metric.MeasurementOption
}

func (f *feedInstruments) make(m metric.Meter, counter func(name, unit, description string) metric.Int64Counter, seconds func(name, description string, bounds ...float64) metric.Float64Histogram) {
	f.clients, _ = m.Int64ObservableGauge("crdbdrain.feed.clients", metric.WithUnit("{client}"), metric.WithDescription("Clients that follow the feed."))
	f.requests = counter("crdbdrain.feed.requests", "{request}", "Requests to the feed, by status.")
	f.notify = seconds("crdbdrain.feed.notify.duration", "From the moment the feed knew of a change to the moment a waiting client was told.", .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5)
	with := func(status string) metric.MeasurementOption {
		return metric.WithAttributeSet(attribute.NewSet(attribute.String("status", status)))
	}
	f.by = make(map[int]metric.MeasurementOption)
	for _, s := range []int{200, 204, 304, 400, 401, 403, 404, 405, 409, 503} {
		f.by[s] = with(strconv.Itoa(s))
	}
	f.other = with("other")
}

func (f *feedInstruments) count(status int) {
	by := f.by[status]
	if by == nil {
		by = f.other
	}
	f.requests.Add(context.Background(), 1, by)
}

func (f *feedInstruments) told(after time.Duration) {
	f.notify.Record(context.Background(), after.Seconds())
}

func (f *feedInstruments) observe(o metric.Observer, feeds map[*FeedHandler]struct{}) {
	for h := range feeds {
		h.mu.Lock()
		h.sweepClients(time.Now())
		n := len(h.order)
		h.mu.Unlock()
		o.ObserveInt64(f.clients, int64(n), metric.WithAttributes(attribute.String("crdbdrain.cluster", h.w.cfg.Load().label())))
	}
}

// watchFeed makes the gauge report a feed, and its counters start at zero.
func (in *instruments) watchFeed(h *FeedHandler) {
	in.mu.Lock()
	in.feeds[h] = struct{}{}
	in.mu.Unlock()
	for _, by := range in.feed.by {
		in.feed.requests.Add(context.Background(), 0, by)
	}
	in.feed.requests.Add(context.Background(), 0, in.feed.other)
}

func (in *instruments) unwatchFeed(h *FeedHandler) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.feeds, h)
}
