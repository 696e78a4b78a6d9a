"""The blocks of saved arrays that are not zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.files.tensors import read_tensors
from omnireduce.kernels.density import find_blocks


class Saved(NamedTuple):
    """The arrays of a file one behind the other, each from a new block on: which blocks are not zero, bool (blocks,),
    and the bytes of an element."""

    mask: Array
    itemsize: int


def read_blocks(path: str, block_size: int) -> Saved:
    """Read a file. Raises FileError, and UsageError for what the service does not reduce, for arrays of elements of
    different sizes, and for none."""
    masks, sizes = [], set()
    for tensor in read_tensors(path):
        try:
            masks.append(find_blocks(tensor.values, block_size))
        except UsageError as error:
            raise UsageError(f"{path}: {tensor.name}: {error}") from None
        sizes.add(tensor.values.itemsize)
    if len(sizes) != 1:
        contents = "no arrays" if not sizes else f"elements of {' and '.join(map(str, sorted(sizes)))} bytes"
        raise UsageError(f"{path} holds {contents}; expected arrays whose elements have one size")
    return Saved(np.concatenate(masks), sizes.pop())


def read_all(paths: Sequence[str], block_size: int) -> tuple[list[Array], int]:
    """The blocks of each file, and the bytes of an element. Raises what `read_blocks` raises, and UsageError where the
    files do not hold the same tensors."""
    all_saved = [read_blocks(path, block_size) for path in paths]
    for path, saved in zip(paths, all_saved, strict=True):
        if (saved.mask.size, saved.itemsize) != (all_saved[0].mask.size, all_saved[0].itemsize):
            raise UsageError(f"{path} holds other tensors than {paths[0]}; expected one file of each rank")
    return [saved.mask for saved in all_saved], all_saved[0].itemsize
