"""Kernels made ready, compiled or loaded from the cache, before a collective needs them; and how far that is.

A job that exchanges tensors only in memory makes ready what every collective there needs, and sums of float32. What
only some collectives need is made ready when the first of them starts. All other processes make ready all that they may
need when they start.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from omnireduce.core.dtypes import ELEMENT_TYPES, Array
from omnireduce.kernels.array_checksum import LANES, mix_words
from omnireduce.kernels.codecs.table import BUILT_IN
from omnireduce.kernels.compiling.claims import Kernel, are_kept, share_out
from omnireduce.kernels.compiling.jit import has_compiler, kernel_files, watching_the_compiler
from omnireduce.kernels.exchange_steps import await_step, next_step, run, run_with_rows
from omnireduce.kernels.index_runs import expand_runs, list_runs
from omnireduce.kernels.index_steps import STEP_BYTES, expand_steps, list_steps
from omnireduce.kernels.interpret import run_on_blocks
from omnireduce.kernels.merge_indices import admit_indices, admit_marked, leave_out, plan_every, plan_union
from omnireduce.kernels.nonzero_blocks import deal_rows, list_blocks, list_noted, pack_blocks, pack_listed, pack_rows
from omnireduce.kernels.reduce import OPS, reduce_blocks, reduce_half_blocks
from omnireduce.kernels.reducers_by_type import reducer_of
from omnireduce.kernels.regions import (
    FLOAT32,
    SLOTS,
    STATE,
    STORAGES,
    anybody_left,
    anybody_sleeps,
    get_counter,
    set_counter,
)
from omnireduce.kernels.scatter import add_rows, scatter_blocks
from omnireduce.support.progress import Ticker

# The types in which blocks and rows are added; narrow floats are added as float32. In the same order in every process.
ADDED = list(dict.fromkeys(element.storage for element in ELEMENT_TYPES.values() if not element.is_narrow))


Progress = Callable[[float, float], None]  # the work that is done, and all work, in seconds that a processor takes
MOMENT_S = 1.0
ALMOST = 0.95  # so much of a kernel counts as done at most while it compiles


def progress_text(done_s: float, total_s: float) -> str:
    """The message to users: how far the work is."""
    return f"compiling kernels (at the first start only): {100 * done_s / max(total_s, 1e-9):.0f} % done"


def _silent(done_s: float, total_s: float) -> None:
    """Nobody asks."""


def warm_up_aggregator(progress: Progress = _silent) -> None:
    """Make the aggregator's kernels ready; call `progress` about once a second while they are compiled."""
    make_ready(aggregator_kernels(), progress)


def warm_up_all(progress: Progress = _silent) -> None:
    """Make all kernels ready that workers and aggregators need."""
    make_ready([*worker_kernels(), *_of_aggregator(reduce_s=0.4)], progress)  # half of their work is done by then


def make_ready(kernels: Sequence[Kernel], progress: Progress = _silent) -> None:
    """Call each kernel. A thread calls `progress` about once a second, if one is compiled, here or by another process:
    to load them is no news, however busy the machine is. Raises what `progress` raises."""
    kernels = list({kernel.name: kernel for kernel in kernels}.values())
    with watching_the_compiler() as has_compiled:
        work, is_cold = _Progress(kernels), not are_kept(kernels)

        def tell() -> None:
            if is_cold or has_compiled():
                progress(work.done_s, work.total_s)

        with Ticker(tell, MOMENT_S) as ticker:
            for kernel in share_out(kernels):
                with work.on(kernel), _nothing_lost_in_callbacks():
                    kernel.call()
                ticker.check()


