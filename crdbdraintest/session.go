package crdbdraintest

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// session is one connection of a node. One goroutine owns it; drains and
// cancellations only set flags under mu and wake it with a read deadline, so
// that everything written comes from that goroutine, in order.
type session struct {
	n      *Node
	raw    net.Conn // the socket
	conn   net.Conn // the socket, or TLS on top of it
	be     *pgproto3.Backend
	ctx    context.Context // ends when the connection is cut
	cancel context.CancelFunc

	user, database string
	version        version // of the node when the session began
	id             string  // SHOW session_id
	key            cancelKey
	vars           map[string]string // session variables that were set

	pending bool // something waits for a flush
	failed  bool // extended protocol: skip to the next Sync
	atSync  bool // the last message ended a batch
	stmts   map[string]*prepared
	portals map[string]*portal

	lastSQL string // the last simple query and its statements: most clients repeat themselves
	lastSts []*stmt

	row     pgproto3.DataRow
	scratch []byte

	mu         sync.Mutex
	tx         byte    // 'I', 'T', 'E'; written by the owner. guarded by mu, like all below
	implicit   bool    // extended protocol: executed something since the last Sync outside a transaction
	busy       bool    // a message is being processed
	draining   bool    // the drain's request is in the queue
	seen       bool    // the session has met it, in a transaction
	wasBusy    bool    // when it came
	ending     bool    // woken to say 57P01 and go
	bare       *Result // to say this instead
	cancelled  bool    // by the deadline of a drain
	counted    bool    // as lost
	gone       bool    // cut: nothing more is read or executed
	cancelStmt context.CancelCauseFunc
}

type prepared struct {
	st     *stmt
	params []uint32
	cols   []column
}

type portal struct {
	*prepared
	args    []any
	formats []int16
	started bool
	rest    [][]any // rows not sent yet
	cols    []column
	tag     string
}

var (
	errQueryCanceled = &pgconn.PgError{Code: "57014", Message: "query execution canceled"}
	errStmtTimeout   = &pgconn.PgError{Code: "57014", Message: "query execution canceled due to statement timeout"}

	// errEnd ends the session's goroutine without another word.
	errEnd = errors.New("crdbdraintest: session over")
	// errBye ends it with the drain's last words.
	errBye = errors.New("crdbdraintest: session over, say so")
)

func newSession(ctx context.Context, n *Node, conn net.Conn) *session {
	s := &session{n: n, raw: conn, conn: conn, tx: 'I', busy: true}
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.be = pgproto3.NewBackend(conn, conn)
	return s
}

func (s *session) run() {
	defer s.n.c.wg.Done()
	defer s.close()
	err := s.startup()
	if err == nil {
		err = s.serve()
	}
	if errors.Is(err, errBye) {
		s.bye()
	}
}

// close closes the connection, with TLS's close_notify where there is TLS.
func (s *session) close() {
	s.cancel()
	if s.key.pid != 0 {
		s.n.c.unregister(s.key, s)
	}
	s.conn.Close()
	s.n.forget(s)
}

// cut closes the socket under the session.
func (s *session) cut(rst bool) {
	s.mu.Lock()
	s.gone = true
	s.mu.Unlock()
	if l, ok := s.raw.(interface{ SetLinger(int) error }); ok && rst {
		l.SetLinger(0)
	}
	s.raw.Close()
	s.cancel()
	s.n.forget(s)
}

// cutByDrain cuts what the grace after the deadline did not end. It reports
// whether the connection is lost by it.
func (s *session) cutByDrain() (lost, busy bool) {
	s.mu.Lock()
	lost, busy = !s.counted, s.wasBusy
	s.counted = true
	s.mu.Unlock()
	s.cut(true)
	return lost, busy
}

func (s *session) send(m pgproto3.BackendMessage) {
	s.be.Send(m)
	s.pending = true
}

func (s *session) flush() error {
	if !s.pending {
		return nil
	}
	if !s.n.gate(s.ctx) {
		return errEnd
	}
	s.pending = false
	return s.be.Flush()
}

