package crdbdrain

import (
	"sync"
	"testing"
	"time"

	"github.com/crdbdrain/crdbdrain/crdbdraintest"
)

// Nodes follows a drain: active, draining with source and time, and active again; connections are counted where they are.
func TestNodesFollowADrain(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{Settings: leaves(700*time.Millisecond, 5*time.Second)})
	db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_window=1s&crdbdrain_readiness="+c.ReadinessURLs())
	if got := db.c.Nodes(); got != nil {
		t.Errorf("before the first connection: %+v, want nil", got)
	}
	fill(t, db.DB, 6)
	total := func(nodes []Node) (n int) {
		for _, x := range nodes {
			n += x.Connections
		}
		return n
	}
	if nodes := db.c.Nodes(); total(nodes) != 6 {
		t.Errorf("%+v, want 6 connections, on known nodes or unknown ones", nodes)
	}
	eventually(t, "three active nodes, with the 6 connections", func() bool {
		nodes := db.c.Nodes()
		for i, n := range nodes {
			if n != (Node{ID: i + 1, State: "active", Live: true, Connections: n.Connections}) {
				return false
			}
		}
		return len(nodes) == 3 && total(nodes) == 6
	})
	began := time.Now()
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		c.Node(2).Drain(t.Context())
	}()
	eventually(t, "node 2 drains and has no connection left", func() bool {
		nodes := db.c.Nodes()
		n := nodes[1]
		return n.State == "draining" && n.Source == "readiness" && n.Since.After(began) && n.Connections == 0 && !n.Live && nodes[0].State == "active"
	})
	<-drained
	c.Node(2).Stop()
	c.Node(2).Start()
	eventually(t, "node 2 is active and live again", func() bool {
		n := db.c.Nodes()[1]
		return n.State == "active" && n.Live && n.Source == "" && n.Since.IsZero()
	})
}

// What is being decommissioned is named so, by gossip, and connections of unknown nodes are under 0.
func TestNodesDecommissioningAndUnknown(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{})
	c.Grant("app", "admin")
	db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms")
	fill(t, db.DB, 1)
	c.Node(3).Decommission()
	eventually(t, "node 3 is being decommissioned", func() bool {
		nodes := db.c.Nodes()
		return len(nodes) == 3 && nodes[2].State == "decommissioning" && nodes[2].Source == "gossip"
	})

	pods := startCluster(t, crdbdraintest.Config{Virtual: true})
	db = open(t, pods.DSN(), "crdbdrain_poll_interval=100ms")
	fill(t, db.DB, 2)
	want := Node{ID: 0, State: "unknown", Live: true, Connections: 2}
	eventually(t, "the rule is known not to hold", func() bool { return db.wd() != nil && db.wd().rule.Load() == ruleOff })
	if got := db.c.Nodes(); len(got) != 1 || got[0] != want {
		t.Errorf("%+v, want %+v alone", got, want)
	}
}

// Snapshots are taken while connections come and go and marks change. The race detector judges.
func TestNodesConcurrently(t *testing.T) {
	t.Parallel()
	c := startCluster(t, crdbdraintest.Config{})
	db := open(t, c.DSN(), "crdbdrain_poll_interval=100ms&crdbdrain_readiness="+c.ReadinessURLs())
	fill(t, db.DB, 3)
	l := startLoad(t, db.DB, 4, 0)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 200 {
				if err := db.c.SetDraining(1, i%2 == 0); err != nil {
					t.Error(err)
				}
				for _, n := range db.c.Nodes() {
					if n.ID < 0 || n.Connections < 0 || n.State == "" {
						t.Errorf("%+v", n)
					}
				}
			}
		})
	}
	wg.Wait()
	l.stop()
	if nodes := db.c.Nodes(); len(nodes) == 0 {
		t.Error("no nodes")
	}
}
