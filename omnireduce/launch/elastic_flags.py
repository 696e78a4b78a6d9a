"""Flags of elastic jobs, and their meaning together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from omnireduce.errors import ConfigError
from omnireduce.support.cli import NumberRange

F = TypeVar("F", bound=Callable[..., Any])
_RANKS = click.IntRange(1, 32000)
COOLDOWN_S = 60.0, 3600.0  # the pause of a host after its first failure, and the longest pause
_FLAGS = ("min_np", "max_np", "host_discovery_script")
_ALONE = ("slots_per_host", "reset_limit")  # without a flag of _FLAGS they have no meaning


def elastic_options(command: F) -> F:
    """Add the flags. The command gets them in `**asked`."""
    options = [
        click.option("--min-np", "--min-num-proc", "min_np", type=_RANKS, help="Fewest ranks to go on with."),
        click.option("--max-np", "--max-num-proc", "max_np", type=_RANKS, help="Most ranks."),
        click.option(
            "--host-discovery-script", metavar="FILE", help="Script that prints the hosts, a line HOST:SLOTS for each."
        ),
        click.option(
            "--slots-per-host", "--slots", "slots_per_host", type=_RANKS,
            help="Slots of hosts for which the script prints no number.",
        ),
        click.option(
            "--elastic-timeout", type=NumberRange(0.1, 1e6), default=600.0, show_default=True,
            envvar="HOROVOD_ELASTIC_TIMEOUT", help="Seconds with fewer than --min-np ranks after which the job ends.",
        ),
        click.option("--reset-limit", type=click.IntRange(0), help="Most restarts of ranks.  [default: no limit]"),
        click.option(
            "--blacklist-cooldown-range", nargs=2, type=NumberRange(0, 1e6), metavar="FIRST MOST",
            help="Seconds without ranks for a host where a rank failed; twice as long each time.  [default: 60 3600]",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def ranks_of_elastic(options: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    """The fewest ranks that the job goes on with, 0 for a job that is not elastic, and the number of ranks to start.
    `ranks`: this number by other options, or 0. Raises ConfigError for numbers that do not fit together."""
    if not any(options[name] for name in _FLAGS):
        for name in _ALONE:
            if options[name] is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}: expected it with --min-np, --max-np or --host-discovery-script")
        return 0, ranks
    if options["launcher"] in ("mpirun", "srun", "torchrun") or options["mpi"]:
        raise ConfigError("--min-np: an elastic job is started by this program: leave --launcher and --mpi out")
    if options["output_filename"]:
        raise ConfigError("--output-filename: ranks of an elastic job come and go; redirect the output instead")
    max_ranks = options["max_np"] or options["np"] or ranks or options["min_np"] or 0
    min_ranks = options["min_np"] or options["np"] or 1
    if not max_ranks:
        raise ConfigError("--host-discovery-script: got no number of ranks; expected -np, --min-np or --max-np")
    if not min_ranks <= (options["np"] or max_ranks) <= max_ranks:
        raise ConfigError(
            f"--min-np {min_ranks}, -np {options['np'] or max_ranks}, --max-np {max_ranks}: "
            "expected numbers that do not fall"
        )
    return min_ranks, max_ranks


def cooldown(first_and_longest: tuple[float, float] | None) -> tuple[float, float]:
    """The pause of a host after a failure: first and longest, in seconds. Raises ConfigError."""
    if not first_and_longest:
        return COOLDOWN_S
    first, longest = first_and_longest
    if first > longest:
        raise ConfigError(f"--blacklist-cooldown-range {first:g} {longest:g}: expected the smaller number first")
    return first, longest
