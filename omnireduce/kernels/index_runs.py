"""Block indices as runs: blocks of one shard that follow on each other, all with the same mark."""

from __future__ import annotations

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import kernel
from omnireduce.kernels.merge_indices import NUMBER_MASK


@kernel
def list_runs(indices: Array, shards: int, stripe_blocks: int, runs: Array) -> int:
    """Write `indices` as `runs` (first index, how many) if that takes less room; return how many there are, else 0.

    `indices`: int64 (n,), ascending, of one shard of `shards`; `runs`: int64 (n // 2 or more, 2).
    """
    max_runs = (indices.size - 1) // 2
    gap = (shards - 1) * stripe_blocks  # blocks of other shards between two stripes
    count, expected = 0, -1
    for k in range(indices.size):
        index = indices[k]
        if count == 0 or (index != expected and index != expected + gap):
            if count == max_runs:
                return 0
            runs[count, 0], runs[count, 1] = index, 0
            count += 1
        runs[count - 1, 1] += 1
        expected = index + 1
    return count


@kernel
def expand_runs(
    listed: Array, run: int, used: int, shards: int, stripe_blocks: int, indices: Array
) -> tuple[int, int, int]:
    """Fill `indices`, int64, with the indices of runs, from index `used` of run `run` on.

    `listed`: int64 (2 × runs,), first index and length of each; a peer may have written anything there, and may still
    do so. Returns how many indices were filled in, and the run and the index in it that come next. They are fewer than
    `indices` takes where the runs end before, where one has no index left, or goes beyond the largest block number.
    """
    filled = 0
    while filled < indices.size and 2 * run < listed.size:
        first, length = listed[2 * run], listed[2 * run + 1]
        if length <= used:
            break
        remaining = min(length - used, indices.size - filled)
        number = first & NUMBER_MASK
        mark = first - number
        offset = number % stripe_blocks + used  # from the start of its stripe, over the shard's next ones
        number = (number // stripe_blocks + offset // stripe_blocks * shards) * stripe_blocks + offset % stripe_blocks
        while remaining > 0:
            step = min(remaining, stripe_blocks - number % stripe_blocks)
            if number + step > NUMBER_MASK + 1:
                return filled, run, used
            for k in range(step):
                indices[filled + k] = mark + number + k
            filled, used, remaining = filled + step, used + step, remaining - step
            number += step + (shards - 1) * stripe_blocks
        if used == length:
            run, used = run + 1, 0
    return filled, run, used
