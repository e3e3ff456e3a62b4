package crdbdrain

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// config is what a DSN, or the pgx config given to NewConnector, says.
// Nothing changes it after newConfig has returned it.
type config struct {
	pgx             *pgx.ConnConfig // a clone, without our keys
	mode            mode
	sources         sourceSet // those configured; the server may still deny some
	auto            bool      // crdbdrain_sources is auto
	readiness       []string  // base URLs without a trailing slash, {host} expanded, no two alike
	feed            string
	feedTokenFile   string
	unsafeInternals bool

	pollInterval, pollIntervalDraining time.Duration
	pollAuto                           bool // pollInterval is the default: interval
	pollTimeout                        time.Duration
	cullStagger                        time.Duration // 0: no pacing
	window                             time.Duration // 0: ask the server
	ttl, ttlStagger                    time.Duration // ttl 0: off

	spares           int
	rerun, rebalance bool
	maxConnections   int // 0: no ceiling
	hostOrder        hostOrder
	cluster          string // crdbdrain_cluster
	key              string // which cluster this is: its name, or its hosts and routing
	otelsql          bool
	roots            *x509.CertPool // the DSN's sslrootcert, for the HTTPS of readiness; nil: the system's
	feedRoots        *x509.CertPool // the same, for that of the feed
}

type mode uint8

const (
	modeOn mode = iota
	modeObserve
	modeOff
)

type hostOrder uint8

const (
	hostOrderRandom hostOrder = iota
	hostOrderListed
)

// sourceID is something that says which nodes drain.
type sourceID uint8

const (
	sourceInstances sourceID = iota
	sourceGossip
	sourceReadiness
	sourceErrors
	sourceFeed
	sourceManual
	numSources
)

var sourceNames = [numSources]string{"instances", "gossip", "readiness", "errors", "feed", "manual"}

func (id sourceID) String() string { return sourceNames[id] }

// sourceSet is a set of sources, one bit each.
type sourceSet uint8

func (s sourceSet) has(id sourceID) bool { return s>>id&1 == 1 }

// configError is all that leaves this file when a config is refused: a text, never a struct or a
// wrapped error that still holds the connection string.
type configError string

func (e configError) Error() string { return "crdbdrain: " + string(e) }

func configErrorf(format string, args ...any) error {
	return configError(fmt.Sprintf(format, args...))
}

const (
	ownPrefix        = "crdbdrain" // whatever begins so, in any letter case, is never a server's parameter
	keyPrefix        = ownPrefix + "_"
	maxReadinessURLs = 1000
)

// configKey is a parameter of the DSN. The default is a value like any other and takes the same
// way in; where it is empty, newConfig decides.
type configKey struct {
	name, def string
	configValue
}

// configValue is a kind of value: its accepted form, for errors, and what stores it.
// Errors of set do not quote the value.
type configValue struct {
	want string
	set  func(string) error
}

func (c *config) keys() []configKey {
	return []configKey{
		{"crdbdrain_mode", "on", wordValue(&c.mode, "on", "observe", "off")},
		{"crdbdrain_sources", "auto", configValue{"auto or a comma list of " + strings.Join(sourceNames[:], ", "), c.setSources}},
		{"crdbdrain_readiness", "", configValue{"a comma list of at most 1000 base URLs, such as https://n1:8080 or https://{host}:8080", c.setReadiness}},
		{"crdbdrain_feed", "", configValue{"the URL of a drain feed, such as https://feed:8443", c.setFeed}},
		{"crdbdrain_feed_token_file", "", textValue(&c.feedTokenFile, "the path of a file", 4096, unicode.IsControl)},
		{"crdbdrain_unsafe_internals", "off", onOffValue(&c.unsafeInternals)},
		{"crdbdrain_poll_interval", "", intervalValue(&c.pollInterval)},
		{"crdbdrain_poll_interval_draining", "", intervalValue(&c.pollIntervalDraining)},
		{"crdbdrain_poll_timeout", "2s", durationValue(&c.pollTimeout, "", "1ms", "1h")},
		{"crdbdrain_cull_stagger", "500ms", durationValue(&c.cullStagger, "0", "1ms", "24h")},
		{"crdbdrain_window", "auto", durationValue(&c.window, "auto", "1ms", "24h")},
		{"crdbdrain_spares", "2", intValue(&c.spares, 1000)},
		{"crdbdrain_rerun", "on", onOffValue(&c.rerun)},
		{"crdbdrain_rebalance", "on", onOffValue(&c.rebalance)},
		{"crdbdrain_ttl", "0", durationValue(&c.ttl, "0", "1s", "8760h")},
		{"crdbdrain_ttl_stagger", "6s", durationValue(&c.ttlStagger, "", "1ms", "24h")},
		{"crdbdrain_max_connections", "0", intValue(&c.maxConnections, maxCeiling)},
		{"crdbdrain_host_order", "", wordValue(&c.hostOrder, "random", "listed")},
		{"crdbdrain_cluster", "", textValue(&c.cluster, "a name of 1 to 128 printable characters without spaces", 128, notGraphic)},
		{"crdbdrain_otelsql", "off", onOffValue(&c.otelsql)},
	}
}

