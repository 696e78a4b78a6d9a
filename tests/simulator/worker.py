"""A rank as a process: joins every shard as `runtime.rendezvous` does, runs its collectives, leaves.

The program of a communicator without its threads: what blocks there is a state here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from omnireduce.dtypes import Array
from omnireduce.errors import OmniReduceError, RefusedError, TransportError
from omnireduce.protocol.effects import End
from omnireduce.protocol.rows import Pool, RowSet
from omnireduce.protocol.worker import WorkerMachine
from omnireduce.runtime.driver import Driver
from omnireduce.runtime.engine import GOODBYE_S
from omnireduce.runtime.handle import error_of
from omnireduce.runtime.rendezvous import RETRY_S, _who_is_missing, read_answer
from omnireduce.transport.base import Link
from omnireduce.transport.memory import private_slots
from omnireduce.transport.sim import SimLink
from omnireduce.wire import PROTOCOL_VERSION, Hello, Pending, Welcome, encode_control

from .audit import audit_worker
from .plan import JobPlan, ProtocolPlan
from .workload import Collective, Work
from .world import Process, World


class Cluster(Protocol):
    """What a worker needs of the cluster around it."""

    world: World
    protocol: ProtocolPlan

    workers: list[Worker]

    def connect(self, client: Process, shard: int) -> SimLink | None:
        """A connection to a shard, or None when nobody listens there."""

    def finished(self, worker: Worker, work: Work, number: int) -> None:
        """A collective is complete."""

    def ended(self, worker: Worker) -> None:
        """The worker's machine has come to its end; `error` is set."""

    def gone(self, worker: Worker) -> None:
        """The worker has come to its end."""


