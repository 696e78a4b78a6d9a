#!/usr/bin/env bash
# Runs the RDMA tests in QEMU guests with Soft-RoCE devices: those of one host, then those of two nodes.
#
#   tools/test_rdma.sh [ARGUMENTS OF PYTEST]
#
# The exit status is not 0 where the tests could not be run, unless RDMA_OPTIONAL=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=.venv/bin/python
# Seconds without a finished test: one waits at most 270 s for anything, and a whole run takes what the machine takes.
SILENT=${RDMA_SILENT:-600}
optional=${RDMA_OPTIONAL:-0}

set -m # what runs in the background is a group of processes: all of it ends with this script
log=$(mktemp)
trap 'for group in $(jobs -p); do kill -- "-$group" 2>/dev/null || true; done; wait; rm -f "$log"' EXIT

could_not_run() {
    printf '\n%s\n' '############################################################' \
        "# THE RDMA TESTS DID NOT RUN: $1" \
        '# Nothing is known about RDMA on this tree.' \
        '############################################################' >&2
    if [[ $optional == 1 ]]; then
        echo '# RDMA_OPTIONAL=1 is set, so this is no failure.' >&2
        exit 0
    fi
    echo '# RDMA_OPTIONAL=1 in the environment lets it pass.' >&2
    exit 1
}

part() { # NAME, then the arguments of guests.py run
    local start=$SECONDS status=0
    echo "== $1"
    "$PYTHON" tools/guests.py run --silent "$SILENT" "${@:2}" </dev/null || status=$?
    if [[ $status == 0 ]]; then
        echo "== $1: passed in $((SECONDS - start)) s"
    else
        echo "== $1: FAILED with status $status after $((SECONDS - start)) s" >&2
    fi
    return "$status"
}

tools/pyverbs.sh .venv </dev/null & # bash acts upon a signal while it waits, and not before a command in the foreground ends
wait $! || could_not_run 'no pyverbs (the reason is above)'
"$PYTHON" tools/guests.py prepare </dev/null &
wait $! || could_not_run 'no guest can be started (the reason is above)'

# Files that name the transports, or a fixture of tests/runtime/conftest.py that goes through them. To import the others
# takes a minute, emulated.
mapfile -t TESTS < <(grep -lE '\b(KINDS|TRANSPORTS|RDMA|by_transports)\b|\b(config|by_shards): Config\b' tests/{runtime,cluster}/test_*.py)
((${#TESTS[@]})) || could_not_run 'no test file names the transports'
TESTS=(tests/rdma tests/transport/test_conformance.py "${TESTS[@]}")
# Of the suites that run over every transport, what is RDMA's: real queues only, and once what differs by types of
# elements or by what ranks disagree about. Blocks are bytes by then, and the other tests have all of them. Launches by
# mpirun are what the two guests have.
ONLY='(rdma or verbs or test_guest or test_failures) and not test_impossible_hellos and not test_rank_size_and_job and not (test_conformance and not rdma)'
ONCE='test_every_dtype_op_and_shape or test_gather_scatter or test_ragged_allgather or test_out_takes or test_duplicates or test_broadcast_from or test_allgather or test_both_sides or test_sums_are_the_same_with_threads'
# Whom a rank waits for, and for how long, has nothing to do with the link.
ONLY="$ONLY and not (test_stragglers or test_a_stopped_rank_is_the_one or test_a_late_rank_stays)"
ONLY="$ONLY and not (($ONCE) and not (float32 or f4 or tensors-verbs))"
# Nor has which call is urgent.
ONLY="$ONLY and not (test_an_urgent_tensor and not verbs-small)"
ONE_GUEST=(env SLOWNESS=8 "$PYTHON" -m pytest -v --durations=12 -p no:cacheprovider "${TESTS[@]}" -k "$ONLY" "$@")
failed=0
part 'two guests' --nodes 2 -- bash -c 'tests/rdma/two_nodes.sh && tests/rdma/tutorial.sh' >"$log" 2>&1 &
two_guests=$!
part 'one guest' -- "${ONE_GUEST[@]}" &
wait $! || failed=1
wait $two_guests || failed=1
cat "$log"
exit $failed
