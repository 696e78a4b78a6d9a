"""One table for each exercise, with a column for each library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from rich.table import Table

from omnireduce.config import Config
from omnireduce.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.printing import make_console, short_count, short_time
from omnireduce.runtime.rank.environment import Launch
from omnireduce.runtime.rank.world import connect
from omnireduce.worker.lab.exercises import allreduce_by_messages, echo, reduce_by_messages, timed
from omnireduce.worker.lab.libraries import Library, gloo, mpi, service

Method = Callable[[Array], object]


def run_lab(config: Config, launch: Launch, sizes: Sequence[int], rounds: int) -> None:
    """Do all exercises with tensors of `sizes` elements of float32. Every rank calls this; rank 0 prints.

    A library that is not installed, or cannot start here, is left out, and rank 0 says so.
    """
    console = make_console(quiet=launch.rank != 0)
    with connect(config, rank=launch.rank, size=launch.size) as comm:
        libraries = [service(comm)]
        for make in (gloo, mpi):
            try:
                libraries.append(make(launch))
            except UsageError as error:
                console.print(f"left out: {error}")
        for title, columns in _exercises(libraries, launch):
            table = Table(title=f"{title}, {launch.size} ranks, milliseconds", title_justify="left")
            table.add_column("bytes", justify="right")
            for column in columns:
                table.add_column(column.name, justify="right")
            for size in sizes:
                cells = [_time(launch, column, size, rounds) for column in columns]
                table.add_row(short_count(4 * size), *(short_time(1000 * seconds) for seconds in cells))
            console.print(table)


class Column(NamedTuple):
    """One timed operation of a library. `sums`: the result is the sum of all ranks, at rank 0 or, with `everywhere`, on
    all."""

    name: str
    library: Library
    way: Method
    sums: bool = True
    everywhere: bool = False


def _exercises(libraries: Sequence[Library], launch: Launch) -> list[tuple[str, list[Column]]]:
    rank, size = launch.rank, launch.size
    echoes, reductions, sums = list[Column](), list[Column](), list[Column]()
    for library in libraries:
        if library.messages is not None:
            by_hand, by_messages = library.messages, f"{library.name}, by messages"
            echoes.append(Column(library.name, library, partial(echo, by_hand, rank), sums=False))
            reductions.append(Column(by_messages, library, partial(reduce_by_messages, by_hand, rank, size)))
            sums.append(
                Column(by_messages, library, partial(allreduce_by_messages, by_hand, rank, size), everywhere=True)
            )
    reductions += [Column(library.name, library, library.reduce) for library in libraries]
    sums += [Column(library.name, library, library.allreduce, everywhere=True) for library in libraries]
    tables = [("a message and its echo", echoes), ("reduce", reductions), ("all-reduce", sums)]
    return tables if size > 1 and echoes else tables[1:]


def _time(launch: Launch, column: Column, elements: int, rounds: int) -> float:
    checked = column.sums and (column.everywhere or launch.rank == 0)
    total = float(sum(range(1, launch.size + 1)))
    return timed(
        column.way, column.library, lambda: np.full(elements, launch.rank + 1, np.float32),
        total if checked else None, rounds,
    )  # fmt: skip
