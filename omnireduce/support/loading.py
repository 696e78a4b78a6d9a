"""Classes and functions of the user's own, by name: MODULE:NAME."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from typing import Any

from omnireduce.errors import UsageError, in_a_line
from omnireduce.support.files.paths import current_folder


def load_named(name: str, said: str, expected: str) -> Any:
    """Load `name`, MODULE:NAME.

    Messages call it what is `said`, and say that they `expected` something where it has another form. Raises UsageError
    for that, and for what cannot be loaded.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise UsageError(f"{said}: expected {expected}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the module is a user's own, and may raise anything, even SystemExit
        raise UsageError(f"{said} cannot be loaded: {in_a_line(error)}") from error


def look_in_this_folder() -> None:
    """Let modules of the current folder be found, as `python -m` does: a program does not by itself."""
    with suppress(UsageError):  # it is gone
        here = str(current_folder())
        if here not in sys.path:
            sys.path.insert(0, here)


def search_path() -> list[str]:
    """Where this process finds modules, for another one: whole paths. In a folder that is gone nothing can be found."""
    paths = []
    for path in sys.path:
        with suppress(UsageError):
            paths.append(path if os.path.isabs(path) else str(current_folder() / path))
    return paths
