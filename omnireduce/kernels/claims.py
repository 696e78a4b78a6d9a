"""Processes of this host that start together share out the kernels to compile: one compiles each, the others load it.

A claim is a lock on one byte of a file that only this user can open. It is in the folder for temporary files, which is
no network's: locks there may be lost, or answer never. The operating system drops it with its process. Once all of a
list are compiled, an empty file beside the kernels says so: then nobody claims any.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from omnireduce.kernels.cache import KernelFiles
from omnireduce.kernels.jit import has_compiler, kernel_files

PATIENCE_S = 10.0  # in which no kernel comes free: a process that has claimed one may have been stopped
LOOK_S = 0.02  # between two looks whether a kernel is free: to compile one takes a second or more
NOWHERE = -1
Kernel = partial[Any]
_compiled = set[str]()  # the lists that this process has compiled


class BuiltIn(partial[Any]):
    """A kernel that others of the list have in themselves: it is compiled, so that they are sooner ready. Once all of
    the list are compiled, it is not loaded."""


def are_kept(kernels: Sequence[Kernel]) -> bool:
    """Whether all of them have been compiled before, as their source is now: in this process, or by one that has kept
    them."""
    if not has_compiler():
        return True
    mark = _mark_of(kernels)
    return mark in _compiled or kernel_files().has(mark)


def in_turn(kernels: Sequence[Kernel]) -> Iterator[Kernel]:
    """The kernels in the order in which this process should call them: those that no other one compiles come first.

    A claim on each is held until the next is asked for. Nobody is waited for who holds one for too long.
    """
    if are_kept(kernels):
        yield from (each for each in kernels if not isinstance(each, BuiltIn))
        return
    with ExitStack() as stack:
        file = _opened(kernel_files())
        if file != NOWHERE:
            stack.callback(os.close, file)
        left, since, is_patient = deque(kernels), time.monotonic(), True
        while left:
            for _ in range(len(left)):
                kernel = left.popleft()
                with _claimed(file, kernel) as is_mine:
                    if is_mine or not is_patient:
                        yield kernel
                        since = time.monotonic()
                    else:
                        left.append(kernel)
            if left and time.monotonic() - since > LOOK_S:
                time.sleep(LOOK_S)
            is_patient = is_patient and time.monotonic() - since <= PATIENCE_S
    _compiled.add(_mark_of(kernels))
    if not kernel_files().trouble:
        kernel_files().save(_mark_of(kernels), b"")


def _opened(files: KernelFiles) -> int:
    """The file of claims, or NOWHERE: every process does all. Others could not load what is kept nowhere."""
    if files.folder is None:
        return NOWHERE
    path = os.path.join(tempfile.gettempdir(), f"omnireduce-kernels-{os.geteuid()}")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return NOWHERE
    status = os.fstat(file)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:  # others could hold claims
        os.close(file)
        return NOWHERE
    return file


def _mark_of(kernels: Sequence[Kernel]) -> str:
    """The name of the file that stands for these kernels."""
    return f"all-{zlib.crc32(repr(list(map(_byte_of, kernels))).encode()):08x}"


@contextmanager
def _claimed(file: int, kernel: Kernel) -> Iterator[bool]:
    """Yields whether no other process has claimed the kernel."""
    if file == NOWHERE:
        yield True
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte_of(kernel))
    except BlockingIOError:
        yield False
        return
    except OSError:  # a file system without locks
        yield True
        return
    try:
        yield True
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, _byte_of(kernel))


def _byte_of(kernel: Kernel) -> int:
    """A number that two processes have in common for one kernel and types of arguments, and for few others."""
    types = [getattr(argument, "dtype", type(argument)) for argument in kernel.args]
    owner = type(getattr(kernel.func, "__self__", None)).__name__  # of codecs
    return zlib.crc32(repr((kernel_files().tag, owner, kernel.func.__name__, types)).encode()) >> 1
