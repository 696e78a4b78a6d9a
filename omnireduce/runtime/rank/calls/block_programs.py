"""Calls whose sums go through a block program on the shards."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnireduce.core.block_program import BlockProgram
from omnireduce.core.descriptor import describe
from omnireduce.core.dtypes import Array, element_type
from omnireduce.errors import UsageError, a_type
from omnireduce.protocol.collective.block_programs import ProgrammedRows, ProgrammedTensor, Totals
from omnireduce.runtime.rank.calls.arguments import (
    check_array,
    check_name,
    check_op,
    check_rows,
    combine_duplicates,
    flat_view,
    whole_number,
)
from omnireduce.runtime.rank.calls.single import Call, CallContext, once

FLOAT = element_type(np.float32)


class Fused(NamedTuple):
    """Outcome of a fused all-reduce: the array with the results, and the totals of the program, float64."""

    out: NDArray[np.float32]
    totals: NDArray[np.float64]


class FusedRows(NamedTuple):
    """Outcome of a fused all-reduce of rows: their numbers, int64 (m,), ascending; the results, (m, row length); the
    totals of the program, float64."""

    indices: NDArray[np.int64]
    rows: NDArray[np.float32]
    totals: NDArray[np.float64]


def fused_reduction(
    context: CallContext, x: Array | None, program: BlockProgram,
    *, out: Array, op: str, name: str, block_size: int | None, wanted: bool,
) -> Call[Fused]:  # fmt: skip
    """A call that sums `x`, runs `program` on the sum, and puts the results into `out`."""
    _check_program(context, program)
    target = flat_view(check_float(out, "out"), "out", writable=wanted)
    source = None if x is None else flat_view(check_float(x, "x"), "x", writable=False)
    if source is not None and x is not None and x.shape != out.shape:
        raise UsageError(f"out has the shape {list(out.shape)}, x has {list(x.shape)}: expected the same")
    if source is not None and np.may_share_memory(source, target):
        raise UsageError("out overlaps x; a program needs two arrays")
    descriptor = describe(
        "allreduce", check_name(name, context.owner), FLOAT.name, out.shape, check_op(op),
        context.block_size if block_size is None else whole_number(block_size, "block_size"), program=program,
    )  # fmt: skip
    totals, layout = Totals(program.totals), context.layout(descriptor)
    results = 0 if not program.returns else layout.blocks if program.every_block else None
    operand = ProgrammedTensor(source, target, layout, FLOAT.zero_mask, totals, drops=not wanted, results=results)
    reads = () if source is None else (source,)
    return Call(descriptor, operand, once(lambda: Fused(out, totals.sums)), reads, (target,) if wanted else ())


def fused_rows(
    context: CallContext, indices: Array, values: Array, program: BlockProgram,
    *, n_rows: int, out: Array | None, op: str, name: str, wanted: bool,
) -> Call[FusedRows]:  # fmt: skip
    """A call that adds rows of a tall matrix by number, and runs `program` on the sums."""
    _check_program(context, program)
    shape = check_rows(indices, check_float(values, "values"), n_rows), values.shape[1]
    target = () if out is None else (flat_view(check_float(out, "out"), "out", writable=True),)
    if out is not None and out.shape != shape:
        raise UsageError(f"out has the shape {list(out.shape)}; expected {list(shape)}")
    descriptor = describe(
        "allreduce_rows", check_name(name, context.owner), FLOAT.name, shape, check_op(op), program=program
    )
    numbers, row_values = combine_duplicates(indices.astype(np.int64), np.ascontiguousarray(values), FLOAT)
    totals, layout = Totals(program.totals), context.layout(descriptor)
    operand = context.with_pool(
        lambda pool: ProgrammedRows(numbers, row_values, layout, pool.take, totals, out=out, drops=not wanted)
    )
    result = once(lambda: FusedRows(*operand.result, totals.sums))
    return Call(descriptor, operand, result, reads=(indices, values), writes=target)


def check_float(array: Array, name: str) -> Array:
    """The array itself. Raises UsageError for anything but an array of float32."""
    checked = check_array(array, name)
    if checked.dtype != np.float32:
        raise UsageError(f"{name} is an array of {checked.dtype}; block programs work on float32")
    return checked


def _check_program(context: CallContext, program: object) -> None:
    if not isinstance(program, BlockProgram):
        raise UsageError(f"program is {a_type(program)}; expected a BlockProgram")
    if context.in_memory:
        raise UsageError(
            "ranks of this communicator exchange in memory, where no program runs; make one with "
            "create_group(name=..., state_bytes=...), or set protocol.state_bytes"
        )