var schemeSyntax = regexp.MustCompile(`^[A-Za-z0-9+.-]*$`)

// parseConfig reads a DSN in every form that pgx reads, and in URLs of three more schemes. It is
// stricter than pgx where a piece of a password may have strayed, or where a byte could change
// what the startup message or a log line says.
func parseConfig(dsn string) (*config, error) {
	if strings.HasPrefix(dsn, "registeredConnConfig") && !strings.Contains(dsn, "=") {
		return nil, configErrorf("a config registered with stdlib.RegisterConnConfig has no DSN: pass the config itself to NewConnector")
	}
	if scheme, rest, ok := strings.Cut(dsn, "://"); ok && schemeSyntax.MatchString(scheme) {
		switch scheme {
		case "postgres", "postgresql":
		case "crdbdrain", "cockroachdb", "cockroach":
			dsn = "postgres://" + rest
		default:
			return nil, configErrorf("unknown scheme in the DSN: want postgres, postgresql, cockroachdb, cockroach, crdbdrain, or keyword/value (host=… user=…)")
		}
		netloc, _, _ := strings.Cut(afterUserinfo(rest), "?")
		if _, path, _ := strings.Cut(netloc, "/"); strings.Contains(path, "@") {
			return nil, configErrorf("database contains '@': escape @ and / in the password as %%40 and %%2F, @ in the database as %%40")
		}
	}
	cc, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, configErrorf("cannot parse the DSN: %s", parseReason(dsn, err))
	}
	return newConfig(cc)
}

// newConfig clones cc and takes our keys out of the clone's RuntimeParams.
func newConfig(cc *pgx.ConnConfig) (*config, error) {
	if !parsedByPgx(cc) {
		return nil, configErrorf("the pgx.ConnConfig must be created by pgx.ParseConfig")
	}
	c := &config{pgx: cc.Copy()}
	given, err := c.takeKeys()
	if err != nil {
		return nil, err
	}
	if err := c.checkText(); err != nil {
		return nil, err
	}
	if len(c.hosts()) == 1 {
		c.hostOrder = hostOrderListed
	}
	keys := c.keys()
	for _, k := range keys {
		v, ok := given[k.name]
		if !ok && k.def == "" {
			continue
		}
		if !ok {
			v = k.def
		}
		if err := k.set(v); err != nil {
			return nil, configErrorf("%s: want %s%v", k.name, k.want, err)
		}
	}
	if c.pollInterval == 0 {
		c.pollInterval, c.pollAuto = defaultPollInterval, true
	}
	if c.pollIntervalDraining == 0 {
		c.pollIntervalDraining = min(time.Second, c.pollInterval)
	}
	if err := c.settleSources(); err != nil {
		return nil, err
	}
	c.key = c.identity()
	c.roots = c.rootCAs()
	c.feedRoots = c.roots
	return c, nil
}

// rootCAs returns the certificates of the first host that has some.
func (c *config) rootCAs() *x509.CertPool {
	configs := []*tls.Config{c.pgx.TLSConfig}
	for _, f := range c.pgx.Fallbacks {
		configs = append(configs, f.TLSConfig)
	}
	for _, t := range configs {
		if t != nil && t.RootCAs != nil {
			return t.RootCAs
		}
	}
	return nil
}

// parsedByPgx reads the marks that pgx.ParseConfig leaves and without which pgx panics at the first
// dial. A pgx that has no such marks has stopped asking for them.
func parsedByPgx(cc *pgx.ConnConfig) bool {
	if cc == nil {
		return false
	}
	for _, v := range []any{cc, &cc.Config} {
		mark := reflect.ValueOf(v).Elem().FieldByName("createdByParseConfig")
		if mark.IsValid() && !mark.Bool() {
			return false
		}
	}
	return true
}

