package crdbdraintest

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// selectStmt is a SELECT of the simple kind: a select list, tables with joins,
// WHERE, ORDER BY, LIMIT. No subqueries, no grouping.
type selectStmt struct {
	list  []item
	from  []from
	where *expr
	order []order
	limit *expr
}

type item struct {
	e     *expr
	name  string
	star  bool
	table string // of table.*
}

type from struct {
	table, alias string
	left         bool
	on           *expr
	using        []string
}

type order struct {
	e    *expr
	desc bool
}

// expr is an expression: "lit", "param", "col", "cast", "call" or an operator.
type expr struct {
	op    string
	val   any
	table string
	name  string
	oid   uint32
	n     int
	args  []*expr
}

// parser is a recursive descent over tokens; errors are panics of *pgconn.PgError.
type parser struct {
	toks []token
	i    int
}

func parseSelect(toks []token) (sel *selectStmt, err *pgconn.PgError) {
	defer func() {
		if r := recover(); r != nil {
			pe, ok := r.(*pgconn.PgError)
			if !ok {
				panic(r)
			}
			sel, err = nil, pe
		}
	}()
	p := &parser{toks: toks}
	p.want("select")
	p.word("all")
	sel = &selectStmt{}
	for {
		sel.list = append(sel.list, p.item())
		if !p.op(",") {
			break
		}
	}
	if p.word("from") {
		sel.from = append(sel.from, p.table())
		for {
			var f from
			switch {
			case p.op(","):
				f = p.table()
			case p.word("cross"):
				p.want("join")
				f = p.table()
			case p.word("join"), p.word("inner"), p.peek("left"):
				left := p.word("left")
				p.word("outer")
				p.word("join")
				f = p.table()
				f.left = left
				if p.word("using") {
					p.wantOp("(")
					for {
						f.using = append(f.using, p.ident())
						if !p.op(",") {
							break
						}
					}
					p.wantOp(")")
				} else {
					p.want("on")
					f.on = p.expr(0)
				}
			}
			if f.table == "" {
				break
			}
			sel.from = append(sel.from, f)
		}
		if p.peek("as") {
			p.want("as")
			p.want("of")
			p.want("system")
			p.want("time")
			p.expr(0)
		}
	}
	if p.word("where") {
		sel.where = p.expr(0)
	}
	if p.word("order") {
		p.want("by")
		for {
			o := order{e: p.expr(0)}
			if !p.word("asc") {
				o.desc = p.word("desc")
			}
			sel.order = append(sel.order, o)
			if !p.op(",") {
				break
			}
		}
	}
	if p.word("limit") {
		sel.limit = p.expr(0)
	}
	if p.word("for") { // FOR UPDATE and its kind
		p.i = len(p.toks)
	}
	if p.i < len(p.toks) {
		panic(syntaxError(p.toks[p.i].text))
	}
	return sel, nil
}

func (p *parser) tok() token {
	if p.i < len(p.toks) {
		return p.toks[p.i]
	}
	return token{text: "EOF"}
}

func (p *parser) peek(w string) bool {
	t := p.tok()
	return t.kind == tokWord && !t.quoted && t.text == w
}

func (p *parser) word(w string) bool {
	if p.peek(w) {
		p.i++
		return true
	}
	return false
}

func (p *parser) want(w string) {
	if !p.word(w) {
		panic(syntaxError(p.tok().text))
	}
}

func (p *parser) op(o string) bool {
	if t := p.tok(); t.kind == tokOp && t.text == o {
		p.i++
		return true
	}
	return false
}

func (p *parser) wantOp(o string) {
	if !p.op(o) {
		panic(syntaxError(p.tok().text))
	}
}

func (p *parser) ident() string {
	t := p.tok()
	if t.kind != tokWord {
		panic(syntaxError(t.text))
	}
	p.i++
	return t.text
}

// keyword reports whether a word cannot be an alias without AS.
func keyword(w string) bool {
	switch w {
	case "from", "where", "order", "limit", "join", "inner", "left", "cross", "on", "using", "as", "for", "group", "having", "union", "offset", "asc", "desc", "and", "or", "is", "not", "in", "like", "between", "right", "full", "natural", "outer":
		return true
	}
	return false
}

