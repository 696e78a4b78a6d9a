"""One collective on the aggregator: the next blocks, their sums in a result slot, and the result as a message.

`protocol.shard` decides when a result is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from omnireduce.core.blocks_and_stripes import Stripes
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import BYTES, Array
from omnireduce.core.wire.blocks import MAX_BLOCKS, block_rows, capacity, seal
from omnireduce.kernels.codecs.base import Codec
from omnireduce.kernels.merge_indices import MARK_SHIFT, leave_out
from omnireduce.protocol.collective.block_programs import ProgramRun
from omnireduce.protocol.collective.combining import BLOCK_WORK, Combiner, Shape, Union
from omnireduce.protocol.collective.index_lists import TINY_BYTES, Lister, MessageSizing

assert MAX_BLOCKS == 1 << MARK_SHIFT
WORTH_LEAVING_OUT = 8  # a shorter message leaves out at least one in 8 blocks; for fewer the copy costs more
PLANNED = 1 << 15  # the most parts of blocks, over all ranks, that are planned in one step


class Budget(NamedTuple):
    """The work that an aggregator does for one job before others have their turn. It is counted in bytes read; other
    work counts as the bytes that could be read in its time.

    `work`: the work of one turn, if no other job is busy. A turn may exceed it by one step. A step is bounded, too:
    `window`, indices of one message; `piece_bytes`, all ranks' parts of one block. `blocks`: the most blocks of one
    result. `output`: about the bytes that leave in one turn while other jobs are busy.
    """

    work: int = 16 << 20
    window: int = 4096
    piece_bytes: int = 1 << 20
    blocks: int = 1 << 16
    output: int = 1 << 20


# `Reduction`, or a function that makes an observed `Reduction`: (senders, divisor, arena, results, sizing, budget)
MakeReduction = Callable[[int, int, Array, Array, MessageSizing, Budget], "Reduction"]


class Reduction:
    """Work space for the collectives of one job, with any kind of blocks; `begin` makes it ready for one of them.

    `senders` ranks bring blocks, each for itself or for its host. A mean is divided by `divisor`. `arena`: uint8 (ranks
    × slots, slot bytes), the receive slots of all ranks; `results`: uint8 (slots, slot bytes). Results are as
    long as `sizing` says. `union`: the blocks that the senders have brought.
    """

    def __init__(
        self, senders: int, divisor: int, arena: Array, results: Array, sizing: MessageSizing, budget: Budget
    ) -> None:
        self._senders, self._results, self._sizing = senders, results, sizing
        self._lengths_vary = sizing.shortest < sizing.longest
        self._numbers = np.empty(min(budget.blocks, capacity(arena.shape[1], 1)), np.int64)  # the result's blocks
        self._lister = Lister(self._numbers.size)
        self._parts = np.empty((max(1, PLANNED // senders), senders), np.int64)
        self.union = Union(senders, arena, budget.window)
        self._combiner = Combiner(
            senders, arena, results,
            divisor=divisor, sizing=sizing, max_blocks=self._numbers.size,
            piece_bytes=budget.piece_bytes,
        )  # fmt: skip

    @property
    def work_bytes(self) -> int:
        """Memory of this work space."""
        own_bytes = self._numbers.nbytes + self._lister.nbytes + self._parts.nbytes
        return own_bytes + self.union.work_bytes + self._combiner.work_bytes

    def begin(
        self, descriptor: Descriptor, stripes: Stripes,
        *, codec: Codec | None = None, key: int = 0, marks_single_senders: bool = True,
        running: ProgramRun | None = None,
    ) -> None:  # fmt: skip
        """Start a collective. Its blocks are all in `stripes`, and encoded by `codec`; `key`: the key of the codec's
        random numbers for sums. `marks_single_senders`: results say which blocks a single sender has brought.
        `running`: the program that works on sums. Raises CodecError."""
        self._format = block_format = self._combiner.begin(descriptor, codec, key, running)
        every = descriptor.program is not None and descriptor.program.every_block and running is not None
        self.union.begin(
            Shape(descriptor.layout.blocks, stripes, block_format.block_size, block_format.block_bytes, every)
        )
        # A result does not always equal the single rank's block: the way of 16-bit floats through float32 may change a
        # NaN, and the rank's block is not encoded.
        may_mark = (
            marks_single_senders
            and codec is None
            and descriptor.program is None
            and block_format.block_bytes > TINY_BYTES
        )
        self._marks_single_sender = may_mark and descriptor.op == "sum" and not block_format.half
        self._returns = running is None or running.program.returns
        self.written = 0
        self._column = 0  # the combined elements of the result's next block
        self.sent_blocks = 0  # blocks in the results of this collective so far, without `written`
        self.sealed = 0  # the frontier of the last result
        self._room = block_format.capacity
        if self._lengths_vary:
            self._size_next_result()

    def _size_next_result(self) -> None:
        """Decide how many blocks the next result takes."""
        block_count = self._sizing.blocks(
            self._format.block_bytes, self.sent_blocks, self.sealed, self.union.shape.blocks
        )
        self._room = min(self._format.capacity, block_count)

    @property
    def full(self) -> bool:
        return self.written == self._room

    @property
    def has_news(self) -> bool:
        """A result sent now would carry blocks or a higher frontier."""
        return self.written > 0 or self.union.watermark > self.sealed

    @property
    def half_full(self) -> bool:
        return 2 * self.written >= self._room

    def merge(self, slot: int, work_limit: int) -> int:
        """Reduce the blocks that the watermark allows into result slot `slot`: `work_limit` work, or up to one block
        more.

        Returns the work done; 0 means that there was nothing to add.
        """
        if not self.union.begun:
            return 0
        first, block_format = self.written, self._format
        if block_format.columns < block_format.block_size:
            return self._merge_piece(slot)
        # Rounded up: otherwise a small rest of the budget would need a step of its own
        max_blocks = max(1, -(-work_limit // block_format.block_work))
        added = self._plan(min(len(self._parts), self._room - first, max_blocks))
        if added:
            out, numbers = block_format.rows[slot, first : first + added], self._numbers[first : first + added]
            self._combiner.combine(self._parts[:added], out, numbers)
            self._use(added if self._returns else 0)
        return added * block_format.block_work

    def _merge_piece(self, slot: int) -> int:
        """As `merge`, for blocks that are too large for one step."""
        if self._column == 0 and not self._plan(1):
            return 0
        block_format, before = self._format, self._column
        self._column = self._combiner.combine_piece(self._parts[:1], block_format.rows[slot, self.written], before)
        piece_bytes = (self._column - before) * block_format.source.itemsize
        if self._column == block_format.block_size:
            self._column = 0
            self._use(1)
        return self._senders * (piece_bytes * block_format.byte_work + BLOCK_WORK)

    def _plan(self, max_blocks: int) -> int:
        """List the next blocks of the union, at most `max_blocks`, behind those written; return how many were
        listed."""
        numbers = self._numbers[self.written : self.written + max_blocks]
        return self.union.plan(numbers, self._parts, self._marks_single_sender)

    def _use(self, added: int) -> None:
        self.written += added
        self.union.use()

    def seal(
        self, slot: int, number: int, memories: Mapping[int, Array], extra: bytes = b""
    ) -> tuple[int, dict[int, Array]]:
        """Complete the result message in `slot`, with this `extra`, and start an empty one.

        Returns its length in bytes, and shorter messages for those ranks in `memories` that already have enough of its
        blocks: a shorter message leaves these out. It is written to the memory given for the rank, uint8 (bytes,).
        """
        numbers, block_bytes = self._numbers[: self.written], self._format.block_bytes
        cut_short = self.full and not self.union.used_up
        frontier = int(numbers[-1]) % MAX_BLOCKS + 1 if cut_short else self.union.watermark
        self.sent_blocks += self.written
        self.written, self.sealed = 0, frontier
        if self._lengths_vary:
            self._size_next_result()
        _, shards, stripe_blocks = self.union.shape.stripes
        runs, steps = self._lister.shortest(numbers, shards, stripe_blocks, block_bytes)
        nbytes = seal(self._results[slot], number, frontier, numbers, block_bytes, extra, runs=runs, steps=steps)
        shorter: dict[int, Array] = {}
        single_sender_counts, minimum = (
            self.union.take_single_sender_counts(),
            max(1, numbers.size // WORTH_LEAVING_OUT),
        )
        for rank, memory in memories.items():
            if single_sender_counts[rank] >= minimum and self._leave_out(rank, self._results[slot], numbers, memory):
                size = seal(
                    memory, number, frontier, numbers, block_bytes, left_out=single_sender_counts[rank], runs=runs
                )
                shorter[rank] = memory[:size]
        return nbytes, shorter

    def _leave_out(self, rank: int, result: Array, numbers: Array, memory: Array) -> bool:
        """Copy the blocks that `rank` does not have from `result` to `memory`; return whether they have room there."""
        if capacity(memory.size, self._format.block_bytes) < max(1, numbers.size):
            return False
        rows, room = (block_rows(buffer, self._format.block_bytes, BYTES) for buffer in (result, memory))
        leave_out(numbers, rank, rows, room)
        return True
