"""The batch file for Slurm, with a user's own numbers and command in it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.resources import files

from omnireduce.errors import UsageError

NAME = r"[A-Za-z0-9._+-]{1,128}"
TIME = r"UNLIMITED|[0-9]{1,8}(:[0-5]?[0-9]){0,2}|[0-9]{1,4}-[0-9]{1,2}(:[0-5]?[0-9]){0,2}"
TIMES = "UNLIMITED, MINUTES[:SECONDS], HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]"


def batch_script(*, job_name: str, nodes: int, ntasks_per_node: int, time: str, command: Sequence[str]) -> str:
    """The text of the file. It runs `command` as every task, unless the file is given another one.

    Raises UsageError for a name or time that Slurm does not take.
    """
    if not re.fullmatch(NAME, job_name):
        raise UsageError(f"job name {job_name!r}: expected letters, digits and . _ + -")
    if not re.fullmatch(TIME, time):
        raise UsageError(f"time {time!r}: expected {TIMES}")
    text = files("omnireduce.console").joinpath("train.sbatch").read_text()
    settings = {"job-name": job_name, "nodes": nodes, "ntasks-per-node": ntasks_per_node, "time": time}
    for option, value in settings.items():
        text = _replace_once(text, rf"(?m)^#SBATCH --{option}=.*$", f"#SBATCH --{option}={value}")
    return _replace_once(text, r"\|\| set -- omnireduce train --against none", f"|| set -- {shlex.join(command)}")


def _replace_once(text: str, pattern: str, replacement: str) -> str:
    """The text, in which the one place that fits the pattern is replaced."""
    replaced, count = re.subn(pattern, lambda _: replacement, text)
    assert count == 1, pattern
    return replaced
