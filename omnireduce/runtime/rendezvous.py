"""How a worker finds its aggregators: connect to each shard, prove the secret, say hello, wait for the other ranks."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from omnireduce.config import Config, parse_address, whole_bytes
from omnireduce.errors import RefusedError, TransportError
from omnireduce.logs import BoundLog, tagged
from omnireduce.runtime.engine import error_of
from omnireduce.runtime.prove import prove, read_message
from omnireduce.secret import load_secret
from omnireduce.transport.base import Event, Link
from omnireduce.transport.memory import private_slots
from omnireduce.transport.shm import ShmLink, connect_shm
from omnireduce.transport.stream import StreamLink
from omnireduce.transport.tcp import TcpLink, connect_tcp
from omnireduce.transport.tls import connect_tls, worker_context
from omnireduce.transport.verbs import import_rdma
from omnireduce.wire import (
    PROTOCOL_VERSION,
    Aborted,
    Hello,
    Newcomers,
    Pending,
    Waiting,
    Welcome,
    encode_control,
    shown,
)

if TYPE_CHECKING:  # importing it needs pyverbs
    from omnireduce.transport.verbs.connect import Offer

RETRY_S = 0.1  # between attempts to reach an aggregator that is not up yet
SEATED_S = 5.0  # how long a worker has at least to go from the first aggregator of an elastic job to the others
QUIET_S = 2.0  # how long to wait for an aggregator before saying so


@dataclass(frozen=True, slots=True)
class Wish:
    """What a worker asks for: to be `rank` of `size`; or, where `smallest` is not 0, a place in an elastic job of
    `smallest` to `size` workers, in the order of their ranks."""

    rank: int
    size: int
    smallest: int = 0
    settle_s: float = 0.0
    survivor: bool = False


class Joined(NamedTuple):
    """What a worker got: one attached link per shard, in order, and its place in this generation of the job."""

    links: list[Link]
    rank: int
    size: int
    generation: int  # of the first shard
    newcomers: int  # who waited by then for the next one


def join(config: Config, job: str, wish: Wish, deadline: float) -> Joined:
    """Join `job` on every configured aggregator until `deadline`, of the monotonic clock.

    Of an elastic job the first aggregator decides the ranks; with these the worker goes to the others.

    Raises ConfigError when the secret or a certificate cannot be used, TransportError when an aggregator cannot be
    reached or does not prove itself, RefusedError when it does not admit this worker or when ranks are missing at the
    deadline, AbortedError when another rank failed meanwhile.
    """
    log = BoundLog(logging.getLogger("omnireduce"), job=job, rank=wish.rank)
    visit = _Visit(config, job, deadline, log)
    try:
        if wish.smallest:
            visit.announce(wish, 1)
            first = visit.await_welcomes()[0]
            if first.seat is None or first.seat.rank >= first.seat.world_size:
                raise TransportError(f"aggregator {visit.links[0].peer} gave no place in an elastic job")
            wish = Wish(first.seat.rank, first.seat.world_size)
            visit.hurry(max(SEATED_S, 2 * config.elastic.settle_s))
            visit.announce(wish, len(config.cluster.aggregators), formation=first.seat.formation)
        else:
            visit.announce(wish, len(config.cluster.aggregators))
        welcomes = visit.await_welcomes()
        visit.attach(welcomes, wish.rank)
    except BaseException:
        visit.close()
        raise
    return Joined(visit.links, wish.rank, wish.size, welcomes[0].generation, visit.newcomers)


class _Visit:
    """One attempt to join: the connections that were made so far, one per shard, and what the aggregators answered."""

    def __init__(self, config: Config, job: str, deadline: float, log: BoundLog) -> None:
        self._config, self._job, self._deadline, self._log = config, job, deadline, log
        self._secret, self._tls = load_secret(config.security), worker_context(config.security)
        self.links: list[Link] = []
        self._offers: list[Offer | None] = []
        self._welcomes: dict[Link, Welcome] = {}
        self.newcomers, self._noted = 0, ""

    def announce(self, wish: Wish, shards: int, *, formation: int = 0) -> None:
        """Connect to the first `shards` aggregators, but those that were told already, and say hello."""
        config = self._config
        for shard in range(len(self.links), shards):
            link = _connect(config.cluster.aggregators[shard], config, self._tls, self._deadline, self._log)
            self.links.append(link)  # one by one, so that a failure closes those that were made
            if self._secret is not None:
                prove([link], self._secret, self._deadline)
            offer = _offer(link, config, self._log)
            self._offers.append(offer)
            # At once: an aggregator drops who says nothing, and the next one may take long to come up.
            link.send_control(encode_control(_hello(config, self._job, wish, shard, offer, formation)))

    def hurry(self, seconds: float) -> None:
        """Give up after so long: who has a seat and does not come is left out in the next attempt."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def await_welcomes(self) -> list[Welcome]:
        """Wait until every aggregator that was told has said Welcome.

        Raises RefusedError, TransportError or AbortedError.
        """
        waiting = {link for link in self.links if link not in self._welcomes}
        missing: dict[Link, Pending] = {}
        complain_at = time.monotonic() + QUIET_S
        with selectors.DefaultSelector() as selector:
            for link in self.links:
                selector.register(link, selectors.EVENT_READ, link)
            while waiting:
                now = time.monotonic()
                if now >= self._deadline:
                    limit_s = self._config.cluster.join_timeout_s
                    raise RefusedError(_who_is_missing(waiting, missing, self._job, limit_s), temporary=True)
                if now >= complain_at:
                    what = _what_is_missing(waiting, missing, self._job)
                    self._log.warning("waiting for %s", what, extra=tagged("waiting_for_ranks"))
                    complain_at = self._deadline
                for key, _ in selector.select(min(self._deadline, complain_at) - now):
                    asked: Link = key.data
                    for event in asked.poll():
                        answer = read_answer(asked, event)
                        if isinstance(answer, Pending):
                            self._warn(asked, answer.note)
                            missing[asked] = answer
                        elif isinstance(answer, Welcome):
                            waiting.discard(asked)
                            self._welcomes[asked] = answer
                        elif isinstance(answer, Newcomers):
                            self.newcomers = answer.count
        return [self._welcomes[link] for link in self.links]

    def _warn(self, asked: Link, note: str) -> None:
        if note and note != self._noted:
            self._noted = note
            self._log.warning(
                "aggregator %s: %s", asked.peer, shown(note), extra=tagged("rank_refused", aggregator=asked.peer)
            )

    def attach(self, welcomes: Sequence[Welcome], rank: int) -> None:
        """Give every link its slots. Raises TransportError."""
        for shard, (welcome, offer) in enumerate(zip(welcomes, self._offers, strict=True)):
            self.links[shard] = _attach(self.links[shard], welcome, offer, self._config, rank, self._log)

    def close(self) -> None:
        for link in self.links:
            link.close()
        for offer in self._offers:
            if offer is not None:
                offer.close()


