"""Guests of tools/guests.py are checked before they start, and tools/test_rdma.sh ends all that it starts.

The guests themselves are tried by `make test-rdma`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from local_cluster import ROOT, WAIT_S, eventually, gone_within

STANDS_IN = """
import os, pathlib, subprocess, sys
if sys.argv[1] == os.environ["UNTIL"]:
    child = subprocess.Popen(["sleep", "600"])
    mine = pathlib.Path(os.environ["STARTED"]) / str(os.getpid())
    mine.with_suffix(".new").write_text(str(child.pid))
    mine.with_suffix(".new").rename(mine)
    child.wait()
"""


@pytest.mark.skipif(not Path("/etc/debian_version").exists(), reason="guests need Debian or Ubuntu")
def test_what_a_guest_would_miss_is_said_before_one_starts(tmp_path: Path) -> None:
    """A guest has this machine's files and no network: here nothing is installed, as dpkg says."""
    nothing = tmp_path / "dpkg-query"
    nothing.write_text("#!/bin/sh\nexit 1\n")
    nothing.chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "tools/guests.py", "run", "--", "true"],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("guests: missing: ")
    missing, _, remedy = result.stderr.partition("Install with: ")
    for package in ("iputils-ping", "perftest", "rdmacm-utils", "python3-pyverbs"):
        assert package in missing.replace(".", "").split()
        assert package in remedy.split()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("until", "count"), [("prepare", 1), ("run", 2)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_ends_the_rdma_tests_ends_their_guests(
    tmp_path: Path, until: str, count: int, number: signal.Signals
) -> None:
    """With something in the place of guests.py that waits."""
    started, kept = tmp_path / "started", tmp_path / "kept"
    for folder in ("tools", ".venv/bin", "started", "kept"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "test_rdma.sh", tmp_path / "tools")
    (tmp_path / "tools" / "pyverbs.sh").symlink_to("/bin/true")
    (tmp_path / "tools" / "guests.py").write_text(STANDS_IN)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    environ = os.environ | {"UNTIL": until, "STARTED": str(started), "TMPDIR": str(kept)}
    with subprocess.Popen([tmp_path / "tools" / "test_rdma.sh"], env=environ, stdout=subprocess.DEVNULL) as process:
        try:
            assert eventually(lambda: len(processes_in(started)) == 2 * count)
            process.send_signal(number)
            assert process.wait(WAIT_S) == -number
            assert all(gone_within(pid, WAIT_S) for pid in processes_in(started))
        finally:
            for pid in [process.pid, *processes_in(started)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert not list(kept.iterdir())


def processes_in(started: Path) -> list[int]:
    return [pid for path in started.iterdir() if not path.suffix for pid in (int(path.name), int(path.read_text()))]
