"""Small matrices as factors of large ones. Each sum has one order, so that all ranks get the same bits whatever their
processors can do."""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import kernel


@kernel
def orthonormalise(columns: Array) -> None:
    """Make the columns of `columns`, float32 (rows, columns), orthogonal and of length 1, one after the other. One that
    follows from those before it becomes zeros."""
    for c in range(columns.shape[1]):
        before = 0.0
        for i in range(columns.shape[0]):
            before += np.float64(columns[i, c]) * columns[i, c]
        for other in range(c):
            along = 0.0
            for i in range(columns.shape[0]):
                along += np.float64(columns[i, c]) * columns[i, other]
            for i in range(columns.shape[0]):
                columns[i, c] -= np.float32(along * columns[i, other])
        square = 0.0
        for i in range(columns.shape[0]):
            square += np.float64(columns[i, c]) * columns[i, c]
        scale = 1 / np.sqrt(square) if square > before * 1e-12 else 0.0
        for i in range(columns.shape[0]):
            columns[i, c] = np.float32(columns[i, c] * scale)


@kernel
def product(left: Array, right: Array, out: Array) -> None:
    """`out` = `left` · `right`ᵀ. `left`: float32 (n, rank); `right`: float32 (m, rank); `out`: float32 (n, m)."""
    for i in range(left.shape[0]):
        for j in range(right.shape[0]):
            total = np.float32(0)
            for r in range(left.shape[1]):
                total += left[i, r] * right[j, r]
            out[i, j] = total
