"""The workload of a sample: the arrays of one training step, each summed by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnireduce.console.bench.cases import Case, RecordedCase, SyntheticCase, TensorSource
from omnireduce.console.bench.recorded_tensors import find_arrays
from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.queue import Queue
from omnireduce.errors import ConfigError
from omnireduce.support.config import Config

GROWTH = 1.5  # of an array over the one before: models have few large arrays and many small ones
_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class StepArray:
    """An array of the step."""

    name: str
    source: TensorSource
    tensor: Array


class Workload:
    """The arrays of a step on rank `rank`. `in_order`: every rank submits them in one order, always the same."""

    def __init__(self, arrays: list[StepArray], rank: int, *, in_order: bool) -> None:
        self._arrays, self._rank, self._in_order = arrays, rank, in_order
        self.nbytes = sum(array.tensor.nbytes for array in arrays)

    def fill(self, number: int) -> None:
        """Write the data of round `number` to the arrays."""
        for array in self._arrays:
            array.source.fill(self._rank, number, array.tensor)

    def submit(self, queue: Queue, number: int) -> None:
        """Sum all arrays in place, in round `number`, and wait for them."""
        order = range(len(self._arrays))
        if not self._in_order:
            order = np.random.default_rng([self._rank, number]).permutation(len(self._arrays)).tolist()
        tasks = [queue.allreduce_async(self._arrays[i].tensor, name=self._arrays[i].name) for i in order]
        for task in tasks:
            task.wait(_WAIT_S)

    def wrong(self, number: int) -> int:
        """The number of elements that are not the sums of round `number`."""
        return sum(array.source.wrong(number, array.tensor) for array in self._arrays)


def synthetic_sizes(elements: int, arrays: int) -> list[int]:
    """The sizes of so many arrays, `elements` in all, each half as large again as the one before. Raises ConfigError
    where there are fewer elements than arrays."""
    if elements < arrays:
        raise ConfigError(f"--elements: got {elements}, expected at least {arrays}, one for each of --arrays")
    ends = np.cumsum(GROWTH ** np.arange(arrays))
    boundaries = np.round(ends / ends[-1] * (elements - arrays)).astype(int)
    return [int(size) + 1 for size in np.diff(boundaries, prepend=0)]


def cases_of(
    config: Config, *, pattern: str | None, elements: int, arrays: int, density: float, size: int
) -> Sequence[Case]:
    """A case for each array; those that are drawn have blocks of bench.block_size. Raises ConfigError, and what
    `find_arrays` raises for files."""
    setting = config.bench.block_size
    block_size = (0 if isinstance(setting, tuple) else setting) or config.protocol.block_size
    if pattern is not None:
        recorded = [array for array in find_arrays(pattern, size) if array.elements]
        if not recorded:
            raise ConfigError(f"--input {pattern}: the arrays are empty")
        return [RecordedCase(array, "sum", block_size) for array in recorded]
    return [
        SyntheticCase(
            elements=count,
            dtype="float32",
            op="sum",
            block_size=block_size,
            overlap="random",
            density=density,
            seed=config.bench.seed + i,
        )
        for i, count in enumerate(synthetic_sizes(elements, arrays))
    ]


def make_workload(cases: Sequence[Case], rank: int, size: int, *, in_order: bool) -> Workload:
    """The arrays of `cases` on this rank. Raises FileError for a file that has changed."""
    arrays = []
    for i, case in enumerate(cases):
        source = case.tensors(size)
        arrays.append(StepArray(f"array {i}", source, np.ones(case.elements, source.dtype)))
    return Workload(arrays, rank, in_order=in_order)
