"""What it costs to ask torch for a collective of omnireduce, beside the collective itself.

`torchrun --nproc-per-node 2 -m benchmarks.dispatch` does small all-reduces of both in turns, and checks them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.outcomes import show_verdicts
from benchmarks.targets import below
from benchmarks.torch_ranks import run_ranks
from omnireduce.dtypes import Array

RANKS, ELEMENTS = 2, 1024
IN_A_ROW = 100  # calls
OURS, TORCH = "omnireduce", "through torch"
SYNC, ASYNC = "synchronous", "asynchronous, then wait"
MOST_US = 60.0  # that torch may add: a collective of one host is not much longer


def measure_dispatch(turns: int) -> str:
    """Run the ranks; return what they print. Raises PeerError where they fail, RuntimeError where torch cannot be
    installed."""
    return run_ranks("benchmarks.dispatch", RANKS, str(turns))


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
        (OURS, SYNC): lambda: communicator.allreduce(array, op="mean"),
        (TORCH, SYNC): lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG),
        (OURS, ASYNC): lambda: communicator.allreduce_async(array, op="mean").wait(),
        (TORCH, ASYNC): lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True).wait(),
    }
    return [Way(*names, call, array if names[0] == OURS else tensor.numpy()) for names, call in calls.items()]


def _time_us(way: Way, rank: int) -> float:
    """Microseconds of one call, out of many in a row. What the first and the last leave is checked: the mean of means
    is the same mean."""
    way.array[:] = 2 * rank
    way.call()
    _check(way)
    begin = time.perf_counter()
    for _ in range(IN_A_ROW):
        way.call()
    found = (time.perf_counter() - begin) / IN_A_ROW * 1e6
    _check(way)
    return found


def _check(way: Way) -> None:
    if not (way.array == RANKS - 1).all():
        raise SystemExit(f"{way.library}, {way.name}: a wrong mean")


def _show(ways: Sequence[Way], times: Sequence[Sequence[float]]) -> None:
    """A table of the medians, and what torch's calls take more."""
    console, table = Console(width=120), Table(box=None)
    table.add_column(f"us of an all-reduce, {RANKS} ranks, 4 KiB")
    for title in (OURS, TORCH, "difference"):
        table.add_column(title, justify="right")
    medians = {(way.library, way.name): float(np.median(each)) for way, each in zip(ways, times, strict=True)}
    lines = []
    for name in (SYNC, ASYNC):
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
