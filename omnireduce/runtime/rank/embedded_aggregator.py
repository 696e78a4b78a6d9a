"""The aggregator that rank 0 starts for its job if none is configured. All ranks of the job learn its address here.

It is a child process of rank 0 (`aggregator/embedded.py`), started as a new program, because this process may have
threads and devices that must not be forked. PR_SET_PDEATHSIG is not used to end it with its parent, because that signal
comes already when the thread ends that has started it.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import select
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from omnireduce.errors import ConfigError, OmniReduceError, RefusedError, TransportError, left_because
from omnireduce.protocol.wait_notices import FIRST_S, WaitNotices
from omnireduce.runtime.embedded_messages import (
    MAX_MESSAGE_BYTES,
    MAX_REASON_CHARACTERS,
    Compiling,
    EmbeddingFailed,
    News,
    Order,
    Ready,
    decode_news,
    encode,
)
from omnireduce.runtime.file_descriptors import shortage
from omnireduce.runtime.rank.launcher_detection import Launch, check_told_apart, identity_of
from omnireduce.support.addresses import BACKLOG, Address, loopback
from omnireduce.support.child_program_code import TREE, program_of
from omnireduce.support.config import Config, Security
from omnireduce.support.control_groups import OutOfMemory
from omnireduce.support.load_by_name import search_path
from omnireduce.support.logs import BoundLog, tagged
from omnireduce.support.os_error_origin import raised_by_signal_handler
from omnireduce.support.secret import Secret
from omnireduce.transport.unix_sockets import holder_of, peer_of

CARD = struct.Struct("<II")  # rank, world size
RETRY_S = 0.02  # pause between two attempts to connect: rank 0 may not listen yet
START_S = 4.0  # an aggregator that takes longer to start is reported
LISTED = 8  # the most ranks in a message
ADVICE = (
    "start `omnireduce aggregator --listen :7400` with a secret on a host that all workers can reach, and tell "
    "all workers: OMNIREDUCE_CLUSTER_AGGREGATORS=HOST:7400, or cluster.aggregators"
)
Say = Callable[[str], None]


def socket_name(launch: str, job: str, proc: Path = Path("/proc")) -> str:
    """The name of the socket. Each network namespace has its own names. A launcher's id may be made of process ids, so
    the PID namespace is part of the name."""
    namespace = ""
    with suppress(OSError):
        namespace = str((proc / "self/ns/pid").stat().st_ino)
    identity = "\0".join((namespace, str(os.geteuid()), launch, job))
    return f"\0omnireduce-launch/{hashlib.sha256(identity.encode(errors='surrogateescape')).hexdigest()}"


class Deadline:
    """The end of a wait of `limit_s` seconds; news puts it off. `complain` is called with the time in words after 1, 2,
    4, ... seconds of the wait. While `is_starting`, the awaited process is here and starts: then it is not called
    before START_S."""

    def __init__(self, limit_s: float, complain: Callable[[str], None]) -> None:
        self._limit_s, self._complain = limit_s, complain
        self.is_starting = False
        self.restart()

    def restart(self) -> None:
        """There is news: the wait begins anew."""
        now = time.monotonic()
        self._at, self._reminders = now + self._limit_s, WaitNotices(now)

    def remaining_s(self, max_s: float = FIRST_S) -> float | None:
        """The seconds to wait for the next event, at most `max_s`; None: the time is over."""
        now = time.monotonic()
        waited_s = self._reminders.due(now)
        if waited_s and not (self.is_starting and waited_s < START_S):
            self._complain(f"since {waited_s:.0f} s")
        return None if now >= self._at else min(max_s, self._at - now)


class Invitations:
    """Rank 0's side: it tells the other ranks the address. Raises OSError when it cannot listen, for example because
    another process has the name."""

    def __init__(self, name: str, size: int) -> None:
        self._size, self._informed = size, set[int]()
        self._news: News | None = None
        self._guests: dict[socket.socket, int | None] = {}  # connections, with their ranks once they have sent a card
        self._selector = selectors.EpollSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.setblocking(False)
            self._listener.bind(name)
            self._listener.listen(BACKLOG)
            self._selector.register(self._listener, selectors.EVENT_READ)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """A descriptor that is readable when `turn` has something to do."""
        return self._selector.fileno()

    def turn(self) -> None:
        """Accept and hear guests, without waiting. Raises RefusedError when a rank has another world size, or comes
        twice; TransportError when no descriptor is left for a connection."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._read_card(key.fileobj)

    def tell(self, news: News) -> None:
        """Tell the news to all guests, and to guests that come later."""
        self._news = news
        for guest, rank in list(self._guests.items()):
            if rank is not None:
                self._tell(guest, rank)

    @property
    def missing(self) -> list[int]:
        """The ranks that do not know the address yet."""
        return [rank for rank in range(1, self._size) if rank not in self._informed]

    def close(self) -> None:
        """Stop listening."""
        for guest in self._guests:
            guest.close()
        self._guests.clear()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except OSError as error:
            if raised_by_signal_handler(error):
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

    def _read_card(self, guest: socket.socket) -> None:
        """Take a card. A guest that sends anything else, or more, or hangs up, is no rank, or knows the address."""
        try:
            data = guest.recv(CARD.size + 1)
        except ConnectionError as error:
            if raised_by_signal_handler(error):
                raise
            data = b""
        rank, size = CARD.unpack(data) if len(data) == CARD.size else (0, 0)
        if self._guests[guest] is not None or not 0 < rank < max(size, self._size):
            self._forget(guest)
            return
        self._guests[guest] = rank
        if size != self._size:
            raise RefusedError(f"rank {rank} was started as one of {size} workers, and rank 0 as one of {self._size}")
        if rank in self._informed or self._has_other_guest(rank, guest):
            raise RefusedError(
                f"rank {rank} has come twice: two launches have this job at once, or it was started again; give each "
                "launch another cluster.job"
            )
        if self._news is not None:
            self._tell(guest, rank)

    def _has_other_guest(self, rank: int, guest: socket.socket) -> bool:
        """Whether another guest has this rank, and has not hung up meanwhile."""
        others = [other for other, other_rank in self._guests.items() if other_rank == rank and other is not guest]
        return not all(map(_has_hung_up, others))

    def _tell(self, guest: socket.socket, rank: int) -> None:
        assert self._news is not None
        try:
            guest.send(encode(self._news))
        except OSError as error:
            if raised_by_signal_handler(error):
                raise
            self._forget(guest)
        else:
            if isinstance(self._news, Ready):
                self._informed.add(rank)

    def _forget(self, guest: socket.socket) -> None:
        self._selector.unregister(guest)
        del self._guests[guest]
        guest.close()


