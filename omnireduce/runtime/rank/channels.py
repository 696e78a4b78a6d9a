"""Channels of a rank: one for ordinary collectives and perhaps one for urgent collectives, and their statistics."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from omnireduce.core.names import URGENT
from omnireduce.core.wire.control import Hello
from omnireduce.errors import RefusedError
from omnireduce.protocol.joining.checks import MIN_SLOT_BYTES, PAGE
from omnireduce.protocol.joining.worker_joining import Joined
from omnireduce.protocol.sharding import Sharding
from omnireduce.runtime.rank.calls.arguments import whole_number
from omnireduce.runtime.rank.calls.single import CallContext, Pool, WithPool
from omnireduce.runtime.rank.engine import Engine
from omnireduce.runtime.rank.joining import JoinedWorker, assemble, join_beside
from omnireduce.support.config import Config
from omnireduce.support.logs import tagged
from omnireduce.support.secret import Secret


class CallChannel(NamedTuple):
    """One channel of a rank: the context of its calls, and the engine that drives them."""

    context: CallContext
    engine: Engine


class RankChannels(NamedTuple):
    """The channels of a rank in one generation of a job. Tensors of up to `urgent_bytes` take the `urgent` channel. It
    is the ordinary channel if there is no other.

    All fields are replaced together, so that no call is made for one generation and started in another.
    """

    ordinary: CallChannel
    urgent: CallChannel
    urgent_bytes: int

    @property
    def owner(self) -> threading.Thread:
        """The thread whose collectives need no name."""
        return self.ordinary.context.owner

    def owned_by(self, thread: threading.Thread) -> RankChannels:
        """The same channels with this thread as the owner."""
        channels = [
            channel._replace(context=channel.context._replace(owner=thread)) for channel in (self.ordinary, self.urgent)
        ]
        return self._replace(ordinary=channels[0], urgent=channels[1])

    def channel_for(self, x: object, priority: object, block_size: object) -> CallChannel:
        """The channel for `x`, as `priority` says; None: urgent for a small array. Blocks larger than usual take the
        ordinary channel, because slots of the urgent channel may be too small. Raises UsageError for a priority that is
        no number."""
        if isinstance(block_size, int) and block_size > self.ordinary.context.block_size:
            return self.ordinary
        if priority is not None:
            return self.urgent if whole_number(priority, "priority") > 0 else self.ordinary
        return self.urgent if isinstance(x, np.ndarray) and x.nbytes <= self.urgent_bytes else self.ordinary


T = TypeVar("T")
log = logging.getLogger("omnireduce")
MAX_NAME_CHARACTERS = 128  # the longest name of a job, and the longest launch id
MEMORY = "memory"  # beside the kinds of links, what carries tensors among ranks of one host
GENERATION_CHARACTERS = 20  # a number of 63 bits, and a dot before it


class Channel:
    """One channel: links, machine and engine of a rank that has joined `job` with `arrival`. `pool` lends memory for
    results. Raises the errors of `assemble`."""

    def __init__(self, config: Config, job: str, arrival: JoinedWorker, pool: Pool) -> None:
        self.joined, self.job = arrival.joined, job
        self.links, self.machine, self.engine = assemble(config, job, arrival)
        self.call_channel = CallChannel(
            _call_context(config, self.joined, len(self.links), self.engine, pool), self.engine
        )

    @property
    def in_memory(self) -> bool:
        """Whether ranks of this host exchange tensors in memory that they share."""
        return self.machine.host is not None

    @property
    def kinds(self) -> set[str]:
        """The kinds of its links, and "memory" if ranks of this host share memory."""
        return {link.kind for link in self.links} | ({MEMORY} if self.in_memory else set())

    @property
    def sent_bytes(self) -> int:
        host = self.machine.host
        return sum(link.counters.sent_bytes for link in self.links) + (0 if host is None else host.sent_bytes)

    @property
    def received_bytes(self) -> int:
        host = self.machine.host
        return sum(link.counters.received_bytes for link in self.links) + (0 if host is None else host.received_bytes)

    @property
    def carried(self) -> Counter[str]:
        """Bytes of messages and of blocks in memory, in both directions, by the kind that carried them."""
        carried, host = Counter[str](), self.machine.host
        for link in self.links:
            carried[link.kind] += link.counters.message_bytes
        if host is not None:
            carried[MEMORY] += host.sent_bytes + host.received_bytes
        return carried

    @property
    def shard_bytes(self) -> list[int]:
        """Bytes exchanged with each shard, in both directions."""
        return [link.counters.sent_bytes + link.counters.received_bytes for link in self.links]


def join_urgent(
    first: Channel, config: Config, hello: Hello, secret: Secret | None, gave_up: Callable[[], bool], pool: Pool
) -> Channel:
    """The channel for urgent collectives beside the `first` channel, which `hello` has joined. Raises the errors of
    `join_beside` and `Channel`."""
    config = urgent_config(config)
    hello = _urgent_hello(hello, first, config.protocol.slot_bytes)
    try:
        arrival = join_beside(first.engine, config, hello, secret, gave_up)
    except RefusedError as error:
        reason = f"no channel for urgent tensors (protocol.urgent_bytes; it is a second job, '{hello.job}'): {error}"
        raise RefusedError(reason, temporary=error.temporary) from None
    return Channel(config, hello.job, arrival, pool)


def urgent_config(config: Config) -> Config:
    """The configuration of the channel for urgent collectives."""
    protocol = config.protocol
    # Enough for the indices of blocks of 8 bytes
    needed_bytes = 2 * protocol.urgent_bytes + 8 * protocol.block_size + PAGE
    slot_bytes = min(protocol.slot_bytes, max(MIN_SLOT_BYTES, -(-needed_bytes // PAGE) * PAGE))
    return replace(
        config,
        protocol=replace(protocol, slot_bytes=slot_bytes),
        transport=replace(config.transport, threads=1),  # its tensors are small
    )


def _urgent_hello(hello: Hello, first: Channel, slot_bytes: int) -> Hello:
    """The hello of a rank to join the urgent channel. The channel is formed anew with each formation of the first."""
    joined = first.joined
    launch = (
        f"{hello.launch[: MAX_NAME_CHARACTERS - GENERATION_CHARACTERS]}.{joined.generation}"
        if hello.launch
        else str(joined.generation)
    )
    return replace(
        hello, job=hello.job[: MAX_NAME_CHARACTERS - len(URGENT)] + URGENT, launch=launch, slot_bytes=slot_bytes,
        rank=joined.rank, world_size=joined.size, min_ranks=0, last_call_s=0.0, formation=0, survived=0, ticket=b"",
        state_bytes=0,
    )  # fmt: skip


def _call_context(config: Config, joined: Joined, shards: int, engine: Engine, pool: Pool) -> CallContext:
    protocol = config.protocol
    is_first_of_one_host = joined.rank == 0 and len(joined.local_ranks.ranks) == joined.size > 1
    return CallContext(
        rank=joined.rank, size=joined.size, owner=threading.current_thread(), block_size=protocol.block_size,
        sharding=Sharding.among(
            joined.local_ranks.hosts, shards, protocol.stripe_blocks, joined.whole_bytes, protocol.slot_bytes
        ),
        part_bytes=protocol.max_part_bytes, with_pool=_lender(engine, pool),
        codec=protocol.codec, codec_seed=protocol.codec_seed,
        in_memory=len(joined.local_ranks.ranks) > 1 or joined.local_ranks.hosts > 1,
        warn_unused_codec=_warn_unused_codec if is_first_of_one_host else None,
    )  # fmt: skip


@cache
def _warn_unused_codec(codec: str) -> None:
    """Say, once in this process, that a codec does nothing in a job whose ranks all share memory."""
    log.warning(
        "codec '%s' has no effect: all ranks are on this host, and exchange tensors in memory without a codec. With "
        "transport.host_exchange=off tensors go through the aggregators, encoded", codec,
        extra=tagged("codec_idle", codec=codec),
    )  # fmt: skip


def _lender(engine: Engine, pool: Pool) -> WithPool:
    """The function that lends memory of `pool` under the lock of `engine`. It is no method: a channel that refers to
    itself would keep its memory until the cycle collector runs."""

    def with_pool(make: Callable[[Pool], T]) -> T:
        return engine.exclusively(lambda: make(pool))

    return with_pool


@dataclass(frozen=True, slots=True)
class Statistics:
    """Totals of one worker since it joined. Bytes include framing; with shared memory they are the bytes that a wire
    would have carried. `shard_bytes`: bytes exchanged with each shard, in both directions. `carried`: bytes of tensors,
    in both directions, by the kind that carried them: "memory", which ranks of one host share, "shm", "tcp",
    "verbs"."""

    sent_bytes: int
    received_bytes: int
    collectives: int
    shard_bytes: tuple[int, ...]
    carried: Mapping[str, int]


def statistics_of(channels: Sequence[Channel]) -> Statistics:
    """The totals of all channels."""
    return Statistics(
        sum(channel.sent_bytes for channel in channels),
        sum(channel.received_bytes for channel in channels),
        sum(channel.machine.submitted for channel in channels),
        tuple(sum(counts) for counts in zip(*(channel.shard_bytes for channel in channels), strict=True)),
        sum((channel.carried for channel in channels), Counter[str]()),
    )
