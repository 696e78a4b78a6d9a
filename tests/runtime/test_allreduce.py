"""The sum and its relatives on real daemons, compared with NumPy in rank order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job
from oracle import assert_results, bits, reduce_in_rank_order
from tensors import Array, sparse
from transports import BY_SHARDS, TRANSPORTS, TYPES, by_transports, over

from omnireduce import Communicator, Config
from omnireduce.core.dtypes import ELEMENT_TYPES

SHAPES = [(), (0,), (3, 0, 2), (1,), (17,), (255,), (256,), (257,), (300,), (5, 7, 11), (70_001,)]
SMALL_SLOTS = ("protocol.slot_bytes=65536", "protocol.slots=2", "protocol.stripe_blocks=3", "protocol.scan_span=50")


def ops_of(dtype: str) -> list[str]:
    return ["sum", "mean", "min", "max", "prod"] if ELEMENT_TYPES[dtype].is_float else ["sum", "min", "max", "prod"]


@pytest.mark.parametrize(("dtype", "config"), by_transports(TYPES), indirect=["config"])
def test_every_dtype_op_and_shape(config: Config, dtype: str) -> None:
    cases = [(op, shape) for op in ops_of(dtype) for shape in SHAPES]

    def run(comm: Communicator) -> list[Array]:
        result = []
        for op, shape in cases:
            x = sparse(comm.rank, dtype, shape)
            assert comm.allreduce(x, op=op) is x
            result.append(x)
        return result

    results = run_job(config, 3, run)
    for i, (op, shape) in enumerate(cases):
        expected = reduce_in_rank_order([sparse(rank, dtype, shape) for rank in range(3)], op)
        assert_results([result[i] for result in results], expected)


@pytest.mark.parametrize(("dtype", "config"), by_transports(TYPES), indirect=["config"])
def test_out_takes_the_result_and_x_is_only_read(config: Config, dtype: str) -> None:
    def run(comm: Communicator) -> Array:
        x, out = sparse(comm.rank, dtype, (4, 1001)), np.ones((4, 1001), ELEMENT_TYPES[dtype].dtype)
        x.flags.writeable = False
        assert comm.allreduce(x, out=out) is out
        assert bits(x) == bits(sparse(comm.rank, dtype, (4, 1001)))
        return out

    results = run_job(config, 2, run)
    assert_results(results, reduce_in_rank_order([sparse(rank, dtype, (4, 1001)) for rank in range(2)], "sum"))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_any_number_of_ranks_and_shards(daemon: Daemon, size: int, shards: int) -> None:
    """Fewer workers than shards, and numbers that do not divide, included; many small messages."""
    config = configured(daemon.addresses[:shards], *SMALL_SLOTS)

    def run(comm: Communicator) -> Array:
        assert (comm.size, comm.shards) == (size, shards)
        x = sparse(comm.rank, "float64", (200_003,), block_size=64)
        return comm.allreduce(x, block_size=64)

    tensors = [sparse(rank, "float64", (200_003,), block_size=64) for rank in range(size)]
    assert_results(run_job(config, size, run), reduce_in_rank_order(tensors, "sum"))


def test_ranks_of_one_job_by_different_transports(daemon: Daemon) -> None:
    configs = [configured(daemon.addresses, *over(kind), *SMALL_SLOTS) for kind in ("shm", "tcp", "auto")]

    def run(comm: Communicator) -> tuple[str, Array, Array]:
        summed = comm.allreduce(sparse(comm.rank, "float32", (100_001,)))
        gathered = comm.allgather(np.full(1000, comm.rank))
        return comm.transport, summed, gathered

    results = run_job(configs, 3, run)
    assert [result[0] for result in results] == ["shm", "tcp", "shm"]
    tensors = [sparse(rank, "float32", (100_001,)) for rank in range(3)]
    assert_results([result[1] for result in results], reduce_in_rank_order(tensors, "sum"))
    assert_results([result[2] for result in results], np.repeat(np.arange(3), 1000).reshape(3, 1000))


def test_bits_do_not_depend_on_transport_shards_and_slots(daemon: Daemon) -> None:
    """Sums of floats depend on their order, so equal bits show that the order is always that of the ranks."""

    def run(comm: Communicator) -> bytes:
        return bits(comm.allreduce(sparse(comm.rank, "float32", (50_000,), density=0.8)))

    results = {
        result
        for shards in (1, 2, 3)
        for more in (*map(over, TRANSPORTS), SMALL_SLOTS, (*SMALL_SLOTS, BY_SHARDS))
        for result in run_job(configured(daemon.addresses[:shards], *more), 4, run)
    }
    assert len(results) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["sum", "min", "max", "prod"])
def test_special_values_are_data(local: Config, dtype: str, op: str) -> None:
    """Blocks of NaN, of infinities and of subnormals only; each beside zeros on another rank."""
    kind = ELEMENT_TYPES[dtype].dtype
    tiny = ml_dtypes.finfo(kind).smallest_subnormal
    specials = np.array([np.nan, np.inf, -np.inf, tiny, -tiny, -0.0], kind)

    def tensor(rank: int) -> Array:
        x = np.zeros((len(specials) * 3, 256), kind)
        x[rank::3] = specials[:, None]
        return x

    results = run_job(local, 3, lambda comm: comm.allreduce(tensor(comm.rank), op=op))
    assert_results(results, reduce_in_rank_order([tensor(rank) for rank in range(3)], op))


def test_blocks_of_the_most_negative_integer(local: Config) -> None:
    """Its sign bit is all that it has; it is data."""
    for dtype in ("int8", "int16", "int32", "int64"):
        lowest = np.iinfo(dtype).min
        x = np.full(600, lowest, dtype)
        [first, _] = run_job(local, 2, lambda comm, x=x: comm.allreduce(x.copy() * (comm.rank == 0), op="max"))
        assert first.tolist() == [0] * 600
        [first, _] = run_job(local, 2, lambda comm, x=x: comm.allreduce(x.copy() * (comm.rank == 0)))
        assert first.tolist() == [lowest] * 600


def test_minus_zero_becomes_zero_where_all_ranks_have_zero_blocks(config: Config) -> None:
    def run(comm: Communicator) -> Array:
        return comm.allreduce(np.full(1000, -0.0 if comm.rank else 0.0, np.float32))

    assert [bits(result) for result in run_job(config, 2, run)] == [bytes(4000)] * 2


@pytest.mark.parametrize("block_size", [8, 64, 4096])
def test_block_size(local: Config, block_size: int) -> None:
    def run(comm: Communicator) -> Array:
        return comm.allreduce(sparse(comm.rank, "float32", (10_007,)), block_size=np.int64(block_size))

    expected = reduce_in_rank_order([sparse(rank, "float32", (10_007,)) for rank in range(2)], "sum")
    assert_results(run_job(local, 2, run), expected)


def test_a_worker_that_contributes_nothing(daemon: Daemon) -> None:
    """Its one empty message comes first; then it takes thousands of result messages."""
    config = configured(daemon.addresses[:1], "protocol.slot_bytes=65536", "protocol.slots=2")

    def run(comm: Communicator) -> Array:
        return comm.allreduce(sparse(comm.rank, "float32", (4_000_000,), density=1.0 if comm.rank else 0.0))

    tensors = [sparse(rank, "float32", (4_000_000,), density=1.0 if rank else 0.0) for rank in range(2)]
    assert_results(run_job(config, 2, run), reduce_in_rank_order(tensors, "sum"))


def test_sliced_input_that_is_contiguous(local: Config) -> None:
    """A view at an odd offset of a larger array; its neighbours stay as they are."""

    def run(comm: Communicator) -> Array:
        base = np.full(2001, comm.rank + 1, np.float32)
        comm.allreduce(base[501:1502])
        return base

    expected = [np.where((np.arange(2001) >= 501) & (np.arange(2001) < 1502), 3, rank + 1) for rank in range(2)]
    for result, expected_sum in zip(run_job(local, 2, run), expected, strict=True):
        assert result.tolist() == expected_sum.tolist()


def test_unaligned_views(local: Config) -> None:
    """Elements that lie across their natural alignment, as in memory-mapped files."""

    def run(comm: Communicator) -> Array:
        x = np.zeros(4 * 1001 + 3, np.uint8)[3:].view(np.float32)
        x[:] = sparse(comm.rank, "float32", (1001,))
        out = np.zeros(4 * 1001 + 1, np.uint8)[1:].view(np.float32)
        comm.allreduce(x, out=out)
        assert np.array_equal(comm.allreduce(x), out)
        return out

    expected = reduce_in_rank_order([sparse(rank, "float32", (1001,)) for rank in range(2)], "sum")
    assert_results(run_job(local, 2, run), expected)
