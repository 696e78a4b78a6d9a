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

from benchmarks.harness.carriers import Carried, CommunicatorWatch, count_socket_bytes
from benchmarks.harness.group import run_ranks
from benchmarks.harness.verdicts import Verdict, below, show_verdicts
from omnireduce.core.dtypes import Array
from omnireduce.support.printing import carriers_text

RANKS, ELEMENTS, LARGE_ELEMENTS = 2, 1 << 10, 1 << 18
MANY_CALLS, FEW_CALLS = 100, 10  # of tensors of ELEMENTS, and of LARGE_ELEMENTS
OURS, TORCH = "omnireduce", "through torch"
ALONE, COMPARED = "gloo alone", "compared before"
SYNC, ASYNC = "all-reduce, synchronous", "all-reduce, asynchronous, then wait"
SMALL, LARGE = "all-gather of 4 KiB", "all-gather of 1 MiB"
MAX_ADDED_US = 60.0  # that torch may add: a collective of one host is not much longer
MAX_COMPARING_US = 300.0  # that comparing may add: an exchange, and each rank waits for one that is behind


class Variant(NamedTuple):
    """A library's variant of the operation `name`. `call` reads `array`, of this rank; afterwards `result` is the same
    on all ranks. The result of a mean is the array itself."""

    library: str
    name: str
    call: Callable[[], object]
    array: Array
    result: Array

    @property
    def calls(self) -> int:
        return MANY_CALLS if self.array.size == ELEMENTS else FEW_CALLS


def measure_dispatch(turns: int) -> str:
    """Run the ranks; return what they print. Raises PeerError where they fail, OmniReduceError where torch cannot be
    installed."""
    return run_ranks("benchmarks.frameworks.dispatch", RANKS, str(turns))


def _reductions() -> list[Variant]:
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
    arrays = {OURS: array, TORCH: tensor.numpy()}
    return [Variant(*names, call, arrays[names[0]], arrays[names[0]]) for names, call in calls.items()]


def _gathers() -> list[Variant]:
    import torch
    import torch.distributed as dist

    groups = {ALONE: dist.new_group(backend="gloo"), COMPARED: None}

    def make_variant(library: str, name: str, elements: int) -> Variant:
        tensor, results = torch.empty(elements), torch.empty(RANKS, elements)
        parts, group = list(results), groups[library]
        return Variant(
            library, name, lambda: dist.all_gather(parts, tensor, group=group), tensor.numpy(), results.numpy()
        )

    return [
        make_variant(library, name, elements)
        for name, elements in ((SMALL, ELEMENTS), (LARGE, LARGE_ELEMENTS))
        for library in groups
    ]


def _time_us(variant: Variant, rank: int) -> float:
    """Microseconds of one call, out of many in a row. What the first and the last leave is checked."""
    variant.array[:] = 2 * rank
    variant.call()
    _check(variant)
    begin = time.perf_counter()
    for _ in range(variant.calls):
        variant.call()
    us = (time.perf_counter() - begin) / variant.calls * 1e6
    _check(variant)
    return us


def _check(variant: Variant) -> None:
    """The mean of means is the same mean."""
    expected = np.full(1, RANKS - 1) if variant.result is variant.array else 2 * np.arange(RANKS)[:, None]
    if not (variant.result == expected).all():
        raise SystemExit(f"{variant.library}, {variant.name}: a wrong result")


def _show(variants: Sequence[Variant], times: Sequence[Sequence[float]], carried: Mapping[str, Carried]) -> None:
    """Tables of the medians, and what torch's calls, or comparing, take more; and what has carried the tensors."""
    console = Console(width=120)
    medians = {
        (variant.library, variant.name): float(np.median(samples))
        for variant, samples in zip(variants, times, strict=True)
    }
    verdicts = list[Verdict]()
    parts = (OURS, TORCH, (SYNC, ASYNC), MAX_ADDED_US), (ALONE, COMPARED, (SMALL, LARGE), MAX_COMPARING_US)
    for base, extended, names, max_us in parts:
        table = Table(box=None)
        table.add_column(f"us of one call, {RANKS} ranks")
        for title in (base, extended, "difference", "carried by"):
            table.add_column(title, justify="right")
        for name in names:
            base_us, extended_us = medians[base, name], medians[extended, name]
            numbers = (f"{us:.0f}" for us in (base_us, extended_us, extended_us - base_us))
            table.add_row(name, *numbers, carriers_text(carried[name]))
            verdicts.append(below(f"dispatch, {name}", extended_us - base_us, max_us, "us"))
        console.print(table, "")
    show_verdicts(console, verdicts)


def _run_rank(turns: int) -> None:
    import torch.distributed as dist

    import omnireduce.torch  # noqa: F401 - the back end

    watch = CommunicatorWatch()
    dist.init_process_group("omnireduce")
    variants = _reductions() + _gathers()
    times, carried = [list[float]() for _ in variants], {variant.name: Counter[str]() for variant in variants}
    for _ in range(turns):
        for variant, samples in zip(variants, times, strict=True):
            before = watch.carried()
            with count_socket_bytes() as received:
                samples.append(_time_us(variant, dist.get_rank()))
            carried[variant.name] += watch.carried() - before if variant.name in (SYNC, ASYNC) else received
    if dist.get_rank() == 0:
        _show(variants, times, carried)
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(int(sys.argv[1]))
