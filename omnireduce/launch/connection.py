"""A supervisor as the launcher sees it: a child of this process, or behind `ssh`."""

from __future__ import annotations

import os
import shlex
import shutil
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from omnireduce.errors import ConfigError, TransportError
from omnireduce.launch.hosts import is_this_host
from omnireduce.support.child_program_code import TREE, program_of

MAGIC = b"\0omnireduce-supervisor-1\n"  # no end of it is its beginning, so a search finds it behind any part of it
MOST_NOISE = 1 << 20  # the most bytes before MAGIC
MOST_BYTES = 1 << 31  # the longest order: a function that `run` sends may have data
CHUNK = 1 << 16  # bytes of output in a message
MOST_NEWS_BYTES = 2 * CHUNK
STDOUT, STDERR, RESULT = 1, 2, 3  # streams of a process
RESULT_FD = "OMNIRUN_RESULT_FD"  # the variable with the descriptor of RESULT
SSH_CONNECTION = "SSH_CONNECTION"  # the variable that sshd sets
ALL_RANKS = -1  # in place of the number of a process: all ranks
AGGREGATOR = -2  # the number of the job's own aggregators; ranks have numbers from 0 on
MAX_REASON_CHARACTERS = 1000

_LENGTH = struct.Struct(">I")
_Number = Annotated[int, Meta(ge=AGGREGATOR, le=2**31)]
_Pid = Annotated[int, Meta(ge=1, le=2**31)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS)]


class Start(Struct, frozen=True, tag="start"):
    """Start a process under `number`. `environ` is its environment; if it `inherits` the supervisor's, `environ` adds
    to that. `given`: the bytes of its standard input. `with_result`: it also has the stream RESULT; the variable
    RESULT_FD has the descriptor."""

    number: int
    words: list[bytes]
    environ: dict[bytes, bytes]
    folder: bytes
    inherits: bool = False
    given: bytes = b""
    with_result: bool = False


class Signal(Struct, frozen=True, tag="signal"):
    """Send a signal to the group of a process, or with ALL_RANKS to the groups of all ranks."""

    number: int
    signal: int


class Greeting(Struct, frozen=True, tag="greeting"):
    """The first message: the supervisor runs. `port` was free on all addresses of its host just now. `ssh`: the text of
    sshd about its connection, with address and port of both ends."""

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
    """A process has ended. `status` is its exit status, or minus the signal that ended it. `was_asked`: the supervisor
    had sent it a signal to end. `why`: a reason that the system knows, or empty."""

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
    """Takes bytes as they come, and gives the messages in them, each of at most `limit_bytes`. With `magic` all bytes
    before MAGIC are left out."""

    def __init__(self, limit_bytes: int, *, magic: bool = False) -> None:
        self._data, self._limit_bytes, self._seeks_magic = bytearray(), limit_bytes, magic

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete now. Raises ValueError for bytes that cannot be a message."""
        self._data += data
        if self._seeks_magic and not self._find_magic():
            return
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > self._limit_bytes:
                raise ValueError(f"a message of {length} bytes, expected at most {self._limit_bytes}")
            if len(self._data) < _LENGTH.size + length:
                return
            message = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
            del self._data[: _LENGTH.size + length]
            yield message

    def _find_magic(self) -> bool:
        start = self._data.find(MAGIC)
        if start < 0:
            if len(self._data) > MOST_NOISE:
                raise ValueError("much output, but not from a supervisor")
            return False
        del self._data[: start + len(MAGIC)]
        self._seeks_magic = False
        return True


PROGRAM = program_of("omnireduce.launch.supervisor")
SSH_OPTIONS = ("-T", "-x", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_KEPT_ERROR_LINES = 20  # last lines of standard error that are kept; an error repeats the last
_KILLED_S = 5.0  # the longest wait for the end of a killed supervisor: it may hang in the system


def supervisor_command(host: str, ssh: str, grace_s: float, *, is_remote: bool) -> list[str]:
    """The command that starts the supervisor of a host. Another host must have Python and this package at the same
    place as this host. Raises ConfigError if ssh is missing."""
    words = [sys.executable, "-P", "-c", PROGRAM, f"{grace_s:g}", TREE]
    if not is_remote:
        return words
    program = shlex.split(ssh)
    if not program or shutil.which(program[0]) is None:
        raise ConfigError(f"ssh: {ssh!r} was not found, and -H names {host}: install openssh-client, or use mpirun")
    remote = " ".join(map(shlex.quote, words))
    return [*program, *SSH_OPTIONS, "--", host, f"exec {remote}"]


def needs_ssh(host: str, launcher: str) -> bool:
    """Whether a host's supervisor is started by ssh: on other hosts, or on all hosts if the launcher is ssh."""
    return launcher == "ssh" or not is_this_host(host)


