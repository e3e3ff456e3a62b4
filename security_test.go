package crdbdrain

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/attribute"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// The claims of SECURITY.md that no other test shows.

const (
	passwordCanary = "Canary4711/pa&ss"
	tokenCanary    = "Canary4711-token"
	anyCanary      = "Canary4711"
)

// printedWith is everything that printing v shows, and printing what it wraps.
func printedWith(v any) string {
	text := fmt.Sprintf("%v\n%+v\n%#v\n", v, v, v)
	err, ok := v.(error)
	if !ok {
		return text
	}
	text += fmt.Sprintf("%q\n", err)
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		for _, e := range joined.Unwrap() {
			text += printedWith(e)
		}
	}
	if e := errors.Unwrap(err); e != nil {
		text += printedWith(e)
	}
	return text
}

// wantNoCanary looks for a secret as it is, as a URL has it, and as a header or a log of bytes may have it.
func wantNoCanary(t *testing.T, what, text string) {
	t.Helper()
	plain := base64.StdEncoding.EncodeToString([]byte(anyCanary))
	for _, secret := range []string{anyCanary, plain[:len(plain)-4], fmt.Sprintf("%x", anyCanary)} {
		if strings.Contains(text, secret) {
			t.Errorf("%s: a secret (%s) in\n%s", what, secret, text)
		}
	}
}

// I01: whatever fails once connections exist, neither an error nor the log nor a metric has the password or the feed's
// token in it: an authentication that is refused later, to the pool and to the watchdog; a readiness endpoint that is away;
// a feed that refuses the token; a ceiling; the ends of the pool; the feed's own server.
func TestI01FailuresOfAPoolKeepTheSecrets(t *testing.T) {
	t.Parallel()
	var log lockedBuffer
	m := newMeter(t)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(tokenCanary+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte("# "+tokenCanary+"\n"+tokenCanary+" with a space\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var sent atomic.Int64
	feed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "Bearer "+tokenCanary {
			sent.Add(1)
		}
		w.Header().Set("Location", "/?"+r.Header.Get("Authorization")) // it echoes where a client has no business to look
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, r.Header.Get("Authorization"))
	}))
	defer feed.Close()
	away := httptest.NewServer(http.NotFoundHandler())
	away.Close()
	c := startCluster(t, crdbdraintest.Config{Password: passwordCanary})
	c.Grant("app", "admin")
	dsn := c.DSN()
	if !strings.Contains(dsn, anyCanary) {
		t.Fatalf("no password in %s", dsn)
	}
	p := open(t, dsn, "crdbdrain_poll_interval=100ms&crdbdrain_poll_timeout=500ms&crdbdrain_max_connections=3&crdbdrain_sources=instances,readiness,feed&crdbdrain_readiness="+away.URL+
		"&crdbdrain_feed="+feed.URL+"&crdbdrain_feed_token_file="+token, WithLogger(log.logger()), WithMeterProvider(m), WithNodeMetric())
	p.c.registry = &watchdogs{}
	var printed strings.Builder
	failed := func(what string, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s: no error", what)
			return
		}
		printed.WriteString(printedWith(err))
	}
	fill(t, p.DB, 3)
	w := p.wd()
	eventually(t, "instances works, readiness and feed do not", func() bool {
		return w.status(sourceInstances).state == sourceOK && w.status(sourceReadiness).state == sourceFailing && w.status(sourceFeed).state == sourceFailing
	})
	if sent.Load() == 0 {
		t.Error("the feed has not seen the token: the test shows nothing")
	}
	// The ceiling, and a key that is not known, in another pool.
	_, err := p.c.Connect(t.Context())
	failed("a connection too many", err)
	pc, err := pgxpool.ParseConfig(dsn + "&crdbdrain_mod=on")
	if err != nil {
		t.Fatal(err)
	}
	_, err = AttachPool(pc)
	failed("AttachPool", err)
	// The feed's server.
	_, err = NewFeedHandler(p.c, FeedConfig{TokenFile: empty})
	failed("a file without a token", err)
	// The password is changed: the server refuses what it had accepted.
	refusing := startPeer(t, false)
	other := open(t, fmt.Sprintf("postgres://app:%s@%s/defaultdb?sslmode=disable", url.QueryEscape(passwordCanary), refusing.ln.Addr()),
		"crdbdrain_poll_interval=100ms&crdbdrain_sources=instances", WithLogger(log.logger()), WithMeterProvider(m))
	fill(t, other.DB, 1)
	refusing.mu.Lock()
	refusing.refuse = refuseWith("28P01", "password authentication failed for user app")
	refusing.mu.Unlock()
	other.wd().poke()
	eventually(t, "the watchdog's failure is in the log", func() bool { return strings.Contains(string(log.bytes()), "28P01") })
	other.SetMaxOpenConns(0)
	held, err := other.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	failed("authentication", other.c.WaitDrained(canceled(t), 77))
	_, err = other.c.Connect(t.Context())
	failed("authentication", err)
	// The ends.
	_, err = other.c.Shutdown(canceled(t))
	failed("Shutdown", err)
	printed.WriteString(printedWith(other.c.Stats()))
	_ = held.Close()
	_ = p.Close()
	for _, v := range []any{p.c, p.c.Stats()} {
		printed.WriteString(printedWith(v))
	}
	wantNoCanary(t, "errors", printed.String())
	wantNoCanary(t, "log", string(log.bytes()))
	for name, s := range m.read(t) {
		wantNoCanary(t, "metric", name+s.unit+s.text)
		for _, pt := range s.points {
			wantNoCanary(t, "metric "+name, pt.attrs.Encoded(attribute.DefaultEncoder()))
		}
	}
}

