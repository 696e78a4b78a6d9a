"""Changes that keep the shape: what they make gets past the first check, and on to those behind it."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from hypothesis import strategies as st
from messages import HEADER
from msgspec.msgpack import Ext

from omnireduce.core.wire.safe_text import UNDECODABLE
from omnireduce.transport.framing import CONTROL, DATA, FRAME

EDGES = [0, 1, 2, 7, 8, 9, 37, 38, 39, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**47, 2**48, 2**62, 2**63 - 1]
HEADER_BYTES = 64
STEPS, STEPS_AT = struct.Struct("<I"), 36  # bytes of a list of steps, in the header
NUMBERS = st.sampled_from(EDGES) | st.sampled_from(EDGES).map(lambda edge: -edge - 1)
VALUES = (
    NUMBERS
    | st.sampled_from([None, True, 0.5, float("nan"), float("inf"), -1.0, "", "\x1b[2J", "x" * 5000, b"", b"\xff" * 32])
    | st.lists(NUMBERS, max_size=20)
)


def packed(draw: st.DrawFn, body: bytes) -> bytes:
    """A msgpack map or list with another value somewhere, a field less or a field more."""
    try:
        whole = msgspec.msgpack.decode(body)
    except UNDECODABLE:
        return body
    _change(draw, whole)
    return msgspec.msgpack.encode(whole)


def _change(draw: st.DrawFn, part: Any) -> None:
    keys = list(part) if isinstance(part, dict) else list(range(len(part))) if isinstance(part, list) else []
    if not keys:
        return
    key = draw(st.sampled_from(keys))
    if isinstance(part[key], (dict, list)) and draw(st.booleans()):
        _change(draw, part[key])
    elif draw(st.integers(0, 9)) == 0:
        del part[key]
    elif isinstance(part[key], int) and draw(st.booleans()):
        part[key] = min(max(part[key] + draw(st.sampled_from([-1, 1])), -(2**63)), 2**64 - 1)
    else:
        part[key] = draw(VALUES)


def block(draw: st.DrawFn, message: bytes) -> bytes:
    """A block message with another header, index or descriptor, whose parts still fit together most of the time."""
    fields = list(HEADER.unpack_from(message.ljust(HEADER_BYTES)))
    count, size, _, left_out, runs, steps = fields[2:]
    words = 2 * runs or count
    if left_out > count or len(message) < HEADER_BYTES:
        return message
    start = (HEADER_BYTES + (count - left_out) * size + 7) // 8 * 8
    if start + (steps or words * 8) + fields[4] != len(message):
        return message
    if steps:
        return _steps(draw, message, start, steps)
    listed = list(struct.unpack_from(f"<{words}q", message, start))
    blocks, extra = message[HEADER_BYTES : HEADER_BYTES + (count - left_out) * size], message[start + words * 8 :]
    what = draw(st.integers(0, 6))
    if what == 0:
        at = draw(st.integers(0, 1))
        fields[at] = max(0 if at == 0 else -(2**63), draw(NUMBERS | st.integers(0, 50)))
    elif what == 1 and listed:
        listed[draw(st.integers(0, words - 1))] = draw(NUMBERS | st.integers(0, 50))
    elif what == 2:
        listed = sorted(draw(st.lists(st.integers(0, 40), max_size=40, unique=draw(st.booleans()))))
        count, runs, blocks = len(listed), 0, bytes(len(listed) * size)
    elif what == 3:
        size = draw(st.sampled_from([0, 1, 4, 8, 16, 64, 1024]))
        blocks = bytes(count * size)
    elif what == 4 and runs == 0:  # a result that leaves out blocks, most of the time those of the receiver alone
        mine = [draw(st.booleans()) for _ in listed]
        listed = [index % 2**48 | own << 48 for index, own in zip(listed, mine, strict=True)]
        blocks = bytes((count - min(sum(mine), draw(st.sampled_from([sum(mine), 0, 1])))) * size)
    elif what == 5:
        listed, count, own = _runs(draw)
        runs, blocks = len(listed) // 2, bytes((count - min(count, draw(st.sampled_from([own, 0, 1])))) * size)
    else:
        extra = packed(draw, extra) if draw(st.booleans()) else draw(st.binary(max_size=40))
    left_out = count - len(blocks) // size if size else 0
    fields[2:] = [count, size, len(extra), left_out, runs, 0]
    head = (HEADER.pack(*fields).ljust(HEADER_BYTES, b"\0") + blocks).ljust(
        (HEADER_BYTES + len(blocks) + 7) // 8 * 8, b"\0"
    )
    return head + struct.pack(f"<{len(listed)}q", *listed) + extra


def _steps(draw: st.DrawFn, message: bytes, start: int, count: int) -> bytes:
    """A message with other steps, `count` bytes from `start` on before."""
    listed, extra = bytearray(message[start : start + count]), message[start + count :]
    what, at = draw(st.integers(0, 3)), draw(st.integers(0, count - 1))
    if what == 0:
        listed[at] = draw(st.sampled_from([0, 1, 38, 127, 128, 255]))
    elif what == 1:
        listed.insert(at, draw(st.sampled_from([0, 1, 128])))
    elif what == 2:
        del listed[at]
    else:
        extra = packed(draw, extra)
    head = bytearray(message[:start])
    STEPS.pack_into(head, STEPS_AT, len(listed))
    return bytes(head + listed) + extra


def _runs(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """A list of runs, how many blocks it has, and how many of rank 0 alone; wrong in some places."""
    listed, count, own, at = [], 0, 0, 0
    for _ in range(draw(st.integers(1, 5))):
        at += draw(st.integers(0, 3))
        length, mine = draw(st.integers(1, 9)), draw(st.booleans())
        listed += [at | mine << 48, length]
        at, count, own = at + length, count + length, own + mine * length
    if draw(st.integers(0, 2)) == 0:
        listed[draw(st.integers(0, len(listed) - 1))] = draw(NUMBERS | st.integers(0, 50))
    return listed, max(0, count + draw(st.sampled_from([0, 0, 0, 1, -1]))), own


def conversation(draw: st.DrawFn, data: bytes) -> bytes:
    """Frames of which one is left out, repeated, exchanged or changed; their lengths are right most of the time."""
    parts = [[*each, 0] for each in _split(data)]  # the last one is what the length lies about
    if not parts:
        return data
    at = draw(st.integers(0, len(parts) - 1))
    what = draw(st.integers(0, 10))
    if what == 0:
        del parts[at]
    elif what == 1:
        parts.insert(draw(st.integers(0, len(parts))), list(parts[at]))
    elif what == 2:
        other = draw(st.integers(0, len(parts) - 1))
        parts[at], parts[other] = parts[other], parts[at]
    elif what == 3:
        parts[at][1] = draw(st.sampled_from([0, 1, 2, 3, 63, 65535]))
    elif what == 4:
        parts[at][0] = draw(st.integers(0, 4))
    elif what == 5:
        parts[at][3] = draw(st.sampled_from([-1, 1, 8, 65536, 2**31]))
    elif parts[at][0] == CONTROL:
        parts[at][2] = packed(draw, parts[at][2])
    elif parts[at][0] == DATA:
        parts[at][2] = block(draw, parts[at][2])
    return b"".join(FRAME.pack(kind, slot, max(0, len(body) + lie)) + body for kind, slot, body, lie in parts)


def _split(data: bytes) -> list[tuple[int, int, bytes]]:
    parts, at = [], 0
    while len(data) - at >= FRAME.size:
        kind, slot, length = FRAME.unpack_from(data, at)
        at += FRAME.size
        size = length if kind in (CONTROL, DATA) else 0
        parts.append((kind, slot, data[at : at + size]))
        at += size
    return parts


def extended(draw: st.DrawFn, body: bytes) -> bytes:
    """Another value somewhere inside extensions of msgpack, or another kind of extension."""
    try:
        outer = msgspec.msgpack.decode(body)
        if not isinstance(outer, Ext):
            return msgspec.msgpack.encode(draw(VALUES))
        inner = msgspec.msgpack.decode(outer.data)
    except UNDECODABLE:
        return body
    if draw(st.integers(0, 4)) == 0:
        return msgspec.msgpack.encode(Ext(draw(st.integers(-1, 16)), outer.data))
    within = [at for at, each in enumerate(inner) if isinstance(each, Ext)] if isinstance(inner, list) else []
    if within and draw(st.booleans()):
        at = draw(st.sampled_from(within))
        inner[at] = msgspec.Raw(extended(draw, msgspec.msgpack.encode(inner[at])))
    else:
        _change(draw, inner)
    return msgspec.msgpack.encode(Ext(outer.code, msgspec.msgpack.encode(inner)))


SHAPES = {
    "control": packed,
    "descriptor": packed,
    "upward": block,
    "downward": block,
    "plain": extended,
    "packets": packed,
}
