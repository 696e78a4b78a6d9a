"""Rows of a run: on the terminal as tables, in results/*.json for everything else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest import OURS, Measured, Result
from benchmarks.targets import Verdict, as_json


def rows_of(measured: Measured) -> list[dict[str, Any]]:
    """One row for each entrant."""
    return [_row(measured, result) for result in measured.results.values()]


def _row(measured: Measured, result: Result) -> dict[str, Any]:
    case, nbytes = measured.case, measured.case.elements * 4
    low, median, high = (float(each) for each in np.percentile(result.ms, (10, 50, 90)))
    return {
        "entrant": result.label,
        "transport": case.transport,
        "ranks": case.ranks,
        "kind": case.kind,
        "size": case.size,
        "bytes": nbytes,
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
        "cpu_s_per_gb": float(np.median(result.cpu_s)) / (nbytes / 1e9),
        "peak_mib": result.peak_mib,
        "wrong": result.wrong,
    }


def show_case(console: Console, measured: Measured) -> None:
    """A table of one case, the fastest first."""
    table = Table(title=measured.case.name, title_justify="left", box=None, pad_edge=False)
    for name in ("", "median ms", "p10", "p90", "GB/s", "CPU s/GB", "up", "down", "peak MiB", "wrong"):
        table.add_column(name, justify="left" if not name else "right")
    for row in sorted(rows_of(measured), key=lambda each: float(each["ms"])):
        style = "bold" if row["entrant"] == OURS else None
        figures = [f"{row[key]:.4g}" for key in ("ms", "ms_p10", "ms_p90", "algbw_gbps", "cpu_s_per_gb")]
        wire = ["" if row[key] is None else f"{row[key] / 1e6:.4g}M" for key in ("wire_up_bytes", "wire_down_bytes")]
        table.add_row(row["entrant"], *figures, *wire, f"{row['peak_mib']:.0f}", str(row["wrong"]), style=style)
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
    """What a run writes into `folder`: its rows and what became of its targets, complete after every case."""

    def __init__(self, folder: Path, rows: str = "rows.json", summary: str = "summary.json") -> None:
        self.folder, self._files = folder, (rows, summary)
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        self.verdicts: list[Verdict] = []

    def add(self, rows: Sequence[dict[str, Any]], verdicts: Sequence[Verdict]) -> None:
        self.rows += rows
        self.verdicts += verdicts
        self._write(self._files[0], self.rows)
        self._write(self._files[1], as_json(self.verdicts))

    def _write(self, name: str, content: object) -> None:
        (self.folder / name).write_text(json.dumps(content, indent=1) + "\n")

    @property
    def wrong(self) -> int:
        return sum(int(row["wrong"]) for row in self.rows)
