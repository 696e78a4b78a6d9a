"""Operations by their definitions, beside what NumPy says, and what the interpreter refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job
from random_programs import cut, inputs_of

from omnireduce import UsageError
from omnireduce.core.dtypes import Array
from omnireduce.programs import (
    AllReduce,
    BFloat16,
    Broadcast,
    Cast,
    Expression,
    Float16,
    Float32,
    Int8,
    Int32,
    Ite,
    Local,
    MatMul,
    Maximum,
    Minimum,
    Multiplication,
    Norm,
    Pipeline,
    ReduceTensor,
    Replicated,
    Sliced,
    Sqrt,
    Summation,
    Tensor,
    Update,
    Variable,
)

N = Variable(Int32, "N")
DTypes = np.dtype[Any]


def result(expression: Expression, ranks: int = 1, **values: Any) -> list[Array]:
    """Value of an expression on each rank."""
    [outcome] = Pipeline("p", inputs_of([expression]), [expression]).interpret(values, ranks).values()
    return outcome


@pytest.mark.parametrize("dtype", [Float16, Float32, BFloat16])
def test_arithmetic_is_that_of_numpy(dtype: DTypes) -> None:
    x, y = (Tensor(dtype, N, Replicated, name) for name in "xy")
    rng = np.random.default_rng(1)
    a, b = (rng.random(50).astype(dtype) for _ in range(2))
    two = dtype.type(2)
    expected = np.where(a > b, (a + two * b) / np.sqrt(b) - a, two - b)
    [outcome] = result(Ite(x > y, (x + 2 * y) / Sqrt(y) - x, 2 - y), x=a, y=b)
    assert outcome.dtype == dtype
    np.testing.assert_array_equal(outcome, expected)


def test_division_by_zero_is_no_error() -> None:
    x = Tensor(Float32, N, Replicated, "x")
    [outcome] = result(x / (x - x), x=np.array([1, 0, -1], np.float32))
    np.testing.assert_array_equal(outcome, [np.inf, np.nan, -np.inf])


@pytest.mark.parametrize("dtype", [Int8, Float16, Float32, BFloat16])
def test_products_of_all_types(dtype: DTypes) -> None:
    x, y = Tensor(dtype, (2, 3, 4), Replicated, "x"), Tensor(dtype, (4, 5), Replicated, "y")
    rng = np.random.default_rng(1)
    a, b = rng.integers(-3, 4, (2, 3, 4)), rng.integers(-3, 4, (4, 5))
    [outcome] = result(MatMul(x, y), x=a.astype(dtype), y=b.astype(dtype))
    assert outcome.dtype == dtype
    np.testing.assert_array_equal(outcome.astype(int), a @ b)


@pytest.mark.parametrize("dtype", [Int32, Float32])
@pytest.mark.parametrize("reduction", [Summation, Multiplication, Maximum, Minimum])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_tensor_in_parts_reduces_as_the_whole(dtype: DTypes, reduction: Any, ranks: int) -> None:
    """Also where a rank has an empty part."""
    x = Tensor(dtype, 3, Sliced, "x")
    whole = np.array([-4, -2, -3]).astype(dtype)
    for part in result(ReduceTensor(reduction, x), ranks, x=cut(whole, Sliced, ranks)):
        assert part == reduction.ufunc.reduce(whole)
        assert (part.shape, part.dtype) == ((), dtype)


def test_norms_do_not_overflow_where_squares_do() -> None:
    x = Tensor(Float16, N, Sliced, "x")
    parts = [np.full(2, 300, np.float16)] * 2
    for part in result(Norm(x), 2, x=parts, N=4):
        assert part == 600  # a square is 90,000


def test_sums_of_16_bits_are_rounded_once(daemon: Daemon) -> None:
    """By the interpreter as by the service."""
    x = Tensor(Float16, N, Local, "x")
    total = AllReduce(Summation, x)
    pipeline = Pipeline("p", [x], [total])
    xs = [np.random.default_rng(rank).standard_normal(1000).astype(np.float16) for rank in range(3)]
    expected = pipeline.interpret({"x": xs}, 3)["total"][0]
    np.testing.assert_array_equal(expected, np.sum(xs, axis=0, dtype=np.float32).astype(np.float16))
    for outcome in run_job(configured(daemon.addresses), 3, lambda comm: pipeline.run(comm, {"x": xs[comm.rank]})):
        np.testing.assert_array_equal(outcome["total"], expected)


def test_a_product_overlaps_whatever_its_type_and_rows(daemon: Daemon) -> None:
    """A product of 16-bit numbers is overlapped, in more chunks than it has rows."""
    x, y = Tensor(BFloat16, (3, 4), Local, "x"), Tensor(BFloat16, (4, 5), Replicated, "y")
    product = MatMul(x, y)
    total = AllReduce(Summation, product)
    pipeline = Pipeline("p", [x, y], [total]).overlap([product, total], chunks=7)
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-2, 3, shape).astype(BFloat16) for shape in ((3, 4), (4, 5)))
    for outcome in run_job(configured(daemon.addresses), 2, lambda comm: pipeline.run(comm, {"x": a, "y": b})):
        np.testing.assert_array_equal(outcome["total"].astype(float), 2 * (a.astype(float) @ b.astype(float)))


def test_what_is_given_stays_as_it_is() -> None:
    w = Tensor(Float32, N, Replicated, "w")
    given = np.ones(3, np.float32)
    [outcome] = result(Update(w, w + 1), w=given)
    np.testing.assert_array_equal(outcome, [2] * 3)
    np.testing.assert_array_equal(given, [1] * 3)


def test_values_that_do_not_fit_are_refused() -> None:
    g, k = Tensor(Float32, N, Local, "g"), Variable(Int8, "k")
    out = Cast(Int8, g) * k
    pipeline = Pipeline("p", [g, k], [out])
    ones = np.ones(3, np.float32)
    for values, ranks, message in (
        ({"g": ones, "k": 1}, 2, "g is Local: expected a list of 2 arrays, one for each rank"),
        ({"g": [ones], "k": 1}, 2, "g has 1 arrays; expected one for each of the 2 ranks"),
        ({"g": [ones]}, 1, "no value for k: expected int8"),
        ({"g": [ones], "k": 200}, 1, "k is 200, which is out of the range of int8"),
        ({"g": [ones], "k": 1.0}, 1, "k is 1.0, a float; expected an integer: int8"),
        ({"g": [ones], "k": 1}, 0, "ranks is 0: expected an int from 1 to 4096"),
    ):
        with pytest.raises(UsageError, match=message):
            pipeline.interpret(values, ranks)
    rooted = Broadcast(g, root=2)
    with pytest.raises(UsageError, match="ranks is 2: expected an int from 3 to 4096"):
        Pipeline("p", [g], [rooted]).interpret({"g": [ones] * 2}, 2)
