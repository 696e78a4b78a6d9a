"""The cost of many connections at once is bounded: a look at the oldest, a few answers a turn, and no busy loop."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator, Sequence

import pytest
from cluster_checks import FAILURE_S
from local_cluster import await_connections, descriptors_below
from msgspec.structs import replace

from omnireduce.core.status_messages import Status, StatusRequest
from omnireduce.core.wire.control import (
    PROTOCOL_VERSION,
    Aborted,
    ControlMessage,
    Hello,
    Pending,
    Refused,
    Welcome,
    decode_control,
    encode_control,
)
from omnireduce.protocol.collective.reduction import Budget
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.shard import BUDGET
from omnireduce.runtime.file_descriptors import PAUSE_S
from omnireduce.runtime.shard.connections import LINGER_S
from omnireduce.runtime.shard.listening import Listener
from omnireduce.runtime.shard.server import ShardServer
from omnireduce.runtime.shard.status_requests import STATUSES
from omnireduce.transport.framing import CONTROL, FRAME
from omnireduce.transport.shm import ShmLink
from omnireduce.transport.tcp import TcpLink, listen_tcp

LIMITS = Limits(max_jobs=9, max_world_size=200, max_job_bytes=1 << 30, join_timeout_s=60.0)
REQUEST = StatusRequest(PROTOCOL_VERSION)
HELLO = Hello(PROTOCOL_VERSION, "job", 0, 2, 0, 1, 2, 65536, "host", 7, 64)


class Crowd:
    """A server, without listeners unless it gets some, at a time of the test's choice, and those connected to it."""

    def __init__(self, budget: Budget = BUDGET, listeners: Sequence[Listener] = ()) -> None:
        self.now, self.step = 100.0, 0.0  # the clock advances by `step` with each reading
        self.processor_s = 0.0  # that the shard has used
        self.server = ShardServer(
            "a:1", listeners, LIMITS, finish_s=0.0, hello_timeout_s=10.0, budget=budget, clock=self.clock,
            processor_s=lambda: self.processor_s,
        )  # fmt: skip
        self.peers: list[socket.socket] = []

    def clock(self) -> float:
        self.now += self.step
        return self.now

    def connect(self) -> socket.socket:
        ours, peer = socket.socketpair()
        peer.setblocking(False)
        self.server.adopt(ShmLink(ours, f"peer {len(self.peers)}"))
        self.peers.append(peer)
        return peer

    def turn(self) -> None:
        self.server.turn(0.0)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.server.stop()
        self.server.serve()


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    result = Crowd()
    yield result
    result.close()


def say(peer: socket.socket, *messages: ControlMessage) -> None:
    bodies = [encode_control(message) for message in messages]
    peer.sendall(b"".join(FRAME.pack(CONTROL, 0, len(body)) + body for body in bodies))


def heard(peer: socket.socket) -> list[ControlMessage]:
    """All messages that have come so far; none after the end of the connection."""
    data, results = b"", []
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while more := peer.recv(1 << 20):
            data += more
    while data:
        length = FRAME.unpack_from(data)[2]
        results.append(decode_control(data[FRAME.size : FRAME.size + length]))
        data = data[FRAME.size + length :]
    return results


def test_a_few_status_requests_are_answered_in_a_turn_in_their_order(crowd: Crowd) -> None:
    peers = [crowd.connect() for _ in range(2 * STATUSES + 1)]
    for peer in peers:
        say(peer, REQUEST)
        crowd.turn()
        crowd.now += 0.001
    for peer in peers:
        assert [type(each) for each in heard(peer)] == [Status]
        say(peer, REQUEST)
    counts = []
    for _ in range(3):
        crowd.turn()
        counts.append(sum(len(heard(peer)) for peer in peers))
    assert counts == [STATUSES, STATUSES, 1]
    assert crowd.server._wait_limit_s(60.0) > 1.0


def test_a_job_that_came_in_this_turn_has_an_age(crowd: Crowd) -> None:
    worker, asker = crowd.connect(), crowd.connect()
    say(worker, HELLO)
    say(asker, REQUEST)
    crowd.step = 2**-20
    crowd.turn()
    [status] = heard(asker)
    assert isinstance(status, Status)
    assert [job.age_s > 0 for job in status.jobs] == [True]


@pytest.mark.parametrize("second", [REQUEST, HELLO])
def test_who_asks_waits_for_the_answer(crowd: Crowd, second: ControlMessage) -> None:
    peer, hasty = crowd.connect(), crowd.connect()
    say(hasty, REQUEST, second)
    say(peer, REQUEST)
    crowd.turn()
    [refused] = heard(hasty)
    assert isinstance(refused, Refused)
    assert refused.reason == f"{type(second).__name__} before a StatusRequest was answered"
    say(peer, second)
    crowd.turn()
    answers = [type(each) for each in heard(peer)]
    assert answers == [Status, Status if second is REQUEST else Pending]


def test_who_does_not_read_answers_gets_no_more_of_them(crowd: Crowd) -> None:
    peer, limit = crowd.connect(), 1 << 14
    for _ in range(limit):
        if crowd.server._connections.closing:
            break
        say(peer, REQUEST)
        crowd.turn()
    [connection] = crowd.server._connections
    assert sum(len(view) for _, view in connection.link._output) < 1 << 17  # type: ignore[attr-defined]
    last = heard(peer)
    crowd.turn()
    last += heard(peer)
    assert isinstance(last[-1], Refused)
    assert last[-1].reason == "a StatusRequest before the last answer was read"


