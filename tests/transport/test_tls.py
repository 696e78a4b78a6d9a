"""Links by TLS alone: bounded work for peers that keep the rules of TLS, and one clear word for the others."""

from __future__ import annotations

import random
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from certificates import certificates, needs_openssl
from tls_client import KEY_UPDATE_WITH_ANSWER, TlsClient, needs_libssl

from omnireduce.support.config import load_config
from omnireduce.transport.base import Control, Event, Lost
from omnireduce.transport.framing import CONTROL, FIRST_BYTES, FRAME
from omnireduce.transport.slot_memory import private_slots
from omnireduce.transport.tcp import listen_tcp
from omnireduce.transport.tls import (
    ANSWER_BYTES,
    EMPTY_RECORDS,
    HANDSHAKE_RECORDS,
    RECORDS_PER_POLL,
    STRANGER_WIRE_BYTES,
    accept_tls,
    aggregator_context,
    connect_tls,
    worker_context,
)

from .pairs import SLOT_BYTES, SLOTS, WAIT_S, TlsPair, accept, wait_for

pytestmark = [needs_openssl, needs_libssl]
FIRST = FRAME.pack(CONTROL, 0, 5) + b"hello"
NO_DATA = Lost(f"{EMPTY_RECORDS + 1} TLS records in a row without data", violation=True)


class Guest:
    """An aggregator's end, and who connects to it: a plain socket, and what makes records for it."""

    def __init__(self, *overrides: str, aside: bool = False, admitted: bool = True) -> None:
        security = load_config(overrides=[*certificates().holder("aggregator"), *overrides], environ={}).security
        context = aggregator_context(security)
        assert context is not None
        with listen_tcp("127.0.0.1", 0) as listener:
            self.sock = socket.create_connection(listener.getsockname())
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.link = accept_tls(accept(listener), "guest", 60, context, uses_tasks=aside)
        if admitted:
            self.link.attach(private_slots(SLOTS, SLOT_BYTES), private_slots(SLOTS, SLOT_BYTES))
        self.client = TlsClient()

    def close(self) -> None:
        self.link.close()
        self.sock.close()
        self.client.close()

    def polled(self) -> list[Event]:
        wait_for([self.link], 10)
        return list(self.link.poll())

    def first_flight(self) -> None:
        """Up to where the client has to answer the aggregator."""
        self.sock.sendall(self.client.hear(b""))
        assert self.polled() == []

    def join(self) -> None:
        self.first_flight()
        self.sock.sendall(self.client.hear(self.sock.recv(65536)))
        assert self.polled() == []
        assert self.link.established

    def says(self, data: bytes) -> list[Event]:
        """Events of a single poll after `data` has come."""
        self.sock.sendall(data)
        return self.polled()


def test_a_handshake_goes_on_when_its_task_is_done() -> None:
    with closing(Guest(aside=True)) as guest:
        guest.sock.sendall(guest.client.hear(b""))
        steps = 0
        while not guest.link.established:
            assert guest.polled() == []
            while (task := guest.link.task) is not None:
                assert guest.link.poll() == []  # nobody else touches it meanwhile
                guest.link.flush()
                assert not guest.link.wants_write
                task()
                steps += 1
                assert guest.link.poll() == []
            if steps == 1:
                guest.sock.sendall(guest.client.hear(guest.sock.recv(65536)))
        assert steps > 1


def test_a_handshake_that_nobody_answers_may_be_tried_again() -> None:
    """It is a time-out of the system, as when nobody can be reached."""
    context = worker_context(load_config(overrides=[certificates().trust()], environ={}).security)
    assert context is not None
    with listen_tcp("127.0.0.1", 0) as listener, pytest.raises(TimeoutError, match="nobody answered its TLS"):
        connect_tls("127.0.0.1", listener.getsockname()[1], 0.1, 10.0, context)


