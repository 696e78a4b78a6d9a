"""TCP: options of the socket, and the ways to listen and to connect."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from pathlib import Path

import pytest

from omnireduce.transport import framing
from omnireduce.transport.base import Control, Lost, Received
from omnireduce.transport.framing import DATA, FRAME
from omnireduce.transport.tcp import WORTH_READING, TcpLink, connect_tcp, listen_tcp
from omnireduce.transport.unix_sockets import listen_local

from .pairs import SHM_PORT, SLOT_BYTES, TcpPair, accept, wait_for

TCP = socket.IPPROTO_TCP


def option(link: TcpLink, level: int, name: int) -> int:
    return link._sock.getsockopt(level, name)


@pytest.mark.parametrize("dead_peer_s", [0.5, 4.0, 60.0, 600.0])
def test_a_silent_peer_is_noticed_in_time(dead_peer_s: float) -> None:
    """An idle connection is probed, and sent data must be acknowledged, within the configured time."""
    with listen_tcp("127.0.0.1", 0) as listener:
        right = connect_tcp("127.0.0.1", listener.getsockname()[1], 10, dead_peer_s)
        left = TcpLink(accept(listener), "right", dead_peer_s)
    for link in (left, right):
        assert option(link, socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert option(link, TCP, socket.TCP_USER_TIMEOUT) == round(dead_peer_s * 1000)
        idle, interval, probes = (
            option(link, TCP, name) for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * probes <= max(4, dead_peer_s)  # the system counts in seconds
        assert option(link, TCP, socket.TCP_NODELAY) == 1
        link.close()


def readable_at(link: TcpLink) -> int:
    """Number of bytes that must have come before the system calls the link readable."""
    return option(link, socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def begin_message(pair: TcpPair, nbytes: int) -> None:
    """Let the right end read the frame of a message of SLOT_BYTES, and so many bytes of it."""
    pair.write_raw(pair.right, FRAME.pack(DATA, 0, SLOT_BYTES) + bytes(nbytes))
    pair.repeat(lambda: pair.right.poll() == [] and pair.right.counters.received_bytes == FRAME.size + nbytes)


def test_a_part_of_a_message_wakes_nobody() -> None:
    pair = TcpPair()
    assert readable_at(pair.right) == 1
    begin_message(pair, 10)
    assert readable_at(pair.right) == SLOT_BYTES - 10 < WORTH_READING
    pair.write_raw(pair.right, bytes(SLOT_BYTES - 10))
    assert pair.collect(pair.right, 1) == [Received(0, SLOT_BYTES)]
    assert readable_at(pair.right) == 1
    pair.close()


def test_a_broken_connection_wakes_who_waits_for_the_rest_of_a_message() -> None:
    pair = TcpPair()
    begin_message(pair, 10)
    pair.left.close()
    assert pair.collect(pair.right, 1) == [Lost("connection closed")]
    pair.close()


def test_what_one_poll_leaves_can_be_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is longer than one poll may take; of the rest a small part has come."""
    pair = TcpPair()
    monkeypatch.setattr(framing, "BYTES_PER_POLL", FRAME.size + SLOT_BYTES)
    begin_message(pair, 10)
    pair.write_raw(pair.right, bytes(SLOT_BYTES - 10) + FRAME.pack(DATA, 1, 0) + FRAME.pack(DATA, 2, 0))
    assert pair.collect(pair.right, 3) == [Received(0, SLOT_BYTES), Received(1, 0), Received(2, 0)]
    pair.close()


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "shm"])
def test_a_crowd_may_wait_to_be_accepted(local: bool) -> None:
    """Nobody accepts: who finds no room by TCP would have to try again after a second, by a Unix socket fails."""
    crowd = min(300, int(Path("/proc/sys/net/core/somaxconn").read_text()))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen_local("127.0.0.1", SHM_PORT) if local else listen_tcp("127.0.0.1", 0))
        for _ in range(crowd):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX if local else socket.AF_INET))
            sock.setblocking(False)
            assert sock.connect_ex(listener.getsockname()) in (0, errno.EINPROGRESS)
            assert select.select([], [sock], [], 0.5)[1], "no room to wait"
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


def test_an_address_can_be_taken_once() -> None:
    with listen_tcp("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        listen_tcp("127.0.0.1", listener.getsockname()[1])


def test_an_address_is_free_again_although_old_connections_linger() -> None:
    """A daemon must be able to restart at once: the side that closes first keeps the address for a while."""
    listener = listen_tcp("127.0.0.1", 0)
    port = listener.getsockname()[1]
    right = connect_tcp("127.0.0.1", port, 10, 4)
    TcpLink(accept(listener), "right", 4).close()
    listener.close()
    right.close()
    listen_tcp("127.0.0.1", port).close()


def test_nobody_listens() -> None:
    with listen_tcp("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        connect_tcp("127.0.0.1", port, 10, 4)


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        listen_tcp("192.0.2.1", 0)  # an address reserved for documentation


def talk(listen_host: str, connect_host: str) -> None:
    with listen_tcp(listen_host, 0) as listener:
        right = connect_tcp(connect_host, listener.getsockname()[1], 10, 4)
        left = TcpLink(accept(listener), "right", 4)
    right.send_control(b"hello")
    right.flush()
    wait_for([left], 10)
    assert left.poll() == [Control(b"hello")]
    left.close()
    right.close()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("listen_host", "connect_host"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "localhost"), ("0.0.0.0", "127.0.0.1"), ("localhost", "127.0.0.1")],
)
def test_ways_to_listen(listen_host: str, connect_host: str) -> None:
    talk(listen_host, connect_host)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")
@pytest.mark.parametrize(
    ("listen_host", "connect_host"), [("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1"), ("::1", "localhost")]
)
def test_ways_to_listen_by_ipv6(listen_host: str, connect_host: str) -> None:
    talk(listen_host, connect_host)


def test_a_listener_and_its_connections_do_not_block() -> None:
    with listen_tcp("127.0.0.1", 0) as listener:
        assert not listener.getblocking()
        with pytest.raises(BlockingIOError):
            listener.accept()
    pair = TcpPair()
    assert not any(end._sock.getblocking() for end in (pair.left, pair.right))
    assert pair.left.poll() == pair.right.poll() == []
    pair.close()
