"""The key of processes that can share memory."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress

BOOT_ID = "/proc/sys/kernel/random/boot_id"
CLOCK = "/proc/self/ns/time"  # ranks of a host compare their times
NETWORK = "/proc/self/ns/net"  # an abstract Unix socket is seen only within it


def memory_key() -> str:
    """The same text for all processes that can share memory and meet to do so: those of one user, on one host, in one
    network namespace. Empty if that is not known."""
    with suppress(OSError), open(BOOT_ID, "rb") as file:
        clock = os.stat(CLOCK).st_ino if os.path.exists(CLOCK) else 0
        told = b"%s %d %d %d" % (file.read(64).strip(), os.stat(NETWORK).st_ino, clock, os.geteuid())
        return hashlib.sha256(told).hexdigest()[:32]
    return ""
