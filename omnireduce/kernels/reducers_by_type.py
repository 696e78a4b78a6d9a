"""Reducers: one small kernel for each element type, which the kernels of the exchange call by its address.

So the exchange is compiled without any arithmetic, and a job compiles reducers for only those types that it sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic, overload

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import address_of, by_address, has_compiler
from omnireduce.kernels.instructions import row_of, span_of
from omnireduce.kernels.reduce import reduce_block, reduce_half_block
from omnireduce.kernels.regions import STORAGES

Reducer = Callable[[int, Array, Array, Array, Array, Array, Array], None]
_bytes: Any = numba.uint8
TYPES: Any = (
    numba.int64, _bytes[::1], numba.int64[:, ::1], _bytes[:, ::1], _bytes[:, ::1],
    numba.float32[:, ::1], numba.uint32[:, ::1],
)  # fmt: skip


def _named(storage: str, function: Reducer) -> Reducer:
    """A reducer. Each has a name of its own, because machine code is found by that."""
    function.__name__ = function.__qualname__ = f"reduce_{storage}"
    return by_address(function)


def _reducer_of(storage: str) -> Reducer:
    kind = np.dtype(storage).type

    def reduce(op: int, arena: Array, plan: Array, own_blocks: Array, out: Array, scratch: Array, bits: Array) -> None:
        elements, own_elements, sums, ranks = arena.view(kind), own_blocks.view(kind), out.view(kind), plan.shape[1] - 1
        for k in range(plan.shape[0]):
            part = span_of(row_of(plan, k), 1, ranks)
            reduce_block(op, elements, part, row_of(own_elements, plan[k, 0]), row_of(sums, k), ranks)

    return _named(storage, reduce)


def _half_reducer_of(storage: str) -> Reducer:
    is_brain = storage == "bfloat16"

    def reduce(op: int, arena: Array, plan: Array, own_blocks: Array, out: Array, scratch: Array, bits: Array) -> None:
        halves, own_elements, sums = arena.view(np.uint16), own_blocks.view(np.uint16), out.view(np.uint16)
        ranks = plan.shape[1] - 1
        for k in range(plan.shape[0]):
            part, my_row = span_of(row_of(plan, k), 1, ranks), row_of(own_elements, plan[k, 0])
            reduce_half_block(op, is_brain, halves, part, my_row, row_of(sums, k), scratch, bits, ranks)

    return _named(storage, reduce)


REDUCERS = tuple((_half_reducer_of if "float16" in storage else _reducer_of)(storage) for storage in STORAGES)


def reducer_of(storage: int) -> int:
    """The address of the reducer of the elements STORAGES[storage], which is compiled or loaded if it is not there yet.
    With the JIT off: its number."""
    return address_of(REDUCERS[storage], TYPES) if has_compiler() else storage


def reduce_at(
    address: int, op: int, arena: Array, plan: Array, own_blocks: Array, out: Array, scratch: Array, bits: Array
) -> None:
    """Call the reducer at `address`: reduce one block for each row of `plan`, int64 (entries, 1 + ranks).

    A row has the row of `own_blocks` that OWN stands for, and then the `part` of `reduce_block`, in elements of
    `arena`. `arena`: uint8 (bytes,); `own_blocks`: uint8 (blocks, block bytes); `out`: uint8 (entries, block bytes).
    `scratch`, `bits`: as in `reduce_half_block`; other reducers do not use them.
    """
    REDUCERS[address](op, arena, plan, own_blocks, out, scratch, bits)


@intrinsic
def _call(
    typing_context: Any,
    address: Any,
    op: Any,
    arena: Any,
    plan: Any,
    own_blocks: Any,
    out: Any,
    scratch: Any,
    bits: Any,
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(
            context.get_value_type(numba.void), [context.get_value_type(argument) for argument in TYPES]
        )
        context.call_function_pointer(builder, builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return numba.void(numba.int64, *TYPES), generate


@overload(reduce_at, strict=False)
def _compile_reduce_at(
    address: Any, op: Any, arena: Any, plan: Any, own_blocks: Any, out: Any, scratch: Any, bits: Any
) -> Any:
    emit: Any = _call
    return lambda address, op, arena, plan, own_blocks, out, scratch, bits: emit(
        address, op, arena, plan, own_blocks, out, scratch, bits
    )
