"""The gain from a second thread of a rank: one rank, with shards that cost nothing, and with shards on one processor.

`python -m benchmarks.threads SOCKET OPTIONS` is the rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import omnireduce as omni
from benchmarks.carriers import NOTHING
from benchmarks.cases import BLOCK, SIZES
from benchmarks.group import Group, PeerError, Servers, daemon, service_group
from benchmarks.orders import serve_turns
from benchmarks.outcomes import show_verdicts
from benchmarks.rank_alone import rank_alone
from benchmarks.targets import at_least
from omnireduce.core.dtypes import Array

ALONE, WAYS, DENSITIES, SHARDS = "the rank alone", ("shm", "tcp"), (1.0, 0.1, 0.01), 4
THREADS = (1, 2)
LEAST = 1.0  # times as fast
# of each number of threads and each density, ms: every turn, the rank's work in it, and that of the shards
Times = dict[tuple[int, float], list[tuple[float, float, float]]]


class Rank:
    """The rank. All values are whole numbers, so that sums are exact."""

    def __init__(self, options: dict[str, Any]) -> None:
        config = omni.load_config(overrides=options["set"], environ={})
        self._comm = omni.connect(config, job=options["job"], rank=options["rank"], size=options["size"])
        self._tensor = np.empty(SIZES["100 MiB"], np.float32)

    def turn(self, density: float) -> dict[str, float]:
        """Milliseconds of one all-reduce, and those of the processor in this process."""
        return timed(self._comm.allreduce, self._tensor, density)


def timed(all_reduce: Callable[[Array], object], tensor: Array, density: float) -> dict[str, float]:
    """Milliseconds of an all-reduce of one rank, and those of the processor in this process."""
    blocks = tensor.reshape(-1, BLOCK)
    blocks[:] = 0
    blocks[np.random.default_rng(1).random(len(blocks)) < density] = 3
    expected = float(tensor.sum(dtype=np.float64))
    begin, used = time.perf_counter(), time.process_time()
    all_reduce(tensor)
    ms, used_ms = (time.perf_counter() - begin) * 1e3, (time.process_time() - used) * 1e3
    return {"ms": ms, "used_ms": used_ms, "wrong": int(tensor.sum(dtype=np.float64) != expected)}


def measure(console: Console, turns: int) -> bool:
    """Let a rank of one thread and one of two take turns; return whether two are faster when the tensor is dense.
    Raises PeerError where one fails, or finds a wrong sum."""
    verdicts = []
    table = Table(box=None)
    works = "rank works", "shards work"
    for title in ("1 rank, 100 MiB", "1 thread ms", "2 threads ms", "ratio", "at most", *works, "carried by"):
        table.add_column(title, justify="right")
    for way in (ALONE, *WAYS):
        times, carrier = (_times_alone(turns), NOTHING) if way == ALONE else _times(way, turns)
        for density in DENSITIES:
            (one, works, shards_work), (two, _, _) = (np.median(times[threads, density], 0) for threads in THREADS)
            name, most = f"{way}, density {density:g}", one / ((works + shards_work) / 2)
            numbers = (one, two, one / two, most, works, shards_work)
            table.add_row(name, *(f"{number:.2f}" for number in numbers), carrier)
            verdicts += [at_least(f"{name}: 2 threads", two, "1 thread", one, LEAST)] if density == 1 else []
    console.print(table, "at most: two processors share the work of the rank and of the shards\n")
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def _times_alone(turns: int) -> Times:
    times: Times = {}
    tensor = np.empty(SIZES["100 MiB"], np.float32)
    with contextlib.ExitStack() as stack:
        ranks = {threads: stack.enter_context(rank_alone(threads, SHARDS)) for threads in THREADS}
        for _, density, (threads, rank) in itertools.product(range(turns), DENSITIES, ranks.items()):
            row = timed(rank.all_reduce, tensor, density)
            if row["wrong"]:
                raise PeerError(ALONE, "gave wrong sums")
            times.setdefault((threads, density), []).append((row["ms"], row["used_ms"], 0.0))
    return times


def _times(way: str, turns: int) -> tuple[Times, str]:
    """Also what has carried the tensors."""
    times: Times = {}
    with contextlib.ExitStack() as stack:
        entrants = {threads: _entrant(stack, way, threads) for threads in THREADS}
        for _, density, (threads, (shards, rank)) in itertools.product(range(turns), DENSITIES, entrants.items()):
            before = shards.cpu_seconds()
            (row,) = rank.tell(do="turn", density=density)
            if row["wrong"]:
                raise PeerError(way, "gave wrong sums")
            shards_ms = (shards.cpu_seconds() - before) * 1e3
            times.setdefault((threads, density), []).append((row["ms"], row["used_ms"], shards_ms))
    [carrier] = {rank.carrier for _, rank in entrants.values()}
    return times, carrier


def _entrant(stack: contextlib.ExitStack, way: str, threads: int) -> tuple[Servers, Group]:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-"))
    processor = str(max(os.sched_getaffinity(0)))
    shards = stack.enter_context(daemon(SHARDS, prefix=["taskset", "-c", processor]))
    sets = ("transport.host_exchange=off", f"transport.kind={way}", f"transport.threads={threads}")
    group = service_group(1, folder, shards.addresses, *sets, program=("benchmarks.threads",), carrier=way)
    return shards, stack.enter_context(group)


if __name__ == "__main__":
    serve_turns(Rank)
