#!/bin/sh
# Lets this user log in from every node to every other without a password, as mpirun needs it.
#
#   ssh.sh KEY     KEY: a private key, the same on all nodes, with the public one in KEY.pub beside it
set -eu

if [ ! -r "${1:-}" ] || [ ! -r "$1.pub" ]; then
    echo "ssh.sh: expected a private key with its public one beside it, got '$*': ssh-keygen -t ed25519 makes both" >&2
    exit 1
fi
umask 077
mkdir -p ~/.ssh
touch ~/.ssh/authorized_keys ~/.ssh/config
[ "$(readlink -f "$1")" = "$(readlink -f ~/.ssh/omnireduce)" ] || cp "$1" ~/.ssh/omnireduce
chmod 600 ~/.ssh/omnireduce
grep -qxF "$(cat "$1.pub")" ~/.ssh/authorized_keys || cat "$1.pub" >>~/.ssh/authorized_keys
grep -q 'IdentityFile ~/.ssh/omnireduce$' ~/.ssh/config || cat >>~/.ssh/config <<'END'
Host node1 node2 192.168.59.*
    IdentityFile ~/.ssh/omnireduce
    StrictHostKeyChecking accept-new
    LogLevel ERROR
END
echo 'ssh: ready'