class Connection:
    """The supervisor of `host`, a child process or behind ssh. Raises TransportError when it cannot be started."""

    def __init__(self, host: str, words: Sequence[str], *, is_remote: bool) -> None:
        self.host, self.is_remote = host, is_remote
        self.port = 0  # from the greeting: the port where torch's ranks may meet
        self.ssh = ""  # from the greeting: the text of sshd about the addresses of both ends
        self.has_greeted = False
        self.is_lost = self._is_closed = False
        self.ssh_lines: deque[str] = deque(maxlen=_KEPT_ERROR_LINES)  # lines of ssh before the greeting
        self._frames = Frames(MOST_NEWS_BYTES, magic=True)
        # the rest of each order, and the number of the process that it starts, if no byte of it has gone yet
        self._waiting = deque[tuple[int | None, memoryview]]()
        try:
            self.popen = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE if is_remote else None,
                start_new_session=True, env={name: text for name, text in os.environ.items() if name != SSH_CONNECTION},
            )  # fmt: skip
        except OSError as error:
            raise TransportError(f"{host}: {words[0]} cannot be started: {error.strerror}") from error
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.orders, self.news = self.popen.stdin.fileno(), self.popen.stdout.fileno()
        self.errors = self.popen.stderr.fileno() if self.popen.stderr is not None else None
        os.set_blocking(self.orders, False)

    def send(self, order: Order) -> None:
        """Give an order. The bytes that the supervisor does not take now go with `write_some`."""
        if self._is_closed:
            return
        self._waiting.append((order.number if isinstance(order, Start) else None, memoryview(frame(order))))
        self.write_some()

    def withdraw(self) -> list[int]:
        """Take back the orders to start processes that have not gone yet; return the numbers of these processes."""
        numbers = [number for number, _ in self._waiting if number is not None]
        self._waiting = deque(order for order in self._waiting if order[0] is None)
        return numbers

    @property
    def waits(self) -> bool:
        """Whether orders wait to be written."""
        return bool(self._waiting)

    def write_some(self) -> None:
        """Write as much as the supervisor takes now."""
        try:
            while self._waiting:
                _, data = self._waiting[0]
                rest = data[os.write(self.orders, data) :]
                if rest:
                    self._waiting[0] = None, rest
                else:
                    self._waiting.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the supervisor is gone; `read_some` will show it
            self._waiting.clear()

    def read_some(self) -> list[News] | None:
        """The news that has come; None when there will be no more. Raises TransportError for invalid news."""
        data = os.read(self.news, CHUNK)
        if not data:
            self.is_lost = True
            return None
        try:
            return [decode_news(message) for message in self._frames.feed(data)]
        except ValueError as error:
            raise TransportError(f"{self.host}: its supervisor sent an invalid message: {error}") from error

    def close(self) -> None:
        """Give no more orders: the supervisor ends its processes, and then itself."""
        stdin = self.popen.stdin
        assert stdin is not None
        self._waiting.clear()
        self._is_closed = True
        if not stdin.closed:
            with suppress(OSError):
                stdin.close()

    def kill(self) -> None:
        """Kill the supervisor. Its processes end with it."""
        self.close()
        if self.popen.poll() is None:
            self.popen.kill()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_KILLED_S)
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()
