"""Operations of torch, and how the service does each of them with each element type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from omnireduce.core.descriptor import Op
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.support.rounding import integer_mean
from omnireduce.torch.tensors import TORCH_TYPES, type_name

FLOATS = tuple(dtype for dtype, element in TORCH_TYPES.items() if element.is_float)
INTEGERS = tuple(dtype for dtype in TORCH_TYPES if dtype not in (*FLOATS, torch.bool))
_NAMES = tuple(ReduceOp.RedOpType.__members__.items())
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)


class Reduction(NamedTuple):
    """An operation on the elements of all ranks. `op`: the operation of the service; None: bit by bit, by gloo.
    `is_divided`: the operation is a sum, which is then divided by the number of ranks, towards zero."""

    op: Op | None
    is_divided: bool = False

    def divided(self, combined: Array, size: int) -> Array:
        """The result of the service for `size` ranks, divided in place if that is still to be done."""
        return integer_mean(combined, size, combined) if self.is_divided else combined


_NUMBERS: dict[str, Reduction] = {
    "SUM": Reduction("sum"),
    "PRODUCT": Reduction("prod"),
    "MIN": Reduction("min"),
    "MAX": Reduction("max"),
}
_FLOATS = _NUMBERS | {"AVG": Reduction("mean")}
_INTEGERS = _NUMBERS | {
    "AVG": Reduction("sum", is_divided=True),
    **{name: Reduction(None) for name in ("BAND", "BOR", "BXOR")},
}
_COMPLEX = {"SUM": Reduction("sum"), "AVG": Reduction("mean")}  # of both parts
_BOOL = {
    **{name: Reduction("any") for name in ("SUM", "MAX", "BOR")},
    **{name: Reduction("all") for name in ("PRODUCT", "MIN", "BAND")},
    "BXOR": Reduction(None),
}
_BY_DTYPE: dict[torch.dtype, dict[str, Reduction]] = {
    **dict.fromkeys(FLOATS, _FLOATS),
    **dict.fromkeys(INTEGERS, _INTEGERS),
    **dict.fromkeys(COMPLEX, _COMPLEX),
    torch.bool: _BOOL,
}


def op_name(op: object) -> str:
    """The name of an operation in torch."""
    return next((name for name, operation in _NAMES if op == operation), str(op))


def reduction_of(op: object, tensors: Sequence[Tensor]) -> Reduction:
    """The reduction for `op` of torch on tensors of one element type, all dense or all sparse. Raises UsageError if
    there is none."""
    name = op_name(op)
    kinds = {type_name(tensor) for tensor in tensors}
    if len(kinds) != 1:
        raise UsageError(f"tensors of {' and '.join(sorted(kinds)) or 'no type'} came; expected one element type")
    dtype, [kind] = tensors[0].dtype, kinds
    reductions = _BY_DTYPE.get(dtype, {})
    if tensors[0].is_sparse:  # a tensor that lacks a row has zeros there: other operations would have to read them
        reductions = {
            op_text: reductions[op_text]
            for op_text in ("SUM", "AVG")
            if op_text in reductions and dtype is not torch.bool
        }
    elif tensors[0].layout != torch.strided:
        reductions = {}
    if not reductions:
        raise UsageError(f"tensors of {kind} cannot be combined; cast them to another type")
    if name not in reductions:
        raise UsageError(f"ReduceOp.{name} does not work on tensors of {kind}; expected {' or '.join(reductions)}")
    return reductions[name]
