"""Worker side, downward: place result blocks, or add rows to groups."""

from __future__ import annotations

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import kernel
from omnireduce.kernels.instructions import LINE_BYTES, prefetch, prefetch_to_write

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
