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
from omnireduce.runtime.rank.calls.arguments import check_array, check_rows, find_overlap, flat_view
from omnireduce.runtime.rank.calls.single import Call, CallContext, Rows, check_codec, reduction, rows

T = TypeVar("T")
Table = tuple[Array, NDArray[Any], int]
"""(indices, values, n_rows), as `allreduce_rows` takes them."""
FUSED_BYTES = 1 << 19  # largest array that is copied to travel with others: a larger copy costs more than an exchange
MAX_DEPTH = 50


class _Leaf(NamedTuple):
    """An array of a group, and its path in the group, as in Python: ['layer'][0]."""

    path: str
    array: Array


def arrays(context: CallContext, x: object, *, op: str, name: str, codec: str | None = None) -> list[Call[Any]]:
    """Calls that combine all arrays in `x` in place. `codec` encodes the arrays that it works on."""
    if codec is not None:
        context = context._replace(codec=check_codec(codec))
    leaves = list(_leaves(x, ""))
    _check_no_overlap(leaves)
    calls: list[Call[Any]] = []
    summary = _digest([(leaf.path, leaf.array.shape, str(leaf.array.dtype)) for leaf in leaves])
    group = f"{_count_text(len(leaves), 'array')} {summary}"
    for members in _group_by(leaves, _exchange_key):
        if len(members) == 1:
            calls.append(reduction(context, "allreduce", members[0].array, op=op, name=name, group=group))
        else:
            calls.append(_fused(context, members, op, name, group))
    if codec not in (None, NONE) and calls and all(call.codec is None for call in calls):
        raise UsageError(f"codec '{codec}' works on no array of the group: expected sum or mean of arrays of float32")
    return calls or [_fused(context, [], op, name, group)]  # if another rank's group has arrays, all ranks get an error


class Batch(NamedTuple):
    """Calls for several tables. `result` makes the results of the tables from the results of the calls."""

    calls: list[Call[Rows[Any]]]
    result: Callable[[list[Rows[Any]]], list[Rows[Any]]]


def tables(context: CallContext, inputs: Sequence[Table], op: str, name: str) -> Batch:
    """Row-sparse sums of several tables."""
    if not isinstance(inputs, list | tuple):
        raise UsageError(f"tables is {a_type(inputs)}; expected a list of (indices, values, n_rows)")
    for index, table in enumerate(inputs):
        _check_table(table, f"tables[{index}]")
    groups = _group_by(enumerate(inputs), lambda pair: _table_key(pair[1]))
    group = (
        f"{_count_text(len(inputs), 'table')} {_digest([(str(_table_key(table)), int(table[2])) for table in inputs])}"
    )
    calls = [
        rows(context, *_stacked([table for _, table in members]), op=op, name=name, group=group)
        for members in groups or [[]]
    ]

    def result(results: list[Rows[Any]]) -> list[Rows[Any]]:
        by_index = dict[int, Rows[Any]]()
        for members, stacked in zip(groups, results, strict=False):
            parts = _unstacked([table for _, table in members], stacked)
            by_index.update(zip([index for index, _ in members], parts, strict=True))
        return [by_index[index] for index in range(len(inputs))]

    return Batch(calls, result)


def _check_table(table: object, name: str) -> None:
    if not isinstance(table, list | tuple) or len(table) != 3:
        raise UsageError(f"{name} is {a_type(table)}; expected (indices, values, n_rows)")
    try:
        element_type(check_array(table[1], "values").dtype)
        check_rows(table[0], table[1], table[2])
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _exchange_key(leaf: _Leaf) -> Hashable:
    """A key that is the same for arrays that travel together."""
    return leaf.array.dtype if leaf.array.nbytes <= FUSED_BYTES else id(leaf.array)


def _table_key(table: Table) -> Hashable:
    """A key that is the same for tables that travel together. It must be the same on all ranks, so it leaves out the
    number of this rank's rows."""
    return table[1].dtype, table[1].shape[1]


