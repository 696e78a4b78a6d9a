"""Members who keep to the rules, and cost as much as the rules allow."""

from __future__ import annotations

import contextlib
import itertools
import random
import struct
from collections.abc import Iterator, Sequence

import numpy as np
from raw_peer import CONTROL, CREDIT, DATA

from omnireduce.descriptor import Descriptor
from omnireduce.wire import seal

from ..target import Peer, Target

RANKS, SLOTS, SLOT_BYTES = 3, 2, 64 << 20
LARGE_JOB_BYTES = (RANKS + 1) * SLOTS * SLOT_BYTES
FORMAT_SLOT_BYTES = 1 << 20
_number = struct.Struct("<Q")


class _Member:
    """One rank of a job by shared memory, whose message lies in its first slot from the begin."""

    def __init__(self, peer: Peer, rank: int, message: np.ndarray) -> None:
        self.peer, self._at, self._nbytes = peer, rank * SLOTS * SLOT_BYTES, message.size
        self._memory = peer.memory()
        self._memory[self._at : self._at + message.size] = message.data

    def begin(self, number: int) -> None:
        self._memory[self._at : self._at + _number.size] = _number.pack(number)
        self.peer.frame(DATA, 0, self._nbytes)

    def finish(self) -> str:
        """Read all results, until the slot is free again; return what came."""
        free = done = False
        while not (free and done):
            kind, slot, message = self.peer.event()
            if kind == CONTROL and type(message).__name__ == "Aborted":
                return "Aborted"
            if kind == DATA:
                self.peer.give_credit(slot)
                done = True
            free |= kind == CREDIT
        return "result"


def _largest_message(descriptor: Descriptor) -> np.ndarray:
    """A message with all blocks of the tensor."""
    memory = np.ones(SLOT_BYTES, np.uint8)
    blocks = descriptor.layout.blocks
    nbytes = seal(memory, 0, blocks, np.arange(blocks), descriptor.block_bytes, descriptor.encoded)
    return memory[:nbytes]


def _job_of(target: Target, descriptor: Descriptor, stack: contextlib.ExitStack, job: str) -> Sequence[_Member]:
    peers = [stack.enter_context(Peer(target, local=True)) for _ in range(RANKS)]
    for rank, peer in enumerate(peers):
        peer.sock.settimeout(20.0)  # a collective of these takes seconds
        peer.hello(job, rank, RANKS, slots=SLOTS, slot_bytes=SLOT_BYTES)
    assert all(peer.admitted() for peer in peers), "not admitted"
    message = _largest_message(descriptor)
    return [_Member(peer, rank, message) for rank, peer in enumerate(peers)]


def _collectives(target: Target, descriptor: Descriptor, job: str) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        members = _job_of(target, descriptor, stack, job)
        for number in itertools.count():
            for member in members:
                member.begin(number)
            yield min(member.finish() for member in members)


def tiny_blocks(target: Target, draw: random.Random) -> Iterator[str]:
    """Collectives of as many blocks of one byte, rows of width 1, as fit the largest slot."""
    blocks = SLOT_BYTES // 9 - 200
    return _collectives(target, Descriptor("allreduce_rows", "", "uint8", (blocks, 1)), "tiny")


def narrow_rows(target: Target, draw: random.Random) -> Iterator[str]:
    """Rows of width 1, as many as fit the largest slot."""
    rows = SLOT_BYTES // 12 - 200
    return _collectives(target, Descriptor("allreduce_rows", "", "float32", (rows, 1)), "narrow")


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
