"""Driver of the join protocol: it connects a worker to its aggregators over links, until all ranks are there."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec.structs import replace

from omnireduce.core.dtypes import Array
from omnireduce.core.wire.control import (
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Cause,
    Hello,
    Leave,
    Welcome,
    decode_control,
    encode_control,
)
from omnireduce.errors import ClosedError, OmniReduceError, ProtocolError, TransportError, left_because
from omnireduce.protocol.collective.effects import SendControl
from omnireduce.protocol.collective.index_lists import MessageSizing
from omnireduce.protocol.host.exchange import region_bytes
from omnireduce.protocol.host.local_ranks import LocalRanks
from omnireduce.protocol.joining.pending_job import worker_name
from omnireduce.protocol.joining.worker_joining import (
    Connect,
    HangUp,
    JoinAction,
    Joined,
    JoinEffect,
    Joining,
    MeetLocalRanks,
    Notice,
    perform,
)
from omnireduce.protocol.rank import RankMachine
from omnireduce.runtime.aggregator_client import connect_once, loss_hint, reach, read_message
from omnireduce.runtime.driver import flush_before_close
from omnireduce.runtime.file_descriptors import shortage
from omnireduce.runtime.rank.engine import GOODBYE_S, Engine
from omnireduce.runtime.rank.threads import threads_for
from omnireduce.runtime.rank.traced_parts import RankParts, traced
from omnireduce.runtime.tracing.trace import trace_folder, with_folder
from omnireduce.support import config as settings
from omnireduce.support.config import Config, whole_bytes
from omnireduce.support.logs import BoundLog, tagged
from omnireduce.support.os_error_origin import raised_by_signal_handler
from omnireduce.support.secret import Secret, load_secret
from omnireduce.transport.base import NO_SLOTS, Control, Event, Link, Lost
from omnireduce.transport.framing import StreamLink
from omnireduce.transport.host_rendezvous import RETRY_S, HostGroup, HostRendezvous, RankGoneError
from omnireduce.transport.rdma_offer import offer_rdma, take_answer
from omnireduce.transport.slot_memory import touch
from omnireduce.transport.tls import worker_context

if TYPE_CHECKING:
    from omnireduce.transport.verbs.connect import Offer


BOOT_ID = "/proc/sys/kernel/random/boot_id"
CLOCK = "/proc/self/ns/time"  # ranks of a host compare their times
NETWORK = "/proc/self/ns/net"  # an abstract Unix socket is seen only within it


def memory_key() -> str:
    """A text that is the same for all processes that can share memory and meet for it: processes of one user, on one
    host, in one network namespace. Empty if these are not known."""
    with suppress(OSError), open(BOOT_ID, "rb") as file:
        clock = os.stat(CLOCK).st_ino if os.path.exists(CLOCK) else 0
        text = b"%s %d %d %d" % (file.read(64).strip(), os.stat(NETWORK).st_ino, clock, os.geteuid())
        return hashlib.sha256(text).hexdigest()[:32]
    return ""


CONNECT_S = 3.0  # the longest attempt to connect: meanwhile no messages are read
RECONNECT_S = 1.0  # pause between two attempts
LOOK_S = 0.1  # pause between two looks whether the kernels are ready


def tell_aggregators(config: Config, hello: Hello, secret: Secret | None, stop: threading.Event) -> None:
    """Let the aggregators know that the worker of `hello` compiles, until `stop` is set. `secret` (None: the configured
    secret) proves who it is. Aggregators that cannot be reached may start later. Raises ConfigError."""
    secret = load_secret(config.security) if secret is None else secret
    # In an elastic job, only the first aggregator knows the ranks so far
    visible_shards = 1 if hello.min_ranks else None
    next_attempt = {shard: 0.0 for shard, _ in enumerate(config.cluster.aggregators[:visible_shards])}  # when to try
    links = dict[int, StreamLink]()
    with ExitStack() as stack:
        while not stop.wait(LOOK_S):
            now = time.monotonic()
            for shard in [shard for shard, at in next_attempt.items() if at <= now]:
                with suppress(OmniReduceError, OSError):
                    link = reach(config.cluster.aggregators[shard], config, secret, now + CONNECT_S)
                    stack.callback(link.close)
                    link.send_control(encode_control(replace(hello, shard=shard, compiling=True)))
                    links[shard] = link
                next_attempt[shard] = float("inf") if shard in links else now + RECONNECT_S
            for shard, link in list(links.items()):
                if not _is_connected(link):
                    del links[shard]
                    next_attempt[shard] = now + RECONNECT_S


def _is_connected(link: StreamLink) -> bool:
    """Whether the connection lasts: the aggregator still knows of this worker."""
    try:
        for event in link.poll():
            read_message(link, event)
    except (OmniReduceError, OSError):
        return False
    return True


class AssembledRank(NamedTuple):
    """The links, machine and engine of a rank."""

    links: list[Link]
    machine: RankMachine
    engine: Engine


def assemble(config: Config, job: str, arrival: JoinedWorker) -> AssembledRank:
    """Make the engine of a rank that has joined.

    Raises TransportError when there are no descriptors or no memory for it. Then it tells the other ranks, and gives
    everything back.
    """
    joined = arrival.joined
    name = worker_name(joined.rank, socket.gethostname(), os.getpid())
    try:
        return _assemble(config, job, arrival, name)
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno is None:  # an error of a signal handler, not of the system
            _give_up(arrival, Cause(name, left_because(error)))
            raise
        wrong = shortage(error)
    except BaseException as error:
        _give_up(arrival, Cause(name, left_because(error)))
        raise
    # Not inside `except`: the error would keep the memory alive.
    _give_up(arrival, Cause(name, f"could not begin: {wrong}"))
    raise TransportError(f"rank {joined.rank} of job '{job}' could not begin: {wrong}")


def _assemble(config: Config, job: str, arrival: JoinedWorker, name: str) -> AssembledRank:
    joined, parts = arrival.joined, RankParts(arrival.links)
    is_traced = bool(trace_folder(config.trace))
    if is_traced:
        parts = traced(with_folder(config.trace), job, joined.rank, joined.size, parts.links)
    links = parts.links
    host = None if arrival.group is None else parts.exchange(*_exchange_arguments(config, joined, arrival.group))
    block_links = links if host is None or joined.local_ranks.hosts > 1 else []  # the links that carry blocks
    for link in block_links:
        touch(link.send_slots)
        touch(link.receive_slots)
    thread_count = 1 if is_traced else config.transport.threads  # a trace shows the work of one thread
    threads = threads_for(thread_count, block_links, len(joined.local_ranks.ranks))
    machine = parts.machine(
        [(link.send_slots, link.receive_slots) for link in links],
        [link.peer for link in links],
        name,
        rank=joined.rank,
        scan_span=config.protocol.scan_span,
        timeout_s=config.cluster.timeout_s,
        sizing=[_sizing(config.protocol, link) for link in links],
        host=host,
        local_ranks=joined.local_ranks,
        threads=threads,
    )
    machine.newcomers = arrival.newcomers
    log = BoundLog(logging.getLogger("omnireduce"), job=job, rank=joined.rank)
    eventfds = () if arrival.group is None else arrival.group.eventfds
    try:
        return AssembledRank(
            links, machine, parts.engine(machine, links, config.transport.spin_us / 1e6, log, eventfds)
        )
    except BaseException:
        if threads is not None:
            threads.close()
        raise


def _sizing(protocol: settings.Protocol, link: Link) -> MessageSizing:
    if link.inline:
        return MessageSizing.for_network(protocol.tcp_message_bytes)
    return MessageSizing(protocol.slot_bytes, protocol.slot_bytes)


def _exchange_arguments(
    config: Config, joined: Joined, group: HostGroup
) -> tuple[Array, int, list[str], int, int, LocalRanks]:
    """The arguments of a host exchange."""
    local_ranks, protocol = joined.local_ranks, config.protocol
    pids = zip(local_ranks.ranks, group.pids, strict=True)
    names = [worker_name(number, socket.gethostname(), pid) for number, pid in pids]
    own_index = local_ranks.ranks.index(joined.rank)
    return group.regions, own_index, names, protocol.slots, protocol.slot_bytes, local_ranks


def _give_up(arrival: JoinedWorker, cause: Cause) -> None:
    """Tell all shards, then close the links and release all memory."""
    links = arrival.links
    if arrival.group is not None:
        arrival.group.close()
    deadline = time.monotonic() + GOODBYE_S
    for link in links:
        link.send_control(encode_control(Leave(cause)))
    for link in links:
        flush_before_close(link, deadline)
        link.close()
        link.attach(NO_SLOTS, NO_SLOTS)


LISTEN_S = 0.1  # the longest wait between two checks for a shutdown: a signal handler cannot end a wait by itself


def hello_of(config: Config, job: str, launch: str, rank: int, size: int) -> Hello:
    """The Hello of this process, to join `job` as `rank` of `size`."""
    return Hello(
        version=PROTOCOL_VERSION,
        job=job,
        rank=rank,
        world_size=size,
        shard=0,
        shards=len(config.cluster.aggregators),
        slots=config.protocol.slots,
        slot_bytes=config.protocol.slot_bytes,
        host=socket.gethostname(),
        pid=os.getpid(),
        stripe_blocks=config.protocol.stripe_blocks,
        timeout_s=config.cluster.timeout_s,
        whole_bytes=whole_bytes(config),
        tcp_message_bytes=config.protocol.tcp_message_bytes,
        urgent_bytes=config.protocol.urgent_bytes,
        launch=launch,
        state_bytes=config.protocol.state_bytes,
        memory="" if config.transport.host_exchange == "off" or config.protocol.state_bytes else memory_key(),
    )


class JoinedWorker(NamedTuple):
    """A worker that has joined: an attached link for each shard, in order, its place in the job, the number of workers
    that wait for the next generation, and the memory that it shares with the other ranks of its host, if any."""

    links: list[Link]
    joined: Joined
    newcomers: int
    group: HostGroup | None = None


def join(config: Config, hello: Hello, secret: Secret | None, gave_up: Callable[[], bool]) -> JoinedWorker:
    """Join the job of `hello` on every configured aggregator, within `cluster.join_timeout_s`. It calls `gave_up` now
    and then, and stops when that returns True.

    Raises ConfigError when the secret or a certificate cannot be used, TransportError when an aggregator cannot be
    reached or does not prove itself, RefusedError when it does not admit this worker or when ranks are missing at the
    end of the time, AbortedError when another rank failed meanwhile, ClosedError when the caller gave up.
    """
    try:
        pending = _PendingRank(config, hello, secret)
    except OSError as error:
        raise TransportError(f"cannot join job '{hello.job}': {shortage(error)}") from error
    return pending.run(gave_up)


class ChannelEngine(Protocol):
    """The part of a channel's engine that a join beside it needs."""

    def listen(self) -> bool: ...
    def end_error(self) -> OmniReduceError: ...


