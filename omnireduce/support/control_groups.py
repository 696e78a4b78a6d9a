"""The control groups of this process, of version 1 or 2, and what they say of processes that ended for lack of memory.

A container has a group of its own, and sees that of the host or only a part of it. So a group is looked for where it is
mounted here. Sources: cgroups(7); the kernel's documentation of memory.events and memory.oom_control.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
_NO_LIMIT = 1 << 60  # version 1 writes a huge number
_COUNTERS = ("memory.events", "memory.oom_control")


def control_groups(controller: str, proc: Path = PROC) -> Iterator[Path]:
    """The folders of the groups of this process that may have files of `controller`, such as "memory" or "cpu": its
    own, then those above it, as far as they can be seen. None where there are none."""
    with suppress(OSError, ValueError):
        paths = dict[str, str]()
        for line in (proc / "self/cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            paths |= dict.fromkeys(["unified"] if number == "0" else names.split(","), path)
        for line in (proc / "self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            root, place = map(_unescaped, left.split()[3:5])
            kind, _, options = right.split(maxsplit=2)
            name = {"cgroup2": "unified", "cgroup": controller}.get(kind, "")
            if name in paths and (kind == "cgroup2" or controller in options.split(",")):
                yield from _up(Path(place), paths[name], root)


def _unescaped(text: str) -> str:
    """Blanks stand as numbers in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _up(place: Path, path: str, root: str) -> Iterator[Path]:
    """The folder of group `path` where group `root` is mounted at `place`, and those above it. In a container only a
    part is mounted, of which the group may not be one."""
    folder = place / os.path.relpath(path, root)
    if ".." in (*Path(path).parts, *folder.parts) or not folder.is_dir():
        folder = place
    yield folder
    while folder != place:
        folder = folder.parent
        yield folder


class OutOfMemory:
    """Notices when the system ends processes for lack of memory: since it was made, and since the last time."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._seen = self._count()

    def news(self) -> str:
        """In words, what has happened meanwhile; empty: nothing."""
        before, self._seen = self._seen, self._count()
        in_group, on_host = (now > then for now, then in zip(self._seen, before, strict=True))
        if in_group:
            limit = memory_limit(self._proc)
            of = "" if limit is None else f" of {limit / 2**20:.0f} MiB"
            return f"the system ended a process because the memory limit{of} of its control group was reached"
        return "the system ended a process because this host had no memory left" if on_host else ""

    def _count(self) -> tuple[int, int]:
        """How many processes were ended in this process's group, and on the host, as far as that can be seen."""
        files = [group / name for group in control_groups("memory", self._proc) for name in _COUNTERS]
        in_group = next((count for file in files if (count := _number_in(file, "oom_kill")) is not None), 0)
        return in_group, _number_in(self._proc / "vmstat", "oom_kill") or 0


def memory_limit(proc: Path = PROC) -> int | None:
    """How many bytes of memory the control groups of this process let it have; None where they do not limit it."""
    limits = []
    for group in control_groups("memory", proc):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _number_in(file: Path, name: str) -> int | None:
    """The number behind `name` on a line of its own."""
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            key, _, number = line.partition(" ")
            if key == name:
                return int(number)
    return None
