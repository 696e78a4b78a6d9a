"""A checksum of many bytes, at about the speed at which memory is read: to see whether ranks have the same arrays.

Nobody who chooses the bytes is kept from a collision: it is for mistakes, not against attacks.
"""

from __future__ import annotations

import hashlib

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import inlined, kernel

LANES = 4  # neighbours are mixed into different numbers: the next word need not wait for the last one
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)  # odd: no product loses a bit


@inlined
def _with_word(lane: np.uint64, word: np.uint64) -> np.uint64:
    """Every bit of the word counts, and spreads: a product alone would carry the highest one, a sign, nowhere."""
    lane += word * _FIRST
    return ((lane << np.uint64(31)) | (lane >> np.uint64(33))) * _SECOND


@kernel
def mix_words(words: Array, lanes: Array) -> None:
    """Mix `words`, uint64 (n,), into `lanes`, uint64 (LANES,): word i into lane i % LANES."""
    one, two, three, four = lanes[0], lanes[1], lanes[2], lanes[3]
    whole = words.size // LANES * LANES
    for i in range(0, whole, LANES):
        one, two = _with_word(one, words[i]), _with_word(two, words[i + 1])
        three, four = _with_word(three, words[i + 2]), _with_word(four, words[i + 3])
    lanes[0], lanes[1], lanes[2], lanes[3] = one, two, three, four
    for i in range(whole, words.size):
        lanes[i - whole] = _with_word(lanes[i - whole], words[i])


def checksum(x: Array) -> bytes:
    """A checksum, 8 bytes, of the bytes of `x`, of any dtype without Python objects, in C order. It says nothing of the
    shape and the dtype."""
    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    lanes, whole = np.full(LANES, data.size, np.uint64), data.size // 8 * 8
    last = np.zeros(8, np.uint8)
    last[: data.size - whole] = data[whole:]
    for part in (data[:whole], last):
        words = np.require(part.view(np.uint64), requirements=["A"])
        mix_words(words, lanes)
    return hashlib.blake2b(lanes.tobytes(), digest_size=8).digest()
