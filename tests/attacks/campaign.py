"""Kinds of attack one after another, each in phases: alone, beside the attacker, alone, beside the attacker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from .attacker import Tally
from .kinds import Kind
from .testbed import JobError, Options, Testbed
from .verdict import MOST_RATIO, Figures
from .watch import Watch

WARM_UP_S = 1.0


def attackers(kind: Kind, options: Options) -> Iterator[str]:
    """Attackers of this kind on such a daemon, stranger or member. Without a secret they do not differ."""
    if not kind.tls or options.tls:
        yield from kind.who if options.secret else kind.who[:1]


def attack(kind: Kind, who: str, options: Options, seconds: float) -> Figures:
    """Attack a daemon in one way, for `seconds` in all; return the measurements."""
    share = seconds / options.pairs
    name = f"{kind.name} ({who})" if options.secret else kind.name
    figures = Figures(name, kind.shows, kind.forbids, kind.own_bytes)
    try:
        with Testbed(kind, who, options) as testbed:
            testbed.measure(WARM_UP_S)
            base = _Base(testbed.memory, testbed.daemon.log_bytes)
            for _ in range(options.pairs):
                figures.alone.append(testbed.measure(share))
                _attacked(testbed, figures, share, base)
                testbed.settle()
            if figures.ratio > MOST_RATIO:
                _attacked_elsewhere(testbed, figures, share)
            if not testbed.same_shard():
                figures.troubles.append("the shard was started again")
    except (JobError, AssertionError, OSError) as error:
        figures.troubles.append(str(error).partition("\n")[0])
    return figures


class _Base(NamedTuple):
    """Memory and log of a daemon before it was attacked."""

    memory: int
    log_bytes: int


def _attacked(testbed: Testbed, figures: Figures, seconds: float, base: _Base) -> None:
    """One phase beside the attacker. Raises JobError."""
    cpu_s, watch, tally = testbed.shard_cpu_s, Watch(testbed.shard, testbed.target.http), Tally()
    with testbed.gather() as gatherer:
        try:
            with watch, testbed.attacker.attacking(tally):
                figures.beside.append(testbed.measure(seconds))
        finally:
            figures.tally.add(tally)
            figures.attack_s += tally.wall_s
            figures.growth_bytes = max(figures.growth_bytes, watch.peak_bytes - base.memory)
            figures.log_bytes = testbed.daemon.log_bytes - base.log_bytes
            figures.probes += watch.probes
            figures.slowest_probe_s = max(figures.slowest_probe_s, watch.slowest_probe_s)
            figures.troubles += watch.troubles
            figures.shard_cpu_s += testbed.shard_cpu_s - cpu_s
        wrong = testbed.complete(gatherer)
    if wrong:
        figures.troubles.append(wrong)


def _attacked_elsewhere(testbed: Testbed, figures: Figures, seconds: float) -> None:
    """Phases beside an attack on this daemon, in turns with phases beside an attack on another one. Raises JobError."""
    with testbed.elsewhere() as decoy:
        for _ in figures.alone:
            for attacker, phases in ((testbed.attacker, figures.here), (decoy, figures.elsewhere)):
                with attacker.attacking(Tally()):
                    phases.append(testbed.measure(seconds))
                testbed.settle()


def campaign(kinds: Sequence[Kind], options: Options, seconds: float, say: Callable[[str], None]) -> list[Figures]:
    """All kinds, with `seconds` of attack in all; `say` gets a line for each."""
    plays = [(kind, who) for kind in kinds for who in attackers(kind, options)]
    results = []
    for number, (kind, who) in enumerate(plays):
        figures = attack(kind, who, replace(options, seed=options.seed + number), seconds / len(plays))
        shard = figures.shard_cpu_s / figures.attack_s if figures.attack_s else 0.0
        say(f"{figures.name}: attacker {figures.tally}; shard {shard:.0%} of a core; {figures.probes} probes")
        results.append(figures)
    return results
