package crdbdrain

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
	"github.com/crdbdrain/crdbdrain/internal/pgtest"
)

// Settings that leave a window, by what they leave.
func leaves(initial, connections time.Duration) crdbdraintest.Settings {
	return crdbdraintest.Settings{InitialWait: initial, ConnectionsTimeout: connections, TransactionsTimeout: 30 * time.Second}
}

// states are the report's sources, in order: "instances denied, readiness off, …".
func states(r *CheckReport) string {
	var all []string
	for _, s := range r.Sources {
		all = append(all, s.Source+" "+s.State)
	}
	return strings.Join(all, ", ")
}

// findings are the report's findings of one level, with what to type.
func findings(r *CheckReport, level string) (all []string) {
	for _, f := range r.Findings {
		if f.Level == level {
			all = append(all, f.Text+" -> "+f.Remedy)
		}
	}
	return all
}

func mention(all []string, text string) bool {
	return slices.ContainsFunc(all, func(s string) bool { return strings.Contains(s, text) })
}

func remedyOf(r *CheckReport, source string) string {
	for _, s := range r.Sources {
		if s.Source == source {
			return s.Remedy
		}
	}
	return "no such source"
}

// A role without privileges, one that has them, and what each version makes of both. READY stands for the readiness URLs.
func TestCheckByVersionAndPrivilege(t *testing.T) {
	t.Parallel()
	const all = "VIEWSYSTEMTABLE VIEWCLUSTERMETADATA VIEWCLUSTERSETTING"
	const noEarly = "no early source works"
	for _, tt := range []struct {
		version, grants, params string
		verdict                 CheckVerdict
		states                  string
		remedies                map[string]string
		problem                 string // part of one; empty: there is none
	}{
		{"v21.2.0", "admin", "", CheckLimited, "instances off, readiness off, feed off, gossip ok, errors ok", nil, noEarly},
		{"v22.1.0", "", "", CheckLimited, "instances off, readiness off, feed off, gossip denied, errors ok", map[string]string{"gossip": "GRANT admin TO app"}, noEarly},
		{"v22.1.0", "admin", "READY", CheckOK, "instances off, readiness ok, feed off, gossip ok, errors ok", nil, ""},
		{"v23.1.0", "", "", CheckLimited, "instances off, readiness off, feed off, gossip denied, errors ok", map[string]string{"gossip": "GRANT admin TO app"}, noEarly},
		{"v23.1.0", "", "READY", CheckOK, "instances off, readiness ok, feed off, gossip denied, errors ok", nil, ""},
		{"v24.3.0", "", "", CheckLimited, "instances denied, readiness off, feed off, gossip denied, errors ok",
			map[string]string{"instances": "GRANT SYSTEM VIEWSYSTEMTABLE TO app", "gossip": "GRANT SYSTEM VIEWCLUSTERMETADATA TO app"}, noEarly},
		{"v24.3.0", all, "", CheckOK, "instances ok, readiness off, feed off, gossip ok, errors ok", nil, ""},
		{"v24.3.0", "VIEWCLUSTERMETADATA", "", CheckLimited, "instances denied, readiness off, feed off, gossip ok, errors ok", nil, noEarly},
		{"v24.3.0", "", "crdbdrain_sources=instances", CheckLimited, "instances denied, readiness off, feed off, gossip off, errors ok", nil, "source instances is configured and does not work"},
		{"v25.4.0", all, "", CheckOK, "instances ok, readiness off, feed off, gossip ok, errors ok", nil, ""},
		{"v26.2.0", all, "", CheckLimited, "instances denied, readiness off, feed off, gossip denied, errors ok",
			map[string]string{"instances": "crdbdrain_unsafe_internals=on (audited by the server), and if the role lacks it GRANT SYSTEM VIEWSYSTEMTABLE TO app"}, noEarly},
		{"v26.2.0", all, "crdbdrain_unsafe_internals=on", CheckOK, "instances ok, readiness off, feed off, gossip ok, errors ok", nil, ""},
		{"v26.2.0", "", "crdbdrain_unsafe_internals=on", CheckLimited, "instances denied, readiness off, feed off, gossip denied, errors ok",
			map[string]string{"instances": "GRANT SYSTEM VIEWSYSTEMTABLE TO app"}, noEarly},
		{"v26.2.0", "", "READY", CheckOK, "instances denied, readiness ok, feed off, gossip denied, errors ok", nil, ""},
		{"v26.2.0", all, "READY&crdbdrain_mode=off", CheckLimited, "instances off, readiness off, feed off, gossip off, errors ok", nil, "crdbdrain_mode is off"},
	} {
		t.Run(tt.version+" "+tt.grants+" "+tt.params, func(t *testing.T) {
			t.Parallel()
			c := startCluster(t, crdbdraintest.Config{Version: tt.version, Settings: leaves(8*time.Second, 12*time.Second)})
			for p := range strings.FieldsSeq(tt.grants) {
				c.Grant("app", p)
			}
			dsn := with(c.DSN(), "connect_timeout=5")
			if tt.params != "" {
				dsn = with(dsn, strings.ReplaceAll(tt.params, "READY", "crdbdrain_readiness="+c.ReadinessURLs()))
			}
			r, err := Check(t.Context(), dsn)
			if err != nil {
				t.Fatal(err)
			}
			if r.Verdict != tt.verdict || states(r) != tt.states {
				t.Errorf("%s: %s; want %s: %s", r.Verdict, states(r), tt.verdict, tt.states)
			}
			for source, want := range tt.remedies {
				if got := remedyOf(r, source); got != want {
					t.Errorf("%s: to type: %q, want %q", source, got, want)
				}
			}
			problems := findings(r, levelProblem)
			if (tt.problem == "") != (len(problems) == 0) || !mention(append(problems, ""), tt.problem) {
				t.Errorf("problems %q, want %q", problems, tt.problem)
			}
			if r.Server.Product != "CockroachDB" || !strings.Contains(r.Server.Version, tt.version) || r.Hosts[0].Version != tt.version {
				t.Errorf("server %+v, host %+v", r.Server, r.Hosts[0])
			}
			wantRule := "holds"
			if tt.version < "v22.1" {
				wantRule = "asked"
			}
			if r.Stamp.Rule != wantRule || r.Stamp.Node < 1 || r.Stamp.Node > 3 {
				t.Errorf("stamp %+v, want %s", r.Stamp, wantRule)
			}
			seen := strings.Contains(tt.grants, "VIEWCLUSTERSETTING") || strings.Contains(tt.grants, "admin")
			want := CheckWindow{Known: seen, InitialWaitMS: 8000, ConnectionsTimeoutMS: 12000, TransactionsTimeoutMS: 30000, TotalMS: 20000, UsedMS: 20000, Origin: "server"}
			if !seen {
				want = CheckWindow{UsedMS: 10000, Origin: "assumed", Detail: "the role may not see the server's settings", Remedy: "GRANT SYSTEM VIEWCLUSTERSETTING TO app"}
			}
			switch {
			case strings.Contains(tt.params, "mode=off"):
			case tt.version < "v22.1": // there is no connection_wait yet: not known, as it is to the driver
				if r.Window.Known || r.Window.UsedMS != 10000 || r.Window.Origin != "assumed" {
					t.Errorf("window %+v", r.Window)
				}
			case !strings.Contains(states(r), "instances ok") && !strings.Contains(states(r), "gossip ok") && seen: // the driver does not read them
				want.UsedMS, want.Origin = 10000, "assumed"
				fallthrough
			default:
				if r.Window != want {
					t.Errorf("window %+v\nwant   %+v", r.Window, want)
				}
			}
		})
	}
}

