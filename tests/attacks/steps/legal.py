"""Members who keep to the rules, and cost as much as the rules allow."""

from __future__ import annotations

import contextlib
import itertools
import random
import struct
from collections.abc import Iterator, Sequence

import numpy as np
from raw_peer import CONTROL, CREDIT, DATA

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.wire.blocks import seal

from ..target import Peer, Target, with_input

RANKS, SLOTS, SLOT_BYTES = 3, 2, 64 << 20
LARGE_JOB_BYTES = (RANKS + 1) * SLOTS * SLOT_BYTES
GREEDY, GREEDY_SLOT_BYTES = 4, 16 << 20  # jobs at once
GREEDY_BYTES = GREEDY * (RANKS + 1) * SLOTS * GREEDY_SLOT_BYTES
TCP_RANKS, TCP_SLOT_BYTES = 2, 4 << 20
TCP_BYTES = (TCP_RANKS + 1) * SLOTS * TCP_SLOT_BYTES
TCP_STEP_BYTES = TCP_RANKS * TCP_SLOT_BYTES  # in each direction
FORMAT_SLOT_BYTES = 1 << 20
_number = struct.Struct("<Q")


class _RankInMemory:
    """One rank of a job by shared memory, whose message lies in its first slot from the begin."""

    def __init__(self, peer: Peer, rank: int, message: np.ndarray, slot_bytes: int) -> None:
        self.peer, self._at, self._nbytes = peer, rank * SLOTS * slot_bytes, message.size
        self._memory = peer.memory()
        self._memory[self._at : self._at + message.size] = message.data

    def begin(self, number: int) -> None:
        self._memory[self._at : self._at + _number.size] = _number.pack(number)
        self.peer.frame(DATA, 0, self._nbytes)


def _finish(peers: Sequence[Peer]) -> str:
    """Take results, as they come, until the slots of all messages are free again; return what came."""
    waiting = set(peers)
    while waiting:
        for peer in with_input(peers):
            kind, slot, message = peer.event()
            if kind == CONTROL and type(message).__name__ == "Aborted":
                return "Aborted"
            if kind == DATA:
                peer.give_credit(slot)
            elif kind == CREDIT:
                waiting.discard(peer)
    return "result"


def _whole_message(descriptor: Descriptor, slot_bytes: int) -> np.ndarray:
    """A message with all blocks of the tensor."""
    memory = np.ones(slot_bytes, np.uint8)
    blocks = descriptor.layout.blocks
    nbytes = seal(memory, 0, blocks, np.arange(blocks), descriptor.block_bytes, descriptor.encoded)
    return memory[:nbytes]


def _job_of(
    target: Target, descriptor: Descriptor, stack: contextlib.ExitStack, job: str, slot_bytes: int = SLOT_BYTES
) -> Sequence[_RankInMemory]:
    peers = [stack.enter_context(Peer(target, local=True)) for _ in range(RANKS)]
    for rank, peer in enumerate(peers):
        peer.hello(job, rank, RANKS, slots=SLOTS, slot_bytes=slot_bytes)
    assert all(peer.admitted() for peer in peers), "not admitted"
    message = _whole_message(descriptor, slot_bytes)
    return [_RankInMemory(peer, rank, message, slot_bytes) for rank, peer in enumerate(peers)]


def _collectives(target: Target, descriptor: Descriptor, job: str) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        members = _job_of(target, descriptor, stack, job)
        for number in itertools.count():
            for member in members:
                member.begin(number)
            yield _finish([member.peer for member in members])


def tiny_blocks(target: Target, draw: random.Random) -> Iterator[str]:
    """Collectives of as many blocks of one byte, rows of width 1, as fit the largest slot."""
    blocks = SLOT_BYTES // 9 - 200
    return _collectives(target, Descriptor("allreduce_rows", "", "uint8", (blocks, 1)), "tiny")


def narrow_rows(target: Target, draw: random.Random) -> Iterator[str]:
    """Rows of width 1, as many as fit the largest slot."""
    rows = SLOT_BYTES // 12 - 200
    return _collectives(target, Descriptor("allreduce_rows", "", "float32", (rows, 1)), "narrow")


def half_floats(target: Target, draw: random.Random) -> Iterator[str]:
    """Dense 16-bit floats, as many as fit the largest slot: adding them takes longer than that of any other type."""
    block, name = 4096, draw.choice(("float16", "bfloat16"))
    elements = SLOT_BYTES // (2 * block + 8) * block - block
    return _collectives(target, Descriptor("allreduce", "", name, (elements,), block_size=block), "halves")


def greedy_jobs(target: Target, draw: random.Random) -> Iterator[str]:
    """Several jobs at once, each of which always has as much to do as fits its slots."""
    rows = Descriptor("allreduce_rows", "", "float32", (GREEDY_SLOT_BYTES // 12 - 200, 1))
    with contextlib.ExitStack() as stack:
        jobs = [_job_of(target, rows, stack, f"greedy-{number}", GREEDY_SLOT_BYTES) for number in range(GREEDY)]
        for number in itertools.count():
            for job in jobs:
                result = _finish([member.peer for member in job]) if number else "begun"
                for member in job:
                    member.begin(number)
                yield result


def large_results(target: Target, draw: random.Random) -> Iterator[str]:
    """Dense collectives by TCP whose messages and results fill slots of some MiB."""
    block = 4096
    elements = TCP_SLOT_BYTES // (4 * block + 8) * block - block
    descriptor = Descriptor("allreduce", "", "float32", (elements,), block_size=block)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(target)) for _ in range(TCP_RANKS)]
        for rank, peer in enumerate(peers):
            size = {"slots": SLOTS, "slot_bytes": TCP_SLOT_BYTES, "tcp_message_bytes": TCP_SLOT_BYTES}
            peer.hello("large-results", rank, TCP_RANKS, **size)
        assert all(peer.admitted() for peer in peers), "not admitted"
        message = _whole_message(descriptor, TCP_SLOT_BYTES)
        for number in itertools.count():
            message[: _number.size] = np.frombuffer(_number.pack(number), np.uint8)
            for peer in peers:
                peer.frame(DATA, 0, message.size, message.tobytes())
            yield _finish(peers)


def large_joins(target: Target, draw: random.Random) -> Iterator[str]:
    """Jobs of the largest slots that come and go."""
    for number in itertools.count():
        with Peer(target, local=draw.random() < 0.5) as peer:
            peer.hello(f"large-{number}", 0, 1, slots=SLOTS, slot_bytes=SLOT_BYTES)
            yield peer.answer()
            if draw.random() < 0.5:
                peer.say({"type": "Leave", "cause": None})
                peer.answer()


def new_formats(target: Target, draw: random.Random) -> Iterator[str]:
    """Empty collectives, each of another dtype and block size."""
    types = ("uint8", "int8")
    with Peer(target) as peer:
        peer.hello("formats", 0, 1, slots=SLOTS, slot_bytes=FORMAT_SLOT_BYTES)
        yield peer.answer()
        free = list(range(SLOTS))
        for number in itertools.count():
            descriptor = Descriptor(
                "allreduce", "", types[number % 2], (0,), block_size=8 * (1 + number // 2 % 100_000)
            )
            peer.collective(descriptor, number, free.pop())
            while not free:
                kind, slot, message = peer.event()
                if kind == CONTROL and type(message).__name__ == "Aborted":
                    yield "Aborted"
                    return
                if kind == DATA:
                    peer.give_credit(slot)
                else:
                    free.append(slot)
            yield "result"
