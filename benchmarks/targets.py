"""What the service aims at, as ratios within one run, and whether it got there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from benchmarks.contest import OURS, SCAN, Measured


@dataclass(frozen=True)
class Verdict:
    """One line of the summary. `ratio` is the peer's value over ours, or for `at_most` ours over the peer's."""

    case: str
    value: float
    unit: str
    peer: str
    peer_value: float
    ratio: float
    target: str
    met: bool


def at_least(case: str, ours: float, peer: str, theirs: float, target: float, unit: str = "ms") -> Verdict:
    """We are to be at least `target` times as fast."""
    ratio = theirs / ours
    return Verdict(case, ours, unit, peer, theirs, ratio, f">= {target:g}x", ratio >= target)


def at_most(case: str, ours: float, peer: str, theirs: float, target: float, unit: str = "ms") -> Verdict:
    """We may take at most `target` times as long, or as much."""
    ratio = ours / theirs
    return Verdict(case, ours, unit, peer, theirs, ratio, f"<= {target:g}x", ratio <= target)


def below(case: str, ours: float, limit: float, unit: str) -> Verdict:
    """An absolute limit."""
    return Verdict(case, ours, unit, "limit", limit, ours / limit, f"<= {limit:g} {unit}", ours <= limit)


DENSE = {  # (transport, ranks, size): by density, how many times as fast as the best dense peer
    ("shm", 2, "100 MiB"): {1.0: 1.5, 0.1: 5.0, 0.01: 9.0, 0.0: 10.0},
    ("shm", 4, "100 MiB"): {1.0: 1.8, 0.1: 4.5, 0.01: 9.0},
    ("tcp", 2, "100 MiB"): {0.1: 3.0, 0.01: 8.0},
    ("shm", 2, "1 MiB"): {1.0: 0.5, 0.1: 1.0, 0.01: 1.0},
}
ROWS = {"gloo sparse": 4.0, "AGsparse": 4.0}
SMALL = ("4 KiB", "64 KiB")
LATENCY_MS = 0.15
SCAN_RATIO = 1.5


def verdicts(found: Iterable[Measured]) -> list[Verdict]:
    """The targets that the cases on one host have; a competitor that did not run has none."""
    return [each for measured in found for each in (*_dense(measured), *_rows(measured), *_small(measured))]


def _of(measured: Measured, label: str) -> float | None:
    result = measured.results.get(label)
    return result.median if result is not None else None


def _dense(measured: Measured) -> list[Verdict]:
    case, ours = measured.case, measured.results[OURS].median
    target = DENSE.get((case.transport, case.ranks, case.size), {}).get(case.density)
    if case.kind != "dense" or case.overlap != "random" or target is None:
        return []
    best, lines = measured.best_dense(), []
    if best is not None:
        lines.append(at_least(case.name, ours, best.label, best.median, target))
    scan = _of(measured, SCAN)
    if (case.transport, case.ranks, case.size, case.density) == ("shm", 2, "100 MiB", 0.01) and scan is not None:
        lines.append(at_most(case.name, ours, SCAN, scan, SCAN_RATIO))
    return lines


def _rows(measured: Measured) -> list[Verdict]:
    case, ours = measured.case, measured.results[OURS].median
    if case.kind != "rows":
        return []
    theirs = [(label, target, _of(measured, label)) for label, target in ROWS.items()]
    return [at_least(case.name, ours, label, value, target) for label, target, value in theirs if value is not None]


def _small(measured: Measured) -> list[Verdict]:
    case, ours = measured.case, measured.results[OURS].median
    if case.size not in SMALL or (case.transport, case.ranks, case.density) != ("shm", 2, 1.0):
        return []
    gloo = _of(measured, "gloo")
    lines = [] if gloo is None else [at_least(case.name, ours, "gloo", gloo, 1.0)]
    if case.size == "4 KiB":
        lines.append(below(f"{case.name}, latency p50", ours, LATENCY_MS, "ms"))
    return lines


def as_json(lines: Iterable[Verdict]) -> list[dict[str, object]]:
    return [asdict(each) for each in lines]
