"""The processors that this process may use."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

from omnireduce.support.control_groups import PROC, control_groups


def usable() -> int:
    """The number of processors that its affinity and its cpuset allow."""
    return len(os.sched_getaffinity(0))


def quota(proc: Path = PROC) -> float | None:
    """The number of processors that this process may use at a time: the least limit of its control group and the groups
    above. None if it may use all. `proc`: the folder in which the kernel lists the groups."""
    limits = map(_limit, control_groups("cpu", proc))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    """The number of processors that a group may use; None without a limit, as for the topmost group of version 2."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError, ZeroDivisionError):  # in sandboxes the files may have other contents
            limit, period = " ".join((group / name).read_text() for name in names).split()
            processors = math.inf if limit == "max" else int(limit) / int(period)
            return processors if 0 < processors < math.inf else None
    return None
