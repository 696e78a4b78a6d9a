"""The arithmetic of a reduction: the ranks' parts of blocks into blocks of a result."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omnireduce.core.blocks_and_stripes import Stripes
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import BYTES, Array
from omnireduce.core.wire.blocks import HEADER_BYTES, INDEX_BYTES, Header, capacity
from omnireduce.errors import ProtocolError
from omnireduce.kernels.codecs.base import PIECE_ELEMENTS, Codec
from omnireduce.kernels.merge_indices import ABSENT, admit_indices, plan_every, plan_union
from omnireduce.kernels.reduce import op_code, reduce_blocks, reduce_half_blocks
from omnireduce.protocol.collective.block_programs import ProgramRun
from omnireduce.protocol.collective.codecs import FLOAT_BYTES, BlockCoder
from omnireduce.protocol.collective.index_lists import START, MessageSizing, expand

NO_HEADER = Header(0, 0, 0, 0, 0)
NOT_STARTED = -1  # the frontier of a rank that has sent nothing yet
INDEX_WORK = 16  # the cost of one index


class Shape(NamedTuple):
    """The blocks of a collective: how many there are, which of them are this shard's, and their size. With `every`,
    `plan` also lists blocks that no rank has brought."""

    blocks: int
    stripes: Stripes
    block_size: int  # elements
    block_bytes: int
    every: bool = False


class Union:
    """The blocks that any rank has brought to a collective, in order.

    `slots`: uint8 (ranks × slots, slot bytes), the receive slots of all ranks, with their messages.

    The indices of a message are copied, checked and used window by window. `awaiting_window`: ranks that have used up
    their window.
    """

    def __init__(self, ranks: int, slots: Array, window: int) -> None:
        self._slots, self._words, self._window = slots, slots.view(np.int64), window
        self._indices = np.empty((ranks, window), np.int64)
        self._counters = np.zeros((4, ranks), np.int64)
        # for each rank: the next index, the number of indices, the start of its first block, and the number of blocks
        # that it alone has brought
        self._position, self._count, self._start, self._single_sender_counts = self._counters
        self._messages: list[tuple[int, Header]] = [(0, NO_HEADER)] * ranks  # each rank's message: its row and header
        self._unused = [0] * ranks  # blocks of each rank's open message that are still to be used
        self._blocks_ahead: dict[int, int] = {}  # by rank, the blocks of its message that are not in its window yet
        self._list_positions = [START] * ranks  # in a list of runs or steps: the place behind the window
        self.awaiting_window: set[int] = set()
        self._frontier = [NOT_STARTED] * ranks

    @property
    def work_bytes(self) -> int:
        """Memory of this work space."""
        return self._indices.nbytes + self._counters.nbytes

    def begin(self, shape: Shape) -> None:
        """Start a collective."""
        self.shape = shape
        self._counters[:] = 0
        self._unused = [0] * len(self._unused)
        self._frontier = [NOT_STARTED] * len(self._frontier)
        self._cursor = shape.stripes.first_block(shape.blocks) if shape.every else 0  # next block of `_plan_every`
        self.watermark = NOT_STARTED  # the lowest frontier: below it nothing can be missing
        self.received_blocks = 0

    def open(self, rank: int, row: int, header: Header) -> int:
        """Take `rank`'s blocks from now on from the message in row `row` of the slots; return the work done. Raises
        ProtocolError."""
        previous = self._frontier[rank]  # each message must raise it: else a peer could send messages without end
        blocks, block_bytes = self.shape.blocks, self.shape.block_bytes
        if header.left_out or header.block_bytes != block_bytes or not previous < header.frontier <= blocks:
            raise ProtocolError(
                f"a message that does not fit its collective of {blocks} blocks, after frontier {previous}: {header}"
            )
        work = self._unused[rank] = self._position[rank] = self._count[rank] = 0
        if header.block_count:
            self._messages[rank], self._list_positions[rank] = (row, header), START
            self._unused[rank] = self._blocks_ahead[rank] = header.block_count
            work = self._fill_window(rank, max(0, previous))
        self._frontier[rank] = header.frontier
        self.received_blocks += header.block_count
        self.watermark = min(self._frontier)
        return work

    def feed(self, rank: int) -> int:
        """Go on with the message of a rank whose window is used up; return the work done. Raises ProtocolError."""
        self.awaiting_window.remove(rank)
        return self._fill_window(rank, int(self._indices[rank, self._count[rank] - 1]) + 1)

    def _fill_window(self, rank: int, low: int) -> int:
        """Fill the window of `rank` with its message's next indices, which must be `low` or higher.

        Each index must be so small that the indices behind the window still fit below the frontier. So no collective
        completes before all indices have been seen.
        """
        row, header = self._messages[rank]
        _, (shard, shards, stripe_blocks), block_size, block_bytes, _ = self.shape
        blocks_ahead = self._blocks_ahead.pop(rank)
        first, count = header.block_count - blocks_ahead, min(blocks_ahead, self._window)
        blocks_later = blocks_ahead - count
        if blocks_later:
            self._blocks_ahead[rank] = blocks_later
        window, start = self._indices[rank, :count], header.list_start
        first_word = start // INDEX_BYTES
        if header.runs:
            listed = self._expand_list(rank, self._words[row, first_word : first_word + 2 * header.runs], window)
        elif header.steps:
            listed = self._expand_list(rank, self._slots[row, start : start + header.steps], window)
        else:
            listed = self._words[row, first_word + first : first_word + first + count]
        high = header.frontier - blocks_later
        fitting = admit_indices(
            listed, low, high,
            shard=shard, shards=shards, stripe_blocks=stripe_blocks, copy=window,
        )  # fmt: skip
        if fitting < count:
            raise ProtocolError(self.shape.stripes.misfit(window[fitting], low, high))
        start = (row * self._slots.shape[1] + HEADER_BYTES) * block_size // block_bytes
        self._start[rank] = start + first * block_size
        self._position[rank], self._count[rank] = 0, count
        return count * INDEX_WORK

    def _expand_list(self, rank: int, listed: Array, window: Array) -> Array:
        """Fill `window` with the next indices of the runs or steps of `rank`, and return `window`. Raises
        ProtocolError."""
        header = self._messages[rank][1]
        filled, self._list_positions[rank] = expand(listed, self._list_positions[rank], self.shape.stripes, window)
        is_used_up = self._list_positions[rank][0] == (header.steps or header.runs)
        if filled < window.size or (rank not in self._blocks_ahead and not is_used_up):
            raise ProtocolError(f"a message whose {header.listed} do not list its blocks: {header}")
        return window

    def plan(self, numbers: Array, parts: Array, marks_single_sender: bool) -> int:
        """List the next blocks of the union in `numbers`, int64 (blocks,); return how many were listed.

        `parts`, int64 (blocks or more, ranks), says for each block where each rank's part begins, in elements from the
        start of the slots, or ABSENT. With `marks_single_sender`, the number of a block that a single rank has brought
        also says which rank; see `take_single_sender_counts`.
        """
        limit = self.watermark
        if self._blocks_ahead:
            limit = min([limit, *(int(self._indices[rank, -1]) + 1 for rank in self._blocks_ahead)])
        if self.shape.every:
            return self._plan_every(limit, numbers, parts)
        listed: int = plan_union(
            self._indices, self._position, self._count, self._start,
            block_size=self.shape.block_size, watermark=limit, out_indices=numbers, parts=parts,
            marks_single_sender=marks_single_sender, single_sender_counts=self._single_sender_counts,
        )  # fmt: skip
        return listed

    def _plan_every(self, limit: int, numbers: Array, parts: Array) -> int:
        """As `plan`, but list also the blocks that no rank has brought."""
        listed, self._cursor = plan_every(
            self._indices, self._position, self._count, self._start,
            block_size=self.shape.block_size, cursor=self._cursor, stop=limit,
            shards=self.shape.stripes.shards, stripe_blocks=self.shape.stripes.stripe_blocks,
            out_indices=numbers, parts=parts,
        )  # fmt: skip
        return listed

    def take_single_sender_counts(self) -> list[int]:
        """For each rank, the number of blocks that it alone has brought, among those planned since the last call."""
        counts: list[int] = self._single_sender_counts.tolist()
        self._single_sender_counts[:] = 0
        return counts

    def use(self) -> None:
        """The blocks planned last are in a result: their parts in the slots are not needed any more."""
        self._unused = (self._count - self._position).tolist()
        for rank in self._blocks_ahead:
            if not self._unused[rank]:
                self.awaiting_window.add(rank)
            self._unused[rank] += self._blocks_ahead[rank]

    def skip(self, rank: int) -> None:
        """The rank's open message has been passed on as it is: its blocks are not needed here."""
        self._unused[rank] = 0
        self._position[rank] = self._count[rank]
        self._blocks_ahead.pop(rank, None)

    def exhausted(self, rank: int) -> bool:
        """All blocks of the rank's open message are used."""
        return self._unused[rank] == 0

    def ended(self, rank: int) -> bool:
        """The rank has promised that nothing follows."""
        return self._frontier[rank] == self.shape.blocks

    @property
    def begun(self) -> bool:
        """Every rank has sent something."""
        return self.watermark != NOT_STARTED

    @property
    def used_up(self) -> bool:
        """All blocks of the messages that are here are used. With `every`, so are all blocks below the watermark."""
        return not any(self._unused) and not (self.shape.every and self._cursor < self.watermark)

    @property
    def complete(self) -> bool:
        """Every block of the union is used."""
        is_listed = not self.shape.every or self._cursor >= self.shape.blocks
        return self.watermark == self.shape.blocks and is_listed and not any(self._unused)

    @property
    def laggards(self) -> list[int]:
        """The ranks whose frontier holds the others up."""
        return [rank for rank, frontier in enumerate(self._frontier) if frontier == self.watermark]


