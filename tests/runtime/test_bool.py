"""Arrays of bool, with any and all."""

from __future__ import annotations

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job, start_job
from tensors import Array

from omnireduce import AbortedError, Communicator, Config, UsageError


def flags(rank: int, shape: tuple[int, ...]) -> Array:
    rng = np.random.default_rng((rank, len(shape)))
    return rng.random(shape) < rng.choice([0, 0.001, 0.5, 1], shape[:1] + (1,) * (len(shape) - 1))


def test_any_and_all(config: Config) -> None:
    shapes: list[tuple[int, ...]] = [(0,), (1,), (257,), (40, 300)]

    def run(comm: Communicator) -> list[list[Array]]:
        results = []
        for shape in shapes:
            some = comm.allreduce(flags(comm.rank, shape), op="any")
            every = comm.allreduce(flags(comm.rank, shape), op="all")
            results.append([some, every, comm.reduce_scatter(flags(comm.rank, shape), op="any")])
            assert {each.dtype for each in results[-1]} == {np.dtype(bool)}
        return results

    for rank, result in enumerate(run_job(config, 3, run)):
        for shape, (some, every, part) in zip(shapes, result, strict=True):
            everybody = np.array([flags(number, shape) for number in range(3)])
            assert some.tolist() == everybody.any(axis=0).tolist()
            assert every.tolist() == everybody.all(axis=0).tolist()
            assert part.tolist() == np.array_split(everybody.any(axis=0), 3)[rank].tolist()


def test_other_ops_and_other_types(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="allreduce of bool has no op sum; expected any or all"):
            comm.allreduce(np.ones(3, bool))
        with pytest.raises(UsageError, match="allreduce of uint8 has no op any; expected sum or mean or min"):
            comm.allreduce(np.ones(3, np.uint8), op="any")
        with pytest.raises(UsageError, match="allreduce_rows of bool has no op sum"):
            comm.allreduce_rows(np.arange(1), np.ones((1, 2), bool), 2)

    run_job(configured(daemon.addresses), 1, run)


def test_bool_and_uint8_do_not_meet(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.allreduce(np.ones(3, bool), op="any")
        else:
            comm.allreduce(np.ones(3, np.uint8), op="max")

    for outcome in start_job(configured(daemon.addresses), 2, run).outcomes():
        assert isinstance(outcome, AbortedError)
        assert "of bool (3,), any" in outcome.reason
        assert "of uint8 (3,), max" in outcome.reason
