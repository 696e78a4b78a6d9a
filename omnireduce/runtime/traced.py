"""The parts that do the work, each with a recorder beside it. They take the place of the plain ones in a traced job."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from omnireduce.config import Trace
from omnireduce.descriptor import Descriptor
from omnireduce.dtypes import Array
from omnireduce.protocol.operands import Operand, Packed
from omnireduce.protocol.reduction import Reduction
from omnireduce.runtime.engine import Engine
from omnireduce.runtime.handle import Handle
from omnireduce.runtime.trace import Origin, Recorder, What, now
from omnireduce.transport.base import EVERYTHING, Credited, Event, Link, Received
from omnireduce.wire import Hello

T = TypeVar("T")


class TracedLink(Link):
    """`link`, to peer number `number`."""

    def __init__(self, link: Link, number: int, recorder: Recorder) -> None:
        super().__init__(link.peer)
        self.kind, self.inline = link.kind, link.inline
        self._link, self._number, self._recorder = link, number, recorder
        self.counters, self.send_slots, self.receive_slots = link.counters, link.send_slots, link.receive_slots
        self._gathers = link.kind != "verbs"  # until `flush`; RDMA writes leave at once
        self._gathered: list[tuple[What, int]] = []

    @property
    def over(self) -> bool:
        return self._link.over

    @property
    def wants_write(self) -> bool:
        return self._link.wants_write

    @property
    def clogged(self) -> bool:
        return self._link.clogged

    def fileno(self) -> int:
        return self._link.fileno()

    def attach(self, send_slots: Array, receive_slots: Array) -> None:
        self._link.attach(send_slots, receive_slots)
        self.send_slots, self.receive_slots = send_slots, receive_slots

    def close(self) -> None:
        self._link.close()

    def drop(self) -> None:
        self._link.drop()

    def abandon(self) -> None:
        self._link.abandon()

    # output

    def send(self, slot: int, nbytes: int, instead: Array | None = None) -> None:
        with self._leaving(What.MESSAGE_OUT, nbytes if instead is None else instead.size):
            self._link.send(slot, nbytes, instead)

    def return_credit(self, slot: int) -> None:
        with self._leaving(What.CREDIT_OUT, slot):
            self._link.return_credit(slot)

    def _send(self, slot: int, nbytes: int) -> None:
        raise AssertionError("the link within sends")

    def _return_credit(self, slot: int) -> None:
        raise AssertionError("the link within returns credits")

    def send_control(self, body: bytes) -> None:
        start = self._offer()
        self._link.send_control(body)
        self._recorder.add(What.SEND, start, now(), self._number)

    def flush(self, most: int = EVERYTHING) -> None:
        if self._gathered or self._link.wants_write:
            start = self._offer()
            self._link.flush(most)
            self._recorder.add(What.SEND, start, now(), self._number)
        else:
            self._link.flush(most)

    @contextmanager
    def _leaving(self, what: What, detail: int) -> Iterator[None]:
        """Around handing something to the link: it leaves with the next `flush`, or by RDMA at once."""
        self._gathered.append((what, detail))
        if self._gathers:
            yield
            return
        start = self._offer()
        yield
        self._recorder.add(What.SEND, start, now(), self._number)

    def _offer(self) -> int:
        """The time, at which everything that was gathered begins to leave."""
        start = now()
        for what, detail in self._gathered:
            self._recorder.add(what, start, start, self._number, detail)
        self._gathered.clear()
        return start

    # input

    def peek(self) -> bool:
        return self._link.peek()

    def poll(self) -> Sequence[Event]:
        start = now()
        events = self._link.poll()
        end = now()
        self._recorder.add(What.RECEIVE, start, end, self._number)
        for event in events:
            if isinstance(event, Received):
                self._recorder.add(What.MESSAGE_IN, end, end, self._number, event.nbytes)
            elif isinstance(event, Credited):
                self._recorder.add(What.CREDIT_IN, end, end, self._number, event.slot)
        return events


def traced_links(links: Sequence[Link], recorder: Recorder) -> list[Link]:
    """All links of a worker or of a job, by peer number."""
    return [TracedLink(link, number, recorder) for number, link in enumerate(links)]


class TracedOperand:
    """`operand`, submitted now."""

    def __init__(self, operand: Operand, nbytes: int, recorder: Recorder) -> None:
        self.layout, self.block_bytes, self.row_dtype = operand.layout, operand.block_bytes, operand.row_dtype
        self._operand, self._nbytes, self._recorder, self._submitted = operand, nbytes, recorder, now()

    def start(self, shard: int) -> int:
        start = now()
        cursor = self._operand.start(shard)
        self._recorder.add(What.PACK, start, now(), shard)
        return cursor

    def pack(self, shard: int, cursor: int, span: int, rows: Array, indices: Array) -> Packed:
        start = now()
        packed = self._operand.pack(shard, cursor, span, rows, indices)
        self._recorder.add(What.PACK, start, now(), shard, packed.block_count)
        return packed

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        start = now()
        self._operand.put(rows, indices, unchanged, left_out)
        self._recorder.add(What.SCATTER, start, now(), detail=indices.size)

    def finish(self) -> None:
        start = now()
        self._operand.finish()
        end = now()
        self._recorder.add(What.SCATTER, start, end)
        self._recorder.add(What.COLLECTIVE, self._submitted, end, detail=self._nbytes)


class TracedEngine(Engine):
    """An engine that writes its trace when it is shut down."""

    def __init__(self, recorder: Recorder, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._recorder = recorder

    def submit(
        self,
        descriptor: Descriptor,
        operand: Operand,
        result: Callable[[], T],
        *,
        reads: tuple[Array, ...] = (),
        writes: tuple[Array, ...] = (),
    ) -> Handle[T]:
        nbytes = descriptor.layout.elements * descriptor.element.itemsize
        traced = TracedOperand(operand, nbytes, self._recorder)
        return super().submit(descriptor, traced, result, reads=reads, writes=writes)

    def _block(self, deadline: float | None) -> None:
        start = now()
        super()._block(deadline)
        self._recorder.add(What.WAIT, start, now())

    def _let_go(self) -> None:
        super()._let_go()
        self._recorder.write()


def trace_worker(
    settings: Trace, job: str, rank: int, size: int, links: Sequence[Link]
) -> tuple[list[Link], Callable[..., Engine]]:
    """A recorder for one rank: its links with it, and what makes the engine."""
    recorder = Recorder(settings, Origin(job=job, kind="rank", number=rank, ranks=size, shards=len(links)))
    return traced_links(links, recorder), partial(TracedEngine, recorder)


class TracedReduction(Reduction):
    """A reduction on an aggregator."""

    def __init__(self, recorder: Recorder, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._recorder = recorder

    def merge(self, slot: int, most: int) -> int:
        start, before = now(), self.written
        work = super().merge(slot, most)
        if work:
            self._recorder.add(What.MERGE, start, now(), detail=self.written - before)
        return work


class TracedSelector(selectors.EpollSelector):
    """What a shard waits with; all jobs that it serves share the wait."""

    def __init__(self) -> None:
        super().__init__()
        self.recorders: list[Recorder] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        start = now()
        ready = super().select(timeout)
        end = now()
        for recorder in self.recorders:
            recorder.add(What.WAIT, start, end)
        return ready


class JobTrace:
    """What records one job on a shard."""

    def __init__(self, recorder: Recorder, selector: TracedSelector) -> None:
        self._recorder, self._selector = recorder, selector
        selector.recorders.append(recorder)
        self.reduction = partial(TracedReduction, recorder)

    def links(self, links: Sequence[Link]) -> list[Link]:
        """The links of all ranks, in order, each with the recorder."""
        return traced_links(links, self._recorder)

    def __enter__(self) -> JobTrace:
        return self

    def __exit__(self, *_: object) -> None:
        """The job did not come about."""
        self._selector.recorders.remove(self._recorder)

    def close(self) -> None:
        """Write what was recorded."""
        self._selector.recorders.remove(self._recorder)
        self._recorder.write()


class ShardTraces:
    """Makes the traces of all jobs on one shard, which has to wait with `selector`."""

    def __init__(self, settings: Trace) -> None:
        self._settings, self.selector = settings, TracedSelector()

    def begin(self, job: str, hello: Hello) -> JobTrace:
        """Record for a job, of whose ranks `hello` is one's."""
        origin = Origin(job=job, kind="shard", number=hello.shard, ranks=hello.world_size, shards=hello.shards)
        return JobTrace(Recorder(self._settings, origin), self.selector)
