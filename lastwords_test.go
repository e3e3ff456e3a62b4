package crdbdrain

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"
)

// stream encodes messages as the server sends them.
func stream(messages ...pgproto3.BackendMessage) []byte {
	var b []byte
	for _, m := range messages {
		var err error
		if b, err = m.Encode(b); err != nil {
			panic(err)
		}
	}
	return b
}

// rawError is an ErrorResponse whose body pgx would not write.
type rawError struct {
	pgproto3.ErrorResponse
	body string
}

func (m *rawError) Encode(dst []byte) ([]byte, error) {
	return append(binary.BigEndian.AppendUint32(append(dst, 'E'), uint32(4+len(m.body))), m.body...), nil
}

// heard is what a link knows after it has read the stream in these pieces.
type heard struct {
	words   uint32
	replied bool
}

func hearPieces(pieces ...[]byte) heard {
	l := &link{}
	for _, p := range pieces {
		l.hear(p)
	}
	return heard{l.words.Load(), l.replied}
}

var (
	goodbyeMessage = shutdown("ERROR")
	rowMessages    = []pgproto3.BackendMessage{oneColumn(), oneRow("1")}
	readyMessage   = &pgproto3.ReadyForQuery{TxStatus: 'I'}
	doneMessage    = &pgproto3.CommandComplete{CommandTag: []byte("INSERT 0 1")}
	cancelMessage  = &pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "57014", Message: "query execution canceled"}
)

// streams are what a server may say, and what is to be made of it.
var streams = []struct {
	name     string
	messages []pgproto3.BackendMessage
	want     heard
}{
	{"nothing", nil, heard{}},
	{"a goodbye alone", []pgproto3.BackendMessage{goodbyeMessage}, heard{words: goodbyeClean}},
	{"a FATAL goodbye", []pgproto3.BackendMessage{shutdown("FATAL")}, heard{words: goodbyeClean}},
	{"a refused dial", []pgproto3.BackendMessage{&pgproto3.ErrorResponse{Severity: "ERROR", Code: "57P01", Message: noticeNotAcceptingClients}}, heard{words: goodbyeClean}},
	{"an answer", append(slices.Clone(rowMessages), doneMessage, readyMessage), heard{}},
	{"an answer so far", rowMessages, heard{replied: true}},
	{"a goodbye behind an answer", append(slices.Clone(rowMessages), doneMessage, readyMessage, goodbyeMessage), heard{words: goodbyeClean}},
	{"a goodbye before ReadyForQuery", append(slices.Clone(rowMessages), doneMessage, goodbyeMessage), heard{words: goodbyeReplied, replied: true}},
	{"a goodbye after a row", append(slices.Clone(rowMessages), goodbyeMessage), heard{words: goodbyeReplied, replied: true}},
	{"a goodbye after Close, Parse, Bind and Describe", []pgproto3.BackendMessage{&pgproto3.CloseComplete{}, &pgproto3.ParseComplete{}, &pgproto3.ParameterDescription{ParameterOIDs: []uint32{25}},
		&pgproto3.BindComplete{}, oneColumn(), &pgproto3.NoData{}, goodbyeMessage}, heard{words: goodbyeClean}},
	{"a goodbye after a cancelled statement", []pgproto3.BackendMessage{cancelMessage, goodbyeMessage}, heard{words: goodbyeErrored, replied: true}},
	{"a goodbye after rows and a cancelled statement", append(slices.Clone(rowMessages), cancelMessage, goodbyeMessage), heard{words: goodbyeErrored, replied: true}},
	{"a goodbye behind an answered error", []pgproto3.BackendMessage{cancelMessage, readyMessage, goodbyeMessage}, heard{words: goodbyeClean}},
	{"the first goodbye counts", []pgproto3.BackendMessage{goodbyeMessage, doneMessage, goodbyeMessage}, heard{words: goodbyeClean, replied: true}},
	{"another 57P01", []pgproto3.BackendMessage{&pgproto3.ErrorResponse{Severity: "FATAL", Code: "57P01", Message: "terminating connection due to administrator command"}}, heard{replied: true}},
	{"the text under another code", []pgproto3.BackendMessage{&pgproto3.ErrorResponse{Severity: "ERROR", Code: "XX000", Message: noticeShuttingDown}}, heard{replied: true}},
	{"the text in a notice", []pgproto3.BackendMessage{&pgproto3.NoticeResponse{Severity: "ERROR", Code: "57P01", Message: noticeShuttingDown}}, heard{replied: true}},
	{"the text in a row", []pgproto3.BackendMessage{oneRow(string(stream(goodbyeMessage)))}, heard{replied: true}},
	{"a goodbye whose detail is long", []pgproto3.BackendMessage{&pgproto3.ErrorResponse{Severity: "ERROR", Code: "57P01", Message: noticeShuttingDown, Detail: strings.Repeat("x", 5000)}}, heard{words: goodbyeClean}},
	{"a goodbye behind a long text", []pgproto3.BackendMessage{&pgproto3.ErrorResponse{Severity: strings.Repeat("x", 5000), Code: "57P01", Message: noticeShuttingDown}}, heard{words: goodbyeClean}},
	{"a text that begins as the goodbye's", []pgproto3.BackendMessage{&pgproto3.ErrorResponse{Code: "57P01", Message: noticeNotAcceptingClients + strings.Repeat(" ", 5000)}}, heard{replied: true}},
	{"a text that the body takes back far behind", []pgproto3.BackendMessage{&rawError{body: "C57P01\x00M" + noticeShuttingDown + "\x00D" + strings.Repeat("x", 5000) + "\x00Mnot so\x00\x00"}}, heard{replied: true}},
	{"a code that the body takes back far behind", []pgproto3.BackendMessage{&rawError{body: "C57P01\x00M" + noticeShuttingDown + "\x00D" + strings.Repeat("x", 5000) + "\x00C40001\x00\x00"}}, heard{replied: true}},
	{"a long row, then a goodbye", []pgproto3.BackendMessage{oneRow(strings.Repeat("E", 70000)), goodbyeMessage}, heard{words: goodbyeReplied, replied: true}},
}

