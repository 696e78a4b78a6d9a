"""Runs many seeds, in several processes, and says what each found and how to see it again."""

from __future__ import annotations

import itertools
import multiprocessing
import shlex
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from omnireduce.kernels.warm import warm_up_all

from .cluster import Cluster
from .draw import draw_plan, fault_at
from .plan import Plan

COMMAND = "python -m tests.simulator"
MOST_S = 60.0  # processor time of one run at most; it takes a fraction of a second
MOST_REAL_S = 900.0  # real time of a run that waits: the machine may be busy, or stopped for a while
FIRST_EVENTS = 10  # until then a fault may find no victim, although the run has hardly begun
MOST_EVENTS = 5000  # more than a run without faults has
SHOWN = 4  # faults of one run that are shown
CHUNK = 8  # seeds that a process takes at once


@dataclass(frozen=True)
class Task:
    """A seed with its own faults or, with `fault`, with that one at every event, or only at `event`."""

    seed: int
    fault: str = ""
    event: int = 0

    def plan(self) -> Plan:
        plan = draw_plan(self.seed)
        return fault_at(plan, self.fault, self.event) if self.fault else plan

    def each(self) -> Iterator[Task]:
        """The single runs of which this task consists; whoever takes them stops when a fault comes too late."""
        if self.fault and not self.event:
            return (Task(self.seed, self.fault, event) for event in range(1, MOST_EVENTS))
        return iter((self,))

    @property
    def replay(self) -> str:
        """The options that run this again."""
        return f"--replay {self.seed}" + (
            f" --fault {shlex.quote(self.fault)} --event {self.event}" if self.fault else ""
        )


@dataclass
class Outcome:
    """Result of a task."""

    task: Task
    runs: int = 0
    found: list[str] = field(default_factory=list)  # faults, one line each
    struck: Counter[str] = field(default_factory=Counter)  # faults that found a victim, by kind


class _OverdueError(BaseException):
    """A run does not come to an end. Not an Exception: the product catches those and goes on."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _OverdueError

    clocks = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, MOST_REAL_S))
    before = [signal.signal(number, interrupt) for _, number, _ in clocks]
    for clock, _, most_s in clocks:
        signal.setitimer(clock, most_s)
    try:
        yield
    finally:
        for (clock, number, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0.0)
            signal.signal(number, handler)


def run_cluster(cluster: Cluster) -> list[str]:
    """Run a cluster; return what is wrong, also if it spins for ever within one event. In the main thread only."""
    try:
        with _limited(MOST_S):
            return cluster.run()
    except _OverdueError:
        where = traceback.format_exc(limit=-3)
        limits = f"{MOST_S:g} s of processor time, or the run longer than {MOST_REAL_S:g} s in all"
        return [f"stuck: one event of virtual time takes longer than {limits}: {where}"]


def run_task(task: Task, before_run: Callable[[], None] = lambda: None) -> Outcome:
    """Run a task until it is done or something is wrong."""
    outcome = Outcome(task)
    for single in task.each():
        before_run()
        cluster = Cluster(single.plan())
        run = run_cluster(cluster)
        if task.fault and not run and not cluster.struck and single.event > FIRST_EVENTS:
            break  # the fault came when all was over
        outcome.runs += 1
        outcome.struck.update(cluster.struck)
        if run:
            outcome.task, outcome.found = single, run
            break
    return outcome


def run_all(tasks: Iterable[Task], processes: int) -> Iterator[Outcome]:
    """Run tasks in `processes` processes, in this one if that is 1; yield the outcomes in the order of the tasks."""
    warm_up_all()  # compiling keeps references to slots for a while
    if processes == 1:
        yield from map(run_task, tasks)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        try:
            yield from itertools.chain.from_iterable(pool.map(_run_chunk, _chunks(tasks)))
        finally:
            pool.shutdown(cancel_futures=True)


def _run_chunk(tasks: list[Task]) -> list[Outcome]:
    return [run_task(task) for task in tasks]


def _chunks(tasks: Iterable[Task]) -> Iterator[list[Task]]:
    remaining = iter(tasks)
    while chunk := list(itertools.islice(remaining, CHUNK)):
        yield chunk


def report(outcome: Outcome, more_options: str = "") -> str:
    """A failure in words: what the seed switched on, what is wrong, how to see it again."""
    lines = [f"seed {outcome.task.seed} fails", *outcome.task.plan().describe(), *outcome.found[:SHOWN]]
    return "\n  ".join([*lines, f"replay: {COMMAND} {outcome.task.replay}{more_options}"])


def replay(task: Task, say: Callable[[str], None]) -> bool:
    """Run one seed and say all about it; return whether it is good."""
    plan = task.plan()
    say("\n".join(plan.describe(collectives=True)))
    cluster = Cluster(plan)
    run = run_cluster(cluster)
    say("\n".join([*cluster.world.trace, *(run or ["nothing wrong"])]))
    return not run


@dataclass
class Campaign:
    """Totals of many outcomes."""

    failed: list[Outcome] = field(default_factory=list)
    seeds: int = 0
    runs: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.runs += outcome.runs
        self.struck.update(outcome.struck)
        if outcome.found:
            self.failed.append(outcome)

    def summary(self) -> str:
        seconds = time.monotonic() - self.started
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.struck.items()))
        pace = f"{seconds:.1f} s, {self.runs / max(seconds, 1e-9):.1f} runs/s"
        runs = f" ({self.runs} runs)" if self.runs != self.seeds else ""
        ends = "".join(f"\nfailed: {COMMAND} {outcome.task.replay}" for outcome in self.failed)  # a long log may be cut
        count = f"{self.seeds} seeds{runs}, {len(self.failed)} failed, {pace}"
        return f"faults that struck: {faults or 'none'}\n{count}{ends}"
