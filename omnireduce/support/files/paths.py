"""Paths and text files of users. All parts of the program read them in the same way.

`~` is a home folder. A path that a file names is relative to the folder of that file, any other path to the current
folder. Text is UTF-8, with or without a byte order mark. Its lines may end as on Linux or as on Windows.
"""

from __future__ import annotations

import codecs
import os
import re
import select
import stat
from pathlib import Path

from omnireduce.errors import ConfigError, OmniReduceError, UsageError

MOST_BYTES = 1 << 20  # the largest text file
PIPE_S = 60.0  # the longest wait of a reader for a writer of a named pipe
BYTE_ORDER_MARK = codecs.BOM_UTF8
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def user_path(path: str | Path, beside: str | Path | None = None) -> Path:
    """The path that a user means. `~` and `~NAME` are home folders, and white space around a text does not count. A
    relative path is in the folder of the file `beside`, which names it, or stays as it is.

    Raises UsageError if the home folder is not known, and for a relative path if the current folder is gone.
    """
    path_as_given = Path(path.strip() if isinstance(path, str) else path)
    try:
        expanded = path_as_given.expanduser()
    except RuntimeError:
        raise UsageError(
            f"{one_line(path_as_given)}: no home folder {one_line(path_as_given.parts[0])} is known"
        ) from None
    if beside is not None and os.path.isfile(beside):  # the folder of a pipe, for example, would make no sense
        return Path(beside).parent / expanded
    if not expanded.is_absolute():
        current_folder()  # raises if it is gone
    return expanded


def whole_path(path: str | Path, beside: str | Path | None = None) -> Path:
    """The same as an absolute path, for later use, or for use in another process.

    Raises the errors of `user_path`.
    """
    expanded = user_path(path, beside)
    return expanded if expanded.is_absolute() else current_folder() / expanded


def current_folder() -> Path:
    """The current folder of this process. Raises UsageError if it is gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current folder is gone: change to another folder, or give absolute paths") from None


def read_text(
    path: str | Path,
    source: str = "",
    *,
    expected: str = "a text file",
    most_bytes: int = MOST_BYTES,
    error: type[OmniReduceError] = ConfigError,
) -> str:
    """The text of a user's file, with line feeds as the ends of lines. Messages call the file `source`, and say what
    was `expected`. Raises `error` for a file that cannot be read, is not UTF-8, or is longer than `most_bytes`."""
    source = source or one_line(path)
    try:
        with open(user_path(path), "rb", opener=without_waiting) as file:
            if _is_silent_pipe(file.fileno()):
                raise error(f"{source}: is a pipe to which nobody has written for {PIPE_S:g} s, expected {expected}")
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise error(f"{source}: no such file, expected {expected}") from None
    except IsADirectoryError:
        raise error(f"{source}: is a directory, expected {expected}") from None
    except (OSError, UsageError, ValueError) as cause:  # ValueError: a NUL in its name
        raise error(f"{source}: cannot be read: {getattr(cause, 'strerror', None) or cause}") from None
    if len(data) > most_bytes:
        raise error(f"{source}: got more than {most_bytes} bytes, expected {expected}")
    return decode_text(data, source, expected=expected, error=error)


def without_waiting(name: str, flags: int) -> int:
    """Open as `open` does, but do not wait for the writer of a pipe."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_silent_pipe(file: int) -> bool:
    """Wait for the writer of a pipe; return whether none has written."""
    os.set_blocking(file, True)
    if not stat.S_ISFIFO(os.fstat(file).st_mode):
        return False
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return not poll.poll(PIPE_S * 1e3)


def decode_text(
    data: bytes, source: str, *, expected: str = "a text file", error: type[OmniReduceError] = ConfigError
) -> str:
    """The text of bytes that have been read already: see `read_text`."""
    if data.startswith(_UTF_16):
        raise error(f"{source}: is UTF-16, expected {expected} in UTF-8")
    try:
        text = data.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as cause:
        raise error(f"{source}: not UTF-8 (at byte {cause.start}), expected {expected}") from None
    return re.sub("\r\n?", "\n", text)


def one_line(path: str | Path) -> str:
    """A path, or another text, for a message: unchanged, or escaped if it would not stay on one line."""
    text = str(path)
    return text if text and text.isprintable() else repr(text)
