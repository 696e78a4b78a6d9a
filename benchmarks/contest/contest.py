"""Runs cases: every competitor in turn, round by round, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.contest.cases import BLOCK, Case, Setup
from benchmarks.harness.group import (
    Group,
    PeerError,
    Servers,
    daemon,
    echo_servers,
    gloo_group,
    mpi_group,
    service_group,
)

WARM_UP = 2  # rounds
SEED = 1
OURS, SCAN, BOUND = "omnireduce", "scan only", "plain sockets"
AGSPARSE_DENSITY = 0.01  # above it a round of the all-gather of elements takes seconds


@dataclass(frozen=True)
class Method:
    """One way to do the exchange, for some cases. `is_rival`: what others use for dense tensors. `is_own`: the
    service's."""

    label: str
    name: str
    kind: str
    is_rival: bool = False
    densities: tuple[float, float] = (0.0, 1.0)  # least and most
    is_own: bool = False

    def fits(self, case: Case) -> bool:
        low, high = self.densities
        return self.kind == case.kind and low <= case.density <= high


def _mpi(name: str) -> tuple[Method, ...]:
    return tuple(
        Method(f"{name} {variant}", variant, "dense", is_rival=True) for variant in ("out of place", "in place")
    )


OWN_METHODS = tuple(Method(OURS, "allreduce", kind, is_own=True) for kind in ("dense", "rows", "skew"))
AGSPARSE = (
    Method("AGsparse", "agsparse", "dense", densities=(0.0, AGSPARSE_DENSITY)),
    Method("AGsparse", "agsparse", "rows"),
)
METHODS = {  # of each competitor
    "mpich": (*_mpi("mpich"), *AGSPARSE),
    "openmpi": _mpi("openmpi"),
    "gloo": (Method("gloo", "allreduce", "dense", is_rival=True), Method("gloo sparse", "sparse", "rows")),
}
PEERS = tuple(METHODS)


def labels(case: Case, peers: Sequence[str]) -> set[str]:
    """The labels that must have a row of the case when all these competitors run."""
    return {OURS} | {method.label for peer in peers for method in METHODS[peer] if method.fits(case)}


@dataclass(frozen=True)
class Entrant:
    """A method and the group that does it. `servers_s`: the processor time so far of what its ranks connect to."""

    method: Method
    group: Group
    servers_s: Callable[[], float] = lambda: 0.0

    @property
    def label(self) -> str:
        return self.method.label


@dataclass
class Result:
    """The cost of one entrant in one case: milliseconds of the slowest rank in each exchange; the rest per exchange.

    `up` and `down` are bytes per rank, `shard_bytes` those of all ranks with each shard.
    """

    label: str
    is_rival: bool
    ms: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    up: int = 0
    down: int = 0
    shard_bytes: list[int] = field(default_factory=list)
    wrong: int = 0
    peak_mib: float = 0.0
    carried: Counter[str] = field(default_factory=Counter)  # bytes in the timed rounds, by transport

    @property
    def median(self) -> float:
        return float(np.median(self.ms))


@dataclass
class Measured:
    """A case with its results, by label. Densities are as the data came out; `others_density`: of the union of all
    ranks but one."""

    case: Case
    density: float
    union_density: float
    others_density: float
    results: dict[str, Result]

    def best_rival(self) -> Result | None:
        """The fastest of the others that move everything, if there are any."""
        rivals = [result for result in self.results.values() if result.is_rival]
        return min(rivals, key=lambda result: result.median, default=None)

    def absent(self, *peers: str) -> list[str]:
        """The competitors among these that should have a row of this case and have none."""
        return [peer for peer in peers if not labels(self.case, [peer]) <= self.results.keys()]


def order(entrants: Sequence[Entrant], number: int) -> list[Entrant]:
    """The entrants as they take their turns in a round, so that none always follows the same other one, or none.

    Those of one group are apart where they can be. Every second round goes backwards; every two begin one further.
    """
    left, separated = list(entrants), list[Entrant]()
    while left:
        counts = Counter(entrant.group for entrant in left)
        candidates = [entrant for entrant in left if not separated or entrant.group is not separated[-1].group]
        separated.append(max(candidates or left, key=lambda entrant: counts[entrant.group]))
        left.remove(separated[-1])
    start = number // 2 % len(separated) if separated else 0
    rotated = separated[start:] + separated[:start]
    return rotated[::-1] if number % 2 else rotated


