//go:build unix

package crdbdrain

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

const (
	sleeperConns   = 12
	sleeperWorkers = 6
	sleeperPause   = 5 * time.Millisecond // of a worker between two operations
	sleeperWait    = 30 * time.Second     // for what should take milliseconds

	sleeperUpdate = "UPDATE slept SET n = 1 WHERE id = $1"
	// The answer to the first is in the socket's buffer when the process goes on; the second runs until the node's deadline.
	sleeperAnswered = "UPDATE slept SET n = 2 WHERE id = $1"
	sleeperCut      = "UPDATE slept SET n = 3 WHERE id = $1"
)

// sleeperVariable holds the sleeperSpec of a process that is to be stopped, in JSON.
const sleeperVariable = "CRDBDRAIN_TEST_SLEEPER"

// sleeperSpec is what a process that is to be stopped does.
type sleeperSpec struct {
	DSN      string
	Shutdown bool // before the DB is closed
}

// sleeperOrder is a line from the test to the process: rest, work, hold, park, finish, look, end.
type sleeperOrder struct {
	Do   string
	Node int    `json:",omitempty"`
	SQL  string `json:",omitempty"`
}

// sleeperLine is a line from the process to the test: an answer to an order, or an error.
type sleeperLine struct {
	Event string // ready, resting, worked, held, finished, looked, ended, error

	// Of an error: what it met (query, update, begin, in a transaction, commit, held, or a parked statement), with which
	// IDs, and when that began, by the wall clock.
	What    string  `json:",omitempty"`
	IDs     []int64 `json:",omitempty"`
	Error   string  `json:",omitempty"`
	Code    string  `json:",omitempty"`
	BadConn bool    `json:",omitempty"`
	Began   int64   `json:",omitempty"`

	Last  int64    `json:",omitempty"` // ID that was used
	Ops   int64    `json:",omitempty"`
	Marks int      `json:",omitempty"`
	Stats Stats    `json:"Stats,omitzero"`
	Log   []string `json:",omitempty"`
}

// sleeper is the process that is stopped: a pool under load, which obeys orders.
type sleeper struct {
	*testing.T
	*pool
	log  logTrap
	ids  atomic.Int64
	ops  [sleeperWorkers]atomic.Int64
	rest sync.RWMutex // an operation holds it shared
	held []*sql.Tx
	pins []*sql.Conn
	park sync.WaitGroup

	mu  sync.Mutex
	out *json.Encoder // guarded by mu
}

func runSleeper(t *testing.T, text string) {
	var spec sleeperSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		t.Fatal(err)
	}
	s := &sleeper{T: t, out: json.NewEncoder(os.Stdout)}
	s.pool = open(t, spec.DSN, "", WithLogger(slog.New(&s.log)))
	fill(t, s.DB, sleeperConns)
	within(t, sleeperWait, "the stamps are verified", func() bool { return s.wd().rule.Load() == ruleHolds })
	ctx, cancel := context.WithCancel(t.Context())
	var workers sync.WaitGroup
	stop := func() { cancel(); workers.Wait() }
	defer stop()
	for i := range sleeperWorkers {
		workers.Go(func() {
			for n := i; ctx.Err() == nil; n++ {
				s.rest.RLock()
				s.op(n)
				s.rest.RUnlock()
				s.ops[i].Add(1)
				time.Sleep(sleeperPause)
			}
		})
	}
	s.work()
	s.say(sleeperLine{Event: "ready"})
	resting := false
	for orders := json.NewDecoder(os.Stdin); ; {
		var o sleeperOrder
		if err := orders.Decode(&o); err != nil {
			t.Fatalf("no more orders: %v", err) // the test has ended
		}
		switch o.Do {
		case "rest": // until there is work again
			s.rest.Lock()
			resting = true
			s.say(sleeperLine{Event: "resting"})
		case "work":
			if resting {
				s.rest.Unlock()
				resting = false
			}
			s.work()
			s.say(sleeperLine{Event: "worked"})
		case "hold":
			s.hold(o.Node)
		case "park":
			s.parkOn(o.Node, o.SQL)
		case "finish":
			s.finish()
		case "look":
			s.say(s.look("looked"))
		case "end":
			stop()
			s.say(s.look("ended"))
			if spec.Shutdown {
				ctx, cancel := context.WithTimeout(context.Background(), sleeperWait)
				defer cancel()
				if _, err := s.c.Shutdown(ctx); err != nil {
					t.Error(err)
				}
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			return
		}
	}
}

