"""The arithmetic of a reduction: the ranks' parts of blocks into blocks of a result."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omnireduce.descriptor import Descriptor
from omnireduce.dtypes import BYTES, Array
from omnireduce.kernels.codecs.base import PIECE_ELEMENTS, Codec
from omnireduce.kernels.merge import ABSENT
from omnireduce.kernels.reduce import op_code, reduce_blocks, reduce_half_blocks
from omnireduce.protocol.coding import FLOAT_BYTES, Coder
from omnireduce.protocol.message_sizing import MessageSizing
from omnireduce.protocol.shard_states import ProgramRun
from omnireduce.wire.blocks import HEADER_BYTES, capacity

BLOCK_WORK = 256  # of one rank's part of a block, beside its bytes
HALF_WORK = 8  # of one byte of 16-bit floats, which go through float32 and back
CODED_WORK = 2  # of one byte of float32 that is decoded and encoded
FORMATS = 16  # that are kept: programs mix few
HALF_COLUMNS = 1 << 14  # 16-bit elements of a block that are combined in one step
_NO_NUMBERS, _NOTHING = np.empty(0, np.int64), np.empty(0, np.float32)


class Format(NamedTuple):
    """The slots, seen as blocks of one dtype and size.

    `source`: the receive slots, (elements,). `rows`: the results, (slots, capacity of a slot, block size). `capacity`:
    blocks of a result. `columns`: elements of a block that are combined in one step. `byte_work`, `block_work`: the
    cost of one byte, and of one block of all senders, in the budget. `coder`: of encoded blocks, which are seen as
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
    coder: Coder | None


class Combiner:
    """Combines parts of so many `senders` in `slots`, uint8 (rows, bytes), into blocks of `results`, uint8 (slots, slot
    bytes). A mean is their sum, divided by `divisor`.

    A result takes no more than `most_blocks`, and is no longer than `lengths` allow. `piece_bytes`: all senders' parts
    of a block that are combined in one step.
    """

    def __init__(
        self, senders: int, slots: Array, results: Array,
        *, divisor: int, sizing: MessageSizing, most_blocks: int, piece_bytes: int,
    ) -> None:  # fmt: skip
        self._divisor = divisor
        self._senders, self._slots, self._results = senders, slots, results
        self._sizing, self._most_blocks, self._piece_bytes = sizing, most_blocks, piece_bytes
        self._scratch = np.empty(2 * HALF_COLUMNS, np.float32)
        self._plain = _NOTHING  # of blocks that are encoded, once a codec is used
        self._formats: dict[tuple[str, int, str], Format] = {}  # by dtype, block size and codec, the last used behind

    @property
    def work_bytes(self) -> int:
        """Memory of this work space."""
        return self._scratch.nbytes + self._plain.nbytes

    def begin(
        self, descriptor: Descriptor, codec: Codec | None = None, key: int = 0, running: ProgramRun | None = None
    ) -> Format:
        """Make ready for a collective whose blocks travel as `codec` says; return how they lie. `key`: of what it draws
        for sums. `running`: the program that works on sums. Raises CodecError."""
        kind = descriptor.element.name, descriptor.layout.block_size, descriptor.codec
        self._format = self._formats.pop(kind) if kind in self._formats else self._new_format(descriptor, codec)
        self._formats[kind] = self._format
        self._key = key
        if len(self._formats) > FORMATS:
            del self._formats[next(iter(self._formats))]
        self._op = op_code(descriptor.op, descriptor.element)
        self._mean_of = self._divisor if descriptor.op == "mean" else 1
        self._running = running
        if running is not None:
            form = self._format
            work = form.block_bytes * running.work
            self._format = form._replace(columns=form.block_size, block_work=form.block_work + work)
        return self._format

    def _new_format(self, descriptor: Descriptor, codec: Codec | None) -> Format:
        element, block_bytes, block_size = descriptor.element, descriptor.block_bytes, descriptor.layout.block_size
        storage, coder, byte_work = element.storage, None, HALF_WORK if element.is_half else 1
        columns = max(1, self._piece_bytes // (self._senders * element.storage.itemsize))
        if codec is not None:
            coder, storage = Coder(descriptor.codec, codec, block_size), BYTES
            self._plain = self._plain if self._plain.size else np.empty(PIECE_ELEMENTS, np.float32)
            byte_work = max(1, CODED_WORK * FLOAT_BYTES * block_size // coder.block_bytes)
            block_size = block_bytes = columns = coder.block_bytes
        fitting = capacity(self._slots.shape[1], block_bytes)
        blocks = self._results[:, HEADER_BYTES : HEADER_BYTES + fitting * block_bytes].view(storage)
        return Format(
            block_size=block_size,
            block_bytes=block_bytes,
            half=element.is_half,
            brain=element.name == "bfloat16",
            source=self._slots.reshape(-1).view(storage),
            rows=blocks.reshape(len(blocks), fitting, -1),
            capacity=min(fitting, self._most_blocks, self._sizing.most(block_bytes)),
            columns=min(columns, HALF_COLUMNS) if element.is_half else columns,
            byte_work=byte_work,
            block_work=self._senders * (block_bytes * byte_work + BLOCK_WORK),
            coder=coder,
        )

    def combine(self, parts: Array, out: Array, numbers: Array) -> None:
        """Combine `parts`, as `Union.plan` lists them, into `out`, (blocks, block size). `numbers`: of the blocks."""
        form = self._format
        if form.coder is not None:
            form.coder.combine(
                form.source, parts, out, divisor=self._mean_of, numbers=numbers, key=self._key, scratch=self._plain
            )
        elif form.half:
            scratch = self._scratch[: 2 * out.shape[1]].reshape(2, -1)
            reduce_half_blocks(
                self._op, form.brain, form.source, parts, out,
                scratch=scratch, bits=scratch.view(np.uint32), divisor=self._divisor,
            )  # fmt: skip
        elif self._running is not None:
            self._running.run(self._op, form.source, parts, out, divisor=self._divisor, numbers=numbers)
        else:
            reduce_blocks(self._op, form.source, parts, out, self._divisor)

    def combine_piece(self, part: Array, row: Array, column: int) -> int:
        """Combine one block from element `column` on, as far as one step goes; return how far that was."""
        piece: Array = row[column : column + self._format.columns].reshape(1, -1)
        self.combine(np.where(part == ABSENT, ABSENT, part + column), piece, _NO_NUMBERS)
        return column + piece.size
