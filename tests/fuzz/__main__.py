"""`python -m tests.fuzz [TARGET...] --examples N --seed S`."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from pathlib import Path

import click

# as for pytest: tests/ and tests/cluster
sys.path[:0] = [str(Path(__file__).parent.parent / name) for name in ("", "cluster")]


@click.command(
    name="python -m tests.fuzz",
    help="Play hostile input to TARGET..., or to all of them; exit status 1 when one fails.",
)
@click.argument("targets", nargs=-1)
@click.option(
    "--examples", default=1000, show_default=True, help="Inputs per target; a twentieth where it is a process."
)
@click.option("--seed", type=int, help="What the inputs follow from. [default: drawn and printed]")
@click.option("--write-seeds", is_flag=True, help="Write the seeds of the corpus anew instead.")
def main(targets: tuple[str, ...], examples: int, seed: int | None, write_seeds: bool) -> None:
    from . import explore, seeds

    os.environ.pop("OMNIREDUCE_SECURITY_SECRET", None)
    if write_seeds:
        click.echo(f"{seeds.write()} files")
        return
    unknown = set(targets) - set(explore.names())
    if unknown:
        raise click.UsageError(f"no target {', '.join(sorted(unknown))}; there are {', '.join(explore.names())}")
    logging.getLogger("omnireduce").setLevel(logging.CRITICAL)
    number = random.SystemRandom().randrange(2**32) if seed is None else seed
    click.echo(f"seed {number}")
    for target in targets or explore.names():
        count = examples if target in explore.LIGHT else max(1, examples // 20)
        started = time.monotonic()
        with explore.opened(target) as run:
            explore.play_corpus(target, run)
            outcomes = explore.explore(target, run, count, number)
        seconds = time.monotonic() - started
        click.echo(f"{target}: {outcomes.total()} inputs, {seconds:.1f} s, {dict(outcomes.most_common())}")


if __name__ == "__main__":
    main()
