"""Devices, and arrays that lie on them."""

from __future__ import annotations

import ctypes
import math

import numpy as np


class Device:
    def __init__(self, name: str, is_there: bool) -> None:
        self.name, self._is_there = name, is_there

    def enabled(self) -> bool:
        return self._is_there

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def cpu() -> Device:
    return Device("cpu", True)


def cuda() -> Device:
    return Device("cuda", False)


class Handle:
    """Memory of a device."""

    def __init__(self, size: int) -> None:
        self.size, self._memory = size, np.empty(size, np.float32)

    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


class NDArray:
    """float32 in some order, in memory that others may share."""

    def __init__(self, values: np.ndarray, device: Device | None = None) -> None:
        self.shape, self.device, self._offset, self._is_permuted = values.shape, device or cpu(), 0, False
        self._handle = Handle(math.prod(values.shape))
        self._strides = self._compact_strides()
        self.array()[...] = values

    def _compact_strides(self) -> tuple[int, ...]:
        results = [1]
        for each in reversed(self.shape[1:]):
            results.append(results[-1] * each)
        return tuple(reversed(results[: len(self.shape)]))

    @property
    def dtype(self) -> str:
        return "float32"

    def array(self) -> np.ndarray:
        """Over its memory. Tensors are made as fast as with the backend in C++, or faster: a benchmark times them."""
        if not self._is_permuted:
            return self._handle._memory.reshape(self.shape)
        strides = tuple(4 * stride for stride in self._strides)
        return np.lib.stride_tricks.as_strided(self._handle._memory[self._offset :], self.shape, strides)

    def is_compact(self) -> bool:
        return self._strides == self._compact_strides() and math.prod(self.shape) == self._handle.size

    def permute(self) -> NDArray:
        """Its transpose, in the same memory."""
        result = NDArray.__new__(NDArray)
        result.__dict__.update(self.__dict__)
        result.shape, result._strides, result._is_permuted = self.shape[::-1], self._strides[::-1], True
        return result

    def numpy(self) -> np.ndarray:
        return self.array().copy()
