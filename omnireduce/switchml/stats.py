"""Statistics of a context."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of some numbers, such as the sizes of jobs in elements. `stdev` is that of the population, not of a
    sample. Without numbers all are 0."""

    sum: float
    mean: float
    max: float
    min: float
    median: float
    stdev: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The distribution of `values`."""
        ordered = sorted(values) or [0]
        mean = statistics.fmean(ordered)
        return cls(
            sum(ordered), mean, ordered[-1], ordered[0], statistics.median(ordered), statistics.pstdev(ordered, mean)
        )

    def __str__(self) -> str:
        return (
            f"Sum: {self.sum} Mean: {self.mean:.6g} Max: {self.max} Min: {self.min} Median: {self.median:.6g} "
            f"Stdev: {self.stdev:.6g}"
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals of a context since it was made, or since `Context.reset_stats`.

    `jobs_finished` are those whose sum is there, `jobs_failed` those that have none; the others are under way.
    `sizes` are those of the submitted jobs. `sent_bytes` and `received_bytes` are those of this rank since the context
    was started last, framing included.
    """

    jobs_submitted: int
    jobs_finished: int
    jobs_failed: int
    sizes: Distribution
    sent_bytes: int
    received_bytes: int

    def __str__(self) -> str:
        return (
            f"Jobs submitted: #{self.jobs_submitted}#\nJobs finished: #{self.jobs_finished}#\n"
            f"Jobs failed: #{self.jobs_failed}#\nJob sizes: {self.sizes}\n"
            f"Bytes sent: #{self.sent_bytes}#\nBytes received: #{self.received_bytes}#"
        )
