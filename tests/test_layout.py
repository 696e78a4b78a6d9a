"""Blocks, stripes and shards: arithmetic in 64 bits and beyond."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.core.blocks_and_stripes import Layout

SIZES = st.integers(0, 3000)
HUGE = st.integers(2**31 - 2, 2**40) | st.integers(0, 2**62)


@given(elements=SIZES, block_size=st.integers(1, 300))
def test_blocks_cover_the_tensor(elements: int, block_size: int) -> None:
    layout = Layout(elements, block_size)
    starts = list(range(0, elements, block_size))
    assert layout.blocks == len(starts)
    assert layout.full_blocks == sum(start + block_size <= elements for start in starts)
    assert layout.tail_elements == (elements - starts[-1]) % block_size if starts else layout.tail_elements == 0


@given(elements=HUGE, block_size=st.integers(1, 2**20))
def test_no_size_overflows(elements: int, block_size: int) -> None:
    layout = Layout(elements, block_size)
    assert layout.full_blocks * block_size + layout.tail_elements == elements
    assert layout.blocks == layout.full_blocks + (layout.tail_elements > 0)


@given(elements=SIZES, shards=st.integers(1, 9), stripe=st.integers(1, 20))
def test_every_block_belongs_to_the_shard_of_its_stripe(elements: int, shards: int, stripe: int) -> None:
    layout = Layout(elements, 8, shards, stripe)
    owned: dict[int, list[int]] = {shard: [] for shard in range(shards)}
    for first in range(0, layout.blocks, stripe):
        owned[first // stripe % shards] += range(first, min(first + stripe, layout.blocks))
    for shard, blocks in owned.items():
        assert all(layout.owner(block) == shard for block in blocks)
        assert layout.first_block(shard) == (blocks[0] if blocks else layout.blocks)
        assert layout.stripes(shard).count(layout.blocks) == len(blocks)


@given(elements=SIZES, shards=st.integers(1, 9), stripe=st.integers(1, 20), whole_bytes=st.integers(0, 20_000))
def test_a_small_tensor_goes_to_the_first_shard_as_a_whole(
    elements: int, shards: int, stripe: int, whole_bytes: int
) -> None:
    striped = Layout(elements, 8, shards, stripe)
    dealt = Layout(elements, 8).dealt(shards, stripe, whole_bytes, 32)
    if striped.blocks * 32 > whole_bytes:
        assert dealt == striped
    else:
        assert [shard for shard in range(shards) if dealt.takes_part(shard)] == [0]
        assert dealt.stripes(0).count(dealt.blocks) == dealt.blocks


def test_more_than_2_to_the_31_elements() -> None:
    layout = Layout(2**33 + 5, 256, shards=3, stripe_blocks=64)
    assert (layout.blocks, layout.full_blocks, layout.tail_elements) == (2**25 + 1, 2**25, 5)
    assert layout.owner(2**25) == 2**25 // 64 % 3
    layout = Layout(2**61, 8, shards=2, stripe_blocks=1)
    assert (layout.blocks, layout.owner(2**58 - 1)) == (2**58, 1)


@pytest.mark.parametrize("shards", [1, 2, 64])
def test_an_empty_tensor_has_no_blocks(shards: int) -> None:
    layout = Layout(0, 256, shards)
    assert (layout.blocks, layout.full_blocks, layout.tail_elements) == (0, 0, 0)
    assert [layout.first_block(shard) for shard in range(shards)] == [0] * shards
