"""Classes and functions of the user's own, by name: MODULE:NAME."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from omnireduce.errors import UsageError, in_a_line


def load_named(name: str, said: str, expected: str) -> Any:
    """What `name`, MODULE:NAME, is.

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
    except BaseException as error:  # the module is a user's own, and may raise anything, also SystemExit
        raise UsageError(f"{said} cannot be loaded: {in_a_line(error)}") from error


def look_in_this_folder() -> None:
    """Let modules of the current folder be found, as `python -m` does: a program does not by itself."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