def _group_by(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """The items grouped by key, in the order of the first item of each key."""
    by_key: dict[Hashable, list[T]] = {}
    for item in items:
        by_key.setdefault(key(item), []).append(item)
    return list(by_key.values())


def _leaves(x: Any, path: str, depth: int = 0) -> Iterator[_Leaf]:
    """The arrays in `x`, in an order that is the same on all ranks."""
    if depth > MAX_DEPTH:
        raise UsageError(f"x is nested more than {MAX_DEPTH} deep")
    if isinstance(x, dict):
        keys = sorted(((type(key).__name__, repr(key), index) for index, key in enumerate(x)))
        for (kind, text, _), (next_kind, next_text, _) in pairwise(keys):
            if (kind, text) == (next_kind, next_text):
                raise UsageError(f"x{path} has two keys {text}: the ranks could not tell which is which")
        values = list(x.values())
        for _, text, index in keys:
            yield from _leaves(values[index], f"{path}[{text}]", depth + 1)
    elif isinstance(x, list | tuple):
        for index, part in enumerate(x):
            yield from _leaves(part, f"{path}[{index}]", depth + 1)
    else:
        array = check_array(x, f"x{path}")
        flat_view(array, f"x{path}", writable=True)
        yield _Leaf(path, array)


def _check_no_overlap(leaves: Sequence[_Leaf]) -> None:
    overlapping = find_overlap([leaf.array for leaf in leaves])
    if overlapping:
        path, other_path = (leaves[index].path for index in overlapping)
        raise UsageError(f"x{path} and x{other_path} share memory; expected each array once")


def _fused(context: CallContext, leaves: Sequence[_Leaf], op: str, name: str, group: str) -> Call[Any]:
    """A call for arrays of one dtype, copied into one array, which is copied back in the end."""
    flats = [np.asarray(leaf.array).reshape(-1) for leaf in leaves]
    dtype = flats[0].dtype if flats else np.dtype(np.bool_ if op in BOOL_OPS else np.float32)
    stops = np.cumsum([0, *(flat.size for flat in flats)])
    nbytes = int(stops[-1]) * dtype.itemsize
    fused = context.with_pool(lambda pool: pool.take(nbytes))[:nbytes].view(dtype)
    parts = [fused[start:stop] for start, stop in pairwise(stops.tolist())]
    for part, flat in zip(parts, flats, strict=True):
        part[:] = flat

    def put_back() -> None:
        for part, flat in zip(parts, flats, strict=True):
            flat[:] = part

    call = reduction(context, "allreduce", fused, op=op, name=name, group=group)
    return call._replace(writes=(*call.writes, *flats), put_back=put_back)


def _stacked(tables_to_stack: Sequence[Table]) -> Table:
    """Tables of one row length, stacked into one table."""
    if not tables_to_stack:
        return np.zeros(0, np.int64), np.zeros((0, 1), np.float32), 0
    if len(tables_to_stack) == 1:
        return tables_to_stack[0]
    starts = _starts(tables_to_stack)
    if starts[-1] >= MAX_BLOCKS:
        raise UsageError(f"tables of one dtype and row length have {starts[-1]} rows in all; expected fewer than 2**48")
    numbers = np.concatenate(
        [table[0].astype(np.int64) + start for table, start in zip(tables_to_stack, starts, strict=False)]
    )
    return numbers, np.concatenate([table[1] for table in tables_to_stack]), starts[-1]


def _unstacked(stacked_tables: Sequence[Table], rows_of_stack: Rows[Any]) -> list[Rows[Any]]:
    """The rows of each table in a stack, with the table's own row numbers."""
    numbers, values = rows_of_stack
    starts = _starts(stacked_tables)
    cuts = np.searchsorted(numbers, starts).tolist()
    return [
        (numbers[cut:end] - start, values[cut:end]) for start, (cut, end) in zip(starts, pairwise(cuts), strict=False)
    ]


def _starts(stacked_tables: Sequence[Table]) -> list[int]:
    starts = [0]
    for _, _, n_rows in stacked_tables:
        starts.append(starts[-1] + int(n_rows))
    return starts


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode(errors="backslashreplace")).hexdigest()[:16]
