"""Layers that several ranks share, and dropout that does not depend on how they do."""

from __future__ import annotations

import numpy as np
import pytest
from random_programs import cut

from omnireduce import UsageError
from omnireduce.core.dtypes import Array
from omnireduce.programs import (
    AllGather,
    Cast,
    Dropout,
    Expression,
    Float16,
    Float32,
    Float64,
    Int32,
    Layout,
    Local,
    Pipeline,
    Replicated,
    Sliced,
    Sliced_2,
    Tensor,
    Variable,
)
from omnireduce.programs.library import model_parallel, pipeline_parallel, schedules

T, K, H = 13, 10, 6


def whole(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def dropped(x: Array, p: float, seed: int, step: int) -> Array:
    """Apply Dropout to a whole array, by one expression on one rank."""
    t = Tensor(Float32, x.shape, Replicated, "t")
    out = Dropout(t, p, seed=seed, step=step)
    [result] = Pipeline("p", [t], [out]).interpret({"t": x}, 1)["out"]
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_layer_is_the_same_in_every_schedule(ranks: int) -> None:
    x, weight, bias, residual = whole((T, K), 1), whole((K, H), 2), whole((H,), 3), whole((T, H), 4)
    values = {"x": cut(x, Sliced_2, ranks), "weight": cut(weight, Sliced, ranks), "bias": bias, "residual": residual}
    expected = dropped(x @ weight + bias, 0.5, 9, 3) + residual
    for pipeline in schedules(model_parallel(p=0.5, seed=9)).values():
        for part in pipeline.interpret({**values, "t": 3, "K": K}, ranks)["out"]:
            np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_border_is_the_same_in_every_schedule(ranks: int) -> None:
    partial = [whole((T, H), 10 + rank) for rank in range(ranks)]
    bias, residual = whole((H,), 3), whole((T, H), 4)
    total = np.sum(partial, axis=0, dtype=np.float32)
    expected = dropped(total + bias, 0.5, 9, 3) + residual
    for pipeline in schedules(pipeline_parallel(p=0.5, seed=9)).values():
        values = {"partial": partial, "bias": bias, "residual": residual, "t": 3}
        for part in pipeline.interpret(values, ranks)["out"]:
            np.testing.assert_array_equal(part, expected)


def test_parts_are_sent_where_parts_are_reduced() -> None:
    result = schedules("pipeline-parallel")
    assert [each["sent"].type.layout for each in result.values()] == [Replicated, Sliced]


def test_other_programs_are_refused() -> None:
    with pytest.raises(UsageError, match=r"program 'sdg': expected one of sgd, adam, lamb, model-parallel, pipeline"):
        schedules("sdg")


def outcome(layout: Layout, shape: tuple[int, ...], ranks: int, step: int = 1) -> list[Array]:
    """Apply Dropout to ones; return the whole result of each rank."""
    x, t = Tensor(Float32, shape, layout, "x"), Variable(Int32, "t")
    out: Expression = Dropout(x, 0.25, seed=5, step=t)
    if layout.is_sliced:
        out = AllGather(out)
    ones = np.ones(shape, np.float32)
    given = cut(ones, layout, ranks) if layout.is_sliced else [ones] * ranks
    return Pipeline("p", [x, t], [out]).interpret({"x": given, "t": step}, ranks)["out"]


@pytest.mark.parametrize("shape", [(1000,), (40, 25), (5, 8, 25), (1, 1000), (1000, 1)])
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("layout", [Sliced, Sliced_2])
def test_dropout_of_parts_is_that_of_the_whole(shape: tuple[int, ...], ranks: int, layout: Layout) -> None:
    [expected] = outcome(Replicated, shape, 1)
    for each in outcome(layout, shape, ranks):
        np.testing.assert_array_equal(each, expected)


def test_dropout_draws_anew_in_each_step_and_on_each_rank_of_a_local_tensor() -> None:
    one, two = outcome(Local, (4000,), 2)
    [replicated] = outcome(Replicated, (4000,), 1)
    [later] = outcome(Replicated, (4000,), 1, step=2)
    draws = [each == 0 for each in (one, two, replicated, later)]
    for at, each in enumerate(draws):
        assert abs(each.mean() - 0.25) < 0.04
        for other in draws[:at]:
            assert abs((each & other).mean() - 0.0625) < 0.02  # as independent ones
    assert set(np.unique(replicated)) == {0, np.float32(1 / 0.75)}


@pytest.mark.parametrize("dtype", [Float16, Float64])
def test_dropout_of_other_types_drops_the_same(dtype: np.dtype[np.generic]) -> None:
    x = Tensor(Float32, 100, Replicated, "x")
    both = [Dropout(x, 0.5, seed=1), Cast(Float32, Dropout(Cast(dtype, x), 0.5, seed=1))]
    one, other = Pipeline("p", [x], both).interpret({"x": np.ones(100, np.float32)}, 1).values()
    np.testing.assert_array_equal(one, other)
