"""The arithmetic of one collective on the aggregator: the ranks' open messages, the watermark, the result slot being
filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from omnireduce.descriptor import Descriptor
from omnireduce.dtypes import BYTES, Array
from omnireduce.errors import ProtocolError
from omnireduce.kernels.merge import ABSENT, SOLE_SHIFT, leave_out, plan_union
from omnireduce.kernels.reduce import OPS, reduce_blocks, reduce_half_blocks
from omnireduce.kernels.scatter import admit_indices, all_owned
from omnireduce.layout import Stripes
from omnireduce.wire.blocks import HEADER_BYTES, MAX_BLOCKS, Header, block_rows, capacity, seal

assert MAX_BLOCKS == 1 << SOLE_SHIFT
WORTH_LEAVING_OUT = 8  # one in so many blocks of a message; below that the copy costs more than the bytes
NO_HEADER = Header(0, 0, 0, 0, 0)
NOT_STARTED = -1  # the frontier of a rank that has sent nothing yet
BLOCK_WORK = 256  # of one rank's part of a block, beside its bytes
INDEX_WORK = 16  # of one index
HALF_WORK = 8  # of one byte of 16-bit floats, which go through float32 and back
PLANNED = 1 << 15  # parts of blocks, of all ranks, that are planned in one step
FORMATS = 16  # that are kept: programs mix few
HALF_COLUMNS = 1 << 14  # 16-bit elements of a block that are reduced in one step


class Budget(NamedTuple):
    """What an aggregator does for one job before others have their turn. Work is counted in bytes that are read; what
    has no bytes counts as many as take as long.

    `work`: of one turn, where no other job is busy. A turn may pass it by one step, and these bound a step. `window`:
    indices of one message; `piece_bytes`: all ranks' parts of one block. `blocks`: of one result. `output`: bytes
    that leave in one turn, about, beside other jobs.
    """

    work: int = 16 << 20
    window: int = 4096
    piece_bytes: int = 1 << 20
    blocks: int = 1 << 16
    output: int = 1 << 20


class _Format(NamedTuple):
    """The work space as blocks of one dtype and size see it.

    `arena`: the receive slots, (elements,). `rows`: the results, (slots, capacity of a slot, block size). `capacity`:
    blocks of a result. `columns`: elements of a block that are reduced in one step. `byte_work`, `block_work`: what
    one byte, and one block of all ranks, counts for the budget.
    """

    block_size: int
    block_bytes: int
    half: bool
    brain: bool
    arena: Array
    rows: Array
    capacity: int
    columns: int
    byte_work: int
    block_work: int


class Reduction:
    """Work space for the collectives of one job, whatever their blocks; `begin` makes it ready for one.

    `arena`: uint8 (ranks × slots, slot bytes), the receive slots of all ranks; `results`: uint8 (slots, slot bytes).
    Blocks of a result take no more than `message_bytes`, unless one alone takes more.

    Of a message the indices are copied, checked and used window by window: `hungry` ranks have used up theirs.
    """

    def __init__(self, ranks: int, arena: Array, results: Array, message_bytes: int, budget: Budget) -> None:
        self._slots, self._results, self._message_bytes, self._budget = arena, results, message_bytes, budget
        self._words = arena.view(np.int64)
        self._indices = np.empty((ranks, budget.window), np.int64)
        self._position, self._count, self._start = (np.zeros(ranks, np.int64) for _ in range(3))
        self._out_indices = np.empty(min(budget.blocks, capacity(arena.shape[1], 1)), np.int64)
        self._parts = np.empty((max(1, PLANNED // ranks), ranks), np.int64)
        self._scratch = np.empty(2 * HALF_COLUMNS, np.float32)
        self._open: list[tuple[int, Header]] = [(0, NO_HEADER)] * ranks  # each rank's message: its row and head
        self._unused = [0] * ranks  # blocks of each rank's open message that are still to be used
        self._ahead: dict[int, int] = {}  # by rank, blocks of it that are not in its window yet
        self.hungry: set[int] = set()
        self._frontier = [NOT_STARTED] * ranks
        self._formats: dict[tuple[str, int], _Format] = {}  # by dtype and block size, the one used last behind

    @property
    def work_bytes(self) -> int:
        """Memory of this work space."""
        arrays = (self._indices, self._position, self._count, self._start, self._parts, self._out_indices)
        return sum(array.nbytes for array in (*arrays, self._scratch))

    def begin(self, descriptor: Descriptor, stripes: Stripes) -> None:
        """Start a collective whose blocks are all of `stripes`."""
        key = descriptor.element.name, descriptor.layout.block_size
        self._format = self._formats.pop(key) if key in self._formats else self._new_format(descriptor)
        self._formats[key] = self._format
        if len(self._formats) > FORMATS:
            del self._formats[next(iter(self._formats))]
        self.stripes = stripes
        self._op, self.blocks = OPS[descriptor.op], descriptor.layout.blocks
        # 16-bit floats go through float32 and back, which may change the bits of a NaN
        self._sole_is_result = descriptor.op == "sum" and not self._format.half
        self._position[:] = 0
        self._count[:] = 0
        self._unused = [0] * len(self._unused)
        self._frontier = [NOT_STARTED] * len(self._frontier)
        self.watermark = NOT_STARTED  # the lowest frontier: below it nothing can be missing
        self.written = 0
        self._column = 0  # of the next block of the result: how many of its elements are there
        self.received_blocks = self.sent_blocks = 0  # of this collective, without `written`

    def _new_format(self, descriptor: Descriptor) -> _Format:
        element, block_bytes, ranks = descriptor.element, descriptor.block_bytes, len(self._unused)
        fitting = capacity(self._slots.shape[1], block_bytes)
        blocks = self._results[:, HEADER_BYTES : HEADER_BYTES + fitting * block_bytes].view(element.storage)
        byte_work = HALF_WORK if element.is_half else 1
        columns = max(1, self._budget.piece_bytes // (ranks * element.storage.itemsize))
        return _Format(
            block_size=descriptor.layout.block_size,
            block_bytes=block_bytes,
            half=element.is_half,
            brain=element.name == "bfloat16",
            arena=self._slots.reshape(-1).view(element.storage),
            rows=blocks.reshape(len(blocks), fitting, -1),
            capacity=min(fitting, self._out_indices.size, max(1, self._message_bytes // block_bytes)),
            columns=min(columns, HALF_COLUMNS) if element.is_half else columns,
            byte_work=byte_work,
            block_work=ranks * (block_bytes * byte_work + BLOCK_WORK),
        )

    def open(self, rank: int, row: int, header: Header) -> int:
        """Make the message in arena row `row` the one that `rank`'s blocks are taken from; return the work that this
        was. Raises ProtocolError."""
        before = self._frontier[rank]  # a message that does not raise it would be one of endless many
        block_bytes = self._format.block_bytes
        if header.left_out or header.block_bytes != block_bytes or not before < header.frontier <= self.blocks:
            raise ProtocolError(
                f"a message that does not fit its collective of {self.blocks} blocks, after frontier {before}: {header}"
            )
        work = self._unused[rank] = self._position[rank] = self._count[rank] = 0
        if header.block_count:
            self._open[rank] = row, header
            self._unused[rank] = self._ahead[rank] = header.block_count
            work = self._admit(rank, max(0, before))
        self._frontier[rank] = header.frontier
        self.received_blocks += header.block_count
        self.watermark = min(self._frontier)
        return work

    def feed(self, rank: int) -> int:
        """Go on with the message of a hungry rank; return the work that this was. Raises ProtocolError."""
        self.hungry.remove(rank)
        return self._admit(rank, int(self._indices[rank, self._count[rank] - 1]) + 1)

    def _admit(self, rank: int, low: int) -> int:
        """Fill the window of `rank` with its message's next indices, which must be `low` or higher.

        They leave room for those that follow: no collective completes before all indices have been seen.
        """
        row, header = self._open[rank]
        ahead = self._ahead.pop(rank)
        first, count = header.block_count - ahead, min(ahead, self._budget.window)
        later = ahead - count
        if later:
            self._ahead[rank] = later
        own, at = self._indices[rank, :count], header.indices_start // 8 + first
        if not admit_indices(self._words[row, at : at + count], low, header.frontier - later, own):
            raise ProtocolError(f"block indices that do not ascend between the frontiers {low} and {header.frontier}")
        if self.stripes.shards > 1 and not all_owned(own, *self.stripes):
            raise ProtocolError(f"blocks of another shard than {self.stripes.shard} of {self.stripes.shards}")
        start = (row * self._slots.shape[1] + HEADER_BYTES) // self._format.arena.itemsize
        self._start[rank] = start + first * self._format.block_size
        self._position[rank], self._count[rank] = 0, count
        return count * INDEX_WORK

    def exhausted(self, rank: int) -> bool:
        """All blocks of the rank's open message are used."""
        return self._unused[rank] == 0

    def ended(self, rank: int) -> bool:
        """The rank has promised that nothing follows."""
        return self._frontier[rank] == self.blocks

    @property
    def laggards(self) -> list[int]:
        """The ranks whose frontier holds the others up."""
        return [rank for rank, frontier in enumerate(self._frontier) if frontier == self.watermark]

    @property
    def full(self) -> bool:
        return self.written == self._format.capacity

    @property
    def half_full(self) -> bool:
        return 2 * self.written >= self._format.capacity

    @property
    def complete(self) -> bool:
        """Every block of the union is in this or an earlier result message."""
        return self.watermark == self.blocks and not any(self._unused)

    def merge(self, slot: int, most: int) -> int:
        """Reduce what the watermark allows into result slot `slot`: as much as `most` work, but at least one step.

        Returns the work done; 0 means that there was nothing to add.
        """
        if self.watermark == NOT_STARTED:
            return 0
        first, form = self.written, self._format
        if form.columns < form.block_size:
            return self._merge_piece(slot)
        added = self._plan(min(len(self._parts), form.capacity - first, max(1, most // form.block_work)))
        if added:
            self._reduce(self._parts[:added], form.rows[slot, first : first + added])
            self._used(added)
        return added * form.block_work

    def _merge_piece(self, slot: int) -> int:
        """As `merge`, where one block is too much for one step."""
        if self._column == 0 and not self._plan(1):
            return 0
        part, row = self._parts[:1], self._format.rows[slot, self.written]
        piece: Array = row[self._column : self._column + self._format.columns].reshape(1, -1)
        self._reduce(np.where(part == ABSENT, ABSENT, part + self._column), piece)
        self._column += piece.size
        if self._column == self._format.block_size:
            self._column = 0
            self._used(1)
        return len(self._unused) * (piece.nbytes * self._format.byte_work + BLOCK_WORK)

    def _plan(self, most: int) -> int:
        """List the next blocks of the union, at most so many, behind what is written; return how many there are."""
        first = self.written
        known = self.watermark
        if self._ahead:
            known = min([known, *(int(self._indices[rank, -1]) + 1 for rank in self._ahead)])
        out = self._out_indices[first : first + most]
        added: int = plan_union(
            *(self._indices, self._position, self._count, self._start, self._format.block_size, known),
            *(out, self._parts, self._sole_is_result),
        )
        return added

    def _reduce(self, parts: Array, out: Array) -> None:
        form = self._format
        if form.half:
            scratch = self._scratch[: 2 * out.shape[1]].reshape(2, -1)
            reduce_half_blocks(self._op, form.brain, form.arena, parts, out, scratch, scratch.view(np.uint32))
        else:
            reduce_blocks(self._op, form.arena, parts, out)

    def _used(self, added: int) -> None:
        """The blocks planned last are in the result: their ranks need them no more."""
        self.written += added
        self._unused = (self._count - self._position).tolist()
        for rank in self._ahead:
            if not self._unused[rank]:
                self.hungry.add(rank)
            self._unused[rank] += self._ahead[rank]

    def seal(self, slot: int, number: int, memories: Mapping[int, Array]) -> tuple[int, dict[int, Array]]:
        """Complete the result message in `slot` and start an empty one.

        Returns its length in bytes, and the messages of those ranks in `memories` that are better off with less: what
        they have already is left out. These lie in the memory given for the rank, uint8 (bytes,).
        """
        indices = self._out_indices[: self.written]
        cut_short = self.full and any(self._unused)
        frontier = int(indices[-1]) % MAX_BLOCKS + 1 if cut_short else self.watermark
        self.sent_blocks += self.written
        self.written = 0
        nbytes = seal(self._results[slot], number, frontier, indices, self._format.block_bytes)
        shorter: dict[int, Array] = {}
        if self._sole_is_result and memories:
            sole = np.bincount(indices >> SOLE_SHIFT, minlength=len(self._unused) + 1)[1:]
            for rank in np.flatnonzero(sole >= max(1, indices.size // WORTH_LEAVING_OUT)).tolist():
                memory = memories.get(rank)
                if memory is not None and self._leave_out(rank, self._results[slot], indices, memory):
                    left_out = int(sole[rank])
                    size = seal(memory, number, frontier, indices, self._format.block_bytes, left_out=left_out)
                    shorter[rank] = memory[:size]
        return nbytes, shorter

    def _leave_out(self, rank: int, result: Array, indices: Array, memory: Array) -> bool:
        """Copy the blocks that `rank` does not have from `result` to `memory`; return whether they have room there."""
        if capacity(memory.size, self._format.block_bytes) < max(1, indices.size):
            return False
        rows, room = (block_rows(each, self._format.block_bytes, BYTES) for each in (result, memory))
        leave_out(indices, rank, rows, room)
        return True
