"""Python leaves out docstrings with -OO. What users see stays: every help, the reference, generated files."""

from __future__ import annotations

import subprocess
import sys

import pytest
from local_cluster import READY_S, ROOT

SHOWN = """
import contextlib, io, pathlib, runpy, sys
import click
from click.testing import CliRunner
from omnireduce.__main__ import main
from omnireduce.worker.cli import main as worker

def show(command, *path):
    said = CliRunner().invoke(command, ["--help"], prog_name=" ".join(path))
    assert said.exit_code == 0, said.output
    print(said.output)
    for name, each in sorted(getattr(command, "commands", {}).items()):
        show(each, *path, name)

show(main, "omnireduce")
show(worker, "worker")
print(CliRunner().invoke(main, ["config", "--reference"]).output)
file = pathlib.Path(sys.argv[1]) / "generated.py"
for program, schedule, target in (("sgd", "rs-c-ag", "mpi4py"), ("lamb", "fuse-rs-c-ag", "omnireduce")):
    words = ["coconet", "generate", program, "--schedule", schedule, "--target", target, "-o", str(file)]
    print(CliRunner().invoke(main, words).output, file.read_text())
sys.argv[1:] = ["--help"]
with contextlib.suppress(SystemExit):
    runpy.run_path(str(file), run_name="__main__")
print("optimized", sys.flags.optimize, file=sys.stderr)
"""


def shown(folder: object, *options: str) -> str:
    result = subprocess.run(
        [sys.executable, *options, "-c", SHOWN, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=READY_S
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.endswith(f"optimized {2 * len(options)}\n")
    return result.stdout


def test_nothing_that_is_shown_depends_on_docstrings(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("files")
    usual = shown(folder)
    assert "# Where the aggregators are and which job this worker belongs to.\n[cluster]" in usual
    assert "usage: generated.py" in usual
    assert "sgd, rs-c-ag." in usual
    assert shown(folder, "-OO") == usual