func (s *sleeper) say(l sleeperLine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.out.Encode(l); err != nil {
		s.Errorf("nobody listens: %v", err)
	}
}

func (s *sleeper) look(event string) sleeperLine {
	l := sleeperLine{Event: event, Last: s.ids.Load(), Stats: s.c.Stats()}
	for i := range s.ops {
		l.Ops += s.ops[i].Load()
	}
	if m := s.wd().marks.Load(); m != nil {
		l.Marks = len(m.of)
	}
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	l.Log = slices.Clone(s.log.lines)
	return l
}

func (s *sleeper) failed(what string, began time.Time, err error, ids ...int64) {
	if err == nil {
		return
	}
	l := sleeperLine{Event: "error", What: what, IDs: ids, Error: err.Error(), BadConn: errors.Is(err, driver.ErrBadConn), Began: began.UnixNano()}
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		l.Code = pg.Code
	}
	s.say(l)
}

// work waits until every worker has made a few operations that it has yet to begin.
func (s *sleeper) work() {
	var before [sleeperWorkers]int64
	for i := range s.ops {
		before[i] = s.ops[i].Load()
	}
	for i := range s.ops {
		within(s, sleeperWait, "a worker works", func() bool { return s.ops[i].Load() >= before[i]+20 })
	}
}

// op is a query, an update, or a transaction of two updates.
func (s *sleeper) op(n int) {
	ctx, cancel := context.WithTimeout(context.Background(), sleeperWait)
	defer cancel()
	began := time.Now()
	switch n % 3 {
	case 0:
		var one int
		s.failed("query", began, s.QueryRowContext(ctx, "SELECT 1").Scan(&one))
		return
	case 1:
		id := s.ids.Add(1)
		_, err := s.ExecContext(ctx, sleeperUpdate, id)
		s.failed("update", began, err, id)
		return
	}
	tx, err := s.BeginTx(ctx, nil)
	if err != nil {
		s.failed("begin", began, err)
		return
	}
	defer tx.Rollback()
	var ids []int64
	for range 2 {
		ids = append(ids, s.ids.Add(1))
		if _, err := tx.ExecContext(ctx, sleeperUpdate, ids[len(ids)-1]); err != nil {
			s.failed("in a transaction", began, err, ids...)
			return
		}
	}
	s.failed("commit", began, tx.Commit(), ids...)
}

// on takes a connection that is on this node out of the pool.
func (s *sleeper) on(node int) *sql.Conn {
	var others []*sql.Conn
	defer func() {
		for _, c := range others {
			_ = c.Close()
		}
	}()
	for {
		ctx, cancel := context.WithTimeout(context.Background(), sleeperWait)
		c, err := s.Conn(ctx)
		cancel()
		if err != nil {
			s.Fatalf("a connection on node %d: %v", node, err)
		}
		var id int
		if err := c.QueryRowContext(context.Background(), "SHOW node_id").Scan(&id); err != nil {
			s.Fatal(err)
		}
		if id == node {
			s.pins = append(s.pins, c)
			return c
		}
		others = append(others, c)
	}
}

// hold begins a transaction on the node, and leaves it open.
func (s *sleeper) hold(node int) {
	ctx := context.Background()
	tx, err := s.on(node).BeginTx(ctx, nil)
	if err != nil {
		s.Fatal(err)
	}
	id := s.ids.Add(1)
	if _, err := tx.ExecContext(ctx, sleeperUpdate, id); err != nil {
		s.Fatal(err)
	}
	s.held = append(s.held, tx)
	s.say(sleeperLine{Event: "held", IDs: []int64{id}})
}

