"""A peer that says to an aggregator whatever a test wants, byte by byte."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from local_cluster import WAIT_S

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.wire.blocks import seal
from omnireduce.core.wire.control import (
    PROTOCOL_VERSION,
    ControlMessage,
    Pending,
    Refused,
    decode_control,
    encode_control,
)
from omnireduce.protocol.joining.authentication import Candidate
from omnireduce.support.addresses import parse_address
from omnireduce.support.config import Config
from omnireduce.support.secret import Secret
from omnireduce.transport.framing import CONTROL, CREDIT, DATA, FRAME

__all__ = ["CONTROL", "CREDIT", "DATA", "NOISE", "RawPeer", "await_pending", "framed"]
DEFAULTS = Config().protocol
NOISE = np.random.default_rng(7).integers(0, 256, 100_000, np.uint8).tobytes()


def framed(message: ControlMessage) -> bytes:
    """A control message as it travels."""
    body = encode_control(message)
    return FRAME.pack(CONTROL, 0, len(body)) + body


class RawPeer:
    """One connection by TCP, or by the shards' Unix socket (`local=True`). Every wait has a bound."""

    def __init__(self, address: str, *, local: bool = False) -> None:
        host, port = parse_address(address)
        self.sock = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(f"\0omnireduce/{host}:{port}" if local else (host, port))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        """Close so that the other side gets a reset (TCP only)."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def send(self, data: bytes) -> None:
        """Send, or find out that the other side has closed."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(data)

    def frame(self, kind: int, slot: int, length: int, body: bytes = b"") -> None:
        self.send(FRAME.pack(kind, slot, length) + body)

    def say(self, message: object) -> None:
        """Send any value as a control message."""
        body = msgspec.msgpack.encode(message)
        self.frame(CONTROL, 0, len(body), body)

    def prove(self, secret: Secret, nonce: bytes = bytes(32)) -> ControlMessage:
        """Go through the handshake as far as the aggregator lets us; return its last answer."""
        candidate = Candidate(secret, nonce)
        self.send(framed(candidate.greeting))
        answer = self.control()
        while not isinstance(answer, Refused) and (reply := candidate.answer(answer)) is not None:
            self.send(framed(reply))
            answer = self.control()
        return answer

    def hello(self, job: str, rank: int, world_size: int, **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "type": "Hello", "version": PROTOCOL_VERSION, "shard": 0, "shards": 1, "host": "test", "pid": 1,
            "slots": DEFAULTS.slots, "slot_bytes": DEFAULTS.slot_bytes, "stripe_blocks": DEFAULTS.stripe_blocks,
            "timeout_s": 60.0,
        }  # fmt: skip
        self.say(defaults | {"job": job, "rank": rank, "world_size": world_size} | fields)

    def collective(self, descriptor: Descriptor, number: int = 0, slot: int = 0, frontier: int | None = None) -> None:
        """Begin a collective with a message without blocks that, unless told otherwise, ends it too."""
        memory = np.zeros(65536, np.uint8)
        end = descriptor.layout.blocks if frontier is None else frontier
        none = np.zeros(0, np.int64)
        nbytes = seal(memory, number, end, none, descriptor.block_bytes, descriptor.encoded)
        self.frame(DATA, slot, nbytes, memory[:nbytes].tobytes())

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            assert more, "the other side closed the connection"
            data += more
        return data

    def control(self) -> ControlMessage:
        """The next control message; messages with data are skipped."""
        while True:
            kind, _, length = FRAME.unpack(self.read(FRAME.size))
            body = self.read(length) if kind in (CONTROL, DATA) else b""
            if kind == CONTROL:
                return decode_control(body)

    def is_closed(self) -> bool:
        """Whether the other side closes the connection in time; what it still says does not matter."""
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True


def await_pending(peer: RawPeer, missing: Sequence[int]) -> None:
    """Wait until the aggregator says that exactly these ranks are missing."""
    while True:
        message = peer.control()
        assert isinstance(message, Pending)
        if message.missing == list(missing):
            return
