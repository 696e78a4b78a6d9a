"""Targets without processes: decoding, the machines, and the real links, drivers and server over socket pairs.

Each takes the bytes of one peer and returns what became of them, in a word or two.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from harness import Guarded

from omnireduce.dtypes import element_type
from omnireduce.errors import OmniReduceError, ProtocolError
from omnireduce.protocol.aggregator import AggregatorMachine
from omnireduce.protocol.effects import Effect, End, Finish, Send
from omnireduce.protocol.handshake import Candidate, Gate
from omnireduce.protocol.membership import Limits
from omnireduce.protocol.operands import DenseTensor
from omnireduce.protocol.worker import WorkerMachine
from omnireduce.runtime.access import Access
from omnireduce.runtime.driver import Driver
from omnireduce.runtime.prove import _advance
from omnireduce.runtime.rendezvous import read_answer
from omnireduce.runtime.server import ShardServer
from omnireduce.secret import Secret
from omnireduce.transport.base import Link
from omnireduce.transport.stream import CONTROL, DATA, FRAME, StreamLink
from omnireduce.wire import (
    MAX_BLOCKS,
    Welcome,
    decode_control,
    decode_descriptor,
    encode_control,
    encode_descriptor,
    message_indices,
    read_header,
)

from .seeds import AGGREGATOR_NONCE, SECRET, SLOT_BYTES, SLOTS, TENSOR, WHOLE, WORKER_NONCE

RANKS = ["rank 0 (host h, pid 1)", "rank 1 (host h, pid 2)"]
AGGREGATOR = "aggregator a:1"
TURNS = 200  # of a server until a connection that has ended must be forgotten
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
    again = encode_control(message)
    assert encode_control(decode_control(again)) == again
    return type(message).__name__


def descriptor(data: bytes) -> str:
    """The descriptor in a worker's first block message."""
    try:
        found = decode_descriptor(data)
    except ProtocolError as error:
        return kind_of(error)
    assert decode_descriptor(encode_descriptor(found)) == found
    assert found.block_bytes > 0
    assert 0 <= found.layout.blocks < MAX_BLOCKS
    return found.kind


def upward(data: bytes) -> str:
    """A block message of rank 1 to the aggregator, where rank 0 has sent a proper one, or sends it afterwards."""
    outcomes = [_upward(data, order) for order in ((0, 1), (1, 0))]
    return " / ".join(dict.fromkeys(outcomes))


def _upward(data: bytes, order: tuple[int, int]) -> str:
    arena, results = Guarded((2 * SLOTS, SLOT_BYTES)), Guarded((SLOTS, SLOT_BYTES))
    machine = AggregatorMachine(RANKS, arena.array, results.array)
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
            indices = (message_indices(results.array[effect.slot], header) % MAX_BLOCKS).tolist()
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
    tensor, machine, effects = _busy_worker(send, receive)
    message = data[:SLOT_BYTES]
    receive.array[0, : len(message)] = np.frombuffer(message, np.uint8)
    effects += machine.received(0, 0, len(message), 0.0)
    for guard in (tensor, send, receive):
        guard.check()
    return _outcome(machine.ended, effects, {AGGREGATOR})


def _busy_worker(send: Guarded, receive: Guarded) -> tuple[Guarded, WorkerMachine, list[Effect]]:
    tensor = Guarded((TENSOR.elements,), np.float32)
    tensor.array[:] = 1
    machine = WorkerMachine([(send.array, receive.array)], ["a:1"], RANKS[0], rank=0, scan_span=1 << 20, timeout_s=60.0)
    mask = element_type(np.float32).zero_mask
    machine.submit(TENSOR, DenseTensor(tensor.array, tensor.array, TENSOR.layout, mask), 0.0)
    return tensor, machine, list(machine.advance(0.0))


def _outcome(end: End | None, effects: list[Effect], culprits: set[str]) -> str:
    """What a machine came to. The one to blame must be the peer."""
    if end is None:
        return "finished" if any(isinstance(effect, Finish) for effect in effects) else "goes on"
    assert end.cause is not None
    assert end.cause.culprit in culprits, end
    assert len(end.cause.reason) < LONGEST_ERROR
    return "violation"


class InlineLink(StreamLink):
    """What tcp does with bytes, over a socket pair."""

    kind = "inline"
    inline = True


@contextlib.contextmanager
def wired() -> Iterator[tuple[InlineLink, socket.socket]]:
    """A link, and the plain socket that is its peer."""
    ours, peer = socket.socketpair()
    peer.setblocking(False)
    link = InlineLink(ours, "the peer")
    with peer:
        yield link, peer
    link.close()


