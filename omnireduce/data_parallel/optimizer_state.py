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
    """State of an optimizer, which trains these `parameters`. The root calls `described`. The others call `expect` with
    that description, and `restore` with the values of the arrays. `arrays`: those of the state on the root, and as many
    like them on the others.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Any], adapter: Adapter) -> None:
        if not hasattr(optimizer, "__dict__"):
            raise UsageError(f"optimizer is {a_type(optimizer)}: expected an object that keeps its state")
        self._optimizer, self._parameters, self._adapter = optimizer, parameters, adapter
        self._places = {id(parameter): at for at, parameter in enumerate(parameters)}
        self._told: dict[str, Any] = {}
        self.arrays: list[Array] = []

    def described(self) -> dict[str, Any]:
        """The state as plain data, with a description of each array in its place."""
        for name, value in vars(self._optimizer).items():
            before = len(self.arrays)
            try:
                self._told[name] = self._said(value)
            except _NoStateError:
                del self.arrays[before:]
        return self._told

    def _said(self, x: Any) -> Any:
        if id(x) in self._places:  # the attribute has the parameters themselves
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
            return {"pairs": [[self._key(key), self._said(value)] for key, value in x.items()]}
        if type(x) in (list, tuple):
            return {"list": [self._said(value) for value in x], "is_tuple": isinstance(x, tuple)}
        raise _NoStateError

    def _key(self, key: Any) -> Any:
        """A key of a dict: often it is a parameter, or the id of one."""
        if id(key) in self._places:
            return {"parameter": self._places[id(key)]}
        if isinstance(key, int) and key in self._places:
            return {"id": self._places[key]}
        if not _is_plain(key):
            raise _NoStateError
        return {"plain": key}

    def expect(self, told: dict[str, Any]) -> None:
        """Take the root's description."""
        self._told = told
        for description in told.values():
            self._expect(description)

    def _expect(self, said: Any) -> None:
        if "kind" in said:
            self.arrays.append(np.empty(said["shape"], said["dtype"]))
        for nested in (*said.get("list", ()), *(value for _, value in said.get("pairs", ()))):
            self._expect(nested)

    def restore(self, values: Sequence[Array]) -> None:
        """Give the optimizer the state that was described, with these values of its arrays."""
        rest = iter(values)
        for name, said in self._told.items():
            old, new = getattr(self._optimizer, name, None), self._made(said, rest)
            if isinstance(old, dict) and isinstance(new, dict):  # others may refer to it
                old.clear()
                old.update(new)
            elif isinstance(old, list) and isinstance(new, list):
                old[:] = new
            else:
                setattr(self._optimizer, name, new)

    def _made(self, said: Any, rest: Any) -> Any:
        if "parameter" in said:
            return self._parameters[said["parameter"]]
        if "id" in said:
            return id(self._parameters[said["id"]])
        if "kind" in said:
            return self._adapter.make(said["kind"], next(rest), self._parameters[0])
        if "plain" in said:
            return said["plain"]
        if "pairs" in said:
            return {self._made(key, rest): self._made(value, rest) for key, value in said["pairs"]}
        values = [self._made(value, rest) for value in said["list"]]
        return tuple(values) if said["is_tuple"] else values


def _has_numbers(x: Any) -> bool:
    return x.dtype.kind in NUMBERS or x.dtype.name in ELEMENT_TYPES


def _is_plain(key: Any) -> bool:
    return all(map(_is_plain, key)) if type(key) is tuple else type(key) in PLAIN
