"""Needle's tensors as NumPy arrays.

A tensor has its values in `realize_cached_data()`: a NumPy array if Needle computes with NumPy, otherwise an NDArray. A
compact NDArray on the processor is read and written at its address, `_handle.ptr()`, because `numpy()` would copy it.
Values on another device are copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.support.extras import need

TENSOR, NDARRAY, ARRAY = "Tensor", "NDArray", "array"
FLOAT32: np.dtype[Any] = np.dtype(np.float32)  # the only type of an NDArray


def library() -> Any:
    """The module `needle`. Raises ModuleNotFoundError, which says how to get it."""
    need(
        "needle",
        "omnireduce.needle",
        install_advice="put its folder `python` on PYTHONPATH; see docs/frameworks.md",
    )
    import needle

    return needle


class NeedleAdapter:
    """Access to the tensors of Needle, whose module is the one that the program imports."""

    gradient_kind = TENSOR

    def __init__(self) -> None:
        self._needle = library()

    def kind(self, x: Any) -> str:
        """The kind of `x`: a tensor, an NDArray or an array of NumPy; empty for anything else."""
        if isinstance(x, self._needle.Tensor):
            return TENSOR
        if isinstance(x, np.ndarray):
            return ARRAY
        return NDARRAY if hasattr(x, "_handle") and hasattr(x, "is_compact") else ""

    def memory(self, x: Any) -> Array | None:
        """Memory of the processor, if the values lie in it in one piece."""
        data = x.realize_cached_data() if isinstance(x, self._needle.Tensor) else x
        if not isinstance(data, np.ndarray):
            return _memory_of(data)
        return data if data.flags.c_contiguous and data.flags.writeable else None

    def read(self, x: Any) -> Array:
        """The values, as a copy if need be."""
        memory = self.memory(x)
        return np.asarray(x if isinstance(x, np.ndarray) else x.numpy()) if memory is None else memory

    def write(self, x: Any, values: Array) -> None:
        """Give the tensor new data. Other references to the old data keep that."""
        if isinstance(x, np.ndarray):
            x[...] = values
        else:
            x.data = self.make(TENSOR, values, x)

    def make(self, kind: str, values: Array, beside: Any) -> Any:
        """A new tensor, NDArray or array of this `kind`, on the device of the tensor `beside`."""
        if kind == ARRAY:
            return values
        tensor = self._needle.Tensor(values, device=beside.device, dtype=str(values.dtype), requires_grad=False)
        return tensor if kind == TENSOR else tensor.realize_cached_data()

    def buffers(self, model: Any) -> Iterable[tuple[str, Any]]:
        """All tensors among the attributes of the model and of its modules: Needle keeps no list of buffers."""
        return (
            []
            if self.kind(model) or isinstance(model, list | tuple | dict)
            else list(self._tensors_within(model, "", set()))
        )

    def _tensors_within(self, x: Any, path: str, seen: set[int]) -> Iterable[tuple[str, Any]]:
        if id(x) in seen:
            return
        seen.add(id(x))
        if isinstance(x, self._needle.Tensor):
            yield path.lstrip("."), x
        elif isinstance(x, dict):
            for key, child in x.items():
                yield from self._tensors_within(child, f"{path}[{key!r}]", seen)
        elif isinstance(x, list | tuple):
            for at, child in enumerate(x):
                yield from self._tensors_within(child, f"{path}[{at}]", seen)
        elif isinstance(x, self._needle.nn.Module):
            for name, child in vars(x).items():
                yield from self._tensors_within(child, f"{path}.{name}", seen)


def _memory_of(data: Any) -> Array | None:
    """An array over the memory of an NDArray: None on other devices, and where its values do not lie in one piece."""
    handle, device, shape = data._handle, data.device.name, data.shape
    strides, size, memory = _compact(shape)
    if data._strides != strides or handle.size != size or data._offset != 0:
        return None
    if device == "cpu_numpy":
        array: Array = handle.array.reshape(shape)
        return array
    if device != "cpu" or not hasattr(handle, "ptr"):
        return None
    return np.ndarray(shape, FLOAT32, memory.from_address(handle.ptr())) if size else np.empty(shape, FLOAT32)


@lru_cache(maxsize=4096)
def _compact(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, Any]:
    """The strides of an NDArray of this shape that lies in one piece, in elements, how many it has, and the type of its
    memory."""
    strides = [1]
    for dimension in reversed(shape):
        strides.append(strides[-1] * dimension)
    return tuple(reversed(strides[:-1])), strides[-1], ctypes.c_char * (strides[-1] * FLOAT32.itemsize)
