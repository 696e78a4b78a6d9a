"""reduce, gather, scatter and alltoall: what one rank gives, or gets, differs from the others'."""

from __future__ import annotations

import numpy as np
import pytest
from local_cluster import WAIT_S, Daemon, configured, run_job, start_job
from oracle import assert_results, bits, reduce_in_rank_order
from tensors import Array, sparse
from test_movement import DTYPES, SHAPES, raw
from transports import by_transports

from omnireduce import AbortedError, Communicator, Config, Op, UsageError


@pytest.mark.parametrize("root", range(3))
def test_reduce_changes_only_the_array_of_the_root(config: Config, root: int) -> None:
    ops: list[Op] = ["sum", "mean", "min", "max", "prod"]

    def run(comm: Communicator) -> list[Array]:
        result = [sparse(comm.rank, "float32", (5, 1001)) for _ in ops]
        for x, op in zip(result, ops, strict=True):
            x.flags.writeable = comm.rank == root
            assert comm.reduce(x, root, op=op) is (x if comm.rank == root else None)
        return result

    results = run_job(config, 3, run)
    tensors = [sparse(rank, "float32", (5, 1001)) for rank in range(3)]
    for at, op in enumerate(ops):
        assert_results([results[root][at]], reduce_in_rank_order(tensors, op))
        assert all(bits(results[rank][at]) == bits(tensors[rank]) for rank in range(3) if rank != root)


def test_blocks_of_minus_zero(config: Config) -> None:
    """They are zero, though not all of their bits are."""

    def run(comm: Communicator) -> float:
        x = np.full(5000, -0.0, np.float32)
        comm.reduce(x, 1)
        return float(np.abs(x).sum())

    assert run_job(config, 3, run) == [0.0] * 3


def test_reduce_of_large_tensors(daemon: Daemon) -> None:
    config = configured(daemon.addresses, "protocol.slot_bytes=65536", "protocol.slots=2")
    tensors = [sparse(rank, "float64", (300_001,)) for rank in range(3)]
    results = run_job(config, 3, lambda comm: comm.reduce(tensors[comm.rank].copy(), 1))
    assert results[0] is results[2] is None
    assert_results([results[1]], reduce_in_rank_order(tensors, "sum"))


@pytest.mark.parametrize(("dtype", "config"), by_transports(DTYPES), indirect=["config"], ids=str)
def test_gather_scatter_and_alltoall_of_any_dtype(config: Config, dtype: object) -> None:
    def run(comm: Communicator) -> list[bytes | None]:
        result: list[bytes | None] = []
        for shape in SHAPES:
            x = raw(comm.rank, dtype, shape)
            x.flags.writeable = False
            for root in range(3):
                gathered = comm.gather(x, root)
                result.append(None if gathered is None else bits(gathered))
                out = np.zeros(shape, dtype)  # type: ignore[call-overload]
                assert comm.scatter(out, raw(root, dtype, (3, *shape)) if comm.rank == root else None, root) is out
                result.append(bits(out))
            result.append(bits(comm.alltoall(raw(comm.rank, dtype, (3, *shape)))))
        return result

    results = run_job(config, 3, run)
    for rank, result in enumerate(results):
        expected: list[bytes | None] = []
        for shape in SHAPES:
            whole = [raw(number, dtype, (3, *shape)) for number in range(3)]
            for root in range(3):
                everybody = b"".join(bits(raw(number, dtype, shape)) for number in range(3))
                expected += [everybody if rank == root else None, bits(whole[root][rank : rank + 1])]
            expected.append(b"".join(bits(each[rank : rank + 1]) for each in whole))
        assert result == expected


@pytest.mark.parametrize("kind", ["reduce", "gather", "scatter", "broadcast_object"])
def test_ranks_that_mean_different_roots_are_told(daemon: Daemon, kind: str) -> None:
    def run(comm: Communicator) -> None:
        root, x = comm.rank, np.ones(3)
        if kind == "scatter":
            comm.scatter(x, np.ones((2, 3)), root)
        else:
            getattr(comm, kind)(x, root)

    for outcome in start_job(configured(daemon.addresses), 2, run).outcomes(WAIT_S):
        assert isinstance(outcome, AbortedError)
        assert f"called {kind}" in outcome.reason
        assert "root 0" in outcome.reason
        assert "root 1" in outcome.reason


def test_arguments_that_cannot_be(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        x = np.ones(3, np.float32)
        for call in (comm.reduce, comm.gather, comm.scatter, comm.broadcast_object):
            with pytest.raises(UsageError, match="root 2: expected 0 to 1"):
                call(x, root=2)  # type: ignore[operator]
        me = comm.rank
        with pytest.raises(UsageError, match=r"parts is None on the root; expected an array of \(2, 3\)"):
            comm.scatter(x, root=me)
        with pytest.raises(UsageError, match=r"parts is float32\[3, 3\]; expected float32\[2, 3\]"):
            comm.scatter(x, np.ones((3, 3), np.float32), root=me)
        with pytest.raises(UsageError, match="parts is float64"):
            comm.scatter(x, np.ones((2, 3)), root=me)  # type: ignore[arg-type]
        for wrong in (x, np.float32(1)[...]):
            with pytest.raises(UsageError, match="expected one part for each of the 2 ranks"):
                comm.alltoall(wrong)
        comm.barrier()

    run_job(configured(daemon.addresses), 2, run)
