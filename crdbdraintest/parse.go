package crdbdraintest

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
)

type kind int

const (
	kindOther kind = iota
	kindEmpty
	kindBegin
	kindCommit
	kindRollback
	kindSavepoint
	kindRollbackTo
	kindRelease
	kindSet
	kindReset
	kindDiscard
	kindDeallocate
	kindShow
	kindShowSetting
	kindDML
	kindDDL
	kindSelect
	kindCopyIn
	kindCopyOut
)

// stmt is a parsed statement. It is immutable.
type stmt struct {
	text   string
	toks   []token
	kind   kind
	tag    string
	name   string // of a variable, setting, prepared statement
	value  string // of SET
	sleeps bool
	sel    *selectStmt
	err    *pgconn.PgError // why sel is nil
	list   []column        // a guess at the columns, from the select list or RETURNING
}

// endsTx reports whether the statement is allowed in an aborted transaction.
func (st *stmt) endsTx() bool {
	return st.kind == kindCommit || st.kind == kindRollback || st.kind == kindRollbackTo
}

// controls reports whether the statement changes the session's state.
func (st *stmt) controls() bool {
	return st.kind >= kindBegin && st.kind <= kindDeallocate
}

func (st *stmt) syntaxError() *pgconn.PgError {
	near := "EOF"
	if len(st.toks) > 0 {
		near = st.toks[0].text
	}
	return syntaxError(near)
}

func syntaxError(near string) *pgconn.PgError {
	return &pgconn.PgError{Code: "42601", Message: fmt.Sprintf("at or near %q: syntax error", near)}
}

type tokenKind byte

const (
	tokEOF  tokenKind = iota
	tokWord           // lower case unless quoted
	tokNumber
	tokString
	tokParam // text is the number
	tokOp
)

type token struct {
	kind     tokenKind
	text     string
	quoted   bool
	pos, end int
}

// lex splits SQL into tokens, without comments.
func lex(sql string) []token {
	var toks []token
	i := 0
	quoted := func(q byte) string {
		var b strings.Builder
		for i++; i < len(sql); i++ {
			if sql[i] == q {
				if i+1 < len(sql) && sql[i+1] == q {
					i++
				} else {
					i++
					break
				}
			}
			b.WriteByte(sql[i])
		}
		return b.String()
	}
	letter := func(c byte) bool {
		return c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= utf8.RuneSelf
	}
	digit := func(c byte) bool { return c >= '0' && c <= '9' }
	for i < len(sql) {
		start := i
		c := sql[i]
		switch {
		case c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f':
			i++
			continue
		case strings.HasPrefix(sql[i:], "--"):
			for i < len(sql) && sql[i] != '\n' {
				i++
			}
			continue
		case strings.HasPrefix(sql[i:], "/*"):
			depth := 0
			for i < len(sql) {
				if strings.HasPrefix(sql[i:], "/*") {
					depth++
					i += 2
				} else if strings.HasPrefix(sql[i:], "*/") {
					depth--
					i += 2
					if depth == 0 {
						break
					}
				} else {
					i++
				}
			}
			continue
		case c == '\'':
			toks = append(toks, token{kind: tokString, text: quoted('\'')})
		case c == '"':
			toks = append(toks, token{kind: tokWord, text: quoted('"'), quoted: true})
		case letter(c):
			for i < len(sql) && (letter(sql[i]) || digit(sql[i]) || sql[i] == '$') {
				i++
			}
			toks = append(toks, token{kind: tokWord, text: strings.ToLower(sql[start:i])})
		case digit(c) || c == '.' && i+1 < len(sql) && digit(sql[i+1]):
			for i < len(sql) && (digit(sql[i]) || sql[i] == '.' || sql[i] == 'e' || sql[i] == 'E') {
				i++
			}
			toks = append(toks, token{kind: tokNumber, text: sql[start:i]})
		case c == '$' && i+1 < len(sql) && digit(sql[i+1]):
			for i++; i < len(sql) && digit(sql[i]); i++ {
			}
			toks = append(toks, token{kind: tokParam, text: sql[start+1 : i]})
		default:
			i++
			for _, op := range []string{"::", "<=", ">=", "<>", "!=", "||"} {
				if strings.HasPrefix(sql[start:], op) {
					i = start + 2
				}
			}
			toks = append(toks, token{kind: tokOp, text: sql[start:i]})
		}
		toks[len(toks)-1].pos, toks[len(toks)-1].end = start, i
	}
	return toks
}

