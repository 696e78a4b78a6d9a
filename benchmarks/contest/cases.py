"""The cases that are measured. Each has one table row per competitor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

BLOCK = 256  # elements; also the length of a row
DENSITIES = (1.0, 0.5, 0.1, 0.01, 0.001, 0.0)
SIZES = {"4 KiB": 1 << 10, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "16 MiB": 1 << 22, "100 MiB": 26_214_400}  # float32
LARGEST = {"400 MiB": 4 * 26_214_400}  # for memory alone
MEMORY = "memory"  # ranks of one host combine among themselves; by the others every block goes through a shard
TRANSPORTS = (MEMORY, "shm", "tcp")
SHARDS, SKEW_SHARDS = 2, 4
IN_A_ROW = "one after the other"


@dataclass(frozen=True)
class Setup:
    """The processes that a case needs. Cases with the same setup are measured by the same processes."""

    transport: str
    ranks: int
    shards: int = SHARDS

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of the service's ranks, as `section.key=value`."""
        if self.transport == MEMORY:
            return ("transport.host_exchange=auto",)
        return ("transport.host_exchange=off", f"transport.kind={self.transport}")


@dataclass(frozen=True)
class Case:
    """One exchange of `elements` of float32 among `ranks`.

    `kind`: a `dense` tensor; `rows` of a sparse matrix; `skew`, a tensor whose first blocks are the likely ones, over
    four shards; or `memory`, what processes take for tensors of several densities. A round has `repeats` exchanges, one
    after the other: only the first finds cold caches and ranks that sleep. `links`: which hosts the ranks are on, and
    the rate of their links, where that is not this host.
    """

    transport: str
    ranks: int
    size: str
    density: float
    overlap: str = "random"
    kind: str = "dense"
    rounds: int = 15
    links: str = ""
    repeats: int = 1

    @property
    def elements(self) -> int:
        return (SIZES | LARGEST)[self.size]

    @property
    def distribution(self) -> str:
        return "zipf" if self.kind == "skew" else "uniform"

    @property
    def setup(self) -> Setup:
        return Setup(self.transport, self.ranks, SKEW_SHARDS if self.kind == "skew" else SHARDS)

    @property
    def name(self) -> str:
        setting = f"{self.links or self.transport}, {self.ranks} ranks, {self.size}"
        if self.kind == "memory":
            return f"{setting}, memory"
        data_texts = {"rows": "rows", "skew": f"Zipf over {self.setup.shards} shards"}
        suffix = f", {IN_A_ROW}" if self.repeats > 1 else ""
        return f"{setting}, density {self.density:g}, {data_texts.get(self.kind, f'{self.overlap} overlap')}{suffix}"


def _cases_of_densities(
    transport: str, ranks: int, size: str, densities: tuple[float, ...], rounds: int = 20, repeats: int = 1
) -> list[Case]:
    return [Case(transport, ranks, size, density, rounds=rounds, repeats=repeats) for density in densities]


def target_cases() -> list[Case]:
    """The cases on one host that have a target, and those through shards that must not get slower."""
    return [
        *_cases_of_densities(MEMORY, 2, "100 MiB", (1.0, 0.1, 0.01, 0.0)),
        *_cases_of_densities(MEMORY, 2, "16 MiB", (1.0, 0.1, 0.01), 40),
        *_cases_of_densities(MEMORY, 2, "1 MiB", (1.0, 0.1, 0.01), 100),
        *_cases_of_densities(MEMORY, 2, "1 MiB", (1.0, 0.1, 0.01), 20, 50),
        *_cases_of_densities(MEMORY, 2, "4 KiB", (1.0,), 20, 200),
        Case(MEMORY, 2, "100 MiB", 0.01, kind="rows", rounds=20),
        *_cases_of_densities(MEMORY, 4, "100 MiB", (1.0, 0.1, 0.01)),
        *_cases_of_densities(MEMORY, 4, "16 MiB", (1.0, 0.1, 0.01), 40),
        *_cases_of_densities(MEMORY, 4, "4 KiB", (1.0,), 20, 200),
        Case(MEMORY, 4, "100 MiB", 0.01, kind="rows", rounds=20),
        *_cases_of_densities("shm", 2, "100 MiB", (1.0, 0.1, 0.01), 12),
        *_cases_of_densities("shm", 2, "1 MiB", (1.0, 0.1), 50),
        *_cases_of_densities("tcp", 2, "100 MiB", (1.0, 0.1, 0.01), 12),
        *(
            Case(transport, 2, "100 MiB", density, kind="skew", rounds=5)
            for transport, density in itertools.product(("shm", "tcp"), (0.1, 0.01))
        ),
        *(Case(MEMORY, 2, size, 1.0, kind="memory", rounds=1) for size in (*SIZES, *LARGEST)),
        *(Case(transport, 2, "100 MiB", 1.0, kind="memory", rounds=1) for transport in ("shm", "tcp")),
    ]


def all_cases() -> list[Case]:
    """The cases with a target, then every other combination of transport, ranks, size, density and overlap."""
    cases = target_cases()
    names = {case.name for case in cases}
    for transport, ranks, size, density, overlap in itertools.product(
        TRANSPORTS, (2, 4), SIZES, DENSITIES, ("random", "full", "none")
    ):
        if overlap != "random" and density in (1.0, 0.0):
            continue  # the same tensors
        if overlap == "none" and density * ranks > 1:
            continue
        case = Case(transport, ranks, size, density, overlap, rounds=5 if size == "100 MiB" else 10)
        if case.name not in names:
            cases.append(case)
    return cases
