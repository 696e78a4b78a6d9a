"""Parts of a rank that record their work. In a traced job they take the place of the plain parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from omnireduce.core.descriptor import PACKED, Descriptor
from omnireduce.core.dtypes import Array
from omnireduce.kernels.exchange_steps import DONE, WAITS
from omnireduce.protocol.collective.collective import Collective
from omnireduce.protocol.collective.dense_operands import (
    EncodeBlocks,
    Operand,
    Packed,
    RowBlocks,
    TensorBlocks,
    WriteBlocks,
)
from omnireduce.protocol.host.exchange import STEPS, HostExchange
from omnireduce.protocol.host.local_ranks import LocalRanks
from omnireduce.protocol.rank import RankMachine
from omnireduce.runtime.rank.calls.single import Call
from omnireduce.runtime.rank.engine import Engine
from omnireduce.runtime.rank.handles import SingleHandle
from omnireduce.runtime.tracing.links import traced_links
from omnireduce.runtime.tracing.profile import Profile, Tally
from omnireduce.runtime.tracing.timeline import Timeline
from omnireduce.runtime.tracing.trace import OF_TENSOR, Origin, Recorder, SpanKind, now
from omnireduce.support.config import Trace
from omnireduce.support.logs import BoundLog
from omnireduce.transport.base import Link

_numbers = itertools.count(1)


class ChannelCounters(NamedTuple):
    """Counters of a channel: bytes that it has sent, and non-zero blocks that its rank brought to exchanges in memory
    (None: they are not counted)."""

    sent_bytes: int
    own_blocks: int | None


class Observer:
    """Watches collectives from start to end. `profile`, `timeline` and `recorder` may change. `recorder` records the
    work of the collectives, unless the channel is traced already."""

    def __init__(self, read_counters: Callable[[], ChannelCounters], profile: Profile | None) -> None:
        self.profile, self._read_counters = profile, read_counters
        self.timeline: Timeline | None = None
        self.recorder: Recorder | None = None
        self._last_counters = read_counters()

    def watch(self, calls: Sequence[Call[Any]], handles: Sequence[SingleHandle[Any]]) -> tuple[Call[Any], ...]:
        """The calls to start in place of `calls`, with hooks for their end."""
        return tuple(self._watch_call(*pair) for pair in zip(calls, handles, strict=True))

    def _watch_call(self, call: Call[Any], handle: SingleHandle[Any]) -> Call[Any]:
        descriptor, operand = call.descriptor, call.operand
        if self.recorder is not None and not isinstance(operand, TracedOperand):
            is_tensor = descriptor.reduces and not descriptor.has_rows
            operand = TracedOperand(operand, self.recorder, is_tensor=is_tensor)
        number, start, timeline, profile = next(_numbers), now(), self.timeline, self.profile
        if profile is not None:
            profile.begin(start)
        if timeline is not None:
            details = {"dtype": descriptor.dtype, "shape": descriptor.shape}
            timeline.started(number, descriptor.kind, descriptor.name, details)

        def record_end(*, failed: bool) -> None:
            end, (sent, blocks) = now(), self._since_last()
            nbytes = _bytes_of(descriptor, operand)
            if profile is not None:
                profile.end(descriptor.kind, Tally(1, nbytes, end - start, sent, failed), end)
            if timeline is not None:
                details = _details(descriptor, operand, nbytes, blocks) | {"sent_bytes": sent}
                timeline.done(number, details | ({"failed": True} if failed else {}))

        handle.on_over = record_end
        return call if operand is call.operand else call._replace(operand=operand)

    def _since_last(self) -> tuple[int, int | None]:
        """The bytes and blocks that were moved since the last collective was over."""
        previous, self._last_counters = self._last_counters, self._read_counters()
        sent, blocks = self._last_counters
        return sent - previous[0], None if blocks is None or previous[1] is None else blocks - previous[1]


def _bytes_of(descriptor: Descriptor, operand: Operand) -> int:
    """The bytes of the caller's array, or of its rows."""
    if descriptor.has_rows or descriptor.kind in PACKED:
        return operand.nbytes
    return math.prod(descriptor.shape) * (descriptor.item_bytes or descriptor.element.dtype.itemsize)


