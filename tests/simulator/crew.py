"""Threads of a simulated worker: their calls end in an order that the seed gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TypeVar

from omnireduce.protocol.division import Crew

T = TypeVar("T")


class SimThreads(Crew):
    """Divides every tensor, however small."""

    worth_bytes = 0

    def __init__(self, random: Random) -> None:
        self._random = random

    def run(self, calls: Sequence[Callable[[], T]]) -> Iterator[T]:
        order = self._random.sample(range(len(calls)), len(calls))
        return iter([calls[at]() for at in order])

    def close(self) -> None:
        """There is no thread."""


def drawn_crew(random: Random) -> SimThreads | None:
    """Every second worker has threads."""
    return SimThreads(random) if random.random() < 0.5 else None
