"""Several element-wise expressions in one pass over memory, piece by piece.

A piece is so small that what is computed of it stays in the processor's cache until it is used. Only what is needed
outside is stored whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from omnireduce.dtypes import Array
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
    shaped = [each for each in stage.nodes if each.type.shape]
    for node in stage.nodes:
        if not node.type.shape:
            run.evaluate(node)  # once, not for each piece
    kind = kind_of(stage)
    region, shape = run.placement.region(kind)
    wanted = [each for each in shaped if _is_needed_outside(each, stage, run)]
    results = {each: run.room(each, shape) for each in wanted}
    outside = _operands(shaped, kind, run)
    pieces = _pieces(shape, max(each.type.dtype.itemsize for each in shaped))
    scratch = {each: np.empty((pieces[0].rows if pieces else 0, *shape[1:]), each.type.dtype) for each in shaped}
    for piece in pieces:
        starts = (region.starts[0] + piece.start, *region.starts[1:])
        rooms = {
            each: results[each][piece.start : piece.stop] if each in results else scratch[each][: piece.rows]
            for each in shaped
        }
        _evaluate(shaped, outside, piece, region._replace(starts=starts), rooms)
    for each, result in results.items():
        is_update = isinstance(each, Update)
        run.put(each, run.placement.fitting(result, each.operands[1].type, each.type) if is_update else result)


def kind_of(stage: Fused) -> Type:
    """The type of what the pass computes. What is Replicated among Sliced expressions is computed in parts, too."""
    types = [each.type for each in stage.nodes if each.type.shape and isinstance(each, Pointwise)]
    return next((each for each in types if each.layout is not Layout.REPLICATED), types[0])


def _is_needed_outside(node: Expression, stage: Fused, run: Execution) -> bool:
    users = run.pipeline.users[node]
    return isinstance(node, Update) or node in run.pipeline.outputs or any(each not in stage.nodes for each in users)


def _operands(shaped: Collection[Expression], kind: Type, run: Execution) -> Mapping[Expression, tuple[Array, bool]]:
    """What comes from outside: this rank's part, and whether it has rows, of which each piece takes some."""
    found: dict[Expression, tuple[Array, bool]] = {}
    for node in shaped:
        operands = node.operands[1:] if isinstance(node, Update) else node.operands
        for each in operands:
            if each not in shaped and each not in found:
                has_rows = len(each.type.shape) == len(kind.shape) and each.type.shape[0] == kind.shape[0]
                found[each] = run.placement.fitting(run.value(each), each.type, kind), has_rows
    return found


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
    found: dict[Expression, Array] = dict(rooms)
    for each, (array, has_rows) in outside.items():
        found[each] = array[piece.start : piece.stop] if has_rows else array
    with np.errstate(all="ignore"):  # as in `compute`
        for node in shaped:
            room = rooms[node]
            if isinstance(node, Update):
                room[...] = found[node.value]
            elif isinstance(node, Pointwise):
                made = node.compute([found[each] for each in node.operands], region, room)
                if made is not room:
                    room[...] = made
