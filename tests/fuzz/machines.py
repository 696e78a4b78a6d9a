"""Targets without a connection: decoding, and the machines of both sides.

Each takes the bytes of one peer and returns what became of them, in a word or two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np
from harness import Guarded, indices_of
from messages import SLOT_BYTES, SLOTS

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.descriptor import PACKET_BYTES, decode_descriptor
from omnireduce.core.dtypes import Array, element_type
from omnireduce.core.wire.blocks import MAX_BLOCKS, read_header
from omnireduce.core.wire.control import decode_control, encode_control
from omnireduce.core.wire.safe_text import UNDECODABLE
from omnireduce.errors import OmniReduceError, ProtocolError, UsageError
from omnireduce.protocol.collective.dense_operands import DenseTensor
from omnireduce.protocol.collective.effects import Effect, End, Finish, Send
from omnireduce.protocol.collective.ragged_parts import COUNT_BYTES, RaggedParts, packed
from omnireduce.protocol.rank import RankMachine
from omnireduce.protocol.shard import ShardMachine
from omnireduce.runtime.rank.calls.objects import from_bytes, to_bytes
from omnireduce.runtime.rank.calls.single import Pool

from .oracles import (
    control_is_proper,
    descriptor_is_proper,
    first_message_is_proper,
    packets_are_proper,
    result_is_proper,
)
from .seeds import TENSOR, WHOLE

RANKS = ["rank 0 (host h, pid 1)", "rank 1 (host h, pid 2)"]
AGGREGATOR = "aggregator a:1"
MOST_PACKETS = 8
SAID_PACKET = tuple[Annotated[int, msgspec.Meta(ge=0, lt=2 * MOST_PACKETS)], Annotated[int, msgspec.Meta(ge=0)]]
LONGEST_ERROR = 10_000  # characters, of which a peer may have chosen most


def kind_of(error: OmniReduceError) -> str:
    """The kind of an error, whose text must be fit to be shown."""
    text = str(error)
    assert text.isprintable(), text
    assert len(text) < LONGEST_ERROR
    return type(error).__name__


def control(data: bytes) -> str:
    """A control message."""
    try:
        message = decode_control(data)
    except ProtocolError as error:
        return kind_of(error)
    assert control_is_proper(message), message
    again = encode_control(message)
    assert encode_control(decode_control(again)) == again
    return type(message).__name__


def descriptor(data: bytes) -> str:
    """The descriptor in a worker's first block message."""
    try:
        result = decode_descriptor(data)
    except ProtocolError as error:
        return kind_of(error)
    assert decode_descriptor(result.encoded) == result
    assert descriptor_is_proper(result), result
    return result.kind


def upward(data: bytes) -> str:
    """A block message of rank 1 to the aggregator, where rank 0 has sent a proper one, or sends it afterwards."""
    second, first = (_upward(data, order) for order in ((0, 1), (1, 0)))
    assert (second != "violation") == first_message_is_proper(data), second
    assert first == second or first == "violation", "what may come second may come first"
    return second


def _upward(data: bytes, order: tuple[int, int]) -> str:
    arena, results = Guarded((2 * SLOTS, SLOT_BYTES)), Guarded((SLOTS, SLOT_BYTES))
    machine = ShardMachine(RANKS, arena.array, results.array)
    effects: list[Effect] = []
    for rank in order:
        message = (WHOLE if rank == 0 else data)[:SLOT_BYTES]
        arena.array[rank * SLOTS, : len(message)] = np.frombuffer(message, np.uint8)
        effects += machine.received(rank, 0, len(message), 0.0)
        effects += machine.advance(0.0)
    arena.check()
    results.check()
    below = 0
    for effect in effects:
        if isinstance(effect, Send):
            header = read_header(results.array[effect.slot], effect.nbytes)
            indices = [index % MAX_BLOCKS for index in indices_of(results.array[effect.slot], header)]
            assert indices == sorted(set(indices))
            assert all(below <= index < header.frontier for index in indices)
            below = header.frontier % TENSOR.layout.blocks
    merged = any(isinstance(effect, Send) for effect in effects)
    return (
        "merged" if merged and machine.ended is None else _outcome(machine.ended, effects, {RANKS[1], "ranks 0 and 1"})
    )


