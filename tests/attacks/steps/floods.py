"""Connections that do nothing good: silent, short, half, deaf, noisy, and too many questions."""

from __future__ import annotations

import itertools
import random
import resource
import socket
from collections.abc import Iterator

import numpy as np
from raw_peer import CONTROL, NOISE, RawPeer

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.status_messages import StatusRequest
from omnireduce.core.wire.blocks import seal
from omnireduce.core.wire.control import PROTOCOL_VERSION
from omnireduce.transport.framing import FRAME

from ..target import PATIENCE_S, SMALL, Crowd, Peer, Target

HELD = min(4000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # connections that stay
HALVES = (
    b"\x03",
    FRAME.pack(CONTROL, 0, 200)[:5],
    FRAME.pack(CONTROL, 0, 200) + b"\x8ctype\xa5Hello",
    FRAME.pack(CONTROL, 0, 60_000) + bytes(59_999),
)
GARBAGE = (NOISE, bytes(100_000), b"\xff" * 100_000, b"GET / HTTP/1.1\r\n\r\n", FRAME.pack(CONTROL, 0, 4000) + NOISE)


def _bare(target: Target, local: bool) -> RawPeer:
    """A connection on which nothing was said, not even TLS."""
    peer = RawPeer(target.address, local=local)
    peer.sock.settimeout(PATIENCE_S)
    return peer


def silent(target: Target, draw: random.Random) -> Iterator[str]:
    """Connections that say nothing and stay."""
    with Crowd(HELD) as crowd:
        while True:
            crowd.add(_bare(target, draw.random() < 0.5))
            yield "open"


def short(target: Target, draw: random.Random) -> Iterator[str]:
    """Connections that are closed or reset at once."""
    while True:
        peer = _bare(target, local := draw.random() < 0.5)
        if local or draw.random() < 0.5:
            peer.close()
        else:
            peer.reset()
        yield "closed"


def half_said(target: Target, draw: random.Random) -> Iterator[str]:
    """Connections that begin a frame, never end it, and stay."""
    with Crowd(HELD) as crowd:
        while True:
            peer = Peer(target, local=draw.random() < 0.5, proves=draw.random() < 0.5)
            crowd.add(peer)
            peer.send(draw.choice(HALVES))
            yield "half"


def garbage(target: Target, draw: random.Random) -> Iterator[str]:
    """Bytes that are no frames."""
    while True:
        with Peer(target, local=draw.random() < 0.5, proves=False) as peer:
            peer.send(draw.choice(GARBAGE))
            yield peer.answer()


def questions(target: Target, draw: random.Random) -> Iterator[str]:
    """Status requests: one after the answer to the other, many without waiting, and each on a new connection."""
    request = StatusRequest(PROTOCOL_VERSION)
    while True:
        with Peer(target, local=draw.random() < 0.5) as peer:
            for _ in range(draw.choice((1, 50))):
                peer.say(request)
                yield peer.answer()
            for _ in range(50):
                peer.say(request)
            yield peer.answer()


def deaf(target: Target, draw: random.Random) -> Iterator[str]:
    """Connections that never read: ranks that send blocks until they have no credit left, and status requests."""
    blocks = Descriptor("allreduce", "", "uint8", (50_000,), block_size=1000)
    memory, request = np.zeros(65536, np.uint8), StatusRequest(PROTOCOL_VERSION)
    with Crowd(20) as crowd:
        for job in itertools.count():
            peer = Peer(target)
            crowd.add(peer)
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            if draw.random() < 0.5:
                peer.say(request)
                peer.say(request)
                yield "asked"
                continue
            peer.hello(f"deaf-{job}", 0, 1, **SMALL)
            yield peer.answer()
            for slot in range(2):
                nbytes = seal(memory, slot, 50, np.arange(50), 1000, blocks.encoded)
                peer.put(slot, memory[:nbytes].tobytes())
