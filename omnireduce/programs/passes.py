"""Several element-wise expressions in one pass over memory, piece by piece.

A piece is so small that what is computed of it stays in the processor's cache until it is used. Only what is needed
outside is stored whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.programs.execution import Execution
from omnireduce.programs.expressions import Expression, Region, Type
from omnireduce.programs.layouts import Layout
from omnireduce.programs.operations import Update
from omnireduce.programs.pointwise import Pointwise
from omnireduce.programs.stages import Fused

PIECE_BYTES = 1 << 18  # of one operand: several of them fit into a second-level cache


class _Piece(NamedTuple):
    """Rows of the first dimension."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def run_fused(stage: Fused, run: Execution) -> None:
    """Evaluate the expressions of `stage`, and keep those that others need."""
    shaped = [node for node in stage.nodes if node.type.shape]
    for node in stage.nodes:
        if not node.type.shape:
            run.evaluate(node)  # once, not for each piece
    kind = kind_of(stage)
    region, shape = run.placement.region(kind)
    wanted = [node for node in shaped if _is_needed_outside(node, stage, run)]
    results = {node: run.room(node, shape) for node in wanted}
    outside = _operands(shaped, kind, run)
    pieces = _pieces(shape, max(node.type.dtype.itemsize for node in shaped))
    scratch = {node: np.empty((pieces[0].rows if pieces else 0, *shape[1:]), node.type.dtype) for node in shaped}
    for piece in pieces:
        starts = (region.starts[0] + piece.start, *region.starts[1:])
        rooms = {
            node: results[node][piece.start : piece.stop] if node in results else scratch[node][: piece.rows]
            for node in shaped
        }
        _evaluate(shaped, outside, piece, region._replace(starts=starts), rooms)
    for output, result in results.items():
        is_update = isinstance(output, Update)
        run.put(output, run.placement.fitting(result, output.operands[1].type, output.type) if is_update else result)


def kind_of(stage: Fused) -> Type:
    """The type of what the pass computes. What is Replicated among Sliced expressions is computed in parts, too."""
    types = [node.type for node in stage.nodes if node.type.shape and isinstance(node, Pointwise)]
    return next((kind for kind in types if kind.layout is not Layout.REPLICATED), types[0])


def _is_needed_outside(node: Expression, stage: Fused, run: Execution) -> bool:
    users = run.pipeline.users[node]
    return isinstance(node, Update) or node in run.pipeline.outputs or any(user not in stage.nodes for user in users)


def _operands(shaped: Collection[Expression], kind: Type, run: Execution) -> Mapping[Expression, tuple[Array, bool]]:
    """What comes from outside: this rank's part, and whether it has rows, of which each piece takes some."""
    outside: dict[Expression, tuple[Array, bool]] = {}
    for node in shaped:
        operands = node.operands[1:] if isinstance(node, Update) else node.operands
        for operand in operands:
            if operand not in shaped and operand not in outside:
                has_rows = len(operand.type.shape) == len(kind.shape) and operand.type.shape[0] == kind.shape[0]
                outside[operand] = run.placement.fitting(run.value(operand), operand.type, kind), has_rows
    return outside


def _pieces(shape: tuple[int, ...], itemsize: int) -> list[_Piece]:
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * itemsize
    rows = max(1, PIECE_BYTES // max(row_bytes, 1))
    return [_Piece(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]


def _evaluate(
    shaped: Collection[Expression],
    outside: Mapping[Expression, tuple[Array, bool]],
    piece: _Piece,
    region: Region,
    rooms: Mapping[Expression, Array],
) -> None:
    """One piece of each expression, in its room."""
    arrays: dict[Expression, Array] = dict(rooms)
    for operand, (array, has_rows) in outside.items():
        arrays[operand] = array[piece.start : piece.stop] if has_rows else array
    with np.errstate(all="ignore"):  # as in `compute`
        for node in shaped:
            room = rooms[node]
            if isinstance(node, Update):
                room[...] = arrays[node.value]
            elif isinstance(node, Pointwise):
                made = node.compute([arrays[operand] for operand in node.operands], region, room)
                if made is not room:
                    room[...] = made
