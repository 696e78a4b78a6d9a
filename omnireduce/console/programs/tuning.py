"""A rank of `omnireduce coconet tune`. All ranks measure; rank 0 prints."""

from __future__ import annotations

import os
import sys

import msgspec
from rich.table import Table

import omnireduce as omni
from omnireduce.launch.connection import RESULT_FD
from omnireduce.programs import autotune
from omnireduce.programs.tuning.autotune import Choice
from omnireduce.support.cli import reporting_errors
from omnireduce.support.config import load_config
from omnireduce.support.logs import start_logs
from omnireduce.support.printing import make_console, short_time


class TuneRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says; see `omnireduce coconet tune --help`."""

    config_file: str | None
    overrides: tuple[str, ...]
    program: str
    sizes: list[int]
    chunks: list[int]
    turns: int
    on_shards: bool
    cache: bool


def main() -> None:
    """The process of a rank. It reads its task from standard input, as JSON, and writes success to a pipe."""
    pipe = int(os.environ.pop(RESULT_FD))
    os.set_inheritable(pipe, False)
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=TuneRequest)
    with reporting_errors():
        config = load_config(asked.config_file, overrides=asked.overrides)
        start_logs(config.log)
        with omni.connect(config) as comm:
            tuned = autotune(
                asked.program,
                comm,
                sizes=asked.sizes,
                chunks=asked.chunks,
                turns=asked.turns,
                on_shards=asked.on_shards,
                cache=asked.cache,
            )
            rank, size = comm.rank, comm.size
        if rank == 0:
            known = ", known from an earlier run" if tuned.is_recalled else ""
            what = f"{asked.program} on {size} rank{'s' * (size > 1)}"
            _print(f"{what}: median ms of a run{known}", tuned.choices)
        with open(pipe, "wb") as file:
            file.write(b"true")


def _print(title: str, choices: list[Choice]) -> None:
    """A row for each way, a column for each size, and what is the fastest of each."""
    console, table = make_console(), Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for choice in choices:
        table.add_column(_sizes(choice), justify="right")
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
