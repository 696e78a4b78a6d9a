"""Runs a command behind the filter of system calls that a unit of systemd describes: filtered.py FILE COMMAND...

FILE is JSON: `calls`, the names of the calls that may be made, and `families`, the numbers of the address families that
`socket` may be called for. A call beyond them ends the process, where systemd would only let it fail: so that none goes
unseen. The kernel does the filtering; libseccomp, which systemd uses as well, writes the filter.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

KILL, ALLOW, EQUAL = 0x80000000, 0x7FFF0000, 4  # SCMP_ACT_KILL_PROCESS, SCMP_ACT_ALLOW, SCMP_CMP_EQ


class Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp`: what an argument of a call must be."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def install(calls: list[str], families: list[int]) -> None:
    """Filter the calls of this process and of all that it starts. Raises OSError."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(KILL))

    def allow(number: int, *comparisons: Comparison) -> None:
        array = (Comparison * len(comparisons))(*comparisons)
        status = library.seccomp_rule_add_array(context, ALLOW, number, len(comparisons), array)
        if status:
            raise OSError(-status, os.strerror(-status))

    for name in calls:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # a call of another architecture
            continue
        if name == "socket":
            for family in families:
                allow(number, Comparison(0, EQUAL, family, 0))
        else:
            allow(number)
    if status := library.seccomp_load(context):
        raise OSError(-status, os.strerror(-status))


if __name__ == "__main__":
    filter_ = json.loads(Path(sys.argv[1]).read_text())
    install(filter_["calls"], filter_["families"])
    os.execvp(sys.argv[2], sys.argv[2:])
