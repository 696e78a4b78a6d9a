"""Classes and functions of users, loaded by name: MODULE:NAME."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from omnireduce.errors import UsageError, in_a_line
from omnireduce.support.files.paths import current_folder


def load_named(name: str, label: str, expected: str) -> Any:
    """Load `name`, MODULE:NAME.

    Messages call it `label`, and for another form they say what was `expected`. Raises UsageError for a name of another
    form, and for a name that cannot be loaded.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise UsageError(f"{label}: expected {expected}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module of the user may raise anything, even SystemExit
        raise UsageError(f"{label} cannot be loaded: {in_a_line(error)}") from error


def load_class(name: str, bases: Mapping[str, type]) -> Any:
    """Load a class that derives from one of `bases`; messages call them as the keys do. Raises UsageError for anything
    else, and for an abstract class."""
    loaded = load_named(name, name, "MODULE:CLASS, such as my_module:MyClass")
    if not (isinstance(loaded, type) and issubclass(loaded, tuple(bases.values()))):
        raise UsageError(f"{name} is {loaded!r}; expected a class that derives from {' or '.join(bases)}")
    if missing := ", ".join(sorted(getattr(loaded, "__abstractmethods__", ()))):
        raise UsageError(f"{name} is abstract; expected a class that has {missing}")
    return loaded


def add_current_folder_to_path() -> None:
    """Let modules of the current folder be found, as `python -m` does. An installed program does not by itself."""
    with suppress(UsageError):  # the folder is gone
        folder = str(current_folder())
        if folder not in sys.path:
            sys.path.insert(0, folder)


def search_path() -> list[str]:
    """The folders of modules of this process, for another process, as absolute paths. A folder that is gone is left
    out."""
    paths = []
    for path in sys.path:
        with suppress(UsageError):
            paths.append(path if os.path.isabs(path) else str(current_folder() / path))
    return paths
