"""The meeting of the ranks of a launch on one host: rank 0 tells them where the aggregator is that it has started.

Rank 0 listens on an abstract Unix socket. Its name follows from what only the processes of this launch share, so
nothing is left in the file system, and no other launch comes there. Each of the other ranks connects and sends a card:
its rank, and the world size. Rank 0 tells it the news of the aggregator, up to the address and the secret. When all of
them know, rank 0 listens no more: a rank that is ahead of it, in its next job, then finds nobody and waits.

Both ends must be of the same user, as the kernel says. So another user who takes the name first learns nothing.
"""

from __future__ import annotations

import hashlib
import os
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from omnireduce.blame import from_a_handler
from omnireduce.errors import RefusedError, TransportError
from omnireduce.protocol.deadlines import FIRST_S, Reminders
from omnireduce.runtime.embedding import MOST_BYTES, Compiling, EmbeddingFailed, News, Ready, decode_news, encode
from omnireduce.runtime.reserve import shortage
from omnireduce.transport.shm import peer_of
from omnireduce.transport.stream import BACKLOG

CARD = struct.Struct("<II")  # rank, world size
RETRY_S = 0.02  # between two attempts to connect: rank 0 may not listen yet
START_S = 4.0  # for an aggregator to start; if it takes longer, that is said
LISTED = 8  # ranks in a message
HOW = (
    "start `omnireduce aggregator --listen :7400` with a secret on a host that all workers can reach, and tell "
    "all workers: OMNIREDUCE_CLUSTER_AGGREGATORS=HOST:7400, or cluster.aggregators"
)
Say = Callable[[str], None]


def place_of(launch: str, job: str, proc: Path = Path("/proc")) -> str:
    """The name of the socket. Network namespaces have their own names. A launcher's id may be made of process ids, so
    the PID namespace is part of the name."""
    namespace = ""
    with suppress(OSError):
        namespace = str((proc / "self/ns/pid").stat().st_ino)
    what = "\0".join((namespace, str(os.geteuid()), launch, job))
    return f"\0omnireduce-launch/{hashlib.sha256(what.encode(errors='surrogateescape')).hexdigest()}"


class Deadline:
    """The end of a wait of `limit_s` seconds; news puts it off. `complain` is called after 1, 2, 4, ... seconds of it,
    with the time in words; not before START_S while `is_starting`: the awaited process is here, and starts."""

    def __init__(self, limit_s: float, complain: Callable[[str], None]) -> None:
        self._limit_s, self._complain = limit_s, complain
        self.is_starting = False
        self.put_off()

    def put_off(self) -> None:
        """Something goes on."""
        now = time.monotonic()
        self._at, self._reminders = now + self._limit_s, Reminders(now)

    def left_s(self, most_s: float = FIRST_S) -> float | None:
        """How many seconds to wait for the next event, at most `most_s`; None: the time is over."""
        now = time.monotonic()
        waited_s = self._reminders.due(now)
        if waited_s and not (self.is_starting and waited_s < START_S):
            self._complain(f"since {waited_s:.0f} s")
        return None if now >= self._at else min(most_s, self._at - now)


