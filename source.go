package crdbdrain

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
)

// nodeState is what a source says of one node.
type nodeState struct {
	draining        bool
	decommissioning bool
	live            bool
	epoch           int64
}

func (s nodeState) leaving() bool { return s.draining || s.decommissioning }

// sourceState is the value of the metric crdbdrain.source.state.
type sourceState int8

const (
	sourceOK      sourceState = 1
	sourceOff     sourceState = 0
	sourceFailing sourceState = -1
	sourceDenied  sourceState = -2
)

// sourceStatus is one source's state and last answer.
type sourceStatus struct {
	state    sourceState
	nodes    map[nodeID]nodeState // the last complete answer; nil once it is too old
	asked    time.Time            // for it
	answered time.Time
	due      time.Time // not to be asked before
	failures int       // in a row

	denied map[role]time.Time // by role, when it may be asked again: the grant may have come
}

// role is what the server's answer to a question depends on.
type role struct {
	user            string
	unsafeInternals bool
}

func (c *Connector) role() role { return role{c.cfg.pgx.User, c.cfg.unsafeInternals} }

// answer is what one poll of one source came to: nodes, or an error, or off, when the server's version has no such source.
type answer struct {
	source sourceID
	role   role // that asked
	nodes  map[nodeID]nodeState
	err    error
	off    string
	asked  time.Time
	took   time.Duration
}

// question is what a poll is to ask.
type question struct {
	readiness bool
	sql       []asking // by role
	rule      uint32   // the stamp's, as far as it is known
	marks     *marks
	cfg       *config // the watchdog's
	roles     map[role]struct{}
}

// asking is the SQL sources that one connector's role is to ask; none where only the stamp's rule is in question.
type asking struct {
	by  *Connector
	due []sourceID
}

// pollResult is what it came to.
type pollResult struct {
	answers []answer
	rule    uint32
	goodbye nodeID         // the node whose goodbye the watchdog's own connection met
	before  time.Time      // when that connection had last been answered: the goodbye is of a later time
	dialled []*sideConn    // the watchdog's own connections that were opened: their nodes are back
	onNode  nodeID         // the node that the watchdog's own connection is on, unless it has just tried in vain to leave it
	window  time.Duration  // what the server's settings leave; 0 if they were not asked for or not told
	errs    map[role]error // why the watchdog has no connection of its own

	overslept bool // the process stood still meanwhile
}

// standstill is how much later than its time is over a poll ends only where the process has stood still (SIGSTOP, a frozen
// container): answers that came in time may not have been read, and those that were read are of another time.
const standstill = 250 * time.Millisecond

func overslept(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ok && time.Since(deadline) > standstill
}

// The statements of the watchdog. They are constants, select only what is used, and are sent with the simple protocol.
const (
	sqlShowNodeID = "SHOW node_id"
	// v24.3 and later; NULL means false.
	sqlInstances = "SELECT id, is_draining FROM system.sql_instances"
	// Liveness records of decommissioned nodes stay for ever with "draining" set; gossip_nodes does not have them.
	sqlGossip = "SELECT l.node_id, l.epoch, l.draining, l.membership, n.is_live" +
		" FROM crdb_internal.gossip_liveness AS l JOIN crdb_internal.gossip_nodes AS n ON n.node_id = l.node_id"
	// v25.4 and later; off by default from v26.1 on.
	sqlUnsafeInternals = "SET allow_unsafe_internals = on"
)

// sqlWindow asks for the settings that make the window, under their names of v23.2 and later, and of earlier versions.
// Where the role may not see them the answer is an error, and the window stays what it was taken to be.
var sqlWindow = [2][2]string{
	{"SHOW CLUSTER SETTING server.shutdown.initial_wait", "SHOW CLUSTER SETTING server.shutdown.connections.timeout"},
	{"SHOW CLUSTER SETTING server.shutdown.drain_wait", "SHOW CLUSTER SETTING server.shutdown.connection_wait"},
}

const (
	maxRows    = 10_000
	maxMessage = 1 << 20 // bytes in one message from the server to the watchdog
	maxBackoff = 30 * time.Second
	// A denied source is asked again after 15 to 30 minutes: the grant may have come.
	reprobeMin    = 15 * time.Minute
	reprobeSpread = 15 * time.Minute
)

