"""Codecs of a user's own, as tests and their aggregators load them."""

from __future__ import annotations

import numpy as np

from omnireduce import Codec
from omnireduce.core.dtypes import Array


class Doubles(Codec):
    """Sends float16, and what it stands for is twice as much."""

    def block_bytes(self, block_size: int) -> int:
        return 2 * block_size

    def encode(self, values: Array, encoded: Array, keys: Array) -> None:
        encoded.view(np.float16)[:] = values / 2

    def add(self, encoded: Array, where: Array, totals: Array) -> None:
        totals[where] += 2 * encoded.view(np.float16).astype(np.float32)


class Unlucky(Doubles):
    """Fails on an aggregator, where there are two blocks to add, or more."""

    def add(self, encoded: Array, where: Array, totals: Array) -> None:
        if len(encoded) > 1:
            raise ArithmeticError("out of luck \udcff" + "x" * 200_000)


class Clumsy(Doubles):
    """Fails on the rank that has a 13."""

    def encode(self, values: Array, encoded: Array, keys: Array) -> None:
        if (values == 13).any():
            raise ArithmeticError("a 13")
        super().encode(values, encoded, keys)
