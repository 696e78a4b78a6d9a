"""Compression of gradients for the exchange, with Horovod's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array


class NoneCompressor:
    """Sends arrays as they are."""

    @staticmethod
    def compress(array: Array) -> tuple[Array, Any]:
        """The array that is sent, and what `decompress` needs."""
        return array, None

    @staticmethod
    def decompress(array: Array, context: Any) -> Array:
        """The result, from the array that came."""
        return array


class FP16Compressor(NoneCompressor):
    """Sends float32 and float64 as float16, and combines them in it. Other arrays are sent as they are.

    A float16 sum beyond 65,504 is infinite.
    """

    @staticmethod
    def compress(array: Array) -> tuple[Array, Any]:
        if array.dtype not in (np.float32, np.float64):
            return array, None
        with np.errstate(over="ignore"):
            return array.astype(np.float16), array.dtype

    @staticmethod
    def decompress(array: Array, context: Any) -> Array:
        return array if context is None else array.astype(context)


class Compression:
    """How gradients are sent: `Compression.none` or `Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
