"""Hosts of a job: the ranks that share memory, and the rank that exchanges the host's sums with each shard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from omnireduce.core.descriptor import REMEMBERED, Descriptor
from omnireduce.core.layout import Layout
from omnireduce.core.wire.blocks import capacity
from omnireduce.core.wire.control import MAX_LOCAL_RANKS, Hello

# Chunk of a large tensor: smaller chunks cost more looks at counters, larger ones leave the caches
CHUNK_BYTES = 1 << 19
SMALL_CHUNK_BYTES = 1 << 16  # the smallest chunk that is worth its looks
CHUNKS_AT_ONCE = 4  # chunks of a small union, or of a small sum of a host: ranks and shards work on them side by side
CHUNKS_OF_ONE_HOST = 2  # chunks of a small tensor in a job on one host: all ranks share each chunk


class LocalRanks(NamedTuple):
    """The ranks of one host, ascending: host number `host` of `hosts`. They share memory. If no ranks of the job share
    memory, this is a single rank, and `hosts` is 1."""

    ranks: tuple[int, ...]
    host: int = 0
    hosts: int = 1

    def delegate(self, shard: int) -> int:
        """The rank that exchanges the host's sums with this shard."""
        return self.ranks[shard % len(self.ranks)]

    def can_be(self, rank: int, size: int) -> bool:
        """Whether these can be the local ranks of `rank`, in a job of `size` ranks."""
        ranks, host, hosts = self
        ascend = all(low < high for low, high in zip(ranks, (*ranks[1:], size), strict=True))
        return ascend and rank in ranks and host < hosts <= size and (hosts > 1 or len(ranks) == size)


class JobRank(NamedTuple):
    """A rank as a shard or a relay sees it. `relay`: the key of the relay below through which it comes, or empty.
    `host`: the ranks of its host, if it shares memory with others."""

    rank: int
    relay: bytes
    host: LocalRanks | None


def delegates_of(members: Sequence[JobRank], shard: int) -> list[int]:
    """The indices in `members` of the ranks that send sums to this shard: the first rank of each relay, the delegate of
    each host, and every rank that has neither. They are in the order of the first ranks. Empty if no rank sends sums:
    then every rank sends its own blocks."""
    several = any(member.relay or (member.host is not None and member.host.hosts > 1) for member in members)
    delegates: dict[bytes | tuple[int, ...], int] = {}
    for index, (rank, relay, host) in enumerate(members):
        key = relay or (host.ranks if host is not None else (rank,))
        first = delegates.setdefault(key, index)
        if not relay and host is not None and rank == host.delegate(shard) and first != index:
            delegates[key] = index
    return list(delegates.values()) if several else []


def readers_of(members: Sequence[JobRank]) -> list[int]:
    """The indices in `members` of the ranks that get results when every rank sends for itself: the first rank of each
    relay, and every rank without a relay."""
    first = dict[bytes, int]()
    return [
        index
        for index, member in enumerate(members)
        if not member.relay or first.setdefault(member.relay, index) == index
    ]


def hosts_of(hellos: Sequence[Hello]) -> list[LocalRanks]:
    """The hosts of a job, in the order of their first ranks; `hellos[r]` is the hello of rank r. Empty if no two ranks
    share memory: then each rank sends its own blocks."""
    hosts: dict[str, list[int]] = {}
    for rank, hello in enumerate(hellos):
        hosts.setdefault(hello.memory or f"rank {rank}", []).append(rank)
    sizes = [len(ranks) for ranks in hosts.values()]
    if not 2 <= max(sizes) <= MAX_LOCAL_RANKS:
        return []
    return [LocalRanks(tuple(ranks), host, len(hosts)) for host, ranks in enumerate(hosts.values())]


def chunk_bytes(nbytes: int, largest: int, at_once: int = CHUNKS_AT_ONCE) -> int:
    """The size to aim at for a chunk of a tensor or union of `nbytes`, between the smallest size and `largest`."""
    return min(largest, max(SMALL_CHUNK_BYTES, nbytes // at_once))


def chunk_blocks(blocks: int, block_bytes: int, room: int, at_once: int = CHUNKS_AT_ONCE) -> int:
    """The blocks in a chunk of a tensor of `blocks` full blocks, if `room` of them fit a slot."""
    return max(1, min(chunk_bytes(blocks * block_bytes, CHUNK_BYTES, at_once) // block_bytes, room))


class Sharding(NamedTuple):
    """The distribution of blocks among `shards` shards: in stripes of `stripe_blocks`, or all to the first one if the
    tensor has no more than `whole_bytes`. If hosts send sums, a stripe of a tensor is a chunk that fits `slot_bytes`;
    else that is 0."""

    shards: int = 1
    stripe_blocks: int = 64
    whole_bytes: int = 0
    slot_bytes: int = 0

    @classmethod
    def among(cls, hosts: int, shards: int, stripe_blocks: int, whole_bytes: int, slot_bytes: int) -> Sharding:
        """The sharding of a job on `hosts` hosts. On one host, or if no ranks share memory, no host sends sums."""
        return cls(shards, stripe_blocks, whole_bytes, slot_bytes if hosts > 1 else 0)

    def layout(self, descriptor: Descriptor) -> Layout:
        """The tensor of a collective, with its stripes dealt to the shards."""
        return _deal(self, descriptor)


@lru_cache(REMEMBERED)
def _deal(sharding: Sharding, descriptor: Descriptor) -> Layout:
    layout, block_bytes, stripe_blocks = descriptor.layout, descriptor.block_bytes, sharding.stripe_blocks
    if sharding.slot_bytes and descriptor.summed_by_host and not descriptor.has_rows:
        stripe_blocks = chunk_blocks(layout.full_blocks, block_bytes, capacity(sharding.slot_bytes, block_bytes))
    return layout.dealt(sharding.shards, stripe_blocks, sharding.whole_bytes, block_bytes)
