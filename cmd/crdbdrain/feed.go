package main

import (
	"context"
	"flag"
	"io"

	"github.com/crdbdrain/crdbdrain/internal/feedcmd"
)

var feedCommand = command{
	name:    "feed",
	summary: "tell other processes which nodes drain",
	help:    feedcmd.Help,
	run: func(ctx context.Context, args []string, _, stderr io.Writer) error {
		var o feedcmd.Options
		flags := flag.NewFlagSet("feed", flag.ContinueOnError)
		o.Register(flags)
		if err := parseFlags(flags, args); err != nil {
			return err
		}
		if err := o.Check(); err != nil {
			return usageError("feed: " + err.Error())
		}
		return o.Run(ctx, stderr)
	},
}