// enabled returns the sources that the watchdog polls by these settings.
func (c *config) enabled() sourceSet {
	polled := c.sources & (1<<sourceInstances | 1<<sourceGossip | 1<<sourceReadiness)
	if len(c.readiness) == 0 {
		polled &^= 1 << sourceReadiness
	}
	return polled
}

// ask says what is to be asked at t, and by whom: where one role is denied a source, another that is not asks.
func (w *watchdog) ask(t time.Time) question {
	w.mu.Lock()
	defer w.mu.Unlock()
	cfg := w.cfg.Load()
	q := question{rule: w.rule.Load(), marks: w.marks.Load(), cfg: cfg, roles: make(map[role]struct{})}
	for _, m := range w.members {
		q.roles[m.role()] = struct{}{}
	}
	enabled := cfg.enabled()
	q.readiness = enabled.has(sourceReadiness) && !t.Before(w.sources[sourceReadiness].due)
	for _, id := range []sourceID{sourceInstances, sourceGossip} {
		s := &w.sources[id]
		if !enabled.has(id) || t.Before(s.due) {
			continue
		}
		if by := w.whoAsks(t, func(r role) bool { return !t.Before(s.denied[r]) }); by != nil {
			i := slices.IndexFunc(q.sql, func(a asking) bool { return a.by == by })
			if i < 0 {
				i = len(q.sql)
				q.sql = append(q.sql, asking{by: by})
			}
			q.sql[i].due = append(q.sql[i].due, id)
		}
	}
	if by := w.whoAsks(t, func(role) bool { return true }); q.rule == ruleUnknown && len(q.sql) == 0 && by != nil {
		q.sql = append(q.sql, asking{by: by})
	}
	return q
}

// whoAsks returns the first member whose role may ask, rather one that could connect lately. w.mu is held.
func (w *watchdog) whoAsks(t time.Time, may func(role) bool) (by *Connector) {
	for _, m := range w.members {
		if r := m.role(); may(r) {
			if !t.Before(w.barred[r]) {
				return m
			}
			if by == nil {
				by = m
			}
		}
	}
	return by
}

// anotherMay reports whether a member's role has yet to be asked, or may be asked again. w.mu is held.
func (w *watchdog) anotherMay(s *sourceStatus, t time.Time) bool {
	return slices.ContainsFunc(w.members, func(m *Connector) bool { return !t.Before(s.denied[m.role()]) })
}

// anotherCan reports whether a member's role may be asked that has not lately been unable to connect. w.mu is held.
func (w *watchdog) anotherCan(s *sourceStatus, t time.Time) bool {
	return slices.ContainsFunc(w.members, func(m *Connector) bool { return !t.Before(s.denied[m.role()]) && !t.Before(w.barred[m.role()]) })
}

// forgetRoles drops what is known of roles that no member has any more. w.mu is held.
func (w *watchdog) forgetRoles() {
	gone := func(r role, _ time.Time) bool {
		return !slices.ContainsFunc(w.members, func(m *Connector) bool { return m.role() == r })
	}
	maps.DeleteFunc(w.barred, gone)
	for id := range w.sources {
		maps.DeleteFunc(w.sources[id].denied, gone)
	}
}

// barFor is how long a role that could not connect comes after the others.
const barFor = time.Minute

