"""Running a module of this tree in another interpreter."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from local_cluster import Process

from omnireduce.support.child_program_code import program_of

WAITS = "import os, signal\nos.write(1, b'here\\n')\nsignal.pause()\n"
IN_MAIN = """import os, signal
def main():
    try:
        os.write(1, b"here\\n")
        signal.pause()
    except KeyboardInterrupt:
        raise SystemExit(3)
"""


@pytest.mark.parametrize(("text", "status"), [(WAITS, -signal.SIGINT), (IN_MAIN, 3)], ids=["import", "main"])
def test_ctrl_c_shows_no_traceback(text: str, status: int, tmp_path: Path) -> None:
    """While modules are imported it ends the process; later it is main's to answer."""
    (tmp_path / "waits_here.py").write_text(text)
    with Process(sys.executable, "-c", program_of("waits_here"), str(tmp_path), from_scratch=True) as process:
        assert process.line() == "here"
        process.signal(signal.SIGINT)
        assert process.wait() == status
        assert process.log == ""
