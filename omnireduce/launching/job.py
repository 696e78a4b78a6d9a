"""The launcher's loop: supervisors, ranks, their output, signals, and the end.

Steps: every supervisor greets; the aggregators of the job start, if it has its own; the ranks start; when the first one
fails, or a signal comes, all end. Everything waits in one selector, so nothing waits for something that is full.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from omnireduce.errors import ConfigError, OmniReduceError, TransportError
from omnireduce.launching.connection import Connection
from omnireduce.launching.messages import (
    CHUNK,
    EVERY,
    RESULT,
    STDERR,
    STDOUT,
    Ended,
    Failed,
    Greeting,
    News,
    Output,
    Signal,
    Start,
    Started,
)
from omnireduce.launching.output import Descriptor, Lines, Plain, Prefixed
from omnireduce.logs import tagged

AGGREGATOR = -2  # its number; ranks have 0 and more
READY_S = 600.0  # for an aggregator that must first compile its kernels
SLOWNESS_S = 10.0  # beyond the grace period, for supervisors to end
LAST_OUTPUT_S = 5.0  # for the last output to be taken, after the job was interrupted
_FATAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (*_FATAL, signal.SIGUSR1, signal.SIGUSR2)
log = logging.getLogger("omnireduce")


@dataclass
class Rank:
    """A process of the job, and where it runs."""

    number: int
    connection: Connection
    status: int | None = None
    pid: int = 0
    result: bytearray = field(default_factory=bytearray)


class InterruptedLaunchError(Exception):
    """A signal came before the ranks ran."""


class Job:
    """A job on some hosts. Use it as a context manager: at the end nothing of it is left.

    `output` gets what ranks write; `descriptors` are its sinks that may be full. `grace_s`: how long ranks have after
    SIGTERM.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        output: Prefixed | Plain,
        *,
        grace_s: float,
        descriptors: Sequence[Descriptor] = (),
    ) -> None:
        self.connections, self.output, self._grace_s = list(connections), output, grace_s
        self._descriptors = descriptors
        self.ranks: dict[int, Rank] = {}
        self.failed: Rank | None = None  # the first one
        self.reasons: dict[int, str] = {}  # why a rank could not be started
        self.signal = 0  # the one that ends the job
        self.called = ""  # what is in place of ranks, another launcher
        self.is_over = False  # ranks were told to end
        self._kill_at: float | None = None
        self._readable: dict[int, Callable[[], None]] = {}
        self._aggregator = Lines()
        self.ready: tuple[str, ...] = ()  # the addresses of the job's own aggregators
        self._give_back: Callable[[], None] = lambda: None
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self.watch(self._woken.fileno(), self._read_signals)
        for each in self.connections:
            self.watch_connection(each)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # signals

    def take_signals(self) -> None:
        """From now on signals to this process are the job's, until it is closed. Main thread only."""
        wakeup = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        # As nohup wants it, an ignored SIGHUP stays ignored.
        taken = [each for each in FORWARDED if signal.getsignal(each) != signal.SIG_IGN or each != signal.SIGHUP]
        before = {each: signal.signal(each, lambda *_: None) for each in taken}

        def give_back() -> None:
            for each, handler in before.items():
                signal.signal(each, handler)
            signal.set_wakeup_fd(wakeup)

        self._give_back = give_back

    def _read_signals(self) -> None:
        for number in self._woken.recv(CHUNK):
            if number in _FATAL and self.signal:
                self._send(signal.SIGKILL)
            elif number in FORWARDED:
                self.interrupt(number)

    def interrupt(self, number: int) -> None:
        """Give all ranks a signal; unless it is one for the ranks' own use, they have to end."""
        self._send(number)
        if number in _FATAL or number == signal.SIGPIPE:
            log.info("signal %d: all ranks end", number, extra=tagged("interrupted", signal=number))
            self.signal, self.is_over = number, True
            self._kill_at = self._kill_at or time.monotonic() + self._grace_s

    def _send(self, number: int) -> None:
        for each in self.connections:
            each.send(Signal(EVERY, number))

    def end_ranks(self) -> None:
        """Tell all ranks to end, and see to it."""
        if not self.is_over:
            self.is_over = True
            self._kill_at = time.monotonic() + self._grace_s
            self._send(signal.SIGTERM)

    # the loop

    def watch_connection(self, connection: Connection) -> None:
        """Listen to a supervisor."""
        if connection not in self.connections:
            self.connections.append(connection)
        self.watch(connection.news, lambda: self._hear(connection))
        if connection.errors is not None:
            self.watch(connection.errors, lambda: self._hear_errors(connection))

    def watch(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call `act` when the descriptor is readable."""
        self._readable[descriptor] = act

    def forget(self, descriptor: int) -> None:
        """Watch this descriptor no more."""
        self._readable.pop(descriptor, None)

    def wait_for(self, condition: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Take turns until the condition holds; whether it does before the limit."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not condition():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            self._turn(left_s)
        return True

    def _turn(self, limit_s: float | None) -> None:
        times = [] if limit_s is None else [limit_s]
        if self._kill_at is not None:
            times.append(max(0.0, self._kill_at - time.monotonic()))
        for key, _ in self._select(min(times, default=None)):
            if isinstance(key.data, list):
                for act in key.data:
                    act()
            elif key.fd in self._readable:
                self._readable[key.fd]()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            self._send(signal.SIGKILL)
        if not self.signal and any(each.is_broken for each in self._descriptors):
            self.interrupt(signal.SIGPIPE)

    def _select(self, limit_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        writers: dict[int, list[Callable[[], None]]] = {}
        for sink in self._descriptors:
            if sink.waits:
                writers.setdefault(sink.descriptor, []).append(sink.write_some)
        for each in self.connections:
            if each.waits:
                writers[each.orders] = [each.write_some]
        readers = self._readable
        if any(sink.is_full for sink in self._descriptors):
            readers = {self._woken.fileno(): self._read_signals}
        with selectors.DefaultSelector() as selector:
            for descriptor in readers:
                selector.register(descriptor, selectors.EVENT_READ)
            for descriptor, acts in writers.items():
                selector.register(descriptor, selectors.EVENT_WRITE, acts)
            return selector.select(limit_s)

    def _hear(self, connection: Connection) -> None:
        try:
            news = connection.read_some()
        except TransportError as error:
            log.error("%s", error, extra=tagged("host_lost", host=connection.host))
            news = None
        if news is None:
            self.forget(connection.news)
            connection.is_lost = True
            self._end_without(connection)
            self._host_lost(connection)
            return
        for each in news:
            self._take(connection, each)

    def _hear_errors(self, connection: Connection) -> None:
        assert connection.errors is not None
        data = os.read(connection.errors, CHUNK)
        if not data:
            del self._readable[connection.errors]
        elif connection.has_greeted:
            self.output.feed(connection.host, STDERR, data)
        else:
            connection.said.extend(line for line in data.decode(errors="replace").splitlines() if line.strip())

    def _take(self, connection: Connection, news: News) -> None:
        if isinstance(news, Greeting):
            connection.has_greeted, connection.port, connection.ssh = True, news.port, news.ssh
        elif isinstance(news, Output):
            self._take_output(news)
        elif isinstance(news, Started):
            if news.number in self.ranks:
                self.ranks[news.number].pid = news.pid
        elif isinstance(news, Failed | Ended):
            if isinstance(news, Failed):
                self.reasons[news.number] = f"{connection.host}: {news.reason}"
            rank = self.ranks.get(news.number)
            if rank is not None and rank.connection is connection:
                rank.status = news.status if isinstance(news, Ended) else 127
                self.output.finish(_name(rank.number))
                self._rank_ended(rank)

    def _take_output(self, news: Output) -> None:
        if news.stream == RESULT:
            self.ranks[news.number].result += news.data
        elif news.number == AGGREGATOR and news.stream == STDOUT:
            for line in self._aggregator.feed(news.data):
                word, *addresses = line.decode(errors="replace").split() or [""]
                if word == "ready":
                    self.ready = tuple(addresses)
        else:
            self.output.feed(_name(news.number), news.stream, news.data)

    # what happens

    def greet(self, limit_s: float) -> None:
        """Wait for all supervisors. Raises TransportError, which names a host that does not answer, and
        InterruptedLaunchError."""
        self.wait_for(
            lambda: bool(self.signal) or all(each.has_greeted or each.is_lost for each in self.connections), limit_s
        )
        if self.signal:
            raise InterruptedLaunchError
        for each in self.connections:
            if each.is_lost and each.errors is not None:
                self.wait_for(lambda each=each: each.errors not in self._readable, 1.0)  # type: ignore[misc]
            if not each.has_greeted:
                how = "ssh" if each.is_remote else "its supervisor"
                why = each.said[-1] if each.said else f"no answer within --start-timeout {limit_s:g} s"
                if each.is_lost and not each.said:
                    why = "it ended at once; are Python and omnireduce at the same place there as here?"
                raise TransportError(f"host {each.host}: {how}: {why.removeprefix('ssh: ')}")

    def start(self, number: int, connection: Connection, order: Start) -> None:
        """Start a process on a host."""
        self.ranks[number] = Rank(number, connection)
        connection.send(order)

    def await_aggregator(self) -> tuple[str, ...]:
        """The addresses of the job's own aggregators, when they are ready. Raises OmniReduceError when they cannot be;
        InterruptedLaunchError."""
        own = self.ranks[AGGREGATOR]
        done = self.wait_for(lambda: bool(self.ready or self.signal) or own.status is not None, READY_S)
        if self.signal:
            raise InterruptedLaunchError
        if not self.ready:
            why = "it ended" if done else f"it was not ready after {READY_S:g} s"
            raise TransportError(f"the aggregator of this job on {own.connection.host}: {why}")
        return self.ready

    def carry_out(self, begin: Callable[[], None]) -> int:
        """Take signals, `begin` the job, and wait for its end; the exit status. Raises OmniReduceError."""
        self.take_signals()
        try:
            begin()
        except InterruptedLaunchError:
            return self.status()
        status = self.run()
        self.complain()
        return status

    def run(self) -> int:
        """Wait for the ranks' end; the exit status: that of the first rank that failed, or of the signal."""
        self.wait_for(self._all_ended)
        return self.status()

    def status(self) -> int:
        """The exit status of the job as it is now."""
        if self.signal:
            return 128 + self.signal
        if self.failed is None or self.failed.status is None:
            return 0
        return self.failed.status if self.failed.status > 0 else 128 - self.failed.status

    def _running_on(self, connection: Connection) -> list[Rank]:
        return [each for each in self.ranks.values() if each.connection is connection and each.status is None]

    def _all_ended(self) -> bool:
        return all(each.status is not None for each in self.ranks.values() if each.number >= 0)

    def _rank_ended(self, rank: Rank) -> None:
        if rank.number in self.reasons and not self.is_over:
            self.failed = rank
            self.end_ranks()
        elif rank.number < 0:
            if self.ready and not self.is_over:
                self._fail(rank, "the aggregator of this job", rank.status or 1)
        elif rank.status and not self.is_over:
            self._fail(rank, self.called or f"rank {rank.number}", rank.status)

    def _fail(self, rank: Rank, what: str, status: int) -> None:
        how = f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
        where = f"{what} on {rank.connection.host}"
        rank.status, self.failed = status, rank
        number = rank.number if rank.number >= 0 else None
        log.error("%s %s; the others end", where, how, extra=tagged("rank_failed", rank=number, status=status))
        self.end_ranks()

    def _end_without(self, connection: Connection) -> None:
        """The system ends ranks whose supervisor is gone, but not their children; those here can be reached."""
        for each in self._running_on(connection):
            if each.pid and not connection.is_remote:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(each.pid, signal.SIGKILL)

    def _host_lost(self, connection: Connection) -> None:
        lost = self._running_on(connection)
        for each in lost:
            each.status = 1
        if lost and not self.is_over:
            self.failed = lost[0]
            log.error("lost host %s", connection.host, extra=tagged("host_lost", host=connection.host))
            self.end_ranks()

    def give_up(self, connection: Connection) -> None:
        """Forget a supervisor that has not greeted: it has started nothing."""
        for descriptor in (connection.news, connection.errors):
            self._readable.pop(-1 if descriptor is None else descriptor, None)
        connection.kill()
        connection.is_lost = True

    def complain(self) -> None:
        """Raise ConfigError when a rank could not be started."""
        if self.failed is not None and self.failed.number in self.reasons:
            raise ConfigError(self.reasons[self.failed.number])

    def close(self) -> None:
        """End all that is left, with its output, within bounds."""
        self.is_over = True
        self._kill_at = None
        for each in self.connections:
            if each.has_greeted or each.is_lost:
                each.close()
            else:
                self.give_up(each)
        with suppress(OmniReduceError):
            while not self.wait_for(lambda: all(each.is_lost for each in self.connections), self._grace_s + SLOWNESS_S):
                if self.signal or not any(each.is_full for each in self._descriptors):
                    break
        self.output.close()
        limit_s = LAST_OUTPUT_S if self.signal else None
        self.wait_for(lambda: not any(each.waits for each in self._descriptors), limit_s)
        for each in self.connections:
            each.kill()
        self._give_back()
        self._woken.close()
        self._wakes.close()


def _name(number: int) -> str:
    return "aggregator" if number == AGGREGATOR else str(number)
