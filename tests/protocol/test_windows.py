"""A message whose indices are checked in windows may be wrong in a later one: nothing completes before that is seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from oracle import steps_of

from omnireduce.core.blocks_and_stripes import Stripes
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.wire.blocks import read_header, seal
from omnireduce.errors import ProtocolError
from omnireduce.protocol.collective.combining import FORMATS, Combiner
from omnireduce.protocol.collective.index_lists import MessageSizing
from omnireduce.protocol.collective.reduction import Budget, Reduction

BLOCK, BLOCKS, RANKS, SLOT_BYTES, ALL = 8, 4, 2, 4096, Stripes()
Runs = Sequence[tuple[int, int]]


def fed(indices: list[int], window: int, runs: Runs = (), *, in_steps: bool = False) -> Reduction:
    """A reduction of int64 to which rank 0 has brought these blocks, all of ones, and rank 1 every block.

    Rank 0 lists its blocks as `runs`, if there are any, or else as steps.
    """
    arena, results = (np.zeros((RANKS, SLOT_BYTES), np.uint8) for _ in range(2))
    reduction = Reduction(RANKS, RANKS, arena, results, MessageSizing(SLOT_BYTES, SLOT_BYTES), Budget(window=window))
    descriptor = Descriptor("allreduce", "", "int64", (BLOCKS * BLOCK,), block_size=BLOCK)
    reduction.begin(descriptor, ALL)
    for rank, (own, listed) in enumerate([(indices, runs), (list(range(BLOCKS)), ())]):
        arena[rank, 64 : 64 + 8 * BLOCK * len(own)].view(np.int64)[:] = 1
        as_runs = np.array(listed, np.int64).reshape(-1, 2)
        steps = np.frombuffer(steps_of(own) if in_steps and rank == 0 else b"", np.uint8)
        nbytes = seal(arena[rank], 0, BLOCKS, np.array(own), descriptor.block_bytes, runs=as_runs, steps=steps)
        reduction.union.open(rank, rank, read_header(arena[rank], nbytes))
    return reduction


def merging(indices: list[int], window: int, runs: Runs = (), *, in_steps: bool = False) -> Iterator[Reduction]:
    """The reduction after each step, as long as there is something to do."""
    reduction = fed(indices, window, runs, in_steps=in_steps)
    while reduction.merge(0, 1 << 20) or reduction.union.awaiting_window:
        yield reduction
        for rank in sorted(reduction.union.awaiting_window):
            reduction.union.feed(rank)
    yield reduction


@pytest.mark.parametrize("window", [1, 2, 4096])
@pytest.mark.parametrize(
    ("indices", "runs"),
    [([0, 1, 2, 3], []), ([1, 3], []), ([3], []), ([], []), ([0, 1, 2, 3], [(0, 4)]), ([1, 2, 3], [(1, 3)])],
)
@pytest.mark.parametrize("in_steps", [False, True])
def test_all_windows_of_an_honest_message_are_used(indices: list[int], runs: Runs, window: int, in_steps: bool) -> None:
    *_, reduction = merging(indices, window, () if in_steps else runs, in_steps=in_steps)
    assert reduction.union.complete
    result = reduction._results[0, 64 : 64 + BLOCKS * 8 * BLOCK].view(np.int64).reshape(BLOCKS, BLOCK)
    assert result[:, 0].tolist() == [1 + (block in indices) for block in range(BLOCKS)]


@pytest.mark.parametrize("window", [1, 2, 4096])
@pytest.mark.parametrize("indices", [[3, 2], [0, 3, 1], [0, 3, 3], [1, 2, 3, 0], [1, 0, 3], [0, 1, 1, 3]])
def test_no_collective_completes_before_the_last_index_was_seen(indices: list[int], window: int) -> None:
    written: list[int] = []
    with pytest.raises(ProtocolError, match="expected ascending blocks"):
        written.extend(int(block) for each in merging(indices, window) for block in each._numbers[: each.written])
    assert 3 not in written


@pytest.mark.parametrize("window", [1, 2, 4096])
@pytest.mark.parametrize("length", [2, 4, 2**40])
def test_no_collective_completes_before_the_last_run_was_seen(window: int, length: int) -> None:
    """A message of three blocks has a run of fewer or more."""
    written: list[int] = []
    with pytest.raises(ProtocolError, match="runs do not list its blocks"):
        written.extend(
            int(block) for each in merging([0, 1, 2], window, [(0, length)]) for block in each._numbers[: each.written]
        )
    assert 3 not in written


def test_the_formats_that_were_used_last_are_kept_and_no_more() -> None:
    arena, results = (np.zeros((RANKS, SLOT_BYTES), np.uint8) for _ in range(2))
    combiner = Combiner(
        RANKS,
        arena,
        results,
        divisor=RANKS,
        sizing=MessageSizing(SLOT_BYTES, SLOT_BYTES),
        max_blocks=100,
        piece_bytes=1 << 20,
    )

    def begin(block_size: int) -> object:
        return combiner.begin(Descriptor("allreduce", "", "int64", (64,), block_size=8 * block_size))

    kept = begin(1)
    for block_size in range(2, 2 * FORMATS):
        begin(block_size)
        assert begin(1) is kept
    assert len(combiner._formats) == FORMATS
    first = begin(2)
    assert first is not begin(3)
    assert begin(2) is first