def _offer(link: Link, config: Config, log: BoundLog) -> Offer | None:
    """Get ready for RDMA with this aggregator, if it is wanted and possible. Raises TransportError."""
    kind, protocol = config.transport.kind, config.protocol
    if not isinstance(link, TcpLink) or kind not in ("auto", "verbs"):
        return None
    try:
        import_rdma()
        from omnireduce.transport.verbs.connect import Offer

        return Offer(link, config.verbs, protocol.slots, protocol.slot_bytes, required=kind == "verbs")
    except TransportError as error:
        if kind == "verbs":
            raise
        _say_no_verbs(log, link, str(error))
        return None


def _hello(config: Config, job: str, wish: Wish, shard: int, offer: Offer | None, formation: int) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION,
        job=job,
        rank=wish.rank,
        world_size=wish.size,
        shard=shard,
        shards=len(config.cluster.aggregators),
        slots=config.protocol.slots,
        slot_bytes=config.protocol.slot_bytes,
        host=socket.gethostname(),
        pid=os.getpid(),
        stripe_blocks=config.protocol.stripe_blocks,
        whole_bytes=whole_bytes(config),
        timeout_s=config.cluster.timeout_s,
        verbs=None if offer is None else offer.endpoint,
        tcp_message_bytes=config.protocol.tcp_message_bytes,
        smallest=wish.smallest,
        settle_s=wish.settle_s,
        survivor=wish.survivor,
        formation=formation,
    )


def _connect(address: str, config: Config, tls: ssl.SSLContext | None, deadline: float, log: BoundLog) -> Link:
    """Connect by the wanted transport, again and again until the deadline. Raises TransportError."""
    started, complained = time.monotonic(), False

    def say(reason: str) -> None:
        log.warning("going on by tcp: %s", reason, extra=tagged("no_shm", aggregator=address))

    while True:
        try:
            return connect_once(address, config, lambda: tls, deadline, say)
        except OSError as error:
            now = time.monotonic()
            if now >= deadline or isinstance(error, socket.gaierror):
                raise unreachable(address, config, error) from error
            if not complained and now - started > QUIET_S:
                waiting = tagged("waiting_for_aggregator", aggregator=address)
                log.warning("waiting for aggregator %s: %s", address, error.strerror or error, extra=waiting)
                complained = True
            time.sleep(min(RETRY_S, max(0.0, deadline - now)))


