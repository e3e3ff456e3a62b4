package crdbdraintest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func selfSigned(t *testing.T) (*tls.Config, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, _ := x509.ParseCertificate(der)
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, pool
}

func TestTLS(t *testing.T) {
	cfg, pool := selfSigned(t)
	c := start(t, Config{Nodes: 2, TLS: cfg, LoadBalancer: LoadBalancerConfig{Interval: 20 * time.Millisecond}})
	n := c.Node(1)
	if !strings.HasPrefix(n.HTTPURL(), "https://") || !strings.HasSuffix(c.DSN(), "sslmode=require") {
		t.Fatal(n.HTTPURL(), c.DSN())
	}
	conn := connect(t, c, n.DSN())
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	idle := connect(t, c, n.DSN())
	done := make(chan DrainResult)
	go func() { done <- n.Drain(t.Context()) }()
	n.WaitStep(t.Context(), Closing)
	if err := tx.Commit(t.Context()); err != nil {
		t.Error(err)
	}
	if r := <-done; r.LostIdle != 1 || r.LostBusy != 1 {
		t.Errorf("%+v", r)
	}
	if _, err := idle.Exec(t.Context(), "SELECT 1"); err == nil {
		t.Error("the idle connection survived")
	}
	// One dial with require, two with prefer: refused inside TLS, then in clear.
	for _, mode := range []struct {
		name  string
		dials int
	}{{"require", 1}, {"prefer", 2}, {"disable", 1}} {
		before := n.Stats().Refused
		_, err := dial(c, strings.Replace(n.DSN(), "=require", "="+mode.name, 1))
		if code(err) != "57P01" || n.Stats().Refused-before != mode.dials {
			t.Errorf("sslmode=%s: %d dials, %v", mode.name, n.Stats().Refused-before, err)
		}
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true}}
	res, err := client.Get(n.HTTPURL() + "/health?ready=1")
	if err != nil || res.StatusCode != http.StatusServiceUnavailable {
		t.Fatalf("%v %v", res, err)
	}
	res.Body.Close()
	for c.LoadBalancer().Up(1) || !c.LoadBalancer().Up(2) {
		time.Sleep(time.Millisecond)
	}
}

func TestCloseEndsWhatHangs(t *testing.T) {
	c := Start(Config{})
	cfg, _ := pgx.ParseConfig(c.DSN())
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer hangUp(conn)
	for _, n := range c.Nodes() {
		n.Hang(true)
	}
	done := make(chan struct{})
	go func() {
		conn.Exec(context.Background(), "SELECT pg_sleep(60)")
		close(done)
	}()
	go c.Node(1).Drain(context.Background())
	time.Sleep(20 * time.Millisecond)
	c.Close()
	<-done
	c.Close() // twice is fine
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"SELECT 1", "select a.b::int8 as x from c d join e using (f) where g in (1,2) order by h desc limit 1", "/* /* */ '", "set x = ", "insert into t values ($1) returning a, b::int8", `"`, "$999999999999", ";;", "copy t from stdin", "show", "not"} {
		f.Add(s)
	}
	c := Start(Config{Nodes: 1, Memory: true})
	f.Cleanup(c.Close)
	c.Grant("app", "admin")
	f.Fuzz(func(t *testing.T, sql string) {
		if len(sql) > 1<<14 {
			t.Skip() // each of its statements may have 65535 parameters
		}
		s := &session{n: c.Node(1), user: "app", version: parseVersion("v25.2.0"), tx: 'I'}
		for _, st := range parseSQL(sql) {
			params := paramTypes(st, nil)
			if _, err := s.columns(st, params); err == nil && st.kind == kindSelect && !st.sleeps {
				s.selectRows(context.Background(), st.sel, make([]any, len(params)), nil)
			}
		}
	})
}
