"""The cost of comparing a program's inputs between ranks: runs of one program that compare, and runs that do not, take
turns.

The program is SGD on a gradient without zeros. All ranks have the weights. A comparison reads them once more.

`python -m benchmarks.programs.inputs SOCKET OPTIONS` is one rank of it.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest.cases import MEMORY
from benchmarks.harness.group import group_here
from benchmarks.harness.orders import connect, serve_turns
from benchmarks.harness.verdicts import at_most, show_verdicts
from omnireduce.programs.library import schedules

RANKS = 2
SIZES = {"4 KiB": (1 << 10, 200), "1 MiB": (1 << 18, 20), "64 MiB": (1 << 24, 1)}  # elements, and runs of a turn
TRANSPORT_SETTINGS = {MEMORY: (), "tcp": ("transport.kind=tcp", "transport.host_exchange=off")}
COMPARING, BELIEVING = "compared", "believed"
MAX_RATIO = {"4 KiB": 2.5, "1 MiB": 1.75, "64 MiB": 1.25}  # times as long


class Rank:
    """One rank."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._comm = connect(options)
        self._pipeline = schedules("sgd")["ar-c"]
        self._values: dict[str, dict[str, Any]] = {
            size: {"g": np.ones(elements, np.float32), "w": np.zeros(elements, np.float32), "lr": 1.0}
            for size, (elements, _) in SIZES.items()
        }

    def turn(self, size: str, variant: str) -> dict[str, float]:
        """Milliseconds of a run, and how many weights are wrong."""
        values, (_, runs) = self._values[size], SIZES[size]
        before = values["w"][0]
        self._comm.barrier()
        begin = time.perf_counter()
        for _ in range(runs):
            self._pipeline.run(self._comm, values, compare=variant == COMPARING)
        ms = (time.perf_counter() - begin) * 1e3 / runs
        return {"ms": ms, "wrong": int(np.count_nonzero(values["w"] != before - runs * self._comm.size))}


def measure(console: Console, turns: int) -> bool:
    """Let both variants take turns, where ranks exchange in memory and over TCP; return whether the aims are met.
    Raises PeerError where one fails or gives a wrong result."""
    verdicts = []
    for transport in TRANSPORT_SETTINGS:
        with group_here(
            RANKS, *TRANSPORT_SETTINGS[transport], program=("benchmarks.programs.inputs",), carrier=transport
        ) as ranks:
            for size in SIZES:
                rows = ranks.in_turns(
                    turns, {variant: {"size": size, "variant": variant} for variant in (COMPARING, BELIEVING)}
                )
                ms = {
                    variant: float(np.median([row["ms"] for row in variant_rows]))
                    for variant, variant_rows in rows.items()
                }
                _show(console, f"{RANKS} ranks, carried by {ranks.carrier}, {size}", ms)
                name = f"inputs, {transport}, {size}"
                verdicts.append(at_most(name, ms[COMPARING], BELIEVING, ms[BELIEVING], MAX_RATIO[size]))
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def _show(console: Console, title: str, ms: dict[str, float]) -> None:
    table = Table(box=None)
    table.add_column(title)
    table.add_column("ms", justify="right")
    for variant, variant_ms in ms.items():
        table.add_row(f"inputs are {variant}", f"{variant_ms:.3f}")
    console.print(table, "")


if __name__ == "__main__":
    serve_turns(Rank)
