//go:build ignore

// Mutants breaks conditions that the promises rest on, one at a time, in a copy of the tree, and runs the tests that
// have to notice: go run .ci/mutants.go [-run NAME] [-n]. It exits with 1 if a mutant survives, or its text is not there.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// mutant is a condition, what it becomes, and the tests that fail then.
type mutant struct {
	name, file, from, to, tests string
}

var mutants = []mutant{
	{"a return inside a transaction is kept", "validator.go", "if s.pg.IsClosed() || s.pg.TxStatus() != 'I' {", "if s.pg.IsClosed() {", "TestIsValidRefuses"},
	{"a goodbye heard does not keep a connection from the pool", "validator.go", "	if s.link.words.Load() != goodbyeNone {\n		s.lost(lostIdle)\n		return false\n	}\n	if m := s.w.marks", "	if m := s.w.marks", "TestIsValidRefuses"},
	{"a checkout does not look at the socket", "validator.go", "	case look == peekClosed:\n		alive = false", "	case look == peekClosed:", "TestA04A05A06|TestA19|TestFaultMatrix|TestExactlyOnce"},
	{"an end right after the return is not seen", "validator.go", "	if !bad && s.dead(ctx) {", "	if !bad && idle > time.Millisecond && s.dead(ctx) {", "TestAnEndRightAfter"},
	{"the sweep takes sessions in use", "marks.go", "		from = sessionIdle\n", "		from = s.state.Load()\n", "FuzzCulls|TestModelSchedules|TestB04|TestA11|TestB10"},
	{"a statement inside a transaction runs again", "validator.go", "if !s.connector.cfg.rerun || !r.outside {", "if !s.connector.cfg.rerun {", "TestA03|TestExactlyOnce"},
	{"a statement that was answered in part runs again", "lastwords.go", "	default:\n		l.reply()\n", "	default:\n", "TestA03|TestExactlyOnce"},
	{"what is cut while it is prepared fails", "validator.go", "!s.link.asked.Load() && s.link.nothingRan()", "false", "TestAStatementCut"},
	{"what is executed passes for prepared", "lastwords.go", "	default:\n			return false\n		}\n		if len(p) < 5 {", "	default:\n		}\n		if len(p) < 5 {", "TestOnlyPrepares|TestB08|TestExactlyOnce"},
	{"what ends nodes is prepared by one after the other", "validator.go", "!again && !c.cut && r.first", "!again && r.first", "TestWhatEndsNodes"},
	{"any cut statement runs again", "validator.go", "kind != rerunStatement && !pgconn.Timeout(err)", "!pgconn.Timeout(err)", "TestB08|TestFaultMatrix|TestExactlyOnce"},
	{"a goodbye that pgx loses is no answer", "validator.go", "(sqlState(err) == stateAdminShutdown || s.link.nothingRan())", "sqlState(err) == stateAdminShutdown", "TestGoodbyeTo"},
	{"a goodbye behind any answer is the only one", "lastwords.go", "return l.ran.Load() == l.began", "return true", "TestGoodbyeBehind"},
	{"a replacement is made for any request", "validator.go", "	if r.first && c.mend(ctx) == nil {", "	if c.mend(ctx) == nil {", "TestExactlyOnce|TestE06|TestPinned|TestRerun|TestA03"},
	{"what runs again is not replaced while it is prepared again", "validator.go", "	st.conn.untouched = true\n	err := st.renew", "	err := st.renew", "TestAStatementThatIsPrepared"},
	{"an error's first text counts, not its last", "lastwords.go", "f.message = string(f.value)", "if f.message == \"\" {\n f.message = string(f.value)\n}", "TestLastWords|TestErrorFields"},
	{"half a gauge names a node", "source_readiness.go", "if err == nil || err == io.EOF && body.N > 0 {", "if true {", "TestReadinessHalfAGauge"},
	{"any 57P01 is a drain's", "sqlstate.go", "return code == stateAdminShutdown && (message == noticeShuttingDown || message == noticeNotAcceptingClients)", "return code == stateAdminShutdown", "TestE07|TestB09|TestIsGoodbye|TestSQLState|TestOther57P01|TestFaultMatrix"},
	{"0A000 is always permanent", "sqlstate.go", `if strings.Contains(pgErr.Message, "virtual cluster") || strings.Contains(pgErr.Message, "multi-tenancy") {`, `if true {`, "TestD0|TestDenial|TestD07"},
	{"nothing is checked before a cull: no node to go to", "marks.go", "	if !m.somewhereToGo(t, w.interval()) {\n", "	if false {\n", "TestA15|TestI05|TestLyingFeed|TestFuzzedSchedules"},
	{"a fresh connection on a marked node is culled", "marks.go", "	if younger && (mk.decommissioning", "	if false && (mk.decommissioning", "FuzzCulls|TestModelSchedules|TestA12|TestB01|TestARestarted|TestDecommission"},
	{"the pace is not kept", "limiter.go", "	if p.limiter.TokensAt(now) < 1-1e-9 {\n		return token{}, false\n	}\n", "", "TestB15|TestB10|FuzzCulls|TestLimiter|TestH07|TestPace"},
	{"the pace is not fitted to the window", "limiter.go", "return min(stagger, time.Duration(float64(time.Second)/perSecond))", "return stagger", "TestH07|TestGap"},
	{"what comes back for the last time waits for the pace", "marks.go", "!mk.over && !w.lastCall(s, mk, t, point)", "!mk.over", "TestConnectionsThatComeBack"},
	{"more spares are dialled than have to leave", "spares.go", "min(spares+int(sp.ahead.Load()), sp.leaving)", "spares+int(sp.ahead.Load())", "TestNoMoreSpares"},
	{"a feed does not tell of a node's return", "marks.go", "(again || refutes && n.heard.Before(asked))", "(again && false || refutes && n.heard.Before(asked))", "TestAFeedTells"},
	{"a slow server is taken for one that is gone", "validator.go", "max(maxPing, min(2*time.Duration(s.connector.welcomed.Load()), maxSlowPing))", "maxPing", "TestSlowServers"},
	{"a node that does not say its ID fails the dial", "connector.go", "if errors.Is(err, errUnanswered) {", "if false {", "TestANodeThatDoes"},
	{"a late notice does not hurry the pool", "limiter.go", "!calm.IsZero() && hurry.Before(target)", "false", "TestNeed|TestTheDefaultPoll"},
	{"the pool does not hurry for a node that is decommissioned", "marks.go", "graver := mk.since.IsZero() || mk.decommissioning && !n.decommissioning", "graver := mk.since.IsZero()", "TestSourcesMakeOneMark|TestADrainAfter"},
	{"a pool without a spare holds up the others", "watchdog.go", "		if v == unready {\n", "		if v == unready {\n			left = append(left, s.idle[i:]...)\n			break\n		}\n		if v == unready {\n", "TestASweepGoesOn"},
	{"what a hanging node has held up is old", "source_readiness.go", "(errs[i] == nil || now.Sub(t.asked) <= r.keep)", "now.Sub(t.asked) <= r.keep", "TestAHangingNode"},
	{"a poll through a standstill is taken for a failure", "source.go", "w.overslept = r.overslept && !w.overslept; w.overslept", "w.overslept = r.overslept && !w.overslept; false", "TestF08APoll"},
	{"a replacement in hand is swept", "watchdog.go", " && !c.wouldBe.Load() && !c.reserve.Load() {", " && !c.wouldBe.Load() {", "TestModelSchedules"},
	{"a replacement outlives the session it waits for", "validator.go", "		_ = s.bury()\n	}\n	s.dropReplacement()\n}", "		_ = s.bury()\n	}\n}", "TestDiscardDrops"},
	{"dead connections keep their places under the ceiling", "ceiling.go", "if !l.dropSpare() && !l.dropDead() {", "if !l.dropSpare() {", "TestDeadConnections"},
	{"the watchdog's own new connection does not clear a mark", "source.go", "if w.rule.Load() != ruleUnknown {\n		for _, side", "if false {\n		for _, side", "TestTheWatchdogsDial"},
	{"a refused dial is not tried again", "connector.go", "try < maxRefused && (isRefusal(err) || c.cutByDrain(err))", "false", "TestA07"},
	{"every failed dial is tried again", "connector.go", "try < maxRefused && (isRefusal(err) || c.cutByDrain(err))", "try < maxRefused", "TestB09|TestH09"},
	{"a connection on a marked node is kept at once", "connector.go", "	for range maxSteer {\n		if s.w == nil", "	for range 0 {\n		if s.w == nil", "TestDialsAreSteered"},
	{"a new connection does not clear a goodbye's mark", "marks.go", "if n := said[sourceErrors]; n != nil && opened.After(n.heard) {", "if n := said[sourceErrors]; n != nil && false {", "TestARestarted|TestALate|TestUnannounced|TestCameBack|TestFuzzedSchedules|TestMarks"},
	{"a failing source's marks outlive it", "marks.go", "if s.nodes == nil || t.Sub(s.answered) <= w.keepOf(sourceID(id)) {", "if true {", "TestFeedWithoutNews|TestFuzzedSchedules|TestMarksExpire|TestD07|TestSource"},
	{"a denied role is asked again at every poll", "source.go", "func(r role) bool { return !t.Before(s.denied[r]) }", "func(role) bool { return true }", "TestD02|TestH10|TestARoleThatMay|TestDenied|TestD0"},
	{"the ceiling takes one too many", "ceiling.go", "if limit > 0 && used >= limit {", "if limit > 0 && used > limit {", "TestCeiling"},
}

