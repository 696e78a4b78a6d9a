"""Block messages, with the checks of decoding.

A block message fills the start of a slot, so that every transport moves one contiguous run of bytes:

    header (64 bytes) | blocks (count × block bytes) | padding to 8 | list | extra

The list holds the indices of the blocks, or a shorter form of them. The first such form is their runs: the first index
of each run, and its number of blocks, which follow each other in the stripes of one shard. The second form is their
steps: the distance of each index from the index before, see `kernels.index_steps`; these are bytes, not int64. In a
result an index may have a mark in its bits above MAX_BLOCKS: 1 + the number of the only rank that contributed. This
rank has the block already. The result for this rank may leave such blocks out, but not their indices. Everything is
little-endian. `extra` is the encoded Descriptor in the first message of a collective. A collective ends with a message
whose frontier is its number of blocks; in a result it may carry totals of a program as `extra`.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import ProtocolError

HEADER_BYTES = 64
EXTRA_BYTES = 1024  # room kept in every slot for `extra`
MAX_ELEMENTS = 1 << 62  # a tensor has fewer elements than this
MAX_BLOCKS = 1 << 48  # the bits of an index above a block number belong to marks

INDEX_BYTES, RUN_BYTES = 8, 16  # size of an index and of a run in a list

_HEADER = struct.Struct("<QqIIIIII24x")  # unused bytes are 0
NO_RUNS, NO_STEPS = np.empty((0, 2), np.int64), np.empty(0, np.uint8)


class Header(NamedTuple):
    """Head of a block message: its collective, the frontier that it promises, and its contents."""

    collective: int
    frontier: int
    block_count: int
    block_bytes: int
    extra_bytes: int
    left_out: int = 0  # blocks that are listed and counted in `block_count`, but left out
    runs: int = 0  # runs in the list; 0: it has indices or steps
    steps: int = 0  # bytes of a list of steps; 0: it has indices or runs

    @property
    def listed(self) -> str:
        """The form of its list, as a word."""
        return "steps" if self.steps else "runs" if self.runs else "indices"

    @property
    def list_start(self) -> int:
        """The place in the message where its list begins, in bytes."""
        return (HEADER_BYTES + (self.block_count - self.left_out) * self.block_bytes + 7) // 8 * 8

    @property
    def list_stop(self) -> int:
        return self.list_start + (self.steps or RUN_BYTES * self.runs or INDEX_BYTES * self.block_count)


def capacity(slot_bytes: int, block_bytes: int) -> int:
    """The number of blocks of `block_bytes` that fit in one slot."""
    return max(0, (slot_bytes - HEADER_BYTES - EXTRA_BYTES - 8) // (block_bytes + INDEX_BYTES))


def slot_bytes_for(message_bytes: int) -> int:
    """The size of a slot for blocks of 8 bytes or more, each with its index, that take `message_bytes` in all."""
    return (HEADER_BYTES + 2 * message_bytes + EXTRA_BYTES + 15) // 8 * 8


def largest_block(slot_bytes: int) -> int:
    """The size in bytes of the largest block that fits in one slot."""
    return slot_bytes - HEADER_BYTES - EXTRA_BYTES - 16


def block_rows(slot: Array, block_bytes: int, dtype: np.dtype[Any]) -> Array:
    """The block area of `slot` (uint8, slot bytes) as (capacity, elements per block) of `dtype`."""
    rows = capacity(slot.size, block_bytes)
    return slot[HEADER_BYTES : HEADER_BYTES + rows * block_bytes].view(dtype).reshape(rows, -1)


def seal(
    slot: Array,
    collective: int,
    frontier: int,
    indices: Array,
    block_bytes: int,
    extra: bytes = b"",
    *,
    left_out: int = 0,
    runs: Array = NO_RUNS,
    steps: Array = NO_STEPS,
) -> int:
    """Complete a message whose blocks, except those left out, are already in `slot`; return its length in bytes.

    `runs`, int64 (runs, 2), or `steps`, uint8 (bytes,), stand for the same indices, and are listed instead, if they are
    not empty.
    """
    count, run_count = indices.size, len(runs)
    listed = (steps if steps.size else runs.reshape(-1) if run_count else indices).view(np.uint8)
    blocks_stop = HEADER_BYTES + (count - left_out) * block_bytes
    start = (blocks_stop + 7) // 8 * 8
    stop = start + listed.size
    if start > blocks_stop:
        slot[blocks_stop:start] = 0
    lengths = count, block_bytes, len(extra), left_out, run_count, steps.size
    _HEADER.pack_into(slot.data, 0, collective, frontier, *lengths)
    slot[start:stop] = listed
    if extra:
        slot.data[stop : stop + len(extra)] = extra
    return stop + len(extra)


def read_header(slot: Array, nbytes: int) -> Header:
    """Copy the header out of a received message and check it against the message's length. Raises ProtocolError."""
    if nbytes < HEADER_BYTES or nbytes > slot.size:
        raise ProtocolError(f"a block message of {nbytes} bytes; expected {HEADER_BYTES} to {slot.size}")
    header = Header._make(_HEADER.unpack_from(slot.data))
    if header.left_out > header.block_count:
        raise ProtocolError(f"a block message that leaves out more than it has: {header}")
    if header.extra_bytes > EXTRA_BYTES or header.block_count > capacity(slot.size, header.block_bytes):
        raise ProtocolError(f"a block message that claims more than its slot holds: {header}")
    if header.runs and 2 * header.runs >= header.block_count:
        raise ProtocolError(f"a block message with runs that take no less room than its indices: {header}")
    if header.steps and (header.runs or not header.block_count <= header.steps < INDEX_BYTES * header.block_count):
        raise ProtocolError(f"a block message whose steps cannot list its blocks: {header}")
    expected = header.list_stop + header.extra_bytes
    if nbytes != expected:
        raise ProtocolError(f"a block message of {nbytes} bytes whose header means {expected}: {header}")
    return header


def message_list(slot: Array, header: Header) -> Array:
    """The message's list, int64 (indices,) or (2 × runs,). It lies in memory that the peer may still write."""
    return slot[header.list_start : header.list_stop].view(np.int64)


def message_steps(slot: Array, header: Header) -> Array:
    """The list of a message with steps, uint8 (bytes,). It lies in memory that the peer may still write."""
    return slot[header.list_start : header.list_stop]


def message_extra(slot: Array, header: Header) -> bytes:
    if not header.extra_bytes:
        return b""
    start = header.list_stop
    return slot[start : start + header.extra_bytes].tobytes()
