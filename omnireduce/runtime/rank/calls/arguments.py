"""Arguments of collectives: checks, and conversions."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import numpy as np

from omnireduce.core.descriptor import Op
from omnireduce.core.dtypes import Array, ElementType
from omnireduce.core.wire.blocks import MAX_BLOCKS, MAX_ELEMENTS
from omnireduce.errors import UsageError, a_type
from omnireduce.kernels.reduce import OPS
from omnireduce.kernels.scatter import add_rows
from omnireduce.protocol.collective.dense_operands import as_writable

MAX_SHOWN_BITS = 1024  # the longest integer that an error shows


def whole_number(value: object, name: str) -> int:
    """An integer of any type as an int. Raises UsageError for anything else. A bool is most likely a mistake, so it is
    refused, too."""
    try:
        if not isinstance(value, bool):
            number = operator.index(value)  # type: ignore[arg-type]  # that is the question
            if number.bit_length() > MAX_SHOWN_BITS:
                raise UsageError(f"{name} is an integer of {number.bit_length()} bits, which is out of any range")
            return number
    except TypeError:
        pass
    raise UsageError(f"{name} is {value!r}, {a_type(value)}; expected an int")


NAMES_PER_TABLE = 4096  # the least number of names that are remembered; at most twice as many are


class Names:
    """Names of collectives, each with the thread that used it first. It owns the name until it has ended.

    Two threads that use one name in turn may do so in another order on another rank, and nothing would tell their
    tensors apart. A program may use a new name in each step, so names that were not used for long are forgotten: a name
    in use moves from the older table to the newer table. When that is full, it becomes the older table.
    """

    def __init__(self) -> None:
        self._newer: dict[str, weakref.ref[threading.Thread]] = {}
        self._older: dict[str, weakref.ref[threading.Thread]] = {}

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def claim(self, name: str, thread: threading.Thread) -> None:
        """Raise UsageError if the name belongs to another thread; else it belongs to `thread` from now on."""
        owner_reference = self._newer.get(name)
        if owner_reference is not None and owner_reference() is thread:  # nearly always
            return
        owner_reference = owner_reference or self._older.get(name)
        owner = None if owner_reference is None else owner_reference()
        if owner is not None and owner is not thread and owner.is_alive():
            raise UsageError(
                f"the name '{name}' belongs to thread '{owner.name}', which used it first; thread '{thread.name}' must "
                "use another one: the ranks tell threads apart by the names of their collectives, and nothing else"
            )
        if len(self._newer) >= NAMES_PER_TABLE:
            self._older, self._newer = self._newer, {}
        self._newer[name] = weakref.ref(thread)


def check_array(x: Array, name: str) -> Array:
    """`x` itself. Raises UsageError when it is no array, or a masked array."""
    if type(x) is np.ndarray:  # nearly always true
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError(f"{name} is a masked array, and masks are not sent; pass an ordinary array")
    if isinstance(x, np.ndarray):
        return x
    is_number = isinstance(x, np.generic | int | float)
    advice = f": make one of it first, {name} = numpy.array([{name}])" if is_number else ""
    raise UsageError(f"{name} is {a_type(x)}; expected a numpy.ndarray{advice}")


def flat_view(x: Array, name: str, *, writable: bool, advice: str = "pass a copy") -> Array:
    """`x` as a flat view. Raises UsageError when that would need a copy, or when the array cannot take the result."""
    if not check_array(x, name).flags.c_contiguous:
        raise UsageError(f"{name} is not C-contiguous; pass numpy.ascontiguousarray({name}) or work on its base array")
    if writable and not x.flags.writeable:
        raise UsageError(f"{name} is read-only and cannot take the result; {advice}")
    if x.dtype.hasobject:
        raise UsageError(f"{name} holds Python objects, which cannot be sent")
    if x.dtype.itemsize == 0:
        raise UsageError(f"{name} has elements of 0 bytes, so there is nothing to send; expected at least 1 byte")
    return np.asarray(x).reshape(-1)


def find_overlap(arrays: Sequence[Array]) -> tuple[int, int] | None:
    """The indices of two of these contiguous arrays that share memory; None if no two do."""
    intervals = sorted((array.ctypes.data, array.nbytes, index) for index, array in enumerate(arrays) if array.nbytes)
    for (start, nbytes, index), (next_start, _, next_index) in pairwise(intervals):
        if start + nbytes > next_start:
            return index, next_index
    return None


def check_name(name: object, owner: threading.Thread) -> str:
    """The name of a collective. Raises UsageError when it is no str, or empty in a thread other than the `owner` of the
    communicator: then nothing would tell which threads' tensors belong together."""
    if name is None:
        raise UsageError("name is None; leave it out for a collective without a name")
    if not isinstance(name, str):
        raise UsageError(f"name is {a_type(name)}; expected a str")
    caller = threading.current_thread()
    if not name and caller is not owner:
        raise UsageError(
            f"a collective without a name from thread '{caller.name}', but the communicator belongs to thread "
            f"'{owner.name}': the ranks would not know which threads' tensors belong together. Give it name=..., the "
            "same on every rank, or make a communicator in this thread"
        )
    return str(name)


def check_op(op: object) -> Op:
    if not isinstance(op, str) or op not in OPS:
        raise UsageError(f"op {op!r}: expected one of {', '.join(OPS)}")
    return cast(Op, str(op))


def check_root(root: object, size: int, name: str = "root") -> int:
    """The argument `name`, a rank, as an int. Raises UsageError unless the job has this rank."""
    number = whole_number(root, name)
    if not 0 <= number < size:
        raise UsageError(f"{name} {number}: expected 0 to {size - 1}")
    return number


def check_rows(indices: Array, values: Array, n_rows: object) -> int:
    """`n_rows` as an int. Raises UsageError unless these arguments of `allreduce_rows` fit together."""
    check_array(indices, "indices")
    if indices.ndim != 1 or values.ndim != 2 or len(indices) != len(values) or values.shape[1] == 0:
        expected = "indices (n,) and values (n, row length) with a row length of at least 1"
        raise UsageError(f"expected {expected}, got {indices.shape} and {values.shape}")
    if not np.issubdtype(indices.dtype, np.integer):
        raise UsageError(f"expected integer indices, got {indices.dtype}")
    rows, length = whole_number(n_rows, "n_rows"), values.shape[1]
    largest = min(MAX_BLOCKS, -(-MAX_ELEMENTS // length)) - 1
    if not 0 <= rows <= largest:
        raise UsageError(f"n_rows {rows}: expected 0 to {largest} for rows of {length} elements")
    if indices.size and not rows:
        raise UsageError(f"{indices.size} indices, but n_rows is 0; expected none")
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < rows:
        raise UsageError(f"indices from {indices.min()} to {indices.max()}: expected 0 to {rows - 1}")
    return rows


def combine_duplicates(numbers: Array, rows: Array, element: ElementType) -> tuple[Array, Array]:
    """Sort rows by number. Rows of one number are added in the given order; 16-bit floats are added in float32."""
    if numbers.size == 0 or np.all(numbers[1:] > numbers[:-1]):
        return numbers, rows
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True])))
    unique = ordered[starts[:-1]]
    values = rows.astype(np.float32) if element.is_narrow else rows.view(element.storage)
    out = np.empty((len(unique), rows.shape[1]), values.dtype)
    add_rows(as_writable(values), order, starts, out)
    return unique, out.astype(rows.dtype) if element.is_narrow else out.view(rows.dtype)
