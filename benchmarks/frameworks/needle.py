"""The time to average a step's gradients: Needle's own way, parameter by parameter over MPI, against one exchange of
the service.

Needle's own way takes an array out of each gradient, adds it to those of the other ranks, divides, and makes a new
tensor. Only this is timed. Before it both ways get new gradients, as a backward pass leaves them.
The tensors are those of the checkout in OMNIREDUCE_NEEDLE, whose backend for the processor must be built. Without a
checkout they are those of the tests' stand-in, which keeps values behind a handle and copies them as that backend does.

`python -m benchmarks.frameworks.needle SOCKET` is one rank of it, under mpirun.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest.cases import MEMORY
from benchmarks.harness.carriers import count_socket_bytes
from benchmarks.harness.environments import HERE, ROOT
from benchmarks.harness.group import Group, PeerError, socket_path
from benchmarks.harness.orders import serve
from benchmarks.harness.verdicts import at_least, show_verdicts
from omnireduce.core.dtypes import Array

OWN, OURS = "parameter by parameter, mpi4py", "omnireduce"
RANKS, STEPS, MIN_SPEEDUP = 2, 10, 2.0
CONVOLUTIONS = (
    (3, 16, 7),
    (16, 32, 3),
    (32, 32, 3),
    (32, 32, 3),
    (32, 64, 3),
    (64, 128, 3),
    (128, 128, 3),
    (128, 128, 3),
)
RESNET9, PERCEPTRON = "ResNet9 of the tutorial", "perceptron of 8 layers"
Shapes = list[tuple[int, ...]]


def _models() -> dict[str, Shapes]:
    """The shapes of the parameters: of convolutions with a bias and a normalisation each, and of large matrices."""
    convolved: Shapes = []
    for inputs, outputs, kernel in CONVOLUTIONS:
        convolved += [(kernel, kernel, inputs, outputs), (outputs,), (outputs,), (outputs,)]
    widths = [784, *[1024] * 7, 10]
    layers: Shapes = [shape for a, b in pairwise(widths) for shape in ((a, b), (1, b))]
    return {RESNET9: [*convolved, (128, 128), (1, 128), (128, 10), (1, 10)], PERCEPTRON: layers}


class Averaging:
    """A rank with parameters of Needle."""

    def __init__(self) -> None:
        checkout = os.environ.get("OMNIREDUCE_NEEDLE")
        sys.path.append(f"{checkout}/python" if checkout else str(ROOT / "tests/frameworks/stand_in"))
        import needle
        from mpi4py import MPI

        import omnireduce.needle as ddp

        self._needle, self._mpi = needle, MPI
        self.rank, _ = ddp.init()
        self._device, self._world = needle.cpu(), MPI.COMM_WORLD
        self._variants = {OWN: self._average_over_mpi, OURS: self._average_over_service}
        rng = np.random.default_rng(self.rank)
        self._models: dict[str, tuple[list[Any], list[Array], Any]] = {}
        for name, shapes in _models().items():
            values = [rng.integers(-8, 9, shape).astype(np.float32) for shape in shapes]
            parameters = [needle.nn.Parameter(np.zeros(shape, np.float32), device=self._device) for shape in shapes]
            self._models[name] = parameters, values, ddp.DistributedOptimizer(needle.optim.SGD(parameters, lr=1.0))

    def turn(self, model: str, variant: str) -> dict[str, Any]:
        """The milliseconds of an exchange, and a sum of all its numbers, which is exact."""
        parameters, values, optimizer = self._models[model]
        for parameter, gradient in zip(parameters, values, strict=True):
            parameter.grad = self._needle.Tensor(gradient, device=self._device, requires_grad=False)
        self._world.Barrier()
        with count_socket_bytes() as carried:
            begin = time.perf_counter()
            self._variants[variant](parameters, optimizer)
            ms = (time.perf_counter() - begin) * 1e3
        total = sum((number + 1) * float(parameter.grad.numpy().sum()) for number, parameter in enumerate(parameters))
        return {"ms": ms, "sum": total} | ({"carried": carried} if variant == OWN else {})

    def _average_over_mpi(self, parameters: list[Any], optimizer: Any) -> None:
        for parameter in parameters:
            gradient = np.ascontiguousarray(parameter.grad.numpy())
            mean = np.empty_like(gradient, dtype=parameter.dtype)
            self._world.Allreduce(gradient, mean, op=self._mpi.SUM)
            mean = mean / self._world.size
            parameter.grad.data = self._needle.Tensor(mean, device=self._device, dtype=parameter.grad.dtype)

    def _average_over_service(self, parameters: list[Any], optimizer: Any) -> None:
        optimizer.average_gradients()


def measure(console: Console, turns: int) -> bool:
    """Let the variants take turns; return whether the aim is met. Raises PeerError where one fails or gives wrong
    means."""
    rows: dict[tuple[str, str], list[float]] = {(model, variant): [] for model in _models() for variant in (OWN, OURS)}
    with tempfile.TemporaryDirectory(prefix="omnireduce-bench-") as folder:
        rank_command = [str(HERE.python), "-m", "benchmarks.frameworks.needle", socket_path(folder, "frameworks")]
        command = [str(Path(HERE.python).parent / "mpirun"), "-n", str(RANKS), *rank_command]
        with Group("frameworks", RANKS, [command], folder, carrier={OURS: MEMORY}) as group:
            for _ in range(turns + 1):
                for model in _models():
                    for _ in range(STEPS):
                        _take_step(group, model, rows)
    table = Table(box=None)
    for title in ("averages on two ranks", "way", "ms", "carried by"):
        table.add_column(title, justify="right" if title == "ms" else "left")
    medians = {key: float(np.median(times[STEPS:])) for key, times in rows.items()}  # the first turn warms up
    for (model, variant), ms in medians.items():
        table.add_row(model, variant, f"{ms:.4g}", group.carrier_of(variant))
    console.print(table, "")
    verdicts = [
        at_least(model, medians[model, OURS], OWN, medians[model, OWN], MIN_SPEEDUP) for model in _models()
    ]  # fmt: skip
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def _take_step(group: Group, model: str, rows: dict[tuple[str, str], list[float]]) -> None:
    """Ways alternate: neither finds its code and memory in the caches, as none does in a training."""
    sums = set[float]()
    for variant in (OWN, OURS):
        answers = group.tell(do="turn", model=model, variant=variant)
        rows[model, variant].append(max(answer["ms"] for answer in answers))
        sums.update(answer["sum"] for answer in answers)
    if len(sums) > 1:
        raise PeerError("frameworks", f"gave different means of {model}: {sums}")


def _start() -> tuple[int, dict[str, Any]]:
    averaging = Averaging()
    return averaging.rank, {"turn": averaging.turn}


if __name__ == "__main__":
    serve(sys.argv[1], _start)