func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// A process that crashes prints an error, values and every goroutine's stack, but no secret.
func TestI01CrashOutputHasNoSecret(t *testing.T) {
	const variable = "CRDBDRAIN_TEST_CRASH"
	dsn := "postgres://app:" + url.QueryEscape(passwordCanary) + "@127.0.0.1:1/d?sslmode=disable&connect_timeout=5"
	switch os.Getenv(variable) {
	case "parse":
		_, err := theDriver.OpenConnector(dsn + "&crdbdrain_mode=x")
		panic(err)
	case "dial":
		panic(open(t, dsn, "").PingContext(t.Context()))
	case "value":
		panic(open(t, dsn, "").c)
	case "nil":
		dc, err := theDriver.OpenConnector(dsn)
		if err != nil {
			t.Fatal(err)
		}
		dc.(*Connector).cfg.pgx.DialFunc = nil
		_, _ = dc.Connect(t.Context()) // a bug, say: it panics amid the connector's own frames
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for how, want := range map[string]string{
		"parse": "panic: crdbdrain: crdbdrain_mode", "dial": "failed to connect", "value": "panic: (*crdbdrain.Connector)", "nil": "nil pointer dereference",
	} {
		cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestI01CrashOutputHasNoSecret$", "-test.timeout=1m")
		cmd.Env = append(os.Environ(), variable+"="+how, "GOTRACEBACK=all")
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) || !strings.Contains(string(out), "goroutine ") {
			t.Errorf("%s: %v, want %q in\n%s", how, err, want, out)
		}
		wantNoCanary(t, how, string(out))
	}
}

// middleman stands between a pool and a server with TLS: it passes connections on until it turns, and then answers
// SSLRequests as an attacker would.
type middleman struct {
	ln     net.Listener
	server string
	wg     sync.WaitGroup

	mu     sync.Mutex
	turned *tls.Config // guarded by mu, like all below; an attacker's certificate, or empty: it says that it has no TLS
	asked  int         // SSLRequests since
	heard  []byte      // sent in clear after an SSLRequest, or inside the attacker's TLS
	errs   []error     // of the attacker's handshakes
	open   []net.Conn
}

func startMiddleman(t *testing.T, server string) *middleman {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &middleman{ln: ln, server: server}
	m.wg.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			m.mu.Lock()
			turned := m.turned
			m.open = append(m.open, nc)
			m.mu.Unlock()
			m.wg.Go(func() {
				defer nc.Close()
				if turned != nil {
					m.attack(nc, turned)
					return
				}
				to, err := net.Dial("tcp", m.server)
				if err != nil {
					return
				}
				m.mu.Lock()
				m.open = append(m.open, to)
				m.mu.Unlock()
				m.wg.Go(func() {
					defer nc.Close()
					_, _ = io.Copy(nc, to)
				})
				defer to.Close()
				_, _ = io.Copy(to, nc)
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		m.mu.Lock()
		for _, nc := range m.open {
			_ = nc.Close()
		}
		m.mu.Unlock()
		m.wg.Wait()
	})
	return m
}

