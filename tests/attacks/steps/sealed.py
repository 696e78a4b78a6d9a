"""Attacks on TLS: half a handshake, garbage, records that are corrupt, keys that change for ever."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import os
import random
import socket
import ssl
from collections.abc import Iterator
from typing import Any

from omnireduce.support.addresses import parse_address

from ..target import PATIENCE_S, SMALL, Crowd, Peer, Target, tls_context

CORRUPT = b"\x17\x03\x03\x00\x20" + b"\xee" * 32
REQUESTED = (0, 1)  # argument of SSL_key_update: 1 asks the other side to change its key, too
BURST = 1000  # updates in one step


def _connect(target: Target) -> socket.socket:
    return socket.create_connection(parse_address(target.address), timeout=PATIENCE_S)


def _client_hello(target: Target) -> bytes:
    """The first flight of a handshake."""
    assert target.ca is not None
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls_context(target.ca).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def whole_handshakes(target: Target, draw: random.Random) -> Iterator[str]:
    """Handshakes for each of which the daemon has to sign, and nothing behind them."""
    while True:
        with Peer(target, proves=False):
            yield "open"


def half_handshakes(target: Target, draw: random.Random) -> Iterator[str]:
    """Handshakes that stop in the first flight or after it, and stay."""
    with Crowd(300) as crowd:
        while True:
            sock = _connect(target)
            crowd.add(sock)
            hello = _client_hello(target)
            sock.sendall(hello[: draw.choice((1, 5, draw.randint(1, len(hello)), len(hello)))])
            yield "half"


def garbage(target: Target, draw: random.Random) -> Iterator[str]:
    """Bytes that are no TLS, and handshakes with some bytes changed."""
    while True:
        hello = bytearray(_client_hello(target))
        for _ in range(draw.randint(1, 5)):
            hello[draw.randrange(len(hello))] = draw.randrange(256)
        with _connect(target) as sock:
            sock.sendall(draw.choice((draw.randbytes(5000), bytes(hello), b"\x16\x03\x01\x40\x00" + bytes(9000))))
            sock.settimeout(0.1)
            yield "answer" if sock.recv(100) else "closed"


def corrupt_records(target: Target, draw: random.Random) -> Iterator[str]:
    """Connections in order, behind which records come that nobody can decrypt; they stay open."""
    with Crowd(100) as crowd:
        number = 0
        while True:
            peer, number = Peer(target), number + 1
            crowd.add(peer)
            if draw.random() < 0.5:
                peer.hello(f"corrupt-{number}", 0, 1, **SMALL)
                peer.answer()
            with socket.socket(fileno=os.dup(peer.sock.fileno())) as beneath:
                for _ in range(draw.choice((1, 2, 50))):
                    beneath.sendall(CORRUPT)
            peer.sock.settimeout(0.1)
            yield peer.answer()


@functools.cache
def _libssl() -> Any:
    library = ctypes.CDLL(ctypes.util.find_library("ssl"))
    for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
        getattr(library, name).restype = ctypes.c_void_p
    return library


class _Session:
    """A TLS connection by OpenSSL itself: Python's module cannot ask for new keys."""

    def __init__(self, target: Target) -> None:
        self._sock, library = _connect(target), _libssl()
        self._sock.settimeout(None)  # a timeout of Python would disturb OpenSSL; the kernel bounds its waits
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(PATIENCE_S))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(PATIENCE_S))
        self._context = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method())))
        self._ssl = ctypes.c_void_p(library.SSL_new(self._context))
        library.SSL_set_fd(self._ssl, self._sock.fileno())
        if library.SSL_connect(self._ssl) != 1:
            self.close()
            raise ConnectionError("no handshake")

    def update(self, requested: int) -> bool:
        """Change this side's key; whether that could be sent."""
        library = _libssl()
        return library.SSL_key_update(self._ssl, requested) == 1 and library.SSL_do_handshake(self._ssl) == 1

    def close(self) -> None:
        _libssl().SSL_free(self._ssl)
        _libssl().SSL_CTX_free(self._context)
        self._sock.close()


def _timeval(seconds: float) -> bytes:
    return int(seconds).to_bytes(8, "little") + int(seconds % 1 * 1e6).to_bytes(8, "little")


def key_updates(target: Target, draw: random.Random) -> Iterator[str]:
    """Streams of KeyUpdate; some want an answer, which is not read."""
    while True:
        with contextlib.closing(_Session(target)) as session:
            requested = draw.choice(REQUESTED)
            for _ in range(draw.choice((1, 100, 10_000))):
                if not all(session.update(requested) for _ in range(BURST)):
                    yield "closed"
                    break
                yield "updated"
