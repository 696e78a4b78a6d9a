#!/usr/bin/env bash
# Checks that two nodes reach each other by IP, SSH, mpirun and RDMA. Runs on both nodes (node1 does the work), in two
# guests of tools/guests.py or on the two machines of vagrant/.
# shellcheck disable=SC2029,SC2032,SC2033 # names in commands for node2 are meant to be filled in here
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

[[ $(hostname) == node1 ]] || exit 0

DEVICE=rxe0
PORT=/sys/class/infiniband/$DEVICE/ports/1
WORK=$(mktemp -d)
LIMIT=240 # seconds for one step, as long as nothing may be said; the slowest takes about ten, emulated

clean_up() {
    command ssh -O exit -o ControlPath="$WORK/node2" node2 2>/dev/null || true
    mapfile -t pids < <(jobs -p)
    kill "${pids[@]}" 2>/dev/null || true
    rm -rf "$WORK"
}
trap clean_up EXIT

ssh() { # one connection for all commands: making one takes seconds, emulated
    command ssh -o BatchMode=yes -o ControlMaster=auto -o ControlPath="$WORK/%h" -o ControlPersist=yes "$@"
}

fail() { echo "two_nodes.sh: $*" >&2; exit 1; }

expect() { # WHAT EXPECTED FOUND
    [[ $2 == "$3" ]] || fail "$1: expected '$2', found '$3'"
    echo "$1: $3"
}

gid_index() { # NODE, its GIDs in order: where the one with an IPv4 address is; RoCE v2 routes by it
    local line
    line=$(grep -n '^0000:0000:0000:0000:0000:ffff:' <<<"$2") ||
        fail "$DEVICE of $1 has no GID with an IPv4 address: ip addr, then vagrant/provision/rxe.sh"
    echo $((${line%%:*} - 1))
}

with_server() { # SERVER COMMAND -- CLIENT COMMAND: starts one on node2, then the other here as soon as that one listens
    local server=() log=$WORK/server end=$((SECONDS + LIMIT)) pid
    while [[ $1 != -- ]]; do server+=("$1"); shift; done
    shift
    ssh node2 timeout $LIMIT "${server[@]}" >"$log" 2>&1 &
    pid=$!
    until timeout $LIMIT "$@" >"$log.client" 2>&1; do
        # nothing but a server that does not listen yet is a reason to try again: it serves one client, and ends
        if ! kill -0 $pid 2>/dev/null || ((SECONDS >= end)); then
            fail "$*: $(tail -n 3 "$log.client"); node2 says: $(tail -n 3 "$log")"
        fi
        sleep 0.5
    done
    wait $pid || fail "${server[*]} on node2 failed: $(cat "$log")"
    cat "$log.client"
}

ping -q -c 3 -i 0.2 -w 10 node2 >/dev/null || fail 'node1 cannot ping node2: compare ip addr on both'
ssh node2 ping -q -c 3 -i 0.2 -w 10 node1 >/dev/null || fail 'node2 cannot ping node1: compare ip addr on both'
echo 'ping: both ways'

expect 'ssh from node1' node2 "$(ssh node2 hostname)"
expect 'ssh from node2' node1 "$(ssh node2 ssh -o BatchMode=yes node1 hostname)"
expect 'mpirun' 'node1 node2' "$(timeout $LIMIT .venv/bin/mpirun -hosts node1,node2 -n 2 hostname | sort | xargs)"

expect "$DEVICE of node1" '4: ACTIVE' "$(cat $PORT/state)"
expect "$DEVICE of node2" '4: ACTIVE' "$(ssh node2 cat $PORT/state)"

with_server rping -s -C 10 -- rping -c -a 192.168.59.102 -C 10
echo 'rping: 10 rounds'

bench=(ib_write_bw -d "$DEVICE" -F -s 65536 -n 200 --report_gbits)
index1=$(gid_index node1 "$(cat $PORT/gids/[0-9])")
index2=$(gid_index node2 "$(ssh node2 cat "$PORT/gids/[0-9]")")
figures=$(with_server "${bench[@]}" -x "$index2" -- "${bench[@]}" -x "$index1" 192.168.59.102)
speed=$(awk '$1 == 65536 { print $4 }' <<<"$figures")
[[ -n $speed ]] || fail "ib_write_bw: expected a line for messages of 65536 bytes, found: $figures"
echo "ib_write_bw: $speed Gbit/s in messages of 64 KiB"
