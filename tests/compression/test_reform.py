"""Memories keep their rests when a rank is lost: the others reform, and repeat the aborted step."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from local_cluster import Daemon, Ranks, configured, unique_job
from transports import TRANSPORTS, over

from omnireduce import AbortedError, Communicator
from omnireduce.compression import BlockTopK, Compression, DgcMomentum, RandomK, Residual, TopK
from omnireduce.core.dtypes import Array
from omnireduce.support.config import Config

SIZE, RANKS, FAILS = 5000, 3, 1


@pytest.fixture(params=TRANSPORTS)
def elastic(request: pytest.FixtureRequest, daemon: Daemon) -> Config:
    settings = (
        "elastic.enabled=true",
        "elastic.min_ranks=2",
        "elastic.last_call_s=0.3",
        "security.allow_no_secret=true",
    )
    return configured(daemon.addresses, *settings, *over(request.param))


def gradient(rank: int, step: int) -> Array:
    """Whole numbers, so that sums are exact."""
    return np.random.default_rng([rank, step]).integers(-1000, 1001, SIZE).astype(np.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Compression(TopK(0.02), Residual()),
        lambda: Compression(RandomK(0.02), Residual()),
        lambda: Compression(BlockTopK(0.2), DgcMomentum(0.0)),
    ],
    ids=["top-k", "random-k", "blocks"],
)
@pytest.mark.parametrize("is_new", [False, True], ids=["survivors", "one that is new"])
def test_all_that_was_received_and_what_is_left_are_all_gradients(
    elastic: Config, make: Callable[[], Compression], is_new: bool
) -> None:
    """Rank 1 fails between two steps. `is_new`: rank 2 then has a compression like that of a rank which comes new."""
    together, job = threading.Barrier(RANKS), unique_job("elastic")

    def left(compression: Compression) -> Array:
        kept = compression.memory.state_dict()
        return kept.get("residuals", kept.get("sums", {})).get("w", np.zeros(SIZE, np.float32)).copy()

    def run(rank: int) -> list[Array]:
        with Communicator(elastic, rank=rank, size=RANKS, job=job) as comm:
            compression = make()
            first = compression.allreduce(comm, gradient(rank, 0), name="w", op="sum")
            together.wait(60)  # a fault ends also collectives that some ranks have completed already
            if rank == FAILS:
                comm._engine.abort("had enough")
                return [first, left(compression)]
            with pytest.raises(AbortedError):
                compression.allreduce(comm, gradient(rank, 1), name="w", op="sum")
            before = left(compression)
            if is_new and rank == RANKS - 1:
                compression = make()
            comm.reform()
            second = compression.allreduce(comm, gradient(rank, 1), name="w", op="sum")
            compression.allreduce(comm, np.zeros(SIZE, np.float32), name="other", op="sum")  # and it goes on
            return [first, left(compression), second, before]

    first, failed, third = Ranks(RANKS, run).outcomes()
    assert not any(isinstance(each, BaseException) for each in (first, failed, third)), (first, failed, third)
    assert (first[0] == third[0]).all()
    assert (first[2] == third[2]).all()
    kept = first[1] + third[1] + failed[1] + (third[3] if is_new else 0)
    everything = sum(gradient(rank, 0) for rank in range(RANKS)) + gradient(0, 1) + gradient(2, 1)
    assert (first[0] + first[2] + kept == everything).all()
