"""Links of a simulated network, in virtual time: messages travel, pipes fill up, connections break.

The two ends of a link share a `Network`, which gives the time and calls functions later. Like a stream link, an end
gathers its output until `flush`, keeps the output that a full pipe does not take, and still delivers messages that were
sent before a close. The simulation decides when each process polls; `on_ready` tells it that an end has news.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from benchmarks.harness.inproc import FRAME_BYTES, InprocLink, wire_bytes
from omnireduce.core.dtypes import Array
from omnireduce.transport.base import EVERYTHING, Control, Event, Lost, Received

POISON = 0xEE  # fills a receive slot once its credit is returned, so that late reads are noticed


class Network(Protocol):
    """Virtual time: `now` gives it, in seconds; `at` calls a function at a later time."""

    def now(self) -> float: ...
    def at(self, time: float, action: Callable[[], None]) -> None: ...


class CopiedMessage(Received):
    """A message with a copy of its bytes: they arrive even if its slot is filled anew on the way."""

    message: Array


class SimLink(InprocLink):
    """One end of a link. `delay_s()` gives the delay of each message; up to `pipe_bytes` may be on the way, unread by
    the peer."""

    kind = "sim"
    other_end: SimLink

    def __init__(self, peer: str, network: Network, delay_s: Callable[[], float], pipe_bytes: int) -> None:
        super().__init__(peer)
        self.on_ready: Callable[[], None] = lambda: None
        self._network, self._delay_s, self._pipe_bytes = network, delay_s, pipe_bytes
        self._peer_messages: dict[int, Array] = {}  # messages that are sent and not credited, by slot
        self._mapped = False  # this end uses the slots of the peer, as with shared memory
        self._output: deque[Event] = deque()
        self._in_pipe = 0
        self._last_arrival = 0.0
        self._severed = False

    def map_slots(self) -> None:
        """Use the slots that the other end has attached. This takes the place of `attach`."""
        self._mapped = True
        self.attach(self.other_end.receive_slots, self.other_end.send_slots)

    @property
    def shares_memory(self) -> bool:
        return self._mapped or self.other_end._mapped

    @property
    def readable(self) -> bool:
        """Whether a selector would find this end readable."""
        return self._lost or bool(self._waiting_events)

    @property
    def writable(self) -> bool:
        """Whether a selector would find this end writable."""
        return self._has_room(wire_bytes(self._output[0]) if self._output else FRAME_BYTES)

    @property
    def wants_write(self) -> bool:
        return bool(self._output) and not self._lost

    # output

    def _send(self, slot: int, nbytes: int) -> None:
        self._peer_messages.pop(slot, None)
        super()._send(slot, nbytes)

    def _send_message(self, slot: int, message: Array) -> None:
        super()._send(slot, message.size)
        self._peer_messages[slot] = message

    def send_twice(self, slot: int, nbytes: int) -> None:
        """Break the protocol: send a slot that is still under way once more."""
        copy = CopiedMessage(slot, nbytes)
        copy.message = self.send_slots[slot, :nbytes].copy()
        self._output.append(copy)

    def _return_credit(self, slot: int) -> None:
        if not self._mapped:  # other ranks may still read a mapped slot
            self.receive_slots[slot] = POISON
        super()._return_credit(slot)

    def _put(self, event: Event) -> None:
        self.counters.sent_bytes += wire_bytes(event)
        self._output.append(event)
        if isinstance(event, Control):
            self.flush()

    def _has_room(self, nbytes: int) -> bool:
        return self._in_pipe == 0 or self._in_pipe + nbytes <= self._pipe_bytes

    def flush(self, max_bytes: int = EVERYTHING) -> None:
        if self._lost or self._severed:
            self._output.clear()
        while max_bytes > 0 and self._output and self._has_room(wire_bytes(self._output[0])):
            event = self._output.popleft()
            nbytes = wire_bytes(event)
            max_bytes -= nbytes
            self._in_pipe += nbytes
            self._deliver_later(event)

    def _deliver_later(self, event: Event) -> None:
        """Let `event` arrive after all events that were sent before."""
        self._last_arrival = max(self._network.now() + self._delay_s(), self._last_arrival)
        self._network.at(self._last_arrival, lambda: None if self._severed else self.other_end.deliver(event))

    # input

    def deliver(self, event: Event) -> None:
        if not self._lost:
            super().deliver(event)
            self.on_ready()

    def poll(self) -> Sequence[Event]:
        events = super().poll()
        for event in events:
            if isinstance(event, Received) and not self.shares_memory:
                self.receive_slots[event.slot, : event.nbytes] = self._bytes_of(event)
            self.other_end._read_by_peer(wire_bytes(event))
        return events

    def _bytes_of(self, event: Received) -> Array:
        if isinstance(event, CopiedMessage):
            return event.message
        message: Array = self.other_end._peer_messages.get(event.slot, self.other_end.send_slots[event.slot])
        return message[: event.nbytes]

    def _read_by_peer(self, nbytes: int) -> None:
        self._in_pipe -= nbytes
        if self.wants_write:
            self.on_ready()

    # ends

    def close(self) -> None:
        if not self._closed:
            self._lost = self._closed = True
            self._output.clear()
            self._deliver_later(Lost("connection closed"))

    def sever(self, notice_s: float, peer_notice_s: float) -> None:
        """Cut the network between the ends; each end hears of it after its notice, in seconds."""
        self._sever_end(notice_s)
        self.other_end._sever_end(peer_notice_s)

    def _sever_end(self, notice_s: float) -> None:
        self._severed = True
        self._network.at(self._network.now() + notice_s, lambda: self.deliver(Lost("connection broken")))


def sim_pair(
    left: str, right: str, network: Network, delay_s: Callable[[], float], pipe_bytes: int = 1 << 20
) -> tuple[SimLink, SimLink]:
    """Two joined ends; `left` is the name under which the first end knows its peer."""
    first, second = (SimLink(peer, network, delay_s, pipe_bytes) for peer in (left, right))
    first.other_end, second.other_end = second, first
    return first, second
