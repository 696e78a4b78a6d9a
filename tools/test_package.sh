#!/usr/bin/env bash
# Builds the wheel and the sdist, and tries them in fresh environments outside of the repository, with each Python at hand: the
# quickstart of the README, the doctor, the programs, some tests, and that nothing is left after pip uninstall. Kernels are kept
# in this user's cache, as ever.
#
#   tools/test_package.sh [PYTHON]...     without arguments: the newest of each version from 3.11 on, on PATH or of pyenv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
TESTS=(tests/test_config.py tests/test_wire.py tests/test_extras.py tests/kernels/test_merge_kernels.py
    tests/cluster/test_mpirun.py tests/runtime/test_fused.py)

say() { echo "package: $*"; }
fail() { echo "package: $*" >&2; exit 1; }

# Names on PATH are no proof: version managers put shims there that only print an error.
pythons() {
    local minor candidate
    for minor in 11 12 13 14; do
        for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
            if "$candidate" -c "import venv, ensurepip, sys; sys.exit(sys.version_info[:2] != (3, $minor))" 2>/dev/null; then
                echo "$candidate"
                continue 2
            fi
        done
        say "NOT TRIED with Python 3.$minor: it is not on this machine" >&2
    done
}

if (($#)); then interpreters=("$@"); else mapfile -t interpreters < <(pythons); fi
((${#interpreters[@]})) || fail 'no Python from 3.11 on with its venv module was found'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONSAFEPATH=1
unset PYTHONPATH

say "building with $("${interpreters[0]}" --version)"
"${interpreters[0]}" -m venv "$work/build"
"$work/build/bin/pip" install -q build
# What git does not know is no part of it: an old build could leave modules behind.
git ls-files -z --cached --others --exclude-standard | xargs -0 tar c --no-recursion | (mkdir "$work/tree" && tar x -C "$work/tree")
"$work/build/bin/python" -m build --outdir "$work/dist" "$work/tree" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
wheel=$(echo "$work"/dist/*.whl) sdist=$(echo "$work"/dist/*.tar.gz)
"$work/build/bin/python" - "$wheel" <<'PY'
import sys, zipfile
top = {name.partition("/")[0] for name in zipfile.ZipFile(sys.argv[1]).namelist()}
assert all(name == "omnireduce" or name.endswith(".dist-info") for name in top), f"the wheel has {sorted(top)}"
PY
"$work/build/bin/python" - README.md >"$work/train.py" <<'PY'
import re, sys
quickstart = open(sys.argv[1], encoding="utf-8").read().partition("## Quickstart")[2]
print(re.search(r"```python\n(.*?)```", quickstart, re.S)[1])
PY
mkdir "$work/tests" && cp -r tests configs pyproject.toml "$work/tests"

try() { # PYTHON
    local env=$work/env start=$SECONDS
    say "$("$1" --version)"
    rm -rf "$env" && "$1" -m venv "$env"
    "$env/bin/pip" install -q "$wheel[mpi]" 'pytest>=8' 'hypothesis>=6.100'
    cd "$work" # where no checkout can be imported
    PATH=$env/bin:$PATH
    [[ $("$env/bin/mpirun" -n 4 "$env/bin/python" train.py 2>train.log) == '4 workers: weights[0, 0] is 0.875' ]] || { cat train.log; fail 'the quickstart'; }
    omnireduce doctor >doctor.log 2>&1 || { cat doctor.log; fail 'doctor'; }
    for program in omnireduce omnireduce.aggregator omnireduce.worker; do
        "$env/bin/python" -m "$program" --help >/dev/null || fail "python -m $program"
    done
    "$env/bin/python" -c 'import omnireduce.torch' 2>torch.log && fail 'torch should not be here'
    [[ $(tail -n 1 torch.log) == *"pip install 'torch>="* ]] || { cat torch.log; fail 'the advice for an extra'; }
    (unset PYTHONSAFEPATH && cd tests && "$env/bin/python" -m pytest -q -p no:cacheprovider "${TESTS[@]}") || fail 'the tests'
    files >"$work/files"
    uninstall
    cd "$root"
    say "$("$1" --version): passed in $((SECONDS - start)) s"
}

site() { "$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
files() { (cd "$(site)" && find omnireduce -name '*.pyc' -prune -o -type f -print0 | sort -z | xargs -0 sha256sum); }

uninstall() {
    "$work/env/bin/pip" uninstall -qy omnireduce
    [[ ! -e $(site)/omnireduce ]] || { find "$(site)/omnireduce" | head; fail 'pip uninstall leaves files'; }
    ! "$work/env/bin/python" -c 'import omnireduce' 2>/dev/null || fail 'it can still be imported'
}

# The sdist installs the same files as the wheel. PYTHON
try_sdist() {
    say "$("$1" --version), from the sdist"
    cd "$work"
    "$work/env/bin/pip" install -q --no-deps "$sdist"
    files | diff "$work/files" - || fail 'the sdist installs other files than the wheel'
    uninstall
    cd "$root"
}

# A clone beside a script does not hide what is installed from it.
beside() {
    say "an editable install, and a script beside the clone"
    mkdir "$work/home" && mv "$work/tree" "$work/home/omnireduce"
    "$work/build/bin/pip" install -q --no-deps --editable "$work/home/omnireduce"
    echo 'import omnireduce, omnireduce.worker; print(omnireduce.__version__)' >"$work/home/train.py"
    (unset PYTHONSAFEPATH && cd / && "$work/build/bin/python" "$work/home/train.py" >/dev/null) || fail 'the clone hides the package'
}

beside
for python in "${interpreters[@]}"; do try "$python"; done
try_sdist "${interpreters[-1]}"
say "passed: $(basename "$wheel"), $(basename "$sdist")"
