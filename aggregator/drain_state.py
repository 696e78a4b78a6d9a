"""The drain state of the daemon, and the jobs that its shards still have."""

from __future__ import annotations

import math
import time

from omnireduce.aggregator.children import Child
from omnireduce.core.admin_messages import Order

MIN_DRAIN_S = 1.0  # least time of a drain: a client that asks one shard after another still finds the last one


class Draining:
    """State of a drain. From `begin` on, the shards take no new jobs. The daemon ends when no shard has a job, or at
    `until`."""

    def __init__(self) -> None:
        self.order: Order | None = None  # the order to drain; None: the daemon takes jobs
        self.until = math.inf
        self._begun_at = 0.0
        self._jobs_of_shards: dict[Child, int] = {}  # the number of jobs of each shard that has reported it

    @property
    def stops(self) -> bool:
        """Whether the drain can no longer be taken back."""
        return self.order is not None and self.order.stops

    def begin(self, order: Order, limit_s: float = math.inf) -> None:
        """Begin to drain. If the daemon drains already, it may stop from now on."""
        if not self.stops and (self.order is None or order.stops):
            now = time.monotonic()
            self.order, self.until, self._begun_at = order, now + limit_s, now

    def resume(self) -> None:
        """Take jobs again, unless the daemon stops."""
        if not self.stops:
            self.order, self.until = None, math.inf
            self._jobs_of_shards.clear()

    def record_jobs(self, shard: Child, jobs: int) -> None:
        """Record how many jobs a shard still has."""
        if self.order is not None:
            self._jobs_of_shards[shard] = jobs

    def forget(self, shard: Child) -> None:
        """Drop the count of a shard that died. The process that replaces it has reported nothing yet."""
        self._jobs_of_shards.pop(shard, None)

    def without_report(self, shards: list[Child]) -> list[Child]:
        """The shards that have not reported yet."""
        return [shard for shard in shards if shard not in self._jobs_of_shards]

    def jobs(self) -> int:
        """The number of jobs: the largest count, because a job may be on several shards."""
        return max(self._jobs_of_shards.values(), default=0)

    def is_over(self, shards: list[Child], now: float) -> bool:
        """Whether the daemon may end."""
        if self.order is None:
            return False
        is_early = now < self._begun_at + MIN_DRAIN_S and not self.order.stops
        return now >= self.until or not (is_early or self.without_report(shards) or self.jobs())
