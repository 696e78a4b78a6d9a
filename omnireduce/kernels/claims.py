"""Processes that start together share out the kernels to compile: one compiles each, and the others load it.

A claim is a lock on one byte of a file beside the compiled kernels. The operating system drops it with its process. The
file also says which lists of kernels have been compiled as a whole: then nobody claims any.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from omnireduce.kernels.jit import source_stamp

FILE = "claims"
PATIENCE_S = 10.0  # for a process that has claimed a kernel, and may have been stopped
MOST_MARKS = 4096  # bytes
LOOK_S = 0.02  # between two looks whether a kernel is free: to compile one takes a second or more
Kernel = partial[Any]


class BuiltIn(partial[Any]):
    """A kernel that others of the list have in themselves: it is compiled, so that they are sooner ready. Once all of
    the list are compiled, it is not loaded."""


def in_turn(kernels: Sequence[Kernel]) -> Iterator[Kernel]:
    """The kernels in the order in which this process should call them: those that no other one compiles come first.

    A claim on each is held until the next is asked for. A kernel that another process has held for too long comes
    without one.
    """
    with ExitStack() as stack:
        file, mark = _opened(kernels), _mark_of(kernels)
        if file >= 0:
            stack.callback(os.close, file)
        if mark in _marks(file):
            yield from (each for each in kernels if not isinstance(each, BuiltIn))
            return
        left, since = deque(kernels), time.monotonic()
        while left:
            for _ in range(len(left)):
                kernel = left.popleft()
                with _claimed(file, kernel) as is_mine:
                    if is_mine or time.monotonic() - since > PATIENCE_S:
                        yield kernel
                        since = time.monotonic()
                    else:
                        left.append(kernel)
            if left and time.monotonic() - since > LOOK_S:
                time.sleep(LOOK_S)
        _note(file, mark)


def _opened(kernels: Sequence[Kernel]) -> int:
    """The file of claims, or -1: with the JIT off, or where there can be none, every process does all."""
    cache: Any = getattr(kernels[0].func, "_cache", None) if kernels else None
    try:
        return os.open(os.path.join(cache.cache_path, FILE), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except (AttributeError, TypeError, OSError):
        return -1


def _mark_of(kernels: Sequence[Kernel]) -> bytes:
    """What stands for these kernels, as their source is now."""
    return b"%08x" % zlib.crc32(repr((source_stamp(), list(map(_byte_of, kernels)))).encode())


def _marks(file: int) -> list[bytes]:
    """The lists that have been compiled. They are a hint: what is not, will be."""
    with suppress(OSError):
        return os.pread(file, MOST_MARKS, 0).split()
    return []


def _note(file: int, mark: bytes) -> None:
    with suppress(OSError):
        if os.fstat(file).st_size > MOST_MARKS - 2 * len(mark):
            os.ftruncate(file, 0)  # after many edits
        os.write(file, mark + b"\n")


@contextmanager
def _claimed(file: int, kernel: Kernel) -> Iterator[bool]:
    """Yields whether no other process has claimed the kernel."""
    if file < 0:
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
    return zlib.crc32(repr((owner, kernel.func.__name__, types)).encode()) >> 1
