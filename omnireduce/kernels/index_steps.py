"""Block indices as steps: how far each is beyond the one before it, the first beyond 0, in as few bytes as that takes.

A byte has seven bits of a step, the lowest ones first. Its highest bit says that another byte follows (LEB128).
"""

from __future__ import annotations

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import kernel
from omnireduce.kernels.merge_indices import NUMBER_MASK

STEP_BYTES = 7  # size of the longest step
BITS, MORE = 7, 0x80


@kernel
def list_steps(indices: Array, max_bytes: int, steps: Array) -> int:
    """Write `indices` as `steps`; return how many bytes they take, or 0 if more than `max_bytes` or if an index has a
    mark.

    `indices`: int64 (n,), ascending; `steps`: uint8 (most + STEP_BYTES or more,).
    """
    written, previous = 0, 0
    for k in range(indices.size):
        step = indices[k] - previous
        previous = indices[k]
        if previous > NUMBER_MASK:
            return 0
        while step >= MORE:
            steps[written] = step & (MORE - 1) | MORE
            step >>= BITS
            written += 1
        steps[written] = step
        written += 1
        if written > max_bytes:
            return 0
    return written


@kernel
def expand_steps(listed: Array, position: int, number: int, indices: Array) -> tuple[int, int, int]:
    """Fill `indices`, int64, with the indices of steps, from byte `position` of `listed` on, behind index `number`.

    `listed`: uint8 (bytes,); a peer may have written anything there, and may still do so. Returns how many indices were
    filled in, the byte that comes next, and the last index. They are fewer than `indices` takes where the steps end
    before, where one is too long, or goes beyond the largest block number.
    """
    for k in range(indices.size):
        step, shift, byte = 0, 0, MORE
        while byte >= MORE:
            if position == listed.size or shift == STEP_BYTES * BITS:
                return k, position, number
            byte = int(listed[position])  # read once, because another process may change it
            step |= (byte & (MORE - 1)) << shift
            shift += BITS
            position += 1
        if number + step > NUMBER_MASK:
            return k, position, number
        number += step
        indices[k] = number
    return indices.size, position, number
