"""The number of processors that control groups leave to a process, on trees that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnireduce.support import processors

V1 = "5:memory:/other\n3:cpu,cpuacct:{0}\n1:name=systemd:{0}\n0::{0}\n"
V2 = "0::{0}\n"


def tree(folder: Path, cgroup: str, *, version: int, root: str = "/", files: dict[str, str]) -> Path:
    """A folder with the files of /proc and /sys for a process in group `cgroup`.

    The mounted hierarchy begins at `root`; `files` has the contents of its files, by path.
    """
    top = folder / "sys fs" / "cgroup"  # a space stands as \040 in mountinfo
    for name, text in files.items():
        file = top / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    shown = str(top).replace(" ", "\\040")
    kind, options = ("cgroup", "rw,cpu,cpuacct") if version == 1 else ("cgroup2", "rw,nsdelegate")
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text((V1 if version == 1 else V2).format(cgroup))
    (proc / "self/mountinfo").write_text(
        "22 1 0:20 / /proc rw,relatime shared:1 - proc proc rw\n"
        f"30 1 0:26 {root} {shown} rw,relatime shared:9 master:1 - {kind} cgroup {options}\n"
        "31 1 0:27 / /elsewhere rw - cgroup cgroup rw,memory\n"
    )
    return proc


def v1(quota: int, period: int = 100_000, at: str = "") -> dict[str, str]:
    return {f"{at}cpu.cfs_quota_us": f"{quota}\n", f"{at}cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("cgroup", "version", "root", "files", "expected"),
    [
        ("/", 2, "/", {}, None),  # the topmost group has no such file
        ("/", 2, "/", {"cpu.max": "150000 100000\n"}, 1.5),  # as in a container
        ("/a/b", 2, "/", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("/a/b", 2, "/", {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "400000 100000\n"}, 2.0),
        ("/a/b", 2, "/", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("/a/b", 2, "/", {"a/b/cpu.max": "max 100000\n", "c/cpu.max": "50000 100000\n"}, None),
        ("/a/b", 1, "/", v1(-1) | v1(-1, at="a/") | v1(50_000, at="a/b/"), 0.5),
        ("/a/b", 1, "/", v1(-1) | v1(25_000, at="a/") | v1(-1, at="a/b/"), 0.25),
        ("/a/b", 1, "/", v1(-1) | v1(-1, at="a/") | v1(-1, at="a/b/"), None),
        ("/docker/x/job", 1, "/docker/x", v1(300_000) | v1(200_000, at="job/"), 2.0),  # a part is mounted
        ("/docker/x", 2, "/docker/x", {"cpu.max": "75000 50000"}, 1.5),
        ("/docker/xy", 2, "/docker/x", {"cpu.max": "75000 50000"}, 1.5),
        ("/elsewhere", 2, "/docker/x", {"cpu.max": "75000 50000"}, 1.5),  # not in that part
        ("/../../a", 2, "/", {"cpu.max": "75000 50000"}, 1.5),  # outside of the namespace of groups
        ("/a", 2, "/", {"a/cpu.max": "no numbers"}, None),
        ("/a", 2, "/", {"a/cpu.max": "50000 0"}, None),
        ("/a", 2, "/", {"a/cpu.max": "0 100000"}, None),
    ],
)
def test_the_least_quota_on_the_way_up_counts(
    tmp_path: Path, cgroup: str, version: int, root: str, files: dict[str, str], expected: float | None
) -> None:
    assert processors.quota(tree(tmp_path, cgroup, version=version, root=root, files=files)) == expected


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert processors.quota(tmp_path) is None
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("")
    (tmp_path / "self/mountinfo").write_text("")
    assert processors.quota(tmp_path) is None


def test_this_process() -> None:
    assert processors.usable() >= 1
    result = processors.quota()
    assert result is None or result > 0
