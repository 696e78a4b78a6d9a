"""The messages between the launcher and the supervisor of a host.

Each message is MessagePack behind its length, four bytes, big-endian. Before its first message a supervisor writes
MAGIC. A shell that starts on another host may write text before MAGIC, which is skipped. Words and variables
are bytes, because they need not be UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

MAGIC = b"\0omnireduce-supervisor-1\n"  # its end is not its beginning: so it is found behind a part of itself
MOST_NOISE = 1 << 20  # bytes before MAGIC
MOST_BYTES = 1 << 31  # of an order: a function that `run` sends may have data
CHUNK = 1 << 16  # bytes of output in a message
MOST_NEWS_BYTES = 2 * CHUNK
STDOUT, STDERR, RESULT = 1, 2, 3  # streams of a process
RESULT_FD = "OMNIRUN_RESULT_FD"  # the variable that tells a process which descriptor RESULT has
SSH_CONNECTION = "SSH_CONNECTION"  # the variable that sshd sets
EVERY = -1  # in place of the number of a process: all of them
AGGREGATOR = -2  # the number of the job's own aggregators; ranks have 0 and more
MOST_SAID = 1000  # characters of a reason
_LENGTH = struct.Struct(">I")
_Number = Annotated[int, Meta(ge=AGGREGATOR, le=2**31)]
_Pid = Annotated[int, Meta(ge=1, le=2**31)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Reason = Annotated[str, Meta(max_length=MOST_SAID)]


class Start(Struct, frozen=True, tag="start"):
    """Start a process under `number`. `environ` is all of its environment, or comes on top of the supervisor's own if
    it `inherits` that. `given` is what it reads from standard input. `with_result`: RESULT is a stream, too; the
    variable RESULT_FD has its descriptor."""

    number: int
    words: list[bytes]
    environ: dict[bytes, bytes]
    folder: bytes
    inherits: bool = False
    given: bytes = b""
    with_result: bool = False


class Signal(Struct, frozen=True, tag="signal"):
    """Send a signal to the group of a process, or of EVERY one whose number is not negative."""

    number: int
    signal: int


class Greeting(Struct, frozen=True, tag="greeting"):
    """The first message: the supervisor runs. `port` was free on all addresses of its host just now. `ssh` is what sshd
    says of its connection: the addresses of both ends, each with its port behind it."""

    pid: _Pid
    port: _Port
    ssh: Annotated[str, Meta(max_length=256)] = ""


class Started(Struct, frozen=True, tag="started"):
    """A process runs."""

    number: _Number
    pid: _Pid


class RankFailed(Struct, frozen=True, tag="failed"):
    """A process could not be started."""

    number: _Number
    reason: _Reason


class Output(Struct, frozen=True, tag="output"):
    """Output of a process."""

    number: _Number
    stream: Annotated[int, Meta(ge=STDOUT, le=RESULT)]
    data: Annotated[bytes, Meta(max_length=CHUNK)]


class Ended(Struct, frozen=True, tag="ended"):
    """A process has ended; `status` is minus the signal that ended it. `was_asked`: the supervisor had sent it a signal
    to end. `why`: what the system says about that, or nothing."""

    number: _Number
    status: Annotated[int, Meta(ge=-255, le=255)]
    was_asked: bool = False
    why: _Reason = ""


Order = Start | Signal
News = Greeting | Started | RankFailed | Output | Ended
_encoder = msgspec.msgpack.Encoder()
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_news = msgspec.msgpack.Decoder(News).decode


def frame(message: Order | News) -> bytes:
    """A message behind its length."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Takes bytes as they come, and gives the messages in them, each of at most so many bytes. With `magic` all before
    MAGIC is left out."""

    def __init__(self, most_bytes: int, *, magic: bool = False) -> None:
        self._data, self._most_bytes, self._seeks = bytearray(), most_bytes, magic

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete now. Raises ValueError for what cannot be one."""
        self._data += data
        if self._seeks and not self._find_magic():
            return
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > self._most_bytes:
                raise ValueError(f"a message of {length} bytes, expected at most {self._most_bytes}")
            if len(self._data) < _LENGTH.size + length:
                return
            message = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
            del self._data[: _LENGTH.size + length]
            yield message

    def _find_magic(self) -> bool:
        at = self._data.find(MAGIC)
        if at < 0:
            if len(self._data) > MOST_NOISE:
                raise ValueError("much output, but none of a supervisor")
            return False
        del self._data[: at + len(MAGIC)]
        self._seeks = False
        return True
