"""Random programs, random rewrites of them, and inputs whose sums are exact.

A program grows expression by expression. What the checker refuses is left out, so all that comes is legal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from omnireduce import UsageError
from omnireduce.core.dtypes import Array
from omnireduce.programs import (
    AllGather,
    AllReduce,
    Broadcast,
    Cast,
    Dropout,
    Expression,
    Float32,
    Int32,
    Int64,
    Ite,
    Layout,
    Local,
    MatMul,
    Maximum,
    Minimum,
    Pipeline,
    Recv,
    ReduceScatter,
    ReduceTensor,
    Replicated,
    Send,
    Sliced,
    Sliced_2,
    Summation,
    Tensor,
    Update,
    Variable,
)
from omnireduce.programs.expressions import Input, Pointwise

ROWS, COLUMNS = 7, 5  # neither divides by two or three
Draw = Callable[[st.SearchStrategy[Any]], Any]


def cut(array: Array, layout: Layout, ranks: int) -> list[Array]:
    """The parts of a whole array, one for each rank."""
    axis = layout.axis(array.ndim)
    return [np.ascontiguousarray(each) for each in np.array_split(array, ranks, axis)]


def joined(parts: Sequence[Array], layout: Layout) -> Array | list[Array]:
    """Value of all ranks together: one array, or for a Local value a list with one array for each rank."""
    if layout.is_sliced:
        return np.concatenate(parts, axis=layout.axis(parts[0].ndim))
    if layout is Local:
        return list(parts)
    for part in parts[1:]:
        np.testing.assert_array_equal(part, parts[0])
    return parts[0]


def shape_of(each: Input) -> tuple[int, ...]:
    sizes = {"T": ROWS, "H": COLUMNS}
    return tuple(size if isinstance(size, int) else sizes[size.name] for size in each.type.shape)


def inputs_for(pipeline: Pipeline, seed: int, ranks: int) -> dict[str, Any]:
    """Small integers for all inputs, as `interpret` takes them. They follow from the name, not from the layout."""
    results: dict[str, Any] = {"T": ROWS, "H": COLUMNS}
    for each in pipeline.inputs:
        rng = np.random.default_rng([seed, *each.name.encode()])
        if isinstance(each, Variable):
            results[each.name] = int(rng.integers(1, 4))
        elif each.type.layout is Local:
            results[each.name] = [rng.integers(-9, 10, shape_of(each)).astype(each.type.dtype) for _ in range(ranks)]
        else:
            array = rng.integers(-9, 10, shape_of(each)).astype(each.type.dtype)
            layout = each.type.layout
            results[each.name] = cut(array, layout, ranks) if layout.is_sliced else [array.copy() for _ in range(ranks)]
    known = {size.name for node in pipeline.nodes for size in node.type.shape if isinstance(size, Variable)}
    return {name: value for name, value in results.items() if name not in ("T", "H") or name in known}


def results_of(pipeline: Pipeline, seed: int, ranks: int) -> dict[str, Array | list[Array]]:
    """The outputs as the interpreter has them, each as one array, whatever its layout."""
    result = pipeline.interpret(inputs_for(pipeline, seed, ranks), ranks)
    outputs = zip(pipeline.output_names, pipeline.outputs, strict=True)
    return {name: joined(result[name], each.type.layout) for name, each in outputs}


class _Growing:
    """Expressions so far."""

    def __init__(self, draw: Draw, dtype: Any) -> None:
        self._draw, self._dtype = draw, dtype
        rows, columns = Variable(Int32, "T"), Variable(Int32, "H")
        self.factor = Variable(dtype, "k")
        shapes = [(rows, columns), (columns, columns), (columns,)]
        self.tensors = [
            Tensor(dtype, shape, layout, f"{letter}{at}")
            for at, shape in enumerate(shapes)
            for letter, layout in (("g", Local), ("w", Replicated), ("m", Replicated), ("s", Sliced), ("c", Sliced_2))
        ]
        self.pool: list[Expression] = [self.factor, *self.tensors]

    def some(self) -> Expression:
        """An input, or rather one that was computed, also in parts where there is one."""
        computed = self.pool[1 + len(self.tensors) :]
        return self._draw(st.sampled_from(computed if self._draw(st.integers(0, 3)) else self.pool))

    def grow(self) -> None:
        """Add an expression, if the one that is drawn is legal."""
        op = self._draw(
            st.sampled_from([operation for operation in _OPERATIONS if operation[0] in ("", self._dtype.name)])
        )[1]
        try:
            self.pool.append(op(self, self.some(), self.some()))
        except UsageError:
            return


def _dropped(grown: _Growing, x: Expression, _: Expression) -> Expression:
    return Dropout(x, 0.5, seed=len(grown.pool), step=Cast(Int64, grown.factor))


_OPERATIONS: list[tuple[str, Callable[[_Growing, Expression, Expression], Expression]]] = [
    ("", lambda _, x, y: x + y),
    ("", lambda _, x, y: x - y),
    ("", lambda _, x, y: Ite(x > y, x, 3)),
    ("int64", lambda _, x, y: x * y),
    ("int64", lambda _, x, y: MatMul(x, y)),
    ("float32", lambda _, x, y: x * 0.5),
    ("float32", _dropped),
    ("", lambda _, x, y: ReduceTensor(Summation, x)),
    ("", lambda _, x, y: ReduceTensor(Maximum, x)),
    *[("", lambda _, x, y: AllReduce(Summation, x))] * 3,
    ("", lambda _, x, y: AllReduce(Minimum, x)),
    ("", lambda _, x, y: ReduceScatter(Summation, x)),
    ("", lambda _, x, y: AllGather(x)),
    ("", lambda _, x, y: Broadcast(x, 1)),
    ("", lambda _, x, y: Recv(Send(x, to=1 - (x.type.group or 0)))),
]  # fmt: skip


def _fits(tensor: Tensor, value: Expression) -> bool:
    return value.type[:3] == tensor.type[:3]


@st.composite
def programs(draw: Draw) -> Pipeline:
    """A program of some ten expressions, with some Updates. Its gradients are used, most of the time."""
    dtype = draw(st.sampled_from([Int64, Float32]))
    grown = _Growing(draw, dtype)
    grown.pool.append(AllReduce(Summation, grown.tensors[0]))
    if draw(st.booleans()):
        left, right = draw(st.sampled_from([(0, 5), (1, 5), (0, 6), (4, 8)]))  # g0 g1, w0 g1, g0 w1, c0 s1
        product = MatMul(grown.tensors[left], grown.tensors[right])
        reduction = draw(st.sampled_from([AllReduce, ReduceScatter]))
        grown.pool.append(reduction(Summation, product))
    for _ in range(draw(st.integers(4, 16 if dtype is Int64 else 8))):
        grown.grow()
    outputs: list[Expression] = []
    for tensor in draw(st.lists(st.sampled_from(grown.tensors), unique_by=id, max_size=4)):
        fitting = [each for each in grown.pool if _fits(tensor, each)]
        computed = [each for each in fitting if not isinstance(each, Input)]
        try:
            update = Update(tensor, draw(st.sampled_from(computed[-4:] or fitting)))
        except UsageError:
            continue
        outputs.append(update)
        grown.pool.append(update)
        grown.grow()
    outputs += [each for each in grown.pool[-2:] if not isinstance(each, Input) and each not in outputs]
    return Pipeline("random", inputs_of(outputs), outputs)


def inputs_of(outputs: Sequence[Expression]) -> list[Input]:
    """Inputs of the outputs, in the order in which a search finds them."""
    results: dict[Input, None] = {}
    waiting = list(outputs)
    seen = set()
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            if isinstance(each, Input):
                results[each] = None
            waiting.extend(each.operands)
    return list(results)


def _some_names(draw: Draw, pipeline: Pipeline, limit: int = 4) -> list[str]:
    names = [name for each, name in pipeline.names.items() if not isinstance(each, Input)]
    return draw(st.lists(st.sampled_from(names), min_size=1, max_size=limit, unique=True))


def _named(pipeline: Pipeline, *kinds: type) -> list[str]:
    return [name for each, name in pipeline.names.items() if isinstance(each, kinds)]


def _first(draw: Draw, pipeline: Pipeline, *kinds: type) -> str:
    """The name of a stage of these kinds, or of any one."""
    names = _named(pipeline, *kinds)
    return draw(st.sampled_from(names)) if names else next(reversed(pipeline.names.values()))


def _fused(draw: Draw, pipeline: Pipeline) -> Pipeline:
    """A stage that is element-wise, and most of the time some that need it."""
    first = _first(draw, pipeline, Pointwise, Update)
    near = [pipeline.names[each] for each in pipeline.users[pipeline[first]] if each in pipeline.names]
    others = st.lists(st.sampled_from(near), unique=True) if near else st.just([])
    return pipeline.fuse(
        list(dict.fromkeys([first, *draw(others), *(_some_names(draw, pipeline, 1) if draw(st.booleans()) else [])]))
    )


def _fused_into(draw: Draw, pipeline: Pipeline) -> Pipeline:
    ends = [_first(draw, pipeline, ReduceScatter), *_some_names(draw, pipeline, 2), _first(draw, pipeline, AllGather)]
    return pipeline.fuse_into(list(dict.fromkeys(ends)))


def _behind(pipeline: Pipeline, gather: str) -> list[str]:
    """All stages that need `gather` and are no communication."""
    results, waiting = [], [pipeline[gather]]
    while waiting:
        for each in pipeline.users[waiting.pop()]:
            if each not in results and not isinstance(each, AllReduce | ReduceScatter | Broadcast | AllGather):
                results.append(each)
                waiting.append(each)
    return [pipeline.names[result] for result in results if result in pipeline.names]


def _reordered(draw: Draw, pipeline: Pipeline) -> Pipeline:
    gather = _first(draw, pipeline, AllGather)
    behind = _behind(pipeline, gather) or [gather]
    moved = behind if draw(st.booleans()) else draw(st.lists(st.sampled_from(behind), min_size=1, unique=True))
    return pipeline.reorder(moved, gather)


REWRITES: dict[str, Callable[[Draw, Pipeline], Pipeline]] = {
    "split": lambda draw, each: each.split(_first(draw, each, AllReduce)),
    "reorder": _reordered,
    "as_slice": lambda draw, each: each.as_slice([draw(st.sampled_from(each.inputs))]),
    "fuse": _fused,
    "fuse_into": _fused_into,
    "overlap": lambda draw, each: each.overlap(
        [_first(draw, each, MatMul), _first(draw, each, AllReduce, ReduceScatter)], chunks=draw(st.integers(2, 9))
    ),
}


def rewritten(draw: Draw, pipeline: Pipeline) -> tuple[Pipeline, list[str]]:
    """The program after some rewrites that are legal, and which ones."""
    done = []
    for kind in draw(
        st.lists(st.sampled_from(["split", "reorder", "split", "reorder", *REWRITES]), min_size=4, max_size=14)
    ):
        try:
            pipeline = REWRITES[kind](draw, pipeline)
        except UsageError:
            continue
        done.append(kind)
    return pipeline, done


def own_parts(values: dict[str, Any], rank: int) -> dict[str, Any]:
    """Arguments of one rank for `run`."""
    return {name: value[rank].copy() if isinstance(value, list) else value for name, value in values.items()}