// What the settings leave is held against what the load balancer and the driver need.
func TestCheckTheWindow(t *testing.T) {
	t.Parallel()
	const s = time.Second
	for _, tt := range []struct {
		name            string
		settings        crdbdraintest.Settings
		params          string
		problem, advice string // part of one, with what to type; empty: there is no problem; any advice
	}{
		{"the server's defaults", crdbdraintest.DefaultSettings(), "", "leave no window", ""},
		{"good", leaves(8*s, 30*s), "", "", ""},
		{"the load balancer notices too late", leaves(2*s, 30*s), "", "", "initial_wait is 2s: if the host is a load balancer"},
		{"and what to type", leaves(2*s, 30*s), "", "", "SET CLUSTER SETTING server.shutdown.initial_wait = '8s'"},
		{"polled too seldom", leaves(8*s, 0), "crdbdrain_poll_interval=8s", "crdbdrain_poll_interval is 8s, the window 8s: a drain can be over before it is noticed -> crdbdrain_poll_interval=2s", ""},
		{"polled a bit seldom", leaves(8*s, 4*s), "crdbdrain_poll_interval=7s", "", "more than half of the window of 12s: little of it is left for the pool -> crdbdrain_poll_interval=3s"},
		{"the default follows the window", leaves(2*s, s), "", "", "initial_wait is 2s"},
		{"a window that is not there", leaves(8*s, 4*s), "crdbdrain_window=30s", "counts on a window of 30s (crdbdrain_window), the server leaves 12s: the pool would leave too slowly -> crdbdrain_window=12s", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := startCluster(t, crdbdraintest.Config{Settings: tt.settings})
			c.Grant("app", "admin")
			dsn := c.DSN()
			if tt.params != "" {
				dsn = with(dsn, tt.params)
			}
			r, err := Check(t.Context(), dsn)
			if err != nil {
				t.Fatal(err)
			}
			problems, advice := findings(r, levelProblem), findings(r, levelAdvice)
			if (tt.problem == "") != (len(problems) == 0) || !mention(append(problems, ""), tt.problem) || !mention(append(advice, ""), tt.advice) {
				t.Errorf("problems %q\nadvice %q\nwant %q, %q", problems, advice, tt.problem, tt.advice)
			}
		})
	}
	t.Run("read by the check, and not by the driver", func(t *testing.T) {
		t.Parallel()
		c := startCluster(t, crdbdraintest.Config{Settings: leaves(2*s, 4*s)})
		c.Grant("app", "VIEWCLUSTERSETTING")
		dsn := with(c.DSN(), "crdbdrain_poll_interval=1s", "crdbdrain_readiness="+c.ReadinessURLs())
		for window, want := range map[string]CheckVerdict{"auto": CheckLimited, "6s": CheckOK} {
			r, err := Check(t.Context(), with(dsn, "crdbdrain_window="+window))
			if err != nil || r.Verdict != want {
				t.Errorf("crdbdrain_window=%s: %v, %v, want %s; %q", window, r.Verdict, err, want, findings(r, levelProblem))
			}
		}
	})
}

