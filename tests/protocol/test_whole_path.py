"""Property tests of the whole path, worker to aggregator and back, against NumPy in rank order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import InprocCluster, slot_bytes_for
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_results, bits, reduce_in_rank_order
from samples import CASES, DTYPES, OPS, Array, sparse_tensor

from omnireduce.core.dtypes import ELEMENT_TYPES

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(0, 40) | st.integers(0, 700) | st.sampled_from([0, 1, 7, 8, 9, 17, 255, 256, 257, 300])


@st.composite
def clusters(draw: st.DrawFn, block_bytes: int, **fixed: Any) -> InprocCluster:
    """A cluster of any shape whose slots hold from 1 to 6 blocks of `block_bytes`."""
    shape: dict[str, Any] = {
        "shards": draw(st.integers(1, 4)),
        "slots": draw(st.integers(2, 4)),
        "slot_bytes": slot_bytes_for(draw(st.integers(1, 6)), block_bytes),
        "scan_span": draw(st.integers(1, 20)),
        "stripe_blocks": draw(st.integers(1, 6)),
        "message_bytes": draw(st.none() | st.integers(1, 5 * block_bytes)),
        "seed": draw(SEEDS),
    }
    return InprocCluster(**({"world_size": draw(st.integers(1, 5))} | shape | fixed))


def tensors(rng: np.random.Generator, dtype: str, ranks: int, elements: int, block_size: int) -> list[Array]:
    """One tensor a rank; the ranks' non-zero blocks are the same, have none in common, or whatever comes."""
    results = [sparse_tensor(rng, dtype, elements, block_size, rng.random()) for _ in range(ranks)]
    overlap = rng.choice(["random", "full", "none"])
    for start in range(0, elements, block_size):
        part = slice(start, start + block_size)
        owner = rng.integers(ranks)
        for rank, tensor in enumerate(results):
            if (overlap == "full" and owner < ranks / 2) or (overlap == "none" and rank != owner):
                tensor[part] = np.zeros((), tensor.dtype)
    return results


class Submission:
    """One all-reduce on all ranks of a cluster, and what must come out."""

    def __init__(
        self, cluster: InprocCluster, rng: np.random.Generator, dtype: str, op: str, elements: int, block_size: int
    ) -> None:
        inputs = tensors(rng, dtype, cluster.world_size, elements, block_size)
        self.expected = reduce_in_rank_order(inputs, op)
        self.kept: list[tuple[Array, Array]] = []
        self.results = []
        for rank, x in enumerate(inputs):
            out = None
            if rng.random() < 0.5:
                out = np.full(elements, 3, x.dtype)
                self.kept.append((x, x.copy()))
            self.results.append(cluster.allreduce(rank, x, out, op=op, block_size=block_size))

    def check(self) -> None:
        assert_results(self.results, self.expected)
        for x, before in self.kept:
            assert bits(x) == bits(before), "the input of an out-of-place collective changed"


@pytest.mark.integration  # long for a unit test
@pytest.mark.parametrize(("dtype", "op"), CASES)
@settings(max_examples=25)
@given(data=st.data(), seed=SEEDS, elements=SIZES, octets=st.integers(1, 4))
def test_allreduce(dtype: str, op: str, data: st.DataObject, seed: int, elements: int, octets: int) -> None:
    block_size = 8 * octets
    cluster = data.draw(clusters(block_size * ELEMENT_TYPES[dtype].itemsize))
    submission = Submission(cluster, np.random.default_rng(seed), dtype, op, elements, block_size)
    cluster.run()
    submission.check()


@given(data=st.data(), seed=SEEDS, sizes=st.lists(SIZES, min_size=2, max_size=6))
def test_many_collectives_in_flight(data: st.DataObject, seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    cluster = data.draw(clusters(24 * 8))
    submissions = []
    for elements in sizes:
        dtype, op = CASES[rng.integers(len(CASES))]
        block_size = 8 * int(rng.integers(1, 4))
        submissions.append(Submission(cluster, rng, dtype, op, elements, block_size))
        if rng.random() < 0.3:
            cluster.settle()
    cluster.run()
    for submission in submissions:
        submission.check()


@given(data=st.data(), seed=SEEDS, elements=st.integers(0, 400))
def test_ranks_submit_at_different_times(data: st.DataObject, seed: int, elements: int) -> None:
    cluster = data.draw(clusters(32))
    rng, size = np.random.default_rng(seed), cluster.world_size
    rounds = [tensors(rng, "float32", size, elements, 8) for _ in range(3)]
    expected = [reduce_in_rank_order(each, "sum") for each in rounds]
    for rank in rng.permutation(size):
        for each in rounds:
            cluster.allreduce(rank, each[rank])
        cluster.settle()
    cluster.run()
    for result, value in zip(rounds, expected, strict=True):
        assert_results(result, value)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20)
