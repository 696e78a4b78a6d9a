"""Matrices as thin factors: what they can say they say, the rest is kept, all ranks have the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import Daemon, configured, run_job
from transports import BY_SHARDS

from omnireduce import Communicator, UsageError
from omnireduce.compression import PowerSgd, Residual
from omnireduce.core.dtypes import Array
from omnireduce.kernels.factors import orthonormalise, product

RANKS, STEPS = 3, 6


def matrix(rank: int, step: int, inner: int = 20) -> Array:
    """(40, 30), of rank `inner` at most."""
    rng = np.random.default_rng([rank, step])
    return (rng.standard_normal((40, inner)) @ rng.standard_normal((inner, 30))).astype(np.float32)


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(30, 50), columns=st.integers(1, 5))
def test_columns_become_orthonormal(seed: int, rows: int, columns: int) -> None:
    """So many more rows than columns that no column nearly follows from the others."""
    x = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    space = x.copy()
    orthonormalise(x)
    assert np.allclose(x.T @ x, np.eye(columns), atol=1e-3)
    assert np.linalg.matrix_rank(np.hstack([space, x]), tol=1e-2) <= columns


def test_a_column_that_adds_nothing_becomes_zeros() -> None:
    x = np.array([[1, 2, 0], [0, 0, 0], [1, 2, 1]], np.float32)
    orthonormalise(x)
    assert np.allclose(x[:, 1], 0)
    assert np.allclose(np.linalg.norm(x, axis=0), [1, 0, 1])


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 9), m=st.integers(0, 9), rank=st.integers(0, 4))
def test_a_product_of_factors(seed: int, n: int, m: int, rank: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = (rng.integers(-9, 10, (size, rank)).astype(np.float32) for size in (n, m))
    out = np.full((n, m), 7, np.float32)
    product(left, right, out)
    assert (out == left @ right.T).all()


def test_what_is_forgotten_begins_anew(daemon: Daemon) -> None:
    def run(comm: Communicator) -> list[bytes]:
        sgd, x = PowerSgd(rank=2, memory=Residual()), matrix(0, 0)
        found = []
        for _ in range(2):
            found += [sgd.allreduce(comm, x.copy(), name="w").tobytes() for _ in range(2)]
            sgd.forget(["w", "v"])
        assert sgd.state_dict() == {"residuals": {}, "factors": {}}
        return found

    first, second, *again = run_job(configured(daemon.addresses), 1, run)[0]
    assert first != second
    assert again == [first, second]


def test_what_the_factors_can_say_is_the_mean(daemon: Daemon) -> None:
    """All ranks together have a matrix of rank 3."""

    def run(comm: Communicator) -> Array:
        sgd = PowerSgd(rank=3)
        x = matrix(comm.rank, 0, inner=1)
        return sgd.allreduce(comm, x, name="w")

    results = run_job(configured(daemon.addresses, BY_SHARDS), RANKS, run)
    expected = sum(matrix(rank, 0, inner=1) for rank in range(RANKS)) / RANKS
    assert np.allclose(results[0], expected, atol=1e-4)
    assert all(result.tobytes() == results[0].tobytes() for result in results)


def test_what_was_received_and_what_is_left_are_all_gradients(daemon: Daemon) -> None:
    def run(comm: Communicator) -> tuple[Array, Array]:
        sgd, received = PowerSgd(rank=2), np.zeros((40, 30), np.float32)
        for step in range(STEPS):
            received += sgd.allreduce(comm, matrix(comm.rank, step), name="w")
        return received, sgd.state_dict()["residuals"]["w"].reshape(40, 30)

    results = run_job(configured(daemon.addresses, BY_SHARDS), RANKS, run)
    everything = sum(matrix(rank, step) for rank in range(RANKS) for step in range(STEPS)) / RANKS
    assert np.allclose(results[0][0] + sum(left for _, left in results) / RANKS, everything, atol=1e-3)


def test_the_factors_of_the_last_step_help(daemon: Daemon) -> None:
    """The same matrix again and again: each step comes nearer to the best that two factors can do."""

    def run(comm: Communicator) -> list[float]:
        warm, errors = PowerSgd(rank=2), []
        x = matrix(0, 0)
        for _ in range(STEPS):
            warm.memory = Residual()
            errors.append(float(np.linalg.norm(x - warm.allreduce(comm, x.copy(), name="w"))))
        return errors

    errors = run_job(configured(daemon.addresses, BY_SHARDS), 2, run)[0]
    best = float(np.sqrt((np.linalg.svd(matrix(0, 0), compute_uv=False)[2:] ** 2).sum()))
    assert best - 1e-3 <= errors[-1] < errors[1] < errors[0]
    assert errors[-1] <= 1.05 * best


@pytest.mark.parametrize("shape", [(7,), (), (2, 2), (0, 5), (5, 0)])
def test_what_is_no_matrix_or_small_travels_as_it_is(daemon: Daemon, shape: tuple[int, ...]) -> None:
    def run(comm: Communicator) -> tuple[Array, Array]:
        x = np.full(shape, comm.rank + 1, np.float32)
        y = np.full((4, 5, 2), comm.rank + 1, np.float32)
        sgd = PowerSgd()
        return sgd.allreduce(comm, x, name="x", op="sum"), sgd.allreduce(comm, y, name="y", op="sum")

    for x, y in run_job(configured(daemon.addresses), 2, run):
        assert (x == np.full(shape, 3)).all()
        assert np.allclose(y, 3)


def test_a_state_goes_on_elsewhere(daemon: Daemon) -> None:
    def run(comm: Communicator) -> bool:
        sgd, other = PowerSgd(2), PowerSgd(2)
        sgd.allreduce(comm, matrix(comm.rank, 0), name="w")
        other.load_state_dict(sgd.state_dict())
        one = sgd.allreduce(comm, matrix(comm.rank, 1), name="w")
        return bool((one == other.allreduce(comm, matrix(comm.rank, 1), name="w")).all())

    assert run_job(configured(daemon.addresses), 2, run) == [True, True]


def test_what_cannot_be(daemon: Daemon) -> None:
    with pytest.raises(UsageError, match="rank 0: expected a whole number from 1 on"):
        PowerSgd(0)
    with pytest.raises(UsageError, match="a state of residuals; expected a state with factors"):
        PowerSgd().load_state_dict(Residual().state_dict())

    def run(comm: Communicator) -> None:
        sgd = PowerSgd()
        for wrong, message in (
            ([1.0], "is a list"),
            (np.ones(3), "of float64"),
            (np.ones((9, 9), np.float32).T[1:], "C-c"),
        ):
            with pytest.raises(UsageError, match=message):
                sgd.allreduce(comm, wrong, name="w")  # type: ignore[arg-type]
        frozen = np.ones(4, np.float32)
        frozen.flags.writeable = False
        with pytest.raises(UsageError, match="read-only"):
            sgd.allreduce(comm, frozen, name="w")

    run_job(configured(daemon.addresses), 1, run)
