"""Updates on the shards against torch's optimizers, over real aggregators.

Both round in other places: after 20 steps of gradients of about 1 they agree within 1e-5 of the largest weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job

torch = pytest.importorskip("torch")

from omnireduce import Communicator  # noqa: E402
from omnireduce.core.dtypes import Array  # noqa: E402
from omnireduce.optimizers.rules import Adagrad, Adam, AdamW, Lamb, RowAdagrad, Rule, Sgd, SparseAdam  # noqa: E402
from omnireduce.optimizers.sharded import ShardedOptimizer  # noqa: E402

RANKS, STEPS, TOLERANCE = 3, 20, 1e-5
SHAPES = {"large": (500, 301), "matrix": (20, 33), "bias": (33,), "one": (1,)}
OPTIM = torch.optim
Make = Callable[[list[Any]], Any]
DENSE: dict[str, tuple[Rule, Make]] = {
    "sgd": (Sgd(lr=0.1), lambda p: OPTIM.SGD(p, lr=0.1)),
    "decay": (Sgd(lr=0.1, weight_decay=0.01), lambda p: OPTIM.SGD(p, lr=0.1, weight_decay=0.01)),
    "momentum": (
        Sgd(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
        lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    ),
    "nesterov": (
        Sgd(lr=0.1, momentum=0.9, nesterov=True),
        lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "adagrad": (
        Adagrad(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5, weight_decay=0.01),
        lambda p: OPTIM.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5, weight_decay=0.01),
    ),
    "adam": (Adam(lr=0.01), lambda p: OPTIM.Adam(p, lr=0.01)),
    "adam-decay": (
        Adam(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda p: OPTIM.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "adamw": (AdamW(lr=0.01, weight_decay=0.1), lambda p: OPTIM.AdamW(p, lr=0.01, weight_decay=0.1)),
}


def first_weights() -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(rank: int, step: int) -> dict[str, Array]:
    """Half of the blocks are zero; "one" has none on some ranks."""
    rng = np.random.default_rng([rank, step])
    results = {}
    for name, shape in SHAPES.items():
        x = rng.standard_normal(shape).astype(np.float32)
        if name == "large":
            x.reshape(-1)[:100_000] *= np.repeat(rng.random(500) < 0.5, 200)
        if name != "one" or rank != step % RANKS:
            results[name] = x
    return results


def mean_gradients(step: int) -> dict[str, Array]:
    results = [gradients(rank, step) for rank in range(RANKS)]
    return {
        name: np.sum([result.get(name, np.zeros(SHAPES[name], np.float32)) for result in results], axis=0)
        / np.float32(RANKS)
        for name in SHAPES
    }


def sharded(daemon: Daemon, rule: Rule) -> list[dict[str, Array]]:
    """The weights of all ranks after the last step. Only those of rank 1 are right at first."""

    def run(comm: Communicator) -> dict[str, Array]:
        weights = (
            first_weights() if comm.rank == 1 else {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        )
        with ShardedOptimizer(weights, rule, comm=comm, root=1) as optimizer:
            for step in range(STEPS):
                optimizer.step(gradients(comm.rank, step))
        return weights

    return run_job(configured(daemon.addresses), RANKS, run)


def assert_alike(found: list[dict[str, Array]], expected: dict[str, Array]) -> None:
    for name, expected_state in expected.items():
        for each in found:
            assert (each[name].view(np.uint32) == found[0][name].view(np.uint32)).all(), name
        np.testing.assert_allclose(
            found[0][name], expected_state, atol=TOLERANCE * np.abs(expected_state).max(), rtol=0, err_msg=name
        )


@pytest.mark.parametrize("name", DENSE)
def test_weights_are_those_of_torch(daemon: Daemon, name: str) -> None:
    rule, make = DENSE[name]
    params = {each: torch.nn.Parameter(torch.from_numpy(x)) for each, x in first_weights().items()}
    optimizer = make(list(params.values()))
    for step in range(STEPS):
        for each, x in mean_gradients(step).items():
            params[each].grad = torch.from_numpy(x)
        optimizer.step()
    assert_alike(sharded(daemon, rule), {each: p.detach().numpy() for each, p in params.items()})


def test_lamb_is_that_of_the_paper(daemon: Daemon) -> None:
    weights, rule = {name: x.astype(np.float64) for name, x in first_weights().items()}, Lamb(lr=0.01, weight_decay=0.1)
    m, v = ({name: np.zeros_like(x) for name, x in weights.items()} for _ in range(2))
    for step in range(1, STEPS + 1):
        for name, g in mean_gradients(step - 1).items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * np.square(g, dtype=np.float64)
            r = m[name] / (1 - 0.9**step) / (np.sqrt(v[name] / (1 - 0.999**step)) + 1e-6) + 0.1 * weights[name]
            weights[name] -= 0.01 * np.linalg.norm(weights[name]) / np.linalg.norm(r) * r
    assert_alike(sharded(daemon, rule), weights)


def rows(rank: int, step: int) -> tuple[Array, Array]:
    """A few rows, some of them twice."""
    rng = np.random.default_rng([rank, step])
    return rng.integers(0, 40, 9), rng.standard_normal((9, 12)).astype(np.float32)


def of_rows(daemon: Daemon, rule: Rule) -> list[dict[str, Array]]:
    def run(comm: Communicator) -> dict[str, Array]:
        weights = {"table": np.random.default_rng(3).standard_normal((50, 12)).astype(np.float32)}
        with ShardedOptimizer(weights, rule, tables=["table"], comm=comm) as optimizer:
            for step in range(STEPS):
                optimizer.step({"table": rows(comm.rank, step)} if comm.rank != step % 7 else {})
        return weights

    return run_job(configured(daemon.addresses), RANKS, run)


def row_gradients(step: int) -> Array:
    total = np.zeros((50, 12), np.float32)
    for rank in range(RANKS):
        if rank != step % 7:
            np.add.at(total, *rows(rank, step))
    return total / np.float32(RANKS)


def test_sparse_adam_is_that_of_torch(daemon: Daemon) -> None:
    weights = torch.nn.Parameter(
        torch.from_numpy(np.random.default_rng(3).standard_normal((50, 12)).astype(np.float32))
    )
    optimizer = OPTIM.SparseAdam([weights], lr=0.01)
    for step in range(STEPS):
        g = row_gradients(step)
        there = np.flatnonzero(g.any(axis=1))
        indices, values = torch.from_numpy(there[None]), torch.from_numpy(g[there])
        weights.grad = torch.sparse_coo_tensor(indices, values, (50, 12), check_invariants=True)
        optimizer.step()
    assert_alike(of_rows(daemon, SparseAdam(lr=0.01)), {"table": weights.detach().numpy()})


def test_row_wise_adagrad(daemon: Daemon) -> None:
    weights, kept = (
        np.random.default_rng(3).standard_normal((50, 12)).astype(np.float32).astype(np.float64),
        np.zeros(50),
    )
    for step in range(STEPS):
        g = row_gradients(step).astype(np.float64)
        kept += np.square(g).mean(axis=1)
        there = g.any(axis=1)
        weights[there] -= 0.1 * g[there] / (np.sqrt(kept[there]) + 1e-10)[:, None]
    assert_alike(of_rows(daemon, RowAdagrad(lr=0.1)), {"table": weights})
