"""Targets over socket pairs: the real links, drivers and server hear a peer's whole side of a connection."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass

from harness import Guarded
from messages import AGGREGATOR_NONCE, HELLO, SLOT_BYTES, SLOTS, TEAM_SECRET, WORKER_NONCE

from omnireduce.core.dtypes import Array
from omnireduce.core.wire.control import Hello, Welcome, decode_control, encode_control
from omnireduce.errors import ProtocolError
from omnireduce.protocol.collective.effects import SendControl
from omnireduce.protocol.joining.authentication import Gate
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.joining.worker_joining import Joined, JoinEffect, JoinFailed, Joining
from omnireduce.runtime.driver import Driver
from omnireduce.runtime.rank.joining import feed
from omnireduce.runtime.shard.access import Access
from omnireduce.runtime.shard.server import ShardServer
from omnireduce.support.teams import Teams
from omnireduce.transport.base import Credited, Event, Link, Received
from omnireduce.transport.framing import CONTROL, DATA, FRAME, StreamLink

from .machines import busy_worker, kind_of
from .oracles import MAX_BYTES, MAX_RANKS, hello_is_proper
from .seeds import SECRET

TEAMS = Teams({"": [SECRET], TEAM_SECRET.team: [TEAM_SECRET]})
TURNS = 200  # a server forgets a connection that has ended after at most so many turns


class InlineLink(StreamLink):
    """A link that treats bytes as tcp does, over a socket pair. It checks that its events keep the rules of credits."""

    kind = "inline"
    inline = True

    def __init__(self, sock: socket.socket, peer: str) -> None:
        super().__init__(sock, peer)
        self._theirs: set[int] = set()  # receive slots that were reported and not returned
        self._ours: set[int] = set()  # send slots that were sent and not credited

    def send(self, slot: int, nbytes: int, instead: Array | None = None) -> None:
        super().send(slot, nbytes, instead)
        self._ours.add(slot)

    def return_credit(self, slot: int) -> None:
        super().return_credit(slot)
        self._theirs.remove(slot)

    def poll(self) -> Sequence[Event]:
        events = super().poll()
        for event in events:
            if isinstance(event, Received):
                assert event.slot < len(self.receive_slots)
                assert event.nbytes <= self.receive_slots.shape[1]
                assert event.slot not in self._theirs
                self._theirs.add(event.slot)
            elif isinstance(event, Credited):
                self._ours.remove(event.slot)
        return events


@contextlib.contextmanager
def wired() -> Iterator[tuple[InlineLink, socket.socket]]:
    """A link, and the plain socket that is its peer."""
    ours, peer = socket.socketpair()
    peer.setblocking(False)
    link = InlineLink(ours, "the peer")
    with peer, contextlib.closing(link):
        yield link, peer


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
    answer = b""
    for _ in range(TURNS):
        with contextlib.suppress(BlockingIOError):
            try:
                data = data[peer.send(data) :]
            except (BrokenPipeError, ConnectionResetError):
                data = b""
        turn()
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            answer += peer.recv(1 << 20)
        if not data:
            return answer
    raise AssertionError("the other side does not read")


@dataclass(frozen=True, slots=True)
class FixedNonce(Access):
    """So that a seed can hold the right proof."""

    def gate(self, link: Link) -> Gate:
        return Gate(self.teams, AGGREGATOR_NONCE)


def stranger(data: bytes) -> str:
    """A whole connection to a shard without a secret."""
    outcome = _connection(data, None)
    assert outcome != "AdminAnswer"
    return outcome


def proven(data: bytes) -> str:
    """A whole connection to a shard with a secret, and a team with one: without the right proof nothing begins."""
    outcome = _connection(data, TEAMS)
    if outcome in ("Welcome", "Aborted", "Goodbye", "Pending", "AdminAnswer"):
        proofs = [each.proof("worker", WORKER_NONCE, AGGREGATOR_NONCE) in data for each in (SECRET, TEAM_SECRET)]
        assert any(proofs)
        if not proofs[0] and outcome == "AdminAnswer":
            assert b"drain" not in data
        elif not proofs[0]:
            jobs = [hello.job for hello in hellos(data)]
            assert any(job == TEAM_SECRET.team or job.startswith(f"{TEAM_SECRET.team}.") for job in jobs)
    return outcome


def _connection(data: bytes, teams: Teams | None) -> str:
    limits = Limits(max_jobs=4, max_world_size=MAX_RANKS, max_job_bytes=MAX_BYTES, join_timeout_s=60.0)
    server = ShardServer("a:1", [], limits, finish_s=0.0, access=FixedNonce(teams))
    answers = b""
    with wired() as (link, peer):
        server.adopt(link)
        for frame in frames(data):
            answers += _say(peer, frame, lambda: server.turn(0.0))
        peer.shutdown(socket.SHUT_WR)
        for _ in range(TURNS):
            server.turn(0.0)
            if not server._connections:
                break
    admission = server._admission
    server._selector.close()
    kept: list[Sized] = [
        server._connections,
        server._connections.unidentified,
        server._connections.closing,
        server._status_requests,
    ]
    kept += [server._jobs, server._teardown._members, admission._pending_jobs, admission._running, admission._in_memory]
    kept += [admission._compilers._by_connection, admission._compilers._last_connections]
    assert not any(map(len, kept)), f"kept after the connection had ended: {kept}"
    if b"Leave" not in data:  # a rank may give any reason
        broken, counted = answers.count(b"protocol error: "), server._pages._aborts["violation"]
        assert broken <= counted, f"{broken} jobs ended for broken rules, {counted} are counted as that"
    if b"Pending" in answers or b"Welcome" in answers:
        assert any(hello_is_proper(hello) for hello in hellos(data)), "admitted without a proper hello"
    return _last_word(answers)


def hellos(data: bytes) -> Iterator[Hello]:
    """Hello messages that can be decoded."""
    for frame in frames(data):
        with contextlib.suppress(ProtocolError):
            message = decode_control(frame[FRAME.size :])
            if isinstance(message, Hello):
                yield message


def _last_word(data: bytes) -> str:
    """The kind of the last whole control message."""
    last = "nothing"
    for frame in frames(data):
        if frame[:1] == bytes([CONTROL]):
            last = type(decode_control(frame[FRAME.size :])).__name__
    return last


def aggregator(data: bytes) -> str:
    """Play the bytes of an aggregator to a worker with a secret that wants to join."""
    machine = Joining(HELLO, [link_name := "the peer"], SECRET, 60.0)
    with wired() as (link, peer):
        outcomes: list[Joined | JoinFailed] = []

        def perform(effects: Iterator[JoinEffect]) -> None:
            for effect in effects:
                if isinstance(effect, SendControl):
                    link.send_control(encode_control(effect.message))
                elif isinstance(effect, Joined | JoinFailed):
                    outcomes.append(effect)

        def turn() -> None:
            for event in link.poll():
                if not outcomes:
                    perform(feed(machine, 0, link_name, event, 0.0))

        perform(machine.start(0.0))
        perform(machine.connected(0, WORKER_NONCE, 0.0))
        for frame in frames(data):
            if link.over:  # nothing more is read of it
                break
            _say(peer, frame, turn)
    assert len(outcomes) <= 1
    return _end_of_joining(outcomes[0], data) if outcomes else "nothing"


def _end_of_joining(outcome: Joined | JoinFailed, data: bytes) -> str:
    if isinstance(outcome, JoinFailed):
        return kind_of(outcome.error)
    assert SECRET.proof("aggregator", WORKER_NONCE, AGGREGATOR_NONCE) in data
    return Welcome.__name__


def delivery(data: bytes) -> str:
    """Play the bytes of an aggregator to a worker of a running job."""
    with wired() as (link, peer):
        send, receive = Guarded((SLOTS, SLOT_BYTES)), Guarded((SLOTS, SLOT_BYTES))
        link.attach(send.array, receive.array)
        tensor, machine, effects = busy_worker(send, receive)
        finished: list[int] = []
        driver = Driver(machine, [link], lambda: 0.0, on_finish=finished.append)
        driver.perform(effects)
        for frame in frames(data):
            if link.over:  # an engine would close it now
                break
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


TARGETS: dict[str, Callable[[bytes], str]] = {each.__name__: each for each in (stranger, proven, aggregator, delivery)}
