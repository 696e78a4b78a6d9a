"""Placement of values on ranks: the elements that a rank has, and what it computes from its parts of the operands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError, a_type
from omnireduce.programs.expressions import (
    Dimension,
    Expression,
    Input,
    Pointwise,
    Region,
    Tensor,
    Type,
    Variable,
    number_array,
)
from omnireduce.programs.layouts import Layout, bounds
from omnireduce.programs.whole_tensor_operations import MatMul

Sizes = Mapping[Variable, int]


class RankPlacement(NamedTuple):
    """One rank of `ranks` in its group, and the sizes of this run."""

    rank: int
    ranks: int
    sizes: Sizes

    def shape(self, shape: Sequence[Dimension]) -> tuple[int, ...]:
        """The sizes of these dimensions."""
        return tuple(dimension if isinstance(dimension, int) else self.sizes[dimension] for dimension in shape)

    def region(self, kind: Type) -> tuple[Region, tuple[int, ...]]:
        """The part of a value of this type that this rank has: its region and its shape."""
        whole = self.shape(kind.shape)
        starts, shape = [0] * len(whole), list(whole)
        if kind.layout.is_sliced:
            axis = kind.layout.axis(len(whole))
            start, stop = bounds(whole[axis], self.rank, self.ranks)
            starts[axis], shape[axis] = start, stop - start
        stream = self.rank + 1 if kind.layout is Layout.LOCAL else 0
        return Region(whole, tuple(starts), stream), tuple(shape)

    def own_shape(self, kind: Type) -> tuple[int, ...]:
        """The shape of this rank's part of a value of this type."""
        return self.region(kind)[1]

    def fitting(self, array: Array, operand: Type, result: Type) -> Array:
        """The elements of an operand that belong to this rank's part of the result."""
        return array if axis_to_cut(operand, result) is None else self.part(array, result.layout)

    def part(self, array: Array, layout: Layout) -> Array:
        """This rank's part of a whole array."""
        axis = layout.axis(array.ndim)
        start, stop = bounds(array.shape[axis], self.rank, self.ranks)
        return array[start:stop] if axis == 0 else array[..., start:stop]


def axis_to_cut(operand: Type, result: Type) -> int | None:
    """The dimension along which a Replicated operand must be cut, if the result is cut. None if it is needed as it is:
    it is repeated along the dimension of the cut, or it is cut already."""
    if operand.layout is not Layout.REPLICATED or not result.layout.is_sliced or not operand.shape:
        return None
    if result.layout is Layout.SLICED and len(operand.shape) < len(result.shape):
        return None
    axis = result.layout.axis(len(operand.shape))
    return axis if operand.shape[axis] == result.shape[result.layout.axis(len(result.shape))] else None


def compute(node: Expression, arrays: Sequence[Array], placement: RankPlacement) -> Array:
    """This rank's part of the result of a Pointwise or MatMul, from its parts of the operands."""
    if isinstance(node, MatMul):
        return node.compute(arrays)
    assert isinstance(node, Pointwise)
    fitting = [
        placement.fitting(array, operand.type, node.type) for array, operand in zip(arrays, node.operands, strict=True)
    ]
    region, _ = placement.region(node.type)
    with np.errstate(all="ignore"):  # infinities and NaN are values, as they are in what is reduced
        return np.asarray(node.compute(fitting, region), node.type.dtype)


def sizes_in(nodes: Iterable[Expression]) -> list[Variable]:
    """The Variables that are sizes of dimensions of `nodes`."""
    return list(dict.fromkeys(size for node in nodes for size in node.type.shape if isinstance(size, Variable)))


def check_names(values: object, known: Collection[str], taker: str) -> None:
    """Raises UsageError unless `values` is a dict with `known` names. `taker`: who gets it, for the message."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{taker} got values as {a_type(values)}; expected a dict, by name")
    for name in values:
        if name not in known:
            raise UsageError(f"{taker} takes no {name!r}; expected {', '.join(sorted(known))}")


def bound_sizes(sizes: Sequence[Variable], inputs: Sequence[Expression], values: Mapping[str, Any]) -> Sizes:
    """The sizes of dimensions: those given by name, and those that follow from whole arrays of `inputs`. Raises
    UsageError if a dimension has two different sizes, or none."""
    bound: dict[Variable, int] = {}
    origins: dict[Variable, str] = {}
    tensors = [input_node for input_node in inputs if isinstance(input_node, Tensor)]
    for size in sizes:
        if size.name in values:
            bound[size], origins[size] = size_value(values[size.name], size.name), "as given"
    for tensor in tensors:
        array = values.get(tensor.name)
        if not isinstance(array, np.ndarray) or array.ndim != len(tensor.type.shape):
            continue
        for axis, dimension in enumerate(tensor.type.shape):
            is_cut = tensor.type.layout.is_sliced and tensor.type.layout.axis(array.ndim) == axis
            if isinstance(dimension, Variable) and not is_cut:
                length = array.shape[axis]
                if bound.setdefault(dimension, length) != length:
                    other = f"{bound[dimension]} {origins[dimension]}"
                    raise UsageError(f"{dimension.name} is {length} in {tensor.name}, and {other}: expected one size")
                origins.setdefault(dimension, f"in {tensor.name}")
    for size in sizes:
        if size not in bound:
            raise UsageError(f"the size {size.name} follows from no whole array: give it as '{size.name}'")
    return bound


def size_value(value: object, name: str) -> int:
    """`value` as the size of a dimension. Raises UsageError unless it is an int from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise UsageError(f"{name} is {value!r}: expected a size, an int from 1 on")
    return int(value)


def input_value(input_node: Input, values: Mapping[str, Any], placement: RankPlacement) -> Array:
    """A rank's value for an input, as an array. A size that is used as a number need not be given. Raises UsageError
    for a value that is missing or does not fit."""
    name = input_node.name
    value = values.get(name, placement.sizes.get(input_node) if isinstance(input_node, Variable) else None)
    if value is None:
        raise UsageError(f"no value for {name}: expected {input_node.type}")
    if isinstance(input_node, Variable):
        return number_value(value, input_node.type, name)
    if not isinstance(value, np.ndarray):
        raise UsageError(f"{name} is {a_type(value)}; expected a numpy.ndarray, {input_node.type}")
    if value.dtype != input_node.type.dtype:
        raise UsageError(f"{name} is an array of {value.dtype}; expected {input_node.type}")
    shape = placement.own_shape(input_node.type)
    if value.shape != shape:
        part = f", part {placement.rank} of {placement.ranks} of {list(placement.shape(input_node.type.shape))}"
        raise UsageError(
            f"{name} has the shape {list(value.shape)}; expected {list(shape)}"
            f"{part if input_node.type.layout.is_sliced else ''}: {input_node.type}"
        )
    return value


def number_value(value: Any, kind: Type, name: str) -> Array:
    """The value of a Variable, as an array without dimensions. Raises UsageError if it does not fit."""
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    expected = "an integer" if kind.dtype.kind in "iu" else "a number"
    fits = integer or (kind.dtype.kind not in "iub" and isinstance(value, float | np.floating))
    if kind.dtype.kind == "b":
        fits, expected = isinstance(value, bool | np.bool_), "True or False"
    if not fits:
        raise UsageError(f"{name} is {value!r}, {a_type(value)}; expected {expected}: {kind.dtype}")
    try:
        return number_array(value, kind.dtype)
    except OverflowError:
        raise UsageError(f"{name} is {value}, which is out of the range of {kind.dtype}") from None
