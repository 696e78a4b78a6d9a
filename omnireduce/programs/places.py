"""Where in a user's file something was written, for messages that point there."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from typing import NamedTuple

from omnireduce.errors import UsageError

HERE = str(Path(__file__).parent)


class Place(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    @property
    def text(self) -> str:
        """What stands there; empty where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


def place_of_user() -> Place:
    """The line outside of this package that is running now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


def names_of_user() -> dict[int, str]:
    """By the id of an object, the variable of the user's function that holds it now. Of several it is the first."""
    frame = sys._getframe(1)
    while (
        frame.f_back is not None
        and frame.f_code.co_filename.startswith(f"{HERE}/")
        and not _is_ready_made(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    found: dict[int, str] = {}
    for name, value in frame.f_locals.items():
        found.setdefault(id(value), name)
    return found


def _is_ready_made(file: str) -> bool:
    return file.startswith(f"{HERE}/ready/")


def wrong(place: Place, message: str) -> UsageError:
    """An error about what stands at `place`: the file and line, the message, and the line itself."""
    source = f"\n    {place.text}" if place.text else ""
    return UsageError(f"{place.file}:{place.line}: {message}{source}")