func (m *middleman) attack(nc net.Conn, with *tls.Config) {
	var request [8]byte
	if _, err := io.ReadFull(nc, request[:]); err != nil {
		return
	}
	var in io.Reader = nc
	if binary.BigEndian.Uint32(request[4:]) == 80877103 {
		m.mu.Lock()
		m.asked++
		m.mu.Unlock()
		if len(with.Certificates) == 0 {
			_, _ = nc.Write([]byte("N"))
		} else {
			_, _ = nc.Write([]byte("S"))
			secure := tls.Server(nc, with)
			err := secure.Handshake()
			m.mu.Lock()
			m.errs = append(m.errs, err)
			m.mu.Unlock()
			in = secure
		}
	} else {
		in = io.MultiReader(strings.NewReader(string(request[:])), nc)
	}
	var b [512]byte
	for {
		n, err := in.Read(b[:])
		m.mu.Lock()
		m.heard = append(m.heard, b[:n]...)
		m.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (m *middleman) turn(with *tls.Config) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.turned, m.asked, m.heard, m.errs = with, 0, nil, nil
}

// told returns how often a client asked for TLS, and what it said without it or to the attacker.
func (m *middleman) told() (asked int, heard string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.asked, string(m.heard)
}

// The watchdog's own connection has the DSN's TLS, or is none: an attacker in the path who denies TLS, or has a certificate
// of his own, hears neither a name nor a password nor a statement.
func TestWatchdogIsNotDowngraded(t *testing.T) {
	t.Parallel()
	serverTLS := testTLS()
	leaf, err := x509.ParseCertificate(serverTLS.Certificates[0].Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(root, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	noTLS, ownCertificate := &tls.Config{}, selfSigned(t)
	for _, tt := range []struct {
		sslmode string
		with    *tls.Config
	}{
		{"require", noTLS}, {"verify-ca", noTLS}, {"verify-full", noTLS}, {"verify-ca", ownCertificate}, {"verify-full", ownCertificate},
	} {
		c := startCluster(t, crdbdraintest.Config{Nodes: 1, TLS: serverTLS, Password: passwordCanary})
		c.Grant("app", "admin")
		cc, err := pgx.ParseConfig(c.DSNAll())
		if err != nil {
			t.Fatal(err)
		}
		m := startMiddleman(t, fmt.Sprintf("%s:%d", cc.Host, cc.Port))
		dsn := fmt.Sprintf("postgres://app:%s@%s/defaultdb?sslrootcert=%s&sslmode=", url.QueryEscape(passwordCanary), m.ln.Addr(), url.QueryEscape(root))
		var log lockedBuffer
		p := open(t, dsn+tt.sslmode, "crdbdrain_sources=instances&crdbdrain_poll_interval=1h&crdbdrain_cluster="+m.ln.Addr().String(), WithLogger(log.logger()))
		fill(t, p.DB, 1)
		m.turn(tt.with)
		p.wd().poke()
		eventually(t, "the watchdog has tried and failed", func() bool {
			asked, heard := m.told()
			return asked+len(heard) > 0 && len(log.lines("source fails")) > 0
		})
		if _, heard := m.told(); heard != "" {
			t.Errorf("sslmode=%s: the attacker hears %q", tt.sslmode, heard)
		}
		wantNoCanary(t, "log", string(log.bytes()))
		if err := p.PingContext(t.Context()); err != nil { // the pool's connection is older than the attack
			t.Errorf("sslmode=%s: %v", tt.sslmode, err)
		}
		// The attacker does hear a client that permits it: pgx itself, with sslmode=prefer.
		m.turn(noTLS)
		prefer, err := pgx.ParseConfig(strings.Replace(dsn, "sslrootcert="+url.QueryEscape(root)+"&", "", 1) + "prefer")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		_, err = pgx.ConnectConfig(ctx, prefer)
		cancel()
		if _, heard := m.told(); err == nil || !strings.Contains(heard, "app") {
			t.Errorf("the attacker is deaf: %v, %q", err, heard)
		}
	}
}

// selfSigned is a certificate of nobody's for 127.0.0.1.
func selfSigned(t *testing.T) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	of := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, of, of, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
}

// The token goes to the feed and nowhere else: no redirect is followed, whatever its status, and no proxy is used.
func TestFeedTokenGoesNowhereElse(t *testing.T) {
	t.Parallel()
	var elsewhere, asked atomic.Int64
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	defer other.Close()
	status := http.StatusMovedPermanently
	feed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "Bearer "+tokenCanary {
			asked.Add(1)
		}
		http.Redirect(w, r, other.URL+"/v1/drain", status)
	}))
	defer feed.Close()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(tokenCanary), 0o600); err != nil {
		t.Fatal(err)
	}
	c, w := bare(t, "crdbdrain_feed="+feed.URL+" crdbdrain_feed_token_file="+token)
	f := newFeedClient(w, c.cfg)
	defer f.client.CloseIdleConnections()
	for _, status = range []int{301, 302, 303, 307, 308} {
		if _, err := f.ask(t.Context()); err == nil || err.Error() != fmt.Sprintf("answers %d", status) {
			t.Errorf("%d: %v", status, err)
		}
	}
	if asked.Load() != 5 || elsewhere.Load() != 0 {
		t.Errorf("%d requests to the feed, %d elsewhere; want 5 and 0", asked.Load(), elsewhere.Load())
	}
	if f.client.Transport.(*http.Transport).Proxy != nil {
		t.Error("a proxy from the environment would be used")
	}
	for _, to := range []string{"http://feed.example:8080", "http://10.0.0.1", "http://127.0.0.1.example", "http://[::2]:1", "http://localhost.example"} {
		_, err := parseConfig("host=h user=u crdbdrain_feed=" + to + " crdbdrain_feed_token_file=" + token)
		if err == nil || !strings.Contains(err.Error(), "needs https://") {
			t.Errorf("a token for %s: %v", to, err)
		}
	}
}

