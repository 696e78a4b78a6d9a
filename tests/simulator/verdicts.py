"""The judges: never wrong, never stuck, the right culprit in time, all slots back, nothing kept."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from omnireduce.errors import AbortedError, CollectiveTimeoutError, RefusedError, TransportError
from omnireduce.protocol.collective.index_lists import MessageSizing
from omnireduce.protocol.joining.worker_joining import ASSIGNED_S
from omnireduce.runtime.shard.connections import LINGER_S

from . import reasons
from .plan import RARE, SLOWER, Fault
from .workload import Collective, Tree, Work, expected, wrong_elements

if TYPE_CHECKING:
    from .cluster import Cluster
    from .worker import Worker

STALLS = ("worker stall", "shard stall", "freeze", "shard freeze")
JUMPS = ("clock jump", "shard clock jump")
OUTAGES = ("shard crash", "drain")
SLOW = ("slow reader", "slow shard")
PATIENCE_S = 9.0  # shorter than any time limit: what takes less, ends nothing
SLOW_S = 30.0  # additional time with slow readers
MOVES_ON = "though it moves on"
BUSY = "which is busy"
NOTICED_LATE = "it noticed that"  # and says by how much
HELLO_S = 1.0  # transfer of a hello and of its answer
STOOD_STILL_S = 1.0  # beyond a time limit, as every freeze does; also what came before has arrived by then
NOTICE_S = 5.0  # time until every rank knows of a death, beyond the time of the fault itself


def held_by_process() -> dict[str, int]:
    """Counts of resources of this process that a shard must give back."""
    return {
        "regions of slot memory": Path("/proc/self/maps").read_text().count("/memfd:omnireduce"),
        "open files": len(os.listdir("/proc/self/fd")),
    }


@contextmanager
def no_internal_errors(add: Callable[[str], None]) -> Iterator[None]:
    """Report every exception that the product catches and logs as a bug of its own."""
    logger, handler = logging.getLogger("omnireduce"), _Reporter(add)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class _Reporter(logging.Handler):
    def __init__(self, add: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._add = add

    def emit(self, record: logging.LogRecord) -> None:
        self._add(f"internal error: {self.format(record)}")


class Verdicts:
    """Faults of one run."""

    def __init__(self, cluster: Cluster) -> None:
        self.found: list[str] = []
        self._cluster = cluster
        self._results: dict[tuple[Collective, int, Tree], bytes] = {}
        self._must_end: list[tuple[Worker, int, float, Fault]] = []  # worker, its generation, deadline, fault
        self._must_fail: list[tuple[Worker, Fault]] = []
        self._must_go_on: list[tuple[Worker, Fault]] = []

    def add(self, text: str) -> None:
        self.found.append(f"at {self._cluster.world.now():.3f} s, event {self._cluster.world.events}: {text}")

    def judge_result(self, worker: Worker, work: Work, number: int) -> None:
        """Never wrong: the oracle's values, and the same bits on all ranks."""
        ranks = worker.place[1]
        if work.what != worker.job.collectives[number] and not self._all_submitted(worker, work.what, number):
            self.add(f"wrong: {worker.name} finished a collective that no other rank submitted")
            return
        if worker.job.name in self._cluster.garbled:
            return
        what, result = f"{worker.name} collective {number} ({work.what})", work.result()
        oracle = expected(work.what, ranks, worker.sums)
        wrong = wrong_elements(result, oracle)
        if wrong:
            self.add(f"wrong: {what}: {wrong} of {oracle.size} elements")
        if self._results.setdefault((work.what, ranks, worker.sums), result.tobytes()) != result.tobytes():
            self.add(f"wrong: {what} differs in its bits")
        damage = work.damage()
        if damage:
            self.add(f"wrong: {what}: {damage}")

    def _all_submitted(self, worker: Worker, what: Collective, number: int) -> bool:
        """Whether all ranks of the worker's job submitted `what`: a mismatch of all of them is none. Refusals are
        alike, whatever their reasons."""
        launch = worker.job.name, worker.job.launch
        mates = [each for each in self._cluster.workers if (each.job.name, each.job.launch) == launch]
        there = [(mate.rank, mate.program[number]) for mate in mates if number < len(mate.program)]
        same = {rank for rank, each in there if each == what or each.kind == what.kind == "refusal"}
        return len(same) >= worker.place[1]

    def judge_slots(self, worker: Worker) -> None:
        """All slots back: after a clean end the worker, and both ends of its links, have them all.

        Unless it breaks the rules: what it sends twice may come when it has done its work.
        """
        tampered = "tampering" in self._cluster.causes and worker.culprit in self._cluster.culprits(worker.job.name)
        if tampered or not worker.clean:
            return
        for link, free in zip(worker.links, worker.free_slots(), strict=True):
            ends = [link._in_flight, link._held, link.other_end._in_flight, link.other_end._held]
            if any(ends) or free != list(range(len(link.send_slots))):
                self.add(f"slots: {worker.name}: {ends} in use and {free} free at a clean end")

    def judge_kept(self, worker: Worker) -> None:
        """A result is the caller's as long as he refers to it."""
        for number, values, before in worker.kept:
            if values.tobytes() != before:
                self.add(f"wrong: {worker.name}: the rows of collective {number} have changed since")

    def judge_time_out(self, worker: Worker) -> None:
        """Check a timeout that says that the job moves on: no shard may stand still, nor the rank itself.

        A job moves on, and still ends, if it has many messages, each of them slow, that together take longer than the
        limit. If few of them have a result, all seem to wait for the rank whose message comes next. A rank that stood
        still itself cannot judge others: it does not know when its input arrived.
        """
        error = worker.error
        if not isinstance(error, CollectiveTimeoutError):
            return
        if BUSY in error.culprit:
            # Its turns are rare, and may do very little; or it stood still with work at hand, and says so now.
            if self._cluster.causes.intersection(("slow shard", "shard stall", "shard freeze")):
                self._cluster.causes.add(reasons.TIME)
            return
        moves_on = MOVES_ON in error.reason
        culprits = self._cluster.culprits(worker.job.name)
        explained = reasons.plausible(error, self._causes) and self._explained_delay(error, self._causes, culprits)
        if moves_on or not explained:
            self._allow_for_many_messages(worker)
        if moves_on and worker.culprit in error.culprit:  # others were told what this one says of itself
            self._judge_who_moves_on(worker)

    def _allow_for_many_messages(self, worker: Worker) -> None:
        if self._longest_s(worker) > PATIENCE_S:
            self._cluster.causes.add(reasons.TIME)
            self._cluster.blame(worker.job.name, worker.culprit)

    def _judge_who_moves_on(self, worker: Worker) -> None:
        quiet_s = worker.protocol.timeout_s / 2 + STOOD_STILL_S  # for less, it may well have moved on
        own_shards = [shard for shard in self._cluster.shards if shard.address in worker.addresses]
        still = [shard.address for shard in own_shards if shard.stalled_s > quiet_s]
        if still:
            self.add(f"reason: {worker.name} did not blame {still}: {worker.error}")
        if worker.overslept_s >= STOOD_STILL_S:
            self.add(f"reason: {worker.name} stood still for {worker.overslept_s:g} s too long: {worker.error}")

    def _longest_s(self, worker: Worker) -> float:
        """Seconds that the oldest collective of `worker` may take, with those before it in the window, if each message,
        each turn of a slow shard and each credit is the slowest of all ranks'."""
        network = self._cluster.plan.network
        turn_s = network.latency_s * (SLOWER if network.slow else 1)
        turn_s += max((fault.number for fault in self._cluster.plan.faults if fault.kind in SLOW), default=0.0)
        delay_s = network.delay_s * (1 + network.spike * (RARE - 1))
        slowest = sum(
            1 / number for number in range(1, worker.job.ranks + 1)
        )  # mean largest of so many exponential times
        first = max(0, worker.completed - worker.job.window + 1)
        messages = sum(self._messages(worker, what) for what in worker.program[first : worker.completed + 1])
        return 2 * messages * (turn_s + delay_s * slowest)

    def _messages(self, worker: Worker, what: Collective) -> float:
        """Number of messages that a rank may send for a collective, one after another."""
        descriptor, protocol = what.descriptor(), worker.protocol
        blocks, block_bytes = descriptor.layout.blocks, descriptor.block_bytes
        turns = [shard.turns(blocks, block_bytes, worker.job.ranks) for shard in self._cluster.shards]
        return max(
            blocks
            / max(
                1, min(MessageSizing.for_network(protocol.message_bytes).shortest // block_bytes, protocol.scan_span)
            ),
            *turns,
        )

    def judge_workers(self) -> None:
        """Every worker that is gone did all its work, or has a reason that a fault of this run explains."""
        for worker in self._cluster.workers:
            if not worker.alive and not worker.killed and not self._explained(worker):
                self.add(f"reason: {worker.name} ended with {type(worker.error).__name__}: {worker.error}")
            if worker.found:
                self.add(f"inside {worker.name}: {worker.found}")
            self._judge_admission(worker)
        self._judge_expectations()

    def _judge_admission(self, worker: Worker) -> None:
        """Check that a worker that may not join is refused, with the reason."""
        if worker.nonsense and (worker.joined or "still waiting for rank" in str(worker.error)):
            self.add(f"not refused: {worker.name}, which said {worker.nonsense}: {worker.error}")
        if worker.joined and worker.secret is not self._cluster.secret:
            self.add(f"not refused: {worker.name}, which has another secret, or none")

    def _judge_expectations(self) -> None:
        for worker, generation, by, fault in self._must_end:
            ended_at = worker.ends[generation] if len(worker.ends) > generation else None
            if ended_at is None or ended_at > by + self._unread_s(fault):
                self.add(f"late: {worker.name} ended at {ended_at} instead of {by:.3f} after {fault}")
        for worker, fault in self._must_fail:
            if not (worker.alive or worker.killed or worker.left_early) and worker.error is None:
                self.add(f"unnoticed: {worker.name} did all its work after {fault}")
        for worker, fault in self._must_go_on:
            gave_up = worker.error is not None and not worker.killed and not self._left_behind(worker)
            if gave_up and self._cluster.struck == [fault.kind]:
                self.add(f"given up: {worker.name} ended after {fault}: {worker.error}")
        self._must_end.clear()
        self._must_fail.clear()
        self._must_go_on.clear()

    def _unread_s(self, fault: Fault) -> float:
        """Seconds until anybody notices that a link of the same rank has broken: its last messages are still on their
        way."""
        lost = [each for each in self._cluster.plan.faults if each.kind == "link loss"]
        same = [each.number for each in lost if (each.job, each.rank) == (fault.job, fault.rank) and each != fault]
        return max(same, default=0.0) if "link loss" in self._cluster.causes else 0.0

    def _left_behind(self, worker: Worker) -> bool:
        """The job ran without it while it waited, until its time was over or until all others had done their work."""
        if worker.ended_at is None or "still waiting for rank" not in str(worker.error):
            return False
        others = [each for each in self._cluster.workers if each.job is worker.job and each.rank != worker.rank]
        runs = [run for each in others for run in zip(each.begins, each.ends, strict=False)]
        missed = [end for begin, end in runs if begin <= worker.said_hello_at + HELLO_S and worker.said_hello_at <= end]
        nobody_comes = all(each.done or each.killed for each in others)
        return any(worker.ended_at <= end for end in missed) or (bool(missed) and nobody_comes)

    def _explained(self, worker: Worker) -> bool:
        culprits = self._cluster.culprits(worker.job.name)
        if worker.error is None:
            return worker.done and (worker.clean or bool(culprits) or self._disturbed)
        unheard = worker.was_stalled or (bool(culprits) and (self._goodbyes_are_slow or self._a_moment_was_skipped))
        if isinstance(worker.error, AbortedError) and unheard and worker.error.reason == "connection closed":
            return True  # the shard did not wait until it could tell it why
        causes = self._elastic_causes(worker) if worker.job.min_ranks else self._causes
        if isinstance(worker.error, AbortedError) and self._passed_on(worker.error, causes):
            return True
        if not reasons.plausible(worker.error, causes):
            return False
        if reasons.UNREACHED in str(worker.error) and not (causes.intersection(OUTAGES) or self._had_no_time_left):
            return False  # somebody listens all the time
        if isinstance(worker.error, CollectiveTimeoutError):
            return self._explained_delay(worker.error, causes, culprits)
        if isinstance(worker.error, AbortedError):
            return self._explained_abort(worker, worker.error, culprits)
        if isinstance(worker.error, TransportError):
            return any(culprit in str(worker.error) for culprit in culprits)
        return True

    def _explained_abort(self, worker: Worker, error: AbortedError, culprits: Set[str]) -> bool:
        """Whether it names one who is to blame."""
        if reasons.DIFFERENT in error.reason:  # a false number looks like a skipped collective: two are named
            named = set(re.findall(r"\d+", error.culprit))
            numbers = {number for culprit in culprits for number in re.findall(r"^rank (\d+)", culprit)}
            if named & numbers or (worker.job.min_ranks and " as number " in error.reason):
                return True
        match = re.match(r"refused collective \d+, which rank (\d+) called", error.reason)
        if match and any(culprit.startswith(f"rank {match[1]} ") for culprit in culprits):
            return True  # with a false word its own refusal looks like a call, which another rank refused
        if reasons.NOT_LEFT in error.reason:
            return True  # it names all who are still there, by numbers that change when the job is formed anew
        misled = bool(worker.misled) and str(error).startswith(worker.misled)
        blamed = any(culprit in error.culprit for culprit in culprits)
        return misled or blamed or self._could_not_say_why(error) or self._came_back_too_soon(error)

    def _passed_on(self, error: AbortedError, causes: Set[str]) -> bool:
        """Whether a rank that could not join has said so, and a fault explains it."""
        text = str(error)
        is_excused = any(text in worker.excuses for worker in self._cluster.workers)
        errors = (
            RefusedError(text),
            TransportError(text + reasons.NOT_ADMITTED * error.culprit.startswith("aggregator")),
        )
        return is_excused and any(reasons.plausible(each, causes) for each in errors)

    def _came_back_too_soon(self, error: AbortedError) -> bool:
        """Whether it names a rank that one shard admitted, and another refused: it had not heard its last goodbye."""
        named = [worker for worker in self._cluster.workers if worker.culprit in error.culprit]
        refused = any(isinstance(each.error, RefusedError) and "is already in job" in str(each.error) for each in named)
        return error.reason == "connection closed" and refused

    def _could_not_say_why(self, error: AbortedError) -> bool:
        """Whether it names a rank whose time was over, and a shard stood still: nobody read that rank's last words."""
        named = [worker for worker in self._cluster.workers if worker.culprit in error.culprit]
        in_vain = self._cluster.causes.intersection(("shard stall", "shard freeze", "slow shard"))
        gave_up = any(isinstance(each.error, CollectiveTimeoutError) and not each.alive for each in named)
        return error.reason == "connection closed" and bool(in_vain) and gave_up

    def _explained_delay(self, error: CollectiveTimeoutError, causes: Set[str], culprits: Set[str]) -> bool:
        """Whether it names whom a collective waited for."""
        if NOTICED_LATE in error.reason:
            named = [worker for worker in self._cluster.workers if worker.culprit in error.culprit]
            return any(each.was_stalled for each in named)  # and nobody else: it says this of itself
        if reasons.TIME in causes or MOVES_ON in error.reason:
            return True  # time went to several, or to one that went on just before the limit
        return any(culprit in error.culprit for culprit in culprits)

    @property
    def _causes(self) -> set[str]:
        """The kinds of fault that have struck so far, and what else may end a job."""
        results = set(self._cluster.causes)
        if self._cluster.plan.crowded and not self._cluster.in_epilogue:
            results.add(reasons.CROWD)
        if not self._cluster.in_epilogue and self._lost_s(JUMPS + STALLS[:2]) > PATIENCE_S:
            results.add(reasons.TIME)
        if results.intersection(OUTAGES) and self._lost_s(OUTAGES) > PATIENCE_S:
            results.add(reasons.DOWN)
        if "link loss" in results and self._lost_s(("link loss",)) > PATIENCE_S:
            results.add(reasons.SILENCE)
        return results

    def _elastic_causes(self, worker: Worker) -> set[str]:
        """The same for a worker of an elastic job, which may begin its last attempt at any time."""
        result, text = self._causes, str(worker.error)
        if result.intersection(OUTAGES):
            result.add(reasons.DOWN)
        missed = isinstance(worker.error, RefusedError) and ("waiting for rank" in text or "is already in job" in text)
        if missed and not self._cluster.in_epilogue and self._lost_s(STALLS[:2]) > self._seated_s(worker):
            result.add(reasons.TIME)  # the others formed the job without it, and may have done its work
        return result

    def _seated_s(self, worker: Worker) -> float:
        """Seconds that a rank of an elastic job has to join further aggregators, after the first."""
        return max(ASSIGNED_S, 2 * worker.job.last_call_s)

    @property
    def _had_no_time_left(self) -> bool:
        """A connection broke before the hello, and no time was left for another one: the clock jumped over it, or the
        shard that was to answer stood still."""
        lost_s = self._lost_s(("clock jump", "shard stall", "shard freeze"))
        return "link loss" in self._cluster.causes and lost_s > PATIENCE_S

    @property
    def _disturbed(self) -> bool:
        """Goodbyes may take longer than a worker waits for them, or a shard until it hangs up."""
        return self._goodbyes_are_slow or bool(self._cluster.causes.intersection(JUMPS + STALLS + SLOW))

    @property
    def _a_moment_was_skipped(self) -> bool:
        """Clocks of shards jumped over the moment that a rank has for reading why its job ends."""
        return self._lost_s(("shard clock jump",)) >= LINGER_S

    @property
    def _goodbyes_are_slow(self) -> bool:
        network = self._cluster.plan.network
        return network.spike > 0 and RARE * network.delay_s > LINGER_S / 10

    def _lost_s(self, kinds: Sequence[str]) -> float:
        """For how many seconds faults of `kinds` keep processes from their work."""
        return sum(fault.number for fault in self._cluster.plan.faults if fault.kind in kinds)

    def expect_end(self, workers: Sequence[Worker], noticed_at: float, fault: Fault) -> None:
        """These workers must be gone soon after `noticed_at`, unless something stops them."""
        slow_s = SLOW_S if any(each.kind in SLOW for each in self._cluster.plan.faults) else 0.0
        own_s = fault.number if fault.kind in STALLS and fault not in self._cluster.plan.faults else 0.0
        by = noticed_at + NOTICE_S + self._lost_s(STALLS) + own_s + slow_s
        self._must_end += [(worker, len(worker.ends), by, fault) for worker in workers]

    def expect_failure(self, workers: Sequence[Worker], fault: Fault) -> None:
        """These workers must end with an error, if nothing but `fault` makes any end."""
        if self._cluster.causes - reasons.BY_ITSELF == {fault.kind}:
            self._must_fail += [(worker, fault) for worker in workers if not worker.job.min_ranks]

    def expect_going_on(self, workers: Sequence[Worker], fault: Fault) -> None:
        """These workers form their job anew and do all their work, if nothing but `fault` happens."""
        if not self._cluster.plan.crowded:
            self._must_go_on += [(worker, fault) for worker in workers if worker.reforms_left]

    def stuck(self) -> None:
        """Never stuck: everybody came to an end."""
        alive = [worker.name for worker in self._cluster.workers if worker.alive]
        self.add(f"stuck: {', '.join(alive) or 'nobody'} still there")

    def judge_shards(self) -> None:
        """A shard that has been quiet for long keeps nothing."""
        for shard in self._cluster.shards:
            if not shard.alive:
                self.add(f"shard: {shard.name} is not up")
            elif shard.residue():
                self.add(f"shard: {shard.name} keeps {shard.residue()}")
            for wrong in shard.found:
                self.add(f"inside {shard.name}: {wrong}")

    def judge_strangers(self) -> None:
        """A shard hangs up on those who do not behave like workers."""
        for stranger in self._cluster.strangers:
            if stranger.there:
                self.add(f"kept: {stranger.name}")
