package crdbdrain

import (
	"cmp"
	"slices"
	"time"
)

// Node is what the process knows of one node of its cluster.
type Node struct {
	// ID is CockroachDB's; 0 stands for the connections whose node is not known (yet).
	ID int
	// State is "active", "draining" or "decommissioning"; that of ID 0 is "unknown".
	State string
	// Live says that a source's last answer lists the node as live, or that the process has a connection to it. A node that
	// is neither marked nor live is one that a source lists and that does not serve now.
	Live bool
	// Source is what said first that the node leaves: instances, gossip, readiness, errors, feed or manual. Empty for an
	// active node.
	Source string
	// Since is when it said so, by this process's clock; zero for an active node.
	Since time.Time
	// Connections is how many connections the process's pools of the cluster hold to it: idle, in use, and spares.
	Connections int
}

// Nodes returns what the process knows of the cluster's nodes, ordered by ID: those that a source lists, those that are
// marked, those that there are connections to, and, under ID 0, the connections whose node is not known. It is a snapshot,
// the same for every connector of the cluster, and nil before the first connection to CockroachDB. No server is asked. It is
// safe for concurrent use; it looks at every connection once, under the lock that a new connection takes, so call it for
// people and not for every request.
func (c *Connector) Nodes() []Node {
	w := c.watchdog.Load()
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	nodes := make(map[nodeID]*Node)
	at := func(id nodeID) *Node {
		n := nodes[id]
		if n == nil {
			n = &Node{ID: int(id), State: nodeActive}
			nodes[id] = n
		}
		return n
	}
	for id := range w.sources {
		for node, state := range w.sources[id].nodes {
			n := at(node)
			n.Live = n.Live || state.live
		}
	}
	for _, info := range w.nodes {
		for s := range info.held {
			n := at(s.stamp())
			n.Connections++
			n.Live = true
		}
	}
	if m := w.marks.Load(); m != nil {
		for id, mk := range m.of {
			n := at(id)
			n.State, n.Source, n.Since = nodeDraining, mk.source.String(), mk.since
			if mk.decommissioning {
				n.State = nodeDecommissioning
			}
		}
	}
	if unknown := nodes[0]; unknown != nil {
		unknown.State = "unknown"
	}
	list := make([]Node, 0, len(nodes))
	for _, n := range nodes {
		list = append(list, *n)
	}
	slices.SortFunc(list, func(a, b Node) int { return cmp.Compare(a.ID, b.ID) })
	return list
}
