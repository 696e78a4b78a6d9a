"""Gradients as they come, arrays of NumPy or tensors of torch, and the numbers that are compressed.

A tensor is known by its methods: this package does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.errors import UsageError, a_type

FLOATS = ("float16", "bfloat16", "float32", "float64")


def is_tensor(x: object) -> bool:
    """Whether `x` is a tensor of torch."""
    return hasattr(x, "detach") and hasattr(x, "new_empty")


class GradientTemplate:
    """What a gradient is beside its numbers, so that others can take its form.

    `values`: its numbers, float32 (elements,), which may be its own memory: not to be written. `shape`, `size`: its
    own. Raises UsageError for what is no array or dense tensor of floats.
    """

    def __init__(self, x: Any) -> None:
        if not (isinstance(x, np.ndarray | np.generic) or is_tensor(x)):  # a sum of no dimension is a scalar
            raise UsageError(f"a gradient is {a_type(x)}; expected a numpy.ndarray or a torch.Tensor")
        dtype = str(x.dtype).removeprefix("torch.")
        is_dense = str(getattr(x, "layout", "torch.strided")) == "torch.strided"
        if getattr(x, "is_meta", False):
            raise UsageError("a gradient is on the device meta, which has no numbers; expected one of another device")
        if dtype not in FLOATS or not is_dense:
            what = "sparse" if dtype in FLOATS else f"of {dtype}"
            raise UsageError(f"a gradient is {what}; expected a dense one of {', '.join(FLOATS)}")
        self.shape = tuple(x.shape)
        self._like: Any = x.detach().new_empty(0) if is_tensor(x) else np.empty(0, x.dtype)
        plain = x.detach().cpu().float().numpy() if is_tensor(x) else x
        self.values: Array = np.ascontiguousarray(plain, np.float32).reshape(-1)
        self.size = self.values.size

    def restore(self, values: Array) -> Any:
        """`values`, float32 (elements,), in this form. A float32 array shares their memory."""
        shaped = values.reshape(self.shape)
        if not is_tensor(self._like):
            with np.errstate(over="ignore"):  # infinity says it
                return shaped.astype(self._like.dtype, copy=False)
        room = self._like.cpu().float().new_empty(self.shape)
        room.numpy()[...] = shaped
        return room.to(self._like)

    def kind_of(self, arrays: Sequence[Array]) -> list[Any]:
        """`arrays` of any dtype as what the gradient is: arrays, or tensors on the processor with the same memory."""
        if not is_tensor(self._like):
            return list(arrays)
        return [sys.modules["torch"].from_numpy(array) for array in arrays]  # there is a tensor, so there is torch


def payload_of(x: Any) -> Any:
    """What travels of one compressed tensor: an array, or a plain number as it is. Raises UsageError for a tensor of a
    type that NumPy does not have."""
    if not is_tensor(x):
        return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x
    try:
        return np.ascontiguousarray(x.detach().cpu().numpy())
    except TypeError as error:
        raise UsageError(f"a compressed tensor of {x.dtype} cannot travel: {error}") from error


def payload_like(found: Any, own: Any) -> Any:
    """The reverse, for what a rank has received in the place of its `own`."""
    if not is_tensor(own):
        return found
    room = own.detach().cpu().new_empty(found.shape)
    room.numpy()[...] = found
    return room.to(own)
