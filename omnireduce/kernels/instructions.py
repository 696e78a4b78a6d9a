"""Instructions of the processor that Python has no words for: kernels call these functions like others.

With the JIT off, each is what stands here as Python. The compiler emits the machine's instruction in its place.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np import arrayobj

from omnireduce.core.dtypes import Array

_array_of: Any = arrayobj.make_array
_insert_function: Any = cgutils.get_or_insert_function
_fill_array: Any = arrayobj.populate_array
_lengths_of: Any = cgutils.unpack_tuple
_stored_on_stack: Any = cgutils.alloca_once_value
LINE_BYTES = 64  # of a cache line
WORD_BYTES = 8
FLUSHES = {"x86_64": 0x8040, "aarch64": 1 << 24}  # FTZ and DAZ of MXCSR; FZ of FPCR


def row_of(rows: Array, k: int) -> Array:
    """`rows[k]` of a C-contiguous array of two dimensions.

    An ordinary slice counts a reference to the memory below it, and drops it again. Both are atomic, and together they
    take longer than to read a short row. This one counts nothing: use it while its array lives.
    """
    row: Array = rows[k]
    return row


def span_of(array: Array, start: int, size: int) -> Array:
    """`array[start : start + size]` of an array of one dimension, which must have these elements; see `row_of`."""
    return array[start : start + size]


def span_or(array: Array, start: int, other: Array) -> Array:
    """`span_of(array, start, other.size)`, or `other` itself where `start` is negative; see `row_of`. `other` is
    contiguous, and has the same type of element."""
    return other if start < 0 else span_of(array, start, other.size)


def _borrow(builder: Any, context: Any, array: Any, kind: Any, data: Any, size: Any) -> Any:
    """An array of `size` elements at `data`, of the type of element of `array`, that owns nothing."""
    borrowed = _array_of(kind)(context, builder)
    itemsize = array.itemsize
    _fill_array(borrowed, data=data, shape=[size], strides=[itemsize], itemsize=itemsize, meminfo=None)
    return borrowed._getvalue()


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
    """The intrinsic for the machine's instruction: `prefetch`, or with `write` 1 `prefetch_to_write`."""

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


def flush_denormals() -> int:
    """From now on, in this thread, the processor takes numbers below the smallest normal one for zero, as operands and
    as results, whatever they would cost. Returns the mode before, for `restore_mode`."""
    return 0


def restore_mode(mode: int) -> None:
    """End what `flush_denormals` has begun."""


_word: Any = ir.IntType(8 * WORD_BYTES)


def _read_mode(builder: Any) -> Any:
    if platform.machine() == "aarch64":
        kind = ir.FunctionType(_word, [])
        return builder.call(_insert_function(builder.module, kind, "llvm.aarch64.get.fpcr"), [])
    mode_address = _stored_on_stack(builder, ir.Constant(_word, 0))
    _exchange_mode(builder, "llvm.x86.sse.stmxcsr", mode_address)
    return builder.load(mode_address)


def _write_mode(builder: Any, mode: Any) -> None:
    if platform.machine() == "aarch64":
        kind = ir.FunctionType(ir.VoidType(), [_word])
        builder.call(_insert_function(builder.module, kind, "llvm.aarch64.set.fpcr"), [mode])
        return
    mode_address = _stored_on_stack(builder, mode)
    _exchange_mode(builder, "llvm.x86.sse.ldmxcsr", mode_address)


def _exchange_mode(builder: Any, instruction: str, mode_address: Any) -> None:
    """Emit `instruction` (stmxcsr or ldmxcsr), which uses the lower 32 bits at `mode_address`."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
    function = _insert_function(builder.module, kind, instruction)
    builder.call(function, [builder.bitcast(mode_address, cgutils.voidptr_t)])


@intrinsic
def _flush(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        before = _read_mode(builder)
        _write_mode(builder, builder.or_(before, ir.Constant(_word, FLUSHES[platform.machine()])))
        return before

    return numba.int64(), generate


@intrinsic
def _restore(typing_context: Any, mode: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> None:
        _write_mode(builder, args[0])

    return numba.void(numba.int64), generate


@overload(flush_denormals, strict=False)
def _compile_flush_denormals() -> Any:
    emit: Any = _flush
    return (lambda: emit()) if platform.machine() in FLUSHES else (lambda: 0)


@overload(restore_mode, strict=False)
def _compile_restore_mode(mode: Any) -> Any:
    emit: Any = _restore
    return (lambda mode: emit(mode)) if platform.machine() in FLUSHES else (lambda mode: None)
