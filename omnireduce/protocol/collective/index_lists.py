"""Messages: how many blocks they take, and how their list of indices is written in the shortest of three forms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omnireduce.core.blocks_and_stripes import Stripes
from omnireduce.core.dtypes import Array
from omnireduce.core.wire.blocks import INDEX_BYTES, NO_RUNS, NO_STEPS, RUN_BYTES
from omnireduce.kernels.index_runs import expand_runs, list_runs
from omnireduce.kernels.index_steps import STEP_BYTES, expand_steps, list_steps

LONGER = 4  # the longest message is this many times as long as the shortest
SHARE = 64  # a message that is longer than the shortest has at most this part, 1/64, of the bytes for its shard


class MessageSizing(NamedTuple):
    """The blocks of a message take `shortest` to `longest` bytes together, or one block alone takes more.

    Messages of a small tensor are short, because results can come back only for blocks that have arrived. Messages of a
    large tensor are longer, because each message has a fixed cost on both sides.
    """

    shortest: int
    longest: int

    @classmethod
    def for_network(cls, longest: int) -> MessageSizing:
        """Sizing for a network."""
        return cls(longest // LONGER, longest)

    def message_bytes(self, nbytes: int) -> int:
        """The bytes of a message, if `nbytes` go to its shard in all."""
        return min(self.longest, max(self.shortest, nbytes // SHARE))

    def max_blocks(self, block_bytes: int) -> int:
        """The most blocks of any message."""
        return max(1, self.longest // block_bytes)

    def blocks(self, block_bytes: int, sent: int, at: int, end: int) -> int:
        """The most blocks of the next message. `sent` blocks have gone before it, from those below block `at` of `end`.
        The rest of the tensor is taken to be as dense."""
        if self.shortest == self.longest or at <= 0:
            return max(1, self.shortest // block_bytes)
        return max(1, self.message_bytes(sent * end // at * block_bytes) // block_bytes)


TINY_BYTES = 16  # blocks up to this size are listed as steps, and results do not mark them: a mark costs more
MAX_STEP_BYTES = INDEX_BYTES // 2  # the most bytes of one step, on average
# A place in a list. Of runs: the run that comes next, and how many of its indices were read. Of steps: the byte that
# comes next, and the index before it.
ListPosition = tuple[int, int]
START: ListPosition = (0, 0)


class Lister:
    """Lists up to `capacity` indices in memory that it keeps."""

    def __init__(self, capacity: int) -> None:
        self._runs = np.empty((capacity // 2, 2), np.int64)
        self._steps = np.empty(MAX_STEP_BYTES * capacity + STEP_BYTES, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._runs.nbytes + self._steps.nbytes

    def shortest(self, indices: Array, shards: int, stripe_blocks: int, block_bytes: int) -> tuple[Array, Array]:
        """The shortest list of the ascending `indices`, int64, of one shard: runs and steps, as `list_runs` and
        `list_steps` write them, at most one of the two not empty. If both are empty, a plain list is shorter."""
        runs = self._runs[: list_runs(indices, shards, stripe_blocks, self._runs)]
        if block_bytes > TINY_BYTES:
            return runs, NO_STEPS
        run_bytes, max_step_bytes = RUN_BYTES * len(runs), MAX_STEP_BYTES * indices.size
        if 0 < run_bytes <= indices.size:  # a step takes a byte
            return runs, NO_STEPS
        steps = self._steps[
            : list_steps(indices, min(max_step_bytes, run_bytes - 1) if run_bytes else max_step_bytes, self._steps)
        ]
        return (NO_RUNS, steps) if steps.size else (runs, NO_STEPS)


def expand(listed: Array, position: ListPosition, stripes: Stripes, indices: Array) -> tuple[int, ListPosition]:
    """Fill `indices`, int64, with the next indices of a list: of runs, int64, or of steps, uint8, as they lie in a
    message.

    Returns how many indices it has filled in, and the place behind them. It fills in fewer than fit if the list ends or
    is invalid. A list is used up when the place is behind its last run, or its last byte.
    """
    if listed.itemsize == 1:
        filled, *next_position = expand_steps(listed, *position, indices)
    else:
        filled, *next_position = expand_runs(
            listed, *position, shards=stripes.shards, stripe_blocks=stripes.stripe_blocks, indices=indices
        )  # fmt: skip
    return filled, (next_position[0], next_position[1])