class _Progress:
    """Progress of the work on some kernels, in seconds of a processor. A kernel that is compiled now counts by the time
    that this process has worked on it."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.total_s = sum(kernel.seconds for kernel in kernels)
        self._ready_s = self._current_s = self._began_at = 0.0

    @property
    def done_s(self) -> float:
        return self._ready_s + min(time.process_time() - self._began_at, ALMOST * self._current_s)

    @contextmanager
    def on(self, kernel: Kernel) -> Iterator[None]:
        """Count the work on this kernel, which is ready in the end."""
        self._current_s, self._began_at = kernel.seconds, time.process_time()
        yield
        self._current_s = 0.0
        self._ready_s += kernel.seconds


@contextmanager
def _nothing_lost_in_callbacks() -> Iterator[None]:
    """Raise what a signal handler, such as that of Ctrl-C, has raised inside a callback of the compiler. Python would
    print that and go on. If the callback should have taken the compiled kernel, numba then has none. Handlers run in
    the main thread alone; there is one hook for all threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    lost = list[BaseException]()
    hook = sys.unraisablehook

    def keep(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_value is not None and "ctypes callback" in (unraisable.err_msg or ""):
            lost.append(unraisable.exc_value)
        else:
            hook(unraisable)

    sys.unraisablehook = keep
    try:
        yield
    except RuntimeError:
        if not lost:
            raise
    finally:
        sys.unraisablehook = hook
    if lost:
        raise lost[0]


def take_trouble() -> str:
    """The trouble with the files of compiled kernels, or an empty text. Each trouble is returned once."""
    return kernel_files().take_trouble() if has_compiler() else ""


def worker_kernels(*, in_memory: bool = True) -> list[Kernel]:
    """All kernels that a worker calls; those of the exchange inside a host only if ranks may exchange `in_memory`."""
    kernels = list(_of_messages())
    if in_memory:
        kernels += [exchange_kernel(), *row_kernels(), *map(reducer_kernel, range(len(STORAGES)))]
    return kernels


def first_kernels() -> list[Kernel]:
    """The kernels that a worker needs at first, if its job exchanges tensors only in memory."""
    return [exchange_kernel(), reducer_kernel(FLOAT32)]


def reducer_kernel(storage: int) -> Kernel:
    """The kernel that adds elements of STORAGES[storage] inside a host."""
    name = STORAGES[storage]
    return Kernel(f"reduce_{name}", 1.2 if "float16" in name else 2.0, partial(reducer_of, storage))


def exchange_kernel() -> Kernel:
    """The kernels that every exchange inside a host needs. One process compiles them all: they share most code."""
    return Kernel("exchange", 6.0, _call_exchange)


def row_kernels() -> list[Kernel]:
    """The kernels that an exchange of rows inside a host needs besides."""
    plan, floats, marked = np.zeros((0, 2), np.int64), np.zeros((2, 0), np.float32), np.zeros(0, np.int64)
    state, ints = _of_no_tensor()
    rows, lists = np.zeros((0, 1), np.uint8), np.zeros((5, 1), np.int64)
    return [_kernel(
        3.3, run_with_rows, state, ints, ints.view(np.uint64), marked, lists, marked, marked, rows, rows, plan, floats,
        floats.view(np.uint32), marked, steps=1, looks=1,
    )]  # fmt: skip


def aggregator_kernels() -> list[Kernel]:
    """All kernels that an aggregator calls."""
    return list(_of_aggregator())


def _kernel(seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Kernel:
    """The kernel for the types of these arguments."""
    types = [argument.dtype.name if isinstance(argument, np.ndarray) else type(argument).__name__ for argument in args]
    owner = getattr(function, "__self__", None)  # of the methods of codecs
    name = function.__name__ if owner is None else f"{type(owner).__name__}.{function.__name__}"
    return Kernel(f"{name}({', '.join(types)})", seconds, partial(function, *args, **kwargs))


def _of_aggregator(reduce_s: float = 2.0) -> Iterator[Kernel]:
    indices, one = np.zeros((1, 1), np.int64), np.ones(1, np.int64)
    parts, zero = np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
    yield _kernel(0.2, admit_indices, indices[0], 0, 1, 0, 1, 1, one.copy())
    yield _kernel(0.5, plan_union, indices, zero, one, zero.copy(), 8, 1, one.copy(), parts.copy(), True, zero.copy())
    yield _kernel(0.2, plan_every, indices, zero, one, zero.copy(), 8, 0, 1, 1, 1, one.copy(), parts.copy())
    yield from _of_lists(one)
    row = np.zeros((1, 8), np.uint8)
    yield _kernel(0.1, leave_out, one, 0, row, row.copy())
    for storage in ADDED:
        yield _kernel(reduce_s, reduce_blocks, OPS["sum"], np.zeros(8, storage), parts, np.zeros((1, 8), storage), 1)
    half, scratch = np.zeros(8, np.uint16), np.zeros((2, 8), np.float32)
    bits = scratch.view(np.uint32)
    yield _kernel(1.0, reduce_half_blocks, OPS["sum"], True, half, parts, half.reshape(1, 8), scratch, bits, 1)
    yield from _of_codecs()
    yield _of_programs()


def _of_programs() -> Kernel:
    block, number = np.zeros((1, 8), np.float32), np.zeros(1, np.int64)
    return _kernel(
        5.0, run_on_blocks, OPS["sum"], block[0], number.reshape(1, 1), block.copy(), 1,
        numbers=number, shards=1, stripe_blocks=1, elements=8, code=np.zeros((1, 4), np.uint8), scalars=block[0],
        state=block.copy(), columns=1, registers=block.copy(), totals=np.zeros(1),
    )  # fmt: skip


def _of_codecs() -> Iterator[Kernel]:
    values, keys, where = np.zeros((1, 8), np.float32), np.zeros(1, np.uint64), np.zeros(1, np.int64)
    for codec in {type(codec): codec for codec in BUILT_IN.values()}.values():
        encoded = np.zeros((1, codec.block_bytes(8)), np.uint8)
        yield _kernel(0.4, codec.encode_at, values, where, encoded, keys)
        yield _kernel(0.25, codec.sum, encoded.reshape(-1), where.reshape(1, 1), values)


def _of_messages() -> Iterator[Kernel]:
    words, index = np.zeros((1, 1), np.uint64), np.zeros(1, np.int64)
    yield _kernel(0.9, pack_blocks, words, words, True, np.uint64(1), 0, 1, 1, 1, words.copy(), index.copy())
    rows = words.view(np.uint8)
    yield _kernel(0.3, list_blocks, words, words, True, np.uint64(1), 0, 1, 1, 1, index.copy())
    yield _kernel(0.2, list_noted, rows[0], 1, 0, 1, 1, 1, index.copy())
    yield _kernel(0.1, pack_listed, words, index, words.copy())
    yield _kernel(0.15, deal_rows, index, 1, 1, index.copy(), np.zeros(2, np.int64))
    yield _kernel(0.1, pack_rows, index, rows, index, 0, rows.copy(), index.copy())
    for values in (np.zeros((1, 1), storage) for storage in ADDED):
        yield _kernel(0.1, add_rows, values, index, np.array([0, 1]), values.copy())
    yield from _of_lists(index)
    unchanged = np.zeros(1, np.bool_)
    yield _kernel(0.2, admit_marked, index, 0, 0, 1, 0, 1, 1, index.copy(), unchanged)
    yield _kernel(0.2, scatter_blocks, words, words.copy(), index, unchanged, False)
    yield _kernel(0.15, mix_words, words[0], np.zeros(LANES, np.uint64))


def _of_lists(indices: Array) -> Iterator[Kernel]:
    yield _kernel(0.1, list_runs, indices, 1, 1, np.zeros((1, 2), np.int64))
    yield _kernel(0.2, expand_runs, np.zeros(2, np.int64), 0, 0, 1, 1, indices.copy())
    steps = np.zeros(1 + STEP_BYTES, np.uint8)
    yield _kernel(0.1, list_steps, indices, 1, steps)
    yield _kernel(0.1, expand_steps, steps, 0, 0, indices.copy())


def _of_no_tensor() -> tuple[Array, Array]:
    """A state in which all steps are taken, and the region."""
    state = np.zeros(1, STATE)
    state["has_begun"] = state["has_agreed"] = 1
    return state, np.zeros(SLOTS, np.int64)


def _call_exchange() -> None:
    plan, words, floats = np.zeros((0, 2), np.int64), np.zeros((0, 1), np.uint64), np.zeros((2, 0), np.float32)
    state, ints = _of_no_tensor()
    places, marked, notes = np.zeros((3, 1), np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8)
    tensor = words, words, words, words
    run(
        state, ints, ints.view(np.uint64), *tensor, places, plan, marked, notes, floats, floats.view(np.uint32), marked,
        steps=1, looks=1,
    )  # fmt: skip
    await_step(state, ints, 1)
    anybody_sleeps(state, ints, marked)
    anybody_left(state, ints)
    next_step(state, ints)
    set_counter(ints, 0, 0)
    get_counter(ints, 0)
