package crdbdrain

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// TestModelSchedules runs random schedules against what decides: the real marks, pace, sweep, spares, moves, ceiling and
// hooks, with connections that exist on paper and a model of the truth, in virtual time. What TestFuzzedSchedules does with
// whole clusters at a few schedules a second, it does some thousand times faster. The model has its own specification of
// what makes a mark (spec), of the pace, and of what each end of a connection counts as.
//
// By default it runs for about two seconds; CRDBDRAIN_MODELS=n runs n schedules, CRDBDRAIN_MODEL_SEED=seed the one of a
// failure.
func TestModelSchedules(t *testing.T) {
	var sum modelCounts
	if os.Getenv("CRDBDRAIN_MODEL_SEED") == "" {
		for _, seed := range modelSeeds {
			runModel(t, seed, &sum)
		}
	}
	took := eachSeed(t, "CRDBDRAIN_MODEL_SEED", "CRDBDRAIN_MODELS", 2*time.Second, func(seed uint64) { runModel(t, seed, &sum) })
	t.Logf("%v; %.1f s, %.0f schedules/s", &sum, took.Seconds(), float64(sum.schedules.Load())/took.Seconds())
	if sum.schedules.Load() < 1000 {
		return // too few to say anything of them all
	}
	for what, n := range map[string]*atomic.Int64{
		"culls": &sum.culled, "paced culls": &sum.paced, "losses": &sum.lost, "moves": &sum.moved, "drains": &sum.drains,
		"dials": &sum.dials, "refused places": &sum.rejected, "times at rest": &sum.rests, "would-be culls": &sum.observed,
	} {
		if n.Load() == 0 {
			t.Errorf("no %s: the test tests nothing", what)
		}
	}
	if sum.younger.Load() == 0 && sum.schedules.Load() > 20_000 { // one in three hundred schedules has one
		t.Error("no culls of younger connections: the test tests nothing")
	}
}

// modelSeeds are of schedules that failed once.
var modelSeeds = []uint64{
	2161307493826103992, 7953255237353895420, // a dial that began before the mark landed after it
	8244000850925995992,                      // a replacement in hand was swept
	6751283232953664772, 5085904496103348505, // a dead feed's share outlived a suspension
	1753745733466758896, 4904206978445553879, // a closed pool's connection was the oldest past its TTL
	7346171673584044777, // a decommissioning was over, and a drain begun, in one event
	9067148195206400616, // a pool with a shorter interval joined after the marks had been made
}

// modelCounts are what the schedules came to.
type modelCounts struct {
	schedules, events, culled, paced, younger, lost, moved, observed, drains, dials, rejected, rests atomic.Int64
}

func (c *modelCounts) String() string {
	return fmt.Sprintf("%d schedules: %d events, %d drains, %d culls (%d paced, %d of younger connections), %d would be, %d lost, %d moved, %d dials by pgx, %d places refused, %d times at rest",
		c.schedules.Load(), c.events.Load(), c.drains.Load(), c.culled.Load(), c.paced.Load(), c.younger.Load(), c.observed.Load(), c.lost.Load(),
		c.moved.Load(), c.dials.Load(), c.rejected.Load(), c.rests.Load())
}

func runModel(t *testing.T, seed uint64, sum *modelCounts) {
	defer func() {
		if r := recover(); r != nil { // a deadlock, say: of goroutines that never end
			fmt.Fprintf(os.Stderr, "CRDBDRAIN_MODEL_SEED=%d: %v\n", seed, r)
			panic(r)
		}
	}()
	synctest.Test(t, func(t *testing.T) {
		m := newModel(seed)
		m.run()
		sum.schedules.Add(1)
		sum.events.Add(int64(m.events))
		sum.culled.Add(m.sum.Culled)
		sum.lost.Add(m.sum.Lost)
		sum.moved.Add(m.sum.Moved)
		sum.observed.Add(m.sum.Observed)
		sum.paced.Add(m.paced)
		sum.younger.Add(m.younger)
		sum.drains.Add(m.drains)
		sum.dials.Add(m.dials)
		sum.rejected.Add(m.rejected)
		sum.rests.Add(m.rests)
		if len(m.failures) > 0 {
			t.Errorf("CRDBDRAIN_MODEL_SEED=%d\n%s\n%s", seed, strings.Join(m.failures, "\n"), m.story())
		}
	})
}

// modelIDs bounds the node IDs: 1 to 5 can be there, 6 and 7 are only in lies.
const modelIDs = 8

// spec says what the model holds for true of the watchdog's marks, from what was said and what happened: each source has a
// word on a node or has not, and a node is marked exactly while one has.
type spec struct {
	holds   bool          // the stamps' rule is verified
	learned time.Duration // the window that a source has told
	words   [modelIDs][numSources]word
	says    [numSources]map[nodeID]nodeState // the last complete answer; nil: none that is good
	last    [numSources]map[nodeID]nodeState // its last one; it may hold for longer by the settings of then
	at      [numSources]time.Time
	asked   [numSources]time.Time
	good    [numSources]time.Time // until when it was to hold by the settings of any moment since
	back    [modelIDs]int64       // gossip's epoch at which the node has come back, while gossip has yet to hear of it
	isBack  [modelIDs]bool
	reached [modelIDs]bool      // there was a connection to it
	known   [modelIDs]bool      // or it was marked
	used    [modelIDs]time.Time // when one was last opened or used
	drains  [modelIDs]specDrain
	marks   [modelIDs]specMark // what the words come to
	begun   [modelIDs]int32    // drains that were told
	ended   [modelIDs]int32
	fleet   *fleetShare
	turn    time.Time
	full    time.Time // when a server last had too many connections
}

type word struct {
	said                  bool
	since, before, heard  time.Time
	calm                  time.Time // when the node was last said not to drain
	leaves, over, drained bool      // leaves: decommissioning, and not draining
	epoch                 int64
}

type specDrain struct {
	on, over, leaves bool
	fresh            bool // it began with the latest event
	held             int
}

type specMark struct {
	on, leaves, over bool
	source           sourceID
	since, before    time.Time
	calm             time.Time
}

// mark is what the sources' words on a node come to.
func (sp *spec) mark(id int) (mk specMark) {
	for source := range sp.words[id] {
		n := &sp.words[id][source]
		if !n.said {
			continue
		}
		// A drain outweighs a decommissioning, whatever came first; of two alike the earlier counts.
		if !mk.on || mk.leaves && !n.leaves || mk.leaves == n.leaves && n.since.Before(mk.since) {
			mk.on, mk.leaves, mk.source, mk.since = true, n.leaves, sourceID(source), n.since
		}
		mk.before, mk.calm = maxTime(mk.before, n.before), maxTime(mk.calm, n.calm)
		mk.over = mk.over || n.over
	}
	return mk
}

// remark follows the words.
func (sp *spec) remark() {
	for id := range sp.words {
		sp.marks[id] = sp.mark(id)
	}
}

// say is the server's own word, or one that is said by hand: what was said before stays said.
func (sp *spec) say(id nodeID, source sourceID, n word) {
	n.said = true
	if old := sp.words[id][source]; old.said {
		n.since, n.over, n.before = old.since, n.over || old.over, maxTime(n.before, old.before)
	}
	sp.words[id][source] = n
}

// answer is a source's complete answer: it repeats its words or takes them back.
func (sp *spec) answer(source sourceID, nodes map[nodeID]nodeState, asked, t time.Time) {
	sp.last[source] = nodes
	said, askedThen := sp.says[source], sp.asked[source]
	sp.says[source], sp.at[source], sp.asked[source] = nodes, t, asked
	for id := range sp.words {
		state, words := nodes[nodeID(id)], &sp.words[id]
		w := &words[source]
		leaves, back := state.draining || state.decommissioning, state.live && !state.draining && !state.decommissioning
		withdrawn := w.said && !leaves
		// A node that is listed as live and not draining has restarted since it said goodbye; gossip is too late to tell, and a
		// feed tells it only where it has known of the drain, or has missed the node.
		_, listedThen := said[nodeID(id)]
		missed := source == sourceFeed && len(said) > 0 && !listedThen
		if back && (missed || words[sourceErrors].heard.Before(asked) && (source == sourceInstances || source == sourceReadiness || source == sourceFeed && withdrawn)) {
			words[sourceErrors] = word{}
		}
		if h := &words[sourceManual]; h.said && source != sourceGossip {
			h.drained = h.drained || withdrawn && !w.since.Before(h.since)
			if h.drained && back {
				*h = word{}
			}
		}
		if source == sourceGossip && sp.isBack[id] {
			if _, listed := nodes[nodeID(id)]; !listed || state.epoch > sp.back[id] {
				sp.isBack[id] = false
			}
		}
		switch {
		case withdrawn:
			*w = word{}
		case !leaves || source == sourceGossip && state.draining && sp.isBack[id]:
		case w.said && w.leaves != state.draining:
		default:
			n := word{said: true, since: t, before: t, heard: t, leaves: !state.draining, epoch: state.epoch}
			if was, known := said[nodeID(id)]; known && !was.draining && state.draining && source != sourceFeed {
				n.calm = askedThen
			}
			if w.said && n.leaves { // of the drain only the decommissioning is left
				n.since, n.before = w.since, w.before
			}
			*w = n
		}
	}
}

