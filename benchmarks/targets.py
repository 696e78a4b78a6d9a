"""The targets of the service, as ratios within one run where possible, and whether it met them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cases import MEMORY
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


AT_LEAST = {  # (transport, ranks, size, one after the other): by density, how many times as fast as the best dense peer
    (MEMORY, 2, "100 MiB", False): {1.0: 1.6, 0.1: 3.5},
    (MEMORY, 4, "100 MiB", False): {1.0: 2.0, 0.1: 3.5},
    (MEMORY, 2, "16 MiB", False): {1.0: 0.8, 0.1: 1.8, 0.01: 2.5},
    (MEMORY, 4, "16 MiB", False): {1.0: 0.8, 0.1: 1.8, 0.01: 2.5},
    (MEMORY, 2, "1 MiB", False): {1.0: 0.6, 0.1: 1.5, 0.01: 2.0},
    (MEMORY, 2, "1 MiB", True): {1.0: 1.0, 0.1: 3.0, 0.01: 4.0},
    ("tcp", 2, "100 MiB", False): {0.1: 3.0, 0.01: 8.0},
}
AT_MOST = {  # the same, and density: what bounds the time, and how many times as long we may take
    (MEMORY, 2, "100 MiB", False, 0.01): (SCAN, 1.3),
    (MEMORY, 2, "100 MiB", False, 0.0): (SCAN, 1.3),
    (MEMORY, 4, "100 MiB", False, 0.01): (SCAN, 1.6),
    ("tcp", 2, "100 MiB", False, 1.0): (BOUND, 1.3),
}
ROWS = {"gloo": ("gloo sparse", 4.0), "mpich": ("AGsparse", 1.2)}  # by competitor
LATENCY_MS = 0.03  # of 4 KiB, two ranks
SKEW = 1.15
WORKER_MIB = SHARD_MIB = 64.0
READY_S = 5.0


def verdicts(measured: Measured) -> list[Verdict]:
    """The verdicts on the targets of a case on one host; undecided ones if a competitor did not run."""
    kinds = {"dense": _dense, "rows": _rows, "skew": _skew}
    return kinds[measured.case.kind](measured)


def _dense(measured: Measured) -> list[Verdict]:
    case, ours, lines = measured.case, measured.results[OURS].median, []
    if case.overlap != "random":
        return []
    kind = case.transport, case.ranks, case.size, case.repeats > 1
    target = AT_LEAST.get(kind, {}).get(case.density)
    if target is not None:
        lines.append(_against_best(measured, ours, target))
    label, most = AT_MOST.get((*kind, case.density), ("", 0.0))
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
    """Two ranks have a limit; four are no slower than Open MPI, which is faster than others there."""
    case, ours = measured.case, measured.results[OURS].median
    if (case.transport, case.size, case.repeats > 1) != (MEMORY, "4 KiB", True):
        return []
    if case.ranks == 2:
        return [below(f"{case.name}: p50", ours, LATENCY_MS, "ms")]
    if measured.absent("openmpi"):
        return [undecided(case.name, ours, ["openmpi"], 1.0)]
    theirs = [result for label, result in measured.results.items() if label.startswith("openmpi")]
    fastest = min(theirs, key=lambda result: result.median)
    return [at_least(case.name, ours, fastest.label, fastest.median, 1.0)]


def _rows(measured: Measured) -> list[Verdict]:
    if measured.case.transport != MEMORY:
        return []
    return [_against(measured, peer, label, target) for peer, (label, target) in ROWS.items()]


def _skew(measured: Measured) -> list[Verdict]:
    shards = measured.results[OURS].shard_bytes
    mean = sum(shards) / len(shards)
    return [at_most(f"{measured.case.name}: busiest", max(shards) / 1e6, "mean shard", mean / 1e6, SKEW, "MB")]


def memory_verdicts(memory: Memory) -> list[Verdict]:
    """The verdicts on the targets for memory, and for the start of a daemon that has its kernels."""
    case = memory.case
    lines = [
        below(f"{case.name}: worker beyond its tensor", memory.worker, WORKER_MIB, "MiB"),
        below(f"{case.name}: shard beyond its slots", memory.shard, SHARD_MIB, "MiB"),
    ]
    if (case.transport, case.size) == (MEMORY, "100 MiB"):
        lines.append(below(f"{case.name}: start of a warm daemon", memory.ready_s, READY_S, "s"))
    return lines
