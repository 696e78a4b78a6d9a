"""The optimizers against PyTorch, and LAMB against the formulas of its paper in NumPy's float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omnireduce import UsageError
from omnireduce.core.dtypes import Array
from omnireduce.programs import Pipeline
from omnireduce.programs.library import adam, lamb, schedules, sgd

SIZE, STEPS, RANKS = 1001, 12, 3
LR = 0.01


def gradients(step: int) -> list[Array]:
    return [np.random.default_rng([step, rank]).standard_normal(SIZE).astype(np.float32) for rank in range(RANKS)]


def first_weights() -> Array:
    return np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)


def cut_state(pipeline: Pipeline) -> bool:
    return any(each.name == "m" and each.type.layout.is_sliced for each in pipeline.inputs)


def trained(pipeline: Pipeline) -> Array:
    """The weights after STEPS steps in the interpreter."""
    values: dict[str, Any] = {"w": first_weights(), "lr": LR}
    names = {each.name for each in pipeline.inputs}
    for name in names & {"m", "v"}:
        zeros = np.zeros(SIZE, np.float32)
        values[name] = np.array_split(zeros, RANKS) if cut_state(pipeline) else zeros
    for step in range(1, STEPS + 1):
        given = values | {"g": gradients(step)} | ({"t": step} if "t" in names else {})
        outcome = pipeline.interpret(given, RANKS)
        for name in names & {"w", "m", "v"}:
            values[name] = outcome[f"{name}1"]
    for each in values["w"][1:]:
        np.testing.assert_array_equal(each, values["w"][0])
    result: Array = values["w"][0]
    return result


def trained_by_torch(name: str, **options: Any) -> Array:
    torch = pytest.importorskip("torch", reason="no torch here; `make torch` installs it")
    weights = torch.nn.Parameter(torch.from_numpy(first_weights()))
    optimizer = getattr(torch.optim, name)([weights], lr=LR, **options)
    for step in range(1, STEPS + 1):
        first, second, third = gradients(step)
        weights.grad = torch.from_numpy(first + second + third)
        optimizer.step()
    result: Array = weights.detach().numpy()
    return result


def test_sgd_is_exact() -> None:
    w = first_weights()
    for step in range(1, STEPS + 1):
        first, second, third = gradients(step)
        w = w - np.float32(LR) * (first + second + third)
    np.testing.assert_array_equal(trained(sgd()), w)


def test_sgd_is_that_of_torch() -> None:
    """But for the last bit of a product, which torch does not round before it subtracts."""
    np.testing.assert_allclose(trained(sgd()), trained_by_torch("SGD"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_adam_is_that_of_torch(decay: float) -> None:
    """To 2e-6 of the size of the weights after twelve steps: torch rounds in another order."""
    expected = trained_by_torch("AdamW", weight_decay=decay) if decay else trained_by_torch("Adam")
    np.testing.assert_allclose(trained(adam(weight_decay=decay)), expected, rtol=2e-6, atol=2e-7)


def lamb_of_the_paper(decay: float, eps: float = 1e-6) -> Array:
    w = first_weights().astype(np.float64)
    m, v = np.zeros(SIZE), np.zeros(SIZE)
    for t in range(1, STEPS + 1):
        g = np.sum(gradients(t), axis=0, dtype=np.float64)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + eps)
        u = r + decay * w
        w = w - LR * np.linalg.norm(w) / np.linalg.norm(u) * u
    return w


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lamb_is_that_of_the_paper(decay: float) -> None:
    np.testing.assert_allclose(trained(lamb(weight_decay=decay)), lamb_of_the_paper(decay), rtol=5e-6, atol=5e-7)


@pytest.mark.parametrize("zero", ["weights", "gradients"])
def test_lamb_takes_a_plain_step_where_a_norm_is_zero(zero: str) -> None:
    w, g = np.ones(4, np.float32), [np.ones(4, np.float32)]
    values = {"m": np.zeros(4, np.float32), "v": np.zeros(4, np.float32), "lr": 0.5, "t": 1}
    if zero == "weights":
        [result] = lamb().interpret({"w": w * 0, "g": g, **values}, 1)["w1"]
        np.testing.assert_allclose(result, [-0.5] * 4, rtol=1e-5)
    else:
        [result] = lamb(weight_decay=0).interpret({"w": w, "g": [g[0] * 0], **values}, 1)["w1"]
        np.testing.assert_array_equal(result, w)


@pytest.mark.parametrize("make", [sgd, adam, lamb])
def test_all_schedules_give_the_same_weights(make: Any) -> None:
    results = [trained(schedule) for schedule in schedules(make()).values()]
    assert len(results) == 3
    for result in results[1:]:
        if make is lamb:  # the norm of parts is added up in another order, in float64
            np.testing.assert_allclose(result, results[0], rtol=1e-6)
        else:
            np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_state_is_cut_where_parts_are_updated(name: str) -> None:
    assert [cut_state(schedule) for schedule in schedules(name).values()] == [False, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": 0.9}, "betas is 0.9; expected two numbers"),
        ({"betas": (0.9, 1.0)}, "beta2 is 1; expected 0 or more and less than 1"),
        ({"eps": "small"}, "eps is 'small'; expected a number"),
        ({"weight_decay": float("nan")}, "weight_decay is nan; expected 0 or more"),
    ],
)
def test_numbers_that_cannot_be(options: dict[str, Any], message: str) -> None:
    for make in (adam, lamb):
        with pytest.raises(UsageError, match=message):
            make(**options)
