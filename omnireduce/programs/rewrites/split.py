"""AllReduce as ReduceScatter and AllGather."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllGather, AllReduce, ReduceScatter
from omnireduce.programs.graph import rebuilt
from omnireduce.programs.rewrites.parts import called, check_single, reason

if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Handle, Pipeline


def split(pipeline: Pipeline, stage: Handle) -> Pipeline:
    """Do the AllReduce `stage` as an AllGather, which has its name, of a ReduceScatter, which has its name and `_rs`.

    Raises UsageError for another stage, and for one of a number: it has no dimension to cut.
    """
    node = pipeline[stage]
    if not isinstance(node, AllReduce):
        raise UsageError(f"cannot split {called(pipeline, node)}: expected an AllReduce")
    check_single(pipeline, [node], "split")
    try:
        scattered = ReduceScatter(node.reduction, node.operands[0]).with_operands(node.operands, node.place)
    except UsageError as error:
        raise UsageError(f"cannot split {called(pipeline, node)}: {reason(error)}") from None
    gathered = AllGather(scattered).with_operands([scattered], node.place)
    changes = rebuilt(pipeline.nodes, {node: gathered})
    return pipeline.changed(changes, names={scattered: f"{pipeline.names[node]}_rs"})
