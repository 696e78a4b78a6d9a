"""`omnireduce bench`: the cases that [bench] or files describe, a row printed for each case as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console
from rich.status import Status
from rich.text import Text

import omnireduce as omni
from omnireduce.bench.cases import Case, Row, RowTable, recorded_cases, synthetic_cases
from omnireduce.bench.mpi import MpiAllreduce, finalize
from omnireduce.bench.runs import run_case
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.environment import Launch
from omnireduce.support.config import Config
from omnireduce.support.files.output import check_writable, write_json
from omnireduce.support.printing import make_console
from omnireduce.support.progress import PlainProgress

_AGAINST_MPI = "mpirun -n {} omnireduce bench --against mpi"


def run_bench(config: Config, launch: Launch, *, pattern: str | None, json_path: str | None, against_mpi: bool) -> int:
    """Run every case on all ranks; return how many elements were wrong, the same number on all of them.

    The tensors are synthetic, as [bench] says, or those in the files that `pattern` names. Rank 0 prints the rows and
    writes them to `json_path`. Raises UsageError or FileError, before anything runs, if a case is impossible, if a file
    cannot be read or written or if there is no MPI to compare with.
    """
    todo: Sequence[Case] = synthetic_cases(config) if pattern is None else recorded_cases(config, pattern, launch.size)
    for case in todo:
        case.check(launch.size)
    baseline = _baseline(launch) if against_mpi else None
    console = make_console(quiet=launch.rank != 0)
    with omni.connect(config, rank=launch.rank, size=launch.size) as comm:
        if json_path is not None and comm.rank == 0:
            check_writable(json_path)  # here, where the other ranks learn at once that this one gives up
        rows = _run_cases(comm, config, todo, baseline, console)
    if json_path is not None and launch.rank == 0:
        write_json(msgspec.json.encode(rows), json_path)
    finalize()
    return sum(row.wrong for row in rows)


def _baseline(launch: Launch) -> MpiAllreduce:
    if launch.launcher == "none":
        command = _AGAINST_MPI.format(2)
        raise UsageError(f"the comparison with MPI needs workers that mpirun started: {command}")
    return MpiAllreduce(launch.rank, launch.size, command=_AGAINST_MPI.format(launch.size))


def _run_cases(
    comm: Communicator, config: Config, todo: Sequence[Case], baseline: MpiAllreduce | None, console: Console
) -> list[Row]:
    table = RowTable(console, against_mpi=baseline is not None)
    rounds, warmup = config.bench.rounds, config.bench.warmup
    plain = PlainProgress(time.monotonic()) if comm.rank == 0 and not console.is_terminal else None
    rows = []
    for number, case in enumerate(todo, 1):
        title = f"case {number} of {len(todo)}: {case}, round"
        with console.status(Text(title), refresh_per_second=2) as status:  # shown on a terminal only
            on_round = _shown_on(status, plain, title, warmup + rounds)
            row = run_case(comm, case, rounds, warmup, baseline, on_round=on_round)
        table.add(row, case.data)
        rows.append(row)
    return rows


def _shown_on(status: Status, plain: PlainProgress | None, title: str, rounds: int) -> Callable[[int], None]:
    def show(number: int) -> None:
        text = f"{title} {number + 1} of {rounds}"
        status.update(Text(text))
        if plain is not None:
            plain.at(f"bench: {text}", time.monotonic())

    return show