// parkOn sends a statement to the node that is not answered soon.
func (s *sleeper) parkOn(node int, query string) {
	c := s.on(node)
	s.park.Go(func() {
		began, id := time.Now(), s.ids.Add(1)
		_, err := c.ExecContext(context.Background(), query, id)
		s.failed(query, began, err, id)
	})
}

// finish brings to an end what has been held and parked.
func (s *sleeper) finish() {
	s.park.Wait()
	for _, tx := range s.held {
		began, id := time.Now(), s.ids.Add(1)
		_, err := tx.ExecContext(context.Background(), sleeperUpdate, id)
		if err == nil {
			err = tx.Commit()
		} else if tx.Rollback() == nil {
			s.Error("a transaction that had failed was rolled back")
		}
		s.failed("held", began, err, id)
	}
	for _, c := range s.pins {
		_ = c.Close()
	}
	s.say(sleeperLine{Event: "finished"})
}

// sleepTest is the test's side: a cluster, the process, and what it has said.
type sleepTest struct {
	*testing.T
	c      *crdbdraintest.Cluster
	cmd    *exec.Cmd
	orders *json.Encoder
	lines  chan sleeperLine // but the errors

	parked  chan string   // a parked statement has arrived at its node
	release chan struct{} // answers those of sleeperAnswered

	mu       sync.Mutex
	executed map[string]int // by ID; guarded by mu, like all below
	unsure   map[int64]bool // IDs of what failed
	errors   []sleeperLine  // that nobody has taken
	rest     []string       // of the output

	stopped, continued time.Time
}

// sleepersStart is how many processes start at a time: with the race detector that is work for a processor.
var sleepersStart = make(chan struct{}, 3)

// startSleeper starts a cluster and a process with a pool on it, and waits until the pool works.
func startSleeper(t *testing.T, settings crdbdraintest.Settings, spec sleeperSpec, dsn func(*crdbdraintest.Cluster) string) *sleepTest {
	t.Helper()
	s := &sleepTest{T: t, lines: make(chan sleeperLine, 16), parked: make(chan string, 4), release: make(chan struct{}),
		executed: make(map[string]int), unsure: make(map[int64]bool)}
	s.c = startCluster(t, crdbdraintest.Config{Settings: settings, Handler: s.execute,
		LoadBalancer: crdbdraintest.LoadBalancerConfig{Interval: 500 * time.Millisecond, Fall: 5}}) // at load an answer takes its time
	s.c.Grant("app", "VIEWSYSTEMTABLE")
	s.c.Grant("app", "VIEWCLUSTERMETADATA")
	spec.DSN = dsn(s.c)
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s.cmd = exec.CommandContext(t.Context(), self, "-test.run=^TestSuspendedProcess$", "-test.timeout=2m")
	s.cmd.Env = append(os.Environ(), sleeperVariable+"="+string(text))
	var stderr bytes.Buffer
	s.cmd.Stderr = &stderr
	in, err := s.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.orders = json.NewEncoder(in)
	sleepersStart <- struct{}{}
	defer func() { <-sleepersStart }()
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var reader sync.WaitGroup
	reader.Go(func() { s.read(out) })
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill() // also one that is stopped
		reader.Wait()
		_ = s.cmd.Wait()
		if t.Failed() {
			t.Logf("the process said\n%s\n%s", strings.Join(s.rest, "\n"), stderr.String())
		}
	})
	s.await("ready")
	return s
}

// execute is the cluster's Handler.
func (s *sleepTest) execute(q crdbdraintest.Query) *crdbdraintest.Result {
	if len(q.Args) == 1 {
		s.mu.Lock()
		s.executed[fmt.Sprint(q.Args[0])]++
		s.mu.Unlock()
	}
	switch q.SQL {
	case sleeperAnswered:
		s.parked <- q.SQL
		select {
		case <-s.release:
		case <-q.Context().Done():
		}
	case sleeperCut:
		s.parked <- q.SQL
		<-q.Context().Done()
	}
	return nil
}

