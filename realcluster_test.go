//go:build realcluster

package crdbdrain

// With this tag TestRealCluster runs on the cluster that the environment names (docs/real-cluster.md), and fails where it
// names none.
func init() { onRealCluster = true }
