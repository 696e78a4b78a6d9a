"""Block indices as runs: blocks of one shard that follow on each other, all with the same mark."""

from __future__ import annotations

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import kernel
from omnireduce.kernels.merge import SOLE_SHIFT

NUMBER = (1 << SOLE_SHIFT) - 1  # the bits of an index that are its block number


@kernel
def list_runs(indices: Array, shards: int, stripe_blocks: int, runs: Array) -> int:
    """Write `indices` as `runs` (first index, how many) if that takes less room; return how many there are, else 0.

    `indices`: int64 (n,), ascending, of one shard of `shards`; `runs`: int64 (n // 2 or more, 2).
    """
    most = (indices.size - 1) // 2
    gap = (shards - 1) * stripe_blocks  # of others between two stripes
    found, expected = 0, -1
    for k in range(indices.size):
        index = indices[k]
        if found == 0 or (index != expected and index != expected + gap):
            if found == most:
                return 0
            runs[found, 0], runs[found, 1] = index, 0
            found += 1
        runs[found - 1, 1] += 1
        expected = index + 1
    return found


@kernel
def expand_runs(
    listed: Array, run: int, used: int, shards: int, stripe_blocks: int, own: Array
) -> tuple[int, int, int]:
    """Fill `own`, int64, with the indices of runs, from index `used` of run `run` on.

    `listed`: int64 (2 × runs,), first index and length of each; a peer may have written anything there, and may still
    do so. Returns how many indices were filled in, and the run and the index in it that come next. They are fewer than
    `own` takes where the runs end before, where one has no index left, or goes beyond the largest block number.
    """
    filled = 0
    while filled < own.size and 2 * run < listed.size:
        first, rest = listed[2 * run], listed[2 * run + 1]
        if rest <= used:
            break
        left = min(rest - used, own.size - filled)
        number = first & NUMBER
        mark = first - number
        place = number % stripe_blocks + used  # from the start of its stripe, over the shard's next ones
        number = (number // stripe_blocks + place // stripe_blocks * shards) * stripe_blocks + place % stripe_blocks
        while left > 0:
            step = min(left, stripe_blocks - number % stripe_blocks)
            if number + step > NUMBER + 1:
                return filled, run, used
            for k in range(step):
                own[filled + k] = mark + number + k
            filled, used, left = filled + step, used + step, left - step
            number += step + (shards - 1) * stripe_blocks
        if used == rest:
            run, used = run + 1, 0
    return filled, run, used
