"""Processes of this host that start together share out the kernels to compile: one compiles each, the others load it.

A claim is a lock on one byte of a file that only this user can open. The file is in the folder for temporary files,
which is on no network: there locks may be lost, or answer never. The operating system drops a lock with its process.
Once a kernel is compiled, an empty file beside it says so: then nobody claims it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from omnireduce.kernels.compiling.cache import KernelFiles
from omnireduce.kernels.compiling.jit import has_compiler, kernel_files

PATIENCE_S = 10.0  # in which no kernel comes free: a process that has claimed one may have been stopped
LOOK_S = 0.02  # between two looks whether a kernel is free: to compile one takes a second or more
NOWHERE = -1
_compiled = set[str]()  # the names of kernels that this process has compiled, or loaded


class Kernel(NamedTuple):
    """A kernel for some types of arguments. `name` tells it from all others, in every process. To compile it takes a
    processor about `seconds`. `call` compiles it, or loads it."""

    name: str
    seconds: float
    call: Callable[[], object]


def are_kept(kernels: Sequence[Kernel]) -> bool:
    """Whether all of them have been compiled before, as their source is now: in this process, or by one that has kept
    them."""
    return all(map(_is_kept, kernels))


def _is_kept(kernel: Kernel) -> bool:
    return not has_compiler() or kernel.name in _compiled or kernel_files().has(_mark_of(kernel))


def share_out(kernels: Sequence[Kernel]) -> Iterator[Kernel]:
    """The kernels in the order in which this process should call them: first those that no other process compiles.

    A claim on a kernel is held until the next one is asked for. If another process holds one for too long, this one
    does not wait for it any more.
    """
    cold = deque[Kernel]()
    for kernel in kernels:
        if _is_kept(kernel):
            yield kernel
        else:
            cold.append(kernel)
    if not cold:
        return
    with ExitStack() as stack:
        file = _opened(kernel_files())
        if file != NOWHERE:
            stack.callback(os.close, file)
        since, is_patient = time.monotonic(), True
        while cold:
            for _ in range(len(cold)):
                kernel = cold.popleft()
                with _claimed(file, kernel) as is_mine:
                    if is_mine or not is_patient:
                        yield kernel
                        _mark(kernel)
                        since = time.monotonic()
                    else:
                        cold.append(kernel)
            if cold and time.monotonic() - since > LOOK_S:
                time.sleep(LOOK_S)
            is_patient = is_patient and time.monotonic() - since <= PATIENCE_S


def _mark(kernel: Kernel) -> None:
    """Note that the kernel is compiled: for this process, and for others if they can load it."""
    _compiled.add(kernel.name)
    files, mark = kernel_files(), _mark_of(kernel)
    if not files.trouble and not files.has(mark):
        files.save(mark, b"")


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


def _mark_of(kernel: Kernel) -> str:
    """The name of the file that says that a kernel is compiled."""
    return f"ready-{zlib.crc32(kernel.name.encode()):08x}"


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
    """A number that two processes have in common for one kernel, and for few others."""
    return zlib.crc32(repr((kernel_files().tag, kernel.name)).encode()) >> 1
