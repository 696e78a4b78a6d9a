"""The framing that shm and tcp share: bytes that no honest peer sends, and bytes that come in pieces."""

from __future__ import annotations

import random
import select
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from certificates import OPENSSL
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.transport.base import Control, Credited, Event, Lost, Received
from omnireduce.transport.framing import BYTES_PER_POLL, CONTROL, CONTROL_LIMIT, CREDIT, DATA, FRAME, StreamLink
from omnireduce.transport.shm import ShmLink
from omnireduce.transport.slot_memory import private_slots
from omnireduce.transport.tcp import TcpLink, connect_tcp, listen_tcp

from .pairs import SLOT_BYTES, SLOTS, StreamPair, accept, tcp_ends, tls_ends

KINDS = (DATA, CREDIT, CONTROL)


@pytest.mark.parametrize(
    "garbage",
    [
        FRAME.pack(0, 0, 0),
        FRAME.pack(4, 0, 0),
        b"\xff" * 8,
        FRAME.pack(CONTROL, 0, CONTROL_LIMIT + 1),
        FRAME.pack(CONTROL, 0, 2**32 - 1),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_garbage_is_a_violation(streams: StreamPair, garbage: bytes) -> None:
    streams.write_raw(streams.left, FRAME.pack(CONTROL, 0, 5) + b"hello" + garbage)
    hello, lost = streams.collect(streams.left, 2)
    assert hello == Control(b"hello")
    assert isinstance(lost, Lost)
    assert lost.violation
    streams.write_raw(streams.left, FRAME.pack(CONTROL, 0, 0))
    assert streams.left.poll() == []


def test_who_has_broken_the_rules_can_still_be_told(streams: StreamPair) -> None:
    """And what was sent before gets there first; whoever is gone is not written to any more."""
    streams.left.send_control(b"before")
    streams.write_raw(streams.left, b"\xff" * 8)
    [lost] = streams.collect(streams.left, 1)
    assert isinstance(lost, Lost)
    assert streams.left.over
    streams.left.send_control(b"after")
    assert not streams.left.wants_write
    streams.left.close()
    streams.left.send_control(b"too late")
    *events, end = streams.collect(streams.right, 3)
    assert events == [Control(b"before"), Control(b"after")]
    assert isinstance(end, Lost)
    streams.right.send_control(b"to nobody")
    assert not streams.right.wants_write


def test_the_longest_control_message_passes_and_a_longer_one_is_our_own_mistake(streams: StreamPair) -> None:
    longest = random.Random(3).randbytes(CONTROL_LIMIT)
    for _ in range(3):
        streams.right.send_control(longest)
    assert streams.collect(streams.left, 3) == [Control(longest)] * 3
    with pytest.raises(AssertionError, match="control message"):
        streams.right.send_control(longest + b"x")


def test_before_slots_are_attached_only_control_messages_may_come() -> None:
    with listen_tcp("127.0.0.1", 0) as listener:
        right = connect_tcp("127.0.0.1", listener.getsockname()[1], 10, 4)
        left = TcpLink(accept(listener), "right", 4)
    right._sock.sendall(FRAME.pack(CONTROL, 0, 2) + b"ok" + FRAME.pack(DATA, 0, 8))
    events: list[Event] = []
    while len(events) < 2:
        select_read(left)
        events += left.poll()
    assert events[0] == Control(b"ok")
    assert isinstance(events[1], Lost)
    assert events[1].violation
    left.close()
    right.close()


def _next(link: StreamLink, sender: StreamLink) -> Event:
    while not (result := link.poll()):
        sender.flush()
        select_read(link)
    [event] = result
    return event


def test_the_bound_of_control_messages_holds_until_slots_are_attached() -> None:
    longest = random.Random(5).randbytes(CONTROL_LIMIT)
    for attached in (False, True):
        left, right = tcp_ends()
        left.bound_control(100)
        right.send_control(longest[:100])
        assert _next(left, right) == Control(longest[:100])
        if attached:
            left.attach(private_slots(SLOTS, SLOT_BYTES), private_slots(SLOTS, SLOT_BYTES))
        right.send_control(longest)
        reason = f"not a frame of this protocol: kind 3, length {CONTROL_LIMIT}; expected at most 100 bytes"
        assert _next(left, right) == (Control(longest) if attached else Lost(reason, violation=True))
        left.close()
        right.close()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "it looks like HTTP"),
        (b"OPTIONS * HTTP/1.1\r\n", "it looks like HTTP"),
        (b"HTTP/1.1 200 OK\r\n", "it looks like HTTP"),
        (b"PRI * HTTP/2.0\r\n", "it looks like HTTP/2"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it looks like SSH"),
        (b"PROXY TCP4 10.0.0.1", "it looks like the PROXY protocol of a load balancer"),
        (b"\r\n\r\n\x00\r\nQUIT\n", "it looks like the PROXY protocol of a load balancer"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "it looks like TLS; give both ends TLS or none"),
        (b"\x15\x03\x03\x00\x02\x02\x28\x00", "it looks like TLS; give both ends TLS or none"),
        (b"\x16\x04\x01\x02\x00\x01\x00\x01", "kind 22, length "),
        (b"GETS / HTTP", "kind 71, length "),
    ],
)
def test_another_protocol_is_called_by_its_name(data: bytes, expected: str) -> None:
    left, right = tcp_ends()
    right._sock.sendall(data)
    event = _next(left, right)
    assert isinstance(event, Lost)
    assert event.violation
    assert event.reason.startswith(f"not a frame of this protocol: {expected}")
    left.close()
    right.close()


