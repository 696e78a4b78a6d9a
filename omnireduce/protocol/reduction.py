"""The arithmetic of one collective on the aggregator: the ranks' open messages, the watermark, the result slot being
filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from omnireduce.descriptor import Descriptor
from omnireduce.dtypes import BYTES, Array
from omnireduce.errors import ProtocolError
from omnireduce.kernels.merge import SOLE_SHIFT, leave_out, mark_sole, plan_union
from omnireduce.kernels.reduce import OPS, reduce_blocks, reduce_half_blocks
from omnireduce.kernels.scatter import admit_indices, all_owned
from omnireduce.layout import Stripes
from omnireduce.wire import HEADER_BYTES, MAX_BLOCKS, Header, block_rows, capacity, message_indices, seal

assert MAX_BLOCKS == 1 << SOLE_SHIFT
WORTH_LEAVING_OUT = 8  # one in so many blocks of a message; below that the copy costs more than the bytes
NOT_STARTED = -1  # the frontier of a rank that has sent nothing yet


class Reduction:
    """Work space for collectives of one block format; `begin` makes it ready for one.

    `arena`: uint8 (ranks × slots, slot bytes), the receive slots of all ranks; `results`: uint8 (slots, slot bytes).
    Blocks of a result take no more than `message_bytes`, unless one alone takes more.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        ranks: int,
        arena: Array,
        results: Array,
        message_bytes: int,
    ) -> None:
        element, block_size = descriptor.element, descriptor.layout.block_size
        self._storage: np.dtype[Any] = element.storage
        self._half, self._brain = element.is_half, element.name == "bfloat16"
        self._block_size, self._block_bytes = block_size, descriptor.block_bytes
        self._slots, self._results = arena, results
        self._arena = arena.reshape(-1).view(self._storage)
        self._rows = [block_rows(slot, self._block_bytes, self._storage) for slot in results]
        fitting = capacity(arena.shape[1], self._block_bytes)
        self.capacity = min(fitting, max(1, message_bytes // self._block_bytes))  # of a result, in blocks
        self._indices = np.empty((ranks, fitting), np.int64)
        self._position, self._count, self._start = (np.zeros(ranks, np.int64) for _ in range(3))
        self._unused = [0] * ranks  # blocks of each rank's open message that are still to be used
        self._frontier = [NOT_STARTED] * ranks
        self._out_indices = np.empty(self.capacity, np.int64)
        self._parts = np.empty((self.capacity, ranks), np.int64)
        self._scratch = np.empty((2, block_size if self._half else 0), np.float32)

    @property
    def work_bytes(self) -> int:
        """Memory of this work space."""
        arrays = (self._indices, self._parts, self._out_indices, self._scratch)
        return sum(array.nbytes for array in arrays)

    def begin(self, descriptor: Descriptor, stripes: Stripes) -> None:
        """Start a collective of this block format, whose blocks are all of `stripes`."""
        self.stripes = stripes
        self._op, self.blocks = OPS[descriptor.op], descriptor.layout.blocks
        # 16-bit floats go through float32 and back, which may change the bits of a NaN
        self._sole_is_result = descriptor.op == "sum" and not self._half
        self._position[:] = 0
        self._count[:] = 0
        self._unused = [0] * len(self._unused)
        self._frontier = [NOT_STARTED] * len(self._frontier)
        self.watermark = NOT_STARTED  # the lowest frontier: below it nothing can be missing
        self.written = 0
        self.received_blocks = self.sent_blocks = 0  # of this collective, without `written`

    def open(self, rank: int, row: int, header: Header) -> None:
        """Make the message in arena row `row` the one that `rank`'s blocks are taken from. Raises ProtocolError."""
        before = self._frontier[rank]  # a message that does not raise it would be one of endless many
        if header.left_out or header.block_bytes != self._block_bytes or not before < header.frontier <= self.blocks:
            raise ProtocolError(
                f"a message that does not fit its collective of {self.blocks} blocks, after frontier {before}: {header}"
            )
        low = max(0, before)
        own = self._indices[rank, : header.block_count]
        if not admit_indices(message_indices(self._slots[row], header), low, header.frontier, own):
            raise ProtocolError(f"block indices that do not ascend between the frontiers {low} and {header.frontier}")
        if self.stripes.shards > 1 and not all_owned(own, *self.stripes):
            raise ProtocolError(f"blocks of another shard than {self.stripes.shard} of {self.stripes.shards}")
        self._position[rank], self._count[rank] = 0, header.block_count
        self._start[rank] = (row * self._slots.shape[1] + HEADER_BYTES) // self._storage.itemsize
        self._unused[rank] = header.block_count
        self._frontier[rank] = header.frontier
        self.received_blocks += header.block_count
        self.watermark = min(self._frontier)

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
        return self.written == self.capacity

    @property
    def complete(self) -> bool:
        """Every block of the union is in this or an earlier result message."""
        return self.watermark == self.blocks and not any(self._unused)

    def merge(self, slot: int) -> bool:
        """Reduce what the watermark allows into result slot `slot`; return whether anything was added."""
        first = self.written
        self.written = plan_union(
            self._indices, self._position, self._count, self._start, self._block_size,
            self.watermark, self._out_indices, self._parts, first,
        )  # fmt: skip
        if self.written == first:
            return False
        self._unused = (self._count - self._position).tolist()
        parts, out = self._parts[: self.written], self._rows[slot]
        if self._sole_is_result:
            mark_sole(parts, first, self._out_indices)
        if self._half:
            scratch = self._scratch
            reduce_half_blocks(self._op, self._brain, self._arena, parts, first, out, scratch, scratch.view(np.uint32))
        else:
            reduce_blocks(self._op, self._arena, parts, first, out)
        return True

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
        nbytes = seal(self._results[slot], number, frontier, indices, self._block_bytes)
        shorter: dict[int, Array] = {}
        if self._sole_is_result:
            for rank, memory in memories.items():
                left_out = self._leave_out(rank, self._results[slot], indices, memory)
                if left_out:
                    size = seal(memory, number, frontier, indices, self._block_bytes, left_out=left_out)
                    shorter[rank] = memory[:size]
        return nbytes, shorter

    def _leave_out(self, rank: int, result: Array, indices: Array, memory: Array) -> int:
        """Copy the blocks that `rank` does not have from `result` to `memory`; return how many it has."""
        if capacity(memory.size, self._block_bytes) < max(1, indices.size):
            return 0
        rows, room = (block_rows(each, self._block_bytes, BYTES) for each in (result, memory))
        return leave_out(indices, rank, rows, room, max(1, indices.size // WORTH_LEAVING_OUT))
