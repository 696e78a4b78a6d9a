"""The kinds of transport, in one table. Nobody else asks for their names.

Each kind says how a worker connects and how an aggregator listens. What a link can do, the link says: see `base`. RDMA
is not in the table: it takes the blocks off a connection by TCP that both ends have already. See `rdma_offer`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from omnireduce.errors import TransportError
from omnireduce.support.addresses import Address, host_of, loopback
from omnireduce.support.config import Config
from omnireduce.support.os_error_origin import raised_by_signal_handler
from omnireduce.transport.base import Link
from omnireduce.transport.framing import StreamLink
from omnireduce.transport.rdma_offer import AUTO, RDMA
from omnireduce.transport.shm import ShmLink, connect_shm
from omnireduce.transport.slot_memory import Region
from omnireduce.transport.tcp import TcpLink, connect_tcp, listen_tcp
from omnireduce.transport.tls import accept_tls, connect_tls
from omnireduce.transport.unix_sockets import holder_of, listen_local, name_of, peer_of

MakeTls = Callable[[], ssl.SSLContext | None]
PROBE_S = 2.0  # time limit of a connection to this process itself


class ConnectAttempt(NamedTuple):
    """An attempt of a worker to connect. `is_required`: transport.kind names this kind. `make_tls` makes the context of
    a connection that leaves the host; None: without TLS. It raises ConfigError."""

    address: Address
    timeout_s: float
    config: Config
    make_tls: MakeTls
    is_required: bool = False


class UnavailableError(Exception):
    """An aggregator cannot offer a kind of transport; the text says why."""


class Transport(ABC):
    """A kind of transport. `name`: the word for it in transport.kind. `advice`: what to look at if it does not work."""

    name: str
    advice: str

    @abstractmethod
    def connect(self, attempt: ConnectAttempt) -> StreamLink:
        """Connect to an aggregator. Only control messages can flow yet. Raises OSError when the aggregator cannot be
        reached in this way, TransportError when it can be, but must not."""

    @abstractmethod
    def listen(self, address: Address) -> socket.socket:
        """A listening socket, non-blocking. Raises OSError and TransportError, and UnavailableError when the aggregator
        may go on with other kinds."""

    @abstractmethod
    def accept_link(self, sock: socket.socket, config: Config, make_tls: MakeTls) -> Link:
        """The link of a connection that the aggregator has accepted. Raises OSError."""

    @abstractmethod
    def probe(self) -> str:
        """Connect to this process itself. Returns a text that says so. Raises OSError and UnavailableError."""

    def _probe_beside(self) -> str:
        """The `probe` of a kind that listens beside TCP."""
        with listen_tcp(loopback(), 0) as holder:  # its port makes the address unique
            address = Address(loopback(), holder.getsockname()[1])
            with (
                self.listen(address),
                contextlib.closing(self.connect(ConnectAttempt(address, PROBE_S, Config(), no_tls, True))),
            ):
                return "available on this host"


def no_tls() -> None:
    """Make no context."""


class Shm(Transport):
    """Shared memory, among processes of one host."""

    name = "shm"
    advice = "does the sandbox allow memfd_create and abstract Unix sockets?"

    def connect(self, attempt: ConnectAttempt) -> StreamLink:
        any_user = attempt.config.security.local_users == "any"
        link = connect_shm(*attempt.address, attempt.timeout_s, any_user=any_user)
        owner = link.process.user
        if attempt.is_required or any_user or owner == os.geteuid():
            return link
        # Memory is shared only between processes of one user, even if the other one is root, unless both allow any.
        link.close()
        raise TransportError(
            f"the aggregator {attempt.address} is of user {owner}, this worker of user {os.geteuid()}: for shared "
            "memory set security.local_users = 'any' on both"
        )

    def listen(self, address: Address) -> socket.socket:
        """Its name may have been taken. If a process of another user has it, workers do not trust that process. If it
        is a process of root or of this user, they would take it for the aggregator: that must not be."""
        try:
            return listen_local(*address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        name = name_of(*address)
        holder = holder_of(name)
        owner = holder or "a process that answers nobody"
        reason = f"the Unix socket @{name[1:]}, for workers of this host, belongs to {owner}"
        if holder is not None and holder.is_trusted:
            raise TransportError(f"{reason}; end it, or choose another port")
        raise UnavailableError(reason)

    def accept_link(self, sock: socket.socket, config: Config, make_tls: MakeTls) -> ShmLink:
        return ShmLink(sock, str(peer_of(sock)))

    def probe(self) -> str:
        Region(1, 65536).close()
        return self._probe_beside()


class Tcp(Transport):
    """TCP, with TLS if both ends have it."""

    name = "tcp"
    advice = "is the loopback interface up (ip link set lo up)?"

    def connect(self, attempt: ConnectAttempt) -> StreamLink:
        tls, dead_peer_s = attempt.make_tls(), attempt.config.transport.dead_peer_s
        if tls is not None:
            return connect_tls(*attempt.address, attempt.timeout_s, dead_peer_s, tls)
        return connect_tcp(*attempt.address, attempt.timeout_s, dead_peer_s)

    def listen(self, address: Address) -> socket.socket:
        return listen_tcp(*address)

    def accept_link(self, sock: socket.socket, config: Config, make_tls: MakeTls) -> TcpLink:
        name = sock.getpeername()
        peer, context, dead_peer_s = str(Address(host_of(name), name[1])), make_tls(), config.transport.dead_peer_s
        if context is not None:
            return accept_tls(sock, peer, dead_peer_s, context, uses_tasks=True)
        return TcpLink(sock, peer, dead_peer_s)

    def probe(self) -> str:
        with listen_tcp(loopback(), 0) as listener:
            port = listener.getsockname()[1]
            with contextlib.closing(connect_tcp(loopback(), port, PROBE_S, dead_peer_s=PROBE_S)):
                return "available"


NETWORK: Transport = Tcp()  # between hosts; each shard takes its port, whatever else it offers
TABLE: tuple[Transport, ...] = (Shm(), NETWORK)  # in the order in which workers try them


def is_required(transport: Transport, kind: str) -> bool:
    """Whether `kind` (transport.kind) allows no other transport."""
    return transport.name == kind or (transport is NETWORK and kind == RDMA)


def allowed_by(kind: str) -> list[Transport]:
    """The transports that `kind` (transport.kind) allows."""
    return [transport for transport in TABLE if kind == AUTO or is_required(transport, kind)]


def connect_by_any(attempt: ConnectAttempt, say: Callable[[str], None]) -> StreamLink:
    """Connect to an aggregator by the first allowed transport that works. Calls `say` with the reason when a transport
    works, but must not be used.

    Raises what the last one raises: OSError when the aggregator cannot be reached, TransportError when it must not be
    used; and what `attempt.make_tls` raises.
    """
    *others, last = allowed_by(attempt.config.transport.kind)
    for transport in others:
        try:
            return transport.connect(attempt)
        except TransportError as error:
            say(str(error))
        except OSError as error:
            if raised_by_signal_handler(error):
                raise
    return last.connect(attempt._replace(is_required=not others))


# Between processes of one daemon. The sockets are of the same kind as those for shared memory, under another name.


def connect_to_own_daemon(address: Address, timeout_s: float, purpose: str) -> StreamLink:
    """Connect to a shard of the own daemon, at its socket for `purpose`. Raises OSError and TransportError."""
    return connect_shm(*address, timeout_s, purpose=purpose)


def listen_for_own_daemon(address: Address, purpose: str) -> socket.socket:
    """Listen for the own daemon, for `purpose`. Raises OSError."""
    return listen_local(*address, purpose)


def accept_own_link(sock: socket.socket) -> Link:
    """The link of a connection that was accepted there. Raises ConnectionRefusedError for other users."""
    link = ShmLink(sock, str(peer_of(sock)))
    if not link.process.is_trusted:  # connections of this listener are served first
        raise ConnectionRefusedError("only the daemon's own user may ask here")
    return link