// takeKeys removes every parameter in our name, however it is spelled: PostgreSQL refuses a
// connection that comes with a parameter it does not know.
func (c *config) takeKeys() (map[string]string, error) {
	var names []string
	for _, k := range c.keys() {
		names = append(names, k.name)
	}
	given := make(map[string]string)
	for _, param := range slices.Sorted(maps.Keys(c.pgx.RuntimeParams)) {
		key := strings.NewReplacer(".", "_", "-", "_").Replace(strings.ToLower(strings.TrimSpace(param)))
		switch {
		case !strings.HasPrefix(key, ownPrefix):
			continue
		case !slices.Contains(names, key):
			return nil, configErrorf("unknown key %s%s; the keys are %s", c.shown(param), didYouMean(key, names), strings.Join(names, ", "))
		case param != key:
			return nil, configErrorf("%s must be written so: in lower case, with underscores", key)
		}
		given[key] = c.pgx.RuntimeParams[param]
		delete(c.pgx.RuntimeParams, param)
	}
	return given, nil
}

// checkText refuses bytes that could end a field of the startup message or forge a log line, and
// names that can only be the debris of a misread password.
func (c *config) checkText() error {
	for _, h := range c.hosts() {
		if strings.Contains(h.host, "@") {
			return configErrorf("host contains '@': escape @ in the password as %%40")
		}
		if hasControl(h.host) {
			return configErrorf("host contains a control byte")
		}
	}
	for name, value := range map[string]string{"user": c.pgx.User, "database": c.pgx.Database, "password": c.pgx.Password} {
		if hasControl(value) {
			return configErrorf("%s contains a control byte", name)
		}
	}
	for param, value := range c.pgx.RuntimeParams {
		if strings.ContainsAny(param, "@/? ") || hasControl(param) {
			return configErrorf("a parameter's name contains '@', '/', '?', a space or a control byte; a URL begins with postgres://")
		}
		if hasControl(value) {
			if param != "application_name" && param != "options" { // it may be a piece of a keyword/value DSN's unquoted password
				param = "a parameter's value"
			}
			return configErrorf("%s contains a control byte", param)
		}
	}
	return nil
}

func hasControl(s string) bool { return strings.ContainsFunc(s, unicode.IsControl) }

