"""Plots of rows.json, testbed.json, relays.json and training.json. Needs the extra `plot`.

The same rows give the same files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from benchmarks.contest.cases import TRANSPORTS
from benchmarks.contest.contest import BOUND, OURS, SCAN
from benchmarks.contest.outcomes import Row
from omnireduce.support.files.output import make_folder

Points = list[tuple[float, float]]
DENSE = ("mpich out of place", "mpich in place", "openmpi out of place", "openmpi in place", "gloo")
STYLES = {OURS: "C0o-", SCAN: "k:", BOUND: "k*", "AGsparse": "C6.--"} | {
    label: f"C{number}.--" for number, label in enumerate(DENSE, 1)
}
ZERO = 1e-4  # where a density of zero is drawn on a logarithmic axis
STYLE: Any = {"svg.hashsalt": OURS, "svg.fonttype": "none", "savefig.dpi": 100, "font.size": 9}
SAME = {"svg": {"Date": None}, "png": {"Software": None}}  # else a file tells when it was made, and by which version


def draw(results: Path, out: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draw into `out` all figures for which the files in `results` have rows; return the pictures."""
    make_folder(out)
    pictures = []
    with mpl.rc_context(STYLE):
        row_lists = [_read(results / f"{name}.json") for name in ("rows", "testbed", "relays", "training")]
        for name, figure in _figures(*row_lists):
            for extension in formats:
                pictures.append(out / f"{name}.{extension}")
                figure.savefig(pictures[-1], metadata=SAME[extension])
    return pictures


def _read(path: Path) -> list[Row]:
    return json.loads(path.read_text()) if path.exists() else []


def _figures(
    rows: list[Row], testbed: list[Row], relays: list[Row], training: list[Row]
) -> Iterator[tuple[str, Figure]]:
    large = [
        row for row in rows if (row["kind"], row.get("overlap"), row["size"]) == ("dense", "random", "100 MiB")
    ]  # fmt: skip
    for transport in TRANSPORTS:
        transport_rows = [row for row in large if row["transport"] == transport]
        two_rank_rows = [row for row in transport_rows if row["ranks"] == 2]
        if len({row["density"] for row in two_rank_rows}) > 1:
            yield f"time-{transport}", _time_over_density(two_rank_rows, transport)
        if len({row["ranks"] for row in transport_rows}) > 1:
            yield f"ranks-{transport}", _time_over_ranks(transport_rows, transport)
    if _best_dense(large):
        yield "speedup", _speedup_over_density(large)
    if testbed:
        yield "bound", _share_of_bound(testbed)
    if relays:
        yield "relays", _with_relays(relays)
    if training:
        yield "training", _steps_per_second(training)


