package crdbdrain

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
)

// The fuzz targets of what other hands write: DSNs, a server's rows and settings, HTTP answers, token files, and the
// server's stream. Others stand beside what they test (go test -list '^Fuzz' . lists all).

// wantShort fails for an error text that is long, or has what could forge a line of a log.
func wantShort(t *testing.T, err error) {
	t.Helper()
	if text := err.Error(); len(text) > 600 || hasControl(text) {
		t.Errorf("an error of %d bytes: %q", len(text), text)
	}
}

// mayNameAFile reports whether pgx could be led to open a file of this machine.
func mayNameAFile(dsn string) bool {
	dsn = strings.ReplaceAll(strings.ToLower(dsn), "sslmode=", "")
	return slices.ContainsFunc([]string{"file", "ssl", "service", "%"}, func(key string) bool { return strings.Contains(dsn, key) })
}

// settings are a config's fields that can be compared; TLS and fallbacks are told in words.
func settings(cc *pgx.ConnConfig) map[string]any {
	all := map[string]any{}
	for _, v := range []reflect.Value{reflect.ValueOf(*cc), reflect.ValueOf(cc.Config)} {
		for f, value := range v.Fields() {
			switch f.Type.Kind() {
			case reflect.Func, reflect.Interface, reflect.Struct, reflect.Pointer, reflect.Slice:
				continue
			}
			if f.IsExported() {
				all[f.Name] = value.Interface()
			}
		}
	}
	all["TLSConfig"] = tlsWords(cc, cc.Host, cc.Port, -1)
	for i, f := range cc.Fallbacks {
		all["fallback "+strconv.Itoa(i)] = tlsWords(cc, f.Host, f.Port, i)
	}
	return all
}

func tlsWords(cc *pgx.ConnConfig, host string, port uint16, fallback int) string {
	c := cc.TLSConfig
	if fallback >= 0 {
		c = cc.Fallbacks[fallback].TLSConfig
	}
	if c == nil {
		return fmt.Sprint(host, " ", port, " in clear text")
	}
	return fmt.Sprint(host, " ", port, " ", c.ServerName, c.InsecureSkipVerify, c.MinVersion, len(c.Certificates), c.RootCAs == nil)
}

// FuzzDSNIsPgxs: a DSN with one of our keys added means to pgx what it means without.
func FuzzDSNIsPgxs(f *testing.F) {
	noPGEnv(f)
	names := (&config{}).keys()
	for _, dsn := range []string{
		"", "postgres://h1,h2?", "host=h user=u password='it\\'s' port=5", "postgres://u:p@h1:1,h2:2/d?application_name=me&target_session_attrs=any",
		"postgresql://u@[::1]/d?sslmode=require&options=-c%20a%3Db", "host=/tmp dbname=d sslmode=prefer connect_timeout=3 statement_cache_capacity=7",
	} {
		f.Add(dsn, uint8(0), "observe")
		f.Add(dsn, uint8(2), "http://n1:8080,https://{host}:1/x")
		f.Add(dsn, uint8(6), "1s ' \\ & ? # % = \x00")
	}
	f.Fuzz(func(t *testing.T, dsn string, which uint8, value string) {
		key := names[int(which)%len(names)].name
		if mayNameAFile(strings.ReplaceAll(dsn, "%", "")) || strings.Contains(strings.ToLower(dsn), ownPrefix) || strings.Contains(dsn, "#") {
			t.Skip()
		}
		cc, err := pgx.ParseConfig(dsn)
		if err != nil || readElsewhere(dsn, cc) {
			t.Skip()
		}
		with := key + "='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(value) + "' " + dsn
		if scheme, rest, _ := strings.Cut(dsn, "://"); scheme == "postgres" || scheme == "postgresql" {
			sep := "?"
			if rest = afterUserinfo(rest); strings.HasSuffix(rest, "?") {
				sep = ""
			} else if strings.Contains(rest, "?") { // one in the password begins no query
				sep = "&"
			}
			with = dsn + sep + key + "=" + percent(value)
		}
		c, err := parseConfig(with)
		plain, plainErr := parseConfig(dsn)
		ours, pgxErr := pgx.ParseConfig(with)
		if err != nil {
			checkSecrets(t, with, err)
			wantShort(t, err)
			if pgxErr != nil || ours.RuntimeParams[key] != value {
				return // where dsn ends, a parameter is not what it seems to be
			}
			if own := (&config{pgx: cc.Copy()}); plainErr == nil && own.accepts(key, value) && !mustBeTogether(key) {
				t.Errorf("%q is refused: %v; without %s it is not, and the value is good", with, err, key)
			}
			return
		}
		if plainErr != nil {
			t.Fatalf("%q is refused without %s: %v", dsn, key, plainErr)
		}
		want := settings(cc)
		for of, got := range map[string]*pgx.ConnConfig{with: c.pgx, dsn: plain.pgx} {
			if got := settings(got); !reflect.DeepEqual(got, want) {
				t.Errorf("%q:\n%v\npgx:\n%v", of, got, want)
			}
		}
	})
}

