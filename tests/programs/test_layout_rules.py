"""Every combination of layouts: what the checker says, and that what it allows gives the right tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from random_programs import cut

from omnireduce import UsageError
from omnireduce.core.dtypes import Array
from omnireduce.programs import (
    AllGather,
    AllReduce,
    Broadcast,
    Expression,
    Int64,
    Ite,
    Layout,
    Local,
    MatMul,
    Norm,
    Pipeline,
    Recv,
    ReduceScatter,
    ReduceTensor,
    Send,
    Summation,
    Tensor,
    Update,
)
from omnireduce.programs.expressions import Float64
from omnireduce.programs.layouts import bounds

NAMES = [each.value for each in Layout]
RANKS = 3

# A row for the layout of the first operand, a column for that of the second one; "-" is an error.
POINTWISE = """
            Local       Replicated  Sliced      Sliced_2
Local       Local       Local       -           -
Replicated  Local       Replicated  Sliced      Sliced_2
Sliced      -           Sliced      Sliced      -
Sliced_2    -           Sliced_2    -           Sliced_2
"""
MATMUL = """
            Local       Replicated  Sliced      Sliced_2
Local       Local       Local       -           -
Replicated  Local       Replicated  -           Sliced_2
Sliced      -           Sliced      -           -
Sliced_2    -           -           Local       -
"""
UPDATE = """
            Local       Replicated  Sliced      Sliced_2
Local       Local       Local       -           -
Replicated  -           Replicated  -           -
Sliced      -           Sliced      Sliced      -
Sliced_2    -           Sliced_2    -           Sliced_2
"""
ONE_OPERAND = """
               Local       Replicated  Sliced      Sliced_2
