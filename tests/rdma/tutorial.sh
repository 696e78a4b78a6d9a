#!/usr/bin/env bash
# The steps of vagrant/README.md on two nodes: an aggregator and a worker on each, blocks over RDMA. Then other sizes and
# densities from the configuration file, with the same aggregators. Runs on both nodes; node1 does the work.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

[[ $(hostname) == node1 ]] || exit 0

LIMIT=${TUTORIAL_LIMIT:-240} # seconds for one step, emulated: as long as nothing may be said
BIN=$PWD/.venv/bin
CONFIG=$PWD/vagrant/nodes.toml
WORK=$(mktemp -d)
NODES=(node1 node2)
pids=()

clean_up() {
    kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$WORK"
}
trap clean_up EXIT

fail() {
    echo "tutorial.sh: $*" >&2
    tail -n 20 "$WORK"/*.log >&2
    for node in "${NODES[@]}"; do
        echo "what Soft-RoCE counted on $node:" >&2
        timeout 60 ssh -o BatchMode=yes "$node" "grep -r . /sys/class/infiniband/rxe0/ports/1/hw_counters" >&2 || true
    done
    exit 1
}

on() { # NODE COMMAND...
    ssh -o BatchMode=yes "$1" "cd $PWD && ${*:2}"
}

for node in "${NODES[@]}"; do
    # -tt: the aggregator ends with the connection
    ssh -tt -o BatchMode=yes "$node" "cd $PWD && exec $BIN/omnireduce aggregator --config $CONFIG" \
        >"$WORK/$node.log" 2>&1 </dev/null &
    pids+=($!)
done
for node in "${NODES[@]}"; do
    timeout "$LIMIT" sh -c "until grep -q ^ready '$WORK/$node.log'; do sleep 0.3; done" || fail "no aggregator on $node"
done
echo 'an aggregator on each node: ready'

bench() { # ARGUMENTS OF BENCH: one worker on each node
    timeout "$LIMIT" "$BIN/mpirun" -hosts node1,node2 -n 2 "$BIN/omnireduce" bench --config "$@" \
        --set cluster.join_timeout_s=200 --json "$WORK/rows.json" >"$WORK/bench.log" 2>&1 || fail "bench $*"
    grep -v '^bench:' "$WORK/bench.log"
    "$BIN/python" - "$WORK/rows.json" <<'PYTHON' || fail 'rows that are not as expected'
import json, sys
for row in json.load(open(sys.argv[1])):
    assert row["transport"] == "verbs" and row["world_size"] == 2 and row["shards"] == 2 and row["wrong"] == 0, row
PYTHON
}

bench "$CONFIG"
echo 'the tutorial: 262,144 floats of density 1.0 over RDMA, nothing wrong'

# Another file with other sizes and densities, on the nodes that run the workers; the aggregators go on.
sed -e 's/^elements = .*/elements = [262_144, 1_000_003]/' -e 's/^density = .*/density = [0.5, 0.01, 0.0]/' \
    "$CONFIG" >"$WORK/changed.toml"
on node2 "mkdir -p $WORK && cat > $WORK/changed.toml" <"$WORK/changed.toml"
bench "$WORK/changed.toml"
echo 'other sizes and densities, the same aggregators: nothing wrong'
