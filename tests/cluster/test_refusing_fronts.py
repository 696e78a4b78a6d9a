"""A refusal of one rank before its first exchange, in each layer over a communicator, reaches the other ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, Ranks, configured, run_job, unique_job

from omnireduce import AbortedError, Communicator, ShardedOptimizer, UsageError, data_parallel
from omnireduce.compression import Compression, PowerSgd
from omnireduce.compression.grace import grace_from_params
from omnireduce.optimizers import Sgd
from omnireduce.programs import (
    AllReduce,
    Broadcast,
    Float32,
    Int32,
    Local,
    Pipeline,
    Replicated,
    Summation,
    Tensor,
    Update,
    Variable,
)
from omnireduce.programs.library import schedules
from omnireduce.programs.shard_runner import runs_on_shards
from omnireduce.switchml import Context

Use = Callable[[bool], object]  # as it should be used, or not


def program() -> Pipeline:
    size, rate = Variable(Int32, "N"), Variable(Float32, "lr")
    g, w = Tensor(Float32, size, Local, "g"), Tensor(Float32, size, Replicated, "w")
    return Pipeline("sgd", [g, w, rate], [Update(w, w - rate * AllReduce(Summation, g))])


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def compression(comm: Communicator) -> Use:
    local_compression = Compression()
    return lambda fits: local_compression.allreduce(comm, ones(9) if fits else np.ones(9), name="g")


def factors(comm: Communicator) -> Use:
    local_powersgd = PowerSgd()
    return lambda fits: local_powersgd.allreduce(comm, ones(9, 9) if fits else np.ones((9, 9)), name="g")


def grace(comm: Communicator) -> Use:
    made = grace_from_params({"compressor": "topk", "memory": "residual", "communicator": "allgather"}, comm=comm)
    return lambda fits: made.step(ones(9) if fits else "x", "g")


def optimizer_on_shards(comm: Communicator) -> Use:
    optimizer = ShardedOptimizer([ones(9)], Sgd(lr=1), comm=comm)
    optimizer.step([ones(9)])
    return lambda fits: optimizer.step([ones(9 if fits else 8)])


def pipeline(comm: Communicator) -> Use:
    local_pipeline = program()
    return lambda fits: local_pipeline.run(comm, {"g": ones(8), "w": ones(8), "lr": 0.5 if fits else "x"})


def pipeline_for_more_ranks(comm: Communicator) -> Use:
    g = Tensor(Float32, Variable(Int32, "N"), Local, "g")
    fits, wrong = (Pipeline("p", [g], [each]) for each in (Broadcast(g, root=1), Broadcast(g, root=2)))
    return lambda is_right: (fits if is_right else wrong).run(comm, {"g": ones(8)})


def pipeline_on_shards(comm: Communicator) -> Use:
    fused = next(schedule for schedule in schedules("sgd").values() if runs_on_shards(schedule))
    own = fused.on_shards(comm, {"w": ones(9)})
    return lambda fits: own.run({"g": ones(9), "lr": 0.5 if fits else "x"})


def distributed_optimizer(comm: Communicator) -> Use:
    class Plain:
        def __init__(self) -> None:
            self.params = [ones(9)]

        def step(self, gradients: Any) -> None:
            """Nothing is learnt here."""

    optimizer = data_parallel.DistributedOptimizer(Plain(), comm=comm)
    optimizer.step([ones(9)])
    return lambda fits: optimizer.step([ones(9)] if fits else [ones(9), ones(9)])


CASES = {
    "compression": compression,
    "factors": factors,
    "GRACE": grace,
    "an optimizer on the shards": optimizer_on_shards,
    "a program": pipeline,
    "a program for more ranks": pipeline_for_more_ranks,
    "a program on shards": pipeline_on_shards,
    "an optimizer of any framework": distributed_optimizer,
    "parameters": lambda comm: lambda fits: data_parallel.broadcast_parameters([ones(9)] if fits else 7, comm=comm),
    "a dataset": lambda comm: lambda fits: data_parallel.partition_dataset(ones(9) if fits else 7, 2, comm=comm),
}


@pytest.mark.parametrize("what", CASES)
def test_what_one_rank_refuses_reaches_the_other(daemon: Daemon, what: str) -> None:
    """At once, and with the reason."""

    def run(comm: Communicator) -> str:
        use = CASES[what](comm)
        with pytest.raises(UsageError if comm.rank else AbortedError) as caught:
            use(comm.rank == 0)
        return str(caught.value)

    error, reason = run_job(configured(daemon.addresses), 2, run)
    assert re.match(r"rank 1 \(host .*\): refused collective \d+, which rank 0 called as ", error)
    assert error.endswith(reason)


@pytest.mark.parametrize("what", CASES)
def test_what_both_ranks_refuse_is_over(daemon: Daemon, what: str) -> None:
    """The next use is sound."""

    def run(comm: Communicator) -> None:
        use = CASES[what](comm)
        for _ in range(2):
            with pytest.raises(UsageError):
                use(False)
            use(True)

    run_job(configured(daemon.addresses), 2, run)


@pytest.mark.parametrize("collides", [False, True])
def test_jobs_of_switchml(daemon: Daemon, collides: bool) -> None:
    """A refused one comes in its turn, also behind those that wait for memory."""
    config = configured(daemon.addresses, f"cluster.job={unique_job()}")

    def run(rank: int) -> str:
        with Context().start(config, rank=rank, size=2) as context:
            x = ones(1 << 20)
            for _ in range(2 if collides else 1):
                context.allreduce_async(x)
            if rank == 1:
                with pytest.raises(UsageError, match="op is 'max'"):
                    context.allreduce_async(x, op="max")
            with pytest.raises(AbortedError) as caught:
                context.allreduce(ones(3), timeout_s=30)
            return str(caught.value)

    for error in Ranks(2, run).results():
        assert "refused collective" in error
        assert "op is 'max'" in error
