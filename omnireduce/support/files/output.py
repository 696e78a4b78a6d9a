"""Result files: they are written under another name and renamed when complete, so readers never see half a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.support.files.paths import user_path


def check_writable(path: str | Path) -> None:
    """Raise UsageError now if `path` could not be written later. Leaves the file as it is."""
    path = user_path(path)
    if path.is_dir():
        raise UsageError(f"{path}: is a directory, expected a file name")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    target = path if _is_special(path) else path.parent
    if not os.access(target, os.W_OK):
        raise UsageError(f"{path}: no permission to write to {target}")


def _is_special(path: Path) -> bool:
    """Whether the path exists and is neither a file nor a folder, but a device or a pipe, for example."""
    return path.exists() and not path.is_file() and not path.is_dir()


def make_folder(path: str | Path) -> Path:
    """Make the folder, and missing folders above it; raise UsageError if files cannot be written to it."""
    path = user_path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be made a folder: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"{path}: no permission to write to this folder")
    return path


def write_json(encoded: bytes, path: str | Path) -> None:
    """Write encoded JSON, indented, all or nothing. Raises UsageError if that is not possible."""
    write_file(msgspec.json.format(encoded, indent=2) + b"\n", path)


def write_file(content: bytes, path: str | Path) -> None:
    """Write a file, all or nothing. Raises UsageError if that is not possible."""
    with _replacing(path) as file:
        file.write(content)


def write_chunks(chunks: Iterable[bytes], path: str | Path) -> None:
    """Write a file that need not fit into memory, all or nothing. Raises UsageError if that is not possible."""
    with _replacing(path) as file:
        file.writelines(chunks)


def write_npy(array: Array, path: str | Path) -> None:
    """Write an .npy file, all or nothing. Raises UsageError if that is not possible."""
    with _replacing(path) as file:
        np.save(file, array, allow_pickle=False)


@contextmanager
def _replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A new file that becomes `path` when the block ends without an exception, and vanishes otherwise. A device or a
    pipe is written directly."""
    path = user_path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if _is_special(path):
            number = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails for a pipe without a reader
            os.set_blocking(number, True)
            with open(number, "wb") as file:
                yield file
            return
        try:
            with partial.open("wb") as file:
                yield file
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
