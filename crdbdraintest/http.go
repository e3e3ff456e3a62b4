package crdbdraintest

import (
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
)

// newHTTPServer makes the HTTP server of one incarnation of the node. It
// answers as long as the process runs, also while it drains.
func (n *Node) newHTTPServer() *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", n.health)
	mux.HandleFunc("GET /_status/vars", n.vars)
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if n.gate(r.Context()) {
				mux.ServeHTTP(w, r)
			}
		}),
		TLSConfig: n.c.cfg.TLS.Clone(),
		ErrorLog:  log.New(io.Discard, "", 0),
	}
}

func (n *Node) serveHTTP(srv *http.Server, l net.Listener) {
	if srv.TLSConfig != nil {
		srv.ServeTLS(l, "", "") // the certificate is in the configuration
		return
	}
	srv.Serve(l)
}

// health answers readiness from step 1 on with 503; plain /health stays 200
// while the node drains (pkg/server/api.go, the health endpoint).
func (n *Node) health(w http.ResponseWriter, r *http.Request) {
	f := n.faults.Load()
	n.mu.Lock()
	step := n.step
	n.mu.Unlock()
	ready := r.URL.Query().Get("ready")
	w.Header().Set("Content-Type", "application/json")
	switch asked := ready == "1" || ready == "true"; {
	case asked && f.ReadinessStatus != 0:
		w.WriteHeader(f.ReadinessStatus)
		io.WriteString(w, f.ReadinessBody)
	case asked && step >= Unready:
		w.WriteHeader(http.StatusServiceUnavailable)
		io.WriteString(w, `{"error":"node is shutting down","code":14,"message":"node is shutting down","details":[]}`)
	default:
		io.WriteString(w, "{}")
	}
}

// vars answers with Prometheus text: many lines, one of which says which node
// this is.
func (n *Node) vars(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	if f := n.faults.Load(); f.Vars != "" {
		io.WriteString(w, f.Vars)
		return
	}
	var b strings.Builder
	noise := func(from, to int) {
		for i := from; i < to; i++ {
			fmt.Fprintf(&b, "# HELP sim_metric_%d A metric that is not the one you look for\n# TYPE sim_metric_%d counter\nsim_metric_%d{store=\"1\"} %d\n", i, i, i, i*i)
		}
	}
	noise(0, 400)
	fmt.Fprintf(&b, "# HELP node_id node ID with labels for advertised RPC and HTTP addresses\n# TYPE node_id gauge\nnode_id{advertise_addr=%q,http_addr=%q,sql_addr=%q} %d\n", n.addr, n.httpAddr, n.addr, n.id)
	noise(400, 800)
	io.WriteString(w, b.String())
}