// settleSources holds the sources against what they need.
func (c *config) settleSources() error {
	for _, s := range []struct {
		id  sourceID
		set bool
	}{{sourceReadiness, c.readiness != nil}, {sourceFeed, c.feed != ""}} {
		switch {
		case c.auto && s.set:
			c.sources |= 1 << s.id
		case s.set && !c.sources.has(s.id):
			return configErrorf("crdbdrain_%s is set, but crdbdrain_sources does not name %[1]s", s.id)
		case !s.set && c.sources.has(s.id):
			return configErrorf("crdbdrain_sources names %s, but crdbdrain_%[1]s is not set", s.id)
		}
	}
	if c.feed == "" {
		if c.feedTokenFile != "" {
			return configErrorf("crdbdrain_feed_token_file is set, but crdbdrain_feed is not")
		}
		return nil
	}
	if c.auto { // the feed asks the cluster, so that this process need not
		c.sources &^= 1<<sourceInstances | 1<<sourceGossip
	}
	if u, err := url.Parse(c.feed); c.feedTokenFile != "" && err == nil && u.Scheme == "http" && !isLoopback(u.Hostname()) {
		return configErrorf("crdbdrain_feed: a token (crdbdrain_feed_token_file) needs https://, or a loopback address")
	}
	return nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// identity tells clusters apart: by name, or by hosts and what CockroachDB Cloud's proxy routes by
// (--cluster=NAME in options, or NAME.database).
func (c *config) identity() string {
	if c.cluster != "" {
		return c.cluster
	}
	var addrs []string
	for _, h := range c.hosts() {
		addrs = append(addrs, h.String())
	}
	slices.Sort(addrs)
	key := strings.Join(slices.Compact(addrs), ",")
	for word := range strings.FieldsSeq(c.pgx.RuntimeParams["options"]) {
		if name, ok := strings.CutPrefix(word, "--cluster="); ok {
			return key + " --cluster=" + name
		}
	}
	if dot := strings.LastIndexByte(c.pgx.Database, '.'); dot > 0 {
		key += " --cluster=" + c.pgx.Database[:dot]
	}
	return key
}

// hostPort is a server of the DSN; for a Unix socket, host is its directory.
type hostPort struct {
	host string
	port uint16
}

func (h hostPort) unix() bool {
	network, _ := pgconn.NetworkAddress(h.host, h.port)
	return network == "unix"
}

// String is the address to dial, in lower case where case does not matter.
func (h hostPort) String() string {
	_, addr := pgconn.NetworkAddress(h.host, h.port)
	if h.unix() {
		return addr
	}
	return strings.ToLower(addr)
}

// hosts are the servers of the DSN, in its order. With sslmode prefer or allow, pgx has each of
// them twice: with TLS and without.
func (c *config) hosts() []hostPort {
	hosts := []hostPort{{c.pgx.Host, c.pgx.Port}}
	seen := map[hostPort]bool{hosts[0]: true}
	for _, f := range c.pgx.Fallbacks {
		if h := (hostPort{f.Host, f.Port}); !seen[h] {
			seen[h] = true
			hosts = append(hosts, h)
		}
	}
	return hosts
}

// The errors of values continue "want FORM". errForm has nothing to add.
var (
	errForm = errors.New("")
	errUnit = errors.New("; a number needs a unit, such as 5s")
)

func wordValue[T ~uint8](field *T, words ...string) configValue {
	want := strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
	return configValue{want, func(v string) error {
		i := slices.Index(words, v)
		if i < 0 {
			return errors.New(didYouMean(v, words))
		}
		*field = T(i)
		return nil
	}}
}

func onOffValue(field *bool) configValue {
	return configValue{"on or off", func(v string) error {
		switch strings.ToLower(v) {
		case "true", "yes", "1":
			return errors.New("; did you mean on?")
		case "false", "no", "0":
			return errors.New("; did you mean off?")
		}
		*field = v == "on"
		if v != "on" && v != "off" {
			return errForm
		}
		return nil
	}}
}

func intValue(field *int, most int) configValue {
	return configValue{fmt.Sprintf("a whole number from 0 to %d", most), func(v string) error {
		n, err := strconv.ParseUint(v, 10, 31)
		if err != nil || int(n) > most {
			return errForm
		}
		*field = int(n)
		return nil
	}}
}

// durationValue leaves the field at zero for the word zero, if there is one.
func durationValue(field *time.Duration, zero, least, most string) configValue {
	low, _ := time.ParseDuration(least)
	high, _ := time.ParseDuration(most)
	want := "a duration from " + least + " to " + most
	if zero != "" {
		want = zero + " or " + want
	}
	return configValue{want, func(v string) error {
		d, err := time.ParseDuration(v)
		switch {
		case v == zero && v != "", zero == "0" && err == nil && d == 0:
			return nil
		case v != "" && strings.Trim(v, "+-.0123456789") == "" && d == 0 && err != nil:
			return errUnit
		case err != nil || d < low || d > high:
			return errForm
		}
		*field = d
		return nil
	}}
}

func intervalValue(field *time.Duration) configValue {
	value := durationValue(field, "", "100ms", "24h")
	value.want += ", or crdbdrain_sources=errors to poll nothing"
	return value
}

// setSources always includes errors: what the server says about itself cannot be unheard.
func (c *config) setSources(v string) error {
	if v == "auto" {
		c.auto, c.sources = true, 1<<sourceInstances|1<<sourceGossip|1<<sourceErrors|1<<sourceManual
		return nil
	}
	for name := range strings.SplitSeq(v, ",") {
		name = strings.TrimSpace(name)
		id := slices.Index(sourceNames[:], name)
		switch {
		case name == "":
			return errors.New("; an element is empty")
		case name == "auto":
			return errors.New("; auto stands alone")
		case id < 0:
			return errors.New(didYouMean(name, sourceNames[:]))
		case c.sources.has(sourceID(id)):
			return fmt.Errorf("; %s is there twice", sourceID(id))
		}
		c.sources |= 1 << id
	}
	c.sources |= 1 << sourceErrors
	return nil
}

func (c *config) setReadiness(v string) error {
	for elem := range strings.SplitSeq(v, ",") {
		for _, text := range c.expandHost(strings.TrimSpace(elem)) {
			base, err := baseURL(text)
			if err != nil {
				return err
			}
			if slices.Contains(c.readiness, base) {
				continue
			}
			if c.readiness = append(c.readiness, base); len(c.readiness) > maxReadinessURLs {
				return errors.New("; there are more")
			}
		}
	}
	if c.readiness == nil {
		return errors.New("; {host} stands for the DSN's TCP hosts, and there is none")
	}
	return nil
}

// expandHost puts each TCP host of the DSN in the place of {host}.
func (c *config) expandHost(text string) []string {
	if !strings.Contains(text, "{host}") {
		return []string{text}
	}
	var texts []string
	for _, h := range c.hosts() {
		if h.unix() {
			continue
		}
		host := h.host
		if strings.Contains(host, ":") {
			host = "[" + strings.ReplaceAll(host, "%", "%25") + "]" // RFC 6874 escapes the % of a zone
		}
		texts = append(texts, strings.ReplaceAll(text, "{host}", host))
	}
	return texts
}

// baseURL checks and normalises a URL that this process will send GET requests to.
func baseURL(text string) (string, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Opaque != "":
		return "", errors.New("; a URL is malformed")
	case u.Scheme != "http" && u.Scheme != "https":
		return "", errors.New("; a URL must begin with https:// or http://")
	case u.User != nil:
		return "", errors.New("; a URL must not hold a user name or password")
	case strings.ContainsAny(text, "?#"):
		return "", errors.New("; a URL must not have a query or a fragment")
	case u.Hostname() == "":
		return "", errors.New("; a URL must name a host")
	}
	if port := u.Port(); port != "" || strings.HasSuffix(u.Host, ":") {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", errors.New("; a URL's port must be from 1 to 65535")
		}
	}
	u.Host = strings.ToLower(u.Host)
	return strings.TrimRight(u.String(), "/"), nil
}

