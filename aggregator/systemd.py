"""Messages of the daemon to systemd: that it is ready, and that it lives."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping


def notify(*state: str) -> None:
    """Send assignments such as "READY=1"; does nothing without systemd."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.sendto("\n".join(state).encode(), address)


def watchdog_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """The seconds within which systemd expects the next WATCHDOG=1 of this process; None if it expects none."""
    microseconds = environ.get("WATCHDOG_USEC", "")
    if not re.fullmatch("[0-9]{1,18}", microseconds) or environ.get("WATCHDOG_PID", str(os.getpid())) != str(
        os.getpid()
    ):
        return None
    return int(microseconds) / 1e6 or None
