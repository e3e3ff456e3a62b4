package crdbdrain

import (
	"strconv"
	"strings"
)

// nodeID is CockroachDB's ID of a node (of a SQL instance, where SQL runs apart from storage). 0 means unknown.
type nodeID uint32

// maxNodeID bounds what a source may claim: IDs are positive 32-bit integers.
const maxNodeID = 1<<31 - 1

// nodeFromPID decodes the node ID that CockroachDB (v22.1 and later) puts into BackendKeyData, in the field that
// PostgreSQL uses for the process ID (pkg/sql/pgwire/pgwirecancel):
//
//	 31 30          20 19                    0
//	┌──┬──────────────┬───────────────────────┐
//	│ 0│ node ID      │ random                │   IDs below 2048
//	├──┼──────────────┴───────────────────────┤
//	│ 1│ node ID                              │   larger ones
//	└──┴──────────────────────────────────────┘
//
// Earlier versions send 0. Proxies put their own values there, so the rule has to be verified before it is believed
// (verifyRule).
func nodeFromPID(pid uint32) nodeID {
	if pid&(1<<31) != 0 {
		return nodeID(pid &^ (1 << 31))
	}
	return nodeID(pid >> 20)
}

// parseNodeID reads a node ID as SHOW node_id and the source tables print it. External SQL pods answer 0, which is
// unknown and therefore not ok.
func parseNodeID(s string) (id nodeID, ok bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n < 1 || n > maxNodeID {
		return 0, false
	}
	return nodeID(n), true
}

// crdbVersion reads major and minor from the ParameterStatus crdb_version, a text such as
// "CockroachDB CCL v25.2.0 (x86_64-pc-linux-gnu, …)". It is not ok where the text has another form; the caller then
// asks and lets the server refuse.
func crdbVersion(s string) (major, minor int, ok bool) {
	for field := range strings.FieldsSeq(s) {
		rest, found := strings.CutPrefix(field, "v")
		if !found {
			continue
		}
		a, b, found := strings.Cut(rest, ".")
		if !found {
			continue
		}
		b, _, _ = strings.Cut(b, ".")
		b, _, _ = strings.Cut(b, "-")
		major, err := strconv.Atoi(a)
		if err != nil || major < 0 {
			continue
		}
		minor, err := strconv.Atoi(b)
		if err != nil || minor < 0 {
			continue
		}
		return major, minor, true
	}
	return 0, 0, false
}
