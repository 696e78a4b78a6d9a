"""A rank's work for several shards at the same time, in threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, TypeVar

from omnireduce.protocol.collective.collective import Collective
from omnireduce.protocol.collective.effects import Send
from omnireduce.protocol.collective.stream import ShardStream

T = TypeVar("T")


class ThreadPool(Protocol):
    """Threads that make calls at the same time. Tensors of `worth_bytes` or more are worth dividing among them."""

    worth_bytes: int

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Make all calls; return their results in the order of the calls. Raises the first error among them. When it
        returns or raises, all calls have ended."""

    def close(self) -> None:
        """End the threads."""


class ShardThreads:
    """A rank's work for its shards, divided among the threads of `pool`. `streams`: one for each shard."""

    def __init__(self, pool: ThreadPool, streams: Sequence[ShardStream], under_way: Collection[Collective]) -> None:
        self.pool, self._streams, self._under_way = pool, streams, under_way

    @property
    def is_on(self) -> bool:
        """Whether to use threads: a collective under way is large, and all of them are divisible."""
        large = any(collective.sent.nbytes >= self.pool.worth_bytes for collective in self._under_way)
        return large and all(collective.sent.is_divisible for collective in self._under_way)

    def pack(self) -> Iterator[Send]:
        """Pack as long as there are free slots, for several shards at the same time."""
        while calls := [stream.pack for stream in self._streams if stream.may_pack]:
            messages = [message for message in self.pool.run(calls) if message is not None]
            if not messages:
                return
            yield from messages

    def place(self, shard: int, slot: int, nbytes: int) -> None:
        """Do in advance the part of the machine's `received` that concerns this shard alone. Threads may call this for
        different shards at the same time."""
        self._streams[shard].place(slot, nbytes)
