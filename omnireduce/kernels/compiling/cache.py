"""Compiled kernels on disk: where the files are, whose files are believed, how they are read and written.

    FOLDER/kernels/VERSION-DIGEST/NAME-DIGEST.kernel

A file is one kernel for one combination of types. Its name follows from all that its code depends on: the source of the
kernels, the versions of Python and of the compiler, the processor, the types. So a file never changes. A process writes
it under another name and renames it. Nothing is locked, and several processes, users and hosts may share a folder.

Machine code is run. So a file counts only if nobody could have written it but this user or root: both it and its folder
belong to one of them, and others may not write to it. The digest of the contents stands in the file: what a full disk
has cut short does not count.

Whatever is wrong here costs time, and nothing else: a kernel that cannot be read is compiled, and one that cannot be
kept is used. `trouble` says what was wrong.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from omnireduce.support.files.cache import CACHE_VARIABLE

UNFINISHED = ".unfinished"
OURS = re.compile(r"-[0-9a-f]{16}\Z")  # the end of a folder's name
FILES = re.compile(rf".*\.kernel|(all|ready)-[0-9a-f]{{8}}|.*{re.escape(UNFINISHED)}")  # (all|ready): see claims.py
KEPT = 8  # folders of other versions and processors: each takes some 20 MB
UNFINISHED_S = 3600.0  # after that nobody writes it any more
DIGEST_BYTES = hashlib.sha256().digest_size
ROOT = 0
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class KernelFiles:
    """The kernels of one source, compiler and processor, which `tag` stands for, in the first of `folders` that has
    them."""

    def __init__(self, tag: str, folders: Sequence[Path]) -> None:
        self.tag = tag
        self._folders = [folder / "kernels" / tag for folder in folders]
        self._used, self._swept = False, False
        self.trouble = ""  # the first one; empty: there was none
        self.kept_in: Path | None = None  # where the last one was read or written

    def load(self, name: str) -> bytes | None:
        """The contents of the file `name`; None where there is none that can be used."""
        for folder_path in self._folders:
            try:
                with _opened(folder_path) as folder:
                    content = _read(folder, name)
                    self._use(folder)
            except OSError:  # where nothing else can be kept either, `save` says why
                continue
            if content is not None:
                self.kept_in = folder_path
                return content
            self.note(f"{folder_path / name}: cut short or damaged, so this kernel was compiled once more")
        return None

    def save(self, name: str, content: bytes) -> None:
        """Keep `content` as the file `name`."""
        why = []
        for folder_path in self._folders:
            try:
                _make(folder_path)
                with _opened(folder_path) as folder:
                    _write(folder, name, content)
            except OSError as error:
                why.append(f"{folder_path}: {error.strerror}")
            else:
                self.kept_in = folder_path
                self._sweep(folder_path)
                return
        because = "; ".join(why) or "this user has no home"
        self.trouble = (
            f"compiled kernels are not kept, so every start compiles them again ({because}): "
            f"set {CACHE_VARIABLE} to a folder that this user can write to"
        )

    def has(self, name: str) -> bool:
        """Whether some folder has the file `name`."""
        return any(os.path.exists(folder_path / name) for folder_path in self._folders)

    def use_first_only(self) -> None:
        """From now on, read kernels from the first folder, and keep them there, alone."""
        del self._folders[1:]

    @property
    def folder(self) -> Path | None:
        """The folder for new kernels, which this makes; None if they cannot be kept."""
        for folder_path in self._folders:
            with suppress(OSError):
                _make(folder_path)
                with _opened(folder_path) as folder:
                    if os.access(".", os.W_OK, dir_fd=folder):
                        return folder_path
        return None

    def note(self, trouble: str) -> None:
        """Remember what is wrong, if nothing was before."""
        self.trouble = self.trouble or trouble

    def take_trouble(self) -> str:
        """`trouble`, which is then forgotten."""
        trouble, self.trouble = self.trouble, ""
        return trouble

    def _use(self, folder: int) -> None:
        """Once in a process: note when the folder was used last. It may be read-only."""
        if not self._used:
            self._used = True
            with suppress(OSError):
                os.utime(folder)

    def _sweep(self, folder_path: Path) -> None:
        """Once in a process: remove files that nobody has finished, and the folders that were used least lately."""
        if self._swept:
            return
        self._swept = True
        with suppress(OSError):
            for file in folder_path.glob(f"*{UNFINISHED}"):
                if time.time() - file.stat().st_mtime > UNFINISHED_S:
                    file.unlink()
            siblings = [path for path in folder_path.parent.iterdir() if path != folder_path and _is_ours(path)]
            for sibling in sorted(siblings, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
                _remove(sibling)


def _is_ours(folder: Path) -> bool:
    """Whether this is a folder of kernels. A user may have named a place where other things are, and somebody else may
    have made a link of it."""
    return OURS.search(folder.name) is not None and folder.is_dir() and not folder.is_symlink()


def _remove(folder: Path) -> None:
    """Remove a folder of kernels, but nothing else that somebody has put there."""
    with suppress(OSError):
        for file in folder.iterdir():
            if FILES.fullmatch(file.name):
                file.unlink()
        folder.rmdir()


def _make(folder_path: Path) -> None:
    """Make the folder, so that others cannot write to it, whatever the umask is."""
    for missing in reversed([path for path in (folder_path, *folder_path.parents) if not path.exists()]):
        missing.mkdir(mode=0o755, exist_ok=True)


@contextmanager
def _opened(folder_path: Path) -> Iterator[int]:
    """The folder's descriptor. Raises OSError where it cannot be opened, or others may write to it."""
    folder = os.open(folder_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(os.fstat(folder))
        yield folder
    finally:
        os.close(folder)


def _check(status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), ROOT):
        raise PermissionError(0, f"it belongs to another user, {status.st_uid}")
    if status.st_mode & OTHERS_WRITE:
        raise PermissionError(0, f"other users may write to it, its mode is {stat.S_IMODE(status.st_mode):o}")


def _read(folder: int, name: str) -> bytes | None:
    """The contents of a file; None if they are not whole."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(file, "rb") as stream:
        _check(os.fstat(file))
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        data = stream.read()
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def _write(folder: int, name: str, content: bytes) -> None:
    unfinished = f"{name}.{secrets.token_hex(8)}{UNFINISHED}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = os.open(unfinished, flags, 0o644, dir_fd=folder)
    try:
        with open(file, "wb") as stream:
            stream.write(hashlib.sha256(content).digest() + content)
        os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished, dir_fd=folder)
        raise