func (s *session) sendError(e *pgconn.PgError) {
	severity := e.Severity
	if severity == "" {
		severity = "ERROR"
	}
	s.send(&pgproto3.ErrorResponse{
		Severity: severity, SeverityUnlocalized: severity,
		Code: e.Code, Message: e.Message, Detail: e.Detail, Hint: e.Hint,
		File: "crdbdraintest", Routine: "sendError",
	})
}

// startup brings the connection from its first byte to the first
// ReadyForQuery.
func (s *session) startup() error {
	var params map[string]string
	for params == nil {
		if !s.n.gate(s.ctx) {
			return errEnd
		}
		m, err := s.be.ReceiveStartupMessage()
		if err != nil {
			return errEnd
		}
		if !s.n.gate(s.ctx) {
			return errEnd
		}
		switch m := m.(type) {
		case *pgproto3.SSLRequest:
			if s.n.c.cfg.TLS == nil || s.conn != s.raw {
				if _, err := s.conn.Write([]byte{'N'}); err != nil {
					return errEnd
				}
				continue
			}
			if _, err := s.conn.Write([]byte{'S'}); err != nil {
				return errEnd
			}
			t := tls.Server(s.raw, s.n.c.cfg.TLS)
			if err := t.HandshakeContext(s.ctx); err != nil {
				return errEnd
			}
			s.conn = t
			s.be = pgproto3.NewBackend(t, t)
		case *pgproto3.GSSEncRequest:
			if _, err := s.conn.Write([]byte{'N'}); err != nil {
				return errEnd
			}
		case *pgproto3.CancelRequest:
			var k cancelKey
			k.pid = m.ProcessID
			if len(m.SecretKey) >= 4 {
				k.secret = binary.BigEndian.Uint32(m.SecretKey)
			}
			s.n.count(func(st *Stats) { st.CancelRequests++ })
			s.n.c.cancelRequest(k)
			return errEnd // without an answer
		case *pgproto3.StartupMessage:
			params = m.Parameters
		}
	}
	s.n.count(func(st *Stats) { st.Startups = append(st.Startups, params) })
	f := s.n.faults.Load()
	refuse := func(e *pgconn.PgError) error {
		s.sendError(e)
		s.flush()
		return errEnd
	}
	// Step 2: refused after TLS and the StartupMessage, before authentication
	// (pkg/sql/pgwire/server.go, errDraining).
	if !s.n.admit(s) {
		return refuse(&pgconn.PgError{Severity: f.Severity, Code: "57P01", Message: "server is not accepting clients, try another node"})
	}
	if f.Refuse != nil && !f.RefuseAuthenticated {
		s.n.count(func(st *Stats) { st.Refused++ })
		return refuse(f.Refuse)
	}
	s.user, s.database = params["user"], params["database"]
	if s.database == "" {
		s.database = "defaultdb"
	}
	if want := s.n.c.cfg.Password; want != "" {
		s.send(&pgproto3.AuthenticationCleartextPassword{})
		s.be.SetAuthType(pgproto3.AuthTypeCleartextPassword)
		if err := s.flush(); err != nil {
			return errEnd
		}
		m, err := s.be.Receive()
		if err != nil {
			return errEnd
		}
		if p, ok := m.(*pgproto3.PasswordMessage); !ok || p.Password != want {
			s.n.count(func(st *Stats) { st.Refused++ })
			return refuse(&pgconn.PgError{Code: "28P01", Message: "password authentication failed for user " + s.user})
		}
	}
	s.send(&pgproto3.AuthenticationOk{})
	if f.Refuse != nil {
		s.n.count(func(st *Stats) { st.Refused++ })
		return refuse(f.Refuse)
	}
	s.n.mu.Lock()
	s.version = s.n.version
	s.n.mu.Unlock()
	s.setVars(params)
	for _, p := range [][2]string{
		{"server_version", "13.0.0"},
		{"server_encoding", "UTF8"},
		{"client_encoding", "UTF8"},
		{"application_name", s.vars["application_name"]},
		{"DateStyle", "ISO, MDY"},
		{"IntervalStyle", "postgres"},
		{"is_superuser", "off"},
		{"session_authorization", s.user},
		{"integer_datetimes", "on"},
		{"standard_conforming_strings", "on"},
		{"TimeZone", "UTC"},
	} {
		s.send(&pgproto3.ParameterStatus{Name: p[0], Value: p[1]})
	}
	if !f.HideVersion {
		s.send(&pgproto3.ParameterStatus{Name: "crdb_version", Value: s.version.long()})
	}
	for name, value := range f.Parameters {
		s.send(&pgproto3.ParameterStatus{Name: name, Value: value})
	}
	s.identify(f)
	return s.ready()
}

