"""The compiler behind every kernel: the decorators, and the hints that Python has no words for.

Kernels release the GIL and are cached on disk. An edit to any file of this folder makes all of them compile anew,
because a compiled kernel holds the code of the kernels that it calls. NUMBA_DISABLE_JIT=1 runs the same code as plain
Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import binding as llvm
from llvmlite import ir
from numba.core import cgutils, event
from numba.extending import intrinsic, overload
from numba.np import arrayobj

from omnireduce.dtypes import Array

_array_of: Any = arrayobj.make_array
_insert_function: Any = cgutils.get_or_insert_function
_fill_array: Any = arrayobj.populate_array
_lengths_of: Any = cgutils.unpack_tuple
LINE_BYTES = 64  # of a cache line
WORD_BYTES = 8
F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile `function` on first use for each combination of argument types."""
    return _compiled(function)


def inlined(function: F) -> F:
    """A kernel whose code becomes part of the kernels that call it: what is done for every block is worth that."""
    return _compiled(function, forceinline=True)


def reordering(function: F) -> F:
    """A kernel whose float sums may be added in any order, so that they vectorise. Not for what ranks must agree on."""
    return _compiled(function, fastmath={"reassoc", "nsz"})


def entry(function: F) -> F:
    """A large kernel that Python calls, and no kernel may call. Its file has none of the code that compilers want:
    loaded, that takes ten times as much memory as the machine code."""
    return _compiled(function, stored=_machine_code_only)


def _compiled(function: F, stored: Callable[[Any], Any] | None = None, **more: Any) -> F:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", **more}
    try:
        compiled: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable folder for the cache: compile in every process
        return cast(F, numba.njit(**options)(function))
    if hasattr(compiled, "_cache"):  # not with the JIT off
        cache = compiled._cache
        cache._cache_file._source_stamp = source_stamp()
        cache._impl.reduce = stored or cache._impl.reduce
        cache.save_overload = _locked(cache.save_overload, fcntl.LOCK_EX)
        cache.load_overload = _locked(cache.load_overload, fcntl.LOCK_SH)
    return cast(F, compiled)


def _machine_code_only(result: Any) -> Any:
    """What numba stores of a compiled kernel, with empty functions in the place of those to build into others."""
    (name, kind, (machine_code, bitcode)), *rest = result._reduce()
    names = [each.name for each in llvm.parse_bitcode(bitcode).functions if not each.is_declaration]
    empty = llvm.parse_assembly("\n".join(f'define void @"{each}"() {{ ret void }}' for each in names))
    return (name, kind, (machine_code, empty.as_bitcode())), *rest


@lru_cache(maxsize=1)
def source_stamp() -> tuple[tuple[str, float, int], ...]:
    """What tells this state of the kernels from others: numba looks only at the file of each kernel."""
    here = Path(__file__).parent
    files = sorted(here.rglob("*.py"))
    return tuple((str(file.relative_to(here)), file.stat().st_mtime, file.stat().st_size) for file in files)


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


@contextlib.contextmanager
def watching_the_compiler() -> Iterator[Callable[[], bool]]:
    """Yields what tells whether a kernel has been compiled since, rather than loaded from the cache."""
    with event.install_recorder("numba:compile") as recorder:
        yield lambda: bool(recorder.buffer)


def row_of(rows: Array, k: int) -> Array:
    """`rows[k]` of a C-contiguous array of two dimensions.

    An ordinary slice counts a reference to the memory below it, and drops it again. Both are atomic, and together they
    take longer than to read a short row. This one counts nothing: use it while its array lives.
    """
    found: Array = rows[k]
    return found


def span_of(array: Array, start: int, size: int) -> Array:
    """`array[start : start + size]` of an array of one dimension, which must have these elements; see `row_of`."""
    return array[start : start + size]


def span_or(array: Array, start: int, other: Array) -> Array:
    """`span_of(array, start, other.size)`, or `other` itself where `start` is negative; see `row_of`. `other` is
    contiguous, and has the same type of element."""
    return other if start < 0 else span_of(array, start, other.size)


