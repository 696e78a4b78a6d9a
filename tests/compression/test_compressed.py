"""Gradients of which a part is sent, on real daemons: sums of what each rank has sent, and little else travels."""

from __future__ import annotations

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job
from transports import BY_SHARDS

from omnireduce import Communicator, UsageError
from omnireduce.compression import BlockTopK, Compression, GuardedThreshold, RandomK, Residual, Threshold, TopK
from omnireduce.dtypes import Array

SIZE, RANKS, STEPS = 20_001, 3, 4
WAYS = [BY_SHARDS, "transport.host_exchange=auto"]


def gradient(rank: int, step: int) -> Array:
    """Whole numbers, so that sums are exact."""
    return np.random.default_rng([rank, step]).integers(-1000, 1001, SIZE).astype(np.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: Compression(TopK(0.01), Residual()),
        lambda: Compression(TopK(0.5), Residual()),
        lambda: Compression(BlockTopK(0.1), Residual()),
        lambda: Compression(RandomK(0.02), Residual()),
        lambda: Compression(Threshold(900), Residual()),
        lambda: Compression(GuardedThreshold(1e9, 0.01), Residual()),
        lambda: Compression(memory=Residual()),
        lambda: Compression(memory=Residual(), codec="int8"),
    ],
    ids=["few", "many", "blocks", "random", "threshold", "guarded", "all", "int8"],
)
def test_all_that_was_received_and_what_is_left_are_all_gradients(daemon: Daemon, make: object, way: str) -> None:
    def run(comm: Communicator) -> tuple[Array, Array]:
        compression = make()  # type: ignore[operator]
        received = np.zeros(SIZE, np.float32)
        for step in range(STEPS):
            x = gradient(comm.rank, step)
            assert compression.allreduce(comm, x, name="w", op="sum") is x
            received += x
        return received, compression.memory.state_dict()["residuals"]["w"]

    results = run_job(configured(daemon.addresses, way), RANKS, run)
    received = results[0][0]
    assert all((each == received).all() for each, _ in results)
    everything = sum(gradient(rank, step) for rank in range(RANKS) for step in range(STEPS))
    assert np.allclose(received + sum(left for _, left in results), everything, atol=STEPS * 3000 / 64)


def test_the_cost_follows_the_union(daemon: Daemon) -> None:
    """All ranks select the same elements: each gets them once, and not once of each rank."""

    def run(comm: Communicator) -> tuple[int, int]:
        x = np.tile(gradient(0, 0), 10)
        before = comm.statistics()
        Compression(TopK(0.01)).allreduce(comm, x, name="w")
        after = comm.statistics()
        return after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes

    for sent, received in run_job(configured(daemon.addresses, BY_SHARDS), RANKS, run):
        assert max(sent, received) <= 2000 * 12 + 5000


def test_a_mean_of_a_matrix(daemon: Daemon) -> None:
    def run(comm: Communicator) -> Array:
        return Compression(TopK(1.0)).allreduce(comm, np.full((3, 5), comm.rank, np.float32), name="w")

    for x in run_job(configured(daemon.addresses), 3, run):
        assert x.tolist() == [[1.0] * 5] * 3


def test_gradients_of_nothing(daemon: Daemon) -> None:
    """Nothing is above the threshold, on one rank or on all."""

    def run(comm: Communicator) -> tuple[Array, Array]:
        compression = Compression(Threshold(10.0))
        some = np.full(100, 11.0 * comm.rank, np.float32)
        none = np.ones(100, np.float32)
        empty = np.empty(0, np.float32)
        assert compression.allreduce(comm, empty, name="empty", op="sum").size == 0
        return compression.allreduce(comm, some, name="s", op="sum"), compression.allreduce(comm, none, name="n")

    for some, none in run_job(configured(daemon.addresses, BY_SHARDS), 2, run):
        assert set(some) == {11.0}
        assert set(none) == {0.0}


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="codec 'int8' with TopK: single elements travel as float32"):
        Compression(TopK(), codec="int8")
    Compression(BlockTopK(), codec="int8")
    Compression(codec="int8")
