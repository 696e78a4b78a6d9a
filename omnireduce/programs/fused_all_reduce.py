"""The fused AllReduce, run by its definition. A lowering to something faster replaces this function."""

from __future__ import annotations

from omnireduce.dtypes import Array
from omnireduce.programs.execution import Execution
from omnireduce.programs.stages import FusedAllReduce


def run_fused_all_reduce(stage: FusedAllReduce, run: Execution, reduced: Array | None = None) -> None:
    """ReduceScatter, compute on the parts, AllGather. All results become values of `run`.

    `reduced`: this rank's part of the sum, if that is known already.
    """
    for node in stage.nodes:
        if node is stage.reduce_scatter and reduced is not None:
            run.put(node, reduced)
        else:
            run.evaluate(node)
