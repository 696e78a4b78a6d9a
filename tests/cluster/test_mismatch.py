"""Ranks that submit different collectives in the same place: every rank learns what both sides submitted."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from cluster_checks import FAILURE_S, assert_serves
from local_cluster import Daemon, configured, start_job, unique_job
from transports import by_transports, over

from omnireduce import AbortedError, Communicator

Call = Callable[[Communicator], object]
ONES = np.ones(1000, np.float32)
GRID = np.arange(6, dtype=np.float32).reshape(2, 3)


def reduce(elements: int = 1000, dtype: str = "float32", **more: object) -> Call:
    return lambda comm: comm.allreduce(np.ones(elements, dtype), **more)  # type: ignore[arg-type]


MISMATCHES: dict[str, tuple[Call, Call, str, str]] = {
    "two tensors": (
        reduce(name="fc1.weight"),
        reduce(10, name="fc2.bias"),
        "allreduce 'fc1.weight' of float32 (1000,), sum",
        "allreduce 'fc2.bias' of float32 (10,), sum",
    ),
    "name": (
        reduce(name="a"),
        reduce(name="b"),
        "allreduce 'a' of float32 (1000,)",
        "allreduce 'b' of float32 (1000,)",
    ),
    "size": (reduce(), reduce(999), "float32 (1000,)", "float32 (999,)"),
    "dtype": (reduce(), reduce(dtype="int32"), "float32 (1000,)", "int32 (1000,)"),
    "op": (reduce(), reduce(op="max"), "float32 (1000,), sum", "float32 (1000,), max"),
    "block size": (reduce(), reduce(block_size=64), "sum, block_size 256", "sum, block_size 64"),
    "nothing against something": (reduce(0), reduce(1), "float32 (0,)", "float32 (1,)"),
    "shape of an allreduce": (
        lambda comm: comm.allreduce(GRID.copy(), name="w"),
        lambda comm: comm.allreduce(np.ascontiguousarray(GRID.T), name="w"),
        "allreduce 'w' of float32 (2, 3), sum",
        "allreduce 'w' of float32 (3, 2), sum",
    ),
    "shape of a broadcast": (
        lambda comm: comm.broadcast(GRID.copy()),
        lambda comm: comm.broadcast(GRID.reshape(6).copy()),
        "broadcast of float32 (2, 3), root 0",
        "broadcast of float32 (6,), root 0",
    ),
    "shape of an allgather": (
        lambda comm: comm.allgather(GRID),
        lambda comm: comm.allgather(GRID.reshape(3, 2)),
        "allgather of float32 (2, 3)",
        "allgather of float32 (3, 2)",
    ),
    "shape of a reduce_scatter": (
        lambda comm: comm.reduce_scatter(GRID),
        lambda comm: comm.reduce_scatter(GRID.reshape(3, 2)),
        "reduce_scatter of float32 (2, 3), sum",
        "reduce_scatter of float32 (3, 2), sum",
    ),
    "a scalar against one element": (
        lambda comm: comm.allreduce(np.ones((), np.float32)),
        reduce(1),
        "allreduce of float32 (), sum",
        "allreduce of float32 (1,), sum",
    ),
    "an allreduce against its relative": (
        reduce(),
        lambda comm: comm.reduce_scatter(ONES),
        "called allreduce of float32 (1000,), sum",
        "called reduce_scatter of float32 (1000,), sum",
    ),
    "rows of another table": (
        lambda comm: comm.allreduce_rows(np.array([1]), np.ones((1, 4)), 10, name="t"),
        lambda comm: comm.allreduce_rows(np.array([1]), np.ones((1, 8)), 5, name="t"),
        "allreduce_rows 't' of float64, n_rows 10, width 4, sum",
        "allreduce_rows 't' of float64, n_rows 5, width 8, sum",
    ),
    "name of a barrier": (
        lambda comm: comm.barrier(name="a"),
        lambda comm: comm.barrier(name="b"),
        "barrier 'a'",
        "barrier 'b'",
    ),
    "kind": (
        reduce(),
        lambda comm: comm.broadcast(ONES.copy()),
        "allreduce of float32 (1000,), sum",
        "broadcast of float32 (1000,), root 0",
    ),
    "order": (
        lambda comm: [comm.barrier(), comm.allreduce(ONES.copy())],
        lambda comm: [comm.allreduce(ONES.copy()), comm.barrier()],
        "barrier",
        "allreduce of float32 (1000,)",
    ),
    "several in flight": (
        lambda comm: [comm.allreduce_async(ONES.copy(), name=name) for name in ("x", "y")] and comm.barrier(),
        lambda comm: [comm.allreduce_async(ONES.copy(), name=name) for name in ("y", "x")] and comm.barrier(),
        "'x' of float32 (1000,)",
        "'y' of float32 (1000,)",
    ),
}


@pytest.mark.parametrize(("what", "transport"), by_transports(MISMATCHES))
def test_both_sides_are_named_on_every_rank(daemon: Daemon, what: str, transport: str) -> None:
    """Ranks 0 and 2 agree, rank 1 does not; whoever is compared first, rank 1 is one of the two."""
    ours, theirs, our_text, their_text = MISMATCHES[what]
    config, job = configured(daemon.addresses, *over(transport)), unique_job()
    began = time.monotonic()
    outcomes = start_job(config, 3, lambda comm: (theirs if comm.rank == 1 else ours)(comm), job).outcomes()
    assert time.monotonic() - began < FAILURE_S
    for error in outcomes:
        assert isinstance(error, AbortedError)
        assert error.culprit in ("ranks 0 and 1", "ranks 1 and 2")
        assert error.reason.startswith("submitted different collectives: collective 0: ")
        assert our_text in error.reason
        assert their_text in error.reason
    assert len({str(error) for error in outcomes}) <= 2  # one per pair that a shard compared first
    assert_serves(daemon, job=job)


def test_a_mismatch_later_on_says_where(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        for i in range(17):
            comm.allreduce(np.ones(10), name=f"layer {i}")
        comm.allreduce(np.ones(10), name=("left", "right")[comm.rank])

    for error in start_job(configured(daemon.addresses), 2, run).outcomes():
        assert isinstance(error, AbortedError)
        assert "collective 17: rank 0 called allreduce 'left' of float64 (10,), sum" in error.reason
        assert "rank 1 called allreduce 'right' of float64 (10,), sum" in error.reason
