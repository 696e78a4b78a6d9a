"""Tensors that a random reduction test needs: blocks of data and of zeros, and every kind of awkward value."""

from __future__ import annotations

from typing import Any

import numpy as np

from omnireduce.core.dtypes import ELEMENT_TYPES

Array = np.ndarray[Any, np.dtype[Any]]
DTYPES = tuple(ELEMENT_TYPES)
OPS = ("sum", "mean", "min", "max", "prod")
CASES = [(dtype, op) for dtype in DTYPES for op in OPS if op != "mean" or ELEMENT_TYPES[dtype].is_float]


def awkward_values(dtype: str) -> Array:
    """NaN, infinities, -0.0, subnormals and the limits of floats; the limits of integers, signed and unsigned."""
    element = ELEMENT_TYPES[dtype]
    if not element.is_float:
        limits = np.iinfo(element.dtype)
        return np.array([limits.min, 0, 1, limits.max // 2, limits.max // 2 + 1, limits.max], element.dtype)
    width = element.itemsize * 8
    unsigned = np.dtype(f"u{element.itemsize}")
    infinity = int(np.array([np.inf]).astype(element.dtype).view(unsigned)[0])
    sizes = [0, 1, infinity - 1, infinity, infinity + (~infinity & (infinity >> 1))]  # the last one is a NaN
    codes = sizes + [size | 1 << (width - 1) for size in sizes]
    return np.array(codes, unsigned).view(element.dtype)


def random_values(rng: np.random.Generator, dtype: str, size: int) -> Array:
    """Numbers of moderate size, or any bits at all."""
    element = ELEMENT_TYPES[dtype]
    if not element.is_float or rng.random() < 0.2:
        return np.frombuffer(rng.bytes(size * element.itemsize), element.dtype).copy()
    with np.errstate(all="ignore"):
        return (rng.standard_normal(size) * 2.0 ** rng.integers(-6, 7)).astype(element.dtype)


def sparse_tensor(
    rng: np.random.Generator, dtype: str, elements: int, block_size: int, density: float, awkward: float = 0.1
) -> Array:
    """(elements,) of `dtype`, of which about `density` of the blocks are not zero.

    Of these, some have a single element, and `awkward` of them awkward values. Zero blocks of floats hold some -0.0.
    """
    element = ELEMENT_TYPES[dtype]
    blocks = -(-elements // block_size)
    data = random_values(rng, dtype, blocks * block_size).reshape(blocks, block_size)
    for block in np.flatnonzero(rng.random(blocks) < awkward):
        some = rng.random(block_size) < rng.random()
        data[block, some] = rng.choice(awkward_values(dtype), int(some.sum()))
    for block in np.flatnonzero(rng.random(blocks) < 0.2):
        keep, value = rng.integers(block_size), data[block].copy()
        data[block] = 0
        data[block, keep] = value[keep]
    empty = rng.random(blocks) >= density
    data[empty] = np.zeros((), element.dtype)
    if element.is_float:
        data[empty & (rng.random(blocks) < 0.3)] = np.array(-0.0, element.dtype)
    return data.reshape(-1)[:elements].copy()


def some_rows(rng: np.random.Generator, dtype: str, n_rows: int, length: int) -> tuple[Array, Array]:
    """Rows of any numbers, int64 (n,), and (n, length); of some ranks none or all."""
    numbers = np.flatnonzero(rng.random(n_rows) < rng.choice([0.0, 0.1, 0.5, 1.0]))
    values = sparse_tensor(rng, dtype, numbers.size * length, length, rng.random())
    return numbers, values.reshape(-1, length)
