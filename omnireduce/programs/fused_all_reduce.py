"""How a fused AllReduce is done: by its definition. What lowers it to something else replaces this function."""

from __future__ import annotations

from omnireduce.dtypes import Array
from omnireduce.programs.execution import Execution
from omnireduce.programs.stages import FusedAllReduce


def run_fused_all_reduce(stage: FusedAllReduce, run: Execution, reduced: Array | None = None) -> None:
    """ReduceScatter, compute on the parts, AllGather; all results are then values of `run`.

    `reduced`: this rank's part of the sum, where that is known already.
    """
    for node in stage.nodes:
        if node is stage.reduce_scatter and reduced is not None:
            run.put(node, reduced)
        else:
            run.evaluate(node)
