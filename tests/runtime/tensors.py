"""Test data: tensors that are zero in most blocks, different on every rank and the same in every run."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnireduce.core.dtypes import ELEMENT_TYPES

Array = NDArray[Any]


def sparse(
    rank: int, dtype: str, shape: Sequence[int] = (1000,), *, density: float = 0.4, block_size: int = 256, seed: int = 1
) -> Array:
    """Random values, integers from the whole range, in about `density` of the blocks; zeros elsewhere."""
    rng = np.random.default_rng((zlib.crc32(dtype.encode()), rank, seed))
    kind, elements = ELEMENT_TYPES[dtype], int(np.prod(shape, dtype=np.int64))
    if kind.is_float:
        flat = rng.uniform(-2, 2, elements).astype(kind.dtype)
    else:
        limits = np.iinfo(kind.dtype)
        flat = rng.integers(limits.min, limits.max, elements, kind.dtype, endpoint=True)
    blocks = -(-elements // block_size)
    flat[np.repeat(rng.random(blocks) >= density, block_size)[:elements]] = 0
    return flat.reshape(shape)
