"""Inputs of a target: its corpus, changes to it, and noise."""

from __future__ import annotations

import struct
from collections.abc import Callable

from hypothesis import strategies as st

from .seeds import folder
from .shapes import EDGES, SHAPES, conversation

MOST_BYTES = 40_000
WORDS = [struct.Struct(code) for code in ("<B", "<H", "<I", "<Q", ">H", ">I", ">Q")]


def corpus(target: str) -> dict[str, bytes]:
    """The files of a target, by name."""
    return {file.stem: file.read_bytes() for file in sorted(folder(target).glob("*.bin"))}


def _set_bit(draw: st.DrawFn, data: bytearray, at: int) -> None:
    if at < len(data):
        data[at] ^= 1 << draw(st.integers(0, 7))


def _set_word(draw: st.DrawFn, data: bytearray, at: int) -> None:
    word = draw(st.sampled_from(WORDS))
    value = draw(st.sampled_from(EDGES)) + draw(st.integers(-2, 2))
    data[at : at + word.size] = word.pack(value % 2 ** (8 * word.size))


def _insert(draw: st.DrawFn, data: bytearray, at: int) -> None:
    data[at:at] = draw(st.binary(min_size=1, max_size=16))


def _cut(draw: st.DrawFn, data: bytearray, at: int) -> None:
    del data[at : at + draw(st.integers(1, 64))]


def _cut_off(draw: st.DrawFn, data: bytearray, at: int) -> None:
    del data[at:]


def _repeat(draw: st.DrawFn, data: bytearray, at: int) -> None:
    data[at:at] = data[draw(st.integers(0, at)) : at] * draw(st.integers(1, 3))


CHANGES: list[Callable[[st.DrawFn, bytearray, int], None]] = [_set_bit, _set_word, _insert, _cut, _cut_off, _repeat]


def inputs(target: str) -> st.SearchStrategy[bytes]:
    """Files of the corpus, put together and changed in a few places; sometimes noise."""
    files = st.sampled_from(list(corpus(target).values()))

    @st.composite
    def changed(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(files))
        if draw(st.integers(0, 3)) == 0:
            data += draw(files)
        for _ in range(draw(st.integers(0, 4))):
            draw(st.sampled_from(CHANGES))(draw, data, draw(st.integers(0, len(data))))
        return bytes(data[:MOST_BYTES])

    @st.composite
    def reshaped(draw: st.DrawFn) -> bytes:
        data, reshape = draw(files), SHAPES.get(target, conversation)
        for _ in range(draw(st.integers(1, 3))):
            data = reshape(draw, data)
        return data[:MOST_BYTES]

    return reshaped() | reshaped() | reshaped() | changed() | changed() | st.binary(max_size=300)
