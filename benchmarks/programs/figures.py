"""The figures of CoCoNet's paper, from the tables of the experiments here. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.contest.plots import STYLE
from benchmarks.programs.experiments import ON_SHARDS, TOTAL, Row
from omnireduce.support.files.output import write_file

FORMATS = ("pdf", "svg")
METADATA: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # same rows, same files
OVER_SIZES = {"Figure10a": ("adam", "Adam"), "Figure10b": ("lamb", "LAMB")}
OVER_BATCHES = {"Figure11": "model-parallel", "Figure12": "pipeline-parallel"}


def draw(rows: Sequence[Row], results: Path) -> list[Path]:
    """Draw the figures of an experiment into `results`; return the files. Raises UsageError where a file cannot be
    written."""
    paths = []
    with mpl.rc_context({**STYLE, "pdf.fonttype": 42}):
        for name in (*OVER_SIZES, *OVER_BATCHES):
            program, title = OVER_SIZES.get(name, (OVER_BATCHES.get(name, ""),) * 2)
            figure_rows = [row for row in rows if row.program == program and row.stage == TOTAL]
            if not figure_rows:
                continue
            figure = _over_sizes(figure_rows, title) if name in OVER_SIZES else _over_batches(figure_rows, title)
            for extension in FORMATS:
                paths.append(results / f"{name}.{extension}")
                drawn = BytesIO()
                figure.savefig(drawn, format=extension, metadata=METADATA[extension])
                write_file(drawn.getvalue(), paths[-1])
    return paths


def _axes(title: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def speedups(rows: Sequence[Row]) -> dict[str, dict[tuple[str, int], float]]:
    """The speed of each schedule relative to the first one, by its name, for each case and number of elements."""
    first = rows[0].schedule
    base = {(row.case, row.elements): row.ms for row in rows if row.schedule == first}
    ratios: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        key = row.case, row.elements
        if row.ms > 0 and key in base:
            ratios.setdefault(row.schedule, {})[key] = base[key] / row.ms
    return ratios


def _over_sizes(rows: Sequence[Row], title: str) -> Figure:
    first = rows[0].schedule
    figure, axes = _axes(f"{title}, {rows[0].ranks} ranks", f"times as fast as {first}")
    for number, (schedule, points) in enumerate(speedups(rows).items()):
        ordered = sorted((elements, ratio) for (_, elements), ratio in points.items())
        label = f"{schedule}, on the shards" if schedule == ON_SHARDS else schedule
        style = "k:" if schedule == first else f"C{number}o-"
        axes.plot(*zip(*ordered, strict=True), style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("elements")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _over_batches(rows: Sequence[Row], title: str) -> Figure:
    figure, axes = _axes(f"{title}, {rows[0].ranks} ranks", "ms of a step")
    cases, names = (list(dict.fromkeys(values)) for values in ([r.case for r in rows], [r.schedule for r in rows]))
    ratios = speedups(rows)
    for number, schedule in enumerate(names):
        schedule_rows = [row for row in rows if row.schedule == schedule]
        positions = [cases.index(row.case) + (number + 0.5) * 0.8 / len(names) - 0.4 for row in schedule_rows]
        bars = axes.bar(positions, [row.ms for row in schedule_rows], 0.8 / len(names), label=schedule)
        times = [ratios.get(schedule, {}).get((row.case, row.elements)) for row in schedule_rows]
        axes.bar_label(bars, ["" if ratio is None else f"{ratio:.2f}x" for ratio in times])
    axes.set_xticks(range(len(cases)), cases)
    axes.legend()
    return figure