@given(data=st.data(), seed=SEEDS, n_rows=st.integers(1, 200), length=st.integers(1, 9))
def test_rows(dtype: str, data: st.DataObject, seed: int, n_rows: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = data.draw(clusters(length * ELEMENT_TYPES[dtype].itemsize))
    full, present, operands = [], np.zeros(n_rows, np.bool_), []
    for rank in range(cluster.world_size):
        mine = rng.random(n_rows) < rng.choice([0.0, 0.1, 0.5, 1.0])  # some ranks have no rows at all
        present |= mine
        matrix = sparse_tensor(rng, dtype, n_rows * length, length, 0.8).reshape(n_rows, length)
        matrix[~mine] = np.zeros((), matrix.dtype)
        full.append(matrix)
        operands.append(cluster.rows(rank, np.flatnonzero(mine), matrix[mine], n_rows))
    cluster.run()
    expected = reduce_in_rank_order(full, "sum")[present]
    for operand in operands:
        assert operand.result[0].tolist() == np.flatnonzero(present).tolist()
    assert_results([operand.result[1] for operand in operands], expected)


def test_rows_of_a_matrix_with_more_than_2_to_the_31_elements() -> None:
    n_rows, length = 2**40, 64
    cluster = InprocCluster(2, shards=3, slot_bytes=slot_bytes_for(2, length * 4))
    numbers = [np.array([0, 2**31 - 1, 2**31, 2**32 + 5, n_rows - 1]), np.array([2**31, 2**35, n_rows - 1])]
    operands = [
        cluster.rows(rank, own, np.full((own.size, length), rank + 1, np.float32), n_rows)
        for rank, own in enumerate(numbers)
    ]
    cluster.run()
    for operand in operands:
        result, values = operand.result
        assert result.tolist() == [0, 2**31 - 1, 2**31, 2**32 + 5, 2**35, n_rows - 1]
        assert (values == np.array([[1], [1], [3], [1], [2], [3]])).all()


@given(data=st.data(), seed=SEEDS, nbytes=st.integers(0, 500), root=st.integers(0, 4))
def test_broadcast(data: st.DataObject, seed: int, nbytes: int, root: int) -> None:
    cluster = data.draw(clusters(8))
    rng, root = np.random.default_rng(seed), root % cluster.world_size
    arrays = [np.frombuffer(rng.bytes(nbytes), np.uint8).copy() for _ in range(cluster.world_size)]
    expected = arrays[root].tobytes()
    for rank, array in enumerate(arrays):
        cluster.move_bytes(rank, "broadcast", array if rank == root else None, array)
    cluster.run()
    assert all(array.tobytes() == expected for array in arrays)


@given(data=st.data(), seed=SEEDS, nbytes=st.integers(0, 100))
def test_allgather(data: st.DataObject, seed: int, nbytes: int) -> None:
    cluster = data.draw(clusters(8))
    rng, size = np.random.default_rng(seed), cluster.world_size
    parts = [rng.bytes(nbytes) for _ in range(size)]
    results = [np.zeros((size, nbytes), np.uint8) for _ in range(size)]
    for rank, result in enumerate(results):
        result[rank] = np.frombuffer(parts[rank], np.uint8)
        flat = result.reshape(-1)
        cluster.move_bytes(rank, "allgather", flat, flat)
    cluster.run()
    assert all(result.tobytes() == b"".join(parts) for result in results)


@pytest.mark.parametrize("size", [1, 5])
def test_a_barrier_waits_for_the_last_rank(size: int) -> None:
    cluster = InprocCluster(size, shards=3)
    for rank in range(size):
        cluster.settle()
        assert cluster.finished == [[]] * size
        cluster.move_bytes(rank, "barrier", None, np.zeros(0, np.uint8))
    cluster.run()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10)
@given(data=st.data(), seed=SEEDS, elements=st.integers(0, 500), ranks=st.integers(1, 4))
def test_the_same_bits_for_any_shape_of_the_cluster(
    dtype: str, data: st.DataObject, seed: int, elements: int, ranks: int
) -> None:
    rng = np.random.default_rng(seed)
    op = str(rng.choice([op for op in OPS if (dtype, op) in CASES]))
    inputs = tensors(rng, dtype, ranks, elements, 16)
    outcomes = set()
    for _ in range(3):
        cluster = data.draw(clusters(16 * ELEMENT_TYPES[dtype].itemsize, world_size=ranks))
        results = [cluster.allreduce(rank, x, np.empty_like(x), op=op, block_size=16) for rank, x in enumerate(inputs)]
        cluster.run()
        outcomes |= {bits(result) for result in results}
    assert len(outcomes) == 1


@pytest.mark.parametrize("offset", [1, 3])
def test_memory_that_is_not_aligned_to_words(offset: int) -> None:
    cluster = InprocCluster(2, shards=2)
    memory = np.random.default_rng(offset).integers(-99, 99, (2, 4 * 333 + offset), np.int8)
    inputs = [each[offset:] for each in memory]
    expected = reduce_in_rank_order(inputs, "sum")
    for rank, x in enumerate(inputs):
        cluster.allreduce(rank, x)
    cluster.run()
    assert_results(inputs, expected)


def test_a_read_only_input() -> None:
    cluster = InprocCluster(2)
    x = np.arange(100, dtype=np.float32)
    x.flags.writeable = False
    outs = [cluster.allreduce(rank, x, np.empty_like(x)) for rank in range(2)]
    cluster.run()
    assert_results(outs, 2 * x)
