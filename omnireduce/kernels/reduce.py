"""Combine the ranks' blocks, always in rank order.

`parts` are those of `plan_union`. An absent block is a block of zeros. To add it would change no value, except
the sign of a -0, which stays as it is. Min, max and prod must see it, so they count the contributions.

Unsigned integers are seen as signed ones. Sums and products have the same bits. Min and max have ops of their own: two
numbers compare as unsigned ones as they do as signed ones, unless only one of them is negative.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array, ElementType
from omnireduce.kernels.compiling.jit import inlined, inner, kernel
from omnireduce.kernels.instructions import row_of, span_of, span_or
from omnireduce.kernels.merge_indices import ABSENT

OWN = -2  # in the part of a block: the block that the caller has in an array of its own
SUM, MEAN, MIN, MAX, PROD, UNSIGNED_MIN, UNSIGNED_MAX = range(7)
OPS = {"sum": SUM, "mean": MEAN, "min": MIN, "max": MAX, "prod": PROD, "any": MAX, "all": MIN}
_UNSIGNED = OPS | {"min": UNSIGNED_MIN, "max": UNSIGNED_MAX}


def op_code(op: str, element: ElementType) -> int:
    """The number of `op` in the kernels, for such elements."""
    return (_UNSIGNED if element.is_unsigned else OPS)[op]


@inner
def _is_below(left: int, right: int) -> bool:
    """Compare two signed numbers as unsigned ones."""
    return (left < right) != ((left < 0) != (right < 0))


@inlined
def _combine(op: int, out: Array, left: Array, right: Array) -> None:
    """out = left op right. NaN wins in min and max, as in NumPy."""
    if op == MIN:
        for i in range(out.size):
            out[i] = left[i] if left[i] < right[i] or left[i] != left[i] else right[i]
    elif op == MAX:
        for i in range(out.size):
            out[i] = left[i] if left[i] > right[i] or left[i] != left[i] else right[i]
    elif op == PROD:
        for i in range(out.size):
            out[i] = left[i] * right[i]
    elif op in (UNSIGNED_MIN, UNSIGNED_MAX):
        for i in range(out.size):
            out[i] = left[i] if _is_below(left[i], right[i]) == (op == UNSIGNED_MIN) else right[i]
    else:
        for i in range(out.size):
            out[i] = left[i] + right[i]


@inlined
def _accumulate(op: int, total: Array, item: Array) -> None:
    """total = total op item. Not _combine(op, total, total, item): with aliased arguments that would not vectorise."""
    if op == MIN:
        for i in range(total.size):
            total[i] = total[i] if total[i] < item[i] or total[i] != total[i] else item[i]
    elif op == MAX:
        for i in range(total.size):
            total[i] = total[i] if total[i] > item[i] or total[i] != total[i] else item[i]
    elif op == PROD:
        for i in range(total.size):
            total[i] *= item[i]
    elif op in (UNSIGNED_MIN, UNSIGNED_MAX):
        for i in range(total.size):
            total[i] = total[i] if _is_below(total[i], item[i]) == (op == UNSIGNED_MIN) else item[i]
    else:
        for i in range(total.size):
            total[i] += item[i]


@inlined
def _divide(total: Array, divisor: int) -> None:
    """Divide `total` by `divisor` in the type of `total`. By an int, Numba would divide float32 in float64."""
    if divisor & (divisor - 1) == 0:
        share = total.dtype.type(1 / divisor)  # exact, and a product takes less time
        for i in range(total.size):
            total[i] *= share
    else:
        whole = total.dtype.type(divisor)
        for i in range(total.size):
            total[i] /= whole


@inlined
def _finish(op: int, total: Array, present: int, ranks: int, divisor: int) -> None:
    """Let absent blocks take part in min and max as zeros, and divide a mean once, by `divisor`."""
    zero = total.dtype.type(0)  # a plain 0 is an int64, which would make wider what it meets
    if op == MEAN:
        _divide(total, divisor)
    elif present < ranks and op == MIN:
        for i in range(total.size):
            total[i] = zero if total[i] > zero else total[i]
    elif present < ranks and op == MAX:
        for i in range(total.size):
            total[i] = zero if total[i] < zero else total[i]
    elif present < ranks and op == UNSIGNED_MIN:
        for i in range(total.size):
            total[i] = zero


@inner
def _product(total: Array, arena: Array, part: Array, own_block: Array) -> None:
    """The product with absent blocks as zeros, each in its place: factors that overflow after a zero give 0."""
    zero = total.dtype.type(0)  # as in _finish
    total[:] = 1
    for r in range(part.size):
        offset = part[r]
        for i in range(total.size):
            factor = zero
            if offset >= 0:
                factor = arena[offset + i]
            elif offset == OWN:
                factor = own_block[i]
            total[i] *= factor


@inlined
def _copy(block: Array, total: Array) -> None:
    for i in range(total.size):
        total[i] = block[i]


@inlined
def reduce_block(op: int, arena: Array, part: Array, own_block: Array, total: Array, divisor: int) -> None:
    """Reduce the block of each rank into `total`. A mean is their sum, divided by `divisor`.

    `part`: int64 (ranks,), offsets into `arena`, or OWN for the block `own_block`, or ABSENT. One is there at least.
    `arena`, (elements,), `own_block` and `total`, (block size,), are of the reduced type.
    """
    ranks, present, first = part.size, 0, OWN
    for r in range(ranks):
        offset = part[r]
        if offset == ABSENT:
            continue
        if present == 0:
            first = offset
        elif present == 1:
            _combine(op, total, span_or(arena, first, own_block), span_or(arena, offset, own_block))
        else:
            _accumulate(op, total, span_or(arena, offset, own_block))
        present += 1
    if present == 1:
        _copy(span_or(arena, first, own_block), total)
    if op == PROD and present < ranks:
        _product(total, arena, part, own_block)
    elif op != SUM:
        _finish(op, total, present, ranks, divisor)


@kernel
def reduce_blocks(op: int, arena: Array, parts: Array, out: Array, divisor: int) -> None:
    """Reduce the entries of `parts` (int64, (entries, ranks), offsets into `arena` or ABSENT) into `out`.

    `arena`: (elements,) of the reduced type; `out`: (entries, block size). `divisor` as in `reduce_block`.
    """
    for k in range(parts.shape[0]):
        out_row = row_of(out, k)  # also as `own_block`, for which no part stands
        reduce_block(op, arena, row_of(parts, k), out_row, out_row, divisor)


@kernel
def decode_half(brain: bool, stored: Array, values: Array, bits: Array) -> None:
    """16-bit floats in `stored` (uint16) to float32 in `values`; `bits` is the same memory as uint32."""
    if brain:
        for i in range(stored.size):
            bits[i] = np.uint32(stored[i]) << np.uint32(16)
        return
    for i in range(stored.size):
        bits[i] = np.uint32(stored[i] & np.uint16(0x7FFF)) << np.uint32(13)
    for i in range(stored.size):
        values[i] *= np.float32(2.0**112)  # moves the exponent bias from 15 to 127, subnormals included
    for i in range(stored.size):
        special = np.uint32(0x7F800000) if stored[i] & np.uint16(0x7C00) == 0x7C00 else np.uint32(0)
        bits[i] |= special | np.uint32(stored[i] & np.uint16(0x8000)) << np.uint32(16)


@kernel
def encode_half(brain: bool, values: Array, bits: Array, stored: Array) -> None:
    """float32 to 16-bit floats, rounded to nearest even. Overwrites `values`."""
    for i in range(stored.size):
        word = bits[i]
        sign, size = word >> np.uint32(16) & np.uint32(0x8000), word & np.uint32(0x7FFFFFFF)
        if brain:
            if size > np.uint32(0x7F800000):  # NaN stays NaN: rounding could carry into infinity
                code = size >> np.uint32(16) | np.uint32(0x40)
            else:
                code = (size + np.uint32(0x7FFF) + (size >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        elif size > np.uint32(0x7F800000):
            code = np.uint32(0x7E00)
        elif size >= np.uint32(0x477FF000):  # 65520 and above round to infinity
            code = np.uint32(0x7C00)
        elif size < np.uint32(0x38800000):  # subnormal: adding 1/2 makes the adder round at 2**-24
            bits[i] = size
            values[i] += np.float32(0.5)
            code = bits[i] - np.uint32(0x3F000000)
        else:
            code = (
                size - np.uint32(112 << 23) + np.uint32(0xFFF) + (size >> np.uint32(13) & np.uint32(1))
            ) >> np.uint32(13)
        stored[i] = np.uint16(sign | code)


@inner
def reduce_half_block(
    op: int,
    brain: bool,
    arena: Array,
    part: Array,
    own_block: Array,
    total: Array,
    scratch: Array,
    bits: Array,
    divisor: int,
) -> None:
    """`reduce_block` for float16 (or bfloat16 when `brain`): summed in float32, rounded once.

    `arena`, `own_block`, `total`: uint16; `scratch`: float32 (2, block size), and `bits` the same memory as uint32.
    """
    size, present = total.size, 0
    for r in range(part.size):
        offset, row = part[r], min(present, 1)
        if offset >= 0:
            decode_half(brain, span_of(arena, offset, size), row_of(scratch, row), row_of(bits, row))
        elif offset == OWN:
            decode_half(brain, own_block, row_of(scratch, row), row_of(bits, row))
        elif op == PROD:
            scratch[row, :] = 0
        else:
            continue
        if present > 0:
            _accumulate(op, row_of(scratch, 0), row_of(scratch, 1))
        present += 1
    _finish(op, row_of(scratch, 0), present, part.size, divisor)
    encode_half(brain, row_of(scratch, 0), row_of(bits, 0), total)


@kernel
def reduce_half_blocks(
    op: int, brain: bool, arena: Array, parts: Array, out: Array, scratch: Array, bits: Array, divisor: int
) -> None:
    """`reduce_blocks` for float16 (or bfloat16 when `brain`); see `reduce_half_block`."""
    for k in range(parts.shape[0]):
        reduce_half_block(op, brain, arena, row_of(parts, k), arena, row_of(out, k), scratch, bits, divisor)
