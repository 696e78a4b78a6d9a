"""`python -m tests.attacks`: every kind of attack beside an honest job, or some; exit status 1 if one does not hold."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import click
from rich.console import Console

# as for pytest: tests/ and tests/cluster
sys.path[:0] = [str(Path(__file__).parent.parent / name) for name in ("", "cluster")]


@click.command(
    name="python -m tests.attacks", help="Attack a daemon beside an honest job; exit status 1 when it does not hold."
)
@click.option("--seconds", default=600.0, show_default=True, help="Seconds of attack in all: each kind has its share.")
@click.option("--secret", is_flag=True, help="The daemon has a secret; attackers know it or not.")
@click.option("--tls", is_flag=True, help="The daemon has a certificate.")
@click.option("--kinds", help="Names, with commas in between. [default: all]")
@click.option("--pairs", default=3, show_default=True, help="How often the honest job is alone, then attacked.")
@click.option("--seed", type=int, help="Of what attackers draw. [default: drawn and printed]")
def main(seconds: float, secret: bool, tls: bool, kinds: str | None, pairs: int, seed: int | None) -> None:
    os.environ.pop("OMNIREDUCE_SECURITY_SECRET", None)
    from .campaign import campaign
    from .kinds import BY_NAME, KINDS
    from .testbed import Options
    from .verdict import table

    names = [name.strip() for name in kinds.split(",")] if kinds else [kind.name for kind in KINDS]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}; expected some of: {', '.join(BY_NAME)}", param_hint="--kinds")
    first = random.SystemRandom().randrange(1_000_000_000) if seed is None else seed
    click.echo(f"seed {first}")
    options = Options(secret, tls, first, pairs)
    figures = campaign([BY_NAME[name] for name in names], options, seconds, click.echo)
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False)
    console.print(table(figures, judge_time=True))
    failed = [row.name for row in figures if row.faults(judge_time=True)]
    click.echo(f"{len(figures)} kinds, {len(failed)} do not hold{': ' + ', '.join(failed) if failed else ''}")
    sys.exit(1 if failed or not figures else 0)


if __name__ == "__main__":
    main()