// readElsewhere reports whether the target cannot tell where in the DSN a key is to be added, or has one there already: a
// URL of a scheme that is not pgx's, a '?' in the brackets of a host, our keys percent-encoded.
func readElsewhere(dsn string, cc *pgx.ConnConfig) bool {
	for param := range cc.RuntimeParams {
		if strings.Contains(strings.ToLower(param), ownPrefix) {
			return true
		}
	}
	return strings.HasPrefix(dsn, "cockroach://") || strings.HasPrefix(dsn, "cockroachdb://") ||
		slices.ContainsFunc((&config{pgx: cc}).hosts(), func(h hostPort) bool { return strings.Contains(h.host, "?") })
}

// accepts reports whether the value is one of the key's.
func (c *config) accepts(key, value string) bool {
	keys := c.keys()
	i := slices.IndexFunc(keys, func(k configKey) bool { return k.name == key })
	return !hasControl(value) && keys[i].set(value) == nil
}

// mustBeTogether is the keys that are refused alone.
func mustBeTogether(key string) bool {
	return key == "crdbdrain_sources" || key == "crdbdrain_feed_token_file"
}

// percent escapes every byte.
func percent(s string) string {
	var b strings.Builder
	for _, c := range []byte(s) {
		fmt.Fprintf(&b, "%%%02X", c)
	}
	return b.String()
}

// FuzzDSNSecret: whatever stands around it, a password is in no error.
func FuzzDSNSecret(f *testing.F) {
	noPGEnv(f)
	f.Add(false, "", "", "sslmode=wrong")
	f.Add(false, "a@b/c?d=", "", "crdbdrain_mode=x")
	f.Add(false, "1/x?crdbdrain_", "=y", "")
	f.Add(false, "[::1]:", "\x01", "port=x")
	f.Add(true, "'", "", "port=x")
	f.Add(true, "a ", " b", "sslmode=disable")
	f.Add(true, "it''s ", "=1", "crdbdrain_spares=x")
	f.Fuzz(func(t *testing.T, keywords bool, before, after, params string) {
		const canary = "Canary4711"
		dsn := "postgres://u:" + before + canary + after + "@h/d?" + params
		if keywords {
			if strings.Contains(before, "=") || strings.Contains(strings.ToLower(before), ownPrefix) { // the canary is something else's then
				t.Skip()
			}
			dsn = "host=h password=" + before + canary + after + " " + params
		}
		if mayNameAFile(dsn) || strings.Count(dsn, canary) > 1 {
			t.Skip()
		}
		if _, err := parseConfig(dsn); err != nil {
			checkSecrets(t, dsn, err, canary)
		}
	})
}

