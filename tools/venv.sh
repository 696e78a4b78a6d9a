#!/bin/sh
# Makes a virtual environment with the development install in it, with no root and no configuration.
#
#   tools/venv.sh DIR EXTRAS     for example: tools/venv.sh .venv mpi,dev
#   tools/venv.sh --missing      only print the Debian packages that are missing, if any
#
# PYTHON=/path/to/python chooses the interpreter; else the first good one of python3.13, 3.12, 3.11 and python3.
set -eu

# A name on PATH is no proof: version managers put shims there that only print an error.
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
complete() { "$1" -c 'import venv; from ensurepip import bootstrap' >/dev/null 2>&1; } # Debian ships these two separately
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

# Sets `python`, or leaves it empty and sets `missing` to the Debian packages that would help.
find_python() {
    python='' missing=''
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        recent "$candidate" || continue
        if complete "$candidate"; then
            python=$candidate missing=''
            return
        fi
        missing=${missing:-python$(version "$candidate")-venv}
    done
    [ -z "$missing" ] || return 0
    for release in 3.13 3.12 3.11; do
        if apt-cache show "python$release-venv" >/dev/null 2>&1; then
            missing="python$release python$release-venv"
            return
        fi
    done
    missing='python3 python3-venv'
}

explain() {
    sudo=$([ "$(id -u)" = 0 ] || echo 'sudo ')
    if [ -n "${PYTHON:-}" ] && ! recent "$PYTHON"; then
        echo "PYTHON=$PYTHON is no Python 3.11 or newer; name one that is, or leave PYTHON out" >&2
    elif command -v apt-get >/dev/null; then
        echo "missing: $missing. Install with: ${sudo}apt-get update && ${sudo}apt-get install -y $missing" >&2
    else
        echo "missing: Python 3.11 or newer with its venv module. Install it, or run: make PYTHON=/path/to/python3" >&2
    fi
    exit 1
}

find_python
if [ "${1:-}" = --missing ]; then
    [ -z "$missing" ] || echo "$missing"
    exit 0
fi
[ -n "$python" ] || explain

directory=$1 extras=$2
if ! recent "$directory/bin/python" || ! "$directory/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "making $directory with $("$python" --version)"
    "$python" -m venv --clear "$directory"
fi
echo "installing omnireduce and what it needs into $directory (about 170 MB to download the first time)"
"$directory/bin/python" -m pip install -qq --disable-pip-version-check --editable ".[$extras]"
echo "installed"
