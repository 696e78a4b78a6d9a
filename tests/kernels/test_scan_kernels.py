"""Scanning and packing against obvious loops."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import DTYPES, Array, awkward_values, sparse_tensor

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.kernels.nonzero_blocks import (
    deal_rows,
    list_blocks,
    list_noted,
    nonzero_blocks,
    pack_blocks,
    pack_listed,
    pack_rows,
)
from omnireduce.kernels.scatter import scatter_blocks

SEEDS = st.integers(0, 2**32 - 1)


def as_words(tensor: Array, block_size: int) -> Array:
    return tensor.view(np.uint64).reshape(-1, block_size * tensor.itemsize // 8)


def is_data(tensor: Array, block_size: int) -> Array:
    """Per block: some element is neither +0 nor -0."""
    with np.errstate(invalid="ignore"):  # signalling NaN of bfloat16
        return (tensor.reshape(-1, block_size) != 0).any(axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_awkward_value_alone_is_data_unless_it_is_zero(dtype: str) -> None:
    element = ELEMENT_TYPES[dtype]
    for value in np.concatenate([awkward_values(dtype), np.ones(1, element.dtype)]):
        for at in range(16):
            tensor = np.zeros(16, element.dtype)
            tensor[at] = value
            result = np.zeros(1, np.bool_)
            count = nonzero_blocks(as_words(tensor, 16), element.zero_mask, result)
            assert count == result[0] == (value != 0), (value, at)


@pytest.mark.parametrize("name", [name for name, element in ELEMENT_TYPES.items() if element.is_narrow])
def test_of_all_narrow_floats_only_the_two_zeros_are_zero(name: str) -> None:
    storage = ELEMENT_TYPES[name].storage
    values = 1 << 8 * storage.itemsize
    tensor = np.zeros((values, 8), storage)
    tensor[:, 5] = np.arange(values)
    result = np.zeros(values, np.bool_)
    assert nonzero_blocks(tensor.view(np.uint64), ELEMENT_TYPES[name].zero_mask, result) == values - 2
    assert set(np.flatnonzero(~result)) == {0, values // 2}


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_a_block_of_only_the_most_negative_integer_is_data(dtype: str) -> None:
    tensor = np.full(32, np.iinfo(dtype).min, dtype)
    result = np.zeros(2, np.bool_)
    assert nonzero_blocks(as_words(tensor, 16), ELEMENT_TYPES[dtype].zero_mask, result) == 2


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=SEEDS, blocks=st.integers(0, 40), octets=st.integers(1, 12), density=st.floats(0, 1))
def test_nonzero_blocks(dtype: str, seed: int, blocks: int, octets: int, density: float) -> None:
    size = octets * 8
    tensor = sparse_tensor(np.random.default_rng(seed), dtype, blocks * size, size, density)
    result = np.ones(blocks, np.bool_)
    count = nonzero_blocks(as_words(tensor, size), ELEMENT_TYPES[dtype].zero_mask, result)
    assert count == result.sum()
    assert (result == is_data(tensor, size)).all()


def pack_slowly(
    data: Array, layout: Layout, shard: int, cursor: int, span: int, capacity: int
) -> tuple[list[int], list[int], int]:
    """Scan the shard's blocks from `cursor` on. Return the packed blocks, the zero blocks, and the next cursor."""
    packed: list[int] = []
    zero: list[int] = []
    owned = [block for block in range(cursor, layout.blocks) if layout.owner(block) == shard]
    for block in owned[:span]:
        if len(packed) == capacity:
            return packed, zero, block
        if not data[block]:
            zero.append(block)
        else:
            packed.append(block)
    return packed, zero, owned[span] if len(owned) > span else layout.blocks


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    seed=SEEDS,
    blocks=st.integers(0, 60),
    octets=st.integers(1, 12),
    density=st.floats(0, 1),
    shards=st.integers(1, 4),
    stripe=st.integers(1, 9),
    span=st.integers(1, 70),
    capacity=st.integers(1, 20),
    in_place=st.booleans(),
    copies=st.booleans(),
)
def test_pack_blocks(
    dtype: str,
    seed: int,
    blocks: int,
    octets: int,
    density: float,
    shards: int,
    stripe: int,
    span: int,
    capacity: int,
    in_place: bool,
    copies: bool,
) -> None:
    """With their copies in one pass, or only listed and copied later."""
    size, rng = octets * 8, np.random.default_rng(seed)
    layout = Layout(blocks * size, size, shards, stripe)
    tensor = sparse_tensor(rng, dtype, blocks * size, size, density)
    data, original = is_data(tensor, size), as_words(tensor.copy(), size)
    source = as_words(tensor, size)
    target = source if in_place else np.full_like(source, 7)
    expected_target = target.copy()
    mask = ELEMENT_TYPES[dtype].zero_mask
    for shard in range(shards):
        cursor = layout.first_block(shard)
        while cursor < blocks:
            rows, indices = np.full((capacity, octets * tensor.itemsize), 9, np.uint64), np.full(capacity, -9)
            packed, zero, following = pack_slowly(data, layout, shard, cursor, span, capacity)
            arguments = source, target, in_place, mask, cursor, span, stripe, shards
            if copies:
                count, cursor = pack_blocks(*arguments, rows, indices)
            else:
                count, cursor = list_blocks(*arguments, indices)
                pack_listed(source, indices[:count], rows)
            assert (list(indices[:count]), cursor) == (packed, following)
            assert (rows[:count] == original[packed]).all()
            assert (rows[count + 1 :] == 9).all(), "only the row behind the last one may serve as scratch"
            expected_target[zero] = 0
            assert (target == expected_target).all()
    if not in_place:
        assert (source == original).all()


