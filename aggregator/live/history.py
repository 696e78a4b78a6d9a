"""The traffic of a daemon's jobs in the last minutes. Each request to the monitor may add a sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from omnireduce.support.job_summary import JobSummary

KEPT_S = 600.0
MIN_GAP_S = 0.5  # least time between two samples that are kept
MAX_SAMPLES = 600  # the most samples of one job
MAX_SAMPLED_JOBS = 256  # the most jobs with samples


class TrafficSample(NamedTuple):
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
        self._samples: dict[tuple[str, str, bool], deque[TrafficSample]] = {}

    def add_samples(self, jobs: Sequence[JobSummary], now: float) -> None:
        """Add a sample of each of these jobs."""
        running = {job.key: job for job in jobs if not job.gathers}
        for ended_key in self._samples.keys() - running.keys():
            del self._samples[ended_key]
        for key, job in running.items():
            if key in self._samples or len(self._samples) < MAX_SAMPLED_JOBS:
                self._add_sample(self._samples.setdefault(key, deque(maxlen=MAX_SAMPLES)), job, now)

    def _add_sample(self, samples: deque[TrafficSample], job: JobSummary, now: float) -> None:
        sample = TrafficSample(now, job.traffic.received_bytes, job.traffic.sent_bytes)
        # Another job of this name:
        if samples and (sample.received < samples[-1].received or sample.sent < samples[-1].sent):
            samples.clear()
        if samples and now - samples[-1].at < MIN_GAP_S:
            return
        samples.append(sample)
        while samples[0].at < now - KEPT_S:
            samples.popleft()

    def rates(self, job: JobSummary) -> list[Rate]:
        """The rates of a job, the oldest first."""
        samples = list(self._samples.get(job.key, ()))
        return [
            Rate(new.at, (new.received - old.received) / (new.at - old.at), (new.sent - old.sent) / (new.at - old.at))
            for old, new in pairwise(samples)
        ]
