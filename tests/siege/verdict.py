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
MOST_OF_ELSEWHERE = 1.5  # p99 here / p99 elsewhere: more is not the machine, which both attacks keep busy
MOST_GROWTH_BYTES = 64 << 20
MOST_LOG_BYTES = 1_000_000  # a minute
MOST_PROBE_S = 3.0  # for /healthz: orchestrators wait about as long


@dataclass
class Figures:
    """Of one kind; `shows`, `forbids` and `own_bytes` are those of `Kind`.

    For each pair of phases what the honest ranks' collectives took, alone and beside the attacker, in seconds; where
    the second is too long, also beside an attack here and on another daemon of the machine (`elsewhere`). How much
    the shard grew, what was logged in `attack_s` of attack, and as `troubles` what may not be at all.
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
        """The median over the pairs of p99 beside / p99 alone; infinite where nothing was completed."""
        return _ratio(self.beside, self.alone)

    @property
    def of_elsewhere(self) -> float:
        """The same of p99 here / p99 elsewhere."""
        return _ratio(self.here, self.elsewhere)

    @property
    def log_rate(self) -> float:
        """Bytes a minute."""
        return 60 * self.log_bytes / self.attack_s if self.attack_s else 0.0

    @property
    def collectives(self) -> int:
        return sum(map(len, self.alone + self.beside))

    def faults(self, *, judge_time: bool) -> list[str]:
        """What does not hold. How long things take depends on the machine: only where it is to be judged."""
        found = list(dict.fromkeys(self.troubles))
        if not (self.tally.words[self.shows] if self.shows else self.tally.words):
            found.append(f"nothing was attacked: no '{self.shows}'")
        if self.tally.words[self.forbids]:
            found.append(self.forbids)
        if self.growth_bytes > MOST_GROWTH_BYTES + self.own_bytes:
            found.append("memory")
        if self.log_rate > MOST_LOG_BYTES:
            found.append("log")
        if judge_time and not self.ratio <= MOST_RATIO and not self.of_elsewhere <= MOST_OF_ELSEWHERE:
            found.append("latency")
        if judge_time and self.slowest_probe_s > MOST_PROBE_S:
            found.append(f"/healthz took {self.slowest_probe_s:.1f} s")
        return found


def quantile(seconds: Sequence[float], percent: float) -> float:
    """Infinite where there are none: nothing was completed."""
    return float(np.percentile(seconds, percent)) if seconds else float("inf")


def _ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> float:
    pairs = zip(above, below, strict=False)
    return median([quantile(one, 99) / quantile(other, 99) for one, other in pairs] or [float("inf")])


def _milliseconds(phases: Sequence[Sequence[float]], percent: float) -> str:
    found = [quantile(each, percent) for each in phases]
    return f"{1000 * median(found):.1f}" if found else "-"


def table(rows: Iterable[Figures], *, judge_time: bool) -> Table:
    """One line for each kind."""
    found = Table(box=None, pad_edge=False)
    found.add_column("kind", no_wrap=True)
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
        found.add_column(name, justify="right")
    found.add_column("verdict", overflow="fold")
    for each in rows:
        faults = each.faults(judge_time=judge_time)
        legal = f" of {each.own_bytes >> 20}" if each.own_bytes else ""
        found.add_row(
            each.name,
            str(each.collectives),
            _milliseconds(each.alone, 50),
            _milliseconds(each.alone, 99),
            _milliseconds(each.beside, 99),
            _milliseconds(each.beside, 100),
            f"{each.ratio:.1f}",
            f"{each.of_elsewhere:.1f}" if each.elsewhere else "",
            f"{each.growth_bytes / 2**20:+.0f}{legal}",
            f"{each.log_rate / 1000:.0f}",
            Text("; ".join(faults), "red") if faults else Text("holds", "green"),
        )
    return found