// take takes a poll's result over. It reports whether to poll again at once.
func (w *watchdog) take(r pollResult) (again bool) {
	t := time.Now()
	var events []event
	another := false
	w.mu.Lock()
	if w.overslept = r.overslept && !w.overslept; w.overslept { // twice in a row is no standstill
		r.answers, r.errs, another = nil, nil, true
	}
	if r.rule != ruleUnknown && w.rule.CompareAndSwap(ruleUnknown, r.rule) {
		rule := r.rule
		events = append(events, func() { w.logRule(rule) })
		events = append(events, w.remark(t)...)
	}
	var failed error
	for by, err := range r.errs {
		failed = err
		if w.barred == nil {
			w.barred = make(map[role]time.Time)
		}
		w.barred[by] = t.Add(barFor)
	}
	fed := len(r.answers) == 1 && r.answers[0].source == sourceFeed // which says nothing of that connection
	if failing := failed != nil && len(r.answers) == 0; failing != w.mute && !fed && !w.overslept {
		w.mute = failing
		if failing {
			events = append(events, func() {
				w.log.Warn("crdbdrain: the watchdog cannot connect; which node a connection is on stays unknown", "error", redact(failed))
			})
		}
	}
	if r.window > 0 {
		w.learned.Store(int64(r.window))
	}
	for _, a := range r.answers {
		s := &w.sources[a.source]
		before := *s
		reason := ""
		switch denied, isDenied := denial(a.source, a.err); {
		case a.off != "":
			s.state, s.due, reason = sourceOff, t.Add(reprobeMin+rand.N(reprobeSpread)), a.off
		case isDenied:
			if s.denied == nil {
				s.denied = make(map[role]time.Time)
			}
			s.denied[a.role] = t.Add(reprobeMin + rand.N(reprobeSpread))
			if w.anotherMay(s, t) {
				another = true // and this role's denial is nobody's trouble
			} else {
				s.state, reason = sourceDenied, denied
			}
		case a.err != nil && r.errs[a.role] != nil && w.anotherCan(s, t):
			another = true // that this role cannot connect is nobody's trouble
		case a.err != nil:
			s.failures++
			interval := w.interval()
			s.state, s.due = sourceFailing, t.Add(jitter(min(interval<<min(s.failures-1, 3), max(maxBackoff, interval))))
			if w.marks.Load() != nil {
				s.due = t // while a node drains, every poll asks
			}
		default:
			s.state, s.failures, s.due = sourceOK, 0, time.Time{}
			events = append(events, w.apply(a.source, a.nodes, a.asked, t)...)
		}
		events = append(events, w.sourceEdge(before.state, s.state, a, reason))
	}
	if w.rule.Load() != ruleUnknown {
		for _, side := range r.dialled {
			events = append(events, w.cameBack(side.node, side.opened)...)
		}
	}
	m := w.marks.Load()
	again = another || r.onNode != 0 && m != nil && m.of[r.onNode] != nil // the watchdog's own connection moves first
	w.mu.Unlock()
	w.tell(events)
	if r.goodbye != 0 {
		w.note(r.goodbye, sourceErrors, notice{since: t, heard: t, before: r.before, over: true})
	}
	return again
}

// sourceEdge is the event that logs a source's change of state, once, and counts its poll.
func (w *watchdog) sourceEdge(before, after sourceState, a answer, reason string) event {
	return func() {
		w.countPoll(a)
		if before == after {
			return
		}
		switch after {
		case sourceOK:
			if before == sourceOff {
				return // it works from the start: nothing to say
			}
			w.log.Info("crdbdrain: source works again", "source", a.source.String())
		case sourceOff:
			w.log.Info("crdbdrain: source is off", "source", a.source.String(), "reason", reason)
		case sourceDenied:
			w.log.Warn("crdbdrain: source is denied; it is asked again in 15 to 30 minutes", "source", a.source.String(), "remedy", reason, "error", redact(a.err))
		case sourceFailing:
			w.log.Warn("crdbdrain: source fails", "source", a.source.String(), "error", redact(a.err))
		}
	}
}

func (w *watchdog) logRule(rule uint32) {
	switch rule {
	case ruleAsk:
		w.log.Info("crdbdrain: BackendKeyData does not tell the node here (a proxy?); each new connection is asked with SHOW node_id")
	case ruleOff:
		w.log.Warn("crdbdrain: no way to tell which node a connection is on; nothing is culled by node")
	}
}

// asker is the watchdog's own connection: it answers a statement with its rows as text. nil is NULL.
type asker interface {
	ask(ctx context.Context, sql string) ([][]*string, error)
}

// poller asks the sources. One poll at a time uses it.
type poller struct {
	w     *watchdog
	sides map[role]*sideConn // the watchdog's own connections: one, but where one role cannot ask for all

	cfg       *config // that readiness was made for
	readiness *readiness

	together    bool // both SQL sources have answered: they are asked in one round trip
	windowAsked time.Time
}

// windowAgain is how often the server's settings are asked for: somebody may change them, or grant the privilege.
const windowAgain = 30 * time.Minute