func main() {
	only := flag.String("run", "", "only mutants whose name contains this")
	look := flag.Bool("n", false, "only look whether each text is there, once")
	flag.Parse()
	tree, err := os.MkdirTemp("", "mutants")
	check(err)
	defer os.RemoveAll(tree)
	check(exec.Command("cp", "-r", ".", tree).Run())
	survivors := 0
	for _, m := range mutants {
		if !strings.Contains(m.name, *only) {
			continue
		}
		file := filepath.Join(tree, m.file)
		text, err := os.ReadFile(file)
		check(err)
		if strings.Count(string(text), m.from) != 1 {
			fmt.Printf("NOT THERE  %-60s %s\n", m.name, m.file)
			survivors++
			continue
		}
		if *look {
			continue
		}
		check(os.WriteFile(file, []byte(strings.Replace(string(text), m.from, m.to, 1)), 0o644))
		start := time.Now()
		test := exec.Command("go", "test", "-timeout=120s", "-failfast", "-run", "^("+m.tests+")", ".")
		test.Dir = tree
		out, err := test.CombinedOutput()
		verdict := "killed by  "
		killer := ""
		for line := range strings.Lines(string(out)) {
			if name, ok := strings.CutPrefix(strings.TrimSpace(line), "--- FAIL: "); ok && killer == "" {
				killer, _, _ = strings.Cut(name, " ")
			}
		}
		switch {
		case err == nil:
			verdict, survivors = "SURVIVES   ", survivors+1
		case killer == "" && strings.Contains(string(out), "panic: "):
			killer = "a panic"
		case killer == "":
			verdict, survivors = "NO TEST RAN", survivors+1
			killer = strings.TrimSpace(string(out[:min(len(out), 200)]))
		}
		fmt.Printf("%s%-60s %s (%.0f s)\n", verdict, m.name, killer, time.Since(start).Seconds())
		check(os.WriteFile(file, text, 0o644))
	}
	if survivors > 0 {
		os.Exit(1)
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