def _axes(title: str, x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _log_time(axes: Any) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _over_density(title: str, y: str) -> tuple[Figure, Any]:
    figure, axes = _axes(title, "density of blocks", y)
    axes.set_xscale("log")
    axes.set_xticks([1, 0.1, 0.01, 0.001, ZERO], ["1", "0.1", "0.01", "0.001", "0"])
    return figure, axes


def _curves(rows: Iterable[Row], key: str, x: str, y: str) -> dict[Any, Points]:
    """The points of each value of `key`, in order."""
    curves = defaultdict(list)
    for row in rows:
        curves[row[key]].append((max(row[x], ZERO) if x == "density" else row[x], row[y]))
    return {name: sorted(points) for name, points in curves.items()}


def _time_over_density(rows: list[Row], transport: str) -> Figure:
    figure, axes = _over_density(f"100 MiB of float32, 2 ranks, {transport}", "median ms")
    _log_time(axes)
    for label, points in _curves(rows, "entrant", "density", "ms").items():
        axes.plot(*zip(*points, strict=True), STYLES[label], label=label, linewidth=2.5 if label == OURS else 1)
    figure.legend(loc="outside right upper")
    return figure


Panel = tuple[str, int, float]  # transport, ranks, density


def _panel(row: Row) -> Panel:
    return row["transport"], row["ranks"], row["density"]


def _best_dense(rows: Iterable[Row]) -> dict[Panel, float]:
    """The milliseconds of the fastest of the others that move everything."""
    fastest: dict[Panel, float] = {}
    for row in rows:
        if row["entrant"] in DENSE:
            fastest[_panel(row)] = min(row["ms"], fastest.get(_panel(row), row["ms"]))
    return fastest


def _speedup_over_density(rows: list[Row]) -> Figure:
    figure, axes = _over_density("100 MiB of float32 against the best dense peer", "times as fast")
    best = _best_dense(rows)
    ours = [
        row | {"speedup": best[_panel(row)] / row["ms"], "line": f"{row['transport']}, {row['ranks']} ranks"}
        for row in rows
        if row["entrant"] == OURS and _panel(row) in best
    ]
    for label, points in _curves(ours, "line", "density", "speedup").items():
        axes.plot(*zip(*points, strict=True), "o-", label=label)
    axes.axhline(1, color="grey", linewidth=1)
    axes.legend()
    return figure


def _time_over_ranks(rows: list[Row], transport: str) -> Figure:
    figure, axes = _axes(f"100 MiB of float32, {transport}, on the same cores", "ranks", "median ms")
    _log_time(axes)
    ours = [row for row in rows if row["entrant"] == OURS]
    for density, points in sorted(_curves(ours, "density", "ranks", "ms").items(), reverse=True):
        if len(points) > 1:
            axes.plot(*zip(*points, strict=True), "o-", label=f"density {density:.1g}")
    peers = sorted((ranks, ms) for (_, ranks, density), ms in _best_dense(rows).items() if density == 1)
    if peers:
        axes.plot(*zip(*peers, strict=True), "k.:", label="best dense peer")
    axes.set_xticks(sorted({row["ranks"] for row in rows}))
    figure.legend(loc="outside right upper")
    return figure


def _share_of_bound(rows: list[Row]) -> Figure:
    figure, axes = _over_density("100 MiB between hosts with shaped links", "share of what the links allow")
    ours = [
        row | {"line": f"{row['layout']}, {row['ranks']} ranks, {row['rate']}"}
        for row in rows
        if row["entrant"] == OURS
    ]
    for label, points in _curves(ours, "line", "density", "share_of_least").items():
        axes.plot(*zip(*points, strict=True), "o-", label=label)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xlim(left=0.007)
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _bars(axes: Any, label: str, values: Sequence[tuple[int, float]], number: int, bar_count: int) -> list[float]:
    """One bar for each (group, value): the bar `number` of the `bar_count` that each group has. Return the positions of
    the bars."""
    positions = [group + (number + 0.5) * 0.8 / bar_count - 0.4 for group, _ in values]
    axes.bar(positions, [value for _, value in values], 0.8 / bar_count, label=label)
    return positions


def _with_relays(rows: list[Row]) -> Figure:
    """Bars of flat and with relays for each density, and what the racks' links allow."""
    densities = sorted({row["density"] for row in rows}, reverse=True)
    figure, axes = _axes(f"{rows[0]['size']} on two racks, whose links carry {rows[0]['rate']}", "density", "median ms")
    entrants = list(dict.fromkeys(row["entrant"] for row in rows))
    for number, entrant in enumerate(entrants):
        entrant_rows = [row for row in rows if row["entrant"] == entrant]
        positions = _bars(
            axes, entrant, [(densities.index(row["density"]), row["ms"]) for row in entrant_rows], number, len(entrants)
        )
        label = "the link alone" if number == 0 else None
        axes.plot(positions, [row["bound_ms"] for row in entrant_rows], "k*", label=label)
    axes.set_xticks(range(len(densities)), [f"{density:g}" for density in densities])
    axes.legend()
    return figure


def _place_label(row: Row) -> str:
    return f"{row['ranks']} ranks, {row['links']}"


def _steps_per_second(rows: list[Row]) -> Figure:
    """A panel for each model, with a group of bars for each number of ranks and place."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(7, 2.6 * len(models)), layout="constrained")
    for panel, model in zip(figure.subplots(len(models), squeeze=False)[:, 0], models, strict=True):
        model_rows = [row for row in rows if row["model"] == model]
        labels = list(dict.fromkeys(_place_label(row) for row in model_rows))
        entrants = list(dict.fromkeys(row["entrant"] for row in model_rows))
        for number, entrant in enumerate(entrants):
            steps_of_label = {_place_label(row): row["steps_per_s"] for row in model_rows if row["entrant"] == entrant}
            _bars(
                panel,
                entrant,
                [(labels.index(label), value) for label, value in steps_of_label.items()],
                number,
                len(entrants),
            )
        rates = [row["steps_per_s"] for row in model_rows]
        if max(rates) > 10 * min(rates):
            panel.set(yscale="log", ylim=(min(rates) / 2, 4 * max(rates)))
            panel.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=True))
        else:
            panel.set(ylim=(0, 1.25 * max(rates)))
        panel.set(title=model, ylabel="steps per second")
        panel.set_xticks(range(len(labels)), labels)
        panel.grid(axis="y", alpha=0.3)
        panel.legend(loc="upper right", ncols=len(entrants))
    return figure