def _details(descriptor: Descriptor, operand: Operand, nbytes: int, own_blocks: int | None) -> dict[str, Any]:
    details: dict[str, Any] = {"dtype": descriptor.dtype, "shape": descriptor.shape, "bytes": nbytes}
    if not descriptor.reduces:
        return details
    details["op"] = descriptor.op
    if not descriptor.has_rows:
        details["blocks"] = descriptor.layout.blocks
    if isinstance(operand, TracedOperand) and operand.own_blocks + operand.union_blocks:
        return details | {"nonzero_blocks": operand.own_blocks, "union_blocks": operand.union_blocks}
    return details if own_blocks is None else details | {"nonzero_blocks": own_blocks}


# `Engine`, or a function that makes an engine that records: (machine, links, spin_s, log, eventfds)
MakeEngine = Callable[[RankMachine, Sequence[Link], float, BoundLog, Sequence[int]], Engine]
MakeExchange = Callable[[Array, int, Sequence[str], int, int, LocalRanks], HostExchange]
Progress = dict[SpanKind, tuple[int, int]]  # by kind of step: the number of steps, and of their blocks


class TracedOperand:
    """`operand` with a recorder. Its collective counts as submitted when this is made. `is_tensor`: the operand is a
    tensor to be combined, and the trace gets its numbers of blocks.

    `own_blocks`, `union_blocks`: the number of blocks that this rank has brought, and of the result. They are counted
    here, or in the exchange inside the host.
    """

    is_divisible = False  # a traced rank has a single thread

    def __init__(self, operand: Operand, recorder: Recorder, *, is_tensor: bool = False) -> None:
        self.layout, self.block_bytes, self.row_dtype = operand.layout, operand.block_bytes, operand.row_dtype
        self.nbytes, self.blocks = operand.nbytes, operand.blocks
        self._operand, self._recorder, self._submitted = operand, recorder, now()
        self._is_tensor, self.own_blocks, self.union_blocks = is_tensor, 0, 0
        self._last_find = 0, 0  # the time of the last `find`, and its shard

    def start(self, shard: int) -> int:
        start = now()
        cursor = self._operand.start(shard)
        self._recorder.add(SpanKind.PACK, start, now(), shard)
        return cursor

    def pack(self, shard: int, cursor: int, span: int, rows: Array, indices: Array) -> Packed:
        start = now()
        packed = self._operand.pack(shard, cursor, span, rows, indices)
        self._recorder.add(SpanKind.PACK, start, now(), shard, packed.block_count)
        self.own_blocks += packed.block_count
        return packed

    def find(self, shard: int, cursor: int, span: int, indices: Array) -> Packed:
        self._last_find = now(), shard
        return self._operand.find(shard, cursor, span, indices)

    def pack_found(self, indices: Array, encode: EncodeBlocks) -> None:
        start, shard = self._last_find
        self._operand.pack_found(indices, encode)
        self._recorder.add(SpanKind.PACK, start, now(), shard, indices.size)
        self.own_blocks += indices.size

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        start = now()
        self._operand.put(rows, indices, unchanged, left_out)
        self._recorder.add(SpanKind.SCATTER, start, now(), detail=indices.size)
        self.union_blocks += indices.size  # with blocks that the message leaves out: they belong to the result

    def put_encoded(self, indices: Array, write: WriteBlocks) -> None:
        start = now()
        self._operand.put_encoded(indices, write)
        self._recorder.add(SpanKind.SCATTER, start, now(), detail=indices.size)
        self.union_blocks += indices.size

    def take_totals(self, shard: int, totals: Array) -> None:
        self._operand.take_totals(shard, totals)

    def finish(self) -> None:
        start = now()
        self._operand.finish()
        end = now()
        self._recorder.add(SpanKind.SCATTER, start, end)
        if self._is_tensor:
            counts = self.layout.blocks, self.block_bytes, self.own_blocks, self.union_blocks
            for kind, detail in zip(OF_TENSOR, counts, strict=True):
                self._recorder.add(kind, end, end, detail=detail)
        self._recorder.add(SpanKind.COLLECTIVE, self._submitted, end, detail=self.nbytes)


