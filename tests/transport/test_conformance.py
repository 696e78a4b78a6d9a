"""The promises of every link, of any kind: see `omnireduce.transport.base`."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from omnireduce.transport.base import Control, Credited, Event, Link, Lost, Received
from omnireduce.transport.framing import EVENTS_PER_POLL, FRAME
from omnireduce.transport.tls import RECORD_LIMIT

from .pairs import SLOT_BYTES, SLOTS, Pair

CONTROL_BODY = 65000


def fill(link: Link, slot: int, nbytes: int, seed: int) -> bytes:
    """Put `nbytes` random bytes into a send slot."""
    data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    link.send_slots[slot, :nbytes] = data
    return data.tobytes()


def content(link: Link, event: Event) -> bytes:
    assert isinstance(event, Received)
    return link.receive_slots[event.slot, : event.nbytes].tobytes()


def directions(pair: Pair) -> list[tuple[Link, Link]]:
    return [(pair.left, pair.right), (pair.right, pair.left)]


def test_a_message_arrives_whole_whatever_its_length(pair: Pair) -> None:
    rng = random.Random(1)
    lengths = [0, 1, 8, 63, 64, SLOT_BYTES - 1, SLOT_BYTES, *(rng.randrange(SLOT_BYTES) for _ in range(20))]
    for number, (sender, receiver) in enumerate(directions(pair)):
        for seed, nbytes in enumerate(lengths):
            slot = seed % SLOTS
            sent = fill(sender, slot, nbytes, seed)
            sender.send(slot, nbytes)
            (event,) = pair.collect(receiver, 1)
            assert event == Received(slot, nbytes)
            assert content(receiver, event) == sent
            receiver.return_credit(slot)
            assert pair.collect(sender, 1) == [Credited(slot)]
        for end in (sender, receiver):
            assert end.counters.message_bytes == (number + 1) * sum(lengths)


def test_other_memory_arrives_like_a_slot_where_messages_travel_as_bytes(pair: Pair) -> None:
    message = np.random.default_rng(1).integers(0, 256, SLOT_BYTES // 2, np.uint8)
    for sender, receiver in directions(pair):
        if not sender.inline:
            with pytest.raises(AssertionError, match="sends slots"):
                sender.send(1, 8, message)
            continue
        kept = fill(sender, 1, SLOT_BYTES, 2)
        sender.send(1, SLOT_BYTES, message)
        (event,) = pair.collect(receiver, 1)
        assert event == Received(1, message.size)
        assert content(receiver, event) == message.tobytes()
        assert sender.send_slots[1, :SLOT_BYTES].tobytes() == kept
        receiver.return_credit(1)
        assert pair.collect(sender, 1) == [Credited(1)]
        fill(sender, 1, 8, 3)
        sender.send(1, 8)
        (event,) = pair.collect(receiver, 1)
        assert event == Received(1, 8)


def test_a_control_message_arrives_whole_whatever_its_length(pair: Pair) -> None:
    bodies = [b"", b"x", bytes(range(256)), b"y" * CONTROL_BODY]
    for sender, receiver in directions(pair):
        for body in bodies:
            sender.send_control(body)
        assert pair.collect(receiver, len(bodies)) == [Control(body) for body in bodies]


class Endpoint:
    """One end in a long exchange: sends and returns credits at random, and notes what it sent and received."""

    def __init__(self, link: Link, seed: int) -> None:
        self.link, self.rng = link, random.Random(seed)
        self.free, self.held = set(range(SLOTS)), list[int]()
        self.sent, self.received = list[bytes](), list[bytes]()
        self.seeds = itertools.count(seed * 1_000_000)

    def act(self) -> None:
        if self.free and self.rng.random() < 0.6:
            slot = self.rng.choice(sorted(self.free))
            self.free.remove(slot)
            nbytes = self.rng.choice([1, 100, self.rng.randrange(SLOT_BYTES)])
            self.sent.append(fill(self.link, slot, nbytes, next(self.seeds)))
            self.link.send(slot, nbytes)
        elif self.rng.random() < 0.5:
            body = b"control" * self.rng.randrange(20)
            self.sent.append(body)
            self.link.send_control(body)
        elif self.held:
            self.give_back(self.rng.randrange(len(self.held)))

    def give_back(self, which: int) -> None:
        self.link.return_credit(self.held.pop(which))

    def take(self) -> None:
        self.link.flush()
        for event in self.link.poll():
            if isinstance(event, Received):
                self.received.append(content(self.link, event))
                self.held.append(event.slot)
            elif isinstance(event, Control):
                self.received.append(event.body)
            else:
                assert isinstance(event, Credited)
                self.free.add(event.slot)


def test_messages_and_control_messages_keep_their_common_order(pair: Pair) -> None:
    one, two = Endpoint(pair.left, 1), Endpoint(pair.right, 2)
    for _ in range(600):
        one.act()
        two.act()
        if one.rng.random() < 0.3:
            one.take()
        if two.rng.random() < 0.3:
            two.take()

    def everything_is_back() -> bool:
        for end in (one, two):
            end.take()
            while end.held:
                end.give_back(0)
            end.link.flush()
        arrived = len(one.received) == len(two.sent) and len(two.received) == len(one.sent)
        return arrived and len(one.free) == len(two.free) == SLOTS

    pair.repeat(everything_is_back)
    assert one.received == two.sent
    assert two.received == one.sent
    assert one.link.counters.sent_bytes == two.link.counters.received_bytes >= sum(map(len, one.sent))
    assert two.link.counters.sent_bytes == one.link.counters.received_bytes >= sum(map(len, two.sent))


def test_sending_a_slot_twice_is_our_own_mistake(pair: Pair) -> None:
    pair.left.send(1, 8)
    with pytest.raises(AssertionError, match="slot 1 was sent twice"):
        pair.left.send(1, 8)
    pair.collect(pair.right, 1)
    with pytest.raises(AssertionError, match="slot 1 was sent twice"):
        pair.left.send(1, 8)
    pair.right.return_credit(1)
    pair.collect(pair.left, 1)
    pair.left.send(1, 8)


def test_a_credit_can_be_returned_once(pair: Pair) -> None:
    pair.left.send(1, 8)
    pair.collect(pair.right, 1)
    pair.right.return_credit(1)
    with pytest.raises(KeyError):
        pair.right.return_credit(1)


def ends_with_violation(pair: Pair, link: Link, *before: Event) -> None:
    """`link` reports `before`, then a violation, then nothing more, although more arrives."""
    *first, last = pair.collect(link, len(before) + 1)
    assert first == list(before)
    assert isinstance(last, Lost)
    assert last.violation
    assert link.over
    assert link.poll() == []
    link.flush()
    assert not link.wants_write


@pytest.mark.parametrize(
    "event",
    [Received(SLOTS, 8), Received(65535, 8), Received(0, SLOT_BYTES + 1), Credited(0), Credited(SLOTS)],
    ids=["slot out of range", "slot far out", "longer than a slot", "credit not due", "credit for no slot"],
)
def test_a_peer_that_breaks_the_rules_is_lost(pair: Pair, event: Received | Credited) -> None:
    for sender, receiver in directions(pair):
        sender.send_control(b"before")
        pair.collect(receiver, 1)
        pair.forge(receiver, event)
        pair.forge(receiver, Received(1, 0))
        ends_with_violation(pair, receiver)
        break


def test_a_second_message_without_a_credit_is_a_violation(pair: Pair) -> None:
    pair.right.send(2, 8)
    pair.collect(pair.left, 1)
    pair.forge(pair.left, Received(2, 8))
    ends_with_violation(pair, pair.left)


def test_a_second_credit_for_one_message_is_a_violation(pair: Pair) -> None:
    pair.right.send(2, 8)
    pair.collect(pair.left, 1)
    pair.left.return_credit(2)
    pair.collect(pair.right, 1)
    pair.forge(pair.right, Credited(2))
    ends_with_violation(pair, pair.right)


def test_what_came_before_a_violation_is_still_reported(pair: Pair) -> None:
    pair.right.send_control(b"hello")
    pair.right.send(0, 8)
    pair.right.flush()
    pair.forge(pair.left, Credited(3))
    ends_with_violation(pair, pair.left, Control(b"hello"), Received(0, 8))


def test_who_broke_the_rules_sees_the_link_end(pair: Pair) -> None:
    pair.forge(pair.left, Credited(0))
    ends_with_violation(pair, pair.left)
    pair.left.close()
    (event,) = pair.collect(pair.right, 1)
    assert isinstance(event, Lost)
    assert not event.violation


def clog(link: Link) -> list[bytes]:
    """Send control messages until the pipe takes no more and, beyond that, what may wait; return their bodies."""
    bodies: list[bytes] = []
    waiting = 0
    while len(bodies) < 200 and waiting < 10:
        bodies.append(bytes([len(bodies)]) * CONTROL_BODY)
        link.send_control(bodies[-1])
        waiting += link.wants_write
    return bodies


def test_nothing_blocks_and_nothing_is_lost_while_the_peer_does_not_read(pair: Pair) -> None:
    """Both ends send far more than any pipe takes before either reads."""
    bodies = {}
    for end in pair.ends:
        for slot in range(SLOTS):
            fill(end, slot, SLOT_BYTES, slot)
            end.send(slot, SLOT_BYTES)
        bodies[end] = clog(end)
    if pair.name != "inproc":
        assert all(end.wants_write for end in pair.ends)
    events = {end: list[Event]() for end in pair.ends}

    def read_all() -> bool:
        for end in pair.ends:
            end.flush()
            events[end] += end.poll()
        return all(len(events[receiver]) == SLOTS + len(bodies[sender]) for sender, receiver in directions(pair))

    pair.repeat(read_all)
    for sender, receiver in directions(pair):
        expected = [Received(slot, SLOT_BYTES) for slot in range(SLOTS)] + [Control(body) for body in bodies[sender]]
        assert events[receiver] == expected
        assert all(bytes(receiver.receive_slots[k]) == fill(sender, k, SLOT_BYTES, k) for k in range(SLOTS))
        assert not sender.wants_write


@pytest.mark.parametrize("limit", [1, 7, 1000, SLOT_BYTES + 1])
def test_a_flush_of_so_many_bytes_leaves_a_rest_that_is_told_of(pair: Pair, limit: int) -> None:
    sender, receiver = pair.ends
    for slot in range(SLOTS):
        fill(sender, slot, SLOT_BYTES, slot)
        sender.send(slot, SLOT_BYTES)
    sender.flush(limit)
    if pair.name in ("tcp", "tls"):
        assert sender.wants_write
    events: list[Event] = []
    flushes = itertools.count(1)

    def read_all() -> bool:
        if sender.wants_write:  # more and more at once: by TLS each byte alone would be a record
            sender.flush(limit * next(flushes))
        assert not sender.poll()  # some links go on there
        events.extend(receiver.poll())
        return len(events) == SLOTS

    pair.repeat(read_all)
    assert events == [Received(slot, SLOT_BYTES) for slot in range(SLOTS)]
    assert all(bytes(receiver.receive_slots[k]) == fill(sender, k, SLOT_BYTES, k) for k in range(SLOTS))
    assert not sender.wants_write


def test_one_poll_takes_a_bounded_amount_and_leaves_the_rest_where_it_is_told_of(pair: Pair) -> None:
    """Small messages, as many as the pipe holds, and more behind them."""
    sent = 0
    while sent < 20_000 and not pair.right.wants_write:
        for _ in range(500):
            pair.right.send_control(b"%d" % sent)
            sent += 1
    events: list[Event] = []
    if not pair.has_descriptors:  # the simulation says how much one poll takes
        pair.left.max_events = 7  # type: ignore[attr-defined]
    limit = EVENTS_PER_POLL + RECORD_LIMIT // FRAME.size

    def step() -> bool:
        pair.right.flush()
        result = pair.left.poll()
        events.extend(result)
        assert len(result) <= limit
        return len(events) == sent

    pair.repeat(step, pair.left, *([pair.right] if pair.right.wants_write else []))
    assert events == [Control(b"%d" % number) for number in range(sent)]


def test_a_slow_reader_keeps_only_its_own_link_waiting(pair: Pair) -> None:
    """Credits travel against the direction that is clogged."""
    pair.left.send(0, SLOT_BYTES)
    pair.collect(pair.right, 1)
    clog(pair.left)
    pair.right.return_credit(0)
    pair.right.flush()
    assert pair.collect(pair.left, 1) == [Credited(0)]


def test_what_was_sent_before_a_close_arrives_then_the_loss(pair: Pair) -> None:
    for closer, other in directions(pair):
        sent = fill(closer, 0, 1000, 5)
        closer.send(0, 1000)
        closer.send_control(b"goodbye")
        closer.close()
        message, control, lost = pair.collect(other, 3)
        assert content(other, message) == sent
        assert control == Control(b"goodbye")
        assert isinstance(lost, Lost)
        assert not lost.violation
        assert other.over
        assert other.poll() == []
        break


def test_using_a_link_whose_peer_is_gone_raises_nothing(pair: Pair) -> None:
    pair.right.send(3, 8)
    pair.collect(pair.left, 1)
    pair.right.close()
    for _ in range(3):
        pair.left.send_control(b"anybody there?")
        pair.left.flush()
    (event,) = pair.collect(pair.left, 1)
    assert isinstance(event, Lost)
    pair.left.send(0, 8)
    pair.left.return_credit(3)
    pair.left.send_control(b"nobody")
    pair.left.flush()
    assert not pair.left.wants_write
    assert pair.left.poll() == []


def test_close_may_be_called_twice_and_ends_this_side(pair: Pair) -> None:
    pair.left.send(0, 8)
    pair.left.close()
    pair.left.close()
    assert pair.left.over
    assert not pair.left.wants_write
    assert pair.left.poll() == []
    pair.left.send_control(b"x")
    pair.left.flush()


def test_a_descriptor_is_readable_when_there_is_news(pair: Pair) -> None:
    if not pair.has_descriptors:
        assert pair.left.fileno() == -1
        return
    pair.right.send_control(b"news")
    pair.wait([pair.left], 10)
    assert pair.left.poll() == [Control(b"news")]