BLOCK_WORK = 256  # the cost of one rank's part of a block, beside its bytes
HALF_WORK = 8  # the cost of one byte of 16-bit floats, which go through float32 and back
CODED_WORK = 2  # the cost of one byte of float32 that is decoded and encoded
FORMATS = 16  # the number of formats that are kept: a job uses few
HALF_COLUMNS = 1 << 14  # 16-bit elements of a block that are combined in one step
_NO_NUMBERS, _NOTHING = np.empty(0, np.int64), np.empty(0, np.float32)


class Format(NamedTuple):
    """The slots, seen as blocks of one dtype and size.

    `source`: the receive slots, (elements,). `rows`: the results, (slots, capacity of a slot, block size). `capacity`:
    blocks of a result. `columns`: elements of a block that are combined in one step. `byte_work`, `block_work`: the
    cost of one byte, and of one block of all senders, in the budget. `coder`: for encoded blocks, which are seen as
    bytes.
    """

    block_size: int
    block_bytes: int
    half: bool
    brain: bool
    source: Array
    rows: Array
    capacity: int
    columns: int
    byte_work: int
    block_work: int
    coder: BlockCoder | None


class Combiner:
    """Combines the parts of `senders` ranks in `slots`, uint8 (rows, bytes), into blocks of `results`, uint8 (slots,
    slot bytes). A mean is their sum, divided by `divisor`.

    A result takes at most `max_blocks`, and is no longer than `sizing` allows. `piece_bytes`: the most bytes of one
    block, with the parts of all senders, that are combined in one step.
    """

    def __init__(
        self, senders: int, slots: Array, results: Array,
        *, divisor: int, sizing: MessageSizing, max_blocks: int, piece_bytes: int,
    ) -> None:  # fmt: skip
        self._divisor = divisor
        self._senders, self._slots, self._results = senders, slots, results
        self._sizing, self._max_blocks, self._piece_bytes = sizing, max_blocks, piece_bytes
        self._scratch = np.empty(2 * HALF_COLUMNS, np.float32)
        self._decoded = _NOTHING  # scratch memory for the float32 of encoded blocks, once a codec is used
        # By element type, block size and codec; the last used at the end.
        self._formats: dict[tuple[str, int, str], Format] = {}

    @property
    def work_bytes(self) -> int:
        """Memory of this work space."""
        return self._scratch.nbytes + self._decoded.nbytes

    def begin(
        self, descriptor: Descriptor, codec: Codec | None = None, key: int = 0, running: ProgramRun | None = None
    ) -> Format:
        """Make ready for a collective whose blocks are encoded by `codec`; return their format. `key`: the key of the
        codec's random numbers for sums. `running`: the program that works on sums. Raises CodecError."""
        kind = descriptor.element.name, descriptor.layout.block_size, descriptor.codec
        self._format = self._formats.pop(kind) if kind in self._formats else self._new_format(descriptor, codec)
        self._formats[kind] = self._format
        self._key = key
        if len(self._formats) > FORMATS:
            del self._formats[next(iter(self._formats))]
        self._op = op_code(descriptor.op, descriptor.element)
        self._mean_divisor = self._divisor if descriptor.op == "mean" else 1
        self._running = running
        if running is not None:
            block_format = self._format
            work = block_format.block_bytes * running.work
            self._format = block_format._replace(
                columns=block_format.block_size, block_work=block_format.block_work + work
            )
        return self._format

    def _new_format(self, descriptor: Descriptor, codec: Codec | None) -> Format:
        element, block_bytes, block_size = descriptor.element, descriptor.block_bytes, descriptor.layout.block_size
        storage, coder, byte_work = element.storage, None, HALF_WORK if element.is_narrow else 1
        columns = max(1, self._piece_bytes // (self._senders * element.storage.itemsize))
        if codec is not None:
            coder, storage = BlockCoder(descriptor.codec, codec, block_size), BYTES
            self._decoded = self._decoded if self._decoded.size else np.empty(PIECE_ELEMENTS, np.float32)
            byte_work = max(1, CODED_WORK * FLOAT_BYTES * block_size // coder.block_bytes)
            block_size = block_bytes = columns = coder.block_bytes
        fitting = capacity(self._slots.shape[1], block_bytes)
        blocks = self._results[:, HEADER_BYTES : HEADER_BYTES + fitting * block_bytes].view(storage)
        return Format(
            block_size=block_size,
            block_bytes=block_bytes,
            half=element.is_narrow,
            brain=element.name == "bfloat16",
            source=self._slots.reshape(-1).view(storage),
            rows=blocks.reshape(len(blocks), fitting, -1),
            capacity=min(fitting, self._max_blocks, self._sizing.max_blocks(block_bytes)),
            columns=min(columns, HALF_COLUMNS) if element.is_narrow else columns,
            byte_work=byte_work,
            block_work=self._senders * (block_bytes * byte_work + BLOCK_WORK),
            coder=coder,
        )

    def combine(self, parts: Array, out: Array, numbers: Array) -> None:
        """Combine `parts`, as `Union.plan` lists them, into `out`, (blocks, block size). `numbers`: the block
        numbers."""
        block_format = self._format
        if block_format.coder is not None:
            block_format.coder.combine(
                block_format.source,
                parts,
                out,
                divisor=self._mean_divisor,
                numbers=numbers,
                key=self._key,
                scratch=self._decoded,
            )
        elif block_format.half:
            scratch = self._scratch[: 2 * out.shape[1]].reshape(2, -1)
            reduce_half_blocks(
                self._op, block_format.brain, block_format.source, parts, out,
                scratch=scratch, bits=scratch.view(np.uint32), divisor=self._divisor,
            )  # fmt: skip
        elif self._running is not None:
            self._running.run(self._op, block_format.source, parts, out, divisor=self._divisor, numbers=numbers)
        else:
            reduce_blocks(self._op, block_format.source, parts, out, self._divisor)

    def combine_piece(self, part: Array, row: Array, column: int) -> int:
        """Combine one block from element `column` on, as far as one step goes; return the element where to go on."""
        piece: Array = row[column : column + self._format.columns].reshape(1, -1)
        self.combine(np.where(part == ABSENT, ABSENT, part + column), piece, _NO_NUMBERS)
        return column + piece.size
