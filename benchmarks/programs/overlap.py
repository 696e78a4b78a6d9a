"""The gain from reducing a matrix product while it is computed: a program's MatMul and AllReduce, one after the other
and overlapped, in chunks.

Two ranks on hosts with shaped links: there a rank waits for the link, and the processor is free. Between ranks that
share memory and processors nobody waits, and chunks cost more than they gain.

`python -m benchmarks.programs.overlap SOCKET OPTIONS` is one rank of it.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest.cases import MEMORY
from benchmarks.contest.shaped import group_between
from benchmarks.harness.group import group_here
from benchmarks.harness.orders import connect, serve_turns
from benchmarks.harness.verdicts import at_least, show_verdicts
from omnireduce.programs import Pipeline
from omnireduce.programs.layouts import bounds
from omnireduce.programs.library import model_parallel

RANKS, ROWS, COLUMNS, INNER = 2, 1024, 1024, 16384
RATE = "100mbit"  # with which a sum takes about as long as its product, on a processor of 2020
CHUNKS = (2, 4, 8)
SERIAL = "one after the other"
MIN_SPEEDUP = 1.1  # times as fast over shaped links, with the best number of chunks


class Rank:
    """One rank. All values are small whole numbers, so that sums are exact."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._comm = connect(options)
        start, stop = bounds(INNER, self._comm.rank, self._comm.size)
        rng = np.random.default_rng(1)
        x, weight = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((ROWS, INNER), (INNER, COLUMNS)))
        self._values: dict[str, Any] = {
            "x": np.ascontiguousarray(x[:, start:stop]),
            "weight": np.ascontiguousarray(weight[start:stop]),
            "bias": np.zeros(COLUMNS, np.float32),
            "residual": np.zeros((ROWS, COLUMNS), np.float32),
            "K": INNER,
            "t": 1,
        }
        self._expected = x @ weight
        self._pipelines = pipelines()

    def turn(self, variant: str) -> dict[str, float]:
        """Milliseconds of one run, of the product alone on one rank, and how many elements are wrong."""
        self._comm.barrier()
        begin = time.perf_counter()
        output = self._pipelines[variant].run(self._comm, self._values)["out"]
        ms = (time.perf_counter() - begin) * 1e3
        begin = time.perf_counter()
        np.matmul(self._values["x"], self._values["weight"])
        product_ms = (time.perf_counter() - begin) * 1e3
        return {"ms": ms, "product_ms": product_ms, "wrong": int(np.count_nonzero(output != self._expected))}


def pipelines() -> dict[str, Pipeline]:
    """The layer in each variant. Nothing is dropped."""
    serial = model_parallel(p=0.0)
    variants = {SERIAL: serial}
    for chunks in CHUNKS:
        variants[f"{chunks} chunks"] = serial.overlap(["product", "total"], chunks=chunks)
    return variants


def measure(console: Console, turns: int, rate: str) -> bool:
    """Let the variants take turns, in shared memory and over shaped links; return whether the aim is met. Raises
    PeerError where one fails or gives a wrong result, TestbedError where there can be no hosts with shaped links."""
    verdicts = []
    program = ("benchmarks.programs.overlap",)
    local_group = group_here(RANKS, program=program, carrier=MEMORY)
    for network, group in ((MEMORY, local_group), (rate, group_between(rate, RANKS, program=program))):
        with group as ranks:
            rows = ranks.in_turns(turns, {variant: {"variant": variant} for variant in pipelines()})
        ms = {variant: float(np.median([answer["ms"] for answer in answers])) for variant, answers in rows.items()}
        product_ms = float(np.median([answer["product_ms"] for answers in rows.values() for answer in answers]))
        title = f"{RANKS} ranks, {network}, carried by {ranks.carrier}"
        _show(console, f"{title}; the product alone takes {product_ms:.0f} ms", ms)
        best = min((variant for variant in ms if variant != SERIAL), key=lambda variant: ms[variant])
        if network == rate:
            verdicts.append(at_least(f"overlap, {rate}, {best}", ms[best], SERIAL, ms[SERIAL], MIN_SPEEDUP))
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def _show(console: Console, title: str, ms: dict[str, float]) -> None:
    table = Table(box=None)
    table.add_column(title)
    table.add_column("ms", justify="right")
    table.add_column("faster", justify="right")
    for variant, variant_ms in ms.items():
        table.add_row(variant, f"{variant_ms:.1f}", f"{ms[SERIAL] / variant_ms:.2f}")
    console.print(table, "")


if __name__ == "__main__":
    serve_turns(Rank)
