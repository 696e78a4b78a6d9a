"""A program as a picture: stages in layers, each below what it needs, with a frame around stages that are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnireduce.errors import ConfigError
from omnireduce.programs.expressions import Expression, Input, Tensor, Variable, formula
from omnireduce.programs.stages import Fused, FusedAllReduce, Stage, nodes_of
from omnireduce.support.extras import install
from omnireduce.support.files.output import write_file

if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Pipeline


Line = tuple[str, str]  # what is done, and its type
Names = Mapping[Expression, str]


def title(stage: Stage) -> str:
    """The name of several expressions together."""
    if isinstance(stage, Fused):
        return "fused"
    if isinstance(stage, FusedAllReduce):
        return "fused all-reduce"
    return "" if isinstance(stage, Expression) else f"overlapped in {stage.chunks} chunks"


def program_text(
    name: str, inputs: Sequence[Expression], outputs: Sequence[str], stages: Sequence[Stage], names: Names
) -> str:
    """The whole program."""
    lines: list[Line] = []
    for input_node in inputs:
        if isinstance(input_node, Tensor):
            lines.append((f"  {input_node.name}", str(input_node.type)))
        elif isinstance(input_node, Variable):
            lines.append((f"  {input_node.name}", str(input_node.type.dtype)))
    split = len(lines)
    for stage in stages:
        lines += _stage_lines(stage, names, "  ")
    width = min(max(len(text) for text, _ in lines), 78)
    texts = [f"{text:{width}}  {kind}".rstrip() for text, kind in lines]
    arguments = ", ".join(names[input_node] for input_node in inputs)
    return "\n".join([f"{name}({arguments}) -> {', '.join(outputs)}", *texts[:split], "", *texts[split:]])


def _stage_lines(stage: Stage, names: Names, margin: str) -> list[Line]:
    if isinstance(stage, Expression):
        return [_line(stage, names, margin)] if stage in names else []
    deeper = f"{margin}  "
    if isinstance(stage, Fused | FusedAllReduce):
        inner = [_line(node, names, deeper) for node in nodes_of(stage) if node in names]
    else:
        inner = [_line(stage.matmul, names, deeper), *_stage_lines(stage.reducer, names, deeper)]
    return [(f"{margin}{title(stage)} {{", ""), *inner, (f"{margin}}}", "")]


def _line(node: Expression, names: Names, margin: str) -> Line:
    return f"{margin}{names[node]} = {formula(node, names)}", str(node.type)


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
        raise ConfigError(f"a picture needs matplotlib ({error}): {install('matplotlib', 'plot')}") from None
    spots = find_spots(pipeline)
    columns, rows = [x for x, _ in spots.values()], [y for _, y in spots.values()]
    width, height = 1 + max(columns) - min(columns), 1 + max(rows) - min(rows)
    figure = Figure(figsize=(WIDE * width, HIGH * height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(min(columns) - 0.5, max(columns) + 0.5)
    axes.set_ylim(min(rows) - 0.5, max(rows) + 0.5)
    for stage in pipeline.stages:
        if not isinstance(stage, Expression):
            _draw_frame(axes, stage, spots)
    boxes = {node: _draw_box(axes, pipeline, node, spot) for node, spot in spots.items()}
    for node, spot in spots.items():
        for operand in _needed_nodes(pipeline, node):
            ends = {"patchA": boxes[operand], "patchB": boxes[node], "arrowstyle": "->", "color": "#555555"}
            axes.annotate("", xy=spot, xytext=spots[operand], arrowprops=ends, zorder=3)
    buffer = BytesIO()
    figure.savefig(buffer, format="svg")
    write_file(buffer.getvalue(), path)


def find_spots(pipeline: Pipeline) -> dict[Expression, Spot]:
    """Places of inputs and stages. A stage is one layer below the lowest of those that it needs, and beside others in
    the order of the program. Inputs stand to the left of the first stage that needs them."""
    layers: dict[Expression, int] = {}
    filled: dict[int, int] = {}
    spots: dict[Expression, Spot] = {}
    for node in pipeline.nodes:
        if node in pipeline.names and not isinstance(node, Input):
            layers[node] = 1 + max(
                (layers[operand] for operand in _needed_nodes(pipeline, node) if operand in layers), default=-1
            )
            spots[node] = float(filled.setdefault(layers[node], 0)), float(-layers[node])
            filled[layers[node]] += 1
    input_count: dict[int, int] = {}
    for input_node in pipeline.inputs:
        layer = min(layers[node] for node in layers if input_node in _needed_nodes(pipeline, node))
        input_count[layer] = input_count.get(layer, 0) + 1
        offset = 0.5 * (input_count[layer] % 2 == 0)  # so that an arrow passes beside the next box
        spots[input_node] = -0.6 * input_count[layer] - 0.2, offset - layer
    return spots


def _needed_nodes(pipeline: Pipeline, node: Expression) -> list[Expression]:
    """The named operands that `node` is made from."""
    inside = [node] if isinstance(node, Input) else pipeline.belonging_to(node)
    operands = [
        operand
        for member in inside
        for operand in member.operands
        if operand in pipeline.names and operand not in inside
    ]
    return list(dict.fromkeys(operands))


def _draw_box(axes: Any, pipeline: Pipeline, node: Expression, spot: Spot) -> Any:
    """Draw the box of a stage or input; the frame around its text."""
    name, formula_text = pipeline.names[node], formula(node, pipeline.names)
    formula_text = formula_text if len(formula_text) <= LONGEST else f"{formula_text[: LONGEST - 3]}..."
    text = f"{name}\n{node.type}" if isinstance(node, Input) else f"{name} = {formula_text}\n{node.type}"
    colour = LAYOUT_COLOURS[node.type.layout.value]
    box = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": "#555555"}
    font = {"fontsize": 8, "family": "monospace", "parse_math": False}
    return axes.text(*spot, text, ha="center", va="center", bbox=box, zorder=2, **font).get_bbox_patch()


def _draw_frame(axes: Any, stage: Stage, spots: dict[Expression, Spot]) -> None:
    """A frame around the boxes of a stage, and what they are together."""
    inside = [spots[node] for node in nodes_of(stage) if node in spots]
    left, right = min(x for x, _ in inside) - 0.46, max(x for x, _ in inside) + 0.46
    low, high = min(y for _, y in inside) - 0.42, max(y for _, y in inside) + 0.42
    from matplotlib.patches import Rectangle

    frame = Rectangle((left, low), right - left, high - low, fill=False, edgecolor="#aa3333", linestyle="--")
    axes.add_patch(frame)
    axes.text(left + 0.02, high - 0.02, title(stage), fontsize=7, color="#aa3333", va="top")
