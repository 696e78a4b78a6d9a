"""PowerSGD, with GRACE's name. Its factors are summed while they are made, so the communicators call `PowerSgd`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnireduce.compression.grace.built_in_base import BuiltInCompressor, Context
from omnireduce.compression.powersgd import PowerSgd, first_factor, rank_for
from omnireduce.core.dtypes import Array
from omnireduce.kernels.factors import orthonormalise, product


class PowerSGDCompressor(BuiltInCompressor):
    """Matrices as two factors of rank `compress_rank`. A gradient that factors would not make smaller is sent whole.

    `compress` alone makes one step from the first factor, without the factors of other ranks.
    """

    communicators = ("allreduce", "aggregator")

    def __init__(self, compress_rank: int = 1, seed: int = 0) -> None:
        super().__init__()
        PowerSgd(compress_rank, seed=seed)  # raises for invalid arguments
        self.compress_rank, self.seed = compress_rank, seed

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        rows, columns, rank = rank_for(ctx.template.shape, self.compress_rank)
        if not rank:
            return [x.copy()]
        matrix = x.reshape(rows, columns)
        left = matrix @ first_factor(ctx.name, columns, rank, self.seed)
        orthonormalise(left)
        return [left, np.ascontiguousarray(matrix.T @ left)]

    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        if len(arrays) == 1:
            return arrays[0]
        left, right = arrays
        matrix = np.empty((len(left), len(right)), np.float32)
        product(left, right, matrix)
        return matrix.reshape(-1)
