"""The list of a message: which of its three forms takes the least room, and what indices each of them stands for."""

from __future__ import annotations

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.kernels.runs import expand_runs, list_runs
from omnireduce.kernels.steps import STEP_BYTES, expand_steps, list_steps
from omnireduce.layout import Stripes
from omnireduce.wire.blocks import INDEX_BYTES, NO_RUNS, NO_STEPS, RUN_BYTES, Header, message_list, message_steps

TINY_BYTES = 16  # blocks of up to so many are listed as steps, and results do not mark them: a mark costs more
MOST_OF_STEP = INDEX_BYTES // 2  # bytes of one, on average
Place = tuple[int, int]  # in a list: which run, or byte of steps, and behind it which index of the run, or of all
START: Place = (0, 0)


class Lister:
    """Lists up to `most` indices, in memory that stays."""

    def __init__(self, most: int) -> None:
        self._runs = np.empty((most // 2, 2), np.int64)
        self._steps = np.empty(MOST_OF_STEP * most + STEP_BYTES, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._runs.nbytes + self._steps.nbytes

    def shortest(self, indices: Array, shards: int, stripe_blocks: int, block_bytes: int) -> tuple[Array, Array]:
        """What to list in place of `indices`, int64, ascending, of one shard: runs, as `list_runs` writes them, or
        steps, as `list_steps` does, or none of both."""
        runs = self._runs[: list_runs(indices, shards, stripe_blocks, self._runs)]
        run_bytes, most = RUN_BYTES * len(runs), MOST_OF_STEP * indices.size
        if block_bytes > TINY_BYTES or 0 < run_bytes <= indices.size:  # a step takes a byte
            return runs, NO_STEPS
        steps = self._steps[: list_steps(indices, min(most, run_bytes - 1) if run_bytes else most, self._steps)]
        return (NO_RUNS, steps) if steps.size else (runs, NO_STEPS)


def expand(slot: Array, header: Header, place: Place, stripes: Stripes, own: Array) -> tuple[int, Place]:
    """Fill `own`, int64, with the next indices of a list of runs or steps, which the peer may be able to change.

    Returns how many it has filled in, fewer if the list does not say more, and the place behind them.
    """
    if header.steps:
        filled, *after = expand_steps(message_steps(slot, header), *place, own)
    else:
        listed = message_list(slot, header)
        filled, *after = expand_runs(
            listed, *place, shards=stripes.shards, stripe_blocks=stripes.stripe_blocks, own=own
        )  # fmt: skip
    return filled, (after[0], after[1])


def is_used_up(header: Header, place: Place) -> bool:
    """Whether nothing of a list of runs or steps is left behind `place`."""
    return place[0] == (header.steps or header.runs)
