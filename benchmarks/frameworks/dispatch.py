"""The overhead of a call of omnireduce's collectives through torch.

`torchrun --nproc-per-node 2 -m benchmarks.frameworks.dispatch` does small all-reduces in turns, directly and
through torch. It also does all-gathers of two sizes by gloo, alone and after ranks have compared their calls. All
results are checked.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.carriers import Carried, Watch, by_sockets
from benchmarks.harness.group import run_ranks
from benchmarks.harness.verdicts import Verdict, below, show_verdicts
from omnireduce.core.dtypes import Array
from omnireduce.support.printing import carriers_text

RANKS, ELEMENTS, MANY = 2, 1 << 10, 1 << 18
IN_A_ROW, FEW = 100, 10  # calls, of tensors of ELEMENTS and of MANY
OURS, TORCH = "omnireduce", "through torch"
ALONE, COMPARED = "gloo alone", "compared before"
SYNC, ASYNC = "all-reduce, synchronous", "all-reduce, asynchronous, then wait"
SMALL, LARGE = "all-gather of 4 KiB", "all-gather of 1 MiB"
MOST_US = 60.0  # that torch may add: a collective of one host is not much longer
MOST_COMPARED_US = 300.0  # that comparing may add: an exchange, and each rank waits for one that is behind


class Way(NamedTuple):
    """A way to do what `name` says. `call` reads `array`, of this rank; afterwards `result` is the same on all ranks.
    The result of a mean is the array itself."""

    library: str
    name: str
    call: Callable[[], object]
    array: Array
    result: Array

    @property
    def calls(self) -> int:
        return IN_A_ROW if self.array.size == ELEMENTS else FEW


def measure_dispatch(turns: int) -> str:
    """Run the ranks; return what they print. Raises PeerError where they fail, OmniReduceError where torch cannot be
    installed."""
    return run_ranks("benchmarks.frameworks.dispatch", RANKS, str(turns))


def _reductions() -> list[Way]:
    import torch
    import torch.distributed as dist

    import omnireduce

    communicator, array, tensor = omnireduce.init(), np.empty(ELEMENTS, np.float32), torch.empty(ELEMENTS)
    calls = {
        (OURS, SYNC): lambda: communicator.allreduce(array, op="mean"),
        (TORCH, SYNC): lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG),
        (OURS, ASYNC): lambda: communicator.allreduce_async(array, op="mean").wait(),
        (TORCH, ASYNC): lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True).wait(),
    }
    own = {OURS: array, TORCH: tensor.numpy()}
    return [Way(*names, call, own[names[0]], own[names[0]]) for names, call in calls.items()]


def _gathers() -> list[Way]:
    import torch
    import torch.distributed as dist

    groups = {ALONE: dist.new_group(backend="gloo"), COMPARED: None}

    def way(library: str, name: str, elements: int) -> Way:
        tensor, results = torch.empty(elements), torch.empty(RANKS, elements)
        parts, group = list(results), groups[library]
        return Way(library, name, lambda: dist.all_gather(parts, tensor, group=group), tensor.numpy(), results.numpy())

    return [way(library, name, elements) for name, elements in ((SMALL, ELEMENTS), (LARGE, MANY)) for library in groups]


def _time_us(way: Way, rank: int) -> float:
    """Microseconds of one call, out of many in a row. What the first and the last leave is checked."""
    way.array[:] = 2 * rank
    way.call()
    _check(way)
    begin = time.perf_counter()
    for _ in range(way.calls):
        way.call()
    us = (time.perf_counter() - begin) / way.calls * 1e6
    _check(way)
    return us


def _check(way: Way) -> None:
    """The mean of means is the same mean."""
    expected = np.full(1, RANKS - 1) if way.result is way.array else 2 * np.arange(RANKS)[:, None]
    if not (way.result == expected).all():
        raise SystemExit(f"{way.library}, {way.name}: a wrong result")


def _show(ways: Sequence[Way], times: Sequence[Sequence[float]], carried: Mapping[str, Carried]) -> None:
    """Tables of the medians, and what torch's calls, or comparing, take more; and what has carried the tensors."""
    console = Console(width=120)
    medians = {(way.library, way.name): float(np.median(samples)) for way, samples in zip(ways, times, strict=True)}
    lines = list[Verdict]()
    parts = (OURS, TORCH, (SYNC, ASYNC), MOST_US), (ALONE, COMPARED, (SMALL, LARGE), MOST_COMPARED_US)
    for without, with_, names, most_us in parts:
        table = Table(box=None)
        table.add_column(f"us of one call, {RANKS} ranks")
        for title in (without, with_, "difference", "carried by"):
            table.add_column(title, justify="right")
        for name in names:
            less, more = medians[without, name], medians[with_, name]
            numbers = (f"{us:.0f}" for us in (less, more, more - less))
            table.add_row(name, *numbers, carriers_text(carried[name]))
            lines.append(below(f"dispatch, {name}", more - less, most_us, "us"))
        console.print(table, "")
    show_verdicts(console, lines)


def _run_rank(turns: int) -> None:
    import torch.distributed as dist

    import omnireduce.torch  # noqa: F401 - the back end

    watch = Watch()
    dist.init_process_group("omnireduce")
    ways = _reductions() + _gathers()
    times, carried = [list[float]() for _ in ways], {way.name: Counter[str]() for way in ways}
    for _ in range(turns):
        for way, samples in zip(ways, times, strict=True):
            before = watch.carried()
            with by_sockets() as received:
                samples.append(_time_us(way, dist.get_rank()))
            carried[way.name] += watch.carried() - before if way.name in (SYNC, ASYNC) else received
    if dist.get_rank() == 0:
        _show(ways, times, carried)
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(int(sys.argv[1]))