// FuzzRows: what a source's rows say is taken whole or not at all, and in whatever order they come.
func FuzzRows(f *testing.F) {
	f.Add("1\tt\n2\tf\n3\t\\N", false)
	f.Add("1\ttrue\n1\tfalse", false)
	f.Add("0\tt\n2147483647\tf\n+4\tt\n 5\tt", false)
	f.Add("1\t4\tf\tactive\tt\n2\t\\N\tt\tdecommissioning\tf\n3\t-9\t\\N\t\\N\t\\N", true)
	f.Add("1\t1\tf\tretired\nlevel=ERROR\tt", true)
	f.Fuzz(func(t *testing.T, text string, gossip bool) {
		var rows [][]*string
		for line := range strings.SplitSeq(text, "\n") {
			var row []*string
			for v := range strings.SplitSeq(line, "\t") {
				row = append(row, &v)
				if v == `\N` {
					row[len(row)-1] = nil
				}
			}
			rows = append(rows, row)
		}
		read := readInstances
		if gossip {
			read = readGossip
		}
		nodes, err := read(rows)
		if err != nil {
			wantShort(t, err)
			if nodes != nil {
				t.Errorf("%v and %v", nodes, err)
			}
		} else if len(nodes) != len(rows) {
			t.Errorf("%d nodes of %d rows", len(nodes), len(rows))
		}
		is := func(v *string) bool { return v != nil && (*v == "t" || *v == "true") }
		for _, row := range rows {
			if err != nil {
				break
			}
			id, convErr := strconv.ParseInt(*row[0], 10, 64)
			s, there := nodes[nodeID(id)]
			if convErr != nil || id < 1 || id > maxNodeID || !there {
				t.Fatalf("row %q is taken as one of %v", *row[0], nodes)
			}
			want := nodeState{draining: is(row[1]), live: !is(row[1])}
			if gossip {
				want = nodeState{draining: is(row[2]), decommissioning: row[3] != nil && *row[3] != "active", live: is(row[4]), epoch: s.epoch}
			}
			if s != want {
				t.Errorf("node %d is %+v, want %+v", id, s, want)
			}
		}
		slices.Reverse(rows)
		if again, againErr := read(rows); (err == nil) != (againErr == nil) || !reflect.DeepEqual(nodes, again) {
			t.Errorf("backwards: %v, %v; forwards: %v, %v", again, againErr, nodes, err)
		}
	})
}

// roundTrip answers requests without a socket.
type roundTrip func(*http.Request) *http.Response

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r), nil }

func response(status int, body []byte) *http.Response {
	return &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(body))}
}

// gaugeLine is the gauge as the text format has it: labels, whose quoted values may hold anything, and the value.
var gaugeLine = regexp.MustCompile(`^node_id(\{.*\})?[ \t\r]*([0-9.eE+]+)([ \t\r].*)?$`)

