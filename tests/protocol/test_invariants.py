"""The protocol's invariants I1 to I7, each by its name in docs/protocol.md."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from harness import Guarded, InprocCluster, Message, slot_bytes_for
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_results, bits, reduce_in_rank_order
from samples import Array, sparse_tensor

from omnireduce.core.blocks_and_stripes import Layout, Stripes
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import element_type
from omnireduce.core.wire.blocks import HEADER_BYTES, seal
from omnireduce.kernels.index_runs import expand_runs
from omnireduce.kernels.index_steps import expand_steps
from omnireduce.kernels.merge_indices import admit_indices
from omnireduce.protocol.collective.dense_operands import DenseTensor
from omnireduce.transport.base import Credited, Received

SEEDS = st.integers(0, 2**32 - 1)
BLOCK = 8


def small_cluster(rng: random.Random, world_size: int | None = None) -> InprocCluster:
    return InprocCluster(
        world_size or rng.randint(1, 5),
        shards=rng.randint(1, 4),
        slots=rng.randint(2, 4),
        slot_bytes=slot_bytes_for(rng.randint(1, 4), BLOCK * 4),
        scan_span=rng.randint(1, 9),
        stripe_blocks=rng.randint(1, 4),
        seed=rng.randint(0, 2**32),
    )


def random_tensors(seed: int, ranks: int, blocks: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [sparse_tensor(rng, "float32", blocks * BLOCK - 3, BLOCK, rng.random()) for _ in range(ranks)]


def data_blocks(x: Array) -> list[int]:
    padded = np.concatenate([x, np.zeros(-x.size % BLOCK, x.dtype)])
    return [int(block) for block in np.flatnonzero((padded.reshape(-1, BLOCK) != 0).any(axis=1))]


def recorded_run(seed: int) -> tuple[InprocCluster, list[list[list[int]]], list[Message]]:
    """Run two collectives; return the cluster, the non-zero blocks per collective and rank, and all messages."""
    cluster = small_cluster(random.Random(seed))
    cluster.record = []
    contributed = []
    for number in range(2):
        inputs = random_tensors(seed + number, cluster.world_size, blocks=1 + seed % 61)
        contributed.append([data_blocks(x) for x in inputs])
        for rank, x in enumerate(inputs):
            cluster.allreduce(rank, x)
    cluster.run()
    return cluster, contributed, cluster.record


def owned(cluster: InprocCluster, blocks: list[int], shard: int) -> list[int]:
    return [block for block in blocks if Layout(0, BLOCK, cluster.shards, cluster.stripe_blocks).owner(block) == shard]


@given(seed=SEEDS)
def test_i1_indices_ascend_and_lie_between_frontiers(seed: int) -> None:
    cluster, contributed, messages = recorded_run(seed)
    frontiers: dict[tuple[int, int, bool, int], int] = {}
    sent: dict[tuple[int, int, int], list[int]] = {}
    for shard, rank, down, header, indices in messages:
        key = shard, rank, down, header.collective
        low = frontiers.get(key, 0)
        assert low <= header.frontier
        assert indices == sorted(set(indices))
        assert all(low <= index < header.frontier for index in indices)
        frontiers[key] = header.frontier
        if not down:
            sent.setdefault((header.collective, rank, shard), []).extend(indices)
    for number, ranks in enumerate(contributed):
        for rank, blocks in enumerate(ranks):
            for shard in range(cluster.shards):
                assert sent.get((number, rank, shard), []) == owned(cluster, blocks, shard)


@given(seed=SEEDS)
def test_i2_a_block_is_emitted_once_and_only_when_every_frontier_is_past_it(seed: int) -> None:
    cluster, contributed, messages = recorded_run(seed)
    frontiers: dict[tuple[int, int], list[int]] = {}
    emitted: dict[tuple[int, int, int], list[int]] = {}
    for shard, rank, down, header, indices in messages:
        key = header.collective, shard
        of_ranks = frontiers.setdefault(key, [0] * cluster.world_size)
        if down:
            assert all(index < frontier for index in indices for frontier in of_ranks)
            emitted.setdefault((*key, rank), []).extend(indices)
        else:
            of_ranks[rank] = header.frontier
    for number, ranks in enumerate(contributed):
        union = sorted(set().union(*ranks))
        for shard in range(cluster.shards):
            for rank in range(cluster.world_size):
                assert emitted.get((number, shard, rank), []) == owned(cluster, union, shard)


@given(seed=SEEDS)
def test_i2_blocks_are_summed_in_rank_order_whatever_the_order_of_arrival(seed: int) -> None:
    inputs = random_tensors(seed, 4, 30)
    expected = reduce_in_rank_order(inputs, "sum")
    outcomes = set()
    for schedule in range(3):
        cluster = small_cluster(random.Random(seed + schedule), world_size=4)
        results = [cluster.allreduce(rank, x, np.empty_like(x)) for rank, x in enumerate(inputs)]
        cluster.run()
        assert_results(results, expected)
        outcomes.add(bits(results[0]))
    assert len(outcomes) == 1


def test_i3_no_more_messages_than_slots_are_unreturned() -> None:
    cluster = InprocCluster(2, slots=3, slot_bytes=slot_bytes_for(1, BLOCK * 4))
    cluster.record = []
    cluster.allreduce(0, np.ones(100 * BLOCK, np.float32))
    cluster.settle()  # rank 1 has not come: nothing can be returned
    assert len(cluster.record) == 3
    cluster.allreduce(1, np.ones(100 * BLOCK, np.float32))
    cluster.settle(paused=[cluster.worker_drivers[0]])  # rank 0 reads no results
    assert sum(message.down and message.rank == 0 for message in cluster.record) == 3
    cluster.run()


@pytest.mark.parametrize("slot", [0, 1, 2, 65535])
def test_i3_a_peer_that_exceeds_its_credit_is_named(slot: int) -> None:
    cluster = InprocCluster(3, shards=2, slot_bytes=slot_bytes_for(2, BLOCK * 4))
    for rank in (1, 2):
        cluster.allreduce(rank, np.ones(500, np.float32))
    cluster.settle()  # the aggregators hold both messages of ranks 1 and 2, and wait for rank 0
    cluster.down[0][1].deliver(Received(slot, 64))
    cluster.settle()
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}
    reasons = {end.cause.reason for end in cluster.worker_ends if end and end.cause}
    assert reasons == {f"protocol error: message for slot {slot} without a credit"}


def test_i3_a_credit_that_nobody_owes_is_named() -> None:
    cluster = InprocCluster(2, shards=2)  # its link to shard 0 is over, so rank 1 hears it from shard 1
    cluster.down[0][1].deliver(Credited(0))
    cluster.settle()
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}


@given(seed=SEEDS)
def test_i4_random_schedules_are_never_stuck_and_all_slots_come_back(seed: int) -> None:
    rng = random.Random(seed)
    cluster = small_cluster(rng)
    for number in range(rng.randint(1, 4)):
        inputs = random_tensors(seed + number, cluster.world_size, rng.choice([0, 1, 5, 40, 150]) or 1)
        for rank, x in enumerate(inputs):
            cluster.allreduce(rank, x)
        if rng.random() < 0.5:
            cluster.settle()
    cluster.run()  # says so if it is stuck or a slot is missing


@pytest.mark.parametrize("slow", range(5))
def test_i4_the_rank_with_the_lowest_frontier_always_has_its_credits_back(slow: int) -> None:
    cluster = InprocCluster(5, slots=2, slot_bytes=slot_bytes_for(1, BLOCK * 4), scan_span=1)
    for rank in range(5):
        cluster.allreduce(rank, np.ones(200 * BLOCK, np.float32))
    driver = cluster.worker_drivers[slow]
    for _ in range(20):
        cluster.settle(paused=[driver])  # everybody else goes as far as possible
        before = cluster.up[slow][0].counters.sent_bytes
        driver.turn()
        assert cluster.up[slow][0].counters.sent_bytes > before
    cluster.run()


@given(seed=SEEDS)
def test_i5_in_place_is_safe(seed: int) -> None:
    inputs = random_tensors(seed, 3, 50)
    results = []
    for in_place in (True, False):
        cluster = small_cluster(random.Random(seed), world_size=3)
        own = [x.copy() for x in inputs]
        results += [cluster.allreduce(rank, x, None if in_place else np.empty_like(x)) for rank, x in enumerate(own)]
        cluster.run()
    assert_results(results, reduce_in_rank_order(inputs, "sum"))


def test_i5_a_result_for_a_block_that_was_not_packed_is_refused() -> None:
    cluster = InprocCluster(1, slots=2, slot_bytes=slot_bytes_for(1, BLOCK * 4))
    x = np.ones(10 * BLOCK, np.float32)
    cluster.allreduce(0, x)
    cluster.worker_drivers[0].advance()  # has packed blocks 0 and 1
    nbytes = seal(cluster.results[0][0], 0, 3, np.array([2]), BLOCK * 4)
    cluster.up[0][0].deliver(Received(0, nbytes))
    cluster.worker_drivers[0].feed(0)
    assert (x == 1).all()
    assert cluster.culprits() == {"aggregator 127.0.0.1:7400"}


@pytest.mark.parametrize("density", [1.0, 0.1, 0.01])
def test_i6_bytes_are_the_blocks_and_one_percent(density: float) -> None:
    size = 256
    cluster = InprocCluster(2, slots=4, slot_bytes=1 << 20, scan_span=8192, stripe_blocks=64)
    rng = np.random.default_rng(6)
    inputs = []
    for _ in range(2):
        tensor = np.zeros((16384, size), np.float32)
        tensor[rng.random(16384) < density] = 1
        inputs.append(tensor)
    own = [int((tensor != 0).any(axis=1).sum()) for tensor in inputs]
    union = int(((inputs[0] != 0) | (inputs[1] != 0)).any(axis=1).sum())
    for rank, tensor in enumerate(inputs):
        cluster.allreduce(rank, tensor.reshape(-1), block_size=size)
    cluster.run()
    for rank in range(2):
        counters = cluster.up[rank][0].counters
        assert own[rank] * 4 * size < counters.sent_bytes <= own[rank] * 4 * size * 1.01
        assert union * 4 * size < counters.received_bytes <= union * 4 * size * 1.01


def test_i6_a_tensor_of_zeros_is_one_message_a_shard() -> None:
    cluster = InprocCluster(3, shards=2, scan_span=8192)
    cluster.record = []
    for rank in range(3):
        cluster.allreduce(rank, np.full(5000, -0.0, np.float32))
    cluster.run()
    assert len(cluster.record) == 3 * 2 * 2
    assert all(message.indices == [] for message in cluster.record)


@pytest.mark.parametrize(("message_blocks", "most"), [(3, 3), (0.5, 1), (99, 8)])
def test_messages_keep_their_limit_both_ways(message_blocks: float, most: int) -> None:
    """The limits: blocks of a message, though one always goes, and bytes of a slot."""
    nbytes = BLOCK * 4
    cluster = InprocCluster(2, slot_bytes=slot_bytes_for(8, nbytes), message_bytes=int(message_blocks * nbytes))
    cluster.record = []
    tensors = [np.ones(800 * BLOCK, np.float32) for _ in range(2)]  # a long message is a 64th of what goes to a shard
    for rank, tensor in enumerate(tensors):
        cluster.allreduce(rank, tensor)
    cluster.run()
    assert all((tensor == 2).all() for tensor in tensors)
    assert max(len(message.indices) for message in cluster.record) == most


# I7: what a peer wrote is copied out, then checked, then used


def half_merged(step: int = 1) -> tuple[InprocCluster, list[Array]]:
    """Rank 0's only message, of each `step`th block, is admitted, rank 1's has not come yet."""
    cluster = InprocCluster(2, slot_bytes=slot_bytes_for(8, BLOCK * 4))
    inputs = [np.zeros(8 * step * BLOCK, np.float32) for _ in range(2)]
    for each in inputs:
        each.reshape(8, -1)[:, :BLOCK] = np.arange(8 * BLOCK).reshape(8, -1) + 1
    cluster.allreduce(0, inputs[0])
    cluster.settle()
    cluster.allreduce(1, inputs[1])
    return cluster, inputs


@pytest.mark.parametrize("value", [-1, 7, 2**40, -(2**63), 2**63 - 1])
@pytest.mark.parametrize(("step", "listed"), [(2, list(range(0, 16, 2))), (1, [0, 8])], ids=["indices", "run"])
def test_i7_indices_that_change_after_they_were_admitted_reach_nothing(
    step: int, listed: list[int], value: int
) -> None:
    cluster, inputs = half_merged(step)
    expected = 2 * inputs[0]
    slot = cluster.arenas[0][1]  # rank 0 sent from its last free slot
    start = HEADER_BYTES + 8 * BLOCK * 4
    words = slot[start : start + 8 * len(listed)].view(np.int64)
    assert words.tolist() == listed
    words[:] = value
    cluster.run()
    assert_results(inputs, expected)


def test_i7_a_header_that_changes_after_it_was_read_changes_nothing() -> None:
    cluster, inputs = half_merged()
    expected = 2 * inputs[0]
    cluster.arenas[0][1][:HEADER_BYTES] = 0xFF
    cluster.run()
    assert_results(inputs, expected)


def test_i7_blocks_that_change_are_a_wrong_sum_of_that_peer_and_nothing_else() -> None:
    cluster, inputs = half_merged()
    cluster.arenas[0][1][HEADER_BYTES : HEADER_BYTES + 4] = 0xFF
    cluster.run()
    assert np.isnan(inputs[1][0])
    assert (inputs[1][1:] == 2 * (np.arange(1, 8 * BLOCK) + 1)).all()


def test_i7_indices_are_checked_on_the_copy_while_a_peer_writes_them() -> None:
    near = np.arange(1 << 15)  # long enough for both sides to run without the interpreter's lock
    shared, own, far = near.copy(), np.zeros_like(near), near + 2**40
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            shared[:] = far
            for _ in range(16):  # so that a change while they are copied is over when they are checked
                shared[:] = near

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3000):
            if admit_indices(shared, 0, near.size, *Stripes(), own) == near.size:
                assert (own == near).all()
    finally:
        stop.set()
        writer.join()


def test_i7_runs_are_written_out_within_bounds_while_a_peer_writes_them() -> None:
    near = np.array([word for at in range(1 << 12) for word in (8 * at, 3)])
    far = np.where(np.arange(near.size) % 2, 2**62, near)
    shared, own = near.copy(), Guarded((3 << 12,), np.int64)
    expected = np.arange(8 << 12).reshape(-1, 8)[:, :3].reshape(-1)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            shared[:] = far
            shared[:] = near

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3000):
            expand_runs(shared, 0, 0, 1, 64, own.array)
            own.check()
    finally:
        stop.set()
        writer.join()
    shared[:] = near
    assert expand_runs(shared, 0, 0, 1, 64, own.array) == (expected.size, near.size // 2, 0)
    assert (own.array == expected).all()


def test_i7_steps_are_written_out_within_bounds_while_a_peer_writes_them() -> None:
    near = np.ones(3 << 12, np.uint8)
    shared, own = near.copy(), Guarded((2 << 12,), np.int64)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            shared[:] = 0xFF
            shared[:] = near

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3000):
            expand_steps(shared, 0, 0, own.array)
            own.check()
    finally:
        stop.set()
        writer.join()
    shared[:] = near
    assert expand_steps(shared, 0, 0, own.array) == (2 << 12, 2 << 12, 2 << 12)
    assert (own.array == np.arange(1, 1 + (2 << 12))).all()


def test_i7_a_result_for_a_collective_that_was_not_sent_reaches_nothing() -> None:
    """A long tensor came before: its frontier must not vouch for indices in the short one that waits for a slot."""
    cluster = InprocCluster(1, slots=2, slot_bytes=slot_bytes_for(1, BLOCK * 4))
    cluster.allreduce(0, np.ones(200 * BLOCK, np.float32))
    cluster.run()
    short = np.zeros(4096, np.uint8)  # with guard bytes on both sides, where block 100 of it would lie
    target = short[1024 : 1024 + 4 * BLOCK * 4].view(np.float32)
    target[:] = 1
    before = short.copy()
    stream = cluster.workers[0]._streams[0]
    free, stream._free = stream._free, []
    layout = Layout(target.size, BLOCK, cluster.shards, cluster.stripe_blocks)
    operand = DenseTensor(target, target, layout, element_type(np.float32).zero_mask)
    cluster.submit(0, Descriptor("allreduce", "", "float32", target.shape, block_size=BLOCK), operand)
    cluster.worker_drivers[0].advance()
    nbytes = seal(cluster.results[0][0], 1, 60, np.array([50]), BLOCK * 4)
    cluster.up[0][0].deliver(Received(0, nbytes))
    cluster.worker_drivers[0].feed(0)
    stream._free = free
    assert cluster.culprits() == {"aggregator 127.0.0.1:7400"}
    assert (short == before).all()