// askWindow reads the server's settings. It returns 0 where it does not get to know both.
func askWindow(ctx context.Context, side asker) time.Duration {
	for _, names := range sqlWindow {
		var sum time.Duration
		known := 0
		for _, sql := range names {
			rows, err := side.ask(ctx, sql)
			if err != nil {
				if sqlState(err) == stateInsufficientPrivs {
					return 0
				}
				break
			}
			if len(rows) != 1 || len(rows[0]) != 1 || rows[0][0] == nil {
				return 0
			}
			d, ok := parseInterval(*rows[0][0])
			if !ok {
				return 0
			}
			sum += d
			known++
		}
		if known == len(names) {
			return max(sum, minWindow) // 0s and 0s is an answer too
		}
	}
	return 0
}

// printedInterval is an interval as the server prints it: hours, minutes and seconds, "00:01:30.5".
var printedInterval = regexp.MustCompile(`^([0-9]+):([0-9]+):([0-9]+(?:\.[0-9]+)?)$`)

// parseInterval reads an interval as the server prints it or a Go duration, "4s".
func parseInterval(s string) (time.Duration, bool) {
	if part := printedInterval.FindStringSubmatch(s); part != nil {
		s = part[1] + "h" + part[2] + "m" + part[3] + "s"
	}
	d, err := time.ParseDuration(s)
	return d, err == nil && d >= 0 && d <= 24*time.Hour
}

func newPoller(w *watchdog) *poller {
	return &poller{w: w, sides: make(map[role]*sideConn)}
}

// configure follows the settings of the watchdog's members.
func (p *poller) configure(cfg *config) {
	if p.cfg != nil && slices.Equal(p.cfg.readiness, cfg.readiness) && p.cfg.enabled() == cfg.enabled() {
		return
	}
	if p.readiness != nil {
		p.readiness.close()
		p.readiness = nil
	}
	if cfg.enabled().has(sourceReadiness) {
		p.readiness = newReadiness(cfg, p.w.log)
	}
	p.cfg = cfg
}

func (p *poller) close() {
	for r := range p.sides {
		p.hangUp(r)
	}
	if p.readiness != nil {
		p.readiness.close()
	}
}

func (p *poller) hangUp(r role) {
	if side := p.sides[r]; side != nil {
		side.close()
		delete(p.sides, r)
	}
}

// poll asks everything that is due: the SQL sources on the watchdog's own connection, readiness at the same time.
func (p *poller) poll(ctx context.Context, q question) (r pollResult) {
	ctx, cancel := context.WithTimeout(ctx, q.cfg.pollTimeout)
	defer cancel()
	defer func() { r.overslept = overslept(ctx) }()
	p.configure(q.cfg)
	var ready sync.WaitGroup
	if q.readiness {
		var a answer
		ready.Go(func() {
			start := time.Now()
			nodes, err := p.readiness.poll(ctx)
			a = answer{source: sourceReadiness, nodes: nodes, err: err, asked: start, took: time.Since(start)}
		})
		defer func() {
			ready.Wait()
			r.answers = append(r.answers, a)
		}()
	}
	for key, side := range p.sides {
		if _, wanted := q.roles[key]; !wanted || q.marks != nil && q.marks.of[side.node] != nil {
			p.hangUp(key) // the last connector with this role is closed, or the connection's node drains
		}
	}
	for _, a := range q.sql {
		p.askAs(ctx, q, a, &r)
	}
	return r
}

// askAs asks what one connector's role is to ask, and adds what that came to.
func (p *poller) askAs(ctx context.Context, q question, a asking, r *pollResult) {
	key := a.by.role()
	var answers []answer
	for {
		fresh := p.sides[key] == nil
		answers = p.askSQL(ctx, q, a, r)
		side := p.sides[key]
		if side == nil || !side.pg.IsClosed() {
			break
		}
		if node := side.goodbye(); node != 0 {
			r.goodbye, r.before = node, side.answered
		}
		p.hangUp(key)
		if fresh || ctx.Err() != nil {
			break // it was not a connection that went stale between two polls
		}
	}
	r.answers = append(r.answers, answers...)
	// The connection stays as long as a SQL source is worth asking again soon.
	for _, a := range answers {
		if _, denied := denial(a.source, a.err); !denied && a.off == "" {
			if side := p.sides[key]; side != nil && (q.marks == nil || q.marks.of[side.node] == nil) {
				r.onNode = side.node
			}
			return
		}
	}
	p.hangUp(key)
}