@given(
    seed=SEEDS, blocks=st.integers(1, 60), density=st.floats(0, 1), shards=st.integers(1, 4), stripe=st.integers(1, 9),
    capacity=st.integers(1, 20), ready=st.integers(0, 60),
)  # fmt: skip
def test_listed_by_notes_and_copied(
    seed: int, blocks: int, density: float, shards: int, stripe: int, capacity: int, ready: int
) -> None:
    """Blocks with the note 2, whatever is in them, up to where they are ready."""
    rng, limit = np.random.default_rng(seed), min(ready, blocks)
    layout = Layout(blocks * 8, 8, shards, stripe)
    source = rng.integers(0, 9, (blocks, 4)).astype(np.uint64)
    notes = rng.choice(np.array([0, 1, 4, 5], np.uint8), blocks)
    notes[rng.random(blocks) < density] |= 2
    for shard in range(shards):
        expected = [b for b in range(limit) if layout.owner(b) == shard and notes[b] & 2]
        cursor, packed = layout.first_block(shard), list[int]()
        while cursor < limit:
            rows, indices = np.full((capacity, 4), 99, np.uint64), np.full(capacity, -9)
            count, cursor = list_noted(notes, 2, cursor, limit, stripe, shards, indices)
            pack_listed(source, indices[:count], rows)
            assert (rows[:count] == source[indices[:count]]).all()
            assert (rows[count:] == 99).all()
            packed += indices[:count].tolist()
            assert count == capacity or cursor == limit
        assert packed == expected


@pytest.fixture
def vast() -> Iterator[Array]:
    """32 GiB of zeros as (2**26, 64) words, of which only what is written takes memory."""
    file = os.memfd_create("vast")
    try:
        os.ftruncate(file, 2**35)
        memory = mmap.mmap(file, 2**35)
    finally:
        os.close(file)
    return np.frombuffer(memory, np.uint64).reshape(2**26, 64)


@pytest.mark.parametrize("shards", [1, 3])
def test_packing_and_placing_beyond_2_to_the_31_words(vast: Array, shards: int) -> None:
    last = len(vast) - 1
    layout = Layout(vast.size, 64, shards, 1)
    vast[last] = np.arange(64)
    vast[last - 3] = 7
    rows, indices = np.zeros((8, 64), np.uint64), np.zeros(8, np.int64)
    cursor = next(block for block in range(last - 7, last) if layout.owner(block) == layout.owner(last))
    mask = ELEMENT_TYPES["int64"].zero_mask
    count, following = pack_blocks(vast, vast, True, mask, cursor, 99, 1, shards, rows, indices)
    assert (indices[:count].tolist(), following) == ([last - 3, last], last + 1)
    assert (rows[0] == 7).all()
    assert (rows[1] == np.arange(64)).all()
    scatter_blocks(vast, rows[1::-1], np.array([2**25 + 1, last]), np.zeros(2, np.bool_), False)
    assert (vast[2**25 + 1] == np.arange(64)).all()
    assert (vast[last] == 7).all()


@given(
    seed=SEEDS,
    total=st.integers(1, 80),
    row_bytes=st.integers(1, 20),
    shards=st.integers(1, 4),
    stripe=st.integers(1, 9),
    capacity=st.integers(1, 20),
    offset=st.sampled_from([0, 2**33]),
)
def test_pack_rows(seed: int, total: int, row_bytes: int, shards: int, stripe: int, capacity: int, offset: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = np.flatnonzero(rng.random(total) < rng.random()) + offset
    values = np.frombuffer(rng.bytes(numbers.size * row_bytes), np.uint8).reshape(numbers.size, row_bytes).copy()
    layout = Layout((total + offset) * 8, 8, shards, stripe)
    order, starts = np.full(numbers.size, -9), np.full(shards + 1, -9)
    deal_rows(numbers, stripe, shards, order, starts)
    for shard in range(shards):
        mine = [at for at, number in enumerate(numbers) if layout.owner(int(number)) == shard]
        own_rows = order[starts[shard] : starts[shard + 1]]
        assert own_rows.tolist() == mine
        for position in range(0, len(mine), capacity):
            rows, indices = np.full((capacity, row_bytes), 9, np.uint8), np.full(capacity, -9)
            count = pack_rows(numbers, values, own_rows, position, rows, indices)
            chosen = mine[position : position + capacity]
            assert count == len(chosen)
            assert (indices[:count] == numbers[chosen]).all()
            assert (rows[:count] == values[chosen]).all()
            assert (indices[count:] == -9).all()
            assert (rows[count:] == 9).all()
    assert (starts[0], starts[-1]) == (0, numbers.size)