class TracedMachine(RankMachine):
    """A rank's machine with a recorder. It records the operands that it makes itself, the sums of its host."""

    def __init__(self, recorder: Recorder, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._recorder = recorder

    def _new_collective(self, descriptor: Descriptor, operand: Operand) -> Collective:
        collective = super()._new_collective(descriptor, operand)
        if collective.host_sum is not None:
            collective.sent = TracedOperand(collective.host_sum, self._recorder)
        return collective


class TracedExchange(HostExchange):
    """A host exchange that takes one step at a time, with a recorder."""

    def __init__(self, recorder: Recorder, *arguments: Any) -> None:
        super().__init__(*arguments, steps=1)
        self._recorder = recorder

    def _run(self, blocks: TensorBlocks, notes: Array) -> int:
        return self._take_steps(partial(super()._run, blocks, notes), self._tensor_progress)

    def _run_with_rows(self, blocks: RowBlocks) -> int:
        return self._take_steps(partial(super()._run_with_rows, blocks), self._row_progress)

    def _finish(self, descriptor: Descriptor) -> None:
        operand, s = self._queue[0].collective.operand, self._state[0]
        assert isinstance(operand, TracedOperand)
        operand.own_blocks += int(s["staged_blocks"] + s["own_blocks"])
        results = s["shown_blocks"] if s["shards"] else s["result_blocks"]
        operand.union_blocks += int(results + s["collected_blocks"])
        super()._finish(descriptor)

    def _take_steps(self, step: Callable[[], int], progress: Callable[[], Progress]) -> int:
        for _ in range(STEPS):
            if not self.can_go_on and not self._wait():
                return WAITS
            outcome = self._record(step, progress)
            if outcome >= DONE:
                break
        return outcome

    def _wait(self) -> bool:
        start = now()
        can_go_on = self.await_step()
        self._recorder.add(SpanKind.WAIT, start, now())
        return can_go_on

    def _record(self, step: Callable[[], int], progress: Callable[[], Progress]) -> int:
        progress_before, start = progress(), now()
        outcome = step()
        end = now()
        for kind, (steps, count) in progress().items():
            steps_before, count_before = progress_before[kind]
            if steps > steps_before:
                self._recorder.add(kind, start, end, detail=count - count_before)
        return outcome

    def _tensor_progress(self) -> Progress:
        s = self._state[0]
        shown_chunks = int(s["combined"]) if s["shards"] else 0
        return {
            SpanKind.STAGE: (int(s["staged"]), int(s["staged_blocks"])),
            SpanKind.COMBINE: (int(s["summed"] if s["shards"] else s["combined"]), int(s["result_blocks"])),
            SpanKind.SHOW: (shown_chunks, int(s["shown_blocks"])),
            SpanKind.COLLECT: (int(s["collected"]), int(s["collected_blocks"])),
        }

    def _row_progress(self) -> Progress:
        """The progress of an exchange of rows. There is nothing to collect, because each rank combines all rows of the
        result. The chunks of row numbers come first."""
        s = self._state[0]
        combined = max(0, int(s["combined"] - s["number_chunks"])) * int(s["chunk_blocks"])
        return {
            SpanKind.STAGE: (int(s["staged"]), int(s["staged_blocks"])),
            SpanKind.COMBINE: (int(s["combined"]), min(combined, int(s["union"]))),
        }


class TracedEngine(Engine):
    """An engine that writes its trace when it is shut down."""

    def __init__(self, recorder: Recorder, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._recorder = recorder

    def submit(self, *calls: Call[Any]) -> list[SingleHandle[Any]]:
        return super().submit(*(call._replace(operand=self._traced_operand(call)) for call in calls))

    def _traced_operand(self, call: Call[Any]) -> TracedOperand:
        is_tensor = call.descriptor.reduces and not call.descriptor.has_rows
        return TracedOperand(call.operand, self._recorder, is_tensor=is_tensor)

    def _block(self, deadline: float | None) -> None:
        start = now()
        super()._block(deadline)
        self._recorder.add(SpanKind.WAIT, start, now())

    def _release(self) -> None:
        super()._release()
        self._recorder.write()


class RankParts(NamedTuple):
    """The parts of a rank: its links, and functions that make its machine, its engine and its host exchange."""

    links: list[Link]
    machine: Callable[..., RankMachine] = RankMachine
    engine: MakeEngine = Engine
    exchange: MakeExchange = HostExchange


def traced(settings: Trace, job: str, rank: int, size: int, links: Sequence[Link]) -> RankParts:
    """The parts of a rank; with a recorder if traces are wanted."""
    recorder = Recorder(settings, Origin(job=job, kind="rank", number=rank, ranks=size, shards=len(links)))
    return RankParts(
        traced_links(links, recorder),
        partial(TracedMachine, recorder),
        partial(TracedEngine, recorder),
        partial(TracedExchange, recorder),
    )
