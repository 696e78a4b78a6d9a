"""`omnireduce bench`: the cases that [bench] or files describe, a row printed for each case as it comes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from rich.console import Console
from rich.status import Status
from rich.text import Text

import omnireduce as omni
from omnireduce.console.bench.cases import Case, Row, RowTable, recorded_cases, synthetic_cases
from omnireduce.console.bench.mpi import MpiAllreduce, finalize
from omnireduce.core.dtypes import Array
from omnireduce.errors import OmniReduceError, UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.launcher_detection import Launch
from omnireduce.support.config import Config
from omnireduce.support.files.output import check_writable, write_json
from omnireduce.support.printing import carriers_text, make_console
from omnireduce.support.progress import PlainProgress

_AGAINST_MPI = "mpirun -n {} omnireduce bench --against mpi"


def run_bench(config: Config, launch: Launch, *, pattern: str | None, json_path: str | None, against_mpi: bool) -> int:
    """Run every case on all ranks; return how many elements were wrong, the same number on all of them.

    The tensors are synthetic, as [bench] says, or those in the files that `pattern` names. Rank 0 prints the rows and
    writes them to `json_path`. Raises UsageError or FileError, before anything runs, if a case is impossible, if a file
    cannot be read or written or if there is no MPI to compare with.
    """
    cases: Sequence[Case] = synthetic_cases(config) if pattern is None else recorded_cases(config, pattern, launch.size)
    for case in cases:
        case.check(launch.size)
    baseline = _baseline(launch) if against_mpi else None
    console = make_console(quiet=launch.rank != 0)
    with omni.connect(config, rank=launch.rank, size=launch.size) as comm:
        if json_path is not None and comm.rank == 0:
            check_writable(json_path)  # here, where the other ranks learn at once that this one gives up
        rows = _run_cases(comm, config, cases, baseline, console)
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
    comm: Communicator, config: Config, cases: Sequence[Case], baseline: MpiAllreduce | None, console: Console
) -> list[Row]:
    table = RowTable(console, against_mpi=baseline is not None)
    rounds, warmup = config.bench.rounds, config.bench.warmup
    plain = PlainProgress(time.monotonic()) if comm.rank == 0 and not console.is_terminal else None
    rows = []
    for number, case in enumerate(cases, 1):
        title = f"case {number} of {len(cases)}: {case}, round"
        with console.status(Text(title), refresh_per_second=2) as status:  # shown on a terminal only
            on_round = _show_progress_on(status, plain, title, warmup + rounds)
            row = run_case(comm, case, rounds, warmup, baseline, on_round=on_round)
        table.add(row, case.data)
        rows.append(row)
    return rows


def _show_progress_on(status: Status, plain: PlainProgress | None, title: str, rounds: int) -> Callable[[int], None]:
    def show(number: int) -> None:
        text = f"{title} {number + 1} of {rounds}"
        status.update(Text(text))
        if plain is not None:
            plain.write_if_due(f"bench: {text}", time.monotonic())

    return show


def run_case(
    comm: Communicator,
    case: Case,
    rounds: int,
    warmup: int,
    against_mpi: MpiAllreduce | None = None,
    *,
    on_round: Callable[[int], None] = lambda number: None,
) -> Row:
    """Run one case and return its row, equal on all ranks; all ranks of `comm` must call this.

    `rounds` are timed, after `warmup` rounds that are only checked. `on_round` is told the number of each
    round before it starts. Raises UsageError if there is no such data, AbortedError when the job failed.
    """
    run = _CaseRun(comm, case, rounds, against_mpi)
    for number in range(warmup + rounds):
        on_round(number)
        run.service_round(number, number - warmup)
        run.mpi_round(number, number - warmup)
    return run.row()


class _CaseRun:
    """One case under way on one rank. A negative `timed_round` marks a round that is not timed."""

    def __init__(self, comm: Communicator, case: Case, rounds: int, mpi: MpiAllreduce | None) -> None:
        self._comm, self._case, self._rounds = comm, case, rounds
        self._data = case.tensors(comm.size)
        self._tensor = np.ones(case.elements, self._data.dtype)
        self._mpi = mpi if mpi is not None and mpi.supports(self._tensor) else None
        self._result = np.ones_like(self._tensor) if self._mpi else None  # written, so that all its pages exist
        self._seconds = np.zeros((3, rounds))  # the service, MPI out of place, MPI in place
        self._totals = np.zeros(3)  # bytes sent, bytes received, wrong elements
        self._carried = Counter[str]()  # bytes, by transport

    def service_round(self, number: int, timed_round: int) -> None:
        comm, case, tensor = self._comm, self._case, self._tensor
        self._data.fill(comm.rank, number, tensor)
        comm.barrier()
        before = comm.statistics()
        start = time.perf_counter()
        comm.allreduce(tensor, op=case.op, name="bench", block_size=case.block_size)
        seconds = time.perf_counter() - start
        after = comm.statistics()
        if timed_round >= 0:
            self._seconds[0, timed_round] = seconds
            self._totals[0] += after.sent_bytes - before.sent_bytes
            self._totals[1] += after.received_bytes - before.received_bytes
            self._carried += Counter(after.carried) - Counter(before.carried)
        self._totals[2] += self._data.wrong(number, tensor)

    def mpi_round(self, number: int, timed_round: int) -> None:
        if self._mpi is None or self._result is None:
            return
        self._data.fill(self._comm.rank, number, self._tensor)
        out_of_place = self._mpi.out_of_place(self._tensor, self._result, self._case.op)
        in_place = self._mpi.in_place(self._tensor, self._case.op)
        if timed_round >= 0:
            self._seconds[1:, timed_round] = out_of_place, in_place
        if number == 0 and self._data.any_order:
            self._check_mpi(number, self._result)
            self._check_mpi(number, self._tensor)

    def _check_mpi(self, number: int, result: Array) -> None:
        """Raise OmniReduceError if MPI's result is wrong: nothing can be compared with such a baseline."""
        wrong = self._data.wrong(number, result)
        if wrong:
            raise OmniReduceError(f"MPI's all-reduce and the oracle differ in {wrong} elements, nothing to compare")

    def row(self) -> Row:
        comm, case = self._comm, self._case
        milliseconds = comm.allreduce(self._seconds, op="max", name="bench times") * 1e3
        sent, received, wrong = comm.allreduce(self._totals, name="bench totals")
        carried_by_ranks = comm.allgather_object(dict(self._carried), name="bench carried")
        service = milliseconds[0]
        median = float(np.median(service))
        mpi = float(np.median(milliseconds[1:], axis=1).min()) if self._mpi else None
        nbytes = self._tensor.nbytes
        return Row(
            transport=carriers_text(sum(map(Counter, carried_by_ranks), Counter[str]())),
            world_size=comm.size,
            shards=comm.shards,
            op=case.op,
            dtype=case.dtype,
            elements=case.elements,
            bytes=nbytes,
            block_size=case.block_size,
            density=self._data.density,
            union_density=self._data.union_density,
            time_ms=median,
            time_ms_p90=float(np.percentile(service, 90)),
            time_ms_min=float(service.min()),
            algbw_gbps=nbytes / (median * 1e6),
            wire_up_bytes=round(sent / comm.size / self._rounds),
            wire_down_bytes=round(received / comm.size / self._rounds),
            wrong=int(wrong),
            mpi_time_ms=mpi,
            speedup=None if mpi is None else mpi / median,
        )
