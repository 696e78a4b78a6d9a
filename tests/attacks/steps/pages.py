"""Floods of the pages for metrics and health."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from omnireduce.support.addresses import parse_address

from ..target import PATIENCE_S, Crowd, Target

HELD = 300
ANSWER_S = 0.3  # some requests are such that none comes
REQUESTS = (
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n" + bytes(1000),
    b"GET /" + b"x" * 60_000 + b" HTTP/1.1\r\n",
    b"GET / HTTP/1.1\r\n" + b"Header: value\r\n" * 1000,
    bytes(1000),
)


def _connect(target: Target) -> socket.socket:
    return socket.create_connection(parse_address(target.http), timeout=PATIENCE_S)


def flood(target: Target, draw: random.Random) -> Iterator[str]:
    """Requests of all kinds; some wait for the answer, some go, some stay and do not read."""
    with Crowd(HELD) as crowd:
        while True:
            sock = _connect(target)
            sock.sendall(draw.choice(REQUESTS))
            if draw.random() < 0.3:
                with sock:
                    sock.settimeout(ANSWER_S)
                    yield "answer" if sock.recv(100).startswith(b"HTTP/") else "closed"
            elif draw.random() < 0.5:
                sock.close()
                yield "gone"
            else:
                crowd.add(sock)
                yield "stays"


def silent(target: Target, draw: random.Random) -> Iterator[str]:
    """Connections that stay and say nothing, or half a request."""
    with Crowd(HELD) as crowd:
        while True:
            sock = _connect(target)
            crowd.add(sock)
            sock.sendall(b"GET /metr"[: draw.randint(0, 9)])
            yield "silent"