def join_beside(
    first: ChannelEngine | None, config: Config, hello: Hello, secret: Secret | None, gave_up: Callable[[], bool]
) -> JoinedWorker:
    """`join`, for as long as `first` lasts (None: no condition). Raises the errors of `join`, and the error of its
    end."""
    try:
        return join(config, hello, secret, lambda: gave_up() or (first is not None and first.listen()))
    except ClosedError:
        if first is None or gave_up():
            raise
        raise first.end_error() from None


def feed(machine: Joining, shard: int, peer: str, event: Event, now: float) -> Iterator[JoinEffect]:
    """Give the machine an event of the link to an aggregator."""
    if isinstance(event, Lost):
        return machine.lost(shard, event.reason, now, for_good=event.violation or event.refused)
    if not isinstance(event, Control):
        return machine.failed(TransportError(f"aggregator {peer} sent blocks before this worker was admitted"), now)
    try:
        message = decode_control(event.body)
    except ProtocolError as error:
        return machine.failed(TransportError(f"aggregator {peer}: {error}"), now)
    return machine.control_received(shard, message, now)


class _PendingRank:
    """Carries out the effects of the join protocol: connections, messages, slots."""

    def __init__(self, config: Config, hello: Hello, secret: Secret | None) -> None:
        self._config, self._tls = config, worker_context(config.security)
        self._log = BoundLog(logging.getLogger("omnireduce"), job=hello.job, rank=hello.rank)
        cluster = config.cluster
        self._machine = Joining(hello, cluster.aggregators, secret, cluster.join_timeout_s, config.transport.kind)
        self._links: list[Link] = []
        self._offers: list[Offer | None] = []
        self._joined: Joined | None = None
        self._selector = selectors.DefaultSelector()
        self._rendezvous: HostRendezvous | None = None

    def run(self, gave_up: Callable[[], bool]) -> JoinedWorker:
        """Return when this worker is a rank of the job, or raise why it cannot be."""
        with self._selector:
            try:
                self._perform(self._machine.start(time.monotonic()))
                while not self._attach_links():
                    if gave_up():
                        raise ClosedError("the communicator was shut down while it joined; make a new one to go on")
                    self._wait()
            except BaseException:
                self._hang_up()
                raise
        assert self._joined is not None
        group = None if self._rendezvous is None else self._rendezvous.group
        return JoinedWorker(self._links, self._joined, self._machine.newcomers, group)

    def _wait(self) -> None:
        deadline = self._machine.deadline
        timeout_s = LISTEN_S if deadline is None else min(LISTEN_S, max(0.0, deadline - time.monotonic()))
        if self._rendezvous is not None and self._rendezvous.must_retry_soon:
            timeout_s = min(timeout_s, RETRY_S)
        for key, _ in self._selector.select(timeout_s):
            link, shard = key.fileobj, key.data
            if not isinstance(link, Link):
                continue  # the rendezvous of local ranks has its turn below
            for event in link.poll() if link in self._links else ():
                if link in self._links:  # an earlier event may have ended this attempt
                    self._perform(feed(self._machine, shard, link.peer, event, time.monotonic()))
        self._advance_rendezvous()
        self._perform(self._machine.timer(time.monotonic()))

    def _advance_rendezvous(self) -> None:
        if self._rendezvous is None or self._rendezvous.group is not None:
            return
        try:
            is_complete = self._rendezvous.turn()
        except RankGoneError:
            self._end_rendezvous()  # an aggregator will say which rank failed, and why
            return
        except (TransportError, OSError) as error:
            self._fail_to_share_memory(error)
            return
        if is_complete:
            self._selector.unregister(self._rendezvous)
            self._perform(self._machine.local_ranks_met())

    def _attach_links(self) -> bool:
        """If the worker has joined, give every link its slots; return whether all links have theirs."""
        if self._joined is None:
            return False
        try:
            for shard, welcome in enumerate(self._joined.welcomes):
                link, offer = self._links[shard], self._offers[shard]
                self._selector.unregister(link)
                self._links[shard] = _attach(link, welcome, offer, self._config, self._log)
        except (TransportError, OSError, MemoryError) as error:
            wrong = str(error) if isinstance(error, TransportError) else shortage(error)
        else:
            return True
        self._fail(wrong)
        return False

    def _fail(self, wrong: str) -> None:
        """End this attempt."""
        self._perform(self._machine.failed(TransportError(wrong), time.monotonic()))

    def _fail_to_share_memory(self, error: TransportError | OSError) -> None:
        """End this attempt because memory could not be shared. Raises the error if a signal handler has raised it."""
        if isinstance(error, OSError) and raised_by_signal_handler(error):
            raise error
        self._fail(str(error) if isinstance(error, TransportError) else shortage(error))

    def _begin_rendezvous(self, action: MeetLocalRanks) -> None:
        """Begin to meet the other ranks of this host."""
        protocol = self._config.protocol
        size = region_bytes(protocol.slots, protocol.slot_bytes, action.hosts)
        try:
            self._rendezvous = HostRendezvous(action.token, action.size, action.rank, size)
        except (TransportError, OSError) as error:
            self._fail_to_share_memory(error)
        else:
            self._selector.register(self._rendezvous, selectors.EVENT_READ)

    def _perform(self, effects: Iterator[JoinEffect]) -> None:
        perform(effects, self._execute)

    def _execute(self, action: JoinAction) -> Iterator[JoinEffect] | None:
        """Carry out an effect; return the further effects of the machine."""
        try:
            return self._execute_action(action)
        except TransportError as error:
            return self._machine.failed(error, time.monotonic())

    def _execute_action(self, action: JoinAction) -> Iterator[JoinEffect] | None:
        if isinstance(action, Connect):
            return self._connect(action)
        if isinstance(action, SendControl):
            self._send(action)
        elif isinstance(action, HangUp):
            self._hang_up(action.first)
        elif isinstance(action, MeetLocalRanks):
            self._begin_rendezvous(action)
        elif isinstance(action, Notice):
            fields = {} if action.shard < 0 else {"aggregator": self._config.cluster.aggregators[action.shard]}
            self._log.warning("%s", action.text, extra=tagged(action.event, **fields))
        else:
            self._joined = action
        return None

    def _connect(self, action: Connect) -> Iterator[JoinEffect]:
        address = self._config.cluster.aggregators[action.shard]

        def say(reason: str) -> None:
            self._log.warning("going on by tcp: %s", reason, extra=tagged("no_shm", aggregator=address))

        try:
            deadline = min(action.deadline, time.monotonic() + CONNECT_S)
            link = connect_once(address, self._config, lambda: self._tls, deadline, say)
        except OSError as error:
            return self._machine.unreachable(action.shard, error.strerror or str(error), time.monotonic())
        self._links.append(link)
        self._offers.append(None)
        self._selector.register(link, selectors.EVENT_READ, action.shard)
        nonce = secrets.token_bytes(NONCE_BYTES)
        return self._machine.connected(action.shard, nonce, time.monotonic(), loss_hint(link))

    def _send(self, effect: SendControl) -> None:
        """Send a message. A Hello also gets this worker's endpoint for RDMA."""
        link, message = self._links[effect.peer], effect.message
        if isinstance(message, Hello):
            offered = offer_rdma(link, self._config, partial(_log_no_verbs, self._log, link))
            self._offers[effect.peer] = offered
            message = replace(message, verbs=None if offered is None else offered.endpoint)
        link.send_control(encode_control(message))

    def _hang_up(self, first: int = 0) -> None:
        for link in self._links[first:]:
            if link in self._selector.get_map():
                self._selector.unregister(link)
            link.close()
        for offer in self._offers[first:]:
            if offer is not None:
                offer.close()
        self._end_rendezvous()
        self._joined = None
        del self._links[first:], self._offers[first:]

    def _end_rendezvous(self) -> None:
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is None:
            return
        if rendezvous.group is not None:
            rendezvous.group.close()
            return
        if rendezvous in self._selector.get_map():
            self._selector.unregister(rendezvous)
        rendezvous.close()


def _attach(link: Link, welcome: Welcome, offered: Offer | None, config: Config, log: BoundLog) -> Link:
    """The link with its slots, over RDMA if the aggregator took the offer. Raises TransportError, OSError and
    MemoryError."""
    if offered is not None:
        verbs_link = take_answer(link, offered, welcome.verbs, welcome.note, config, partial(_log_no_verbs, log, link))
        if verbs_link is not link:
            return verbs_link
    link.take_slots(welcome.place, config.protocol.slots, config.protocol.slot_bytes)
    return link


def _log_no_verbs(log: BoundLog, link: Link, reason: str) -> None:
    log.info(
        "aggregator %s by %s, not verbs: %s",
        link.peer,
        link.kind,
        reason,
        extra=tagged("no_verbs", aggregator=link.peer),
    )
