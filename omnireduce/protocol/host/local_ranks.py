"""Hosts of a job: the ranks that share memory, and the rank that exchanges the host's sums with each shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from omnireduce.core.wire.control import MAX_LOCAL_RANKS, Hello


class LocalRanks(NamedTuple):
    """The ranks of one host, ascending: host number `host` of `hosts`. They share memory. If no ranks of the job share
    memory, this is a single rank, and `hosts` is 1."""

    ranks: tuple[int, ...]
    host: int = 0
    hosts: int = 1

    def delegate(self, shard: int) -> int:
        """The rank that exchanges the host's sums with this shard."""
        return self.ranks[shard % len(self.ranks)]

    def is_possible_for(self, rank: int, size: int) -> bool:
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
    some_send_sums = any(member.relay or (member.host is not None and member.host.hosts > 1) for member in members)
    delegates: dict[bytes | tuple[int, ...], int] = {}
    for index, (rank, relay, host) in enumerate(members):
        key = relay or (host.ranks if host is not None else (rank,))
        first = delegates.setdefault(key, index)
        if not relay and host is not None and rank == host.delegate(shard) and first != index:
            delegates[key] = index
    return list(delegates.values()) if some_send_sums else []


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
