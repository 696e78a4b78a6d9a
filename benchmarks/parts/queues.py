"""The cost of submission by name: many small tensors against a large one, the hook of a gradient, and the gradient of
an embedding, summed by its rows, against the all-gathers of Horovod.

An all-gather as Horovod does it: one of all ranks' indices and one of their values, over MPI; then each rank adds what
all have sent to its weights. The service adds equal rows first, sums them by number, and each rank adds those once.
Ranks look up words whose frequency follows Zipf's law, as in a text.

`python -m benchmarks.parts.queues KIND SOCKET OPTIONS` is one rank of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest.cases import MEMORY
from benchmarks.contest.shaped import group_between
from benchmarks.harness.carriers import count_socket_bytes
from benchmarks.harness.environments import HERE
from benchmarks.harness.group import Group, PeerError, group_here, socket_path
from benchmarks.harness.orders import Order, join, serve
from benchmarks.harness.verdicts import Verdict, at_least, at_most, below, show_verdicts
from benchmarks.peak_memory import forget_peak, memory_mib
from omnireduce.core.dtypes import Array
from omnireduce.data_parallel import session

PROGRAM = ("benchmarks.parts.queues",)
COUNT, BYTES = 200, 1024
MANY, GROUPED, ONE = f"{COUNT} of {BYTES} bytes, by name", f"{COUNT} of {BYTES} bytes, in a group", "one of all bytes"
SMALL = (MANY, GROUPED, ONE)
WITH, WITHOUT = "with hooks", "without"
LAYERS = 100  # of two parameters each
SUMMED, GATHERED = "summed by row", "gathered (two all-gathers)"
WORDS, WIDTH, LOOKED_UP = 1_000_000, 64, 32_768
ALIKE, TIMED, MAX_STEPS = 8, 8, 1000
GROWING = 1024, 4096, 16384, 65536  # looked up, one after the other
MAX_RATIO, MAX_HOOK_US, MIN_SPEEDUP, MAX_MEMORY_RATIO = 3.0, 30.0, 3.0, 4.0


class Named:
    """A rank that submits by name."""

    def __init__(self, options: dict[str, Any]) -> None:
        join(options)
        self._small = [np.ones(BYTES // 4, np.float32) for _ in range(COUNT)]
        self._large = np.ones(COUNT * BYTES // 4, np.float32)
        self._variants = {MANY: self._reduce_each, GROUPED: self._reduce_grouped, ONE: self._reduce_large}

    def turn(self, variant: str) -> dict[str, float]:
        """Milliseconds: the median of several steps, once they are known to be alike. That takes longer each time that
        a program has changed what it does."""
        times: list[float] = []
        for _ in range(MAX_STEPS):
            session.queue().barrier()
            before, begin = session.queue().statistics().rounds, time.perf_counter()
            self._variants[variant]()
            took_s, rounds = time.perf_counter() - begin, session.queue().statistics().rounds
            times = [*times, took_s * 1e3] if rounds == before else []
            if len(times) == ALIKE + TIMED:
                break
        return {"ms": float(np.median(times[ALIKE:]))}

    def _reduce_each(self) -> None:
        tasks = [session.queue().allreduce_async(x, name=f"w{i}", op="max") for i, x in enumerate(self._small)]
        for task in tasks:
            task.wait()

    def _reduce_grouped(self) -> None:
        session.queue().grouped_allreduce_async(self._small, name="group", op="max").wait()

    def _reduce_large(self) -> None:
        session.queue().allreduce_async(self._large, name="large", op="max").wait()


class Hooked:
    """A rank that trains a deep and narrow model."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        import omnireduce.torch as hvd

        torch.set_num_threads(1)
        join(options)
        self._x, self._models = torch.ones(1, 8), dict[str, tuple[Any, Any]]()
        for variant in (WITH, WITHOUT):
            net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(LAYERS)))
            plain = torch.optim.SGD(net.parameters(), lr=0.0)
            self._models[variant] = net, hvd.DistributedOptimizer(plain) if variant == WITH else plain

    def turn(self, variant: str) -> dict[str, float]:
        """Milliseconds of a backward pass, without what comes after it."""
        (net, optimizer), times = self._models[variant], []
        for _ in range(ALIKE + TIMED):
            optimizer.zero_grad()
            loss = net(self._x).sum()
            session.queue().barrier()
            begin = time.perf_counter()
            loss.backward()
            times.append((time.perf_counter() - begin) * 1e3)
            optimizer.step()
        return {"ms": float(np.median(times[ALIKE:]))}


