#!/usr/bin/env bash
# Makes a guest a node: names, network, RDMA devices and SSH by the scripts that provision the virtual machines of
# vagrant/, then the command. Runs as root in the guest; /run/guests is the folder shared with tools/guests.py.
# shellcheck disable=SC2317,SC2153 # `must` calls functions by their names; GUEST_NODES comes from outside
node=$1
control=/run/guests
provision=$GUEST_ROOT/vagrant/provision
export HOME=/root GUEST_NODE=$node

leave() { # NAME TEXT: whole at once, and by a name of its own: process ids are alike on both nodes
    echo "$2" >"$control/$1.$node.new"
    mv "$control/$1.$node.new" "$control/$1.$node"
}

finish() { # leave the exit status, and stay until every node has: a peer must not be cut off
    leave exit "$1"
    wait_for exit
    exit
}

wait_for() { # until every node has left such a file, or one has given up
    local other
    for ((other = 1; other <= GUEST_NODES; other++)); do
        until [[ -e $control/$1.$other || -e $control/exit.$other ]]; do sleep 0.3; done
    done
}

must() {
    "$@" >/run/provision.log 2>&1 && return
    echo "node.sh: failed: $*"
    cat /run/provision.log
    finish 125
}

veth() { # NAME ADDRESS PEER [PEER'S ADDRESS]
    ip link add "$1" mtu 9000 type veth peer name "$3" mtu 9000
    ip addr add "$2/24" dev "$1"
    [[ -z ${4:-} ]] || ip addr add "$4/24" dev "$3"
    ip link set "$1" up && ip link set "$3" up
}

cable() { # rxe1 and rxe2, with packets really going over the wire: cable1 down is a pulled cable
    veth cable1 192.168.60.1 cable2 192.168.60.2
    # each end of the cable must take packets that come from an address of this very host
    sysctl -q -w net.ipv4.conf.{cable1,cable2}.{accept_local=1,rp_filter=0} net.ipv4.conf.all.rp_filter=0
    "$provision/rxe.sh" rxe1 cable1
    "$provision/rxe.sh" rxe2 cable2
}

ssh_server() {
    # of the key exchanges, the default one takes 2 s longer, emulated
    ssh-keygen -q -t ed25519 -N '' -f /run/ssh_host_key
    echo 'root:*:::::::' >/run/shadow # the machine's may lock root, for keys too, or be unreadable
    mount --bind /run/shadow /etc/shadow
    printf '%s\n' 'HostKey /run/ssh_host_key' 'PermitRootLogin prohibit-password' 'StrictModes no' 'PidFile none' \
        'KexAlgorithms curve25519-sha256' \
        "SetEnv PATH=$PATH NUMBA_CPU_NAME=$NUMBA_CPU_NAME NUMBA_CACHE_DIR=$NUMBA_CACHE_DIR" >/run/sshd_config
    /usr/sbin/sshd -f /run/sshd_config
}

hostname "node$node"
{
    echo '127.0.0.1 localhost'
    for ((i = 1; i <= GUEST_NODES; i++)); do echo "192.168.59.$((100 + i)) node$i"; done
} >/etc/hosts
ulimit -l unlimited
ulimit -n 65536
ulimit -c 0
while read -r tag path; do
    mkdir -p "$path"
    must mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=mmap "$tag" "$path"
done <$control/shares
if [[ $(stat -c %u "$NUMBA_CACHE_DIR") != 0 ]]; then # kernels that another user has compiled are not run
    cp -r "$NUMBA_CACHE_DIR" /run/kernels
    must mount --bind /run/kernels "$NUMBA_CACHE_DIR"
fi

must ip link set lo up
if [[ $GUEST_NODES == 1 ]]; then
    must veth eth0 192.168.59.101 eth0peer
else
    must ip link set eth0 mtu 9000 up
    must ip addr add "192.168.59.$((100 + node))/24" dev eth0
fi
must "$provision/packages.sh"
must "$provision/rxe.sh" rxe0 eth0
if [[ $GUEST_NODES == 1 ]]; then
    must cable
else
    mkdir -p ~/.ssh && mount -t tmpfs tmpfs ~/.ssh # the machine's own stays untouched, even if its home is shared
    must "$provision/ssh.sh" $control/key
    must ssh_server
    # without a network this only proves what is installed: where it is out of date, `make rdma` outside comes first
    must env PIP_NO_INDEX=1 PIP_RETRIES=0 "$provision/omnireduce.sh"
fi

read -r up _ </proc/uptime
leave up "$up"
wait_for up
/bin/bash $control/command
finish $?
