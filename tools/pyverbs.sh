#!/bin/sh
# Makes `import pyverbs` work in a virtual environment, and says which RDMA devices there are.
#
#   tools/pyverbs.sh DIR     for example: tools/pyverbs.sh .venv
#
# pyverbs must match the rdma-core libraries of the system, and one from PyPI rarely does. The distribution's always does,
# and works in any CPython of the same minor version: its folder is linked into the environment. As root this installs the
# packages; else it prints the line that does.
set -eu

packages='python3-pyverbs rdma-core ibverbs-providers ibverbs-utils iproute2'
folder=/usr/lib/python3/dist-packages/pyverbs

fail() { echo "pyverbs: $*" >&2; exit 1; }
works() { "$python" -c 'import pyverbs.device' >/dev/null 2>&1; }
tag() { "$1" -c 'import sys; print("%s %d.%d" % (sys.implementation.name, *sys.version_info[:2]))'; }

say_devices() {
    "$python" - <<'END'
from os.path import dirname, realpath

import pyverbs.device
from pyverbs.pyverbs_error import PyverbsRDMAError

try:
    names = sorted(device.name.decode() for device in pyverbs.device.get_device_list())
except PyverbsRDMAError:  # the kernel knows nothing of RDMA
    names = []
print("pyverbs:", dirname(realpath(pyverbs.device.__file__)))
print("RDMA devices:", ", ".join(names) or "none here; `make test-rdma` runs the tests in guests that have some")
END
}

install_packages() {
    . /etc/os-release
    command -v apt-get >/dev/null ||
        fail "expected Debian or Ubuntu, found ${PRETTY_NAME:-another system}: install its own pyverbs (python3-pyverbs" \
            "on Fedora), make the environment with the system's Python and --system-site-packages, and run this again"
    sudo=$([ "$(id -u)" = 0 ] || echo 'sudo ')
    [ -z "$sudo" ] || fail "missing: $packages. Install with: sudo apt-get update && sudo apt-get install -y $packages"
    echo "installing: $packages"
    apt-cache show python3-pyverbs >/dev/null 2>&1 || apt-get -qq update
    # shellcheck disable=SC2086 # one word per package
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $packages >/dev/null ||
        fail "could not install: $packages; the message of apt-get is above"
}

[ -x "${1:-}/bin/python" ] || fail "expected a virtual environment, got '$*': make one with tools/venv.sh"
python=$1/bin/python
if works; then
    say_devices
    exit
fi

[ -d $folder ] || install_packages
theirs=$(tag /usr/bin/python3) ours=$(tag "$python")
[ "$theirs" = "$ours" ] ||
    fail "the distribution's is for $theirs, $1 has $ours: make clean, then PYTHON=/usr/bin/python3 make rdma"

target=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/pyverbs
[ ! -d "$target" ] || [ -L "$target" ] ||
    fail "$target does not match this system's rdma-core: $python -m pip uninstall pyverbs, then run this again"
ln -sfn $folder "$target"
works || fail "linked $folder, but: $("$python" -c 'import pyverbs.device' 2>&1 | tail -n 1)"
say_devices
