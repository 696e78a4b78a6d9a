#!/bin/busybox sh
# The first process of a guest: loads the modules, puts the machine's files below a tmpfs, goes there and runs node.sh.
# The kernel hands over guest_node (1 or 2) and guest_limit (seconds) as variables. See tools/guests.py.
# shellcheck shell=dash disable=SC2154,SC2016
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
ln -s /proc/self/fd /dev/fd # elsewhere udev does this
while read -r module; do
    insmod "/modules/$module" || echo "init.sh: cannot load $module"
done </modules/order

(sleep "$guest_limit" && poweroff -f) & # a guest never outlives its time, even if nobody is left to kill it

share='trans=virtio,version=9p2000.L,msize=512000'
mkdir -p /machine /written /new
mount -t 9p -o "$share,ro,cache=loose" root /machine || echo 'init.sh: cannot mount the files of the machine'
mount -t tmpfs tmpfs /written
mkdir -p /written/upper /written/work
mount -t overlay -o lowerdir=/machine,upperdir=/written/upper,workdir=/written/work overlay /new
for folder in dev proc sys; do mount --move "/$folder" "/new/$folder"; done
mkdir -p /new/dev/pts /new/dev/shm
mount -t devpts devpts /new/dev/pts
for folder in dev/shm run; do mount -t tmpfs tmpfs "/new/$folder"; done
ls /new/root >/dev/null 2>&1 || mount -t tmpfs tmpfs /new/root # the machine's user may not be root
mkdir -p /new/run/guests /new/run/sshd /new/run/lock
mount -t 9p -o "$share,cache=none" control /new/run/guests

out=/dev/console
for port in /new/sys/class/virtio-ports/*; do
    [ "$(cat "$port/name")" = out ] && out=/new/dev/${port##*/}
done
chroot /new /bin/sh -c '. /run/guests/environment; exec /bin/bash "$GUEST_ROOT/tools/guest/node.sh" "$1"' sh \
    "$guest_node" >"$out" 2>&1
sync
umount -a 2>/dev/null
poweroff -f
