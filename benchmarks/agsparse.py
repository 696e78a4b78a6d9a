"""AGsparse: an all-gather of non-zero elements or rows, summed by every rank.

All that a round needs, other than a few row numbers, is kept from round to round, so that none pays for fresh pages.
Every rank adds in the order of the ranks, so that all get the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array


class AGsparse:
    """The exchange among the ranks of an mpi4py communicator. A result is valid until the next exchange."""

    def __init__(self, world: Any) -> None:
        self._world, self._size = world, world.Get_size()
        self._kept: dict[str, Array] = {}

    def elements(self, tensor: Array) -> Array:
        """Sum tensors element by element, in place."""
        mask = np.not_equal(tensor, 0, out=self._buffer("mask", tensor.shape, np.bool_))
        indices = np.flatnonzero(mask)  # many times as fast as of the tensor itself
        places = self._buffer("places", indices.shape, np.int32)
        places[:] = indices
        values = np.take(tensor, indices, out=self._buffer("values", indices.shape, tensor.dtype), mode="clip")
        counts = self._counts(indices.size)
        every, parts = self._gather("every place", places, counts), self._gather("parts", values, counts)
        tensor[indices] = 0
        ends = np.cumsum(counts)
        for end, count in zip(ends, counts, strict=True):  # of each rank: every place at most once
            of_rank = every[end - count : end]
            sums = np.take(tensor, of_rank, out=self._buffer("sums", of_rank.shape, tensor.dtype), mode="clip")
            tensor[of_rank] = np.add(sums, parts[end - count : end], out=sums)
        return tensor

    def rows(self, numbers: Array, values: Array, n_rows: int) -> tuple[Array, Array]:
        """Sum rows; return the union's row numbers and sums."""
        counts = self._counts(numbers.size)
        every, parts = self._gather("every number", numbers, counts), self._gather("rows", values, counts)
        union, first, places = np.unique(every, return_index=True, return_inverse=True)
        shape = (union.size, values.shape[1])
        result = np.take(parts, first, axis=0, out=self._buffer("union", shape, values.dtype), mode="clip")
        again = np.flatnonzero(first[places] != np.arange(every.size))  # rows that an earlier rank has as well
        for of_rank in np.split(again, np.searchsorted(again, np.cumsum(counts[:-1]))):  # every row at most once
            shape = (of_rank.size, values.shape[1])
            more = np.take(parts, of_rank, axis=0, out=self._buffer("more", shape, values.dtype), mode="clip")
            where = places[of_rank]
            sums = np.take(result, where, axis=0, out=self._buffer("row sums", shape, values.dtype), mode="clip")
            result[where] = np.add(sums, more, out=sums)
        return union, result

    def _counts(self, own: int) -> Array:
        counts = np.empty(self._size, np.int64)
        self._world.Allgather(np.array([own]), counts)
        return counts

    def _gather(self, name: str, part: Array, counts: Array) -> Array:
        width = part.shape[1] if part.ndim > 1 else 1
        every = self._buffer(name, (int(counts.sum()), *part.shape[1:]), part.dtype)
        self._world.Allgatherv(part, (every, counts * width))
        return every

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory that is kept under this name, and grows."""
        size = int(np.prod(shape))
        kept = self._kept.get(name)
        if kept is None or kept.size < size or kept.dtype != dtype:
            kept = self._kept[name] = np.ones(size + size // 4, dtype)  # written, so that its pages are there
        return kept[:size].reshape(shape)
