"""The judges: never wrong, never stuck, the right culprit in time, all slots back, nothing kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from omnireduce.errors import AbortedError, RefusedError, TransportError

from .plan import Fault
from .workload import Collective, Work, expected

if TYPE_CHECKING:
    from .cluster import Cluster
    from .worker import Worker

NOTICE_S = 5.0  # how long the news of a death may take to reach every rank, beyond what the fault itself takes


def mapped_regions() -> int:
    """How many regions of slot memory this process has mapped or open."""
    return Path("/proc/self/maps").read_text().count("/memfd:omnireduce")


class Verdicts:
    """What was found wrong in one run."""

    def __init__(self, cluster: Cluster) -> None:
        self.found: list[str] = []
        self._cluster = cluster
        self._results: dict[tuple[Collective, int], bytes] = {}
        self._must_end: list[tuple[Worker, float, Fault]] = []

    def add(self, text: str) -> None:
        self.found.append(f"at {self._cluster.world.now():.3f} s, event {self._cluster.world.events}: {text}")

    def judge_result(self, worker: Worker, work: Work, number: int) -> None:
        """Never wrong: the oracle's values, and the same bits on all ranks."""
        if work.what != worker.job.collectives[number]:
            self.add(f"wrong: {worker.name} finished a collective that no other rank submitted")
            return
        result = work.result()
        oracle = expected(work.what, worker.job.ranks)
        wrong = int(np.count_nonzero(result != oracle)) if result.shape == oracle.shape else -1
        if wrong:
            self.add(f"wrong: {worker.name} collective {number}: {wrong} of {oracle.size} elements: {work.what}")
        if self._results.setdefault((work.what, worker.job.ranks), result.tobytes()) != result.tobytes():
            self.add(f"wrong: {worker.name} collective {number} differs in its bits: {work.what}")

    def judge_slots(self, worker: Worker) -> None:
        """All slots back: after a clean end the worker, and both ends of its links, have them all."""
        if not worker.clean:
            return
        for link, free in zip(worker.links, worker.free_slots(), strict=True):
            ends = [link._under_way, link._held, link.other._under_way, link.other._held]
            if any(ends) or free != list(range(len(link.send_slots))):
                self.add(f"slots: {worker.name}: {ends} in use and {free} free at a clean end")

    def judge_workers(self) -> None:
        """Every worker that is gone did all its work, or has a reason that a fault of this run explains."""
        for worker in self._cluster.workers:
            if not worker.alive and not worker.killed and not self._explained(worker):
                self.add(f"reason: {worker.name} ended with {type(worker.error).__name__}: {worker.error}")
        for worker, by, fault in self._must_end:
            if worker.ended_at is None or worker.ended_at > by:
                self.add(f"late: {worker.name} ended at {worker.ended_at} instead of {by:.3f} after {fault}")
        self._must_end.clear()

    def _explained(self, worker: Worker) -> bool:
        if worker.error is None:
            return worker.done and (worker.clean or bool(self._cluster.plan.faults))
        culprits = self._cluster.culprits(worker.job.name)
        if isinstance(worker.error, AbortedError):
            if worker.was_stalled and worker.error.reason == "connection closed":
                return True  # the shard did not wait until it could tell a stopped process why
            return any(culprit in worker.error.culprit for culprit in culprits)
        if isinstance(worker.error, TransportError):
            return any(culprit in str(worker.error) for culprit in culprits)
        return bool(culprits) and isinstance(worker.error, RefusedError)

    def expect_end(self, workers: Sequence[Worker], noticed_at: float, fault: Fault) -> None:
        """These workers must be gone soon after `noticed_at`, unless something stops them."""
        stalls = sum(each.number for each in self._cluster.plan.faults if each.kind in STALLS)
        self._must_end += [(worker, noticed_at + NOTICE_S + stalls, fault) for worker in workers]

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
            if shard.lost_slots:
                self.add(f"slots: {shard.name}: a clean job ended without {shard.lost_slots}")
            if shard.spun:
                self.add(f"shard: {shard.name} takes turns without end")


STALLS = ("worker stall", "shard stall", "freeze", "shard freeze")