class Worker(Process):
    """`pid` tells workers of the same rank apart. After `gone`, `error` says why, or None when all its work is done."""

    def __init__(
        self, cluster: Cluster, job: JobPlan, rank: int, pid: int, latency_s: Callable[[], float], ahead_s: float
    ) -> None:
        super().__init__(cluster.world, f"{job.name} rank {rank} pid {pid}", latency_s, ahead_s)
        self.cluster, self.job, self.rank, self.pid = cluster, job, rank, pid
        self.program: Sequence[Collective] = job.collectives
        self.ranks = job.ranks  # what this rank believes the world size, the settings, the list of shards to be
        self.protocol = cluster.protocol
        self.shard_order = list(range(self.protocol.shards))
        self.nonsense: dict[str, Any] = {}  # what it says in its hello that nobody may
        self.links: list[SimLink] = []
        self.driver: Driver | None = None
        self.error: OmniReduceError | None = None
        self.ended_at: float | None = None
        self.clean = False  # confirmed by every shard
        self.joined = False
        self.found = ""  # what was wrong inside
        self.killed = False
        self.completed = 0  # collectives
        self._machine: WorkerMachine
        self._welcomes: set[SimLink] = set()
        self._missing: dict[Link, Pending] = {}
        self._join_by = 0.0
        self._close_by: float | None = None
        self._under_way: dict[int, Work] = {}
        self._pool = Pool()
        self.kept: list[tuple[int, Array, bytes]] = []  # rows that were a result, and what they were then
        self._submitted = 0
        self._think_until = 0.0
        self._random = self.world.random(self.name)

    @property
    def culprit(self) -> str:
        """What an error that blames this worker contains."""
        return f"rank {self.rank} (host host{self.rank}, pid {self.pid})"

    @property
    def done(self) -> bool:
        """All of its work is complete."""
        return self.completed == len(self.program)

    def free_slots(self) -> list[list[int]]:
        """The machine's free send slots, for each shard."""
        return [sorted(stream._free) for stream in self._machine._streams]

    @property
    def peers(self) -> list[Worker]:
        """All workers of the same job that run now."""
        return [worker for worker in self.cluster.workers if worker.job.name == self.job.name and worker.running]

    @property
    def patience_s(self) -> float:
        """How long this worker goes on at most when no more results come."""
        return self.job.window * self.job.idle_s + self.protocol.timeout_s

    def start(self) -> None:
        self._join_by = self.now() + self.protocol.join_timeout_s
        self.wake()

    @property
    def running(self) -> bool:
        """Has joined and may be waited for."""
        return self.alive and self.driver is not None and self._machine.ended is None

    def turn(self) -> None:
        try:
            if self.driver is None:
                self._join()
            if self.driver is not None:
                self._run(self.driver)
        except OmniReduceError as error:
            self._end(error)
        if len(self.links) == len(self.shard_order) and any(link.readable and not link.over for link in self.links):
            self.wake()

    # joining

    def _join(self) -> None:
        """Connect to all shards, one after the other, and say hello to each at once; then wait for all."""
        self.wake_at(self._join_by)
        while len(self.links) < len(self.shard_order):
            shard = self.shard_order[len(self.links)]
            link = self.cluster.connect(self, shard)
            if link is None:
                if self.now() >= self._join_by:
                    raise TransportError(f"cannot reach aggregator shard{shard}:7400")
                self.wake_at(self.now() + RETRY_S)
                return
            self.links.append(link)
            link.send_control(encode_control(self._hello(len(self.links) - 1)))
        for link in self.links:
            for event in link.poll():
                answer = read_answer(link, event)
                if isinstance(answer, Welcome):
                    self._welcomes.add(link)
                elif isinstance(answer, Pending):
                    self._missing[link] = answer
        if len(self._welcomes) == len(self.links):
            self._start()
        elif self.now() >= self._join_by:
            waiting: set[Link] = {link for link in self.links if link not in self._welcomes}
            raise RefusedError(_who_is_missing(waiting, self._missing, self.job.name, self.protocol.join_timeout_s))

    def _hello(self, shard: int) -> Hello:
        protocol = self.protocol
        hello = Hello(
            PROTOCOL_VERSION, self.job.name, self.rank, self.ranks, shard, protocol.shards,
            protocol.slots, protocol.slot_bytes, f"host{self.rank}", self.pid, protocol.stripe_blocks,
            protocol.timeout_s, whole_bytes=protocol.whole_bytes, tcp_message_bytes=protocol.message_bytes,
        )  # fmt: skip
        return msgspec.structs.replace(hello, **self.nonsense)

    def _start(self) -> None:
        protocol = self.protocol
        shape = protocol.slots, protocol.slot_bytes
        for link in self.links:
            if link.kind == "shm":
                link.map_slots()
            else:
                link.attach(private_slots(*shape), private_slots(*shape))
        self._machine = WorkerMachine(
            [(link.send_slots, link.receive_slots) for link in self.links],
            [link.peer for link in self.links],
            self.culprit,
            rank=self.rank,
            scan_span=protocol.scan_span,
            timeout_s=protocol.timeout_s,
            message_bytes=[
                protocol.message_bytes if link.kind == "tcp" else protocol.slot_bytes for link in self.links
            ],
        )
        self.driver = Driver(self._machine, self.links, self.now, on_finish=self._finished, on_end=self._on_end)
        self.joined = True
        self.log("joined")

    # running

    def _run(self, driver: Driver) -> None:
        driver.turn()
        self._submit(driver)
        if self._under_way or self._machine.ended is not None:  # as a thread does before it waits
            driver.flush()
        if self._machine.ended is not None:
            self._leave()
            return
        self.found = self.found or ", ".join(audit_worker(self._machine, self.links))
        if self._machine.deadline is not None:
            self.wake_at(self._machine.deadline + 1e-6)

    def _submit(self, driver: Driver) -> None:
        now = self.now()
        while self._machine.ended is None and len(self._under_way) < self.job.window:
            if self._submitted == len(self.program):
                if not self._under_way:
                    driver.perform(self._machine.leave())
                return
            if now < self._think_until:
                self.wake_at(self._think_until)
                return
            what = self.program[self._submitted]
            self._submitted += 1
            descriptor, protocol = what.descriptor(), self.protocol
            layout = descriptor.layout.dealt(
                protocol.shards, protocol.stripe_blocks, protocol.whole_bytes, descriptor.block_bytes
            )
            work = Work(what, self.rank, self.ranks, layout, self._pool)
            number = self._machine.submit(descriptor, work.operand, now)
            self._under_way[number] = work
            self._think_until = now + self._random.uniform(0, self.job.think_s)
            if self._submitted == len(self.program) // 2:
                self._think_until += self.job.pause_s
            driver.advance()

    def _finished(self, number: int) -> None:
        self.completed += 1
        work = self._under_way.pop(number)
        self.cluster.finished(self, work, number)
        if isinstance(work.operand, RowSet):
            values = work.operand.result[1]
            self.kept.append((number, values, values.tobytes()))

    # leaving

    def _on_end(self, end: End) -> None:
        self._close_by = self.now() + GOODBYE_S
        self.error = error_of(end.cause) if end.cause is not None else None
        self.cluster.ended(self)
        self.log(f"ends: {self.error or 'done'}")

    def _leave(self) -> None:
        """Close as soon as the last words are out and, after a clean end, confirmed."""
        assert self._close_by is not None
        said = self._machine.said_goodbye if self.error is None else not any(link.wants_write for link in self.links)
        if said or all(link.over for link in self.links) or self.now() >= self._close_by:
            self.clean = self.error is None and self._machine.said_goodbye
            self._end(self.error)
        else:
            self.wake_at(self._close_by)

    def _end(self, error: OmniReduceError | None) -> None:
        self.error = error
        self.log(f"gone: {error or 'done'}")
        self._depart()

    def kill(self, *, silent_s: float | None = None) -> None:
        """End at once; the system closes the connections. With `silent_s`, the peers notice only after that time."""
        self.log("killed")
        self.killed = True
        for link in self.links:
            if silent_s is not None:
                link.sever(0.0, silent_s)
        self._depart()

    def _depart(self) -> None:
        self.alive = False
        self.ended_at = self.world.now()
        for link in self.links:
            link.close()
        self.cluster.gone(self)
        self.driver, self.links = None, []
        self._under_way.clear()
        self.__dict__.pop("_machine", None)

    def leave_early(self) -> None:
        """Shut down although work is left or under way."""
        self.program = self.program[: self._submitted]
        if self.driver is not None:
            self.driver.perform(self._machine.leave())
        self.wake()
