# What go test -tags realcluster needs to know of the cluster of compose.yaml. To be read with ". ./env.sh" in this folder.
export COMPOSE_FILE="$PWD/compose.yaml"
export CRDBDRAIN_REAL_DSN='postgres://root@127.0.0.1:26257/defaultdb?sslmode=disable'
export CRDBDRAIN_REAL_READINESS='http://127.0.0.1:8081,http://127.0.0.1:8082,http://127.0.0.1:8083'
export CRDBDRAIN_REAL_DRAIN='docker compose exec -T "n$NODE" ./cockroach node drain --self --insecure --host="n$NODE"'
export CRDBDRAIN_REAL_RESTART='docker compose restart "n$NODE"'
export CRDBDRAIN_REAL_SET="docker compose exec -T n1 ./cockroach sql --insecure --host=n1 -e \"SET CLUSTER SETTING \$SETTING = '\$VALUE'\""
