"""A MatMul in chunks of rows: the service reduces one while the next one is computed.

A chunk is reduced in place in the array of the whole product, so nothing is copied. The part of a ReduceScatter is then
cut out of that: over this service a ReduceScatter moves as much as an AllReduce.
"""

from __future__ import annotations

from omnireduce.programs.execution import Execution
from omnireduce.programs.fused_all_reduce import run_fused_all_reduce
from omnireduce.programs.layouts import bounds
from omnireduce.programs.stages import FusedAllReduce, Overlapped


def run_overlapped(stage: Overlapped, run: Execution) -> None:
    """Evaluate the product and what reduces it, chunk by chunk."""
    matmul, reduction = stage.matmul, stage.reduction
    if not run.is_here(matmul):
        return
    left, right = (run.value(operand) for operand in matmul.operands)
    product = run.room(reduction, (*left.shape[:-1], right.shape[-1]))
    handles = []
    for chunk in range(stage.chunks):
        start, stop = bounds(len(left), chunk, stage.chunks)
        if start == stop:
            continue
        rows = product[start:stop]
        with run.shown(matmul, "MATMUL"):
            matmul.compute([left[start:stop], right], out=rows)
        handles.append(run.ranks.allreduce_async(rows, reduction.reduction, f"{run.name(reduction)}.chunk{chunk}"))
    for handle in handles:
        handle.wait()
    if isinstance(stage.reducer, FusedAllReduce):
        run_fused_all_reduce(stage.reducer, run, run.placement.part(product, reduction.type.layout))
    else:
        is_part = reduction.type.layout.is_sliced
        run.put(reduction, run.placement.part(product, reduction.type.layout) if is_part else product)
