#!/bin/sh
# Installs the Debian and Ubuntu packages that a node needs, those of them that are missing. As root.
#
#   packages.sh [--missing]     --missing: as any user; only print their names
set -eu

packages='make kmod iproute2 iputils-ping openssh-client openssh-server
    rdma-core ibverbs-providers ibverbs-utils rdmacm-utils perftest python3-pyverbs'

command -v dpkg-query >/dev/null || { echo 'packages.sh: expected Debian or Ubuntu, found no dpkg' >&2; exit 1; }

# shellcheck disable=SC2086 # one word per package
installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' $packages 2>/dev/null || true)
missing=''
for package in $packages; do
    case $installed in *"$package installed"*) ;; *) missing="$missing $package" ;; esac
done
tree=$(dirname "$0")/../..
[ -x "$tree/.venv/bin/python" ] || missing="$missing $("$tree/tools/venv.sh" --missing)"

if [ "${1:-}" = --missing ]; then
    echo "${missing# }"
    exit
fi
if [ -z "${missing# }" ]; then
    echo 'packages: all there'
    exit
fi
if [ "$(id -u)" != 0 ]; then
    echo "packages.sh: missing:$missing. Install with: sudo apt-get install -y$missing" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
# shellcheck disable=SC2086
apt-get -qq install -y --no-install-recommends $missing