// askSQL asks the SQL sources that are due on one connection, in one round trip where both have answered before.
func (p *poller) askSQL(ctx context.Context, q question, a asking, r *pollResult) (answers []answer) {
	start, key := time.Now(), a.by.role()
	add := func(id sourceID, nodes map[nodeID]nodeState, err error, off string) {
		answers = append(answers, answer{source: id, role: key, nodes: nodes, err: err, off: off, asked: start, took: time.Since(start)})
	}
	side := p.sides[key]
	if side == nil {
		var err error
		if side, err = dialSide(ctx, q, a.by); err != nil {
			if r.errs == nil {
				r.errs = make(map[role]error)
			}
			r.errs[key] = err
			for _, id := range a.due {
				add(id, nil, fmt.Errorf("connect: %w", err), "")
			}
			return answers
		}
		p.sides[key] = side
		r.dialled = append(r.dialled, side)
	}
	if q.rule == ruleUnknown && r.rule == ruleUnknown {
		var node nodeID
		if r.rule, node = verifyRule(ctx, side, side.node); r.rule != ruleUnknown {
			side.node = node // until then what the PID tells, to be compared the next time
		}
	}
	due := a.due
	if len(due) == 2 && p.together {
		p.together = false
		start = time.Now()
		if sets, err := side.exec(ctx, sqlInstances+"; "+sqlGossip); err == nil && len(sets) == 2 {
			instances, err := readInstances(sets[0])
			add(sourceInstances, instances, err, "")
			gossip, err := readGossip(sets[1])
			add(sourceGossip, gossip, err, "")
			due = nil
		}
	}
	for _, id := range due {
		start = time.Now()
		switch {
		case id == sourceGossip:
			nodes, err := askGossip(ctx, side)
			add(id, nodes, err, "")
		case side.versionKnown && (side.major < 24 || side.major == 24 && side.minor < 3):
			add(id, nil, nil, "system.sql_instances has is_draining from v24.3 on")
		default:
			nodes, err := askInstances(ctx, side)
			add(id, nodes, err, "")
		}
	}
	good := 0
	for _, a := range answers {
		if a.err == nil && a.off == "" {
			good++
		}
	}
	p.together = good == 2
	// A role that may read a source may be allowed to see the settings; any other is not asked to fail.
	if good > 0 && q.cfg.window == 0 && time.Since(p.windowAsked) > windowAgain {
		p.windowAsked = time.Now()
		r.window = askWindow(ctx, side)
	}
	return answers
}

// verifyRule compares what the watchdog's own connection's PID tells with the server's answer.
func verifyRule(ctx context.Context, side asker, stamp nodeID) (rule uint32, node nodeID) {
	rows, err := side.ask(ctx, sqlShowNodeID)
	if err != nil {
		if state := sqlState(err); strings.HasPrefix(state, "42") || state == stateFeatureNotSupported {
			return ruleOff, 0 // the question is not known here, or not for this role
		}
		return ruleUnknown, 0 // no answer, or a passing error: ask again
	}
	if len(rows) != 1 || len(rows[0]) != 1 || rows[0][0] == nil {
		return ruleOff, 0
	}
	switch id, ok := parseNodeID(*rows[0][0]); {
	case !ok:
		return ruleOff, 0 // 0: an external SQL pod
	case id == stamp:
		return ruleHolds, id
	default:
		return ruleAsk, id
	}
}

// errEmpty is an answer that cannot be: the asking node itself is missing. Just after a node's start it happens.
var errEmpty = errors.New("an empty answer")

// askInstances reads system.sql_instances.
func askInstances(ctx context.Context, side asker) (map[nodeID]nodeState, error) {
	rows, err := side.ask(ctx, sqlInstances)
	if err != nil {
		return nil, err
	}
	return readInstances(rows)
}

func readInstances(rows [][]*string) (map[nodeID]nodeState, error) {
	return readNodes(rows, 2, func(row []*string) (nodeState, error) {
		draining, err := readBool("is_draining", row[1])
		return nodeState{draining: draining, live: !draining}, err
	})
}

// askGossip reads the gateway's view of liveness.
func askGossip(ctx context.Context, side asker) (map[nodeID]nodeState, error) {
	rows, err := side.ask(ctx, sqlGossip)
	if err != nil {
		return nil, err
	}
	return readGossip(rows)
}

