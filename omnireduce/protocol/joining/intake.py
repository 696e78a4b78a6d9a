"""Intake of jobs on a shard: all jobs; while the shard drains, only jobs that it knows; in the end none. A job that a
user has ended is not admitted again.

An elastic job counts as known for as long as the shard drains: its ranks may form it anew. Only the first shard knows
which workers belong to it, so the other shards do the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from omnireduce.core.wire.control import Hello
from omnireduce.protocol.joining.checks import job_family

DRAINING = "the aggregator is draining and takes no new jobs: use another one, or wait until it runs again"
SHUTTING_DOWN = "the aggregator is shutting down"
MAX_ENDED = 64  # ended jobs that a shard remembers


@dataclass(frozen=True, slots=True)
class _Ended:
    reason: str
    until: float


@dataclass(frozen=True, slots=True)
class _Order(_Ended):
    """An order to end jobs with matching hellos. It refuses survivors of formations older than `before`."""

    is_meant: Callable[[Hello], bool]
    before: int


class Intake:
    """The decision of a shard whether workers may begin a job. It remembers for `limit_s` that a job was ended."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.state: Literal["open", "draining", "closed"] = "open"
        self._known_jobs: set[tuple[str, str, str, bool, bool]] = set()  # the known jobs while it drains
        self._ended: dict[tuple[str, str, str], _Ended] = {}  # by team, job and launch, the oldest first
        self._orders: deque[_Order] = deque(maxlen=MAX_ENDED)

    def drain(self, running: Iterable[Hello]) -> None:
        """Take only known jobs. `running`: a hello of each job that runs."""
        if self.state == "open":
            self.state, self._known_jobs = "draining", set(map(job_family, running))

    def resume(self) -> None:
        """Take all jobs again."""
        if self.state == "draining":
            self.state = "open"

    def close(self) -> None:
        """Take no jobs any more."""
        self.state = "closed"

    def job_begins(self, hello: Hello) -> None:
        """A job has been admitted; `hello`: one of its hellos."""
        if self.state == "draining":
            self._known_jobs.add(job_family(hello))

    def end(self, hello: Hello, reason: str, now: float) -> None:
        """The job of this hello was ended."""
        for key in [key for key, ended in self._ended.items() if now >= ended.until]:
            del self._ended[key]
        self._ended.pop(_launch_key(hello), None)
        if len(self._ended) >= MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._ended[_launch_key(hello)] = _Ended(reason, now + self._limit_s)

    def end_survivors(self, is_meant: Callable[[Hello], bool], reason: str, now: float, before: int) -> None:
        """Jobs were ended. Refuse their ranks also if these have left already to form the job anew, because another
        shard told them first."""
        self._orders.append(_Order(reason, now + self._limit_s, is_meant, before))

    def objection(self, hello: Hello, now: float, *, gathers: bool) -> tuple[str, bool]:
        """The reason to refuse a worker, and whether it may come later; empty when it may come now. `gathers`: other
        workers wait for the same job."""
        if self.state == "closed":
            return SHUTTING_DOWN, True
        is_elastic = hello.min_ranks > 0 or hello.formation > 0
        if self.state == "draining" and not gathers and not (is_elastic and job_family(hello) in self._known_jobs):
            return DRAINING, True
        for order in self._orders:
            if 0 < hello.survived < order.before and now < order.until and order.is_meant(hello):
                return order.reason, False
        ended = self._ended.get(_launch_key(hello))
        # Without a launch id, a worker that is new may belong to another start of the job.
        is_the_same = hello.launch != "" or hello.survived > 0
        return (ended.reason, False) if ended is not None and is_the_same and now < ended.until else ("", False)


def _launch_key(hello: Hello) -> tuple[str, str, str]:
    return hello.team, hello.job, hello.launch