// FuzzReadinessAnswers: whatever an endpoint answers, a poll takes it whole or leaves what was known.
func FuzzReadinessAnswers(f *testing.F) {
	f.Add(uint16(200), "{}", fmt.Sprintf(honestVars, 3), uint16(503), "node is shutting down")
	f.Add(uint16(503), "node is not healthy", "node_id{a=\"}\"} 4 1700000000000\nnode_id 5", uint16(302), "")
	f.Add(uint16(200), "", "node_id{} NaN\nnode_id 1e3\nnode_id 0x10\nnode_id{ 2", uint16(200), "")
	f.Fuzz(func(t *testing.T, status uint16, body, vars string, status2 uint16, body2 string) {
		target := &target{url: mustURL(t, "http://n1:8080/base")}
		healthStatus, healthBody, varsBody := status, body, vars
		target.client = &http.Client{
			Transport: roundTrip(func(r *http.Request) *http.Response {
				switch r.URL.RequestURI() {
				case "/base/health?ready=1":
					return response(int(healthStatus), []byte(healthBody))
				case "/base/_status/vars":
					return response(200, []byte(varsBody))
				}
				t.Errorf("a request for %s", r.URL)
				return response(404, nil)
			}),
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
		for range 2 {
			before := target.state
			err := target.poll(t.Context())
			excused := slices.ContainsFunc(notDraining, func(text string) bool {
				return strings.Contains(healthBody[:min(len(healthBody), maxReadinessBody)], text)
			})
			want := nodeState{live: healthStatus == 200, draining: healthStatus == 503 && !excused}
			switch {
			case healthStatus != 200 && healthStatus != 503:
				if err == nil || target.state != before {
					t.Fatalf("status %d: %v, and the state is %+v", healthStatus, err, target.state)
				}
			case err == nil && (target.state != want || target.node < 1 || target.node > maxNodeID):
				t.Fatalf("node %d, %+v; want %+v", target.node, target.state, want)
			}
			if err != nil {
				wantShort(t, err)
			}
			healthStatus, healthBody = status2, body2
		}
		// The first line that is the gauge counts, whatever follows.
		healthStatus, healthBody, varsBody = 200, "", "node_id{x=\"1\"} 77\n"+vars
		target.node, target.state = 0, nodeState{}
		if err := target.poll(t.Context()); err != nil || target.node != 77 {
			t.Errorf("node %d, %v; want 77", target.node, err)
		}
		if line, _, _ := strings.Cut(vars, "\n"); line != "" {
			id, ok := nodeIDGauge(line)
			if m := gaugeLine.FindStringSubmatch(line); ok && (m == nil || id < 1 || id > maxNodeID) {
				t.Errorf("%q is node %d", line, id)
			}
		}
	})
}

// FuzzFeedAnswer: whatever a feed answers, with whatever headers, the client takes what is within its bounds, and sends
// nothing of it back but a tag that is fit for a header.
func FuzzFeedAnswer(f *testing.F) {
	const body = `{"version":1,"cluster":"C","instance":"i","sequence":1,"age_ms":5,"window_ms":1,"nodes":[{"id":1,"state":"draining"},{"id":2,"state":"active"}],"fleet":{"clients":2,"client":1,"max_reconnects_per_second":10}}`
	f.Add(uint16(200), `"a"`, "", []byte(body), uint16(304), `"a"`)
	f.Add(uint16(503), "", "7", []byte("x"), uint16(200), "\r\nHost: elsewhere")
	f.Add(uint16(429), "", "99999999999999999999", []byte(nil), uint16(301), strings.Repeat("e", 300))
	f.Add(uint16(200), "", "-1", []byte(strings.Replace(body, `"C"`, `"another"`, 1)), uint16(200), `W/"b"`)
	f.Fuzz(func(t *testing.T, status uint16, etag, after string, body []byte, status2 uint16, etag2 string) {
		c, w := bare(t, "crdbdrain_feed=https://feed")
		client := newFeedClient(w, c.cfg)
		client.cluster = "" // it takes any
		client.client.Transport = roundTrip(func(r *http.Request) *http.Response {
			tag := r.Header.Get("If-None-Match")
			if len(tag) > maxETag || hasControl(tag) {
				t.Errorf("If-None-Match: %q", tag)
			}
			if r.URL.Host != "feed" || r.URL.Path != feedPath {
				t.Errorf("a request for %s", r.URL)
			}
			resp := response(int(status), body)
			resp.Header = http.Header{"Etag": {etag}, "Retry-After": {after}, "Location": {"https://elsewhere/"}}
			return resp
		})
		for range 2 {
			marks, known := w.marks.Load(), w.status(sourceFeed).nodes
			_, err := client.ask(t.Context())
			var wait retryAfter
			if errors.As(err, &wait) && (wait.wait < time.Second || wait.wait > time.Hour) {
				t.Errorf("Retry-After %q is %v", after, wait.wait)
			}
			if err != nil {
				wantShort(t, err)
				if w.marks.Load() != marks || !reflect.DeepEqual(w.status(sourceFeed).nodes, known) {
					t.Errorf("something is taken from an answer that fails: %v", err)
				}
			} else if _, bodyErr := parseFeed(body); bodyErr != nil || status != 200 && status != 304 {
				t.Errorf("status %d is taken: %v", status, bodyErr)
			}
			if learned := time.Duration(w.learned.Load()); learned != 0 && (learned < minWindow || learned > 24*time.Hour) {
				t.Errorf("a window of %v", learned)
			}
			if gap := w.fleetGap(); gap < 0 || gap > maxFleetGap {
				t.Errorf("a gap of %v", gap)
			}
			status, etag = status2, etag2
		}
	})
}

// FuzzFeedRequest: whatever a feed is asked, it answers with one of its statuses, never with a token, and marks nothing for
// somebody without one.
func FuzzFeedRequest(f *testing.F) {
	tokens := filepath.Join(f.TempDir(), "tokens")
	if err := os.WriteFile(tokens, []byte("hunter2\n"), 0o600); err != nil {
		f.Fatal(err)
	}
	c, w := bare(f, "crdbdrain_sources=instances,manual")
	w.answer(sourceInstances, map[nodeID]nodeState{1: {live: true}, 2: {live: true}}, nil)
	h, err := NewFeedHandler(c, FeedConfig{TokenFile: tokens, MarkTokenFile: tokens})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = h.Close() })
	eventually(f, "the feed is ready", func() bool { _, _, ok := h.fresh(); return ok })
	f.Add("GET", "/v1/drain", "wait=10s", "Bearer hunter2", `"x", W/"y"`, "id")
	f.Add("POST", "/v1/drain/2", "for=1h", "Bearer hunter2", "", "")
	f.Add("DELETE", "/v1/drain/0", "for=-1h", "Bearer hunter", "*", strings.Repeat("x", 100))
	f.Add("POST", "/v1/drain/../drain/%31", "for=1h&for=2h", "", "", "\x00")
	statuses := []int{200, 204, 304, 307, 400, 401, 403, 404, 405, 409, 503}
	f.Fuzz(func(t *testing.T, method, path, query, authorization, match, client string) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // nobody waits
		r := (&http.Request{Method: method, URL: mustURL(t, "https://feed"), Host: "feed", Body: http.NoBody, Header: http.Header{
			"Authorization": {authorization}, "If-None-Match": {match}, headerClient: {client},
		}}).WithContext(ctx)
		r.URL.Path, r.URL.RawQuery = path, query
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		if !slices.Contains(statuses, rec.Code) {
			t.Errorf("%s %s?%s: %d", method, path, query, rec.Code)
		}
		// http.ServeMux redirects to the clean form of a path, which is the client's own text.
		if rec.Code != 307 && strings.Contains(fmt.Sprint(rec.Header(), rec.Body), "hunter2") {
			t.Errorf("%s %s?%s: %d %v %s", method, path, query, rec.Code, rec.Header(), rec.Body)
		}
		allowed := h.mark.allows(authorization)
		if m := w.marks.Load(); m != nil && !allowed {
			t.Errorf("%s %s marks for %q", method, path, authorization)
		}
		w.unsay(1, 2)
		if wait, err := parseWait(query); err == nil && (wait < 0 || wait > maxFeedWait) {
			t.Errorf("wait=%q is %v", query, wait)
		}
	})
}