def _has_hung_up(guest: socket.socket) -> bool:
    """Whether the other end has hung up."""
    poll = select.poll()
    poll.register(guest, 0)
    return bool(poll.poll(0))


def await_invitation(name: str, job: str, rank: int, size: int, limit_s: float, say: Say) -> Ready:
    """Any other rank's side: wait for rank 0 and for the address.

    Raises TransportError when rank 0 does not come within `limit_s`, is gone, or has no aggregator to offer.
    """
    rank_0 = f"rank 0 of job '{job}', which starts the aggregator"
    deadline = Deadline(limit_s, lambda since: say(f"waiting for {rank_0}, {since}"))
    timeout_error = TransportError(
        f"{rank_0}, is not on this host, or has stopped, after cluster.join_timeout_s = {limit_s:g}; were all workers "
        f"started here, with the same job? For workers on several hosts {ADVICE}"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, selectors.DefaultSelector() as selector:
        sock.setblocking(False)  # if rank 0 has stopped, there may be no room for one more connection
        while not _connected(sock, name):
            patience_s = deadline.remaining_s(RETRY_S)
            if patience_s is None:
                raise timeout_error
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
            while (patience_s := deadline.remaining_s()) is not None:
                news = _read(sock, rank_0) if selector.select(patience_s) else None
                if isinstance(news, Ready):
                    return news
                if news is not None:
                    deadline.restart()
        except ConnectionError as error:
            if raised_by_signal_handler(error):
                raise
            raise TransportError(f"{rank_0}, is gone") from None
    raise TransportError(f"{rank_0}, has said nothing for cluster.join_timeout_s = {limit_s:g}")


def _connected(sock: socket.socket, name: str) -> bool:
    try:
        sock.connect(name)
    except (ConnectionRefusedError, BlockingIOError) as error:
        if raised_by_signal_handler(error):
            raise
        return False
    return True


def _read(sock: socket.socket, rank_0: str) -> Ready | Compiling:
    """The next message of `rank_0`, rank 0. Raises TransportError for bad news, and when the connection is over."""
    data = sock.recv(MAX_MESSAGE_BYTES)
    if not data:
        raise TransportError(f"{rank_0}, is gone")
    try:
        news = decode_news(data)
    except ValueError:
        raise TransportError(f"{rank_0}, is of another version of omnireduce") from None
    if isinstance(news, EmbeddingFailed):
        raise TransportError(f"{rank_0}, has none: {news.reason}")
    return news


MOMENT_S = 0.5
PROGRAM = program_of("omnireduce.aggregator.embedded")
Progress = Callable[[float, float], None]


def embed(config: Config, launch: Launch, job: str, *, is_named: bool, sums: bool) -> Embedded:
    """The aggregator of a job for which none is configured. `sums`: it will have to sum. Raises the errors of
    `identify`, and TransportError if it cannot be started."""
    return Embedded(config, launch, identify(config, launch, is_named=is_named), job, sums=sums)


def identify(config: Config, launch: Launch, *, is_named: bool) -> str:
    """The identity of this launch among others on this host. Empty if the name of its job is enough: `is_named`.

    Raises ConfigError if rank 0 cannot start an aggregator for all: for workers on several hosts, for an elastic job,
    or if nothing shows which workers belong together.
    """
    problem = "no aggregator is configured (cluster.aggregators)"
    if launch.local_size is not None and launch.local_size < launch.size:
        local_text = f"only {launch.local_size} of the {launch.size} workers are on this host"
        raise ConfigError(f"{problem}, and {local_text}: {ADVICE}; docs/operations.md")
    if config.elastic.enabled:
        raise ConfigError(f"{problem}, and elastic.enabled needs an aggregator that outlives rank 0: {ADVICE}")
    check_told_apart(config, launch.rank, launch.size, is_named=is_named)
    return identity_of(config, launch.rank, launch.size)


class Embedded:
    """The aggregator of a single job, as one of its ranks sees it. Rank 0 starts it at once.

    `secret`: the secret of the aggregator, once it is known. Raises TransportError when it cannot be started.
    """

    def __init__(self, config: Config, launch: Launch, identity: str, job: str, *, sums: bool) -> None:
        self._config, self._launch, self._job, self._sums = config, launch, job, sums
        self._log = BoundLog(logging.getLogger("omnireduce"), job=job, rank=launch.rank)
        self._socket_name = socket_name(identity, job)
        self.secret: Secret | None = None
        self._child: Child | None = None
        self._invitations: Invitations | None = None
        _open_aggregators.add(self)
        if not launch.rank:
            self._start()

    def _start(self) -> None:
        problem = f"cannot start an aggregator for job '{self._job}'"
        try:
            if self._launch.size > 1:
                self._invitations = Invitations(self._socket_name, self._launch.size)
            self._child = Child(self._config, sums=self._sums)
        except OSError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                holder = holder_of(self._socket_name, socket.SOCK_SEQPACKET) or "another process"
                reason = f"{holder} starts one on this host just now; do two launches have this job?"
                raise TransportError(f"{problem}: {reason} Give each launch another cluster.job") from error
            raise TransportError(f"{problem}: {shortage(error)}") from error

    def await_aggregator(self, progress: Progress) -> Config:
        """Wait until the aggregator is ready and, on rank 0, until all other ranks know its address. `progress` hears
        how far its kernels are compiled. Returns the configuration with which a rank reaches it.

        Raises TransportError, or RefusedError when ranks are missing after `cluster.join_timeout_s` or differ.
        """
        limit_s, launch = self._config.cluster.join_timeout_s, self._launch
        if launch.rank:
            ready = await_invitation(self._socket_name, self._job, launch.rank, launch.size, limit_s, self._warn)
        else:
            ready = self._await_ready(progress)
        self.secret = Secret(ready.secret)  # in place of the secret that is configured for other aggregators
        cluster = replace(self._config.cluster, aggregators=(ready.address,))
        return replace(self._config, cluster=cluster, security=Security())

    def close(self) -> None:
        """End the aggregator, if this rank has started it. May be called twice; raises nothing."""
        if self._invitations is not None:
            self._invitations.close()
            self._invitations = None
        if self._child is not None:
            self._child.close()

    def abandon(self) -> None:
        """In a forked child: close the sockets, and leave the aggregator to the parent."""
        if self._invitations is not None:
            self._invitations.close()
        if self._child is not None:
            self._child.abandon()

    def _warn(self, text: str) -> None:
        self._log.warning("%s", text, extra=tagged("waiting_for_ranks"))

    def _await_ready(self, progress: Progress) -> Ready:
        assert self._child is not None
        try:
            return self._await_ranks(self._child, progress)
        except BaseException as error:
            if self._invitations is not None:
                is_known = isinstance(error, OmniReduceError)
                self._invitations.tell(
                    EmbeddingFailed(str(error)[:MAX_REASON_CHARACTERS] if is_known else left_because(error))
                )
            raise
        finally:
            if self._invitations is not None:
                self._invitations.close()
                self._invitations = None

    def _await_ranks(self, child: Child, progress: Progress) -> Ready:
        limit_s, ready = self._config.cluster.join_timeout_s, None
        deadline = Deadline(limit_s, lambda since: self._warn(f"waiting for {self._awaited_text(ready)} {since}"))
        with selectors.DefaultSelector() as selector:
            selector.register(child, selectors.EVENT_READ)
            if self._invitations is not None:
                selector.register(self._invitations, selectors.EVENT_READ)
            while ready is None or self._missing:
                deadline.is_starting = ready is None
                patience_s = deadline.remaining_s()
                if patience_s is None:
                    raise RefusedError(
                        f"still waiting for {self._awaited_text(ready)} after cluster.join_timeout_s = {limit_s:g}; "
                        f"were all workers started on this host, with the same job? For workers on several hosts "
                        f"{ADVICE}",
                        temporary=True,
                    )
                for key, _ in selector.select(patience_s):
                    if key.fileobj is not child:
                        self._serve_invitations()
                        continue
                    news = child.news()
                    self._pass_on(news)
                    if isinstance(news, Ready):
                        ready = news
                        selector.unregister(child)
                    else:
                        progress(news.done_s, news.total_s)
                        deadline.restart()
        return ready

    def _serve_invitations(self) -> None:
        assert self._invitations is not None
        self._invitations.turn()

    def _pass_on(self, news: News) -> None:
        if self._invitations is not None:
            self._invitations.tell(news)

    @property
    def _missing(self) -> list[int]:
        return [] if self._invitations is None else self._invitations.missing

    def _awaited_text(self, ready: Ready | None) -> str:
        if ready is None:
            return f"the aggregator of job '{self._job}' to be ready"
        ranks = ", ".join(map(str, self._missing[:LISTED])) + (" …" if len(self._missing) > LISTED else "")
        return f"rank {ranks} of job '{self._job}'"


# For forked children; ranks may still meet, without a communicator
_open_aggregators: weakref.WeakSet[Embedded] = weakref.WeakSet()


def _abandon_all() -> None:
    for aggregator in list(_open_aggregators):
        aggregator.abandon()


os.register_at_fork(after_in_child=_abandon_all)


class Child:
    """The process of the aggregator, and rank 0's connection to it. Raises OSError when it cannot be started."""

    def __init__(self, config: Config, *, sums: bool) -> None:
        self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        job_codecs = [config.protocol.codec] if config.protocol.has_own else []
        codecs = dict.fromkeys([*config.aggregator.codecs, *job_codecs])
        self._memory = OutOfMemory()
        # The aggregator must find the modules of codecs in the same folders as this rank.
        variables = {"PYTHONPATH": os.pathsep.join(search_path())} if codecs else {}
        try:
            with child_socket:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", PROGRAM, TREE],
                    stdin=child_socket.fileno(), stdout=subprocess.DEVNULL, start_new_session=True,
                    env=os.environ | variables,
                )  # fmt: skip
            self._send_order(replace(config, aggregator=replace(config.aggregator, codecs=tuple(codecs))), sums=sums)
        except BaseException:
            self._socket.close()
            raise

    def _send_order(self, config: Config, *, sums: bool) -> None:
        """Send the process its configuration, and a descriptor that shows when this process ends. Without pidfd_open,
        the end of the connection has to show it, though a fork of this process may keep the connection open."""
        daemon = replace(config.aggregator, listen=str(Address(loopback(), 0)), shards=1)
        log = config.log if config.log.level == "error" else replace(config.log, level="warning")
        child_config = Config(
            transport=config.transport, verbs=config.verbs, aggregator=daemon, trace=config.trace, log=log
        )
        lifelines = []
        with suppress(OSError):
            lifelines.append(os.pidfd_open(os.getpid()))
        try:
            with suppress(ConnectionError):  # it has ended already: no news will come
                socket.send_fds(self._socket, [encode(Order(child_config, sums))], lifelines)
        finally:
            for lifeline in lifelines:
                os.close(lifeline)

    def fileno(self) -> int:
        """A descriptor that is readable when there is news."""
        return self._socket.fileno()

    def news(self) -> Compiling | Ready:
        """The latest news; call this when there is news. Raises TransportError when there will be no aggregator."""
        news: News | None = None
        with suppress(ConnectionError, BlockingIOError):
            while not isinstance(news, Ready | EmbeddingFailed) and (
                data := self._socket.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            ):
                news = decode_news(data)
        if news is None or isinstance(news, EmbeddingFailed):
            reason = self._end_text() if news is None else news.reason
            raise TransportError(f"the aggregator that rank 0 starts cannot serve: {reason}")
        return news

    def _end_text(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(MOMENT_S)
        status = self._process.returncode
        text = "its process has ended" if status is None else f"its process has ended with status {status}"
        if status is not None and status < 0:
            text = f"its process was ended by signal {-status}"
        reason = self._memory.news()
        return f"{text}: {reason}" if reason else text

    def close(self) -> None:
        """Tell the aggregator that this rank does not need it any more. It ends when the other ranks have left, too.
        Waits a moment for that, so that normally no process is left."""
        if self._process.returncode is not None:
            self._socket.close()
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)  # this counts for the copies in forked processes, too
            self._socket.settimeout(MOMENT_S)
            while self._socket.recv(MAX_MESSAGE_BYTES):
                pass  # skip old messages
        self._socket.close()
        try:
            self._process.wait(MOMENT_S)
        except subprocess.TimeoutExpired:
            with suppress(RuntimeError):  # no thread can be started, as at the end of the process
                threading.Thread(target=self._process.wait, name="omnireduce-wait", daemon=True).start()

    def abandon(self) -> None:
        """In a forked child: close the connection without a word."""
        self._socket.close()
        self._process.returncode = 0  # it is a child of another process