func (v version) long() string {
	return "CockroachDB CCL " + v.text + " (x86_64-pc-linux-gnu, built 2025/05/19 12:00:00, go1.23.7)"
}

// identify makes the session's ID and its key, and sends the key
// (pkg/sql/pgwire/pgwirecancel, v22.1+):
//
//	 31 30      20 19       0
//	┌──┬──────────┬──────────┐
//	│ 0│ node ID  │ random   │  IDs below 2048
//	├──┼──────────┴──────────┤
//	│ 1│ node ID             │  other IDs
//	└──┴─────────────────────┘
func (s *session) identify(f *Faults) {
	id := uint32(s.n.id)
	seq := s.n.c.secret.Add(1)
	s.id = fmt.Sprintf("%016x%08x%08x", time.Now().UnixNano(), uint32(seq), id)
	if s.version.atLeast(22, 1) {
		if id < 2048 {
			s.key.pid = id<<20 | rand.Uint32N(1<<20)
		} else {
			s.key.pid = 1<<31 | id
		}
		s.key.secret = uint32(seq)<<8 | rand.Uint32N(1<<8)
	}
	if f.PID != nil {
		s.key.pid = f.PID(s.n.id)
	}
	if s.key.pid != 0 {
		s.n.c.register(s.key, s)
	}
	secret := binary.BigEndian.AppendUint32(nil, s.key.secret)
	s.send(&pgproto3.BackendKeyData{ProcessID: s.key.pid, SecretKey: secret})
}

// boundary is between two messages, which is where a drain's request takes
// effect. Outside a transaction it ends the session, and what comes behind it is
// not executed; inside one, the session ends at the first Sync outside it
// (pkg/sql/conn_executor.go, DrainRequest). It reports whether to go on. The
// decision and the change of busy are one, so that a statement is either
// executed or refused.
func (s *session) boundary(busy bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending || s.cancelled || s.gone {
		return false
	}
	if s.draining {
		if s.tx == 'I' && !s.implicit && (s.atSync || !s.seen) {
			return false
		}
		s.seen = true
	}
	s.busy = busy
	return true
}

// requestDrain puts the drain's request into the session's queue. The node's mu is
// held: locks are taken in this order, node before session.
func (s *session) requestDrain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return
	}
	s.draining = true
	s.seen = false
	s.wasBusy = s.busy || s.tx != 'I' || s.implicit
	if !s.wasBusy {
		s.wake()
	}
}

// wake interrupts the owner's read, for good. mu is held.
func (s *session) wake() {
	s.ending = true
	s.conn.SetReadDeadline(time.Unix(1, 0))
}

// cancelSession is what the deadline of a drain does.
func (s *session) cancelSession() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancelled = true
	if s.cancelStmt != nil {
		s.cancelStmt(errQueryCanceled)
	}
	s.wake()
}

// disconnect ends the session without a drain, if it is idle.
func (s *session) disconnect(r Result) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending || s.gone || s.busy || s.tx != 'I' || s.implicit {
		return false
	}
	if r.End == Keep {
		r.End = EndFIN
	}
	s.bare = &r
	s.wake()
	return true
}

// withdrawDrain takes the drain's request back, unless it is too late.
func (s *session) withdrawDrain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining, s.seen = false, false
}

func (s *session) cancelStatement(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cancelStmt != nil {
		s.cancelStmt(cause)
	}
}

func (s *session) setTx(tx byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tx = tx
}

