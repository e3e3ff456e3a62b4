// Package check holds the documents' dashboard and alerts against what the driver really exports.
package check

import (
	"context"
	"database/sql"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.uber.org/goleak"

	"github.com/crdbdrain/crdbdrain"
	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// series is what is exported: by name, the values of each label.
type series map[string]map[string]map[string]bool

// export runs a pool through a drain, and returns what a scrape then sees.
func export(t *testing.T) series {
	t.Helper()
	cluster := crdbdraintest.Start(crdbdraintest.Config{Settings: crdbdraintest.Settings{
		InitialWait: 500 * time.Millisecond, ConnectionsTimeout: 2 * time.Second}})
	defer cluster.Close()
	cfg, err := pgx.ParseConfig(cluster.DSN() + "&crdbdrain_cluster=orders&crdbdrain_max_connections=100&crdbdrain_poll_interval=100ms" +
		"&crdbdrain_window=2500ms&crdbdrain_readiness=" + cluster.ReadinessURLs())
	if err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	if err != nil {
		t.Fatal(err)
	}
	provider := metric.NewMeterProvider(metric.WithReader(exporter))
	defer provider.Shutdown(context.Background())
	connector, err := crdbdrain.NewConnector(cfg, crdbdrain.WithMeterProvider(provider), crdbdrain.WithNodeMetric())
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	db.SetMaxIdleConns(9)
	conns := make([]*sql.Conn, 9)
	for i := range conns {
		if conns[i], err = db.Conn(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range conns {
		c.Close()
	}
	if d := cluster.Node(1).Drain(t.Context()); d.Err != nil || d.LostIdle > 0 {
		t.Fatalf("with a window: %+v", d)
	}
	cluster.SetSettings(crdbdraintest.Settings{})
	if d := cluster.Node(2).Drain(t.Context()); d.Err != nil || d.LostIdle == 0 {
		t.Fatalf("without one: %+v", d)
	}
	for deadline := time.Now().Add(10 * time.Second); connector.Stats().Lost == 0; { // until the pool has seen it
		if time.Now().After(deadline) {
			t.Fatalf("nothing lost: %+v", connector.Stats())
		}
		if err := db.PingContext(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := make(series)
	add := func(name string, m *dto.Metric, more ...string) {
		if all[name] == nil {
			all[name] = make(map[string]map[string]bool)
		}
		for _, l := range m.GetLabel() {
			if all[name][l.GetName()] == nil {
				all[name][l.GetName()] = make(map[string]bool)
			}
			all[name][l.GetName()][l.GetValue()] = true
		}
		for _, l := range more {
			all[name][l] = map[string]bool{}
		}
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetType() == dto.MetricType_HISTOGRAM {
				add(f.GetName()+"_bucket", m, "le")
				add(f.GetName()+"_sum", m)
				add(f.GetName()+"_count", m)
				continue
			}
			add(f.GetName(), m)
		}
	}
	return all
}

// targetLabels are those that Prometheus adds.
var targetLabels = []string{"job", "instance"}

// query checks one PromQL expression: what it selects is exported, with these labels and, where they are given, values.
func (all series) query(t *testing.T, where, text string) parser.Expr {
	t.Helper()
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(text)
	if err != nil {
		t.Errorf("%s: %v", where, err)
		return nil
	}
	for _, f := range all.faults(expr) {
		t.Errorf("%s: %s", where, f)
	}
	return expr
}

func (all series) faults(expr parser.Expr) (faults []string) {
	has := func(name, label string) bool {
		return slices.Contains(targetLabels, label) || all[name][label] != nil
	}
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		switch n := node.(type) {
		case *parser.VectorSelector:
			if all[n.Name] == nil {
				faults = append(faults, n.Name+" is not exported")
				return nil
			}
			for _, m := range n.LabelMatchers {
				switch {
				case m.Name == model.MetricNameLabel:
				case !has(n.Name, m.Name):
					faults = append(faults, n.Name+" has no label "+m.Name)
				case slices.Contains(targetLabels, m.Name) || strings.Contains(m.Value, "variable"):
				case m.Type == labels.MatchEqual && !all[n.Name][m.Name][m.Value]:
					faults = append(faults, n.Name+" has no "+m.Name+"="+m.Value)
				case m.Type == labels.MatchRegexp:
					for v := range strings.SplitSeq(m.Value, "|") {
						if !all[n.Name][m.Name][v] {
							faults = append(faults, n.Name+" has no "+m.Name+"="+v)
						}
					}
				}
			}
		case *parser.AggregateExpr:
			parser.Inspect(n.Expr, func(below parser.Node, _ []parser.Node) error {
				if v, ok := below.(*parser.VectorSelector); ok {
					for _, l := range n.Grouping {
						if !has(v.Name, l) {
							faults = append(faults, v.Name+" has no label "+l+" to aggregate by")
						}
					}
				}
				return nil
			})
		}
		return nil
	})
	return faults
}

// resultLabels are the labels that an expression's outermost aggregation leaves; ok is false where it has none.
func resultLabels(expr parser.Expr) (left []string, ok bool) {
	parser.Inspect(expr, func(node parser.Node, path []parser.Node) error {
		if a, is := node.(*parser.AggregateExpr); is && !ok {
			left, ok = a.Grouping, true
		}
		return nil
	})
	return left, ok
}

var (
	alertLabel  = regexp.MustCompile(`\$labels\.(\w+)`)
	legendLabel = regexp.MustCompile(`\{\{(\w+)\}\}`)
	// What Grafana puts in before Prometheus sees the query.
	grafana = strings.NewReplacer("$__rate_interval", "5m", "$__range", "3h", "$job", "variable", "$cluster", "variable")
)

func TestTheAlertsFitWhatIsExported(t *testing.T) {
	all := export(t)
	groups, errs := rulefmt.ParseFile("../alerts.yml", false, model.UTF8Validation, parser.NewParser(parser.Options{}), slog.Default())
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	manual, err := os.ReadFile("../operating.md")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			n++
			expr := all.query(t, r.Alert, r.Expr)
			left, _ := resultLabels(expr)
			for _, text := range r.Annotations {
				for _, m := range alertLabel.FindAllStringSubmatch(text, -1) {
					if !slices.Contains(left, m[1]) {
						t.Errorf("%s: its result has no label %s", r.Alert, m[1])
					}
				}
			}
			if !strings.Contains(string(manual), r.Alert) {
				t.Errorf("operating.md does not say what to do about %s", r.Alert)
			}
		}
	}
	if n == 0 {
		t.Error("no rule")
	}
}

