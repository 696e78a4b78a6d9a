"""A mistake in a command's words, or in a file that they name, gives one line and exit status 2, everywhere."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main as benchmarks
from benchmarks.harness import testbed
from omnireduce.__main__ import main
from omnireduce.worker.cli import main as worker

# MISSING, FOLDER and GARBAGE stand for files: one that is not there, one that cannot be read, one that makes no sense
OMNIREDUCE = [
    "aggregator --config MISSING.toml",
    "aggregator --config FOLDER",
    "aggregator --set security.teams_folder=MISSING",
    "allreduce-benchmark --config GARBAGE.toml",
    "bench --input MISSING.npy",
    "bench --input GARBAGE.npy",
    "coconet generate MISSING.py --schedule x -o out.py",
    "coconet run MISSING.py",
    "coconet tune FOLDER.py",
    "compression test MISSING:Compressor",
    "config --config MISSING.toml",
    "density MISSING.npy",
    "density FOLDER.npy",
    "density GARBAGE.npy --methods",
    "density GARBAGE",
    "doctor --set transport.kind=pigeon",
    "drain MISSING",
    "end-job",
    "plan GARBAGE.npy",
    "plan --trace MISSING",
    "replay MISSING.csv",
    "replay GARBAGE.csv",
    "run --hostfile MISSING true",
    "run --hostfile FOLDER true",
    "slurm-script",
    "status --config FOLDER",
    "trace MISSING",
    "trace GARBAGE",
    "train --compression pigeon",
    "tune --input MISSING.npy",
    "warm MISSING",
]
BENCHMARKS = [
    "compare MISSING",
    "plan --results MISSING",
    "plot --results FOLDER",
    "plot --results GARBAGE",
    "programs pigeon FOLDER",
    "programs data-parallel MISSING --draw-only",
    "run --only pigeon",
    "run --quick --results GARBAGES",
]
CASES = [
    *((main, each) for each in OMNIREDUCE),
    *((benchmarks, benchmark) for benchmark in BENCHMARKS),
    (worker, "lab --config MISSING.toml"),
]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FOLDER", "FOLDER.npy", "FOLDER.py", "GARBAGES"):
        Path(name).mkdir()
    for name in ("GARBAGE", "GARBAGE.npy", "GARBAGE.csv", "GARBAGE.toml", "GARBAGES/rows.json"):
        Path(name).write_bytes(b"\x93\xff\x00" * 50)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(("program", "words"), CASES)
def test_wrong_use_is_one_line_and_status_2(program: click.Command, words: str) -> None:
    result = CliRunner().invoke(program, words.split())
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert (result.exit_code, result.stdout) == (2, "")
    *usage, error = result.stderr.splitlines()
    assert error.startswith("Error: "), result.stderr
    assert not usage or usage[0].startswith("Usage: "), result.stderr


def test_each_command_is_tried() -> None:
    assert {each.split()[0] for each in OMNIREDUCE} == set(main.commands)


def test_a_testbed_of_too_many_hosts_is_wrong_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["testbed", "--hosts", "999"])
    with pytest.raises(SystemExit) as ended:
        testbed.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "Error: a testbed has 2 to 250 hosts, not 999\n"
