"""Statistics of a worker: what it has moved, and by which transports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omnireduce.runtime.member.channel import Channel


@dataclass(frozen=True, slots=True)
class Statistics:
    """Totals of one worker since it joined. Bytes include framing; with shared memory they are what a wire would have
    carried. `shard_bytes` are those exchanged with each shard, both ways. `carried` are those of tensors, both ways, by
    what carried them: "memory", which ranks of one host share, "shm", "tcp", "verbs"."""

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
        tuple(sum(those) for those in zip(*(channel.shard_bytes for channel in channels), strict=True)),
        sum((channel.carried for channel in channels), Counter[str]()),
    )
