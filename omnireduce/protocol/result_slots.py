"""Result slots of a shard: the free ones, and for each other one the ranks that have not read it yet."""

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

    def release(self, rank: int, slot: int) -> bool:
        """`rank` has read a result; return whether it was the last to read it."""
        readers = self._readers[slot]
        if rank not in readers:
            return False
        readers.remove(rank)
        if not readers:
            self.free.append(slot)
        return not readers

    def release_all(self, rank: int) -> list[int]:
        """`rank` reads nothing any more; return the slots of which it was the last reader."""
        return [slot for slot in range(len(self._readers)) if self.release(rank, slot)]

    @property
    def unread(self) -> list[int]:
        """The slots that somebody has not read."""
        return [slot for slot, readers in enumerate(self._readers) if readers]

    @property
    def readers(self) -> list[int]:
        """The ranks that have not read something."""
        return sorted(set().union(*self._readers))
