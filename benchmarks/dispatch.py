"""What it costs to ask torch for a collective of omnireduce, beside the collective itself.

`torchrun --nproc-per-node 2 -m benchmarks.dispatch` does small all-reduces of both in turns, and checks them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.environments import ROOT, python_of
from benchmarks.group import THREADS, PeerError
from benchmarks.outcomes import show_verdicts
from benchmarks.targets import below
from omnireduce.dtypes import Array

RANKS, ELEMENTS = 2, 1024
IN_A_ROW = 100  # calls
OURS, TORCH = "omnireduce", "torch"
AT_ONCE, LATER = "waited for at once", "async, then waited for"
MOST_US = 60.0
RUN_S = 300.0  # the longest that a run may take


def measure_dispatch(turns: int) -> str:
    """Run the ranks in the environment of gloo, which has torch; return what they print. Raises PeerError where they
    fail, RuntimeError where torch cannot be installed."""
    torchrun = python_of("gloo").parent / "torchrun"
    command = [str(torchrun), "--standalone", "--nproc-per-node", str(RANKS), "-m", "benchmarks.dispatch", str(turns)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | THREADS, capture_output=True, text=True, timeout=RUN_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise PeerError(TORCH, f"took longer than {RUN_S:g} s") from None
    if done.returncode:
        raise PeerError(TORCH, f"failed: {done.stderr[-500:]}")
    return done.stdout


class Way(NamedTuple):
    """A way to replace `array` by the mean of those of all ranks."""

    library: str
    name: str
    call: Callable[[], object]
    array: Array


def _ways() -> list[Way]:
    import torch
    import torch.distributed as dist

    import omnireduce
    import omnireduce.torch

    communicator, array, tensor = omnireduce.init(), np.empty(ELEMENTS, np.float32), torch.empty(ELEMENTS)
    dist.init_process_group("omnireduce")
    calls = {
        (OURS, AT_ONCE): lambda: communicator.allreduce(array, op="mean"),
        (TORCH, AT_ONCE): lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG),
        (OURS, LATER): lambda: communicator.allreduce_async(array, op="mean").wait(),
        (TORCH, LATER): lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True).wait(),
    }
    return [Way(*names, call, array if names[0] == OURS else tensor.numpy()) for names, call in calls.items()]


def _time_us(way: Way, rank: int) -> float:
    """Microseconds of one call, out of many in a row; the result is checked."""
    way.array[:] = 2 * rank
    begin = time.perf_counter()
    for _ in range(IN_A_ROW):
        way.call()
    found = (time.perf_counter() - begin) / IN_A_ROW * 1e6
    if not (way.array == RANKS - 1).all():
        raise SystemExit(f"{way.library}, {way.name}: a wrong mean")
    return found


def _show(ways: Sequence[Way], times: Sequence[Sequence[float]]) -> None:
    """A table of the medians, and what torch's calls take more."""
    console, table = Console(width=120), Table(box=None)
    for title in (f"us of an all-reduce, {RANKS} ranks, 4 KiB", *(f"{OURS} {TORCH} difference".split())):
        table.add_column(title, justify="left" if " " in title else "right")
    medians = {(way.library, way.name): float(np.median(each)) for way, each in zip(ways, times, strict=True)}
    lines = []
    for name in (AT_ONCE, LATER):
        ours, theirs = medians[OURS, name], medians[TORCH, name]
        table.add_row(name, f"{ours:.0f}", f"{theirs:.0f}", f"{theirs - ours:.0f}")
        lines.append(below(f"dispatch, {name}", theirs - ours, MOST_US, "us"))
    console.print(table, "")
    show_verdicts(console, lines)


def _run_rank(turns: int) -> None:
    import torch.distributed as dist

    ways = _ways()
    times = [[_time_us(way, dist.get_rank()) for way in ways] for _ in range(turns)]
    if dist.get_rank() == 0:
        _show(ways, list(zip(*times, strict=True)))
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(int(sys.argv[1]))
