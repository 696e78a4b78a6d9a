"""Run a test as another user."""

from __future__ import annotations

import ctypes
import os

KEEP = -1


def set_user(user: int) -> bool:
    """Be another user in this thread, and in those that it starts, but for files; root can. Return whether that worked.

    glibc's own functions change all threads.
    """
    setresuid, setfsuid = {"x86_64": (117, 122), "aarch64": (147, 151)}.get(os.uname().machine, (-1, -1))
    call = ctypes.CDLL(None).syscall
    changed = setresuid > 0 and call(setresuid, KEEP, user, KEEP) == 0
    if changed:
        call(setfsuid, 0)  # Python and Numba load files late: the rest of the process must still be able to
    return changed
