package feedcmd

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"flag"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func parse(t *testing.T, args ...string) (Options, error) {
	t.Helper()
	var o Options
	flags := flag.NewFlagSet("feed", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	o.Register(flags)
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	return o, o.Check()
}

func TestOptions(t *testing.T) {
	for _, tt := range []struct{ args, want string }{
		{"", "a DSN is missing"},
		{"-dsn postgres://h/d", ""},
		{"-dsn postgres://h/d -listen [::1]:0", ""},
		{"-dsn postgres://h/d -listen :8443", "-tls-cert and -tls-key, or -insecure"},
		{"-dsn postgres://h/d -listen 10.0.0.1:8443", "-tls-cert and -tls-key, or -insecure"},
		{"-dsn postgres://h/d -listen :8443 -insecure", ""},
		{"-dsn postgres://h/d -listen :8443 -tls-cert c -tls-key k", ""},
		{"-dsn postgres://h/d -tls-cert c", "go together"},
		{"-dsn postgres://h/d -listen nowhere", "want HOST:PORT"},
		{"-dsn postgres://h/d -shutdown-timeout 0s", "above 0s"},
		{"-dsn postgres://h/d -max-reconnects-per-second x", "invalid value"},
	} {
		_, err := parse(t, strings.Fields(tt.args)...)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %q", tt.args, err, tt.want)
		}
	}
	t.Setenv(DSNVariable, "postgres://h/d")
	if _, err := parse(t); err != nil {
		t.Errorf("with %s: %v", DSNVariable, err)
	}
}

// buffer is a log that is written to and read at the same time.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// start runs the command, and returns its address and what ends it.
func start(t *testing.T, o Options) (addr string, log *buffer, stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	addrs, done := make(chan net.Addr, 1), make(chan error, 1)
	o.listening = func(a net.Addr) { addrs <- a }
	log = &buffer{}
	go func() { done <- o.Run(ctx, log) }()
	select {
	case a := <-addrs:
		addr = a.String()
	case err := <-done:
		t.Fatalf("it ended: %v\n%s", err, log)
	}
	return addr, log, func() error { cancel(); return <-done }
}

// eventually waits until a request gets a status.
func eventually(t *testing.T, c *http.Client, url string, status int) (body string) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		resp, err := c.Get(url)
		if err == nil {
			text, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode == status {
				return string(text)
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not answer %d: %v", url, status, err)
		}
	}
}

func TestRun(t *testing.T) {
	c := crdbdraintest.Start(crdbdraintest.Config{})
	defer c.Close()
	c.Grant("app", "VIEWSYSTEMTABLE")
	o, err := parse(t, "-dsn", c.DSN()+"&crdbdrain_poll_interval=100ms&crdbdrain_cluster=prod", "-listen", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o.Metrics = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "metrics") })
	addr, log, stop := start(t, o)
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	eventually(t, client, "http://"+addr+"/readyz", 200)
	if body := eventually(t, client, "http://"+addr+"/v1/drain", 200); !strings.Contains(body, `"cluster":"prod"`) {
		t.Error(body)
	}
	if body := eventually(t, client, "http://"+addr+"/metrics", 200); body != "metrics" {
		t.Error(body)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if n := strings.Count(log.String(), "\n"); n > 4 {
		t.Errorf("%d lines:\n%s", n, log)
	}
}

// certificate makes a key and its certificate, PEM.
func certificate(t *testing.T) (crt, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: serial, NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

// The certificate is read again when it has changed.
func TestTLSReload(t *testing.T) {
	c := crdbdraintest.Start(crdbdraintest.Config{})
	defer c.Close()
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "crt"), filepath.Join(dir, "key")
	write := func() {
		t.Helper()
		crt, k := certificate(t)
		for path, text := range map[string][]byte{cert: crt, key: k} {
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	write()
	o, err := parse(t, "-dsn", c.DSN(), "-listen", "127.0.0.1:0", "-tls-cert", cert, "-tls-key", key)
	if err != nil {
		t.Fatal(err)
	}
	addr, _, stop := start(t, o)
	serial := func() string {
		t.Helper()
		conn, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.String()
	}
	before := serial()
	if again := serial(); again != before {
		t.Errorf("%s, then %s", before, again)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	files := &keyPair{cert: cert, key: key}
	one, err := files.get(nil)
	if err != nil {
		t.Fatal(err)
	}
	write()
	if err := os.Chtimes(cert, time.Now(), time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if two, _ := files.get(nil); two != one {
		t.Error("it is looked at again at once")
	}
	files.looked = time.Time{}
	if two, err := files.get(nil); err != nil || bytes.Equal(two.Certificate[0], one.Certificate[0]) {
		t.Errorf("the old one: %v", err)
	}
	if err := os.Remove(cert); err != nil {
		t.Fatal(err)
	}
	files.looked = time.Time{}
	if two, err := files.get(nil); err != nil || two == nil {
		t.Errorf("without the file: %v", err)
	}
}

// Errors at the start name what is wrong, and no secret.
func TestRunFails(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, args := range [][]string{
		{"-dsn", "postgres://u:hunter2@h:x/d"},
		{"-dsn", "postgres://u:hunter2@h/d?crdbdrain_mod=on"},
		{"-dsn", "postgres://u:hunter2@h/d?crdbdrain_mode=off"},
		{"-dsn", "postgres://u:hunter2@h/d?crdbdrain_sources=errors"},
		{"-dsn", "postgres://u:hunter2@h/d", "-listen", taken.Addr().String()},
		{"-dsn", "postgres://u:hunter2@h/d", "-token-file", "/nowhere"},
		{"-dsn", "postgres://u:hunter2@h/d", "-tls-cert", "/nowhere", "-tls-key", "/nowhere"},
		{"-dsn", "postgres://u:hunter2@h/d", "-max-reconnects-per-second", "-1"},
	} {
		o, err := parse(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		log := &buffer{}
		if err = o.Run(t.Context(), log); err == nil || strings.Contains(err.Error()+log.String(), "hunter2") {
			t.Errorf("%q: %v\n%s", args, err, log)
		}
	}
}

// A client that sends its request byte by byte, and one whose request is too long, do not last.
func TestSlowAndLongRequests(t *testing.T) {
	c := crdbdraintest.Start(crdbdraintest.Config{})
	defer c.Close()
	o, err := parse(t, "-dsn", c.DSN(), "-listen", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr, _, stop := start(t, o)
	var wg sync.WaitGroup
	wg.Go(func() {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		begin := time.Now()
		for _, b := range []byte("GET /v1/drain HTTP/1.1\r\nHost: x\r\nX-Long: " + strings.Repeat("x", 1000)) {
			if _, err := conn.Write([]byte{b}); err != nil {
				break
			}
			time.Sleep(20 * time.Millisecond)
			if time.Since(begin) > 15*time.Second {
				t.Error("a slow request is let go on")
				return
			}
		}
	})
	wg.Go(func() {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		go func() {
			_, _ = io.WriteString(conn, "GET /v1/drain HTTP/1.1\r\nHost: x\r\nX-Long: "+strings.Repeat("x", 1<<20)+"\r\n\r\n")
		}()
		resp, err := io.ReadAll(conn)
		if !strings.HasPrefix(string(resp), "HTTP/1.1 431") {
			t.Errorf("a long request: %q, %v", resp, err)
		}
	})
	wg.Wait()
	if err := stop(); err != nil {
		t.Error(err)
	}
}
