"""The command line of the aggregator."""

from __future__ import annotations

import sys

import click

from omnireduce.aggregator.children import process_count
from omnireduce.support.cli import Command, config_options
from omnireduce.support.config import Config, load_config, override_config
from omnireduce.support.logs import start_logs


@click.command(
    cls=Command,
    name="aggregator",
    short_help="Run aggregator shards, the daemon.",
    help="""
    Run aggregator shards until SIGTERM or Ctrl-C; running collectives may then finish.

    Prints `ready` and the addresses on standard output as soon as workers can join; logs go to standard error.
    """,
)
@config_options
@click.option("--listen", metavar="HOST:PORT", help="Address of shard 0; shard i listens on PORT + i.")
@click.option("--shards", type=int, help="Number of shards, each a process.")
def main(config_file: str | None, overrides: tuple[str, ...], listen: str | None, shards: int | None) -> None:
    def read_config() -> Config:
        return _with_options(load_config(config_file, overrides=overrides), listen, shards)

    config = read_config()
    start_logs(config.log, process_count(config))
    from omnireduce.aggregator.daemon import Daemon  # imports numba, which --help need not wait for

    sys.exit(Daemon(config, read_config).run())


def _with_options(config: Config, listen: str | None, shards: int | None) -> Config:
    if listen is not None:
        config = override_config(config, {"aggregator.listen": listen}, source="--listen")
    if shards is not None:
        config = override_config(config, {"aggregator.shards": shards}, source="--shards")
    return config
