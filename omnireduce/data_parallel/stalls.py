"""Stalls of a queue: collectives that some ranks wait for, and others do not come to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

MOST_NAMED = 6
Ready = tuple[str, float]  # a name, and for how many seconds a rank has been ready for it


class Stall(NamedTuple):
    """A collective that some ranks are ready for, the first of them for `age_s` seconds, and others are `missing`."""

    name: str
    age_s: float
    ready: tuple[int, ...]
    missing: tuple[int, ...]


def stalls(told: Sequence[Sequence[Ready]], joined: Collection[int], oldest_s: float) -> list[Stall]:
    """The collectives that have waited for `oldest_s` seconds or more, the oldest first. `told`: by rank, what
    it is ready for. A rank that has joined is never missing."""
    ages: dict[str, dict[int, float]] = {}
    for rank, waiting in enumerate(told):
        for name, age_s in waiting:
            ages.setdefault(name, {})[rank] = age_s
    overdue = []
    for name, ready in ages.items():
        missing = tuple(rank for rank in range(len(told)) if rank not in ready and rank not in joined)
        if missing and max(ready.values()) >= oldest_s:
            overdue.append(Stall(name, max(ready.values()), tuple(sorted(ready)), missing))
    return sorted(overdue, key=lambda stall: -stall.age_s)


def in_words(found: Sequence[Stall]) -> list[tuple[str, str]]:
    """For each set of missing ranks, two texts: their numbers, and the collectives that wait for them."""
    names: dict[tuple[int, ...], list[Stall]] = {}
    for stall in found:
        names.setdefault(stall.missing, []).append(stall)
    return [
        (
            _ranks(missing),
            f"{'has' if len(missing) == 1 else 'have'} not come to {_listed(those)}, for which "
            f"{_ranks(those[0].ready)} {'waits' if len(those[0].ready) == 1 else 'wait'} since {those[0].age_s:.0f} s",
        )
        for missing, those in names.items()
    ]


def _listed(those: Sequence[Stall]) -> str:
    shown = [f"'{stall.name}'" for stall in those[:MOST_NAMED]]
    return ", ".join(shown) + (f" and {len(those) - MOST_NAMED} more" if len(those) > MOST_NAMED else "")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_NAMED])) + (", …" if len(ranks) > MOST_NAMED else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
