"""Standard input of the launcher, which ranks do not get."""

from __future__ import annotations

import array
import fcntl
import logging
import os
import stat
import termios

from omnireduce.launching.loop import Loop
from omnireduce.logs import tagged

log = logging.getLogger("omnireduce")


def watch_input(loop: Loop, descriptor: int = 0) -> None:
    """Say once that ranks read nothing from standard input, when there is something to read."""
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            if os.lseek(descriptor, 0, os.SEEK_CUR) < status.st_size:
                _tell()
            return
    except OSError:  # it is closed
        return

    def look() -> None:
        loop.forget(descriptor)
        waiting = array.array("i", [0])
        fcntl.ioctl(descriptor, termios.FIONREAD, waiting)
        if waiting[0]:  # else it has ended
            _tell()

    if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or os.isatty(descriptor):
        loop.watch(descriptor, look)


def _tell() -> None:
    what = "ranks read nothing from standard input: give the program a file or arguments instead"
    log.warning("%s", what, extra=tagged("input_not_read"))