def test_who_connects_reads_the_longest_message_before_slots_are_attached() -> None:
    """A welcome is short, an aggregator's status need not be."""
    longest = random.Random(7).randbytes(CONTROL_LIMIT)
    left, right = tcp_ends()
    for body in (b"short", longest, longest[::-1], b"short"):
        left.send_control(body)
        assert _next(right, left) == Control(body)
    left.close()
    right.close()


def select_read(link: StreamLink) -> None:
    link._sock.setblocking(True)
    link._sock.settimeout(20)
    link._sock.recv(1, socket.MSG_PEEK)
    link._sock.setblocking(False)


@pytest.mark.parametrize("join", [tcp_ends, *([tls_ends] if OPENSSL else [])])
def test_one_poll_takes_a_bounded_part_of_long_messages(join: Callable[[], tuple[TcpLink, TcpLink]]) -> None:
    """However fast the peer sends: it does so at the same time, and the system holds much."""
    left, right = join()
    slots, slot_bytes = 2, 48 << 20
    for end in (left, right):
        end.attach(*(np.zeros((slots, slot_bytes), np.uint8) for _ in range(2)))
        end._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    right.send_slots[:] = 7
    for slot in range(slots):
        right.send(slot, slot_bytes)

    def send() -> None:
        while right.wants_write:
            select.select([], [right], [], 20)
            right.flush()

    right.flush()
    events: list[Event] = []
    with ThreadPoolExecutor(1) as sender:
        sent = sender.submit(send)
        while len(events) < slots:
            before = left.counters.received_bytes
            assert select.select([left], [], [], 20)[0]
            events += left.poll()
            assert left.counters.received_bytes - before <= BYTES_PER_POLL
        sent.result()
    assert events == [Received(slot, slot_bytes) for slot in range(slots)]
    assert (left.receive_slots == 7).all()
    left.close()
    right.close()


class InlineLink(StreamLink):
    """A link that treats bytes as tcp does, over a socket pair."""

    kind = "inline"
    inline = True


@contextmanager
def wired(inline: bool) -> Iterator[tuple[StreamLink, socket.socket]]:
    """A link, and the plain socket that is its peer."""
    ours, peer = socket.socketpair()
    link: StreamLink = InlineLink(ours, "peer") if inline else ShmLink(ours, "peer")
    link.attach(private_slots(SLOTS, SLOT_BYTES), private_slots(SLOTS, SLOT_BYTES))
    with peer:
        yield link, peer
    link.close()