// The path: proxies, poolers, pods without a node.
func TestCheckThePath(t *testing.T) {
	t.Parallel()
	version := func(text string) func(crdbdraintest.Query) *crdbdraintest.Result {
		return func(q crdbdraintest.Query) *crdbdraintest.Result {
			if q.SQL != "SELECT version()" {
				return nil
			}
			return &crdbdraintest.Result{Columns: []string{"version"}, Rows: [][]any{{text}}}
		}
	}
	for _, tt := range []struct {
		name       string
		cfg        crdbdraintest.Config
		rule       string
		product    string
		hidden     bool
		states     string // the beginning
		level      string
		text       string
		statements int // that are not allowed to come
	}{
		{"a proxy that rewrites BackendKeyData", crdbdraintest.Config{Faults: crdbdraintest.Faults{PID: proxyPID}},
			"asked", "CockroachDB", false, "instances ok, readiness off, feed off, gossip ok, errors ok", levelAdvice, "puts its own values into BackendKeyData", -1},
		{"external SQL pods", crdbdraintest.Config{Virtual: true},
			"unknown", "CockroachDB", false, "instances", levelProblem, "cannot tell which node a connection is on", -1},
		{"a pooler that hides CockroachDB", crdbdraintest.Config{Handler: version("CockroachDB CCL v25.2.0 (x)"), Faults: crdbdraintest.Faults{HideVersion: true}},
			"unknown", "CockroachDB", true, "instances off, readiness off, feed off, gossip off, errors off", levelProblem, "keeps the parameter crdb_version from the driver", 0},
		{"something else", crdbdraintest.Config{Handler: version("Redshift 1.0"), Faults: crdbdraintest.Faults{HideVersion: true}},
			"unknown", "unknown", false, "instances off, readiness off, feed off, gossip off, errors off", levelProblem, "does not send crdb_version", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			tt.cfg.Settings = leaves(8*time.Second, 30*time.Second)
			c := startCluster(t, tt.cfg)
			c.Grant("app", "admin")
			r, err := Check(t.Context(), c.DSN())
			if err != nil {
				t.Fatal(err)
			}
			if r.Stamp.Rule != tt.rule || r.Server.Product != tt.product || r.Server.Hidden != tt.hidden || !strings.HasPrefix(states(r), tt.states) {
				t.Errorf("%s, %+v, %s", states(r), r.Server, r.Stamp.Rule)
			}
			if !mention(findings(r, tt.level), tt.text) {
				t.Errorf("findings %q, want one with %q", r.Findings, tt.text)
			}
			if n := c.Stats().Statements[wantInstancesSQL]; tt.statements == 0 && n > 0 {
				t.Errorf("a server that is not CockroachDB was asked for %s", wantInstancesSQL)
			}
		})
	}
}

