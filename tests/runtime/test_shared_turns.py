"""Beside other jobs a job does less in one turn, and less of its output leaves."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from contextlib import closing

import numpy as np
import pytest
from local_cluster import WAIT_S
from samples import Array
from test_crowds import HELLO, Crowd, say
from test_scheduler import BLOCK, SoleRank

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.wire.blocks import read_header, seal
from omnireduce.core.wire.control import Hello, Welcome, decode_control
from omnireduce.protocol.collective.reduction import Budget
from omnireduce.runtime.shard.scheduler import LATELY_S, Share, share
from omnireduce.transport.base import EVERYTHING
from omnireduce.transport.framing import CREDIT, DATA, FRAME
from omnireduce.transport.tcp import TcpLink, listen_tcp


class TcpRank:
    """The one rank of a job, by TCP. It gives each result slot back. `link` is the shard's end of its connection."""

    def __init__(self, crowd: Crowd, job: str, slot_bytes: int) -> None:
        with listen_tcp("127.0.0.1", 0) as listener:
            listener.setblocking(True)
            self.sock = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
        crowd.peers.append(self.sock)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.link = TcpLink(accepted, job, 10.0)
        crowd.server.adopt(self.link)
        say(
            self.sock, Hello(HELLO.version, job, 0, 1, 0, 1, 2, slot_bytes, "host", 7, 64, tcp_message_bytes=slot_bytes)
        )
        self.slot_bytes, self.deadline = slot_bytes, time.monotonic() + WAIT_S
        self.sock.setblocking(False)
        while not select.select([self.sock], [], [], 0.0)[0]:
            crowd.turn()
            assert time.monotonic() < self.deadline
        assert isinstance(decode_control(self.sock.recv(4096)[FRAME.size :]), Welcome)
        self._data, self._unsent, self._parsed = b"", b"", 0
        self._results: list[Array] = []

    def submit(self, values: Array) -> None:
        descriptor = Descriptor("allreduce", "", values.dtype.name, (values.size,), op="max", block_size=BLOCK)
        memory, blocks = np.zeros(self.slot_bytes, np.uint8), values.size // BLOCK
        memory[64 : 64 + values.nbytes] = values.view(np.uint8)
        nbytes = seal(memory, 0, blocks, np.arange(blocks), BLOCK * values.itemsize, descriptor.encoded)
        self._unsent = FRAME.pack(DATA, 0, nbytes) + memory[:nbytes].tobytes()

    def go_on(self) -> None:
        """Send what can be sent, and read all that has come."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        with contextlib.suppress(BlockingIOError):
            while more := self.sock.recv(1 << 20):
                self._data += more
        read = len(self._data)
        while read >= self._parsed + FRAME.size:
            kind, slot, length = FRAME.unpack_from(self._data, self._parsed)
            at = self._parsed + FRAME.size
            if read < at + length and kind != CREDIT:
                break
            self._parsed = at if kind == CREDIT else at + length
            if kind == DATA:
                self._take(np.frombuffer(self._data, np.uint8, length, at), slot)

    @property
    def sent(self) -> int:
        """Bytes that the shard has sent to this rank."""
        return self.link._taken_bytes[0]

    def _take(self, message: Array, slot: int) -> None:
        memory = np.zeros(self.slot_bytes, np.uint8)
        memory[: message.size] = message
        header = read_header(memory, message.size)
        self._results.append(memory[64 : 64 + header.block_count * header.block_bytes].view(np.float32))
        self._unsent += FRAME.pack(CREDIT, slot, 0)

    def result(self, elements: int) -> Array | None:
        """The blocks of the result, which is several messages, when all of it has come."""
        result = np.concatenate([np.empty(0, np.float32), *self._results])
        return result[:elements] if result.size >= elements else None


@pytest.mark.parametrize(
    ("ranks", "busy", "shared", "work", "output"),
    [
        (2, 1, False, 16 << 20, EVERYTHING),
        (2, 1, True, 2 << 20, 1 << 19),
        (2, 2, True, 1 << 20, 1 << 18),
        (2, 4, True, 1 << 20, 1 << 17),
        (2, 64, True, 1 << 20, 1 << 16),  # the least
        (1000, 1, True, 2 << 20, 1 << 16),
    ],
)
def test_what_one_job_may_do_in_a_turn(ranks: int, busy: int, shared: bool, work: int, output: int) -> None:
    budget = Budget()
    assert share(budget, ranks, busy, shared=shared) == Share(work, output)
    small = share(Budget(work=100, output=50), ranks, busy, shared=shared)
    assert small.work <= 100
    assert not shared or 1 <= small.output <= 50


def test_beside_another_busy_job_a_result_leaves_in_parts() -> None:
    """By TCP; and all of it leaves, also when the other job is busy no more."""
    output, values = 1 << 16, np.arange(1, 200_001, dtype=np.float32)
    with closing(Crowd(Budget(output=output))) as crowd:
        other, rank = SoleRank(crowd, "other"), TcpRank(crowd, "large", 1 << 20)
        other.submit(np.ones(BLOCK, np.float32))
        crowd.turn()
        rank.submit(values)
        while rank.sent < values.nbytes // 2:
            assert sent_in_a_turn(crowd, rank) <= 2 * output + 4096
        crowd.now += LATELY_S
        while (result := rank.result(values.size)) is None:
            sent_in_a_turn(crowd, rank)
        assert (result == values).all()


def test_alone_or_beside_idle_jobs_a_result_leaves_at_once() -> None:
    values = np.arange(1, 200_001, dtype=np.float32)
    with closing(Crowd(Budget(output=1 << 16))) as crowd:
        SoleRank(crowd, "idle")
        crowd.turn()
        crowd.now += LATELY_S
        rank = TcpRank(crowd, "large", 1 << 20)
        rank.submit(values)
        welcomed = rank.sent
        while rank.sent == welcomed:
            largest = sent_in_a_turn(crowd, rank)
        assert largest > 4 << 16


def sent_in_a_turn(crowd: Crowd, rank: TcpRank) -> int:
    """Bytes that the shard has sent to the rank in one turn. When they come, the system decides."""
    before = rank.sent
    crowd.turn()
    rank.go_on()
    assert time.monotonic() < rank.deadline
    return rank.sent - before