// parseSQL returns the statements of a query; at least one, which may be empty.
func parseSQL(sql string) []*stmt {
	var sts []*stmt
	toks := lex(sql)
	from, at := 0, 0
	for i := 0; i <= len(toks); i++ {
		if i < len(toks) && !(toks[i].kind == tokOp && toks[i].text == ";") {
			continue
		}
		end := len(sql)
		if i < len(toks) {
			end = toks[i].pos
		}
		if i > from {
			sts = append(sts, parseStmt(strings.TrimSpace(sql[at:end]), toks[from:i]))
		}
		from = i + 1
		if i < len(toks) {
			at = toks[i].end
		}
	}
	switch len(sts) {
	case 0:
		return []*stmt{{text: sql, kind: kindEmpty}}
	case 1:
		sts[0].text = sql
	}
	return sts
}

func word(toks []token, i int) string {
	if i < len(toks) && toks[i].kind == tokWord && !toks[i].quoted {
		return toks[i].text
	}
	return ""
}

// dotted reads a name such as server.shutdown.initial_wait.
func dotted(toks []token, i int) (string, int) {
	var b strings.Builder
	for ; i < len(toks); i++ {
		if toks[i].kind == tokWord || toks[i].text == "." {
			b.WriteString(toks[i].text)
			if i+1 < len(toks) && toks[i+1].text == "." || toks[i].text == "." {
				continue
			}
			return b.String(), i + 1
		}
		break
	}
	return b.String(), i
}

func parseStmt(text string, toks []token) *stmt {
	st := &stmt{text: text, toks: toks}
	first := word(toks, 0)
	for i := range toks {
		if toks[i].kind == tokWord && toks[i].text == "pg_sleep" { // quoted, it is that function too
			st.sleeps = true
		}
	}
	rest := func(i int) string { return word(toks, i) }
	switch first {
	case "begin", "start":
		st.kind, st.tag = kindBegin, "BEGIN"
		if first == "start" {
			st.tag = "START TRANSACTION"
			if rest(1) != "transaction" {
				st.kind = kindOther
			}
		}
	case "commit", "end":
		st.kind = kindCommit
	case "rollback", "abort":
		st.kind, st.tag = kindRollback, "ROLLBACK"
		for i := range toks {
			if rest(i) == "to" {
				st.kind = kindRollbackTo
			}
		}
	case "savepoint":
		st.kind, st.tag = kindSavepoint, "SAVEPOINT"
	case "release":
		st.kind, st.tag = kindRelease, "RELEASE"
	case "set":
		st.kind, st.tag = kindSet, "SET"
		i := 1
		if (rest(1) == "session" || rest(1) == "local") && rest(2) != "" && rest(2) != "to" {
			i = 2
		}
		if rest(i) == "time" && rest(i+1) == "zone" {
			st.name, i = "timezone", i+2
		} else {
			st.name, i = dotted(toks, i)
			if i < len(toks) && (toks[i].text == "=" || toks[i].text == "to") {
				i++
			}
		}
		var values []string
		for ; i < len(toks); i++ {
			values = append(values, toks[i].text)
		}
		st.value = strings.Join(values, "")
		st.name = strings.ToLower(st.name)
		if st.name == "characteristics" {
			st.name = "transaction"
		}
	case "reset":
		st.kind, st.tag = kindReset, "RESET"
		st.name, _ = dotted(toks, 1)
	case "discard":
		st.kind, st.tag = kindDiscard, "DISCARD ALL"
	case "deallocate":
		st.kind, st.tag = kindDeallocate, "DEALLOCATE"
		i := 1
		if rest(1) == "prepare" {
			i = 2
		}
		st.name, _ = dotted(toks, i)
		if st.name == "all" {
			st.tag = "DEALLOCATE ALL"
		}
	case "show":
		if rest(1) == "cluster" && rest(2) == "setting" {
			st.kind = kindShowSetting
			st.name, _ = dotted(toks, 3)
			break
		}
		st.kind = kindShow
		switch {
		case rest(1) == "time" && rest(2) == "zone":
			st.name = "timezone"
		case rest(1) == "transaction" && rest(2) == "isolation":
			st.name = "transaction_isolation"
		default:
			st.name, _ = dotted(toks, 1)
		}
	case "insert", "upsert":
		st.kind, st.tag = kindDML, "INSERT 0 1"
	case "update":
		st.kind, st.tag = kindDML, "UPDATE 1"
	case "delete":
		st.kind, st.tag = kindDML, "DELETE 1"
	case "create", "drop", "alter":
		st.kind, st.tag = kindDDL, strings.ToUpper(first+" "+rest(1))
	case "truncate", "grant", "revoke", "analyze", "comment", "use":
		st.kind, st.tag = kindDDL, strings.ToUpper(first)
	case "copy":
		for i := range toks {
			switch rest(i) {
			case "stdin":
				st.kind = kindCopyIn
			case "stdout":
				st.kind = kindCopyOut
			}
		}
	case "select":
		st.kind = kindSelect
		st.sel, st.err = parseSelect(toks)
		st.list = guessColumns(toks[1:])
	}
	if st.kind == kindDML {
		depth := 0
		for i, t := range toks {
			switch {
			case t.text == "(" && t.kind == tokOp:
				depth++
			case t.text == ")" && t.kind == tokOp:
				depth--
			case depth == 0 && rest(i) == "returning" && rest(i+1) != "nothing":
				st.list = guessColumns(toks[i+1:])
				return st
			}
		}
	}
	return st
}

