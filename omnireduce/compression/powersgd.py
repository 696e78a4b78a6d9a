"""PowerSGD: a gradient that is a matrix travels as two thin factors.

    P = M Q        summed over all ranks, then made orthonormal
    Q = Mᵀ P       summed over all ranks
    P Qᵀ           is what all ranks take for the sum of M

Q is kept for the next step, so that each step goes on with the power iteration of the last one. What the factors leave
out, a memory keeps. After Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import numpy as np

from omnireduce.compression.memories import Memory, Residual
from omnireduce.compression.sums import Sum, check_gradient, check_name, check_seed, name_for_all
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.factors import orthonormalise, product
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.refusals import told_to_others


def rank_for(shape: tuple[int, ...], most: int) -> tuple[int, int, int]:
    """How many rows and columns a gradient of this shape has, and the rank of its factors, `most` at most; 0 where
    they would not be smaller."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape) // max(1, rows)
    rank = min(most, rows, columns)
    return rows, columns, rank if len(shape) > 1 and (rows + columns) * rank < rows * columns else 0


def first_factor(name: str, columns: int, rank: int, seed: int) -> Array:
    """The first Q of a gradient, float32 (columns, rank): all ranks draw the same."""
    rng = np.random.Generator(np.random.Philox([seed, zlib.crc32(name.encode())]))
    return rng.standard_normal((columns, rank), np.float32)


class PowerSgd:
    """Sums gradients by factors of rank `rank`. Those of one dimension, and small ones, travel as they are.

    `memory` keeps what the factors leave out. `seed`: of the first factors, the same on all ranks.
    """

    def __init__(self, rank: int = 1, memory: Memory | None = None, seed: int = 0) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise UsageError(f"rank {rank!r}: expected a whole number from 1 on")
        self.rank, self.memory, self.seed = rank, memory or Residual(), check_seed(seed)
        self._factors: dict[str, Array] = {}

    def allreduce(self, comm: Communicator, gradient: Array, *, name: str, op: Sum = "mean") -> Array:
        """Replace `gradient`, float32 (n, ...), by what the factors make of the sum or mean of all ranks; return it.

        Other dimensions than the first count as one. `name` tells gradients apart, and is the same on all ranks. Raises
        what `Communicator.allreduce` raises, and UsageError for another dtype.
        """
        with told_to_others(comm):
            flat = check_gradient(gradient)
            rows, columns, rank = rank_for(gradient.shape, self.rank)
            check_name(name)
        if not rank:
            return comm.allreduce(gradient, op=op, name=name, codec="none")
        with told_to_others(comm):
            matrix = self.memory.compensate(flat, name).reshape(rows, columns)
            left = matrix @ self._factor(name, columns, rank)
        sent_as = name_for_all(name, f"PowerSgd(seed={self.seed})")
        comm.allreduce(left, op="mean", name=sent_as, codec="none")
        orthonormalise(left)
        right = np.ascontiguousarray(matrix.T @ left)
        comm.allreduce(right, op="mean", name=sent_as, codec="none")
        self._factors[name] = right  # from here on nothing fails
        product(left, right, gradient.reshape(rows, columns))
        self.memory.keep_rest(name, flat)  # the ranks' rests add up to what the mean of all lacks
        if op == "sum":
            flat *= comm.size
        return gradient

    def _factor(self, name: str, columns: int, rank: int) -> Array:
        """The last Q of this gradient, or one that all ranks draw alike. Raises UsageError for another size."""
        known = self._factors.get(name)
        if known is None:
            return first_factor(name, columns, rank, self.seed)
        if known.shape != (columns, rank):
            raise UsageError(f"gradient '{name}' has {columns} columns; it had {known.shape[0]} before")
        return known

    def forget(self, names: Iterable[str]) -> None:
        """Keep nothing of these gradients any more, neither a rest nor factors."""
        gone = list(names)
        self.memory.forget(gone)
        for name in gone:
            self._factors.pop(name, None)

    def state_dict(self) -> dict[str, dict[str, Array]]:
        """A copy of all that is kept: that of the memory, and the factors."""
        return {**self.memory.state_dict(), "factors": {name: factor.copy() for name, factor in self._factors.items()}}

    def load_state_dict(self, saved: dict[str, dict[str, Array]]) -> None:
        """Go on with what `state_dict` gave. Raises UsageError for that of something else."""
        rest = dict(saved)
        if "factors" not in rest:
            raise UsageError(f"a state of {', '.join(sorted(saved)) or 'nothing'}; expected one with factors")
        factors = rest.pop("factors")
        self.memory.load_state_dict(rest)
        self._factors = {name: np.array(factor, np.float32) for name, factor in factors.items()}
