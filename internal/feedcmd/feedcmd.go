// Package feedcmd is the command that serves a drain feed. It is a package so that a build with OpenTelemetry's exporters,
// which the driver's module does without, can share it.
package feedcmd

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/metric"

	"github.com/crdbdrain/crdbdrain"
)

// Options is what the command line says, and what the build adds to it.
type Options struct {
	DSN             string
	Listen          string
	Cert, Key       string
	Insecure        bool
	Feed            crdbdrain.FeedConfig
	ShutdownTimeout time.Duration

	// Metrics, if not nil, is served as /metrics. Provider, if not nil, gets the metrics.
	Metrics  http.Handler
	Provider metric.MeterProvider

	listening func(net.Addr) // for tests
}

// DSNVariable is the environment variable that holds the DSN, where a command line would show its password to everybody on
// the machine.
const DSNVariable = "CRDBDRAIN_DSN"

// Register adds the command's flags to a set.
func (o *Options) Register(flags *flag.FlagSet) {
	flags.StringVar(&o.DSN, "dsn", "", "")
	flags.StringVar(&o.Listen, "listen", "127.0.0.1:8443", "")
	flags.StringVar(&o.Cert, "tls-cert", "", "")
	flags.StringVar(&o.Key, "tls-key", "", "")
	flags.BoolVar(&o.Insecure, "insecure", false, "")
	flags.StringVar(&o.Feed.TokenFile, "token-file", "", "")
	flags.StringVar(&o.Feed.MarkTokenFile, "mark-token-file", "", "")
	flags.Float64Var(&o.Feed.MaxReconnectsPerSecond, "max-reconnects-per-second", 0, "")
	flags.DurationVar(&o.ShutdownTimeout, "shutdown-timeout", 10*time.Second, "")
}

// Check completes the options, and says what is wrong with them.
func (o *Options) Check() error {
	if o.DSN == "" {
		o.DSN = os.Getenv(DSNVariable)
	}
	host, _, err := net.SplitHostPort(o.Listen)
	switch {
	case o.DSN == "":
		return errors.New("a DSN is missing: -dsn, or better " + DSNVariable + " in the environment")
	case err != nil:
		return errors.New("-listen: want HOST:PORT or :PORT")
	case (o.Cert == "") != (o.Key == ""):
		return errors.New("-tls-cert and -tls-key go together")
	case o.Cert == "" && !o.Insecure && !loopback(host):
		return errors.New("-listen is no loopback address: give -tls-cert and -tls-key, or -insecure behind something that does TLS")
	case o.ShutdownTimeout <= 0:
		return errors.New("-shutdown-timeout: want a duration above 0s")
	}
	return nil
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Run serves until ctx ends, and then shuts down in good order: readiness first, then those who wait, then the rest.
func (o *Options) Run(ctx context.Context, stderr io.Writer) error {
	log := slog.New(slog.NewTextHandler(stderr, nil))
	cfg, err := pgx.ParseConfig(o.DSN)
	if err != nil {
		// The driver's own error shows no secret.
		_, err = (&crdbdrain.Driver{}).OpenConnector(o.DSN)
		return err
	}
	options := []crdbdrain.Option{crdbdrain.WithLogger(log)}
	if o.Provider != nil {
		options = append(options, crdbdrain.WithMeterProvider(o.Provider))
	}
	connector, err := crdbdrain.NewConnector(cfg, options...)
	if err != nil {
		return err
	}
	defer connector.Close()
	feed, err := crdbdrain.NewFeedHandler(connector, o.Feed)
	if err != nil {
		return err
	}
	defer feed.Close()
	var handler http.Handler = feed
	if o.Metrics != nil {
		mux := http.NewServeMux()
		mux.Handle("GET /metrics", o.Metrics)
		mux.Handle("/", feed)
		handler = mux
	}
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      80 * time.Second, // a client waits for 60 s at most
		IdleTimeout:       90 * time.Second,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo), // a handshake that fails is the client's to report
	}
	var listenConfig net.ListenConfig
	listener, err := listenConfig.Listen(ctx, "tcp", o.Listen)
	if err != nil {
		return err
	}
	if o.Cert != "" {
		files := &keyPair{cert: o.Cert, key: o.Key}
		if _, err := files.get(nil); err != nil {
			_ = listener.Close()
			return err
		}
		server.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: files.get}
	}
	log.Info("crdbdrain: the feed listens", "address", listener.Addr().String(), "tls", o.Cert != "")
	if o.listening != nil {
		o.listening(listener.Addr())
	}
	served := make(chan error, 1)
	go func() {
		if o.Cert != "" {
			served <- server.ServeTLS(listener, "", "")
		} else {
			served <- server.Serve(listener)
		}
	}()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.ShutdownTimeout)
	defer cancel()
	feedErr := feed.Shutdown(bound)
	if err := server.Shutdown(bound); err != nil {
		_ = server.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	if feedErr != nil {
		return fmt.Errorf("clients were cut off: %w", feedErr)
	}
	log.Info("crdbdrain: the feed has ended")
	return nil
}

