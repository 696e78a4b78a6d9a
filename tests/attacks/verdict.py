"""Measurements of one kind of attack, the bounds that must hold, and the table of all kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from rich.table import Table
from rich.text import Text

from .attacker import Tally

MOST_RATIO = 3.0  # p99 beside / p99 alone
MOST_OF_ELSEWHERE = 1.5  # p99 here / p99 elsewhere; both attacks keep the machine equally busy
MOST_GROWTH_BYTES = 64 << 20
MOST_LOG_BYTES = 1_000_000  # a minute
MOST_PROBE_S = 3.0  # for /healthz: orchestrators wait about as long


@dataclass
class Figures:
    """Measurements of one kind; `shows`, `forbids` and `own_bytes` are those of `Kind`.

    Each list has an entry for each phase: the seconds of the honest ranks' collectives, `alone` and `beside` the
    attacker. If they take too long beside it, `here` and `elsewhere` have those beside an attack on this daemon and on
    another daemon of the machine. The shard grew by `growth_bytes` and logged `log_bytes` in `attack_s` seconds of
    attack. `troubles` are faults whatever the figures say.
    """

    name: str
    shows: str
    forbids: str = ""
    own_bytes: int = 0
    alone: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)
    here: list[list[float]] = field(default_factory=list)
    elsewhere: list[list[float]] = field(default_factory=list)
    growth_bytes: int = 0
    log_bytes: int = 0
    attack_s: float = 0.0
    shard_cpu_s: float = 0.0  # while it was attacked
    probes: int = 0
    slowest_probe_s: float = 0.0
    tally: Tally = field(default_factory=Tally)
    troubles: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median over the pairs of p99 beside / p99 alone; infinite if nothing was completed."""
        return _ratio(self.beside, self.alone)

    @property
    def of_elsewhere(self) -> float:
        """Median over the pairs of p99 here / p99 elsewhere."""
        return _ratio(self.here, self.elsewhere)

    @property
    def log_rate(self) -> float:
        """Bytes a minute."""
        return 60 * self.log_bytes / self.attack_s if self.attack_s else 0.0

    @property
    def collectives(self) -> int:
        return sum(map(len, self.alone + self.beside))

    def faults(self, *, judge_time: bool) -> list[str]:
        """Faults, as text. Times depend on the machine: they count only with `judge_time`."""
        faults = list(dict.fromkeys(self.troubles))
        if not (self.tally.words[self.shows] if self.shows else self.tally.words):
            faults.append(f"nothing was attacked: no '{self.shows}'")
        if self.tally.words[self.forbids]:
            faults.append(self.forbids)
        if self.growth_bytes > MOST_GROWTH_BYTES + self.own_bytes:
            faults.append("memory")
        if self.log_rate > MOST_LOG_BYTES:
            faults.append("log")
        if judge_time and not self.ratio <= MOST_RATIO and not self.of_elsewhere <= MOST_OF_ELSEWHERE:
            faults.append("latency")
        if judge_time and self.slowest_probe_s > MOST_PROBE_S:
            faults.append(f"/healthz took {self.slowest_probe_s:.1f} s")
        return faults


def quantile(seconds: Sequence[float], percent: float) -> float:
    """A percentile of durations; infinite if there are none, because nothing was completed."""
    return float(np.percentile(seconds, percent)) if seconds else float("inf")


def _ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> float:
    pairs = zip(above, below, strict=False)
    return median([quantile(one, 99) / quantile(other, 99) for one, other in pairs] or [float("inf")])


def _milliseconds(phases: Sequence[Sequence[float]], percent: float) -> str:
    quantiles = [quantile(phase, percent) for phase in phases]
    return f"{1000 * median(quantiles):.1f}" if quantiles else "-"


def table(rows: Iterable[Figures], *, judge_time: bool) -> Table:
    """A table with one line for each kind."""
    lines = Table(box=None, pad_edge=False)
    lines.add_column("kind", no_wrap=True)
    for name in (
        "collectives",
        "p50 alone ms",
        "p99 alone ms",
        "p99 beside ms",
        "worst ms",
        "ratio",
        "of elsewhere",
        "memory MiB",
        "log kB/min",
    ):
        lines.add_column(name, justify="right")
    lines.add_column("verdict", overflow="fold")
    for figures in rows:
        faults = figures.faults(judge_time=judge_time)
        legal = f" of {figures.own_bytes >> 20}" if figures.own_bytes else ""
        lines.add_row(
            figures.name,
            str(figures.collectives),
            _milliseconds(figures.alone, 50),
            _milliseconds(figures.alone, 99),
            _milliseconds(figures.beside, 99),
            _milliseconds(figures.beside, 100),
            f"{figures.ratio:.1f}",
            f"{figures.of_elsewhere:.1f}" if figures.elsewhere else "",
            f"{figures.growth_bytes / 2**20:+.0f}{legal}",
            f"{figures.log_rate / 1000:.0f}",
            Text("; ".join(faults), "red") if faults else Text("holds", "green"),
        )
    return lines
