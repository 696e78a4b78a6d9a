"""The outcomes of cases: as tables on the terminal, and in results/*.json for everything else."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest.cases import Case
from benchmarks.contest.contest import OURS, SCAN, Measured, Result
from benchmarks.contest.memory import Memory
from benchmarks.contest.targets import memory_verdicts, verdicts
from benchmarks.harness.verdicts import Verdict
from omnireduce.errors import UsageError
from omnireduce.support.files.output import make_folder, write_json
from omnireduce.support.printing import carriers_text

Row = dict[str, Any]
SUMMARY = "summary.json"


class AnyCase(Protocol):
    """A case on one host or on several, or a training."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: a row for each entrant, and a verdict on each target that it has."""

    case: AnyCase
    rows: list[Row]
    verdicts: list[Verdict]


def outcome(measured: Measured) -> Outcome:
    """The outcome of a contest on one host."""
    return Outcome(measured.case, rows_of(measured), verdicts(measured))


def memory_outcome(memory: Memory) -> Outcome:
    row = _head(memory.case, OURS) | {
        "worker_mib": memory.worker,
        "worker_joined_mib": memory.joined,
        "shard_mib": memory.shard,
        "shard_slots_mib": memory.slots,
        "shard_resident_mib": memory.resident,
        "ready_s": memory.ready_s,
        "carried_by": memory.carried_by,
        "wrong": memory.wrong,
    }
    return Outcome(memory.case, [row], memory_verdicts(memory))


def rows_of(measured: Measured) -> list[Row]:
    """One row for each entrant."""
    return [_row(measured, result) for result in measured.results.values()]


def _head(case: Case, entrant: str) -> Row:
    return {
        "case": case.name,
        "entrant": entrant,
        "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
        "transport": case.transport,
        "ranks": case.ranks,
        "kind": case.kind,
        "size": case.size,
        "bytes": case.elements * 4,
    }


def _row(measured: Measured, result: Result) -> Row:
    case, nbytes = measured.case, measured.case.elements * 4
    low, median, high = (float(ms) for ms in np.percentile(result.ms, (10, 50, 90)))
    return _head(case, result.label) | {
        "density": measured.density,
        "union_density": measured.union_density,
        "overlap": case.overlap,
        "rounds": len(result.ms),
        "ms": median,
        "ms_p10": low,
        "ms_p90": high,
        "algbw_gbps": nbytes / (median * 1e6),
        "wire_up_bytes": result.up or None,  # only the service counts them
        "wire_down_bytes": result.down or None,
        "shard_bytes": result.shard_bytes or None,
        "cpu_s_per_gb": float(np.median(result.cpu_s)) / (nbytes / 1e9),
        "peak_mib": result.peak_mib,
        "carried_by": carriers_text(result.carried) if result.label != SCAN else None,
        "wrong": result.wrong,
    }


TIMES = {  # title of a column: key of the row, format, scale
    "median ms": ("ms", ".4g", 1.0),
    "p10": ("ms_p10", ".4g", 1.0),
    "p90": ("ms_p90", ".4g", 1.0),
    "GB/s": ("algbw_gbps", ".4g", 1.0),
    "CPU s/GB": ("cpu_s_per_gb", ".4g", 1.0),
    "MB up": ("wire_up_bytes", ".4g", 1e-6),
    "MB down": ("wire_down_bytes", ".4g", 1e-6),
    "peak MiB": ("peak_mib", ".0f", 1.0),
    "carried by": ("carried_by", "s", 1),
    "wrong": ("wrong", "d", 1),
}
MEMORY = {
    "worker MiB": ("worker_mib", ".1f", 1.0),
    "when joined": ("worker_joined_mib", ".1f", 1.0),
    "shard MiB": ("shard_mib", ".1f", 1.0),
    "its slots": ("shard_slots_mib", ".1f", 1.0),
    "all of it": ("shard_resident_mib", ".1f", 1.0),
    "ready s": ("ready_s", ".2f", 1.0),
    "carried by": ("carried_by", "s", 1),
    "wrong": ("wrong", "d", 1),
}
TRAINING = {
    "median ms": ("ms", ".4g", 1.0),
    "least": ("ms_min", ".4g", 1.0),
    "most": ("ms_max", ".4g", 1.0),
    "steps/s": ("steps_per_s", ".4g", 1.0),
    "runs": ("rounds", "d", 1),
    "loss, or % right": ("quality", ".4g", 1.0),
    "carried by": ("carried_by", "s", 1),
    "wrong": ("wrong", "d", 1),
}


