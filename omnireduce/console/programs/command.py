"""The command line of `omnireduce coconet`."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from omnireduce.cli import Group, config_options
from omnireduce.config import load_config
from omnireduce.errors import UsageError
from omnireduce.interpreters import TREE, program_of
from omnireduce.logs import start_logs

# What it runs is imported when it runs: --help need not wait for it.

_RANK = program_of("omnireduce.console.programs.rank")


@click.group(cls=Group, name="coconet", short_help="Run programs of computation and communication.")
def coconet() -> None:
    """Programs in the language of omnireduce.programs, which has CoCoNet's names: docs/programs.md."""


@coconet.command("run", short_help="Run a program in its schedules, and compare.")
@click.argument("program", metavar="PROGRAM")
@config_options
@click.option("--schedule", help="Such as ar-c, rs-c-ag or fuse-rs-c-ag.  [default: all that the program has]")
@click.option("-np", "--num-proc", "np", type=click.IntRange(1, 4096), default=2, show_default=True, help="Ranks.")
@click.option("--elements", type=click.IntRange(1, 1 << 30), default=1_000_000, show_default=True, help="Of a tensor.")
@click.option("--steps", type=click.IntRange(1, 10_000), default=5, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**31), default=1, show_default=True, help="Of the values.")
def run(config_file: str | None, overrides: tuple[str, ...], np: int, **asked: Any) -> None:
    """Run PROGRAM on ranks of this host: sgd, adam, lamb, model-parallel or pipeline-parallel. Each schedule is
    compared with what the program means, computed in one process.

    `state` is what a rank keeps between steps, and `up` what it sends in a step, in bytes.

    The exit status is 1 if a result differs: by a bit, or for lamb by more than 1e-6.

    Example: omnireduce coconet run adam --schedule rs-c-ag -np 4
    """
    from omnireduce.console.programs.trial import Wanted, check_wanted

    config = load_config(config_file, overrides=overrides)
    start_logs(config.log)
    wanted = Wanted(config_file=config_file, overrides=overrides, **asked)
    check_wanted(wanted, np)
    sys.exit(_launch(wanted, config, np))


def _launch(wanted: Any, config: Any, np: int) -> int:
    """Run the ranks, and return the exit status."""
    import msgspec

    from omnireduce.launching.job import Job
    from omnireduce.launching.launch import launch, start_ranks
    from omnireduce.launching.plan import Asked

    asked = Asked(
        words=[sys.executable, "-c", _RANK, TREE],
        ranks=np,
        config=config,
        environ=dict(os.environ),
        given=msgspec.json.encode(wanted),
        prefixed=False,
    )
    jobs = []

    def begin(job: Job, asked: Asked) -> None:
        jobs.append(job)
        start_ranks(job, asked)

    status = launch(asked, begin)
    if status:
        return status
    result = bytes(jobs[0].ranks[0].result)
    if not result:
        raise UsageError("rank 0 ended before it could say what came of it")
    return 0 if msgspec.json.decode(result, type=bool) else 1
