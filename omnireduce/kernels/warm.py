"""Compile, or load from the cache, every kernel for every element type, so that no collective waits for it."""

from __future__ import annotations

import numpy as np

from omnireduce.dtypes import ELEMENT_TYPES, Array
from omnireduce.kernels.merge import leave_out, plan_union, split_marks
from omnireduce.kernels.pack import pack_blocks, pack_rows
from omnireduce.kernels.reduce import OPS, reduce_blocks, reduce_half_blocks
from omnireduce.kernels.scatter import add_rows, admit_indices, all_owned, scatter_blocks

STORAGES = {element.storage for element in ELEMENT_TYPES.values() if not element.is_half}  # rows of halves: as float32


def warm_up_aggregator() -> None:
    """Make the aggregator's kernels ready."""
    indices, one = np.zeros((1, 1), np.int64), np.ones(1, np.int64)
    parts = np.zeros((1, 1), np.int64)
    admit_indices(indices[0], 0, 1, one.copy())
    all_owned(one, 0, 1, 1)
    plan_union(indices, np.zeros(1, np.int64), one, np.zeros(1, np.int64), 8, 1, one.copy(), parts, True)
    row = np.zeros((1, 8), np.uint8)
    leave_out(one, 0, row, row.copy())
    scratch = np.zeros((2, 8), np.float32)
    for storage in STORAGES:
        reduce_blocks(OPS["sum"], np.zeros(8, storage), parts, np.zeros((1, 8), storage))
    half = np.zeros(8, np.uint16)
    reduce_half_blocks(OPS["sum"], True, half, parts, half.reshape(1, 8), scratch, scratch.view(np.uint32))


def warm_up_worker() -> None:
    """Make the worker's kernels ready."""
    words, index = np.zeros((1, 1), np.uint64), np.zeros(1, np.int64)
    for source in _as_callers_have_it(words):
        pack_blocks(source, words, source is words, np.uint64(1), 0, 1, 1, 1, words.copy(), index)
        pack_rows(index, source.view(np.uint8), 0, 1, 1, 0, words.copy().view(np.uint8), index.copy())
    for values in (np.zeros((1, 1), storage) for storage in STORAGES):
        for source in _as_callers_have_it(values):
            add_rows(source, index, np.array([0, 1]), values.copy())
    admit_indices(index, 0, 1, index.copy())
    all_owned(index, 0, 1, 1)
    unchanged = np.zeros(1, np.bool_)
    split_marks(index, 0, index.copy(), unchanged)
    scatter_blocks(words, words.copy(), index, unchanged, False)


def _as_callers_have_it(array: Array) -> tuple[Array, Array]:
    """The array itself and a read-only view, which is another type to the compiler."""
    read_only = array.view()
    read_only.flags.writeable = False
    return array, read_only
