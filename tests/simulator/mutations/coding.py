"""Bugs of blocks that travel encoded."""

from __future__ import annotations

from .base import Mutation

_CODING = "omnireduce.protocol.coding"
_STREAM = "omnireduce.protocol.shard_stream"

MUTATIONS = (
    Mutation(
        "coder sums the first blocks again and again",
        _CODING,
        "of a result that takes several steps only the first blocks are summed",
        "self._codec.sum(slots, some, totals)",
        "self._codec.sum(slots, parts[: len(some)], totals)",
        test="tests/protocol/test_coding.py::test_a_tensor_of_many_pieces",
    ),
    Mutation(
        "coder puts all pieces to the first places",
        _CODING,
        "of a message that takes several steps only the first blocks get results",
        "self._codec.place(encoded[piece], where[piece], target)",
        "self._codec.place(encoded[piece], where[: piece.stop - piece.start], target)",
        test="tests/protocol/test_coding.py::test_a_tensor_of_many_pieces",
    ),
    Mutation(
        "coder forgets what it had packed",
        _CODING,
        "of a message that takes several steps only the last blocks are encoded",
        "self._codec.encode(self._plain[:fresh], rows[count : count + fresh], block_keys(key, own[:fresh]))",
        "self._codec.encode(self._plain[:fresh], rows[:fresh], block_keys(key, own[:fresh]))",
        test="tests/protocol/test_coding.py::test_a_tensor_of_many_pieces",
    ),
    Mutation(
        "stream keeps its coder for another codec",
        _STREAM,
        "a tensor is encoded as the one before it",
        "if self._coder is None or not self._coder.suits(descriptor):",
        "if self._coder is None:",
    ),
)