class Embedding:
    """A rank with an embedding, under mpirun."""

    def __init__(self) -> None:
        session.init()
        self.rank = session.rank()
        self._weights = np.zeros((WORDS, WIDTH), np.float32)
        self._step = 0

    def turn(self, variant: str, seed: int) -> dict[str, Any]:
        """Milliseconds of one exchange and update, how much memory it took at its peak, and a digest of the weights."""
        self._weights[:] = 0
        indices, values = self._gradient(seed, self.rank)
        session.queue().barrier()
        forget_peak()
        with count_socket_bytes() as carried:
            before, begin = memory_mib("VmRSS"), time.perf_counter()
            if variant == SUMMED:
                task = session.queue().allreduce_rows_async(indices, values, WORDS, name="embedding")
                numbers, rows = task.wait()
                self._weights[numbers] += rows
            else:
                numbers, rows = self._gather_rows(indices, values)
                np.add.at(self._weights, numbers, rows)
            ms, peak = (time.perf_counter() - begin) * 1e3, memory_mib("VmHWM") - before
        total = float(self._weights.sum(dtype=np.float64))
        answer = {"ms": ms, "peak_mib": peak, "rows": len(numbers), "sum": total}
        return answer | ({"carried": carried} if variant == GATHERED else {})

    def memory(self) -> dict[str, float]:
        """The memory of a sum at its peak, as a multiple of the bytes of all ranks' rows together, its result and
        copies of the gradient included: the most of several sums, few rows first, since the service keeps the memory
        that it has."""
        gradients, largest_ratio = [self._gradient(0, self.rank, count) for count in GROWING], 0.0
        session.queue().barrier()
        before = memory_mib("VmRSS")
        for count, (indices, values) in zip(GROWING, gradients, strict=True):
            forget_peak()
            _, rows = session.queue().allreduce_rows_async(indices, values, WORDS, name=f"{count} looked up").wait()
            largest_ratio = max(largest_ratio, (memory_mib("VmHWM") - before) / (rows.nbytes / 2**20))
        return {"of_union": largest_ratio}

    @staticmethod
    def _gradient(seed: int, rank: int, count: int = LOOKED_UP) -> tuple[Array, Array]:
        """The gradient of a step: whole numbers, whose sums are exact in any order."""
        rng = np.random.default_rng([seed, rank])
        indices = np.minimum(rng.zipf(1.2, count), WORDS) - 1
        return indices, rng.integers(-3, 4, (count, WIDTH)).astype(np.float32)

    @staticmethod
    def _gather_rows(indices: Array, values: Array) -> tuple[Array, Array]:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        counts = np.array(world.allgather(len(indices)))
        numbers, rows = np.empty(counts.sum(), indices.dtype), np.empty((counts.sum(), WIDTH), np.float32)
        world.Allgatherv(indices, (numbers, counts))
        world.Allgatherv(values, (rows, counts * WIDTH))
        return numbers, rows


def measure(console: Console, turns: int, rate: str) -> bool:
    """Let the variants take turns; return whether the aims are met. Raises PeerError where one fails or gives a wrong
    sum, TestbedError where there can be no hosts with shaped links, ImportError without torch."""
    import torch  # noqa: F401  the ranks have the same environment

    between = group_between(rate, 2, program=(*PROGRAM, "named"), shards=1)
    verdicts = [_small(console, MEMORY, turns, _group_on_this_host("named")), _small(console, rate, turns, between)]
    verdicts += [_hooks(console, turns), *_embedding(console, turns)]
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def _medians(group: Group, variants: tuple[str, ...], turns: int, **options: object) -> dict[str, dict[str, float]]:
    """Each variant's measurements on the slowest rank: the median of all turns except the first, which warms up."""
    rows: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for turn in range(turns + 1):
        for variant in variants:
            answers = group.tell(do="turn", variant=variant, **({"seed": turn} if "seed" in options else {}))
            rows[variant].append(max(answers, key=lambda row: row["ms"]))
        if "seed" in options and len({row[-1]["sum"] for row in rows.values()}) > 1:
            raise PeerError("embedding", "gave wrong sums")
    return {
        variant: {key: float(np.median([row[key] for row in variant_rows[1:]])) for key in variant_rows[0]}
        for variant, variant_rows in rows.items()
    }