// land is a connection that a node has accepted, dialled at a time.
func (sp *spec) land(id nodeID, opened, t time.Time) {
	sp.reached[id], sp.known[id], sp.used[id] = true, true, t
	if !sp.holds {
		return
	}
	words := &sp.words[id]
	e, g, h := &words[sourceErrors], &words[sourceGossip], &words[sourceManual]
	state, listed := sp.says[sourceGossip][id]
	if e.said && opened.After(e.heard) {
		if e.over && listed {
			sp.back[id], sp.isBack[id] = state.epoch, true
		}
		if h.said && e.over && !e.heard.Before(h.since) {
			*h = word{}
		}
		*e = word{}
	}
	if g.said && !g.leaves && opened.After(g.heard) {
		sp.back[id], sp.isBack[id] = g.epoch, true
		*g = word{}
	}
}

// keepOf is how long an answer holds.
func (m *model) keepOf(source sourceID) time.Duration {
	if source == sourceFeed {
		return 20*time.Second + 3*m.poll
	}
	return 3 * m.poll
}

// expire is the passing of time, as the worker sees it.
func (m *model) expire(t time.Time) {
	sp := &m.spec
	if sp.fleet != nil && t.Sub(sp.at[sourceFeed]) > m.keepOf(sourceFeed) {
		sp.fleet = nil // a dead feed shares nothing out
	}
	for source := range sp.says {
		if sp.says[source] != nil && t.Sub(sp.at[source]) > m.keepOf(sourceID(source)) {
			sp.says[source] = nil
			for id := range sp.words {
				sp.words[id][source] = word{}
			}
		}
	}
	for id := range sp.words {
		if e := &sp.words[id][sourceErrors]; e.said && t.Sub(e.heard) > 20*time.Second && m.older(nodeID(id), e.before) == 0 {
			*e = word{}
		}
	}
}

// somewhere reports whether an unmarked node is listed as live, or was used within the interval.
func (m *model) somewhere(t time.Time) bool {
	sp := &m.spec
	for id := 1; id < modelIDs; id++ {
		if sp.marks[id].on {
			continue
		}
		if !sp.used[id].IsZero() && time.Since(sp.used[id]) <= m.poll {
			return true
		}
		for source, says := range sp.last {
			if state := says[nodeID(id)]; state.live && t.Before(maxTime(sp.good[source], sp.at[source].Add(m.keepOf(sourceID(source))))) &&
				(sp.known[id] || source != int(sourceInstances) && source != int(sourceFeed)) {
				return true
			}
		}
	}
	return false
}

// older counts the connections to a node that were opened before a time.
func (m *model) older(id nodeID, before time.Time) (n int) {
	if !m.spec.holds {
		return 0
	}
	for _, w := range m.open {
		if w.node == id && w.s != nil && w.s.w == m.w && w.opened.Before(before) {
			n++
		}
	}
	return n
}

// windowNow is how long a node is taken to leave connections alone.
func (m *model) windowNow() time.Duration {
	return cmp.Or(m.window, m.spec.learned, 10*time.Second)
}

// lastCall reports whether a connection that comes back at t, and goes again for as long as it was in use, would come back
// too late for the window.
func (m *model) lastCall(w *modelWire, mk *specMark, t time.Time) bool {
	begin := mk.since
	if !mk.calm.IsZero() && mk.calm.Before(begin) {
		begin = mk.calm
	}
	into, window := t.Sub(begin), m.windowNow()
	return m.spec.fleet == nil && !mk.leaves && w.s.checkedOut != 0 && into < window && into+time.Duration(now()-w.s.checkedOut) > window*9/10
}

// gap is the least time between two culls by the connections that have to leave, the time they have, and the stagger.
func (m *model) gap(t time.Time) time.Duration {
	window := m.windowNow()
	perSecond, all := 0.0, 0
	for id := 1; id < modelIDs; id++ {
		mk := &m.spec.marks[id]
		if !mk.on || mk.over || mk.leaves {
			continue
		}
		conns := 0
		for _, w := range m.open {
			if w.node == nodeID(id) && w.s != nil && w.s.w == m.w {
				conns++
			}
		}
		// They are to have left 0.6 of the window after it was noticed, or 0.8 after it cannot have begun yet.
		target := mk.since.Add(window * 6 / 10)
		if !mk.calm.IsZero() && mk.calm.Add(window*8/10).Before(target) {
			target = mk.calm.Add(window * 8 / 10)
		}
		tenth, rate := window.Seconds()/10, 0.0
		if conns > 0 || t.Before(target) {
			rate = float64(m.spec.drains[id].held) / max(target.Sub(mk.since).Seconds(), tenth)
		}
		perSecond += max(rate, float64(conns)/max(target.Sub(t).Seconds(), tenth))
		all += conns
	}
	gap := m.stagger
	if perSecond > 0 && all > 0 {
		gap = min(gap, time.Duration(1e9/perSecond))
	}
	if m.spec.fleet != nil {
		gap = max(gap, m.spec.fleet.gap)
	}
	return gap
}

// modelWire is a connection on paper as the server and the network see it.
type modelWire struct {
	m       *model
	n       int
	node    nodeID
	pool    *modelPool
	s       *session
	opened  time.Time
	in      []byte // to be read
	goodbye bool   // that is in it
	bye     bool   // the server says it at the next use
	look    peeked
	closed  atomic.Int32

	owner    modelOwner // before the event
	by       *modelConn
	observed bool // as a would-be cull
}

type modelOwner uint8

const (
	ownerNone    modelOwner = iota
	ownerPool               // database/sql has it
	ownerPending            // it waits to take a session's place
	ownerSpare
)

func (w *modelWire) Read(p []byte) (int, error) {
	if len(w.in) == 0 {
		return 0, io.EOF
	}
	if w.goodbye {
		w.goodbye = false
		w.m.hearGoodbye(w)
	}
	n := copy(p, w.in)
	w.in = w.in[n:]
	return n, nil
}

func (w *modelWire) Write(p []byte) (int, error)    { return len(p), nil }
func (w *modelWire) Close() error                   { w.closed.Add(1); return nil }
func (*modelWire) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (*modelWire) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (*modelWire) SetDeadline(time.Time) error      { return nil }
func (*modelWire) SetReadDeadline(time.Time) error  { return nil }
func (*modelWire) SetWriteDeadline(time.Time) error { return nil }

// paperRaw is a wire's descriptor.
type paperRaw struct{}

func (paperRaw) Control(look func(uintptr)) error { look(0); return nil }
func (paperRaw) Read(func(uintptr) bool) error    { return nil }
func (paperRaw) Write(func(uintptr) bool) error   { return nil }

var _ syscall.RawConn = paperRaw{}

func (w *modelWire) peeker() *peeker {
	p := &peeker{raw: paperRaw{}}
	p.look = func(uintptr) { p.result = w.look }
	return p
}

// modelConn is database/sql's entry for a connection.
type modelConn struct {
	c       *conn
	busy    bool
	claimed bool // the user has used it
	fresh   bool // no hook has been called
	rest    time.Time
}

type modelPool struct {
	n      int
	c      *Connector
	conns  []*modelConn
	closed bool
	hidden bool // a wrapper hides IsValid
	want   Stats
	spares int // before the event
}

// modelNode is the truth about a node.
type modelNode struct {
	step    modelStep
	epoch   int64
	leaves  bool // is being decommissioned
	gone    bool // for good
	flagged bool // gossip can hear that it drains
	gossip  nodeState
}

// modelStep is where a node is in its drain, in the server's order.
type modelStep uint8

const (
	stepServing   modelStep = iota
	stepAnnounced           // system.sql_instances says so
	stepUnready             // and readiness
	stepRefusing            // new connections are refused
	stepClosing             // idle connections get the notice and are closed, others when they come to rest
	stepDeadline            // the row is gone, and every session
	stepFlagged             // and gossip says so
	stepDown
)

type model struct {
	rng      *rand.Rand
	start    time.Time
	key      string
	registry watchdogs
	w        *watchdog // nil without a pool
	pools    []*modelPool
	nodes    int
	node     [modelIDs]modelNode
	balanced bool // one address for all nodes
	byPgx    bool // spares and moves are dialled by the driver
	latency  time.Duration
	fullNow  bool
	next     int
	silent   [numSources]bool // never asked
	idle     bool             // the worker has ended
	sw       sweeper
	mv       mover
	spec     spec
	log      modelLog
	logger   *slog.Logger

	// What the members' settings come to.
	poll, draining, stagger, window time.Duration

	mu     sync.Mutex
	wires  []*modelWire // guarded by mu; new ones
	facts  []fact       // guarded by mu; what the driver has met since
	open   []*modelWire
	made   int
	heard  [modelIDs]bool // of the node, in the event
	events int

	// Before the event.
	marksWere     [modelIDs]specMark
	somewhereWas  bool
	gapWas, least time.Duration
	lastCull      time.Time
	turnWas       time.Time
	began         time.Time
	fullWas       time.Time
	usedWere      int64

	sum                                            Stats
	paced, younger, drains, dials, rejected, rests int64
	failures                                       []string
	lines                                          []modelLine
}

