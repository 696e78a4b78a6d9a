"""Worker side, downward: check and place result blocks."""

from __future__ import annotations

from omnireduce.dtypes import Array
from omnireduce.kernels.jit import LINE_BYTES, kernel, prefetch, prefetch_to_write

LINE = LINE_BYTES // 8  # words
AHEAD = 1024  # words between what is copied and what is fetched


@kernel
def scatter_blocks(target: Array, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
    """Write the row of each index to `target` there, except where `unchanged`: there it stands already.

    `target`, `rows`: uint64 (…, words per block); `indices` were checked before. `left_out`: what is unchanged has no
    row.
    """
    width, at = rows.shape[1], 0
    ahead = max(1, AHEAD // width)
    for k in range(indices.size):
        later = k + ahead
        if later < indices.size and not unchanged[later]:
            row, out = rows[min(at + ahead, rows.shape[0] - 1)], target[indices[later]]
            for i in range(0, width, LINE):
                prefetch(row, i)
                prefetch_to_write(out, i)
        if unchanged[k]:
            at += not left_out
            continue
        row, out = rows[at], target[indices[k]]
        for i in range(row.size):
            out[i] = row[i]
        at += 1


@kernel
def admit_indices(shared: Array, low: int, high: int, own: Array) -> bool:
    """Copy `shared` (int64, possibly still writable by the peer) to `own`, then check the copy.

    True when the copied indices ascend strictly and lie in [low, high).
    """
    previous = low - 1
    for k in range(shared.size):
        own[k] = shared[k]
    for k in range(shared.size):
        if own[k] <= previous or own[k] >= high:
            return False
        previous = own[k]
    return True


@kernel
def all_owned(indices: Array, shard: int, shards: int, stripe_blocks: int) -> bool:
    """Whether all of these blocks (int64, ascending, not negative) are in stripes of `shard`."""
    stop = 0
    for k in range(indices.size):
        if indices[k] >= stop:
            stripe = indices[k] // stripe_blocks
            if stripe % shards != shard:
                return False
            stop = (stripe + 1) * stripe_blocks
    return True


@kernel
def add_rows(values: Array, order: Array, starts: Array, out: Array) -> None:
    """Sum groups of rows: `out[g] = values[order[starts[g]]] + … + values[order[starts[g + 1] - 1]]`, in that order.

    `values`: (n, row length); `order`: int64 (n,); `starts`: int64 (groups + 1,); `out`: (groups, row length).
    """
    for group in range(out.shape[0]):
        total = out[group]
        for k in range(starts[group], starts[group + 1]):
            row = values[order[k]]
            for i in range(row.size):
                if k == starts[group]:
                    total[i] = row[i]
                else:
                    total[i] += row[i]
