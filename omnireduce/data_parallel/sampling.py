"""Which samples of an epoch each rank takes, and which are done: also when ranks fail or come. Pure.

What a rank has done dies with it. So ranks tell each other at each commit what they have done since the last one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from omnireduce.dtypes import Array


class Sampling:
    """The numbers of `total` samples, dealt out to ranks. What was done is not dealt out again in the same epoch.

    `shuffle`: in another order each epoch, the same on all ranks, drawn from `seed`. `pads`: all ranks get as many, for
    which the last ones get some numbers a second time; else the first ranks may have one more.
    """

    def __init__(self, total: int, *, shuffle: bool = True, seed: int = 0, pads: bool = True) -> None:
        self._total, self._shuffle, self._seed, self._pads = total, shuffle, seed, pads
        self.epoch = 0
        self.processed: set[int] = set()  # by any rank, as far as this one has been told
        self.indices: list[int] = []  # that this rank takes
        self._untold: set[int] = set()

    def deal(self, rank: int, size: int) -> None:
        """Deal out what is left of this epoch."""
        numbers = list(range(self._total))
        if self._shuffle:
            random.Random(f"{self._seed} {self.epoch}").shuffle(numbers)
        left = [each for each in numbers if each not in self.processed]
        if self._pads and left:
            short = -len(left) % size
            left += (left * (short // len(left) + 1))[:short]
        self.indices = left[rank::size]

    def begin(self, epoch: int) -> None:
        """Nothing of this epoch is done."""
        self.epoch, self.processed, self._untold = epoch, set(), set()

    def record(self, indices: Iterable[int]) -> None:
        """This rank has done these."""
        done = set(indices)
        self.processed |= done
        self._untold |= done

    def untold(self) -> Array:
        """What this rank has done and the others do not know: bool (total,)."""
        found = np.zeros(self._total, np.bool_)
        found[list(self._untold)] = True
        return found

    def told(self, done: Array) -> None:
        """Take what any rank has done, made of the `untold` of all: bool (total,)."""
        self.processed.update(np.flatnonzero(done).tolist())
        self._untold = set()

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and what is done of it."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.epoch, self.processed, self._untold = int(state["epoch"]), set(state["processed_indices"]), set()
