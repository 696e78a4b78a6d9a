"""Shared-memory links between processes of one host: slots in a mapped memfd, doorbells over a Unix socket.

The aggregator listens on an abstract Unix address derived from its TCP address, so nothing is left in the file
system. It creates the memory and passes descriptors with the Welcome; a result slot is mapped by all local ranks and
written once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from functools import cache
from pathlib import Path
from typing import NamedTuple

from omnireduce.errors import TransportError
from omnireduce.support.addresses import Address, is_own, is_wildcard, look_up, where_to_listen
from omnireduce.support.os_errors import from_a_handler
from omnireduce.transport.framing import BACKLOG, CONTROL, FRAME, StreamLink
from omnireduce.transport.memory import map_slots

MAX_DESCRIPTORS = 2
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
            if from_a_handler(error):
                raise
            return None


class ShmLink(StreamLink):
    """A link over a Unix socket whose block messages stay in shared memory.

    `takes_memory`: the peer may pass descriptors, until `attach_memory`. Only workers take them. `process` is the
    peer's, as the kernel says.
    """

    kind = "shm"

    def __init__(self, sock: socket.socket, peer: str, *, takes_memory: bool = False) -> None:
        super().__init__(sock, peer)
        self.process = peer_of(sock)
        self.user = self.process.user
        self._descriptors: deque[int] = deque()
        self._takes_memory = takes_memory

    @property
    def foreign_user(self) -> int | None:
        """The user of the peer's process if it is neither root nor the one of this process."""
        return None if self.process.is_trusted else self.process.user

    def _receive(self, into: memoryview) -> int:
        if not self._takes_memory:
            return self._sock.recv_into(into)
        data, descriptors, _, _ = socket.recv_fds(self._sock, len(into), MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        self._descriptors.extend(descriptors)
        while len(self._descriptors) > MAX_DESCRIPTORS:
            os.close(self._descriptors.pop())
        into[: len(data)] = data
        return len(data)

    def send_control_with_memory(self, body: bytes, up_fd: int, down_fd: int) -> None:
        """Send a control message together with the descriptors of the upward and downward slots.

        Descriptors cannot wait in a buffer: if the peer has not read what was sent before, the link is ended.
        """
        self.flush()
        frame = FRAME.pack(CONTROL, 0, len(body)) + body
        self.counters.sent_bytes += len(frame)
        try:
            if self._output:
                raise BlockingIOError
            sent = socket.send_fds(self._sock, [frame], [up_fd, down_fd])
        except OSError:
            self._output_dead = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        else:
            if sent < len(frame):
                self._queue(frame[sent:])

    def attach_memory(self, first_up: int, slots: int, slot_bytes: int) -> None:
        """Worker side: map the slots whose descriptors came with the Welcome. Raises TransportError."""
        if len(self._descriptors) < MAX_DESCRIPTORS:
            raise TransportError("the aggregator sent no shared memory with its welcome")
        up, down = self._descriptors.popleft(), self._descriptors.popleft()
        try:
            self.attach(map_slots(up, first_up, slots, slot_bytes), map_slots(down, 0, slots, slot_bytes))
        finally:
            os.close(up)
            os.close(down)
        self._takes_memory = False

    def close(self) -> None:
        super().close()
        while self._descriptors:
            os.close(self._descriptors.popleft())


def _abstract(host: str, port: int, purpose: str = "") -> str:
    return f"\0omnireduce{purpose}/{Address(host, port)}"


def name_of(host: str, port: int, purpose: str = "") -> str:
    """The abstract name of the Unix socket at which the aggregator at host:port listens. Raises OSError."""
    return _abstract(WILDCARD if is_wildcard(host) else where_to_listen(host).host, port, purpose)


def _own(host: str) -> list[str]:
    """The addresses of `host` in this network namespace, which also has its own abstract names."""
    try:
        return [target.host for target in look_up(host) if is_own(target)]
    except OSError as error:
        if from_a_handler(error):
            raise
        return []


def connect_shm(host: str, port: int, timeout_s: float, *, any_user: bool = False, purpose: str = "") -> ShmLink:
    """Connect to an aggregator on this host, at its socket for `purpose`. It must be of root or of this user; with
    `any_user` it may be of any user.

    Raises OSError when it is elsewhere or offers no shared memory, TransportError when it is another user's.
    """
    address, foreign, own = Address(host, port), "", _own(host)
    if not own:
        raise ConnectionError(f"{host} is not this host")
    for name in (_abstract(own_address, port, purpose) for own_address in (*own, WILDCARD)):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(name)
        except OSError as error:
            sock.close()
            if from_a_handler(error):
                raise
        else:
            link = ShmLink(sock, str(address), takes_memory=True)
            if any_user or link.foreign_user is None:
                return link
            foreign = f"{link.process}, this worker to user {os.geteuid()}"
            link.close()
    if foreign:
        raise TransportError(
            f"what offers shared memory for {address} belongs to {foreign}: set security.local_users = 'any' "
            "if that is meant"
        )
    raise ConnectionRefusedError(f"no aggregator on this host listens on {address} for shared memory")


def listen_shm(host: str, port: int, *, purpose: str = "") -> socket.socket:
    """Listen for local workers of the aggregator at host:port, non-blocking, or for another `purpose`.

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
