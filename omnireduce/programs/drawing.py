"""A program as a picture: stages in layers, each below what it needs, with a frame around stages that are one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnireduce.errors import ConfigError, UsageError
from omnireduce.programs.expressions import Constant, Expression, Input, formula
from omnireduce.programs.stages import Stage, nodes_of
from omnireduce.programs.text import title

if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Pipeline

LAYOUT_COLOURS = {"Local": "#f6d5c9", "Replicated": "#d9e6f5", "Sliced": "#d8ecd2", "Sliced_2": "#ece3c2"}
LONGEST = 46  # characters of a formula
WIDE, HIGH = 4.0, 0.9  # inches from one box to the next one
Spot = tuple[float, float]


def draw(pipeline: Pipeline, path: Path) -> None:
    """Write the picture to `path`, as SVG. Raises UsageError where it cannot be written, ConfigError without
    matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"a picture needs matplotlib: pip install 'omnireduce[plot]' ({error})") from None
    spots = places(pipeline)
    columns = 1 + max(x for x, _ in spots.values())
    rows = 1 + max(-y for _, y in spots.values())
    figure = Figure(figsize=(WIDE * columns, HIGH * rows))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(0.5 - rows, 0.5)
    for stage in pipeline.stages:
        if not isinstance(stage, Expression):
            _frame(axes, stage, spots)
    for node, spot in spots.items():
        _box(axes, pipeline, node, spot)
        for each in _needed(pipeline, node):
            x, y = spots[each]
            arrow = {"arrowstyle": "->", "color": "#555555", "shrinkA": 16, "shrinkB": 16}
            axes.annotate("", xy=spot, xytext=(x, y), arrowprops=arrow, zorder=1)
    try:
        figure.savefig(path, format="svg")
    except OSError as error:
        raise UsageError(f"{path}: the picture cannot be written: {error.strerror}") from None


def places(pipeline: Pipeline) -> dict[Expression, Spot]:
    """Where inputs and stages stand: one layer below the lowest of those that they need, and beside one another in the
    order of the program."""
    shown = [each for each in pipeline.nodes if each in pipeline.names and not isinstance(each, Constant)]
    shown.sort(key=lambda each: not isinstance(each, Input))
    layers: dict[Expression, int] = {}
    filled: dict[int, int] = {}
    found: dict[Expression, Spot] = {}
    for node in shown:
        needed = _needed(pipeline, node)
        layers[node] = 1 + max((layers[each] for each in needed), default=-1)
        at = filled.setdefault(layers[node], 0)
        filled[layers[node]] += 1
        found[node] = float(at), float(-layers[node])
    return found


def _needed(pipeline: Pipeline, node: Expression) -> list[Expression]:
    """What has a name among the things that `node` is made from."""
    inside = [node] if isinstance(node, Input) else pipeline.belonging_to(node)
    found = [each for own in inside for each in own.operands if each in pipeline.names and each not in inside]
    return list(dict.fromkeys(found))


def _box(axes: Any, pipeline: Pipeline, node: Expression, spot: Spot) -> None:
    name, what = pipeline.names[node], formula(node, pipeline.names)
    what = what if len(what) <= LONGEST else f"{what[: LONGEST - 3]}..."
    text = f"{name}\n{node.type}" if isinstance(node, Input) else f"{name} = {what}\n{node.type}"
    colour = LAYOUT_COLOURS[node.type.layout.value]
    box = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": "#555555"}
    axes.text(
        *spot, text, ha="center", va="center", fontsize=8, family="monospace", bbox=box, zorder=2, parse_math=False
    )


def _frame(axes: Any, stage: Stage, spots: dict[Expression, Spot]) -> None:
    """A frame around the boxes of a stage, and what they are together."""
    inside = [spots[each] for each in nodes_of(stage) if each in spots]
    left, right = min(x for x, _ in inside) - 0.46, max(x for x, _ in inside) + 0.46
    low, high = min(y for _, y in inside) - 0.42, max(y for _, y in inside) + 0.42
    from matplotlib.patches import Rectangle

    frame = Rectangle((left, low), right - left, high - low, fill=False, edgecolor="#aa3333", linestyle="--")
    axes.add_patch(frame)
    axes.text(left + 0.02, high - 0.02, title(stage), fontsize=7, color="#aa3333", va="top")
