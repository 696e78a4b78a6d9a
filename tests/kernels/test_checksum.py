"""The checksum of an array, computed word by word in numbers of any size; and that each bit of it counts."""

from __future__ import annotations

import hashlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.core.dtypes import Array
from omnireduce.kernels.array_checksum import _FIRST, _SECOND, LANES, checksum

MASK = 2**64 - 1
BYTES = st.binary(max_size=100)


def oracle(data: bytes) -> bytes:
    lanes = [len(data)] * LANES
    padded = data + bytes(8 - len(data) % 8)
    words = struct.unpack(f"<{len(padded) // 8}Q", padded)
    for i, word in enumerate(words[:-1]):
        lanes[i % LANES] = with_word(lanes[i % LANES], word)
    lanes[0] = with_word(lanes[0], words[-1])
    return hashlib.blake2b(struct.pack(f"<{LANES}Q", *lanes), digest_size=8).digest()


def with_word(lane: int, word: int) -> int:
    lane = (lane + word * int(_FIRST)) & MASK
    return (lane << 31 | lane >> 33) * int(_SECOND) & MASK


def of_bytes(data: bytes) -> bytes:
    return checksum(np.frombuffer(data, np.uint8))


@given(data=BYTES)
def test_it_is_that_of_the_bytes(data: bytes) -> None:
    assert of_bytes(data) == oracle(data)


@given(data=st.binary(min_size=1, max_size=100), draw=st.data())
def test_one_bit_or_one_more_byte_is_another_checksum(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    assert of_bytes(bytes(changed)) != of_bytes(data) != of_bytes(data + b"\0")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8"])
def test_signs_and_places_count(dtype: str) -> None:
    """Signs are highest bits, which a product carries nowhere: of any two elements, whichever lanes they are in."""
    count, size = 40, np.dtype(dtype).itemsize
    seen = set()
    for i, j in itertools.combinations_with_replacement(range(count), 2):
        data = np.zeros((count, size), np.uint8)
        data[[i, j], -1] = 0x80
        seen.add(checksum(data.view(dtype)))
    assert len(seen) == count * (count + 1) // 2
    assert len({checksum(np.roll(np.arange(count).astype(dtype), by)) for by in range(count)}) == count


def views(x: Array) -> list[Array]:
    """The same numbers: read-only, beside an odd address, in every other place, and backwards in memory."""
    odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    frozen, spread = x.copy(), np.zeros((2 * x.shape[0], *x.shape[1:]), x.dtype)
    frozen.flags.writeable = False
    odd[:], spread[::2] = x, x
    return [frozen, odd, spread[::2], x[::-1].copy()[::-1], np.asfortranarray(x)]


def test_it_is_that_of_the_elements_wherever_they_lie() -> None:
    x = np.random.default_rng(1).standard_normal((9, 7)).astype(np.float32)
    assert {checksum(view) for view in views(x)} == {oracle(x.tobytes())}
    assert checksum(np.float32(1.5).reshape(())) == oracle(np.float32(1.5).tobytes())
    assert checksum(np.zeros((0, 3))) == oracle(b"")