@pytest.mark.parametrize("reset", [False, True])
def test_a_handshake_in_which_the_aggregator_hangs_up_may_be_tried_again(reset: bool) -> None:
    """It says nothing about the aggregator's certificate."""
    context = worker_context(load_config(overrides=[certificates().trust()], environ={}).security)
    assert context is not None
    with listen_tcp("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as other:
        listener.setblocking(True)

        def hang_up() -> None:
            sock, _ = listener.accept()
            assert sock.recv(1 << 16)
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

        future = other.submit(hang_up)
        with pytest.raises(ConnectionResetError) as caught:
            connect_tls("127.0.0.1", listener.getsockname()[1], WAIT_S, 10.0, context)
        future.result()
    why = "connection broken: Connection reset by peer" if reset else "connection closed"
    assert caught.value.strerror == f"{why} in the TLS handshake; does it use TLS (security.tls_certificate there)?"


@pytest.mark.parametrize("reset", [False, True])
def test_nobody_signs_for_a_peer_that_has_gone(reset: bool) -> None:
    with closing(Guest(aside=True)) as guest:
        guest.sock.sendall(guest.client.hear(b""))
        assert guest.polled() == []
        task = guest.link.task
        assert task is not None
        if reset:
            guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        guest.sock.close()
        wait_for([guest.link], 10)
        task()
        assert guest.link._outgoing.pending == 0
        [lost] = guest.link.poll()
        assert lost == Lost("connection broken: Connection reset by peer" if reset else "connection closed")


@pytest.mark.parametrize("aside", [False, True])
def test_garbage_ends_a_handshake(aside: bool) -> None:
    with closing(Guest(aside=aside)) as guest:
        guest.sock.sendall(b"\x16\x03\x01\x00\x10" + bytes(16))
        events = guest.polled()
        if guest.link.task is not None:
            guest.link.task()
            events += guest.link.poll()
        [lost] = events
        assert isinstance(lost, Lost)
        assert lost.violation


@pytest.fixture
def guest() -> Iterator[Guest]:
    result = Guest()
    yield result
    result.close()


def test_a_corrupt_record_is_told_at_once_and_answered(guest: Guest) -> None:
    guest.join()
    (lost,) = guest.says(b"\x17\x03\x03\x00\x20" + b"\xee" * 32)
    assert isinstance(lost, Lost)
    assert lost.violation
    assert lost.reason.startswith("no TLS: [SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC]")
    assert guest.sock.recv(100)[0] == 0x17  # an alert, encrypted as everything is


def test_an_alert_is_the_words_of_the_peer_not_its_fault() -> None:
    pair = TlsPair()
    pair.right._sock.sendall(b"\x17\x03\x03\x00\x20" + b"\xee" * 32)
    pair.collect(pair.left, 1)
    (lost,) = pair.collect(pair.right, 1)
    pair.close()
    assert isinstance(lost, Lost)
    assert lost.reason.startswith("connection broken: [SSL: SSLV3_ALERT_BAD_RECORD_MAC]")
    assert not lost.violation
    assert lost.refused


def test_a_reset_is_no_close(guest: Guest) -> None:
    guest.join()
    guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    guest.sock.close()
    assert guest.polled() == [Lost("connection broken: Connection reset by peer")]


def test_the_end_is_a_close(guest: Guest) -> None:
    guest.join()
    guest.sock.sendall(guest.client.data(FIRST))
    guest.sock.shutdown(socket.SHUT_WR)
    events = guest.polled()
    while not guest.link.over:
        events += guest.polled()
    assert events == [Control(b"hello"), Lost("connection closed")]


def test_a_few_new_keys_are_allowed_a_stream_of_them_is_not(guest: Guest) -> None:
    guest.join()
    for kind in (0, KEY_UPDATE_WITH_ANSWER):
        keys = guest.client.key_updates(EMPTY_RECORDS, kind)
        assert guest.says(keys + guest.client.data(FIRST)) == [Control(b"hello")]
    guest.link.send_control(b"with new keys")
    assert guest.sock.recv(65536)
    assert guest.says(guest.client.key_updates(5000)) == [NO_DATA]


def test_records_without_data_count_as_well_one_by_one(guest: Guest) -> None:
    guest.join()
    for _ in range(EMPTY_RECORDS):
        assert guest.says(guest.client.key_updates(1)) == []
    assert guest.says(guest.client.key_updates(1)) == [NO_DATA]


def test_answers_that_the_peer_asks_for_and_does_not_read_are_bounded(guest: Guest) -> None:
    guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    guest.link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    guest.join()
    client, events = guest.client, list[Event]()
    turn = EMPTY_RECORDS, KEY_UPDATE_WITH_ANSWER
    guest.sock.sendall(b"".join(client.key_updates(*turn) + client.data(FIRST) for _ in range(800)))
    while not guest.link.over:
        assert guest.link._outgoing.pending < 2 * ANSWER_BYTES
        events = guest.polled()
    assert events == [Lost("it sends, but does not read", violation=True)]


def test_one_poll_takes_few_records_and_what_it_leaves_is_told_of(guest: Guest) -> None:
    guest.join()
    rng = random.Random(4)
    sent = b"".join(guest.client.data(FRAME.pack(CONTROL, 0, 4) + b"%4d" % number) for number in range(1000))
    guest.sock.sendall(sent[:-9])  # the last one is not whole
    events: list[Event] = []
    while len(events) < 999:
        result = guest.polled()
        assert 0 < len(result) <= RECORDS_PER_POLL
        events += result
    assert guest.link.poll() == []
    for byte in sent[-9:]:
        events += guest.says(bytes([byte]))
    assert events == [Control(b"%4d" % number) for number in range(1000)]
    rest = guest.client.data(FIRST * 1500) + guest.client.data(FIRST)
    while rest:
        cut = rng.randrange(1, 9000)
        events += guest.says(rest[:cut])
        rest = rest[cut:]
    while len(events) < 2501:
        events += guest.polled()
    assert events[1000:] == [Control(b"hello")] * 1501


def test_a_handshake_in_single_bytes(guest: Guest) -> None:
    for byte in guest.client.hear(b""):
        assert guest.says(bytes([byte])) == []
    for byte in guest.client.hear(guest.sock.recv(65536)):
        assert guest.says(bytes([byte])) == []
    assert guest.says(guest.client.data(FIRST)) == [Control(b"hello")]


def test_a_handshake_in_too_many_records(guest: Guest) -> None:
    hello = guest.client.hear(b"")
    cut = [hello[:5]] + [b"\x16\x03\x01\x00\x01" + hello[at : at + 1] for at in range(5, 5 + HANDSHAKE_RECORDS + 1)]
    events = guest.says(b"".join(cut[1:]))
    while not events:
        events = guest.polled()
    assert events == [Lost(f"no TLS: a handshake of more than {HANDSHAKE_RECORDS} records", violation=True)]


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "it looks like HTTP"),
        (b"PROXY TCP4 10.0.0.1", "it looks like the PROXY protocol of a load balancer"),
        (FIRST, "it looks like a worker without TLS (security.tls_ca)"),
        (b"\x16\x03\x01\xff\xff", "it looks like TLS, with a record of 65535 bytes"),
        (b"\x17\x04\x03\x00\x05hello", r"it sent b'\x17\x04\x03\x00\x05'"),
    ],
)
def test_what_is_no_tls_is_told_at_once(guest: Guest, noise: bytes, message: str) -> None:
    assert guest.says(noise) == [Lost(f"no TLS: {message}", violation=True)]


def test_without_a_certificate_nothing_is_looked_at() -> None:
    """The client thinks that the handshake is over, and sends a message with its last words of it."""
    guest = Guest(certificates().trust())
    guest.first_flight()
    finished = guest.client.hear(guest.sock.recv(65536))
    assert guest.client.established
    events = guest.says(finished + guest.client.data(FIRST) * 3)
    guest.close()
    assert len(events) == 1
    assert isinstance(events[0], Lost)
    assert events[0].violation
    assert events[0].reason.startswith("no TLS: [SSL: PEER_DID_NOT_RETURN_A_CERTIFICATE]")
    assert guest.link.counters.received_bytes == 0


def test_who_is_not_admitted_takes_little_memory() -> None:
    """Hundreds of strangers may complete their handshakes and stay."""
    tracemalloc.start()
    try:
        with closing(Guest(admitted=False)) as guest:
            guest.join()
            assert guest.says(guest.client.data(FIRST)) == [Control(b"hello", 0)]
            taken = sum(trace.size for trace in tracemalloc.take_snapshot().traces if trace.size > 4096)
    finally:
        tracemalloc.stop()
    assert taken <= STRANGER_WIRE_BYTES + FIRST_BYTES + 1000
