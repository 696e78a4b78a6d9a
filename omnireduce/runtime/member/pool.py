"""Memory for results that is used again and again."""

from __future__ import annotations

import sys

import numpy as np

from omnireduce.dtypes import Array

KEPT = 6  # arrays that a pool remembers: of rows a call takes up to four, and users keep results of calls before


class Pool:
    """Lends arrays of bytes, and lends them again once nobody refers to them: to touch fresh memory for the first time
    costs more than all copies of a row. For one thread at a time."""

    def __init__(self) -> None:
        self._lent: list[Array] = []

    def take(self, nbytes: int) -> Array:
        """An array of at least `nbytes` bytes, with any content; it is the caller's as long as he refers to it."""
        free = [at for at in range(len(self._lent)) if _references(self._lent, at) == _UNUSED]
        for at in reversed(free):
            if self._lent[at].size >= nbytes:
                return self._lent[at]
            del self._lent[at]
        self._lent = [*self._lent[1 - KEPT :], np.empty(nbytes, np.uint8)]
        return self._lent[-1]


def _references(arrays: list[Array], at: int) -> int:
    return sys.getrefcount(arrays[at])


_UNUSED = _references([np.empty(0)], 0)  # depends on the interpreter
