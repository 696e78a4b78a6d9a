"""Control groups of either version, wherever they are mounted, and what is said of processes that had no memory."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import RUN, environ_of, python
from local_cluster import READY_S, ROOT

from omnireduce.support.control_groups import OutOfMemory, control_groups, memory_limit

MOUNT = "31 23 0:28 {root} {place} rw,relatime shared:9 - {kind} {kind} rw,{options}\n"


def system(folder: Path, groups: str, *mounts: tuple[str, str, str, str]) -> Path:
    """A folder in place of /proc, with mounts: the root of each, its place below `folder`, kind and options."""
    (folder / "self").mkdir(exist_ok=True)
    (folder / "self/cgroup").write_text(groups)
    lines = ["22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"]
    for root, mount_point, kind, options in mounts:
        lines.append(MOUNT.format(root=root, place=folder / mount_point, kind=kind, options=options))
    (folder / "self/mountinfo").write_text("".join(lines))
    return folder


@pytest.mark.parametrize(
    ("groups", "mount", "expected"),
    [
        ("0::/a/b\n", ("/", "cg", "cgroup2", ""), ["cg/a/b", "cg/a", "cg"]),
        ("0::/\n", ("/", "cg", "cgroup2", ""), ["cg"]),
        ("0::/../c\n", ("/", "cg", "cgroup2", ""), ["cg"]),  # the process has left the group that is mounted
        ("0::/x/a/b\n", ("/x", "cg", "cgroup2", ""), ["cg/a/b", "cg/a", "cg"]),  # the group of a container
        ("0::/elsewhere\n", ("/x", "cg", "cgroup2", ""), ["cg"]),
        ("4:cpu,memory:/a\n0::/\n", ("/", "cg", "cgroup", "cpu,memory"), ["cg/a", "cg"]),
        ("4:cpu:/a\n", ("/", "cg", "cgroup", "cpu"), []),
        ("nonsense", ("/", "cg", "cgroup2", ""), []),
    ],
)
def test_groups_are_found_where_they_are_mounted(
    tmp_path: Path, groups: str, mount: tuple[str, str, str, str], expected: list[str]
) -> None:
    (tmp_path / "cg/a/b").mkdir(parents=True)
    assert list(control_groups("memory", system(tmp_path, groups, mount))) == [tmp_path / each for each in expected]
    assert list(control_groups("memory", tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("kind", "counter", "limit", "unlimited"),
    [
        ("cgroup2", "memory.events", "memory.max", "max"),
        ("cgroup", "memory.oom_control", "memory.limit_in_bytes", "9223372036854771712"),
    ],
)
def test_what_was_ended_for_lack_of_memory_is_said_once(
    tmp_path: Path, kind: str, counter: str, limit: str, unlimited: str
) -> None:
    group = tmp_path / "cg/a"
    group.mkdir(parents=True)
    system(tmp_path, "0::/a\n4:memory:/a\n", ("/", "cg", kind, "memory"))
    (group / counter).write_text("low 0\noom_kill 3\n")
    (tmp_path / "cg" / limit).write_text(f"{512 << 20}\n")
    (group / limit).write_text(unlimited)
    (tmp_path / "vmstat").write_text("oom_kill 7\n")
    assert memory_limit(tmp_path) == 512 << 20
    events = OutOfMemory(tmp_path)
    assert events.news() == ""
    (group / counter).write_text("low 0\noom_kill 4\n")
    (tmp_path / "vmstat").write_text("oom_kill 8\n")
    assert "because the memory limit of 512 MiB of its control group was reached" in events.news()
    assert events.news() == ""
    (tmp_path / "vmstat").write_text("oom_kill 9\n")
    assert "because this host had no memory left" in events.news()


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of this machine's with little memory, if this user may make one."""
    for parent in control_groups("memory"):
        group = parent / f"omnireduce-test-{os.getpid()}"
        limit = group / ("memory.max" if (parent / "cgroup.controllers").exists() else "memory.limit_in_bytes")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            limit.write_text(str(256 << 20))
            yield group
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")


def test_a_rank_that_needs_more_than_its_group_has_is_told_apart(small_group: Path) -> None:
    launch = [*RUN, "-np", "1", *python("x = b'x' * (1 << 30)")]
    result = subprocess.run(
        ["sh", "-c", f'echo $$ >{small_group}/cgroup.procs; exec "$@"', "-", *launch],
        env=environ_of(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=READY_S,
    )  # fmt: skip
    assert result.returncode == 128 + signal.SIGKILL, result.stderr
    assert "ended by signal 9: the system ended a process because the memory limit of 256 MiB of its" in result.stderr