def test_strangers_and_leavers_go_when_their_own_time_is_over(crowd: Crowd) -> None:
    first = crowd.connect()
    crowd.now += 5.0
    second, rude = crowd.connect(), crowd.connect()
    say(rude, Pending([], 0))
    crowd.turn()
    assert [type(each) for each in heard(rude)] == [Refused]
    assert crowd.server._wait_limit_s(60.0) == LINGER_S
    crowd.now += LINGER_S
    crowd.turn()
    assert len(crowd.server._connections) == 2
    assert crowd.server._wait_limit_s(60.0) == 10.0 - 5.0 - LINGER_S
    crowd.now += 4.0
    crowd.turn()
    assert [type(each) for each in heard(first)] == [Refused]
    assert heard(second) == []
    say(second, HELLO)
    crowd.turn()
    crowd.now += LINGER_S
    crowd.turn()
    [left] = crowd.server._connections
    assert left.hello == HELLO
    assert crowd.server._wait_limit_s(600.0) > 50.0  # until its job has gathered for too long


@pytest.mark.slow
def test_a_shard_whose_last_descriptor_is_the_one_kept_back_turns_away() -> None:
    with listen_tcp("127.0.0.1", 0) as listener:
        server = ShardServer("a:1", [Listener(listener, lambda sock: ShmLink(sock, "peer"))], LIMITS, finish_s=0.0)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(3)]
            await_connections(listener, len(clients))
            free = os.dup(0)
            os.close(free)
            with descriptors_below(free):
                for _ in clients:
                    server.turn(FAILURE_S)
            assert all(b"too many connections" in client.recv(4096) for client in clients)
            assert not server._connections
        server.stop()
        server.serve()


def test_a_shard_without_descriptors_looks_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """Instead of being told again and again that somebody waits."""
    now = 100.0
    with listen_tcp("127.0.0.1", 0) as one, listen_tcp("127.0.0.1", 0) as other:
        listeners = [Listener(each, lambda sock: ShmLink(sock, "peer")) for each in (one, other)]
        server = ShardServer("a:1", listeners, LIMITS, finish_s=0.0, clock=lambda: now)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(each.getsockname())) for each in (one, other)]
            for each in (one, other):
                await_connections(each, 1)
            with descriptors_below(0):
                for _ in range(5):
                    server.turn(0.0)
            assert caplog.text.count("cannot accept a connection: [Errno 24] Too many open files") == 1
            assert server._wait_limit_s(60.0) == PAUSE_S
            server.turn(0.0)
            assert not server._connections
            now += PAUSE_S
            server.turn(0.0)
            server.turn(FAILURE_S)
            assert len(server._connections) == len(clients)
        server.stop()
        server.serve()


def test_ranks_that_compile_take_no_connection_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8, 8))  # three of four are for connections
    with listen_tcp("127.0.0.1", 0) as listener, contextlib.ExitStack() as stack:
        crowd = Crowd(listeners=[Listener(listener, lambda sock: TcpLink(sock, "peer", 10.0))])
        stack.callback(crowd.close)

        def come(hello: Hello) -> socket.socket:
            peer = socket.create_connection(listener.getsockname())
            crowd.peers.append(peer)
            crowd.server.turn(FAILURE_S)
            say(peer, hello)
            crowd.server.turn(FAILURE_S)
            peer.setblocking(False)
            return peer

        compile_them = [come(replace(HELLO, job=f"job{number}", compiling=True)) for number in range(6)]
        assert len(crowd.server._connections) == 6
        ranks = [come(HELLO), come(replace(HELLO, rank=1))]
        assert [[type(each) for each in heard(peer)] for peer in ranks] == [[Pending, Welcome], [Welcome]]
        assert [type(each) for peer in compile_them for each in heard(peer)] == [Pending] * 6
        assert [_is_over(peer) for peer in compile_them] == [True, True, False, False, False, False]


def _is_over(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False


def in_a_job(crowd: Crowd) -> socket.socket:
    """The only rank of a job that has begun."""
    peer = crowd.connect()
    say(peer, replace(HELLO, world_size=1))
    crowd.turn()
    assert [type(each) for each in heard_without_memory(peer)] == [Welcome]
    return peer


def heard_without_memory(peer: socket.socket) -> list[ControlMessage]:
    """As `heard`, of a connection that hands over memory with its messages."""
    data, descriptors, _, _ = socket.recv_fds(peer, 1 << 16, 8)
    for descriptor in descriptors:
        os.close(descriptor)
    return [decode_control(data[FRAME.size :])]


def test_beside_a_busy_job_a_newcomer_that_says_nothing_has_its_time_only(crowd: Crowd) -> None:
    peer, silent = in_a_job(crowd), crowd.connect()
    for seconds in (4.0, 4.0, 4.0, LINGER_S):
        assert len(crowd.server._connections) == 2
        crowd.now += seconds
        peer.send(bytes(1))  # a part of a frame: something comes in each turn
        crowd.turn()
    assert [type(each) for each in heard(silent)] == [Refused]
    assert len(crowd.server._connections) == 1


def test_who_does_not_hang_up_when_his_job_is_over_is_dropped_in_time(crowd: Crowd) -> None:
    peer = in_a_job(crowd)
    crowd.turn()
    peer.sendall(FRAME.pack(CONTROL, 0, 3) + b"???")
    crowd.turn()
    assert [type(each) for each in heard(peer)] == [Aborted]
    assert len(crowd.server._connections) == 1
    crowd.now += LINGER_S
    crowd.turn()
    assert len(crowd.server._connections) == 0
