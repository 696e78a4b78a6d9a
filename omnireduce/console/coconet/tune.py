"""`omnireduce coconet tune` on a rank. All ranks measure; rank 0 prints."""

from __future__ import annotations

import omnireduce as omni
from omnireduce.console.rank_processes import RankRequest
from omnireduce.programs import autotune
from omnireduce.programs.tuning import Choice
from omnireduce.support.config import Config
from omnireduce.support.printing import make_console, short_time, table_of


class Request(RankRequest, frozen=True, kw_only=True):
    """The options of the command line; see `omnireduce coconet tune --help`."""

    program: str
    sizes: list[int]
    chunks: list[int]
    turns: int
    on_shards: bool
    cache: bool


def run(request: Request, config: Config) -> bool:
    """Measure, as all ranks do. Rank 0 prints a table. Returns True."""
    with omni.connect(config) as comm:
        tuned = autotune(
            request.program,
            comm,
            sizes=request.sizes,
            chunks=request.chunks,
            turns=request.turns,
            on_shards=request.on_shards,
            cache=request.cache,
        )
        rank, size = comm.rank, comm.size
    if rank == 0:
        source = ", known from an earlier run" if tuned.is_recalled else ""
        job_text = f"{request.program} on {size} rank{'s' * (size > 1)}"
        _print(f"{job_text}: median ms of a run{source}", tuned.choices)
    return True


def _print(title: str, choices: list[Choice]) -> None:
    """A row for each schedule, a column for each size; then the fastest schedule of each size."""
    titles = ("schedule", *(_sizes(choice) for choice in choices))
    console, table = make_console(), table_of(titles, left=("schedule",), no_wrap=False)
    labels = dict.fromkeys(label for choice in choices for label in choice.ms)
    for label in labels:
        table.add_row(label, *(short_time(choice.ms[label]) if label in choice.ms else "-" for choice in choices))
    console.print(title)
    console.print(table)
    for choice in choices:
        best = min(choice.ms, key=choice.ms.__getitem__)
        console.print(f"{_sizes(choice)}: {best}")


def _sizes(choice: Choice) -> str:
    return " ".join(f"{name}={size}" for name, size in choice.sizes.items())
