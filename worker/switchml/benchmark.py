"""SwitchML's benchmark: all-reduces of one size, in groups, each group timed from its first start to its last end."""

from __future__ import annotations

import math
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, Self

import click
import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from omnireduce.core.dtypes import Array
from omnireduce.errors import OmniReduceError, UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.support.config import override_config
from omnireduce.support.files.output import check_writable, write_json
from omnireduce.support.printing import carriers_text, make_console, short_count, times_text
from omnireduce.switchml import Context, Distribution, Settings
from omnireduce.switchml.dummy import DummyCommunicator

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Say = Callable[[str], object]


@contextmanager
def started(settings: Settings) -> Iterator[tuple[Context, Say]]:
    """The context of this process, started, and what prints on rank 0 alone; signals stop it."""
    context = Context.instance().start(settings)
    say: Say = click.echo if context.communicator.rank == 0 else nothing
    with SignalThread(context, say):
        yield context, say


def nothing(text: str) -> None:
    """The other ranks say nothing."""


class SignalThread:
    """`with SignalThread(context, say):` ends the program with the status of the signal that came, if one did."""

    def __init__(self, context: Context, say: Say) -> None:
        self._context, self._say = context, say
        self._came = queue.SimpleQueue[int | None]()  # a handler may use it, also on top of another one
        self._number = 0
        self._before: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)

    def __enter__(self) -> Self:
        self._say("Signal handler thread started. Waiting for any signals.")
        self._thread.start()
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._came.put(None)
        self._thread.join()
        self._say("Signal handler thread is exiting")
        if self._number and (error is None or isinstance(error, OmniReduceError)):
            if self._number == signal.SIGINT:
                raise KeyboardInterrupt from None
            sys.exit(128 + self._number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came.put(number)

    def _run(self) -> None:
        while (number := self._came.get()) is not None:
            self._number = number
            self._say(f"Received {signal.Signals(number).name}. Stopping.")
            self._context.stop()


LENGTH = 1 << 20
SHIFT = 7919  # of the window from one to the next, in elements: a prime, so that all places come
LARGEST = 1000  # of what is drawn
SHOWN = 5
DTYPES = {"int32": np.dtype(np.int32), "float": np.dtype(np.float32)}


@dataclass(frozen=True, slots=True)
class WrongElements:
    """The number of wrong elements, and the first of them: index, value and expected value."""

    count: int
    first: tuple[tuple[int, float, float], ...]

    def __str__(self) -> str:
        listed = "; ".join(f"[{index}] is {actual:g}, expected {expected:g}" for index, actual, expected in self.first)
        return f"{self.count} wrong elements, the first: {listed}"

    def beside(self, other: WrongElements) -> WrongElements:
        """Both together."""
        return WrongElements(self.count + other.count, (*self.first, *other.first)[:SHOWN])


class Summands:
    """The tensors of `size` ranks, of `dtype`; random if there is a `seed`. `number` tells several tensors of a rank
    apart. `alike`: all ranks have the tensors of this rank."""

    def __init__(self, dtype: np.dtype[Any], size: int, seed: int | None = None, *, alike: int | None = None) -> None:
        self.dtype, self._size, self._seed = dtype, size, seed
        self._own = (-1, np.empty(0))  # rank, and its table
        self._sums = np.zeros(2 * LENGTH)
        for rank in range(size):
            self._sums += self._table(rank if alike is None else alike)

    def _table(self, rank: int) -> NDArray[np.float64]:
        """The table of a rank, twice in a row, so that every window of it is contiguous."""
        if self._seed is None:
            values = np.arange(LENGTH) % LARGEST + (rank + 1.0)
        else:
            drawn = np.random.default_rng([self._seed, rank]).integers(-LARGEST, LARGEST, LENGTH, endpoint=True)
            values = drawn / (1 if self.dtype.kind == "i" else 1024)
        return np.concatenate([values, values])

    def fill(self, rank: int, out: Array, number: int = 0) -> None:
        """Write a tensor of a rank to `out`."""
        if self._own[0] != rank:
            self._own = (rank, self._table(rank).astype(self.dtype))
        for part, place in _parts(out, number):
            part[:] = self._own[1][place]

    def wrong(self, result: Array, *, number: int = 0, rounds: int = 1, err: float = 0.0) -> WrongElements:
        """Compare with the sum of all ranks. In each of the `rounds` after the first, each rank has sent the sum of the
        round before. `err`: per cent of the expected value by which a float may differ, up or down."""
        factor = float(self._size) ** (rounds - 1)
        allowed = 0.0 if self.dtype.kind == "i" else err / 100
        count, first, start = 0, list[tuple[int, float, float]](), 0
        for part, place in _parts(result, number):
            expected, actual = self._sums[place] * factor, part.astype(np.float64)
            is_right = np.abs(actual - expected) <= allowed * np.abs(expected)  # NaN is not
            at = np.flatnonzero(~is_right)
            count += len(at)
            first += [(start + int(i), float(actual[i]), float(expected[i])) for i in at[: SHOWN - len(first)]]
            start += len(part)
        return WrongElements(count, tuple(first))

    def most_rounds(self) -> int | None:
        """The most rounds in place whose sums the type still holds; None: no limit."""
        info: Any = np.iinfo(self.dtype) if self.dtype.kind == "i" else np.finfo(self.dtype)
        if self._size == 1:
            return None
        largest, rounds = float(np.abs(self._sums).max()), 0
        while largest <= float(info.max):
            largest, rounds = largest * self._size, rounds + 1
        return rounds


def _parts(tensor: Array, number: int) -> Iterator[tuple[Array, slice]]:
    """The parts of a tensor, each with its place in a table."""
    flat = tensor.reshape(-1)
    for turn, start in enumerate(range(0, flat.size, LENGTH), number * 31):
        part, place = flat[start : start + LENGTH], turn * SHIFT % LENGTH
        yield part, slice(place, place + part.size)


def summands_of(comm: Communicator | DummyCommunicator, dtype: str, seed: int | None) -> Summands:
    """The summands of the ranks of a context. The dummy backend sums as if all ranks had the tensors of this one."""
    alike = comm.rank if isinstance(comm, DummyCommunicator) else None
    return Summands(DTYPES[dtype], comm.size, seed, alike=alike)


class Cell(msgspec.Struct, frozen=True):
    """`goodput_gbps`: of all jobs together. `wrong`: elements, on all ranks."""

    threads: int
    tensor_numel: int
    goodput_gbps: float
    job_ns: Distribution
    wrong: int


def run_table(
    settings: Settings, asked: BenchmarkOptions, threads: Sequence[int], sizes: Sequence[int], json_path: str | None
) -> int:
    """Run the benchmark in each cell; return how many elements were wrong. The context starts anew for
    each number of threads. Rank 0 prints, and writes to `json_path`."""
    context, cells = Context.instance(), list[Cell]()
    for count in threads:
        config = override_config(settings.config, {"transport.threads": count}, source="--threads")
        with context.start(settings._replace(config=config)), SignalThread(context, nothing):
            cells += [_cell(context, replace(asked, tensor_numel=size), count) for size in sizes]
    comm = context.communicator
    console = make_console(quiet=comm.rank != 0)
    shards = "1 shard" if comm.shards == 1 else f"{comm.shards} shards"
    transport = carriers_text(comm.statistics().carried)  # of the last number of threads
    title = f"goodput, Gbit/s: {comm.size} ranks, {shards}, {transport}, {asked.tensor_type}"
    table = Table(title=title, title_justify="left")
    table.add_column("elements", justify="right")
    for count in threads:
        table.add_column(f"{count} threads" if count > 1 else "1 thread", justify="right")
    for size in sizes:
        row = [cell for cell in cells if cell.tensor_numel == size]
        table.add_row(short_count(size), *(f"{cell.goodput_gbps:.4g}" for cell in row))
    console.print(table)
    console.print(trend(cells))
    if json_path is not None and comm.rank == 0:
        write_json(msgspec.json.encode(cells), json_path)
    return sum(cell.wrong for cell in cells)


def _cell(context: Context, asked: BenchmarkOptions, threads: int) -> Cell:
    groups, wrong = run_groups(context, asked, nothing)
    goodput = asked.tensor_numel * 32 * asked.num_jobs / sum(group.ns for group in groups)
    return Cell(threads, asked.tensor_numel, goodput, ns_of_jobs(groups), wrong)


def trend(cells: Sequence[Cell]) -> str:
    """The change of the goodput from the fewest threads to the most, and from the smallest tensor to the largest."""
    goodput = {(cell.threads, cell.tensor_numel): cell.goodput_gbps for cell in cells}
    threads, sizes = sorted({cell.threads for cell in cells}), sorted({cell.tensor_numel for cell in cells})
    by_threads = [goodput[threads[-1], size] / goodput[threads[0], size] for size in sizes]
    by_size = [goodput[count, sizes[-1]] / goodput[count, sizes[0]] for count in threads]
    return (
        f"trend: from {threads[0]} to {threads[-1]} threads {_span(by_threads)} the goodput; "
        f"from {short_count(sizes[0])} to {short_count(sizes[-1])} elements {_span(by_size)}"
    )


def _span(factors: Sequence[float]) -> str:
    return f"{times_text(min(factors))} to {times_text(max(factors))}"


BITS = 32  # of an element


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """The values of the flags. `tensor_type` is a key of `DTYPES`; `err` is in per cent; of `sync_every` 0 is all jobs;
    `num_tensors`: how many tensors the jobs of a group take in turn."""

    tensor_numel: int
    tensor_type: str
    num_jobs: int
    num_warmup_jobs: int
    inplace: bool
    verify: bool
    sync_every: int
    err: float
    random: bool
    seed: int
    dump_stats: bool
    num_tensors: int

    def groups(self) -> Iterator[range]:
        """The numbers of the jobs of each group. The last one may be shorter."""
        step = self.sync_every or self.num_jobs
        for first in range(0, self.num_jobs, step):
            yield range(first, min(first + step, self.num_jobs))

    @property
    def rounds(self) -> int:
        """The most jobs of a group, or of the warm-up, that take the same tensor."""
        longest = max(self.num_warmup_jobs, *(len(group) for group in self.groups()))
        return math.ceil(longest / self.num_tensors)


class Group(msgspec.Struct, frozen=True):
    """Jobs from `first` to `last` that were waited for together. `ns`: of all; `goodput_gbps`: bits of the tensors of
    one rank / time."""

    first: int
    last: int
    ns: int
    goodput_gbps: float

    def __str__(self) -> str:
        label = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"Job(s) #{label}# finished. Duration: #{self.ns}# ns Goodput: #{self.goodput_gbps:.6g}# Gbps."


class Report(msgspec.Struct, frozen=True):
    """The JSON output. `job_ns`: of one job each."""

    asked: BenchmarkOptions
    world_size: int
    transport: str
    groups: list[Group]
    job_ns: Distribution
    wrong: int


class Tensors:
    """The memory that the jobs of one rank use, and the check of what is in it. Raises UsageError for a series of jobs
    in place whose sums the type does not hold."""

    def __init__(self, asked: BenchmarkOptions, comm: Communicator | DummyCommunicator) -> None:
        self._asked, self._rank, size = asked, comm.rank, comm.size
        self._summands = summands_of(comm, asked.tensor_type, asked.seed if asked.random else None)
        most = self._summands.most_rounds()
        if asked.inplace and most is not None and asked.rounds > most:
            raise UsageError(
                f"{asked.rounds} jobs one after the other in place: with {size} workers {asked.tensor_type} holds the "
                f"sums of {most}; set --inplace 0, a smaller --sync-every or --num-warmup-jobs, or more --num-tensors"
            )
        self.inputs = [self._allocate() for _ in range(asked.num_tensors)]
        self.outs: list[Array | None] = [None if asked.inplace else self._allocate() for _ in self.inputs]
        for number, tensor in enumerate(self.inputs):
            self._summands.fill(self._rank, tensor, number)

    def _allocate(self) -> Array:
        return np.empty(self._asked.tensor_numel, self._summands.dtype)

    def refresh(self) -> None:
        """Before a group: remove the results of earlier groups from the tensors."""
        for number, (tensor, out) in enumerate(zip(self.inputs, self.outs, strict=True)):
            if out is None:
                self._summands.fill(self._rank, tensor, number)
            else:
                out.fill(-1)

    def wrong(self, jobs: int) -> WrongElements:
        """Check the results of a group of this number of jobs."""
        total = WrongElements(0, ())
        for number, (tensor, out) in enumerate(zip(self.inputs, self.outs, strict=True)):
            turns = len(range(number, jobs, self._asked.num_tensors))
            if turns:
                summed, rounds = (tensor, turns) if out is None else (out, 1)
                total = total.beside(self._summands.wrong(summed, number=number, rounds=rounds, err=self._asked.err))
        return total


def run_benchmark(settings: Settings, asked: BenchmarkOptions, json_path: str | None) -> int:
    """Run the benchmark on all ranks; return how many elements were wrong, the same number on all of them. Rank 0
    prints, and writes to `json_path`. Raises UsageError, ConfigError, and what ends a job of the service."""
    with started(settings) as (context, say):
        comm = context.communicator
        with context:
            if json_path is not None and comm.rank == 0:
                check_writable(json_path)
            groups, wrong = run_groups(context, asked, say)
            job_ns = ns_of_jobs(groups)
            say(_table(asked.tensor_numel, job_ns))
            if asked.dump_stats:
                say(str(context.stats))
            say("Cleaning up.")
        if json_path is not None and comm.rank == 0:
            report = Report(asked, comm.size, carriers_text(comm.statistics().carried), groups, job_ns, wrong)
            write_json(msgspec.json.encode(report), json_path)
    return wrong


def run_groups(context: Context, asked: BenchmarkOptions, say: Say) -> tuple[list[Group], int]:
    """Warm up, then time every group, and check its tensors if asked to. Also returns the number of wrong elements on
    all ranks together."""
    comm = context.communicator
    tensors = Tensors(asked, comm)
    say(f"Submitting {asked.num_warmup_jobs} warmup jobs.")
    if asked.num_warmup_jobs:
        _time_group(context, tensors, range(asked.num_warmup_jobs))
    say(f"Warmup finished.\nSubmitting {asked.num_jobs} jobs.")
    groups, wrong = list[Group](), WrongElements(0, ())
    for jobs in asked.groups():
        tensors.refresh()
        groups.append(_time_group(context, tensors, jobs))
        say(str(groups[-1]))
        if asked.verify:
            wrong = wrong.beside(tensors.wrong(len(jobs)))
    say("All jobs finished.")
    return groups, verdict(comm, wrong, say) if asked.verify else 0


def _time_group(context: Context, tensors: Tensors, jobs: range) -> Group:
    """Time a group of jobs on this rank. All ranks begin together."""
    context.communicator.barrier(name="group")
    begin = time.perf_counter_ns()
    for number in range(len(jobs)):
        turn = number % len(tensors.inputs)
        context.allreduce_async(tensors.inputs[turn], tensors.outs[turn])
    context.wait_for_all_jobs()
    ns = time.perf_counter_ns() - begin
    return Group(jobs[0], jobs[-1], ns, tensors.inputs[0].size * BITS * len(jobs) / ns)


def verdict(comm: Communicator | DummyCommunicator, wrong: WrongElements, say: Say) -> int:
    """The number of wrong elements on all ranks together. Rank 0 prints whether there are any, and each rank lists its
    own."""
    say("Verifying final results")
    everywhere = int(comm.allreduce(np.array([wrong.count]), name="wrong")[0])
    if wrong.count:
        click.echo(f"rank {comm.rank}: {wrong}", err=True)
    say("Verification failed." if everywhere else "Data verified successfully.")
    return everywhere


def ns_of_jobs(groups: Sequence[Group]) -> Distribution:
    """The times of jobs: where several were waited for together, each has an equal part."""
    return Distribution.of([group.ns / (group.last - group.first + 1) for group in groups])


def named(found: Distribution) -> list[tuple[str, float]]:
    """The statistics that are printed, each with its name."""
    values = (found.min, found.max, found.median, found.mean, found.stdev)
    return list(zip(("Min", "Max", "Median", "Mean", "Std dev"), values, strict=True))


def _table(numel: int, each: Distribution) -> str:
    *lines, (last, deviation) = named(each)
    times = [f"{name} {ns:.0f} ns {numel * BITS / ns:.6g} Gbps" for name, ns in lines]
    return "\n".join(["", *times, f"{last} {deviation:.0f} ns"])
