"""The result slots of a shard: those that are free, and who has not read the others yet."""

from __future__ import annotations

from collections.abc import Iterable


class ResultSlots:
    """`count` slots."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self._readers: list[set[int]] = [set() for _ in range(count)]

    def send(self, slot: int, ranks: Iterable[int]) -> None:
        """A result has been sent to these ranks."""
        self._readers[slot] = set(ranks)

    def release(self, rank: int, slot: int) -> None:
        """`rank` has read a result."""
        readers = self._readers[slot]
        if rank in readers:
            readers.remove(rank)
            if not readers:
                self.free.append(slot)

    def release_all(self, rank: int) -> None:
        """`rank` reads nothing any more."""
        for slot in range(len(self._readers)):
            self.release(rank, slot)

    @property
    def unread(self) -> list[int]:
        """The slots that somebody has not read."""
        return [slot for slot, readers in enumerate(self._readers) if readers]

    @property
    def readers(self) -> list[int]:
        """The ranks that have not read something."""
        return sorted(set().union(*self._readers))