// liar is somebody who can say what he likes about nodes. say takes those that are to leave.
type liar struct {
	name   string
	params string
	say    func(draining map[int]bool)
}

// What a feed, readiness endpoints, or a server's tables can do at most, when they say every moment that other nodes leave,
// and often that all do: nothing fails, and with a window connections are replaced no faster than the pace, so that the
// pool is never empty. A feed in a hurry may find a pool that needs few connections without any, a dial before the next.
func TestLiarsSlowThingsDownAtMost(t *testing.T) {
	t.Parallel()
	var document atomic.Value
	feed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, document.Load().(string)) }))
	defer feed.Close()
	window := 0
	tellFeed := func(draining map[int]bool) {
		nodes := ""
		for id := 1; id <= 4; id++ { // the fourth does not exist
			state := nodeActive
			if draining[id] {
				state = nodeDraining
			}
			nodes += fmt.Sprintf(`,{"id":%d,"state":%q}`, id, state)
		}
		document.Store(fmt.Sprintf(`{"version":1,"cluster":"L","window_ms":%d,"nodes":[%s]}`, window, nodes[1:]))
	}
	var tables atomic.Pointer[map[int]bool]
	tables.Store(&map[int]bool{})
	endpoints := []*httpNode{newHTTPNode(t, 1), newHTTPNode(t, 2), newHTTPNode(t, 3)}
	for _, l := range []liar{
		{"feed", "crdbdrain_window=30s&crdbdrain_feed=" + feed.URL, tellFeed},
		{"feed in a hurry", "crdbdrain_feed=" + feed.URL, func(d map[int]bool) { window = 1; tellFeed(d) }},
		{"readiness", "crdbdrain_window=30s&crdbdrain_sources=readiness&crdbdrain_readiness=" + endpoints[0].URL + "," + endpoints[1].URL + "," + endpoints[2].URL, func(draining map[int]bool) {
			for i, n := range endpoints {
				n.set(func() { n.id = 1 + (n.id+1)%3 }) // each time it is another node
				if draining[i+1] {
					n.says(http.StatusServiceUnavailable, "node is shutting down")
				} else {
					n.says(http.StatusOK, "{}")
				}
			}
		}},
		{"tables", "crdbdrain_window=30s&crdbdrain_sources=instances", func(d map[int]bool) { tables.Store(&d) }},
	} {
		t.Run(l.name, func(t *testing.T) {
			l.say(nil)
			c := startCluster(t, crdbdraintest.Config{Faults: crdbdraintest.Faults{Source: func(table string) *crdbdraintest.Result {
				if table != "system.sql_instances" {
					return nil
				}
				r := &crdbdraintest.Result{Columns: instanceColumns}
				for id := int64(1); id <= 4; id++ {
					r.Rows = append(r.Rows, []any{id, (*tables.Load())[int(id)]})
				}
				return r
			}}})
			c.Grant("app", "admin")
			p := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_cluster=L&crdbdrain_rebalance=off&"+l.params)
			p.c.registry = &watchdogs{}
			fill(t, p.DB, 9)
			w := p.dog(t)
			load := startLoad(t, p.DB, 4, time.Millisecond)
			begin := time.Now()
			marked, least := 0, 9
			for i := 0; time.Since(begin) < 2*time.Second; i++ {
				if i%25 == 0 {
					n := i / 25
					l.say(map[int]bool{1 + n%3: true, 1 + (n+1)%3: n%2 == 0, 1 + (n+2)%3: n%4 == 0})
				}
				if w.marks.Load() != nil {
					marked++
				}
				least = min(least, p.Stats().OpenConnections)
				time.Sleep(2 * time.Millisecond)
			}
			took := time.Since(begin)
			if load.stop(); len(load.errors) > 0 {
				t.Errorf("errors: %v", load.errors)
			}
			s := p.c.Stats()
			if marked == 0 || load.ops.Load() == 0 {
				t.Error("nobody has been believed: the test shows nothing")
			}
			if !strings.Contains(l.params, "crdbdrain_window") {
				return
			}
			// With a window of 30 s the pace is the stagger's, 500 ms.
			if most := int64(took/(500*time.Millisecond)) + 2; s.Culled > most {
				t.Errorf("%d culls in %v, want at most %d", s.Culled, took, most)
			}
			// database/sql opens another one when somebody needs it.
			if least < max(9-int(s.Culled), 1) {
				t.Errorf("the pool had %d connections at one moment, after %d culls in all", least, s.Culled)
			}
		})
	}
}

