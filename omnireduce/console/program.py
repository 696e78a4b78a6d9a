"""The command line of `omnireduce`."""

from __future__ import annotations

import sys

import click

from omnireduce.cli import Group, config_options
from omnireduce.config import load_config, override_config, split_list
from omnireduce.logs import start_logs
from omnireduce.version import __version__


@click.group(cls=Group, name="omnireduce")
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Sum sparse gradients over many workers: run the service, measure it, look after it.

    Start aggregators with `omnireduce aggregator`, N workers with `mpirun -n N omnireduce bench`.
    """


@main.command(short_help="Show what aggregators do: jobs, traffic, stragglers.")
@click.argument("addresses", nargs=-1, metavar="[HOST:PORT]...")
@config_options
@click.option("--watch/--once", default=None, help="Go on until Ctrl-C, or not.  [default: --watch on a terminal]")
@click.option(
    "--every", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.option(
    "--timeout", type=click.FloatRange(0.1, 60), default=2.0, show_default=True, help="Seconds to wait for an answer."
)
@click.option("--json", "as_json", is_flag=True, help="Print all that the aggregators say, as JSON, once.")
def status(
    addresses: tuple[str, ...],
    config_file: str | None,
    overrides: tuple[str, ...],
    watch: bool | None,
    every: float,
    timeout: float,
    as_json: bool,
) -> None:
    """Show what the aggregator shards at HOST:PORT do, or those of cluster.aggregators.

    A job's row adds up its shards. `done` are collectives, `in` and `out` bytes from and to its workers; `density` is
    that of a worker's blocks, `union` that of the results; `slots` are receive slots in use. `late` names the rank that
    the others have waited for most, all in all, to begin a collective, `waits for` whom a collective waits for now.

    The exit status is 1 if one of them does not answer.
    """
    config = load_config(config_file, overrides=overrides)
    start_logs(config.log)
    from omnireduce.console.status import Look, print_json, print_once, watch_status

    look = Look(split_list(addresses) or config.cluster.aggregators, config, timeout)
    if as_json:
        sys.exit(0 if print_json(look) else 1)
    if sys.stdout.isatty() if watch is None else watch:
        watch_status(look, every)
    else:
        sys.exit(0 if print_once(look) else 1)


@main.command(short_help="Say what does not work here, and what to do.")
@click.argument("addresses", nargs=-1, metavar="[HOST:PORT]...")
@config_options
def doctor(addresses: tuple[str, ...], config_file: str | None, overrides: tuple[str, ...]) -> None:
    """Look at this host and at the aggregators at HOST:PORT, or those of cluster.aggregators: versions, processor,
    kernels, limits, transports, RDMA devices with their ports and GIDs, the launcher, rank and job of this process, and
    whether each aggregator answers and has the same secret.

    What is not well comes with what to do about it. The exit status is 1 if something that the configuration asks for
    cannot work.
    """
    config = load_config(config_file, overrides=overrides)
    if addresses:
        config = override_config(config, {"cluster.aggregators": split_list(addresses)}, source="HOST:PORT")
    start_logs(config.log)
    from omnireduce.console.doctor import examine

    sys.exit(0 if examine(config) else 1)