func (s *sleepTest) read(out io.Reader) {
	defer close(s.lines)
	for r := bufio.NewScanner(out); r.Scan(); {
		var l sleeperLine
		if json.Unmarshal(r.Bytes(), &l) != nil || l.Event == "" {
			s.mu.Lock()
			s.rest = append(s.rest, r.Text())
			s.mu.Unlock()
			continue
		}
		if l.Event == "error" {
			s.mu.Lock()
			s.errors = append(s.errors, l)
			for _, id := range l.IDs {
				s.unsure[id] = true
			}
			s.mu.Unlock()
			continue
		}
		s.lines <- l
	}
}

// await waits for a line.
func (s *sleepTest) await(event string) sleeperLine {
	s.Helper()
	select {
	case l, ok := <-s.lines:
		if !ok || l.Event != event {
			s.Fatalf("the process says %q, want %q", l.Event, event)
		}
		return l
	case <-time.After(2 * sleeperWait):
		s.Fatalf("the process does not say %q", event)
	}
	return sleeperLine{}
}

func (s *sleepTest) order(o sleeperOrder) {
	s.Helper()
	if err := s.orders.Encode(o); err != nil {
		s.Fatal(err)
	}
}

func (s *sleepTest) do(o sleeperOrder, answer string) sleeperLine {
	s.Helper()
	s.order(o)
	return s.await(answer)
}

// stop stops the process, and returns when none of its threads runs.
func (s *sleepTest) stop() {
	s.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		s.Fatal(err)
	}
	var status syscall.WaitStatus
	for {
		_, err := syscall.Wait4(s.cmd.Process.Pid, &status, syscall.WUNTRACED, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || !status.Stopped() {
			s.Fatalf("the process has not stopped: %v, %v", status, err)
		}
		break
	}
	s.stopped = time.Now()
}

func (s *sleepTest) goOn() {
	s.Helper()
	s.continued = time.Now()
	if err := s.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		s.Fatal(err)
	}
}

// dials counts the dials in the first moments after the process went on.
func (s *sleepTest) dials(d time.Duration) (n int) {
	time.Sleep(time.Until(s.continued.Add(d)))
	for _, at := range s.c.Stats().Dials {
		if !at.Before(s.continued) && at.Before(s.continued.Add(d)) {
			n++
		}
	}
	return n
}

// fewDials fails if the process dialled more than most within a second of going on, and tells how many it was.
func (s *sleepTest) fewDials(most int) string {
	s.Helper()
	soon, second := s.dials(100*time.Millisecond), s.dials(time.Second)
	if second > most {
		s.Errorf("%d dials in the first 100 ms, %d in the first second, want at most %d", soon, second, most)
	}
	return fmt.Sprintf("%d dials in the first 100 ms, %d in the first second", soon, second)
}

// end tells the process to end, now or when it goes on, and holds what it did against what the nodes did.
func (s *sleepTest) end() sleeperLine {
	s.Helper()
	s.order(sleeperOrder{Do: "end"})
	return s.ended()
}

func (s *sleepTest) ended() sleeperLine {
	s.Helper()
	l := s.await("ended")
	told := time.Now()
	for range s.lines { // until its output ends
		s.Error("the process has more to say")
	}
	if err := s.cmd.Wait(); err != nil {
		s.Errorf("the process: %v", err) // goroutines that are left, among others (TestMain)
	}
	if took := time.Since(told); took > 10*time.Second {
		s.Errorf("the process took %v to end", took)
	}
	within(s, sleeperWait, "no session is open", func() bool { return s.c.Stats().Open == 0 })
	s.mu.Lock()
	defer s.mu.Unlock()
	var never, again []int64
	for id := int64(1); id <= l.Last; id++ {
		switch n := s.executed[fmt.Sprint(id)]; {
		case n > 1:
			again = append(again, id)
		case n == 0 && !s.unsure[id]:
			never = append(never, id)
		}
	}
	if len(never)+len(again) > 0 {
		s.Errorf("of %d updates, %v were executed more than once, and %v never, though they were acknowledged", l.Last, again, never)
	}
	return l
}

