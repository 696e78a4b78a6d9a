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
Print = Callable[[str], object]


@contextmanager
def start_context(settings: Settings) -> Iterator[tuple[Context, Print]]:
    """The context of this process, started, and what prints on rank 0 alone; signals stop it."""
    context = Context.instance().start(settings)
    print_line: Print = click.echo if context.communicator.rank == 0 else print_nothing
    with SignalThread(context, print_line):
        yield context, print_line


def print_nothing(text: str) -> None:
    """The other ranks say nothing."""


class SignalThread:
    """`with SignalThread(context, say):` ends the program with the status of the signal that came, if one did."""

    def __init__(self, context: Context, print_line: Print) -> None:
        self._context, self._print = context, print_line
        self._signals = queue.SimpleQueue[int | None]()  # a handler may use it, also on top of another one
        self._number = 0
        self._former_handlers: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)

    def __enter__(self) -> Self:
        self._print("Signal handler thread started. Waiting for any signals.")
        self._thread.start()
        self._former_handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        self._signals.put(None)
        self._thread.join()
        self._print("Signal handler thread is exiting")
        if self._number and (error is None or isinstance(error, OmniReduceError)):
            if self._number == signal.SIGINT:
                raise KeyboardInterrupt from None
            sys.exit(128 + self._number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signals.put(number)

    def _run(self) -> None:
        while (number := self._signals.get()) is not None:
            self._number = number
            self._print(f"Received {signal.Signals(number).name}. Stopping.")
            self._context.stop()


LENGTH = 1 << 20
SHIFT = 7919  # of the window from one to the next, in elements: a prime, so that all places come
LARGEST = 1000  # of what is drawn
MAX_LISTED = 5
DTYPES = {"int32": np.dtype(np.int32), "float": np.dtype(np.float32)}


@dataclass(frozen=True, slots=True)
class WrongElements:
    """The number of wrong elements, and the first of them: index, value and expected value."""

    count: int
    first: tuple[tuple[int, float, float], ...]

    def __str__(self) -> str:
        listed = "; ".join(f"[{index}] is {actual:g}, expected {expected:g}" for index, actual, expected in self.first)
        return f"{self.count} wrong elements, the first: {listed}"

    def plus(self, other: WrongElements) -> WrongElements:
        """Both together."""
        return WrongElements(self.count + other.count, (*self.first, *other.first)[:MAX_LISTED])


class Summands:
    """The tensors of `size` ranks, of `dtype`; random if there is a `seed`. `number` tells several tensors of a rank
    apart. `same_as_rank`: all ranks have the tensors of this rank."""

    def __init__(
        self, dtype: np.dtype[Any], size: int, seed: int | None = None, *, same_as_rank: int | None = None
    ) -> None:
        self.dtype, self._size, self._seed = dtype, size, seed
        self._cached_table = (-1, np.empty(0))  # rank, and its table
        self._sums = np.zeros(2 * LENGTH)
        for rank in range(size):
            self._sums += self._table(rank if same_as_rank is None else same_as_rank)

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
        if self._cached_table[0] != rank:
            self._cached_table = (rank, self._table(rank).astype(self.dtype))
        for part, window in _parts_and_windows(out, number):
            part[:] = self._cached_table[1][window]

    def wrong(self, result: Array, *, number: int = 0, rounds: int = 1, err: float = 0.0) -> WrongElements:
        """Compare with the sum of all ranks. In each of the `rounds` after the first, each rank has sent the sum of the
        round before. `err`: per cent of the expected value by which a float may differ, up or down."""
        factor = float(self._size) ** (rounds - 1)
        tolerance = 0.0 if self.dtype.kind == "i" else err / 100
        count, first, start = 0, list[tuple[int, float, float]](), 0
        for part, window in _parts_and_windows(result, number):
            expected, actual = self._sums[window] * factor, part.astype(np.float64)
            is_right = np.abs(actual - expected) <= tolerance * np.abs(expected)  # NaN is not
            wrong_indices = np.flatnonzero(~is_right)
            count += len(wrong_indices)
            first += [
                (start + int(i), float(actual[i]), float(expected[i])) for i in wrong_indices[: MAX_LISTED - len(first)]
            ]
            start += len(part)
        return WrongElements(count, tuple(first))

    def max_rounds(self) -> int | None:
        """The most rounds in place whose sums the type still holds; None: no limit."""
        info: Any = np.iinfo(self.dtype) if self.dtype.kind == "i" else np.finfo(self.dtype)
        if self._size == 1:
            return None
        largest, rounds = float(np.abs(self._sums).max()), 0
        while largest <= float(info.max):
            largest, rounds = largest * self._size, rounds + 1
        return rounds


def _parts_and_windows(tensor: Array, number: int) -> Iterator[tuple[Array, slice]]:
    """The parts of a tensor, each with its place in a table."""
    flat = tensor.reshape(-1)
    for turn, start in enumerate(range(0, flat.size, LENGTH), number * 31):
        part, begin = flat[start : start + LENGTH], turn * SHIFT % LENGTH
        yield part, slice(begin, begin + part.size)


def summands_of(comm: Communicator | DummyCommunicator, dtype: str, seed: int | None) -> Summands:
    """The summands of the ranks of a context. The dummy backend sums as if all ranks had the tensors of this one."""
    same_as_rank = comm.rank if isinstance(comm, DummyCommunicator) else None
    return Summands(DTYPES[dtype], comm.size, seed, same_as_rank=same_as_rank)


class Cell(msgspec.Struct, frozen=True):
    """`goodput_gbps`: of all jobs together. `wrong`: elements, on all ranks."""

    threads: int
    tensor_numel: int
    goodput_gbps: float
    job_ns: Distribution
    wrong: int


def run_table(
    settings: Settings, options: BenchmarkOptions, threads: Sequence[int], sizes: Sequence[int], json_path: str | None
) -> int:
    """Run the benchmark in each cell; return how many elements were wrong. The context starts anew for
    each number of threads. Rank 0 prints, and writes to `json_path`."""
    context, cells = Context.instance(), list[Cell]()
    for count in threads:
        config = override_config(settings.config, {"transport.threads": count}, source="--threads")
        with context.start(settings._replace(config=config)), SignalThread(context, print_nothing):
            cells += [_run_cell(context, replace(options, tensor_numel=size), count) for size in sizes]
    comm = context.communicator
    console = make_console(quiet=comm.rank != 0)
    shards = "1 shard" if comm.shards == 1 else f"{comm.shards} shards"
    transport = carriers_text(comm.statistics().carried)  # of the last number of threads
    title = f"goodput, Gbit/s: {comm.size} ranks, {shards}, {transport}, {options.tensor_type}"
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


def _run_cell(context: Context, options: BenchmarkOptions, threads: int) -> Cell:
    groups, wrong = run_groups(context, options, print_nothing)
    goodput = options.tensor_numel * 32 * options.num_jobs / sum(group.ns for group in groups)
    return Cell(threads, options.tensor_numel, goodput, ns_of_jobs(groups), wrong)


def trend(cells: Sequence[Cell]) -> str:
    """The change of the goodput from the fewest threads to the most, and from the smallest tensor to the largest."""
    goodput = {(cell.threads, cell.tensor_numel): cell.goodput_gbps for cell in cells}
    threads, sizes = sorted({cell.threads for cell in cells}), sorted({cell.tensor_numel for cell in cells})
    by_threads = [goodput[threads[-1], size] / goodput[threads[0], size] for size in sizes]
    by_size = [goodput[count, sizes[-1]] / goodput[count, sizes[0]] for count in threads]
    return (
        f"trend: from {threads[0]} to {threads[-1]} threads {_range_text(by_threads)} the goodput; "
        f"from {short_count(sizes[0])} to {short_count(sizes[-1])} elements {_range_text(by_size)}"
    )


def _range_text(factors: Sequence[float]) -> str:
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

    def __init__(self, options: BenchmarkOptions, comm: Communicator | DummyCommunicator) -> None:
        self._options, self._rank, size = options, comm.rank, comm.size
        self._summands = summands_of(comm, options.tensor_type, options.seed if options.random else None)
        max_rounds = self._summands.max_rounds()
        if options.inplace and max_rounds is not None and options.rounds > max_rounds:
            raise UsageError(
                f"{options.rounds} jobs one after the other in place: with {size} workers {options.tensor_type} holds "
                f"the sums of {max_rounds}; set --inplace 0, a smaller --sync-every or --num-warmup-jobs, or more "
                "--num-tensors"
            )
        self.inputs = [self._allocate() for _ in range(options.num_tensors)]
        self.outs: list[Array | None] = [None if options.inplace else self._allocate() for _ in self.inputs]
        for number, tensor in enumerate(self.inputs):
            self._summands.fill(self._rank, tensor, number)

    def _allocate(self) -> Array:
        return np.empty(self._options.tensor_numel, self._summands.dtype)

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
            rounds = len(range(number, jobs, self._options.num_tensors))
            if rounds:
                result, rounds = (tensor, rounds) if out is None else (out, 1)
                total = total.plus(self._summands.wrong(result, number=number, rounds=rounds, err=self._options.err))
        return total


def run_benchmark(settings: Settings, options: BenchmarkOptions, json_path: str | None) -> int:
    """Run the benchmark on all ranks; return how many elements were wrong, the same number on all of them. Rank 0
    prints, and writes to `json_path`. Raises UsageError, ConfigError, and what ends a job of the service."""
    with start_context(settings) as (context, print_line):
        comm = context.communicator
        with context:
            if json_path is not None and comm.rank == 0:
                check_writable(json_path)
            groups, wrong = run_groups(context, options, print_line)
            job_ns = ns_of_jobs(groups)
            print_line(_table(options.tensor_numel, job_ns))
            if options.dump_stats:
                print_line(str(context.stats))
            print_line("Cleaning up.")
        if json_path is not None and comm.rank == 0:
            report = Report(options, comm.size, carriers_text(comm.statistics().carried), groups, job_ns, wrong)
            write_json(msgspec.json.encode(report), json_path)
    return wrong


def run_groups(context: Context, options: BenchmarkOptions, print_line: Print) -> tuple[list[Group], int]:
    """Warm up, then time every group, and check its tensors if asked to. Also returns the number of wrong elements on
    all ranks together."""
    comm = context.communicator
    tensors = Tensors(options, comm)
    print_line(f"Submitting {options.num_warmup_jobs} warmup jobs.")
    if options.num_warmup_jobs:
        _time_group(context, tensors, range(options.num_warmup_jobs))
    print_line(f"Warmup finished.\nSubmitting {options.num_jobs} jobs.")
    groups, wrong = list[Group](), WrongElements(0, ())
    for jobs in options.groups():
        tensors.refresh()
        groups.append(_time_group(context, tensors, jobs))
        print_line(str(groups[-1]))
        if options.verify:
            wrong = wrong.plus(tensors.wrong(len(jobs)))
    print_line("All jobs finished.")
    return groups, verdict(comm, wrong, print_line) if options.verify else 0


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


def verdict(comm: Communicator | DummyCommunicator, wrong: WrongElements, print_line: Print) -> int:
    """The number of wrong elements on all ranks together. Rank 0 prints whether there are any, and each rank lists its
    own."""
    print_line("Verifying final results")
    wrong_on_all_ranks = int(comm.allreduce(np.array([wrong.count]), name="wrong")[0])
    if wrong.count:
        click.echo(f"rank {comm.rank}: {wrong}", err=True)
    print_line("Verification failed." if wrong_on_all_ranks else "Data verified successfully.")
    return wrong_on_all_ranks


def ns_of_jobs(groups: Sequence[Group]) -> Distribution:
    """The times of jobs: where several were waited for together, each has an equal part."""
    return Distribution.of([group.ns / (group.last - group.first + 1) for group in groups])


def named_statistics(distribution: Distribution) -> list[tuple[str, float]]:
    """The statistics that are printed, each with its name."""
    values = (distribution.min, distribution.max, distribution.median, distribution.mean, distribution.stdev)
    return list(zip(("Min", "Max", "Median", "Mean", "Std dev"), values, strict=True))


def _table(numel: int, distribution: Distribution) -> str:
    *lines, (last, deviation) = named_statistics(distribution)
    times = [f"{name} {ns:.0f} ns {numel * BITS / ns:.6g} Gbps" for name, ns in lines]
    return "\n".join(["", *times, f"{last} {deviation:.0f} ns"])
