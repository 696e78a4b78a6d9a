"""Shared-memory links between processes of one host: slots in a mapped memfd, frames over a Unix socket.

The aggregator creates the memory and passes descriptors with the Welcome. A result slot is mapped by all local ranks
and written once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque

from omnireduce.errors import TransportError
from omnireduce.support.addresses import Address
from omnireduce.transport.framing import CONTROL, FRAME, StreamLink
from omnireduce.transport.slot_memory import Region, map_slots
from omnireduce.transport.unix_sockets import Peer, connect_local, peer_of

MAX_DESCRIPTORS = 2


class ShmLink(StreamLink):
    """A link over a Unix socket whose block messages stay in shared memory.

    `takes_memory`: the peer may pass descriptors, until `take_slots`. Only workers take them.
    """

    kind = "shm"
    process: Peer

    def __init__(self, sock: socket.socket, peer: str, *, takes_memory: bool = False) -> None:
        super().__init__(sock, peer)
        self.process = peer_of(sock)
        self._descriptors: deque[int] = deque()
        self._takes_memory = takes_memory

    @property
    def shares_memory(self) -> bool:
        return True

    def _receive(self, into: memoryview) -> int:
        if not self._takes_memory:
            return self._sock.recv_into(into)
        data, descriptors, _, _ = socket.recv_fds(self._sock, len(into), MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        self._descriptors.extend(descriptors)
        while len(self._descriptors) > MAX_DESCRIPTORS:
            os.close(self._descriptors.pop())
        into[: len(data)] = data
        return len(data)

    def send_welcome(self, body: bytes, up: Region, down: Region) -> None:
        """Send the descriptors of the memory with the message. They cannot wait in a buffer: if the peer has not read
        what was sent before, the link is ended."""
        self.flush()
        frame = FRAME.pack(CONTROL, 0, len(body)) + body
        self.counters.sent_bytes += len(frame)
        try:
            if self._output:
                raise BlockingIOError
            sent = socket.send_fds(self._sock, [frame], [up.fd, down.fd])
        except OSError:
            self._output_dead = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        else:
            if sent < len(frame):
                self._queue_output(frame[sent:])

    def take_slots(self, position: int, slots: int, slot_bytes: int) -> None:
        """Map the slots whose descriptors came with the Welcome."""
        if len(self._descriptors) < MAX_DESCRIPTORS:
            raise TransportError("the aggregator sent no shared memory with its welcome")
        up, down = self._descriptors.popleft(), self._descriptors.popleft()
        try:
            self.attach(map_slots(up, position * slots, slots, slot_bytes), map_slots(down, 0, slots, slot_bytes))
        finally:
            os.close(up)
            os.close(down)
        self._takes_memory = False

    def close(self) -> None:
        super().close()
        while self._descriptors:
            os.close(self._descriptors.popleft())


def connect_shm(host: str, port: int, timeout_s: float, *, any_user: bool = False, purpose: str = "") -> ShmLink:
    """Connect to an aggregator on this host, at its socket for `purpose`. It must run as root or as this user; with
    `any_user` it may run as any user.

    Raises OSError when it is elsewhere or offers no shared memory, TransportError when it runs as another user.
    """
    address, other_owner = Address(host, port), ""
    for sock in connect_local(host, port, timeout_s, purpose):
        link = ShmLink(sock, str(address), takes_memory=True)
        if any_user or link.process.is_trusted:
            return link
        other_owner = f"{link.process}, this worker to user {os.geteuid()}"
        link.close()
    if other_owner:
        raise TransportError(
            f"the process that offers shared memory for {address} belongs to {other_owner}: set "
            "security.local_users = 'any' to allow that"
        )
    raise ConnectionRefusedError(f"no aggregator on this host listens on {address} for shared memory")
