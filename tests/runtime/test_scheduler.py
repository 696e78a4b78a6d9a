"""Turns of a shard have a budget: who asks for much waits for others, and nobody for long."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest
from local_cluster import WAIT_S, await_connections
from samples import Array
from test_crowds import HELLO, LIMITS, REQUEST, Crowd, heard, say

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.status_messages import Status
from omnireduce.core.wire.blocks import seal
from omnireduce.core.wire.control import Hello, Refused, Welcome, decode_control
from omnireduce.protocol.collective.combining import BLOCK_WORK, HALF_WORK
from omnireduce.protocol.collective.reduction import Budget
from omnireduce.runtime.shard.connections import Connection
from omnireduce.runtime.shard.job import ShardJob
from omnireduce.runtime.shard.listening import BESIDE_JOBS, Listener
from omnireduce.runtime.shard.scheduler import ALONE_S, MIN_WORK, OTHERS_S, OTHERS_WORK, POLL_WORK, RECOVERY, Share
from omnireduce.runtime.shard.server import ShardServer
from omnireduce.runtime.shard.status_requests import MAX_REQUESTS, SHARE
from omnireduce.transport.base import Event
from omnireduce.transport.framing import DATA, FRAME
from omnireduce.transport.shm import ShmLink
from omnireduce.transport.tcp import TcpLink, listen_tcp

BLOCK = 8  # float32 elements
PAGE_S = 2**-5  # that one answer takes
SLOT = 65536
A_TURN = OTHERS_WORK // POLL_WORK  # connections outside jobs that one turn serves


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    result = Crowd(Budget(work=1))
    yield result
    result.close()


class SoleRank:
    """The one rank of a job, by shared memory."""

    def __init__(self, crowd: Crowd, job: str, slot_bytes: int = SLOT) -> None:
        self.sock = crowd.connect()
        say(self.sock, Hello(HELLO.version, job, 0, 1, 0, 1, 2, slot_bytes, "host", 7, 64))
        crowd.turn()
        data, descriptors, _, _ = socket.recv_fds(self.sock, 4096, 2)
        assert isinstance(decode_control(data[FRAME.size :]), Welcome)
        self.up, self.down = (
            np.frombuffer(mmap.mmap(descriptor, 0), np.uint8).reshape(2, -1) for descriptor in descriptors
        )
        for descriptor in descriptors:
            os.close(descriptor)

    def submit(self, values: Array, block: int = BLOCK) -> None:
        """Begin an all-reduce of `values`, which are non-zero, in one message of blocks of so many elements."""
        blocks = values.size // block
        descriptor = Descriptor("allreduce", "", values.dtype.name, (values.size,), block_size=block).encoded
        self.up[0, 64 : 64 + values.nbytes] = values.view(np.uint8)
        nbytes = seal(self.up[0], 0, blocks, np.arange(blocks), block * values.itemsize, descriptor)
        self.sock.sendall(FRAME.pack(DATA, 0, nbytes))

    def frames(self) -> list[int]:
        """The kinds of frames that have come."""
        with contextlib.suppress(BlockingIOError):
            return [FRAME.unpack(each)[0] for each in _eights(self.sock.recv(4096))]
        return []


def _eights(data: bytes) -> list[bytes]:
    return [data[at : at + FRAME.size] for at in range(0, len(data), FRAME.size)]


def test_a_large_collective_is_divided_and_a_small_one_beside_it_does_not_wait(crowd: Crowd) -> None:
    greedy, modest = SoleRank(crowd, "greedy"), SoleRank(crowd, "modest")
    large, small = np.arange(1, 1 + 500 * BLOCK, dtype=np.float32), np.ones(BLOCK, np.float32)
    greedy.submit(large)
    crowd.turn()
    modest.submit(small)
    turns, finished = 0, {}
    while len(finished) < 2:
        crowd.turn()
        turns += 1
        assert turns < 2000
        for rank in (greedy, modest):
            if DATA in rank.frames():
                finished[rank] = turns
        if greedy not in finished:
            assert crowd.server._wait_limit_s(60.0) == 0.0
    assert finished[modest] <= 5
    assert finished[greedy] >= 500  # a block in each
    assert (modest.down[1, 64:].view(np.float32)[:BLOCK] == small).all()
    assert (greedy.down[1, 64:].view(np.float32)[: large.size] == large).all()
    crowd.turn()
    crowd.turn()
    assert crowd.server._wait_limit_s(0.5) > 0.0


def turns_of(crowd: Crowd, ranks: list[SoleRank]) -> dict[SoleRank, int]:
    """Turn by turn until all their results are there: after how many each was."""
    turns, finished = 0, dict[SoleRank, int]()
    while len(finished) < len(ranks):
        crowd.turn()
        turns += 1
        assert turns < 2000
        finished |= {rank: turns for rank in ranks if DATA in rank.frames()}
    return finished


def test_jobs_that_wait_together_share_a_turn() -> None:
    blocks = 20_000
    with closing(Crowd(Budget(work=4 << 20))) as crowd:
        values, memory = np.arange(1, 1 + blocks * BLOCK, dtype=np.float32), 1 << 20
        work = blocks * (BLOCK * 4 + BLOCK_WORK)
        alone = SoleRank(crowd, "alone", memory)
        alone.submit(values)
        assert turns_of(crowd, [alone])[alone] <= work // (4 << 20) + 2
        greedy = [SoleRank(crowd, f"greedy-{number}", memory) for number in range(6)]
        for rank in greedy:
            rank.submit(values)
        finished = turns_of(crowd, greedy)
        assert min(finished.values()) > work // MIN_WORK
        for rank in (alone, *greedy):
            assert (rank.down[1, 64:].view(np.float32)[: values.size] == values).all()


def test_16_bit_floats_count_as_long_as_they_take() -> None:
    block, blocks, memory = 1024, 300, 1 << 20
    with closing(Crowd(Budget(work=MIN_WORK))) as crowd:
        for dtype, minimum in ((np.float32, 1), (np.float16, 300 * 1024 * 2 * HALF_WORK // MIN_WORK)):
            values = np.full(blocks * block * 2 // np.dtype(dtype).itemsize, 3, dtype)
            rank = SoleRank(crowd, np.dtype(dtype).name, memory)
            rank.submit(values, block)
            assert minimum <= turns_of(crowd, [rank])[rank] <= minimum + 2
            assert (rank.down[1, 64:].view(dtype)[: values.size] == values).all()


def test_a_job_whose_work_takes_longer_than_it_counts_has_shorter_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with numbers on which the processor is slow. Afterwards its turns are what they were."""
    block, blocks, took = 1024, 2000, list[float]()
    with closing(Crowd(Budget(work=4 << 20))) as crowd:
        serve, slow = crowd.server._serve_job, [1e-7]

        def serve_slowly(job: ShardJob, ready: dict[Connection, int], share: Share) -> int:
            work = serve(job, ready, share)
            took.append(work * slow[0])
            crowd.processor_s += took[-1]
            return work

        monkeypatch.setattr(crowd.server, "_serve_job", serve_slowly)
        values = np.arange(1, 1 + block * blocks, dtype=np.float32)
        rank = SoleRank(crowd, "slow", 16 << 20)
        rank.submit(values, block)
        turns_of(crowd, [rank])
        assert took[0] > 10 * ALONE_S
        a_block = block * 4 + BLOCK_WORK
        late = took[1:-1]  # the last one seals the result, in one step
        assert len(late) > 10
        assert max(late) <= ALONE_S * RECOVERY + 2 * (a_block + POLL_WORK) * slow[0]
        [job] = crowd.server._jobs.values()
        assert job.work_limit < 1 << 20
        slow[0] = 0.0
        rank = SoleRank(crowd, "other", 16 << 20)
        rank.submit(values, block)
        turns_of(crowd, [rank])
        [_, other] = crowd.server._jobs.values()
        assert other.work_limit == 4 << 20
        for _ in range(30):
            crowd.server._scheduler.queue_job(job)
            crowd.turn()
        assert job.work_limit >= 4 << 20


