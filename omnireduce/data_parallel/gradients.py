"""Gradients as arrays that can be exchanged, and the trees of lists, tuples and dicts in which programs have them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from omnireduce.data_parallel.adapters import Adapter
from omnireduce.dtypes import Array
from omnireduce.errors import UsageError, a_type
from omnireduce.rounding import scaled
from omnireduce.runtime.rank.arguments import two_that_share


class Part(NamedTuple):
    """What the gradient of a parameter is, without its numbers."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def exchangeable(
    tensors: Sequence[Any], names: Sequence[str], parts: Sequence[Part], adapter: Adapter
) -> tuple[list[Array | None], set[int]]:
    """The gradients as arrays of these dtypes and shapes that may be overwritten, and the places of those that are
    copies. Raises UsageError for what is no gradient of its parameter."""
    arrays: list[Array | None] = []
    copied: set[int] = set()
    for at, (tensor, (dtype, shape)) in enumerate(zip(tensors, parts, strict=True)):
        if tensor is None:
            arrays.append(None)
            continue
        if not adapter.kind(tensor):
            raise UsageError(f"the gradient of '{names[at]}' is {a_type(tensor)}: expected a tensor or None")
        values = adapter.memory(tensor)
        if values is None or values.dtype != dtype:
            values = np.array(adapter.read(tensor), dtype, order="C")
            copied.add(at)
        if values.shape != shape:
            raise UsageError(f"the gradient of '{names[at]}' is {list(values.shape)}: expected {list(shape)}")
        arrays.append(values)
    return arrays, copied


def scale(arrays: list[Array | None], factor: float, copied: set[int]) -> None:
    """Multiply the gradients by this factor, where they lie. Two that share memory are separated first, and the places
    of copies added to those that are `copied`."""
    there = [(at, array) for at, array in enumerate(arrays) if array is not None]
    while pair := two_that_share([array for _, array in there]):
        at, shared = there[pair[1]]
        arrays[at] = own = shared.copy()
        there[pair[1]] = at, own
        copied.add(at)
    for _, array in there:
        scaled(array, factor, array)


def leaves(gradients: Any, parameters: Any, adapter: Adapter, path: str = "") -> Iterator[Any]:
    """The gradients in the order of the parameters, whose lists, tuples and dicts they are in. None is missing, as is a
    key that is not there. Raises UsageError for another structure."""
    where = f"gradients{path}"
    if adapter.kind(parameters):
        yield gradients
    elif isinstance(parameters, dict):
        own = {} if gradients is None else gradients
        if not isinstance(own, dict) or not own.keys() <= parameters.keys():
            raise UsageError(f"{where} is {_shown(gradients)}: expected a dict with the keys {list(parameters)}")
        for key, part in parameters.items():
            yield from leaves(own.get(key), part, adapter, f"{path}[{key!r}]")
    else:
        parts = list(parameters) if isinstance(parameters, list | tuple) else list(parameters.parameters())
        own = [None] * len(parts) if gradients is None else gradients
        if not isinstance(own, list | tuple) or len(own) != len(parts):
            raise UsageError(f"{where} is {_shown(gradients)}: expected a list of {len(parts)}, as the parameters are")
        for at, (mine, part) in enumerate(zip(own, parts, strict=True)):
            yield from leaves(mine, part, adapter, f"{path}[{at}]")


def rebuilt(found: Iterator[Any], parameters: Any, adapter: Adapter) -> Any:
    """These gradients in the structure of the parameters: the reverse of `leaves`."""
    if adapter.kind(parameters):
        return next(found)
    if isinstance(parameters, dict):
        return {key: rebuilt(found, part, adapter) for key, part in parameters.items()}
    if isinstance(parameters, tuple):
        parts = [rebuilt(found, part, adapter) for part in parameters]
        return type(parameters)(*parts) if hasattr(parameters, "_fields") else tuple(parts)
    own = parameters if isinstance(parameters, list) else parameters.parameters()
    return [rebuilt(found, part, adapter) for part in own]


def _shown(x: Any) -> str:
    if isinstance(x, dict):
        return f"a dict with the keys {list(x)}"
    return f"{a_type(x)} of {len(x)}" if isinstance(x, list | tuple) else a_type(x)
