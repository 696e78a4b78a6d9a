"""Bytes on the wire follow the density of the data, plus at most 1 % for framing: 0.05 % where all is dense."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job
from pairwise import pairwise
from tensors import Array, sparse
from transports import BY_SHARDS, KINDS, TRANSPORTS, over

from omnireduce import Communicator, Config, Statistics

ELEMENTS, BLOCK = 4_194_304, 256  # 16 MiB of float32, 16384 blocks


def difference(after: Statistics, before: Statistics) -> tuple[int, int, int]:
    return (
        after.sent_bytes - before.sent_bytes,
        after.received_bytes - before.received_bytes,
        after.collectives - before.collectives,
    )


def block_bytes(mask: np.ndarray) -> int:
    return int(mask.sum()) * BLOCK * 4


@pytest.mark.parametrize(("density", "transport", "shards"), pairwise([1.0, 0.1, 0.01], KINDS, [1, 3]))
def test_bytes_are_the_non_zero_blocks_plus_framing(
    daemon: Daemon, transport: str, density: float, shards: int
) -> None:
    """Up: a worker's own non-zero blocks. Down: those of the union, over TCP without those of this worker alone."""
    config = configured(daemon.addresses[:shards], *over(transport))
    tensors = [sparse(rank, "float32", (ELEMENTS,), density=density) for rank in range(2)]
    nonzero = [tensor.reshape(-1, BLOCK).any(axis=1) for tensor in tensors]

    def run(comm: Communicator) -> tuple[int, int, int]:
        before = comm.statistics()
        comm.allreduce(tensors[comm.rank].copy())
        return difference(comm.statistics(), before)

    for rank, (sent, received, collectives) in enumerate(run_job(config, 2, run)):
        assert collectives == 1
        up = block_bytes(nonzero[rank])
        down = block_bytes(nonzero[1 - rank] if transport == "tcp" else nonzero[0] | nonzero[1])
        framing = 0.01 * (up + down) + 2000 * shards
        assert up <= sent <= up + framing
        assert down <= received <= down + framing


@pytest.mark.parametrize(("block_size", "transport", "shards"), pairwise([64, 256, 1024], KINDS, [1, 3]))
def test_dense_tensors_carry_next_to_nothing_beside_their_data(
    daemon: Daemon, transport: str, block_size: int, shards: int
) -> None:
    """A message has its head, one run and a credit for 256 KiB over TCP; and one descriptor for each shard."""
    config = configured(daemon.addresses[:shards], *over(transport), f"protocol.block_size={block_size}")
    tensor = sparse(0, "float32", (ELEMENTS,), density=1.0)

    def run(comm: Communicator) -> tuple[int, int, int]:
        before = comm.statistics()
        comm.allreduce(tensor.copy())
        return difference(comm.statistics(), before)

    for sent, received, _ in run_job(config, 2, run):
        assert tensor.nbytes <= sent <= 1.0005 * tensor.nbytes
        assert tensor.nbytes <= received <= 1.0005 * tensor.nbytes


def test_dense_rows_carry_next_to_nothing_beside_their_data(daemon: Daemon) -> None:
    numbers, values = np.arange(5000, 21_000), np.ones((16_000, BLOCK), np.float32)

    def run(comm: Communicator) -> tuple[int, int, int]:
        before = comm.statistics()
        comm.allreduce_rows(numbers, values, 100_000)
        return difference(comm.statistics(), before)

    for sent, received, _ in run_job(configured(daemon.addresses, *over("tcp")), 2, run):
        assert values.nbytes <= sent <= 1.0005 * values.nbytes
        assert values.nbytes <= received <= 1.0005 * values.nbytes


