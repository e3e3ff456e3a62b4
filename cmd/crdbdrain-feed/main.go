// Crdbdrain-feed is the command "crdbdrain feed" with OpenTelemetry's exporters built in: Prometheus' text at /metrics, or
// OTLP. It is a module of its own, so that the driver's has none of them.
//
//	cd cmd/crdbdrain-feed && go build
//
// It has the flags of "crdbdrain feed" (crdbdrain help feed), and -otlp, which sends the metrics with OTLP over HTTP to
// where OpenTelemetry's environment variables say (OTEL_EXPORTER_OTLP_ENDPOINT and others). /metrics is there either way.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

	"github.com/crdbdrain/crdbdrain/internal/feedcmd"
)

const flagsHelp = `
FLAGS OF THIS BUILD
    -otlp
        Send the metrics with OTLP over HTTP as well; OTEL_EXPORTER_OTLP_ENDPOINT
        and OpenTelemetry's other variables say where.

    GET /metrics has them as Prometheus' text. It asks for no token, and names
    neither nodes nor hosts.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is main without the process: it returns the exit status, 0, 1 if it could not serve, or 2 if the call was not
// understood.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var o feedcmd.Options
	flags := flag.NewFlagSet("crdbdrain-feed", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	o.Register(flags)
	otlp := flags.Bool("otlp", false, "")
	err := flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		_, _ = fmt.Fprint(stdout, feedcmd.Help, flagsHelp)
		return 0
	}
	if err == nil && flags.NArg() > 0 {
		err = fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if err == nil {
		err = o.Check()
	}
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "crdbdrain-feed: %s\nTry: crdbdrain-feed -h\n", err)
		return 2
	}
	if err := serve(ctx, &o, *otlp, stderr); err != nil {
		_, _ = fmt.Fprintf(stderr, "crdbdrain-feed: %s\n", err)
		return 1
	}
	return 0
}

func serve(ctx context.Context, o *feedcmd.Options, otlp bool, stderr io.Writer) error {
	registry := prometheus.NewRegistry()
	pull, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	if err != nil {
		return err
	}
	readers := []sdkmetric.Option{sdkmetric.WithReader(pull)}
	if otlp {
		push, err := otlpmetrichttp.New(ctx)
		if err != nil {
			return err
		}
		readers = append(readers, sdkmetric.WithReader(sdkmetric.NewPeriodicReader(push)))
	}
	provider := sdkmetric.NewMeterProvider(readers...)
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = provider.Shutdown(ctx) // what OTLP's receiver has not got by now it does not get
	}()
	o.Provider = provider
	o.Metrics = promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
	return o.Run(ctx, stderr)
}
