#!/usr/bin/env bash
# Runs pytest in a guest. What fails there gets a second chance, alone and said aloud: two cores emulate the guests' four
# processors, and a test that times out because another one held them says nothing about RDMA.
set -euo pipefail

run() { .venv/bin/python -m pytest -v --durations=12 -o cache_dir="$cache" "$@"; }

cache=$(mktemp -d)
run "$@" && exit
status=$?
((status == 1)) || exit "$status"
echo '== SOME TESTS FAILED; again, only those'
run "$@" --last-failed --last-failed-no-failures none
echo '== PASSED, BUT SOME TESTS ONLY WHEN REPEATED: see above which'
