#!/usr/bin/env bash
# Runs the RDMA tests in QEMU guests with Soft-RoCE devices: those of one host, then those of two nodes.
#
#   tools/test_rdma.sh [ARGUMENTS OF PYTEST]
#
# The exit status is not 0 where the tests could not be run, unless OMNIREDUCE_RDMA_OPTIONAL=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=.venv/bin/python
LIMIT=${RDMA_TIMEOUT:-420} # seconds for each of the two parts
optional=${OMNIREDUCE_RDMA_OPTIONAL:-0}
unset OMNIREDUCE_RDMA_OPTIONAL # omnireduce takes each such name for a configuration key

could_not_run() {
    printf '\n%s\n' '############################################################' \
        "# THE RDMA TESTS DID NOT RUN: $1" \
        '# Nothing is known about RDMA on this tree.' \
        '############################################################' >&2
    if [[ $optional == 1 ]]; then
        echo '# OMNIREDUCE_RDMA_OPTIONAL=1 is set, so this is no failure.' >&2
        exit 0
    fi
    echo '# OMNIREDUCE_RDMA_OPTIONAL=1 in the environment lets it pass.' >&2
    exit 1
}

part() { # NAME, then the arguments of guests.py run
    local start=$SECONDS status=0
    echo "== $1"
    "$PYTHON" tools/guests.py run --timeout "$LIMIT" "${@:2}" </dev/null || status=$?
    if [[ $status == 0 ]]; then
        echo "== $1: passed in $((SECONDS - start)) s"
    else
        echo "== $1: FAILED with status $status after $((SECONDS - start)) s" >&2
        failed=1
    fi
}

tools/pyverbs.sh .venv || could_not_run 'no pyverbs (the reason is above)'
"$PYTHON" tools/guests.py prepare || could_not_run 'no guest can be started (the reason is above)'

failed=0
part 'one guest' -- "$PYTHON" -m pytest -p no:cacheprovider tests/rdma "$@"
part 'two guests' --nodes 2 -- tests/rdma/two_nodes.sh
exit $failed
