"""An elastic job: a rank that fails is started again, on a free slot of some host.

The number of ranks is fixed when the job starts: as many as there are slots, up to --max-np. The remaining ranks go on
meanwhile, if they are --min-np or more (docs/reliability.md). When the first rank has ended well, none is started
again. The first rank that fails after that gives the job its status.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from omnireduce.errors import ConfigError, OmniReduceError
from omnireduce.launch.connection import CHUNK, STDERR, STDOUT, Connection, Signal
from omnireduce.launch.hosts import Host, Slot, parse_lines, place_ranks
from omnireduce.launch.launch import LOCALHOST, connect
from omnireduce.launch.launched_job import InterruptedLaunchError, LaunchedJob
from omnireduce.launch.launched_rank import LaunchedRank, exit_status, how_it_ended
from omnireduce.launch.loop import watch_input
from omnireduce.launch.output import DescriptorSink, PrefixedOutput
from omnireduce.launch.plan import LaunchRequest, Plan, check_command
from omnireduce.protocol.wait_notices import WaitNotices
from omnireduce.support.config import override_config
from omnireduce.support.files.paths import decode_text
from omnireduce.support.logs import tagged

SCRIPT_PAUSE_S = 5.0  # pause between two runs of the script
SCRIPT_S = 60.0  # the longest run of the script
KILLED_S = 5.0  # the longest wait for the end of a killed script: it may hang in the system
_MOST_LISTED = 1 << 20  # the most bytes that it may print
log = logging.getLogger("omnireduce")


class Discovery:
    """Runs the script, without waiting for it. `slots`: the slots of hosts for which it prints no number.

    The script is over when its process has ended, even if its output was closed before, or another process still has
    it. The other processes of its group end with it.
    """

    def __init__(self, script: str, slots: int) -> None:
        self._script, self._slots = script, slots
        self._process: subprocess.Popen[bytes] | None = None
        self._output = self._end = -1  # descriptors: its output, and a descriptor that is readable when it is over
        self._unwatch: Callable[[int], None] = lambda _: None
        self._started_at: float | None = None  # the time of its last start
        self._text = bytearray()

    def start_if_due(self, job: ElasticJob) -> None:
        """Start the script, if it has not run for a while; `job.take_hosts` gets its hosts. Raises ConfigError if even
        its first run could not be started."""
        now = time.monotonic()
        since_s = SCRIPT_PAUSE_S if self._started_at is None else now - self._started_at
        if self._process is not None:
            if since_s > SCRIPT_S:
                self.close()
                self._warn(f"it took more than {SCRIPT_S:g} s")
        elif since_s >= SCRIPT_PAUSE_S:
            self._start(job)
            self._started_at = now

    def _start(self, job: ElasticJob) -> None:
        try:
            process = subprocess.Popen(
                [self._script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            if self._started_at is None:
                raise ConfigError(f"--host-discovery-script {self._script}: {error.strerror}") from None
            self._warn(str(error.strerror))  # for example, its file is just being replaced
            return
        assert process.stdout is not None
        self._process, self._text, self._unwatch = process, bytearray(), job.forget
        self._output, self._end = process.stdout.fileno(), os.pidfd_open(process.pid)
        os.set_blocking(self._output, False)

        def read() -> None:
            if not self._read():
                job.forget(self._output)  # the script has closed its output, but may go on

        job.watch(self._output, read)
        job.watch(self._end, lambda: self._finish(job, process.pid))

    def _read(self) -> int:
        """Read a piece of the script's output; return its number of bytes."""
        try:
            data = os.read(self._output, CHUNK)
        except BlockingIOError:
            return 0
        self._text += data[: _MOST_LISTED + 1 - len(self._text)]
        return len(data)

    def _finish(self, job: ElasticJob, pid: int) -> None:
        exit_info, left_bytes = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT), _MOST_LISTED
        assert exit_info is not None
        while left_bytes > 0 and (read_bytes := self._read()):  # bounded: processes that it has started may print on
            left_bytes -= read_bytes
        self.close()
        if exit_info.si_status:
            end_kind = "with status" if exit_info.si_code == os.CLD_EXITED else "by signal"
            self._warn(f"it ended {end_kind} {exit_info.si_status}")
            return
        if len(self._text) > _MOST_LISTED:  # a list that is cut off would leave hosts out
            self._warn(f"it printed more than {_MOST_LISTED} bytes")
            return
        try:
            text = decode_text(bytes(self._text), "what it printed", expected="a list of hosts")
            hosts = parse_lines(text, "what it printed", self._slots)
        except ConfigError as error:
            self._warn(str(error))
        else:
            job.take_hosts(hosts)

    def _warn(self, reason: str) -> None:
        log.warning("host discovery: %s: %s", self._script, reason, extra=tagged("discovery_failed"))

    def close(self) -> None:
        """End the script, if it still runs, and its process group. Until then no other process can have its number."""
        process, self._process = self._process, None
        if process is None:
            return
        for descriptor in (self._output, self._end):
            self._unwatch(descriptor)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        assert process.stdout is not None
        process.stdout.close()
        os.close(self._end)