// guessColumns reads a select list without understanding it: the alias or the
// last name of an expression, and the type of a cast at its end.
func guessColumns(toks []token) []column {
	cols := []column{}
	depth := 0
	cur := column{name: "?column?", oid: oidText}
	some := false
	for i := 0; i < len(toks); i++ {
		t := toks[i]
		switch {
		case t.kind == tokOp && t.text == "(":
			depth++
		case t.kind == tokOp && t.text == ")":
			depth--
		case depth > 0:
		case t.kind == tokOp && t.text == ",":
			cols = append(cols, cur)
			cur = column{name: "?column?", oid: oidText}
			some = false
			continue
		case t.kind == tokOp && t.text == "::" && i+1 < len(toks):
			i++
			cur.oid = castType(toks[i].text)
		case word(toks, i) == "from" || word(toks, i) == "where" || word(toks, i) == "limit":
			if some {
				cols = append(cols, cur)
			}
			return cols
		case word(toks, i) == "as" || word(toks, i) == "distinct":
		case t.kind == tokWord:
			cur.name = t.text
		}
		some = true
	}
	if some {
		cols = append(cols, cur)
	}
	return cols
}

// paramTypes returns the types of $1…$n: what the client said, else a cast's,
// else 0, with which clients choose by their value.
func paramTypes(st *stmt, given []uint32) []uint32 {
	n := len(given)
	for _, t := range st.toks {
		if t.kind == tokParam {
			if i, _ := strconv.Atoi(t.text); i > n && i < 1<<16 {
				n = i
			}
		}
	}
	types := make([]uint32, n)
	copy(types, given)
	for i, t := range st.toks {
		if t.kind != tokParam {
			continue
		}
		k, _ := strconv.Atoi(t.text)
		if k < 1 || k > n || types[k-1] != 0 {
			continue
		}
		op := func(j int) bool {
			return j >= 0 && j < len(st.toks) && st.toks[j].kind == tokOp && strings.Contains("+-*/", st.toks[j].text)
		}
		switch {
		case i+3 < len(st.toks) && st.toks[i+1].text == "::" && strings.HasPrefix(st.toks[i+3].text, "["):
			// an array, of which the client knows more
		case i+2 < len(st.toks) && st.toks[i+1].text == "::":
			types[k-1] = castType(st.toks[i+2].text)
		case i >= 2 && word(st.toks, i-2) == "pg_sleep":
			types[k-1] = oidFloat8
		case i >= 1 && word(st.toks, i-1) == "limit", st.kind == kindSelect && (op(i-1) || op(i+1)):
			types[k-1] = oidInt8
		}
	}
	return types
}