func (c *config) setFeed(v string) (err error) {
	c.feed, err = baseURL(v)
	return err
}

func textValue(field *string, want string, most int, odd func(rune) bool) configValue {
	return configValue{want, func(v string) error {
		if n := utf8.RuneCountInString(v); n < 1 || n > most || strings.ContainsFunc(v, odd) {
			return errForm
		}
		*field = v
		return nil
	}}
}

func notGraphic(r rune) bool { return r == ' ' || r == utf8.RuneError || !unicode.IsPrint(r) }

// didYouMean names the nearest of names, if one is near.
func didYouMean(word string, names []string) string {
	best, least := "", 3
	for _, name := range names {
		if d := editDistance(word, name); d < least {
			best, least = name, d
		}
	}
	for _, sign := range []string{"_health", "_ready"} {
		if best == "" && strings.Contains(word, sign) {
			best = "crdbdrain_readiness"
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + best + "?"
}

// editDistance counts the bytes to insert, delete or replace. What is much longer than b is only far.
func editDistance(a, b string) int {
	if len(a) > len(b)+3 {
		return len(a)
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}

// Secrets. What pgx makes of a DSN is not always what was meant: an unescaped '@', '/' or '?' in a
// password puts its rest into the host, the path or the query. So nothing of a DSN is quoted but
// what cannot be such a rest.

var nameSyntax = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)

// shown is a parameter's name, where it is safe to show.
func (c *config) shown(param string) string {
	if !nameSyntax.MatchString(param) || ambiguous(c.pgx.ConnString()) {
		return "(not shown)"
	}
	return param
}

// ambiguous tells whether dsn is a URL with an '@' that may be the one that was meant to end the password.
func ambiguous(dsn string) bool {
	scheme, rest, ok := strings.Cut(dsn, "://")
	return ok && schemeSyntax.MatchString(scheme) && strings.Contains(afterUserinfo(rest), "@")
}

// afterUserinfo cuts off the user name and password as pgx does.
func afterUserinfo(rest string) string {
	if i := strings.IndexAny(rest, "@/"); i >= 0 && rest[i] == '@' {
		return rest[i+1:]
	}
	return rest
}

// parseReason is why pgx refused dsn. Its texts are constant words, then what they quote. A quotation
// is kept where dsn was well-formed and so is what it seems to be: the name of a file, say.
func parseReason(dsn string, err error) string {
	quotedDSN := pgconn.NewParseConfigError(dsn, "", nil).Error()
	reason, ok := strings.CutPrefix(err.Error(), quotedDSN)
	if !ok {
		return "malformed"
	}
	malformed := strings.HasPrefix(reason, "failed to parse as") && strings.ContainsAny(reason, "\"'`")
	if malformed || ambiguous(dsn) || hasControl(reason) {
		reason = strings.TrimSpace(reason[:strings.IndexAny(reason+":", "(:\"'`")])
	}
	switch {
	case strings.HasPrefix(reason, "failed to parse as keyword/value"):
		reason += "; a URL begins with postgres://"
	case strings.HasPrefix(reason, "failed to parse as URL"), reason == "invalid port":
		reason += "; in a URL's password, @ : / ? # % are written %40 %3A %2F %3F %23 %25"
	}
	return reason
}