func (p *parser) item() item {
	if p.op("*") {
		return item{star: true}
	}
	if p.i+2 < len(p.toks) && p.toks[p.i].kind == tokWord && p.toks[p.i+1].text == "." && p.toks[p.i+2].text == "*" {
		it := item{star: true, table: p.toks[p.i].text}
		p.i += 3
		return it
	}
	it := item{e: p.expr(0)}
	it.name = it.e.title()
	if p.word("as") {
		it.name = p.ident()
	} else if t := p.tok(); t.kind == tokWord && (t.quoted || !keyword(t.text)) {
		it.name = p.ident()
	}
	return it
}

// title is the name of a column without alias.
func (e *expr) title() string {
	switch e.op {
	case "col", "call":
		return e.name
	case "cast":
		if e.args[0].op == "col" {
			return e.args[0].name
		}
	}
	return "?column?"
}

func (p *parser) table() from {
	name := []string{p.ident()}
	for p.op(".") {
		name = append(name, p.ident())
	}
	name = slices.DeleteFunc(name, func(s string) bool { return s == "public" })
	if n := len(name); n > 2 {
		name = name[n-2:]
	}
	if len(name) == 0 {
		panic(syntaxError(p.tok().text))
	}
	f := from{table: strings.Join(name, "."), alias: name[len(name)-1]}
	if p.peek("as") && !(p.i+1 < len(p.toks) && word(p.toks, p.i+1) == "of") {
		p.i++
		f.alias = p.ident()
	} else if t := p.tok(); t.kind == tokWord && (t.quoted || !keyword(t.text)) {
		f.alias = p.ident()
	}
	return f
}

var precedence = map[string]int{
	"or": 1, "and": 2, "is": 4, "in": 4, "=": 4, "<>": 4, "!=": 4, "<": 4, "<=": 4, ">": 4, ">=": 4,
	"||": 5, "+": 6, "-": 6, "*": 7, "/": 7, "%": 7,
}

func (p *parser) expr(min int) *expr {
	var e *expr
	if p.word("not") {
		e = &expr{op: "not", args: []*expr{p.expr(3)}}
	} else {
		e = p.unary()
	}
	for {
		t := p.tok()
		op := t.text
		negate := false
		if t.kind == tokWord && op == "not" && word(p.toks, p.i+1) == "in" {
			op, negate = "in", true
		}
		prec := precedence[op]
		if prec == 0 || prec <= min || t.kind != tokOp && (t.kind != tokWord || t.quoted) {
			return e
		}
		p.i++
		switch op {
		case "is":
			not := p.word("not")
			switch {
			case p.word("distinct"):
				p.want("from")
				e = &expr{op: "distinct", args: []*expr{e, p.expr(4)}}
			case p.word("null"):
				e = &expr{op: "isnull", args: []*expr{e}}
			case p.word("true"):
				e = &expr{op: "isbool", val: true, args: []*expr{e}}
			default:
				p.want("false")
				e = &expr{op: "isbool", val: false, args: []*expr{e}}
			}
			if not {
				e = &expr{op: "not", args: []*expr{e}}
			}
		case "in":
			if negate {
				p.i++
			}
			p.wantOp("(")
			e = &expr{op: "in", args: []*expr{e}}
			for {
				e.args = append(e.args, p.expr(0))
				if !p.op(",") {
					break
				}
			}
			p.wantOp(")")
			if negate {
				e = &expr{op: "not", args: []*expr{e}}
			}
		default:
			if op == "!=" {
				op = "<>"
			}
			e = &expr{op: op, args: []*expr{e, p.expr(prec)}}
		}
	}
}

func (p *parser) unary() *expr {
	if p.op("-") {
		return &expr{op: "neg", args: []*expr{p.unary()}}
	}
	e := p.primary()
	for p.op("::") {
		name := p.ident()
		if name == "double" {
			p.word("precision")
		}
		e = &expr{op: "cast", oid: castType(name), args: []*expr{e}}
	}
	return e
}