def downward(data: bytes) -> str:
    """A result for a worker that has packed all of its tensor."""
    send, receive = Guarded((SLOTS, SLOT_BYTES)), Guarded((SLOTS, SLOT_BYTES))
    tensor, machine, effects = busy_worker(send, receive)
    message = data[:SLOT_BYTES]
    receive.array[0, : len(message)] = np.frombuffer(message, np.uint8)
    effects += machine.received(0, 0, len(message), 0.0)
    for guard in (tensor, send, receive):
        guard.check()
    outcome = _outcome(machine.ended, effects, {AGGREGATOR})
    assert (outcome != "violation") == result_is_proper(data), outcome
    return outcome


def busy_worker(send: Guarded, receive: Guarded) -> tuple[Guarded, RankMachine, list[Effect]]:
    tensor = Guarded((TENSOR.layout.elements,), np.float32)
    tensor.array[:] = 1
    machine = RankMachine([(send.array, receive.array)], ["a:1"], RANKS[0], rank=0, scan_span=1 << 20, timeout_s=60.0)
    mask = element_type(np.float32).zero_mask
    machine.submit(TENSOR, DenseTensor(tensor.array, tensor.array, TENSOR.layout, mask), 0.0)
    return tensor, machine, list(machine.advance(0.0))


def _outcome(end: End | None, effects: list[Effect], culprits: set[str]) -> str:
    """Outcome of a machine. If it ended, its error must blame the peer."""
    if end is None:
        return "finished" if any(isinstance(effect, Finish) for effect in effects) else "goes on"
    assert end.cause is not None
    assert end.cause.culprit in culprits, end
    assert len(end.cause.reason) < LONGEST_ERROR
    assert end.kind in (None, "violation", "mismatch"), end  # None: of a worker
    return "violation"


def plain(data: bytes) -> str:
    """An object of another rank, as plain data."""
    try:
        result = from_bytes(data, trust=False, sender=RANKS[1])
    except UsageError as error:
        return kind_of(error)
    again = from_bytes(to_bytes(result, trust=False), trust=False, sender=RANKS[1])
    assert type(again) is type(result)
    return type(result).__name__


def packets(data: bytes) -> str:
    """Play packets of a shard, [number, items] each, to one of two ranks that have sent parts."""
    try:
        decoded = dict(msgspec.msgpack.decode(data, type=list[SAID_PACKET], strict=True))
    except UNDECODABLE:
        return "no packets"
    numbers = np.array(sorted(decoded), np.int64)
    rows = np.full((len(decoded), PACKET_BYTES), ord("x"), np.uint8)
    rows[:, -COUNT_BYTES:].view(np.uint64)[:, 0] = [decoded[number] for number in sorted(decoded)]
    some, none = (_unpacked(decoded, numbers, rows, width) for width in (2, 0))
    return some if some != "ProtocolError" else f"{some}, {none} of no bytes"


def _unpacked(decoded: dict[int, int], numbers: Array, rows: Array, width: int) -> str:
    """Outcome of the packets, if each item has `width` numbers of 4 bytes."""
    layout, like = Layout(2 * MOST_PACKETS * PACKET_BYTES, PACKET_BYTES), np.empty((0, width), np.int32)
    own_packets = packed(np.ones((3, width), np.int32))
    operand = RaggedParts(own_packets, like, layout, Pool().take, rank=0, senders=range(2), max_packets=MOST_PACKETS)
    operand.put(rows, numbers, np.zeros(len(decoded), np.bool_), False)
    try:
        operand.finish()
    except ProtocolError as error:
        assert not packets_are_proper(decoded, MOST_PACKETS, 4 * width)
        return kind_of(error)
    assert packets_are_proper(decoded, MOST_PACKETS, 4 * width)
    assert all(part.shape[1:] == (width,) for part in operand.parts)
    assert all(len(part) in decoded.values() for rank, part in enumerate(operand.parts) if rank not in operand.refused)
    assert all(set(text) == {"x"} for text in operand.refused.values())
    return "refusal" if operand.refused else "parts"


TARGETS: dict[str, Callable[[bytes], str]] = {
    each.__name__: each for each in (control, descriptor, upward, downward, plain, packets)
}
