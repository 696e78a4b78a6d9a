"""The benchmarks: `python -m benchmarks --help` lists them."""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console

from benchmarks.comparisons import COMPARISONS
from benchmarks.contest import relays as relays_between
from benchmarks.contest.cases import MEMORY, SIZES, TRANSPORTS, Case, all_cases, target_cases
from benchmarks.contest.compare import STARTS, checkout, compare_shaped
from benchmarks.contest.compare import compare as compare_cases
from benchmarks.contest.contest import OURS, PEERS, labels
from benchmarks.contest.outcomes import AnyCase, Outcome, Results, show_case
from benchmarks.contest.plans import compare_plans, show_plans
from benchmarks.contest.profile import profile_case
from benchmarks.contest.shaped import LAYOUTS, RATE, Setting, run_settings
from benchmarks.contest.sweep import sweep
from benchmarks.frameworks.all_reduce import measure_all_reduce
from benchmarks.frameworks.dispatch import measure_dispatch
from benchmarks.frameworks.training import MODELS, THIS_HOST, TURNS, Training, run_trainings
from benchmarks.harness.environments import Tree
from benchmarks.harness.testbed import TestbedError
from benchmarks.harness.verdicts import show_verdicts
from benchmarks.programs.experiments import programs
from omnireduce.errors import UsageError
from omnireduce.support.cli import Group, NumberRange
from omnireduce.support.extras import install

