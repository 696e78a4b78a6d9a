"""A job of a launch: supervisors, ranks, their output, and the end.

Steps: every supervisor greets; the aggregators of the job start, if it has its own; the ranks start; when the first
rank fails, or a signal comes, all end. All messages of supervisors are checked, because those of another host may be
anything.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from omnireduce.errors import ConfigError, OmniReduceError, TransportError
from omnireduce.launch.connection import (
    AGGREGATOR,
    ALL_RANKS,
    CHUNK,
    MAX_REASON_CHARACTERS,
    RESULT,
    STDERR,
    STDOUT,
    Connection,
    Ended,
    Greeting,
    News,
    Output,
    RankFailed,
    Signal,
    Start,
    Started,
)
from omnireduce.launch.launched_rank import LaunchedRank, exit_status, how_it_ended
from omnireduce.launch.loop import FATAL, Loop
from omnireduce.launch.output import DescriptorSink, LineSplitter, PrefixedOutput, UnchangedOutput
from omnireduce.support.addresses import parse_address
from omnireduce.support.logs import tagged

READY_S = 600.0  # the longest wait for an aggregator, which may have to compile its kernels
SLOWNESS_S = 10.0  # the wait for supervisors to end, beyond the grace period
LAST_OUTPUT_S = 5.0  # the longest wait for readers of the last output, after the job was interrupted
MOST_RESULT_BYTES = 1 << 31  # the largest result of a rank's function
log = logging.getLogger("omnireduce")


class InterruptedLaunchError(Exception):
    """A signal came before the ranks ran."""


class LaunchedJob(Loop):
    """A job on some hosts. Use it as a context manager: at the end no process of it is left.

    `output` gets the output of ranks; `descriptors` are its sinks that may be full. `grace_s`: the time that ranks have
    after SIGTERM.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        output: PrefixedOutput | UnchangedOutput,
        *,
        grace_s: float,
        descriptors: Sequence[DescriptorSink] = (),
    ) -> None:
        super().__init__(connections, descriptors)
        self.output, self._grace_s = output, grace_s
        self.ranks: dict[int, LaunchedRank] = {}
        self.failed: LaunchedRank | None = None  # the first rank that failed
        self.reasons: dict[int, str] = {}  # why a rank could not be started
        self.signal = 0  # the signal that ends the job
        self.launcher_name = ""  # the name of another launcher, if it runs in place of ranks
        self.is_ending = False  # ranks were told to end
        self._is_hurried = False  # a second signal came
        self._host_lost_early = ""  # a host that was lost before its ranks were started
        self._aggregator_lines = LineSplitter()
        self.ready: tuple[str, ...] = ()  # the addresses of the job's own aggregators
        for connection in self.connections:
            self.watch_connection(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # the end

    def take_signal(self, number: int) -> None:
        """Pass a signal on to all ranks. If it is a signal to end, they have to end, and after a second signal at
        once."""
        if number == signal.SIGPIPE and self.signal:
            return
        if number in FATAL and self.signal:
            self._is_hurried = True
            self._kill()
            return
        self._send(number)
        if number in FATAL or number == signal.SIGPIPE:
            log.info("signal %d: all ranks end", number, extra=tagged("interrupted", signal=number))
            self.signal = number
            self._begin_end()

    def end_ranks(self) -> None:
        """Tell all ranks to end, and kill ranks that do not."""
        if not self.is_ending:
            self._send(signal.SIGTERM)
            self._begin_end()

    def _begin_end(self) -> None:
        self.is_ending = True
        for connection in self.connections:
            for number in connection.withdraw():
                self.ranks[number].status = -(self.signal or signal.SIGTERM)
        self.call_after(self._grace_s, "kill", self._kill)

    def _kill(self) -> None:
        self._send(signal.SIGKILL)
        self.call_after(SLOWNESS_S, "give up", self._give_up_ranks)

    def _give_up_ranks(self) -> None:
        """Stop waiting for hosts that do not report the end of their ranks."""
        for connection in self.connections:
            ranks_left = self._running_on(connection)
            if ranks_left:
                text = f"host {connection.host} does not say that its ranks have ended; are they still there?"
                log.error("%s", text, extra=tagged("host_silent", host=connection.host))
                self.give_up(connection)
            for rank in ranks_left:
                rank.status = -signal.SIGKILL

    def _send(self, number: int) -> None:
        for connection in self.connections:
            connection.send(Signal(ALL_RANKS, number))

    # messages of supervisors

    def watch_connection(self, connection: Connection) -> None:
        """Listen to a supervisor."""
        if connection not in self.connections:
            self.connections.append(connection)
        self.watch(connection.news, lambda: self._read_news(connection))
        if connection.errors is not None:
            self.watch(connection.errors, lambda: self._read_errors(connection))

    def _read_news(self, connection: Connection) -> None:
        try:
            news = connection.read_some()
            for message in news or ():
                self._handle_news(connection, message)
        except TransportError as error:
            log.error("%s", error, extra=tagged("host_lost", host=connection.host))
            self.give_up(connection)
            news = None
        if news is None:
            self.forget(connection.news)
            connection.is_lost = True
            self._end_ranks_of_lost(connection)
            self._host_lost(connection)

    def _read_errors(self, connection: Connection) -> None:
        assert connection.errors is not None
        data = os.read(connection.errors, CHUNK)
        if not data:
            self.forget(connection.errors)
        elif connection.has_greeted:
            self.output.feed(connection.host, STDERR, data)
        else:
            lines = data.decode(errors="replace").splitlines()
            connection.ssh_lines.extend(line[:MAX_REASON_CHARACTERS] for line in lines if line.strip())

    def _handle_news(self, connection: Connection, news: News) -> None:
        if isinstance(news, Greeting):
            connection.has_greeted, connection.port, connection.ssh = True, news.port, news.ssh
        elif isinstance(news, Output):
            self._take_output(connection, news)
        else:
            rank = self._rank(connection, news.number)
            if rank.connection is not connection:
                return  # it was started again elsewhere
            if isinstance(news, Started):
                rank.pid = news.pid
                return
            if isinstance(news, RankFailed):
                self.reasons[news.number] = f"{connection.host}: {news.reason}"
            else:
                rank.was_asked, rank.why = news.was_asked, news.why
            rank.status = news.status if isinstance(news, Ended) else 127
            self.output.finish(_name(rank.number))
            self._rank_ended(rank)

    def _rank(self, connection: Connection, number: int) -> LaunchedRank:
        """The process of this number. Raises TransportError if there is none."""
        if number not in self.ranks:
            raise TransportError(f"{connection.host}: its supervisor speaks of process {number}, which is not there")
        return self.ranks[number]

    def _take_output(self, connection: Connection, news: Output) -> None:
        rank = self._rank(connection, news.number)
        if news.stream == RESULT:
            rank.result += news.data if rank.connection is connection else b""
            if len(rank.result) > MOST_RESULT_BYTES:
                excess = f"more than {MOST_RESULT_BYTES} bytes"
                raise TransportError(f"{connection.host}: rank {rank.number} returns {excess}")
        elif news.number == AGGREGATOR and news.stream == STDOUT:
            for line in self._aggregator_lines.feed(news.data):
                word, *addresses = line.decode(errors="replace").split() or [""]
                if word == "ready":
                    self.ready = tuple(addresses)
        else:
            self.output.feed(_name(news.number), news.stream, news.data)

    # steps of the job

    def greet(self, limit_s: float) -> None:
        """Wait for all supervisors. Raises TransportError, which names a host that does not answer, and
        InterruptedLaunchError."""
        self.wait_for(lambda: self._cannot_begin or not self._silent_connections(), limit_s, self._silent_hosts)
        self.check()
        for connection in self.connections:
            if connection.is_lost and connection.errors is not None:
                self.wait_for(lambda connection=connection: not self.is_watched(connection.errors), 1.0)  # type: ignore[misc]
            if not connection.has_greeted:
                program = "ssh" if connection.is_remote else "its supervisor"
                reason = (
                    connection.ssh_lines[-1]
                    if connection.ssh_lines
                    else f"no answer within --start-timeout {limit_s:g} s"
                )
                if connection.is_lost and not connection.ssh_lines:
                    reason = "it ended at once; does it have Python and omnireduce at the same place as this host?"
                raise TransportError(f"host {connection.host}: {program}: {reason.removeprefix('ssh: ')}")

    def _silent_connections(self) -> list[Connection]:
        return [connection for connection in self.connections if not connection.has_greeted and not connection.is_lost]

    def _silent_hosts(self) -> str:
        return ", ".join(connection.host for connection in self._silent_connections() if connection.is_remote)[
            :MAX_REASON_CHARACTERS
        ]

    @property
    def _cannot_begin(self) -> bool:
        """Whether the job cannot begin any more."""
        return bool(self.signal or self._host_lost_early)

    def check(self) -> None:
        """Handle events while the job begins. Raises InterruptedLaunchError, and TransportError for a lost host."""
        self.turn()
        if self.signal:
            raise InterruptedLaunchError
        if self._host_lost_early:
            raise TransportError(f"lost host {self._host_lost_early} before its ranks were started")

    def start(self, number: int, connection: Connection, order: Start) -> None:
        """Start a process on a host."""
        self.ranks[number] = LaunchedRank(number, connection)
        connection.send(order)

    def await_aggregator(self, shards: int) -> tuple[str, ...]:
        """Wait for the job's own aggregators; return their addresses. Raises TransportError if they cannot start;
        InterruptedLaunchError."""
        aggregator = self.ranks[AGGREGATOR]
        has_happened = self.wait_for(
            lambda: bool(self.ready) or self._cannot_begin or aggregator.status is not None, READY_S
        )
        self.check()
        if not self.ready:
            reason = "it ended" if has_happened else f"it was not ready after {READY_S:g} s"
            raise TransportError(f"the aggregator of this job on {aggregator.connection.host}: {reason}")
        try:
            if len(self.ready) != shards or not all(parse_address(address).port for address in self.ready):
                raise ConfigError(f"got {len(self.ready)} addresses, expected {shards} with ports")
        except ConfigError as error:
            process = f"the aggregator of this job on {aggregator.connection.host}"
            raise TransportError(f"{process} does not give valid addresses: {error}") from None
        return self.ready

    def carry_out(self, begin: Callable[[], None]) -> int:
        """Take signals, `begin` the job, and wait for its end; return the exit status. Raises OmniReduceError."""
        self.take_signals()
        try:
            begin()
        except InterruptedLaunchError:
            return self.status()
        status = self.run()
        self.complain()
        return status

    def run(self) -> int:
        """Wait for the end of the ranks; return the exit status: of the first rank that failed, or of the signal."""
        self.wait_for(self._all_ended)
        return self.status()

    def status(self) -> int:
        """The exit status of the job as it is now."""
        if self.signal:
            return 128 + self.signal
        if self.failed is None or self.failed.status is None:
            return 0
        return exit_status(self.failed.status)

    def _running_on(self, connection: Connection) -> list[LaunchedRank]:
        return [rank for rank in self.ranks.values() if rank.connection is connection and rank.status is None]

    def _all_ended(self) -> bool:
        return all(rank.status is not None for rank in self.ranks.values() if rank.number >= 0)

    def _rank_ended(self, rank: LaunchedRank) -> None:
        if rank.number in self.reasons and not self.is_ending:
            self.failed = rank
            self.end_ranks()
        elif rank.number < 0:
            if self.ready and not self.is_ending:
                self._fail(rank, "the aggregator of this job", rank.status or 1)
        elif (rank.status or rank.was_asked) and not self.is_ending:
            self._fail(rank, self.launcher_name or f"rank {rank.number}", rank.status or 1)

    def _fail(self, rank: LaunchedRank, process: str, status: int) -> None:
        end, place_of_process = how_it_ended(rank, status), f"{process} on {rank.connection.host}"
        rank.status, self.failed = status, rank
        number = rank.number if rank.number >= 0 else None
        log.error(
            "%s %s; the others end", place_of_process, end, extra=tagged("rank_failed", rank=number, status=status)
        )
        self.end_ranks()

    def _end_ranks_of_lost(self, connection: Connection) -> None:
        """End ranks whose supervisor is gone. The system ends the ranks, but not their children; on this host they can
        be reached."""
        for rank in self._running_on(connection):
            if rank.pid and not connection.is_remote:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, signal.SIGKILL)

    def _host_lost(self, connection: Connection) -> None:
        lost_ranks = self._running_on(connection)
        for rank in lost_ranks:
            rank.status = 1
        if connection.has_greeted and not any(rank.connection is connection for rank in self.ranks.values()):
            self._host_lost_early = connection.host
        if lost_ranks and not self.is_ending:
            self.failed = lost_ranks[0]
            log.error("lost host %s", connection.host, extra=tagged("host_lost", host=connection.host))
            self.end_ranks()

    def give_up(self, connection: Connection) -> None:
        """Give up a silent supervisor."""
        for descriptor in (connection.news, connection.errors):
            if descriptor is not None:
                self.forget(descriptor)
        self._end_ranks_of_lost(connection)
        connection.kill()
        connection.is_lost = True

    def complain(self) -> None:
        """Raise ConfigError if a rank could not be started."""
        if self.failed is not None and self.failed.number in self.reasons:
            raise ConfigError(self.reasons[self.failed.number])

    def close(self) -> None:
        """End all processes that are left, and write their output, within bounds."""
        self.is_ending = True
        for connection in self.connections:
            if connection.has_greeted or connection.is_lost:
                connection.close()
            else:
                self.give_up(connection)
        with suppress(OmniReduceError):
            while not self.wait_for(self._may_stop_waiting, self._grace_s + SLOWNESS_S):
                if self.signal or not any(descriptor.is_full for descriptor in self.sinks):
                    break
        self.output.close()
        self.wait_for(lambda: bool(self.signal) or self._is_output_written())  # a reader may take its time
        self.wait_for(lambda: self._is_hurried or self._is_output_written(), LAST_OUTPUT_S)
        for connection in self.connections:
            connection.kill()
        super().close()

    def _may_stop_waiting(self) -> bool:
        return self._is_hurried or all(connection.is_lost for connection in self.connections)

    def _is_output_written(self) -> bool:
        return not any(sink.waits for sink in self.sinks)


def _name(number: int) -> str:
    return "aggregator" if number == AGGREGATOR else str(number)
