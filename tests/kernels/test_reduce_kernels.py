"""Reductions of blocks against NumPy in rank order, and 16-bit floats over all their bits."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_values, bits, is_number, reduce_in_rank_order
from samples import CASES, DTYPES, Array, awkward_values, sparse_tensor

from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.kernels import reduce as kernels
from omnireduce.kernels.merge_indices import ABSENT
from omnireduce.kernels.reduce import op_code, reduce_blocks, reduce_half_blocks

HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
STRIDE = 97 if os.environ.get("NUMBA_DISABLE_JIT") == "1" else 1  # between values, of all 65,536; plain Python is slow


def reduce_entries(dtype: str, op: str, arena: Array, parts: Array, out: Array) -> None:
    """Call the kernel that belongs to `dtype`."""
    element = ELEMENT_TYPES[dtype]
    arena, out = arena.view(element.storage), out.view(element.storage)
    if element.is_narrow:
        scratch = np.full((2, out.shape[1]), np.nan, np.float32)
        reduce_half_blocks(
            op_code(op, element), dtype == "bfloat16", arena, parts, out, scratch, scratch.view(np.uint32),
            parts.shape[1],
        )  # fmt: skip
    else:
        reduce_blocks(op_code(op, element), arena, parts, out, parts.shape[1])


def expected_entry(arena: Array, offsets: Array, size: int, op: str) -> Array:
    zeros = np.zeros(size, arena.dtype)
    return reduce_in_rank_order([zeros if at < 0 else arena[at : at + size] for at in offsets], op)


@pytest.mark.parametrize(("dtype", "op"), CASES)
@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 5),
    entries=st.integers(0, 4),
    words=st.integers(1, 5),
)
def test_reduces_in_rank_order(dtype: str, op: str, seed: int, ranks: int, entries: int, words: int) -> None:
    rng, size = np.random.default_rng(seed), words * 8
    arena = sparse_tensor(rng, dtype, 64 + 12 * size, size, 0.9, awkward=0.5)
    parts = rng.integers(0, arena.size - size, (entries, ranks))
    absent = rng.random(parts.shape) < 0.4
    absent[np.arange(entries), rng.integers(0, ranks, entries)] = False  # a block that nobody has is no entry
    parts[absent] = ABSENT
    out = sparse_tensor(rng, dtype, entries * size, size, 1.0).reshape(entries, size)
    reduce_entries(dtype, op, arena, parts, out)
    for k in range(entries):
        assert_same_values(out[k], expected_entry(arena, parts[k], size, op), f"entry {k} of parts {parts[k]}")


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_every_pair_of_awkward_values(dtype: str, op: str) -> None:
    values = awkward_values(dtype)
    arena = np.concatenate([np.repeat(values, values.size), np.tile(values, values.size)])
    size = values.size**2
    for offsets in ([0, size], [size, 0], [0, size, 0], [ABSENT, 0], [0, ABSENT], [0, ABSENT, size], [ABSENT, 0, size]):
        out = np.zeros((1, size), arena.dtype)
        reduce_entries(dtype, op, arena, np.array([offsets]), out)
        assert_same_values(out[0], expected_entry(arena, np.array(offsets), size, op), f"parts {offsets}")


@pytest.mark.parametrize("dtype", [name for name in DTYPES if not ELEMENT_TYPES[name].is_float])
def test_integers_wrap(dtype: str) -> None:
    limits = np.iinfo(dtype)
    arena = np.array([limits.max] * 8 + [1] * 8, dtype)
    out = np.zeros((1, 8), dtype)
    reduce_entries(dtype, "sum", arena, np.array([[0, 8]]), out)
    assert (out == limits.min).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_zero_among_factors_that_overflow_gives_zero(dtype: str) -> None:
    arena = np.full(8, ml_dtypes.finfo(dtype).max, ELEMENT_TYPES[dtype].dtype)
    for offsets in ([ABSENT, 0, 0, 0], [0, ABSENT, 0, 0]):
        out = np.ones((1, 8), arena.dtype)
        reduce_entries(dtype, "prod", arena, np.array([offsets]), out)
        assert (out == 0).all(), offsets


def test_a_16_bit_sum_is_rounded_once() -> None:
    # 2048 + 1 + 1: float16 has no 2049, so a sum rounded at every step would stay at 2048
    arena = np.repeat(np.array([2048, 1], np.float16), 8)
    out = np.zeros((1, 8), np.float16)
    reduce_entries("float16", "sum", arena, np.array([[0, 8, 8]]), out)
    assert (out == 2050).all()


def all_halves() -> Array:
    return np.arange(0, 65536, STRIDE, dtype=np.uint16)


@pytest.mark.parametrize("name", HALVES)
def test_decoding_all_16_bit_floats(name: str) -> None:
    stored = all_halves()
    values = np.zeros(stored.size, np.float32)
    kernels.decode_half(name == "bfloat16", stored, values, values.view(np.uint32))
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = stored.view(HALVES[name]).astype(np.float32)
    assert_same_values(values, expected)
    numbers = is_number(expected)
    assert bits(values[numbers]) == bits(expected[numbers])


@pytest.mark.parametrize("name", HALVES)
def test_encoding_all_16_bit_floats_and_all_roundings_between_them(name: str) -> None:
    with np.errstate(all="ignore"):
        exact = all_halves().view(HALVES[name]).astype(np.float32)
        finite = exact[np.isfinite(exact)]
        step = np.nextafter(finite.astype(HALVES[name]), HALVES[name].type(np.inf)).astype(np.float32)
        step = np.where(np.isfinite(step), step, 2 * finite)  # above the largest: where rounding reaches infinity
        middle = (finite.astype(np.float64) + step.astype(np.float64)).astype(np.float64) / 2
        middle = middle.astype(np.float32)
        infinity = np.float32(np.inf)
        values = np.concatenate([exact, middle, np.nextafter(middle, infinity), np.nextafter(middle, -infinity)])
        nans = np.array([0x7F800001, 0x7FBFFFFF, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
        values = np.concatenate([values, awkward_values("float32"), nans])
        expected: Any = values.astype(HALVES[name])
    result = np.zeros(values.size, np.uint16)
    kernels.encode_half(name == "bfloat16", values, values.view(np.uint32), result)
    assert_same_values(result.view(HALVES[name]), expected)
    numbers = is_number(expected)
    assert bits(result[numbers]) == bits(expected[numbers])


@pytest.mark.parametrize("name", HALVES)
def test_16_bit_floats_survive_a_sum_of_one(name: str) -> None:
    stored = all_halves()
    out = np.zeros((1, stored.size), HALVES[name])
    reduce_entries(name, "sum", stored.view(HALVES[name]), np.array([[0]]), out)
    numbers = is_number(stored.view(HALVES[name]))
    assert bits(out[0][numbers]) == bits(stored[numbers])
    assert not is_number(out[0][~numbers]).any()