func init() {
	for _, kind := range []pgproto3.BackendMessage{
		&pgproto3.EmptyQueryResponse{}, &pgproto3.PortalSuspended{}, &pgproto3.ParameterStatus{Name: "a", Value: "b"},
		&pgproto3.NotificationResponse{Channel: "c"}, &pgproto3.NoticeResponse{Code: "00000"}, &pgproto3.CopyInResponse{}, &pgproto3.CopyOutResponse{},
		&pgproto3.CopyBothResponse{}, &pgproto3.CopyData{Data: []byte("1\n")}, &pgproto3.CopyDone{}, &pgproto3.FunctionCallResponse{},
	} {
		streams = append(streams, struct {
			name     string
			messages []pgproto3.BackendMessage
			want     heard
		}{fmt.Sprintf("a goodbye after %T", kind), []pgproto3.BackendMessage{kind, goodbyeMessage}, heard{words: goodbyeReplied, replied: true}})
	}
}

// The verdict is the same however the network cuts the stream.
func TestLastWords(t *testing.T) {
	t.Parallel()
	for _, tt := range streams {
		b := stream(tt.messages...)
		if got := hearPieces(b); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
			continue
		}
		single := make([][]byte, 0, len(b))
		for i := range b {
			single = append(single, b[i:i+1])
			if got := hearPieces(b[:i], b[i:]); got != tt.want {
				t.Errorf("%s, cut at byte %d of %d: %+v, want %+v", tt.name, i, len(b), got, tt.want)
				break
			}
		}
		if got := hearPieces(single...); got != tt.want {
			t.Errorf("%s, byte by byte: %+v, want %+v", tt.name, got, tt.want)
		}
	}
}

// A goodbye that has not come in whole is none.
func TestLastWordsCutShort(t *testing.T) {
	t.Parallel()
	b := stream(goodbyeMessage)
	for i := range b {
		if got := hearPieces(b[:i]); got.words != goodbyeNone {
			t.Errorf("%d of %d bytes: %+v", i, len(b), got)
		}
	}
}

