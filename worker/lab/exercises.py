"""One table for each exercise, with a column for each library."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.global_communicator import connect
from omnireduce.runtime.rank.launcher_detection import Launch
from omnireduce.support.config import Config
from omnireduce.support.extras import install
from omnireduce.support.printing import make_console, short_count, short_time


class Messages(NamedTuple):
    """`send(x, peer)` and `receive(x, peer)` return when `x` is on its way, or there."""

    send: Callable[[Array, int], object]
    receive: Callable[[Array, int], object]


class Library(NamedTuple):
    """`messages`: those between two ranks; None where a library has none. `reduce(x)` is for rank 0; `allreduce(x)` for
    all."""

    name: str
    messages: Messages | None
    reduce: Callable[[Array], object]
    allreduce: Callable[[Array], object]
    barrier: Callable[[], object]


def make_service(comm: Communicator) -> Library:
    """omnireduce itself: it sums, and has no messages between two ranks."""
    return Library("omnireduce", None, comm.reduce, comm.allreduce, comm.barrier)


def make_gloo(launch: Launch) -> Library:
    """torch.distributed with gloo. Raises UsageError where torch is not installed, or does not know where to meet."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise UsageError(f"torch is not installed here; `make torch`, or {install('torch', 'torch')}") from None
    from omnireduce.torch.backend.launch_variables import set_torch_variables

    set_torch_variables()
    torch.set_num_threads(1)
    if launch.size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        try:
            dist.init_process_group("gloo")
        except ValueError as error:  # a variable is not set
            advice = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start this with torchrun"
            raise UsageError(f"gloo: {error}; {advice}") from None
    tensor: Callable[[Array], Any] = torch.from_numpy
    return Library(
        "gloo",
        Messages(lambda x, peer: dist.send(tensor(x), peer), lambda x, peer: dist.recv(tensor(x), peer)),
        lambda x: dist.reduce(tensor(x), 0),
        lambda x: dist.all_reduce(tensor(x)),
        dist.barrier,
    )


def make_mpi(launch: Launch) -> Library:
    """mpi4py. Raises UsageError where it is not installed, or where no mpirun started these ranks."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise UsageError(f"mpi4py is not installed here; {install('mpi4py', 'mpi')}") from None
    world: Any = MPI.COMM_WORLD
    if world.Get_size() != launch.size:
        raise UsageError(f"MPI has {world.Get_size()} ranks here, the launch {launch.size}: start it with mpirun")
    in_place: Any = MPI.IN_PLACE
    return Library(
        "mpi4py",
        Messages(lambda x, peer: world.Send(x, peer), lambda x, peer: world.Recv(x, peer)),
        lambda x: world.Reduce(in_place if launch.rank == 0 else x, x if launch.rank == 0 else None),
        lambda x: world.Allreduce(in_place, x),
        world.Barrier,
    )


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
    received, step = np.empty_like(x), 1
    while step < size:
        if rank % (2 * step):
            messages.send(x, rank - step)
            return
        if rank + step < size:
            messages.receive(received, rank + step)
            x += received
        step *= 2


def allreduce_by_messages(messages: Messages, rank: int, size: int, x: Array) -> None:
    """Add `x` of all ranks into everyone's, around a ring: each part goes around once to be added, and once to be
    copied. An even rank sends first, so that no two wait for each other."""
    if size == 1:
        return
    parts = np.array_split(x, size)
    for turn in range(2 * (size - 1)):
        out, target = parts[(rank - turn) % size], parts[(rank - turn - 1) % size]
        received = np.empty_like(target)
        _pass_on(messages, rank, size, out, received)
        if turn < size - 1:
            target += received
        else:
            target[:] = received


def _pass_on(messages: Messages, rank: int, size: int, out: Array, received: Array) -> None:
    """Send `out` to the right, and receive `received` from the left. The last rank of an odd ring is even beside rank
    0: it receives first."""
    right, left = (rank + 1) % size, (rank - 1) % size
    sends_first = rank % 2 == 0 and not (size % 2 and rank == size - 1)
    if sends_first:
        messages.send(out, right)
    messages.receive(received, left)
    if not sends_first:
        messages.send(out, right)


def timed(
    run: Callable[[Array], object], library: Library, make: Callable[[], Array], expected: float | None, rounds: int
) -> float:
    """The median time of `run` in seconds, over `rounds` rounds, after one that does not count.

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


Method = Callable[[Array], object]


def run_lab(config: Config, launch: Launch, sizes: Sequence[int], rounds: int) -> None:
    """Do all exercises with tensors of `sizes` elements of float32. Every rank calls this; rank 0 prints.

    A library that is not installed, or cannot start here, is left out, and rank 0 says so.
    """
    console = make_console(quiet=launch.rank != 0)
    with connect(config, rank=launch.rank, size=launch.size) as comm:
        libraries = [make_service(comm)]
        for make in (make_gloo, make_mpi):
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
    """One timed operation of a library. `sums`: the result is the sum of all ranks, at rank 0 or, with `on_all_ranks`,
    on all."""

    name: str
    library: Library
    method: Method
    sums: bool = True
    on_all_ranks: bool = False


def _exercises(libraries: Sequence[Library], launch: Launch) -> list[tuple[str, list[Column]]]:
    rank, size = launch.rank, launch.size
    echoes, reductions, sums = list[Column](), list[Column](), list[Column]()
    for library in libraries:
        if library.messages is not None:
            messages, name_by_messages = library.messages, f"{library.name}, by messages"
            echoes.append(Column(library.name, library, partial(echo, messages, rank), sums=False))
            reductions.append(Column(name_by_messages, library, partial(reduce_by_messages, messages, rank, size)))
            sums.append(
                Column(
                    name_by_messages, library, partial(allreduce_by_messages, messages, rank, size), on_all_ranks=True
                )
            )
    reductions += [Column(library.name, library, library.reduce) for library in libraries]
    sums += [Column(library.name, library, library.allreduce, on_all_ranks=True) for library in libraries]
    tables = [("a message and its echo", echoes), ("reduce", reductions), ("all-reduce", sums)]
    return tables if size > 1 and echoes else tables[1:]


def _time(launch: Launch, column: Column, elements: int, rounds: int) -> float:
    is_checked = column.sums and (column.on_all_ranks or launch.rank == 0)
    total = float(sum(range(1, launch.size + 1)))
    return timed(
        column.method, column.library, lambda: np.full(elements, launch.rank + 1, np.float32),
        total if is_checked else None, rounds,
    )  # fmt: skip
