package crdbdrain

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// noPGEnv keeps the machine's PG* variables and home directory out of what a DSN means.
func noPGEnv(tb testing.TB) {
	tb.Helper()
	for _, kv := range os.Environ() {
		if name, value, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "PG") {
			tb.Setenv(name, value) // restores it afterwards
			os.Unsetenv(name)
		}
	}
	tb.Setenv("HOME", tb.TempDir())
}

func mustParse(t testing.TB, dsn string) *config {
	t.Helper()
	c, err := parseConfig(dsn)
	if err != nil {
		t.Fatalf("parseConfig(%q): %v", dsn, err)
	}
	return c
}

// wantError checks the whole text, and that no form of the error holds more than that text.
func wantError(t *testing.T, err error, want string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error; want %q", want)
	}
	if got := err.Error(); got != "crdbdrain: "+want {
		t.Errorf("error\n got %s\nwant crdbdrain: %s", got, want)
	}
}

// withKey is a DSN with one of our keys, through the form that can carry any value.
func withKey(key, value string) string {
	return fmt.Sprintf(`host=h user=u crdbdrain_%s='%s'`, key, strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(value))
}

func TestConfigDefaults(t *testing.T) {
	noPGEnv(t)
	c := mustParse(t, "postgres://u@h:26257/d")
	if c.pgx.Host != "h" {
		t.Errorf("host %q", c.pgx.Host)
	}
	c.pgx = nil
	want := &config{
		mode: modeOn, auto: true,
		sources:      1<<sourceInstances | 1<<sourceGossip | 1<<sourceErrors | 1<<sourceManual,
		pollInterval: 5 * time.Second, pollAuto: true, pollIntervalDraining: time.Second, pollTimeout: 2 * time.Second,
		cullStagger: 500 * time.Millisecond, spares: 2, rerun: true, rebalance: true,
		ttlStagger: 6 * time.Second, hostOrder: hostOrderListed, key: "h:26257",
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("defaults\n got %+v\nwant %+v", c, want)
	}
}

func TestC01OwnKeysNeverReachTheServer(t *testing.T) {
	noPGEnv(t)
	c := mustParse(t, "postgres://u:p@h/db?crdbdrain_poll_interval=7s&crdbdrain_mode=observe&application_name=app&search_path=s")
	want := map[string]string{"application_name": "app", "search_path": "s"}
	if !reflect.DeepEqual(c.pgx.RuntimeParams, want) {
		t.Errorf("RuntimeParams = %v, want %v", c.pgx.RuntimeParams, want)
	}
	if c.pollInterval != 7*time.Second || c.mode != modeObserve {
		t.Errorf("poll interval %v, mode %v", c.pollInterval, c.mode)
	}
	for param, want := range map[string]string{
		"crdbdrain.poll_interval":  "crdbdrain_poll_interval must be written so: in lower case, with underscores",
		"crdbdrain-mode":           "crdbdrain_mode must be written so: in lower case, with underscores",
		"CrdbDrain_Mode":           "crdbdrain_mode must be written so: in lower case, with underscores",
		"CRDBDRAIN.MODE":           "crdbdrain_mode must be written so: in lower case, with underscores",
		"%20crdbdrain_mode":        "crdbdrain_mode must be written so: in lower case, with underscores",
		"crdbdrain%5Fmode%00":      "cannot parse the DSN: failed to parse as URL; in a URL's password, @ : / ? # % are written %40 %3A %2F %3F %23 %25",
		"crdbdrain_mode&mode":      `cannot parse the DSN: failed to parse as URL; in a URL's password, @ : / ? # % are written %40 %3A %2F %3F %23 %25`,
		"crdbdrain.nothing":        "unknown key crdbdrain.nothing; the keys are " + allKeys(),
		"crdbdrainmode":            "unknown key crdbdrainmode; did you mean crdbdrain_mode?; the keys are " + allKeys(),
		"crdbdrain":                "unknown key crdbdrain; the keys are " + allKeys(),
		"crdbdrain_%0Apoll_wanted": "unknown key (not shown); the keys are " + allKeys(),
	} {
		_, err := parseConfig("postgres://u:p@h/db?" + param + "=on")
		wantError(t, err, want)
	}
}

func allKeys() string {
	var names []string
	for _, k := range new(config).keys() {
		names = append(names, k.name)
	}
	return strings.Join(names, ", ")
}

