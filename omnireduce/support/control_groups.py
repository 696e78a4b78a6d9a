"""Control groups of this process, of version 1 or 2: limits, and processes that were ended for lack of memory.

A container has its own group, and sees the tree of groups of the host, or only a part of it. So this looks for groups
in the mounts of this process. Sources: cgroups(7); the kernel's documentation of memory.events and memory.oom_control.
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
    """Yield the folders of the groups of this process that may have files of `controller`, such as "memory" or "cpu":
    its own group, then the groups above it, as far as they are visible."""
    with suppress(OSError, ValueError):
        paths = dict[str, str]()
        for line in (proc / "self/cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            paths |= dict.fromkeys(["unified"] if number == "0" else names.split(","), path)
        for line in (proc / "self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            root, mount_point = map(_unescape, left.split()[3:5])
            kind, _, options = right.split(maxsplit=2)
            name = {"cgroup2": "unified", "cgroup": controller}.get(kind, "")
            if name in paths and (kind == "cgroup2" or controller in options.split(",")):
                yield from _folder_and_parents(Path(mount_point), paths[name], root)


def _unescape(text: str) -> str:
    """A path of mountinfo, in which blanks are written as numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _folder_and_parents(mount_point: Path, path: str, root: str) -> Iterator[Path]:
    """Yield the folder of group `path`, and the folders above it, if group `root` is mounted at `mount_point`. A
    container mounts only a part of the tree, which may not have the group."""
    folder = mount_point / os.path.relpath(path, root)
    if ".." in (*Path(path).parts, *folder.parts) or not folder.is_dir():
        folder = mount_point
    yield folder
    while folder != mount_point:
        folder = folder.parent
        yield folder


class OutOfMemory:
    """Notices when the system ends processes for lack of memory. It counts from its construction, or from the last
    news."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._last_counts = self._count()

    def news(self) -> str:
        """A text about processes that were ended meanwhile; empty: none."""
        counts_before, self._last_counts = self._last_counts, self._count()
        group_count_grew, host_count_grew = (
            now > then for now, then in zip(self._last_counts, counts_before, strict=True)
        )
        if group_count_grew:
            limit = memory_limit(self._proc)
            limit_text = "" if limit is None else f" of {limit / 2**20:.0f} MiB"
            return f"the system ended a process because the memory limit{limit_text} of its control group was reached"
        return "the system ended a process because this host had no memory left" if host_count_grew else ""

    def _count(self) -> tuple[int, int]:
        """The number of ended processes in this process's group, and on the host, as far as they are visible."""
        files = [group / name for group in control_groups("memory", self._proc) for name in _COUNTERS]
        in_group = next((count for file in files if (count := _number_in(file, "oom_kill")) is not None), 0)
        return in_group, _number_in(self._proc / "vmstat", "oom_kill") or 0


def memory_limit(proc: Path = PROC) -> int | None:
    """The limit on memory of this process by its control groups, in bytes; None without a limit."""
    limits = []
    for group in control_groups("memory", proc):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _number_in(file: Path, name: str) -> int | None:
    """The number behind `name` on its line; None without such a line."""
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            key, _, number = line.partition(" ")
            if key == name:
                return int(number)
    return None