type modelLine struct {
	at   time.Time
	what string
	a    [3]int
}

// fact is something that the driver has met on its own.
type fact struct {
	kind factKind
	at   time.Time
	w    *modelWire
	node nodeID
	word word
	dog  *watchdog
}

type factKind uint8

const (
	factGoodbye factKind = iota
	factLanded
	factRefused
	factFull
)

func (m *model) note(what string, a ...int) {
	l := modelLine{at: time.Now(), what: what}
	copy(l.a[:], a)
	m.lines = append(m.lines, l)
}

func (m *model) fail(format string, args ...any) {
	if len(m.failures) < 10 {
		m.failures = append(m.failures, fmt.Sprintf("%10.6f FAILED ", time.Since(m.start).Seconds())+fmt.Sprintf(format, args...))
	}
}

// story is the schedule's log.
func (m *model) story() string {
	var b strings.Builder
	for _, l := range m.lines {
		args := make([]any, strings.Count(l.what, "%"))
		for i := range args {
			args[i] = l.a[i]
		}
		fmt.Fprintf(&b, "%10.6f "+l.what+"\n", append([]any{l.at.Sub(m.start).Seconds()}, args...)...)
	}
	return b.String()
}

// modelLog counts the drains that are told.
type modelLog struct {
	begun, ended [modelIDs]atomic.Int32
}

func (l *modelLog) reset() {
	for id := range l.begun {
		l.begun[id].Store(0)
		l.ended[id].Store(0)
	}
}

func (*modelLog) Enabled(context.Context, slog.Level) bool { return true }
func (l *modelLog) WithAttrs([]slog.Attr) slog.Handler     { return l }
func (l *modelLog) WithGroup(string) slog.Handler          { return l }

func (l *modelLog) Handle(_ context.Context, r slog.Record) error {
	var of *[modelIDs]atomic.Int32
	switch r.Message {
	case "crdbdrain: a node is leaving":
		of = &l.begun
	case "crdbdrain: a node is no longer leaving", "crdbdrain: the last connection has left a node":
		of = &l.ended
	default:
		return nil
	}
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "node" {
			of[a.Value.Uint64()%modelIDs].Add(1)
			return false
		}
		return true
	})
	return nil
}

// modelParts are made once: parsing a DSN takes longer than a schedule.
var modelParts = sync.OnceValue(func() (p struct {
	balanced          *config
	direct            [6][6]*config // by nodes, and which comes first
	quiet, inTx, over *pgconn.PgConn
	hello             [modelIDs][]byte
	refusal, full     []byte
	goodbye           []byte
	lookups           map[string][]string
},
) {
	parse := func(hosts string) *config {
		cfg, err := parseConfig("host=" + hosts + " user=u sslmode=disable crdbdrain_host_order=listed")
		if err != nil {
			panic(err)
		}
		return cfg
	}
	p.balanced = parse("lb")
	for nodes := 2; nodes <= 5; nodes++ {
		for first := range nodes {
			var hosts []string
			for i := range nodes {
				hosts = append(hosts, "n"+strconv.Itoa((first+i)%nodes+1))
			}
			p.direct[nodes][first] = parse(strings.Join(hosts, ","))
		}
	}
	pg := func(status byte) *pgconn.PgConn {
		c, err := pgconn.Construct(&pgconn.HijackedConn{Conn: &modelWire{}, TxStatus: status, Config: &p.balanced.pgx.Config})
		if err != nil {
			panic(err)
		}
		return c
	}
	p.quiet, p.inTx, p.over = pg('I'), pg('T'), &pgconn.PgConn{}
	encode := func(messages ...pgproto3.BackendMessage) (b []byte) {
		for _, msg := range messages {
			var err error
			if b, err = msg.Encode(b); err != nil {
				panic(err)
			}
		}
		return b
	}
	for id := range p.hello {
		p.hello[id] = encode(&pgproto3.AuthenticationOk{}, &pgproto3.ParameterStatus{Name: "crdb_version", Value: "CockroachDB CCL v25.2.0"},
			&pgproto3.BackendKeyData{ProcessID: uint32(id)<<20 | 5, SecretKey: []byte{1, 2, 3, 4}}, &pgproto3.ReadyForQuery{TxStatus: 'I'})
	}
	said := func(code, message string) *pgproto3.ErrorResponse {
		return &pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: message}
	}
	p.refusal = encode(said(stateAdminShutdown, noticeNotAcceptingClients))
	p.full = encode(&pgproto3.AuthenticationOk{}, said(stateTooManyConnections, "sorry, too many clients already"))
	p.goodbye = encode(said(stateAdminShutdown, noticeShuttingDown))
	p.lookups = map[string][]string{"lb": {"10.0.0.100"}}
	for id := range modelIDs {
		p.lookups["n"+strconv.Itoa(id)] = []string{"10.0.0." + strconv.Itoa(id)}
	}
	return p
})

func newModel(seed uint64) *model {
	rng := rand.New(rand.NewPCG(seed, 1))
	m := &model{
		rng: rng, start: time.Now(), key: "model-" + strconv.FormatUint(seed, 10),
		nodes: 2 + rng.IntN(4), balanced: rng.IntN(2) == 0, byPgx: rng.IntN(16) == 0, least: time.Hour,
	}
	m.logger = slog.New(&m.log)
	if m.balanced && rng.IntN(2) == 0 {
		m.latency = m.ms(0, 300)
	}
	for id := 1; id <= m.nodes; id++ {
		m.node[id] = modelNode{epoch: 1}
		m.seen(id)
	}
	for source := range m.silent {
		m.silent[source] = rng.IntN(3) == 0
	}
	return m
}

func (m *model) ms(from, to int) time.Duration {
	return time.Duration(from+m.rng.IntN(to-from+1)) * time.Millisecond
}

func (m *model) chance(of int) bool { return m.rng.IntN(of) == 0 }

// join makes a pool, whose settings are its own.
func (m *model) join() {
	parts := modelParts()
	cfg := *parts.balanced
	if !m.balanced {
		cfg = *parts.direct[m.nodes][m.rng.IntN(m.nodes)]
	}
	cfg.key, cfg.cluster = m.key, m.key
	cfg.pollInterval, cfg.pollAuto = m.ms(200, 3000), false
	cfg.pollIntervalDraining = min(cfg.pollInterval, m.ms(100, 1000))
	cfg.cullStagger = []time.Duration{0, 50 * time.Millisecond, 500 * time.Millisecond, 500 * time.Millisecond, 2 * time.Second}[m.rng.IntN(5)]
	cfg.window = 0
	if m.chance(2) {
		cfg.window = m.ms(100, 20_000)
	}
	cfg.spares = m.rng.IntN(3)
	cfg.rebalance = m.chance(2)
	cfg.ttl = 0
	if m.chance(4) {
		cfg.ttl, cfg.ttlStagger = m.ms(1000, 20_000), m.ms(100, 2000)
	}
	if m.chance(4) {
		cfg.maxConnections = 1 + m.rng.IntN(16)
	}
	if m.chance(10) {
		cfg.mode = modeObserve
	}
	p := &modelPool{n: len(m.pools), hidden: m.chance(10)}
	cc := *cfg.pgx
	cc.DialFunc = func(ctx context.Context, _, addr string) (net.Conn, error) { return m.dial(ctx, p, addr) }
	cc.LookupFunc = func(_ context.Context, host string) ([]string, error) { return parts.lookups[host], nil }
	cfg.pgx = &cc
	p.c = newConnector(&cfg, WithLogger(m.logger))
	p.c.registry = &m.registry
	m.pools = append(m.pools, p)
	w := p.c.attach()
	if w != m.w {
		w.stop = func() {} // the schedule is the worker
		m.w, m.spec = w, spec{}
		m.log.reset()
		m.sw, m.mv, m.idle, m.lastCull, m.least = sweeper{}, mover{}, false, time.Time{}, time.Hour
		if !m.chance(8) {
			w.rule.Store(ruleHolds)
			m.spec.holds = true
		}
	}
	m.note("pool %d joins", p.n)
	m.common()
}

// common is what the settings of the pools come to.
func (m *model) common() {
	m.poll, m.draining, m.stagger, m.window = time.Hour, time.Hour, 0, 0
	for _, p := range m.pools {
		if p.closed {
			continue
		}
		m.poll, m.draining = min(m.poll, p.c.cfg.pollInterval), min(m.draining, p.c.cfg.pollIntervalDraining)
		m.stagger = max(m.stagger, p.c.cfg.cullStagger)
		if d := p.c.cfg.window; d != 0 && (m.window == 0 || d < m.window) {
			m.window = d
		}
	}
}

func (m *model) accepts(id int) bool { return m.node[id].step < stepRefusing && !m.node[id].gone }

