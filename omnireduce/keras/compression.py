"""Gradients on their way in fewer bytes, in Horovod's words."""

from __future__ import annotations

from typing import Any

import numpy as np

from omnireduce.dtypes import Array


class NoneCompressor:
    """Sends arrays as they are."""

    @staticmethod
    def compress(array: Array) -> tuple[Array, Any]:
        """What is sent, and what `decompress` needs beside it."""
        return array, None

    @staticmethod
    def decompress(array: Array, context: Any) -> Array:
        """The result, from what came."""
        return array


class FP16Compressor(NoneCompressor):
    """Sends float32 and float64 as float16, in which they are combined. Everything else goes as it is.

    A sum beyond 65,504 is infinite then.
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
