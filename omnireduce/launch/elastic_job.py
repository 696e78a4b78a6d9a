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
from typing import Protocol

from omnireduce.errors import ConfigError, OmniReduceError
from omnireduce.launch.connection import CHUNK, STDERR, STDOUT, Connection, Signal
from omnireduce.launch.hosts import Host, Slot, parse_lines, place
from omnireduce.launch.job import InterruptedLaunchError, Job
from omnireduce.launch.launch import HERE, connect
from omnireduce.launch.loop import watch_input
from omnireduce.launch.output import Descriptor, Prefixed
from omnireduce.launch.plan import LaunchRequest, Plan, check_command
from omnireduce.launch.rank_variables import Rank, how_it_ended
from omnireduce.protocol.reminders import Reminders
from omnireduce.support.config import override_config
from omnireduce.support.files.paths import decode_text
from omnireduce.support.logs import tagged

LOOK_S = 5.0  # pause between two runs of the script
SCRIPT_S = 60.0  # the longest run of the script
KILLED_S = 5.0  # the longest wait for the end of a killed script: it may hang in the system
_MOST_LISTED = 1 << 20  # the most bytes that it may print
log = logging.getLogger("omnireduce")


class HostReceiver(Protocol):
    """A job that takes hosts, and watches descriptors."""

    def watch(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call `act` when the descriptor is readable."""

    def forget(self, descriptor: int) -> None:
        """Stop watching this descriptor."""

    def take_hosts(self, hosts: Sequence[Host]) -> None:
        """Use these hosts from now on."""


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
        self._begun: float | None = None  # the time of its last start
        self._text = bytearray()

    def look(self, job: HostReceiver) -> None:
        """Start the script, if it has not run for a while; `job.take_hosts` gets its hosts. Raises ConfigError if even
        its first run could not be started."""
        now = time.monotonic()
        since_s = LOOK_S if self._begun is None else now - self._begun
        if self._process is not None:
            if since_s > SCRIPT_S:
                self.close()
                self._complain(f"it took more than {SCRIPT_S:g} s")
        elif since_s >= LOOK_S:
            self._start(job)
            self._begun = now

    def _start(self, job: HostReceiver) -> None:
        try:
            process = subprocess.Popen(
                [self._script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            if self._begun is None:
                raise ConfigError(f"--host-discovery-script {self._script}: {error.strerror}") from None
            self._complain(str(error.strerror))  # for example, its file is just being replaced
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

    def _finish(self, job: HostReceiver, pid: int) -> None:
        ended, left = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT), _MOST_LISTED
        assert ended is not None
        while left > 0 and (many := self._read()):  # bounded: processes that it has started may print on
            left -= many
        self.close()
        if ended.si_status:
            how = "with status" if ended.si_code == os.CLD_EXITED else "by signal"
            self._complain(f"it ended {how} {ended.si_status}")
            return
        if len(self._text) > _MOST_LISTED:  # a list that is cut off would leave hosts out
            self._complain(f"it printed more than {_MOST_LISTED} bytes")
            return
        try:
            text = decode_text(bytes(self._text), "what it printed", expected="a list of hosts")
            hosts = parse_lines(text, "what it printed", self._slots)
        except ConfigError as error:
            self._complain(str(error))
        else:
            job.take_hosts(hosts)

    def _complain(self, why: str) -> None:
        log.warning("host discovery: %s: %s", self._script, why, extra=tagged("discovery_failed"))

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
class Record:
    """Failures of a host in a row, the time of the last failure, and the time until which it gets no rank."""

    failures: int = 0
    last: float = float("-inf")
    until: float = 0.0


class ElasticJob(Job):
    """A job of `size` ranks. Ranks that fail are started again."""

    def __init__(self, asked: LaunchRequest, output: Prefixed, sinks: Sequence[Descriptor]) -> None:
        super().__init__([], output, grace_s=asked.grace_s, descriptors=sinks)
        self._asked, self.size = asked, 0
        self.hosts: dict[str, Host] = {host.name: host for host in asked.hosts}
        self._records: dict[str, Record] = {}
        self._missing: dict[int, str] = {}  # ranks to start, each with its last host
        self._slots: dict[int, Slot] = {}  # the last slot of each rank
        self._resets, self._port = 0, 0
        self._plan: Plan | None = None
        self._is_finishing = False
        self._failed_after: int | None = None  # the first status of a failure after a rank had ended well
        self._too_few_since: float | None = None
        self._reminders = Reminders(0.0)  # reminders of too few ranks
        self._discovery = Discovery(asked.discovery_script, asked.slots_per_host) if asked.discovery_script else None
        self._kill_rank_at: dict[int, float] = {}  # for ranks that have to leave their host
        self._asked_at: dict[str, float] = {}  # the start of each host's supervisor

    def begin(self) -> None:
        """Start the job with the hosts known now. Raises OmniReduceError; InterruptedLaunchError."""
        asked = self._asked
        if self._discovery is not None:
            self._await_room(self._discovery)
        elif not self.hosts:
            self.hosts = {HERE: Host(HERE, asked.ranks)}
        if self.signal:
            raise InterruptedLaunchError
        self.size = min(asked.ranks, self._room())
        if self.size < asked.min_ranks:
            raise ConfigError(f"--min-np {asked.min_ranks}: the hosts have {self._room()} slots: give more")
        slots = place(list(self.hosts.values()), self.size)
        names = list(dict.fromkeys(slot.host for slot in slots))
        self._plan = Plan(asked, names, is_wide=self._discovery is not None)
        for name in names:
            self._connection(name)
        self.greet(asked.start_timeout_s)
        self._port = self.connections[0].port
        self._plan.serve(self, self.connections[0])
        for slot in slots:
            self.check()
            self._start(slot)

    def _await_room(self, discovery: Discovery) -> None:
        deadline, reminders = time.monotonic() + self._asked.elastic_timeout_s, Reminders(time.monotonic())
        while not (self.signal or self._room() >= self._asked.min_ranks):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            discovery.look(self)
            if waited_s := reminders.due(time.monotonic()):
                what = f"waiting for --min-np {self._asked.min_ranks} slots since {waited_s:.0f} s"
                log.warning("%s: there are %d", what, self._room(), extra=tagged("waiting_for_hosts"))
            self.wait_for(lambda: bool(self.signal) or self._room() >= self._asked.min_ranks, min(TURN_S, left_s))

    def run(self) -> int:
        """Wait for the end of the job; return the exit status."""
        while not self._is_done():
            self.wait_for(self._is_done, TURN_S)
            self._tend()
        return self.status()

    def _is_done(self) -> bool:
        return self._all_ended() and (self.is_over or self._is_finishing or not self._missing)

    def _room(self) -> int:
        return sum(host.slots for host in self.hosts.values())

    def _alive(self) -> int:
        return sum(rank.status is None for rank in self.ranks.values() if rank.number >= 0)

    def _slots_in_use(self) -> list[Slot]:
        return [slot for number, slot in self._slots.items() if self.ranks[number].status is None]

    def _connection(self, name: str) -> Connection:
        for known in self.connections:
            if known.host == name and not known.is_lost:
                return known
        with ExitStack() as stack:
            [connection] = connect([name], self._asked, stack)
            stack.pop_all()  # `close` ends it
        self._asked_at[name] = time.monotonic()
        self.watch_connection(connection)
        return connection

    def _start(self, slot: Slot) -> None:
        assert self._plan is not None
        connection = self._connection(slot.host)
        self._slots[slot.rank] = slot
        self._kill_rank_at.pop(slot.rank, None)
        self.start(slot.rank, connection, self._plan.rank(slot, self.size, connection, self._port))

    # ranks and hosts that fail

    def _rank_ended(self, rank: Rank) -> None:
        if rank.number < 0 or self.is_over or rank.number in self.reasons:
            super()._rank_ended(rank)
        elif self._is_finishing:
            self._failed_after = self._failed_after or rank.status or None
        elif rank.was_asked:  # with any status the training goes on
            self._again(rank)
        elif rank.status == 0:
            self._is_finishing = True
            self._missing.clear()
        else:
            self._again(rank)

    def _again(self, rank: Rank) -> None:
        host, limit = rank.connection.host, self._asked.reset_limit
        rank.status = rank.status or 1  # it has not ended the training
        self.failed = rank
        if limit is not None and self._resets >= limit:
            self._fail(rank, f"--reset-limit {limit} is reached: rank {rank.number}", rank.status)
            return
        self._resets += 1
        self._missing[rank.number] = host
        was_ours = self._kill_rank_at.pop(rank.number, None) is not None
        how = "ended because its host is no longer there" if was_ours else how_it_ended(rank, rank.status)
        what = f"rank {rank.number} on {host} {how}; it is started again"
        log.warning("%s", what, extra=tagged("rank_restarted", rank=rank.number, status=rank.status))
        if rank.was_asked and not was_ours:
            self._set_aside(host)
        elif not was_ours:
            self._blame(host)

    def _host_lost(self, connection: Connection) -> None:
        if self.is_over or self._is_finishing:
            super()._host_lost(connection)
            return
        lost = self._running_on(connection)
        if any(rank.number < 0 for rank in lost):
            super()._host_lost(connection)
            return
        log.warning("lost host %s", connection.host, extra=tagged("host_lost", host=connection.host))
        self._set_aside(connection.host)
        for rank in lost:
            rank.status = 1
            self._again(rank)

    def _blame(self, host: str) -> None:
        """Count a failure of a host. If failures follow each other soon, the host gets no ranks for a while."""
        record, now = self._records.setdefault(host, Record()), time.monotonic()
        is_soon = now - record.last < self._asked.cooldown_s[0]
        record.failures, record.last = record.failures + 1 if is_soon else 1, now
        if record.failures > max(1, self.hosts[host].slots if host in self.hosts else 1):
            self._set_aside(host)

    def _set_aside(self, host: str) -> None:
        record, (first, most) = self._records.setdefault(host, Record()), self._asked.cooldown_s
        record.failures = max(1, record.failures)
        pause_s = min(most, first * 2 ** min(20, record.failures - 1))
        record.until = record.last = time.monotonic() + pause_s
        log.warning("host %s gets no ranks for %g s", host, pause_s, extra=tagged("host_set_aside", host=host))

    # work of every turn

    def _tend(self) -> None:
        now = time.monotonic()
        self._kill_leaving(now)
        if self.is_over or self._is_finishing:
            return
        if self._discovery is not None:
            self._discovery.look(self)
        self._give_up_silent(now)
        for number in sorted(self._missing):
            self._place_again(number, now)
        self._count(now)

    def _give_up_silent(self, now: float) -> None:
        for connection in self.connections:
            begun = self._asked_at.get(connection.host, now)
            if not connection.has_greeted and not connection.is_lost and now - begun > self._asked.start_timeout_s:
                self.give_up(connection)
                self._set_aside(connection.host)

    def _place_again(self, number: int, now: float) -> None:
        used = Counter(slot.host for slot in self._slots_in_use())
        free = [
            host.name
            for host in self.hosts.values()
            if used[host.name] < host.slots and self._records.get(host.name, Record()).until <= now
        ]
        if not free:
            return
        name = self._missing[number] if self._missing[number] in free else free[0]
        try:
            connection = self._connection(name)
        except OmniReduceError as error:
            log.warning("%s", error, extra=tagged("host_lost", host=name))
            self._set_aside(name)
            return
        if connection.has_greeted:
            del self._missing[number]
            taken = {slot.local_rank for slot in self._slots_in_use() if slot.host == name}
            local = min(set(range(len(taken) + 1)) - taken)  # a free number: survivors use the devices of the others
            self._start(Slot(number, name, local, len(taken) + 1, 0, 1))

    def _count(self, now: float) -> None:
        """End the job if no rank is left that knows its state, or if there were too few ranks for too long."""
        alive = self._alive()
        if alive >= self._asked.min_ranks:
            self._too_few_since = None
            return
        if self._too_few_since is None:
            self._too_few_since, self._reminders = now, Reminders(now)
        limit_s = self._asked.elastic_timeout_s
        if alive and now - self._too_few_since < limit_s:
            if waited_s := self._reminders.due(now):
                what = f"waiting for hosts with room for --min-np {self._asked.min_ranks} ranks since {waited_s:.0f} s"
                log.warning("%s: there are %d ranks", what, alive, extra=tagged("waiting_for_hosts", ranks=alive))
            return
        why = "no rank is left" if not alive else f"fewer than --min-np {self._asked.min_ranks} ranks for {limit_s:g} s"
        log.error("%s; the job ends", why, extra=tagged("too_few_ranks", ranks=alive))
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
                self._kill_rank_at[rank.number] = time.monotonic() + self._asked.grace_s
                rank.connection.send(Signal(rank.number, signal.SIGTERM))

    def _kill_leaving(self, now: float) -> None:
        for number in [number for number, at in self._kill_rank_at.items() if at <= now]:
            del self._kill_rank_at[number]
            if self.ranks[number].status is None:
                self.ranks[number].connection.send(Signal(number, signal.SIGKILL))

    def status(self) -> int:
        """The exit status: 0 if the last ranks have ended well, else the status of the first that has not."""
        if not self.signal and self._is_finishing and not self.is_over:
            return 0 if self._failed_after is None else _positive(self._failed_after)
        return super().status()

    def close(self) -> None:
        """End all processes that are left."""
        if self._discovery is not None:
            self._discovery.close()
        super().close()


def _positive(status: int) -> int:
    return status if status > 0 else 128 - status


def launch_elastic(asked: LaunchRequest) -> int:
    """Run a command as all ranks of an elastic job, and return the exit status. Raises OmniReduceError."""
    check_command(asked.words, asked.environ)
    if asked.config.cluster.join_timeout_s < asked.elastic_timeout_s:  # survivors wait for others as long
        limit = {"cluster.join_timeout_s": min(86400.0, asked.elastic_timeout_s)}
        config = override_config(asked.config, limit, source="--elastic-timeout")
        environ = {**asked.environ, "OMNIREDUCE_CLUSTER_JOIN_TIMEOUT_S": f"{config.cluster.join_timeout_s:g}"}
        asked = replace(asked, config=config, environ=environ)
    sinks = {STDOUT: Descriptor(1), STDERR: Descriptor(2)}
    output = Prefixed(dict(sinks), timestamps=asked.timestamps)
    with ElasticJob(asked, output, list(sinks.values())) as job:
        watch_input(job)
        return job.carry_out(job.begin)
