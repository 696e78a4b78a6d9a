"""Adasum: a sum that keeps only one of two gradients that point the same way, and both where they do not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnireduce.dtypes import Array


def adasum(gradients: Sequence[Array]) -> Array:
    """Combine a power of two of arrays of one shape and float type, neighbours first, then pairs of neighbours.

    Two are combined as a(1 - a·b / 2|a|²) + b(1 - a·b / 2|b|²), where an array of zeros adds nothing; in float64, and
    rounded once in the end. After Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
    """
    combined = [gradient.astype(np.float64) for gradient in gradients]
    while len(combined) > 1:
        combined = [_pair(a, b) for a, b in zip(combined[::2], combined[1::2], strict=True)]
    return combined[0].astype(gradients[0].dtype)


def _pair(a: Array, b: Array) -> Array:
    product, own, other = (float(np.vdot(x, y)) for x, y in ((a, b), (a, a), (b, b)))
    of_a = 1 - product / (2 * own) if own else 1.0
    of_b = 1 - product / (2 * other) if other else 1.0
    combined: Array = of_a * a + of_b * b
    return combined
