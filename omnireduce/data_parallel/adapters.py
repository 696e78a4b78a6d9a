"""Adapters, which read and write a framework's tensors as NumPy arrays: all that data parallelism knows of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError, a_type

ARRAY, OBJECT = "array", "object"


class Adapter(Protocol):
    """Access to the tensors of a framework. `gradient_kind`: the kind of a gradient that this rank has not made itself.

    A kind is the name of a class of tensors. It means the same on all ranks.
    """

    gradient_kind: str

    def kind(self, x: Any) -> str:
        """The kind of this tensor; empty if it is none."""

    def memory(self, x: Any) -> Array | None:
        """An array over the memory of the tensor, C-contiguous and writable; None if there can be none."""

    def read(self, x: Any) -> Array:
        """The values of the tensor, which are not written to."""

    def write(self, x: Any, values: Array) -> None:
        """Set the tensor to these values, of its shape and dtype. The array belongs to the caller."""

    def make(self, kind: str, values: Array, beside: Any) -> Any:
        """A new tensor of this kind, on the device of the tensor `beside`. It owns the array `values`."""

    def buffers(self, model: Any) -> Iterable[tuple[str, Any]]:
        """Names and tensors of the model that are no parameters, such as running means."""


class ArrayAdapter:
    """The adapter of NumPy arrays, and of objects whose `data` is an array and whose `grad` is an array or None."""

    gradient_kind = ARRAY

    def kind(self, x: Any) -> str:
        """An array or a number of NumPy, or an object that has an array."""
        if isinstance(x, np.ndarray | np.generic):
            return ARRAY
        return OBJECT if isinstance(getattr(x, "data", None), np.ndarray) else ""

    def memory(self, x: Any) -> Array | None:
        """The array itself; None for one that is not contiguous or is read-only."""
        if isinstance(x, np.generic):
            return None
        array = self.read(x)
        return array if array.flags.c_contiguous and array.flags.writeable else None

    def read(self, x: Any) -> Array:
        """The array itself."""
        return np.asarray(x if isinstance(x, np.ndarray | np.generic) else x.data)

    def write(self, x: Any, values: Array) -> None:
        """In place. Raises UsageError for an array that is read-only."""
        target = self.read(x)
        if isinstance(x, np.generic) or not target.flags.writeable:
            raise UsageError(f"an array {target.dtype}{list(target.shape)} is read-only: expected parameters to write")
        target[...] = values

    def make(self, kind: str, values: Array, beside: Any) -> Any:
        """The array itself. Raises UsageError for an object: nobody knows how to make one."""
        if kind != ARRAY:
            raise UsageError("an optimizer's state has objects with arrays: expected arrays, or an adapter of your own")
        return values

    def buffers(self, model: Any) -> Iterable[tuple[str, Any]]:
        """The result of the model's `buffers()`, if it has that method. Its other arrays may be anything."""
        buffers = getattr(model, "buffers", None)
        return [(f"buffers()[{at}]", buffer) for at, buffer in enumerate(buffers())] if callable(buffers) else []


def named_tensors(x: Any, adapter: Adapter, path: str = "") -> list[tuple[str, Any]]:
    """Names and tensors of an array, of a list, tuple or dict of arrays, or of an object with `parameters()`. The order
    is the same on all ranks, and each tensor comes once."""
    named: dict[int, tuple[str, Any]] = {}
    for name, tensor in _walk(x, adapter, path):
        named.setdefault(id(tensor), (name, tensor))
    return list(named.values())


def _walk(x: Any, adapter: Adapter, path: str) -> Iterable[tuple[str, Any]]:
    if adapter.kind(x):
        yield path or "parameter", x
    elif isinstance(x, dict):
        for key, nested in x.items():
            yield from _walk(nested, adapter, f"{path}[{key!r}]")
    elif isinstance(x, list | tuple):
        for at, nested in enumerate(x):
            yield from _walk(nested, adapter, f"{path}[{at}]")
    elif callable(getattr(x, "parameters", None)):
        yield from _walk(list(x.parameters()), adapter, f"{path}parameters()")
    elif x is not None:
        raise UsageError(
            f"{path or 'the model'} is {a_type(x)}: expected arrays, lists, tuples or dicts of them, or an "
            "object with parameters()"
        )
