"""Classes of the user's own by name."""

from __future__ import annotations

import importlib
from typing import Any

from omnireduce.errors import UsageError, in_a_line


def class_named(name: str, *kinds: type) -> Any:
    """The class of this "module:Class", which derives from one of `kinds`. Raises UsageError."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UsageError(f"{name}: expected MODULE:CLASS, such as my_module:MyCompressor")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module is a user's own, and may raise anything
        raise UsageError(f"{name} cannot be loaded: {in_a_line(error)}") from error
    if not (isinstance(found, type) and issubclass(found, kinds)):
        names = " or ".join(f"{each.__module__}.{each.__qualname__}" for each in kinds)
        raise UsageError(f"{name} is a {found!r}; expected a class that derives from {names}")
    return found
