"""Real tensors for the benchmark: each rank's array from a file of its own, such as a gradient that training saved.

Every process reads the files of all ranks, one array at a time, and reduces them once, in rank order. Each round is
compared with this result. So a process holds its own array, the expected result and for a while two more arrays,
however many ranks there are. Comparison is by value: -0 equals 0, and NaN, which may be data here, equals NaN.

The service reduces in rank order, so its float results must be the oracle's to the last bit. Another all-reduce may
take another order. Among more than two ranks it may then round differently, and in min and max it may lose a NaN. So
`any_order` says whether another order gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omnireduce.console.bench.data import check_reduction, reduce_in_rank_order, share_set
from omnireduce.core.dtypes import Array, number_type
from omnireduce.errors import UsageError
from omnireduce.kernels.nonzero_blocks import find_blocks
from omnireduce.support.files.tensors import FileError, Tensor, read_tensors

RANK = "{rank}"
_CHUNK_ELEMENTS = 1 << 17  # compared at once: temporaries stay small and in the cache


@dataclass(frozen=True, slots=True)
class RecordedArray:
    """An array that the files of all ranks have, of one name, shape and dtype. That of an .npy file has no name."""

    pattern: str
    world_size: int
    name: str | None
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        file = Path(self.pattern).name
        return file if self.name is None else f"{self.name} of {file}"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def read(self, rank: int) -> Array:
        """The elements of `rank`, (elements,), mapped where the format allows it. Raises FileError."""
        path = file_of(self.pattern, rank)
        for tensor in read_tensors(path, self.name):
            if _describe(tensor) == (self.shape, self.dtype):
                return tensor.values
        raise FileError(f"{path}: was changed while it was in use")


def file_of(pattern: str, rank: int) -> Path:
    """The file of one rank. Raises UsageError for a pattern that gives all ranks the same file."""
    if RANK not in pattern:
        raise UsageError(f"got {pattern!r}, expected the file of every rank, such as gradients/gradient-{RANK}.npy")
    return Path(pattern.replace(RANK, str(rank)))


def find_arrays(pattern: str, world_size: int) -> list[RecordedArray]:
    """The arrays in the files of all ranks, in the order of rank 0's file.

    Raises FileError for a file that cannot be read or does not hold what rank 0's does, UsageError for a wrong pattern.
    """
    first_path, first_arrays = file_of(pattern, 0), _contents(file_of(pattern, 0))
    if not first_arrays:
        raise FileError(f"{first_path}: holds no arrays")
    for rank in range(1, world_size):
        path = file_of(pattern, rank)
        arrays = _contents(path)
        for name in [*first_arrays, *arrays]:
            text, first_text = (_array_text(name, contents.get(name)) for contents in (arrays, first_arrays))
            if text != first_text:
                raise FileError(f"{path}: {text}, but {first_path}: {first_text}; every rank needs the same arrays")
    return [
        RecordedArray(pattern, world_size, name, *shape_and_dtype) for name, shape_and_dtype in first_arrays.items()
    ]


class RecordedTensors:
    """The tensors of all ranks from their files, the same in every round. Raises FileError, UsageError."""

    def __init__(self, array: RecordedArray, op: str, block_size: int) -> None:
        self._array, self._type = array, check_reduction(array.dtype, op)
        self._block_size = block_size
        self._cached: tuple[int, Array] | None = None
        self._flags: list[Array] = []  # which blocks are not zero, of each rank
        self._expected = reduce_in_rank_order(self._read_all(), self._type, op)
        # Whether a correct all-reduce gives the same in any order, not only in that of the ranks.
        self.any_order = not self._type.is_float or (array.world_size <= 2 and op not in ("min", "max"))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._type.dtype

    @property
    def density(self) -> float:
        """Non-zero blocks / blocks, mean over ranks; 0 for an empty array."""
        return float(np.mean([share_set(flags) for flags in self._flags]))

    @property
    def union_density(self) -> float:
        """Blocks that are non-zero on at least one rank / blocks; 0 for an empty array."""
        return share_set(np.logical_or.reduce(self._flags))

    def fill(self, rank: int, round_number: int, out: Array) -> None:
        """Write the array of `rank` to `out`, a contiguous array of any shape."""
        flat = self._flat(out)
        if self._cached is None or self._cached[0] != rank:
            self._cached = rank, self._array.read(rank)
        flat[:] = self._cached[1]

    def wrong(self, round_number: int, result: Array) -> int:
        """The number of elements of `result` that differ from the reduction in rank order."""
        flat, count = self._flat(result), 0
        for first in range(0, flat.size, _CHUNK_ELEMENTS):
            part = slice(first, first + _CHUNK_ELEMENTS)
            count += _differences(flat[part], self._expected[part])
        return count

    def _read_all(self) -> Iterator[Array]:
        """Yield the array of each rank and note its blocks."""
        for rank in range(self._array.world_size):
            values = self._array.read(rank)
            self._flags.append(find_blocks(values, self._block_size))
            yield values

    def _flat(self, tensor: Array) -> Array:
        size = self._expected.size
        if tensor.dtype != self.dtype or tensor.size != size or not tensor.flags.c_contiguous:
            raise UsageError(f"got {tensor.dtype}[{tensor.size}], expected {self.dtype}[{size}], contiguous")
        return tensor.reshape(-1)


def _contents(path: Path) -> dict[str | None, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each array by name; None is the name of the one in an .npy file."""
    named = path.suffix.lower() != ".npy"
    return {tensor.name if named else None: _supported(path, tensor) for tensor in read_tensors(path)}


def _supported(path: Path, tensor: Tensor) -> tuple[tuple[int, ...], str]:
    try:
        number_type(tensor.values.dtype.newbyteorder("="))
    except UsageError as error:
        raise FileError(f"{path}: {tensor.name}: {error}") from None
    return _describe(tensor)


def _describe(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tensor.shape, str(tensor.values.dtype.newbyteorder("="))


def _array_text(name: str | None, shape_and_dtype: tuple[tuple[int, ...], str] | None) -> str:
    """The value of a file under a name, in words."""
    array = "the array" if name is None else f"array {name!r}"
    if shape_and_dtype is None:
        return f"has no {array}"
    shape, dtype = shape_and_dtype
    return f"{array} is {dtype}[{'x'.join(map(str, shape))}]"


def _differences(values: Array, expected: Array) -> int:
    bits = f"u{values.itemsize}"
    if np.array_equal(values.view(bits), expected.view(bits)):  # almost always, and much faster for 16-bit floats
        return 0
    with np.errstate(invalid="ignore"):  # signalling NaN
        numbers = (values == values) | (expected == expected)
        return int(np.count_nonzero((values != expected) & numbers))
