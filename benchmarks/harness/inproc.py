"""Links inside one process: two ends that share their slots and hand events over in queues. For benchmarks,
tests and the simulator."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence

from omnireduce.transport.base import EVERYTHING, Control, Credited, Event, Link, Lost, Received

FRAME_BYTES = 8
UNLIMITED = sys.maxsize


class InprocLink(Link):
    """One end of a link; `pair` makes two. A subclass may override `deliver` to delay or drop events for the peer."""

    kind = "inproc"
    other_end: InprocLink

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self.max_events = UNLIMITED  # the most events that one poll reports
        self._waiting_events: deque[Event] = deque()
        self._lost = self._closed = False

    @property
    def over(self) -> bool:
        return self._lost

    def deliver(self, event: Event) -> None:
        """Hand `event` to this end."""
        self._waiting_events.append(event)

    def _send(self, slot: int, nbytes: int) -> None:
        self._put(Received(slot, nbytes))

    def _return_credit(self, slot: int) -> None:
        self._put(Credited(slot))

    def send_control(self, body: bytes) -> None:
        self._put(Control(body))

    def _put(self, event: Event) -> None:
        self.counters.sent_bytes += wire_bytes(event)
        if not self._lost:
            self.other_end.deliver(event)

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        while self._waiting_events and not self._lost and len(events) < self.max_events:
            event = self._waiting_events.popleft()
            wrong = self._check_credit(event) if isinstance(event, Received | Credited) else ""
            if wrong:
                event = Lost(wrong, violation=True)
            self.counters.received_bytes += wire_bytes(event)
            self._lost = isinstance(event, Lost)
            events.append(event)
        return events

    def flush(self, max_bytes: int = EVERYTHING) -> None:
        """Do nothing: no output waits."""

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        if not self._closed:
            self._lost = self._closed = True
            self.other_end.deliver(Lost("connection closed"))


def wire_bytes(event: Event) -> int:
    """The bytes that `event` would take on a wire, framing included."""
    if isinstance(event, Received):
        return FRAME_BYTES + event.nbytes
    if isinstance(event, Control):
        return FRAME_BYTES + len(event.body)
    return FRAME_BYTES if isinstance(event, Credited) else 0


def pair(left: str, right: str) -> tuple[InprocLink, InprocLink]:
    """Two joined ends; `left` is the name under which the first end knows its peer."""
    first, second = InprocLink(left), InprocLink(right)
    first.other_end, second.other_end = second, first
    return first, second
