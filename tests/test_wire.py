"""Block messages and control messages: what is written is read, and what does not fit is refused."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import MESSAGES
from msgspec.structs import replace
from samples import DTYPES

from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.core.wire.blocks import (
    EXTRA_BYTES,
    HEADER_BYTES,
    Header,
    block_rows,
    capacity,
    message_extra,
    message_list,
    read_header,
    seal,
)
from omnireduce.core.wire.control import (
    PROTOCOL_VERSION,
    Cause,
    ControlMessage,
    Goodbye,
    Hello,
    decode_control,
    encode_control,
)
from omnireduce.errors import ProtocolError
from omnireduce.protocol.collective.effects import error_of

INT64 = st.integers(-(2**63), 2**63 - 1)
BYTES = np.dtype(np.uint8)
HELLO = Hello(PROTOCOL_VERSION, "job", 0, 2, 0, 1, 4, 65536, "host", 7, 64)


@given(
    slot_bytes=st.integers(0, 1 << 16).map(lambda size: size * 8),
    block_bytes=st.integers(1, 5000),
)
def test_a_full_slot_holds_its_blocks_indices_and_extra(slot_bytes: int, block_bytes: int) -> None:
    rows = capacity(slot_bytes, block_bytes)
    used = (HEADER_BYTES + rows * block_bytes + 7) // 8 * 8 + rows * 8 + EXTRA_BYTES
    assert rows == 0 or used <= slot_bytes
    one_more = HEADER_BYTES + (rows + 1) * (block_bytes + 8) + EXTRA_BYTES + 8
    assert one_more > slot_bytes, "there was room for one more"


@given(
    rows=st.integers(0, 12),
    spare=st.integers(1, 3),
    block_bytes=st.integers(1, 70),
    collective=st.integers(0, 2**64 - 1),
    frontier=INT64,
    data=st.data(),
)
def test_a_message_reads_back(
    rows: int, spare: int, block_bytes: int, collective: int, frontier: int, data: st.DataObject
) -> None:
    slot_bytes = (HEADER_BYTES + EXTRA_BYTES + 8 + (rows + spare) * (block_bytes + 8) + 7) // 8 * 8
    slot = np.full(slot_bytes, 0xEE, np.uint8)
    indices = np.array(data.draw(st.lists(INT64, min_size=rows, max_size=rows)), np.int64)
    extra = data.draw(st.binary(max_size=EXTRA_BYTES))
    runs = np.arange(2 * data.draw(st.integers(0, max(0, rows - 1) // 2))).reshape(-1, 2)
    blocks = block_rows(slot, block_bytes, BYTES)
    assert blocks.shape == (capacity(slot_bytes, block_bytes), block_bytes)
    blocks[:rows] = np.arange(rows * block_bytes).reshape(rows, block_bytes) % 251
    nbytes = seal(slot, collective, frontier, indices, block_bytes, extra, runs=runs)
    arrived = np.zeros_like(slot)
    arrived[:nbytes] = slot[:nbytes]
    header = read_header(arrived, nbytes)
    assert header == Header(collective, frontier, rows, block_bytes, len(extra), runs=len(runs))
    assert message_list(arrived, header).tolist() == (runs.reshape(-1) if len(runs) else indices).tolist()
    assert message_extra(arrived, header) == extra
    assert (block_rows(arrived, block_bytes, BYTES)[:rows] == blocks[:rows]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_rows_are_views_of_the_slot(dtype: str) -> None:
    element = ELEMENT_TYPES[dtype]
    slot = np.zeros(4096, np.uint8)
    rows = block_rows(slot, 16 * element.itemsize, element.storage)
    assert rows.shape == (capacity(4096, 16 * element.itemsize), 16)
    rows[...] = 1
    assert slot[:HEADER_BYTES].sum() == 0
    assert slot[HEADER_BYTES : HEADER_BYTES + rows.nbytes].view(element.storage).all()
    assert slot[HEADER_BYTES + rows.nbytes :].sum() == 0


def test_frontiers_and_collectives_of_64_bits() -> None:
    slot = np.zeros(2048, np.uint8)
    indices = np.array([2**31, 2**33, 2**62 - 1])
    nbytes = seal(slot, 2**40, 2**62, indices, 8)
    header = read_header(slot, nbytes)
    assert (header.collective, header.frontier) == (2**40, 2**62)
    assert message_list(slot, header).tolist() == indices.tolist()


def test_the_header_is_little_endian() -> None:
    slot = np.zeros(2048, np.uint8)
    nbytes = seal(slot, 1, -2, np.array([3]), 8, b"xy")
    assert nbytes == HEADER_BYTES + 8 + 8 + 2
    assert slot[:28].tobytes().hex() == "0100000000000000feffffffffffffff010000000800000002000000"
    assert slot[28:HEADER_BYTES].sum() == 0
    nbytes = seal(slot, 1, 9, np.array([3, 4, 5]), 8, left_out=1, runs=np.array([[3, 3]]))
    assert nbytes == HEADER_BYTES + 2 * 8 + 2 * 8
    assert slot[16:HEADER_BYTES].tobytes().hex() == "0300000008000000000000000100000001000000" + "00" * 28


@pytest.mark.parametrize("change", [-1, 1, 8])
def test_a_length_that_disagrees_with_the_header_is_refused(change: int) -> None:
    slot = np.zeros(2048, np.uint8)
    nbytes = seal(slot, 1, 2, np.array([0, 1]), 8, b"extra")
    with pytest.raises(ProtocolError, match="whose header means"):
        read_header(slot, nbytes + change)


@pytest.mark.parametrize(("count", "runs", "taken"), [(5, 2, True), (4, 2, False), (3, 1, True), (2, 1, False)])
def test_runs_are_shorter_than_indices_or_are_refused(count: int, runs: int, taken: bool) -> None:
    slot = np.zeros(2048, np.uint8)
    nbytes = seal(slot, 0, 9, np.arange(count), 8, runs=np.ones((runs, 2), np.int64))
    if taken:
        assert read_header(slot, nbytes).runs == runs
        return
    with pytest.raises(ProtocolError, match="runs that take no less room than its indices"):
        read_header(slot, nbytes)


def test_a_message_without_blocks_has_no_runs() -> None:
    slot = np.zeros(2048, np.uint8)
    nbytes = seal(slot, 0, 9, np.arange(0), 8, runs=np.array([[0, 0]]))
    with pytest.raises(ProtocolError, match="runs that take no less room than its indices"):
        read_header(slot, nbytes)


@pytest.mark.parametrize("nbytes", [-1, 0, 63, 2049, 2**40])
def test_a_length_outside_of_the_slot_is_refused(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="expected 64 to 2048"):
        read_header(np.zeros(2048, np.uint8), nbytes)


def test_a_count_that_fits_no_slot_is_refused_even_if_the_length_agrees() -> None:
    slot = np.zeros(4096, np.uint8)
    nbytes = seal(slot, 0, 500, np.arange(400), 1)
    with pytest.raises(ProtocolError, match="more than its slot holds"):
        read_header(slot, nbytes)


# texts


@pytest.mark.parametrize("text", ["\x1b[2J", "two\nlines", "\u202e"])
def test_texts_that_would_spoil_a_log_are_refused_or_escaped(text: str) -> None:
    with pytest.raises(ProtocolError, match="malformed control message") as caught:
        decode_control(msgspec.msgpack.encode({"type": text}))
    assert str(caught.value).isprintable()
    error = error_of(Cause(text, f"said {text}"))
    assert str(error).isprintable()
    assert error_of(Cause("rank 1", "ünïcode, 'quoted'")).args == ("rank 1: ünïcode, 'quoted'",)


@pytest.mark.parametrize("block_bytes", [8, 12, 20])
def test_nothing_that_was_in_the_memory_before_travels(block_bytes: int) -> None:
    """A result may lie in memory that held another job's."""
    slot = np.full(4096, 0xA5, np.uint8)
    block_rows(slot, block_bytes, BYTES)[:2] = 1
    nbytes = seal(slot, 0, 9, np.array([1, 4, 7]), block_bytes, left_out=1)
    assert read_header(slot, nbytes).left_out == 1
    assert 0xA5 not in slot[:nbytes]


