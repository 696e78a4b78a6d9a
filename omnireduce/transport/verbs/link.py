"""RDMA links: blocks are written into the peer's slots, everything else goes over a TCP connection beside them.

The write of a message carries 32 bits: kind, slot, and the number of control messages that were sent before it. A
control message carries the number of writes that were announced before it. So the receiver can restore the common order
of both paths: it holds back messages that have overtaken others. The TCP connection stays open for the life of the
link. It shows when a peer dies, even if nothing is written.

A credit is a write of no bytes. At most a message and a credit of every slot are under way. The receiver has a receive
request ready for each of them, so it is always prepared.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from omnireduce.core.dtypes import Array
from omnireduce.errors import TransportError
from omnireduce.transport.base import EVERYTHING, Control, Credited, Event, Link, Lost, Received
from omnireduce.transport.framing import CONTROL_LIMIT
from omnireduce.transport.tcp import TcpLink

MESSAGE, CREDIT = 0, 1
KIND_SHIFT, SLOT_SHIFT = 30, 24
SLOT_MASK, CONTROLS_MASK, WRITES_MASK = 63, (1 << SLOT_SHIFT) - 1, 0xFFFF
IMMEDIATE_BYTES = 4
MAX_HELD_CONTROLS = 64  # control messages that may wait for writes
FAREWELL_S = 0.25  # the longest wait of a close until the peer has acknowledged all writes


class Write(NamedTuple):
    """The peer wrote `nbytes` bytes, with the immediate data `immediate`."""

    immediate: int
    nbytes: int


class Failure(NamedTuple):
    """The RDMA connection is over."""

    reason: str


class QueuePair(Protocol):
    """The part of `verbs.queue_pair.VerbsQueuePair` that a link needs."""

    descriptor: int
    unacknowledged: int

    def write(self, slot: int, nbytes: int, immediate: int) -> None: ...
    def announce(self, immediate: int) -> None: ...
    def poll(self) -> Iterable[Write | Failure]: ...
    def drain(self) -> Iterable[Write | Failure]: ...
    def close(self) -> None: ...

    def abandon(self) -> None: ...


class VerbsLink(Link):
    """A link over `queue`, which is connected, and `control`, whose other end is a VerbsLink as well."""

    kind = "verbs"
    gathers = False

    def __init__(self, control: TcpLink, queue: QueuePair, send_slots: Array, receive_slots: Array) -> None:
        super().__init__(control.peer)
        self.counters = control.counters
        self._control, self._queue = control, queue
        self._announced = 0  # writes that were announced to the peer
        self._reported = 0  # writes of the peer that `poll` has reported
        self._controls = control.controls_received  # control messages of the peer that were reported
        self._writes: deque[Write] = deque()  # arrived, not reported yet
        self._held_controls: deque[Control | Lost] = deque()
        self._failure: Lost | None = None
        self._lost: Lost | None = None
        self._interest = select.EPOLLIN
        self._hangup = select.poll()
        self._hangup.register(control, 0)
        self._epoll = select.epoll()
        self._epoll.register(control, select.EPOLLIN)
        self._epoll.register(queue.descriptor, select.EPOLLIN)
        self.attach(send_slots, receive_slots)
        control.bound_control(CONTROL_LIMIT)  # `attach` would lift the bound for newcomers, but is not called here

    @property
    def over(self) -> bool:
        return self._lost is not None

    @property
    def wants_write(self) -> bool:
        return self._control.wants_write

    @property
    def clogged(self) -> bool:
        return self._control.clogged

    def fileno(self) -> int:
        return self._epoll.fileno()

    # output

    def _send(self, slot: int, nbytes: int) -> None:
        self._announce(MESSAGE, slot, nbytes)

    def _return_credit(self, slot: int) -> None:
        self._announce(CREDIT, slot, 0)

    def _announce(self, kind: int, slot: int, nbytes: int) -> None:
        if self._lost is not None or self._failure is not None:
            return
        immediate = kind << KIND_SHIFT | slot << SLOT_SHIFT | self._control.controls_sent & CONTROLS_MASK
        self._announced += 1
        self.counters.sent_bytes += IMMEDIATE_BYTES + nbytes
        try:
            if kind == MESSAGE:
                self._queue.write(slot, nbytes, immediate)
            else:
                self._queue.announce(immediate)
        except TransportError as error:
            self._failure = Lost(str(error))
            self._watch()

    def send_control(self, body: bytes) -> None:
        self._control.send_control(body, after=self._announced & WRITES_MASK)
        self._watch()

    def flush(self, max_bytes: int = EVERYTHING) -> None:
        if self._control.wants_write:
            self._control.flush(max_bytes)
            self._watch()

    def _watch(self) -> None:
        """Let the descriptor show room for output on the control connection if output waits, and hide its input while
        many letters wait.

        A failure that `poll` has not reported yet also makes the descriptor ready, because the control connection
        nearly always has room for output.
        """
        interest = select.EPOLLIN if len(self._held_controls) < MAX_HELD_CONTROLS else 0
        if self._control.wants_write or self._failure is not None:
            interest |= select.EPOLLOUT
        if interest != self._interest and self._lost is None:
            self._interest = interest
            self._epoll.modify(self._control, interest)

    # input

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        if self._lost is not None:
            return events
        self.flush()
        self._take_writes()
        self._take_controls()
        self._report(events)
        self._watch()
        return events

    def peek(self) -> bool:
        if self._lost is None:
            self._take(self._queue.drain())
        return bool(self._writes or self._failure)

    def _take_writes(self) -> None:
        self._take(self._queue.poll())

    def _take(self, outcomes: Iterable[Write | Failure]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                self._failure = self._failure or Lost(outcome.reason)
            else:
                self._writes.append(outcome)
        if len(self._writes) > 2 * len(self.receive_slots):
            self._failure = self._failure or Lost("more writes than credits", violation=True)

    def _take_controls(self) -> None:
        """Read control messages, unless many wait for a write: a peer must not fill the memory."""
        if len(self._held_controls) < MAX_HELD_CONTROLS:
            self._held_controls.extend(event for event in self._control.poll() if isinstance(event, (Control, Lost)))
        elif self._hangup.poll(0):
            self._held_controls.append(Lost("connection broken"))

    def _report(self, events: list[Event]) -> None:
        """Report writes and control messages in the order in which they were sent; then the end of the link, if it has
        come."""
        while self._lost is None and (self._report_next(events) or self._report_end(events)):
            pass

    def _report_next(self, events: list[Event]) -> bool:
        """Report the next write or control message, if all that were sent before it have been reported."""
        if self._writes and self._writes[0].immediate & CONTROLS_MASK == self._controls & CONTROLS_MASK:
            self._report_write(self._writes.popleft(), events)
            return True
        message = self._held_controls[0] if self._held_controls else None
        if not isinstance(message, Control) or message.after != self._reported & WRITES_MASK:
            return False
        self._held_controls.popleft()
        self._controls += 1
        events.append(Control(message.body))
        return True

    def _report_end(self, events: list[Event]) -> bool:
        """Report that one of the two connections is over, if it is. Writes that are still held back are dropped: the
        control messages that they wait for are lost.

        Control messages are reported all the same: they may say why.
        """
        last = self._held_controls[-1] if self._held_controls else None
        if isinstance(last, Lost):
            count_before = len(self._writes)
            self._take_writes()  # the last writes may have come since the control connection was read
            if len(self._writes) == count_before:
                self._report_controls(events)
                self._end(events, last)
            return True
        if self._failure is not None:
            self._report_controls(events)
            self._end(events, self._failure)
        return False

    def _report_controls(self, events: list[Event]) -> None:
        events.extend(Control(message.body) for message in self._held_controls if isinstance(message, Control))

    def _report_write(self, write: Write, events: list[Event]) -> None:
        kind, slot = write.immediate >> KIND_SHIFT, write.immediate >> SLOT_SHIFT & SLOT_MASK
        event = Credited(slot) if kind == CREDIT else Received(slot, write.nbytes)
        wrong = self._check_credit(event) if kind in (MESSAGE, CREDIT) else f"an announcement of unknown kind {kind}"
        if wrong:
            self._end(events, Lost(wrong, violation=True))
            return
        self._reported += 1
        self.counters.received_bytes += IMMEDIATE_BYTES + write.nbytes
        events.append(event)

    def _end(self, events: list[Event], lost: Lost) -> None:
        self._lost = lost
        events.append(lost)

    def close(self) -> None:
        if self._lost is None:
            self._await_acknowledgements()
        self.drop()

    def drop(self) -> None:
        self._lost = self._lost or Lost("closed by this side")
        if not self._epoll.closed:
            self._epoll.close()
            self._control.close()
            self._queue.close()

    def release(self) -> None:
        """Release the resources of RDMA. The control connection goes on: it may carry the reason why there is no
        RDMA."""
        self._lost = self._lost or Lost("closed by this side")
        if not self._epoll.closed:
            self._epoll.close()
            self._queue.close()

    def abandon(self) -> None:
        self._lost = Lost("left to the parent process")
        if not self._epoll.closed:
            self._epoll.close()
            self._control.close()
            self._queue.abandon()

    def _await_acknowledgements(self) -> None:
        """Wait a moment until the peer has got all writes: closing the queue would cancel them."""
        deadline, poller = time.monotonic() + FAREWELL_S, select.poll()
        poller.register(self._queue.descriptor, select.POLLIN)
        while self._queue.unacknowledged and self._failure is None and time.monotonic() < deadline:
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            self._take_writes()
