"""The exercises: how long a message takes; reduce and all-reduce made of messages between two ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.worker.lab.libraries import Library, Messages


def echo(messages: Messages, rank: int, x: Array) -> None:
    """Rank 0 sends `x` to rank 1, and gets it back. The others do nothing."""
    if rank == 0:
        messages.send(x, 1)
        messages.receive(x, 1)
    elif rank == 1:
        messages.receive(x, 0)
        messages.send(x, 0)


def reduce_by_messages(messages: Messages, rank: int, size: int, x: Array) -> None:
    """Add `x` of all ranks into rank 0's, along a tree: in each round half of the ranks that are left send theirs to
    the other half."""
    other, step = np.empty_like(x), 1
    while step < size:
        if rank % (2 * step):
            messages.send(x, rank - step)
            return
        if rank + step < size:
            messages.receive(other, rank + step)
            x += other
        step *= 2


def allreduce_by_messages(messages: Messages, rank: int, size: int, x: Array) -> None:
    """Add `x` of all ranks into everyone's, around a ring: each part goes around once to be added, and once to be
    copied. An even rank sends first, so that no two wait for each other."""
    if size == 1:
        return
    parts = np.array_split(x, size)
    for turn in range(2 * (size - 1)):
        out, into = parts[(rank - turn) % size], parts[(rank - turn - 1) % size]
        arrived = np.empty_like(into)
        _pass_on(messages, rank, size, out, arrived)
        if turn < size - 1:
            into += arrived
        else:
            into[:] = arrived


def _pass_on(messages: Messages, rank: int, size: int, out: Array, arrived: Array) -> None:
    """Send `out` to the right, and receive `arrived` from the left. The last rank of an odd ring is even beside rank 0:
    it receives first."""
    right, left = (rank + 1) % size, (rank - 1) % size
    sends_first = rank % 2 == 0 and not (size % 2 and rank == size - 1)
    if sends_first:
        messages.send(out, right)
    messages.receive(arrived, left)
    if not sends_first:
        messages.send(out, right)


def timed(
    run: Callable[[Array], object], library: Library, make: Callable[[], Array], expected: float | None, rounds: int
) -> float:
    """The median time of `run` in seconds, of so many rounds, and one before them that does not count.

    `expected`: what each element of the result must be; None for no check. Raises AssertionError if it is not.
    """
    times = []
    for _ in range(rounds + 1):
        x = make()
        library.barrier()
        begin = time.perf_counter()
        run(x)
        times.append(time.perf_counter() - begin)
        assert expected is None or np.all(x == expected), f"{library.name}: {x[:3]}, expected {expected}"
    return statistics.median(times[1:])
