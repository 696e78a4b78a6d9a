"""The processors that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

LIMIT = Path("/sys/fs/cgroup/cpu.max")


def usable() -> int:
    """On which it may run."""
    return len(os.sched_getaffinity(0))


def quota() -> float | None:
    """How many of them its control group may use at a time; None when it may use all."""
    try:
        limit, period = LIMIT.read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
