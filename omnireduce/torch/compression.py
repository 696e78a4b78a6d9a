"""Compression of gradients for the exchange, with Horovod's names. omnireduce.compression has more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NoneCompressor:
    """Tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor that is sent, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor again."""
        return tensor


class FP16Compressor:
    """Tensors of floats as float16: sums of more than 65,504 are infinite."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor that is sent, and what `decompress` needs."""
        return (tensor.half(), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """The tensor again, in its own type."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The choices for `compression`: `Compression.none` or `Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
