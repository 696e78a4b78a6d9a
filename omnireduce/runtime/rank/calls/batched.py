"""Calls for many arrays, or tables. Arrays of one type travel in one exchange, but each large array in its own.

All exchanges of a batch are under way together. A summary of the whole batch travels with each exchange. So ranks whose
batches differ get an error, not a sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnireduce.core.descriptor import BOOL_OPS
from omnireduce.core.dtypes import Array, element_type
from omnireduce.core.wire.blocks import MAX_BLOCKS
from omnireduce.errors import UsageError, a_type
from omnireduce.kernels.codecs.table import NONE
from omnireduce.runtime.rank.calls.arguments import check_array, check_rows, flat_view, two_that_share
from omnireduce.runtime.rank.calls.single import Call, CallContext, Rows, check_codec, reduction, rows

T = TypeVar("T")
Table = tuple[Array, NDArray[Any], int]
"""(indices, values, n_rows), as `allreduce_rows` takes them."""
FUSED_BYTES = 1 << 19  # largest array that is copied to travel with others: a larger copy costs more than an exchange
DEEPEST = 50


class _Leaf(NamedTuple):
    """An array of a group, and its path in the group, as in Python: ['layer'][0]."""

    path: str
    array: Array


def arrays(context: CallContext, x: object, *, op: str, name: str, codec: str | None = None) -> list[Call[Any]]:
    """Calls that combine all arrays in `x` in place. `codec` encodes the arrays that it works on."""
    if codec is not None:
        context = context._replace(codec=check_codec(codec))
    leaves = list(_leaves(x, ""))
    _check_apart(leaves)
    calls: list[Call[Any]] = []
    everything = _digest([(leaf.path, leaf.array.shape, str(leaf.array.dtype)) for leaf in leaves])
    group = f"{_many(len(leaves), 'array')} {everything}"
    for few in _together(leaves, _exchange_of):
        if len(few) == 1:
            calls.append(reduction(context, "allreduce", few[0].array, op=op, name=name, group=group))
        else:
            calls.append(_fused(context, few, op, name, group))
    if codec not in (None, NONE) and calls and all(call.codec is None for call in calls):
        raise UsageError(f"codec '{codec}' works on no array of the group: expected sum or mean of arrays of float32")
    return calls or [_fused(context, [], op, name, group)]  # if another rank's group has arrays, all ranks get an error


class Batch(NamedTuple):
    """Calls for several tables. `result` makes the results of the tables from the results of the calls."""

    calls: list[Call[Rows[Any]]]
    result: Callable[[list[Rows[Any]]], list[Rows[Any]]]


def tables(context: CallContext, given: Sequence[Table], op: str, name: str) -> Batch:
    """Row-sparse sums of several tables."""
    if not isinstance(given, list | tuple):
        raise UsageError(f"tables is {a_type(given)}; expected a list of (indices, values, n_rows)")
    for at, table in enumerate(given):
        _check_table(table, f"tables[{at}]")
    together = _together(enumerate(given), lambda pair: _format(pair[1]))
    group = f"{_many(len(given), 'table')} {_digest([(str(_format(table)), int(table[2])) for table in given])}"
    calls = [
        rows(context, *_stacked([table for _, table in few]), op=op, name=name, group=group) for few in together or [[]]
    ]

    def result(found: list[Rows[Any]]) -> list[Rows[Any]]:
        placed = dict[int, Rows[Any]]()
        for few, one in zip(together, found, strict=False):
            parts = _unstacked([table for _, table in few], one)
            placed.update(zip([at for at, _ in few], parts, strict=True))
        return [placed[at] for at in range(len(given))]

    return Batch(calls, result)


def _check_table(table: object, what: str) -> None:
    if not isinstance(table, list | tuple) or len(table) != 3:
        raise UsageError(f"{what} is {a_type(table)}; expected (indices, values, n_rows)")
    try:
        element_type(check_array(table[1], "values").dtype)
        check_rows(table[0], table[1], table[2])
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None


def _exchange_of(leaf: _Leaf) -> Hashable:
    """A key that is the same for arrays that travel together."""
    return leaf.array.dtype if leaf.array.nbytes <= FUSED_BYTES else id(leaf.array)


def _format(table: Table) -> Hashable:
    """A key that is the same for tables that travel together. It must be the same on all ranks, so it leaves out the
    number of this rank's rows."""
    return table[1].dtype, table[1].shape[1]


