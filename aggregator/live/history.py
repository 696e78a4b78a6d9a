"""The traffic of a daemon's jobs in the last minutes. Each request to the monitor may add a sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from omnireduce.support.job_summary import JobSummary

KEPT_S = 600.0
LEAST_S = 0.5  # least time between two samples that are kept
LOOKS = 600  # the most samples of one job
JOBS = 256  # the most jobs with samples


class Look(NamedTuple):
    """A sample of a job: its time, in seconds, and the total bytes from and to the workers."""

    at: float
    received: int
    sent: int


class Rate(NamedTuple):
    """Bytes per second from and to workers, between two samples. `at`: the time of the later sample."""

    at: float
    received: float
    sent: float


class History:
    """The samples of all jobs. A job that is over is dropped at the next sample."""

    def __init__(self) -> None:
        self._looks: dict[tuple[str, str, bool], deque[Look]] = {}

    def note(self, jobs: Sequence[JobSummary], now: float) -> None:
        """Add a sample of each of these jobs."""
        running = {job.key: job for job in jobs if not job.gathers}
        for gone in self._looks.keys() - running.keys():
            del self._looks[gone]
        for key, job in running.items():
            if key in self._looks or len(self._looks) < JOBS:
                self._keep(self._looks.setdefault(key, deque(maxlen=LOOKS)), job, now)

    def _keep(self, looks: deque[Look], job: JobSummary, now: float) -> None:
        look = Look(now, job.traffic.received_bytes, job.traffic.sent_bytes)
        if looks and (look.received < looks[-1].received or look.sent < looks[-1].sent):  # another job of this name
            looks.clear()
        if looks and now - looks[-1].at < LEAST_S:
            return
        looks.append(look)
        while looks[0].at < now - KEPT_S:
            looks.popleft()

    def rates(self, job: JobSummary) -> list[Rate]:
        """The rates of a job, the oldest first."""
        looks = list(self._looks.get(job.key, ()))
        return [
            Rate(new.at, (new.received - old.received) / (new.at - old.at), (new.sent - old.sent) / (new.at - old.at))
            for old, new in pairwise(looks)
        ]
