"""Work for several shards, which is done at the same time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, TypeVar

from omnireduce.protocol.collective import Collective
from omnireduce.protocol.effects import Send
from omnireduce.protocol.shard_stream import ShardStream

T = TypeVar("T")


class Crew(Protocol):
    """Threads that do the work. A tensor of `worth_bytes` is worth to be divided."""

    worth_bytes: int

    def run(self, calls: Sequence[Callable[[], T]]) -> Iterator[T]:
        """Make all calls, one or more, and give their results, in any order."""
        ...

    def close(self) -> None:
        """No work is left."""


class Division:
    """How a worker's machine divides its work for the shards, to which `streams` go, among a crew."""

    def __init__(self, crew: Crew, streams: Sequence[ShardStream], under_way: Collection[Collective]) -> None:
        self.crew, self._streams, self._under_way = crew, streams, under_way

    @property
    def is_on(self) -> bool:
        """The collectives under way are large, and the parts of different shards touch nothing in common."""
        least = self.crew.worth_bytes
        return bool(self._under_way) and all(
            each.sent.has_parts and each.sent.nbytes >= least for each in self._under_way
        )

    def pack(self) -> Iterator[Send]:
        """Pack as long as there are free slots, for several shards at the same time."""
        busy = True
        while busy:
            busy = False
            calls = [each.pack for each in self._streams if each.may_pack]
            for message in self.crew.run(calls) if calls else ():
                if message is not None:
                    busy = True
                    yield message

    def place(self, shard: int, slot: int, nbytes: int) -> None:
        """Do ahead what the machine's `received` does for this shard alone. Threads may do it for different shards at
        the same time."""
        self._streams[shard].place(slot, nbytes)