// A new request forgets the replies to the last one, and nothing forgets a goodbye.
func TestLastWordsOfARequest(t *testing.T) {
	t.Parallel()
	l := &link{}
	l.hear(stream(&pgproto3.ParameterStatus{Name: "a", Value: "b"})) // between requests
	l.begin()
	l.hear(stream(goodbyeMessage))
	if l.words.Load() != goodbyeClean {
		t.Errorf("words = %d, want clean: what came before the request is no reply to it", l.words.Load())
	}
	l.begin()
	if l.words.Load() != goodbyeClean {
		t.Error("the next request forgot the goodbye")
	}
}

func TestErrorFieldsOfHostileBodies(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ body, code, message string }{
		{"", "", ""},
		{"\x00", "", ""},
		{"C", "", ""},
		{"C\x00", "", ""},
		{"C57P01", "", ""},          // not terminated
		{"C57P01\x00", "57P01", ""}, // without the terminator
		{"C57P01\x00M", "57P01", ""},
		{"C57P01\x00Mtext\x00\x00", "57P01", "text"},
		{"Mtext\x00C57P01\x00\x00", "57P01", "text"},
		{"C1\x00C57P01\x00\x00", "57P01", ""},   // the last counts, as for pgx
		{"\x00C57P01\x00Mtext\x00\x00", "", ""}, // behind the end
		{"SERROR\x00\x00C57P01\x00\x00", "", ""},
		{"zC57P01\x00Mtext\x00\x00", "", "text"}, // an unknown field
		{"M\xff\xfe\x00C\x01\x00\x00", "\x01", "\xff\xfe"},
	} {
		for size := 1; size <= len(tt.body)+1; size++ {
			var f errorFields
			for piece := range slices.Chunk([]byte(tt.body), size) {
				f.add(piece)
			}
			if err := new(pgproto3.ErrorResponse).Decode([]byte(tt.body)); f.code != tt.code || f.message != tt.message || f.ended != (err == nil) {
				t.Errorf("%q in pieces of %d: %q, %q, ended %v; want %q, %q, pgx says %v", tt.body, size, f.code, f.message, f.ended, tt.code, tt.message, err)
			}
		}
	}
}

// A length that no message can have makes pgx give up, and nothing worse here.
func TestLastWordsOfImpossibleLengths(t *testing.T) {
	t.Parallel()
	for _, length := range []uint32{0, 3, 1 << 31, 1<<32 - 1} {
		b := binary.BigEndian.AppendUint32([]byte{'E'}, length)
		if got := hearPieces(append(b, stream(rowMessages...)...)); got.words != goodbyeNone {
			t.Errorf("length %d: %+v", length, got)
		}
	}
}

// FuzzLastWords compares the link with pgx's own decoder over the same bytes, however they are cut.
func FuzzLastWords(f *testing.F) {
	for _, tt := range streams {
		if b := stream(tt.messages...); len(b) < 1<<13 {
			f.Add(b, uint8(1))
			f.Add(b, uint8(200))
		}
	}
	f.Add([]byte("E\x00\x00\x00\x03"), uint8(1))
	f.Add([]byte("E\x00\x00\x00\x0bC57P01\x00"), uint8(2))
	f.Fuzz(func(t *testing.T, b []byte, size uint8) {
		want, n := byFrontend(b)
		b = b[:n]
		var pieces [][]byte
		for piece := range slices.Chunk(b, int(size)+1) {
			pieces = append(pieces, piece)
		}
		if n == 0 {
			return
		}
		got, whole := hearPieces(pieces...), hearPieces(b)
		if got != whole {
			t.Fatalf("in pieces of %d: %+v; whole: %+v", size+1, got, whole)
		}
		if got != want {
			t.Fatalf("%+v, by pgx's decoder %+v", got, want)
		}
	})
}

// byFrontend decodes what it can, and returns what is to be heard and the bytes decoded.
func byFrontend(b []byte) (h heard, n int) {
	fe := pgproto3.NewFrontend(bytes.NewReader(b), io.Discard)
	fe.SetMaxBodyLen(1 << 20) // it allocates what a length says
	failed := false
	for {
		m, err := fe.Receive()
		if err != nil {
			return h, n
		}
		n += int(binary.BigEndian.Uint32(b[n+1:])) + 1
		switch m := m.(type) {
		case *pgproto3.ParseComplete, *pgproto3.BindComplete, *pgproto3.CloseComplete, *pgproto3.ParameterDescription, *pgproto3.RowDescription, *pgproto3.NoData:
		case *pgproto3.ReadyForQuery:
			h.replied, failed = false, false
		case *pgproto3.ErrorResponse:
			if !isGoodbye(m.Code, m.Message) {
				h.replied, failed = true, true
				continue
			}
			switch {
			case h.words != goodbyeNone:
			case failed:
				h.words = goodbyeErrored
			case h.replied:
				h.words = goodbyeReplied
			default:
				h.words = goodbyeClean
			}
		default:
			h.replied = true
		}
	}
}