// take takes the errors for which it holds out of those that are left.
func (s *sleepTest) take(holds func(sleeperLine) bool) (taken []sleeperLine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.errors = slices.DeleteFunc(s.errors, func(e sleeperLine) bool {
		if holds(e) {
			taken = append(taken, e)
			return true
		}
		return false
	})
	return taken
}

func (s *sleepTest) noErrors() {
	s.Helper()
	for _, e := range s.take(func(sleeperLine) bool { return true }) {
		s.Errorf("%s, begun %v after the stop: %s", e.What, time.Unix(0, e.Began).Sub(s.stopped).Round(time.Microsecond), e.Error)
	}
}

// fullest is the node with the most sessions.
func (s *sleepTest) fullest() *crdbdraintest.Node {
	return slices.MaxFunc(s.c.Nodes(), func(a, b *crdbdraintest.Node) int { return a.Stats().Open - b.Stats().Open })
}

const (
	sleeperParams = "&crdbdrain_poll_interval_draining=100ms"
	often         = "&crdbdrain_poll_interval=200ms"
	// With patient settings no answer to a poll is too late or too old when the process goes on.
	patient = "&crdbdrain_poll_interval=1s&crdbdrain_poll_timeout=20s"
)

func behindOne(params string) func(*crdbdraintest.Cluster) string {
	return func(c *crdbdraintest.Cluster) string {
		return c.DSN() + sleeperParams + "&crdbdrain_readiness=" + c.ReadinessURLs() + params
	}
}

func everyNode(params string) func(*crdbdraintest.Cluster) string {
	return func(c *crdbdraintest.Cluster) string {
		return c.DSNAll() + sleeperParams + "&crdbdrain_readiness=" + c.ReadinessURLs() + params
	}
}

// Processes are stopped (SIGSTOP: a laptop's shell, a debugger, a container's freezer), the cluster goes on without them,
// and both of their clocks run on: when they go on everything is late at once. The application sees nothing of it but what
// the server cut short; and what was late does not happen all at once.
func TestSuspendedProcess(t *testing.T) {
	if spec := os.Getenv(sleeperVariable); spec != "" {
		runSleeper(t, spec)
		return
	}
	var tests sync.WaitGroup
	for name, test := range map[string]func(*testing.T){
		"calm, a load balancer":                func(t *testing.T) { sleepInCalm(t, behindOne(often)) },
		"calm, every node":                     func(t *testing.T) { sleepInCalm(t, everyNode(often)) },
		"past every TTL":                       sleepPastTTL,
		"into a window":                        func(t *testing.T) { sleepIntoWindow(t, behindOne(often+"&crdbdrain_window=3s"), false) },
		"while leaving":                        func(t *testing.T) { sleepIntoWindow(t, everyNode(often+"&crdbdrain_window=3s"), true) },
		"through a drain, the node is gone":    func(t *testing.T) { sleepThroughDrain(t, behindOne(often), false) },
		"through a drain, one of many is gone": func(t *testing.T) { sleepThroughDrain(t, everyNode(often), false) },
		"through a drain, the node is back":    func(t *testing.T) { sleepThroughDrain(t, behindOne(often), true) },
		"through a drain, one of many is back": func(t *testing.T) { sleepThroughDrain(t, everyNode(often), true) },
		"through a roll without a word":        sleepThroughSilentRoll,
		"through a roll":                       func(t *testing.T) { sleepThroughRoll(t, behindOne(often), false, false) },
		"through a roll, to close the DB":      func(t *testing.T) { sleepThroughRoll(t, everyNode(often), true, false) },
		"through a roll, to shut down":         func(t *testing.T) { sleepThroughRoll(t, behindOne(often), true, true) },
	} {
		tests.Go(func() { t.Run(name, test) }) // all at once: they wait more than they work
	}
	tests.Wait()
}

