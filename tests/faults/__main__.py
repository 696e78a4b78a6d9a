"""`python -m tests.faults`: rounds of real faults from seeds, or a soak."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import click

# as for pytest: tests/ and tests/cluster
sys.path[:0] = [str(Path(__file__).parent.parent / name) for name in ("", "cluster")]


@click.group(
    name="python -m tests.faults",
    invoke_without_command=True,
    help="Kill and pause real processes; exit status 1 when anything goes wrong.",
)
@click.option("--rounds", default=200, show_default=True, help="How many; each has the next seed.")
@click.option("--seed", type=int, help="Of the first round. [default: drawn and printed]")
@click.pass_context
def main(context: click.Context, rounds: int, seed: int | None) -> None:
    os.environ.pop("OMNIREDUCE_SECURITY_SECRET", None)
    if context.invoked_subcommand is not None:
        return
    from .campaign import Campaign

    first = random.SystemRandom().randrange(1_000_000, 1_000_000_000) if seed is None else seed
    click.echo(f"seeds {first} to {first + rounds - 1}")
    campaign = Campaign(click.echo)
    campaign.run(range(first, first + rounds))
    sys.exit(1 if campaign.failed else 0)


@main.command(help="Run many jobs on one daemon; exit status 1 unless descriptors and memory stay flat.")
@click.option("--jobs", default=3000, show_default=True, help="How many, on one daemon.")
def soak(jobs: int) -> None:
    from .soak import soak as run

    sys.exit(0 if run(jobs, click.echo) else 1)


if __name__ == "__main__":
    main()
