"""Members of jobs of their own that break the rules: bad frames, too many credits, blocks that were tampered with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
from raw_peer import CONTROL, CREDIT, DATA, NOISE

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.wire.blocks import seal
from omnireduce.core.wire.control import Goodbye
from omnireduce.transport.framing import FRAME

from ..target import SMALL, Crowd, Peer, Target
from .hellos import LONG_HOST, LONG_NAME

TENSOR = Descriptor("allreduce", "", "float32", (2560,), block_size=256)  # ten blocks
Break = Callable[[Peer, random.Random], None]


def block_message(number: int = 0, *, blocks: int = 10, frontier: int = 10) -> bytes:
    memory = np.zeros(65536, np.uint8)
    extra = TENSOR.encoded
    return memory[: seal(memory, number, frontier, np.arange(blocks), 1024, extra)].tobytes()


MESSAGE = block_message()
BREAKS: dict[str, Break] = {
    "noise": lambda peer, draw: peer.send(NOISE[draw.randrange(1000) :]),
    "no such slot": lambda peer, draw: peer.frame(DATA, draw.randint(2, 65535), 64, bytes(64)),
    "a slot without credit": lambda peer, draw: peer.send(2 * (FRAME.pack(DATA, 0, len(MESSAGE)) + MESSAGE)),
    "too long": lambda peer, draw: peer.frame(DATA, 0, draw.randint(65537, (1 << 32) - 1), bytes(5000)),
    "too many credits": lambda peer, draw: peer.send(FRAME.pack(CREDIT, draw.randrange(3), 0) * 1000),
    "no message": lambda peer, draw: peer.frame(CONTROL, 0, 100, draw.randbytes(100)),
    "a goodbye": lambda peer, draw: peer.say(Goodbye()),
    "a second hello": lambda peer, draw: peer.hello(f"{LONG_NAME}-2", 0, 1),
    "deep": lambda peer, draw: peer.frame(CONTROL, 0, 50_000, b"\x91" * 50_000),
    "a long text": lambda peer, draw: peer.say({"type": "x" * 60_000}),
    "an unknown frame": lambda peer, draw: peer.frame(draw.randint(4, 255), 0, 0),
}


def bad_frames(target: Target, draw: random.Random) -> Iterator[str]:
    """Each is said in a new job with the longest of names, which it ends."""
    for number in itertools.count():
        with Peer(target, local=draw.random() < 0.5) as peer:
            peer.hello(f"{LONG_NAME}{number % 50}", 0, 1, host=LONG_HOST, **SMALL)
            if peer.admitted():
                BREAKS[draw.choice(list(BREAKS))](peer, draw)
            yield peer.answer()


def tampered_blocks(target: Target, draw: random.Random) -> Iterator[str]:
    """Some bytes of a block message are other ones; over shared memory also while the aggregator reads them."""
    for number in itertools.count():
        local = draw.random() < 0.5
        with Peer(target, local=local) as peer:
            peer.hello(f"tampered-{number % 50}", 0, 1, **SMALL)
            if not peer.admitted():
                yield "Refused"
                continue
            message = bytearray(MESSAGE)
            for _ in range(draw.randint(1, 8)):
                message[draw.randrange(draw.choice((64, len(message))))] = draw.randrange(256)
            if local:
                _tamper_beneath(peer, bytes(message), draw)
            else:
                peer.put(0, bytes(message))
            peer.sock.settimeout(0.1)  # a message without its end is waited for
            kind, _, answer = peer.event()
            yield type(answer).__name__ if kind == CONTROL else "taken"


def _tamper_beneath(peer: Peer, message: bytes, draw: random.Random) -> None:
    """Announce a message and go on writing to it."""
    with peer.memory() as slots:
        slots[: len(MESSAGE)] = MESSAGE
        peer.put(0, MESSAGE)
        for _ in range(draw.randint(0, 20)):
            slots[: len(MESSAGE)] = message


def restarts(target: Target, draw: random.Random) -> Iterator[str]:
    """Jobs that begin and end at once, some by leaving, some by a closed connection."""
    for number in itertools.count():
        with Peer(target, local=draw.random() < 0.5) as peer:
            peer.hello(f"{LONG_NAME}{number % 50}", 0, 1, host=LONG_HOST, **SMALL)
            yield peer.answer()
            if draw.random() < 0.5:
                peer.say({"type": "Leave", "cause": None})
                peer.answer()


def stragglers(target: Target, draw: random.Random) -> Iterator[str]:
    """Jobs of which one rank begins a collective and the others never do; the longest of names are waited for."""
    with Crowd(60) as crowd:
        for number in itertools.count():
            ranks = [Peer(target, local=local) for local in (True, False)]
            for rank, peer in enumerate(ranks):
                crowd.add(peer)
                peer.hello(f"{LONG_NAME}{number}", rank, len(ranks), host=LONG_HOST, timeout_s=0.2, **SMALL)
            if not all(peer.admitted() for peer in ranks):
                yield "Refused"
                continue
            ranks[1].put(0, block_message())
            yield "waits"