def unreachable(address: str, config: Config, error: OSError) -> TransportError:
    """What to say when nobody can be connected to at the address of an aggregator."""
    return TransportError(
        f"cannot reach aggregator {address} by {config.transport.kind}: {error.strerror or error}; "
        "is `python -m aggregator` running there, and is its port open to this host?"
    )


def connect_once(
    address: str,
    config: Config,
    make_tls: Callable[[], ssl.SSLContext | None],
    deadline: float,
    say: Callable[[str], None],
) -> StreamLink:
    """Connect to an aggregator; only control messages can flow yet. Calls `make_tls` before it connects by TCP, and
    `say` with the reason when shared memory would do but is another user's.

    Raises OSError, TransportError when it offers nothing but the shared memory of another user, and what `make_tls`
    raises.
    """
    host, port = parse_address(address)
    wanted = config.transport
    timeout_s = max(0.1, deadline - time.monotonic())
    if wanted.kind in ("auto", "shm"):
        any_user = config.security.local_users == "any"
        try:
            link = connect_shm(host, port, timeout_s, any_user=any_user)
        except (OSError, TransportError) as error:
            if wanted.kind == "shm":
                raise
            if isinstance(error, TransportError):
                say(str(error))
        else:
            owner = link.peer_user
            if wanted.kind == "shm" or any_user or owner == os.geteuid():
                return link
            # Root's memory could be shared, but root's aggregator shares none with others than root.
            link.close()
            say(
                f"the aggregator {address} is of user {owner}, this worker of user {os.geteuid()}: for shared memory "
                "set security.local_users = 'any' on both"
            )
    tls = make_tls()
    if tls is not None:
        return connect_tls(host, port, timeout_s, wanted.dead_peer_s, tls)
    return connect_tcp(host, port, timeout_s, wanted.dead_peer_s)


def read_answer(link: Link, event: Event) -> Pending | Welcome | Waiting | Newcomers:
    """Read one answer of an aggregator to a Hello. Raises RefusedError, TransportError or AbortedError.

    One shard may admit a job while another still gathers it. Ranks that have all their welcomes go ahead, so the first
    shard can say Waiting, or Aborted, to a rank that waits for the second.
    """
    message = read_message(link, event)
    if isinstance(message, Aborted):
        raise error_of(message.cause)
    if not isinstance(message, Pending | Welcome | Waiting | Newcomers):
        raise TransportError(f"aggregator {link.peer} answered the hello with {type(message).__name__}")
    return message


def _what_is_missing(waiting: set[Link], missing: dict[Link, Pending], job: str) -> str:
    link = min(waiting, key=lambda each: each.peer)
    pending = missing.get(link)
    if pending is None:
        return f"an answer of aggregator {link.peer}"
    names = ", ".join(map(str, pending.missing)) + (" …" if pending.total_missing > len(pending.missing) else "")
    note = f" ({shown(pending.note)})" if pending.note else ""
    return f"rank {names} of job '{job}' at aggregator {link.peer}{note}"


def _who_is_missing(waiting: set[Link], missing: dict[Link, Pending], job: str, timeout_s: float) -> str:
    what = _what_is_missing(waiting, missing, job)
    hint = "; were all workers started, with the same world size and job?" if missing.keys() & waiting else ""
    return f"still waiting for {what} after cluster.join_timeout_s = {timeout_s:g}{hint}"


def _attach(link: Link, welcome: Welcome, offer: Offer | None, config: Config, rank: int, log: BoundLog) -> Link:
    """The link with its slots, over RDMA if the aggregator took the offer. Raises TransportError."""
    slots, slot_bytes = config.protocol.slots, config.protocol.slot_bytes
    if offer is not None and welcome.verbs is not None:
        return offer.accepted(welcome.verbs)
    if offer is not None:
        if config.transport.kind == "verbs":
            raise TransportError(
                f"aggregator {link.peer} offers no RDMA: {shown(welcome.note)}; or choose transport.kind = 'tcp'"
            )
        _say_no_verbs(log, link, shown(welcome.note))
        offer.close()
    if isinstance(link, ShmLink):
        link.attach_memory(rank * slots, slots, slot_bytes)
    else:
        link.attach(private_slots(slots, slot_bytes), private_slots(slots, slot_bytes))
    return link


def _say_no_verbs(log: BoundLog, link: Link, why: str) -> None:
    log.info("aggregator %s by tcp, not verbs: %s", link.peer, why, extra=tagged("no_verbs", aggregator=link.peer))