// bye says 57P01 behind what has been produced so far, and counts.
func (s *session) bye() {
	s.mu.Lock()
	gone, bare, counted, busy := s.gone, s.bare, s.counted, s.wasBusy
	s.counted = s.counted || !gone
	s.mu.Unlock()
	if gone {
		return
	}
	if bare != nil {
		if bare.Err != nil {
			s.sendError(bare.Err)
		}
		s.end(bare.End)
		return
	}
	f := s.n.faults.Load()
	end := f.DrainEnd
	if end == Keep {
		end = EndShutdown
	}
	s.n.lost(!counted, busy)
	s.end(end)
}

func (s *session) end(how End) {
	switch how {
	case EndShutdown:
		// Unsolicited, severity ERROR, no ReadyForQuery (pkg/sql/pgwire/server.go,
		// pgerror's default severity).
		s.sendError(&pgconn.PgError{Severity: s.n.faults.Load().Severity, Code: "57P01", Message: "server is shutting down"})
		s.flush()
	case EndFIN:
		s.flush()
	case EndRST:
		s.flush()
		s.cut(true)
	}
}

// serve is the session after its startup.
func (s *session) serve() error {
	for {
		if !s.boundary(false) {
			return errBye
		}
		m, err := s.be.Receive()
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return errBye
			}
			return errEnd
		}
		if !s.n.gate(s.ctx) {
			return errEnd
		}
		if !s.boundary(true) {
			return errBye
		}
		s.atSync = false
		if _, sync := m.(*pgproto3.Sync); s.failed && !sync {
			if _, ok := m.(*pgproto3.Terminate); ok {
				return errEnd
			}
			continue
		}
		switch m := m.(type) {
		case *pgproto3.Query:
			s.atSync = true
			err = s.query(m.String)
		case *pgproto3.Parse:
			err = s.extended(s.parse(m))
		case *pgproto3.Bind:
			err = s.extended(s.bind(m))
		case *pgproto3.Describe:
			err = s.extended(s.describe(m))
		case *pgproto3.Execute:
			err = s.extended(s.executePortal(m))
		case *pgproto3.Close:
			if m.ObjectType == 'S' {
				delete(s.stmts, m.Name)
			} else {
				delete(s.portals, m.Name)
			}
			s.send(&pgproto3.CloseComplete{})
		case *pgproto3.Sync:
			s.atSync = true
			err = s.sync()
		case *pgproto3.Flush:
			err = s.flush()
		case *pgproto3.Terminate:
			return errEnd
		case *pgproto3.CopyData, *pgproto3.CopyDone, *pgproto3.CopyFail:
			// What a client sends after its COPY failed is ignored.
		default:
			s.sendError(&pgconn.PgError{Code: "08P01", Message: fmt.Sprintf("unexpected message %T", m)})
			err = s.ready()
		}
		if err != nil {
			return err
		}
	}
}

// ready sends ReadyForQuery and everything before it in one write. The session
// is idle before its client can know it.
func (s *session) ready() error {
	s.mu.Lock()
	s.busy = false
	s.mu.Unlock()
	s.send(&pgproto3.ReadyForQuery{TxStatus: s.tx})
	return s.flush()
}

// sync ends a batch of the extended protocol, and with it an implicit
// transaction.
func (s *session) sync() error {
	s.failed = false
	s.mu.Lock()
	s.implicit = false
	s.mu.Unlock()
	return s.ready()
}

// query is the simple protocol.
func (s *session) query(sql string) error {
	sts := s.lastSts
	if sql != s.lastSQL || sts == nil {
		sts = parseSQL(sql)
		s.lastSQL, s.lastSts = sql, sts
	}
	for _, st := range sts {
		out, err := s.execute(st, nil, nil)
		if err != nil {
			pe, ok := errors.AsType[*pgconn.PgError](err)
			if !ok {
				return err
			}
			s.fail(pe)
			if s.isCancelled() {
				return errBye
			}
			break
		}
		if out.cols != nil {
			s.describeRows(out.cols, nil)
		}
		s.sendRows(out.rows, out.cols, nil)
		if err := s.complete(out); err != nil {
			pe, ok := errors.AsType[*pgconn.PgError](err)
			if !ok {
				return err
			}
			s.fail(pe)
			break
		}
	}
	return s.ready()
}

