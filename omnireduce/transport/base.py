"""The interface of every transport: reliable links with send and receive slots. Nothing is sent again.

A link joins two peers. Each side owns a row of send slots and a row of receive slots; slot k of one side arrives as
slot k of the other. Theory of operation:

1. The sender fills a send slot and calls `send(k, nbytes)`. From then on the slot belongs to the link.
2. The receiver's `poll()` reports `Received(k, nbytes)`; receive slot k is the receiver's until it calls
   `return_credit(k)`.
3. The sender's `poll()` reports `Credited(k)`; slot k is the sender's again.

Messages stay in order, in each direction. Control messages share that order. Nothing blocks, and no fault of the peer
or the network raises: a link that is over reports `Lost(reason)` as its last event. A second `send` of a slot that is
under way is a bug of the caller and raises.

One `poll` has a budget of bytes and events, no matter how much the peer sends, because others wait for their turn. The
rest stays where the descriptor still shows it, so a process that waits at the descriptor does not miss it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.transport.slot_memory import Region, private_slots
from omnireduce.transport.unix_sockets import Peer

NO_SLOTS = np.zeros((0, 0), np.uint8)
EVERYTHING = 1 << 62  # bytes


class Received(NamedTuple):
    """A block message lies in receive slot `slot`."""

    slot: int
    nbytes: int


class Credited(NamedTuple):
    """The peer is done with send slot `slot`."""

    slot: int


class Control(NamedTuple):
    """A control message. `after` counts the block messages and credits that the peer sent before it by another path."""

    body: bytes
    after: int = 0


class Lost(NamedTuple):
    """The link is over; nothing follows. `violation`: the peer has broken the rules, while the network works. Then a
    last message may still reach the peer before the link is closed, if it can be sent at once. `refused`: the peer says
    that this end has broken the rules."""

    reason: str
    violation: bool = False
    refused: bool = False


Event = Received | Credited | Control | Lost


@dataclass(slots=True)
class Counters:
    """Bytes that a link put on, and took off, the wire, framing included. `message_bytes`: bytes of block messages
    alone, in both directions."""

    sent_bytes: int = 0
    received_bytes: int = 0
    message_bytes: int = 0


class Link(ABC):
    """One end of a reliable, ordered, credit-controlled path to a peer."""

    kind: str  # its name in statistics and logs
    process: Peer | None = None  # the process at the other end, if it is on this host
    inline = False  # block messages travel as bytes, so they need not lie in the send slot
    gathers = True  # output may wait until `flush`
    loss_question = ""  # a further question to a user whose aggregator hangs up

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.counters = Counters()
        self.send_slots = NO_SLOTS
        self.receive_slots = NO_SLOTS
        self._in_flight: set[int] = set()  # send slots without credit
        self._held: set[int] = set()  # receive slots that this side still reads

    def __str__(self) -> str:
        return self.kind

    @property
    def shares_memory(self) -> bool:
        """Whether both ends use the same slots."""
        return False

    @property
    def user(self) -> int | None:
        """The user of the process at the other end, if it is on this host."""
        return None if self.process is None else self.process.user

    @property
    @abstractmethod
    def over(self) -> bool:
        """The link is lost or closed: nothing can arrive any more."""

    def attach(self, send_slots: Array, receive_slots: Array) -> None:
        """Give the link its slots, each uint8 (slots, slot bytes). Before that only control messages may flow."""
        self.send_slots, self.receive_slots = send_slots, receive_slots

    def take_slots(self, position: int, slots: int, slot_bytes: int) -> None:
        """Worker side, after the Welcome: attach slots. `position`: the rank's place among those of the aggregator.
        Raises TransportError, OSError and MemoryError."""
        self.attach(private_slots(slots, slot_bytes), private_slots(slots, slot_bytes))

    def release(self) -> None:
        """Give the slots back. Control messages can still flow: they may say why."""
        self.attach(NO_SLOTS, NO_SLOTS)

    def send_welcome(self, body: bytes, up: Region, down: Region) -> None:
        """Aggregator side: send the Welcome. `up`, `down`: the memory of the upward and downward slots of all ranks."""
        self.send_control(body)

    def bound_control(self, max_bytes: int) -> None:
        """Until slots are attached, accept only control messages of at most `max_bytes` bytes."""
        return  # a link that buffers no bytes needs no bound

    def send(self, slot: int, nbytes: int, message: Array | None = None) -> None:
        """Send the first `nbytes` bytes of send slot `slot`, or all of `message` (uint8), if this link is `inline`."""
        assert slot not in self._in_flight, f"send slot {slot} was sent twice without a credit"
        assert message is None or self.inline, f"a link by {self.kind} sends slots"
        self._in_flight.add(slot)
        self.counters.message_bytes += nbytes if message is None else message.size
        if message is None:
            self._send(slot, nbytes)
        else:
            self._send_message(slot, message)

    def return_credit(self, slot: int) -> None:
        """Hand receive slot `slot` back to the peer."""
        self._held.remove(slot)
        self._return_credit(slot)

    def _check_credit(self, event: Received | Credited) -> str:
        """Check a peer's event against the credits; return the error as a text, or an empty text."""
        if isinstance(event, Received):
            if event.slot >= len(self.receive_slots) or event.slot in self._held:
                return f"message for slot {event.slot} without a credit"
            if event.nbytes > self.receive_slots.shape[1]:
                return f"message of {event.nbytes} bytes; a slot holds {self.receive_slots.shape[1]}"
            self._held.add(event.slot)
            self.counters.message_bytes += event.nbytes
        else:
            if event.slot not in self._in_flight:
                return f"credit for slot {event.slot}, which is not under way"
            self._in_flight.remove(event.slot)
        return ""

    @abstractmethod
    def _send(self, slot: int, nbytes: int) -> None: ...

    def _send_message(self, slot: int, message: Array) -> None:
        """Called only for links that are `inline`."""
        raise NotImplementedError

    @abstractmethod
    def _return_credit(self, slot: int) -> None: ...

    @abstractmethod
    def send_control(self, body: bytes) -> None:
        """Send a control message."""

    @abstractmethod
    def poll(self) -> Sequence[Event]:
        """Return the events since the last call, within the budget, without blocking."""

    @abstractmethod
    def flush(self, max_bytes: int = EVERYTHING) -> None:
        """Hand waiting output to the system, as much as it takes, up to about `max_bytes` bytes."""

    def peek(self) -> bool:
        """Whether `poll` has something to report that shows without a system call."""
        return False

    @property
    def wants_write(self) -> bool:
        """Whether output waits for the descriptor to become writable, or readable if it never becomes writable."""
        return False

    @property
    def task(self) -> Callable[[], None] | None:
        """Long work that this link waits for; None if there is none. Any thread may do it. Afterwards `poll` goes
        on."""
        return None

    @property
    def clogged(self) -> bool:
        """Whether more output waits than a peer that reads would leave."""
        return False

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to report; -1 if there is none."""

    def drop(self) -> None:
        """Close at once; the last messages may be lost."""
        self.close()

    def abandon(self) -> None:
        """In a forked child: close the parent's link without a message to the peer."""
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Release everything. The peer sees the link as lost. May be called twice."""
