"""The gain from codecs: the same all-reduce as float32 and with each codec, on shaped links and over shared memory.

`python -m benchmarks.parts.codecs SOCKET OPTIONS` is one rank of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest.cases import BLOCK, SIZES
from benchmarks.contest.shaped import group_between
from benchmarks.harness.group import Group, group_here
from benchmarks.harness.orders import connect, serve_turns
from benchmarks.harness.verdicts import Verdict, at_least, show_verdicts
from omnireduce.kernels.codecs.table import BUILT_IN, NONE

RANKS, DENSITIES = 2, (1.0, 0.1)
EXACT = (NONE, "bf16", "fp16", "int8", "qsgd")  # what sends small integers as they are
LARGEST = 63  # of them: the sum of two ranks still is one
SHAPED, SHM = "dedicated", "shm"
MIN_SPEEDUP = {SHAPED: 3.4, SHM: 1.0}  # times as fast as float32 is int8, of a dense tensor
Rows = dict[tuple[float, str], list[dict[str, float]]]  # by density and codec, each rank's of each turn


class Rank:
    """One rank. All values are small integers, so that sums are exact with some codecs."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._comm = connect(options)
        self._tensor = np.empty(SIZES["100 MiB"], np.float32)
        self._tensors = {density: self._tensors_of_ranks(density) for density in DENSITIES}
        self._sums = {density: sum(tensors) for density, tensors in self._tensors.items()}

    def _tensors_of_ranks(self, density: float) -> list[Any]:
        """Each rank's tensor."""
        tensors = []
        for rank in range(self._comm.size):
            rng = np.random.default_rng([rank, int(1000 * density)])
            values = rng.integers(-LARGEST, LARGEST + 1, self._tensor.size, np.int8).astype(np.float32)
            values.reshape(-1, BLOCK)[rng.random(values.size // BLOCK) >= density] = 0
            tensors.append(values)
        return tensors

    def turn(self, density: float, codec: str) -> dict[str, float]:
        """Milliseconds of one all-reduce, bytes that it sent, and how far its result is from the sum: as a share of the
        sum's norm."""
        comm, tensor = self._comm, self._tensor
        tensor[:] = self._tensors[density][comm.rank]
        comm.barrier()
        before, begin = comm.statistics().sent_bytes, time.perf_counter()
        comm.allreduce(tensor, codec=codec)
        ms, sent = (time.perf_counter() - begin) * 1e3, comm.statistics().sent_bytes - before
        expected = self._sums[density]
        error = float(np.linalg.norm(tensor - expected) / np.linalg.norm(expected))
        wrong = np.count_nonzero(tensor != expected) if codec in EXACT else 0
        return {"ms": ms, "sent": sent, "distance": error, "wrong": int(wrong)}


def measure(console: Console, turns: int, rate: str) -> bool:
    """Let the codecs take turns in one job, on each transport; return whether all aims are met. Raises PeerError where
    one fails or gives a wrong sum, TestbedError where there can be no hosts with shaped links."""
    verdicts: list[Verdict] = []
    pairs = itertools.product(DENSITIES, (NONE, *BUILT_IN))
    orders = {(density, codec): {"density": density, "codec": codec} for density, codec in pairs}
    for network in (SHAPED, SHM):
        with _group(network, rate) as group:
            rows = group.in_turns(turns, orders)
        _show(console, f"{f'{network} {rate}' if network == SHAPED else network}, carried by {group.carrier}", rows)
        ms = {codec: _median(rows[1.0, codec], "ms") for codec in ("int8", NONE)}
        verdicts.append(at_least(f"{network}, dense: int8", ms["int8"], "float32", ms[NONE], MIN_SPEEDUP[network]))
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def _median(rows: Sequence[dict[str, float]], key: str) -> float:
    return float(np.median([row[key] for row in rows]))


def _group(network: str, rate: str) -> AbstractContextManager[Group]:
    program = ("benchmarks.parts.codecs",)
    if network == SHAPED:
        return group_between(rate, RANKS, program=program)
    sets = ("transport.host_exchange=off", "transport.kind=shm")
    return group_here(RANKS, *sets, program=program, carrier=SHM, shards=RANKS)


def _show(console: Console, title: str, rows: Rows) -> None:
    for density in DENSITIES:
        table = Table(box=None)
        table.add_column(f"{title}, {RANKS} ranks, 100 MiB, density {density:g}")
        for column in ("ms", "p90", "times as fast", "MB up", "error"):
            table.add_column(column, justify="right")
        float32_ms = _median(rows[density, NONE], "ms")
        for codec in (NONE, *BUILT_IN):
            codec_rows = rows[density, codec]
            ms, p90 = _median(codec_rows, "ms"), float(np.percentile([row["ms"] for row in codec_rows], 90))
            numbers = (f"{ms:.1f}", f"{p90:.1f}", f"{float32_ms / ms:.2f}", f"{_median(codec_rows, 'sent') / 1e6:.2f}")
            table.add_row(codec, *numbers, f"{_median(codec_rows, 'distance'):.2g}")
        console.print(table, "")


if __name__ == "__main__":
    serve_turns(Rank)