// keyPair is a certificate that is read again when its file has changed, at most every ten seconds.
type keyPair struct {
	cert, key string

	mu      sync.Mutex
	looked  time.Time
	changed time.Time
	loaded  *tls.Certificate
}

// get is for tls.Config. While the files cannot be read, the certificate is that of before.
func (k *keyPair) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	k.mu.Lock()
	loaded, changed := k.loaded, k.changed
	if loaded != nil && time.Since(k.looked) < 10*time.Second {
		k.mu.Unlock()
		return loaded, nil
	}
	k.looked = time.Now() // others go on with what there is
	k.mu.Unlock()
	info, err := os.Stat(k.cert)
	if err == nil && loaded != nil && info.ModTime().Equal(changed) {
		return loaded, nil
	}
	var pair tls.Certificate
	if err == nil {
		pair, err = tls.LoadX509KeyPair(k.cert, k.key)
	}
	switch {
	case err == nil:
		k.mu.Lock()
		defer k.mu.Unlock()
		k.loaded, k.changed = &pair, info.ModTime()
		return k.loaded, nil
	case loaded == nil:
		return nil, err
	}
	return loaded, nil
}

// Help is the command's manual, in the manner of a man page.
const Help = `NAME
    crdbdrain feed - tell other processes which nodes drain

SYNOPSIS
    crdbdrain feed -dsn DSN [-listen ADDRESS] [-tls-cert FILE -tls-key FILE]
                   [-token-file FILE] [-mark-token-file FILE]
                   [-max-reconnects-per-second N]

DESCRIPTION
    Polls one cluster, and serves what it knows of its drains over HTTP. Every
    process whose DSN has crdbdrain_feed=https://THIS then needs no privilege in
    the database, and does not poll it.

    The DSN's user needs what the sources need (crdbdrain check says what), or
    the DSN has crdbdrain_readiness, which needs nothing. Set crdbdrain_cluster
    here and in the clients: a client takes no other cluster's feed then.

    It keeps no state: run two behind any load balancer, with /readyz as the
    health check. Each of them polls.

FLAGS
    -dsn DSN
        The cluster. Better in the environment, as CRDBDRAIN_DSN: a command line
        is everybody's to read.
    -listen ADDRESS
        127.0.0.1:8443 by default.
    -tls-cert FILE, -tls-key FILE
        Certificate and key, PEM. Read again when they change.
    -insecure
        Allow an address that is not the loopback's without TLS.
    -token-file FILE
        Bearer tokens that may read, one a line. Read again when it changes.
        Without it, everybody may.
    -mark-token-file FILE
        Bearer tokens that may mark nodes by hand. Without it, nobody may.
    -max-reconnects-per-second N
        How many connections all clients of this process together may give up
        and replace in a second because of a drain. 0, the default: no limit.
        With two replicas, each gets half. What cannot leave at this rate before
        connections.timeout ends, the server closes.
    -shutdown-timeout DURATION
        The most that the end may take. 10s by default.

REQUESTS
    GET /v1/drain[?wait=10s]       the document; with If-None-Match it waits for
                                   another one, at most 60s
    POST /v1/drain/NODE[?for=10m]  mark a node by hand, at most for 24h
    DELETE /v1/drain/NODE          take that mark back
    GET /healthz, GET /readyz

    With replicas, POST to each of them.

SIGNALS
    SIGTERM, SIGINT    /readyz answers 503, waiting clients are sent away over
                       three seconds, then the process ends.

EXAMPLE
    CRDBDRAIN_DSN='postgres://watch@lb:26257/defaultdb?sslmode=verify-full' \
        crdbdrain feed -listen :8443 -tls-cert tls.crt -tls-key tls.key \
        -token-file tokens
`
