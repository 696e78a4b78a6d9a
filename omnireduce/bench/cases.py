"""The cases of a benchmark, one for each row, of synthetic tensors or of those in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from omnireduce.bench.data import Dataset, TensorSource, check_data, check_reduction
from omnireduce.bench.recorded import RecordedArray, RecordedTensors, find_arrays
from omnireduce.config import Config
from omnireduce.descriptor import Op

T = TypeVar("T")


class Case(Protocol):
    """One row of a benchmark: a tensor of `elements` on each rank, and which reduction of it."""

    @property
    def elements(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def op(self) -> Op: ...

    @property
    def block_size(self) -> int: ...

    @property
    def data(self) -> str:
        """What the tensors are, in a few words."""

    def check(self, world_size: int) -> None:
        """Raise UsageError if `tensors` would, without making them."""

    def tensors(self, world_size: int) -> TensorSource:
        """Make the tensors. Raises UsageError if that is not possible."""


@dataclass(frozen=True, slots=True)
class SyntheticCase:
    """A `Case` of synthetic tensors; see `Dataset`."""

    elements: int
    dtype: str
    op: Op
    block_size: int
    overlap: str
    density: float
    seed: int
    distribution: str = "uniform"

    def __str__(self) -> str:
        return f"{self.op} of {self.dtype}[{self.elements}], density {self.density:g}"

    @property
    def data(self) -> str:
        return f"{self.overlap} overlap{', Zipf' if self.distribution == 'zipf' else ''}"

    def check(self, world_size: int) -> None:
        check_data(self.dtype, self.op, self.density, self.overlap, world_size, self.distribution)

    def tensors(self, world_size: int) -> TensorSource:
        return Dataset(
            self.elements,
            dtype=self.dtype,
            block_size=self.block_size,
            density=self.density,
            overlap=self.overlap,
            op=self.op,
            world_size=world_size,
            seed=self.seed,
            distribution=self.distribution,
        )


@dataclass(frozen=True, slots=True)
class RecordedCase:
    """A `Case` of arrays in files, one file for each rank; see `RecordedTensors`."""

    array: RecordedArray
    op: Op
    block_size: int

    def __str__(self) -> str:
        return f"{self.op} of {self.array}"

    @property
    def elements(self) -> int:
        return self.array.elements

    @property
    def dtype(self) -> str:
        return self.array.dtype

    @property
    def data(self) -> str:
        return str(self.array)

    def check(self, world_size: int) -> None:
        check_reduction(self.dtype, self.op)

    def tensors(self, world_size: int) -> TensorSource:
        return RecordedTensors(self.array, self.op, self.block_size)


def synthetic_cases(config: Config) -> list[SyntheticCase]:
    """The sweep: every combination of the values that [bench] lists, the density varying fastest."""
    bench = config.bench
    ops: tuple[Op, ...] = _listed(bench.op)
    return [
        SyntheticCase(
            elements=elements, dtype=dtype, op=op, block_size=block_size, overlap=overlap, density=density,
            seed=bench.seed, distribution=distribution,
        )
        for elements in _listed(bench.elements)
        for dtype in _listed(bench.dtype)
        for op in ops
        for block_size in _block_sizes(config)
        for distribution in _listed(bench.distribution)
        for overlap in _listed(bench.overlap)
        for density in _listed(bench.density)
    ]  # fmt: skip


def recorded_cases(config: Config, pattern: str, world_size: int) -> list[RecordedCase]:
    """Every array in the files that `pattern` names, with each op and block size of [bench].

    Raises FileError or UsageError; see `find_arrays`.
    """
    arrays = find_arrays(pattern, world_size)
    ops: tuple[Op, ...] = _listed(config.bench.op)
    return [
        RecordedCase(array, op, block_size) for op in ops for block_size in _block_sizes(config) for array in arrays
    ]


def _block_sizes(config: Config) -> list[int]:
    return [size or config.protocol.block_size for size in _listed(config.bench.block_size)]


def _listed(value: T | tuple[T, ...]) -> tuple[T, ...]:
    return value if isinstance(value, tuple) else (value,)
