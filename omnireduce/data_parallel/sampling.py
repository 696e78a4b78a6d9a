"""Sampling of an epoch: the samples that each rank takes, and those that are done, even if ranks fail or join. Pure.

If a rank dies, its record of what it has done is lost. So at each commit ranks tell each other what they have done.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array


class Sampling:
    """Deals out the numbers of `total` samples to ranks. Samples that are done are not dealt out again in that epoch.

    `shuffle`: each epoch has another order, drawn from `seed`, the same on all ranks. `pads`: all ranks get equally
    many samples, for which some are dealt out again; otherwise the first ranks may have one more.
    """

    def __init__(self, total: int, *, shuffle: bool = True, seed: int = 0, pads: bool = True) -> None:
        self._total, self._shuffle, self._seed, self._pads = total, shuffle, seed, pads
        self.epoch = 0
        self.processed: set[int] = set()  # by any rank, as far as this one has been told
        self.indices: list[int] = []  # that this rank takes
        self._unreported: set[int] = set()

    def deal(self, rank: int, size: int) -> None:
        """Deal out what is left of this epoch."""
        numbers = list(range(self._total))
        if self._shuffle:
            random.Random(f"{self._seed} {self.epoch}").shuffle(numbers)
        left = [number for number in numbers if number not in self.processed]
        if self._pads and left:
            short = -len(left) % size
            left += (left * (short // len(left) + 1))[:short]
        self.indices = left[rank::size]

    def begin(self, epoch: int) -> None:
        """Begin an epoch. Nothing of it is done."""
        self.epoch, self.processed, self._unreported = epoch, set(), set()

    def record(self, indices: Iterable[int]) -> None:
        """Note that this rank has done these samples."""
        samples = set(indices)
        self.processed |= samples
        self._unreported |= samples

    def unreported(self) -> Array:
        """The samples that this rank has done and the others do not know of: bool (total,)."""
        mask = np.zeros(self._total, np.bool_)
        mask[list(self._unreported)] = True
        return mask

    def take_reported(self, samples: Array) -> None:
        """Take the samples that any rank has done, combined from the `unreported` of all: bool (total,)."""
        self.processed.update(np.flatnonzero(samples).tolist())
        self._unreported = set()

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and its samples that are done."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.epoch, self.processed, self._unreported = int(state["epoch"]), set(state["processed_indices"]), set()
