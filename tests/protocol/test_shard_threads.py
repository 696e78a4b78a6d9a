"""Work that is done ahead of its turn counts when its turn comes."""

from __future__ import annotations

import numpy as np
import pytest

from omnireduce.core.wire.blocks import HEADER_BYTES
from omnireduce.errors import ProtocolError
from omnireduce.protocol.collective.index_lists import MessageSizing
from omnireduce.protocol.collective.stream import ShardStream


def test_a_broken_message_that_is_placed_ahead_raises_in_its_turn() -> None:
    slots = np.zeros((2, 4096), np.uint8)
    stream = ShardStream(0, slots, slots, 64, MessageSizing(1024, 1024))
    stream.place(0, HEADER_BYTES)  # nothing is under way
    with pytest.raises(ProtocolError, match="out of order"):
        stream.received(0, HEADER_BYTES)
