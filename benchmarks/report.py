"""What became of cases: on the terminal as tables, in results/*.json for everything else."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cases import Case
from benchmarks.contest import OURS, Measured, Result
from benchmarks.memory import Memory
from benchmarks.targets import Verdict, memory_verdicts, verdicts
from omnireduce.bench.output import write_json

Row = dict[str, Any]
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Outcome:
    """What became of a case: a row for each entrant, and a verdict on each target that it has."""

    case: Case
    rows: list[Row]
    verdicts: list[Verdict]


def outcome(measured: Measured) -> Outcome:
    """Of a contest on one host."""
    return Outcome(measured.case, rows_of(measured), verdicts(measured))


def memory_outcome(memory: Memory) -> Outcome:
    row = _head(memory.case, OURS) | {
        "worker_mib": memory.worker,
        "worker_joined_mib": memory.joined,
        "shard_mib": memory.shard,
        "shard_slots_mib": memory.slots,
        "shard_resident_mib": memory.resident,
        "ready_s": memory.ready_s,
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
    low, median, high = (float(each) for each in np.percentile(result.ms, (10, 50, 90)))
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
    "wrong": ("wrong", "d", 1),
}
MEMORY = {
    "worker MiB": ("worker_mib", ".1f", 1.0),
    "when joined": ("worker_joined_mib", ".1f", 1.0),
    "shard MiB": ("shard_mib", ".1f", 1.0),
    "its slots": ("shard_slots_mib", ".1f", 1.0),
    "all of it": ("shard_resident_mib", ".1f", 1.0),
    "ready s": ("ready_s", ".2f", 1.0),
    "wrong": ("wrong", "d", 1),
}


def show_case(console: Console, found: Outcome) -> None:
    """A table of one case, the fastest first."""
    columns = MEMORY if found.case.kind == "memory" else TIMES
    table = Table(title=found.case.name, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for title in columns:
        table.add_column(title, justify="right")
    for row in sorted(found.rows, key=lambda each: float(each.get("ms", 0))):
        figures = ["" if row[key] is None else format(row[key] * scale, how) for key, how, scale in columns.values()]
        table.add_row(row["entrant"], *figures, style="bold" if row["entrant"] == OURS else None)
    console.print(table, "")


def show_verdicts(console: Console, lines: Sequence[Verdict]) -> None:
    table = Table(title="Targets", title_justify="left", box=None, pad_edge=False)
    for name in ("case", "ours", "peer", "theirs", "ratio", "target", ""):
        table.add_column(name, justify="left" if name in ("case", "peer", "") else "right")
    for each in lines:
        verdict = "met" if each.met else "[bold red]MISSED"
        values = (f"{each.value:.4g} {each.unit}", each.peer, f"{each.peer_value:.4g} {each.unit}")
        table.add_row(each.case, *values, f"{each.ratio:.2f}", each.target, verdict)
    console.print(table)


class Results:
    """The files of a folder: `rows`, one for each command, and the summary, which they share.

    They are complete after every case, and nobody sees half of one. Raises ValueError for files that no run wrote.
    """

    def __init__(self, folder: Path, rows: str = "rows.json") -> None:
        self.folder, self._file = folder, rows
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = self._read(rows)
        try:
            self.verdicts = [Verdict(**each) for each in self._read(SUMMARY)]
            self.measured = {str(row["case"]) for row in self.rows}
        except (TypeError, KeyError):
            raise ValueError(f"{folder} has files of another version: remove {rows} and {SUMMARY}") from None

    def forget(self, cases: Sequence[Case]) -> None:
        """Drop what is known of these cases."""
        names = {case.name for case in cases}
        self.measured -= names
        self.rows = [row for row in self.rows if row["case"] not in names]
        self.verdicts = [each for each in self.verdicts if each.case.partition(":")[0] not in names]

    def add(self, found: Outcome) -> None:
        """Put the outcome of a case in the place of what was known of it, and write the files."""
        self.forget([found.case])
        self.measured.add(found.case.name)
        self.rows += found.rows
        self.verdicts += found.verdicts
        self._write(self._file, self.rows)
        self._write(SUMMARY, [asdict(each) for each in self.verdicts])

    def _read(self, name: str) -> Any:
        path = self.folder / name
        try:
            return json.loads(path.read_text()) if path.exists() else []
        except ValueError as error:
            raise ValueError(f"{path}: not what a run wrote ({error}): remove it") from None

    def _write(self, name: str, content: object) -> None:
        write_json(json.dumps(content).encode(), self.folder / name)

    @property
    def wrong(self) -> int:
        return sum(int(row["wrong"]) for row in self.rows)