// FuzzTokens: every token of a file opens, nothing else does, and no error has a piece of the file.
func FuzzTokens(f *testing.F) {
	path := filepath.Join(f.TempDir(), "tokens")
	f.Add([]byte("# comment\n\nhunter2\r\nsecond \n"), "Bearer second")
	f.Add([]byte("with a space\n\xff\xfe\n\x00"), "Bearer with a space")
	f.Add([]byte("#only\n"), "bearer #only")
	f.Add([]byte("\ufefffirst\n"), "Bearer first")
	f.Add([]byte(strings.Repeat("#\n", maxTokenFile/2-1)+"hunter2\n"), "bearer hu") // cut off at the bound, "hu" would open
	f.Fuzz(func(t *testing.T, text []byte, header string) {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		file := &tokenFile{path: path}
		token, readErr := readToken(path)
		loadErr := file.load()
		if len(text) > maxTokenFile {
			if readErr == nil || loadErr == nil {
				t.Errorf("%d bytes: %v, %v", len(text), readErr, loadErr)
			}
			return
		}
		var lines []string
		for line := range strings.SplitSeq(strings.TrimPrefix(string(text), "\ufeff"), "\n") {
			lines = append(lines, strings.TrimSpace(line))
		}
		tokens := parseTokens(text)
		if (readErr == nil) != (len(tokens) > 0) || (loadErr == nil) != (len(tokens) > 0) {
			t.Fatalf("%d tokens, %v, %v", len(tokens), readErr, loadErr)
		}
		if len(tokens) == 0 {
			if want := "crdbdrain_feed_token_file: no token"; readErr.Error() != want || loadErr.Error() != "crdbdrain: "+path+" has no token" {
				t.Errorf("%v, %v", readErr, loadErr)
			}
			return
		}
		for _, tok := range tokens {
			if tok == "" || tok[0] == '#' || strings.ContainsFunc(tok, func(r rune) bool { return r < '!' || r > '~' }) || !slices.Contains(lines, tok) {
				t.Errorf("token %q", tok)
			}
		}
		for _, tok := range append(slices.Clip(tokens[:min(len(tokens), 16)]), tokens[len(tokens)-1]) { // each is compared with all
			if !file.allows("Bearer " + tok) {
				t.Errorf("%q is in the file and does not open", tok)
			}
		}
		if token != tokens[0] {
			t.Errorf("the client sends %q, want %q", token, tokens[0])
		}
		scheme, given, _ := strings.Cut(header, " ")
		if file.allows(header) && !(strings.EqualFold(scheme, "Bearer") && slices.Contains(tokens, strings.TrimSpace(given))) {
			t.Errorf("%q opens", header)
		}
	})
}

