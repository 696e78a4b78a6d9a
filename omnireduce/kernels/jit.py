"""The compiler behind every kernel: the one decorator, and the hints that Python has no words for.

Kernels release the GIL and are cached on disk. A kernel file calls no compiled function of another file, so numba's
per-file cache stamp is enough to notice every edit (but not one to the hints: `make clean` after that).
NUMBA_DISABLE_JIT=1 runs the same code as plain Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np import arrayobj

from omnireduce.dtypes import Array

_array_of: Any = arrayobj.make_array
_insert_function: Any = cgutils.get_or_insert_function
LINE_BYTES = 64  # of a cache line
F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile `function` on first use for each combination of argument types."""
    try:
        compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no writable folder for the cache: compile in every process
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))
    if hasattr(compiled, "_cache"):  # not with the JIT off
        cache = compiled._cache
        cache.save_overload = _locked(cache.save_overload, fcntl.LOCK_EX)
        cache.load_overload = _locked(cache.load_overload, fcntl.LOCK_SH)
    return cast(F, compiled)


def _locked(access: Callable[..., Any], how: int) -> Callable[..., Any]:
    """Numba numbers the files of a kernel's cache without a lock: two processes that compile at the same time can take
    the same number, and from then on each loads the other's code."""

    def access_locked(*arguments: Any) -> Any:
        folder = os.open(Path(__file__).parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, how)
            return access(*arguments)
        finally:
            os.close(folder)

    return access_locked


def prefetch(words: Array, index: int) -> None:
    """Begin to load the cache line of `words[index]`, which may lie outside the array. `words`: one-dimensional."""


def prefetch_to_write(words: Array, index: int) -> None:
    """`prefetch` of a line that will be written: it is taken from the other cores' caches as well."""


def _instruction(write: int) -> Any:
    """What emits the machine's instruction: `prefetch`, or with `write` 1 `prefetch_to_write`."""

    @intrinsic
    def emit(typing_context: Any, words: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> None:
            data = _array_of(signature.args[0])(context, builder, args[0]).data
            address = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
            hints = [ir.Constant(cgutils.int32_t, number) for number in (write, 3, 1)]  # into all caches; data
            kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[cgutils.int32_t] * 3])
            function = _insert_function(builder.module, kind, "llvm.prefetch.p0i8")
            builder.call(function, [address, *hints])

        return numba.void(words, numba.intp), generate

    return emit


_read, _write = _instruction(0), _instruction(1)


@overload(prefetch, strict=False)
def _compile_prefetch(words: Any, index: Any) -> Any:
    emit: Any = _read
    return lambda words, index: emit(words, index)


@overload(prefetch_to_write, strict=False)
def _compile_prefetch_to_write(words: Any, index: Any) -> Any:
    emit: Any = _write
    return lambda words, index: emit(words, index)