// lands is where a dial goes, rather to one of some nodes; 0 if nobody accepts. m.mu is held.
func (m *model) lands(rather func(int) bool) int {
	m.next++
	for _, picky := range []bool{true, false} {
		for i := range m.nodes {
			id := (m.next+i)%m.nodes + 1
			if m.accepts(id) && (!picky || rather == nil || rather(id)) {
				return id
			}
		}
	}
	return 0
}

// dial is the network of the dials that pgx makes.
func (m *model) dial(ctx context.Context, p *modelPool, addr string) (net.Conn, error) {
	opened := time.Now()
	if m.latency > 0 {
		time.Sleep(m.latency)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dials++
	var id int
	if m.balanced {
		if id = m.lands(nil); id == 0 {
			id = m.next%m.nodes + 1
		}
	} else {
		id, _ = strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(addr, "10.0.0."), ":5432"))
	}
	parts := modelParts()
	f := fact{at: time.Now(), node: nodeID(id), dog: p.c.watchdog.Load()}
	switch n := &m.node[id]; {
	case n.step == stepDown || n.gone:
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	case n.step >= stepRefusing:
		f.kind = factRefused
		m.facts = append(m.facts, f)
		return &modelWire{in: parts.refusal}, nil
	case m.fullNow:
		if f.kind = factFull; m.balanced { // else another host may accept
			m.facts = append(m.facts, f)
		}
		return &modelWire{in: parts.full}, nil
	}
	w := m.wire(p, nodeID(id), opened)
	w.in = parts.hello[id]
	m.wires = append(m.wires, w)
	f.kind, f.w = factLanded, w
	m.facts = append(m.facts, f)
	return w, nil
}

func (m *model) wire(p *modelPool, id nodeID, opened time.Time) *modelWire {
	m.made++
	return &modelWire{m: m, n: m.made, pool: p, node: id, opened: opened, look: peekQuiet}
}

// paper is a session without pgx, on a node that has accepted it.
func (m *model) paper(p *modelPool, id nodeID) *session {
	opened := time.Now()
	if m.chance(4) {
		opened = opened.Add(-m.ms(0, 200)) // the dial took its time
	}
	m.mu.Lock()
	w := m.wire(p, id, opened)
	m.mu.Unlock()
	s := &session{
		connector: p.c, w: p.c.watchdog.Load(), link: &link{conn: w, r: w, w: w, peeker: w.peeker()}, id: id, opened: opened,
		pg: modelParts().quiet, jitter: time.Duration(m.rng.Int64N(int64(p.c.cfg.ttl/10 + 1))),
	}
	w.s = s
	a := &attempt{start: opened, addr: "10.0.0.100:5432"}
	if !m.balanced {
		a.addr, a.lookups = "10.0.0."+strconv.Itoa(int(id))+":5432", modelParts().lookups
	}
	s.w.add(s, a)
	s.link.session.Store(s)
	m.open = append(m.open, w)
	m.meets(fact{kind: factLanded, at: time.Now(), w: w, node: id, dog: s.w})
	return s
}

// connect is Connector.connect on paper.
func (m *model) connect(p *modelPool, ahead bool, rather func(int) bool) *session {
	l := ceilings.join(p.c)
	limit, used, spare := l.limit.Load(), l.used.Load(), m.spareUnder(l)
	err := p.c.enter(ahead)
	if fits := limit == 0 || used < limit; fits && err != nil || !fits && err == nil && (ahead || !spare) {
		m.fail("%d places of %d are taken (ahead: %v), and another: %v", used, limit, ahead, err)
	}
	if err != nil {
		m.rejected++
		return nil
	}
	dial := func() *session {
		if m.fullNow {
			m.w.full()
			m.meets(fact{kind: factFull, at: time.Now(), dog: m.w})
			return nil
		}
		m.mu.Lock()
		id := m.lands(rather)
		m.mu.Unlock()
		if id == 0 {
			return nil
		}
		return m.paper(p, nodeID(id))
	}
	s := dial()
	if s == nil {
		l.leave()
		return nil
	}
	for range maxSteer {
		if !m.w.shouldSteer(s) || !l.take() {
			s.placed.Store(true)
			return s
		}
		other := dial()
		l.leave()
		if other == nil {
			s.placed.Store(true)
			return s
		}
		s.discard()
		s = other
	}
	m.w.keptMarked(s)
	s.placed.Store(true)
	return s
}

// spareUnder reports whether one of the ceiling's pools has a spare.
func (m *model) spareUnder(l *ceiling) bool {
	for _, p := range m.pools {
		if p.c.ceiling.Load() == l && p.c.spares.count.Load() > 0 {
			return true
		}
	}
	return false
}

// hearGoodbye takes note that the driver is about to hear a goodbye.
func (m *model) hearGoodbye(w *modelWire) {
	s := w.s
	if s == nil || s.link.words.Load() != goodbyeNone {
		return
	}
	t := time.Now()
	n := word{since: t, heard: t, before: w.opened.Add(1), over: true}
	if idled := s.idled.Load(); idled != 0 {
		n.before = maxTime(n.before, clockStart.Add(time.Duration(idled)))
	}
	m.meets(fact{kind: factGoodbye, at: t, w: w, node: w.node, word: n, dog: s.w})
}

func (m *model) meets(f fact) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.facts = append(m.facts, f)
}

// An end of a connection counts as one of these.
type modelEnd uint8

const (
	fateNone modelEnd = iota // the pool's own doing, or nobody has had it
	fateCulled
	fateLost
	fateMoved
)

// happening is an event, in which at most one connection ends by a hook.
type happening struct {
	sweep   bool
	closing bool      // the pools close what they have
	back    bool      // the subject comes back to its pool
	at      time.Time // the reading of the clock, where it is not now
	subject *modelWire
	fate    modelEnd
}

// before takes note of how things are.
func (m *model) before() {
	m.events++
	if m.w == nil {
		return
	}
	t := time.Now()
	m.began = t
	for id := 1; id < modelIDs; id++ {
		m.marksWere[id] = m.spec.marks[id]
	}
	m.somewhereWas, m.gapWas, m.turnWas, m.fullWas = m.somewhere(t), m.gap(t), m.spec.turn, m.spec.full
	m.least = min(m.least, m.gapWas)
	for _, p := range m.pools {
		p.spares = int(p.c.spares.count.Load())
		if !m.byPgx {
			p.c.spares.mu.Lock()
			p.c.spares.retry = m.start.Add(10_000 * time.Hour) // spares land by an event
			p.c.spares.mu.Unlock()
		}
	}
	for _, w := range m.open {
		w.owner, w.by = ownerNone, nil
	}
	for _, p := range m.pools {
		for _, mc := range p.conns {
			s := mc.c.s
			for s.state.Load() == sessionGone {
				r := s.replacement.Load()
				if r == nil {
					break
				}
				s = r
			}
			if w := wireOf(s); s.state.Load() != sessionGone {
				w.owner, w.by = ownerPool, mc
				if r := s.replacement.Load(); r != nil {
					wireOf(r).owner = ownerPending
				}
			}
		}
		p.c.spares.mu.Lock()
		for _, r := range p.c.spares.ready {
			wireOf(r.s).owner = ownerSpare
		}
		p.c.spares.mu.Unlock()
	}
}

func wireOf(s *session) *modelWire { return s.link.conn.(*modelWire) }

// background is how many dials are under way behind the callers' backs.
func (m *model) background() (n int) {
	for _, p := range m.pools {
		p.c.spares.mu.Lock()
		n += p.c.spares.dialing
		p.c.spares.mu.Unlock()
	}
	if m.w != nil {
		n += int(m.w.moving.Load())
	}
	return n
}

// after looks at what has happened.
func (m *model) after(h happening) {
	synctest.Wait()
	t := time.Now()
	if m.w != nil {
		m.w.tellQueued()
	}
	m.mu.Lock()
	facts := m.facts
	m.facts = nil
	m.open = append(m.open, m.wires...)
	m.wires = m.wires[:0]
	m.mu.Unlock()
	m.adopt()
	m.heard = [modelIDs]bool{}
	for _, f := range facts {
		m.heard[f.node] = true
		m.met(f)
	}
	kept := m.open[:0]
	for _, w := range m.open {
		if w.closed.Load() == 0 {
			kept = append(kept, w)
		} else {
			m.ended(w, h)
		}
	}
	clear(m.open[len(kept):])
	m.open = kept
	if m.w == nil {
		return
	}
	for source := range m.spec.good { // the marks may have been made anew in this event
		m.spec.good[source] = maxTime(m.spec.good[source], m.spec.at[source].Add(m.keepOf(sourceID(source))))
	}
	m.drainsAt(t)
	m.check(h)
	m.least = min(m.least, m.gap(t))
}

