#!/bin/sh
# Makes a Soft-RoCE device on a network interface, unless it is there, and waits until it is active. As root.
# It does not outlive a restart of the machine: run this again then.
#
#   rxe.sh [DEVICE [INTERFACE]]     default: rxe0 on the interface with an address in 192.168.59.0/24
set -eu

fail() { echo "rxe.sh: $*" >&2; exit 1; }

device=${1:-rxe0}
interface=${2:-$(ip -o -4 addr show | awk '$4 ~ /^192\.168\.59\./ { print $2; exit }')}
[ "$(id -u)" = 0 ] || fail 'needs root: run it with sudo'
[ -n "$interface" ] || fail "no interface has an address in 192.168.59.0/24: name one: rxe.sh $device eth1"
[ -d "/sys/class/net/$interface" ] || fail "no interface $interface, expected one of: $(ls -m /sys/class/net)"

if [ ! -d /sys/module/rdma_rxe ] && ! modprobe rdma_rxe 2>/dev/null; then
    fail "the kernel $(uname -r) has no module rdma_rxe: install linux-image-amd64 (Debian; the cloud kernel lacks it)" \
        "or linux-modules-extra-$(uname -r) (Ubuntu), then restart"
fi
[ -d "/sys/class/infiniband/$device" ] || rdma link add "$device" type rxe netdev "$interface"

# RDMA pins memory: without this, a user's limit is a few megabytes. It holds from the next login on.
limits=/etc/security/limits.d/90-rdma-memlock.conf
if [ ! -e $limits ] && [ -d /etc/security/limits.d ]; then
    echo '* - memlock unlimited' >$limits
fi

port=/sys/class/infiniband/$device/ports/1
tries=100
until grep -q ACTIVE "$port/state" && grep -qs '^0000:0000:0000:0000:0000:ffff:' "$port"/gids/[0-9]; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || fail "$device on $interface: expected state ACTIVE and a GID with an IPv4 address within 10 s," \
        "found $(cat "$port/state") and $(ip -o -4 addr show "$interface" | wc -l) IPv4 addresses"
    sleep 0.1
done
echo "$device on $interface: active"
