"""`omnireduce trace`: where the time of a traced job went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.runtime.tracing.aligned_traces import Lane, exclusive, missing, read_lanes, sizes, wake_ups, windows
from omnireduce.runtime.tracing.merged_timeline import chrome_trace, merge
from omnireduce.runtime.tracing.trace import WORK, SpanKind
from omnireduce.support.files.output import check_writable, write_file
from omnireduce.support.printing import make_console, short_count


def report_timeline(folder: str | Path, job: str | None, output: str | Path) -> None:
    """Write the timeline of the latest run in `folder` to `output`, and say what it has.

    Raises UsageError when there are no traces or a file cannot be written.
    """
    check_writable(output)
    result = merge(folder, output, job)
    console = make_console()
    console.print(f"{output}: {', '.join(result.who)}; {result.events} events")
    if result.missed:
        console.print(f"{result.missed} events are missing: the room for them was full; raise trace.events")


def report_trace(folder: str | Path, job: str | None, output: str | Path | None) -> None:
    """Print the table of the traces in `folder`, and write the timeline to `output` if one is given.

    Raises UsageError when the traces do not suffice or a file cannot be written.
    """
    if output is not None:
        check_writable(output)
    lanes = read_lanes(folder, job)
    origin = lanes[0].origin
    title = f"job '{origin.job}', {origin.ranks} ranks, {origin.shards} shards"
    show_breakdown(make_console(), title, break_down(lanes), lanes)
    if output is not None:
        write_file(chrome_trace(lanes), output)


WAITS = ("wake-up", "wait")
ACTIVITIES = (*(kind.name.lower() for kind in WORK), *WAITS, "other")
NOTES = """\
Milliseconds of wall time, medians; in every single collective the activities of a row add up to
`whole`. Activities that took no time are left out. pack: scan and copy, one kernel. merge: union
and sum. stage, combine, show, collect: steps in memory that ranks share. send, receive: system
calls. wake-up: the end of a wait, from when a peer began to send what ended it until the wait
returned; over tcp it includes the way of the message. wait: the rest, spinning or blocked. other:
Python. If processes share cores, time without a core lengthens all of them, most of all wake-ups."""


@dataclass(frozen=True)
class LaneMedians:
    """Medians of one lane: milliseconds of a collective and of each activity in it, how often it was woken in a
    collective, and the microseconds that one wake-up took (0 if there was none)."""

    lane: str
    whole_ms: float
    ms: dict[str, float]
    wake_ups: float
    wake_up_us: float


@dataclass(frozen=True)
class Breakdown:
    """`count` collectives of `nbytes` bytes each; `recorded` is how many there were of all sizes.

    `begin`: when the first of the `count` began; `end`: when the last of them ended; nanoseconds on the lanes' clock.
    """

    nbytes: int
    count: int
    recorded: int
    begin: int
    end: int
    rows: list[LaneMedians]


def break_down(lanes: Sequence[Lane], *, skip: int = 0) -> Breakdown:
    """Break down the collectives of one size, without the first `skip` of them: the size that has most bytes in all.

    Raises UsageError when too few were recorded.
    """
    under_way = windows(lanes)
    nbytes = sizes(lanes)[: len(under_way[str(lanes[0].origin)][0])]
    chosen_size = max(np.unique(nbytes), key=lambda size: int(nbytes[nbytes == size].sum()), default=0)
    complete = np.flatnonzero(nbytes == chosen_size)
    chosen = complete[skip:]
    if not chosen.size:
        raise UsageError(
            f"no complete collective is left after the first {skip}: the trace has {complete.size} of one size;"
            " raise trace.events"
        )
    spans = {name: (begin[chosen], end[chosen]) for name, (begin, end) in under_way.items()}
    return Breakdown(
        int(chosen_size),
        chosen.size,
        nbytes.size,
        min(int(begin[0]) for begin, _ in spans.values()),
        max(int(end[-1]) for _, end in spans.values()),
        [_row(lane, lanes, *spans[str(lane.origin)]) for lane in lanes],
    )


def _row(lane: Lane, lanes: Sequence[Lane], begin: Array, end: Array) -> LaneMedians:
    woken = wake_ups(lane, lanes)
    edges, totals = exclusive([*(lane.of(kind) for kind in WORK), woken, lane.of(SpanKind.WAIT)])
    spent = [np.interp(end, edges, total) - np.interp(begin, edges, total) for total in totals]
    spent.append(end - begin - np.sum(spent, axis=0))
    counts = np.searchsorted(woken["end"], end, "right") - np.searchsorted(woken["end"], begin, "right")
    inside = np.searchsorted(begin, woken["end"]) > np.searchsorted(end, woken["end"])
    lengths = (woken["end"] - woken["start"])[inside]
    return LaneMedians(
        str(lane.origin),
        float(np.median(end - begin)) / 1e6,
        {name: float(np.median(times)) / 1e6 for name, times in zip(ACTIVITIES, spent, strict=True)},
        float(np.median(counts)),
        float(np.median(lengths)) / 1e3 if lengths.size else 0.0,
    )


def show_breakdown(
    console: Console,
    title: str,
    breakdown: Breakdown,
    lanes: Sequence[Lane],
    references: Sequence[tuple[str, float]] = (),
) -> None:
    """Print the table, below it `references` (label, milliseconds), and warnings about incomplete traces."""
    size = short_count(breakdown.nbytes)
    heading = f"{title}; {breakdown.count} collectives of {size} bytes, of {breakdown.recorded} recorded"
    table = Table(title=Text(heading, style="bold"), title_justify="left", box=None, pad_edge=False)
    activities = [name for name in ACTIVITIES if any(row.ms[name] for row in breakdown.rows)]
    for name in ("", "whole", *activities, "wakes", "us each"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in breakdown.rows:
        figures = [_milliseconds_text(value) for value in (row.whole_ms, *(row.ms[name] for name in activities))]
        table.add_row(row.lane, *figures, f"{row.wake_ups:g}", f"{row.wake_up_us:.0f}")
    work = {name: sum(row.ms[name] for row in breakdown.rows) for name in activities if name not in WAITS}
    sums = [_milliseconds_text(work[name]) if name in work else "" for name in activities]
    table.add_row("all, no waits", _milliseconds_text(sum(work.values())), *sums)
    for label, milliseconds in references:
        table.add_row(label, _milliseconds_text(milliseconds), style="dim")
    console.print(table)
    console.print(Text(NOTES, style="dim"))
    for lane in lanes:
        if lane.origin.missed:
            warning = f"{lane.origin}: the trace was full and misses {lane.origin.missed} spans; raise trace.events"
            console.print(Text(warning, style="bold red"))
    if absent := missing(lanes):
        console.print(Text(f"no trace of {', '.join(absent)}: is trace.folder set there?", style="bold red"))


def _milliseconds_text(milliseconds: float) -> str:
    """Five digits at most: 0.008, 36.91, 147.4."""
    return f"{milliseconds:.{3 if milliseconds < 10 else 2 if milliseconds < 100 else 1}f}"