def test_a_turn_that_did_all_is_followed_by_no_other() -> None:
    with closing(Crowd()) as crowd:
        rank, values = SoleRank(crowd, "small"), np.ones(BLOCK, np.float32)
        crowd.turn()  # a job is due when it begins
        assert crowd.server._wait_limit_s(60.0) > 0.0
        rank.submit(values)
        crowd.turn()
        assert DATA in rank.frames()
        assert crowd.server._wait_limit_s(60.0) > 0.0


def test_a_turn_serves_so_many_newcomers_and_the_rest_in_the_next(crowd: Crowd) -> None:
    peers = [crowd.connect() for _ in range(A_TURN + 10)]
    for number, peer in enumerate(peers):
        say(peer, Hello(HELLO.version, f"job{number % 3}", number, 200, 0, 1, 2, SLOT, "host", 7, 64))
    crowd.turn()
    assert sum(bool(heard(peer)) for peer in peers) == A_TURN
    assert crowd.server._wait_limit_s(60.0) == 0.0
    crowd.turn()
    assert sum(bool(heard(peer)) for peer in peers) >= 10


def test_the_monitor_goes_first(crowd: Crowd) -> None:
    peers = [crowd.connect() for _ in range(3 * A_TURN)]
    ours, monitor = socket.socketpair()
    with monitor:
        crowd.server.adopt(ShmLink(ours, "the monitor"), of_monitor=True)
        monitor.setblocking(False)
        for peer in peers:
            say(peer, REQUEST)
        say(monitor, REQUEST)
        crowd.turn()
        assert [type(each) for each in heard(monitor)] == [Status]


