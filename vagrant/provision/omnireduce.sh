#!/bin/sh
# Installs omnireduce with pyverbs into .venv of its folder and says which RDMA devices there are. As the user who owns it.
#
#   omnireduce.sh
set -eu
cd "$(dirname "$0")/../.."
make rdma
