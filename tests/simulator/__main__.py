"""`python -m tests.simulator --seeds 0:1000` or `--seed N`."""

from __future__ import annotations

import logging
import sys
import time

import click
from rich.progress import Progress

from .cluster import Cluster
from .plan import Plan, draw_plan


@click.command(name="python -m tests.simulator")
@click.option("--seeds", default="0:200", show_default=True, metavar="FIRST:STOP", help="Which seeds to run.")
@click.option("--seed", type=int, help="Run one seed and show its plan and its trace.")
@click.option("--failures", default=5, show_default=True, help="Stop after so many failing seeds.")
def main(seeds: str, seed: int | None, failures: int) -> None:
    """Run simulated clusters; exit status 1 when one goes wrong."""
    logging.getLogger("omnireduce").setLevel(logging.CRITICAL)
    if seed is not None:
        sys.exit(replay(seed))
    first, stop = (int(word) for word in seeds.split(":"))
    started, failed = time.monotonic(), 0
    with Progress() as progress:
        for number in progress.track(range(first, stop), description="seeds"):
            plan = draw_plan(number)
            found = Cluster(plan).run()
            if found:
                failed += 1
                progress.console.print(report(plan, found), markup=False, highlight=False, soft_wrap=True)
            if failed == failures:
                break
    click.echo(f"{stop - first} seeds, {failed} failed, {time.monotonic() - started:.1f} s")
    sys.exit(1 if failed else 0)


def replay(seed: int) -> int:
    """Run one seed and print all about it; return the exit status."""
    plan = draw_plan(seed)
    cluster = Cluster(plan)
    found = cluster.run()
    click.echo("\n".join([str(plan), *cluster.world.trace, *(found or ["nothing wrong"])]))
    return 1 if found else 0


def report(plan: Plan, found: list[str]) -> str:
    """A failure in words: the faults, what is wrong, how to see it again."""
    lines = [f"seed {plan.seed}: faults {[fault.kind for fault in plan.faults]}"]
    lines += [f"  {line}" for line in found[:4]]
    return "\n".join([*lines, f"  replay: python -m tests.simulator --seed {plan.seed}"])


if __name__ == "__main__":
    main()