func TestC02AllFormsOfADSNAreOne(t *testing.T) {
	noPGEnv(t)
	service := filepath.Join(t.TempDir(), "services")
	text := "[drain]\nhost=h1,h2\nport=26257\nuser=u\npassword=p\ndbname=d\nsslmode=disable\n" +
		"crdbdrain_poll_interval=9s\ncrdbdrain_readiness=http://{host}:8080\noptions=-c statement_timeout=5s\n"
	if err := os.WriteFile(service, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	forms := map[string]string{
		"URL":           "postgres://u:p@h1:26257,h2:26257/d?sslmode=disable&crdbdrain_poll_interval=9s&crdbdrain_readiness=http://{host}:8080&options=-c%20statement_timeout%3D5s",
		"keyword/value": `host=h1,h2 port=26257 user=u password=p dbname=d sslmode=disable crdbdrain_poll_interval=9s crdbdrain_readiness=http://{host}:8080 options='-c statement_timeout=5s'`,
		"service file":  "service=drain servicefile=" + service,
	}
	var first *config
	for form, dsn := range forms {
		c := mustParse(t, dsn)
		if c.pollInterval != 9*time.Second || len(c.readiness) != 2 {
			t.Errorf("%s: poll interval %v, readiness %v", form, c.pollInterval, c.readiness)
		}
		if c.pgx.Host != "h1" || c.pgx.User != "u" || c.pgx.Password != "p" || c.pgx.Database != "d" {
			t.Errorf("%s: %s@%s/%s", form, c.pgx.User, c.pgx.Host, c.pgx.Database)
		}
		if want := map[string]string{"options": "-c statement_timeout=5s"}; !reflect.DeepEqual(c.pgx.RuntimeParams, want) {
			t.Errorf("%s: RuntimeParams = %q", form, c.pgx.RuntimeParams)
		}
		c.pgx = nil
		if first == nil {
			first = c
		} else if !reflect.DeepEqual(c, first) {
			t.Errorf("%s\n got %+v\nwant %+v", form, c, first)
		}
	}
}

// The last of equal keys wins, as in libpq and in pgx from 5.11 on.
func TestC04LastOfDuplicateKeysWins(t *testing.T) {
	noPGEnv(t)
	for _, dsn := range []string{
		"postgres://u@h/d?crdbdrain_poll_interval=5s&crdbdrain_poll_interval=9s",
		"host=h user=u crdbdrain_poll_interval=5s crdbdrain_poll_interval=9s",
	} {
		if c := mustParse(t, dsn); c.pollInterval != 9*time.Second {
			t.Errorf("%s: %v", dsn, c.pollInterval)
		}
	}
}

func TestC05TyposGetASuggestion(t *testing.T) {
	noPGEnv(t)
	for key, suggestion := range map[string]string{
		"crdbdrain_pol_interval":     "crdbdrain_poll_interval",
		"crdbdrain_poll_intervall":   "crdbdrain_poll_interval",
		"crdbdrain_mod":              "crdbdrain_mode",
		"crdbdrain_sorces":           "crdbdrain_sources",
		"crdbdrain_health_url":       "crdbdrain_readiness",
		"crdbdrain_healthcheck":      "crdbdrain_readiness",
		"crdbdrain_ready_urls":       "crdbdrain_readiness",
		"crdbdrain_cull_stager":      "crdbdrain_cull_stagger",
		"crdbdrain_completely_wrong": "",
	} {
		_, err := parseConfig("postgres://u:hunter2@h/d?" + key + "=1")
		want := "unknown key " + key
		if suggestion != "" {
			want += "; did you mean " + suggestion + "?"
		}
		wantError(t, err, want+"; the keys are "+allKeys())
	}
}

func TestC06BadValues(t *testing.T) {
	noPGEnv(t)
	const (
		poll    = "crdbdrain_poll_interval: want a duration from 100ms to 24h, or crdbdrain_sources=errors to poll nothing"
		unit    = "; a number needs a unit, such as 5s"
		sources = "crdbdrain_sources: want auto or a comma list of instances, gossip, readiness, errors, feed, manual"
		urls    = "crdbdrain_readiness: want a comma list of at most 1000 base URLs, such as https://n1:8080 or https://{host}:8080"
		cluster = "crdbdrain_cluster: want a name of 1 to 128 printable characters without spaces"
	)
	for _, test := range []struct{ key, value, want string }{
		{"poll_interval", "5", poll + unit},
		{"poll_interval", "-5", poll + unit},
		{"poll_interval", "1.5", poll + unit},
		{"poll_interval", "0", poll},
		{"poll_interval", "0s", poll},
		{"poll_interval", "-1s", poll},
		{"poll_interval", "99ms", poll},
		{"poll_interval", "24h1ns", poll},
		{"poll_interval", "1e9h", poll},
		{"poll_interval", "9999999999h", poll},
		{"poll_interval", "", poll},
		{"poll_interval", " 5s", poll},
		{"poll_interval", "5s\n", poll},
		{"poll_interval", "5s\x01", poll},
		{"poll_interval", "true", poll},
		{"poll_interval", "5 s", poll},
		{"poll_interval_draining", "0", strings.Replace(poll, "interval", "interval_draining", 1)},
		{"poll_timeout", "0", "crdbdrain_poll_timeout: want a duration from 1ms to 1h"},
		{"poll_timeout", "61m", "crdbdrain_poll_timeout: want a duration from 1ms to 1h"},
		{"cull_stagger", "0/s", "crdbdrain_cull_stagger: want 0 or a duration from 1ms to 24h"},
		{"cull_stagger", "5", "crdbdrain_cull_stagger: want 0 or a duration from 1ms to 24h" + unit},
		{"cull_stagger", "", "crdbdrain_cull_stagger: want 0 or a duration from 1ms to 24h"},
		{"window", "0", "crdbdrain_window: want auto or a duration from 1ms to 24h"},
		{"window", "", "crdbdrain_window: want auto or a duration from 1ms to 24h"},
		{"ttl", "8761h", "crdbdrain_ttl: want 0 or a duration from 1s to 8760h"},
		{"ttl_stagger", "0", "crdbdrain_ttl_stagger: want a duration from 1ms to 24h"},
		{"spares", "-1", "crdbdrain_spares: want a whole number from 0 to 1000"},
		{"spares", "1001", "crdbdrain_spares: want a whole number from 0 to 1000"},
		{"spares", "+1", "crdbdrain_spares: want a whole number from 0 to 1000"},
		{"spares", "", "crdbdrain_spares: want a whole number from 0 to 1000"},
		{"max_connections", "99999999999999999999", "crdbdrain_max_connections: want a whole number from 0 to 1048576"},
		{"rerun", "true", "crdbdrain_rerun: want on or off; did you mean on?"},
		{"rerun", "False", "crdbdrain_rerun: want on or off; did you mean off?"},
		{"rebalance", "", "crdbdrain_rebalance: want on or off"},
		{"otelsql", "ON", "crdbdrain_otelsql: want on or off"},
		{"mode", "observer", "crdbdrain_mode: want on, observe or off; did you mean observe?"},
		{"mode", "passive", "crdbdrain_mode: want on, observe or off"},
		{"host_order", "listet", "crdbdrain_host_order: want random or listed; did you mean listed?"},
		{"sources", "", sources + "; an element is empty"},
		{"sources", "gossip,", sources + "; an element is empty"},
		{"sources", "gosip", sources + "; did you mean gossip?"},
		{"sources", "gossip, gossip", sources + "; gossip is there twice"},
		{"sources", "auto,gossip", sources + "; auto stands alone"},
		{"sources", "readiness", "crdbdrain_sources names readiness, but crdbdrain_readiness is not set"},
		{"sources", "errors,feed", "crdbdrain_sources names feed, but crdbdrain_feed is not set"},
		{"readiness", "", urls + "; a URL must begin with https:// or http://"},
		{"readiness", "http://n1:8080,", urls + "; a URL must begin with https:// or http://"},
		{"readiness", "n1:8080", urls + "; a URL is malformed"},
		{"readiness", "http://{port}:8080", urls + "; a URL is malformed"},
		{"readiness", "http://:8080", urls + "; a URL must name a host"},
		{"readiness", "http://n1:0", urls + "; a URL's port must be from 1 to 65535"},
		{"readiness", "http://n1:", urls + "; a URL's port must be from 1 to 65535"},
		{"readiness", "http://n1:65536", urls + "; a URL's port must be from 1 to 65535"},
		{"feed_token_file", "/run/token", "crdbdrain_feed_token_file is set, but crdbdrain_feed is not"},
		{"feed_token_file", "", "crdbdrain_feed_token_file: want the path of a file"},
		{"cluster", "", cluster},
		{"cluster", "a b", cluster},
		{"cluster", "a\u00a0b", cluster},
		{"cluster", "a\xff", cluster},
		{"cluster", strings.Repeat("ä", 129), cluster},
	} {
		t.Run(test.key+"="+test.value, func(t *testing.T) {
			_, err := parseConfig(withKey(test.key, test.value))
			wantError(t, err, test.want)
		})
	}
}

func TestC06GoodValues(t *testing.T) {
	noPGEnv(t)
	for _, test := range []struct {
		key, value string
		got        func(*config) any
		want       any
	}{
		{"poll_interval", "100ms", func(c *config) any { return c.pollInterval }, 100 * time.Millisecond},
		{"poll_interval", "24h", func(c *config) any { return c.pollInterval }, 24 * time.Hour},
		{"poll_interval", "250ms", func(c *config) any { return c.pollIntervalDraining }, 250 * time.Millisecond}, // never slower than in calm
		{"poll_interval", "1m", func(c *config) any { return c.pollIntervalDraining }, time.Second},
		{"poll_interval_draining", "2s", func(c *config) any { return c.pollIntervalDraining }, 2 * time.Second},
		{"poll_timeout", "1m", func(c *config) any { return c.pollTimeout }, time.Minute},
		{"cull_stagger", "0", func(c *config) any { return c.cullStagger }, time.Duration(0)},
		{"cull_stagger", "0s", func(c *config) any { return c.cullStagger }, time.Duration(0)},
		{"window", "30s", func(c *config) any { return c.window }, 30 * time.Second},
		{"window", "auto", func(c *config) any { return c.window }, time.Duration(0)},
		{"spares", "0", func(c *config) any { return c.spares }, 0},
		{"spares", "1000", func(c *config) any { return c.spares }, 1000},
		{"rerun", "off", func(c *config) any { return c.rerun }, false},
		{"rebalance", "off", func(c *config) any { return c.rebalance }, false},
		{"unsafe_internals", "on", func(c *config) any { return c.unsafeInternals }, true},
		{"otelsql", "on", func(c *config) any { return c.otelsql }, true},
		{"ttl", "0s", func(c *config) any { return c.ttl }, time.Duration(0)},
		{"max_connections", "0", func(c *config) any { return c.maxConnections }, 0},
		{"mode", "off", func(c *config) any { return c.mode }, modeOff},
		{"host_order", "random", func(c *config) any { return c.hostOrder }, hostOrderRandom}, // the word wins over one host
		{"cluster", strings.Repeat("ä", 128), func(c *config) any { return c.key }, strings.Repeat("ä", 128)},
		{"sources", "errors", func(c *config) any { return c.sources }, sourceSet(1 << sourceErrors)},
		{"sources", " gossip , manual ", func(c *config) any { return c.sources }, sourceSet(1<<sourceGossip | 1<<sourceManual | 1<<sourceErrors)},
	} {
		if got := test.got(mustParse(t, withKey(test.key, test.value))); got != test.want {
			t.Errorf("%s=%s: %v, want %v", test.key, test.value, got, test.want)
		}
	}
}

func TestC07AtInThePassword(t *testing.T) {
	noPGEnv(t)
	const (
		host = "host contains '@': escape @ in the password as %40"
		path = "database contains '@': escape @ and / in the password as %40 and %2F, @ in the database as %40"
		url  = "; in a URL's password, @ : / ? # % are written %40 %3A %2F %3F %23 %25"
		name = "a parameter's name contains '@', '/', '?', a space or a control byte; a URL begins with postgres://"
	)
	for dsn, want := range map[string]string{
		"postgres://u:hun@ter2@h/db":                      host,
		"crdbdrain://u:hun@ter2@h/db":                     host,
		"postgres://u:hun@ter2@h1,h2/db":                  host,
		"host=hun@ter2 user=u":                            host,
		"host=h,hun@ter2 user=u":                          host,
		"postgres://u:1/hunter2@h/db":                     path,
		"postgres://u:p@x/hunter2@h/db":                   path,
		"postgres://u:hun@ter2:5@h/db":                    "cannot parse the DSN: invalid port" + url,
		"postgres://u:x/hunter2@h/db":                     path,
		"postgres://u:hunter2%@h/db":                      "cannot parse the DSN: failed to parse as URL (invalid percent-encoded token in password)" + url,
		"postgres://u:p@h/db?crdbdrain_hunter2@h/db=1":    "unknown key (not shown); the keys are " + allKeys(),
		"postgres://u:1/a?crdbdrain_x=hunter2@h/db":       "unknown key (not shown); the keys are " + allKeys(),
		"postgres://u:1/a?sslrootcert=/hunter2@h/db":      "cannot parse the DSN: failed to configure TLS",
		"postgres://u:1/a?target_session_attrs=hunter2@h": "cannot parse the DSN: unknown target_session_attrs value",
		"u:hunter2@h/db?sslmode=disable":                  name,
		"postgres:/u:hunter2@h/db?sslmode=disable":        name,
		"u:hunter2@h/db":                                  "cannot parse the DSN: failed to parse as keyword/value (invalid keyword/value); a URL begins with postgres://",
	} {
		_, err := parseConfig(dsn)
		wantError(t, err, want)
	}
	c := mustParse(t, "postgres://u:hun%40ter2@h/d%40b?application_name=me@here")
	if c.pgx.Password != "hun@ter2" || c.pgx.Database != "d@b" || c.pgx.RuntimeParams["application_name"] != "me@here" {
		t.Error("an escaped @ is a character like any other")
	}
}

func TestC09HostsAndTheirKey(t *testing.T) {
	noPGEnv(t)
	for dsn, want := range map[string]string{
		"postgres://[::1]:26257,[fe80::1]:26258/d": "[::1]:26257,[fe80::1]:26258",
		"postgres://h1,h2:5433/d":                  "h1:5432,h2:5433",
		"postgres://H2:1,h1:1,h2:1/d":              "h1:1,h2:1",
		"host=/tmp port=26257":                     "/tmp/.s.PGSQL.26257",
		"host=h options='-c a=b --cluster=blue-7'": "h:5432 --cluster=blue-7",
		"host=h dbname=blue-7.defaultdb":           "h:5432 --cluster=blue-7",
		"host=h,h2 crdbdrain_cluster=blue":         "blue",
	} {
		if c := mustParse(t, dsn); c.key != want {
			t.Errorf("%s: key %q, want %q", dsn, c.key, want)
		}
	}
}

// With prefer and allow pgx dials each host with and without TLS: two attempts, one host.
func TestC16FallbacksStayAndCountOnce(t *testing.T) {
	noPGEnv(t)
	for sslmode, fallbacks := range map[string]int{"disable": 1, "allow": 3, "prefer": 3, "require": 1} {
		c := mustParse(t, "postgres://h1,h2/d?crdbdrain_readiness=http://{host}:8080&sslmode="+sslmode)
		if len(c.pgx.Fallbacks) != fallbacks || len(c.hosts()) != 2 || len(c.readiness) != 2 {
			t.Errorf("%s: %d fallbacks (want %d), hosts %v, readiness %v", sslmode, len(c.pgx.Fallbacks), fallbacks, c.hosts(), c.readiness)
		}
		if c.hostOrder != hostOrderRandom {
			t.Errorf("%s: two hosts in listed order", sslmode)
		}
		if one := mustParse(t, "postgres://h1/d?sslmode="+sslmode); one.hostOrder != hostOrderListed {
			t.Errorf("%s: one host in random order", sslmode)
		}
	}
}

func TestC11Schemes(t *testing.T) {
	noPGEnv(t)
	for _, scheme := range []string{"postgres", "postgresql", "crdbdrain", "cockroachdb", "cockroach"} {
		if c := mustParse(t, scheme+"://u:secret@h:26257/d?application_name=a"); c.pgx.Host != "h" || c.pgx.Password != "secret" {
			t.Errorf("%s: host %s", scheme, c.pgx.Host)
		}
	}
	for _, scheme := range []string{"mysql", "Postgres", "postgres+tls", ""} {
		_, err := parseConfig(scheme + "://u:secret@h:26257/d?application_name=a")
		wantError(t, err, "unknown scheme in the DSN: want postgres, postgresql, cockroachdb, cockroach, crdbdrain, or keyword/value (host=… user=…)")
	}
	mustParse(t, "host=h password=a://b") // no scheme
}

func TestC12EmptyDSN(t *testing.T) {
	noPGEnv(t)
	mustParse(t, "")
	t.Setenv("PGHOST", "h1,h2")
	t.Setenv("PGOPTIONS", "--cluster=blue")
	if c := mustParse(t, ""); c.key != "h1:5432,h2:5432 --cluster=blue" {
		t.Errorf("key %q", c.key)
	}
}

func TestC13RegisteredConfigHasNoDSN(t *testing.T) {
	_, err := parseConfig("registeredConnConfig0")
	wantError(t, err, "a config registered with stdlib.RegisterConnConfig has no DSN: pass the config itself to NewConnector")
}

func TestC14OptionsAreByteExact(t *testing.T) {
	noPGEnv(t)
	for escaped, want := range map[string]string{
		"-c%20statement_timeout%3D5s":     "-c statement_timeout=5s",
		"--cluster%3Dfoo-123":             "--cluster=foo-123",
		"%20-c%20%20a%3Db%5C%20c%20":      ` -c  a=b\ c `,
		"-ccrdbdrain_mode%3Doff%20%C3%A4": "-ccrdbdrain_mode=off ä",
	} {
		if got := mustParse(t, "postgres://h/d?options="+escaped).pgx.RuntimeParams["options"]; got != want {
			t.Errorf("options %q, want %q", got, want)
		}
	}
}

func TestC15ExecModeKeysStayPgxs(t *testing.T) {
	noPGEnv(t)
	c := mustParse(t, "postgres://h/d?default_query_exec_mode=simple_protocol&statement_cache_capacity=0")
	if c.pgx.DefaultQueryExecMode != pgx.QueryExecModeSimpleProtocol || c.pgx.StatementCacheCapacity != 0 || len(c.pgx.RuntimeParams) != 0 {
		t.Errorf("mode %v, capacity %d, parameters %v", c.pgx.DefaultQueryExecMode, c.pgx.StatementCacheCapacity, c.pgx.RuntimeParams)
	}
}

func TestC19ControlBytes(t *testing.T) {
	noPGEnv(t)
	_, err := parseConfig("postgres://h/d?application_name=x%00user%00root")
	wantError(t, err, "cannot parse the DSN: failed to parse as URL; in a URL's password, @ : / ? # % are written %40 %3A %2F %3F %23 %25")
	_, err = parseConfig("host=h application_name=x\x00user\x00root")
	wantError(t, err, "cannot parse the DSN: failed to parse as keyword/value (forbidden NUL byte in connection string); a URL begins with postgres://")
	for dsn, want := range map[string]string{
		"postgres://h/d?application_name=x%0Alevel%3DERROR": "application_name contains a control byte",
		"postgres://h/d?x%09y=1":                            "a parameter's name contains '@', '/', '?', a space or a control byte; a URL begins with postgres://",
		"postgres://u%01@h/d":                               "user contains a control byte",
		"postgres://h/d%7F":                                 "database contains a control byte",
		"postgres://u:hunter2%0D@h/d":                       "password contains a control byte",
		"postgres://h%0A/d":                                 "host contains a control byte",
		"postgres://h/d?options=-c%0Bx":                     "options contains a control byte",
	} {
		_, err := parseConfig(dsn)
		wantError(t, err, want)
	}
	for name, damage := range map[string]func(*pgx.ConnConfig){
		"application_name contains a control byte": func(cc *pgx.ConnConfig) { cc.RuntimeParams["application_name"] = "x\x00user\x00root" },
		"user contains a control byte":             func(cc *pgx.ConnConfig) { cc.User = "u\x00" },
		"host contains a control byte":             func(cc *pgx.ConnConfig) { cc.Fallbacks[0].Host = "h\x00" },
	} {
		cc, err := pgx.ParseConfig("postgres://h1,h2/d?sslmode=disable")
		if err != nil {
			t.Fatal(err)
		}
		damage(cc)
		_, err = newConfig(cc)
		wantError(t, err, name)
	}
}

func TestNewConfigClones(t *testing.T) {
	noPGEnv(t)
	cc, err := pgx.ParseConfig("postgres://u@h/d?crdbdrain_spares=3&application_name=a")
	if err != nil {
		t.Fatal(err)
	}
	c, err := newConfig(cc)
	if err != nil {
		t.Fatal(err)
	}
	if cc.RuntimeParams["crdbdrain_spares"] != "3" || c.spares != 3 {
		t.Errorf("caller's parameters %v, spares %d", cc.RuntimeParams, c.spares)
	}
	cc.RuntimeParams["application_name"] = "b"
	if c.pgx.RuntimeParams["application_name"] != "a" {
		t.Error("the caller can still change the config")
	}
}

// Pgx panics at the first dial of such a config. Should it drop its marks, parsedByPgx is to go.
func TestNewConfigNeedsParseConfig(t *testing.T) {
	noPGEnv(t)
	half, err := pgx.ParseConfig("host=h")
	if err != nil {
		t.Fatal(err)
	}
	half.Config = pgconn.Config{Host: "h"}
	for _, cc := range []*pgx.ConnConfig{nil, {}, half} {
		_, err := newConfig(cc)
		wantError(t, err, "the pgx.ConnConfig must be created by pgx.ParseConfig")
	}
}

func TestI08Readiness(t *testing.T) {
	noPGEnv(t)
	for _, test := range []struct{ hosts, value, want string }{
		{"h", "https://N1:8080/", "https://n1:8080"},
		{"h", "https://n1:8080 , http://[::1]:8080,https://n1:8080/", "https://n1:8080 http://[::1]:8080"},
		{"h", "HTTPS://lb/crdb/n1//", "https://lb/crdb/n1"},
		{"h1,h2,h1,::1,fe80::1%eth0,/tmp", "http://{host}:8080", "http://h1:8080 http://h2:8080 http://[::1]:8080 http://[fe80::1%25eth0]:8080"},
	} {
		c := mustParse(t, "host="+test.hosts+" crdbdrain_readiness='"+test.value+"'")
		if got := strings.Join(c.readiness, " "); got != test.want || !c.sources.has(sourceReadiness) {
			t.Errorf("%s: %s, want %s; sources %b", test.value, got, test.want, c.sources)
		}
	}
	const want = "crdbdrain_readiness: want a comma list of at most 1000 base URLs, such as https://n1:8080 or https://{host}:8080; "
	for value, text := range map[string]string{
		"file:///etc/passwd":                   "a URL must begin with https:// or http://",
		"gopher://n1":                          "a URL must begin with https:// or http://",
		"http:n1":                              "a URL is malformed",
		"http://u:hunter2@169.254.169.254":     "a URL must not hold a user name or password",
		"http://hunter2@n1":                    "a URL must not hold a user name or password",
		"http://n1/health?hunter2=1":           "a URL must not have a query or a fragment",
		"http://n1/#hunter2":                   "a URL must not have a query or a fragment",
		"http://n1?":                           "a URL must not have a query or a fragment",
		"http://n1:hunter2":                    "a URL is malformed",
		"http://n1,http://u:hunter2@n1/%zz":    "a URL is malformed",
		"http://{host}.hunter2.example:999999": "a URL's port must be from 1 to 65535",
	} {
		_, err := parseConfig(withKey("readiness", value))
		wantError(t, err, want+text)
	}
	_, err := parseConfig("host=/tmp crdbdrain_readiness=http://{host}:8080")
	wantError(t, err, want+"{host} stands for the DSN's TCP hosts, and there is none")
	_, err = parseConfig("host=h crdbdrain_sources=gossip crdbdrain_readiness=http://n1")
	wantError(t, err, "crdbdrain_readiness is set, but crdbdrain_sources does not name readiness")

	var many []string
	for i := range maxReadinessURLs + 1 {
		many = append(many, fmt.Sprintf("http://n%d", i))
	}
	mustParse(t, withKey("readiness", strings.Join(many[1:], ",")))
	_, err = parseConfig(withKey("readiness", strings.Join(many, ",")))
	wantError(t, err, want+"there are more")
}

// badDSNs fail for every reason we know, and hold the secrets hunter2 and ter2.
var badDSNs = []string{
	"postgres://u:hunter2@h/d?crdbdrain_pol_interval=5s",
	"postgres://u:hunter2@h/d?crdbdrain_poll_interval=5",
	"postgres://u:hunter2@h/d?crdbdrain_readiness=http://u:hunter2@n1",
	"postgres://u:hunter2@h/d?crdbdrain_feed=https://u:hunter2@n1",
	"postgres://u:hunter2@h/d?crdbdrain_feed=https://hunter2/?hunter2",
	"postgres://u:hunter2@h/d?crdbdrain_feed=http://hunter2&crdbdrain_feed_token_file=hunter2",
	"postgres://u:hunter2@h/d?crdbdrain_sources=hunter2",
	"postgres://u:hunter2@h/d?crdbdrain_mode=hunter2",
	"postgres://u:hunter2@h/d?sslmode=wrong",
	"postgres://u:hunter2@h/d?connect_timeout=x&password=hunter2",
	"postgres://u:hunter2@h/d?sslpassword=hunter2&sslmode=wrong",
	"postgres://u:hunter2@h/d?pass%77ord=hunter2&sslmode=wrong",
	"postgres://u:hunter2@h/d?password=hunter2%zz",
	"postgres://u:hunter2@h/d?sslpassword=hunter2=",
	"postgres://u:hunter2@h:x/d",
	"postgres://u:hunter2@h1,h2,h3:1,2/d?port=1,2",
	"postgres://u:hunter2@[::1/d",
	"postgres://u:hunter2@[::1]x/d",
	"postgres://u:hun@ter2@h/d",
	"postgres://u:hun@hunter2@h/d",
	"postgres://u:hunter2/@h/d",
	"postgres://u:x/hunter2@h/d",
	"postgres://u:1/hunter2@h/d",
	"postgres://u:x?hunter2/y@h/d",
	"postgres://u:1/x?hunter2@h/d",
	"postgres://u:1/x?y=hunter2@h/d&sslmode=wrong&sslcert=hunter2@h/d",
	"postgres://u:1/x?sslrootcert=hunter2@h/d",
	"postgres://u:1/x?servicefile=hunter2@h/d&service=hunter2@h",
	"postgres://u:hunter2:x@h:y/d",
	"postgres://u:hunter2",
	"postgres://u:hunter2%@h/d",
	"postgres://u%:hunter2@h/d",
	"postgres://u:hunter 2 hunter2@h/d",
	"postgres://u:hunter2\x00@h/d",
	"postgres://u:hunter2%00@h/d",
	"postgres://u:hunter2%01@h/d",
	"mysql://u:hunter2@h/d",
	"hunter2://u:p@h/d",
	"://u:hunter2@h/d",
	"postgres:/u:hunter2@h/d",
	"u:hunter2@h/d?sslmode=disable",
	"registeredConnConfig hunter2",
	"hunter2",
	"host=h password='hunter2",
	"host=h password='a b hunter2' sslmode=wrong",
	"host=h password=a hunter2 sslmode=disable",
	"host=h password=a hunter2",
	"host=h password = 'it''hunter2' x",
	"host=h password=hunter2 port=x",
	"host=h password=hunter2 sslpassword=hunter2 sslrootcert=/nonexistent/ca.crt",
	"host=h password=hunter2 service=none",
	"host=h password=hunter2 application_name='\x01hunter2'",
	"host=h password='hunter2\x01'",
	"host=hun@ter2 user=u",
	"host=h password=hunter2 default_query_exec_mode=wrong",
	"host=h password=hunter2 statement_cache_capacity=wrong",
	"host=h password=hunter2 target_session_attrs=wrong",
}

// checkSecrets looks for secrets in everything that can be printed of err or reached through it.
func checkSecrets(t *testing.T, dsn string, err error, secrets ...string) {
	t.Helper()
	var parseErr *pgconn.ParseConfigError
	if errors.As(err, &parseErr) || errors.Unwrap(err) != nil {
		t.Errorf("%q: pgx's error, which holds the DSN, can be reached", dsn)
	}
	if !strings.HasPrefix(err.Error(), "crdbdrain: ") {
		t.Errorf("%q: error %q does not say where it is from", dsn, err)
	}
	for _, format := range []string{"%s", "%v", "%+v", "%#v", "%q"} {
		text := fmt.Sprintf(format, err)
		for _, secret := range secrets {
			if strings.Contains(text, secret) {
				t.Errorf("%q: %s shows %s: %s", dsn, format, secret, text)
			}
		}
	}
}

func TestI01I02NoErrorHoldsASecret(t *testing.T) {
	noPGEnv(t)
	t.Setenv("PGSERVICEFILE", filepath.Join(t.TempDir(), "none"))
	for _, dsn := range badDSNs {
		if _, err := parseConfig(dsn); err == nil {
			t.Errorf("%q: no error", dsn)
		} else {
			checkSecrets(t, dsn, err, "hunter2", "ter2")
		}
	}
}

func TestI02ErrorsStillHelp(t *testing.T) {
	noPGEnv(t)
	t.Setenv("PGSERVICEFILE", "/nonexistent/services")
	for dsn, want := range map[string]string{
		"postgres://u:p@h/d?sslmode=verify-full&sslrootcert=/nonexistent/ca.crt": "failed to configure TLS (unable to read CA file: open /nonexistent/ca.crt: ",
		"host=h sslmode=verify-ca sslcert=/nonexistent/c sslkey=/nonexistent/k":  "failed to configure TLS (unable to read sslkey: open /nonexistent/k: ",
		"postgres://u:p@h/d?sslmode=verify_full":                                 "failed to configure TLS (sslmode is invalid)",
		"service=blue":                                                           "failed to read service (failed to read service file: /nonexistent/services)",
		"postgres://h/d?target_session_attrs=primry":                             "unknown target_session_attrs value: primry",
		"postgres://h/d?default_query_exec_mode=simple":                          `invalid default_query_exec_mode (unknown value "simple")`,
		"host=h1,h2 port=1,2,3":                                                  "could not match 3 port numbers to 2 hosts",
		"postgres://h/d?connect_timeout=5s&application_name=me":                  `invalid connect_timeout (strconv.ParseInt: parsing "5s": invalid syntax)`,
	} {
		if _, err := parseConfig(dsn); err == nil || !strings.HasPrefix(err.Error(), "crdbdrain: cannot parse the DSN: "+want) {
			t.Errorf("%s\n got %v\nwant %s", dsn, err, want)
		}
	}
}

func TestSourceNames(t *testing.T) {
	var names []string
	for id := range numSources {
		names = append(names, id.String())
	}
	if want := []string{"instances", "gossip", "readiness", "errors", "feed", "manual"}; !slices.Equal(names, want) {
		t.Errorf("sources %v, want %v", names, want)
	}
}

// stricter tells whether we may refuse what pgx accepts: '@' in a host or in the raw path, odd
// parameter names, control bytes, foreign schemes, names that begin with ours.
func stricter(dsn string, cc *pgx.ConnConfig) bool {
	texts := []string{cc.Host, cc.User, cc.Database, cc.Password}
	for _, f := range cc.Fallbacks {
		texts = append(texts, f.Host)
	}
	if slices.ContainsFunc(texts, hasControl) {
		return true
	}
	if _, rest, isURL := strings.Cut(dsn, "://"); isURL { // the raw path: a dbname in the query may be what counts to pgx
		_, path, _ := strings.Cut(rest, "/")
		if path, _, _ = strings.Cut(path, "?"); strings.Contains(path, "@") {
			return true
		}
	}
	for _, h := range append(texts[4:], cc.Host) {
		if strings.Contains(h, "@") {
			return true
		}
	}
	for param, value := range cc.RuntimeParams {
		if hasControl(param+value) || strings.ContainsAny(param, "@/? ") || strings.HasPrefix(strings.ToLower(strings.TrimSpace(param)), ownPrefix) {
			return true
		}
	}
	return false
}

func FuzzParseConfig(f *testing.F) {
	noPGEnv(f)
	for _, dsn := range badDSNs {
		f.Add(dsn)
	}
	for _, dsn := range []string{
		"", "postgres://u:p@h1,h2:5433/d?crdbdrain_mode=observe", "host=h crdbdrain_poll_interval=9s CRDBDRAIN_X=1",
		"cockroachdb://[::1]/d?crdbdrain_readiness=http://{host}:8080&crdbdrain_ttl=0&crdbdrain_window=1h",
		"postgres://h/d?options=--cluster%3Dx&crdbdrain_cull_stagger=0&crdbdrain_sources=errors,gossip",
	} {
		f.Add(dsn)
	}
	f.Fuzz(func(t *testing.T, dsn string) {
		for _, key := range []string{"file", "ssl", "service", "%"} {
			if strings.Contains(strings.ToLower(dsn), key) && !slices.Contains(badDSNs, dsn) {
				t.Skip("may name a file of the machine")
			}
		}
		c, err := parseConfig(dsn)
		cc, pgxErr := pgx.ParseConfig(dsn)
		if err != nil {
			checkSecrets(t, dsn, err)
			if pgxErr == nil && !stricter(dsn, cc) {
				t.Fatalf("pgx accepts %q, we do not: %v", dsn, err)
			}
			// A password that pgx can tell is in no error, unless it is a word of our own texts.
			if pgxErr == nil && len(cc.Password) >= 8 && strings.ContainsAny(cc.Password, "0123456789") && strings.Count(dsn, cc.Password) < 2 {
				checkSecrets(t, dsn, err, cc.Password)
			}
			return
		}
		own := slices.ContainsFunc([]string{"crdbdrain://", "cockroachdb://", "cockroach://"}, func(s string) bool { return strings.HasPrefix(dsn, s) })
		if pgxErr != nil && !own {
			t.Fatalf("pgx refuses %q, we accept it: %v", dsn, pgxErr)
		}
		for param := range c.pgx.RuntimeParams {
			if strings.HasPrefix(strings.ToLower(param), ownPrefix) {
				t.Fatalf("%q: %q would reach the server", dsn, param)
			}
		}
		for _, d := range []struct {
			got, low, high time.Duration
			zero           bool
		}{
			{c.pollInterval, 100 * time.Millisecond, 24 * time.Hour, false},
			{c.pollIntervalDraining, 100 * time.Millisecond, 24 * time.Hour, false},
			{c.pollTimeout, time.Millisecond, time.Hour, false},
			{c.cullStagger, time.Millisecond, 24 * time.Hour, true},
			{c.window, time.Millisecond, 24 * time.Hour, true},
			{c.ttl, time.Second, 365 * 24 * time.Hour, true},
			{c.ttlStagger, time.Millisecond, 24 * time.Hour, false},
		} {
			if (d.got < d.low || d.got > d.high) && !(d.zero && d.got == 0) {
				t.Fatalf("%q: a duration of %v, outside %v to %v", dsn, d.got, d.low, d.high)
			}
		}
		if c.spares > 1000 || len(c.readiness) > maxReadinessURLs || c.key == "" || !c.sources.has(sourceErrors) {
			t.Fatalf("%q: spares %d, %d readiness URLs, key %q, sources %b", dsn, c.spares, len(c.readiness), c.key, c.sources)
		}
	})
}