def show_case(console: Console, case_outcome: Outcome) -> None:
    """A table of one case, the fastest first."""
    columns = {"memory": MEMORY, "training": TRAINING}.get(case_outcome.case.kind, TIMES)
    table = Table(title=case_outcome.case.name, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for title in columns:
        table.add_column(title, justify="right")
    for row in sorted(case_outcome.rows, key=lambda row: float(row.get("ms", 0))):
        figures = ["" if row[key] is None else format(row[key] * scale, spec) for key, spec, scale in columns.values()]
        table.add_row(row["entrant"], *figures, style="bold" if row["entrant"] == OURS else None)
    console.print(table, "")


class Results:
    """The files of a folder: `rows`, one for each command, and the summary, which they share.

    They are complete after every case, and nobody sees half of one. `options` are those that change how cases are
    measured: a folder has the results of one kind of run. Raises ValueError for files of another kind, and for those
    that no run wrote.
    """

    def __init__(self, folder: Path, rows: str = "rows.json", options: str = "") -> None:
        self.folder, self._file, self.options = folder, rows, options
        make_folder(folder)
        try:
            self.rows = self._read(rows)
            self.verdicts = [Verdict(**entry) for entry in self._read(SUMMARY)]
            self._entrants = defaultdict[str, set[str]](set)
            for row in self.rows:
                self._entrants[row["case"]].add(row["entrant"])
        except (TypeError, KeyError, AttributeError):
            raise UsageError(f"{folder} has files of another version: remove {rows} and {SUMMARY}") from None

    def has(self, case: AnyCase, entrants: Iterable[str] = (OURS,)) -> bool:
        """Whether there are rows of the case, of all these entrants."""
        return set(entrants) <= self._entrants[case.name]

    def forget(self, cases: Sequence[AnyCase]) -> None:
        """Drop what is known of these cases."""
        names = {case.name for case in cases}
        for name in names:
            self._entrants.pop(name, None)
        self.rows = [row for row in self.rows if row["case"] not in names]
        self.verdicts = [verdict for verdict in self.verdicts if verdict.case.partition(":")[0] not in names]

    def add(self, case_outcome: Outcome) -> None:
        """Put the outcome of a case in the place of what was known of it, and write the files."""
        self.forget([case_outcome.case])
        self._entrants[case_outcome.case.name] = {row["entrant"] for row in case_outcome.rows}
        self.rows += case_outcome.rows
        self.verdicts += case_outcome.verdicts
        self._write(self._file, self.rows)
        self._write(SUMMARY, [asdict(verdict) for verdict in self.verdicts])

    def _read(self, name: str) -> list[Row]:
        """The entries of a file, without the options."""
        path = self.folder / name
        try:
            entries: list[Row] = json.loads(path.read_text()) if path.exists() else []
        except ValueError as error:
            raise UsageError(f"{path}: not what a run wrote ({error}): remove it") from None
        if other_options := {entry.pop("options", "") for entry in entries} - {self.options}:
            stored_text, own_text = (options or "the defaults" for options in (other_options.pop(), self.options))
            raise UsageError(
                f"{path} has results of {stored_text}, and this is a run of {own_text}: "
                "choose another folder with --results"
            )
        return entries

    def _write(self, name: str, content: list[Row]) -> None:
        entries = [entry | {"options": self.options} for entry in content] if self.options else content
        write_json(json.dumps(entries).encode(), self.folder / name)

    @property
    def undecided(self) -> list[Verdict]:
        """The targets of cases in these rows that a competitor was absent for."""
        return [
            verdict
            for verdict in self.verdicts
            if verdict.met is None and verdict.case.partition(":")[0] in self._entrants
        ]

    @property
    def wrong(self) -> int:
        return sum(int(row["wrong"]) for row in self.rows)