// Every readiness endpoint is looked at by itself.
func TestCheckReadiness(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{Settings: leaves(8*time.Second, 30*time.Second)})
	c.Grant("app", "VIEWCLUSTERMETADATA")
	urls := strings.Split(c.ReadinessURLs(), ",")
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := "http://" + silent.Addr().String()
	silent.Close()
	for _, tt := range []struct {
		name, urls string
		state      string
		verdict    CheckVerdict
		text       string
	}{
		{"all", c.ReadinessURLs(), "ok", CheckOK, ""},
		{"one is missing", urls[0] + "," + urls[2], "ok", CheckLimited, "no endpoint of node 2: its drain is not noticed in time"},
		{"one does not answer", strings.Join(append(urls, nobody), ","), "ok", CheckLimited, "readiness endpoint " + nobody + " does not answer"},
		{"none answers", nobody, "failing", CheckLimited, "source readiness is configured and does not work (failing): no endpoint answers"},
		{"https where there is no TLS", strings.ReplaceAll(c.ReadinessURLs(), "http://", "https://"), "failing", CheckLimited, "no early source works"},
		{"two ways to one node", strings.Join(append(urls, strings.Replace(urls[0], "127.0.0.1", "localhost", 1)), ","), "ok", CheckOK, "4 endpoints lead to 3 nodes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r, err := Check(t.Context(), with(c.DSN(), "crdbdrain_readiness="+tt.urls))
			if err != nil {
				t.Fatal(err)
			}
			if s := r.Sources[1]; s.State != tt.state || r.Verdict != tt.verdict {
				t.Errorf("%s, %s: %+v", r.Verdict, s.State, s)
			}
			if all := append(findings(r, levelProblem), findings(r, levelAdvice)...); !mention(append(all, ""), tt.text) {
				t.Errorf("%q, want one with %q", all, tt.text)
			}
		})
	}
	r, err := Check(t.Context(), with(c.DSN(), "crdbdrain_readiness="+strings.ReplaceAll(c.ReadinessURLs(), "http://", "https://")))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range r.Sources[1].Endpoints {
		if want := "the endpoint has no TLS: http:// in place of https://"; e.Remedy != want {
			t.Errorf("%+v, want the remedy %q", e, want)
		}
	}
}

