"""Many rounds on as few daemons as they allow, and their totals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from .plan import Plan, draw_plan
from .rounds import Outcome, Reaction, play
from .site import Held, Site

COMMAND = "python -m tests.faults"
MOST_DEATHS = 5  # deaths of shards of one daemon: one more within a minute would end it
LOG_LINES = 12  # last lines of the daemon's log, shown with a failure


class _Site:
    """The site of the next round. A site that has failed, or seen too many deaths, is replaced by a new one."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.site: Site | None = None
        # resources of the shards of each site at its begin, and at its end
        self.sites: list[tuple[list[Held], list[Held]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.site = None
        self._stack.__exit__(kind, error, trace)

    def play(self, plan: Plan) -> Outcome:
        if self.site is not None and self.site.deaths == MOST_DEATHS:
            self.__exit__(None, None, None)
        if self.site is None:
            self.site = self._stack.enter_context(Site())
            self.sites.append((self.site.base, self.site.base))
        outcome = play(plan, self.site)
        self.sites[-1] = self.site.base, outcome.held
        return outcome


@dataclass
class Campaign:
    """Plays rounds and counts; `say` gets a line for each."""

    say: Callable[[str], None]
    counts: Counter[str] = field(default_factory=Counter)  # good rounds, by kind of fault
    reactions: int = 0
    slowest: dict[str, Reaction] = field(default_factory=dict)  # by kind, as a share of its bound
    failed: list[Plan] = field(default_factory=list)

    def run(self, seeds: Iterable[int]) -> None:
        """Play these rounds. Those that kill shards have daemons of their own, so that one lasts for all others."""
        started = time.monotonic()
        with _Site() as lasting, _Site() as mortal:
            for seed in seeds:
                plan = draw_plan(seed)
                self._play(plan, mortal if plan.fault == "kill shard" else lasting)
        self._sum_up(time.monotonic() - started, lasting, mortal)

    def _play(self, plan: Plan, current: _Site) -> None:
        try:
            outcome = current.play(plan)
        except AssertionError as error:
            log = current.site.daemon.log.splitlines()[-LOG_LINES:] if current.site else []
            self.failed.append(plan)
            replay = f"replay: {COMMAND} --seed {plan.seed} --rounds 1"
            self.say("\n  ".join([f"{plan.seed} FAILED: {plan}", *str(error).splitlines(), "daemon:", *log, replay]))
            current.__exit__(type(error), error, error.__traceback__)
            return
        self.counts[plan.kind] += 1
        self.reactions += len(outcome.reactions)
        for reaction in outcome.reactions:
            slowest = self.slowest.setdefault(plan.kind, reaction)
            if reaction.seconds / reaction.bound_s > slowest.seconds / slowest.bound_s:
                self.slowest[plan.kind] = reaction
        reactions = ", ".join(map(str, outcome.reactions)) or "nobody minds"
        self.say(f"{plan.seed} {plan}: {reactions}")

    def _sum_up(self, seconds: float, *places: _Site) -> None:
        for kind, count in sorted(self.counts.items()):
            slowest = self.slowest.get(kind)
            reaction = f"; slowest: {slowest} of {1000 * slowest.bound_s:.0f}" if slowest else ""
            self.say(f"{kind}: {count} rounds{reaction}")
        for number, (first, last) in enumerate((site for current in places for site in current.sites), 1):
            for shard, (before, after) in enumerate(zip(first, last, strict=True)):
                self.say(f"daemon {number}, shard {shard}: at first {before}, at the end {after}")
        total = self.counts.total() + len(self.failed)
        self.say(f"{total} rounds, {len(self.failed)} failed, {self.reactions} errors in time, {seconds:.1f} s")
