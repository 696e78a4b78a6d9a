"""Overdue names of a queue: collectives that some ranks have waited for too long, and others have not come to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

MAX_NAMED = 6
Ready = tuple[str, float]  # a name, and for how many seconds a rank has been ready for it


class OverdueName(NamedTuple):
    """A collective that some ranks are ready for, the first of them for `age_s` seconds, and others are `missing`."""

    name: str
    age_s: float
    ready: tuple[int, ...]
    missing: tuple[int, ...]


def find_overdue(reports: Sequence[Sequence[Ready]], joined: Collection[int], oldest_s: float) -> list[OverdueName]:
    """The collectives that have waited for `oldest_s` seconds or more, the oldest first. `reports`: by rank, what
    it is ready for. A rank that has joined is never missing."""
    ages: dict[str, dict[int, float]] = {}
    for rank, waiting in enumerate(reports):
        for name, age_s in waiting:
            ages.setdefault(name, {})[rank] = age_s
    overdue = []
    for name, ready in ages.items():
        missing = tuple(rank for rank in range(len(reports)) if rank not in ready and rank not in joined)
        if missing and max(ready.values()) >= oldest_s:
            overdue.append(OverdueName(name, max(ready.values()), tuple(sorted(ready)), missing))
    return sorted(overdue, key=lambda overdue_name: -overdue_name.age_s)


def describe_overdue(overdue: Sequence[OverdueName]) -> list[tuple[str, str]]:
    """For each set of missing ranks, two texts: their numbers, and the collectives that wait for them."""
    groups: dict[tuple[int, ...], list[OverdueName]] = {}
    for overdue_name in overdue:
        groups.setdefault(overdue_name.missing, []).append(overdue_name)
    return [(_list_ranks(missing), _describe_group(group)) for missing, group in groups.items()]


def _describe_group(group: Sequence[OverdueName]) -> str:
    """A text for overdue names with the same missing ranks."""
    first = group[0]
    return (
        f"{'has' if len(first.missing) == 1 else 'have'} not come to {_list_names(group)}, for which "
        f"{_list_ranks(first.ready)} {'waits' if len(first.ready) == 1 else 'wait'} since {first.age_s:.0f} s"
    )


def _list_names(group: Sequence[OverdueName]) -> str:
    quoted = [f"'{overdue_name.name}'" for overdue_name in group[:MAX_NAMED]]
    return ", ".join(quoted) + (f" and {len(group) - MAX_NAMED} more" if len(group) > MAX_NAMED else "")


def _list_ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks[:MAX_NAMED])) + (", …" if len(ranks) > MAX_NAMED else "")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
