"""`python -m tests.simulator`: simulated clusters from seeds, one seed again, or the mutations."""

from __future__ import annotations

import itertools
import os
import random
import shlex
import signal
import sys
from types import FrameType

import click

from . import mutate  # before anything of the product, which it may change


def _seeds(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> list[range]:
    results = []
    for text in texts:
        first, colon, stop = text.partition(":")
        if not (colon and first.isdecimal() and stop.isdecimal()):
            raise click.BadParameter(f"{text!r}: expected FIRST:STOP, as 0:1000")
        results.append(range(int(first), int(stop)))
    return results


@click.command(
    name="python -m tests.simulator", help="Run clusters in virtual time; exit status 1 when one goes wrong."
)
@click.option(
    "--seeds",
    default=["0:500"],
    show_default=True,
    metavar="FIRST:STOP",
    callback=_seeds,
    multiple=True,
    help="Which to run; may be given again.",
)
@click.option("--hosts", default=0, metavar="COUNT", help="Also run so many in which ranks share a host.")
@click.option("--relays", default=0, metavar="COUNT", help="Also run so many in which there are relays.")
@click.option("--programs", default=0, metavar="COUNT", help="Also run so many in which sums go through programs.")
@click.option("--refusals", default=0, metavar="COUNT", help="Also run so many in which ranks refuse calls.")
@click.option("--new", default=0, metavar="COUNT", help="Also run so many seeds that nobody ran, of all sorts.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default="cores", metavar="COUNT", help="Processes.")
@click.option("--replay", type=int, metavar="SEED", help="Run one seed and show its plan and its last events.")
@click.option("--fault", default="", metavar="KIND", help="No faults but this one, at every event of each seed's run.")
@click.option("--event", default=0, metavar="NUMBER", help="With --fault: only at this event.")
@click.option("--failures", default=3, show_default=True, metavar="COUNT", help="Stop after so many failing seeds.")
@click.option("--verbose", is_flag=True, help="Show what each seed has switched on.")
@click.option("--mutation", default="", metavar="NAME", help="Put this bug into the product first.")
@click.option("--mutations", is_flag=True, help="Show that the simulator catches every deliberate bug.")
def main(
    seeds: list[range], hosts: int, relays: int, programs: int, refusals: int, new: int, jobs: int, replay: int | None,
    fault: str, event: int, failures: int, verbose: bool, mutation: str, mutations: bool,
) -> None:  # fmt: skip
    if mutations:
        sys.exit(0 if mutate.hunt_all(jobs, click.echo) else 1)
    if mutation:
        mutate.install(_known(mutation))
    from . import campaign
    from .draw import FIRST_OF_HOSTS, FIRST_OF_PROGRAMS, FIRST_OF_REFUSALS, FIRST_OF_RELAYS, FIRST_OF_SEVERAL
    from .faults import FROM_THE_START
    from .plan import KINDS

    if fault and (fault not in KINDS or fault in FROM_THE_START):
        events = ", ".join(kind for kind in KINDS if kind not in FROM_THE_START)
        raise click.BadParameter(f"--fault {fault!r}: expected one of {events}")
    if replay is not None:
        sys.exit(0 if campaign.replay(campaign.Task(replay, fault, event), click.echo) else 1)
    firsts = FIRST_OF_HOSTS, FIRST_OF_SEVERAL
    of_hosts = [first + number for number in range(hosts // 2) for first in firsts]
    of_relays = range(FIRST_OF_RELAYS, FIRST_OF_RELAYS + relays)
    of_programs = range(FIRST_OF_PROGRAMS, FIRST_OF_PROGRAMS + programs)
    of_refusals = range(FIRST_OF_REFUSALS, FIRST_OF_REFUSALS + refusals)
    sixths = ((new // 6, each) for each in (*firsts, FIRST_OF_RELAYS, FIRST_OF_PROGRAMS, FIRST_OF_REFUSALS))
    fresh = [_new_seeds(count, first) for count, first in ((new - 5 * (new // 6), 0), *sixths)]
    numbers = [*itertools.chain(*seeds, of_hosts, of_relays, of_programs, of_refusals, *fresh)]
    total, more = campaign.Campaign(), f" --mutation {shlex.quote(mutation)}" if mutation else ""
    stopped = _stopped_by_ctrl_c()
    for outcome in campaign.run_all((campaign.Task(seed, fault, event) for seed in numbers), jobs):
        total.add(outcome)
        if outcome.found:
            click.echo(campaign.report(outcome, more))
        elif verbose:
            click.echo(f"seed {outcome.task.seed}: " + "; ".join(outcome.task.plan().describe()))
        if len(total.failed) == failures or stopped:
            break
    if stopped:
        click.echo(f"stopped after seed {numbers[total.seeds - 1]}")
    click.echo(total.summary())
    sys.exit(130 if stopped else 1 if total.failed else 0)


def _stopped_by_ctrl_c() -> list[int]:
    """Holds a number from the first Ctrl-C on: then the seed under way is the last one. The second ends it at once."""
    signals: list[int] = []

    def take_note(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, take_note)
    return signals


def _known(name: str) -> mutate.Mutation:
    if name not in mutate.BY_NAME:
        raise click.BadParameter(f"--mutation {name!r}: expected one of {', '.join(mutate.BY_NAME)}")
    return mutate.BY_NAME[name]


def _new_seeds(count: int, beyond: int = 0) -> range:
    if not count:
        return range(0)
    first = beyond + random.SystemRandom().randrange(1_000_000, 1_000_000_000)
    click.echo(f"new seeds: {first}:{first + count}")
    return range(first, first + count)


if __name__ == "__main__":
    main()