func (p *parser) primary() *expr {
	t := p.tok()
	p.i++
	switch t.kind {
	case tokNumber:
		if i, err := strconv.ParseInt(t.text, 10, 64); err == nil {
			return &expr{op: "lit", val: i}
		}
		if f, err := strconv.ParseFloat(t.text, 64); err == nil {
			return &expr{op: "lit", val: f}
		}
	case tokString:
		return &expr{op: "lit", val: t.text}
	case tokParam:
		n, _ := strconv.Atoi(t.text)
		return &expr{op: "param", n: n}
	case tokOp:
		if t.text == "(" {
			e := p.expr(0)
			p.wantOp(")")
			return e
		}
	case tokWord:
		if !t.quoted {
			switch t.text {
			case "true", "false":
				return &expr{op: "lit", val: t.text == "true"}
			case "null":
				return &expr{op: "lit"}
			case "current_user", "session_user", "current_timestamp":
				return &expr{op: "call", name: t.text}
			case "cast":
				p.wantOp("(")
				e := p.expr(0)
				p.want("as")
				oid := castType(p.ident())
				p.wantOp(")")
				return &expr{op: "cast", oid: oid, args: []*expr{e}}
			}
			if keyword(t.text) || t.text == "select" {
				break
			}
		}
		name := []string{t.text}
		for p.op(".") {
			name = append(name, p.ident())
		}
		last := name[len(name)-1]
		if p.op("(") {
			e := &expr{op: "call", name: last, table: strings.Join(name[:len(name)-1], ".")}
			if p.op("*") {
				p.wantOp(")")
				return e
			}
			for !p.op(")") {
				e.args = append(e.args, p.expr(0))
				if !p.op(",") {
					p.wantOp(")")
					break
				}
			}
			return e
		}
		e := &expr{op: "col", name: last}
		if len(name) > 1 {
			e.table = name[len(name)-2]
		}
		return e
	}
	panic(syntaxError(t.text))
}

// scope is what an expression sees.
type scope struct {
	s      *session
	ctx    context.Context
	params []uint32
	args   []any
	cols   []scopeColumn
	row    []any
}

type scopeColumn struct {
	table string
	column
}

func (sc *scope) lookup(e *expr) (int, *pgconn.PgError) {
	found := -1
	for i, c := range sc.cols {
		if c.name == e.name && (e.table == "" || e.table == c.table) {
			if found >= 0 && e.table == "" {
				return 0, &pgconn.PgError{Code: "42702", Message: fmt.Sprintf("column reference %q is ambiguous", e.name)}
			}
			found = i
		}
	}
	if found < 0 {
		name := e.name
		if e.table != "" {
			name = e.table + "." + name
		}
		return 0, &pgconn.PgError{Code: "42703", Message: fmt.Sprintf("column %q does not exist", name)}
	}
	return found, nil
}

// check returns the type of an expression, or why it has none.
func (sc *scope) check(e *expr) (uint32, *pgconn.PgError) {
	types := make([]uint32, len(e.args))
	for i, a := range e.args {
		t, err := sc.check(a)
		if err != nil {
			return 0, err
		}
		types[i] = t
	}
	switch e.op {
	case "lit":
		return typeOf(e.val), nil
	case "param":
		if e.n >= 1 && e.n <= len(sc.params) && sc.params[e.n-1] != 0 {
			return sc.params[e.n-1], nil
		}
		if sc.params == nil && e.n >= 1 && e.n <= len(sc.args) {
			return typeOf(sc.args[e.n-1]), nil
		}
		return oidText, nil
	case "col":
		i, err := sc.lookup(e)
		if err != nil {
			return 0, err
		}
		return sc.cols[i].oid, nil
	case "cast":
		return e.oid, nil
	case "neg":
		return types[0], nil
	case "+", "-", "*", "/", "%":
		if e.op == "/" || types[0] == oidFloat8 || types[1] == oidFloat8 {
			return oidFloat8, nil
		}
		return oidInt8, nil
	case "||":
		return oidText, nil
	case "call":
		return sc.checkCall(e, types)
	}
	return oidBool, nil
}