def _small(console: Console, network: str, turns: int, ranks: AbstractContextManager[Group]) -> Verdict:
    with ranks as group:
        medians = _medians(group, SMALL, turns)
    title = f"two ranks, {network}, carried by {group.carrier}"
    _show(console, title, {variant: {"ms": row["ms"]} for variant, row in medians.items()})
    return at_most(f"small tensors, {network}", medians[MANY]["ms"], ONE, medians[ONE]["ms"], MAX_RATIO)


def _hooks(console: Console, turns: int) -> Verdict:
    with _group_on_this_host("hooked") as group:
        medians = _medians(group, (WITH, WITHOUT), turns)
    _show(
        console,
        f"backward of {2 * LAYERS} parameters, two ranks, carried by {group.carrier}",
        {variant: {"ms": row["ms"]} for variant, row in medians.items()},
    )
    us = (medians[WITH]["ms"] - medians[WITHOUT]["ms"]) * 1e3 / (2 * LAYERS)
    return below("hook of a gradient", us, MAX_HOOK_US, "us")


def _embedding(console: Console, turns: int) -> list[Verdict]:
    with tempfile.TemporaryDirectory(prefix="omnireduce-bench-") as folder:
        rank_command = [
            str(HERE.python),
            "-m",
            "benchmarks.parts.queues",
            "embedding",
            socket_path(folder, "embedding"),
            "{}",
        ]
        command = [str(Path(HERE.python).parent / "mpirun"), "-n", "4", *rank_command]
        with Group("embedding", 4, [command], folder, carrier={SUMMED: MEMORY}) as group:
            of_union = max(row["of_union"] for row in group.tell(do="memory"))
            medians = _medians(group, (SUMMED, GATHERED), turns, seed=True)
    title = f"an embedding of {WORDS} words of {WIDTH}, {LOOKED_UP} looked up on each of four ranks"
    _show(console, f"{title}; carried by {group.carrier_of(SUMMED)}, gathered by {group.carrier_of(GATHERED)}", medians)
    ours, theirs = medians[SUMMED], medians[GATHERED]
    return [
        at_least("step of an embedding", ours["ms"], GATHERED, theirs["ms"], MIN_SPEEDUP),
        at_least("its memory", ours["peak_mib"], GATHERED, theirs["peak_mib"], 1.0, "MiB"),
        below("its memory, of the bytes of all ranks' rows", of_union, MAX_MEMORY_RATIO, "times"),
    ]


def _show(console: Console, title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    table = Table(box=None)
    table.add_column(title)
    names = [name for name in next(iter(rows.values())) if name != "sum"]
    for name in names:
        table.add_column(name, justify="right")
    for variant, row in rows.items():
        table.add_row(variant, *(f"{row[name]:.4g}" for name in names))
    console.print(table, "")


def _group_on_this_host(kind: str) -> AbstractContextManager[Group]:
    return group_here(2, program=(*PROGRAM, kind), carrier=MEMORY)


def _start(kind: str, options: dict[str, Any]) -> tuple[int, Mapping[str, Order]]:
    if kind == "embedding":
        embedding = Embedding()
        return embedding.rank, {"turn": embedding.turn, "memory": embedding.memory}
    rank = Hooked(options) if kind == "hooked" else Named(options)
    return options["rank"], {"turn": rank.turn}


if __name__ == "__main__":
    kind, path, text = sys.argv[1:]
    serve(path, lambda: _start(kind, json.loads(text)))