// FuzzInterval: a setting is a time within a day, or not one; what has colons is whole hours, whole minutes and seconds;
// and what a server prints is read.
func FuzzInterval(f *testing.F) {
	for _, s := range []string{"00:00:04", "00:01:30.5", "4s", "-1s", "24:00:00", "25:00:00", "1:-2:3", "1e9:0:0", "::", "1 day", "00:00:1s", "9:1:", "9:9m1:", "0::1", "0:.501:3", ".5:0:0", "0:0:.5", "0:0:1.", "24:00:00.000001", "0:0:1_0"} {
		f.Add(s, uint32(90_500))
	}
	f.Fuzz(func(t *testing.T, s string, ms uint32) {
		if d, ok := parseInterval(s); ok && (d < 0 || d > 24*time.Hour) {
			t.Errorf("%q is %v", s, d)
		} else if part := strings.Split(s, ":"); ok && len(part) > 1 {
			hours, err := strconv.ParseUint(part[0], 10, 64)
			minutes, err2 := strconv.ParseUint(part[1], 10, 64)
			seconds, err3 := strconv.ParseFloat(strings.Join(part[2:], ":"), 64)
			if err := errors.Join(err, err2, err3); err != nil || math.Abs(float64(hours)*3600+float64(minutes)*60+seconds-d.Seconds()) > 1e-6 {
				t.Errorf("%q is %v, %v", s, d, err)
			}
		}
		want := time.Duration(ms%86_400_000) * time.Millisecond
		printed := fmt.Sprintf("%02d:%02d:%02d", int(want.Hours()), int(want.Minutes())%60, int(want.Seconds())%60)
		if rest := want % time.Second; rest > 0 {
			printed += strings.TrimRight(fmt.Sprintf(".%06d", rest.Microseconds()), "0")
		}
		for _, s := range []string{printed, want.String()} {
			if d, ok := parseInterval(s); !ok || d != want {
				t.Errorf("%q is %v, %v; want %v", s, d, ok, want)
			}
		}
	})
}

// pieces is a connection from which each read gets no more than the next cut says.
type pieces struct {
	net.Conn
	b    []byte
	cuts []byte
	n    int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.b) == 0 {
		return 0, io.EOF
	}
	most := len(p.b)
	if len(p.cuts) > 0 {
		most = int(p.cuts[p.n%len(p.cuts)]) + 1
		p.n++
	}
	n := copy(b, p.b[:min(most, len(p.b))])
	p.b = p.b[n:]
	return n, nil
}

