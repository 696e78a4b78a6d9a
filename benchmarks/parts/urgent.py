"""The time of a small all-reduce beside a large one, with a channel of its own and without.

`python -m benchmarks.parts.urgent SOCKET OPTIONS` is one rank of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest.cases import MEMORY
from benchmarks.harness.group import PeerError, group_here
from benchmarks.harness.orders import connect, serve_turns
from benchmarks.harness.verdicts import below, show_verdicts

RANKS, SMALL, LARGE = 2, 1 << 10, 1 << 24  # elements of float32: 4 KiB and 64 MiB
TRANSPORT_SETTINGS = {
    MEMORY: (),
    "shm": ("transport.host_exchange=off",),
    "tcp": ("transport.host_exchange=off", "transport.kind=tcp"),
}
URGENT_BYTES = {"behind it": 0, "with a channel of its own": 65536}
MAX_MS = 3.0
PROGRAM = ("benchmarks.parts.urgent",)


class Rank:
    """One rank, which makes both at the same time. All values are whole numbers, so that sums are exact."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._comm = connect(options)
        self._small, self._large = np.empty(SMALL, np.float32), np.empty(LARGE, np.float32)

    def turn(self) -> dict[str, float]:
        """Milliseconds of the small one alone, of the small one beside the large one, and of that."""
        comm, small, large = self._comm, self._small, self._large
        small[:], large[:] = 1, 2
        alone_ms = self._small_ms()
        comm.barrier()
        begin = time.perf_counter()
        handle = comm.allreduce_async(large)
        small[:] = 1
        beside_ms = self._small_ms()
        handle.wait()
        large_ms = (time.perf_counter() - begin) * 1e3
        wrong = int(np.count_nonzero(small != comm.size) + np.count_nonzero(large != 2 * comm.size))
        return {"alone_ms": alone_ms, "beside_ms": beside_ms, "large_ms": large_ms, "wrong": wrong}

    def _small_ms(self) -> float:
        begin = time.perf_counter()
        self._comm.allreduce(self._small)
        return (time.perf_counter() - begin) * 1e3


def measure(console: Console, turns: int) -> bool:
    """Let both kinds of jobs take turns, for each way that blocks may go; return whether all aims are met. Raises
    PeerError where one fails, or finds a wrong sum."""
    verdicts = []
    for transport, sets in TRANSPORT_SETTINGS.items():
        with contextlib.ExitStack() as stack:
            groups = {
                name: stack.enter_context(
                    group_here(RANKS, *sets, f"protocol.urgent_bytes={nbytes}", program=PROGRAM, carrier=transport)
                )
                for name, nbytes in URGENT_BYTES.items()
            }
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in groups}
            for _ in range(turns):
                for name, group in groups.items():
                    rows[name] += group.tell(do="turn")
        carriers = {name: group.carrier for name, group in groups.items()}
        _show(console, transport, rows, carriers)
        if any(row["wrong"] for job_rows in rows.values() for row in job_rows):
            raise PeerError(transport, "gave wrong sums")
        last = [row["beside_ms"] for row in list(rows.values())[-1]]
        verdicts.append(below(f"{transport}: 4 KiB beside 64 MiB", float(np.median(last)), MAX_MS, "ms"))
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def _show(
    console: Console, transport: str, rows: dict[str, list[dict[str, float]]], carriers: Mapping[str, str]
) -> None:
    table = Table(box=None)
    table.add_column(f"{transport}, {RANKS} ranks, ms")
    for title in ("4 KiB alone", "4 KiB beside", "p90", "64 MiB", "carried by", "wrong"):
        table.add_column(title, justify="right")
    for name, job_rows in rows.items():
        alone, beside, large = ([row[key] for row in job_rows] for key in ("alone_ms", "beside_ms", "large_ms"))
        numbers = np.median(alone), np.median(beside), np.percentile(beside, 90), np.median(large)
        wrong = str(sum(int(row["wrong"]) for row in job_rows))
        table.add_row(name, *(f"{number:.2f}" for number in numbers), carriers[name], wrong)
    console.print(table, "")


if __name__ == "__main__":
    serve_turns(Rank)
