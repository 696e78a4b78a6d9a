"""TCP: options of the socket, and the ways to listen and to connect."""

from __future__ import annotations

import socket

import pytest

from omnireduce.transport.base import Control
from omnireduce.transport.tcp import TcpLink, connect_tcp, listen_tcp

from .pairs import TcpPair, accept, wait_for

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
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "localhost"), ("0.0.0.0", "127.0.0.1"), ("", "localhost")],
)
def test_ways_to_listen(listen_host: str, connect_host: str) -> None:
    talk(listen_host, connect_host)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")
@pytest.mark.parametrize(("listen_host", "connect_host"), [("::1", "::1"), ("::", "::1")])
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
