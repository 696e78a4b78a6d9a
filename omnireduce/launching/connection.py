"""A supervisor as the launcher sees it: a child of this process, or behind `ssh`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from omnireduce.errors import ConfigError, TransportError
from omnireduce.interpreters import TREE, program_of
from omnireduce.launching.hosts import is_here
from omnireduce.launching.messages import (
    CHUNK,
    MOST_NEWS_BYTES,
    SSH_CONNECTION,
    Frames,
    News,
    Order,
    Start,
    decode_news,
    frame,
)

PROGRAM = program_of("omnireduce.launching.supervisor")
SSH_OPTIONS = ("-T", "-x", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_SAID = 20  # lines of standard error that an error repeats the last of
_KILLED_S = 5.0  # for a supervisor to end that was killed: it may hang in the system


def words_of_supervisor(host: str, ssh: str, grace_s: float, *, by_ssh: bool) -> list[str]:
    """The command that starts the supervisor of a host. On another one Python and this package are at the same place as
    here. Raises ConfigError where ssh is missing."""
    words = [sys.executable, "-P", "-c", PROGRAM, f"{grace_s:g}", TREE]
    if not by_ssh:
        return words
    program = shlex.split(ssh)
    if not program or shutil.which(program[0]) is None:
        raise ConfigError(f"ssh: {ssh!r} is not there, and -H names {host}: install openssh-client, or use mpirun")
    remote = " ".join(map(shlex.quote, words))
    return [*program, *SSH_OPTIONS, "--", host, f"exec {remote}"]


def goes_by_ssh(host: str, launcher: str) -> bool:
    """Whether a host's supervisor is started by ssh: those of other hosts, or of all where that was asked for."""
    return launcher == "ssh" or not is_here(host)


class Connection:
    """The supervisor of `host`, a process of its own. Raises TransportError when it cannot be started."""

    def __init__(self, host: str, words: Sequence[str], *, is_remote: bool) -> None:
        self.host, self.is_remote = host, is_remote
        self.port = 0  # where torch's ranks may meet, once the supervisor has said so
        self.ssh = ""  # what sshd there says of the addresses of both ends, then
        self.has_greeted = False
        self.is_lost = self._is_closed = False
        self.said: deque[str] = deque(maxlen=_SAID)  # by ssh, before the greeting
        self._frames = Frames(MOST_NEWS_BYTES, magic=True)
        # what is left of each order, and the number of the process that it starts, if nothing of it has gone yet
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
        """Give an order. What the supervisor does not take now goes when `write_some` is called."""
        if self._is_closed:
            return
        self._waiting.append((order.number if isinstance(order, Start) else None, memoryview(frame(order))))
        self.write_some()

    def withdraw(self) -> list[int]:
        """Take back the orders to start processes that have not gone yet: the numbers of these processes."""
        numbers = [number for number, _ in self._waiting if number is not None]
        self._waiting = deque(order for order in self._waiting if order[0] is None)
        return numbers

    @property
    def waits(self) -> bool:
        """Whether orders are still here."""
        return bool(self._waiting)

    def write_some(self) -> None:
        """Write what the supervisor takes now."""
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
        except OSError:  # it is gone; the end of its news says so
            self._waiting.clear()

    def read_some(self) -> list[News] | None:
        """The news that have come; None when there will be no more. Raises TransportError for what makes no sense."""
        data = os.read(self.news, CHUNK)
        if not data:
            self.is_lost = True
            return None
        try:
            return [decode_news(message) for message in self._frames.feed(data)]
        except ValueError as error:
            raise TransportError(f"{self.host}: its supervisor says nonsense: {error}") from error

    def close(self) -> None:
        """Give no more orders: the supervisor ends what it has started, and then itself."""
        stdin = self.popen.stdin
        assert stdin is not None
        self._waiting.clear()
        self._is_closed = True
        if not stdin.closed:
            with suppress(OSError):
                stdin.close()

    def kill(self) -> None:
        """Forget the supervisor. What it has started ends with it."""
        self.close()
        if self.popen.poll() is None:
            self.popen.kill()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_KILLED_S)
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()