// Nothing happens: no error, no mark, nothing culled, nothing moved.
func sleepInCalm(t *testing.T, dsn func(*crdbdraintest.Cluster) string) {
	s := startSleeper(t, crdbdraintest.Settings{TransactionsTimeout: time.Second}, sleeperSpec{Shutdown: true}, dsn)
	s.stop()
	time.Sleep(2500 * time.Millisecond) // longer than a poll, and than pgx lets a connection be idle without a ping
	s.goOn()
	s.do(sleeperOrder{Do: "work"}, "worked")
	dials := s.fewDials(3)
	l := s.end()
	s.noErrors()
	t.Logf("%s; %d operations, %+v, log %q", dials, l.Ops, l.Stats, l.Log)
	if l.Stats != (Stats{}) || l.Marks > 0 {
		t.Errorf("%+v, %d marks", l.Stats, l.Marks)
	}
}

// Every connection is past its TTL when the process goes on: they still go one per stagger.
func sleepPastTTL(t *testing.T) {
	s := startSleeper(t, crdbdraintest.Settings{TransactionsTimeout: time.Second}, sleeperSpec{}, behindOne(patient+"&crdbdrain_ttl=1s&crdbdrain_ttl_stagger=300ms"))
	s.stop()
	time.Sleep(2500 * time.Millisecond)
	s.goOn()
	s.do(sleeperOrder{Do: "work"}, "worked")
	dials := s.fewDials(6)
	l := s.end()
	s.noErrors()
	t.Logf("%s; %d operations, %+v, log %q", dials, l.Ops, l.Stats, l.Log)
	if l.Stats.Moved == 0 || l.Stats.Culled+l.Stats.Lost > 0 {
		t.Errorf("%+v, want some moved and nothing else", l.Stats)
	}
}

// The drain begins while the process is stopped, or the process is stopped while it leaves the node; it goes on when new
// connections are refused already. The drain waits: it ends because the process has left, and not because the time was over.
func sleepIntoWindow(t *testing.T, dsn func(*crdbdraintest.Cluster) string, leaving bool) {
	s := startSleeper(t, crdbdraintest.Settings{InitialWait: 1200 * time.Millisecond, ConnectionsTimeout: sleeperWait, TransactionsTimeout: 10 * time.Second},
		sleeperSpec{}, dsn)
	n := s.fullest()
	before := n.Stats().Open
	if !leaving {
		s.stop()
	}
	done := make(chan crdbdraintest.DrainResult, 1)
	go func() { done <- n.Drain(context.Background()) }()
	if leaving {
		within(t, sleeperWait, "a connection leaves", func() bool { return n.Stats().Open < before })
		s.stop()
	}
	if err := n.WaitStep(t.Context(), crdbdraintest.Refusing); err != nil {
		t.Fatal(err)
	}
	s.goOn()
	d := <-done
	took := time.Since(s.continued)
	s.do(sleeperOrder{Do: "work"}, "worked")
	dials := s.fewDials(sleeperConns + 8)
	l := s.end()
	s.noErrors()
	t.Logf("%d connections, gone %v after the stop; %s; %d operations, %+v, log %q", before, took, dials, l.Ops, l.Stats, l.Log)
	if d.Err != nil || d.LostIdle+d.LostBusy > 0 || l.Stats.Lost > 0 {
		t.Errorf("%+v; %+v", d, l.Stats)
	}
}