TURN_S = 0.25


@dataclass
class HostRecord:
    """Failures of a host in a row, the time of the last failure, and the time until which it gets no rank."""

    failures: int = 0
    last_failure_at: float = float("-inf")
    paused_until: float = 0.0


class ElasticJob(LaunchedJob):
    """A job of `size` ranks. Ranks that fail are started again."""

    def __init__(self, request: LaunchRequest, output: PrefixedOutput, sinks: Sequence[DescriptorSink]) -> None:
        super().__init__([], output, grace_s=request.grace_s, descriptors=sinks)
        self._request, self.size = request, 0
        self.hosts: dict[str, Host] = {host.name: host for host in request.hosts}
        self._records: dict[str, HostRecord] = {}
        self._missing: dict[int, str] = {}  # ranks to start, each with its last host
        self._slots: dict[int, Slot] = {}  # the last slot of each rank
        self._resets, self._port = 0, 0
        self._plan: Plan | None = None
        self._is_finishing = False
        self._failed_after: int | None = None  # the first status of a failure after a rank had ended well
        self._too_few_since: float | None = None
        self._reminders = WaitNotices(0.0)  # reminders of too few ranks
        self._discovery = (
            Discovery(request.discovery_script, request.slots_per_host) if request.discovery_script else None
        )
        self._kill_rank_at: dict[int, float] = {}  # for ranks that have to leave their host
        self._supervisor_started_at: dict[str, float] = {}  # by host

    def begin(self) -> None:
        """Start the job with the hosts known now. Raises OmniReduceError; InterruptedLaunchError."""
        request = self._request
        if self._discovery is not None:
            self._await_slots(self._discovery)
        elif not self.hosts:
            self.hosts = {LOCALHOST: Host(LOCALHOST, request.ranks)}
        if self.signal:
            raise InterruptedLaunchError
        self.size = min(request.ranks, self._count_slots())
        if self.size < request.min_ranks:
            raise ConfigError(f"--min-np {request.min_ranks}: the hosts have {self._count_slots()} slots: give more")
        slots = place_ranks(list(self.hosts.values()), self.size)
        names = list(dict.fromkeys(slot.host for slot in slots))
        self._plan = Plan(request, names, may_grow=self._discovery is not None)
        for name in names:
            self._connection(name)
        self.greet(request.start_timeout_s)
        self._port = self.connections[0].port
        self._plan.serve(self, self.connections[0])
        for slot in slots:
            self.check()
            self._start(slot)

    def _await_slots(self, discovery: Discovery) -> None:
        deadline, reminders = time.monotonic() + self._request.elastic_timeout_s, WaitNotices(time.monotonic())
        while not (self.signal or self._count_slots() >= self._request.min_ranks):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            discovery.start_if_due(self)
            if waited_s := reminders.due(time.monotonic()):
                text = f"waiting for --min-np {self._request.min_ranks} slots since {waited_s:.0f} s"
                log.warning("%s: there are %d", text, self._count_slots(), extra=tagged("waiting_for_hosts"))
            self.wait_for(
                lambda: bool(self.signal) or self._count_slots() >= self._request.min_ranks, min(TURN_S, left_s)
            )

    def run(self) -> int:
        """Wait for the end of the job; return the exit status."""
        while not self._is_done():
            self.wait_for(self._is_done, TURN_S)
            self._handle_turn()
        return self.status()

    def _is_done(self) -> bool:
        return self._all_ended() and (self.is_ending or self._is_finishing or not self._missing)

    def _count_slots(self) -> int:
        return sum(host.slots for host in self.hosts.values())

    def _count_running_ranks(self) -> int:
        return sum(rank.status is None for rank in self.ranks.values() if rank.number >= 0)

    def _slots_in_use(self) -> list[Slot]:
        return [slot for number, slot in self._slots.items() if self.ranks[number].status is None]

    def _connection(self, name: str) -> Connection:
        for connection in self.connections:
            if connection.host == name and not connection.is_lost:
                return connection
        with ExitStack() as stack:
            [connection] = connect([name], self._request, stack)
            stack.pop_all()  # `close` ends it
        self._supervisor_started_at[name] = time.monotonic()
        self.watch_connection(connection)
        return connection

    def _start(self, slot: Slot) -> None:
        assert self._plan is not None
        connection = self._connection(slot.host)
        self._slots[slot.rank] = slot
        self._kill_rank_at.pop(slot.rank, None)
        self.start(slot.rank, connection, self._plan.rank(slot, self.size, connection, self._port))

    # ranks and hosts that fail

    def _rank_ended(self, rank: LaunchedRank) -> None:
        if rank.number < 0 or self.is_ending or rank.number in self.reasons:
            super()._rank_ended(rank)
        elif self._is_finishing:
            self._failed_after = self._failed_after or rank.status or None
        elif rank.was_asked:  # with any status the training goes on
            self._restart(rank)
        elif rank.status == 0:
            self._is_finishing = True
            self._missing.clear()
        else:
            self._restart(rank)

    def _restart(self, rank: LaunchedRank) -> None:
        host, limit = rank.connection.host, self._request.reset_limit
        rank.status = rank.status or 1  # it has not ended the training
        self.failed = rank
        if limit is not None and self._resets >= limit:
            self._fail(rank, f"--reset-limit {limit} is reached: rank {rank.number}", rank.status)
            return
        self._resets += 1
        self._missing[rank.number] = host
        was_ended_by_us = self._kill_rank_at.pop(rank.number, None) is not None
        end = "ended because its host is no longer there" if was_ended_by_us else how_it_ended(rank, rank.status)
        text = f"rank {rank.number} on {host} {end}; it is started again"
        log.warning("%s", text, extra=tagged("rank_restarted", rank=rank.number, status=rank.status))
        if rank.was_asked and not was_ended_by_us:
            self._pause_host(host)
        elif not was_ended_by_us:
            self._count_failure(host)

    def _host_lost(self, connection: Connection) -> None:
        if self.is_ending or self._is_finishing:
            super()._host_lost(connection)
            return
        lost = self._running_on(connection)
        if any(rank.number < 0 for rank in lost):
            super()._host_lost(connection)
            return
        log.warning("lost host %s", connection.host, extra=tagged("host_lost", host=connection.host))
        self._pause_host(connection.host)
        for rank in lost:
            rank.status = 1
            self._restart(rank)

    def _count_failure(self, host: str) -> None:
        """Count a failure of a host. If failures follow each other soon, the host gets no ranks for a while."""
        record, now = self._records.setdefault(host, HostRecord()), time.monotonic()
        is_soon = now - record.last_failure_at < self._request.cooldown_s[0]
        record.failures, record.last_failure_at = record.failures + 1 if is_soon else 1, now
        if record.failures > max(1, self.hosts[host].slots if host in self.hosts else 1):
            self._pause_host(host)

    def _pause_host(self, host: str) -> None:
        record, (first_s, longest_s) = self._records.setdefault(host, HostRecord()), self._request.cooldown_s
        record.failures = max(1, record.failures)
        pause_s = min(longest_s, first_s * 2 ** min(20, record.failures - 1))
        record.paused_until = record.last_failure_at = time.monotonic() + pause_s
        log.warning("host %s gets no ranks for %g s", host, pause_s, extra=tagged("host_set_aside", host=host))

    # in every turn of the loop

    def _handle_turn(self) -> None:
        now = time.monotonic()
        self._kill_leaving_ranks(now)
        if self.is_ending or self._is_finishing:
            return
        if self._discovery is not None:
            self._discovery.start_if_due(self)
        self._give_up_silent_hosts(now)
        for number in sorted(self._missing):
            self._place_missing_rank(number, now)
        self._check_rank_count(now)

    def _give_up_silent_hosts(self, now: float) -> None:
        for connection in self.connections:
            started_at = self._supervisor_started_at.get(connection.host, now)
            if (
                not connection.has_greeted
                and not connection.is_lost
                and now - started_at > self._request.start_timeout_s
            ):
                self.give_up(connection)
                self._pause_host(connection.host)

    def _place_missing_rank(self, number: int, now: float) -> None:
        used_slots = Counter(slot.host for slot in self._slots_in_use())
        free_hosts = [
            host.name
            for host in self.hosts.values()
            if used_slots[host.name] < host.slots and self._records.get(host.name, HostRecord()).paused_until <= now
        ]
        if not free_hosts:
            return
        name = self._missing[number] if self._missing[number] in free_hosts else free_hosts[0]
        try:
            connection = self._connection(name)
        except OmniReduceError as error:
            log.warning("%s", error, extra=tagged("host_lost", host=name))
            self._pause_host(name)
            return
        if connection.has_greeted:
            del self._missing[number]
            taken_local_ranks = {slot.local_rank for slot in self._slots_in_use() if slot.host == name}
            # a free number: survivors use the devices of the others
            local_rank = min(set(range(len(taken_local_ranks) + 1)) - taken_local_ranks)
            self._start(Slot(number, name, local_rank, len(taken_local_ranks) + 1, 0, 1))

    def _check_rank_count(self, now: float) -> None:
        """End the job if no rank is left that knows its state, or if there were too few ranks for too long."""
        running = self._count_running_ranks()
        if running >= self._request.min_ranks:
            self._too_few_since = None
            return
        if self._too_few_since is None:
            self._too_few_since, self._reminders = now, WaitNotices(now)
        limit_s = self._request.elastic_timeout_s
        if running and now - self._too_few_since < limit_s:
            if waited_s := self._reminders.due(now):
                text = (
                    f"waiting for hosts with room for --min-np {self._request.min_ranks} ranks since {waited_s:.0f} s"
                )
                log.warning("%s: there are %d ranks", text, running, extra=tagged("waiting_for_hosts", ranks=running))
            return
        too_few = f"fewer than --min-np {self._request.min_ranks} ranks for {limit_s:g} s"
        reason = too_few if running else "no rank is left"
        log.error("%s; the job ends", reason, extra=tagged("too_few_ranks", ranks=running))
        self._missing.clear()
        self.end_ranks()

    def take_hosts(self, hosts: Sequence[Host]) -> None:
        """Use these hosts from now on. Ranks on other hosts have to end, within the grace period, and are started
        elsewhere."""
        self.hosts = {host.name: host for host in hosts}
        if not self.size:
            return
        for rank in self.ranks.values():
            is_leaving = rank.number >= 0 and rank.status is None and rank.connection.host not in self.hosts
            if is_leaving and rank.number not in self._kill_rank_at:
                self._kill_rank_at[rank.number] = time.monotonic() + self._request.grace_s
                rank.connection.send(Signal(rank.number, signal.SIGTERM))

    def _kill_leaving_ranks(self, now: float) -> None:
        for number in [number for number, at in self._kill_rank_at.items() if at <= now]:
            del self._kill_rank_at[number]
            if self.ranks[number].status is None:
                self.ranks[number].connection.send(Signal(number, signal.SIGKILL))

    def status(self) -> int:
        """The exit status: 0 if the last ranks have ended well, else the status of the first that has not."""
        if not self.signal and self._is_finishing and not self.is_ending:
            return 0 if self._failed_after is None else exit_status(self._failed_after)
        return super().status()

    def close(self) -> None:
        """End all processes that are left."""
        if self._discovery is not None:
            self._discovery.close()
        super().close()


def launch_elastic(request: LaunchRequest) -> int:
    """Run a command as all ranks of an elastic job, and return the exit status. Raises OmniReduceError."""
    check_command(request.words, request.environ)
    if request.config.cluster.join_timeout_s < request.elastic_timeout_s:  # survivors wait for others as long
        overrides = {"cluster.join_timeout_s": min(86400.0, request.elastic_timeout_s)}
        config = override_config(request.config, overrides, source="--elastic-timeout")
        environ = {**request.environ, "OMNIREDUCE_CLUSTER_JOIN_TIMEOUT_S": f"{config.cluster.join_timeout_s:g}"}
        request = replace(request, config=config, environ=environ)
    sinks = {STDOUT: DescriptorSink(1), STDERR: DescriptorSink(2)}
    output = PrefixedOutput(dict(sinks), timestamps=request.timestamps)
    with ElasticJob(request, output, list(sinks.values())) as job:
        watch_input(job)
        return job.carry_out(job.begin)
