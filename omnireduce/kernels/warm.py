"""Compile, or load from the cache, every kernel for every element type, so that no collective waits for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from omnireduce.core.dtypes import ELEMENT_TYPES, Array
from omnireduce.kernels.checksum import LANES, mix_words
from omnireduce.kernels.claims import BuiltIn, Kernel, are_kept, in_turn
from omnireduce.kernels.codecs.table import BUILT_IN
from omnireduce.kernels.exchange import await_step, next_step, run, run_with_rows
from omnireduce.kernels.interpret import run_on_blocks
from omnireduce.kernels.jit import has_compiler, kernel_files, watching_the_compiler
from omnireduce.kernels.merge import admit_indices, admit_marked, leave_out, plan_every, plan_union
from omnireduce.kernels.pack import deal_rows, list_blocks, list_noted, pack_blocks, pack_listed, pack_rows
from omnireduce.kernels.reduce import OPS, reduce_blocks, reduce_half_blocks, reduce_half_planned, reduce_planned
from omnireduce.kernels.regions import SLOTS, STATE, anybody_left, anybody_sleeps, get_counter, set_counter
from omnireduce.kernels.runs import expand_runs, list_runs
from omnireduce.kernels.scatter import add_rows, scatter_blocks
from omnireduce.kernels.steps import STEP_BYTES, expand_steps, list_steps
from omnireduce.support.progress import Ticker

# of rows, too: those of halves are added as float32; in the same order in every process
STORAGES = list(dict.fromkeys(element.storage for element in ELEMENT_TYPES.values() if not element.is_narrow))


Progress = Callable[[int, int], None]  # how many kernels are ready, of how many
COMPILING = "compiling kernels (at the first start only): %d of %d are ready"
MOMENT_S = 1.0


def _silent(ready: int, total: int) -> None:
    """Nobody asks."""


def warm_up_aggregator(progress: Progress = _silent) -> None:
    """Make the aggregator's kernels ready; call `progress` about once a second while they are compiled."""
    make_ready([list(_of_aggregator())], progress)


def warm_up_all(progress: Progress = _silent) -> None:
    """Make all kernels ready that workers and aggregators need."""
    make_ready([worker_kernels(), list(_of_aggregator())], progress)


def worker_kernels(*, in_memory: bool = True) -> list[Kernel]:
    """The kernels that a worker calls; those of the exchange inside a host only if ranks may exchange `in_memory`."""
    return list(_of_worker(in_memory))


def make_ready(lists: Sequence[Sequence[Kernel]], progress: Progress = _silent) -> None:
    """Call each kernel of `lists`. A thread calls `progress` about once a second, if one is compiled, here or by
    another process: to load them is no news, however busy the machine is. Raises what `progress` raises."""
    ready, total, are_cold = 0, sum(map(len, lists)), not all(map(are_kept, lists))
    with watching_the_compiler() as has_compiled:

        def tell() -> None:
            if are_cold or has_compiled():
                progress(ready, total)

        with Ticker(tell, MOMENT_S) as ticker:
            for kernels in lists:
                for kernel in in_turn(kernels):
                    with _nothing_lost_in_callbacks():
                        kernel()
                    ready += 1
                    ticker.check()


