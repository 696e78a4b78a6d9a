"""The benchmark against what a user would pick instead.

`run` measures on this host, `shaped` between hosts with shaped links, `plot` draws what they wrote. `profile` shows
where the service's own time goes.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from benchmarks.cases import SIZES, Case, all_cases, target_cases
from benchmarks.contest import PEERS, contest
from benchmarks.group import PeerError
from benchmarks.profiling import profile_case
from benchmarks.report import Results, rows_of, show_case, show_verdicts
from benchmarks.shaped import LAYOUTS, Setting, run_setting
from benchmarks.targets import verdicts
from benchmarks.testbed import TestbedError
from omnireduce.errors import OmniReduceError


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option("--quick", is_flag=True, help="Only the cases that have a target.")
@click.option("--only", default="", help="Only the cases whose name contains this text.")
@click.option("--rounds", type=click.IntRange(1), default=None, help="Timed rounds of each case, instead of its own.")
@click.option("--peers", default=",".join(PEERS), show_default=True, help="Whom to compare with.")
@click.option("--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
def run(quick: bool, only: str, rounds: int | None, peers: str, results: Path) -> None:
    """Measure on this host, print a table for each case, and write rows.json and summary.json."""
    cases = [case for case in (target_cases() if quick else all_cases()) if only in case.name]
    chosen = [name for name in peers.split(",") if name]
    if unknown := set(chosen) - set(PEERS):
        raise click.UsageError(f"--peers: got {', '.join(sorted(unknown))}, expected some of {', '.join(PEERS)}")
    if not cases:
        raise click.UsageError(f"no case's name contains {only!r}")
    if rounds is not None:
        cases = [replace(case, rounds=rounds) for case in cases]
    console, found, started = Console(width=140), Results(results), time.monotonic()
    for (transport, ranks), group in itertools.groupby(cases, key=lambda case: (case.transport, case.ranks)):
        try:
            with contest(transport, ranks, chosen) as running:
                for case in group:
                    measured = running.run(case)
                    found.add(rows_of(measured), verdicts([measured]))
                    show_case(console, measured)
        except PeerError as error:
            raise click.ClickException(str(error)) from error
    show_verdicts(console, found.verdicts)
    console.print(f"{time.monotonic() - started:.0f} s; rows and summary are in {results}")
    sys.exit(1 if found.wrong else 0)


@main.command()
@click.option("--rate", default="1gbit", show_default=True, help="Of every link, each way, as tc writes it.")
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True)
@click.option("--layout", type=click.Choice(LAYOUTS), multiple=True, default=LAYOUTS, show_default=True)
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Configuration of the workers.")
@click.option("--ranks", type=click.IntRange(2), multiple=True, default=(2, 4), show_default=True)
@click.option("--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
def shaped(
    rate: str, rounds: int, layout: tuple[str, ...], ranks: tuple[int, ...], sets: tuple[str, ...], results: Path
) -> None:
    """Measure on hosts with shaped links (network namespaces; needs root), and write testbed.json."""
    console, found = Console(width=140), Results(results, "testbed.json", "testbed-summary.json")
    try:
        for setting in itertools.starmap(Setting, itertools.product(layout, ranks)):
            for measured, rows, lines in run_setting(setting, rate, rounds, sets):
                found.add(rows, lines)
                show_case(console, measured)
    except (PeerError, TestbedError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    show_verdicts(console, found.verdicts)
    sys.exit(1 if found.wrong else 0)


@main.command()
@click.option("--transport", type=click.Choice(["shm", "tcp"]), default="shm", show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True)
@click.option("--shards", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--size", type=click.Choice(list(SIZES)), default="100 MiB", show_default=True, help="Of the tensor.")
@click.option("--density", type=click.FloatRange(0, 1), default=1.0, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Traced rounds.")
@click.option("--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
def profile(transport: str, ranks: int, shards: int, size: str, density: float, rounds: int, results: Path) -> None:
    """Trace all-reduces on this host, print where the time goes in each rank and shard, and write profile.json, which
    ui.perfetto.dev shows."""
    case = Case(transport, ranks, size, density, rounds=rounds)
    try:
        wrong = profile_case(Console(width=140, highlight=False), case, shards, results)
    except (PeerError, OmniReduceError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(1 if wrong else 0)


@main.command()
@click.option("--results", type=click.Path(path_type=Path, exists=True), default=Path("results"), show_default=True)
def plot(results: Path) -> None:
    """Draw the rows in FOLDER, as PNG and SVG."""
    try:
        from benchmarks.plots import draw

        made = draw(results)
    except ImportError as error:
        raise click.ClickException(f"{error}: pip install 'omnireduce[plot]'") from error
    for path in made:
        click.echo(path)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
