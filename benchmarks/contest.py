"""Runs cases: every competitor in turn, round by round, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.cases import BLOCK, Case
from benchmarks.group import Daemon, Group, PeerError, daemon, gloo_group, mpi_group, service_group

WARM_UP = 2  # rounds
SEED = 1
OURS, SCAN = "omnireduce", "scan only"
PEERS = ("mpich", "openmpi", "gloo")
AGSPARSE_DENSITY = 0.01  # above it a round of the all-gather of elements takes seconds
SHARDS = 2


@dataclass(frozen=True)
class Entrant:
    """One way to do the exchange: a method of a group. `dense` ones move everything."""

    label: str
    group: Group
    method: str
    kind: str
    dense: bool = True

    def fits(self, case: Case) -> bool:
        sparse_enough = self.dense or case.kind == "rows" or case.density <= AGSPARSE_DENSITY
        return self.kind == case.kind and sparse_enough


@dataclass
class Result:
    """What one entrant took in one case: milliseconds of the slowest rank in each round, and the rest per round."""

    label: str
    dense: bool
    ms: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    up: int = 0
    down: int = 0
    wrong: int = 0
    peak_mib: float = 0.0

    @property
    def median(self) -> float:
        return float(np.median(self.ms))


@dataclass
class Measured:
    """A case with its results, by label. `union_density` and `density` are as the data came out."""

    case: Case
    density: float
    union_density: float
    results: dict[str, Result]

    def best_dense(self) -> Result | None:
        """The fastest of the others that move everything."""
        others = [each for each in self.results.values() if each.dense and each.label not in (OURS, SCAN)]
        return min(others, key=lambda each: each.median, default=None)


class Contest:
    """All competitors for one transport and number of ranks."""

    def __init__(self, entrants: Sequence[Entrant], cpu_seconds: Callable[[], float]) -> None:
        self._entrants, self._daemon_cpu = entrants, cpu_seconds

    def run(self, case: Case) -> Measured:
        """Measure one case. Raises PeerError when a competitor fails."""
        entrants = [each for each in self._entrants if each.fits(case)]
        data: dict[str, Any] = {"overlap": case.overlap, "block_size": BLOCK, "seed": SEED, "density": case.density}
        for group in dict.fromkeys(each.group for each in entrants):
            told = group.tell(do="case", elements=case.elements, **data)
        results = {each.label: Result(each.label, each.dense) for each in entrants}
        for number in range(WARM_UP + case.rounds):
            for entrant in entrants:
                self._round(entrant, case, number, results[entrant.label])
        return Measured(case, told[0]["density"], told[0]["union_density"], results)

    def _round(self, entrant: Entrant, case: Case, number: int, result: Result) -> None:
        """One round of one entrant. The service's every result is checked, of the others the first."""
        ours = entrant.label == OURS
        processor = self._daemon_cpu() if ours else 0.0
        answers = entrant.group.tell(
            do="round", kind=case.kind, method=entrant.method, number=number,
            check=entrant.label != SCAN and (ours or number == 0),
        )  # fmt: skip
        result.wrong += sum(each["wrong"] for each in answers)
        if number < WARM_UP:
            return
        result.ms.append(1e3 * max(each["seconds"] for each in answers))
        shards = self._daemon_cpu() - processor if ours else 0.0
        result.cpu_s.append(sum(each["cpu"] for each in answers) + shards)
        result.up = round(float(np.mean([each["sent"] for each in answers])))
        result.down = round(float(np.mean([each["received"] for each in answers])))
        result.peak_mib = max(result.peak_mib, *(each["peak_mib"] for each in answers))


def _entrants(group: Group) -> list[Entrant]:
    if group.name == "service":
        return [
            Entrant(OURS, group, "allreduce", "dense"),
            Entrant(SCAN, group, "scan", "dense"),
            Entrant(OURS, group, "allreduce", "rows"),
        ]
    if group.name == "gloo":
        return [Entrant("gloo", group, "allreduce", "dense"), Entrant("gloo sparse", group, "sparse", "rows", False)]
    found = [Entrant(f"{group.name} {how}", group, how, "dense") for how in ("out of place", "in place")]
    if group.name == "mpich":
        found.append(Entrant("AGsparse", group, "agsparse", "dense", False))
        found.append(Entrant("AGsparse", group, "agsparse", "rows", False))
    return found


@contextlib.contextmanager
def contest(transport: str, ranks: int, peers: Sequence[str] = PEERS) -> Iterator[Contest]:
    """Start the service and these competitors on this host. One that cannot start is left out, and said to be.

    Raises PeerError when the service does not start.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-"))
        own: Daemon = stack.enter_context(daemon(SHARDS))
        service = stack.enter_context(service_group(ranks, folder, own.addresses, f"transport.kind={transport}"))
        entrants = _entrants(service)
        for name in peers:
            try:
                entrants += _entrants(stack.enter_context(_peer_group(name, ranks, folder, transport)))
            except (PeerError, RuntimeError, OSError) as error:
                sys.stderr.write(f"bench: left out: {error}\n")
        yield Contest(entrants, own.cpu_seconds)


def _peer_group(name: str, ranks: int, folder: str, transport: str) -> Group:
    return gloo_group(ranks, folder) if name == "gloo" else mpi_group(name, ranks, folder, transport)
