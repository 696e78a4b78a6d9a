"""The file descriptors of this process: how many it may have, and one that is kept back for emergencies."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
NO_ROOM = (*NO_DESCRIPTORS, errno.ENOBUFS, errno.ENOMEM)  # errors of accept: no room for one more connection
PAUSE_S = 1.0  # after such an error no connection is accepted for this time


def shortage(error: OSError | MemoryError) -> str:
    """A text that says what this process lacks, and what to do."""
    if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
        return f"no descriptors left ({error.strerror}); raise ulimit -n"
    if isinstance(error, OSError) and error.errno != errno.ENOMEM:
        return error.strerror or str(error)
    return "no memory left"


def allow_all_descriptors() -> None:
    """Raise this process's limit of open files to the highest allowed."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


class Reserve:
    """Keeps one descriptor back. When no other descriptor is left, a connection can be accepted with it, to tell the
    peer why it is refused. Otherwise the connection would wait, and wake the listener for ever."""

    def __init__(self) -> None:
        self._descriptor = os.open(os.devnull, os.O_RDONLY)

    @contextmanager
    def spent(self) -> Iterator[None]:
        """A context in which one more descriptor is free. The block must have closed it by its end."""
        self.close()
        try:
            yield
        finally:
            with suppress(OSError):
                self._descriptor = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