// FuzzLink: what a link makes of a conversation does not depend on how the server's bytes come in, and is what a reader of
// whole messages makes of it. Each element of script is a message, a request, or a write that fails.
func FuzzLink(f *testing.F) {
	f.Add([]byte{0, 9}, []byte{1, 0, 200})
	f.Add([]byte{20, 11, 8, 9}, []byte{5})
	f.Add([]byte{20, 5, 6, 7, 8, 9}, []byte{0})
	f.Add([]byte{20, 1, 5, 20, 9, 6}, []byte{})
	f.Add([]byte{20, 11, 9, 21, 9}, []byte{3, 3, 0})
	f.Add([]byte{7, 20, 10, 12, 8, 22, 9}, []byte{250, 4})
	messages := []pgproto3.BackendMessage{
		&pgproto3.ParseComplete{}, &pgproto3.BindComplete{}, &pgproto3.NoData{}, &pgproto3.ParameterDescription{ParameterOIDs: []uint32{25}}, oneColumn(),
		oneRow("1"), doneMessage, &pgproto3.ParameterStatus{Name: "a", Value: "b"}, readyMessage, goodbyeMessage, shutdown("FATAL"), cancelMessage,
		oneRow(string(stream(goodbyeMessage))), &pgproto3.NoticeResponse{Severity: "ERROR", Code: "57P01", Message: noticeShuttingDown},
		&pgproto3.ErrorResponse{Code: "57P01", Message: "terminating connection due to administrator command"}, &pgproto3.CopyDone{}, oneRow(strings.Repeat("E", 700)),
		&pgproto3.ErrorResponse{Code: "57P01", Message: noticeNotAcceptingClients, Detail: strings.Repeat("x", 2000)}, &pgproto3.EmptyQueryResponse{}, &pgproto3.CloseComplete{},
	}
	const request, dead, half = 20, 21, 22 // what stands behind the messages
	_, w := bare(f, "")
	f.Fuzz(func(t *testing.T, script, cuts []byte) {
		if len(script) > 64 {
			t.Skip()
		}
		in := &pieces{cuts: cuts}
		out := &failingConn{}
		l := &link{r: in, w: out, conn: in}
		l.session.Store(&session{w: w, node: &nodeInfo{}})
		words, replied, failed, wrote, unsent := uint32(goodbyeNone), false, false, false, false
		for _, at := range script {
			switch at %= byte(len(messages) + 3); at {
			case request, dead, half:
				if at == request {
					l.begin()
					replied, wrote = false, false
				}
				out.n, out.err = 1<<20, nil
				if at != request {
					out.n, out.err = int(at-dead), &net.OpError{Op: "write", Err: syscall.EPIPE}
				}
				if n, err := l.Write([]byte("Q....")); n != 5 || err != nil {
					t.Fatalf("a write: %d, %v", n, err)
				}
				wrote = wrote || at != dead
				unsent = unsent || !wrote
				continue
			}
			m := messages[at]
			in.b = stream(m)
			var got []byte
			for buf := make([]byte, 1+len(cuts)*7%97); ; {
				n, err := l.Read(buf)
				if got = append(got, buf[:n]...); err != nil {
					break
				}
			}
			if !bytes.Equal(got, stream(m)) {
				t.Fatalf("the link passes on %q of %q", got, stream(m))
			}
			switch m := m.(type) {
			case *pgproto3.ParseComplete, *pgproto3.BindComplete, *pgproto3.CloseComplete, *pgproto3.NoData, *pgproto3.ParameterDescription, *pgproto3.RowDescription:
			case *pgproto3.ReadyForQuery:
				replied, failed, wrote = false, false, false
			case *pgproto3.ErrorResponse:
				switch {
				case !isGoodbye(m.Code, m.Message):
					replied, failed = true, true
				case words != goodbyeNone:
				case failed:
					words = goodbyeErrored
				case replied:
					words = goodbyeReplied
				default:
					words = goodbyeClean
				}
			default:
				replied = true
			}
			if l.words.Load() != words || l.replied != replied || l.err != failed || l.wrote.Load() != wrote || l.unsent.Load() != unsent {
				t.Fatalf("after %v (%T): words %d, replied %v, error %v, wrote %v, unsent %v; want %d, %v, %v, %v, %v",
					script, m, l.words.Load(), l.replied, l.err, l.wrote.Load(), l.unsent.Load(), words, replied, failed, wrote, unsent)
			}
		}
	})
}

// FuzzStamp: any key data is a node ID of 31 bits or unknown, and any that CockroachDB makes is that node's.
func FuzzStamp(f *testing.F) {
	f.Add([]byte{0x80, 0, 8, 0}, uint32(2048), uint32(1))
	f.Add([]byte{0, 0x10, 0, 1}, uint32(1), uint32(1<<20-1))
	f.Fuzz(func(t *testing.T, data []byte, id, random uint32) {
		if len(data) >= 4 {
			if got := nodeFromPID(binary.BigEndian.Uint32(data)); got > maxNodeID {
				t.Errorf("%x is node %d", data, got)
			}
		}
		id = max(id%(maxNodeID+1), 1)
		pid := id<<20 | random%(1<<20)
		if id >= 2048 {
			pid = id | 1<<31
		}
		if got := nodeFromPID(pid); got != nodeID(id) {
			t.Errorf("%#x is node %d, want %d", pid, got, id)
		}
	})
}

func mustURL(t testing.TB, s string) *url.URL {
	t.Helper()
	u, err := url.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return u
}
