"""Carries out a plan on a site and judges what came of it: who raised what, how soon, and what is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from cluster_checks import DEATH_S
from transports import over

from .crew import WorkerProcess, complete, silent_until
from .plan import JOIN_S, SHARDS, Plan
from .site import Held, Site
from .worker import Order, Report

OVERDUE_S = 10.0  # beyond its bound, until an error is no longer waited for
GENEROUS_S = 20  # a job without a fault joins in this time, and does a collective in this time
MISSING = re.compile(r"rank (\d+(?:, \d+)*) of job")  # in the error of a rank that waited for others in vain


@dataclass(frozen=True)
class Reaction:
    """Error of one survivor, seconds from the fault to it, and the largest number of seconds allowed."""

    who: str
    kind: str
    seconds: float
    bound_s: float

    def __str__(self) -> str:
        return f"{self.who} {self.kind} {1000 * self.seconds:.0f} ms"


@dataclass(frozen=True)
class Outcome:
    """Result of a round in which nothing went wrong."""

    plan: Plan
    reactions: list[Reaction]
    held: list[Held]  # by shard, afterwards


def play(plan: Plan, site: Site) -> Outcome:
    """Run one round. Raises AssertionError, which says what went wrong."""
    with ExitStack() as stack:
        members = [stack.enter_context(WorkerProcess()) for _ in range(plan.ranks)]
        reactions = _Round(plan, site, members, stack).play()
        site.expect_neighbours()
    return Outcome(plan, reactions, site.expect_rest())


class _Round:
    def __init__(self, plan: Plan, site: Site, members: list[WorkerProcess], stack: ExitStack) -> None:
        self._plan, self._site, self._members, self._stack = plan, site, members, stack
        if plan.hits_shard:
            [self._shard] = plan.victims
            self._victims: dict[str, WorkerProcess] = {}
            self._pids, self._names = [site.pids[self._shard]], [f"aggregator {site.address(self._shard)}"]
        else:
            self._shard = -1
            self._victims = {f"rank {rank}": members[rank] for rank in plan.victims}
            self._pids = [member.pid for member in self._victims.values()]
            self._names = [members[rank].name(rank) for rank in plan.victims]
        ranks = {f"rank {rank}": member for rank, member in enumerate(members)}
        self._survivors = {who: member for who, member in ranks.items() if who not in self._victims}
        self._untouched = [shard for shard in range(SHARDS) if shard != self._shard]

    def play(self) -> list[Reaction]:
        plan = self._plan
        begun = time.monotonic()
        for rank, member in enumerate(self._members):
            member.tell(self._order(rank))
        if plan.joining:
            silent_until((), begun + plan.after_s)
        else:
            for member in self._members:
                member.hear("joined")
            silent_until(self._members, time.monotonic() + plan.after_s)
        return {"kill": self._kill, "stop": self._stop, "pause": self._pause}[plan.action]()

    def _kill(self) -> list[Reaction]:
        since = self._signal(signal.SIGKILL)
        if self._plan.joining:
            reactions = self._expect_end_of_joining(since)
        else:
            reactions = self._expect_errors(self._survivors, since, DEATH_S, "AbortedError")
        self._site.expect_neighbours(self._untouched)
        if self._plan.hits_shard:
            neighbours = {
                f"neighbour {rank}": neighbour for rank, neighbour in enumerate(self._site.neighbours(self._shard))
            }
            reactions += self._expect_errors(neighbours, since, DEATH_S, "AbortedError")
            self._site.shard_restarted(self._shard)
        self._next_job()
        return reactions

    def _stop(self) -> list[Reaction]:
        plan = self._plan
        since = self._signal(signal.SIGSTOP)
        reactions = self._expect_errors(self._survivors, since, plan.timeout_s + DEATH_S, "CollectiveTimeoutError")
        self._site.expect_neighbours(self._untouched)
        if not plan.hits_shard:
            self._next_job()  # although the victims are still there
        went_on = self._signal(signal.SIGCONT)
        self._expect_errors(self._victims, went_on, DEATH_S, "AbortedError", "CollectiveTimeoutError")
        if plan.hits_shard:
            self._next_job()
        return reactions

    def _pause(self) -> list[Reaction]:
        """Nobody may mind."""
        since = self._signal(signal.SIGSTOP)
        self._site.expect_neighbours(self._untouched)
        silent_until(self._members, since + self._plan.pause_s)
        self._signal(signal.SIGCONT)
        self._work_on()
        return []

    def _signal(self, number: int) -> float:
        """Signal all victims; return the time just before. None stays stopped for longer than this round."""
        if number == signal.SIGSTOP:
            self._stack.callback(self._signal, signal.SIGCONT)
        since = time.monotonic()
        for pid in self._pids:
            os.kill(pid, number)
        return since

    def _order(self, rank: int, rounds: int | None = None) -> Order:
        """To take part in the job of this round, or in one of so many `rounds` after it."""
        plan, disturbed = self._plan, rounds is None
        return Order(
            f"round-{plan.seed}",
            rank,
            plan.ranks,
            tuple(self._site.daemon.addresses[: plan.shards]),
            (
                *over(plan.transports[rank]),
                f"cluster.join_timeout_s={JOIN_S if disturbed and plan.joining else GENEROUS_S}",
                f"cluster.timeout_s={plan.timeout_s if disturbed else GENEROUS_S}",
            ),
            plan.workload,
            plan.elements,
            plan.density,
            rounds,
        )

    def _next_job(self) -> None:
        """The next generation of the job, with the survivors and somebody new in place of each victim, works."""
        staff = [
            self._stack.enter_context(WorkerProcess()) if member in self._victims.values() else member
            for member in self._members
        ]
        complete(staff, [self._order(rank, rounds=3) for rank in range(self._plan.ranks)])

    def _work_on(self) -> None:
        """All ranks complete some more rounds and end the job."""
        for _ in range(2):  # the first may have been all but complete before
            for member in self._members:
                member.expect_progress()
        for member in self._members:
            member.finish()
        for member in self._members:
            member.expect_left()

    def _expect_errors(
        self, who: Mapping[str, WorkerProcess], since: float, bound_s: float, *kinds: str
    ) -> list[Reaction]:
        """Each raises one of these kinds of errors in time, and nobody but victims is named."""
        results = {
            name: member.hear("error", "wrong", "left", within_s=bound_s + OVERDUE_S) for name, member in who.items()
        }
        return [self._judged(name, report, since, bound_s, kinds) for name, report in results.items()]

    def _expect_end_of_joining(self, since: float) -> list[Reaction]:
        """Ranks that were joining all raise in time, or all work, on a shard that was started again meanwhile."""
        bound_s = JOIN_S + DEATH_S
        begun = {who: member.hear("begins").at for who, member in self._survivors.items()}  # with its data ready
        results = {who: _two_rounds(member, bound_s + OVERDUE_S) for who, member in self._survivors.items()}
        if self._plan.hits_shard and all(report.event == "there" for report in results.values()):
            self._work_on()
            return []
        kinds = ("AbortedError", "RefusedError", "TransportError")
        return [self._judged(who, result, max(since, begun[who]), bound_s, kinds) for who, result in results.items()]

    def _judged(self, who: str, found: Report, since: float, bound_s: float, kinds: tuple[str, ...]) -> Reaction:
        seconds = found.at - since
        assert found.event == "error", f"{who}: expected {' or '.join(kinds)}, got {found}"
        assert found.kind in kinds, f"{who}: expected {' or '.join(kinds)}, got {found}"
        assert self._accused(found), f"{who}: expected {' or '.join(self._names)} to be named, got {found}"
        assert 0 <= seconds <= bound_s, f"{who}: {seconds:.3f} s after the fault, expected {bound_s:g} s: {found}"
        return Reaction(who, found.kind, seconds, bound_s)

    def _accused(self, found: Report) -> bool:
        """Whether an error names a victim, and nobody else; while joining, ranks that are missing have no more names
        than their numbers, and with a dead shard those that have given up are missing, too."""
        if found.culprit:
            others = found.culprit
            for name in self._names:
                others = others.replace(name, "")
            return others != found.culprit and not others.strip(", ")
        missing = MISSING.search(found.text)
        if missing is None:
            return any(name in found.text for name in self._names)
        return self._plan.hits_shard or bool({*map(int, missing[1].split(", "))} & {*self._plan.victims})


def _two_rounds(member: WorkerProcess, within_s: float) -> Report:
    """An error, or word that two more rounds are complete; the first may have been all but complete before."""
    first = member.ask(within_s)
    return member.ask(within_s) if first.event == "there" else first
