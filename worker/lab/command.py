"""One table for each exercise, with a column for each library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from rich.table import Table

from omnireduce.config import Config
from omnireduce.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.printing import make_console, short_count, short_time
from omnireduce.runtime.member.communicator import Communicator
from omnireduce.runtime.member.launcher import Launch, job_name
from worker.lab.exercises import allreduce_by_messages, echo, reduce_by_messages, timed
from worker.lab.libraries import Library, gloo, mpi, service

Way = Callable[[Array], object]


def run_lab(config: Config, launch: Launch, sizes: Sequence[int], rounds: int) -> None:
    """Do all exercises with tensors of `sizes` elements of float32. Every rank calls this; rank 0 prints.

    A library that is not installed is left out, and rank 0 says so.
    """
    console = make_console(quiet=launch.rank != 0)
    comm = Communicator(
        config, rank=launch.rank, size=launch.size, local_rank=launch.local_rank, local_size=launch.local_size,
        job=job_name(config, launch.job),
    )  # fmt: skip
    with comm:
        found = [service(comm)]
        for make in (gloo, mpi):
            try:
                found.append(make(launch))
            except UsageError as error:
                console.print(f"left out: {error}")
        for title, columns in _exercises(found, launch):
            table = Table(title=f"{title}, {launch.size} ranks, milliseconds", title_justify="left")
            table.add_column("bytes", justify="right")
            for name, *_ in columns:
                table.add_column(name, justify="right")
            for size in sizes:
                cells = [_time(launch, column, size, rounds) for column in columns]
                table.add_row(short_count(4 * size), *(short_time(1000 * seconds) for seconds in cells))
            console.print(table)


Column = tuple[str, Library, Way, bool, bool]  # its name; the library; what is timed; it sums; on all ranks


def _exercises(libraries: Sequence[Library], launch: Launch) -> list[tuple[str, list[Column]]]:
    rank, size = launch.rank, launch.size
    with_messages = [each for each in libraries if each.send is not None]
    messages: list[Column] = [(each.name, each, partial(echo, each, rank), False, False) for each in with_messages]
    reductions: list[Column] = [
        (f"{each.name}, by messages", each, partial(reduce_by_messages, each, rank, size), True, False)
        for each in with_messages
    ]
    reductions += [(each.name, each, each.reduce, True, False) for each in libraries]
    sums: list[Column] = [
        (f"{each.name}, by messages", each, partial(allreduce_by_messages, each, rank, size), True, True)
        for each in with_messages
    ]
    sums += [(each.name, each, each.allreduce, True, True) for each in libraries]
    return [
        *([("a message and its echo", messages)] if size > 1 and messages else []),
        ("reduce", reductions),
        ("all-reduce", sums),
    ]


def _time(launch: Launch, column: Column, elements: int, rounds: int) -> float:
    _, library, way, is_sum, is_everywhere = column
    checked = is_sum and (is_everywhere or launch.rank == 0)
    total = float(sum(range(1, launch.size + 1)))
    return timed(
        way, library, lambda: np.full(elements, launch.rank + 1, np.float32), total if checked else None, rounds
    )