// adopt finds the sessions that the driver has made itself.
func (m *model) adopt() {
	for _, w := range m.open {
		dog := w.pool.c.watchdog.Load()
		if w.s != nil || w.closed.Load() > 0 || dog == nil {
			continue
		}
		dog.mu.Lock()
		for s := range dog.nodeOf(w.node).held {
			if s.link.conn == net.Conn(w) {
				w.s = s
				s.link.peeker = w.peeker()
			}
		}
		dog.mu.Unlock()
		if w.s == nil {
			m.fail("connection %d is open and not entered", w.n)
		}
	}
}

// uses takes note that a caller has used a connection.
func (m *model) uses(w *modelWire) {
	if w.s.w == m.w {
		m.spec.used[w.node] = time.Now()
	}
}

// met is what the driver has met on its own.
func (m *model) met(f fact) {
	sp := &m.spec
	if m.w == nil || f.dog != m.w {
		return
	}
	switch f.kind {
	case factGoodbye:
		m.note("connection %d hears the goodbye of node %d", f.w.n, int(f.node))
		if sp.holds {
			sp.say(f.node, sourceErrors, f.word)
		}
	case factLanded:
		m.note("connection %d lands on node %d", f.w.n, int(f.node))
		sp.land(f.node, f.w.opened, f.at)
	case factRefused:
		reached := 0
		for _, is := range sp.reached {
			reached += boolInt(is)
		}
		if !m.balanced && reached >= 2 && sp.reached[f.node] {
			sp.say(f.node, sourceErrors, word{since: f.at, heard: f.at, before: f.at})
		}
	case factFull:
		sp.full = f.at
	}
	m.drainsAt(f.at)
	if f.kind == factLanded && m.idle { // the next worker's first deed
		m.idle = false
		m.tick(f.at)
	}
}

// drainsAt follows the drains that are to be told.
func (m *model) drainsAt(t time.Time) {
	marked := false
	m.spec.remark()
	for id := 1; id < modelIDs; id++ {
		d, mk := &m.spec.drains[id], &m.spec.marks[id]
		marked = marked || mk.on
		switch {
		case mk.on && (!d.on || d.leaves && !mk.leaves): // a decommissioning that becomes a drain is another one
			if f := m.spec.fleet; f != nil && !d.on {
				m.spec.turn = t.Add(f.phase)
			}
			*d = specDrain{on: true, fresh: true, held: m.older(nodeID(id), mk.before)}
			d.over = d.held == 0
			m.spec.begun[id]++
			m.spec.known[id] = true
			m.drains++
		case !mk.on && d.on:
			if !d.over {
				m.spec.ended[id]++
			}
			*d = specDrain{}
		case d.on && !d.over && m.older(nodeID(id), mk.before) == 0:
			d.over = true
			m.spec.ended[id]++
		}
		d.leaves = mk.leaves
	}
	if !marked || m.spec.fleet == nil {
		m.spec.turn = time.Time{}
	}
}

// ended is a connection's end: it counts as one thing, and has to be allowed.
func (m *model) ended(w *modelWire, h happening) {
	m.wouldBe(w, h)
	f := fateNone
	switch {
	case w == h.subject:
		f = h.fate
	case h.closing:
		if w.owner == ownerPool && w.s.link.words.Load() != goodbyeNone {
			f = fateLost
		}
	case h.sweep && w.owner == ownerPool:
		if f = fateCulled; w.look != peekQuiet {
			f = fateLost
		}
	case w.owner == ownerPool:
		f = fateMoved
	}
	m.note("connection %d of pool %d is closed, which counts as %d", w.n, w.pool.n, int(f))
	if w.by != nil && w.by.busy && w.by.claimed && w != h.subject && !h.closing {
		m.fail("connection %d was in use and has been closed", w.n)
	}
	switch want := &w.pool.want; f {
	case fateNone:
	case fateCulled:
		want.Culled++
		m.sum.Culled++
		m.legal(w, h, m.began)
	case fateLost:
		want.Lost++
		m.sum.Lost++
	case fateMoved:
		want.Moved++
		m.sum.Moved++
	}
}

// wouldBe counts a connection that would have been culled, once.
func (m *model) wouldBe(w *modelWire, h happening) {
	if !w.observed && w.s != nil && w.s.wouldBe.Load() {
		w.observed = true
		w.pool.want.Observed++
		m.sum.Observed++
		m.legal(w, h, m.began)
	}
}

// legal looks at a cull.
func (m *model) legal(w *modelWire, h happening, t time.Time) {
	at := t
	if !h.at.IsZero() {
		at = h.at
	}
	mk := m.marksWere[w.node]
	switch {
	case w.s.w != m.w:
		return
	case !mk.on:
		m.fail("connection %d was culled on node %d, which is not marked", w.n, w.node)
		return
	case !m.somewhereWas && !m.somewhere(t): // a spare may have landed first
		m.fail("connection %d was culled, and there is nowhere to go", w.n)
	case t.Sub(m.fullWas) < firstFull && !m.fullWas.IsZero():
		m.fail("connection %d was culled %v after a server had too many", w.n, t.Sub(m.fullWas))
	}
	younger := !w.opened.Before(mk.before)
	if younger {
		m.younger++
		if mk.leaves || w.pool.spares == 0 || at.Sub(w.opened) < 2*m.draining || h.sweep {
			m.fail("connection %d is younger than the mark of node %d (decommissioning: %v), there are %d spares: culled", w.n, w.node, mk.leaves, w.pool.spares)
		}
	}
	if h.sweep && w.by != nil && (w.by.busy && w.by.claimed || t.Sub(w.by.rest) < sweepIdle) {
		m.fail("connection %d was swept %v after its return (busy: %v)", w.n, t.Sub(w.by.rest), w.by.busy)
	}
	if (mk.over || h.back && m.lastCall(w, &mk, at)) && !younger {
		return // not paced
	}
	m.paced++
	if at.Before(m.turnWas) {
		m.fail("connection %d was culled %v before the process's turn", w.n, m.turnWas.Sub(at))
	}
	m.least = min(m.least, m.gap(t)) // a spare may have landed on a marked node first
	if d := t.Sub(m.lastCull); !m.lastCull.IsZero() && d < m.least-m.least/1_000_000-time.Microsecond {
		m.fail("connection %d was culled %v after the one before, and the pace allows one in %v", w.n, d, m.least)
	}
	m.lastCull, m.least = at, m.gapWas
}

// check compares what the driver holds with what the model does.
func (m *model) check(h happening) {
	marks := m.w.marks.Load()
	marked := 0
	for id := 1; id < modelIDs; id++ {
		want := &m.spec.marks[id]
		var got *mark
		if marks != nil {
			got = marks.of[nodeID(id)]
		}
		if want.on {
			marked++
		}
		if want.on != (got != nil) {
			m.fail("node %d is marked: %v, want %+v", id, got != nil, m.spec.words[id])
		} else if got != nil && (got.decommissioning != want.leaves || got.over != want.over || got.source != want.source || !got.since.Equal(want.since) || !got.before.Equal(want.before) || !got.calm.Equal(want.calm)) {
			m.fail("node %d has the mark %+v, want %+v", id, *got, *want)
		}
		d := &m.spec.drains[id]
		// Of what comes to be in one event either order is right: the last connection had left before another landed, before one
		// became one that has to leave, or before the drain was heard of, which then began with none.
		if more := m.log.ended[id].Load() - m.spec.ended[id]; m.heard[id] && (more == 1 || more == -1 && d.fresh) {
			// The end can be that of the decommissioning before.
			d.over = more == -1 || !d.fresh || m.older(nodeID(id), want.before) == 0
			m.spec.ended[id] += more
		}
		d.fresh = false
		if begun, ended := m.log.begun[id].Load(), m.log.ended[id].Load(); begun != m.spec.begun[id] || ended != m.spec.ended[id] {
			m.fail("of node %d %d drains were told, and %d ends, want %d and %d", id, begun, ended, m.spec.begun[id], m.spec.ended[id])
			m.spec.begun[id], m.spec.ended[id] = begun, ended
		}
	}
	if marked == 0 && marks != nil {
		m.fail("no node is marked, and there is a set of %d marks", len(marks.of))
	}
	if got := m.w.fleet.Load(); (got == nil) != (m.spec.fleet == nil) {
		m.fail("the feed's share is %+v, want %+v", got, m.spec.fleet)
	}
	var held [modelIDs]int
	conns := 0
	for _, w := range m.open {
		if w.s == nil || w.s.w != m.w {
			continue
		}
		held[w.node]++
		conns++
		m.wouldBe(w, h)
	}
	m.w.mu.Lock()
	if m.w.conns != conns {
		m.fail("the watchdog counts %d connections of %d", m.w.conns, conns)
	}
	for id := 1; id < modelIDs; id++ {
		n := m.w.nodes[nodeID(id)]
		if n == nil && held[id] > 0 || n != nil && (len(n.held) != held[id] || int(n.count.Load()) != held[id]) {
			m.fail("node %d holds %+v of %d connections", id, n, held[id])
		}
	}
	m.w.mu.Unlock()
	for _, p := range m.pools {
		got := p.c.Stats()
		want := p.want
		want.Throttled, want.Rerun, want.Refused, want.Steered = got.Throttled, got.Rerun, got.Refused, got.Steered
		if got != want {
			m.fail("pool %d counts %+v, want %+v", p.n, got, want)
			p.want = got
		}
	}
	m.places()
}