// A drain under way is reported, and is nobody's fault.
func TestCheckDuringADrain(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{Settings: leaves(time.Millisecond, 30*time.Second)})
	c.Grant("app", "admin")
	db := open(t, c.Node(2).DSN(), "crdbdrain_mode=off")
	fill(t, db.DB, 1) // holds the drain up
	go c.Node(2).Drain(t.Context())
	if err := c.Node(2).WaitStep(t.Context(), crdbdraintest.Refusing); err != nil {
		t.Fatal(err)
	}
	r, err := Check(t.Context(), with(c.DSNAll(), "crdbdrain_readiness="+c.ReadinessURLs()))
	if err != nil || r.Verdict != CheckOK {
		t.Fatalf("%v, %s: %q", err, r.Verdict, findings(r, levelProblem))
	}
	for _, s := range r.Sources[:2] {
		if !slices.Equal(s.Leaving, []int{2}) || !slices.Equal(s.Nodes, []int{1, 2, 3}) {
			t.Errorf("%s: nodes %v, leaving %v", s.Source, s.Nodes, s.Leaving)
		}
	}
	if e := r.Sources[1].Endpoints[1]; e.State != "draining" || e.Node != 2 {
		t.Errorf("endpoint %+v", e)
	}
	if !mention(findings(r, levelAdvice), "drains: the driver tries the other hosts") {
		t.Errorf("advice %q", findings(r, levelAdvice))
	}
}

const secret = "s3cret&Pa55"

// Where nothing can be connected to, the report says what to look at, and never the password.
func TestCheckFailures(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{Password: secret, Settings: leaves(8*time.Second, 30*time.Second)})
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	right := c.DSN()
	wrong := strings.Replace(right, secret, secret+"x", 1)
	if right == wrong {
		t.Fatalf("no password in %s", right)
	}
	parse := func(dsn string) string {
		u, err := url.Parse(dsn)
		if err != nil {
			t.Fatal(err)
		}
		return u.Host
	}
	report := func(name, dsn string, verdict CheckVerdict, text, remedy string) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, err := Check(t.Context(), dsn)
			if (err != nil) != (verdict == CheckFailed) || r.Verdict != verdict {
				t.Fatalf("%v, %s, want %s", err, r.Verdict, verdict)
			}
			if !mention(findings(r, levelProblem), text) || !mention(findings(r, levelProblem), "-> "+remedy) {
				t.Errorf("problems %q, want %q -> %q", findings(r, levelProblem), text, remedy)
			}
			line, jsonErr := json.Marshal(r)
			if jsonErr != nil {
				t.Fatal(jsonErr)
			}
			for _, s := range []string{secret, url.QueryEscape(secret), "s3cret"} {
				if strings.Contains(string(line), s) || err != nil && strings.Contains(err.Error(), s) {
					t.Errorf("the password is in %s, %v", line, err)
				}
			}
		})
	}
	report("a wrong password", wrong, CheckFailed, "28P01", "the user or the password is wrong")
	report("nobody listens", strings.Replace(right, parse(right), closed.Addr().String(), 1), CheckFailed, "connection refused", "nothing listens there")
	report("one of two", strings.Replace(right, parse(right), closed.Addr().String()+","+parse(right), 1), CheckLimited, closed.Addr().String()+" does not connect", "nothing listens there")
	report("no TLS there", strings.Replace(right, "sslmode=disable", "sslmode=require", 1), CheckFailed, "server refused TLS connection", "the server has no TLS: sslmode=disable")
	t.Run("a host that says nothing", func(t *testing.T) {
		t.Parallel()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		r, err := Check(ctx, strings.Replace(right, parse(right), l.Addr().String(), 1))
		if err == nil || r.Verdict != CheckFailed || !mention(findings(r, levelProblem), "no answer: check host, port and firewalls") {
			t.Errorf("%v, %+v", err, r)
		}
	})
	for _, dsn := range []string{"postgres://app:" + secret + "@host:port/db", "postgres://h/d?crdbdrain_mode=maybe&password=" + url.QueryEscape(secret)} {
		r, err := Check(t.Context(), dsn)
		if r != nil || err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: %v, %v", dsn, r, err)
		}
	}
}

