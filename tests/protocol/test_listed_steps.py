"""Rows of few bytes are listed as steps, in both directions, and what steps say is checked before use."""

from __future__ import annotations

import numpy as np
import pytest
from harness import InprocCluster, slot_bytes_for
from hypothesis import given
from hypothesis import strategies as st
from oracle import indices_of_runs, indices_of_steps

from omnireduce.core.blocks_and_stripes import Stripes
from omnireduce.core.dtypes import Array
from omnireduce.core.wire.blocks import Header, read_header, seal
from omnireduce.errors import ProtocolError
from omnireduce.protocol.collective.index_lists import TINY_BYTES, Lister

ROWS = 10_000


@given(
    gaps=st.lists(st.integers(1, 200), max_size=60),
    far=st.lists(st.integers(0, 59), max_size=3),
    tiny=st.booleans(),
    dense=st.booleans(),
)
def test_the_shortest_list_is_taken(gaps: list[int], far: list[int], tiny: bool, dense: bool) -> None:
    """Blocks that are not tiny get the shorter of two lists, indices or runs; tiny blocks may get steps."""
    steps_of_all = [1 if dense else gap + (2**40 if at in far else 0) for at, gap in enumerate(gaps)]
    indices = np.cumsum(steps_of_all, dtype=np.int64)
    runs, steps = Lister(64).shortest(indices, 1, 64, TINY_BYTES if tiny else TINY_BYTES + 8)
    joined = sum(gap == 1 for gap in steps_of_all[1:])
    runs_bytes = 16 * (len(steps_of_all) - joined) if len(indices) else 8
    sizes = [8 * indices.size, runs_bytes]
    taken = steps.size or 16 * len(runs) or 8 * indices.size
    assert not (len(runs) and steps.size)
    if steps.size:
        assert tiny
        assert indices_of_steps(steps.tobytes()) == indices.tolist()
        assert taken < min(sizes)
    elif len(runs):
        assert indices_of_runs(runs.reshape(-1).tolist()) == indices.tolist()
    if not tiny:
        assert taken == (min(sizes) if indices.size else 0)


def some(rank: int, width: int, count: int) -> tuple[Array, Array]:
    rng = np.random.default_rng([rank, width])
    numbers = np.sort(rng.choice(ROWS, count, replace=False))
    return numbers, rng.integers(1, 9, (count, width)).astype(np.float32)


@pytest.mark.parametrize("width", [1, 2, 4, 5])
@pytest.mark.parametrize("shards", [1, 3])
def test_tiny_rows_travel_with_steps(width: int, shards: int) -> None:
    cluster = InprocCluster(2, shards=shards, stripe_blocks=64, slot_bytes=slot_bytes_for(100, 4 * width))
    cluster.record = []
    parts = [some(rank, width, 700) for rank in range(2)]
    operands = [cluster.rows(rank, *part, ROWS) for rank, part in enumerate(parts)]
    cluster.run()
    total = np.zeros((ROWS, width), np.float32)
    for numbers, values in parts:
        total[numbers] += values
    for operand in operands:
        numbers, sums = operand.result
        assert numbers.tolist() == np.flatnonzero(total.any(axis=1)).tolist()
        assert (sums == total[numbers]).all()
    is_tiny = 4 * width <= TINY_BYTES
    for message in cluster.record:
        assert message.indices == sorted(message.indices)
        assert (message.header.steps > 0) == (is_tiny and message.header.block_count > 1)
        assert message.header.left_out == 0 or not is_tiny


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (bytes([3, 1, 1, 0, 1]), "expected ascending blocks"),
        (bytes([3, 1, 1, 1, 129]), "steps do not list its blocks"),
        (bytes([3, 1, 1, 1, 1, 1]), "steps do not list its blocks"),
        (bytes([3, 1, 1, 1, *[255] * 6, 127]), "steps do not list its blocks"),
        (bytes([3, 1, 1, 1, 93]), "expected ascending blocks from 0 to 98"),
        (bytes([3, 1, 1, 129, 1]), "steps do not list its blocks"),
    ],
)
@pytest.mark.parametrize("down", [False, True])
def test_steps_that_are_wrong_name_who_sent_them(steps: bytes, words: str, down: bool) -> None:
    cluster = InprocCluster(2, slot_bytes=slot_bytes_for(100, 4))
    culprits = []

    def lie(shard: int, rank: int, is_down: bool, slot: Array, nbytes: int) -> int:
        header = read_header(slot, nbytes)
        if is_down != down or rank != 1 or header.block_count != 5 or culprits:
            return nbytes
        culprits.append(words)
        extra = slot[header.list_stop : nbytes].tobytes()
        listed = np.frombuffer(steps, np.uint8)
        return seal(slot, header.collective, header.frontier, np.arange(5), header.block_bytes, extra, steps=listed)

    cluster.tamper = lie
    for rank in range(2):
        cluster.rows(rank, np.arange(3, 8), np.ones((5, 1), np.float32), 99)
    cluster.settle()
    assert culprits
    end = cluster.worker_ends[1 if down else 0]
    assert end is not None
    assert end.cause is not None
    assert words in end.cause.reason
    assert end.cause.culprit.startswith("aggregator" if down else "rank 1 ")


@pytest.mark.parametrize(
    ("count", "steps", "runs"), [(0, 1, 0), (2, 1, 0), (2, 16, 0), (5, 5, 1), (1, 8, 0), (1 << 31, 1 << 31, 0)]
)
def test_a_header_whose_steps_cannot_be_is_refused(count: int, steps: int, runs: int) -> None:
    slot = np.zeros(4096, np.uint8)
    indices = np.arange(min(count, 100))
    nbytes = seal(slot, 0, 99, indices, 8, steps=np.ones(min(steps, 100), np.uint8))
    slot[16:20].view(np.uint32)[:] = count
    slot[32:40].view(np.uint32)[:] = runs, steps
    with pytest.raises(ProtocolError, match=r"steps cannot list|claims more|runs that take no less"):
        read_header(slot, nbytes)


def test_a_header_of_steps_reads_back() -> None:
    slot = np.zeros(4096, np.uint8)
    nbytes = seal(slot, 3, 99, np.array([7, 200]), 4, b"xyz", steps=np.array([7, 0xC1, 1], np.uint8))
    assert nbytes == 64 + 8 + 3 + 3
    assert read_header(slot, nbytes) == Header(3, 99, 2, 4, 3, steps=3)


def test_windows_of_stripes_fit_steps() -> None:
    """A shard's stripes are far apart; steps go from one to the next."""
    stripes = Stripes(1, 3, 4)
    indices = np.array([block for block in range(200) if block // 4 % 3 == stripes.shard][::2])
    _, steps = Lister(100).shortest(indices, 3, 4, 4)
    assert indices_of_steps(steps.tobytes()) == indices.tolist()
