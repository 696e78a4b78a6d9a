"""A program as text: one line for each stage, with its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omnireduce.programs.expressions import Expression, Tensor, Variable, formula
from omnireduce.programs.stages import Fused, FusedAllReduce, Stage, nodes_of

Line = tuple[str, str]  # what is done, and its type
Names = Mapping[Expression, str]


def title(stage: Stage) -> str:
    """What several expressions together are."""
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
    width = min(max(len(what) for what, _ in lines), 78)
    texts = [f"{what:{width}}  {kind}".rstrip() for what, kind in lines]
    given = ", ".join(names[input_node] for input_node in inputs)
    return "\n".join([f"{name}({given}) -> {', '.join(outputs)}", *texts[:split], "", *texts[split:]])


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
