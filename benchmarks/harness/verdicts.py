"""Verdicts: whether a measurement has met its target, as a ratio within one run where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Verdict:
    """One line of the summary. `ratio` is the peer's value over ours, or for `at_most` ours over the peer's.

    `case` is the name of a case; if it has several targets of one kind, then also ":" and which. Where a competitor did
    not run that the target needs, `peer` names who is absent, and there is no ratio, and nothing was met or missed.
    """

    case: str
    value: float
    unit: str
    peer: str
    peer_value: float | None
    ratio: float | None
    target: str
    met: bool | None


def at_least(case: str, ours: float, peer: str, theirs: float, target: float, unit: str = "ms") -> Verdict:
    """We are to be at least `target` times as fast."""
    ratio = theirs / ours
    return Verdict(case, ours, unit, peer, theirs, ratio, f">= {target:.3g}x", ratio >= target)


def at_most(case: str, ours: float, peer: str, theirs: float, target: float, unit: str = "ms") -> Verdict:
    """We may take at most `target` times as long, or as much."""
    ratio = ours / theirs
    return Verdict(case, ours, unit, peer, theirs, ratio, f"<= {target:.3g}x", ratio <= target)


def below(case: str, ours: float, limit: float, unit: str) -> Verdict:
    """An absolute limit."""
    return Verdict(case, ours, unit, "limit", limit, ours / limit, f"<= {limit:g} {unit}", ours <= limit)


def undecided(case: str, ours: float, absent: Sequence[str], target: float) -> Verdict:
    """We are to be at least `target` times as fast, but than whom is not known without all of the competitors."""
    return Verdict(case, ours, "ms", f"without {', '.join(absent)}", None, None, f">= {target:.3g}x", None)


def show_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    table = Table(title="Targets", title_justify="left", box=None, pad_edge=False)
    for name in ("case", "ours", "peer", "theirs", "ratio", "target", ""):
        table.add_column(name, justify="left" if name in ("case", "peer", "") else "right")
    for verdict in verdicts:
        verdict_text = Text("met") if verdict.met else Text("MISSED", "bold red")
        ours, theirs, ratio = f"{verdict.value:.4g} {verdict.unit}", "", ""
        if verdict.peer_value is None or verdict.ratio is None:
            verdict_text = Text("NO VERDICT", "bold red")
        else:
            theirs, ratio = f"{verdict.peer_value:.4g} {verdict.unit}", f"{verdict.ratio:.2f}"
        table.add_row(verdict.case, ours, verdict.peer, theirs, ratio, verdict.target, verdict_text)
    console.print(table)
