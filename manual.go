package crdbdrain

import (
	"context"
	"fmt"
	"time"
)

// SetDraining marks a node by hand, or takes such a mark back: for a script that drains nodes and knows before the server
// says so. It concerns every connector of the cluster in the process, and nothing outside it. The mark stays until it is
// taken back, until a drain of the node that began after it is over (another source or a new connection shows that the node
// is back), or until the cluster's last connector is closed. Marking every node is as good as marking none. An error says
// why nothing was done. It is safe for concurrent use.
func (c *Connector) SetDraining(node int, draining bool) error {
	return c.setDraining(node, draining, time.Time{})
}

// setDraining marks a node until a time; the zero time is no end.
func (c *Connector) setDraining(node int, draining bool, until time.Time) error {
	w, err := c.nodes(node)
	if err != nil {
		return err
	}
	if draining && !c.cfg.sources.has(sourceManual) {
		return configErrorf("crdbdrain_sources does not name manual")
	}
	t := time.Now()
	if draining {
		w.note(nodeID(node), sourceManual, notice{since: t, heard: t, before: t, until: until})
		return nil
	}
	w.mu.Lock()
	var events []event
	if said := w.notices[nodeID(node)]; said != nil && said[sourceManual] != nil {
		said[sourceManual] = nil
		events = w.remark(t)
	}
	w.mu.Unlock()
	w.tell(events)
	return nil
}

// nodes returns the watchdog for a method that names a node.
func (c *Connector) nodes(node int) (*watchdog, error) {
	switch {
	case node < 1 || node > maxNodeID:
		return nil, configErrorf("node %d: a node ID is between 1 and %d", node, maxNodeID)
	case c.cfg.mode == modeOff:
		return nil, configErrorf("crdbdrain_mode is off")
	}
	w := c.attach()
	if w == nil || c.ctx.Err() != nil {
		return nil, errClosed
	}
	return w, nil
}

var errClosed = configError("the connector is closed")

// WaitDrained waits until no connector of the cluster in this process has a connection to the node, idle or in use: the
// barrier for a script that marks a node (SetDraining) and then stops it. Without a mark nothing makes the connections
// leave. A node that the process has no connection to is drained already. The error is ctx's, with the number of
// connections left, or says that it cannot be known here which node a connection is on.
func (c *Connector) WaitDrained(ctx context.Context, node int) error {
	w, err := c.nodes(node)
	if err != nil {
		return err
	}
	for {
		w.mu.Lock()
		left, unknown := 0, 0
		var changed chan struct{}
		if n := w.nodes[nodeID(node)]; n != nil && len(n.held) > 0 {
			left = len(n.held)
			if n.empty == nil {
				n.empty = make(chan struct{})
			}
			changed = n.empty
		}
		rule := w.rule.Load()
		if rule != ruleHolds {
			unknown = len(w.nodeOf(0).held)
		}
		conns := w.conns
		w.mu.Unlock()
		switch {
		case conns == 0:
			return nil
		case rule == ruleOff || rule == ruleAsk && unknown > 0:
			return fmt.Errorf("crdbdrain: node %d: it is not known which node %d connections are on", node, unknown)
		case rule == ruleUnknown:
			w.poke() // it is about to be found out
			if !sleep(ctx, minPollGap) {
				return fmt.Errorf("crdbdrain: node %d: it is not known yet which node a connection is on: %w", node, ended(ctx))
			}
			continue
		case left == 0:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			w.mu.Lock()
			if n := w.nodes[nodeID(node)]; n != nil {
				left = len(n.held)
			}
			w.mu.Unlock()
			return fmt.Errorf("crdbdrain: node %d: %d connections are left: %w", node, left, ctx.Err())
		}
	}
}

// ended is ctx's error, or the one that it is about to have.
func ended(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return context.DeadlineExceeded
}

// tellEmpty wakes those who wait for the node's last connection to go. watchdog.mu is held.
func (n *nodeInfo) tellEmpty() {
	if n.empty != nil && len(n.held) == 0 {
		close(n.empty)
		n.empty = nil
	}
}
