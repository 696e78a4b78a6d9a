"""The statistics that the programs print."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple, Self


class Series(NamedTuple):
    """Of some numbers. `std_dev` is that of all of them, not of a sample."""

    min: float
    max: float
    median: float
    mean: float
    std_dev: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        mean = statistics.fmean(values)
        return cls(min(values), max(values), statistics.median(values), mean, statistics.pstdev(values, mean))

    def named(self) -> list[tuple[str, float]]:
        """Each with the name that it has in what is printed."""
        return list(zip(("Min", "Max", "Median", "Mean", "Std dev"), self, strict=True))
