"""The slow, obvious oracle: what a reduction must give, in plain NumPy and in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnireduce.core.dtypes import ELEMENT_TYPES

Array = NDArray[Any]
NARROW = {element.dtype for element in ELEMENT_TYPES.values() if element.is_float and element.itemsize < 4}
STEPS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}


def reduce_in_rank_order(tensors: Sequence[Array], op: str, *, divisor: int | None = None) -> Array:
    """Combine `tensors`, one of each rank, all of one shape and dtype; every argument stays as it is.

    Floats of fewer than 32 bits are kept in float32 and rounded once. A mean is a sum divided once (by `divisor`, else
    by the number of tensors). Integers wrap, and NaN wins.
    """
    dtype = tensors[0].dtype
    wide = np.dtype(np.float32) if dtype in NARROW else dtype
    total = tensors[0].astype(wide)
    with np.errstate(all="ignore"):
        for tensor in tensors[1:]:
            total = STEPS[op](total, tensor.astype(wide)).astype(wide)
        if op == "mean":
            total = (total / wide.type(divisor or len(tensors))).astype(wide)
        return total.astype(dtype)


def reduce_by_host(hosts: Sequence[Sequence[int]], tensors: Sequence[Array], op: str) -> Array:
    """Combine the tensors of each host's ranks in order, rounded to their type, then those of the hosts. A mean is
    divided once, in the end. The sum of a host could be infinite in a narrow type, except in bfloat16: such tensors are
    combined rank by rank."""
    return reduce_by_tree(tuple(tuple(ranks) for ranks in hosts) if len(hosts) > 1 else tuple(hosts[0]), tensors, op)


def reduce_by_tree(tree: Any, tensors: Sequence[Array], op: str) -> Array:
    """As `reduce_by_host`, for any tree: a rank, or a tuple of trees that are combined in order."""
    if tensors[0].dtype in NARROW and tensors[0].dtype.name != "bfloat16":
        return reduce_in_rank_order(tensors, op)

    def combine(part: Any) -> Array:
        if isinstance(part, int):
            return tensors[part]
        return reduce_in_rank_order([combine(each) for each in part], "sum" if op == "mean" else op)

    return reduce_in_rank_order([combine(part) for part in tree], op, divisor=len(tensors))


Rows = tuple[Array, Array]  # numbers, int64 (n,), ascending, and values, (n, length)


def expected_rows(hosts: Sequence[Sequence[int]], inputs: Sequence[Rows], n_rows: int, op: str) -> Rows:
    """The union of the rows of all ranks, and their sums, as of dense tensors."""
    union = np.unique(np.concatenate([numbers for numbers, _ in inputs]))
    dense = []
    for numbers, values in inputs:
        full = np.zeros((n_rows, values.shape[1]), values.dtype)
        full[numbers] = values
        dense.append(full)
    return union, reduce_by_host(hosts, dense, op)[union]


def indices_of_runs(listed: Sequence[int], shards: int = 1, stripe_blocks: int = 64) -> list[int]:
    """The indices that runs stand for: each run's first one and how many it has, one after the other."""
    results: list[int] = []
    for index, count in zip(listed[::2], listed[1::2], strict=True):
        for _ in range(count):
            results.append(index)
            index += 1
            if index % 2**48 % stripe_blocks == 0:  # the shard's next stripe
                index += (shards - 1) * stripe_blocks
    return results


def steps_of(indices: Sequence[int]) -> bytes:
    """`indices` as steps: seven bits to a byte, the lowest ones first, and a highest bit where another byte follows."""
    encoded = bytearray()
    for before, index in pairwise([0, *indices]):
        digits = [index - before >> shift & 127 for shift in range(0, 63, 7)]
        while len(digits) > 1 and digits[-1] == 0:
            digits.pop()
        encoded += bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])
    return bytes(encoded)


def indices_of_steps(listed: bytes) -> list[int]:
    """The indices that steps stand for."""
    results, index, position = list[int](), 0, 0
    for byte in listed:
        index += byte % 128 << position
        position = position + 7 if byte >= 128 else 0
        if position == 0:
            results.append(index)
    return results


def is_number(array: Array) -> Array:
    """Per element: it is not NaN."""
    with np.errstate(invalid="ignore"):  # signalling NaN of bfloat16
        return array == array


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def assert_same_values(result: Array, expected: Array, what: str = "") -> None:
    """Equal values: NaN equals NaN, and -0 equals +0."""
    assert result.dtype == expected.dtype, f"{what}: {result.dtype}, expected {expected.dtype}"
    assert result.shape == expected.shape, f"{what}: shape {result.shape}, expected {expected.shape}"
    with np.errstate(invalid="ignore"):
        same = (result == expected) | ~(is_number(result) | is_number(expected))
    if not np.all(same):
        at = np.flatnonzero(~np.ravel(same))
        first = [(int(i), np.ravel(result)[i], np.ravel(expected)[i]) for i in at[:5]]
        raise AssertionError(f"{what}: {at.size} wrong elements, the first as (index, found, expected): {first}")


def assert_results(results: Sequence[Array], expected: Array) -> None:
    """The ranks' results are the same, bit by bit, and equal the oracle in value."""
    for rank, result in enumerate(results):
        assert_same_values(result, expected, f"rank {rank}")
        assert bits(result) == bits(results[0]), f"rank {rank} differs from rank 0 in bits"