def _borrow(builder: Any, context: Any, array: Any, kind: Any, data: Any, size: Any) -> Any:
    """An array of `size` elements at `data`, of the type of element of `array`, that owns nothing."""
    found = _array_of(kind)(context, builder)
    itemsize = array.itemsize
    _fill_array(found, data=data, shape=[size], strides=[itemsize], itemsize=itemsize, meminfo=None)
    return found._getvalue()


def _line_of(array: Any) -> Any:
    return numba.types.Array(array.dtype, 1, "C", readonly=not array.mutable, aligned=array.aligned)


@intrinsic
def _row(typing_context: Any, rows: Any, k: Any) -> Any:
    kind = _line_of(rows)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = _array_of(signature.args[0])(context, builder, args[0])
        size = _lengths_of(builder, array.shape, 2)[1]
        data = builder.gep(array.data, [builder.mul(args[1], size)])
        return _borrow(builder, context, array, kind, data, size)

    return kind(rows, numba.intp), generate


@intrinsic
def _span(typing_context: Any, array: Any, start: Any, size: Any) -> Any:
    kind = _line_of(array)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = _array_of(signature.args[0])(context, builder, args[0])
        return _borrow(builder, context, array, kind, builder.gep(array.data, [args[1]]), args[2])

    return kind(array, numba.intp, numba.intp), generate


@intrinsic
def _span_or(typing_context: Any, array: Any, start: Any, other: Any) -> Any:
    kind = _line_of(array)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, other = (_array_of(signature.args[at])(context, builder, args[at]) for at in (0, 2))
        is_other = builder.icmp_signed("<", args[1], ir.Constant(args[1].type, 0))
        data = builder.select(is_other, other.data, builder.gep(array.data, [args[1]]))
        return _borrow(builder, context, array, kind, data, _lengths_of(builder, other.shape, 1)[0])

    return kind(array, numba.intp, other), generate


@overload(row_of, strict=False)
def _compile_row_of(rows: Any, k: Any) -> Any:
    emit: Any = _row
    return lambda rows, k: emit(rows, k)


@overload(span_of, strict=False)
def _compile_span_of(array: Any, start: Any, size: Any) -> Any:
    emit: Any = _span
    return lambda array, start, size: emit(array, start, size)


@overload(span_or, strict=False)
def _compile_span_or(array: Any, start: Any, other: Any) -> Any:
    emit: Any = _span_or
    return lambda array, start, other: emit(array, start, other)


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


def counter(words: Array, index: int) -> int:
    """The number `words[index]`, int64, which another process may be writing. What that process wrote before it stored
    the number with `publish` is seen from now on."""
    return int(words[index])


def publish(words: Array, index: int, value: int) -> None:
    """Store `value` in `words[index]`, int64, once everything that was written before can be seen. What is read after
    that was read later."""
    words[index] = value


def give_way() -> None:
    """Let another process that wants this processor have it."""


@intrinsic
def _load(typing_context: Any, words: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _array_of(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", WORD_BYTES)

    return numba.int64(words, numba.intp), generate


@intrinsic
def _store(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> None:
        data = _array_of(signature.args[0])(context, builder, args[0]).data
        builder.store_atomic(args[2], builder.gep(data, [args[1]]), "seq_cst", WORD_BYTES)

    return numba.void(words, numba.intp, numba.int64), generate


_sched_yield: Any = numba.types.ExternalFunction("sched_yield", numba.int32())


@overload(counter, strict=False)
def _compile_counter(words: Any, index: Any) -> Any:
    emit: Any = _load
    return lambda words, index: emit(words, index)


@overload(publish, strict=False)
def _compile_publish(words: Any, index: Any, value: Any) -> Any:
    emit: Any = _store
    return lambda words, index, value: emit(words, index, value)


@overload(give_way, strict=False)
def _compile_give_way() -> Any:
    emit: Any = _sched_yield

    def call() -> None:
        emit()

    return call
