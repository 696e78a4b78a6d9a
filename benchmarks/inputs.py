"""The cost of comparing a program's inputs between ranks: runs of one program that compare, and runs that do not, take
turns.

The program is SGD on a gradient without zeros. All ranks have the weights. A comparison reads them once more.

`python -m benchmarks.inputs SOCKET OPTIONS` is one rank of it.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import omnireduce as omni
from benchmarks.cases import MEMORY
from benchmarks.group import Group, PeerError, daemon, service_group
from benchmarks.orders import serve_turns
from benchmarks.outcomes import show_verdicts
from benchmarks.targets import at_most
from omnireduce.programs.library import schedules

RANKS = 2
SIZES = {"4 KiB": (1 << 10, 200), "1 MiB": (1 << 18, 20), "64 MiB": (1 << 24, 1)}  # elements, and runs of a turn
PLACES = {MEMORY: (), "tcp": ("transport.kind=tcp", "transport.host_exchange=off")}
COMPARING, BELIEVING = "compared", "believed"
MOST = {"4 KiB": 2.5, "1 MiB": 1.75, "64 MiB": 1.25}  # times as long


class Rank:
    """One rank."""

    def __init__(self, options: dict[str, Any]) -> None:
        config = omni.load_config(overrides=options["set"], environ={})
        self._comm = omni.connect(config, job=options["job"], rank=options["rank"], size=options["size"])
        self._pipeline = schedules("sgd")["ar-c"]
        self._values: dict[str, dict[str, Any]] = {
            size: {"g": np.ones(elements, np.float32), "w": np.zeros(elements, np.float32), "lr": 1.0}
            for size, (elements, _) in SIZES.items()
        }

    def turn(self, size: str, way: str) -> dict[str, float]:
        """Milliseconds of a run, and how many weights are wrong."""
        values, (_, runs) = self._values[size], SIZES[size]
        before = values["w"][0]
        self._comm.barrier()
        begin = time.perf_counter()
        for _ in range(runs):
            self._pipeline.run(self._comm, values, compare=way == COMPARING)
        ms = (time.perf_counter() - begin) * 1e3 / runs
        return {"ms": ms, "wrong": int(np.count_nonzero(values["w"] != before - runs * self._comm.size))}


def measure(console: Console, turns: int) -> bool:
    """Let both ways take turns, where ranks exchange in memory and over TCP; return whether the aims are met. Raises
    PeerError where one fails or gives a wrong result."""
    verdicts = []
    for place in PLACES:
        with _group(place) as ranks:
            for size in SIZES:
                rows: dict[str, list[float]] = {COMPARING: [], BELIEVING: []}
                for turn in range(turns + 1):
                    for way, times in rows.items():
                        both = ranks.tell(do="turn", size=size, way=way)
                        if any(answer["wrong"] for answer in both):
                            raise PeerError(way, "gave a wrong result")
                        if turn:  # the first one warms up
                            times.append(max(answer["ms"] for answer in both))
                ms = {way: float(np.median(times)) for way, times in rows.items()}
                _show(console, f"{RANKS} ranks, carried by {ranks.carrier}, {size}", ms)
                name = f"inputs, {place}, {size}"
                verdicts.append(at_most(name, ms[COMPARING], BELIEVING, ms[BELIEVING], MOST[size]))
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def _show(console: Console, title: str, ms: dict[str, float]) -> None:
    table = Table(box=None)
    table.add_column(title)
    table.add_column("ms", justify="right")
    for way, own in ms.items():
        table.add_row(f"inputs are {way}", f"{own:.3f}")
    console.print(table, "")


@contextlib.contextmanager
def _group(place: str) -> Iterator[Group]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-"))
        addresses = stack.enter_context(daemon(1)).addresses
        program = ("benchmarks.inputs",)
        yield stack.enter_context(
            service_group(RANKS, folder, addresses, *PLACES[place], program=program, carrier=place)
        )


if __name__ == "__main__":
    serve_turns(Rank)