class Contest:
    """All competitors for one setup."""

    def __init__(self, entrants: Sequence[Entrant]) -> None:
        self._entrants = entrants

    def run(self, case: Case) -> Measured:
        """Measure one case. Raises PeerError when a competitor fails."""
        entrants = [entrant for entrant in self._entrants if entrant.method.fits(case)]
        data: dict[str, Any] = {"overlap": case.overlap, "distribution": case.distribution, "density": case.density}
        for group in dict.fromkeys(entrant.group for entrant in entrants):
            descriptions = group.tell(do="case", elements=case.elements, block_size=BLOCK, seed=SEED, **data)
            group.has_only_zeros = not descriptions[0]["union_density"]
        results = {entrant.label: Result(entrant.label, entrant.method.is_rival) for entrant in entrants}
        for number in range(WARM_UP + case.rounds):
            for entrant in order(entrants, number):
                self._round(entrant, case, number, results[entrant.label])
        densities = {name: descriptions[0][name] for name in ("density", "union_density", "others_density")}
        return Measured(case, results=results, **densities)

    def _round(self, entrant: Entrant, case: Case, number: int, result: Result) -> None:
        """One round of one entrant. The service's every result is checked, of the others those of the warm-up."""
        is_checked = entrant.method.is_own or (number < WARM_UP and entrant.label not in (SCAN, BOUND))
        servers_s = entrant.servers_s()
        repeats = {"repeats": case.repeats} if case.repeats > 1 else {}
        answers = entrant.group.tell(
            do="round", kind=case.kind, method=entrant.method.name, number=number, check=is_checked, **repeats
        )
        result.wrong += sum(answer["wrong"] for answer in answers)
        if number < WARM_UP:
            return
        # An older checkout says one number.
        seconds = np.array([np.atleast_1d(answer["seconds"]) for answer in answers])
        result.ms += (1e3 * seconds.max(axis=0)).tolist()
        result.cpu_s.append(sum(answer["cpu"] for answer in answers) + (entrant.servers_s() - servers_s) / case.repeats)
        wire_bytes = np.array([answer["wire_bytes"] for answer in answers])
        result.up, result.down = (round(float(nbytes)) for nbytes in wire_bytes[:, :2].mean(axis=0))
        result.shard_bytes = wire_bytes[:, 2:].sum(axis=0).tolist()
        result.carried += entrant.group.carried_last
        result.peak_mib = max(result.peak_mib, *(answer["peak_mib"] for answer in answers))


@contextlib.contextmanager
def contest(setup: Setup, peers: Sequence[str] = PEERS) -> Iterator[Contest]:
    """Start the service and these competitors on this host. One that cannot start is left out, and said to be.

    Raises PeerError when the service does not start.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-"))
        shards = stack.enter_context(daemon(setup.shards))
        echoes = stack.enter_context(echo_servers(setup.shards if setup.transport == "tcp" else 0))
        service_ranks = service_group(
            setup.ranks, folder, shards.addresses, *setup.settings, echoes=echoes.addresses, carrier=setup.transport
        )
        entrants = _own_entrants(stack.enter_context(service_ranks), shards, echoes)
        for name in peers:
            try:
                group = stack.enter_context(_peer_group(name, setup, folder))
            except (PeerError, RuntimeError, OSError) as error:
                sys.stderr.write(f"bench: left out: {error}\n")
            else:
                entrants += [Entrant(method, group) for method in METHODS[name]]
        yield Contest(entrants)


def _own_entrants(group: Group, shards: Servers, echoes: Servers) -> list[Entrant]:
    entrants = [Entrant(method, group, shards.cpu_seconds) for method in OWN_METHODS]
    entrants.append(Entrant(Method(SCAN, "scan", "dense"), group))
    if echoes.addresses:
        sockets = Method(BOUND, "carry", "dense", densities=(1.0, 1.0))
        entrants.append(Entrant(sockets, group, echoes.cpu_seconds))
    return entrants


def _peer_group(name: str, setup: Setup, folder: str) -> Group:
    return gloo_group(setup.ranks, folder) if name == "gloo" else mpi_group(name, setup.ranks, folder, setup.transport)
