"""What is measured: cases, each one table row per competitor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

BLOCK = 256  # elements; also the length of a row
DENSITIES = (1.0, 0.5, 0.1, 0.01, 0.001, 0.0)
SIZES = {"4 KiB": 1 << 10, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "16 MiB": 1 << 22, "100 MiB": 26_214_400}  # float32


@dataclass(frozen=True)
class Case:
    """One exchange of `elements` of float32 among `ranks`. `kind`: a dense tensor, or `rows` of a sparse matrix."""

    transport: str
    ranks: int
    size: str
    density: float
    overlap: str = "random"
    kind: str = "dense"
    rounds: int = 20

    @property
    def elements(self) -> int:
        return SIZES[self.size]

    @property
    def name(self) -> str:
        what = "rows" if self.kind == "rows" else f"{self.overlap} overlap"
        return f"{self.transport}, {self.ranks} ranks, {self.size}, density {self.density:g}, {what}"


def _dense(transport: str, ranks: int, size: str, densities: tuple[float, ...], rounds: int = 20) -> list[Case]:
    return [Case(transport, ranks, size, density, rounds=rounds) for density in densities]


def target_cases() -> list[Case]:
    """The cases on one host that have a target."""
    return [
        *_dense("shm", 2, "100 MiB", (1.0, 0.1, 0.01, 0.0)),
        *_dense("shm", 2, "1 MiB", (1.0, 0.1, 0.01), 100),
        *_dense("shm", 2, "64 KiB", (1.0,), 300),
        *_dense("shm", 2, "4 KiB", (1.0,), 300),
        Case("shm", 2, "100 MiB", 0.01, kind="rows"),
        *_dense("shm", 4, "100 MiB", (1.0, 0.1, 0.01)),
        Case("shm", 4, "100 MiB", 0.01, kind="rows"),
        *_dense("tcp", 2, "100 MiB", (1.0, 0.1, 0.01)),
    ]


def all_cases() -> list[Case]:
    """Every transport, number of ranks, size, density and overlap, then those with a target."""
    grid = itertools.product(("shm", "tcp"), (2, 4), SIZES, DENSITIES, ("random", "full", "none"))
    found = []
    for transport, ranks, size, density, overlap in grid:
        if overlap != "random" and density in (1.0, 0.0):
            continue  # the same tensors
        if overlap == "none" and density * ranks > 1:
            continue
        found.append(Case(transport, ranks, size, density, overlap))
    names = {case.name for case in target_cases()}
    return [case for case in found if case.name not in names] + target_cases()
