"""Lengths of messages: short for a small tensor, longer for a large one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.protocol.collective.index_lists import LONGER, SHARE, MessageSizing

LENGTHS = MessageSizing.for_network(1 << 20)
BLOCK_BYTES = 1 << 10
LEAST, MOST = 256, 1024  # blocks


@pytest.mark.parametrize(
    ("sent", "at", "end", "expected"),
    [
        (0, 0, 1 << 20, LEAST),  # nothing is known yet
        (0, 1000, 1 << 20, LEAST),  # nothing but zeros so far
        (1000, 1000, LEAST * SHARE, LEAST),  # dense
        (1000, 1000, 2 * LEAST * SHARE, 2 * LEAST),
        (500, 1000, 2 * LEAST * SHARE, LEAST),  # half of the blocks are zeros
        (1000, 1000, 1 << 20, MOST),
        (1 << 39, 1 << 39, 1 << 40, MOST),
    ],
)
def test_a_long_message_is_a_part_of_what_goes_to_its_shard(sent: int, at: int, end: int, expected: int) -> None:
    assert LENGTHS.blocks(BLOCK_BYTES, sent, at, end) == expected


@given(st.integers(1, 1 << 31), st.integers(8, 1 << 23), st.data())
def test_every_message_has_room_for_a_block_and_keeps_its_limit(
    longest: int, block_bytes: int, data: st.DataObject
) -> None:
    end = data.draw(st.integers(0, 1 << 40))
    at = data.draw(st.integers(0, end))
    sent = data.draw(st.integers(0, at))
    sizing = MessageSizing.for_network(longest)
    assert sizing.longest // LONGER == sizing.shortest
    for each in (sizing, MessageSizing(longest, longest)):
        blocks = each.blocks(block_bytes, sent, at, end)
        assert 1 <= blocks <= each.max_blocks(block_bytes)
        assert blocks == 1 or blocks * block_bytes <= longest


def test_where_no_message_is_longer_the_tensor_makes_no_difference() -> None:
    assert {MessageSizing(4096, 4096).blocks(1024, at, at, 1 << 30) for at in (0, 1, 1 << 29)} == {4}
