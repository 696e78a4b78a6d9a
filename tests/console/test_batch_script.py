"""`omnireduce slurm-script`. What the file does is tested in tests/deploy/test_slurm.py."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from click.testing import CliRunner
from local_cluster import WAIT_S

from omnireduce.console.commands import main


def test_the_file_has_the_users_numbers_and_command(tmp_path: object) -> None:
    options = ["--nodes", "3", "--ntasks-per-node", "4", "--time", "1-2:30:00", "--job-name", "big.one"]
    result = CliRunner().invoke(main, ["slurm-script", *options, "--", "python", "my train.py", "--lr=0.1"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "#!/bin/bash"
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert directives == [
        "#SBATCH --job-name=big.one", "#SBATCH --nodes=3", "#SBATCH --ntasks-per-node=4", "#SBATCH --time=1-2:30:00",
    ]  # fmt: skip
    assert "(($#)) || set -- python 'my train.py' --lr=0.1" in lines
    checker = [shutil.which("shellcheck") or "bash", *(["-"] if shutil.which("shellcheck") else ["-n"])]
    subprocess.run(checker, input=result.output, text=True, check=True, timeout=WAIT_S)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--", "python"], ""),
        ([], "Missing argument '-- COMMAND...'"),
        (["--nodes", "0", "--", "x"], "0 is not in the range x>=1"),
        (["--job-name", "a b", "--", "x"], "job name 'a b': expected letters, digits and . _ + -"),
        (["--time", "soon", "--", "x"], "time 'soon': expected UNLIMITED, MINUTES[:SECONDS],"),
    ],
    ids=["right", "no command", "no nodes", "name", "time"],
)
def test_wrong_input(wrong: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["slurm-script", *wrong])
    assert (result.exit_code == 0) == (not message)
    assert message in result.output + str(result.exception or "")