func (s *session) isCancelled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cancelled
}

// complete sends what comes after the rows.
func (s *session) complete(out outcome) error {
	if out.err != nil {
		if out.end != Keep {
			s.sendError(out.err)
			s.end(out.end)
			return errEnd
		}
		return out.err
	}
	switch {
	case out.tag != "":
		s.send(&pgproto3.CommandComplete{CommandTag: []byte(out.tag)})
	case out.empty:
		s.send(&pgproto3.EmptyQueryResponse{})
	}
	if out.end != Keep {
		s.end(out.end)
		return errEnd
	}
	return nil
}

// fail sends an error, which breaks an open transaction.
func (s *session) fail(e *pgconn.PgError) {
	if s.tx == 'T' {
		s.setTx('E')
	}
	s.sendError(e)
}

// extended ends a message of the extended protocol: an error skips to Sync.
func (s *session) extended(err error) error {
	pe, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return err
	}
	s.fail(pe)
	s.failed = true
	if s.isCancelled() {
		return errBye
	}
	// An error ends an implicit transaction; the client learns it now, not at Sync.
	return s.flush()
}

func (s *session) parse(m *pgproto3.Parse) error {
	s.n.count(func(st *Stats) { st.Parses[m.Query]++ })
	if s.tx == 'E' {
		if sts := parseSQL(m.Query); len(sts) != 1 || !sts[0].endsTx() {
			return errAborted
		}
	}
	sts := parseSQL(m.Query)
	if len(sts) > 1 {
		return &pgconn.PgError{Code: "42601", Message: "prepared statement had " + fmt.Sprint(len(sts)) + " statements, expected 1"}
	}
	p := &prepared{st: sts[0]}
	p.params = paramTypes(p.st, m.ParameterOIDs)
	cols, err := s.columns(p.st, p.params)
	if err != nil {
		return err
	}
	p.cols = cols
	if s.stmts == nil {
		s.stmts, s.portals = map[string]*prepared{}, map[string]*portal{}
	}
	if m.Name != "" && s.stmts[m.Name] != nil {
		return &pgconn.PgError{Code: "42P05", Message: fmt.Sprintf("prepared statement %q already exists", m.Name)}
	}
	s.stmts[m.Name] = p
	s.send(&pgproto3.ParseComplete{})
	return nil
}

func (s *session) bind(m *pgproto3.Bind) error {
	p := s.stmts[m.PreparedStatement]
	if p == nil {
		return &pgconn.PgError{Code: "26000", Message: fmt.Sprintf("unknown prepared statement %q", m.PreparedStatement)}
	}
	if len(m.Parameters) != len(p.params) {
		return &pgconn.PgError{Code: "08P01", Message: fmt.Sprintf("expected %d arguments, got %d", len(p.params), len(m.Parameters))}
	}
	po := &portal{prepared: p, cols: p.cols}
	for i, b := range m.Parameters {
		format := int16(0)
		switch len(m.ParameterFormatCodes) {
		case 0:
		case 1:
			format = m.ParameterFormatCodes[0]
		default:
			format = m.ParameterFormatCodes[i]
		}
		v, err := decode(p.params[i], format, b)
		if err != nil {
			return err
		}
		po.args = append(po.args, v)
	}
	po.formats = append(po.formats, m.ResultFormatCodes...)
	s.portals[m.DestinationPortal] = po
	s.send(&pgproto3.BindComplete{})
	return nil
}

func (s *session) describe(m *pgproto3.Describe) error {
	if m.ObjectType == 'S' {
		p := s.stmts[m.Name]
		if p == nil {
			return &pgconn.PgError{Code: "26000", Message: fmt.Sprintf("unknown prepared statement %q", m.Name)}
		}
		s.send(&pgproto3.ParameterDescription{ParameterOIDs: p.params})
		s.describeRows(p.cols, nil)
		return nil
	}
	po := s.portals[m.Name]
	if po == nil {
		return &pgconn.PgError{Code: "34000", Message: fmt.Sprintf("unknown portal %q", m.Name)}
	}
	s.describeRows(po.cols, po.formats)
	return nil
}

