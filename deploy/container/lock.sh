#!/bin/sh
# Writes requirements.lock: every package that the image installs, with its version and hashes, from pyproject.toml.
# Versions that are locked stay; `lock.sh --upgrade` takes the newest. PYTHON must be of the version that the image has.
set -eu
cd "$(dirname "$0")/../.."
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install -q 'pip-tools>=7.4'
export CUSTOM_COMPILE_COMMAND=deploy/container/lock.sh
"$venv/bin/pip-compile" -q --extra mpi --build-deps-for wheel --allow-unsafe --generate-hashes --strip-extras \
    --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
    -o deploy/container/requirements.lock "$@" pyproject.toml
