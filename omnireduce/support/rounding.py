"""Products and means in the type of their arrays. Only the exact value is rounded, once, not a factor before."""

from __future__ import annotations

from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array

WIDE = np.dtype(np.float64)


def scaled(x: Array, factor: float, out: Array | None = None) -> Array:
    """`x` times `factor`, into `out` (None: a new array of its shape and dtype), which may be `x`.

    The product of a float of fewer than 32 bits is that of float32, rounded. The product of an integer is that of
    float64, cut off towards zero.
    """
    out = np.empty_like(x) if out is None else out
    return np.multiply(x, factor, out=out, dtype=_product_type(x.dtype), casting="unsafe")


def integer_mean(total: Array, count: int, out: Array, factor: float = 1.0) -> Array:
    """The integers of `total`, divided by `count` and times `factor`, cut off towards zero: into `out`, of the same
    dtype, which may be `total`."""
    if factor != 1:
        return np.divide(total * WIDE.type(factor), count, out=out, casting="unsafe")
    fits = count <= np.iinfo(total.dtype).max
    divisor = total.dtype.type(count) if fits else np.int64(count)
    multiple = total - np.fmod(total, divisor)  # the next multiple of the divisor towards zero
    return np.floor_divide(multiple, divisor, out=out, casting="unsafe")  # type: ignore[no-any-return]


def _product_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which a product is computed before it is rounded."""
    if dtype.kind in "iu":
        return WIDE
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype
