"""Kinds of attack one after another, each in phases: alone, beside the attacker, alone, beside the attacker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from .attacker import Tally
from .field import Field, JobError, Options
from .kinds import Kind
from .verdict import MOST_RATIO, Figures
from .watch import Watch

WARM_UP_S = 1.0


def attackers(kind: Kind, options: Options) -> Iterator[str]:
    """Who makes this attack on such a daemon. Without a secret a stranger is a member, too."""
    if not kind.tls or options.tls:
        yield from kind.who if options.secret else kind.who[:1]


def besiege(kind: Kind, who: str, options: Options, seconds: float) -> Figures:
    """Play one kind, with `seconds` of attack in all; return what was measured."""
    share = seconds / options.pairs
    name = f"{kind.name} ({who})" if options.secret else kind.name
    figures = Figures(name, kind.shows, kind.forbids, kind.own_bytes)
    try:
        with Field(kind, who, options) as field:
            field.measure(WARM_UP_S)
            base = _Base(field.memory, field.daemon.log_bytes)
            for _ in range(options.pairs):
                figures.alone.append(field.measure(share))
                _attacked(field, figures, share, base)
                field.settle()
            if figures.ratio > MOST_RATIO:
                _attacked_elsewhere(field, figures, share)
            if not field.same_shard():
                figures.troubles.append("the shard was started again")
    except (JobError, AssertionError, OSError) as error:
        figures.troubles.append(str(error).partition("\n")[0])
    return figures


class _Base(NamedTuple):
    """Of a daemon, before it was attacked."""

    memory: int
    log_bytes: int


def _attacked(field: Field, figures: Figures, seconds: float, base: _Base) -> None:
    """One phase beside the attacker. Raises JobError."""
    cpu_s, watch, tally = field.shard_cpu_s, Watch(field.shard, field.target.http), Tally()
    with field.gather() as gatherer:
        try:
            with watch, field.attacker.attacking(tally):
                figures.beside.append(field.measure(seconds))
        finally:
            figures.tally.add(tally)
            figures.attack_s += tally.wall_s
            figures.growth_bytes = max(figures.growth_bytes, watch.peak_bytes - base.memory)
            figures.log_bytes = field.daemon.log_bytes - base.log_bytes
            figures.probes += watch.probes
            figures.slowest_probe_s = max(figures.slowest_probe_s, watch.slowest_probe_s)
            figures.troubles += watch.troubles
            figures.shard_cpu_s += field.shard_cpu_s - cpu_s
        wrong = field.complete(gatherer)
    if wrong:
        figures.troubles.append(wrong)


def _attacked_elsewhere(field: Field, figures: Figures, seconds: float) -> None:
    """The same beside an attack on this daemon and on another one, in turns. Raises JobError."""
    with field.elsewhere() as decoy:
        for _ in figures.alone:
            for attacker, found in ((field.attacker, figures.here), (decoy, figures.elsewhere)):
                with attacker.attacking(Tally()):
                    found.append(field.measure(seconds))
                field.settle()


def campaign(kinds: Sequence[Kind], options: Options, seconds: float, say: Callable[[str], None]) -> list[Figures]:
    """All kinds, with `seconds` of attack in all; `say` gets a line for each."""
    plays = [(kind, who) for kind in kinds for who in attackers(kind, options)]
    found = []
    for number, (kind, who) in enumerate(plays):
        figures = besiege(kind, who, replace(options, seed=options.seed + number), seconds / len(plays))
        shard = figures.shard_cpu_s / figures.attack_s if figures.attack_s else 0.0
        say(f"{figures.name}: attacker {figures.tally}; shard {shard:.0%} of a core; {figures.probes} probes")
        found.append(figures)
    return found