def frames(data: bytes) -> Iterator[bytes]:
    """The bytes, cut behind every whole frame: a peer that keeps the rules waits for answers there."""
    at = 0
    while len(data) - at >= FRAME.size:
        kind, _, length = FRAME.unpack_from(data, at)
        size = FRAME.size + (length if kind in (CONTROL, DATA) else 0)
        yield data[at : at + size]
        at += size
    yield data[at:]


def _say(peer: socket.socket, data: bytes, turn: Callable[[], object]) -> bytes:
    """Send a frame, let the other side work, and return what it has said."""
    said = b""
    for _ in range(TURNS):
        with contextlib.suppress(BlockingIOError):
            try:
                data = data[peer.send(data) :]
            except (BrokenPipeError, ConnectionResetError):
                data = b""
        turn()
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            said += peer.recv(1 << 20)
        if not data:
            return said
    raise AssertionError("the other side does not read")


@dataclass(frozen=True, slots=True)
class FixedNonce(Access):
    """So that a seed can hold the right proof."""

    def gate(self, link: Link) -> Gate:
        return Gate(self.secret, AGGREGATOR_NONCE)


def stranger(data: bytes) -> str:
    """A whole connection to a shard without a secret."""
    return _connection(data, None)


def proven(data: bytes) -> str:
    """A whole connection to a shard with a secret: without the right proof nothing begins."""
    outcome = _connection(data, SECRET)
    if outcome in ("Welcome", "Aborted", "Goodbye", "Pending"):
        assert SECRET.proof("worker", WORKER_NONCE, AGGREGATOR_NONCE) in data
    return outcome


def _connection(data: bytes, secret: Secret | None) -> str:
    limits = Limits(max_jobs=4, max_world_size=8, max_job_bytes=1 << 22, join_timeout_s=60.0)
    server = ShardServer("a:1", [], limits, drain_s=0.0, access=FixedNonce(secret))
    said = b""
    with wired() as (link, peer):
        server.adopt(link)
        for frame in frames(data):
            said += _say(peer, frame, lambda: server.turn(0.0))
        peer.shutdown(socket.SHUT_WR)
        for _ in range(TURNS):
            server.turn(0.0)
            if not server._connections:
                break
    membership = server._membership
    server._selector.close()
    kept = [server._connections, server._timed, server._jobs, server._of_job]
    kept += [membership._gathering, membership._running, membership._held]
    assert not any(kept), f"kept after the connection had ended: {kept}"
    return _last_word(said)


def _last_word(said: bytes) -> str:
    """The kind of the last whole control message."""
    last = "nothing"
    for frame in frames(said):
        if frame[:1] == bytes([CONTROL]):
            last = type(decode_control(frame[FRAME.size :])).__name__
    return last


def aggregator(data: bytes) -> str:
    """What an aggregator says to a worker with a secret that wants to join."""
    with wired() as (link, peer):
        candidate, is_proven, outcome = Candidate(SECRET, WORKER_NONCE), False, "nothing"
        link.send_control(encode_control(candidate.greeting))
        try:
            for frame in frames(data):
                peer.send(frame)
                if not is_proven:
                    is_proven = _advance(link, candidate)
                    continue
                for event in link.poll():
                    outcome = type(read_answer(link, event)).__name__
        except OmniReduceError as error:
            return kind_of(error)
    if outcome == Welcome.__name__:
        assert SECRET.proof("aggregator", WORKER_NONCE, AGGREGATOR_NONCE) in data
    return outcome


def delivery(data: bytes) -> str:
    """What an aggregator sends to a worker of a running job."""
    with wired() as (link, peer):
        send, receive = Guarded((SLOTS, SLOT_BYTES)), Guarded((SLOTS, SLOT_BYTES))
        link.attach(send.array, receive.array)
        tensor, machine, effects = _busy_worker(send, receive)
        finished: list[int] = []
        driver = Driver(machine, [link], lambda: 0.0, on_finish=finished.append)
        driver.perform(effects)
        for frame in frames(data):
            _say(peer, frame, driver.turn)
        peer.shutdown(socket.SHUT_WR)
        for _ in range(TURNS):
            driver.turn()
        assert link.over
        for guard in (tensor, send, receive):
            guard.check()
    assert machine.ended is not None
    assert machine.ended.cause is not None
    return "finished" if finished else "ended"


TARGETS: dict[str, Callable[[bytes], str]] = {
    each.__name__: each for each in (control, descriptor, upward, downward, stranger, proven, aggregator, delivery)
}
