"""State of an optimizer, which is what its attributes hold, as plain data and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omnireduce.core.dtypes import ELEMENT_TYPES, Array
from omnireduce.data_parallel.adapters import ARRAY, Adapter
from omnireduce.errors import UsageError, a_type

NUMBERS = "biufc"  # kinds of NumPy arrays that travel, beside the types of ml_dtypes that can be summed
PLAIN = bool, int, float, str, bytes, type(None)


class _NoStateError(Exception):
    """Something that is no state of an optimizer."""


class OptimizerState:
    """State of an optimizer, which trains these `parameters`. The root calls `describe`. The others call `expect` with
    that description, and `restore` with the values of the arrays. `arrays`: those of the state on the root, and as many
    like them on the others.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Any], adapter: Adapter) -> None:
        if not hasattr(optimizer, "__dict__"):
            raise UsageError(f"optimizer is {a_type(optimizer)}: expected an object that keeps its state")
        self._optimizer, self._parameters, self._adapter = optimizer, parameters, adapter
        self._indices = {id(parameter): at for at, parameter in enumerate(parameters)}
        self._descriptions: dict[str, Any] = {}
        self.arrays: list[Array] = []

    def describe(self) -> dict[str, Any]:
        """The state as plain data, with a description of each array in its place."""
        for name, value in vars(self._optimizer).items():
            before = len(self.arrays)
            try:
                self._descriptions[name] = self._describe(value)
            except _NoStateError:
                del self.arrays[before:]
        return self._descriptions

    def _describe(self, x: Any) -> Any:
        if id(x) in self._indices:  # the attribute has the parameters themselves
            raise _NoStateError
        if isinstance(x, np.ndarray | np.generic) and not _has_numbers(x):
            raise _NoStateError
        if isinstance(x, np.generic):
            return {"plain": x}
        kind = self._adapter.kind(x) or (ARRAY if isinstance(x, np.ndarray) else "")
        if kind:
            values = x if isinstance(x, np.ndarray) else self._adapter.read(x)
            self.arrays.append(values)
            return {"kind": kind, "dtype": str(values.dtype), "shape": list(values.shape)}
        if type(x) in PLAIN:
            return {"plain": x}
        if isinstance(x, dict):
            return {"pairs": [[self._key(key), self._describe(value)] for key, value in x.items()]}
        if type(x) in (list, tuple):
            return {"list": [self._describe(value) for value in x], "is_tuple": isinstance(x, tuple)}
        raise _NoStateError

    def _key(self, key: Any) -> Any:
        """A key of a dict: often it is a parameter, or the id of one."""
        if id(key) in self._indices:
            return {"parameter": self._indices[id(key)]}
        if isinstance(key, int) and key in self._indices:
            return {"id": self._indices[key]}
        if not _is_plain(key):
            raise _NoStateError
        return {"plain": key}

    def expect(self, descriptions: dict[str, Any]) -> None:
        """Take the root's description."""
        self._descriptions = descriptions
        for description in descriptions.values():
            self._expect(description)

    def _expect(self, description: Any) -> None:
        if "kind" in description:
            self.arrays.append(np.empty(description["shape"], description["dtype"]))
        for nested in (*description.get("list", ()), *(value for _, value in description.get("pairs", ()))):
            self._expect(nested)

    def restore(self, values: Sequence[Array]) -> None:
        """Give the optimizer the state that was described, with these values of its arrays."""
        arrays = iter(values)
        for name, description in self._descriptions.items():
            old, new = getattr(self._optimizer, name, None), self._rebuild(description, arrays)
            if isinstance(old, dict) and isinstance(new, dict):  # others may refer to it
                old.clear()
                old.update(new)
            elif isinstance(old, list) and isinstance(new, list):
                old[:] = new
            else:
                setattr(self._optimizer, name, new)

    def _rebuild(self, description: Any, arrays: Any) -> Any:
        if "parameter" in description:
            return self._parameters[description["parameter"]]
        if "id" in description:
            return id(self._parameters[description["id"]])
        if "kind" in description:
            return self._adapter.make(description["kind"], next(arrays), self._parameters[0])
        if "plain" in description:
            return description["plain"]
        if "pairs" in description:
            return {self._rebuild(key, arrays): self._rebuild(value, arrays) for key, value in description["pairs"]}
        values = [self._rebuild(value, arrays) for value in description["list"]]
        return tuple(values) if description["is_tuple"] else values


def _has_numbers(x: Any) -> bool:
    return x.dtype.kind in NUMBERS or x.dtype.name in ELEMENT_TYPES


def _is_plain(key: Any) -> bool:
    return all(map(_is_plain, key)) if type(key) is tuple else type(key) in PLAIN