func (sc *scope) checkCall(e *expr, types []uint32) (uint32, *pgconn.PgError) {
	switch e.table {
	case "", "pg_catalog":
		switch e.name {
		case "coalesce":
			for i, t := range types {
				if a := e.args[i]; !(a.op == "lit" && a.val == nil) {
					return t, nil
				}
			}
			return oidText, nil
		case "version", "current_user", "session_user", "current_database", "current_schema", "lower", "upper", "current_setting", "concat":
			return oidText, nil
		case "pg_sleep", "pg_is_in_recovery":
			return oidBool, nil
		case "now", "current_timestamp", "clock_timestamp", "statement_timestamp":
			return oidTimestamptz, nil
		case "count", "length", "pg_backend_pid":
			return oidInt8, nil
		}
	case "crdb_internal":
		if err := sc.s.restricted(); err != nil {
			return 0, err
		}
		if e.name == "node_id" {
			return oidInt8, nil
		}
	}
	name := e.name
	if e.table != "" {
		name = e.table + "." + name
	}
	return 0, &pgconn.PgError{Code: "42883", Message: "unknown function: " + name + "()"}
}

// eval computes an expression that has been checked.
func (sc *scope) eval(e *expr) any {
	arg := func(i int) any { return sc.eval(e.args[i]) }
	switch e.op {
	case "lit":
		return e.val
	case "param":
		if e.n >= 1 && e.n <= len(sc.args) {
			return sc.args[e.n-1]
		}
		return nil
	case "col":
		i, err := sc.lookup(e)
		if err != nil {
			panic(err)
		}
		return sc.row[i]
	case "cast":
		v := convert(e.oid, arg(0))
		if _, bad := v.(string); bad && (e.oid == oidInt8 || e.oid == oidBool || e.oid == oidFloat8) {
			panic(&pgconn.PgError{Code: "22P02", Message: fmt.Sprintf("could not parse %q as the type of a cast", v)})
		}
		return v
	case "and":
		a, b := arg(0), arg(1)
		if a == false || b == false {
			return false
		}
		if a == nil || b == nil {
			return nil
		}
		return truth(a) && truth(b)
	case "or":
		a, b := arg(0), arg(1)
		if truth(a) || truth(b) {
			return true
		}
		if a == nil || b == nil {
			return nil
		}
		return false
	case "not":
		a := arg(0)
		if a == nil {
			return nil
		}
		return !truth(a)
	case "isnull":
		return arg(0) == nil
	case "isbool":
		return arg(0) == e.val
	case "distinct":
		a, b := arg(0), arg(1)
		if a == nil || b == nil {
			return (a == nil) != (b == nil)
		}
		return compare(a, b) != 0
	case "in":
		a := arg(0)
		if a == nil {
			return nil
		}
		for i := range e.args[1:] {
			if b := arg(i + 1); b != nil && compare(a, b) == 0 {
				return true
			}
		}
		return false
	case "call":
		return sc.call(e)
	case "neg":
		switch v := arg(0).(type) {
		case int64:
			return -v
		case float64:
			return -v
		case nil:
			return nil
		default:
			panic(&pgconn.PgError{Code: "22023", Message: "unsupported unary operator"})
		}
	}
	a, b := arg(0), arg(1)
	if a == nil || b == nil {
		return nil
	}
	switch e.op {
	case "=":
		return compare(a, b) == 0
	case "<>":
		return compare(a, b) != 0
	case "<":
		return compare(a, b) < 0
	case "<=":
		return compare(a, b) <= 0
	case ">":
		return compare(a, b) > 0
	case ">=":
		return compare(a, b) >= 0
	case "||":
		return text(a) + text(b)
	}
	return arithmetic(e.op, a, b)
}

func arithmetic(op string, a, b any) any {
	x, xi := convert(oidInt8, a).(int64)
	y, yi := convert(oidInt8, b).(int64)
	_, af := a.(float64)
	_, bf := b.(float64)
	if op == "/" || af || bf {
		f, ok1 := convert(oidFloat8, a).(float64)
		g, ok2 := convert(oidFloat8, b).(float64)
		if !ok1 || !ok2 {
			panic(&pgconn.PgError{Code: "22023", Message: "unsupported binary operator " + op})
		}
		switch op {
		case "+":
			return f + g
		case "-":
			return f - g
		case "*":
			return f * g
		case "/":
			if g == 0 {
				panic(errDivision)
			}
			return f / g
		}
	}
	if xi && yi {
		switch op {
		case "+":
			return x + y
		case "-":
			return x - y
		case "*":
			return x * y
		case "%":
			if y == 0 {
				panic(errDivision)
			}
			return x % y
		}
	}
	panic(&pgconn.PgError{Code: "22023", Message: "unsupported binary operator " + op})
}