def test_bytes_of_each_shard(daemon: Daemon) -> None:
    """Only the second of three stripes holds data, and only its shard moves more than framing."""
    tensor = np.zeros((3, 64 * BLOCK), np.float32)
    tensor[1] = 1

    def run(comm: Communicator) -> tuple[list[int], int]:
        before = comm.statistics()
        comm.allreduce(tensor.copy())
        after = comm.statistics()
        each = [now - then for now, then in zip(after.shard_bytes, before.shard_bytes, strict=True)]
        sent, received, _ = difference(after, before)
        return each, sent + received

    for (first, second, third), total in run_job(configured(daemon.addresses, BY_SHARDS), 2, run):
        assert first + second + third == total
        assert first + third < 2000
        assert second > 2 * tensor[1].nbytes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_carried_the_tensors_is_counted(daemon: Daemon, transport: str) -> None:
    """Collectives of each kind are counted by transport; control messages are not."""

    def run(comm: Communicator) -> list[dict[str, int]]:
        results = [dict(comm.statistics().carried)]
        comm.allreduce(np.ones(10_000, np.float32))
        comm.broadcast(np.ones(3))
        comm.allreduce_rows(np.arange(2), np.ones((2, 2)), 5)
        return [*results, dict(comm.statistics().carried)]

    for before, after in run_job(configured(daemon.addresses, *over(transport)), 2, run):
        assert (before, list(after)) == ({}, [transport])
        assert after[transport] >= 40_000


def test_nothing_but_framing_for_zeros(config: Config) -> None:
    def run(comm: Communicator) -> tuple[int, int, int]:
        before = comm.statistics()
        comm.allreduce(np.zeros(ELEMENTS, np.float32))
        return difference(comm.statistics(), before)

    for sent, received, collectives in run_job(config, 2, run):
        assert sent + received < 10_000
        assert collectives == 1


def test_every_kind_of_collective_counts(local: Config) -> None:
    def run(comm: Communicator) -> int:
        comm.barrier()
        comm.broadcast(np.ones(3))
        comm.allgather(np.ones(3))
        comm.reduce_scatter(np.ones(3))
        comm.allreduce_rows(np.arange(2), np.ones((2, 2)), 5)
        comm.allreduce_async(np.ones(2)).wait()
        return comm.statistics().collectives

    assert run_job(local, 2, run) == [6, 6]


def moved(comm: Communicator, exchange: Callable[[], object]) -> list[bool]:
    """Flags of the shards on which `exchange` moves blocks."""
    before = comm.statistics().shard_bytes
    exchange()
    return [now > then for now, then in zip(comm.statistics().shard_bytes, before, strict=True)]


def test_small_tensors_move_nothing_on_other_shards_than_the_first(daemon: Daemon) -> None:
    config = configured(daemon.addresses, "protocol.whole_bytes=262144", BY_SHARDS)
    small, large = np.ones(65_536, np.float32), np.ones(65_537, np.float32)

    def run(comm: Communicator) -> list[list[bool]]:
        rows = np.arange(256), np.ones((256, 256), np.float32)
        results: list[Array] = []
        result = [
            moved(comm, lambda: results.append(comm.allreduce(small.copy()))),
            moved(comm, lambda: results.append(comm.broadcast(small * (1 + comm.rank), root=1))),
            moved(comm, lambda: results.append(comm.allreduce_rows(*rows, 256)[1])),
            moved(comm, lambda: results.append(comm.allreduce(large.copy()))),
        ]
        assert all((each == 2).all() for each in results)
        return result

    for result in run_job(config, 2, run):
        assert result == [[True, False, False]] * 3 + [[True, True, True]]


def test_of_ranks_that_call_other_tensors_small_the_most_modest_counts(daemon: Daemon) -> None:
    """The smallest limit counts, whatever its rank."""
    configs = [
        configured(daemon.addresses, f"protocol.whole_bytes={size}", BY_SHARDS) for size in (1 << 19, 1 << 18, 1 << 20)
    ]
    small, large = np.ones(65_536, np.float32), np.ones(65_537, np.float32)

    def run(comm: Communicator) -> list[list[bool]]:
        results = [moved(comm, lambda: comm.allreduce(small.copy())), moved(comm, lambda: comm.allreduce(large.copy()))]
        assert comm.allreduce(np.full(70_000, comm.rank, np.float32)).tolist() == [3.0] * 70_000
        return results

    for order in (configs, configs[1:] + configs[:1]):
        assert run_job(order, 3, run) == [[[True, False, False], [True, True, True]]] * 3