// places looks at the ceiling, and at whether somebody has every connection.
func (m *model) places() {
	var l *ceiling
	for _, p := range m.pools {
		if c := p.c.ceiling.Load(); c != nil && !p.closed {
			l = c
		}
	}
	if l == nil || m.background() > 0 {
		m.usedWere = 1 << 62
		return
	}
	taken := int64(0)
	for _, w := range m.open {
		taken += int64(boolInt(w.pool.c.ceiling.Load() == l))
	}
	used, limit := l.used.Load(), l.limit.Load()
	if used != taken {
		m.fail("%d places are taken, by %d connections", used, taken)
	}
	if limit > 0 && used > limit && used > m.usedWere {
		m.fail("%d places of %d are taken, %d before", used, limit, m.usedWere)
	}
	m.usedWere = used
}

// tick is the worker's timer, but for the poll.
func (m *model) tick(t time.Time) {
	m.w.reap()
	m.w.mu.Lock()
	events := m.w.expire(t)
	m.idle = m.w.conns == 0
	m.w.mu.Unlock()
	m.w.tell(events)
	m.expire(t)
}

// seen is that gossip has heard of a node's state.
func (m *model) seen(id int) {
	n := &m.node[id]
	n.gossip = nodeState{draining: n.flagged, decommissioning: n.leaves, live: n.step != stepDown, epoch: n.epoch}
}

// answer is what a source says now.
func (m *model) answer(source sourceID) map[nodeID]nodeState {
	nodes := make(map[nodeID]nodeState, m.nodes)
	if m.chance(8) { // a lie
		all := m.chance(3)
		for id := 1; id < modelIDs; id++ {
			if !all && m.chance(3) {
				continue
			}
			state := nodeState{live: m.chance(2), draining: all || m.chance(2), epoch: int64(m.rng.IntN(4))}
			if !state.draining {
				state.decommissioning = m.chance(3)
			}
			nodes[nodeID(id)] = state
		}
		return nodes
	}
	for id := 1; id <= m.nodes; id++ {
		n := &m.node[id]
		if n.gone && source != sourceGossip {
			continue
		}
		draining := n.step != stepServing
		switch source {
		case sourceInstances:
			if n.step < stepDeadline || n.step == stepDown && !n.flagged {
				draining = draining && n.step != stepDown
				nodes[nodeID(id)] = nodeState{draining: draining, live: !draining}
			}
		case sourceReadiness:
			if n.step != stepDown {
				draining = n.step >= stepUnready
				nodes[nodeID(id)] = nodeState{draining: draining, live: !draining}
			}
		case sourceGossip:
			nodes[nodeID(id)] = n.gossip
		default: // a feed
			switch {
			case draining && n.step != stepDown:
				nodes[nodeID(id)] = nodeState{draining: true}
			case n.leaves:
				nodes[nodeID(id)] = nodeState{decommissioning: true, live: true}
			default:
				nodes[nodeID(id)] = nodeState{live: true}
			}
		}
	}
	return nodes
}

// told is a source's answer, as a poll brings it.
func (m *model) told(source sourceID, nodes map[nodeID]nodeState, err error, asked time.Time) {
	m.before()
	t := time.Now()
	r := pollResult{answers: []answer{{source: source, role: m.anyOpen().c.role(), nodes: nodes, err: err, asked: asked}}}
	if err == nil && source == sourceFeed {
		var share *fleetShare
		if m.chance(3) {
			share = &fleetShare{gap: m.ms(0, 1500)}
			share.phase = time.Duration(m.rng.Int64N(int64(share.gap) + 1))
		}
		m.w.fleet.Store(share)
		m.spec.fleet = share
	}
	if err == nil && m.chance(10) {
		r.window = m.ms(100, 15_000)
		m.spec.learned = r.window
	}
	m.w.take(r)
	if err == nil {
		m.spec.answer(source, nodes, asked, t)
		m.spec.good[source] = t.Add(m.keepOf(source))
	}
	m.after(happening{})
}

func (m *model) anyOpen() *modelPool {
	n := m.rng.IntN(len(m.pools))
	for i := range m.pools {
		if p := m.pools[(n+i)%len(m.pools)]; !p.closed {
			return p
		}
	}
	return nil
}

// anyConn is one of a pool's connections, in use or not.
func (m *model) anyConn(busy bool) (*modelPool, *modelConn) {
	n := m.rng.IntN(len(m.pools))
	for i := range m.pools {
		p := m.pools[(n+i)%len(m.pools)]
		if len(p.conns) == 0 {
			continue
		}
		k := m.rng.IntN(len(p.conns))
		for j := range p.conns {
			if mc := p.conns[(k+j)%len(p.conns)]; mc.busy == busy {
				return p, mc
			}
		}
	}
	return nil, nil
}

func (p *modelPool) drop(mc *modelConn) {
	for i := range p.conns {
		if p.conns[i] == mc {
			p.conns = append(p.conns[:i], p.conns[i+1:]...)
			return
		}
	}
}

// grow is a dial of the pool's.
func (m *model) grow(p *modelPool) {
	m.before()
	m.note("pool %d dials", p.n)
	var c *conn
	if m.chance(200) || m.byPgx && m.chance(6) {
		dc, err := p.c.Connect(context.Background())
		if err == nil {
			c = dc.(*conn)
		} else if sqlState(err) == stateTooManyConnections && !m.fullNow {
			m.rejected++
		}
	} else if s := p.c.takeSpare(); s != nil {
		c = newConn(s)
	} else if s := m.connect(p, false, nil); s != nil {
		c = newConn(s)
	}
	if c != nil {
		mc := &modelConn{c: c, fresh: true, rest: time.Now()}
		p.conns = append(p.conns, mc)
		if m.chance(3) {
			mc.busy = true
			if !m.chance(4) {
				mc.claimed = c.claim(context.Background()) == nil
			}
		}
	}
	m.after(happening{})
}

// use is a statement that meets its connection's end, of those that have one.
func (m *model) use(p *modelPool, mc *modelConn) {
	c := mc.c
	w := wireOf(c.s)
	if c.s.w != m.w || !w.bye && w.look != peekClosed {
		return
	}
	m.before()
	m.note("connection %d is used, and meets its end (goodbye: %d)", w.n, boolInt(w.bye))
	ctx := context.Background()
	r, err := c.begin(ctx)
	if err != nil {
		m.fail("begin: %v", err)
	}
	err = io.ErrUnexpectedEOF
	marked := m.spec.holds && m.marksWere[w.node].on
	if w.bye {
		m.hearGoodbye(w)
		c.s.link.hear(modelParts().goodbye)
		err = &pgconn.PgError{Severity: "ERROR", Code: stateAdminShutdown, Message: noticeShuttingDown}
	}
	h := happening{subject: w}
	if w.bye || marked {
		h.fate = fateLost
	}
	c.s.pg = modelParts().over
	if err = c.settle(ctx, err, r, rerunKind(m.rng.IntN(int(numRerunKinds)))); !errors.Is(err, errAgain) {
		_ = c.IsValid()
		_ = c.Close()
		p.drop(mc)
	}
	m.after(h)
}

// checkout is a connection that a caller gets from the pool.
func (m *model) checkout(p *modelPool, mc *modelConn) {
	c := mc.c
	m.before()
	ctx := context.Background()
	if mc.fresh {
		m.note("pool %d hands out connection %d, which is new", p.n, wireOf(c.s).n)
		mc.busy = true
		if !m.chance(4) {
			if mc.claimed = c.claim(ctx) == nil; !mc.claimed {
				_ = c.Close()
				p.drop(mc)
			}
		}
		m.after(happening{})
		return
	}
	s := c.follow()
	w := wireOf(s)
	m.note("pool %d hands out connection %d, on node %d", p.n, w.n, int(w.node))
	if w.look == peekPending {
		w.look = peekClosed // a ping would be sent
	}
	s.checkedOut = now()
	h := happening{}
	if s.state.Load() != sessionGone {
		h.subject = w
		goodbye := s.link.words.Load() != goodbyeNone
		switch {
		case s.pg.IsClosed():
		case goodbye || w.look == peekClosed:
			if goodbye || w.goodbye || m.spec.holds && m.marksWere[w.node].on {
				h.fate = fateLost
			}
		default:
			h.fate = fateCulled
		}
	}
	if err := c.ResetSession(ctx); err != nil {
		if !errors.Is(err, driver.ErrBadConn) {
			m.fail("checkout: %v", err)
		}
		_ = c.Close()
		p.drop(mc)
	} else {
		mc.busy, mc.claimed = true, true
	}
	m.uses(w)
	m.after(h)
}

