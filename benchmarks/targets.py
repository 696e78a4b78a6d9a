"""What the service aims at, as ratios within one run where it can be, and whether it got there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contest import BOUND, OURS, PEERS, SCAN, Measured
from benchmarks.memory import Memory


@dataclass(frozen=True)
class Verdict:
    """One line of the summary. `ratio` is the peer's value over ours, or for `at_most` ours over the peer's.

    `case` is the name of a case; if it has several targets of one kind, then also ":" and which. Where a competitor did
    not run that the target needs, `peer` names who is absent, and there is no ratio, and nothing was met or missed.
    """

    case: str
    value: float
    unit: str
    peer: str
    peer_value: float | None
    ratio: float | None
    target: str
    met: bool | None


def at_least(case: str, ours: float, peer: str, theirs: float, target: float, unit: str = "ms") -> Verdict:
    """We are to be at least `target` times as fast."""
    ratio = theirs / ours
    return Verdict(case, ours, unit, peer, theirs, ratio, f">= {target:.3g}x", ratio >= target)


def at_most(case: str, ours: float, peer: str, theirs: float, target: float, unit: str = "ms") -> Verdict:
    """We may take at most `target` times as long, or as much."""
    ratio = ours / theirs
    return Verdict(case, ours, unit, peer, theirs, ratio, f"<= {target:.3g}x", ratio <= target)


def below(case: str, ours: float, limit: float, unit: str) -> Verdict:
    """An absolute limit."""
    return Verdict(case, ours, unit, "limit", limit, ours / limit, f"<= {limit:g} {unit}", ours <= limit)


def undecided(case: str, ours: float, absent: Sequence[str], target: float) -> Verdict:
    """We are to be at least `target` times as fast, but than whom is not known without all of the competitors."""
    return Verdict(case, ours, "ms", f"without {', '.join(absent)}", None, None, f">= {target:.3g}x", None)


DENSE = {  # (transport, ranks, size): by density, how many times as fast as the best dense peer
    ("shm", 2, "100 MiB"): {1.0: 1.5, 0.1: 5.0, 0.01: 9.0, 0.0: 10.0},
    ("shm", 4, "100 MiB"): {1.0: 1.8, 0.1: 4.5, 0.01: 9.0},
    ("tcp", 2, "100 MiB"): {0.1: 3.0, 0.01: 8.0},
    ("shm", 2, "1 MiB"): {1.0: 0.5, 0.1: 1.0, 0.01: 1.0},
}
BOUNDS = {  # (transport, ranks, size, density): what bounds the time, and how many times as long we may take
    ("shm", 2, "100 MiB", 0.01): (SCAN, 1.5),
    ("tcp", 2, "100 MiB", 1.0): (BOUND, 1.3),
}
ROWS = {"gloo": ("gloo sparse", 4.0), "mpich": ("AGsparse", 4.0)}  # by competitor
SMALL = ("4 KiB", "64 KiB")
LATENCY_MS = 0.15
SKEW = 1.15
WORKER_MIB = SHARD_MIB = 64.0
READY_S = 5.0


def verdicts(measured: Measured) -> list[Verdict]:
    """What became of the targets of a case on one host; undecided ones where a competitor did not run."""
    kinds = {"dense": _dense, "rows": _rows, "skew": _skew}
    return kinds[measured.case.kind](measured)


def _dense(measured: Measured) -> list[Verdict]:
    case, ours, lines = measured.case, measured.results[OURS].median, []
    if case.overlap != "random":
        return []
    target = DENSE.get((case.transport, case.ranks, case.size), {}).get(case.density)
    if target is not None:
        lines.append(_against_best(measured, ours, target))
    label, most = BOUNDS.get((case.transport, case.ranks, case.size, case.density), ("", 0.0))
    if label:
        lines.append(at_most(case.name, ours, label, measured.results[label].median, most))
    return lines + _small(measured)


def _against_best(measured: Measured, ours: float, target: float) -> Verdict:
    """The best dense peer is known only when all have run."""
    absent, best = measured.absent(*PEERS), measured.best_rival()
    if absent or best is None:
        return undecided(measured.case.name, ours, absent, target)
    return at_least(measured.case.name, ours, best.label, best.median, target)


def _against(measured: Measured, peer: str, label: str, target: float) -> Verdict:
    """`label` is the method of a peer."""
    ours = measured.results[OURS].median
    if label not in measured.results:
        return undecided(measured.case.name, ours, [peer], target)
    return at_least(measured.case.name, ours, label, measured.results[label].median, target)


def _small(measured: Measured) -> list[Verdict]:
    case, ours = measured.case, measured.results[OURS].median
    if case.size not in SMALL or (case.transport, case.ranks, case.density) != ("shm", 2, 1.0):
        return []
    lines = [_against(measured, "gloo", "gloo", 1.0)]
    if case.size == "4 KiB":
        lines.append(below(f"{case.name}: p50", ours, LATENCY_MS, "ms"))
    return lines


def _rows(measured: Measured) -> list[Verdict]:
    return [_against(measured, peer, label, target) for peer, (label, target) in ROWS.items()]


def _skew(measured: Measured) -> list[Verdict]:
    shards = measured.results[OURS].shard_bytes
    mean = sum(shards) / len(shards)
    return [at_most(f"{measured.case.name}: busiest", max(shards) / 1e6, "mean shard", mean / 1e6, SKEW, "MB")]


def memory_verdicts(memory: Memory) -> list[Verdict]:
    """What became of the targets for memory, and for the start of a daemon that has its kernels."""
    case = memory.case
    lines = [
        below(f"{case.name}: worker beyond its tensor", memory.worker, WORKER_MIB, "MiB"),
        below(f"{case.name}: shard beyond its slots", memory.shard, SHARD_MIB, "MiB"),
    ]
    if (case.transport, case.size) == ("shm", "100 MiB"):
        lines.append(below(f"{case.name}: start of a warm daemon", memory.ready_s, READY_S, "s"))
    return lines
