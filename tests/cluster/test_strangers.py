"""Connections from anybody: whatever comes in, the daemon lives and the jobs on it go on."""

from __future__ import annotations

import os
import resource
import socket
import tempfile

import msgspec
import pytest
from cluster_checks import assert_serves
from local_cluster import Daemon, open_files
from raw_peer import CONTROL, CREDIT, DATA, NOISE, RawPeer, framed

from omnireduce.core.wire.control import Leave, Refused, Welcome
from omnireduce.runtime.shard.connections import HELLO_LIMIT
from omnireduce.transport.framing import CONTROL_LIMIT, FRAME


def framed_map(fields: dict[str, object]) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return FRAME.pack(CONTROL, 0, len(body)) + body


HALF_A_HELLO = FRAME.pack(CONTROL, 0, 200) + b"\x8ctype\xa5Hello"

STRANGERS: dict[str, bytes] = {
    "nothing": b"",
    "one byte": b"\x03",
    "half a frame": FRAME.pack(CONTROL, 0, 200)[:5],
    "half a hello": HALF_A_HELLO,
    "noise": NOISE,
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + NOISE[:500],
    "an oversized control message": FRAME.pack(CONTROL, 0, CONTROL_LIMIT + 1) + NOISE,
    "a huge control message": FRAME.pack(CONTROL, 0, 2**32 - 1) + NOISE,
    "the largest of a member": FRAME.pack(CONTROL, 0, CONTROL_LIMIT) + bytes(CONTROL_LIMIT),
    "the largest of a stranger": FRAME.pack(CONTROL, 0, HELLO_LIMIT) + bytes(HELLO_LIMIT),
    "no msgpack": FRAME.pack(CONTROL, 0, 100) + NOISE[:100],
    "deep msgpack": FRAME.pack(CONTROL, 0, HELLO_LIMIT) + b"\x91" * HELLO_LIMIT,
    "an unknown type of 4,000 letters": framed_map({"type": "x" * 4000}),
    "a map that claims 2^32 entries": FRAME.pack(CONTROL, 0, 5) + b"\xdf\xff\xff\xff\xff",
    "an empty control message": FRAME.pack(CONTROL, 0, 0),
    "a welcome": framed(Welcome(1)),
    "a leave": framed(Leave()),
    "data before a hello": FRAME.pack(DATA, 0, 1000) + bytes(1000),
    "a credit before a hello": FRAME.pack(CREDIT, 3, 0),
}


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "unix"])
def test_strangers(busy: Daemon, local: bool) -> None:
    """Each sends its bytes, then is closed, is reset, or stays until the end; many are there at once."""
    staying = []
    for data in STRANGERS.values():
        for end in (RawPeer.close, RawPeer.reset, staying.append):
            peer = RawPeer(busy.addresses[0], local=local)
            peer.send(data)
            end(peer)
    assert_serves(busy)
    for peer in staying:
        peer.close()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("noise", "not a frame of this protocol: kind "),
        ("http", "not a frame of this protocol: it looks like HTTP"),
        ("a huge control message", "not a frame of this protocol: kind 3, length 4294967295"),
        ("the largest of a member", "not a frame of this protocol: kind 3, length 65528; expected at most 4096 bytes"),
        ("data before a hello", "message for slot 0 without a credit"),
    ],
)
@pytest.mark.parametrize("local", [False, True], ids=["tcp", "unix"])
def test_strangers_are_told_why_and_dropped_at_once(daemon: Daemon, local: bool, what: str, reason: str) -> None:
    with RawPeer(daemon.addresses[0], local=local) as peer:
        peer.send(STRANGERS[what])
        answer = peer.control()
        assert isinstance(answer, Refused)
        assert answer.reason.startswith(reason)
        assert peer.is_closed()


@pytest.mark.parametrize(
    "what", ["no msgpack", "a welcome", "deep msgpack", "the largest of a stranger", "an unknown type of 4,000 letters"]
)
def test_strangers_that_speak_our_frames_get_an_answer(daemon: Daemon, what: str) -> None:
    with RawPeer(daemon.addresses[0]) as peer:
        peer.send(STRANGERS[what])
        answer = peer.control()
        assert isinstance(answer, Refused)
        assert "malformed control message" in answer.reason or "expected one Hello" in answer.reason


def test_connections_that_are_reset_before_they_are_accepted(busy: Daemon) -> None:
    for _ in range(200):
        RawPeer(busy.addresses[0]).reset()
    assert_serves(busy)


def test_many_silent_connections(busy: Daemon) -> None:
    silent = [RawPeer(busy.addresses[i % 3], local=i % 2 == 0) for i in range(600)]
    assert_serves(busy)
    for peer in silent:
        peer.close()


@pytest.mark.slow
def test_more_connections_than_the_daemon_may_open() -> None:
    """Strangers do not keep workers out when descriptors run short: the oldest silent ones make room."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    with Daemon(1, preexec_fn=few) as daemon:
        silent = [RawPeer(daemon.addresses[0], local=i % 2 == 0) for i in range(200)]
        assert_serves(daemon)
        assert daemon.log.count("cannot accept") < 10
        for peer in silent:
            peer.close()


def test_descriptors_that_a_stranger_passes_are_not_kept(daemon: Daemon) -> None:
    with tempfile.TemporaryFile() as file, RawPeer(daemon.addresses[0], local=True) as peer:
        for byte in HALF_A_HELLO:
            socket.send_fds(peer.sock, [bytes([byte])], [file.fileno()] * 2)
        assert_serves(daemon)  # by now the shard has read them all
        mine = os.readlink(f"/proc/self/fd/{file.fileno()}")
        assert mine not in open_files(daemon.shard_pids[0])
