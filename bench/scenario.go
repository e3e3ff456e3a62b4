package main

import (
	"strings"
	"time"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// scenario is a cluster, a load, and a roll. Every pool gets a cluster of its own.
type scenario struct {
	name, title string

	nodes, conns int
	drained      int  // nodes that are drained and restarted, one after the other
	hosts        bool // every node's address in the DSN, instead of the load balancer's
	settings     crdbdraintest.Settings
	params       string        // of crdbdrain; READINESS stands for the nodes' URLs
	stagger      time.Duration // crdbdrain_cull_stagger, for the criteria

	workers int
	burst   int           // operations at once, twice while it is steady and after each drain
	latency time.Duration // of a statement, at the server
	dial    time.Duration // what a connection costs on top: the round trips of TLS and of a password
	think   time.Duration // mean pause of a worker between two operations

	// What the pools with a lifetime set: less than connections.timeout, as CockroachDB's documentation tells operators,
	// for there to be any use in it.
	lifetime, jitter time.Duration

	warm   time.Duration // not measured
	steady time.Duration // measured before the first drain
	linger time.Duration // how long a drained node lives on; a real one moves its leases
	down   time.Duration // how long a node is down
	settle time.Duration // between a node's return and the next drain
	home   time.Duration // longest time to watch the way home
	until  time.Duration // watch for as long at least, from the load's beginning
	apart  bool          // one pool at a time: side by side they would want more of the machine than it has
}

// window is how long a draining node leaves connections alone.
func (s *scenario) window() time.Duration {
	return s.settings.InitialWait + s.settings.ConnectionsTimeout
}

const windowParams = "&crdbdrain_readiness=READINESS&crdbdrain_window=5s&crdbdrain_poll_interval=300ms&crdbdrain_poll_interval_draining=200ms"

var windowSettings = crdbdraintest.Settings{
	InitialWait: time.Second, ConnectionsTimeout: 4 * time.Second, TransactionsTimeout: 10 * time.Second,
}

// base is what the scenarios have in common.
var base = scenario{
	nodes: 3, conns: 30, drained: 3,
	settings: windowSettings, params: windowParams, stagger: 500 * time.Millisecond,
	workers: 16, latency: 2 * time.Millisecond, dial: 20 * time.Millisecond, think: 16 * time.Millisecond,
	lifetime: 3 * time.Second, jitter: 600 * time.Millisecond,
	warm: time.Second, steady: 10 * time.Second,
	linger: 300 * time.Millisecond, down: 500 * time.Millisecond, settle: time.Second, home: 30 * time.Second,
}

func with(change func(*scenario)) scenario {
	s := base
	change(&s)
	return s
}

var scenarios = []scenario{
	with(func(s *scenario) {
		s.name, s.title = "window", "3 nodes behind a load balancer, 30 connections, a window of 5 s"
	}),
	with(func(s *scenario) {
		s.name, s.title = "no-window", "the server's default settings: no warning"
		s.settings, s.params = crdbdraintest.DefaultSettings(), ""
		s.settle = 2 * time.Second
	}),
	with(func(s *scenario) {
		s.name, s.title = "idle", "28 of 30 connections idle, and bursts that want them all"
		s.workers, s.burst = 2, 28
		s.think = 4 * time.Millisecond
	}),
	with(func(s *scenario) {
		s.name, s.title = "saturated", "64 workers on 9 connections"
		s.workers, s.conns = 64, 9
		s.latency = 6 * time.Millisecond // so that the pool is what is short, not the machine
	}),
	with(func(s *scenario) {
		s.name, s.title = "hosts", "every node's address in the DSN, no load balancer"
		s.hosts = true
	}),
	with(func(s *scenario) {
		s.name, s.title = "large", "10 nodes, 500 connections on each, one node drained"
		s.nodes, s.conns, s.drained = 10, 5000, 1
		s.hosts = true // a load balancer in this process would want 40,000 file descriptors
		s.workers = 32
		s.warm, s.steady, s.home = 2*time.Second, 5*time.Second, 30*time.Second
		s.apart = true
	}),
}

// quickScenarios is what -quick runs: the window is 2 s.
func quickScenarios() (quick []scenario) {
	for _, s := range scenarios {
		if s.name != "window" && s.name != "no-window" && s.name != "hosts" {
			continue
		}
		quick = append(quick, s.quick())
	}
	return quick
}

func (s scenario) quick() scenario {
	s.warm, s.steady, s.settle = 300*time.Millisecond, 3*time.Second, 500*time.Millisecond
	s.home = 15 * time.Second
	if s.window() == 0 {
		s.home = 3 * time.Second
		return s
	}
	s.title = strings.Replace(s.title, "5 s", "2 s", 1)
	s.settings.InitialWait, s.settings.ConnectionsTimeout = 400*time.Millisecond, 1600*time.Millisecond
	s.stagger = 200 * time.Millisecond
	s.lifetime, s.jitter = 1200*time.Millisecond, 240*time.Millisecond
	s.params = "&crdbdrain_readiness=READINESS&crdbdrain_window=2s&crdbdrain_poll_interval=150ms&crdbdrain_poll_interval_draining=100ms&crdbdrain_cull_stagger=200ms"
	return s
}
