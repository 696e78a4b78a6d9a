"""Descriptors, which ranks compare: the call in the user's words, the facts of the wire that follow, and its limits."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import DTYPES

from omnireduce.core.descriptor import (
    CODEC_CHARACTERS,
    GROUP_CHARACTERS,
    MAX_BLOCK_SIZE,
    MAX_DIMENSIONS,
    MAX_SEED,
    NAME_CHARACTERS,
    Descriptor,
    decode_descriptor,
    describe,
    distinguish,
    dtype_text,
)
from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.core.wire.blocks import EXTRA_BYTES, MAX_BLOCKS
from omnireduce.errors import ProtocolError, UsageError

SHAPES = st.lists(st.integers(0, 2**40), max_size=MAX_DIMENSIONS).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=NAME_CHARACTERS).filter(str.isprintable)


@given(shape=SHAPES, block_size=st.integers(1, 2**28 - 1), dtype=st.sampled_from(DTYPES), name=NAMES)
def test_a_call_reads_back(shape: tuple[int, ...], block_size: int, dtype: str, name: str) -> None:
    try:
        descriptor = Descriptor("allreduce", name, dtype, shape, "max", 8 * block_size)
    except UsageError:
        return  # too large
    assert decode_descriptor(descriptor.encoded) == descriptor
    assert len(descriptor.encoded) <= EXTRA_BYTES
    assert descriptor.block_bytes == 8 * block_size * ELEMENT_TYPES[dtype].itemsize
    assert descriptor.layout.elements == int(np.prod(np.array(shape, object), initial=1))


@pytest.mark.parametrize(
    "dimensions",
    [[2] * 61 + [1] * 3, [0] * 64, [0] + [2**7] * 8 + [2**5] + [1] * 54, [2**16] * 3 + [2**13], [2**32, 2**29]],
)
@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter", "broadcast", "allgather"])
def test_the_longest_call_fits(kind: Any, dimensions: list[int]) -> None:
    """64 dimensions, 200 characters of four bytes each, a structure of many fields and the largest numbers."""
    reduces = kind in ("allreduce", "reduce_scatter")
    name = "\U0001f600" * NAME_CHARACTERS
    longest = dtype_text(np.dtype([(f"field {i}", "f8") for i in range(100)]))
    many = 0 in dimensions
    descriptor = Descriptor(
        kind, name, "bfloat16" if reduces else longest, tuple(dimensions), "mean" if reduces else "sum",
        MAX_BLOCK_SIZE, 2**32 - 1, 0 if reduces else 2**31 - 8 if many else 1, 2**32 - 1 if many else 1,
        "g" * GROUP_CHARACTERS,
    )  # fmt: skip
    assert len(descriptor.encoded) <= EXTRA_BYTES
    assert decode_descriptor(descriptor.encoded) == descriptor
    assert len(str(descriptor)) < 1000


@pytest.mark.parametrize("dimensions", [[2] * 61 + [1] * 3, [0] * 63 + [2**61], [2**32, 2**29]])
def test_the_longest_call_with_a_codec_fits(dimensions: list[int]) -> None:
    name = "\U0001f600" * NAME_CHARACTERS
    descriptor = Descriptor(
        "allreduce", name, "float32", tuple(dimensions), "mean", 1 << 14, 2**32 - 1, 0, 1, "g" * GROUP_CHARACTERS,
        codec="c" * CODEC_CHARACTERS, seed=MAX_SEED,
    )  # fmt: skip
    assert len(descriptor.encoded) <= EXTRA_BYTES
    assert decode_descriptor(descriptor.encoded) == descriptor
    assert len(str(descriptor)) < 1000


def test_calls_in_words() -> None:
    w = Descriptor("allreduce", "fc1.weight", "float32", (10, 100), "sum", 256)
    assert str(w) == "allreduce 'fc1.weight' of float32 (10, 100), sum"
    assert str(Descriptor("reduce_scatter", "", "int8", (9,), "min")) == "reduce_scatter of int8 (9,), min"
    rows = Descriptor("allreduce_rows", "e", "float16", (9, 4))
    assert str(rows) == "allreduce_rows 'e' of float16, n_rows 9, width 4, sum"
    assert str(Descriptor("broadcast", "", "<U3", (), item_bytes=12, root=2)) == "broadcast of <U3 (), root 2"
    assert str(Descriptor("allgather", "s", "int64", (2, 3), item_bytes=8, parts=4)) == "allgather 's' of int64 (2, 3)"
    assert str(Descriptor("reduce", "", "bool", (2,), "any", root=1)) == "reduce of bool (2,), any, root 1"
    ragged = Descriptor("allgather_ragged", "", "int64", (3,), item_bytes=8, parts=4, packets=5)
    assert str(ragged) == "allgather_ragged of int64, each of its items (3,)"
    thing = Descriptor("broadcast_object", "state", "plain data", (), item_bytes=1, parts=4, root=2, packets=5)
    assert str(thing) == "broadcast_object 'state' of plain data, root 2"
    grouped = Descriptor("allreduce", "", "int8", (5,), group="2 arrays 0123456789abcdef")
    assert str(grouped) == "allreduce of a group, 2 arrays 0123456789abcdef: of int8 (5,), sum"
    assert str(Descriptor("barrier", "", "uint8", (0,), item_bytes=1)) == "barrier"


LONG = (10**7, 10**7, *(1,) * 61)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"shape": (*LONG[:-1], 2)}, ("dimension 62 is 1", "dimension 62 is 2")),
        ({"shape": (*LONG, 1)}, ("63 dimensions", "64 dimensions")),
        ({"parts": 5}, ("4 parts", "5 parts")),
        ({"item_bytes": 4}, ("elements of 8 bytes", "elements of 4 bytes")),
        ({"block_size": 16}, ("block_size 8", "block_size 16")),
    ],
)
def test_a_difference_that_the_words_do_not_show_is_named(changes: dict[str, Any], what: tuple[str, str]) -> None:
    """Long shapes are cut off."""
    fields: dict[str, Any] = {"shape": LONG, "item_bytes": 8, "parts": 4}
    one, other = (Descriptor("allgather", "", "int64", **each) for each in (fields, fields | changes))
    assert str(one) == str(other)
    assert distinguish(one, other) == (f"{one}, {what[0]}", f"{other}, {what[1]}")


def test_two_that_look_alike_are_told_apart() -> None:
    one, other = (Descriptor("allreduce", "w", "int8", (9,), block_size=size) for size in (64, 256))
    assert distinguish(one, other) == (f"{one}, block_size 64", f"{other}, block_size 256")
    assert distinguish(one, one) == (str(one), str(one))
    small, large = (
        Descriptor("allgather_object", "", "pickles", (), item_bytes=1, packets=packets) for packets in (2, 3)
    )
    assert distinguish(small, large)[0] == "allgather_object of pickles, protocol.max_part_bytes in KiB, rounded up, 2"
    shaped = Descriptor("allreduce", "w", "int8", (3, 3))
    assert distinguish(one, shaped) == (str(one), str(shaped))


@pytest.mark.parametrize(
    ("descriptor", "element", "elements", "block_size"),
    [
        (Descriptor("allreduce", "", "float64", (5, 7), block_size=16), "float64", 35, 16),
        (Descriptor("allreduce", "", "float64", ()), "float64", 1, 8),
        (Descriptor("reduce_scatter", "", "int8", (5, 7), block_size=16), "int8", 35, 16),
        (Descriptor("allreduce_rows", "", "float16", (5, 7)), "float16", 35, 7),
        (Descriptor("broadcast", "", "float64", (5, 7), block_size=16, item_bytes=8), "uint8", 280, 128),
        (Descriptor("broadcast", "", "S3", (5,), block_size=8, item_bytes=3), "uint8", 15, 24),
        (Descriptor("broadcast", "", "V9999", (5,), block_size=8, item_bytes=9999), "uint8", 49995, 32768),
        (Descriptor("allgather", "", "float64", (5, 7), item_bytes=8, parts=3), "uint8", 840, 64),
        (Descriptor("barrier", "", "uint8", (0,), item_bytes=1), "uint8", 0, 8),
        (Descriptor("reduce", "", "float64", (5, 7), block_size=16, root=3), "float64", 35, 16),
        (Descriptor("scatter", "", "float64", (5, 7), item_bytes=8, parts=3), "uint8", 840, 64),
        (Descriptor("allgather_ragged", "", "int8", (7,), item_bytes=1, parts=3, packets=9), "uint8", 27 * 1024, 1024),
        (Descriptor("allgather_object", "", "pickles", (), item_bytes=1, parts=2, packets=7), "uint8", 14 * 1024, 1024),
    ],
    ids=str,
)
def test_what_travels_follows_from_the_call(
    descriptor: Descriptor, element: str, elements: int, block_size: int
) -> None:
    assert (descriptor.element.name, descriptor.layout.elements, descriptor.layout.block_size) == (
        element,
        elements,
        block_size,
    )
    assert descriptor.block_bytes == block_size * ELEMENT_TYPES[element].itemsize


@pytest.mark.parametrize("text", ["\x1b[2J", "two\nlines", "\u202e"])
def test_names_that_would_spoil_a_log_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be shown"):
        Descriptor("allreduce", text, "int8", (8,))
    with pytest.raises(ProtocolError, match="cannot be shown") as caught:
        decode_descriptor(msgspec.msgpack.encode(["allreduce", text * 20, "int8", [8], "sum", 8, 0, 0, 1]))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000


def test_more_blocks_than_an_index_can_number_are_refused() -> None:
    with pytest.raises(UsageError, match=r"expected fewer than 2\*\*62 in 2\*\*48"):
        Descriptor("allreduce", "", "float32", (MAX_BLOCKS * 8,))
    assert Descriptor("allreduce", "", "float32", (MAX_BLOCKS * 8 - 8,)).layout.blocks == MAX_BLOCKS - 1


@pytest.mark.parametrize("block_size", [0, -8, 12, 2**31, 2**63, 2**64])
def test_a_block_size_out_of_range_is_told_the_range(block_size: int) -> None:
    with pytest.raises(UsageError, match=f"block_size {block_size}: expected a multiple of 8 from 8 to 2147483640"):
        Descriptor("allreduce", "", "float32", (8,), block_size=block_size)


@pytest.mark.parametrize(("kind", "packets"), [("allgather_object", 0), ("broadcast_object", 2**25 + 1), ("reduce", 1)])
def test_packets_out_of_range(kind: Any, packets: int) -> None:
    with pytest.raises(UsageError, match=f"parts of {packets} packets: expected "):
        Descriptor(kind, "", "int8", (), item_bytes=int(kind != "reduce"), packets=packets)


@pytest.mark.parametrize(
    ("kind", "name", "refused", "message"),
    [
        ("refusal", "", "", "expected a refusal, unnamed"),
        ("refusal", "w", "because", "expected a refusal, unnamed"),
        ("barrier", "", "because", "expected a refusal, unnamed"),
        ("refusal", "", "a\nb", "expected up to 600 bytes that can be shown"),
        ("refusal", "", "\N{EURO SIGN}" * 201, "expected up to 600 bytes that can be shown"),
    ],
)
def test_a_refusal_says_why_and_nothing_else_does(kind: Any, name: str, refused: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Descriptor(kind, name, "uint8", (0,), item_bytes=1, refused=refused)
    longest = Descriptor("refusal", "", "uint8", (0,), item_bytes=1, refused="\N{EURO SIGN}" * 200)
    assert decode_descriptor(longest.encoded) == longest
    assert str(longest) == "a call that was refused: " + "\N{EURO SIGN}" * 200


def test_dtypes_in_words() -> None:
    assert dtype_text(np.dtype([("step", "<i8"), ("lr", "<f4")])) == "[('step', '<i8'), ('lr', '<f4')]"
    one, other = (dtype_text(np.dtype([(f"{stem} {i}", "f8") for i in range(100)])) for stem in ("a", "b"))
    assert one != other
    assert one.startswith("a structure of 800 bytes, checksum ")
    assert dtype_text(np.dtype([("größe", "<f4")])).startswith("a structure of 4 bytes, checksum ")


def test_calls_travel_as_before() -> None:
    """Byte for byte: whoever changes them makes a protocol version, as CONTRIBUTING.md says."""
    descriptor = Descriptor("allreduce_rows", "w", "float32", (125, 8))
    assert (
        descriptor.encoded.hex()
        == "9fae616c6c7265647563655f726f7773a177a7666c6f61743332927d08a373756d08000001a000a000c0a0"
    )


def test_the_same_call_is_described_once() -> None:
    assert describe("allreduce", "w", "int8", (2, 4), "sum", 8) is describe("allreduce", "w", "int8", (2, 4), "sum", 8)
