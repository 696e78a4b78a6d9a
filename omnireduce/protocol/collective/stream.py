"""The stream of messages between a rank and one shard: packs collectives into slots, and places results."""

from __future__ import annotations

from collections import deque

import numpy as np

from omnireduce.core.blocks_and_stripes import Stripes
from omnireduce.core.dtypes import BYTES, Array
from omnireduce.core.wire.blocks import (
    Header,
    block_rows,
    message_extra,
    message_list,
    message_steps,
    read_header,
    seal,
)
from omnireduce.core.wire.control import Waiting
from omnireduce.errors import ProtocolError
from omnireduce.kernels.merge_indices import admit_marked
from omnireduce.protocol.collective.codecs import BlockCoder
from omnireduce.protocol.collective.collective import Collective
from omnireduce.protocol.collective.effects import Send
from omnireduce.protocol.collective.index_lists import START, Lister, MessageSizing, expand


class ShardStream:
    """This rank's exchange with one shard: at most one collective is packed, and one received, at a time."""

    def __init__(
        self, shard: int, send_slots: Array, receive_slots: Array, scan_span: int, sizing: MessageSizing
    ) -> None:
        self.shard, self._sizing = shard, sizing
        self._send_slots, self._receive_slots = send_slots, receive_slots
        self._free = list(range(len(send_slots)))
        self._span = scan_span
        self._outgoing: deque[Collective] = deque()
        self._incoming: deque[Collective] = deque()
        self._cursor = -1  # the position in the first outgoing collective; -1 before its first message
        self._sent_frontier = self._sent_blocks = 0
        self._result_frontier = 0
        self.heard_at = 0.0  # when the shard was heard last
        self.waiting: Waiting | None = None  # the last Waiting; None if work has gone on since
        # Outcomes of messages that a thread placed before `received`: the finished collective, None, or the text of an
        # error (an exception would keep arrays alive).
        self._placed: deque[Collective | str | None] = deque()
        self._indices, self._unchanged = np.empty(0, np.int64), np.empty(0, np.bool_)
        self._lister = Lister(0)
        self._coder: BlockCoder | None = None  # the coder used last

    def submit(self, collective: Collective) -> None:
        self._outgoing.append(collective)
        self._incoming.append(collective)

    def credited(self, slot: int) -> None:
        self._free.append(slot)

    def heard(self, now: float, waiting: Waiting | None = None) -> None:
        """Something came from this shard: a sign of work, or the message `waiting`."""
        self.heard_at, self.waiting = now, waiting

    def hangs(self, now: float, since: float, timeout_s: float) -> bool:
        """Whether this shard has been silent for so long that it must hang. A shard that works, but sends no result,
        says Waiting after half of the time limit at the latest, and again each time that the wait has doubled."""
        waited_s = 0.0 if self.waiting is None else self.waiting.seconds
        return now - max(self.heard_at, since) >= max(timeout_s / 2, 2 * waited_s)

    def missing_from(self, collective: Collective) -> int:
        """The first block whose result this shard still owes; the number of blocks if it owes none; -1 if the tensor is
        empty, and its result is still to come."""
        layout = collective.operand.layout
        if not any(incoming is collective for incoming in self._incoming):
            return layout.blocks
        frontier = self._result_frontier if self.owes(collective) else 0
        return layout.next_block(self.shard, frontier) if layout.blocks else -1

    def owes(self, collective: Collective) -> bool:
        """Whether results of the oldest collective under way are still to come from this shard."""
        return bool(self._incoming) and self._incoming[0] is collective

    @property
    def may_pack(self) -> bool:
        """There may be something to send, and there is a slot to send it in."""
        return bool(self._outgoing and self._free)

    def pack(self) -> Send | None:
        """Pack and seal one message, if there is something to send and a slot to send it in."""
        if not self._outgoing or not self._free:
            return None
        collective, extra = self._outgoing[0], b""
        operand, host_sum = collective.sent, collective.host_sum
        blocks, coder = operand.layout.blocks, None if collective.codec is None else self._coder_of(collective)
        block_bytes = operand.block_bytes if coder is None else coder.block_bytes
        max_blocks = self._sizing.blocks(block_bytes, self._sent_blocks, self._sent_frontier, blocks)
        if host_sum is not None:
            cursor = max(self._cursor, host_sum.start(self.shard))
            if not host_sum.is_worth_packing(cursor, self._span, max_blocks):
                return None
        slot = self._free.pop()
        if self._cursor < 0:
            self._cursor, extra = operand.start(self.shard), collective.descriptor.encoded
        memory = self._send_slots[slot]
        rows = block_rows(memory, block_bytes, operand.row_dtype if coder is None else BYTES)[:max_blocks]
        indices = self._scratch(len(rows))
        scan_arguments = self.shard, self._cursor, self._span, rows, indices
        packed = (
            operand.pack(*scan_arguments) if coder is None else coder.pack(operand, *scan_arguments, collective.key)
        )
        count, self._cursor, frontier = packed
        indices, layout = indices[:count], operand.layout
        runs, steps = self._lister.shortest(indices, layout.shards, layout.stripe_blocks, block_bytes)
        nbytes = seal(memory, collective.number, frontier, indices, block_bytes, extra, runs=runs, steps=steps)
        self._sent_frontier = frontier
        self._sent_blocks += count
        if frontier == blocks:
            self._outgoing.popleft()
            self._cursor, self._sent_frontier, self._sent_blocks = -1, 0, 0
        return Send((self.shard,), slot, nbytes)

    def place(self, slot: int, nbytes: int) -> None:
        """Do the work of `received` in advance. Threads may call this for different streams at the same time."""
        try:
            self._placed.append(self._place(slot, nbytes))
        except ProtocolError as error:
            self._placed.append(str(error))

    def received(self, slot: int, nbytes: int) -> Collective | None:
        """Place a result message; return the collective if this shard has now delivered all of it. Raises
        ProtocolError."""
        if not self._placed:
            return self._place(slot, nbytes)
        outcome = self._placed.popleft()
        if isinstance(outcome, str):
            raise ProtocolError(outcome)
        return outcome

    def _place(self, slot: int, nbytes: int) -> Collective | None:
        memory = self._receive_slots[slot]
        header = read_header(memory, nbytes)
        if not self._incoming or header.collective != self._incoming[0].number:
            raise ProtocolError(f"a result out of order: {header}")
        collective = self._incoming[0]
        operand, coder = collective.sent, None if collective.codec is None else self._coder_of(collective)
        blocks, block_bytes = operand.layout.blocks, operand.block_bytes if coder is None else coder.block_bytes
        packed = self._sent_frontier if self._outgoing and self._outgoing[0] is collective else blocks
        program, is_last = collective.descriptor.program, header.frontier == blocks
        totals_bytes = program.total_bytes if program is not None and is_last else 0
        fits = header.block_bytes == block_bytes and header.extra_bytes == totals_bytes
        if not (fits and self._result_frontier <= header.frontier <= packed):
            raise ProtocolError(f"a result that does not fit {collective.descriptor}: {header}")
        indices = self._scratch(header.block_count)[: header.block_count]
        unchanged = self._unchanged[: header.block_count]
        low, high, stripes = self._result_frontier, header.frontier, operand.layout.stripes(self.shard)
        listed = self._result_indices(memory, header, stripes, indices)
        fitting = admit_marked(
            listed, collective.sender, low, high, shard=stripes.shard, shards=stripes.shards,
            stripe_blocks=stripes.stripe_blocks, copy=indices, unchanged=unchanged,
        )  # fmt: skip
        if fitting < indices.size:
            raise ProtocolError(f"a result with {stripes.misfit(indices[fitting], low, high)}: {header}")
        if header.left_out and header.left_out != np.count_nonzero(unchanged):
            raise ProtocolError(
                f"a result that leaves out other blocks than those that only this rank has brought: {header}"
            )
        rows = block_rows(memory, block_bytes, operand.row_dtype if coder is None else BYTES)
        if coder is None:
            operand.put(rows, indices, unchanged, header.left_out > 0)
        elif header.left_out:
            raise ProtocolError(f"a result that leaves out blocks which are encoded: {header}")
        else:
            coder.put(operand, rows, indices)
        self._result_frontier = header.frontier
        if not is_last:
            return None
        if totals_bytes:
            operand.take_totals(self.shard, np.frombuffer(message_extra(memory, header)))
        self._result_frontier = 0
        return self._incoming.popleft()

    def _coder_of(self, collective: Collective) -> BlockCoder:
        """The coder of a collective that has a codec. Raises CodecError."""
        descriptor = collective.descriptor
        if self._coder is None or not self._coder.suits(descriptor):
            assert collective.codec is not None
            self._coder = BlockCoder(descriptor.codec, collective.codec, descriptor.layout.block_size)
        return self._coder

    @staticmethod
    def _result_indices(memory: Array, header: Header, stripes: Stripes, indices: Array) -> Array:
        """The indices of a result. Runs or steps are expanded into `indices`. Raises ProtocolError."""
        listed = message_steps(memory, header) if header.steps else message_list(memory, header)
        if not (header.runs or header.steps):
            return listed
        filled, position = expand(listed, START, stripes, indices)
        if filled < header.block_count or position[0] != (header.steps or header.runs):
            raise ProtocolError(f"a result whose {header.listed} do not list its blocks: {header}")
        return indices

    def _scratch(self, size: int) -> Array:
        if self._indices.size < size:
            self._indices, self._unchanged = np.empty(size, np.int64), np.empty(size, np.bool_)
            self._lister = Lister(size)
        return self._indices