frames = st.builds(
    FRAME.pack,
    st.sampled_from([0, *KINDS, 255]),
    st.integers(0, SLOTS + 1),
    st.sampled_from([0, 1, 60, SLOT_BYTES, SLOT_BYTES + 1, 2**31]),
)
noise = st.lists(st.one_of(frames, st.binary(max_size=200)), max_size=8).map(b"".join)


@pytest.mark.parametrize("inline", [True, False])
def test_a_peer_that_sends_but_never_reads_is_lost_before_it_costs_much_memory(inline: bool) -> None:
    """It ignores that the credits for its messages are still on their way to it."""
    turn = b"".join(FRAME.pack(DATA, slot, 0) for slot in range(SLOTS))
    with wired(inline) as (link, peer):
        events: list[Event] = []
        largest = 0
        while not link.over:
            peer.sendall(turn)
            events = list(link.poll())
            for event in events:
                if isinstance(event, Received):
                    link.return_credit(event.slot)
            link.flush()
            largest = max(largest, len(link._output))
        assert events == [Lost("it sends, but does not read", violation=True)]
        assert largest < 20


@pytest.mark.parametrize("inline", [True, False])
def test_a_peer_that_gives_credit_for_what_it_has_not_read_is_lost(inline: bool) -> None:
    with wired(inline) as (link, peer):
        events: list[Event] = []
        while not link.over:
            link.send(0, SLOT_BYTES)
            link.flush()
            peer.sendall(FRAME.pack(CREDIT, 0, 0))
            events = list(link.poll())
        assert events == [Lost("it sends, but does not read", violation=True)]


@pytest.mark.parametrize("inline", [True, False])
@given(data=noise, cuts=st.lists(st.integers(1, 50), max_size=10))
def test_no_bytes_raise_and_a_loss_comes_last(inline: bool, data: bytes, cuts: list[int]) -> None:
    events: list[Event] = []
    with wired(inline) as (link, peer):
        at = 0
        for cut in [*cuts, len(data)]:
            peer.sendall(data[at : at + cut])
            at += cut
            events += link.poll()
        peer.close()
        for _ in range(10):
            events += link.poll()
    assert [isinstance(event, Lost) for event in events] == [False] * (len(events) - 1) + [True]
    held = [event.slot for event in events if isinstance(event, Received)]
    assert len(set(held)) == len(held)
    assert all(slot < SLOTS for slot in held)


@pytest.mark.parametrize("inline", [True, False])
@given(what=st.lists(st.sampled_from(["data", "control"]), max_size=6), piece=st.integers(1, 1000), seed=st.integers(0))
def test_pieces_of_any_size_make_the_same_events(inline: bool, what: list[str], piece: int, seed: int) -> None:
    rng = random.Random(seed)
    stream, expected, bodies = b"", list[Event](), dict[int, bytes]()
    for kind in what:
        body = rng.randbytes(rng.randrange(300))
        if kind == "control":
            stream += FRAME.pack(CONTROL, 0, len(body)) + body
            expected.append(Control(body))
        elif len(bodies) < SLOTS:
            stream += FRAME.pack(DATA, len(bodies), len(body)) + (body if inline else b"")
            expected.append(Received(len(bodies), len(body)))
            bodies[len(bodies)] = body
    with wired(inline) as (link, peer):
        link.send(1, 8)
        stream += FRAME.pack(CREDIT, 1, 0)
        events: list[Event] = []
        for at in range(0, len(stream), piece):
            peer.sendall(stream[at : at + piece])
            events += link.poll()
        assert events == [*expected, Credited(1)]
        if inline:
            assert all(bytes(link.receive_slots[slot, : len(body)]) == body for slot, body in bodies.items())


def test_the_frame_is_eight_bytes() -> None:
    assert FRAME.size == 8
    assert FRAME.pack(CREDIT, 3, 0) == struct.pack("<BxHI", 2, 3, 0)
