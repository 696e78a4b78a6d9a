"""The command line of `omnireduce tune`."""

from __future__ import annotations

import sys
from typing import Any

import click

from omnireduce.errors import ConfigError, OmniReduceError
from omnireduce.support.cli import Command, NumberRange, config_options
from omnireduce.support.config import load_config
from omnireduce.support.logs import start_logs

# What it runs is imported when it runs: --help need not wait for it.


@click.command(
    cls=Command,
    name="tune",
    short_help="Search for the fastest configuration here.",
    help="""
    Start ranks and an aggregator here, and search for the block size, span, stripe, slots, threads, fusion and cycle
    with which they sum the arrays of a step fastest. The default is the configuration as it is; every sample is
    measured beside it, in turns.

    Keys that have no effect here are held: ranks of one host sum in memory, unless transport.host_exchange=off.

    With --grid the exit status is 1 if the search reaches less than 95 % of the best point of the grid.

    Example: omnireduce tune -np 2 --log tune.csv --write tuned.toml
    """,
)
@config_options
@click.option("-np", "--num-proc", "np", type=click.IntRange(2, 4096), default=2, show_default=True, help="Ranks.")
@click.option("--shards", type=click.IntRange(1, 64), default=1, show_default=True, help="Of the aggregator.")
@click.option(
    "--input",
    "pattern",
    metavar="PATTERN",
    help="A step is the arrays in files: PATTERN, such as gradients/g-{rank}.npy, is the file of every rank.",
)
@click.option("--elements", type=click.IntRange(1, 1 << 34), default=2_000_000, show_default=True, help="Of a step.")
@click.option("--arrays", type=click.IntRange(1, 1000), default=24, show_default=True, help="Of a step.")
@click.option("--density", type=NumberRange(0, 1), default=0.1, show_default=True, help="Blocks that are not zero.")
@click.option("--any-order", is_flag=True, help="Each rank submits in an order of its own, another one in each step.")
@click.option("--log", "log_path", metavar="FILE", help="Write a line for each sample to FILE, as CSV.")
@click.option(
    "--samples", type=click.IntRange(1, 10_000), help="Of the search.  [default: 6 for each free key, but at least 20]"
)
@click.option("--rounds", type=click.IntRange(1, 10_000), default=16, show_default=True, help="Of each sample.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=1, show_default=True, help="Of the search.")
@click.option(
    "--hold", "holds", multiple=True, metavar="SECTION.KEY[=VALUE]", help="Do not tune this key. May be repeated."
)
@click.option("--write", "write_path", metavar="FILE", help="Write the best configuration to FILE, for --config.")
@click.option("--grid", is_flag=True, help="Also measure a small grid, and compare the search with its best point.")
def tune(config_file: str | None, overrides: tuple[str, ...], np: int, shards: int, **options: Any) -> None:
    from omnireduce.console.rank_processes import run_on_ranks
    from omnireduce.console.tune.search import check_library, read_holds
    from omnireduce.console.tune.session import Request, Verdict

    holds, values = read_holds(options.pop("holds"))
    overrides = (*overrides, *values)
    config = load_config(config_file, overrides=overrides)
    start_logs(config.log)
    check_library()
    in_order = not options.pop("any_order")
    request = Request(config_file=config_file, overrides=overrides, holds=tuple(holds), in_order=in_order, **options)
    _check_files(request, config, np)
    verdict = run_on_ranks(request, np, config, Verdict, shards=None if config.cluster.aggregators else shards)
    if verdict.refusal:
        raise ConfigError(verdict.refusal)
    sys.exit(verdict.status)


def _check_files(request: Any, config: Any, np: int) -> None:
    """Raise ConfigError for input that cannot be read, and for files that cannot be written."""
    from omnireduce.console.tune.workload import cases_of
    from omnireduce.support.files.output import check_writable

    try:
        cases_of(
            config, pattern=request.pattern, elements=request.elements, arrays=request.arrays,
            density=request.density, size=np,
        )  # fmt: skip
        for path in (request.log_path, request.write_path):
            if path is not None:
                check_writable(path)
    except ConfigError:
        raise
    except OmniReduceError as error:
        raise ConfigError(str(error)) from None
