"""Row-sparse sums, as for the gradients of embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job, start_job
from oracle import NARROW, assert_results, reduce_in_rank_order
from pairwise import pairwise
from tensors import Array
from transports import TRANSPORTS, TYPES, by_transports

from omnireduce import AbortedError, Communicator, Config, Op, RowOp, UsageError
from omnireduce.core.dtypes import ELEMENT_TYPES

Rows = tuple[Array, Array]


def some_rows(rank: int, dtype: str, n: int, length: int, n_rows: int) -> Rows:
    """`n` rows in any order, many of them twice."""
    rng = np.random.default_rng((rank, n, length))
    kind = ELEMENT_TYPES[dtype].dtype
    indices = rng.integers(0, n_rows, n)
    indices[n // 2 :] = rng.permutation(indices)[n // 2 :]
    values = rng.integers(-50, 50, (n, length)) if kind.kind in "iu" else rng.uniform(-2, 2, (n, length))
    return indices, values.astype(kind)


def expected_rows(inputs: Sequence[Rows], n_rows: int, op: str = "sum") -> Rows:
    """Add duplicates of each rank in the order given, round, then add the ranks in their order."""
    union = np.unique(np.concatenate([indices for indices, _ in inputs])).astype(np.int64)
    length, dtype = inputs[0][1].shape[1], inputs[0][1].dtype
    wide = np.dtype(np.float32) if dtype in NARROW else dtype
    dense = []
    for indices, values in inputs:
        total = np.zeros((n_rows, length), wide)
        for index, row in zip(indices, values, strict=True):
            total[index] = (total[index] + row.astype(wide)).astype(wide)
        dense.append(total.astype(dtype))
    return union, reduce_in_rank_order(dense, op)[union]


def check(config: Config, inputs: Sequence[Rows], n_rows: int, op: Op = "sum") -> None:
    def run(comm: Communicator) -> Rows:
        indices, values = (each.copy() for each in inputs[comm.rank])
        result = comm.allreduce_rows(indices, values, n_rows, op=op)
        assert np.array_equal(indices, inputs[comm.rank][0])
        assert np.array_equal(values, inputs[comm.rank][1])
        return result

    union, sums = expected_rows(inputs, n_rows, op)
    results = run_job(config, len(inputs), run)
    for indices, _ in results:
        assert indices.dtype == np.int64
        assert indices.tolist() == union.tolist()
    assert_results([values for _, values in results], sums)


@pytest.mark.parametrize(
    ("length", "config", "dtype", "op"),
    pairwise([1, 6, 300], TRANSPORTS, ["float32", "bfloat16"], ["sum", "mean"]),
    indirect=["config"],
)
def test_a_dense_result(config: Config, dtype: str, length: int, op: RowOp) -> None:
    """Sums are in their places, whichever transport they come by; the rest is zero."""
    inputs = [some_rows(rank, dtype, 60 + 50 * rank, length, 500) for rank in range(3)]
    union, sums = expected_rows(inputs, 500, op)
    dense = np.zeros((500, length), sums.dtype)
    dense[union] = sums

    def run(comm: Communicator) -> tuple[Array, Array]:
        indices, values = inputs[comm.rank]
        first, second = (np.full((500, length), 7, values.dtype) for _ in range(2))
        handle = comm.allreduce_rows_into_async(second, indices, values, op=op)
        assert handle.wait() is second
        assert comm.allreduce_rows_into(first, indices, values, op=op) is first
        return first, second

    for results in zip(*run_job(config, len(inputs), run), strict=True):
        assert_results(list(results), dense)


def test_a_dense_result_that_does_not_fit(local: Config) -> None:
    def run(comm: Communicator) -> None:
        out, indices, values = np.zeros((9, 4), np.float32), np.arange(3), np.ones((3, 4), np.float32)
        with pytest.raises(
            UsageError, match=r"out is float32\[9, 4\], values is float64\[3, 4\]: expected rows of the same"
        ):
            comm.allreduce_rows_into(out, indices, values.astype(np.float64))
        with pytest.raises(UsageError, match=r"out is float32\[9, 4\], values is float32\[3, 3\]"):
            comm.allreduce_rows_into(out, indices, values[:, :3])
        with pytest.raises(UsageError, match=r"out is float32\[36\]"):
            comm.allreduce_rows_into(out.reshape(-1), indices, values)
        with pytest.raises(UsageError, match="out overlaps indices or values"):
            comm.allreduce_rows_into(out, indices, out[:3])
        with pytest.raises(UsageError, match="indices from 0 to 9: expected 0 to 8"):
            comm.allreduce_rows_into(out, np.array([0, 9, 1]), values)
        with pytest.raises(UsageError, match="out is not C-contiguous"):
            comm.allreduce_rows_into(np.zeros((9, 8), np.float32)[:, ::2], indices, values)
        assert comm.allreduce_rows_into(np.ones((0, 4), np.float32), indices[:0], values[:0]).shape == (0, 4)

    run_job(local, 1, run)


@pytest.mark.parametrize(("dtype", "config"), by_transports(TYPES), indirect=["config"])
def test_duplicates_in_any_order(config: Config, dtype: str) -> None:
    check(config, [some_rows(rank, dtype, 300 + 50 * rank, 7, 500) for rank in range(3)], 500)


@pytest.mark.parametrize("length", [1, 3, 8, 300])
def test_row_lengths(local: Config, length: int) -> None:
    check(local, [some_rows(rank, "float32", 40, length, 60) for rank in range(2)], 60)


def test_a_rank_without_rows(config: Config) -> None:
    check(config, [some_rows(0, "float32", 0, 5, 100), some_rows(1, "float32", 30, 5, 100)], 100)


def test_no_rows_at_all(local: Config) -> None:
    check(local, [some_rows(rank, "float64", 0, 5, 100) for rank in range(2)], 100)


def test_a_matrix_without_rows(local: Config) -> None:
    def run(comm: Communicator) -> tuple[int, tuple[int, ...]]:
        indices, values = comm.allreduce_rows(np.zeros(0, np.int64), np.zeros((0, 4), np.float32), 0)
        return len(indices), values.shape

    assert run_job(local, 2, run) == [(0, (0, 4))] * 2


def test_rows_that_no_two_ranks_share(local: Config) -> None:
    inputs = [(np.arange(rank, 99, 3), np.full((33, 4), float(rank))) for rank in range(3)]
    check(local, inputs, 99)


def test_more_rows_than_a_message_holds(daemon: Daemon) -> None:
    config = configured(daemon.addresses, "protocol.slot_bytes=65536", "protocol.slots=2", "protocol.stripe_blocks=5")
    check(config, [some_rows(rank, "float32", 3000, 64, 2000) for rank in range(3)], 2000)


@pytest.mark.parametrize(
    ("dtype", "config"),
    by_transports(name for name in TYPES if ELEMENT_TYPES[name].is_float),
    indirect=["config"],
)
def test_the_mean_divides_by_all_ranks(config: Config, dtype: str) -> None:
    """Also by those that lack a row."""
    check(config, [some_rows(rank, dtype, 40 * rank, 12, 300) for rank in range(3)], 300, op="mean")


def test_rows_have_no_other_op(local: Config) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="allreduce_rows of float64 has no op max; expected sum or mean"):
            comm.allreduce_rows(np.arange(2), np.ones((2, 2)), 5, op="max")
        with pytest.raises(UsageError, match="the mean of int8 is not an int8"):
            comm.allreduce_rows(np.arange(2), np.ones((2, 2), np.int8), 5, op="mean")

    run_job(local, 1, run)


def test_a_tall_matrix_costs_no_memory_or_scan(local: Config) -> None:
    """2^40 rows of 2^5 elements: offsets beyond 2^31 and 2^32, and nothing proportional to them."""
    n_rows = 2**40
    rows = np.array([0, 2**31 - 1, 2**31, 2**32, 2**40 - 1])

    def run(comm: Communicator) -> Rows:
        return comm.allreduce_rows(rows, np.ones((5, 32), np.float32), np.int64(n_rows))

    for indices, values in run_job(local, 2, run):
        assert indices.tolist() == rows.tolist()
        assert values.tolist() == [[2.0] * 32] * 5


def test_integer_indices_of_any_type_and_views(local: Config) -> None:
    def run(comm: Communicator) -> list[tuple[list[int], list[list[float]]]]:
        results = []
        for kind in (np.uint8, np.int16, np.uint64):
            indices, values = np.array([9, 1, 9, 4, 2], kind)[::2], np.ones((6, 4), np.float32)[::2, ::2]
            results.append(tuple(each.tolist() for each in comm.allreduce_rows(indices, values, 10)))
        return results

    assert run_job(local, 2, run) == [[([2, 9], [[2.0, 2.0], [4.0, 4.0]])] * 3] * 2


def test_rows_beside_dense_collectives(local: Config) -> None:
    """Rows whose bytes are no multiple of eight, between dense tensors under way."""

    def run(comm: Communicator) -> float:
        before = comm.allreduce_async(np.ones(9000))
        indices, values = comm.allreduce_rows(np.array([comm.rank]), np.ones((1, 3), np.int8), 5)
        assert (indices.tolist(), values.tolist()) == ([0, 1], [[1] * 3] * 2)
        return float(before.wait()[-1] + comm.allreduce(np.ones(3))[0])

    assert run_job(local, 2, run) == [4.0] * 2


@pytest.mark.parametrize(
    ("n_rows", "length", "dtype"),
    [(11, 4, "float32"), (10, 8, "float32"), (5, 8, "float32"), (10, 4, "float64")],
    ids=str,
)
def test_disagreement_is_seen(local: Config, n_rows: int, length: int, dtype: str) -> None:
    def run(comm: Communicator) -> Rows:
        if comm.rank == 0:
            return comm.allreduce_rows(np.arange(2), np.ones((2, 4), np.float32), 10, name="table")
        return comm.allreduce_rows(np.arange(2), np.ones((2, length), dtype), n_rows, name="table")

    for error in start_job(local, 2, run).outcomes():
        assert isinstance(error, AbortedError)
        assert "rank 0 called allreduce_rows 'table' of float32, n_rows 10, width 4, sum" in error.reason
        assert f"rank 1 called allreduce_rows 'table' of {dtype}, n_rows {n_rows}, width {length}" in error.reason
