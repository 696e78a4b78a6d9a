"""The aggregator's side of a block program: add up the ranks' blocks, and run the program on each sum.

A block stays in the nearest cache while all instructions work on it. Target and operand of an instruction are never the
same array, so its loop vectorises.

Numbers below the smallest normal one are zero here: of the sum before the program begins, and of each result. To work
on them takes some processors a hundred times as long, and moments that decay get there.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.block_program import FIRST_COLUMN, Operation
from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import inlined, inner, kernel
from omnireduce.kernels.float32_bits import EXPONENT, SIGN
from omnireduce.kernels.instructions import (
    LINE_BYTES,
    flush_denormals,
    prefetch_to_write,
    restore_mode,
    row_of,
    span_of,
)
from omnireduce.kernels.merge_indices import ABSENT
from omnireduce.kernels.reduce import reduce_block

LINE = LINE_BYTES // 4  # float32
COPY, ADD, SUBTRACT, SUBTRACT_FROM, MULTIPLY, DIVIDE, DIVIDE_INTO = (int(Operation(number)) for number in range(7))
MINIMUM, MAXIMUM, GREATER, ADD_SCALED, MIX, MIX_SQUARE, ROOT, SELECT = (
    int(Operation(number)) for number in range(7, 15)
)
FILL, ADD_SCALAR, SCALE, SQUARE, SQUARE_ROOT = (int(Operation(number)) for number in range(15, 20))
ABSOLUTE, NEGATE, RECIPROCAL, EXPONENTIAL, LOGARITHM, TANH = (int(Operation(number)) for number in range(20, 26))
BLOCK_SUM, LOAD_CELL, STORE_CELL, ADD_TO_TOTAL = (int(Operation(number)) for number in range(26, 30))
MOMENTS, ROOT_STEP = (int(Operation(number)) for number in range(30, 32))


@inner
def _with_operand(operation: int, d: Array, a: Array) -> None:  # noqa: C901  a branch for each
    """An instruction that has two arrays."""
    if operation == COPY:
        for i in range(d.size):
            d[i] = a[i]
    elif operation == ADD:
        for i in range(d.size):
            d[i] += a[i]
    elif operation == SUBTRACT:
        for i in range(d.size):
            d[i] -= a[i]
    elif operation == SUBTRACT_FROM:
        for i in range(d.size):
            d[i] = a[i] - d[i]
    elif operation == MULTIPLY:
        for i in range(d.size):
            d[i] *= a[i]
    elif operation == DIVIDE:
        for i in range(d.size):
            d[i] /= a[i]
    elif operation == DIVIDE_INTO:
        for i in range(d.size):
            d[i] = a[i] / d[i]
    else:
        _compare(operation, d, a)


@inner
def _mixed(operation: int, d: Array, a: Array, s: float, t: float) -> None:
    """An instruction that has two arrays and scalars."""
    if operation == ADD_SCALED:
        for i in range(d.size):
            d[i] += a[i] * s
    elif operation == MIX:
        for i in range(d.size):
            d[i] = d[i] * s + a[i] * t
    elif operation == MIX_SQUARE:
        for i in range(d.size):
            d[i] = d[i] * s + a[i] * a[i] * t
    elif operation == ROOT:
        for i in range(d.size):
            d[i] = np.sqrt(a[i]) * s + t


@inner
def _moments(d: Array, e: Array, a: Array, s: float, t: float, u: float, v: float) -> None:
    for i in range(d.size):
        d[i] = d[i] * s + a[i] * t
        e[i] = e[i] * u + a[i] * a[i] * v


@inner
def _root_step(d: Array, a: Array, b: Array, s: float, t: float, u: float) -> None:
    for i in range(d.size):
        d[i] += a[i] / (np.sqrt(b[i]) * s + t) * u


@inner
def _compare(operation: int, d: Array, a: Array) -> None:
    """NaN wins in minimum and maximum, as in NumPy, and is not greater than anything."""
    one, zero = d.dtype.type(1), d.dtype.type(0)
    if operation == MINIMUM:
        for i in range(d.size):
            d[i] = d[i] if d[i] < a[i] or d[i] != d[i] else a[i]
    elif operation == MAXIMUM:
        for i in range(d.size):
            d[i] = d[i] if d[i] > a[i] or d[i] != d[i] else a[i]
    elif operation == GREATER:
        for i in range(d.size):
            d[i] = one if d[i] > a[i] else zero


@inner
def _select(d: Array, a: Array, b: Array) -> None:
    for i in range(d.size):
        d[i] = a[i] if d[i] != 0 else b[i]


@inner
def _run_on_one_array(operation: int, d: Array, scalar: float) -> None:  # noqa: C901  a branch for each
    """An instruction that has one array."""
    if operation == FILL:
        for i in range(d.size):
            d[i] = scalar
    elif operation == ADD_SCALAR:
        for i in range(d.size):
            d[i] += scalar
    elif operation == SCALE:
        for i in range(d.size):
            d[i] *= scalar
    elif operation == SQUARE:
        for i in range(d.size):
            d[i] *= d[i]
    elif operation == SQUARE_ROOT:
        for i in range(d.size):
            d[i] = np.sqrt(d[i])
    elif operation == ABSOLUTE:
        for i in range(d.size):
            d[i] = abs(d[i])
    elif operation == NEGATE:
        for i in range(d.size):
            d[i] = -d[i]
    else:
        _function(operation, d)


@inner
def _function(operation: int, d: Array) -> None:
    one = d.dtype.type(1)
    if operation == RECIPROCAL:
        for i in range(d.size):
            d[i] = one / d[i]
    elif operation == EXPONENTIAL:
        for i in range(d.size):
            d[i] = np.exp(d[i])
    elif operation == LOGARITHM:
        for i in range(d.size):
            d[i] = np.log(d[i])
    elif operation == TANH:
        for i in range(d.size):
            d[i] = np.tanh(d[i])


@inner
def _sum_of(d: Array, valid: int) -> float:
    """The sum of the first `valid` elements in float64: of every fourth one, and then of these four."""
    a, b, c, e, whole = 0.0, 0.0, 0.0, 0.0, valid // 4 * 4
    for i in range(0, whole, 4):
        a += d[i]
        b += d[i + 1]
        c += d[i + 2]
        e += d[i + 3]
    for i in range(whole, valid):
        a += d[i]
    return float((a + b) + (c + e))


@inlined
def _operand(number: int, block: Array, registers: Array, stored: Array) -> Array:
    """The array that an instruction names: register 0 is `block`."""
    if number >= FIRST_COLUMN:
        return span_of(stored, (number - FIRST_COLUMN) * block.size, block.size)
    if number > 0:
        return row_of(registers, number)
    return block


@inlined
def _scalar(scalars: Array, index: int) -> float:
    """Scalar `index`. Operations without scalars call this, too, perhaps with an index behind the last, and do not use
    the result."""
    scalar: float = scalars[min(index, scalars.size - 1)]
    return scalar


@inlined
def _run(
    code: Array,
    scalars: Array,
    block: Array,
    stored: Array,
    next_stored: Array,
    registers: Array,
    totals: Array,
    columns: int,
    valid: int,
) -> None:
    """Run a program on one block. `stored`: what the state keeps for it; `next_stored`: for the next one, which is
    fetched meanwhile, a share with each instruction: all at once would be more than the processor takes."""
    fetched, share = 0, (next_stored.size // LINE // max(1, code.shape[0]) + 1) * LINE
    for at in range(code.shape[0]):
        for i in range(fetched, min(fetched + share, next_stored.size), LINE):
            prefetch_to_write(next_stored, i)
        fetched += share
        operation, third = code[at, 0], code[at, 3]
        d = _operand(code[at, 1], block, registers, stored)
        s, t = _scalar(scalars, third), _scalar(scalars, third + 1)
        if operation == MOMENTS:
            e, a = _operand(code[at, 1] + 1, block, registers, stored), _operand(code[at, 2], block, registers, stored)
            _moments(d, e, a, s, t, _scalar(scalars, third + 2), _scalar(scalars, third + 3))
        elif operation == ROOT_STEP:
            a, b = _operand(code[at, 2], block, registers, stored), _operand(code[at, 2] + 1, block, registers, stored)
            _root_step(d, a, b, s, t, _scalar(scalars, third + 2))
        elif operation < ADD_SCALED:
            _with_operand(operation, d, _operand(code[at, 2], block, registers, stored))
        elif operation < SELECT:
            _mixed(operation, d, _operand(code[at, 2], block, registers, stored), s, t)
        elif operation == SELECT:
            other = _operand(third, block, registers, stored)
            _select(d, _operand(code[at, 2], block, registers, stored), other)
        elif operation < BLOCK_SUM:
            _run_on_one_array(operation, d, s)
        else:
            _with_numbers(operation, d, stored, columns * block.size + third, totals, third, valid)


@inner
def _with_numbers(operation: int, d: Array, stored: Array, cell: int, totals: Array, total: int, valid: int) -> None:
    """An instruction that has an array and one number."""
    if operation == BLOCK_SUM:
        _run_on_one_array(FILL, d, d.dtype.type(_sum_of(d, valid)))
    elif operation == LOAD_CELL:
        _run_on_one_array(FILL, d, stored[cell])
    elif operation == STORE_CELL:
        stored[cell] = d[0]
    else:
        totals[total] += _sum_of(d, valid)


@kernel
def run_on_blocks(
    op: int,
    arena: Array,
    parts: Array,
    out: Array,
    divisor: int,
    numbers: Array,
    shards: int,
    stripe_blocks: int,
    elements: int,
    code: Array,
    scalars: Array,
    state: Array,
    columns: int,
    registers: Array,
    totals: Array,
) -> None:
    """Reduce the entries of `parts` into `out`, as `reduce_blocks` does, and run the program on each.

    `numbers`: int64 (entries,), the blocks; `shards`, `stripe_blocks`: how blocks are dealt to shards; `elements`: of
    the whole tensor. `code`: uint8 (instructions, 4); `scalars`: float32, those of the program, and one more. `state`:
    float32 (blocks of this shard, row), a row is `columns` times the block size, and the cells. `registers`: float32
    (REGISTERS, block size), the first of which is not used; `totals`: float64.
    """
    size, last, bits = out.shape[1], out.shape[0] - 1, out.view(np.int32)
    for k in range(out.shape[0]):
        block, part = row_of(out, k), row_of(parts, k)
        stored = row_of(state, _index_in_shard(numbers[k], shards, stripe_blocks))
        next_stored = row_of(state, _index_in_shard(numbers[min(k + 1, last)], shards, stripe_blocks))
        if _has_part(part):
            reduce_block(op, arena, part, block, block, divisor)
        else:
            block[:] = 0
        _drop_denormals(row_of(bits, k))
        valid = min(size, elements - numbers[k] * size)
        mode = flush_denormals()
        _run(code, scalars, block, stored, next_stored, registers, totals, columns, valid)
        restore_mode(mode)


@inner
def _drop_denormals(bits: Array) -> None:
    """Make zeros, with their signs, of the numbers that have the exponent of zero."""
    for i in range(bits.size):
        bits[i] = bits[i] if bits[i] & EXPONENT else bits[i] & SIGN


@inlined
def _has_part(part: Array) -> bool:
    """Whether any rank has brought the block."""
    present = 0
    for r in range(part.size):
        present += part[r] != ABSENT
    return present > 0


@inlined
def _index_in_shard(number: int, shards: int, stripe_blocks: int) -> int:
    """The place of a block among the blocks of its shard."""
    return number // (shards * stripe_blocks) * stripe_blocks + number % stripe_blocks
