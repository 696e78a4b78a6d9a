"""Inputs of a program that must be equal on all ranks, and the errors if they differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job

from omnireduce import Communicator, UsageError
from omnireduce.core.dtypes import Array
from omnireduce.programs import (
    AllGather,
    AllReduce,
    Float32,
    Int32,
    Local,
    Pipeline,
    Replicated,
    Sliced,
    Summation,
    Tensor,
    Update,
    Variable,
)
from omnireduce.programs.library import schedules

SIZE = 10
N, M, lr = Variable(Int32, "N"), Variable(Int32, "M"), Variable(Float32, "lr")
g, w = Tensor(Float32, N, Local, "g"), Tensor(Float32, N, Replicated, "w")


def sgd(decay: float = 0.5) -> Pipeline:
    w1 = Update(w, decay * w - lr * AllReduce(Summation, g))
    return Pipeline("sgd", [g, w, lr], [w1])


def arguments(**changed: Any) -> dict[str, Any]:
    arrays = {"g": np.ones(SIZE, np.float32), "w": np.arange(SIZE, dtype=np.float32)}
    return {**arrays, "lr": 0.5, **changed}


def with_another_sign() -> Array:
    weights = np.arange(SIZE, dtype=np.float32)
    weights[-1] *= -1
    return weights


OTHERS: dict[str, tuple[Pipeline, dict[str, Any], str]] = {
    "a tensor": (sgd(), arguments(w=with_another_sign()), r"^'w' differs .* rank 2 has float32\[10\], checksum"),
    "a number": (sgd(), arguments(lr=0.25), "^'lr' differs between ranks: rank 0 has 0.5, rank 2 has 0.25; expected"),
    "a number that stands in the program": (
        sgd(decay=0.25),
        arguments(),
        "^'the program' differs between ranks: rank 0 has .* stages, checksum",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_differs_on_one_rank_is_named_on_all(daemon: Daemon, what: str) -> None:
    """No tensor has changed, and the next run is one."""
    pipeline, values, message = OTHERS[what]

    def run(comm: Communicator) -> Array:
        own_pipeline, own = (pipeline, {**values}) if comm.rank == 2 else (sgd(), arguments())
        own["w"] = before = own["w"].copy()
        kept = before.copy()
        with pytest.raises(UsageError, match=message):
            own_pipeline.run(comm, own)
        np.testing.assert_array_equal(before, kept)
        return sgd().run(comm, arguments(g=np.full(SIZE, comm.rank, np.float32)))["w1"]

    for weights in run_job(configured(daemon.addresses), 3, run):
        np.testing.assert_array_equal(weights, 0.5 * np.arange(SIZE) - 0.5 * 3)


def test_sizes_are_compared_although_nothing_that_travels_has_them(daemon: Daemon) -> None:
    m = Tensor(Float32, M, Sliced, "m")
    pipeline = Pipeline("sized", [g, m], [AllReduce(Summation, g), m * 2])

    def run(comm: Communicator) -> None:
        size = 6 + comm.rank  # both ranks have three
        with pytest.raises(UsageError, match=r"^'M' differs between ranks: rank 0 has 6, rank 1 has 7; expected"):
            pipeline.run(comm, {"g": np.ones(SIZE, np.float32), "m": np.ones(3, np.float32), "M": size})

    run_job(configured(daemon.addresses), 2, run)


@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_kept_on_shards_is_compared_before_it_is_sent(daemon: Daemon, lazy: bool) -> None:
    """Lazy runs would never write blocks of weights that differ."""
    fused = schedules("sgd")["fuse-rs-c-ag"]

    def run(comm: Communicator) -> None:
        weights = np.full(SIZE, comm.rank, np.float32)
        with pytest.raises(UsageError, match=r"^'w' differs between ranks: rank 0 has float32\[10\], checksum"):
            fused.on_shards(comm, {"w": weights}, lazy=lazy)
        with fused.on_shards(comm, {"w": np.zeros_like(weights)}, lazy=lazy) as running:
            assert running.run({"g": np.ones(SIZE, np.float32), "lr": 0.5})["w1"][0] == -0.5 * comm.size

    run_job(configured(daemon.addresses), 2, run)


def test_what_ranks_have_of_their_own_may_differ(daemon: Daemon) -> None:
    """Local tensors, and parts of Sliced ones."""
    part = Tensor(Float32, N, Sliced, "part")
    pipeline = Pipeline("own", [g, part], [AllReduce(Summation, g) * AllGather(part)])

    def run(comm: Communicator) -> Array:
        own = np.full(SIZE // 2, comm.rank + 1, np.float32)
        return next(iter(pipeline.run(comm, {"g": np.full(SIZE, comm.rank, np.float32), "part": own}).values()))

    for total in run_job(configured(daemon.addresses), 2, run):
        np.testing.assert_array_equal(total, [1] * (SIZE // 2) + [2] * (SIZE // 2))


def test_a_run_that_compares_nothing_believes_its_ranks(daemon: Daemon) -> None:
    def run(comm: Communicator) -> tuple[float, int]:
        comm.barrier()
        before = comm.statistics().collectives
        result = sgd().run(comm, arguments(lr=comm.rank), compare=False)["w1"]
        return float(result[0]), comm.statistics().collectives - before

    assert run_job(configured(daemon.addresses), 2, run) == [(0.0, 1), (-2.0, 1)]


def test_groups_of_ranks_compare_theirs(daemon: Daemon) -> None:
    """The first group is right, and has its result; of the second one both ranks are told."""
    near, far = Tensor(Float32, N, Replicated, "near"), Tensor(Float32, N, Replicated, "far", group=1)
    pipeline = Pipeline("apart", [near, far], [near * 2, far * 2])

    def run(comm: Communicator) -> str:
        name = "far" if comm.rank >= 2 else "near"
        try:
            pipeline.run(comm, {name: np.full(SIZE, comm.rank // 3, np.float32)})
        except UsageError as error:
            return str(error)
        return ""

    errors = run_job(configured(daemon.addresses), 4, run)
    assert errors[:2] == ["", ""]
    assert all(error.startswith("'far' differs between ranks") for error in errors[2:])
