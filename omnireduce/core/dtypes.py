"""The element types that the service reduces, and what its kernels need to know of each.

A block is zero when every element is +0 or -0. That is decided on bits: OR the block's 64-bit words, then drop the sign
bits of floating types with `zero_mask`. So NaN, infinities and subnormals are data, and -0 is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from omnireduce.errors import UsageError

Array = NDArray[Any]
BYTES = np.dtype(np.uint8)
ALL_BITS = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
FLOAT32_MAXEXP = 128


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type.

    `name`: what NumPy or ml_dtypes, PyTorch and JAX call it. `storage`: the NumPy type under which kernels see it.
    Narrow floats are unsigned integers there, and unsigned integers are signed ones, so that fewer kernels are compiled
    and loaded. `zero_mask` selects the bits of a 64-bit word that make an element non-zero.
    """

    name: str
    dtype: np.dtype[Any]
    storage: np.dtype[Any]
    zero_mask: np.uint64
    is_float: bool

    @property
    def is_narrow(self) -> bool:
        """Whether it is a float of fewer than 32 bits. Sums are then kept in float32, and rounded once."""
        return self.is_float and self.dtype.itemsize < 4

    @property
    def has_short_range(self) -> bool:
        """Whether it is a float with fewer bits of exponent than float32: a sum of few ranks may be infinite although
        the sum of all is not."""
        return self.is_narrow and bool(ml_dtypes.finfo(self.dtype).maxexp < FLOAT32_MAXEXP)  # type: ignore[no-untyped-call]

    @property
    def is_native(self) -> bool:
        """Whether NumPy itself has the type. The others are those of ml_dtypes."""
        return self.dtype.isbuiltin == 1

    @property
    def is_unsigned(self) -> bool:
        return self.dtype.kind == "u"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def _float(name: str, dtype: DTypeLike) -> ElementType:
    dtype = np.dtype(dtype)
    bits = dtype.itemsize * 8
    signs = sum(1 << (at + bits - 1) for at in range(0, 64, bits))
    storage = np.dtype(f"u{dtype.itemsize}") if bits < 32 else dtype
    return ElementType(name, dtype, storage, np.uint64(ALL_BITS ^ np.uint64(signs)), is_float=True)


def _integer(name: str) -> ElementType:
    return ElementType(name, np.dtype(name), np.dtype(name.removeprefix("u")), ALL_BITS, is_float=False)


_ALL = (
    _float("float16", np.float16),
    _float("bfloat16", ml_dtypes.bfloat16),
    _float("float32", np.float32),
    _float("float64", np.float64),
    *(_integer(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")),
)
ELEMENT_TYPES: dict[str, ElementType] = {kind.name: kind for kind in _ALL}
BOOL = ElementType("bool", np.dtype(np.bool_), np.dtype(np.int8), ALL_BITS, is_float=False)  # any and all, no sums
_BY_DTYPE = {kind.dtype: kind for kind in (*_ALL, BOOL)}


def number_type(dtype: DTypeLike) -> ElementType:
    """Return the element type of a NumPy dtype of numbers. Raises UsageError for one that the service cannot add."""
    kind = _BY_DTYPE.get(np.dtype(dtype))
    if kind is None or kind is BOOL:
        raise UsageError(f"cannot reduce arrays of {np.dtype(dtype)}; supported are {', '.join(ELEMENT_TYPES)}")
    return kind


def element_type(dtype: DTypeLike) -> ElementType:
    """Return the element type of a NumPy dtype, which may be bool. Raises UsageError for one that the service cannot
    reduce."""
    kind = _BY_DTYPE.get(dtype if isinstance(dtype, np.dtype) else np.dtype(dtype))
    if kind is None:
        raise UsageError(f"cannot reduce arrays of {np.dtype(dtype)}; supported are {', '.join(ELEMENT_TYPES)}, bool")
    return kind
