"""Exchange of descriptors among the ranks of one host: of their memory, and of eventfds that wake them.

The first rank listens on an abstract Unix socket, whose name the aggregator has told all of them. Each other rank
connects and sends two descriptors: its region, and an eventfd that wakes it. When all are there, the first rank sends
the descriptors of all ranks to one rank after the other, because the system limits how many are under way. Only
processes of the same user meet; the kernel gives the user of each process. Nothing here blocks.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from contextlib import ExitStack
from dataclasses import dataclass

from omnireduce.core.dtypes import Array
from omnireduce.errors import TransportError
from omnireduce.support.addresses import BACKLOG
from omnireduce.support.os_error_origin import raised_by_signal_handler
from omnireduce.transport.base import NO_SLOTS
from omnireduce.transport.slot_memory import Regions
from omnireduce.transport.unix_sockets import peer_of

_CARD = struct.Struct("<II")  # a rank sends this with its descriptors: its number within the host, its process
_BATCH = struct.Struct("<II")  # comes with a batch of descriptors: the first rank, the number of ranks
BATCH_RANKS = 64  # a message holds no more than 253 descriptors
PIDS = struct.Struct(f"<{BATCH_RANKS}I")
DONE = b"1"  # a rank sends this once it has everything
ACCEPTED = 64  # connections that are accepted in one turn
RETRY_S = 0.002  # pause between two attempts to connect: the first rank may not listen yet


@dataclass
class HostGroup:
    """Shared resources of the ranks of a host: `regions`, uint8 (ranks, bytes), an eventfd and the process of each
    rank."""

    regions: Array
    eventfds: list[int]
    pids: list[int]

    def close(self) -> None:
        """Close the eventfds, and release the memory."""
        self.regions = NO_SLOTS
        for eventfd in self.eventfds:
            os.close(eventfd)
        self.eventfds.clear()


class RankGoneError(TransportError):
    """A rank of this host has left while the others met it."""


class HostRendezvous:
    """The part of rank number `own_index` of `ranks` in the meeting of its host. In the end it has `group`. `token`
    tells this meeting from others.

    Raises OSError. Its methods raise OSError, too, and TransportError when another process has taken the place.
    """

    def __init__(self, token: bytes, ranks: int, own_index: int, region_bytes: int) -> None:
        self._name, self._ranks, self._own_index = f"\0omnireduce-host/{token.hex()}", ranks, own_index
        self.group: HostGroup | None = None
        self._eventfds: list[int] = [-1] * ranks
        self._memories: list[int] = [-1] * ranks
        self._pids = [0] * ranks
        self._resources = ExitStack()
        self._sockets: list[socket.socket] = []
        self._members: dict[int, socket.socket] = {}
        self._unserved: list[socket.socket] = []
        try:
            self._regions = Regions(ranks, own_index, region_bytes)
            self._resources.callback(self._regions.close)
            self._selector = self._resources.enter_context(selectors.EpollSelector())
            self._eventfds[own_index] = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._memories[own_index], self._pids[own_index] = os.dup(self._regions.fd), os.getpid()
            if own_index == 0:
                self._watch(self._new_socket()).bind(self._name)
                self._sockets[0].listen(BACKLOG)
                self._begin_if_complete()
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """A descriptor that is readable when `turn` has something to do."""
        return self._selector.fileno()

    @property
    def must_retry_soon(self) -> bool:
        """Whether there is no connection yet: then call `turn` soon."""
        return self._own_index > 0 and not self._sockets

    def turn(self) -> bool:
        """Go on without waiting; return whether `group` is complete. Raises RankGoneError when a rank has left, and
        TransportError or OSError when memory cannot be shared."""
        try:
            self._handle_events()
        except ConnectionError as error:
            if raised_by_signal_handler(error):
                raise
            raise RankGoneError("another rank of this host is gone") from error
        return self.group is not None

    def _handle_events(self) -> None:
        if self.must_retry_soon:
            self._connect()
        for key, _ in self._selector.select(0) if self.group is None else ():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if self._own_index:
                self._take_batch(sock)
            elif sock is self._sockets[0]:
                self._accept()
            elif self._unserved:
                self._finish_member(sock)
            else:
                self._take_card(sock)
            if self.group is not None:
                break

    # the first rank

    def _accept(self) -> None:
        for _ in range(ACCEPTED):
            try:
                member, _ = self._sockets[0].accept()
            except BlockingIOError as error:
                if raised_by_signal_handler(error):
                    raise
                return
            self._add_member(member)

    def _add_member(self, member: socket.socket) -> None:
        if len(self._sockets) > 2 * self._ranks or _is_foreign(member):
            member.close()  # it is none of the ranks
            return
        member.setblocking(False)
        self._sockets.append(member)
        self._watch(member)

    def _take_card(self, member: socket.socket) -> None:
        data, descriptors = _receive(member, _CARD.size, 2)
        rank, pid = _CARD.unpack(data) if len(data) == _CARD.size else (0, 0)
        self._selector.unregister(member)
        if len(descriptors) != 2 or not 0 < rank < self._ranks or rank in self._members:
            for fd in descriptors:
                os.close(fd)
            self._sockets.remove(member)
            member.close()
            return
        self._members[rank] = member
        self._memories[rank], self._eventfds[rank], self._pids[rank] = *descriptors, pid
        self._begin_if_complete()

    def _begin_if_complete(self) -> None:
        """If all ranks are there, begin to send all descriptors to each of them."""
        if len(self._members) + 1 == self._ranks:
            self._unserved = list(self._members.values())
            self._serve_next()

    def _serve_next(self) -> None:
        if not self._unserved:
            self._complete()
            return
        member = self._unserved[0]
        for first in range(0, self._ranks, BATCH_RANKS):
            part = slice(first, min(first + BATCH_RANKS, self._ranks))
            pids = self._pids[part]
            body = _BATCH.pack(first, len(pids)) + PIDS.pack(*pids, *[0] * (BATCH_RANKS - len(pids)))
            socket.send_fds(member, [body], [*self._memories[part], *self._eventfds[part]])
        self._watch(member)

    def _finish_member(self, member: socket.socket) -> None:
        """Go on with the next member if this member has everything."""
        if member is not self._unserved[0]:
            self._selector.unregister(member)  # a stranger that came late
        elif _receive(member, len(DONE), 0)[0] != DONE:
            raise RankGoneError("another rank of this host is gone")
        else:
            self._selector.unregister(member)
            del self._unserved[0]
            self._serve_next()

    # the others

    def _connect(self) -> None:
        sock = self._new_socket()
        try:
            sock.connect(self._name)
        except OSError as error:
            self._sockets.remove(sock)
            sock.close()
            if raised_by_signal_handler(error):
                raise
            return
        if _is_foreign(sock):
            raise TransportError(f"a process of another user than {os.geteuid()} has the socket where local ranks meet")
        socket.send_fds(
            sock,
            [_CARD.pack(self._own_index, os.getpid())],
            [self._memories[self._own_index], self._eventfds[self._own_index]],
        )
        self._watch(sock)

    def _take_batch(self, sock: socket.socket) -> None:
        data, descriptors = _receive(sock, _BATCH.size + PIDS.size, 2 * BATCH_RANKS)
        if len(data) != _BATCH.size + PIDS.size:
            raise RankGoneError("the first rank of this host is gone")
        first, count = _BATCH.unpack_from(data)
        if count > BATCH_RANKS or first + count > self._ranks or len(descriptors) != 2 * count:
            for fd in descriptors:
                os.close(fd)
            raise TransportError(f"the first rank of this host sent {len(descriptors)} descriptors for {count} ranks")
        pids = PIDS.unpack_from(data, _BATCH.size)
        for k in range(count):
            memory, eventfd, rank = descriptors[k], descriptors[count + k], first + k
            if self._eventfds[rank] >= 0:  # this rank's own
                os.close(memory)
                os.close(eventfd)
            else:
                self._memories[rank], self._eventfds[rank], self._pids[rank] = memory, eventfd, pids[k]
        if min(self._eventfds) >= 0:
            sock.send(DONE)
            self._complete()

    # both

    def _complete(self) -> None:
        for rank, eventfd in enumerate(self._eventfds):
            if os.readlink(f"/proc/self/fd/{eventfd}") != "anon_inode:[eventfd]" or os.get_blocking(eventfd):
                raise TransportError(f"local rank {rank} sent no eventfd, or an eventfd that blocks")
        self._regions.add(self._memories)
        self.group = HostGroup(self._regions.array, self._eventfds, self._pids)
        self._eventfds = []
        self.close()

    def _new_socket(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        self._sockets.append(sock)
        return sock

    def _watch(self, sock: socket.socket) -> socket.socket:
        self._selector.register(sock, selectors.EVENT_READ)
        return sock

    def close(self) -> None:
        """Release everything except the group."""
        for fd in (*self._eventfds, *self._memories):
            if fd >= 0:
                os.close(fd)
        self._eventfds, self._memories = [], []
        for sock in self._sockets:
            sock.close()
        self._resources.close()


def _is_foreign(sock: socket.socket) -> bool:
    """Whether the peer belongs to another user than this process."""
    return peer_of(sock).user != os.geteuid()


def _receive(sock: socket.socket, size: int, max_descriptors: int) -> tuple[bytes, list[int]]:
    """Bytes and descriptors of a message; none when the peer is gone."""
    try:
        data, descriptors, _, _ = socket.recv_fds(sock, size + 1, max_descriptors, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError as error:
        if raised_by_signal_handler(error):
            raise
        return b"", []
    return data, list(descriptors)
