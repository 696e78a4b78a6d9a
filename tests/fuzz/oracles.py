"""Oracles: the rules for valid inputs again, in the most obvious way. The project must accept exactly these inputs."""

from __future__ import annotations

import itertools
import struct

from messages import SLOT_BYTES

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.core.wire.control import (
    Challenge,
    ControlMessage,
    Greeting,
    Hello,
    Pending,
    Proof,
    Refused,
    Waiting,
    Welcome,
)

from .seeds import FIRST, TENSOR

PACKED = ("allgather_ragged", "broadcast_object", "allgather_object")
MOVING = ("broadcast", "allgather", "gather", "scatter", "alltoall", "barrier", "refusal", *PACKED)
MAX_RANKS, MAX_BYTES = 8, 1 << 22  # limits of the fuzzer's shards


def program_is_proper(found: Descriptor) -> bool:
    """Instructions of four bytes, each of which uses what there is, and no array twice."""
    program = found.program
    if program is None:
        return True
    proper = (
        found.kind in ("allreduce", "allreduce_rows")
        and found.dtype == "float32"
        and found.op in ("sum", "mean")
        and not found.codec
        and found.layout.block_size <= 16384
        and program.state in range(1 << 16)
        and program.columns in range(9)
        and program.cells in range(5)
        and program.totals in range(5)
        and len(program.scalars) in range(0, 65, 4)
        and len(program.code) in range(0, 257, 4)
    )
    for at in range(0, len(program.code), 4):
        operation, target, operand, third = program.code[at : at + 4]
        others = {14: [operand, third], 30: [operand, target + 1], 31: [operand, operand + 1]}
        arrays = [target, *others.get(operation, [operand] if operation < 14 else [])]
        scalars = {10: 1, 11: 2, 12: 2, 13: 2, 15: 1, 16: 1, 17: 1, 30: 4, 31: 3}.get(operation, 0)
        proper = (
            proper
            and operation < 32
            and all(array < 8 + program.columns for array in arrays)
            and len(set(arrays)) == len(arrays)
            and (scalars == 0 or third + scalars <= len(program.scalars) // 4)
            and (operation not in (27, 28) or third < program.cells)
            and (operation != 29 or third < program.totals)
        )
    return proper


def descriptor_is_proper(found: Descriptor) -> bool:
    shape, elements, spread = found.shape, 1, 1
    for each in shape:
        elements, spread = elements * each, spread * max(each, 1)
    block_size = found.block_size
    if found.kind in MOVING:
        proper = found.op == "sum" and 1 <= found.item_bytes < 2**31
        elements *= found.item_bytes * found.parts
        block_size = max(8, min(block_size * found.item_bytes, 2**15) // 8 * 8)
    elif found.dtype == "bool":
        proper = found.op in ("any", "all") and found.item_bytes == 0 and found.kind != "allreduce_rows"
    else:
        proper = (
            found.dtype in ELEMENT_TYPES and found.item_bytes == 0 and (found.op != "mean" or "float" in found.dtype)
        )
        proper = proper and found.op not in ("any", "all")
    if found.kind in PACKED:
        elements, block_size = found.parts * found.packets * 1024, 1024
    if found.kind == "allreduce_rows":
        proper = proper and found.op in ("sum", "mean") and len(shape) == 2 and 1 <= shape[1] < 2**31 - 7
        block_size = shape[1] if proper else 1
    return (
        proper
        and len(shape) <= 64
        and all(each >= 0 for each in shape)
        and spread < 2**62
        and 0 <= elements < 2**62
        and -(-elements // block_size) < 2**48
        and found.block_size in range(8, 2**31, 8)
        and found.root in range(2**32)
        and found.parts in range(1, 2**32)
        and (1 <= found.packets <= 2**25 if found.kind in PACKED else found.packets == 0)
        and len(found.name) <= 200
        and len(found.group) <= 60
        and found.group.isascii()
        and len(found.dtype) <= 60
        and f"{found.name}{found.dtype}{found.group}{found.refused}".isprintable()
        and (
            0 < len(found.refused.encode()) <= 600 and not found.name if found.kind == "refusal" else not found.refused
        )
        and len(found.encoded) <= 1024
        and program_is_proper(found)
    )


def packets_are_proper(decoded: dict[int, int], limit: int, item_bytes: int) -> bool:
    """Whether these packets, with the number of items that each says if it is the last one, are a part of each of two
    ranks: items of so many bytes, and 8 bytes more, in packets of 1024. Of items of no bytes, made of numbers of 4, an
    array can have fewer than 2**61. A text of up to 600 bytes in one packet says why a part is missing."""
    for rank in (0, 1):
        mine = [number for number in range(rank * limit, (rank + 1) * limit) if number in decoded]
        if not mine or mine != list(range(rank * limit, rank * limit + len(mine))):
            return False
        if decoded[mine[-1]] >= 2**63:
            if len(mine) > 1 or not 0 < decoded[mine[-1]] - 2**63 <= 600:
                return False
            continue
        nbytes = decoded[mine[-1]] * item_bytes + 8
        if decoded[mine[-1]] >= 2**61:
            return False
        if not 1024 * (len(mine) - 1) < nbytes <= 1024 * len(mine):
            return False
    return True


def control_is_proper(message: ControlMessage) -> bool:
    """Everything that has a length has a limit."""
    texts: list[str] = []
    if isinstance(message, Pending):
        short = max(len(message.missing), len(message.compiling)) <= 16
        return short and all(0 <= rank < 2**32 for rank in message.compiling) and len(message.note) <= 4096
    if isinstance(message, Refused):
        texts = [message.reason]
    if isinstance(message, Waiting):
        texts = [message.what, message.who]
    if isinstance(message, Welcome):
        texts = [message.note]
        if message.generation < 1 or (message.verbs is not None and len(message.verbs.gid) > 39):
            return False
    if isinstance(message, Hello) and len(message.refuses) > 600:
        return False
    if isinstance(message, (Greeting, Challenge)) and len(message.nonce) != 32:
        return False
    if isinstance(message, Greeting) and not (
        len(message.team) <= 64 and all(each.isascii() and (each.isalnum() or each in "_-") for each in message.team)
    ):
        return False
    if isinstance(message, Proof) and len(message.proof) != 32:
        return False
    return all(len(text) <= 4096 for text in texts)


def hello_is_proper(hello: Hello) -> bool:
    """Whether this worker may wait for the others on a shard of the fuzzer."""
    return (
        hello.version == 22
        and hello.refuses == ""
        and 1 <= len(hello.job) <= 128
        and all(letter.isascii() and (letter.isalnum() or letter in "._:@+-") for letter in hello.job)
        and len(hello.host) <= 255
        and hello.host.isprintable()
        and len(hello.relays) <= 8
        and all(0 < len(relay) <= 255 and relay.isprintable() for relay in hello.relays)
        and (len(hello.relay) > 0) == (len(hello.relays) > 0)
        and 1 <= hello.world_size <= MAX_RANKS
        and hello.rank >= 0
        and (hello.rank < hello.world_size or hello.min_ranks > 0)
        and 0 <= hello.min_ranks <= hello.world_size
        and 0 <= hello.last_call_s <= 3600
        and hello.formation >= 0
        and (hello.min_ranks == 0 or hello.shard == 0)
        and (hello.formation == 0 or hello.shard > 0)
        and 0 <= hello.shard < hello.shards <= 4096
        and 2 <= hello.slots <= 64
        and 65536 <= hello.slot_bytes <= 64 << 20
        and hello.slot_bytes % 4096 == 0
        and hello.state_bytes >= 0
        and (hello.world_size + 1) * hello.slots * hello.slot_bytes + hello.state_bytes <= MAX_BYTES
        and 1 <= hello.stripe_blocks <= 2**20
        and 0 <= hello.whole_bytes <= 2**30
        and hello.timeout_s >= 0.1
        and hello.tcp_message_bytes >= 1
        and (hello.memory == "" or (len(hello.memory) == 32 and set(hello.memory) <= set("0123456789abcdef")))
        and (hello.verbs is None or hello.verbs.address + hello.slots * hello.slot_bytes <= 2**64)
    )


def _parts(message: bytes) -> tuple[int, int, int, list[int], bytes, int] | None:
    """Collective, frontier, bytes per block, indices, extra, and how many blocks are left out, of a block message whose
    parts fit together. The stripes of TENSOR are all of one shard: a run goes on without gaps."""
    if not 64 <= len(message) <= SLOT_BYTES:
        return None
    number, frontier, count, size, extra_bytes = struct.unpack_from("<QqIII", message)
    left_out, runs, steps = struct.unpack_from("<III", message, 28)
    if left_out > count or 0 < count <= 2 * runs or count == 0 < runs or (steps and runs):
        return None
    start = (64 + (count - left_out) * size + 7) // 8 * 8
    stop = start + (steps or 8 * (2 * runs if runs else count))
    if extra_bytes > 1024 or count * (size + 8) > SLOT_BYTES - 64 - 1024 - 8 or len(message) != stop + extra_bytes:
        return None
    if steps:
        taken = _steps(message[start:stop]) if count <= steps < 8 * count else None
        if taken is None or len(taken) != count:
            return None
        return number, frontier, size, taken, message[stop:], left_out
    indices = list(struct.unpack_from(f"<{(stop - start) // 8}q", message, start))
    if runs:
        firsts, counts = indices[::2], indices[1::2]
        ends = [first % 2**48 + many for first, many in zip(firsts, counts, strict=True)]
        if min(counts) < 1 or sum(counts) != count or max(ends) > 2**48:
            return None
        indices = [first + k for first, many in zip(firsts, counts, strict=True) for k in range(many)]
    return number, frontier, size, indices, message[stop:], left_out


def _steps(listed: bytes) -> list[int] | None:
    """The indices that a list of steps stands for, if it is one."""
    indices, index = list[int](), 0
    while listed:
        length = next((at + 1 for at, byte in enumerate(listed[:7]) if byte < 128), 0)
        index += sum((byte & 127) * 128**at for at, byte in enumerate(listed[:length]))
        if length == 0 or index >= 2**48:
            return None
        indices.append(index)
        listed = listed[length:]
    return indices


def _fit(indices: list[int], low: int, high: int) -> bool:
    ascend = all(one < two for one, two in itertools.pairwise(indices))
    return ascend and all(low <= index < high for index in indices)


def first_message_is_proper(message: bytes) -> bool:
    """Whether a rank may open the collective of TENSOR with this message."""
    parts = _parts(message)
    if parts is None:
        return False
    number, frontier, size, indices, extra, left_out = parts
    blocks = TENSOR.layout.blocks
    return (
        not left_out
        and number == 0
        and size == 32
        and 0 <= frontier <= blocks
        and extra == FIRST
        and _fit(indices, 0, frontier)
    )


def result_is_proper(message: bytes) -> bool:
    """Whether an aggregator may send this as the first result of TENSOR, once all of it was sent to it."""
    parts = _parts(message)
    if parts is None:
        return False
    number, frontier, size, marked, extra, left_out = parts
    indices = [index % 2**48 for index in marked]  # above are the marks
    own = [index >> 48 for index in marked].count(1)  # marks of rank 0, which this is
    if left_out not in (0, own):
        return False
    fits = 0 <= frontier <= TENSOR.layout.blocks and _fit(indices, 0, frontier)
    return number == 0 and size == 32 and not extra and fits