@contextmanager
def _nothing_lost_in_callbacks() -> Iterator[None]:
    """Raise what a signal handler, such as that of Ctrl-C, has raised inside a callback of the compiler. Python would
    print that and go on. Where the callback should have taken the compiled kernel, numba then has none. Handlers run in
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
    """What was wrong with the files of compiled kernels; empty for nothing, and once somebody has asked."""
    return kernel_files().take_trouble() if has_compiler() else ""


def _of_aggregator() -> Iterator[Kernel]:
    indices, one = np.zeros((1, 1), np.int64), np.ones(1, np.int64)
    parts, zero = np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
    yield partial(admit_indices, indices[0], 0, 1, 0, 1, 1, one.copy())
    yield partial(plan_union, indices, zero, one, zero.copy(), 8, 1, one.copy(), parts.copy(), True, zero.copy())
    yield partial(plan_every, indices, zero, one, zero.copy(), 8, 0, 1, 1, 1, one.copy(), parts.copy())
    yield from _of_lists(one)
    row = np.zeros((1, 8), np.uint8)
    yield partial(leave_out, one, 0, row, row.copy())
    for storage in STORAGES:
        yield partial(reduce_blocks, OPS["sum"], np.zeros(8, storage), parts, np.zeros((1, 8), storage), 1)
    half, scratch = np.zeros(8, np.uint16), np.zeros((2, 8), np.float32)
    yield partial(
        reduce_half_blocks, OPS["sum"], True, half, parts, half.reshape(1, 8), scratch, scratch.view(np.uint32), 1
    )
    yield from _of_codecs()
    yield _of_programs()


def _of_programs() -> Kernel:
    block, number = np.zeros((1, 8), np.float32), np.zeros(1, np.int64)
    return partial(
        run_on_blocks, OPS["sum"], block[0], number.reshape(1, 1), block.copy(), 1,
        numbers=number, shards=1, stripe_blocks=1, elements=8, code=np.zeros((1, 4), np.uint8), scalars=block[0],
        state=block.copy(), columns=1, registers=block.copy(), totals=np.zeros(1),
    )  # fmt: skip


def _of_codecs() -> Iterator[Kernel]:
    values, keys, where = np.zeros((1, 8), np.float32), np.zeros(1, np.uint64), np.zeros(1, np.int64)
    for codec in BUILT_IN.values():
        encoded = np.zeros((1, codec.block_bytes(8)), np.uint8)
        yield partial(codec.encode_at, values, where, encoded, keys)
        yield partial(codec.sum, encoded.reshape(-1), where.reshape(1, 1), values)


def _of_worker(in_memory: bool = True) -> Iterator[Kernel]:
    words, index = np.zeros((1, 1), np.uint64), np.zeros(1, np.int64)
    yield partial(pack_blocks, words, words, True, np.uint64(1), 0, 1, 1, 1, words.copy(), index.copy())
    rows = words.view(np.uint8)
    yield partial(list_blocks, words, words, True, np.uint64(1), 0, 1, 1, 1, index.copy())
    yield partial(list_noted, rows[0], 1, 0, 1, 1, 1, index.copy())
    yield partial(pack_listed, words, index, words.copy())
    yield partial(deal_rows, index, 1, 1, index.copy(), np.zeros(2, np.int64))
    yield partial(pack_rows, index, rows, index, 0, rows.copy(), index.copy())
    for values in (np.zeros((1, 1), storage) for storage in STORAGES):
        yield partial(add_rows, values, index, np.array([0, 1]), values.copy())
    yield from _of_lists(index)
    unchanged = np.zeros(1, np.bool_)
    yield partial(admit_marked, index, 0, 0, 1, 0, 1, 1, index.copy(), unchanged)
    yield partial(scatter_blocks, words, words.copy(), index, unchanged, False)
    yield partial(mix_words, words[0], np.zeros(LANES, np.uint64))
    if in_memory:
        yield from _of_host()


def _of_lists(indices: Array) -> Iterator[Kernel]:
    yield partial(list_runs, indices, 1, 1, np.zeros((1, 2), np.int64))
    yield partial(expand_runs, np.zeros(2, np.int64), 0, 0, 1, 1, indices.copy())
    steps = np.zeros(1 + STEP_BYTES, np.uint8)
    yield partial(list_steps, indices, 1, steps)
    yield partial(expand_steps, steps, 0, 0, indices.copy())


def _of_host() -> Iterator[Kernel]:
    """The exchange inside a host: first its arithmetic, which is most of it."""
    plan, words, floats = np.zeros((0, 2), np.int64), np.zeros((0, 1), np.uint64), np.zeros((2, 0), np.float32)
    for storage in STORAGES:
        row = np.zeros((0, 1), storage)
        yield BuiltIn(reduce_planned, OPS["sum"], row.reshape(-1), plan, row, row)
    half, bits = np.zeros((0, 1), np.uint16), floats.view(np.uint32)
    yield BuiltIn(reduce_half_planned, OPS["sum"], True, half.reshape(-1), plan, half, half, floats, bits)
    state, ints = np.zeros(1, STATE), np.zeros(SLOTS, np.int64)
    state["has_begun"] = state["has_agreed"] = 1  # of a tensor without chunks
    places, marked, notes = np.zeros((3, 1), np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8)
    tensor = words, words, words, words
    yield partial(
        run, state, ints, ints.view(np.uint64), *tensor, places, plan, marked, notes, floats, bits, marked,
        steps=1, looks=1,
    )  # fmt: skip
    rows, lists = np.zeros((0, 1), np.uint8), np.zeros((5, 1), np.int64)
    yield partial(
        run_with_rows, state, ints, ints.view(np.uint64), marked, lists, marked, marked, rows, rows, plan, floats, bits,
        marked, steps=1, looks=1,
    )  # fmt: skip
    yield partial(await_step, state, ints, 1)
    yield partial(anybody_sleeps, state, ints, marked)
    yield partial(anybody_left, state, ints)
    yield partial(next_step, state, ints)
    yield partial(set_counter, ints, 0, 0)
    yield partial(get_counter, ints, 0)
