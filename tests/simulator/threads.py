"""Threads of a simulated worker: their calls end in an order that the seed gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from omnireduce.protocol.collective.shard_threads import ThreadPool

T = TypeVar("T")


class SimThreads(ThreadPool):
    """Every tensor is divided, however small."""

    worth_bytes = 0

    def __init__(self, random: Random) -> None:
        self._random = random

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        order = self._random.sample(range(len(calls)), len(calls))
        results = {at: calls[at]() for at in order}
        return [results[at] for at in range(len(calls))]

    def close(self) -> None:
        """There is no thread."""


def drawn_threads(random: Random) -> SimThreads | None:
    """Every second worker has threads."""
    return SimThreads(random) if random.random() < 0.5 else None