func (s *session) executePortal(m *pgproto3.Execute) error {
	po := s.portals[m.Portal]
	if po == nil {
		return &pgconn.PgError{Code: "34000", Message: fmt.Sprintf("unknown portal %q", m.Portal)}
	}
	var out outcome
	if !po.started {
		if s.tx == 'I' {
			s.mu.Lock()
			s.implicit = true
			s.mu.Unlock()
		}
		var err error
		if out, err = s.execute(po.st, po.args, po.cols); err != nil {
			return err
		}
		if s.tx != 'I' {
			s.mu.Lock()
			s.implicit = false // BEGIN made it explicit
			s.mu.Unlock()
		}
		po.started = true
		po.rest, po.tag = out.rows, out.tag
	} else {
		out.tag = po.tag
	}
	rows := po.rest
	if max := int(m.MaxRows); max > 0 && len(rows) > max {
		s.sendRows(rows[:max], po.cols, po.formats)
		po.rest = rows[max:]
		s.send(&pgproto3.PortalSuspended{})
		return nil
	}
	po.rest = nil
	s.sendRows(rows, po.cols, po.formats)
	return s.complete(out)
}

func format(formats []int16, i int) int16 {
	switch {
	case len(formats) == 0:
		return 0
	case len(formats) == 1:
		return formats[0]
	case i < len(formats):
		return formats[i]
	}
	return 0
}

func (s *session) describeRows(cols []column, formats []int16) {
	if cols == nil {
		s.send(&pgproto3.NoData{})
		return
	}
	fields := make([]pgproto3.FieldDescription, len(cols))
	for i, c := range cols {
		fields[i] = pgproto3.FieldDescription{
			Name: []byte(c.name), DataTypeOID: c.oid, DataTypeSize: typeSize(c.oid), TypeModifier: -1, Format: format(formats, i),
		}
	}
	s.send(&pgproto3.RowDescription{Fields: fields})
}

func (s *session) sendRows(rows [][]any, cols []column, formats []int16) {
	for _, r := range rows {
		s.row.Values = s.row.Values[:0]
		s.scratch = s.scratch[:0]
		for i, v := range r {
			if v == nil {
				s.row.Values = append(s.row.Values, nil)
				continue
			}
			oid := uint32(oidText)
			if i < len(cols) {
				oid = cols[i].oid
			}
			from := len(s.scratch)
			s.scratch = encode(s.scratch, oid, format(formats, i), v)
			s.row.Values = append(s.row.Values, s.scratch[from:len(s.scratch):len(s.scratch)])
		}
		s.send(&s.row)
	}
}

// copyIn is COPY … FROM STDIN: it counts lines.
func (s *session) copyIn() (outcome, error) {
	s.send(&pgproto3.CopyInResponse{OverallFormat: 0})
	if err := s.flush(); err != nil {
		return outcome{}, errEnd
	}
	lines := 0
	for {
		m, err := s.be.Receive()
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return outcome{}, errQueryCanceled
			}
			return outcome{}, errEnd
		}
		switch m := m.(type) {
		case *pgproto3.CopyData:
			lines += strings.Count(string(m.Data), "\n")
		case *pgproto3.CopyDone:
			return outcome{tag: fmt.Sprintf("COPY %d", lines)}, nil
		case *pgproto3.CopyFail:
			return outcome{}, &pgconn.PgError{Code: "57014", Message: "COPY from stdin failed: " + m.Message}
		case *pgproto3.Flush, *pgproto3.Sync:
		default:
			return outcome{}, errEnd
		}
	}
}

// copyOut is COPY … TO STDOUT: one line.
func (s *session) copyOut() outcome {
	s.send(&pgproto3.CopyOutResponse{OverallFormat: 0, ColumnFormatCodes: []uint16{0}})
	s.send(&pgproto3.CopyData{Data: []byte("1\n")})
	s.send(&pgproto3.CopyDone{})
	return outcome{tag: "COPY 1"}
}