// attributes is a logger that keeps the values of the attributes "error", as they are handed to it.
type attributes struct {
	*logTrap
	errors []string // guarded by mu
}

func (l *attributes) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "error" {
			l.errors = append(l.errors, a.Value.String())
		}
		return true
	})
	return nil
}

// What a server says in an error is a line of the log at most, and cut, whatever the logger's handler does with it.
func TestServersTextMakesOneLine(t *testing.T) {
	t.Parallel()
	log := &attributes{logTrap: &logTrap{}}
	p := startPeer(t, false)
	db := open(t, p.dsn("crdbdrain_cluster="+p.ln.Addr().String()), "", WithLogger(slog.New(log)))
	db.c.cfg.sources |= 1 << sourceInstances
	fill(t, db.DB, 1)
	p.mu.Lock()
	p.refuse = func(int) *pgproto3.ErrorResponse {
		return &pgproto3.ErrorResponse{Severity: "FATAL", Code: "28000", Message: "no\nlevel=ERROR msg=forged\r\n" + strings.Repeat("x", 1<<16)}
	}
	p.mu.Unlock()
	db.wd().poke()
	said := func() []string {
		log.mu.Lock()
		defer log.mu.Unlock()
		return slices.Clone(log.errors)
	}
	eventually(t, "it is in the log", func() bool { return strings.Contains(strings.Join(said(), ""), "forged") })
	for _, text := range said() {
		if len(text) > 512 || strings.ContainsAny(text, "\r\n") {
			t.Errorf("%d bytes: %q", len(text), text)
		}
	}
}

// Headers without end are not read to their end.
func TestHeadersAreBounded(t *testing.T) {
	t.Parallel()
	size := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X", strings.Repeat("x", size))
		switch r.URL.Path {
		case "/_status/vars":
			fmt.Fprintf(w, honestVars, 1)
		case feedPath:
			_, _ = io.WriteString(w, `{"version":1,"nodes":[{"id":1,"state":"active"}]}`)
		}
	}))
	defer s.Close()
	c, w := bare(t, "crdbdrain_feed="+s.URL)
	f := newFeedClient(w, c.cfg)
	f.cluster = ""
	defer f.client.CloseIdleConnections()
	r := readinessOf(t, &logTrap{}, "", s.URL)
	for _, tt := range []struct {
		size int
		ok   bool
	}{{32 << 10, true}, {100 << 10, false}} {
		size = tt.size
		if _, err := f.ask(t.Context()); (err == nil) != tt.ok {
			t.Errorf("feed, %d bytes: %v", tt.size, err)
		}
		if _, err := pollNow(t, r); (err == nil) != tt.ok {
			t.Errorf("readiness, %d bytes: %v", tt.size, err)
		}
	}
}