// What sslmode leaves open.
func TestCheckTLS(t *testing.T) {
	t.Parallel()
	lender := httptest.NewTLSServer(http.NotFoundHandler())
	defer lender.Close()
	c := startCluster(t, crdbdraintest.Config{TLS: &tls.Config{Certificates: lender.TLS.Certificates}, Settings: leaves(8*time.Second, 30*time.Second)})
	c.Grant("app", "admin")
	root := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(root, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: lender.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	base, _, _ := strings.Cut(c.Node(1).DSN(), "sslmode=") // without the load balancer, which sends nobody on where a busy machine fails its checks
	for _, tt := range []struct{ ssl, tls, advice string }{
		{"sslmode=disable", "none", ""}, // it does not leave the machine
		{"sslmode=allow", "none", "sslmode=allow tries clear text first"},
		{"sslmode=prefer", "TLS 1.3", "sslmode=prefer (the default) falls back to clear text"},
		{"sslmode=require", "TLS 1.3", "sslmode=require encrypts and verifies nothing"},
		{"sslmode=verify-ca&sslrootcert=" + url.QueryEscape(root), "TLS 1.3", "sslmode=verify-ca does not verify the host's name"},
		{"sslmode=verify-full&sslrootcert=" + url.QueryEscape(root), "TLS 1.3", ""},
	} {
		r, err := Check(t.Context(), base+tt.ssl+"&crdbdrain_poll_timeout=20s&crdbdrain_readiness="+c.ReadinessURLs())
		if err != nil {
			t.Fatal(tt.ssl, err)
		}
		if r.Hosts[0].TLS != tt.tls {
			t.Errorf("%s: %s, want %s", tt.ssl, r.Hosts[0].TLS, tt.tls)
		}
		advice := findings(r, levelAdvice)
		if tt.advice == "" && mention(advice, "sslmode") || !mention(append(advice, ""), tt.advice) {
			t.Errorf("%s: %q, want %q", tt.ssl, advice, tt.advice)
		}
		ready := "failing" // the endpoints' certificate is verified with sslrootcert, whatever sslmode says
		if strings.Contains(tt.ssl, "sslrootcert") {
			ready = "ok"
		}
		if r.Sources[1].State != ready {
			t.Errorf("%s: readiness %+v, want %s", tt.ssl, r.Sources[1], ready)
		}
	}
	r, err := Check(t.Context(), base+"sslmode=verify-full")
	if err == nil || !mention(findings(r, levelProblem), "-> sslrootcert=FILE with the cluster's CA certificate") {
		t.Errorf("without the root: %v, %q", err, findings(r, levelProblem))
	}
}

// A feed is asked as the driver asks it.
func TestCheckTheFeed(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{Settings: leaves(8*time.Second, 30*time.Second)})
	feed := func(status int, body string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			fmt.Fprint(w, body)
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	good := `{"version":1,"cluster":"c","window_ms":9000,"nodes":[{"id":1,"state":"active"},{"id":2,"state":"draining"}]}`
	for _, tt := range []struct {
		name, url, state string
		verdict          CheckVerdict
		detail           string
	}{
		{"good", feed(200, good), "ok", CheckOK, ""},
		{"refuses", feed(401, ""), "failing", CheckLimited, "answers 401"},
		{"malformed", feed(200, "{"), "failing", CheckLimited, "malformed JSON"},
	} {
		r, err := Check(t.Context(), with(c.DSN(), "crdbdrain_feed="+tt.url))
		if err != nil {
			t.Fatal(err)
		}
		s := r.Sources[2]
		if s.State != tt.state || r.Verdict != tt.verdict || !strings.Contains(s.Detail, tt.detail) {
			t.Errorf("%s: %s, %+v", tt.name, r.Verdict, s)
		}
		if tt.state == "ok" && (!slices.Equal(s.Leaving, []int{2}) || r.Window.Origin != "feed" || r.Window.UsedMS != 9000) {
			t.Errorf("%s: %+v, %+v", tt.name, s, r.Window)
		}
	}
}

// A check of a connector leaves the connector as it was, and no statement on its connections.
func TestCheckOfAConnectorLeavesItAlone(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{Settings: leaves(8*time.Second, 30*time.Second)})
	c.Grant("app", "admin")
	db := open(t, c.DSN(), "")
	before := *db.c.cfg.pgx
	r, err := db.c.Check(t.Context())
	if err != nil || r.Verdict != CheckOK {
		t.Fatalf("%v, %+v", err, r)
	}
	if db.wd() != nil || db.c.in.Load() != nil || db.Stats().OpenConnections != 0 {
		t.Errorf("watchdog %p, instruments %p, %d connections", db.wd(), db.c.in.Load(), db.Stats().OpenConnections)
	}
	if after := db.c.cfg.pgx; after.Host != before.Host || len(after.Fallbacks) != len(before.Fallbacks) || after.RuntimeParams["application_name"] != before.RuntimeParams["application_name"] {
		t.Error("the check has changed the connector's config")
	}
	if n := c.Stats(); n.Accepts != 1 || n.Startups[0]["application_name"] != "crdbdrain-watchdog" {
		t.Errorf("%d connections, %v; want one, in the watchdog's name", n.Accepts, n.Startups)
	}
	eventually(t, "the check's connection is closed", func() bool { return c.Stats().Open == 0 })
}

