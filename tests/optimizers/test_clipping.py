"""Means of gradients are clipped on the shards, as torch clips the gradients of one process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import Daemon, configured, run_job

from omnireduce import Communicator, UsageError
from omnireduce.core.dtypes import Array
from omnireduce.optimizers.rules import Adagrad, Adam, AdamW, Lamb, RowAdagrad, Rule, Sgd, SparseAdam
from omnireduce.optimizers.sharded import Clipping, ShardedOptimizer

RULES = [Sgd(lr=0.5, momentum=0.5), Adagrad(), Adam(), AdamW(lazy=True), SparseAdam(), Lamb()]
SHAPES = {"w": (600, 400), "b": (7,), "t": (40, 6)}
STEPS = 3


def weights() -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(rank: int, step: int) -> dict[str, Any]:
    """Small integers, so that sums and squares are exact. Half of the blocks of "w" are zero; "t" has rows."""
    rng = np.random.default_rng([rank, step])
    w = rng.integers(-3, 4, SHAPES["w"]).astype(np.float32)
    w[300 * (step % 2) :][:300] = 0
    rows = rng.integers(0, 40, 9), rng.integers(-3, 4, (9, 6)).astype(np.float32)
    results = {"w": w, "b": rng.integers(-3, 4, 7).astype(np.float32), "t": rows}
    return results if rank else {"w": w, "t": rows}


def mean_gradients(step: int) -> dict[str, Array]:
    total = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for rank in range(2):
        for name, gradient in gradients(rank, step).items():
            if name == "t":
                np.add.at(total[name], *gradient)
            else:
                total[name] += gradient
    return {name: each / 2 for name, each in total.items()}


def clipped(step: int, clip_norm: float | None, clip_value: float | None) -> dict[str, Array]:
    means = mean_gradients(step)
    if clip_value is not None:
        return {name: np.clip(mean, -clip_value, clip_value) for name, mean in means.items()}
    assert clip_norm is not None
    norm = math.sqrt(sum(float(np.square(mean, dtype=np.float64).sum()) for mean in means.values()))
    factor = min(1.0, clip_norm / (norm + 1e-6))
    return {name: mean * np.float32(factor) for name, mean in means.items()}


def rows_of(dense: Array) -> tuple[Array, Array]:
    there = np.flatnonzero(dense.any(axis=1))
    return there, dense[there]


@pytest.mark.parametrize("clip", [{"clip_norm": 5.0}, {"clip_value": 1.25}, {"clip_norm": 1e9}], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_weights_are_those_of_clipped_means(daemon: Daemon, rule: Rule, clip: dict[str, float]) -> None:
    """Weights of dense gradients and of rows equal those of a single rank that contributes the clipped means."""
    tables = [] if isinstance(rule, Lamb) else ["t"]  # Lamb's norms are those of dense gradients

    def ready(x: dict[str, Any]) -> dict[str, Any]:
        return x if tables else {name: each for name, each in x.items() if name != "t"}

    def run(comm: Communicator) -> tuple[dict[str, Array], float | None]:
        weights_of_rank = ready(weights())
        with ShardedOptimizer(weights_of_rank, rule, tables=tables, comm=comm, **clip) as optimizer:
            for step in range(STEPS):
                optimizer.step(ready(gradients(comm.rank, step)))
            return weights_of_rank, optimizer.gradient_norm

    def alone(comm: Communicator) -> dict[str, Array]:
        weights_alone = ready(weights())
        with ShardedOptimizer(weights_alone, rule, tables=tables, comm=comm) as optimizer:
            for step in range(STEPS):
                means = clipped(step, clip.get("clip_norm"), clip.get("clip_value"))
                optimizer.step(ready(means | {"t": rows_of(means["t"])}))
        return weights_alone

    config = configured(daemon.addresses)
    (one, norm), (other, _) = run_job(config, 2, run)
    [expected] = run_job(config, 1, alone)
    for name in expected:
        assert (one[name].view(np.uint32) == other[name].view(np.uint32)).all()
        np.testing.assert_allclose(one[name], expected[name], atol=1e-5, rtol=0)
    squares = {name: np.square(x, dtype=np.float64).sum() for name, x in ready(mean_gradients(STEPS - 1)).items()}
    assert norm == (pytest.approx(math.sqrt(sum(squares.values()))) if "clip_norm" in clip else None)


def test_the_mean_is_clipped_and_not_what_each_rank_has(daemon: Daemon) -> None:
    """Ranks have long gradients that add up to a short one; then two that are long together."""

    def run(comm: Communicator) -> Array:
        weights_of_rank = np.zeros(4, np.float32)
        with ShardedOptimizer([weights_of_rank], Sgd(lr=1.0), clip_norm=1.0, comm=comm) as optimizer:
            optimizer.step([np.array([[8, 0.5, 0, 0], [-8, 0.5, 0, 0]], np.float32)[comm.rank]])
            assert weights_of_rank.tolist() == [0, -0.5, 0, 0]
            optimizer.step([np.array([[0, 0, 6, 0], [0, 0, 0, 8]], np.float32)[comm.rank]])
            assert optimizer.gradient_norm == 5.0
        return weights_of_rank

    for result in run_job(configured(daemon.addresses), 2, run):
        np.testing.assert_allclose(result, [0, -0.5, -0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_norm_that_is_no_number_spoils_what_torch_spoils(daemon: Daemon, wrong: float) -> None:
    """NaN everything that has a gradient, infinity its own element; the others do not change."""

    def run(comm: Communicator) -> Array:
        weights_of_rank = np.ones(4, np.float32)
        with ShardedOptimizer([weights_of_rank], Sgd(lr=1.0), clip_norm=1.0, comm=comm) as optimizer:
            optimizer.step([np.array([wrong, 1, 2, 3], np.float32)])
        return weights_of_rank

    for result in run_job(configured(daemon.addresses), 2, run):
        assert np.isnan(result).tolist() == ([True] * 4 if np.isnan(wrong) else [True, False, False, False])
        assert np.isnan(wrong) or result[1:].tolist() == [1, 1, 1]


def test_ranks_that_clip_differently_are_told(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        weights_of_rank = np.zeros(4, np.float32)
        optimizer = ShardedOptimizer([weights_of_rank], Sgd(lr=1.0), clip_norm=1.0 + comm.rank, comm=comm)
        with pytest.raises(UsageError, match=r"'clip_norm' differs between ranks: rank 0 has 1\.0, rank 1 has 2\.0"):
            optimizer.step([weights_of_rank + 1])
        optimizer = ShardedOptimizer([weights_of_rank], Sgd(lr=1.0), clip_value=1.0 if comm.rank else None, comm=comm)
        with pytest.raises(UsageError, match=r"'clip_value' differs between ranks: rank 0 has None, rank 1 has 1\.0"):
            optimizer.step([weights_of_rank + 1])

    run_job(configured(daemon.addresses), 2, run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": 0}, "clip_norm is 0; expected more than 0, or None not to clip"),
        ({"value": -1.0}, "clip_value is -1; expected more than 0"),
        ({"norm": math.nan}, "clip_norm is nan; expected more than 0"),
        ({"norm": math.inf}, "clip_norm is inf; expected more than 0"),
        ({"norm": "1"}, "clip_norm is '1'; expected a number"),
        ({"norm": 1.0, "value": 1.0}, "clip_norm and clip_value are both given; expected one of them"),
    ],
)
def test_what_cannot_be_clipped(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Clipping(**arguments)


@given(st.floats(1e-3, 1e3), st.floats(0, 1e6))
def test_the_factor_is_that_of_torch(longest: float, norm: float) -> None:
    factor = Clipping(norm=longest).factor(norm)
    assert factor == min(1.0, longest / (norm + 1e-6))
    assert factor * norm <= longest


def test_row_adagrad_is_clipped_by_all_its_rows(daemon: Daemon) -> None:
    """A table of which each rank has looked up another row."""

    def run(comm: Communicator) -> Array:
        table = {"t": np.zeros((9, 4), np.float32)}
        rule = RowAdagrad(lr=1.0, eps=0.0)
        with ShardedOptimizer(table, rule, tables=["t"], clip_norm=1.0, comm=comm) as optimizer:
            optimizer.step({"t": (np.array([3 * comm.rank]), np.full((1, 4), 6.0 + 2 * comm.rank, np.float32))})
            assert optimizer.gradient_norm == 10.0
            state = optimizer.state_dict(None)["state"]["t"]["sum"]
        return np.concatenate([table["t"][:, 0], state])

    for result in run_job(configured(daemon.addresses), 2, run):
        np.testing.assert_allclose(result[[0, 3]], [-1, -1], rtol=1e-6)
        np.testing.assert_allclose(result[9:][[0, 3]], [0.09, 0.16], rtol=1e-6)
        assert not result[[1, 2, 4, 5, 6, 7, 8]].any()
