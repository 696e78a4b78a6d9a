"""The processors that this process may use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SELF = Path("/proc/self")


def usable() -> int:
    """On which it may run: what its affinity and its cpuset allow."""
    return len(os.sched_getaffinity(0))


def quota(proc: Path = SELF) -> float | None:
    """How many of them it may use at a time: the least that its control group, or one above that, allows. None when it
    may use all. `proc`: what the kernel says of this process."""
    try:
        limits = [_limit(group) for place in _places(proc) for group in place.groups]
    except (OSError, ValueError):
        return None
    return min((each for each in limits if each is not None), default=None)


class _Place(NamedTuple):
    """A hierarchy of control groups, mounted at `top`, and the group of this process in it."""

    top: Path
    own: Path

    @property
    def groups(self) -> Iterator[Path]:
        """The group of this process, and those above it as far as they can be seen."""
        yield from (each for each in (self.own, *self.own.parents) if each.is_relative_to(self.top))


def _places(proc: Path) -> Iterator[_Place]:
    """Where processors are limited: the hierarchy of version 2, and that of version 1 which is about them."""
    paths = {}
    for line in (proc / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            paths["cgroup"] = path
    for line in (proc / "mountinfo").read_text().splitlines():
        fields = line.split(" ")
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        if kind in paths and (kind == "cgroup2" or "cpu" in options.split(",")):
            root, top = (_unescaped(each) for each in fields[3:5])
            yield _Place(Path(top), _below(Path(top), paths[kind], root))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _below(top: Path, path: str, root: str) -> Path:
    """The folder of group `path` of a hierarchy of which `top` shows what is below `root`: in a container only a part,
    of which the group may not be one."""
    within = os.path.relpath(path, root)
    return top if within.startswith("..") else top / within


def _limit(group: Path) -> float | None:
    """How many processors a group may use; None where it has no limit."""
    try:
        limit, period = (group / "cpu.max").read_text().split()
    except FileNotFoundError:
        try:
            limit, period = ((group / f"cpu.cfs_{each}_us").read_text().strip() for each in ("quota", "period"))
        except FileNotFoundError:  # the topmost group of version 2 has none
            return None
    return None if limit in ("max", "-1") else int(limit) / int(period)
