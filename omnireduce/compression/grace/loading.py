"""Classes of the user's own by name."""

from __future__ import annotations

from typing import Any

from omnireduce.compression.grace.base import class_text
from omnireduce.errors import UsageError
from omnireduce.loading import load_named


def class_named(name: str, *kinds: type) -> Any:
    """The class of this "module:Class", which derives from one of `kinds`. Raises UsageError."""
    loaded = load_named(name, name, "MODULE:CLASS, such as my_module:MyCompressor")
    if not (isinstance(loaded, type) and issubclass(loaded, kinds)):
        names = " or ".join(map(class_text, kinds))
        raise UsageError(f"{name} is {loaded!r}; expected a class that derives from {names}")
    missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
    if missing:
        raise UsageError(f"{name} is abstract; expected a class that has {missing}")
    return loaded