// giveBack is a connection that comes back to the pool.
func (m *model) giveBack(p *modelPool, mc *modelConn) {
	c := mc.c
	m.before()
	m.note("connection %d comes back to pool %d", wireOf(c.s).n, p.n)
	if p.hidden && !p.closed {
		if mc.claimed {
			mc.rest = time.Now()
		}
		mc.busy, mc.claimed, mc.fresh = false, false, false
		m.after(happening{})
		return
	}
	s := c.follow()
	w := wireOf(s)
	gone := s.state.Load() == sessionGone
	if mc.claimed && m.chance(12) {
		s.pg = modelParts().inTx
	}
	ok := c.IsValid()
	h := happening{back: true, subject: w}
	switch {
	case gone:
		h.subject = nil
	case ok && c.s != s:
		h.fate = fateMoved
	case ok:
	case s.link.words.Load() != goodbyeNone:
		h.fate = fateLost
	case s.pg.TxStatus() != 'I':
	case w.look != peekQuiet:
		h.fate = fateLost
	default:
		h.fate = fateCulled
	}
	if !ok || p.closed {
		_ = c.Close()
		p.drop(mc)
	} else {
		mc.busy, mc.claimed, mc.fresh, mc.rest = false, false, false, time.Now()
	}
	m.uses(w)
	m.after(h)
}

// shrink is a connection that the pool closes on its own.
func (m *model) shrink(p *modelPool, mc *modelConn) {
	m.before()
	w := wireOf(mc.c.follow())
	m.note("pool %d closes connection %d", p.n, w.n)
	h := happening{subject: w}
	if w.s.link.words.Load() != goodbyeNone {
		h.fate = fateLost
	}
	_ = mc.c.Close()
	p.drop(mc)
	m.after(h)
}

// leave closes a pool.
func (m *model) leave(p *modelPool) {
	m.before()
	m.note("pool %d is closed", p.n)
	for _, mc := range append([]*modelConn(nil), p.conns...) {
		if !mc.busy {
			_ = mc.c.Close()
			p.drop(mc)
		}
	}
	p.closed = true
	_ = p.c.Close()
	m.common()
	if m.anyOpen() == nil {
		m.w = nil
	}
	m.after(happening{closing: true})
}

// late is a hook that has read the clock some time ago, or whose clock was set back.
func (m *model) late(p *modelPool, mc *modelConn) {
	s := mc.c.s
	marks := m.w.marks.Load()
	if s.w != m.w || !mc.claimed || marks == nil || p.hidden || s.state.Load() != sessionInUse || s.link.words.Load() != goodbyeNone {
		return
	}
	m.before()
	t := time.Now()
	at := t.Add(-m.ms(0, 499))
	if m.chance(4) {
		at = t.Add(-[]time.Duration{time.Second, time.Hour, 24 * 365 * time.Hour, 1<<63 - 1}[m.rng.IntN(4)])
		m.lastCull = time.Time{} // with the clock back where it was, one cull more
	}
	m.least = min(m.least, m.gap(at))
	w := wireOf(s)
	m.note("connection %d comes back, its clock is late by %d ms", w.n, int(t.Sub(at)/time.Millisecond))
	m.somewhereWas = true // by that clock an answer may hold that does no more
	h := happening{back: true, at: at, subject: w, fate: fateCulled}
	if w.look != peekQuiet {
		h.fate = fateLost
	}
	if m.w.cull(s, marks, at, pointReturn) == gone {
		_ = s.bury()
		_ = mc.c.Close()
		p.drop(mc)
	}
	m.uses(w)
	m.after(h)
}

// progress is a step of a node's drain, or what interrupts it.
func (m *model) progress(id int) {
	m.before()
	m.mu.Lock()
	defer m.mu.Unlock()
	n := &m.node[id]
	step, before := n.step, n.step
	switch m.rng.IntN(10) {
	case 0:
		step = stepDown // a crash
	case 1:
		if step != stepDown {
			step, n.flagged = stepServing, false // undrained
		}
	case 2:
		if n.leaves = !n.leaves; !n.leaves && n.step != stepDown {
			n.gone = false
		}
	default:
		if step++; step > stepDown {
			step, n.flagged = stepServing, false
			n.epoch++
		} else if m.chance(3) && step < stepDown {
			step++
		}
	}
	if step == stepDown && n.leaves && before == stepFlagged {
		n.gone = true
	}
	if n.gone {
		step = stepDown
	}
	n.step = step
	n.flagged = n.flagged || step == stepFlagged
	m.note("node %d: step %d, epoch %d", id, int(step), int(n.epoch))
	if m.chance(2) {
		m.seen(id)
	}
	if step < stepClosing || step == before {
		return
	}
	for _, w := range m.open {
		if int(w.node) != id || w.look != peekQuiet {
			continue
		}
		busy := w.by != nil && w.by.busy
		switch {
		case step == stepDown && before < stepClosing:
			w.look = peekClosed // without a word
		case busy && step == stepClosing:
			w.bye = true
		default:
			w.look = peekClosed
			if !w.bye && w.s != nil && !busy {
				w.in, w.goodbye = modelParts().goodbye, true
				if m.chance(2) {
					w.look = peekPending
				}
			}
		}
	}
}

// home is a step of the way home.
func (m *model) home() {
	m.before()
	m.note("a step of the way home")
	t := time.Now()
	if m.byPgx {
		m.mv.step(m.w, t)
		m.after(happening{})
		return
	}
	if m.w.sweepPending(t) < maxPending && m.w.marks.Load() == nil {
		replace := func(c *Connector, victim *session, reason cullReason) {
			p := m.poolOf(c)
			if p.closed {
				m.fail("pool %d is closed, and is to move a connection", p.n)
				return
			}
			r := m.connect(p, true, nil)
			if r == nil {
				m.w.missed()
				return
			}
			r.reserve.Store(true)
			if victim == nil {
				victim = m.w.surplus(c, r)
			}
			if victim == nil || !r.fit() || !victim.replaceWith(r, reason) {
				r.discard()
				return
			}
			m.w.mu.Lock()
			m.w.pending = append(m.w.pending, pending{victim, time.Now()})
			m.w.mu.Unlock()
		}
		if m.w.hasTTL() {
			if victim := m.w.oldest(t); victim != nil {
				replace(victim.connector, victim, reasonTTL)
				m.after(happening{})
				m.before()
			}
		}
		if p, ok := m.w.plan(); ok && p.c != nil {
			replace(p.c, nil, reasonRebalance)
		}
	}
	m.after(happening{})
}

func (m *model) poolOf(c *Connector) *modelPool {
	for _, p := range m.pools {
		if p.c == c {
			return p
		}
	}
	return nil
}

// spare is a spare that lands.
func (m *model) spare(p *modelPool) {
	sp := &p.c.spares
	sp.mu.Lock()
	wanted := sp.leaving > 0 && sp.wanted.Load() && len(sp.ready) < p.c.cfg.spares
	sp.mu.Unlock()
	if !wanted || m.byPgx {
		return
	}
	m.before()
	m.note("a spare for pool %d", p.n)
	if s := m.connect(p, true, nil); s != nil {
		if s.stamp() != 0 && s.fit() {
			p.c.putSpare(s)
		} else {
			s.discard()
		}
	}
	m.after(happening{})
}

func (m *model) sweep() {
	m.before()
	m.note("sweep")
	m.sw.sweep(m.w)
	m.after(happening{sweep: true})
	if p := m.pools[m.rng.IntN(len(m.pools))]; !p.closed {
		m.spare(p)
	}
}

// pass lets time go by.
func (m *model) pass(d time.Duration) {
	if m.background() == 0 {
		time.Sleep(d)
		return
	}
	m.before()
	time.Sleep(d)
	m.after(happening{})
}

func (m *model) anyNode() int { return 1 + m.rng.IntN(m.nodes) }

