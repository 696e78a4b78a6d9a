"""TCP links: block messages follow their frames on the connection, and are received straight into the slot."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from omnireduce.support.addresses import BACKLOG, Address, connect, host_of, listen
from omnireduce.transport.base import Event
from omnireduce.transport.framing import StreamLink

WORTH_READING = 1 << 20  # bytes of a message that wake its reader, if at least this many are still to come


class TcpLink(StreamLink):
    """A link over TCP. A peer that is silent on the network for `dead_peer_s` seconds counts as lost."""

    kind = "tcp"
    inline = True
    loss_question = ", and does it want TLS (security.tls_ca here)"

    def __init__(self, sock: socket.socket, peer: str, dead_peer_s: float) -> None:
        super().__init__(sock, peer)
        _detect_dead_peer(sock, dead_peer_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._readable_at = 1  # the bytes that make the system report the socket as readable
        self.local_host, self.remote_host = host_of(sock.getsockname()), host_of(sock.getpeername())

    def __str__(self) -> str:
        return f"{self.kind}, from {self.local_host}"

    def poll(self) -> Sequence[Event]:
        events = super().poll()
        if self._lost is None:
            self._let_gather(1 if self._body is None else min(len(self._body), WORTH_READING))
        return events

    def _let_gather(self, nbytes: int) -> None:
        """Let the system report the socket as readable once `nbytes` have come, or the connection is over.
        Otherwise each piece of 30 to 60 kB wakes the process for a turn in which nothing can be done."""
        if nbytes != self._readable_at:
            self._readable_at = 0  # unknown: an interrupt may come after each line
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._readable_at = nbytes


def _detect_dead_peer(sock: socket.socket, dead_peer_s: float) -> None:
    """Let the system probe an idle connection, and bound the time that sent data may stay unacknowledged."""
    probes = 3
    interval = max(1, round(dead_peer_s / (probes + 1)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(dead_peer_s * 1000))


def connect_tcp(host: str, port: int, timeout_s: float, dead_peer_s: float) -> TcpLink:
    """Connect to a listening aggregator. Raises OSError."""
    return TcpLink(connect(host, port, timeout_s), str(Address(host, port)), dead_peer_s)


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listen as `addresses.listen` does. Raises OSError."""
    return listen(host, port, BACKLOG)
