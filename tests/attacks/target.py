"""The target as an attacker knows it: a daemon, and connections to it. Every wait has a bound."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import select
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from raw_peer import CONTROL, CREDIT, DATA, RawPeer

from omnireduce.core.wire.control import ControlMessage, Refused, Welcome, decode_control
from omnireduce.support.addresses import parse_address
from omnireduce.support.secret import Secret
from omnireduce.transport.framing import FRAME

PATIENCE_S = 2.0  # an attacker waits so long for an answer
LONG_PATIENCE_S = 20.0  # for the results of large collectives
SMALL = {"slots": 2, "slot_bytes": 65536}  # the smallest slots that a job may have


@dataclass(frozen=True)
class Target:
    """A daemon's shard at `address` and its pages at `http`.

    `secret` is the daemon's, if this attacker knows it. `ca` is the file that verifies the daemon's TLS certificate.
    The job `job` runs there; the job `gathering` waits for its last rank.
    """

    address: str
    http: str
    secret: bytes | None = None
    ca: str | None = None
    job: str = "honest"
    gathering: str = "gathering"


@functools.cache
def tls_context(ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    return context


class Peer(RawPeer):
    """One connection of an attacker, by TLS if the daemon has a certificate; it proves the secret if it knows one."""

    def __init__(self, target: Target, *, local: bool = False, proves: bool = True) -> None:
        super().__init__(target.address, local=local)
        self.sock.settimeout(PATIENCE_S)
        self.descriptors: list[int] = []
        self._rest = bytearray()
        try:
            if target.ca is not None and not local:
                host = parse_address(target.address)[0]
                self.sock = tls_context(target.ca).wrap_socket(self.sock, server_hostname=host)
            if target.secret is not None and proves:
                self.prove(Secret(target.secret), os.urandom(32))
        except BaseException:
            self.close()
            raise

    def read(self, count: int) -> bytes:
        """Read `count` bytes; keep descriptors that come with them. Raises ConnectionError at the end of the stream."""
        while len(self._rest) < count:
            if self.sock.family == socket.AF_UNIX:
                more, descriptors, _, _ = socket.recv_fds(self.sock, 65536, 4)
                self.descriptors += descriptors
            else:
                more = self.sock.recv(65536)
            if not more:
                raise ConnectionResetError("closed")
            self._rest += more
        data = bytes(self._rest[:count])
        del self._rest[:count]
        return data

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def has_input(self) -> bool:
        """Whether bytes have been read that are not used yet."""
        return bool(self._rest) or (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0)

    def event(self) -> tuple[int, int, ControlMessage | None]:
        """The next frame: its kind, its slot, and the message that it is, if it is one."""
        kind, slot, length = FRAME.unpack(self.read(FRAME.size))
        in_frame = kind == CONTROL or (kind == DATA and self.sock.family != socket.AF_UNIX)
        body = self.read(length) if in_frame else b""
        return kind, slot, decode_control(body) if kind == CONTROL else None

    def answer(self) -> str:
        """Name of the next message of the aggregator, or `closed`, or `silence`."""
        try:
            while (message := self.event()[2]) is None:
                pass
        except TimeoutError:
            return "silence"
        except (ConnectionError, ssl.SSLError):
            return "closed"
        return type(message).__name__

    def admitted(self) -> bool:
        """Wait for the Welcome."""
        while True:
            message = self.event()[2]
            if isinstance(message, Welcome | Refused):
                return isinstance(message, Welcome)

    def memory(self) -> mmap.mmap:
        """The slots of all ranks of this connection's job, upwards. Only behind a Unix socket."""
        return mmap.mmap(self.descriptors[0], 0)

    def give_credit(self, slot: int) -> None:
        self.frame(CREDIT, slot, 0)

    def put(self, slot: int, message: bytes) -> None:
        """Send a block message; over shared memory it lies there already."""
        body = b"" if self.sock.family == socket.AF_UNIX else message
        self.frame(DATA, slot, len(message), body)

    def close(self) -> None:
        super().close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def with_input(peers: Sequence[Peer]) -> list[Peer]:
    """Peers that have input. Raises TimeoutError if no input comes."""
    readable = [peer for peer in peers if peer.has_input]
    readable = readable or select.select(peers, (), (), LONG_PATIENCE_S)[0]
    if not readable:
        raise TimeoutError("silence")
    return readable


class Crowd:
    """Connections that stay open, at most `limit`: a further one closes the oldest. `__exit__` closes all."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._peers: deque[RawPeer | socket.socket] = deque()

    def add(self, peer: RawPeer | socket.socket) -> None:
        self._peers.append(peer)
        if len(self._peers) > self._limit:
            self._peers.popleft().close()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.close()