// The process is stopped before a drain without a window, and goes on when the node's process has ended, and perhaps begun
// again. What the server could not bring to its end fails, once, with the server's own error; nothing else does.
func sleepThroughDrain(t *testing.T, dsn func(*crdbdraintest.Cluster) string, restart bool) {
	s := startSleeper(t, crdbdraintest.Settings{TransactionsTimeout: time.Second}, sleeperSpec{}, dsn)
	n := s.fullest()
	open := n.Stats().Open
	s.do(sleeperOrder{Do: "hold", Node: n.ID()}, "held")
	for _, query := range []string{sleeperAnswered, sleeperCut} {
		s.order(sleeperOrder{Do: "park", Node: n.ID(), SQL: query})
		select {
		case <-s.parked:
		case <-time.After(sleeperWait):
			t.Fatalf("%s does not arrive", query)
		}
	}
	s.stop()
	close(s.release)
	d := n.Drain(context.Background())
	n.Stop()
	if restart {
		n.Start()
	}
	s.goOn()
	s.do(sleeperOrder{Do: "work"}, "worked")
	s.do(sleeperOrder{Do: "finish"}, "finished")
	dials := s.fewDials(open + 6)
	l := s.end()
	t.Logf("%v; %s; %d operations, %+v, log %q", d, dials, l.Ops, l.Stats, l.Log)
	if cut := s.take(func(e sleeperLine) bool { return e.What == sleeperCut }); len(cut) != 1 || cut[0].Code != "57014" || cut[0].BadConn {
		t.Errorf("the statement that ran until the node's deadline: %+v, want 57014", cut)
	}
	if held := s.take(func(e sleeperLine) bool { return e.What == "held" }); len(held) != 1 || held[0].Code != stateAdminShutdown || held[0].BadConn {
		t.Errorf("the transaction that was open at the node's deadline: %+v, want 57P01", held)
	}
	s.transactionsUnderWay(d.LostBusy - 2)
	s.noErrors()
	if l.Stats.Lost == 0 {
		t.Errorf("%+v, %+v: nothing was lost", d, l.Stats)
	}
}

// transactionsUnderWay takes the errors of transactions that were open when the process was stopped. They are the server's
// or the connection's end, and no more than it has cut.
func (s *sleepTest) transactionsUnderWay(most int) {
	s.Helper()
	under := s.take(func(e sleeperLine) bool {
		return (e.What == "in a transaction" || e.What == "commit") && e.Began <= s.stopped.UnixNano() && !e.BadConn
	})
	if len(under) > most {
		s.Errorf("%d transactions have failed, %d were cut: %+v", len(under), most, under)
	}
}

// A proxy keeps the goodbyes to itself: the connections just end, all of them, while nobody uses one. (Of what is under way
// then nobody can tell whether it was executed.)
func sleepThroughSilentRoll(t *testing.T) {
	s := startSleeper(t, crdbdraintest.Settings{TransactionsTimeout: 300 * time.Millisecond}, sleeperSpec{}, everyNode(often))
	s.do(sleeperOrder{Do: "rest"}, "resting")
	s.stop()
	idle := 0
	for _, n := range s.c.Nodes() {
		n.SetFaults(crdbdraintest.Faults{DrainEnd: crdbdraintest.EndFIN})
		idle += n.Restart(context.Background()).LostIdle
	}
	if idle < sleeperConns {
		t.Errorf("%d idle connections have ended, want every one", idle)
	}
	s.goOn()
	s.do(sleeperOrder{Do: "work"}, "worked")
	dials := s.fewDials(sleeperConns + 8)
	l := s.end()
	t.Logf("%s; %d operations, %+v, log %q", dials, l.Ops, l.Stats, l.Log)
	s.noErrors()
}

// Every connection that the process had ended while it was stopped.
func sleepThroughRoll(t *testing.T, dsn func(*crdbdraintest.Cluster) string, closing, shutdown bool) {
	s := startSleeper(t, crdbdraintest.Settings{TransactionsTimeout: 300 * time.Millisecond}, sleeperSpec{Shutdown: shutdown}, dsn)
	s.stop()
	busy := 0
	for _, n := range s.c.Nodes() {
		d := n.Restart(context.Background())
		busy += d.LostBusy
	}
	var l sleeperLine
	dials := ""
	if closing {
		s.order(sleeperOrder{Do: "end"})
		s.goOn()
		l = s.ended()
	} else {
		s.goOn()
		s.do(sleeperOrder{Do: "work"}, "worked")
		dials = s.fewDials(sleeperConns + 8)
		l = s.end()
	}
	t.Logf("%d busy; %s; %d operations, %+v, log %q", busy, dials, l.Ops, l.Stats, l.Log)
	s.transactionsUnderWay(busy)
	s.noErrors()
}

