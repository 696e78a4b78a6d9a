"""The one decorator behind every kernel.

Kernels release the GIL and are cached on disk. A kernel file calls no compiled function of another file, so numba's
per-file cache stamp is enough to notice every edit. NUMBA_DISABLE_JIT=1 runs the same code as plain Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile `function` on first use for each combination of argument types."""
    try:
        return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
    except RuntimeError:  # no writable folder for the cache: compile in every process
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))