var errDivision = &pgconn.PgError{Code: "22012", Message: "division by zero"}

func truth(v any) bool { return v == true }

func compare(a, b any) int {
	switch x := a.(type) {
	case int64:
		switch y := convert(oidInt8, b).(type) {
		case int64:
			if f, ok := b.(float64); ok {
				return cmp.Compare(float64(x), f)
			}
			return cmp.Compare(x, y)
		}
	case float64:
		if y, ok := convert(oidFloat8, b).(float64); ok {
			return cmp.Compare(x, y)
		}
	case bool:
		if y, ok := convert(oidBool, b).(bool); ok {
			return cmp.Compare(btoi(x), btoi(y))
		}
	case []byte:
		if y, ok := b.([]byte); ok {
			return bytes.Compare(x, y)
		}
	case time.Time:
		if y, ok := b.(time.Time); ok {
			return x.Compare(y)
		}
	case string:
		switch b.(type) {
		case int64, float64, bool:
			return -compare(b, a)
		}
	}
	return strings.Compare(text(a), text(b))
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (sc *scope) call(e *expr) any {
	arg := func(i int) any {
		if i < len(e.args) {
			return sc.eval(e.args[i])
		}
		return nil
	}
	switch e.name {
	case "node_id":
		if sc.s.n.c.cfg.Virtual {
			return nil
		}
		return int64(sc.s.n.id)
	case "coalesce":
		for i := range e.args {
			if v := arg(i); v != nil {
				return v
			}
		}
		return nil
	case "version":
		return sc.s.version.long()
	case "current_user", "session_user":
		return sc.s.user
	case "current_database":
		return sc.s.database
	case "current_schema":
		return "public"
	case "current_setting":
		v, err := sc.s.show(strings.ToLower(text(arg(0))))
		if err != nil {
			panic(err)
		}
		return v
	case "lower":
		return strings.ToLower(text(arg(0)))
	case "upper":
		return strings.ToUpper(text(arg(0)))
	case "concat":
		var b strings.Builder
		for i := range e.args {
			b.WriteString(text(arg(i)))
		}
		return b.String()
	case "length":
		return int64(len(text(arg(0))))
	case "pg_is_in_recovery":
		return false
	case "pg_backend_pid":
		return int64(sc.s.key.pid)
	case "now", "current_timestamp", "clock_timestamp", "statement_timestamp":
		return time.Now().UTC()
	case "pg_sleep":
		f, _ := convert(oidFloat8, arg(0)).(float64)
		sleep(sc.ctx, time.Duration(f*float64(time.Second)))
		return true
	}
	return nil
}

// resolve finds the tables of a SELECT and checks its expressions.
func (s *session) resolve(sel *selectStmt, sc *scope) ([]table, []column, *pgconn.PgError) {
	var tables []table
	for _, f := range sel.from {
		t, err := s.source(f.table)
		if err != nil {
			return nil, nil, err
		}
		tables = append(tables, t)
		for _, name := range f.using {
			if _, err := sc.lookup(&expr{name: name}); err != nil {
				return nil, nil, err
			}
		}
		for _, c := range t.cols {
			hidden := slices.Contains(f.using, c.name)
			sc.cols = append(sc.cols, scopeColumn{f.alias, c})
			if hidden { // reachable by table, not by bare name
				sc.cols[len(sc.cols)-1].column.name = "\x00" + c.name
			}
		}
		if f.on != nil {
			if _, err := sc.check(f.on); err != nil {
				return nil, nil, err
			}
		}
	}
	cols := []column{}
	for _, it := range sel.list {
		if it.star {
			for _, c := range sc.cols {
				if (it.table == "" || it.table == c.table) && !strings.HasPrefix(c.name, "\x00") {
					cols = append(cols, c.column)
				}
			}
			continue
		}
		oid, err := sc.check(it.e)
		if err != nil {
			return nil, nil, err
		}
		cols = append(cols, column{it.name, oid})
	}
	if sel.limit != nil { // it sees no columns
		if _, err := (&scope{s: s, params: sc.params, args: sc.args}).check(sel.limit); err != nil {
			return nil, nil, err
		}
	}
	checks := []*expr{sel.where}
	for _, o := range sel.order {
		checks = append(checks, o.e)
	}
	for _, e := range checks {
		if e != nil {
			if _, err := sc.check(e); err != nil {
				return nil, nil, err
			}
		}
	}
	return tables, cols, nil
}

func (s *session) selectColumns(sel *selectStmt, params []uint32) ([]column, *pgconn.PgError) {
	_, cols, err := s.resolve(sel, &scope{s: s, params: params})
	return cols, err
}

// selectRows executes a SELECT.
func (s *session) selectRows(ctx context.Context, sel *selectStmt, args []any, described []column) (out outcome, err error) {
	defer func() {
		if r := recover(); r != nil {
			pe, ok := r.(*pgconn.PgError)
			if !ok {
				panic(r)
			}
			out, err = outcome{}, pe
		}
	}()
	sc := &scope{s: s, ctx: ctx, args: args}
	tables, cols, perr := s.resolve(sel, sc)
	if perr != nil {
		return outcome{}, perr
	}
	// Nested loops over the tables, in order.
	all := sc.cols
	rows := [][]any{nil}
	width := 0
	for i, t := range tables {
		f := sel.from[i]
		var next [][]any
		for _, left := range rows {
			matched := false
			for _, right := range t.rows {
				if len(right) != len(t.cols) {
					panic(&pgconn.PgError{Code: "XX000", Message: fmt.Sprintf("a row of %s has %d values, not %d", f.table, len(right), len(t.cols))})
				}
				row := append(left[:len(left):len(left)], right...)
				for j, v := range row {
					if i, ok := v.(int); ok {
						row[j] = int64(i)
					}
				}
				sc.cols, sc.row = all[:len(row)], row
				if f.on != nil && !truth(sc.eval(f.on)) {
					continue
				}
				same := true
				for _, name := range f.using {
					a, err := (&scope{cols: all[:width]}).lookup(&expr{name: name})
					if err != nil {
						panic(err)
					}
					b := slices.IndexFunc(t.cols, func(c column) bool { return c.name == name })
					if b < 0 || row[a] == nil || right[b] == nil || compare(row[a], row[width+b]) != 0 {
						same = false
					}
				}
				if same {
					next = append(next, row)
					matched = true
				}
			}
			if f.left && !matched {
				next = append(next, append(left[:len(left):len(left)], make([]any, len(t.cols))...))
			}
		}
		rows = next
		width += len(t.cols)
	}
	sc.cols = all
	if sel.where != nil {
		rows = slices.DeleteFunc(rows, func(r []any) bool {
			sc.row = r
			return !truth(sc.eval(sel.where))
		})
	}
	if len(sel.order) > 0 {
		slices.SortStableFunc(rows, func(a, b []any) int {
			for _, o := range sel.order {
				sc.row = a
				x := sc.eval(o.e)
				sc.row = b
				y := sc.eval(o.e)
				c := 0
				switch {
				case x == nil && y == nil:
				case x == nil:
					c = -1
				case y == nil:
					c = 1
				default:
					c = compare(x, y)
				}
				if o.desc {
					c = -c
				}
				if c != 0 {
					return c
				}
			}
			return 0
		})
	}
	if sel.limit != nil {
		if n, ok := sc.eval(sel.limit).(int64); ok && n >= 0 && n < int64(len(rows)) {
			rows = rows[:n]
		}
	}
	if len(sel.list) == 1 && sel.list[0].e != nil && sel.list[0].e.op == "call" && sel.list[0].e.name == "count" {
		out.rows = [][]any{{int64(len(rows))}}
	} else {
		for _, r := range rows {
			sc.row = r
			row := make([]any, 0, len(cols))
			for _, it := range sel.list {
				if !it.star {
					row = append(row, sc.eval(it.e))
					continue
				}
				for i, c := range sc.cols {
					if (it.table == "" || it.table == c.table) && !strings.HasPrefix(c.name, "\x00") {
						row = append(row, r[i])
					}
				}
			}
			out.rows = append(out.rows, row)
		}
	}
	if described == nil {
		out.cols = cols
	}
	out.tag = "SELECT " + strconv.Itoa(len(out.rows))
	return out, nil
}
