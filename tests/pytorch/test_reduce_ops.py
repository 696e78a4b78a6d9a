"""Each reduction of each element type, in each collective that combines tensors. The oracle counts in Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce as fold
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import method, options, run_group
from torch import Tensor
from torch.distributed import ReduceOp

from omnireduce.torch.backend.process_group import ProcessGroup
from omnireduce.torch.backend.reduce_ops import COMPLEX, FLOATS, INTEGERS, reduction_of

pytestmark = [
    pytest.mark.usefixtures("aggregators"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),  # for complex32
]

NAMES = tuple(ReduceOp.RedOpType.__members__)
BITS: dict[str, Callable[[int, int], int]] = {
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}
REFUSED = tuple(dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2) if dtype not in FLOATS)
TYPES = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, *REFUSED)
SIZE = 3
NUMBERS = ([5, -5, 3, 0, 1, -1], [6, -4, 3, 0, 1, -2], [4, -8, 3, 0, 0, -2])  # by rank; means are exact or odd


def values(rank: int, dtype: torch.dtype) -> Tensor:
    signed = dtype.is_signed or dtype.is_floating_point
    return torch.tensor(NUMBERS[rank] if signed else [abs(each) for each in NUMBERS[rank]]).to(dtype)


def expected(name: str, dtype: torch.dtype) -> Tensor | None:
    """None: there is no such result."""
    columns = list(zip(*(values(rank, dtype).tolist() for rank in range(SIZE)), strict=True))
    kind = "bool" if dtype is torch.bool else "complex" if dtype.is_complex else "float"
    kind = "integer" if dtype in INTEGERS else kind
    if dtype in REFUSED or name == "PREMUL_SUM" or (kind == "complex" and name not in ("SUM", "AVG")):
        return None
    if name in BITS:
        results: list[Any] = [fold(BITS[name], column) for column in columns] if kind in ("integer", "bool") else []
    elif name == "AVG":
        sums = [sum(column) for column in columns]
        results = [int(math.copysign(abs(each) // SIZE, each)) for each in sums] if kind == "integer" else []
        results = results or ([each / SIZE for each in sums] if kind != "bool" else [])
    else:
        count = {"SUM": sum, "PRODUCT": math.prod, "MIN": min, "MAX": max}[name]
        results = [count(column) for column in columns]
    wide = {"float": torch.float64, "complex": torch.complex128}.get(kind)
    return torch.tensor(results, dtype=wide).to(dtype) if results else None


Found = tuple[Tensor, slice]  # a result, and which part of that of all elements it is
ALL = slice(None)


def all_reduce(group: ProcessGroup, x: Tensor, op: object) -> Found:
    group.allreduce([x], options("Allreduce", reduceOp=op)).wait()
    return x, ALL


def coalesced(group: ProcessGroup, x: Tensor, op: object) -> Found:
    group.allreduce_coalesced(list(x.split(4)), options("AllreduceCoalesced", reduceOp=op)).wait()
    return x, ALL


def reduce(group: ProcessGroup, x: Tensor, op: object) -> Found:
    before = x.clone()
    group.reduce([x], options("Reduce", reduceOp=op, rootRank=1)).wait()
    if group.getRank() == 1:
        return x, ALL
    assert same(x, before)
    return x[:0], slice(0)


def reduce_scatter(group: ProcessGroup, x: Tensor, op: object) -> Found:
    """Reduce-scatter with parts of one, two and three elements."""
    parts, part = list(x.split([1, 2, 3])), [slice(0, 1), slice(1, 3), slice(3, 6)][group.getRank()]
    group.reduce_scatter([x[part]], [parts], options("ReduceScatter", reduceOp=op)).wait()
    return x[part], part


def into_its_own_input(group: ProcessGroup, x: Tensor, op: object) -> Found:
    part = slice(2 * group.getRank(), 2 * group.getRank() + 2)
    opts = options("ReduceScatter", reduceOp=op)
    method(group, "reduce_scatter_single", "_reduce_scatter_base")(x[part], x, opts).wait()
    return x[part], part


def same(one: Tensor, other: Tensor) -> bool:
    """The same bits."""
    return one.dtype == other.dtype and one.tolist() == other.tolist()


def wrong(collective: Callable[..., Found], group: ProcessGroup, name: str, dtype: torch.dtype) -> str:
    """Fault in a result, or in the error if the operation is impossible; "" if all is right."""
    x, result = values(group.getRank(), dtype), expected(name, dtype)
    op = dist._make_nccl_premul_sum(0.5) if name == "PREMUL_SUM" else ReduceOp.RedOpType.__members__[name]
    try:
        outcome, part = collective(group, x, op)
    except RuntimeError as error:
        is_named = str(dtype).removeprefix("torch.") in str(error)
        is_kept = torch.equal(x.view(torch.uint8), values(group.getRank(), dtype).view(torch.uint8))
        return "" if result is None and is_named and is_kept else f"{name} of {dtype}: {error}; {x}"
    is_right = result is not None and same(outcome, result[part])
    return "" if is_right else f"{name} of {dtype}: {outcome}, expected {part} of {result}"


@pytest.mark.parametrize("collective", [all_reduce, coalesced, reduce, reduce_scatter, into_its_own_input])
def test_each_result_or_an_error_before_a_tensor_is_touched(collective: Callable[..., Found]) -> None:
    def run(group: ProcessGroup, rank: int) -> list[str]:
        results = [wrong(collective, group, name, dtype) for dtype in TYPES for name in NAMES]
        return [result for result in results if result]

    assert run_group(SIZE, run) == [[]] * SIZE


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_mean_of_sparse_integers(dtype: torch.dtype) -> None:
    def run(group: ProcessGroup, rank: int) -> Tensor:
        x = torch.sparse_coo_tensor(
            torch.tensor([[0, 2, 5, 6, 7, 9]]), values(rank, dtype), (10,), check_invariants=True
        )
        group.allreduce([x], options("Allreduce", reduceOp=ReduceOp.AVG)).wait()
        return x._values()

    result = expected("AVG", dtype)
    assert result is not None
    assert all(same(each, result) for each in run_group(SIZE, run))


def test_rows_without_elements() -> None:
    def run(group: ProcessGroup, rank: int) -> list[int]:
        x = torch.sparse_coo_tensor(torch.tensor([[rank, 4]]), torch.zeros(2, 0), (5, 0), check_invariants=True)
        group.allreduce([x]).wait()
        return [*x.shape, *x._indices()[0].tolist()]

    assert run_group(2, run) == [[5, 0, 0, 1, 4]] * 2


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([], "no type came"),
        ([torch.ones(1), torch.ones(1).int()], "float32 and int32 came"),
        ([torch.eye(2).to_sparse(), torch.eye(2)], "float32 and float32, sparse_coo came"),
        ([torch.eye(2).to_sparse().bool()], "bool, sparse_coo cannot be combined"),
    ],
)
def test_what_cannot_be_combined_is_named(tensors: list[Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reduction_of(ReduceOp.SUM, tensors)
