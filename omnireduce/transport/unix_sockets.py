"""Unix sockets of an aggregator, for processes of its host.

Their abstract names follow from the TCP address of the aggregator, so nothing is left in the file system. The kernel
says which process is at the other end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from omnireduce.support.addresses import BACKLOG, Address, is_own_target, is_wildcard, listening_target, look_up
from omnireduce.support.os_error_origin import raised_by_signal_handler

ALL_USERS = ["0", "0", str(2**32 - 1)]  # user_namespaces(7): the first one here, the first one outside, how many
WILDCARD = "*"  # in place of an address, of an aggregator that listens at all of them
_CREDENTIALS = struct.Struct("iII")  # unix(7), struct ucred: process, user, group


class Peer(NamedTuple):
    """A process on this host, and its user. `process` is 0 if it is in a PID namespace that this one cannot see."""

    process: int
    user: int

    @property
    def is_trusted(self) -> bool:
        """Whether it is of root or of the user of this process: its memory may be shared."""
        return self.user in (0, os.geteuid()) and self.user != _user_of_strangers()

    def __str__(self) -> str:
        return f"process {self.process} of user {self.user}" if self.process else f"a process of user {self.user}"


@cache
def _user_of_strangers() -> int | None:
    """The user whom the kernel names in place of all users that this process's user namespace does not know (65534, as
    a rule). None if it knows all users."""
    with contextlib.suppress(OSError):
        if Path("/proc/self/uid_map").read_text().split() != ALL_USERS:
            return int(Path("/proc/sys/kernel/overflowuid").read_text())
    return None


def peer_of(sock: socket.socket) -> Peer:
    """The process at the other end of a Unix socket, as the kernel says."""
    process, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(process, user)


def holder_of(name: str, kind: int = socket.SOCK_STREAM) -> Peer | None:
    """The process that listens at a Unix socket; None if no such process can be asked."""
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.setblocking(False)  # one that accepts nobody must not keep us waiting
        try:
            sock.connect(name)
            return peer_of(sock)
        except OSError as error:
            if raised_by_signal_handler(error):
                raise
            return None


def _abstract_name(host: str, port: int, purpose: str = "") -> str:
    return f"\0omnireduce{purpose}/{Address(host, port)}"


def name_of(host: str, port: int, purpose: str = "") -> str:
    """The abstract name of the Unix socket at which the aggregator at host:port listens. Raises OSError."""
    return _abstract_name(WILDCARD if is_wildcard(host) else listening_target(host).host, port, purpose)


def _own_addresses(host: str) -> list[str]:
    """The addresses of `host` in this network namespace, which also has its own abstract names."""
    try:
        return [target.host for target in look_up(host) if is_own_target(target)]
    except OSError as error:
        if raised_by_signal_handler(error):
            raise
        return []


def connect_local(host: str, port: int, timeout_s: float, purpose: str = "") -> Iterator[socket.socket]:
    """Connect to each Unix socket at which an aggregator on this host may listen for host:port. Who takes a socket
    closes it. Raises ConnectionError when the aggregator is elsewhere."""
    addresses = _own_addresses(host)
    if not addresses:
        raise ConnectionError(f"{host} is not this host")
    for name in (_abstract_name(address, port, purpose) for address in (*addresses, WILDCARD)):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(name)
        except OSError as error:
            sock.close()
            if raised_by_signal_handler(error):
                raise
        else:
            yield sock


def listen_local(host: str, port: int, purpose: str = "") -> socket.socket:
    """Listen for processes of this host, for the aggregator at host:port and this `purpose`, non-blocking.

    Raises OSError.
    """
    name = name_of(host, port, purpose)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