func readGossip(rows [][]*string) (map[nodeID]nodeState, error) {
	return readNodes(rows, 5, func(row []*string) (s nodeState, err error) {
		if row[1] != nil {
			if s.epoch, err = strconv.ParseInt(*row[1], 10, 64); err != nil {
				return s, fmt.Errorf("column epoch has %s", quote(row[1]))
			}
		}
		if s.draining, err = readBool("draining", row[2]); err != nil {
			return s, err
		}
		if row[3] != nil {
			switch *row[3] {
			case "active":
			case "decommissioning", "decommissioned":
				s.decommissioning = true
			default:
				return s, fmt.Errorf("column membership has %s", quote(row[3]))
			}
		}
		s.live, err = readBool("is_live", row[4])
		return s, err
	})
}

// readNodes reads rows that begin with a node ID. An answer is taken whole or not at all.
func readNodes(rows [][]*string, columns int, read func([]*string) (nodeState, error)) (map[nodeID]nodeState, error) {
	if len(rows) == 0 {
		return nil, errEmpty
	}
	nodes := make(map[nodeID]nodeState, len(rows))
	for _, row := range rows {
		if len(row) != columns {
			return nil, fmt.Errorf("%d columns instead of %d", len(row), columns)
		}
		if row[0] == nil {
			return nil, errors.New("a node ID is NULL")
		}
		id, ok := parseNodeID(*row[0])
		if !ok {
			return nil, fmt.Errorf("node ID %s is not between 1 and %d", quote(row[0]), maxNodeID)
		}
		if _, twice := nodes[id]; twice {
			return nil, fmt.Errorf("node ID %d comes twice", id)
		}
		state, err := read(row)
		if err != nil {
			return nil, err
		}
		nodes[id] = state
	}
	return nodes, nil
}

func readBool(column string, s *string) (bool, error) {
	switch {
	case s == nil:
		return false, nil
	case *s == "t" || *s == "true":
		return true, nil
	case *s == "f" || *s == "false":
		return false, nil
	}
	return false, fmt.Errorf("column %s has %s", column, quote(s))
}

// quote makes a server's text fit for an error.
func quote(s *string) string {
	return strconv.Quote((*s)[:min(len(*s), 64)])
}

// sideConn is the watchdog's own connection: never from the pool, without the application's tracer, and without its hooks
// but those that it takes to connect (and OnPgError, which recognises the goodbye).
type sideConn struct {
	pg           *pgconn.PgConn
	link         *link
	node         nodeID
	opened       time.Time // when the dial began
	answered     time.Time // when it was last known that the server had not said goodbye
	versionKnown bool
	major, minor int
}

// dialSide opens the watchdog's own connection, on an unmarked node if the dial can be steered to one.
func dialSide(ctx context.Context, q question, by *Connector) (*sideConn, error) {
	var kept *sideConn
	for range maxSteer {
		side, err := dialSideOnce(ctx, q, by)
		if err != nil && kept != nil {
			return kept, nil // a connection to a marked node is better than none
		}
		if kept != nil {
			kept.close()
		}
		if err != nil {
			return nil, err
		}
		if q.marks == nil || q.marks.of[side.node] == nil {
			return side, nil
		}
		kept = side
	}
	return kept, nil
}

