"""The targets of the service, as ratios within one run where possible, and whether it met them."""

from __future__ import annotations

from benchmarks.contest.cases import MEMORY
from benchmarks.contest.contest import BOUND, OURS, PEERS, SCAN, Measured
from benchmarks.contest.memory import Memory
from benchmarks.harness.verdicts import Verdict, at_least, at_most, below, undecided

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
    case, ours, found_verdicts = measured.case, measured.results[OURS].median, []
    if case.overlap != "random":
        return []
    kind = case.transport, case.ranks, case.size, case.repeats > 1
    target = AT_LEAST.get(kind, {}).get(case.density)
    if target is not None:
        found_verdicts.append(_against_best(measured, ours, target))
    label, limit = AT_MOST.get((*kind, case.density), ("", 0.0))
    if label:
        found_verdicts.append(at_most(case.name, ours, label, measured.results[label].median, limit))
    return found_verdicts + _small(measured)


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
    openmpi_results = [result for label, result in measured.results.items() if label.startswith("openmpi")]
    fastest = min(openmpi_results, key=lambda result: result.median)
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
    found_verdicts = [
        below(f"{case.name}: worker beyond its tensor", memory.worker, WORKER_MIB, "MiB"),
        below(f"{case.name}: shard beyond its slots", memory.shard, SHARD_MIB, "MiB"),
    ]
    if (case.transport, case.size) == (MEMORY, "100 MiB"):
        found_verdicts.append(below(f"{case.name}: start of a warm daemon", memory.ready_s, READY_S, "s"))
    return found_verdicts
