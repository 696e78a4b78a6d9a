"""Late ranks of a host: those that hold the others up."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.kernels.regions import BEGUN, COLLECTED, COMBINED, STAGED, SUMMED


def _lowest_of_others(counters: Array) -> Array:
    """For each rank, the lowest counter of the other ranks."""
    if counters.size < 2:
        return np.full(counters.size, np.iinfo(np.int64).max)
    lowest, second = np.sort(counters)[:2]
    lowest_others: Array = np.where(counters == lowest, second, lowest)
    return lowest_others


def owed_ranks(counters: Array, s: Any, number: int, owed: Collection[int]) -> list[int]:
    """The ranks other than `me` that this one may wait for in leg `number`, while shards owe them something. Arguments
    as in `late_ranks`."""
    behind = counters[:, BEGUN] <= number if owed else counters[:, COMBINED] <= s["base"] + s["collected"]
    return [rank for rank in np.flatnonzero(behind).tolist() if rank != s["me"] and (not owed or rank in owed)]


def late_ranks(counters: Array, s: Any, owed: Collection[int]) -> list[int]:
    """The ranks other than `me` that could take a step and have not. `counters`: int64 (ranks, words), the beginning of
    each region; `s`: an element of STATE; `owed`: ranks that have to wait for a shard before they begin."""
    begun, staged, combined, collected = (counters[:, line] for line in (BEGUN, STAGED, COMBINED, COLLECTED))
    has_begun = begun > s["number"]
    late = ~has_begun
    late[[rank for rank in owed if combined[rank] >= s["base"]]] = False  # it has passed the pass before
    staged, combined, collected = (column - s["base"] for column in (staged, combined, collected))
    summed = counters[:, SUMMED] - s["base"] if s["shards"] else combined  # what a shard owes is not theirs
    free = np.minimum(summed, _lowest_of_others(summed)) if s["shards"] else _lowest_of_others(collected)
    could = has_begun & (staged < s["chunks"]) & (free > staged - s["slots"])
    if has_begun.all():
        could |= (summed < staged) & (_lowest_of_others(staged) > summed)
        could |= (collected < combined) & (_lowest_of_others(combined) > collected)
    return [rank for rank in np.flatnonzero(late | could).tolist() if rank != s["me"]]