func dialSideOnce(ctx context.Context, q question, by *Connector) (*sideConn, error) {
	cfg := by.cfg
	cc := cfg.pgx.Copy()
	cc.Tracer = nil
	if cc.RuntimeParams == nil {
		cc.RuntimeParams = make(map[string]string)
	}
	cc.RuntimeParams["application_name"] = "crdbdrain-watchdog"
	if _, set := cc.RuntimeParams["statement_timeout"]; set { // the application's; a poll has its own bound
		cc.RuntimeParams["statement_timeout"] = strconv.FormatInt(q.cfg.pollTimeout.Milliseconds(), 10)
	}
	cc.OnNotice, cc.OnNotification, cc.ValidateConnect, cc.AfterConnect = nil, nil, nil, nil
	cc.MaxProtocolMessageBodyLen = maxMessage
	oneWay(&cc.Config, by.way.Load())
	orderHosts(&cc.Config, cfg.hostOrder, nil, nil)
	// After a failure pgx dials once more to cancel what may still be running. There is nothing to cancel here, and the
	// server may hang.
	dial, connected := cc.DialFunc, false
	cc.DialFunc = func(ctx context.Context, network, addr string) (c net.Conn, err error) {
		if connected {
			return nil, errors.New("no cancel request")
		}
		return dial(ctx, network, addr)
	}
	a := &attempt{start: time.Now()}
	a.listen(&cc.Config)
	// Through pgx's connector, for the sake of an OptionBeforeConnect that fetches a password. What the application does with
	// a connection of its own, in an OptionAfterConnect, is not for this one.
	opts := append(slices.Clone(by.stdOpts), stdlib.OptionAfterConnect(func(context.Context, *pgx.Conn) error { return nil }))
	std, err := stdlib.GetConnector(*cc, opts...).Connect(context.WithValue(ctx, attemptKey{}, a))
	connected = true
	if err != nil {
		if a.link != nil {
			_ = a.link.conn.Close()
		}
		return nil, err
	}
	pg := std.(*stdConn).Conn().PgConn() //nolint:forcetypeassert // what stdlib's connector returns
	side := &sideConn{pg: pg, link: a.link, opened: a.start, answered: a.start}
	switch q.rule {
	case ruleUnknown, ruleHolds:
		side.node = nodeFromPID(pg.PID())
	case ruleAsk:
		_, side.node = verifyRule(ctx, side, 0)
	}
	side.major, side.minor, side.versionKnown = crdbVersion(pg.ParameterStatus("crdb_version"))
	if cfg.unsafeInternals {
		// Older servers do not know the variable (42704) and do not need it; one that denies it denies the sources too.
		if _, err := side.ask(ctx, sqlUnsafeInternals); err != nil && sqlState(err) == "" {
			side.close()
			return nil, err
		}
	}
	return side, nil
}

// The ways to a server.
const (
	wayUnknown = iota // there was no connection yet
	wayClear
	wayTLS
)

// oneWay keeps of each host the way to it by which the application's connections come, with TLS or without: under
// sslmode=prefer or allow pgx would try a node that refuses both ways, once of them in clear text.
func oneWay(cc *pgconn.Config, way int32) {
	if way == wayUnknown {
		return // a feed's: the DSN decides
	}
	hosts := append([]*pgconn.FallbackConfig{{Host: cc.Host, Port: cc.Port, TLSConfig: cc.TLSConfig}}, cc.Fallbacks...)
	hosts = slices.DeleteFunc(hosts, func(h *pgconn.FallbackConfig) bool { return (h.TLSConfig != nil) != (way == wayTLS) })
	if len(hosts) == 0 {
		return
	}
	cc.Host, cc.Port, cc.TLSConfig, cc.Fallbacks = hosts[0].Host, hosts[0].Port, hosts[0].TLSConfig, hosts[1:]
}

// ask sends a statement and returns its rows.
func (s *sideConn) ask(ctx context.Context, sql string) ([][]*string, error) {
	sets, err := s.exec(ctx, sql)
	if err != nil || len(sets) == 0 {
		return nil, err
	}
	return sets[0], nil
}

// exec sends statements with the simple protocol and reads at most maxRows rows of each.
func (s *sideConn) exec(ctx context.Context, sql string) (sets [][][]*string, err error) {
	start := time.Now()
	results := s.pg.Exec(ctx, sql)
	for results.NextResult() {
		rr := results.ResultReader()
		var rows [][]*string
		for rr.NextRow() {
			if len(rows) == maxRows {
				s.abort()
				return nil, fmt.Errorf("more than %d rows", maxRows)
			}
			row := make([]*string, len(rr.Values()))
			for i, v := range rr.Values() {
				if v != nil {
					text := string(v)
					row[i] = &text
				}
			}
			rows = append(rows, row)
		}
		sets = append(sets, rows)
	}
	if err := results.Close(); err != nil {
		if s.pg.IsClosed() {
			s.abort()
		}
		return nil, err
	}
	s.answered = start
	return sets, nil
}

// goodbye returns the node on which the server ended this connection because it drains, or 0.
func (s *sideConn) goodbye() nodeID {
	if s.link != nil && s.link.words.Load() != goodbyeNone {
		return s.node
	}
	return 0
}

// abort closes the socket, so that nothing of pgx's waits for the server.
func (s *sideConn) abort() {
	if s.link != nil {
		_ = s.link.conn.Close()
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = s.pg.Close(ctx)
}

// close says Terminate and closes, within a tenth of a second.
func (s *sideConn) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_ = s.pg.Close(ctx)
}
