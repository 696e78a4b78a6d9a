"""Densities against plain NumPy, and the estimate against its formulas."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnireduce.console.density.estimate import Density, estimate, measure
from omnireduce.core.dtypes import ELEMENT_TYPES, Array
from omnireduce.core.wire.blocks import HEADER_BYTES, INDEX_BYTES
from omnireduce.errors import UsageError


def blocks_by_hand(nonzero: Array, size: int) -> int:
    return sum(bool(nonzero[at : at + size].any()) for at in range(0, nonzero.size, size))


@settings(max_examples=150, deadline=None)
@given(
    elements=st.integers(0, 3000),
    dtype=st.sampled_from(list(ELEMENT_TYPES)),
    block_sizes=st.lists(st.integers(1, 20).map(lambda each: each * 8), min_size=1, max_size=4, unique=True),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.2, 1.0]),
    seed=st.integers(0, 1000),
)
def test_counts_match_numpy(elements: int, dtype: str, block_sizes: list[int], share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind = ELEMENT_TYPES[dtype]
    values = np.where(rng.random(elements) < share, 1 + rng.integers(0, 100, elements), 0).astype(kind.dtype)
    result = measure(values, block_sizes)
    assert result.elements == elements
    assert result.nonzero_elements == np.count_nonzero(values)
    assert result.nonzero_blocks == {size: blocks_by_hand(values != 0, size) for size in block_sizes}
    assert result.bytes == values.nbytes


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_zero_is_decided_on_bits(dtype: Any) -> None:
    values = np.zeros(64, dtype)
    values[0:8] = -0.0
    values[8] = np.nan
    values[16] = np.inf
    values[24] = ml_dtypes.finfo(dtype).smallest_subnormal
    result = measure(values, [8])
    assert (result.nonzero_elements, result.nonzero_blocks) == (3, {8: 3})


def test_chunks_are_joined_well() -> None:
    """Odd block sizes over more elements than are looked at in one piece."""
    rng = np.random.default_rng(5)
    values = (rng.random(2_500_003) < 0.0005).astype(np.int8)
    result = measure(values, [24, 1000])
    assert result.nonzero_elements == values.sum()
    assert result.nonzero_blocks == {size: blocks_by_hand(values, size) for size in (24, 1000)}


def test_byte_order_and_alignment_do_not_matter() -> None:
    values = np.zeros(1000, np.float32)
    values[::100] = -0.0
    values[5] = 1.0
    swapped = values.astype(">f4")
    shifted = np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:].view(np.float32)
    assert measure(values, [8]) == measure(swapped, [8]) == measure(shifted, [8])


@pytest.mark.parametrize("dtype", [np.complex64, np.bool_, np.longdouble, np.dtype("U3")])
def test_a_type_that_cannot_be_reduced(dtype: Any) -> None:
    with pytest.raises(UsageError, match="cannot reduce"):
        measure(np.zeros(8, dtype), [8])


def part(elements: int = 1024 * 256, density: float = 0.1, itemsize: int = 4) -> Density:
    blocks = -(-elements // 256)
    return Density(elements, itemsize, 0, {256: round(blocks * density)})


@pytest.mark.parametrize(("density", "world_size"), [(0.25, 2), (0.5, 8), (1.0, 3), (0.0, 4)])
def test_formulas(density: float, world_size: int) -> None:
    result = estimate([part(density=density)], 256, world_size=world_size, link_gbps=8)
    union = 1 - (1 - density) ** world_size
    nbytes = 1024 * 256 * 4
    own, unions = (INDEX_BYTES / 1024 * (1 if each <= 0.5 else 2 * (1 - each)) for each in (density, union))
    assert (result.density, result.union_density) == (density, union)
    up, down = (share * nbytes * (1 + each) + HEADER_BYTES for share, each in ((density, own), (union, unions)))
    assert result.wire_up_bytes == round(up)
    assert result.wire_down_bytes == round(down)
    assert math.isclose(result.time_ms, 0.3 + down / 1e6)
    assert math.isclose(result.dense_time_ms, 0.03 + 2 * (world_size - 1) / world_size * nbytes / 1e6)
    assert math.isclose(result.speedup, result.dense_time_ms / result.time_ms)
    assert result.helps == (density < 1)


def test_small_tensors_do_not_gain_however_sparse_they_are() -> None:
    assert estimate([part(64 * 256, 0.01)], 256, world_size=2, link_gbps=10).speedup < 0.5
    assert estimate([part(64 * 256, 0.01)] * 1000, 256, world_size=2, link_gbps=10).speedup < 0.5
    assert estimate([part(64_000 * 256, 0.01)], 256, world_size=2, link_gbps=10).speedup > 20


def test_parts_add_up() -> None:
    parts = [part(2560, 0.5), part(25600, 0.1), part(0)]
    together = estimate(parts, 256, world_size=2, link_gbps=1)
    alone = [estimate([each], 256, world_size=2, link_gbps=1) for each in parts]
    assert math.isclose(together.dense_time_ms, sum(each.dense_time_ms for each in alone))
    assert together.wire_up_bytes == sum(each.wire_up_bytes for each in alone)
    assert together.density == (5 + 10) / 110


def test_nothing_to_reduce() -> None:
    for parts in ([], [part(0)]):
        result = estimate(parts, 256, world_size=2, link_gbps=1)
        assert (result.density, result.speedup, result.helps) == (0, 0, False)


@pytest.mark.parametrize(("world_size", "link_gbps"), [(1, 10.0), (2, 0.0), (2, math.nan)])
def test_wrong_arguments(world_size: int, link_gbps: float) -> None:
    with pytest.raises(UsageError, match="expected at least 2 workers"):
        estimate([part()], 256, world_size=world_size, link_gbps=link_gbps)
