"""Driver of a machine: feeds it the events of its links with the time, and carries out its effects."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from omnireduce.core.wire.control import ControlMessage, decode_control, encode_control
from omnireduce.errors import ProtocolError
from omnireduce.protocol.collective.effects import ALL, Effect, End, Finish, ReturnCredit, Send, SendControl, Wake, Warn
from omnireduce.transport.base import EVERYTHING, Control, Credited, Event, Link, Lost, Received

Clock = Callable[[], float]


class Machine(Protocol):
    """The interface of the machines of a rank and of a shard. A peer of a rank is a shard, and the other way round."""

    ended: End | None

    @property
    def deadline(self) -> float | None: ...
    def advance(self, now: float) -> Iterator[Effect]: ...
    def received(self, peer: int, slot: int, nbytes: int, now: float) -> Iterator[Effect]: ...
    def credited(self, peer: int, slot: int, now: float) -> Iterator[Effect]: ...
    def control_received(self, peer: int, message: ControlMessage, now: float) -> Iterator[Effect]: ...
    def heard(self, peer: int, now: float) -> None: ...
    def lost(self, peer: int, reason: str, now: float) -> Iterator[Effect]: ...
    def violated(self, peer: int, reason: str, now: float) -> Iterator[Effect]: ...
    def timer(self, now: float) -> Iterator[Effect]: ...


class Driver:
    """Drives `machine` over `links[peer]`. Never blocks.

    `on_finish(collective)`, `on_end(end)`, `on_warn(warning)` and `on_wake(rank)` are called as the effects come.
    """

    def __init__(
        self,
        machine: Machine,
        links: Sequence[Link],
        clock: Clock,
        *,
        on_finish: Callable[[int], None] = lambda collective: None,
        on_end: Callable[[End], None] = lambda end: None,
        on_warn: Callable[[Warn], None] = lambda warning: None,
        on_wake: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.machine, self.links = machine, links
        self._clock = clock
        self._on_finish, self._on_end, self._on_warn, self._on_wake = on_finish, on_end, on_warn, on_wake
        self.flush_bytes = EVERYTHING  # the most bytes that one flush takes from a link
        self.read_all_s = math.inf  # the time after which all links are read, not only those with news
        self.read_all_at = -math.inf

    def feed(self, peer: int) -> None:
        """Give the machine everything that has arrived from `peer`."""
        self.take(peer, self.read(peer))

    def feed_all(self, peers: Collection[int]) -> None:
        """Give the machine everything that has arrived from each of `peers`."""
        for peer in peers:
            self.feed(peer)

    def read(self, peer: int) -> Sequence[Event]:
        """The events that have come from `peer`. The machine also learns that part of a message has come."""
        counters = self.links[peer].counters
        bytes_before = counters.received_bytes
        events = self.links[peer].poll()
        if counters.received_bytes != bytes_before and not events:
            self.machine.heard(peer, self._clock())
        return events

    def take(self, peer: int, events: Sequence[Event]) -> None:
        """Give the machine these events of `peer`."""
        if events:
            now = self._clock()
            for event in events:
                self.perform(self._handle(peer, event, now))

    def push(self) -> None:
        """Let the machine advance, and hand all output to the system."""
        self.perform(self.machine.advance(self._clock()))
        self.flush()

    def flush(self) -> None:
        """Hand output to the system, up to `flush_bytes` for each link."""
        for link in self.links:
            link.flush(self.flush_bytes)

    def advance(self) -> None:
        """Push, then keep the machine's deadline."""
        self.push()
        self._keep_deadline(self._clock())

    def turn(self, peers: Collection[int] | None = None) -> None:
        """Feed from these peers (None: all), let the machine advance, and call its timer if it is due.

        If this process was stopped for a while, messages may have come that the machine does not know yet. It must not
        conclude that nothing came. So the timer is called only if the machine's deadline had passed before the turn,
        and then the turn feeds from all peers. A deadline that passes during the turn waits for the next one.

        The turn also feeds from all peers every `read_all_s`: even part of a message, which wakes nobody, shows that
        its sender lives.

        Credits gather until `flush`. A caller must call it before it waits.
        """
        now = self._clock()
        if peers is not None and now >= min(self.read_all_at, self.machine.deadline or math.inf):
            peers = None
        if peers is None:
            self.read_all_at = now + self.read_all_s
        self.feed_all(range(len(self.links)) if peers is None else peers)
        self.perform(self.machine.advance(self._clock()))
        self._keep_deadline(now)

    def _keep_deadline(self, now: float) -> None:
        deadline = self.machine.deadline
        if deadline is not None and now >= deadline:
            self.perform(self.machine.timer(now))

    def perform(self, effects: Iterable[Effect]) -> None:
        """Carry out effects in order, each as soon as the machine names it."""
        links = self.links
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, ReturnCredit):
                links[effect.peer].return_credit(effect.slot)
            elif isinstance(effect, SendControl):
                body = encode_control(effect.message)
                for link in links if effect.peer == ALL else (links[effect.peer],):
                    link.send_control(body)
            elif isinstance(effect, Finish):
                self._on_finish(effect.collective)
            elif isinstance(effect, End):
                self._on_end(effect)
            elif isinstance(effect, Warn):
                self._on_warn(effect)
            elif isinstance(effect, Wake):
                self._on_wake(effect.rank)

    def _send(self, effect: Send) -> None:
        peer_messages = effect.peer_messages
        for peer in effect.peers:
            self.links[peer].send(effect.slot, effect.nbytes, peer_messages.get(peer) if peer_messages else None)
        # A message to one peer leaves at once: the peer can merge it while the next message is packed. Messages to
        # several peers leave at the end of the turn: to wake all ranks for each result would cost more. If the bytes of
        # a turn are bounded, all messages leave at its end.
        if not effect.peers[1:] and self.flush_bytes == EVERYTHING:
            self.links[effect.peers[0]].flush()

    def _handle(self, peer: int, event: Event, now: float) -> Iterable[Effect]:
        machine = self.machine
        if isinstance(event, Received):
            return machine.received(peer, event.slot, event.nbytes, now)
        if isinstance(event, Credited):
            return machine.credited(peer, event.slot, now)
        if isinstance(event, Control):
            try:
                return machine.control_received(peer, decode_control(event.body), now)
            except ProtocolError as error:
                return machine.violated(peer, str(error), now)
        assert isinstance(event, Lost)
        end_event = machine.violated if event.violation else machine.lost
        return end_event(peer, event.reason, now)


def flush_before_close(link: Link, deadline: float) -> None:
    """Give waiting output of the link a moment to leave, until `deadline`."""
    link.flush()
    while link.wants_write and time.monotonic() < deadline:
        poller = select.poll()  # not `select`, which has a limit of 1024 descriptors
        poller.register(link, select.POLLIN | select.POLLOUT)
        poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        link.poll()  # its events are not needed any more
        link.flush()