def test_an_answer_that_waited_for_a_processor_stops_no_others(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    page = crowd.server._pages.page

    def very_slow_page(*arguments: object, **named: object) -> Status:
        crowd.now += 5.0
        return page(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(crowd.server._pages, "page", very_slow_page)
    for _ in range(3):
        asker = crowd.connect()
        say(asker, REQUEST)
        crowd.turn()
        assert [type(each) for each in heard(asker)] == [Status]


def test_answers_take_a_tenth_of_the_time(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    page = crowd.server._pages.page

    def slow_page(*arguments: object, **named: object) -> Status:
        crowd.now += PAGE_S
        return page(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(crowd.server._pages, "page", slow_page)
    first, second = crowd.connect(), crowd.connect()
    say(first, REQUEST)
    crowd.turn()
    assert [type(each) for each in heard(first)] == [Status]
    say(second, REQUEST)
    crowd.turn()
    assert heard(second) == []
    assert crowd.server._wait_limit_s(60.0) == PAGE_S * (SHARE - 1)
    crowd.now += PAGE_S * (SHARE - 1)
    crowd.turn()
    assert [type(each) for each in heard(second)] == [Status]


def test_beyond_a_number_of_questions_the_next_is_refused(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnireduce.runtime.shard.status_requests.MAX_REQUESTS", 3)
    peers = [crowd.connect() for _ in range(4)]
    for peer in peers:
        say(peer, REQUEST)
    crowd.turn()
    answers = [type(each) for peer in peers for each in heard(peer)]
    assert sorted(answer.__name__ for answer in answers) == ["Refused", "Status", "Status", "Status"]
    assert MAX_REQUESTS > 3
    assert Refused in answers


@pytest.mark.slow
def test_a_turn_accepts_all_who_wait() -> None:
    with listen_tcp("127.0.0.1", 0) as listener, contextlib.ExitStack() as stack:
        server = ShardServer("a:1", [Listener(listener, lambda sock: ShmLink(sock, "peer"))], LIMITS, finish_s=0.0)
        for _ in range(20):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        await_connections(listener, 20)
        server.turn(5.0)
        assert len(server._connections) == 20
        server.stop()
        server.serve()


def test_beside_a_job_a_turn_accepts_few() -> None:
    with listen_tcp("127.0.0.1", 0) as listener:
        listeners = [Listener(listener, lambda sock: ShmLink(sock, "peer"))]
        with closing(Crowd(listeners=listeners)) as crowd:
            SoleRank(crowd, "job")
            for _ in range(3 * BESIDE_JOBS):
                crowd.peers.append(socket.create_connection(listener.getsockname()))
            await_connections(listener, 3 * BESIDE_JOBS)
            for turns in range(1, 4):
                crowd.server.turn(5.0)
                assert len(crowd.server._connections) == 1 + turns * BESIDE_JOBS


def test_newcomers_who_take_long_keep_no_job_waiting(crowd: Crowd) -> None:
    class SlowLink(ShmLink):
        """Its looks take as long as a TLS handshake with a large key."""

        looks = 0

        def poll(self) -> Sequence[Event]:
            crowd.now += 2 * OTHERS_S
            SlowLink.looks += 1
            return super().poll()

    rank = SoleRank(crowd, "job")
    for number in range(20):
        ours, peer = socket.socketpair()
        crowd.peers.append(peer)
        crowd.server.adopt(SlowLink(ours, f"slow {number}"))
        say(peer, REQUEST)
    rank.submit(np.ones(BLOCK, np.float32))
    finished = 0
    for turns in range(1, 21):
        assert crowd.server._wait_limit_s(60.0) == 0.0 or turns == 1
        crowd.turn()
        assert SlowLink.looks == turns
        finished = finished or turns * (DATA in rank.frames())
    assert 1 <= finished <= 3


def test_who_came_first_goes_first(crowd: Crowd) -> None:
    """However many others have something to say before he has more."""
    first = crowd.connect()
    crowd.turn()
    others = [crowd.connect() for _ in range(3 * A_TURN)]
    crowd.turn()
    for peer in (*others, first):
        say(peer, REQUEST)
    crowd.turn()
    assert [type(each) for each in heard(first)] == [Status]


def full_peer(crowd: Crowd) -> tuple[socket.socket, TcpLink]:
    """Rank 0 of a job of three that reads nothing, after so many words about who is missing that its socket is full."""
    with listen_tcp("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        peer.connect(listener.getsockname())
        ours = listener.accept()[0]
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    link = TcpLink(ours, "the slow one", 4.0)
    crowd.peers.append(peer)
    crowd.server.adopt(link)
    say(peer, rank_of_three(0))
    crowd.turn()
    for _ in range(3000):
        if link.wants_write:
            break
        other = crowd.connect()
        say(other, rank_of_three(1))
        crowd.turn()
        crowd.now += 1.0
        crowd.turn()
        other.close()
        crowd.turn()
    assert link.wants_write
    peer.setblocking(False)
    return peer, link


def rank_of_three(rank: int) -> Hello:
    return Hello(HELLO.version, "slow", rank, 3, 0, 1, 2, SLOT, "host", 7, 64)


def words(crowd: Crowd, peer: socket.socket, last: type) -> list[str]:
    """Types of the messages to a peer up to one of type `last`. No other event wakes the server."""
    data, results = b"", list[str]()
    while True:
        with contextlib.suppress(BlockingIOError):
            data += peer.recv(1 << 16)
        while len(data) >= FRAME.size and len(data) >= FRAME.size + FRAME.unpack_from(data)[2]:
            length = FRAME.unpack_from(data)[2]
            results.append(type(decode_control(data[FRAME.size : FRAME.size + length])).__name__)
            data = data[FRAME.size + length :]
        if last.__name__ in results:
            return results
        assert crowd.server._selector.select(WAIT_S), "the server waits for nothing"
        crowd.turn()


def test_a_welcome_that_meets_a_full_socket_leaves_when_there_is_room(crowd: Crowd) -> None:
    peer, link = full_peer(crowd)
    others = [crowd.connect() for _ in range(2)]
    for rank, other in enumerate(others, 1):
        say(other, rank_of_three(rank))
    crowd.turn()
    crowd.turn()
    assert len(crowd.server._jobs) == 1
    assert set(words(crowd, peer, Welcome)) == {"Pending", "Welcome"}
    assert not link.wants_write


def test_news_for_who_waits_that_meet_a_full_socket_leave_when_there_is_room(crowd: Crowd) -> None:
    peer, link = full_peer(crowd)
    with contextlib.suppress(BlockingIOError):
        while peer.recv(1 << 16):
            pass
    assert any(key.fileobj is link for key, _ in crowd.server._selector.select(WAIT_S))
    crowd.turn()
    assert not link.wants_write
