"""The command line of `omnireduce coconet`."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import click

from omnireduce.support.cli import Group, config_options, parse_numbers
from omnireduce.support.config import load_config
from omnireduce.support.logs import start_logs

# What it runs is imported when it runs: --help need not wait for it.

MOST_ELEMENTS = 1 << 30  # of a tensor


@click.group(
    cls=Group,
    name="coconet",
    short_help="Run programs of computation and communication.",
    help="""
    Programs in the language of omnireduce.programs, which has CoCoNet's names: docs/programs.md.
    """,
)
def coconet() -> None:
    pass


@coconet.command(
    "run",
    short_help="Run a program in its schedules, and compare.",
    help="""
    Run PROGRAM on ranks of this host: sgd, adam, lamb, model-parallel or pipeline-parallel. Each schedule is
    compared with what the program means, computed in one process.

    `state` is what a rank keeps between steps, and `up` what it sends in a step, in bytes.

    The exit status is 1 if a result differs: by a bit, or for lamb by more than 1e-6.

    Example: omnireduce coconet run adam --schedule rs-c-ag -np 4
    """,
)
@click.argument("program", metavar="PROGRAM")
@config_options
@click.option("--schedule", help="Such as ar-c, rs-c-ag or fuse-rs-c-ag.  [default: all that the program has]")
@click.option("-np", "--num-proc", "np", type=click.IntRange(1, 4096), default=2, show_default=True, help="Ranks.")
@click.option(
    "--elements", type=click.IntRange(1, MOST_ELEMENTS), default=1_000_000, show_default=True, help="Of a tensor."
)
@click.option("--steps", type=click.IntRange(1, 10_000), default=5, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**31), default=1, show_default=True, help="Of the values.")
def run(config_file: str | None, overrides: tuple[str, ...], np: int, **options: Any) -> None:
    from omnireduce.console.coconet.run import Request, check_ranks

    config = load_config(config_file, overrides=overrides)
    start_logs(config.log)
    request = Request(config_file=config_file, overrides=overrides, **options)
    check_ranks(np, request.pipelines().values())
    _run_on_ranks(request, config, np)


@coconet.command(
    short_help="Write a program as a Python file that runs by itself.",
    help="""
    Write PROGRAM in one of its schedules as a Python file: sgd, adam, lamb, model-parallel or pipeline-parallel.

    `mpirun -n 2 python FILE 10` compares it with what the program means, and prints a line for each size, with the
    milliseconds of each stage.

    Example: omnireduce coconet generate adam --schedule rs-c-ag --target mpi4py -o adam.py
    """,
)
@click.argument("program", metavar="PROGRAM")
@click.option("--schedule", required=True, help="Such as ar-c, rs-c-ag or fuse-rs-c-ag.")
@click.option(
    "--target", type=click.Choice(["omnireduce", "mpi4py"]), default="omnireduce", show_default=True,
    help="Over what the file communicates; for mpi4py it needs that and NumPy only.",
)  # fmt: skip
@click.option("-o", "--output", metavar="FILE", required=True, help="Where to write it.")
def generate(program: str, schedule: str, target: str, output: str) -> None:
    from omnireduce.console.coconet.run import choose_pipelines

    [pipeline] = choose_pipelines(program, schedule).values()
    pipeline.codegen(output, target=target, schedule=schedule)
    run = f"mpirun -n {2 * pipeline.groups} python {shlex.quote(output)} 10"
    click.echo(f"{output}: {program}, {schedule}; {run}")


@coconet.command(
    short_help="Find the fastest way to do a program.",
    help="""
    Measure all schedules of PROGRAM on ranks of this host, in turns, and name the fastest for each size: sgd, adam,
    lamb, model-parallel or pipeline-parallel.

    What is found is kept in the folder `programs` of $OMNIREDUCE_CACHE or ~/.cache/omnireduce.

    Example: omnireduce coconet tune adam -np 2 --sizes 10_000,1_000_000
    """,
)
@click.argument("program", metavar="PROGRAM")
@config_options
@click.option("-np", "--num-proc", "np", type=click.IntRange(1, 4096), default=2, show_default=True, help="Ranks.")
@click.option("--sizes", default="10_000,1_000_000", show_default=True, help="Elements of a tensor, several numbers.")
@click.option("--chunks", default="2,4,8", show_default=True, help="In which a product is overlapped.")
@click.option("--turns", type=click.IntRange(1, 10_000), default=7, show_default=True, help="Of each way.")
@click.option("--on-shards/--no-shards", default=True, show_default=True, help="Also on the shards.")
@click.option("--cache/--no-cache", default=True, show_default=True, help="Use, and keep, what was measured.")
def tune(config_file: str | None, overrides: tuple[str, ...], np: int, sizes: str, chunks: str, **options: Any) -> None:
    from omnireduce.console.coconet.run import check_ranks
    from omnireduce.console.coconet.tune import Request
    from omnireduce.programs.rewrites import MAX_CHUNKS
    from omnireduce.programs.tuning import candidates

    config = load_config(config_file, overrides=overrides)
    start_logs(config.log)
    chunk_counts = parse_numbers("--chunks", chunks, 2, MAX_CHUNKS)
    check_ranks(np, [candidate.pipeline for candidate in candidates(options["program"], chunk_counts)])
    elements = parse_numbers("--sizes", sizes, 1, MOST_ELEMENTS)
    request = Request(config_file=config_file, overrides=overrides, sizes=elements, chunks=chunk_counts, **options)
    _run_on_ranks(request, config, np)


def _run_on_ranks(request: Any, config: Any, np: int) -> None:
    """Run the module of `request` on so many ranks. Ends with status 1 where a result is wrong."""
    from omnireduce.console.rank_processes import run_on_ranks

    if not run_on_ranks(request, np, config, bool):
        sys.exit(1)
