"""The cache folders of this user, for compiled kernels and for measurements of autotune."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from omnireduce.errors import UsageError
from omnireduce.support.files.paths import whole_path

CACHE_VARIABLE = "OMNIREDUCE_CACHE"


def cache_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The folders to search, in this order: that of `OMNIREDUCE_CACHE`, and this user's own, which is
    `$XDG_CACHE_HOME/omnireduce` or `~/.cache/omnireduce`. New files go to the first folder that is writable.

    A user without a home has no folder of its own. Root has none in the home of somebody else, as sudo may leave it:
    that user could not write to it later.
    """
    from_variable, cache_home = environ.get(CACHE_VARIABLE, ""), environ.get("XDG_CACHE_HOME", "")
    folders = list[Path]()
    if from_variable:
        with suppress(UsageError):  # a cache that cannot be used is none
            folders.append(whole_path(from_variable))
    if os.path.isabs(cache_home):
        return [*folders, Path(cache_home) / "omnireduce"]
    try:
        home = Path.home()
        is_own_home = os.geteuid() != 0 or home.stat().st_uid == 0
    except (RuntimeError, OSError):
        return folders
    return [*folders, home / ".cache" / "omnireduce"] if is_own_home else folders
