"""Links that record their messages and credits. In a traced job they take the place of plain links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from omnireduce.core.dtypes import Array
from omnireduce.runtime.tracing.trace import Recorder, SpanKind, now
from omnireduce.transport.base import EVERYTHING, Credited, Event, Link, Received


class TracedLink(Link):
    """`link`, to peer number `number`, with a recorder."""

    def __init__(self, link: Link, number: int, recorder: Recorder) -> None:
        super().__init__(link.peer)
        self.kind, self.inline, self.process = link.kind, link.inline, link.process
        self._link, self._number, self._recorder = link, number, recorder
        self.counters, self.send_slots, self.receive_slots = link.counters, link.send_slots, link.receive_slots
        self._gathers = link.gathers
        self._gathered: list[tuple[SpanKind, int]] = []

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

    def send(self, slot: int, nbytes: int, message: Array | None = None) -> None:
        with self._record_departure(SpanKind.MESSAGE_OUT, nbytes if message is None else message.size):
            self._link.send(slot, nbytes, message)

    def return_credit(self, slot: int) -> None:
        with self._record_departure(SpanKind.CREDIT_OUT, slot):
            self._link.return_credit(slot)

    def _send(self, slot: int, nbytes: int) -> None:
        raise AssertionError("the link within sends")

    def _return_credit(self, slot: int) -> None:
        raise AssertionError("the link within returns credits")

    def send_control(self, body: bytes) -> None:
        start = self._begin_departure()
        self._link.send_control(body)
        self._recorder.add(SpanKind.SEND, start, now(), self._number)

    def flush(self, max_bytes: int = EVERYTHING) -> None:
        if self._gathered or self._link.wants_write:
            start = self._begin_departure()
            self._link.flush(max_bytes)
            self._recorder.add(SpanKind.SEND, start, now(), self._number)
        else:
            self._link.flush(max_bytes)

    @contextmanager
    def _record_departure(self, kind: SpanKind, detail: int) -> Iterator[None]:
        """A context in which a message or credit is handed to the link. It leaves with the next `flush`, or by RDMA at
        once."""
        self._gathered.append((kind, detail))
        if self._gathers:
            yield
            return
        start = self._begin_departure()
        yield
        self._recorder.add(SpanKind.SEND, start, now(), self._number)

    def _begin_departure(self) -> int:
        """Record that all gathered messages and credits begin to leave now; return the time."""
        start = now()
        for kind, detail in self._gathered:
            self._recorder.add(kind, start, start, self._number, detail)
        self._gathered.clear()
        return start

    # input

    def peek(self) -> bool:
        return self._link.peek()

    def poll(self) -> Sequence[Event]:
        start = now()
        events = self._link.poll()
        end = now()
        self._recorder.add(SpanKind.RECEIVE, start, end, self._number)
        for event in events:
            if isinstance(event, Received):
                self._recorder.add(SpanKind.MESSAGE_IN, end, end, self._number, event.nbytes)
            elif isinstance(event, Credited):
                self._recorder.add(SpanKind.CREDIT_IN, end, end, self._number, event.slot)
        return events


def traced_links(links: Sequence[Link], recorder: Recorder) -> list[Link]:
    """All links of a worker or of a job, by peer number."""
    return [TracedLink(link, number, recorder) for number, link in enumerate(links)]