# control messages


def test_the_tests_know_all_messages() -> None:
    assert {type(message) for message in MESSAGES.values()} == set(get_args(ControlMessage))


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_a_control_message_reads_back(message: ControlMessage) -> None:
    assert decode_control(encode_control(message)) == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80",
        b"\x81\xa4type\xa5Other",
        b"\x81\xa4type\xa5Hello",
        b"\x82\xa4type\xa7Refused\xa6reason\x01",
        encode_control(Goodbye()) + b"\x00",
    ],
)
def test_other_control_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed control message"):
        decode_control(body)


@pytest.mark.parametrize(
    ("field", "within", "beyond"),
    [
        ("tcp_message_bytes", [1, 2**31 - 1], [0, -1, 2**31]),
        ("urgent_bytes", [0, 2**20], [-1, 2**20 + 1]),
        ("ticket", [b"", bytes(32)], [bytes(33)]),
        ("survived", [0, 2**63 - 1], [-1, 2**63]),
        ("formation", [0, 2**63 - 1], [-1, 2**63]),
    ],
)
def test_no_field_of_a_hello_is_out_of_range(field: str, within: list[Any], beyond: list[Any]) -> None:
    for value in within:
        hello = replace(HELLO, **{field: value})
        assert decode_control(encode_control(hello)) == hello
    for value in beyond:
        with pytest.raises(ProtocolError, match=rf"malformed control message: .* at `\$\.{field}`"):
            decode_control(encode_control(replace(HELLO, **{field: value})))
