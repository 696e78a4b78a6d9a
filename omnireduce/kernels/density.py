"""The non-zero blocks of a tensor: the scan without the copy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from omnireduce.core.dtypes import Array, ElementType, number_type
from omnireduce.kernels.compiling.jit import kernel

_CHUNK_ELEMENTS = 1 << 20


@kernel
def nonzero_blocks(words: Array, mask: np.uint64, is_nonzero: Array) -> int:
    """Set `is_nonzero[b]` for every non-zero row of `words` (uint64, blocks x words per block); return how many there
    are."""
    total = 0
    for block in range(words.shape[0]):
        row = words[block]
        bits = np.uint64(0)
        for i in range(row.size):
            bits |= row[i]
        is_nonzero[block] = bits & mask != 0
        if is_nonzero[block]:
            total += 1
    return total


def find_blocks(values: Array, block_size: int) -> Array:
    """A mask of the blocks of `values`, (elements,), that are not zero: bool (blocks,).

    `values` may be of any dtype that the service reduces, in any byte order. `block_size`: elements, a multiple of 8.
    Raises UsageError for another dtype.
    """
    kind = number_type(values.dtype.newbyteorder("="))
    is_nonzero = np.zeros(-(-values.size // block_size), np.bool_)
    for first, chunk in native_chunks(values, kind, block_size):
        mark_blocks(chunk, kind, block_size, is_nonzero[first:])
    return is_nonzero


def native_chunks(values: Array, kind: ElementType, block_size: int) -> Iterator[tuple[int, Array]]:
    """Yield (number of the first block, elements of that block and some more), in native byte order and aligned."""
    step = max(1, _CHUNK_ELEMENTS // block_size)
    for first in range(0, -(-values.size // block_size), step):
        yield first, np.require(values[first * block_size : (first + step) * block_size], kind.dtype, ["C", "A"])


def mark_blocks(chunk: Array, kind: ElementType, block_size: int, is_nonzero: Array) -> None:
    """Set `is_nonzero[b]` for each block b of `chunk`, (elements,); a short last one is filled up with zeros."""
    if chunk.size % block_size:
        chunk = np.concatenate([chunk, np.zeros(-chunk.size % block_size, chunk.dtype)])
    words = chunk.view(np.uint64).reshape(-1, block_size * chunk.itemsize // 8)
    nonzero_blocks(words, kind.zero_mask, is_nonzero[: len(words)])
