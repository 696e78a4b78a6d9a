"""Draws what rows.json and testbed.json say, each figure as PNG and SVG. Needs the extra `plot`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.contest import OURS, SCAN

Rows = list[dict[str, Any]]
FLOOR = 1e-4  # where a density of zero is drawn on a logarithmic axis
DENSE = ("mpich out of place", "mpich in place", "openmpi out of place", "openmpi in place", "gloo")


def draw(folder: Path) -> list[Path]:
    """Draw all figures that the files in `folder` have rows for; return the pictures."""
    rows = _read(folder / "rows.json")
    largest = [
        row for row in rows if row["kind"] == "dense" and row["overlap"] == "random" and row["size"] == "100 MiB"
    ]
    made: list[Path] = []
    for transport in ("shm", "tcp"):
        two = [row for row in largest if row["transport"] == transport and row["ranks"] == 2]
        if len({row["density"] for row in two}) > 1:
            made += _save(_time_over_density(two, transport), folder / f"time-{transport}")
            made += _save(_speedup_over_density(two, transport), folder / f"speedup-{transport}")
        if len({row["ranks"] for row in largest if row["transport"] == transport}) > 1:
            chosen = [row for row in largest if row["transport"] == transport]
            made += _save(_over_ranks(chosen, transport), folder / f"ranks-{transport}")
    testbed = _read(folder / "testbed.json")
    if testbed:
        made += _save(_share_of_bound(testbed), folder / "bound")
    return made


def _read(path: Path) -> Rows:
    return json.loads(path.read_text()) if path.exists() else []


def _figure(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> list[Path]:
    made = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for each in made:
        figure.savefig(each, dpi=120)
    return made


def _lines(rows: Iterable[dict[str, Any]], by: str, x: str, y: str = "ms") -> dict[Any, list[tuple[float, float]]]:
    found = defaultdict(list)
    for row in rows:
        found[row[by]].append((max(row[x], FLOOR) if x == "density" else row[x], row[y]))
    return {key: sorted(points) for key, points in found.items()}


def _time_over_density(rows: Rows, transport: str) -> Any:
    figure, axes = _figure(f"100 MiB of float32, 2 ranks, {transport}", "density of blocks", "median ms")
    for label, points in _lines(rows, "entrant", "density").items():
        style = {OURS: "o-", SCAN: "k:"}.get(label, ".--")
        axes.loglog(*zip(*points, strict=True), style, label=label, linewidth=2.5 if label == OURS else 1)
    figure.legend(fontsize="small", loc="outside right upper")
    return figure


def _best_dense(rows: Rows) -> dict[float, float]:
    found: dict[float, float] = {}
    for row in rows:
        if row["entrant"] in DENSE:
            found[row["density"]] = min(row["ms"], found.get(row["density"], row["ms"]))
    return found


def _speedup_over_density(rows: Rows, transport: str) -> Any:
    figure, axes = _figure(
        f"100 MiB, 2 ranks, {transport}: against the best dense peer", "density of blocks", "speed-up"
    )
    best = _best_dense(rows)
    comparable = [row for row in rows if row["entrant"] == OURS and row["density"] in best]
    ours = sorted((row["density"], best[row["density"]] / row["ms"]) for row in comparable)
    axes.semilogx([max(density, FLOOR) for density, _ in ours], [ratio for _, ratio in ours], "o-")
    axes.axhline(1, color="grey", linewidth=1)
    return figure


def _over_ranks(rows: Rows, transport: str) -> Any:
    figure, axes = _figure(f"omnireduce, 100 MiB, {transport}", "ranks", "median ms")
    for density, points in _lines([row for row in rows if row["entrant"] == OURS], "density", "ranks").items():
        axes.plot(*zip(*points, strict=True), "o-", label=f"density {density:.3g}")
    axes.set_yscale("log")
    axes.set_xticks(sorted({row["ranks"] for row in rows}))
    axes.legend(fontsize="small")
    return figure


def _share_of_bound(rows: Rows) -> Any:
    figure, axes = _figure("Shaped links: share of the union bound", "density of blocks", "share of the bound")
    ours = [row | {"line": f"{row['layout']}, {row['ranks']} ranks"} for row in rows if row["entrant"] == OURS]
    for label, points in _lines(ours, "line", "density", "share").items():
        axes.semilogx(*zip(*points, strict=True), "o-", label=label)
    axes.set_ylim(0, 1.05)
    axes.legend(fontsize="small")
    return figure