func TestTheDashboardFitsWhatIsExported(t *testing.T) {
	all := export(t)
	text, err := os.ReadFile("../dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			ID      int
			Title   string
			GridPos struct{ X, Y, W, H int }
			Targets []struct{ Expr, LegendFormat string }
		}
		Templating struct {
			List []struct{ Name, Type, Definition string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	ids := make(map[int]bool)
	used := make(map[string]bool)
	for i, p := range dashboard.Panels {
		if ids[p.ID] {
			t.Errorf("%s: another panel has the ID %d", p.Title, p.ID)
		}
		ids[p.ID] = true
		for _, o := range dashboard.Panels[:i] {
			a, b := p.GridPos, o.GridPos
			if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("%s lies on %s", p.Title, o.Title)
			}
		}
		for _, target := range p.Targets {
			expr := all.query(t, p.Title, grafana.Replace(target.Expr))
			left, _ := resultLabels(expr)
			for _, m := range legendLabel.FindAllStringSubmatch(target.LegendFormat, -1) {
				if !slices.Contains(left, m[1]) {
					t.Errorf("%s: the legend names %s, which the result does not have", p.Title, m[1])
				}
			}
			for name := range all {
				if strings.Contains(target.Expr, name) {
					used[name] = true
				}
			}
		}
	}
	for _, v := range dashboard.Templating.List {
		if v.Type != "query" {
			continue
		}
		m := regexp.MustCompile(`^label_values\((\w+), (\w+)\)$`).FindStringSubmatch(v.Definition)
		if m == nil || all[m[1]] == nil || !slices.Contains(targetLabels, m[2]) && all[m[1]][m[2]] == nil {
			t.Errorf("variable %s: %s", v.Name, v.Definition)
		}
	}
	for name := range all {
		histogram := strings.HasSuffix(name, "_sum") || strings.HasSuffix(name, "_seconds_count")
		if !used[name] && !histogram && name != "target_info" && name != "crdbdrain_connection_node" && name != "crdbdrain_dial_count" {
			t.Errorf("%s is exported, and on no panel", name)
		}
	}
}

// Every line that the driver logs is in the troubleshooting page, and that page names no other.
func TestEveryLogLineIsExplained(t *testing.T) {
	page, err := os.ReadFile("../troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, dir := range []string{"../..", "../../internal/feedcmd"} {
		some, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil || len(some) == 0 {
			t.Fatal(dir, err)
		}
		files = append(files, some...)
	}
	logged := regexp.MustCompile(`(?:log|log\.(?:Info|Warn|Error))\("crdbdrain: ([^"]+)"`)
	said := make(map[string]bool)
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range logged.FindAllStringSubmatch(string(source), -1) {
			said[m[1]] = true
			if !strings.Contains(string(page), "| `"+m[1]+"`") {
				t.Errorf("%s logs %q: troubleshooting.md has no row for it", filepath.Base(file), m[1])
			}
		}
	}
	_, table, _ := strings.Cut(string(page), "## By log line")
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)`").FindAllStringSubmatch(table, -1) {
		if !said[m[1]] {
			t.Errorf("troubleshooting.md explains %q, which nothing logs", m[1])
		}
	}
}

// Links between the documents, and to files of the project, lead somewhere.
func TestLinksLeadSomewhere(t *testing.T) {
	pages, err := filepath.Glob("../*.md")
	if err != nil || len(pages) == 0 {
		t.Fatal(pages, err)
	}
	pages = append(pages, "../../README.md")
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(string(text), -1) {
			file, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(file, "://") {
				continue
			}
			target := page
			if file != "" {
				target = filepath.Join(filepath.Dir(page), file)
			}
			there, err := os.Stat(target)
			if err != nil {
				t.Errorf("%s: %s: %v", filepath.Base(page), m[1], err)
				continue
			}
			if anchor == "" || there.IsDir() {
				continue
			}
			text, err := os.ReadFile(target)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(anchors(string(text)), anchor) {
				t.Errorf("%s: %s: there is no such heading", filepath.Base(page), m[1])
			}
		}
	}
}

// anchors are the names that GitHub gives to the headings.
func anchors(page string) (names []string) {
	drop := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	for _, m := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(page, -1) {
		names = append(names, strings.ReplaceAll(drop.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return names
}

// The drawing is well-formed.
func TestTheDrawingIsXML(t *testing.T) {
	file, err := os.Open("../signals.svg")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	elements := 0
	for d := xml.NewDecoder(file); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := token.(xml.StartElement); ok {
			elements++
		}
	}
	if elements == 0 {
		t.Error("it is empty")
	}
}

// The check itself finds what it is there for.
func TestTheCheckFindsFaults(t *testing.T) {
	all := series{"a_total": {"state": {"idle": true}}}
	for text, want := range map[string]int{
		`sum by (state) (rate(a_total{state="idle",job="x"}[5m]))`: 0,
		`rate(b_total[5m])`:           1,
		`a_total{stat="idle"}`:        1,
		`a_total{state="idel"}`:       1,
		`a_total{state=~"idle|idel"}`: 1,
		`sum by (stat) (a_total)`:     1,
	} {
		expr, err := parser.NewParser(parser.Options{}).ParseExpr(text)
		if err != nil {
			t.Fatal(err)
		}
		if got := all.faults(expr); len(got) != want {
			t.Errorf("%s: %v, want %d", text, got, want)
		}
	}
}
