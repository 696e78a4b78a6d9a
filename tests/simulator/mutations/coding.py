"""Bugs of blocks that travel encoded."""

from __future__ import annotations

from .base import Mutation

_CODEC = "omnireduce.kernels.codecs.base"
_CODING = "omnireduce.protocol.collective.codecs"
_STREAM = "omnireduce.protocol.collective.stream"

MUTATIONS = (
    Mutation(
        "coder sums the first blocks again and again",
        _CODING,
        "of a result that takes several steps only the first blocks are summed",
        "self._codec.sum(slots, piece_parts, totals)",
        "self._codec.sum(slots, parts[: len(piece_parts)], totals)",
        test="tests/protocol/test_coding.py::test_a_tensor_of_many_pieces",
    ),
    Mutation(
        "codec puts all pieces to the first places",
        _CODEC,
        "of a message that takes several steps only the first blocks get results",
        "target[where[piece]] = values",
        "target[where[: len(values)]] = values",
        test="tests/protocol/test_coding.py::test_a_tensor_of_many_pieces",
    ),
    Mutation(
        "codec forgets what it had encoded",
        _CODEC,
        "of a message that takes several steps only the last blocks are encoded",
        "self.encode(source[where[piece]], encoded[piece], keys[piece])",
        "self.encode(source[where[piece]], encoded[: len(keys[piece])], keys[piece])",
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