ONLY = click.option("--only", default="", help="Only the cases whose name contains this text.")
RESULTS = click.option("--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
C = TypeVar("C", bound=AnyCase)
RESUME = click.option("--resume", is_flag=True, help="Leave out the cases that the files have all rows of.")
ROUNDS = click.option("--rounds", type=click.IntRange(1), help="Timed rounds of each case, instead of its own.")


@click.group(
    cls=Group,
    help="""
    Compare omnireduce with what a user would pick instead, and with itself.

    `run`, `shaped`, `relays` and `training` say in summary.json which targets are met; `plot` draws what they
    wrote. A case that is measured again replaces what the files had of it; --resume leaves it out. The other commands
    end with status 3 where a target is missed.
    """,
)
def main() -> None:
    pass


@main.command(help="Measure on this host, print a table for each case, and write rows.json and summary.json.")
@click.option("--quick", is_flag=True, help="Only the cases that have a target.")
@ONLY
@click.option("--peers", default=",".join(PEERS), show_default=True, help="Whom to compare with.")
@ROUNDS
@RESUME
@RESULTS
def run(quick: bool, only: str, peers: str, rounds: int | None, resume: bool, results: Path) -> None:
    cases = [case for case in (target_cases() if quick else all_cases()) if only in case.name]
    chosen = _parse_peers(peers)
    if not cases:
        raise click.UsageError(f"no case's name contains {only!r}")
    expected = {replace(case, rounds=rounds or case.rounds): labels(case, chosen) for case in cases}
    stored, remaining = _open_results(results, "rows.json", expected, resume, rounds=rounds, peers=chosen)
    _measure(stored, remaining, sweep(remaining, chosen))


def _parse_peers(peers: str) -> list[str]:
    chosen = [name for name in peers.split(",") if name]
    if unknown := set(chosen) - set(PEERS):
        raise click.UsageError(f"--peers: got {', '.join(sorted(unknown))}, expected some of {', '.join(PEERS)}")
    return chosen


@main.command(help="Measure between hosts with shaped links (needs root), and write testbed.json and summary.json.")
@click.option("--rate", default=RATE, show_default=True, help="Of every link, each way, as tc writes it.")
@click.option("--layout", type=click.Choice(LAYOUTS), multiple=True, default=LAYOUTS, show_default=True)
@click.option(
    "--ranks", type=click.IntRange(2), multiple=True, default=(2, 4), show_default=True,
    help="Of a shared layout, on each of its two hosts.",
)  # fmt: skip
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Configuration of the workers.")
@ONLY
@click.option("--optional", is_flag=True, help="Where there can be no such hosts say so, and succeed.")
@ROUNDS
@RESUME
@RESULTS
def shaped(
    rate: str,
    layout: tuple[str, ...],
    ranks: tuple[int, ...],
    sets: tuple[str, ...],
    only: str,
    optional: bool,
    rounds: int | None,
    resume: bool,
    results: Path,
) -> None:
    settings = [Setting.of(*pair, rate) for pair in itertools.product(layout, ranks)]
    cases = {setting: [case for case in setting.cases(rounds) if only in case.name] for setting in settings}
    expected = {case: labels(case, setting.peers) for setting in settings for case in cases[setting]}
    if not expected:
        if not optional:
            raise click.UsageError(f"no case's name contains {only!r}")
        return click.echo(f"no case between shaped links has a name that contains {only!r}")
    stored, remaining = _open_results(results, "testbed.json", expected, resume, rounds=rounds, sets=sets)
    chosen = {setting: [case for case in cases[setting] if case in remaining] for setting in settings}
    try:
        _measure(stored, remaining, run_settings(chosen, sets))
    except TestbedError as error:
        _report_not_measured(error, optional)


@main.command(help="Measure two racks with relays and without (needs root), and write relays.json and summary.json.")
@click.option("--rate", default=relays_between.RATE, show_default=True, help="Of the link that a rack shares.")
@click.option("--optional", is_flag=True, help="Where there can be no such hosts say so, and succeed.")
@ROUNDS
@RESUME
@RESULTS
def relays(rate: str, optional: bool, rounds: int | None, resume: bool, results: Path) -> None:
    expected = {case: set(relays_between.ENTRANTS) for case in relays_between.cases(rate, rounds)}
    stored, remaining = _open_results(results, "relays.json", expected, resume, rounds=rounds)
    try:
        _measure(stored, remaining, relays_between.run_relays(rate, remaining), relays_between.ENTRANTS)
    except TestbedError as error:
        _report_not_measured(error, optional)


@main.command(help="Train the examples over omnireduce and gloo (shaped links need root), and write training.json.")
@click.option(
    "--links", type=click.Choice((THIS_HOST, RATE)), multiple=True, default=(THIS_HOST, RATE), show_default=True
)
@click.option("--ranks", type=click.Choice(("2", "4")), multiple=True, default=("2", "4"), show_default=True)
@ONLY
@click.option("--turns", type=click.IntRange(1), default=TURNS, show_default=True, help="Runs of each example.")
@click.option("--optional", is_flag=True, help="Where there can be no hosts with shaped links say so, and succeed.")
@RESUME
@RESULTS
def training(
    links: tuple[str, ...], ranks: tuple[str, ...], only: str, turns: int, optional: bool, resume: bool, results: Path
) -> None:
    all_trainings = [Training(model, int(size), link) for link, model, size in itertools.product(links, MODELS, ranks)]
    expected = {case: set(case.labels) for case in all_trainings if only in case.name}
    if not expected:
        raise click.UsageError(f"no training's name contains {only!r}")
    stored, remaining = _open_results(results, "training.json", expected, resume, turns=turns)
    try:
        _measure(stored, remaining, run_trainings(remaining, turns))
    except TestbedError as error:
        _report_not_measured(error, optional)


@main.command(help="Show what torch adds to the time of a small all-reduce, and comparing to that of an all-gather.")
@click.option("--turns", type=click.IntRange(1), default=50, show_default=True, help="Of a hundred calls each.")
def dispatch(turns: int) -> None:
    click.echo(measure_dispatch(turns), nl=False)


@main.command("all-reduce", help="Time torch's all_reduce on this host, with omnireduce and with gloo in turns.")
@click.option("--ranks", type=click.IntRange(2, 1024), default=2, show_default=True)
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
@ONLY
def all_reduce(ranks: int, device: str, only: str) -> None:
    click.echo(measure_all_reduce(ranks, device, only), nl=False)


@main.command(help="Show how near `omnireduce plan` comes to what `shaped` has measured; the target is 10 %.")
@RESULTS
def plan(results: Path) -> None:
    try:
        if not (comparisons := compare_plans(results)):
            raise ValueError("no row of omnireduce")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{results / 'testbed.json'}: {error}. `shaped` writes it") from error
    show_plans(Console(width=140, markup=False), comparisons)
    if not all(comparison.verdict.met for comparison in comparisons):
        sys.exit(3)


def _report_not_measured(error: TestbedError, optional: bool) -> None:
    """There can be no hosts with shaped links here."""
    if not optional:
        raise click.ClickException(str(error)) from error
    sys.stderr.write(f"\n###\n### NOT MEASURED: shaped links: {error}\n###\n")


def _open_results(
    folder: Path,
    rows: str,
    expected: Mapping[C, set[str]],
    resume: bool,
    *,
    rounds: int | None = None,
    turns: int = TURNS,
    peers: Sequence[str] = PEERS,
    sets: Sequence[str] = (),
) -> tuple[Results, list[C]]:
    """The results so far, without these cases, and the cases; or those that lack rows of entrants expected of them."""
    options = [f"--rounds {rounds}"] if rounds else []
    if turns != TURNS:
        options.append(f"--turns {turns}")
    if set(peers) != set(PEERS):
        options.append(f"--peers {','.join(sorted(peers))}")
    options += [f"--set {setting}" for setting in sorted(sets)]
    results = Results(folder, rows, " ".join(options))
    remaining = [case for case, entrants in expected.items() if not (resume and results.has(case, entrants))]
    results.forget(remaining)
    return results, remaining


def _measure(
    results: Results, cases: Sequence[AnyCase], outcomes: Iterable[Outcome], entrants: Sequence[str] = (OURS,)
) -> None:
    """Take the outcomes of the cases as they come; end the program if one of these entrants is missing, or wrong."""
    console, started = Console(width=140, markup=False), time.monotonic()
    for outcome in outcomes:
        results.add(outcome)
        show_case(console, outcome)
    show_verdicts(console, results.verdicts)
    console.print(f"{time.monotonic() - started:.0f} s; rows and summary are in {results.folder}")
    missing = [case.name for case in cases if not results.has(case, entrants)]
    if missing:
        raise click.ClickException(f"not measured: {'; '.join(missing)}. Try again with --resume")
    if results.wrong:
        raise click.ClickException(f"{results.wrong} elements were wrong")
    if results.undecided and "--peers" not in results.options:  # else it was the user who left someone out
        lines = "; ".join(f"{verdict.case} ({verdict.peer})" for verdict in results.undecided)
        raise click.ClickException(f"targets without a verdict: {lines}. Try again with --resume")


@main.command(help="Measure the checkout BEFORE and this one in turns: no case may take --most times as much.")
@click.argument("before", type=click.Path(path_type=Path))
@click.option("--shaped", is_flag=True, help="Between hosts with shaped links (needs root), not on this host.")
@click.option("--most", default=1.05, show_default=True, help="The ratio that no case may pass.")
@click.option("--starts", type=click.IntRange(1), default=STARTS, show_default=True, help="Of all processes.")
@ONLY
def compare(before: Path, shaped: bool, most: float, starts: int, only: str) -> None:
    settings = [Setting.of(*pair) for pair in itertools.product(LAYOUTS, (2, 4), [RATE])] if shaped else []
    cases_of_setting = {setting: [case for case in setting.cases() if only in case.name] for setting in settings}
    cases = [] if shaped else [case for case in target_cases() if only in case.name]
    if not any([*cases_of_setting.values(), cases]):
        raise click.UsageError(f"no case's name contains {only!r}")
    slower, older = [], checkout(before)
    cases = _measurable(cases, older)
    if not any([*cases_of_setting.values(), cases]):
        raise UsageError("nothing is left to compare")
    between_hosts = (
        compare_shaped(setting, chosen, older, starts) for setting, chosen in cases_of_setting.items() if chosen
    )
    try:
        for comparison in itertools.chain(compare_cases(cases, older, starts), *between_hosts):
            slower += [comparison.name] if comparison.ratio > most else []
            click.echo(comparison)
    except TestbedError as error:
        raise click.ClickException(str(error)) from error
    if slower:
        click.echo(f"{len(slower)} take more than {most:g} times what they took: {'; '.join(slower)}", err=True)
        sys.exit(3)


def _measurable(cases: list[Case], older: Tree) -> list[Case]:
    """Without those that an older checkout cannot measure, which are named."""
    measurable = []
    for case in cases:
        if case.repeats == 1 or older.repeats:
            measurable.append(case)
        else:
            click.echo(f"left out, because {older.root} cannot measure it: {case.name}", err=True)
    return measurable


@main.command(help="Trace all-reduces on this host, print where the time goes, and write a timeline, profile.json.")
@click.option("--transport", type=click.Choice(TRANSPORTS), default=MEMORY, show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True)
@click.option("--shards", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--size", type=click.Choice(list(SIZES)), default="100 MiB", show_default=True, help="Of the tensor.")
@click.option("--density", type=NumberRange(0, 1), default=1.0, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Traced rounds.")
@RESULTS
def profile(transport: str, ranks: int, shards: int, size: str, density: float, rounds: int, results: Path) -> None:
    case = Case(transport, ranks, size, density, rounds=rounds)
    wrong = profile_case(Console(width=140, highlight=False, markup=False), case, shards, results)
    sys.exit(1 if wrong else 0)


@main.command(help="Draw the rows in the folder of results.")
@RESULTS
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the pictures, instead of that of the results.")
@click.option("--format", "formats", type=click.Choice(("png", "svg")), multiple=True, default=("png", "svg"))
def plot(results: Path, out: Path | None, formats: tuple[str, ...]) -> None:
    try:
        from benchmarks.contest.plots import draw
    except ImportError as error:
        raise click.ClickException(f"{error}: {install('matplotlib', 'plot')}") from error
    paths = draw(results, out or results, formats)
    if not paths:
        raise UsageError(f"no rows to draw in {results}: `python -m benchmarks run` writes them")
    for path in paths:
        click.echo(path)


for command in (*(comparison.command() for comparison in COMPARISONS), programs):
    main.add_command(command)

if __name__ == "__main__":
    # an exception, so that what was started ends, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated. What `run` has measured is kept: --resume goes on"))
    main(prog_name="python -m benchmarks")
