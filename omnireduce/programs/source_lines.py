"""Lines of a user's file where something was written, for messages that point there."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from typing import NamedTuple

from omnireduce.errors import UsageError

PACKAGE = f"{Path(__file__).parent}{os.sep}"
LIBRARY = f"{PACKAGE}library{os.sep}"  # in programs of the library, too, variables name the stages


class SourceLine(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    @property
    def text(self) -> str:
        """The text of the line; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


def user_line() -> SourceLine:
    """The line outside of this package that is running now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)


def names_of_user() -> dict[int, str]:
    """The variables of the function that makes a program now: their names, by the id of the object that they hold. If
    several variables hold one object, the first counts."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    names: dict[int, str] = {}
    for name, value in frame.f_locals.items():
        names.setdefault(id(value), name)
    return names


def _is_machinery(file: str) -> bool:
    return file.startswith(PACKAGE) and not file.startswith(LIBRARY)


def error_at(source_line: SourceLine, message: str) -> UsageError:
    """An error about the code at `source_line`: the file and line, the message, and the text of the line."""
    source = f"\n    {source_line.text}" if source_line.text else ""
    return UsageError(f"{source_line.file}:{source_line.line}: {message}{source}")