func (m *model) event() {
	if m.w == nil {
		if m.chance(3) {
			m.join()
		} else if p, mc := m.anyConn(true); mc != nil {
			m.giveBack(p, mc)
		}
		return
	}
	k := m.rng.IntN(64)
	if m.idle && k < 32 {
		k = 63 - k
	}
	switch {
	case k < 10:
		source := []sourceID{sourceInstances, sourceGossip, sourceReadiness, sourceFeed}[m.rng.IntN(4)]
		if m.silent[source] && !m.chance(10) {
			return
		}
		asked := time.Now()
		if m.chance(2) {
			asked = asked.Add(-m.ms(0, 2000))
		}
		if m.chance(8) {
			err := []error{errEmpty, io.ErrUnexpectedEOF, &pgconn.PgError{Code: stateInsufficientPrivs, Message: "no"}}[m.rng.IntN(3)]
			m.note("source %d fails", int(source))
			m.told(source, nil, err, asked)
			return
		}
		nodes := m.answer(source)
		leaving := 0
		for id, state := range nodes {
			leaving |= boolInt(state.leaving()) << id
		}
		m.note("source %d answers with %d nodes, of which leave (bits) %d", int(source), len(nodes), leaving)
		m.told(source, nodes, nil, asked)
	case k < 18:
		m.sweep()
	case k < 21:
		m.before()
		m.note("tick")
		m.tick(time.Now())
		m.after(happening{})
	case k < 24:
		m.home()
	case k < 26:
		m.spare(m.anyOpen())
	case k == 26:
		if m.chance(4) {
			m.before()
			m.note("the process was suspended")
			m.w.forget()
			for id := range m.spec.words {
				m.spec.words[id] = [numSources]word{sourceManual: m.spec.words[id][sourceManual]}
			}
			m.spec.says, m.spec.last = [numSources]map[nodeID]nodeState{}, [numSources]map[nodeID]nodeState{}
			m.spec.fleet = nil
			m.after(happening{})
		}
	case k == 27:
		m.before()
		t, id := time.Now(), m.anyNode()
		if !m.spec.holds {
			m.note("the rule is verified")
			m.w.take(pollResult{rule: ruleHolds})
			m.spec.holds = true
		} else if m.node[id].step >= stepClosing {
			m.note("the watchdog's own connection hears a goodbye of node %d", id)
			before := t.Add(-m.ms(0, 1000))
			m.w.take(pollResult{goodbye: nodeID(id), before: before})
			m.spec.say(nodeID(id), sourceErrors, word{since: t, heard: t, before: before, over: true})
		}
		m.after(happening{})
	case k < 32:
		m.progress(m.anyNode())
	case k < 41:
		if p, mc := m.anyConn(false); mc != nil {
			m.checkout(p, mc)
		}
	case k < 50:
		if p, mc := m.anyConn(true); mc != nil {
			if mc.claimed && m.chance(2) {
				m.use(p, mc)
			} else {
				m.giveBack(p, mc)
			}
		}
	case k == 50:
		if p, mc := m.anyConn(true); mc != nil {
			m.late(p, mc)
		}
	case k < 55:
		if p := m.anyOpen(); len(p.conns) < 10 {
			m.grow(p)
		}
	case k == 55:
		if p, mc := m.anyConn(false); mc != nil {
			m.shrink(p, mc)
		}
	case k < 58:
		id, on := 1+m.rng.IntN(modelIDs-1), m.chance(2)
		if m.chance(2) {
			id = m.anyNode()
		}
		m.before()
		m.note("SetDraining(%d, %d)", id, boolInt(on))
		if err := m.anyOpen().c.SetDraining(id, on); err != nil {
			m.fail("SetDraining: %v", err)
		}
		if t := time.Now(); on {
			m.spec.say(nodeID(id), sourceManual, word{since: t, heard: t, before: t})
		} else {
			m.spec.words[id][sourceManual] = word{}
		}
		m.after(happening{})
	case k == 58:
		if m.chance(3) {
			n := m.rng.IntN(12)
			m.before()
			m.note("the ceiling is %d", n)
			if err := m.anyOpen().c.SetMaxConnections(n); err != nil {
				m.fail("SetMaxConnections: %v", err)
			}
			m.after(happening{})
		}
	case k == 59:
		m.mu.Lock()
		m.fullNow = m.chance(4)
		m.mu.Unlock()
	case k == 60:
		if m.chance(4) {
			m.leave(m.anyOpen())
		}
	case k == 61:
		open := 0
		for _, p := range m.pools {
			open += boolInt(!p.closed)
		}
		if open < 3 && m.chance(4) {
			m.join()
		}
	default: // refusals, heard by a dial that came to nothing
		id := m.anyNode()
		if m.balanced || m.accepts(id) {
			return
		}
		m.before()
		m.note("node %d refuses", id)
		m.w.heardRefusals(&attempt{refused: []string{"10.0.0." + strconv.Itoa(id) + ":5432"}})
		m.meets(fact{kind: factRefused, at: time.Now(), node: nodeID(id), dog: m.w})
		m.after(happening{})
	}
}

func (m *model) run() {
	for range 1 + m.rng.IntN(3) {
		m.join()
	}
	for _, p := range m.pools {
		for range m.rng.IntN(6) {
			m.grow(p)
		}
	}
	for range 30 + m.rng.IntN(41) {
		if len(m.failures) > 0 {
			break
		}
		switch k := m.rng.IntN(100); {
		case k < 40:
		case k < 70:
			m.pass(time.Duration(1+m.rng.IntN(100_000)) * time.Microsecond)
		case k < 97:
			m.pass(m.ms(1, 2000))
		case k < 99:
			m.pass(m.ms(1, 40_000))
		default:
			m.pass(m.ms(1, 7_200_000))
		}
		m.event()
	}
	if m.w != nil && m.chance(5) && len(m.failures) == 0 {
		m.calm()
	}
	m.end()
}

// calm is the end of all trouble: within the time that a feed's answer and the server's words hold, which is less than a
// minute, the marks are gone.
func (m *model) calm() {
	m.rests++
	m.note("calm")
	for id := 1; id <= m.nodes; id++ {
		n := &m.node[id]
		if n.step != stepServing {
			for _, w := range m.open {
				if int(w.node) == id && w.look == peekQuiet {
					w.look = peekClosed
				}
			}
			n.epoch++
		}
		n.step, n.flagged, n.leaves, n.gone = stepServing, false, false, false
		m.seen(id)
	}
	m.mu.Lock()
	m.fullNow = false
	m.mu.Unlock()
	for id := 1; id < modelIDs; id++ {
		m.before()
		_ = m.anyOpen().c.SetDraining(id, false)
		m.spec.words[id][sourceManual] = word{}
		m.after(happening{})
	}
	for {
		p, mc := m.anyConn(true)
		if mc == nil {
			break
		}
		m.giveBack(p, mc)
	}
	m.before()
	_ = m.anyOpen().c.SetMaxConnections(0)
	m.after(happening{})
	for round := range 3 {
		m.pass(30 * time.Second)
		for id := 1; id <= m.nodes && round > 0; id++ {
			m.before()
			p := m.anyOpen()
			if s := m.connect(p, false, func(to int) bool { return to == id }); s != nil {
				p.conns = append(p.conns, &modelConn{c: newConn(s), fresh: true, rest: time.Now()})
			}
			m.after(happening{})
		}
		for _, source := range []sourceID{sourceInstances, sourceGossip, sourceReadiness, sourceFeed} {
			if !m.silent[source] {
				nodes := make(map[nodeID]nodeState)
				for id := 1; id <= m.nodes; id++ {
					nodes[nodeID(id)] = nodeState{live: true, epoch: m.node[id].epoch}
				}
				m.told(source, nodes, nil, time.Now())
			}
		}
		for _, p := range m.pools {
			for _, mc := range append([]*modelConn(nil), p.conns...) {
				m.checkout(p, mc)
			}
			for _, mc := range append([]*modelConn(nil), p.conns...) {
				m.giveBack(p, mc)
			}
		}
		m.before()
		m.tick(time.Now())
		m.after(happening{})
	}
	if marks := m.w.marks.Load(); marks != nil {
		for id, mk := range marks.of {
			m.fail("node %d is still marked: %+v, by %+v", id, *mk, m.spec.words[id%modelIDs])
		}
	}
	if len(m.w.notices)+len(m.w.drains) > 0 {
		m.fail("%d notices and %d drains are left", len(m.w.notices), len(m.w.drains))
	}
}

// end closes everything, and looks at what is left.
func (m *model) end() {
	m.note("the end")
	dogs := make(map[*watchdog]bool)
	for _, p := range m.pools {
		dogs[p.c.watchdog.Load()] = true
		if !p.closed && m.chance(2) {
			m.leave(p)
		}
	}
	for _, p := range m.pools {
		for len(p.conns) > 0 {
			mc := p.conns[0]
			if mc.busy {
				m.giveBack(p, mc)
				if len(p.conns) > 0 && p.conns[0] == mc && !mc.busy && !p.closed {
					m.shrink(p, mc)
				}
			} else {
				m.shrink(p, mc)
			}
		}
		if !p.closed {
			m.leave(p)
		}
	}
	synctest.Wait()
	for _, w := range m.open {
		m.fail("connection %d is open", w.n)
	}
	for w := range dogs {
		for id, n := range w.nodes {
			if len(n.held) > 0 || n.count.Load() > 0 {
				m.fail("node %d holds %d connections", id, len(n.held))
			}
		}
		if w.conns != 0 || len(w.pending) > 0 || len(w.members) > 0 || w.stop != nil || w.moving.Load() != 0 {
			m.fail("the watchdog has %d connections, %d replacements in hand, %d members", w.conns, len(w.pending), len(w.members))
		}
	}
	for _, p := range m.pools {
		if p.c.spares.count.Load() != 0 || len(p.c.spares.ready) != 0 || p.c.spares.dialing != 0 || p.c.dialing.Load() != 0 {
			m.fail("pool %d has spares", p.n)
		}
		if l := p.c.ceiling.Load(); l != nil && l.used.Load() != 0 {
			m.fail("%d places are taken", l.used.Load())
		}
	}
	if len(m.registry.of) > 0 {
		m.fail("%d watchdogs are registered", len(m.registry.of))
	}
	ceilings.mu.Lock()
	if ceilings.of[m.key] != nil {
		m.fail("the ceiling is registered")
	}
	ceilings.mu.Unlock()
}
