"""Tells systemd how the daemon is: sd_notify(3), for units of Type=notify."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*state: str) -> None:
    """Send assignments such as "READY=1"; does nothing when no systemd waits for them."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.sendto("\n".join(state).encode(), address)