class Invitations:
    """Rank 0's end. Raises OSError when it cannot listen, as when somebody else has the name."""

    def __init__(self, place: str, size: int) -> None:
        self._size, self._told = size, set[int]()
        self._news: News | None = None
        self._guests: dict[socket.socket, int | None] = {}  # with their ranks, once they have sent a card
        self._selector = selectors.EpollSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.setblocking(False)
            self._listener.bind(place)
            self._listener.listen(BACKLOG)
            self._selector.register(self._listener, selectors.EVENT_READ)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """A descriptor that is readable when `turn` has something to do."""
        return self._selector.fileno()

    def turn(self) -> None:
        """Do what can be done now. Raises RefusedError when a rank comes that was given another world size, or comes
        twice; TransportError when there is no descriptor left for one."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._hear(key.fileobj)

    def tell(self, news: News) -> None:
        """Tell all who are here, and those who come later."""
        self._news = news
        for guest, rank in list(self._guests.items()):
            if rank is not None:
                self._tell(guest, rank)

    @property
    def missing(self) -> list[int]:
        """The ranks that do not know the address yet."""
        return [rank for rank in range(1, self._size) if rank not in self._told]

    def close(self) -> None:
        """Listen no more."""
        for guest in self._guests:
            guest.close()
        self._guests.clear()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except OSError as error:
            if from_a_handler(error):
                raise
            if isinstance(error, BlockingIOError):
                return
            raise TransportError(f"rank 0 cannot take in the other ranks: {shortage(error)}") from error
        if peer_of(guest).user != os.geteuid() or len(self._guests) > 2 * self._size:
            guest.close()
            return
        guest.setblocking(False)
        self._guests[guest] = None
        self._selector.register(guest, selectors.EVENT_READ)

    def _hear(self, guest: socket.socket) -> None:
        """Take a card. A guest that says anything else, or more, or hangs up, is no rank, or knows already."""
        try:
            data = guest.recv(CARD.size + 1)
        except ConnectionError as error:
            if from_a_handler(error):
                raise
            data = b""
        rank, size = CARD.unpack(data) if len(data) == CARD.size else (0, 0)
        if self._guests[guest] is not None or not 0 < rank < max(size, self._size):
            self._forget(guest)
            return
        self._guests[guest] = rank
        if size != self._size:
            raise RefusedError(f"rank {rank} was started as one of {size} workers, and rank 0 as one of {self._size}")
        if rank in self._told or self._is_here(rank, guest):
            raise RefusedError(
                f"rank {rank} has come twice: two launches have this job at once, or it was started again; give each "
                "launch another cluster.job"
            )
        if self._news is not None:
            self._tell(guest, rank)

    def _is_here(self, rank: int, guest: socket.socket) -> bool:
        """Whether another guest than this one is that rank, and has not hung up meanwhile."""
        others = [other for other, its in self._guests.items() if its == rank and other is not guest]
        return not all(map(_is_over, others))

    def _tell(self, guest: socket.socket, rank: int) -> None:
        assert self._news is not None
        try:
            guest.send(encode(self._news))
        except OSError as error:
            if from_a_handler(error):
                raise
            self._forget(guest)
        else:
            if isinstance(self._news, Ready):
                self._told.add(rank)

    def _forget(self, guest: socket.socket) -> None:
        self._selector.unregister(guest)
        del self._guests[guest]
        guest.close()


def _is_over(guest: socket.socket) -> bool:
    """Whether the other end has hung up."""
    poll = select.poll()
    poll.register(guest, 0)
    return bool(poll.poll(0))


def be_invited(place: str, job: str, rank: int, size: int, limit_s: float, say: Say) -> Ready:
    """Any other rank's end: wait for rank 0, and for what it knows.

    Raises TransportError when rank 0 does not come within `limit_s`, is gone, or has no aggregator to offer.
    """
    zero = f"rank 0 of job '{job}', which starts the aggregator"
    deadline = Deadline(limit_s, lambda since: say(f"waiting for {zero}, {since}"))
    too_late = TransportError(
        f"{zero}, is not on this host, or has stopped, after cluster.join_timeout_s = {limit_s:g}; were all workers "
        f"started here, with the same job? For workers on several hosts {HOW}"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, selectors.DefaultSelector() as selector:
        sock.setblocking(False)  # a rank 0 that has stopped may leave no room for one more
        while not _connected(sock, place):
            patience_s = deadline.left_s(RETRY_S)
            if patience_s is None:
                raise too_late
            selector.select(patience_s)
        if peer_of(sock).user != os.geteuid():
            raise TransportError(
                f"{peer_of(sock)}, which is another user, is where the ranks of job '{job}' meet on this host: choose "
                "another cluster.job"
            )
        selector.register(sock, selectors.EVENT_READ)
        deadline.is_starting = True
        try:
            sock.send(CARD.pack(rank, size))
            while (patience_s := deadline.left_s()) is not None:
                news = _read(sock, zero) if selector.select(patience_s) else None
                if isinstance(news, Ready):
                    return news
                if news is not None:
                    deadline.put_off()
        except ConnectionError as error:
            if from_a_handler(error):
                raise
            raise TransportError(f"{zero}, is gone") from None
    raise TransportError(f"{zero}, has said nothing for cluster.join_timeout_s = {limit_s:g}")


def _connected(sock: socket.socket, place: str) -> bool:
    try:
        sock.connect(place)
    except (ConnectionRefusedError, BlockingIOError) as error:
        if from_a_handler(error):
            raise
        return False
    return True


def _read(sock: socket.socket, zero: str) -> Ready | Compiling:
    """The next news of `zero`. Raises TransportError for bad news, and when the connection is over."""
    data = sock.recv(MOST_BYTES)
    if not data:
        raise TransportError(f"{zero}, is gone")
    try:
        news = decode_news(data)
    except ValueError:
        raise TransportError(f"{zero}, is of another version of omnireduce") from None
    if isinstance(news, EmbeddingFailed):
        raise TransportError(f"{zero}, has none: {news.reason}")
    return news
