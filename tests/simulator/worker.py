"""A rank as a process: joins, runs its collectives, forms its job anew after a fault if that is elastic, leaves.

The program of a communicator without its threads: what blocks there is a state here. The machines are the product's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from omnireduce.core.dtypes import Array
from omnireduce.core.wire.control import NONCE_BYTES, PROTOCOL_VERSION, Hello, Leave, RankAssignment, encode_control
from omnireduce.errors import OmniReduceError
from omnireduce.kernels.codecs.table import BUILT_IN
from omnireduce.protocol.collective.effects import End, SendControl, error_of
from omnireduce.protocol.collective.index_lists import MessageSizing
from omnireduce.protocol.collective.row_operands import RowSet
from omnireduce.protocol.host.exchange import HostExchange
from omnireduce.protocol.joining.pending_job import worker_name
from omnireduce.protocol.joining.worker_joining import (
    Connect,
    HangUp,
    JoinAction,
    Joined,
    JoinEffect,
    Joining,
    MeetLocalRanks,
    perform,
)
from omnireduce.protocol.rank import RankMachine
from omnireduce.protocol.sharding import Sharding
from omnireduce.runtime.driver import Driver
from omnireduce.runtime.rank.calls.single import Pool
from omnireduce.runtime.rank.engine import GOODBYE_S
from omnireduce.runtime.rank.joining import feed
from omnireduce.runtime.rank.threads import ParallelDriver
from omnireduce.support.secret import Secret
from omnireduce.transport.slot_memory import private_slots

from .audit import audit_worker
from .links import SimLink
from .plan import JobPlan, ProtocolPlan
from .threads import drawn_threads
from .workload import Collective, Tree, Work, tree_of
from .world import Process, World


class Group(NamedTuple):
    """The ranks of one host in one generation of a job, by rank, and their memory."""

    members: Sequence[Worker]
    regions: Array


class Cluster(Protocol):
    """The cluster as a worker sees it."""

    world: World
    protocol: ProtocolPlan
    secret: Secret | None

    workers: list[Worker]
    places: dict[tuple[str, str, int], dict[int, tuple[tuple[int, ...], int]]]

    def connect(self, client: Process, address: str) -> SimLink | None:
        """A connection to a shard, or None when nobody listens there."""

    def meet(self, worker: Worker, meet: MeetLocalRanks) -> None:
        """The worker has come to where the ranks of its host meet."""

    def finished(self, worker: Worker, work: Work, number: int) -> None:
        """A collective is complete."""

    def ended(self, worker: Worker) -> None:
        """The rank's machine has come to its end; `error` is set."""

    def reforms(self, worker: Worker) -> None:
        """The worker leaves a generation of its job to form the next one."""

    def gave_up(self, worker: Worker) -> None:
        """An attempt of the worker to join has failed."""

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
        self.ranks = job.ranks  # world size, settings and shards as this rank believes them to be
        self.protocol = cluster.protocol
        self.shard_order = list(range(self.protocol.shards))
        self.secret = cluster.secret
        self.nonsense: dict[str, Any] = {}  # fields of its hello that are not allowed
        self.links: list[SimLink] = []
        self.driver: Driver | None = None
        self.error: OmniReduceError | None = None
        self.ended_at: float | None = None
        self.clean = False  # confirmed by every shard
        self.joined = False
        self.found = ""  # a fault inside
        self.killed = self.left_early = False
        self.reforms_left = job.attempts if job.min_ranks else 0
        self.misled = ""  # begin of an error that blames a shard, but is its own fault
        self.completed = 0  # collectives
        self.said_hello_at = 0.0  # for the last time
        self.excuses: set[str] = set()  # its reasons when it could not join
        self.begins: list[float] = []  # times at which its generations began, and ended
        self.ends: list[float] = []
        self.place = (rank, job.ranks)  # its rank and the world size, in this generation
        self._machine: RankMachine
        self.joining: Joining
        self._assignment: RankAssignment | None = None
        self._place_given: Joined | None = None
        self.meets_at = b""  # address at which it waits for the other ranks of its host
        self._group: Group | None = None  # memory that it shares with the other ranks of its host
        self._close_by: float | None = None
        self._under_way: dict[int, Work] = {}
        self._pool = Pool()
        self.kept: list[tuple[int, Array, bytes]] = []  # rows of a result, and a copy of their bytes
        self._submitted = 0
        self._think_until = 0.0
        self._random = self.world.random(self.name)

    @property
    def culprit(self) -> str:
        """Text in an error that blames this worker."""
        name = worker_name(self.place[0], f"host{self.rank}", self.pid)
        return name.partition(" (")[2] if self.job.min_ranks else name  # ranks change when a job is formed anew

    @property
    def sums(self) -> Tree:
        """Ranks that are summed together in this generation: first those of a host, then those of a relay."""
        return tree_of(self.cluster.places[self._generation])

    @property
    def addresses(self) -> list[str]:
        """Addresses of its aggregators."""
        way = self.protocol.way(self.rank)
        names = self.protocol.addresses(way[-1] if way else -1)
        return [f"{names[shard]}:7400" for shard in self.shard_order]

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
        mine = self.job.name, self.job.launch
        return [
            worker for worker in self.cluster.workers if (worker.job.name, worker.job.launch) == mine and worker.running
        ]

    @property
    def patience_s(self) -> float:
        """Seconds for which this worker goes on at most when no more results come."""
        return self.job.window * self.job.idle_s + self.protocol.timeout_s

    @property
    def overslept_s(self) -> float:
        """For how long it has been stopped beyond the time limit of its oldest collective."""
        limit = self._machine._collective_deadline.since + self.protocol.timeout_s - self._ahead_s
        return min(self.world.now(), self._stalled_until) - limit

    def start(self) -> None:
        self._join()

    @property
    def running(self) -> bool:
        """Has joined and may be waited for."""
        return self.alive and self.driver is not None and self._machine.ended is None

    def turn(self) -> None:
        try:
            if self.driver is None:
                self._visit()
            if self.driver is not None:
                self._run(self.driver)
        except OmniReduceError as error:
            self._end(error)
        if any(link.readable and not link.over for link in self.links):
            self.wake()

    # joining

    def _join(self) -> None:
        """Begin to join, or to form the job anew."""
        protocol, assignment = self.protocol, self._assignment
        hello = Hello(
            PROTOCOL_VERSION, self.job.name, self.rank, self.ranks, 0, protocol.shards,
            protocol.slots, protocol.slot_bytes, f"host{self.rank}", self.pid, protocol.stripe_blocks,
            protocol.timeout_s, whole_bytes=protocol.whole_bytes, tcp_message_bytes=protocol.message_bytes,
            min_ranks=self.job.min_ranks, last_call_s=self.job.last_call_s, launch=self.job.launch,
            memory=self._memory_key, state_bytes=self.job.state_bytes,
        )  # fmt: skip
        if assignment is not None:
            hello = replace(hello, survived=assignment.formation, ticket=assignment.ticket)
        self.joining = Joining(hello, self.addresses, self.secret, protocol.join_timeout_s)
        self._perform(self.joining.start(self.now()))
        self.wake()

    @property
    def _memory_key(self) -> str:
        """The same for the ranks of one host."""
        job = self.job
        return (
            f"{zlib.crc32(f'{job.name}/{self.rank % job.hosts}'.encode()):032x}"
            if job.hosts and not job.state_bytes
            else ""
        )

    def _visit(self) -> None:
        """Hear what the shards say, and what time it is."""
        for shard, link in enumerate(self.links):
            for event in link.poll() if link in self.links else ():
                if link in self.links:  # until an earlier event ended the attempt
                    self._perform(feed(self.joining, shard, link.peer, event, self.now()))
        self._perform(self.joining.timer(self.now()))
        if self._place_given is not None:
            self._start(self._place_given)
        elif self.joining.deadline is not None:
            self.wake_at(self.joining.deadline + 1e-6)

    def _perform(self, effects: Iterator[JoinEffect]) -> None:
        perform(effects, self._do)

    def _do(self, action: JoinAction) -> Iterator[JoinEffect] | None:
        if isinstance(action, Connect):
            return self._connect(action.shard)
        if isinstance(action, SendControl):
            message = action.message
            if isinstance(message, Hello):
                message, self.said_hello_at = replace(message, **self.nonsense), self.world.now()
            elif isinstance(message, Leave) and message.cause is not None:
                self.excuses.add(str(error_of(message.cause)))
            self.links[action.peer].send_control(encode_control(message))
        elif isinstance(action, MeetLocalRanks):
            self.meets_at = action.token
            self.cluster.meet(self, action)
        elif isinstance(action, HangUp):
            self._hang_up(action.first)
            if not action.first:  # else the attempt goes on
                self.cluster.gave_up(self)
        elif isinstance(action, Joined):
            self._place_given = action
        return None

    def _connect(self, shard: int) -> Iterator[JoinEffect]:
        link = self.cluster.connect(self, self.addresses[shard])
        if link is None:
            return self.joining.unreachable(shard, "nobody listens", self.now())
        self.links.append(link)
        nonce = self._random.randbytes(NONCE_BYTES)
        return self.joining.connected(shard, nonce, self.now())

    def met(self, group: Group) -> None:
        """All ranks of this worker's host have come to where they meet."""
        self._group, self.meets_at = group, b""
        self._perform(self.joining.local_ranks_met())
        self.wake()

    def ring(self) -> None:
        """Another rank of the host has moved."""
        self.wake()

    def _hang_up(self, first: int = 0) -> None:
        for link in self.links[first:]:
            link.close()
        self.links, self._place_given, self._group = self.links[:first], None, None
        self.meets_at = b""

    def _start(self, joined: Joined) -> None:
        protocol = self.protocol
        shape = protocol.slots, protocol.slot_bytes
        for link in self.links:
            if link.kind == "shm":
                link.map_slots()
            else:
                link.attach(private_slots(*shape), private_slots(*shape))
        host = None if self._group is None else self._host_exchange(self._group, joined)
        self.place, self._assignment, local_ranks = (joined.rank, joined.size), joined.assignment, joined.local_ranks
        # No shard gives a formation twice.
        formation = joined.generation if joined.assignment is None else joined.assignment.formation
        self._generation = self.job.name, self.job.launch, formation
        places = self.cluster.places.setdefault(self._generation, {})
        places[joined.rank] = self.protocol.way(self.rank), local_ranks.host if local_ranks.hosts > 1 else -1
        self._sharding = Sharding.among(
            local_ranks.hosts, protocol.shards, protocol.stripe_blocks, joined.whole_bytes, protocol.slot_bytes
        )
        self._machine = RankMachine(
            [(link.send_slots, link.receive_slots) for link in self.links],
            [link.peer for link in self.links],
            worker_name(joined.rank, f"host{self.rank}", self.pid),
            rank=joined.rank,
            scan_span=protocol.scan_span,
            timeout_s=protocol.timeout_s,
            sizing=[
                MessageSizing.for_network(protocol.message_bytes)
                if link.kind == "tcp"
                else MessageSizing(protocol.slot_bytes, protocol.slot_bytes)
                for link in self.links
            ],
            host=host,
            local_ranks=local_ranks,
            threads=drawn_threads(self.world.random(f"{self.name} threads")),
        )
        self.driver = ParallelDriver(
            self._machine, self.links, self.now,
            on_finish=self._finished, on_end=self._on_end, on_wake=self._wake_other,
        )  # fmt: skip
        self.joined = True
        self.begins.append(self.world.now())
        self._submitted = self.completed = 0  # each generation does all of the work
        self._think_until = 0.0
        self._close_by = None
        self.log(f"joined as rank {joined.rank} of {joined.size}")

    def _host_exchange(self, group: Group, joined: Joined) -> HostExchange:
        members = zip(joined.local_ranks.ranks, group.members, strict=True)
        names = [worker_name(number, f"host{each.rank}", each.pid) for number, each in members]
        me, protocol = joined.local_ranks.ranks.index(joined.rank), self.protocol
        return HostExchange(
            group.regions, me, names, protocol.slots, protocol.slot_bytes, joined.local_ranks,
            steps=self._random.choice([1, 2, 16]), looks=1,
        )  # fmt: skip

    def _wake_other(self, rank: int) -> None:
        assert self._group is not None
        self._group.members[rank].ring()

    # running

    def _run(self, driver: Driver) -> None:
        host = self._machine.host
        if host is not None:
            host.wake_up()
        driver.turn()
        self._submit(driver)
        if self._under_way or self._machine.ended is not None:  # as a thread does before it waits
            driver.flush()
        if self._machine.ended is not None:
            self._leave()
            return
        self.found = self.found or ", ".join(audit_worker(self._machine, self.links))
        if host is not None and not host.fall_asleep():
            self.wake()
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
            descriptor = what.descriptor(self.place[0])
            layout = self._sharding.layout(descriptor)
            work = Work(what, *self.place, layout, self._pool)
            number = self._machine.submit(descriptor, work.operand, now, BUILT_IN.get(what.codec))
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
        self.ends.append(self.world.now())
        self.error = error_of(end.cause) if end.cause is not None else None
        self.cluster.ended(self)
        self.log(f"ends: {self.error or 'done'}")

    def _leave(self) -> None:
        """Close as soon as the last words are out and, after a clean end, confirmed."""
        assert self._close_by is not None
        is_sent = self._machine.said_goodbye if self.error is None else not any(link.wants_write for link in self.links)
        if is_sent or all(link.over for link in self.links) or self.now() >= self._close_by:
            self.clean = self.error is None and self._machine.said_goodbye
            if self.error is not None and self.reforms_left:
                self._reform()
            else:
                self._end(self.error)
        else:
            self.wake_at(self._close_by)

    def _reform(self) -> None:
        """Form the job anew with all who do the same."""
        self.reforms_left -= 1
        self.log(f"forms the job anew: {self.error}")
        self.driver, self.error = None, None
        self._under_way.clear()
        self._hang_up()
        self.cluster.reforms(self)
        self._join()

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
        self.ends.append(self.ended_at)
        for link in self.links:
            link.close()
        self.cluster.gone(self)
        self.driver, self.links = None, []
        self._under_way.clear()
        self.__dict__.pop("_machine", None)

    def leave_early(self) -> None:
        """Shut down although work is left or under way, and for good."""
        self.program, self.reforms_left, self.left_early = self.program[: self._submitted], 0, True
        if self.driver is not None:
            self.driver.perform(self._machine.leave())
        self.wake()