AllReduce      Replicated  -           -           -
ReduceScatter  Sliced      -           -           -
AllGather      -           -           Replicated  Replicated
Broadcast      Replicated  -           -           -
Send           Local       Replicated  Sliced      Sliced_2
Recv           Local       Replicated  Sliced      Sliced_2
Norm           Local       Replicated  Replicated  Replicated
ReduceTensor   Local       Replicated  Replicated  Replicated
"""
TWO_OPERANDS: dict[str, tuple[str, Callable[[Any, Any], Expression]]] = {
    "+": (POINTWISE, lambda x, y: x + y),
    "*": (POINTWISE, lambda x, y: x * y),
    ">": (POINTWISE, lambda x, y: x > y),
    "Ite": (POINTWISE, lambda x, y: Ite(x > 0, x, y)),
    "MatMul": (MATMUL, MatMul),
    "Update": (UPDATE, Update),
}
ONE: dict[str, Callable[[Any], Expression]] = {
    "AllReduce": lambda x: AllReduce(Summation, x),
    "ReduceScatter": lambda x: ReduceScatter(Summation, x),
    "AllGather": AllGather,
    "Broadcast": Broadcast,
    "Send": lambda x: Send(x, to=1),
    "Recv": lambda x: Recv(Send(x, to=1)),
    "Norm": Norm,
    "ReduceTensor": lambda x: ReduceTensor(Summation, x),
}


def cells(table: str) -> Iterator[tuple[str, str, str]]:
    """The row, the column and what stands there."""
    header, *rows = table.strip().splitlines()
    for row in rows:
        name, *result = row.split()
        for column, each in zip(header.split(), result, strict=True):
            yield name, column, each


def pairs() -> list[tuple[str, str, str, str]]:
    return [(op, *cell) for op, (table, _) in TWO_OPERANDS.items() for cell in cells(table)]


def test_the_tables_have_every_combination() -> None:
    assert len(pairs()) == len(TWO_OPERANDS) * len(NAMES) ** 2
    assert len(list(cells(ONE_OPERAND))) == len(ONE) * len(NAMES)


def tensor(name: str, layout: str) -> Tensor:
    return Tensor(Int64, (4, 4), Layout(layout), name)


def values_on_ranks(x: Tensor, seed: int) -> list[Array]:
    """Random value of a tensor on each rank."""
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(-9, 10, (4, 4)) for _ in range(RANKS)]
    if x.type.layout.is_sliced:
        return cut(arrays[0], x.type.layout, RANKS)
    return arrays if x.type.layout is Local else [arrays[0]] * RANKS


def wholes(parts: list[Array], layout: Layout) -> list[Array]:
    """The tensor that each rank has, or has a part of."""
    if layout.is_sliced:
        return [np.concatenate(parts, axis=layout.axis(2))] * RANKS
    return parts


@pytest.mark.parametrize(("op", "one", "other", "expected"), pairs())
def test_two_operands(op: str, one: str, other: str, expected: str) -> None:
    x, y = tensor("x", one), tensor("y", other)
    make = TWO_OPERANDS[op][1]
    if expected == "-":
        with pytest.raises(UsageError, match=r"test_layout_rules\.py:\d+: .*\b(Local|Replicated|Sliced).*"):
            make(x, y)
        return
    z = make(x, y)
    assert z.type.layout.value == expected
    values = {"x": values_on_ranks(x, 1), "y": values_on_ranks(y, 2)}
    [result] = Pipeline("p", [x, y], [z]).interpret(values, RANKS).values()
    xs, ys = wholes(values["x"], x.type.layout), wholes(values["y"], y.type.layout)
    obvious: dict[str, Callable[[Array, Array], Array]] = {
        "+": np.add,
        "*": np.multiply,
        ">": np.greater,
        "Ite": lambda a, b: np.where(a > 0, a, b),
        "MatMul": np.matmul,
        "Update": lambda a, b: b,
    }
    if (op, one, other) == ("MatMul", "Sliced_2", "Sliced"):
        np.testing.assert_array_equal(np.sum(result, axis=0), xs[0] @ ys[0])  # partial sums
        return
    for rank, each in enumerate(wholes(result, z.type.layout)):
        np.testing.assert_array_equal(each, obvious[op](xs[rank], ys[rank]))


@pytest.mark.parametrize(("op", "layout", "expected"), list(cells(ONE_OPERAND)))
def test_one_operand(op: str, layout: str, expected: str) -> None:
    x = tensor("x", layout) if op != "Norm" else Tensor(Float64, (4, 4), Layout(layout), "x")
    if expected == "-":
        with pytest.raises(UsageError, match=rf"test_layout_rules\.py:\d+: {op}.*x is {layout}: "):
            ONE[op](x)
        return
    z = ONE[op](x)
    assert z.type.layout.value == expected
    if op == "Send":
        return
    values = values_on_ranks(x, 1)
    if op == "Norm":
        values = [value.astype(np.float64) for value in values]
    [result] = Pipeline("p", [x], [z]).interpret({"x": values}, RANKS).values()
    xs = wholes(values, x.type.layout)
    for rank, each in enumerate(wholes(result, z.type.layout) if z.type.shape else result):
        obvious = {
            "AllReduce": sum(xs),
            "ReduceScatter": sum(xs),
            "Broadcast": xs[0],
            "Norm": np.sqrt(np.square(xs[rank]).sum()),
            "ReduceTensor": xs[rank].sum(),
        }
        np.testing.assert_array_equal(each, obvious.get(op, xs[rank]))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_are_those_of_numpy(size: int, ranks: int) -> None:
    for rank, part in enumerate(np.array_split(np.arange(size), ranks)):
        start, stop = bounds(size, rank, ranks)
        np.testing.assert_array_equal(np.arange(start, stop), part)


def test_a_repeated_operand_may_not_be_cut_where_it_is_repeated() -> None:
    x, row = tensor("x", "Sliced"), Tensor(Int64, 4, Layout("Sliced"), "row")
    with pytest.raises(UsageError, match=r"row, .* is repeated along the dimension in which it is cut: AllGather it"):
        x + row
    column = Tensor(Int64, (4, 1), Layout("Sliced_2"), "column")
    with pytest.raises(UsageError, match=r"column, .* is repeated along the dimension in which it is cut"):
        tensor("y", "Sliced_2") + column
    assert (tensor("z", "Sliced_2") + Tensor(Int64, 4, Layout("Sliced_2"), "bias")).type.layout.value == "Sliced_2"
