"""Builds what a plan describes, runs it to its end, then shows that the shards still serve."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from omnireduce.protocol.host.exchange import region_bytes
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.joining.worker_joining import MeetLocalRanks
from omnireduce.runtime.shard.access import Access
from omnireduce.runtime.shard.relay_admission import Connected, Upstream
from omnireduce.support.secret import Secret
from omnireduce.support.teams import Teams
from omnireduce.transport.base import NO_SLOTS

from .faults import FROM_THE_START, handicap, strike
from .links import SimLink, sim_pair
from .plan import RARE, SLOWER, Fault, JobPlan, Plan
from .shard import Shard
from .stranger import ForeignSurvivor, Stranger
from .tamper import Rule
from .verdicts import Verdicts, held_by_process, no_internal_errors
from .worker import Group, Worker
from .workload import Collective, Work
from .world import MAX_AHEAD_S, Process, World

MAX_S, MAX_EVENTS = 1000.0, 200_000
QUIET_S = 40.0  # longer than any time limit of a shard: what it still keeps then, it keeps for ever
EPILOGUE = Collective("allreduce", "sum", "float32", 700, 64, 0.5, 1)


class Cluster:
    """One run of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.protocol = plan, plan.protocol
        self.world = World(plan.seed)
        self.secret = Secret(b"the secret of this cluster") if plan.protocol.secret else None
        self.verdicts = Verdicts(self)
        self.struck: list[str] = []  # the kinds of fault that found a victim
        self.causes: set[str] = set()  # faults that may still have effects
        self.garbled: set[str] = set()  # jobs with a rank that announced blocks it never sent: sums may be anything
        self.lies: set[tuple[int, str, Rule | str]] = set()  # a shard, a job, and the lie that the shard told it
        self.in_epilogue = False
        self._pids = itertools.count(100)
        self._links: list[SimLink] = []
        self._meetings: dict[bytes, dict[int, Worker]] = {}
        self._meeting_s = self._delay("meeting")
        teams = None if self.secret is None else Teams({"": [self.secret]})
        access = Access(teams, ticket_key=f"{plan.seed}".encode())
        limits = Limits(
            max_jobs=plan.max_jobs, max_world_size=8, max_job_bytes=1 << 26,
            join_timeout_s=plan.protocol.aggregator_join_timeout_s,
        )  # fmt: skip
        self.shards = [
            self._shard(name, relay, limits, access)
            for relay in range(-1, len(plan.protocol.relays))
            for name in plan.protocol.addresses(relay)
        ]
        self.strangers: list[Stranger | ForeignSurvivor] = []
        self.workers: list[Worker] = []
        self.places: dict[tuple[str, str, int], dict[int, tuple[tuple[int, ...], int]]] = {}
        self.history: list[Worker] = []  # workers of the main part, kept when the epilogue begins
        self.ranks: list[list[Worker | None]] = [[None] * job.ranks for job in plan.jobs]
        self._attempts = [[job.attempts] * job.ranks for job in plan.jobs]
        self._rounds = [[job.rounds] * job.ranks for job in plan.jobs]
        self._to_come = 0
        self._culprits: dict[str, set[str]] = {job.name: set() for job in plan.jobs}

    # the run

    def run(self) -> list[str]:
        """Run everything; return what went wrong, one line each."""
        before = held_by_process()
        try:
            with no_internal_errors(self.verdicts.add):
                self._main()
                if not self.verdicts.found:
                    self._settle()
                    self._epilogue()
                    self._settle()
        except Exception:
            self.verdicts.add(f"exception: {traceback.format_exc()}")
        self._tear_down()
        if not self.verdicts.found:
            for what, count in held_by_process().items():
                if count > before[what]:
                    self.verdicts.add(f"memory: {count - before[what]} {what} are left")
        return self.verdicts.found

    def _main(self) -> None:
        for number, job in enumerate(self.plan.jobs):
            for rank in range(job.ranks):
                self._enter(number, rank, job.start_s, first=True)
        for fault in self.plan.faults:
            if fault.kind not in FROM_THE_START:
                self.world.at_event(fault.at_event, partial(strike, self, fault))
        self._run_to_the_end()
        self.verdicts.judge_workers()

    def _settle(self) -> None:
        self.world.forget_events()
        for shard in self.shards:
            shard.go_on()
        self.world.run(lambda: False, max_s=QUIET_S, max_events=MAX_EVENTS)
        self.verdicts.judge_shards()
        self.verdicts.judge_strangers()

    def _epilogue(self) -> None:
        """Run a small job under every name once more; nothing may disturb it."""
        self.world.log("epilogue")
        self.history, self.workers = self.workers, []
        self.in_epilogue, self.causes = True, self.causes.intersection(("slow shard",))
        for culprits in self._culprits.values():
            culprits.clear()
        self._attempts = self._rounds = [[0] * job.ranks for job in self.plan.jobs]
        for number, job in enumerate(self.plan.jobs):
            for rank in range(job.ranks):
                again = replace(job, collectives=(EPILOGUE,), launch="", think_s=0.0, pause_s=0.0, attempts=1)
                self._start(number, self._worker(again, rank))
            if self.plan.crowded:
                self._run_to_the_end()
        self._run_to_the_end()
        self.verdicts.judge_workers()

    def _run_to_the_end(self) -> None:
        if not self.world.run(self._all_gone, max_s=MAX_S, max_events=MAX_EVENTS):
            self.verdicts.stuck()

    def _all_gone(self) -> bool:
        return self._to_come == 0 and not any(worker.alive for worker in self.workers)

    def _tear_down(self) -> None:
        """Cut the references by which simulated links keep each other's slots, whatever the product does."""
        for link in self._links:
            link.attach(NO_SLOTS, NO_SLOTS)

    def _shard(self, name: str, relay: int, limits: Limits, access: Access) -> Shard:
        """A shard of the aggregator, or of a relay."""

        def upstream(shard: Shard) -> Upstream | None:
            if relay < 0:
                return None
            above = [f"{address}:7400" for address in self.protocol.addresses(self.protocol.relays[relay])]
            return Upstream(above, partial(self._connect_up, shard))

        return Shard(
            self.world, name, self._latency(name), self._ahead_s(name),
            limits=limits, access=access, upstream=upstream,
        )  # fmt: skip

    def _connect_up(self, relay: Shard, address: str, timeout_s: float, done: Connected) -> Callable[[], object]:
        link = self._connect(relay, address, shares_memory=False)
        done("nobody listens" if link is None else link)
        return lambda: None

    # workers

    def _worker(self, job: JobPlan, rank: int) -> Worker:
        pid = next(self._pids)
        host = f"{job.name}/{rank}"
        clock = f"{job.name} on {rank % job.hosts}" if job.hosts > 1 else job.name if job.hosts else host
        return Worker(self, job, rank, pid, self._latency(host), self._ahead_s(clock))

    def _enter(self, job: int, rank: int, at: float, *, first: bool = False) -> None:
        """Let a worker start at virtual time `at`."""
        worker = self._worker(self.plan.jobs[job], rank)
        late_s = handicap(self, job, worker) if first else 0.0
        self.expect(at + late_s, partial(self._start, job, worker))

    def expect(self, at: float, come: Callable[[], None]) -> None:
        """Let somebody come at virtual time `at`; the run does not end before."""
        self._to_come += 1
        self.world.at(at, partial(self._arrive, come))

    def _arrive(self, come: Callable[[], None]) -> None:
        self._to_come -= 1
        come()

    def _start(self, job: int, worker: Worker) -> None:
        self.ranks[job][worker.rank] = worker
        self.workers.append(worker)
        worker.start()

    def intrude(self, job: int, rank: int) -> None:
        """Let another process join as a rank that is already there."""
        worker = self._worker(self.plan.jobs[job], rank)
        self.blame(worker.job.name, worker.culprit)
        self.workers.append(worker)
        worker.start()

    def launch_again(self, job: int) -> None:
        """Start another launch of a job: of the same name and size, but with other data."""
        plan = self.plan.jobs[job]
        other = tuple(replace(collective, launch=1) for collective in plan.collectives)
        for rank in range(plan.ranks):
            worker = self._worker(replace(plan, launch="again", collectives=other, attempts=1), rank)
            self.workers.append(worker)
            worker.start()

    def connect(self, client: Process, address: str) -> SimLink | None:
        """A connection to a shard, or None when nobody listens there."""
        shares_memory = self.world.random(f"memory/{client.name}").random() < self.plan.network.shared_memory
        return self._connect(client, address, shares_memory=shares_memory)

    def _connect(self, client: Process, address: str, *, shares_memory: bool) -> SimLink | None:
        target = next(shard for shard in self.shards if shard.address == address)
        if not target.listening:
            return None
        name = f"{client.name}-{target.name}"
        delay_s = self._delay(name)
        ours, theirs = sim_pair(target.address, client.name, self.world, delay_s, self.plan.network.pipe_bytes)
        ours.kind = theirs.kind = "shm" if shares_memory else "tcp"  # type: ignore[misc]
        theirs.inline = not shares_memory
        ours.on_ready = client.wake
        ours.max_events = client.max_events
        self._links += [ours, theirs]
        self.world.at(self.world.now() + delay_s(), lambda: target.accept(theirs))
        return ours

    def meet(self, worker: Worker, meet: MeetLocalRanks) -> None:
        """Ranks of one host come to where they meet. When all are there, each learns it after a while."""
        meeting = self._meetings.setdefault(meet.token, {})
        meeting[meet.rank] = worker
        if len(meeting) < meet.size:
            return
        size = region_bytes(self.protocol.slots, self.protocol.slot_bytes, meet.hosts)
        group = Group([meeting[rank] for rank in range(meet.size)], np.zeros((meet.size, size), np.uint8))
        for member in group.members:
            self.world.at(self.world.now() + self._meeting_s(), partial(self._tell_met, member, meet.token, group))

    def _tell_met(self, worker: Worker, token: bytes, group: Group) -> None:
        if worker.alive and worker.meets_at == token:
            worker.met(group)

    def finished(self, worker: Worker, work: Work, number: int) -> None:
        self.verdicts.judge_result(worker, work, number)

    def ended(self, worker: Worker) -> None:
        self.verdicts.judge_time_out(worker)

    def reforms(self, worker: Worker) -> None:
        """Called by a worker of an elastic job that leaves one generation for the next."""
        self.verdicts.judge_kept(worker)

    def gave_up(self, worker: Worker) -> None:
        """Called by a worker whose attempt to join has failed: its peers may have been admitted."""
        self.blame(worker.job.name, worker.culprit)

    def gone(self, worker: Worker) -> None:
        """Called by a worker at its end; a rank that failed may try again."""
        self.verdicts.judge_slots(worker)
        self.verdicts.judge_kept(worker)
        job = next(i for i, each in enumerate(self.plan.jobs) if each.name == worker.job.name)
        if self.ranks[job][worker.rank] is worker:
            left = self._rounds if worker.done else self._attempts
            left[job][worker.rank] -= 1
            if left[job][worker.rank] > 0:
                self._enter(job, worker.rank, self.world.now() + self.plan.network.delay_s)

    # faults and blame

    def note(self, fault: Fault) -> None:
        self.struck.append(fault.kind)
        self.causes.add(fault.kind)
        self.world.log(f"fault: {fault}")

    def blame(self, job: str, culprit: str) -> None:
        """From now on the ranks of `job` may name `culprit`."""
        self._culprits[job].add(culprit)

    def culprits(self, job: str) -> set[str]:
        return self._culprits[job]

    def expect_end(self, workers: Sequence[Worker], notice_s: float, fault: Fault) -> None:
        """These workers must come to an end soon."""
        self.verdicts.expect_end(workers, self.world.now() + notice_s, fault)

    def expect_failure(self, workers: Sequence[Worker], fault: Fault) -> None:
        """These workers cannot complete their work any more."""
        self.verdicts.expect_failure(workers, fault)

    def expect_going_on(self, workers: Sequence[Worker], fault: Fault) -> None:
        """These workers of an elastic job go on without those who are gone."""
        self.verdicts.expect_going_on(workers, fault)

    # chance

    def _delay(self, name: str) -> Callable[[], float]:
        rng, network = self.world.random(f"delay/{name}"), self.plan.network
        return lambda: rng.expovariate(1 / network.delay_s) * (RARE if rng.random() < network.spike else 1)

    def _ahead_s(self, host: str) -> float:
        """Seconds by which the clock of `host` is ahead of the true time."""
        return self.world.random(f"clock/{host}").uniform(0, MAX_AHEAD_S) if self.plan.network.clocks_apart else 0.0

    def _latency(self, name: str) -> Callable[[], float]:
        rng, network = self.world.random(f"latency/{name}"), self.plan.network
        mean = network.latency_s * (SLOWER if rng.random() < network.slow else 1)
        return lambda: rng.expovariate(1 / mean)
