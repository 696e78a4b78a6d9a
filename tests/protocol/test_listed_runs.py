"""Blocks that follow on each other are listed as runs, in both directions, and what runs say is checked before use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from harness import Guarded, InprocCluster, slot_bytes_for
from samples import Array

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import element_type
from omnireduce.core.wire.blocks import HEADER_BYTES, MAX_BLOCKS, seal
from omnireduce.protocol.collective.dense_operands import DenseTensor
from omnireduce.protocol.collective.effects import End
from omnireduce.protocol.rank import RankMachine
from omnireduce.protocol.shard import ShardMachine
from omnireduce.protocol.sharding import Sharding

BLOCK, BLOCKS, STRIPE = 8, 24, 4  # shard 0 of 2 has blocks 0 to 3, 8 to 11, 16 to 19
DESCRIPTOR = Descriptor("allreduce", "w", "float32", (BLOCKS * BLOCK,), block_size=BLOCK)
SLOT_BYTES = slot_bytes_for(12, BLOCK * 4)
MINE, OTHERS = 1 << 48, 2 << 48  # marks: worker 0 alone, or worker 1, contributed
Runs = Sequence[tuple[int, int]]

HONEST: dict[str, tuple[list[int], Runs]] = {
    "all": ([0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19], [(0, 12)]),
    "from within a stripe": ([2, 3, 8, 9], [(2, 4)]),
    "two": ([0, 1, 10, 11, 16], [(0, 2), (10, 3)]),
    "the last": ([17, 18, 19], [(17, 3)]),
}
WRONG: dict[str, tuple[int, Runs, str]] = {
    "more than there are": (5, [(0, 6)], "runs do not list its blocks"),
    "fewer than there are": (5, [(0, 4)], "runs do not list its blocks"),
    "one of none": (5, [(0, 5), (9, 0)], "runs do not list its blocks"),
    "none before the others": (5, [(0, 0), (1, 5)], "runs do not list its blocks"),
    "a negative length": (5, [(0, 4), (9, -1)], "runs do not list its blocks"),
    "a length beyond all": (5, [(0, 2**63 - 1)], "runs do not list its blocks"),
    "beyond all numbers": (5, [(MAX_BLOCKS - 3, 5)], "runs do not list its blocks"),
    "as many as indices": (4, [(0, 2), (2, 2)], "runs that take no less room than its indices"),
    "of a negative number": (
        3,
        [(-7, 3)],
        "expected ascending blocks from 0 to 23",
    ),  # in a result these bits are a mark
    "of another shard": (3, [(4, 3)], "block 4, expected ascending blocks from 0 to 23 of shard 0 of 2"),
    "overlapping": (7, [(0, 3), (2, 4)], "block 2, expected ascending blocks"),
    "descending": (7, [(8, 3), (0, 4)], "block 0, expected ascending blocks"),
    "beyond the tensor": (4, [(17, 4)], "block 24, expected ascending blocks from 0 to 23"),
}


def written(slot: Array, count: int, runs: Runs, extra: bytes) -> int:
    slot[HEADER_BYTES : HEADER_BYTES + count * BLOCK * 4].view(np.float32)[:] = 2
    listed = np.array(runs, np.int64).reshape(-1, 2)
    return seal(slot, 0, BLOCKS, np.zeros(count, np.int64), BLOCK * 4, extra, runs=listed)


def summed(count: int, runs: Runs) -> tuple[End | None, Array | None]:
    """Send such a message beside one of zeros. Return how the job ends, or the first result if it goes on."""
    arena, results = Guarded((4, SLOT_BYTES)), Guarded((2, SLOT_BYTES))
    machine = ShardMachine(["rank 0", "rank 1"], arena.array, results.array, sharding=Sharding(2, STRIPE))
    for rank, (blocks, listed) in enumerate([(0, ()), (count, runs)]):
        nbytes = written(arena.array[2 * rank], blocks, listed, DESCRIPTOR.encoded)
        list(machine.received(rank, 0, nbytes, 0.0))
    list(machine.advance(0.0))
    arena.check()
    results.check()
    return machine.ended, None if machine.ended else results.array[-1]


def placed(count: int, runs: Runs) -> tuple[End | None, Array]:
    """Give worker 0 such a result for a tensor of ones. Return how its job ends, and its tensor."""
    slots = [(Guarded((2, SLOT_BYTES)), Guarded((2, SLOT_BYTES))) for _ in range(2)]
    tensor = Guarded((BLOCKS * BLOCK,), np.float32)
    tensor.array[:] = 1
    machine = RankMachine(
        [(send.array, receive.array) for send, receive in slots],
        ["a:1", "b:2"],
        "rank 0",
        rank=0,
        scan_span=64,
        timeout_s=60.0,
    )
    layout = DESCRIPTOR.layout._replace(shards=2, stripe_blocks=STRIPE)
    operand = DenseTensor(tensor.array, tensor.array, layout, element_type(np.float32).zero_mask)
    machine.submit(DESCRIPTOR, operand, 0.0)
    list(machine.advance(0.0))
    nbytes = written(slots[0][1].array[0], count, runs, b"")
    list(machine.received(0, 0, nbytes, 0.0))
    for guard in (tensor, *(each for pair in slots for each in pair)):
        guard.check()
    return machine.ended, tensor.array.reshape(BLOCKS, BLOCK)[:, 0]


@pytest.mark.parametrize("name", HONEST)
def test_runs_say_where_blocks_belong(name: str) -> None:
    blocks, runs = HONEST[name]
    ended, result = summed(len(blocks), runs)
    assert ended is None
    assert result is not None
    assert result[HEADER_BYTES : HEADER_BYTES + len(blocks) * BLOCK * 4].view(np.float32).tolist() == [2.0] * (
        len(blocks) * BLOCK
    )
    ended, values = placed(len(blocks), runs)
    assert ended is None
    assert np.flatnonzero(values == 2).tolist() == blocks


def test_a_run_has_the_mark_of_its_first_index() -> None:
    ended, values = placed(7, [(0 | MINE, 3), (8 | OTHERS, 4)])
    assert ended is None
    assert np.flatnonzero(values == 2).tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("name", WRONG)
def test_runs_that_are_wrong_name_who_sent_them(name: str) -> None:
    count, runs, words = WRONG[name]
    ended, _ = summed(count, runs)
    assert ended is not None
    assert ended.cause is not None
    assert ended.cause.culprit == "rank 1"
    assert words in ended.cause.reason
    ended, values = placed(count, runs)
    assert ended is not None
    assert ended.cause is not None
    assert ended.cause.culprit == "aggregator a:1"
    assert words in ended.cause.reason
    assert (values == 1).all()


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("marked", [False, True])
def test_dense_messages_list_one_run_in_both_directions(shards: int, marked: bool) -> None:
    """However many shards there are, and also where one rank alone has the blocks."""
    cluster = InprocCluster(2, shards=shards, stripe_blocks=3, slot_bytes=slot_bytes_for(10, BLOCK * 4))
    cluster.record = []
    tensors = [np.ones(90 * BLOCK + 3, np.float32), np.full(90 * BLOCK + 3, not marked, np.float32)]
    for rank, tensor in enumerate(tensors):
        cluster.allreduce(rank, tensor, block_size=BLOCK)
    cluster.run()
    assert all((tensor == 2 - marked).all() for tensor in tensors)
    assert all(message.header.runs == (len(message.indices) > 2) for message in cluster.record)
    assert {message.down for message in cluster.record if message.header.runs} == {False, True}


def test_sparse_messages_list_indices() -> None:
    cluster = InprocCluster(2)
    cluster.record = []
    tensor = np.zeros((40, BLOCK), np.float32)
    tensor[::2] = 1
    for rank in range(2):
        cluster.allreduce(rank, tensor.copy().reshape(-1), block_size=BLOCK)
    cluster.run()
    assert [message.header.runs for message in cluster.record] == [0] * len(cluster.record)
    assert sum(len(message.indices) for message in cluster.record) == 2 * 20 + 2 * 20  # up, and down
