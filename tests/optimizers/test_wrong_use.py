"""Wrong use of optimizers on the shards is told, where ranks differ on all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job
from msgspec.structs import replace

from omnireduce import Communicator, UsageError
from omnireduce.optimizers.rules import Adagrad, Adam, Lamb, RowAdagrad, Sgd
from omnireduce.optimizers.sharded import ShardedOptimizer

W = np.zeros((4, 4), np.float32)
SHAPE = "float32[4, 4] as dense"
DIFFERENT: list[tuple[Callable[[int], dict[str, Any]], str]] = [
    (
        lambda rank: {"params": {"a": W.copy(), "b": W.copy()} if rank else {"b": W.copy(), "a": W.copy()}},
        f"'parameter b' differs between ranks: rank 0 has parameter b {SHAPE}, rank 1 has parameter a {SHAPE} in its "
        "place",
    ),
    (
        lambda rank: {"params": [W.copy(), W.copy()] if rank else [W.copy()]},
        f"'parameter 1' differs between ranks: rank 0 has nothing, rank 1 has {SHAPE}",
    ),
    (
        lambda rank: {"params": [np.zeros((2, 8) if rank else (8, 2), np.float32)]},
        "'parameter 0' differs between ranks: rank 0 has float32[8, 2] as dense, rank 1 has float32[2, 8] as dense",
    ),
    (
        lambda rank: {"tables": ["0"] if rank else []},
        f"'parameter 0' differs between ranks: rank 0 has {SHAPE}, rank 1 has float32[4, 4] as table",
    ),
    (
        lambda rank: {"rule": Adam() if rank else Adagrad()},
        "'the rule' differs between ranks: rank 0 has Adagrad, rank 1 has Adam",
    ),
    (lambda rank: {"root": rank}, "'root' differs between ranks: rank 0 has 0, rank 1 has 1"),
    (
        lambda rank: {"root": rank, "params": {"root": W.copy()}},
        "'root' differs between ranks: rank 0 has 0, rank 1 has 1",
    ),
]


def test_optimizers_that_differ_are_told(daemon: Daemon) -> None:
    """And what cannot be a root."""

    def run(comm: Communicator) -> None:
        for at, (make, message) in enumerate(DIFFERENT):
            arguments = {"params": [W.copy()], "rule": Sgd(lr=1), "name": f"o{at}"} | make(comm.rank)
            optimizer = ShardedOptimizer(arguments.pop("params"), arguments.pop("rule"), comm=comm, **arguments)
            with pytest.raises(UsageError, match=re.escape(f"{message}; expected the same on all ranks")):
                optimizer.state_dict()
        for root in (2, -1):
            optimizer = ShardedOptimizer([W.copy()], Sgd(lr=1), comm=comm, root=root, name="root")
            with pytest.raises(UsageError, match=f"root {root}: expected 0 to 1"):
                optimizer.step([W])
        with ShardedOptimizer({"a": W.copy()}, Sgd(lr=np.float32(0.5)), comm=comm) as optimizer:
            optimizer.step([W + 1])  # in the order of the parameters
            with pytest.raises(UsageError, match="root 7"):
                optimizer.state_dict(7)

    run_job(configured(daemon.addresses), 2, run)


def test_ranks_that_differ_are_told(daemon: Daemon) -> None:
    """One rank has another learning rate."""

    def run(comm: Communicator) -> str:
        weights = np.zeros(1000, np.float32)
        optimizer = ShardedOptimizer([weights], Sgd(lr=1.0 + comm.rank), comm=comm)
        with pytest.raises(Exception, match="submitted different collectives") as caught:
            optimizer.step([np.ones(1000, np.float32)])
        optimizer.close()
        return str(caught.value)

    assert all("scalars" in result for result in run_job(configured(daemon.addresses), 2, run))


WRONG: list[tuple[Callable[[Communicator], object], str]] = [
    (lambda comm: ShardedOptimizer([], Sgd(lr=1), comm=comm), "no parameters; expected at least one array"),
    (
        lambda comm: ShardedOptimizer([np.zeros(3)], Sgd(lr=1), comm=comm),
        "parameter 0 is float64; expected an array of",
    ),
    (lambda comm: ShardedOptimizer({"w": [1]}, Sgd(lr=1), comm=comm), "parameter w is a list"),  # type: ignore[dict-item]
    (lambda comm: ShardedOptimizer([W.T[:, 1:]], Sgd(lr=1), comm=comm), "parameter 0: expected a C-contiguous"),
    (lambda comm: ShardedOptimizer([W, W[:2]], Sgd(lr=1), comm=comm), "0 and 1 share memory"),
    (lambda comm: ShardedOptimizer({"w": W}, Sgd(lr=1), tables=["v"], comm=comm), "tables names v; expected some of w"),
    (lambda comm: ShardedOptimizer({"w": W}, RowAdagrad(), comm=comm), "RowAdagrad is for rows: name w in tables"),
    (lambda comm: ShardedOptimizer([W[0]], Sgd(lr=1), tables=["0"], comm=comm), r"0 is \[4\]; expected \[rows"),
    (lambda comm: ShardedOptimizer([W], Sgd(lr=1), tables="0", comm=comm), "tables is '0'; expected a list of names"),
    (lambda comm: ShardedOptimizer([W], Sgd(lr=1), tables=[0], comm=comm), "tables has an int; expected names"),  # type: ignore[list-item]
    (lambda comm: ShardedOptimizer([W], Sgd(lr=1), tables=None, comm=comm), "tables is None"),  # type: ignore[arg-type]
    (lambda comm: Sgd(lr=1, momentum=0.5, nesterov="yes"), "nesterov is 'yes'; expected True or False"),  # type: ignore[arg-type]
    (lambda comm: Sgd(lr=-1), "lr is -1; expected 0 or more"),
    (lambda comm: Adam(betas=(0.9, 1.0)), "beta2 is 1; expected 0 or more and less than 1"),
    (lambda comm: Sgd(lr=1, nesterov=True), "nesterov needs a momentum"),
    (lambda comm: Lamb(lazy=True), "Lamb has no lazy form"),
    (lambda comm: Sgd(lr="x"), "lr is 'x'; expected a number"),  # type: ignore[arg-type]
    (lambda comm: Sgd(lr=10**400), "expected a number"),
    (lambda comm: Adam(betas=(0.9,)), r"betas is \(0.9,\); expected two numbers"),  # type: ignore[arg-type]
    (lambda comm: Adam(lazy="x"), "lazy is 'x'; expected True or False"),  # type: ignore[arg-type]
    (lambda comm: ShardedOptimizer([W], Adam, comm=comm), "expected one of omnireduce.optimizers, such as Adam"),  # type: ignore[arg-type]
    (lambda comm: ShardedOptimizer(None, Adam(), comm=comm), "params is a NoneType"),  # type: ignore[arg-type]
    (lambda comm: ShardedOptimizer([W], Adam(), comm=comm, name="my one"), "name 'my one': expected up to 40"),
]
WRONG_STEPS: list[tuple[Any, str]] = [
    ({"v": W}, "gradients of v; expected some of w"),
    ({"w": W[0]}, r"the gradient of w is float32\[4\]; expected float32\[4, 4\]"),
    ({"w": 3}, "the gradient of w is an int"),
    ([W, W], "2 gradients; expected 1, None for one that is missing"),
]


WRONG_ROWS: list[tuple[Any, str]] = [
    (5, r"the gradient of t is an int; expected \(indices, rows\)"),
    (W, "the gradient of t is an ndarray"),
    ((np.array([9]), W[:1]), "the gradient of t: "),
    ((np.array([0]), W[:1].astype(float)), r"rows of float64\[4\]; expected float32\[4\]"),
    ((np.array([0]), np.zeros((1, 3), np.float32)), r"rows of float32\[3\]; expected float32\[4\]"),
]


def test_rows_that_do_not_fit_are_told(daemon: Daemon) -> None:
    with (
        Communicator(configured(daemon.addresses, "cluster.job=rows"), rank=0, size=1) as comm,
        ShardedOptimizer({"t": W.copy()}, Adam(), tables=["t"], comm=comm) as optimizer,
    ):
        for rows, message in WRONG_ROWS:
            with pytest.raises(UsageError, match=message):
                optimizer.step({"t": rows})
        assert optimizer.steps == 0


def test_wrong_use_is_told(daemon: Daemon) -> None:
    config = configured(daemon.addresses)
    with Communicator(replace(config, cluster=replace(config.cluster, job="wrong")), rank=0, size=1) as comm:
        for make, message in WRONG:
            with pytest.raises(UsageError, match=message):
                make(comm)
        with ShardedOptimizer({"w": W.copy()}, Adam(), comm=comm) as optimizer:
            for step_state, message in WRONG_STEPS:
                with pytest.raises(UsageError, match=message):
                    optimizer.step(step_state)
            for state, message in (
                ([1], "the state is a list"),
                ({"step": 1, "state": {}}, "no exp_avg of w"),
                ({"step": 1, "state": {"w": None}}, "no exp_avg of w"),
                ({"step": -3, "state": {}}, "the state is after -3 steps"),
                ({"step": "x", "state": {}}, "the state is after 'x' steps"),
            ):
                with pytest.raises(UsageError, match=message):
                    optimizer.load_state_dict(state)  # type: ignore[arg-type]