// On PostgreSQL the driver is pgx, and the check says so.
func TestCheckOnPostgres(t *testing.T) {
	t.Parallel()
	db := pgtest.Shared(t).CreateDatabase(t)
	r, err := Check(t.Context(), db.DSN())
	if err != nil {
		t.Fatal(err)
	}
	if r.Verdict != CheckLimited || r.Server.Product != "PostgreSQL" || !strings.HasPrefix(r.Server.Version, "PostgreSQL ") || r.Stamp.Rule != "unknown" {
		t.Errorf("%s, %+v, %+v", r.Verdict, r.Server, r.Stamp)
	}
	if problems := findings(r, levelProblem); len(problems) != 1 || !mention(problems, "this is PostgreSQL: the driver is plain pgx here") {
		t.Errorf("problems %q", problems)
	}
	if mention(findings(r, levelAdvice), "pooler") {
		t.Errorf("a pooler where there is none: %q", findings(r, levelAdvice))
	}
	if got, want := db.Statements(), []string{sqlVersion, sqlBackendPID}; !slices.Equal(got, want) {
		t.Errorf("statements %q, want %q", got, want)
	}
	u, err := url.Parse(db.DSN())
	if err != nil {
		t.Fatal(err)
	}
	two := strings.Replace(db.DSN(), u.Host, u.Host+","+strings.Replace(u.Host, "127.0.0.1", "localhost", 1), 1)
	for dsn, want := range map[string]bool{two: true, with(two, "crdbdrain_host_order=listed"): false} {
		r, err := Check(t.Context(), dsn)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Hosts) != 2 || mention(findings(r, levelAdvice), "-> crdbdrain_host_order=listed") != want {
			t.Errorf("%d hosts, advice %q, want host_order: %t", len(r.Hosts), findings(r, levelAdvice), want)
		}
	}
}
