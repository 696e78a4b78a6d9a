"""`omnireduce trace`: where the time of a traced job went."""

from __future__ import annotations

from pathlib import Path

from omnireduce.console.traces.breakdown import break_down, show_breakdown
from omnireduce.runtime.tracing.aligned_traces import read_lanes
from omnireduce.runtime.tracing.merged_timeline import chrome_trace, merge
from omnireduce.support.files.output import check_writable, write_file
from omnireduce.support.printing import make_console


def report_timeline(folder: str | Path, job: str | None, output: str | Path) -> None:
    """Write the timeline of the latest run in `folder` to `output`, and say what it has.

    Raises UsageError when there are no traces or a file cannot be written.
    """
    check_writable(output)
    made = merge(folder, output, job)
    console = make_console()
    console.print(f"{output}: {', '.join(made.who)}; {made.events} events")
    if made.missed:
        console.print(f"{made.missed} events are missing: the room for them was full; raise trace.events")


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