def _together(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """The items grouped by key, in the order of the first item of each key."""
    by_key: dict[Hashable, list[T]] = {}
    for item in items:
        by_key.setdefault(key(item), []).append(item)
    return list(by_key.values())


def _leaves(x: Any, path: str, depth: int = 0) -> Iterator[_Leaf]:
    """The arrays in `x`, in an order that is the same on all ranks."""
    if depth > DEEPEST:
        raise UsageError(f"x is nested more than {DEEPEST} deep")
    if isinstance(x, dict):
        keys = sorted(((type(key).__name__, repr(key), at) for at, key in enumerate(x)))
        for (kind, said, _), (other, also, _) in pairwise(keys):
            if (kind, said) == (other, also):
                raise UsageError(f"x{path} has two keys {said}: the ranks could not tell which is which")
        values = list(x.values())
        for _, said, at in keys:
            yield from _leaves(values[at], f"{path}[{said}]", depth + 1)
    elif isinstance(x, list | tuple):
        for at, part in enumerate(x):
            yield from _leaves(part, f"{path}[{at}]", depth + 1)
    else:
        array = check_array(x, f"x{path}")
        flat_view(array, f"x{path}", writable=True)
        yield _Leaf(path, array)


def _check_apart(leaves: Sequence[_Leaf]) -> None:
    sharing = two_that_share([leaf.array for leaf in leaves])
    if sharing:
        path, other = (leaves[at].path for at in sharing)
        raise UsageError(f"x{path} and x{other} share memory; expected each array once")


def _fused(context: CallContext, leaves: Sequence[_Leaf], op: str, name: str, group: str) -> Call[Any]:
    """A call for arrays of one dtype, copied into one array, which is copied back in the end."""
    flats = [np.asarray(leaf.array).reshape(-1) for leaf in leaves]
    dtype = flats[0].dtype if flats else np.dtype(np.bool_ if op in BOOL_OPS else np.float32)
    stops = np.cumsum([0, *(flat.size for flat in flats)])
    nbytes = int(stops[-1]) * dtype.itemsize
    whole = context.with_pool(lambda pool: pool.take(nbytes))[:nbytes].view(dtype)
    parts = [whole[start:stop] for start, stop in pairwise(stops.tolist())]
    for part, flat in zip(parts, flats, strict=True):
        part[:] = flat

    def put_back() -> None:
        for part, flat in zip(parts, flats, strict=True):
            flat[:] = part

    call = reduction(context, "allreduce", whole, op=op, name=name, group=group)
    return call._replace(writes=(*call.writes, *flats), put_back=put_back)


def _stacked(given: Sequence[Table]) -> Table:
    """Tables of one row length, stacked into one table."""
    if not given:
        return np.zeros(0, np.int64), np.zeros((0, 1), np.float32), 0
    if len(given) == 1:
        return given[0]
    starts = _starts(given)
    if starts[-1] >= MAX_BLOCKS:
        raise UsageError(f"tables of one dtype and row length have {starts[-1]} rows in all; expected fewer than 2**48")
    numbers = np.concatenate([table[0].astype(np.int64) + start for table, start in zip(given, starts, strict=False)])
    return numbers, np.concatenate([table[1] for table in given]), starts[-1]


def _unstacked(given: Sequence[Table], found: Rows[Any]) -> list[Rows[Any]]:
    """The rows of each table in a stack, with the table's own row numbers."""
    numbers, values = found
    starts = _starts(given)
    cuts = np.searchsorted(numbers, starts).tolist()
    return [
        (numbers[cut:end] - start, values[cut:end]) for start, (cut, end) in zip(starts, pairwise(cuts), strict=False)
    ]


def _starts(given: Sequence[Table]) -> list[int]:
    starts = [0]
    for _, _, n_rows in given:
        starts.append(starts[-1] + int(n_rows))
    return starts


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode(errors="backslashreplace")).hexdigest()[:16]
