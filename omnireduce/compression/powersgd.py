"""PowerSGD: a gradient that is a matrix travels as two thin factors.

    P = M Q        summed over all ranks, then made orthonormal
    Q = Mᵀ P       summed over all ranks
    P Qᵀ           all ranks take this for the sum of M

Q is kept for the next step, which goes on with its power iteration. A memory keeps the rest that the factors leave out.
After Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import numpy as np

from omnireduce.compression.gradient_checks import Sum, check_gradient, check_name, check_seed, name_for_all
from omnireduce.compression.memories import Memory, Residual
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.factors import orthonormalise, product
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.reported_errors import report_errors_to


def rank_for(shape: tuple[int, ...], max_rank: int) -> tuple[int, int, int]:
    """The rows and columns of a gradient of this shape, and the rank of its factors, at most `max_rank`; 0 if
    factors would not be smaller."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape) // max(1, rows)
    rank = min(max_rank, rows, columns)
    return rows, columns, rank if len(shape) > 1 and (rows + columns) * rank < rows * columns else 0


def first_factor(name: str, columns: int, rank: int, seed: int) -> Array:
    """The first Q of a gradient, float32 (columns, rank): all ranks draw the same."""
    rng = np.random.Generator(np.random.Philox([seed, zlib.crc32(name.encode())]))
    return rng.standard_normal((columns, rank), np.float32)


class PowerSgd:
    """Sums gradients by factors of rank `rank`. Gradients of one dimension, and small gradients, travel whole.

    `memory` keeps the rest that the factors leave out. `seed`: the seed of the first factors, the same on all ranks.
    """

    def __init__(self, rank: int = 1, memory: Memory | None = None, seed: int = 0) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise UsageError(f"rank {rank!r}: expected a whole number from 1 on")
        self.rank, self.memory, self.seed = rank, memory or Residual(), check_seed(seed)
        self._factors: dict[str, Array] = {}

    def allreduce(self, comm: Communicator, gradient: Array, *, name: str, op: Sum = "mean") -> Array:
        """Replace `gradient`, float32 (n, ...), by the product of the factors for the sum or mean of all ranks; return
        it.

        Other dimensions than the first count as one. `name` tells gradients apart, and is the same on all ranks. Raises
        the errors of `Communicator.allreduce`, and UsageError for another dtype.
        """
        with report_errors_to(comm):
            flat = check_gradient(gradient)
            rows, columns, rank = rank_for(gradient.shape, self.rank)
            check_name(name)
        if not rank:
            return comm.allreduce(gradient, op=op, name=name, codec="none")
        with report_errors_to(comm):
            matrix = self.memory.compensate(flat, name).reshape(rows, columns)
            left = matrix @ self._factor(name, columns, rank)
        collective_name = name_for_all(name, f"PowerSgd(seed={self.seed})")
        comm.allreduce(left, op="mean", name=collective_name, codec="none")
        orthonormalise(left)
        right = np.ascontiguousarray(matrix.T @ left)
        comm.allreduce(right, op="mean", name=collective_name, codec="none")
        self._factors[name] = right  # from here on nothing fails
        product(left, right, gradient.reshape(rows, columns))
        self.memory.keep_rest(name, flat)  # the mean of all ranks' rests is the error of the mean gradient
        if op == "sum":
            flat *= comm.size
        return gradient

    def _factor(self, name: str, columns: int, rank: int) -> Array:
        """The last Q of this gradient, or a first Q, which all ranks draw alike. Raises UsageError for another size."""
        factor = self._factors.get(name)
        if factor is None:
            return first_factor(name, columns, rank, self.seed)
        if factor.shape != (columns, rank):
            raise UsageError(f"gradient '{name}' has {columns} columns; it had {factor.shape[0]} before")
        return factor

    def forget(self, names: Iterable[str]) -> None:
        """Drop the rests and factors of these gradients."""
        name_list = list(names)
        self.memory.forget(name_list)
        for name in name_list:
            self._factors.pop(name, None)

    def state_dict(self) -> dict[str, dict[str, Array]]:
        """A copy of the memory's content, and of the factors."""
        return {**self.memory.state_dict(), "factors": {name: factor.copy() for name, factor in self._factors.items()}}

    def load_state_dict(self, saved: dict[str, dict[str, Array]]) -> None:
        """Go on with a copy from `state_dict`. Raises UsageError for anything else."""
        rest = dict(saved)
        if "factors" not in rest:
            raise UsageError(f"a state of {', '.join(sorted(saved)) or 'nothing'}; expected a state with factors")
        factors = rest.pop("factors")
        self.memory.load_state_dict(rest)
        self._factors = {name: np.array(factor, np.float32) for name, factor in factors.items()}
