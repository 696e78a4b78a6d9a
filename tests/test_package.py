"""The names by which the packages are found, in a checkout and where omnireduce is installed. What a wheel and an sdist
have is tried in fresh environments, by tools/test_package.sh.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print("loaded:", *sys.modules)
"""


def test_a_clone_beside_a_script_does_not_hide_the_package(tmp_path: Path) -> None:
    """The folder of the script comes first, and has `omnireduce/`, which is the clone and no package."""
    (tmp_path / "omnireduce").symlink_to(ROOT)
    (tmp_path / "train.py").write_text("import omnireduce, omnireduce.worker; print(omnireduce.init.__name__)")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")],
        cwd="/", env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (result.stdout, result.stderr) == ("init\n", "")


@pytest.mark.parametrize("name", ["aggregator", "omnireduce.aggregator", "worker", "omnireduce.worker"])
def test_a_program_loads_each_module_once_whatever_it_is_called(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", RUN, name], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    usage, _, loaded = result.stdout.partition("loaded: ")
    assert usage.startswith("Usage: ")
    names = loaded.split()
    assert f"omnireduce.{name.removeprefix('omnireduce.')}.cli" in names
    assert not [each for each in names if each.startswith(("aggregator.", "worker."))]
