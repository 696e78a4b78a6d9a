"""`dist.all_reduce` of torch with omnireduce and with gloo in turns, for any number of ranks, also on a GPU.

`torchrun --nproc-per-node N -m benchmarks.frameworks.all_reduce cpu` compares all results bit by bit.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.carriers import CommunicatorWatch, count_socket_bytes
from benchmarks.harness.group import run_ranks
from omnireduce.errors import UsageError
from omnireduce.support.printing import carriers_text

BLOCK = 256  # elements
UNTIMED = 2  # rounds
NAMES = ("omnireduce", "gloo")


class Case(NamedTuple):
    """A tensor of float32, of so many bytes, and how many rounds are timed."""

    nbytes: int
    density: float
    rounds: int

    @property
    def name(self) -> str:
        size = f"{self.nbytes >> 20} MiB" if self.nbytes >= 1 << 20 else f"{self.nbytes >> 10} KiB"
        return f"{size}, density {self.density:g}"


CASES = [
    *(Case(100 << 20, density, 7) for density in (1.0, 0.1, 0.01)),
    *(Case(16 << 20, density, 11) for density in (1.0, 0.1, 0.01)),
    *(Case(1 << 20, density, 31) for density in (1.0, 0.1, 0.01)),
    Case(1 << 12, 1.0, 101),
]


def measure_all_reduce(ranks: int, device: str, only: str) -> str:
    """Run the ranks, for the cases whose name contains `only`; return what they print. Raises PeerError where they
    fail, OmniReduceError where torch cannot be installed, UsageError where there is no such case."""
    if not any(only in case.name for case in CASES):
        raise UsageError(f"no case's name contains {only!r}; there are {', '.join(case.name for case in CASES)}")
    return run_ranks("benchmarks.frameworks.all_reduce", ranks, device, only)


def _tensor(case: Case, rank: int, device: str) -> Any:
    import torch

    random = np.random.default_rng(rank)
    x = np.zeros((case.nbytes // 4 // BLOCK, BLOCK), np.float32)
    chosen = random.random(len(x)) < case.density
    x[chosen] = random.integers(1, 5, (int(chosen.sum()), BLOCK))
    return torch.from_numpy(x).to(device)


def _times_ms(x: Any, rounds: int, groups: list[Any]) -> tuple[Any, str]:
    """The time of the slowest rank, (groups, rounds), and what carried the bytes of the last group, gloo. All groups
    give the same result."""
    import torch
    import torch.distributed as dist

    times, carried = torch.zeros(len(groups), rounds + UNTIMED, dtype=torch.float64), Counter[str]()
    for number in range(rounds + UNTIMED):
        results = []
        for index, group in enumerate(groups):
            results.append(x.clone())
            _finish(x)
            dist.barrier(groups[-1])
            with count_socket_bytes() as received:
                begin = time.perf_counter()
                dist.all_reduce(results[-1], group=group)
                _finish(x)
                times[index, number] = time.perf_counter() - begin
        carried += received
        if not all(torch.equal(results[0], result) for result in results):
            raise SystemExit("the results differ")
    dist.all_reduce(times, dist.ReduceOp.MAX, group=groups[-1])
    return times[:, UNTIMED:] * 1e3, carriers_text(carried)


def _finish(x: Any) -> None:
    """Wait until the device of this tensor has done all."""
    if x.is_cuda:
        import torch

        torch.cuda.synchronize()


def _run_rank(device: str, only: str) -> None:
    import torch.distributed as dist

    import omnireduce.torch  # noqa: F401  it registers the backend

    watch = CommunicatorWatch()
    dist.init_process_group("omnireduce")
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    table = Table(box=None)
    table.add_column(f"ms of an all-reduce, {dist.get_world_size()} ranks, {device}")
    for title in (*NAMES, "ratio", *(f"{name} by" for name in NAMES)):
        table.add_column(title, justify="right")
    for case in CASES:
        if only in case.name:
            before = watch.carried()
            times, gloo_carriers = _times_ms(_tensor(case, dist.get_rank(), device), case.rounds, groups)
            own_carriers = carriers_text(watch.carried() - before)
            own_ms, gloo_ms = times.median(1).values.tolist()
            table.add_row(
                case.name, f"{own_ms:.3g}", f"{gloo_ms:.3g}", f"{gloo_ms / own_ms:.2f}x", own_carriers, gloo_carriers
            )
    if dist.get_rank() == 0:
        Console(width=120).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(*sys.argv[1:])