func TestOnlyPrepares(t *testing.T) {
	t.Parallel()
	prepare := slices.Concat(requestOf(&pgproto3.Parse{Query: "SELECT 1"}), requestOf(&pgproto3.Describe{ObjectType: 'S'}), requestOf(&pgproto3.Sync{}))
	for _, tt := range []struct {
		name string
		b    []byte
		want bool
	}{
		{"Parse, Describe, Sync", prepare, true},
		{"Close, Flush", append(requestOf(&pgproto3.Close{ObjectType: 'S'}), requestOf(&pgproto3.Flush{})...), true},
		{"Terminate", requestOf(&pgproto3.Terminate{}), true},
		{"and Execute", append(slices.Clip(prepare), requestOf(&pgproto3.Execute{})...), false},
		{"and Bind", append(slices.Clip(prepare), requestOf(&pgproto3.Bind{})...), false},
		{"a Query in front", append(requestOf(&pgproto3.Query{String: "SELECT 1"}), prepare...), false},
		{"COPY's data", requestOf(&pgproto3.CopyData{Data: []byte("P")}), false},
		{"a function", requestOf(&pgproto3.FunctionCall{}), false},
		{"cut short", prepare[:len(prepare)-1], false},
		{"a length that no message has", []byte("S\x00\x00\x00\x03"), false},
		{"a length beyond the end", []byte("S\xff\xff\xff\xff"), false},
	} {
		if got := onlyPrepares(tt.b); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

// failingConn fails its writes after n bytes.
type failingConn struct {
	net.Conn
	n   int
	err error
}

func (c failingConn) Write(p []byte) (int, error) { return min(c.n, len(p)), c.err }

// A write that fails because the peer is gone passes for a success, so that pgx reads what the peer has said; only one of
// which the kernel took nothing says that nothing was sent.
func TestLinkWrite(t *testing.T) {
	t.Parallel()
	opError := func(errno syscall.Errno) error {
		return &net.OpError{Op: "write", Net: "tcp", Err: os.NewSyscallError("write", errno)}
	}
	for _, tt := range []struct {
		name         string
		cockroach    bool
		n            int
		err          error
		masked       bool
		unsent, sent bool
	}{
		{name: "sent", cockroach: true, n: 10, sent: true},
		{name: "EPIPE, nothing sent", cockroach: true, err: opError(syscall.EPIPE), masked: true, unsent: true},
		{name: "ECONNRESET, nothing sent", cockroach: true, err: opError(syscall.ECONNRESET), masked: true, unsent: true},
		{name: "EPIPE, a part sent", cockroach: true, n: 3, err: opError(syscall.EPIPE), masked: true, sent: true},
		{name: "PostgreSQL", err: opError(syscall.EPIPE)},
		{name: "closed by ourselves", cockroach: true, err: &net.OpError{Op: "write", Err: net.ErrClosed}},
		{name: "a deadline", cockroach: true, err: os.ErrDeadlineExceeded},
	} {
		l := &link{w: failingConn{n: tt.n, err: tt.err}}
		if tt.cockroach {
			l.session.Store(&session{})
		}
		l.begin()
		n, err := l.Write(make([]byte, 10))
		if tt.masked && (n != 10 || err != nil) || !tt.masked && (n != tt.n || !errors.Is(err, tt.err)) {
			t.Errorf("%s: %d, %v", tt.name, n, err)
		}
		if l.unsent.Load() != tt.unsent || l.wrote.Load() != tt.sent {
			t.Errorf("%s: unsent %v, wrote %v", tt.name, l.unsent.Load(), l.wrote.Load())
		}
	}
}
