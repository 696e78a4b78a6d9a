"""What the arguments of collectives must be, and how they are made ready."""

from __future__ import annotations

import zlib
from typing import Any, Literal, cast

import numpy as np

from omnireduce.dtypes import Array, ElementType
from omnireduce.errors import UsageError
from omnireduce.kernels.reduce import OPS
from omnireduce.kernels.scatter import add_rows
from omnireduce.wire import NAME_CHARACTERS


def check_array(x: Array, what: str) -> Array:
    """`x` itself. Raises UsageError when it is no array."""
    if not isinstance(x, np.ndarray):
        raise UsageError(f"{what} is a {type(x).__name__}; expected a numpy.ndarray")
    return x


def flat_view(x: Array, what: str, *, writable: bool, instead: str = "pass a copy") -> Array:
    """`x` as a flat view. Raises UsageError when that would need a copy, or when the array cannot take the result."""
    if not check_array(x, what).flags.c_contiguous:
        raise UsageError(f"{what} is not C-contiguous; pass numpy.ascontiguousarray({what}) or work on its base array")
    if writable and not x.flags.writeable:
        raise UsageError(f"{what} is read-only and cannot take the result; {instead}")
    if x.dtype.hasobject:
        raise UsageError(f"{what} holds Python objects, which cannot be sent")
    return np.asarray(x).reshape(-1)


def dtype_text(dtype: np.dtype[Any]) -> str:
    """A dtype for a descriptor, which has little room: structured ones with many fields show a checksum."""
    text = str(dtype)
    return text if len(text) <= 60 and text.isascii() else f"{dtype.str} {zlib.crc32(text.encode()):08x}"


def check_name(name: str) -> str:
    if len(name) > NAME_CHARACTERS:
        raise UsageError(f"a name of {len(name)} characters; expected at most {NAME_CHARACTERS}")
    if not name.isprintable():
        raise UsageError(f"the name {name!r} has characters that cannot be shown")
    return name


def check_op(op: str, element: ElementType) -> Literal["sum", "mean", "min", "max", "prod"]:
    if op not in OPS:
        raise UsageError(f"op {op!r}: expected one of {', '.join(OPS)}")
    if op == "mean" and not element.is_float:
        raise UsageError(f"the mean of {element.name} is not an {element.name}; convert to a float type first")
    return cast(Literal["sum", "mean", "min", "max", "prod"], op)


def combine_duplicates(numbers: Array, rows: Array, half: bool) -> tuple[Array, Array]:
    """Sort rows by number and add equal ones, in the order given; 16-bit floats are added in float32."""
    if numbers.size == 0 or np.all(numbers[1:] > numbers[:-1]):
        return numbers, rows
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True])))
    unique = ordered[starts[:-1]]
    values = rows.astype(np.float32) if half else rows
    out = np.empty((len(unique), rows.shape[1]), values.dtype)
    add_rows(values, order, starts, out)
    return unique, out.astype(rows.dtype, copy=False)
