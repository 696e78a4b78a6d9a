"""Event loop of the launcher: descriptors, times and signals. It also watches standard input, which ranks do not
get."""

from __future__ import annotations

import array
import fcntl
import logging
import os
import selectors
import signal
import socket
import stat
import termios
import time
from collections.abc import Callable, Sequence

from omnireduce.launch.connection import CHUNK, Connection
from omnireduce.launch.output import DescriptorSink
from omnireduce.protocol.wait_notices import FIRST_S, WaitNotices
from omnireduce.support.logs import tagged

FATAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (*FATAL, signal.SIGUSR1, signal.SIGUSR2)
Act = Callable[[], None]
log = logging.getLogger("omnireduce")


class Loop:
    """Calls functions when a descriptor is readable, when a time has come, and for signals. It writes waiting output to
    `sinks`, which may be full, and to `connections`."""

    def __init__(self, connections: Sequence[Connection], sinks: Sequence[DescriptorSink]) -> None:
        self.connections, self.sinks = list(connections), sinks
        self._readable: dict[int, Act] = {}
        self._alarms: dict[str, tuple[float, Act]] = {}
        self._restore_signals: Act = lambda: None
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self.watch(self._wake_reader.fileno(), self._read_signals)

    def take_signal(self, number: int) -> None:
        """Handle a signal, or SIGPIPE: a sink has no reader any more."""
        raise NotImplementedError

    def take_signals(self) -> None:
        """Let the loop handle signals to this process, until it is closed. Main thread only."""
        wakeup = signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        # For nohup, an ignored SIGHUP stays ignored.
        handled = [
            signum for signum in FORWARDED if signal.getsignal(signum) != signal.SIG_IGN or signum != signal.SIGHUP
        ]
        former_handlers = {signum: signal.signal(signum, lambda *_: None) for signum in handled}

        def restore() -> None:
            for signum, handler in former_handlers.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(wakeup)

        self._restore_signals = restore

    def _read_signals(self) -> None:
        for number in self._wake_reader.recv(CHUNK):
            if number in FORWARDED:
                self.take_signal(number)

    def watch(self, descriptor: int, act: Act) -> None:
        """Call `act` when the descriptor is readable."""
        self._readable[descriptor] = act

    def forget(self, descriptor: int) -> None:
        """Stop watching this descriptor."""
        self._readable.pop(descriptor, None)

    def is_watched(self, descriptor: int) -> bool:
        """Whether the descriptor is watched."""
        return descriptor in self._readable

    def call_after(self, seconds: float, name: str, act: Act) -> None:
        """Call `act` after `seconds`. A later call with the same `name` replaces it."""
        at = time.monotonic() + seconds
        self._alarms[name] = min(self._alarms.get(name, (at, act)), (at, act), key=lambda alarm: alarm[0])

    def wait_for(
        self, condition: Callable[[], bool], limit_s: float | None = None, awaited: Callable[[], str] | None = None
    ) -> bool:
        """Take turns until the condition holds; return whether it holds before the limit. Without a limit, functions of
        `call_after` and `take_signal` must make it hold. After 1, 2, 4, ... seconds it logs for `awaited` it waits."""
        now = time.monotonic()
        deadline, reminders = None if limit_s is None else now + limit_s, WaitNotices(now)
        while not condition():
            now = time.monotonic()
            left_s = None if deadline is None else deadline - now
            if left_s is not None and left_s <= 0:
                return False
            if awaited is not None:
                left_s = min(left_s or FIRST_S, max(0.0, reminders.at - now))
                if (waited_s := reminders.due(now)) and (names := awaited()):
                    log.warning("waiting for %s since %.0f s", names, waited_s, extra=tagged("waiting_for_hosts"))
            self.turn(left_s)
        return True

    def turn(self, limit_s: float | None = 0.0) -> None:
        """Wait for events, up to the limit, and handle them."""
        times = [at - time.monotonic() for at, _ in self._alarms.values()] + ([] if limit_s is None else [limit_s])
        for key, _ in self._select(max(0.0, min(times)) if times else None):
            if isinstance(key.data, list):
                for act in key.data:
                    act()
            elif key.fd in self._readable:
                self._readable[key.fd]()
        now = time.monotonic()
        for name in [name for name, (at, _) in self._alarms.items() if at <= now]:
            self._alarms.pop(name)[1]()
        if any(sink.is_broken for sink in self.sinks):
            self.take_signal(signal.SIGPIPE)

    def _select(self, limit_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        writers: dict[int, list[Act]] = {}
        for sink in self.sinks:
            if sink.waits:
                writers.setdefault(sink.descriptor, []).append(sink.write_some)
        for connection in self.connections:
            if connection.waits:
                writers[connection.orders] = [connection.write_some]
        readers = self._readable
        if any(sink.is_full for sink in self.sinks):
            readers = {self._wake_reader.fileno(): self._read_signals}
        with selectors.DefaultSelector() as selector:
            for descriptor in readers:
                selector.register(descriptor, selectors.EVENT_READ)
            for descriptor, acts in writers.items():
                selector.register(descriptor, selectors.EVENT_WRITE, acts)
            return selector.select(limit_s)

    def close(self) -> None:
        """Give signals back."""
        self._restore_signals()
        self._wake_reader.close()
        self._wake_writer.close()


def watch_input(loop: Loop, descriptor: int = 0) -> None:
    """Log once that ranks read nothing from standard input, if there is something to read."""
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            if os.lseek(descriptor, 0, os.SEEK_CUR) < status.st_size:
                _warn_input_not_read()
            return
    except OSError:  # it is closed
        return

    def check_input() -> None:
        loop.forget(descriptor)
        waiting_bytes = array.array("i", [0])
        fcntl.ioctl(descriptor, termios.FIONREAD, waiting_bytes)
        if waiting_bytes[0]:  # otherwise the input has ended
            _warn_input_not_read()

    if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or os.isatty(descriptor):
        loop.watch(descriptor, check_input)


def _warn_input_not_read() -> None:
    text = "ranks read nothing from standard input: give the program a file or arguments instead"
    log.warning("%s", text, extra=tagged("input_not_read"))