// lateLog is a logger that keeps whoever writes the first line with its text for a while: the worker of the watchdog, which
// is late then for all that it has to do.
type lateLog struct {
	logTrap
	text string
	kept atomic.Bool
	late time.Duration
	woke chan time.Time
}

func (l *lateLog) Handle(ctx context.Context, r slog.Record) error {
	if strings.Contains(r.Message, l.text) && l.kept.CompareAndSwap(false, true) {
		time.Sleep(l.late)
		l.woke <- time.Now()
	}
	return l.logTrap.Handle(ctx, r)
}

// The worker is late by minutes, and a node is drained and restarted meanwhile: callers go on without it, and then what it
// has to do is still paced, with every poll, sweep and TTL due at once. (A bubble of synctest has one clock for all: that
// the whole process is late is TestSuspendedProcess.)
func TestALateWorker(t *testing.T) {
	for _, line := range []string{"source fails", "a node is leaving"} {
		t.Run(line, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const stagger = 3 * time.Second
				log := &lateLog{text: line, late: 2 * time.Minute, woke: make(chan time.Time, 1)}
				c := crdbdraintest.Start(crdbdraintest.Config{Memory: true, LoadBalancer: crdbdraintest.LoadBalancerConfig{Interval: time.Second},
					Settings: crdbdraintest.Settings{InitialWait: 6 * time.Second, ConnectionsTimeout: 4 * time.Second, TransactionsTimeout: 10 * time.Second}})
				defer c.Close()
				c.Grant("app", "VIEWSYSTEMTABLE")
				db := memPool(t, c, "crdbdrain_window=10s&crdbdrain_sources=instances&crdbdrain_rebalance=off&crdbdrain_ttl=3m&crdbdrain_ttl_stagger="+stagger.String(),
					func(_ *pgx.ConnConfig, con *Connector) {
						if con != nil {
							con.log = slog.New(log)
						}
					})
				defer db.Close()
				fill(t, db.DB, 20)
				time.Sleep(2 * time.Minute)
				if line == "source fails" {
					for _, n := range c.Nodes() {
						n.SetFaults(crdbdraintest.Faults{Source: func(string) *crdbdraintest.Result {
							return &crdbdraintest.Result{Err: &pgconn.PgError{Code: "XX000", Message: "internal error"}}
						}})
					}
					for !log.kept.Load() {
						time.Sleep(time.Second)
					}
					for _, n := range c.Nodes() {
						n.SetFaults(crdbdraintest.Faults{})
					}
				}
				l := startLoad(t, db.DB, 4, 500*time.Millisecond)
				d := c.Node(1).Restart(context.Background())
				woke := <-log.woke
				time.Sleep(90 * time.Second)
				l.stop()
				var dials []time.Time
				for _, at := range c.Stats().Dials {
					if !at.Before(woke) {
						dials = append(dials, at)
					}
				}
				stats := db.c.Stats()
				t.Logf("%v; %d dials after the worker woke, %d within a stagger; %d operations, %+v\n%s", d, len(dials), mostIn(dials, stagger), l.ops.Load(), stats, &log.logTrap)
				if len(l.errors) > 0 {
					t.Errorf("errors: %v", l.errors)
				}
				// One for the TTL, the watchdog's own, and what is found to be lost.
				if most := mostIn(dials, stagger); most > 5 || stats.Moved < 10 {
					t.Errorf("%d dials within %v after the worker woke, %d moved, want one after the other", most, stagger, stats.Moved)
				}
			})
		})
	}
}
