"""A job that cannot be started when all its ranks are there: each learns it, and nothing is left of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnireduce.core.wire.control import (
    PROTOCOL_VERSION,
    ControlMessage,
    Hello,
    Pending,
    Refused,
    Welcome,
    decode_control,
)
from omnireduce.core.wire.control import encode_control as encoded
from omnireduce.protocol.joining.limits import Limits
from omnireduce.runtime.shard import job as runtime_job
from omnireduce.runtime.shard.server import ShardServer
from omnireduce.runtime.shard.traced import ShardTraces
from omnireduce.support.config import Trace
from omnireduce.transport.framing import CONTROL, FRAME
from omnireduce.transport.shm import ShmLink

LIMITS = Limits(
    max_jobs=1, max_world_size=2, max_job_bytes=1 << 20, join_timeout_s=60.0, max_ranks=2, max_bytes=1 << 20
)


def joining(server: ShardServer) -> list[ControlMessage]:
    """Both ranks of a job connect and say hello; the last word to each, before they go."""
    peers = []
    for rank in range(2):
        ours, peer = socket.socketpair()
        server.adopt(ShmLink(ours, f"rank {rank}"))
        body = encoded(Hello(PROTOCOL_VERSION, "job", rank, 2, 0, 1, 2, 65536, "host", 7, 64))
        peer.sendall(FRAME.pack(CONTROL, 0, len(body)) + body)
        server.turn(0.0)
        peers.append(peer)
    results = [last_word(peer) for peer in peers]
    for peer in peers:
        peer.close()
    while server._connections:
        server.turn(60.0)
    return results


def last_word(peer: socket.socket) -> ControlMessage:
    data, last = peer.recv(65536), None
    while data:
        length = FRAME.unpack_from(data)[2]
        last = decode_control(data[FRAME.size : FRAME.size + length])
        data = data[FRAME.size + length :]
    assert last is not None
    return last


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(12, "Cannot allocate memory"), "no memory for this job: [Errno 12] Cannot allocate memory"),
        (MemoryError("Unable to allocate 1 PiB"), "no memory for this job: Unable to allocate 1 PiB"),
        (ValueError("a bug"), "internal error; the log of the aggregator has the details"),
    ],
)
def test_all_ranks_are_refused_and_may_come_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str
) -> None:
    """With the strictest limits: what was left behind would keep the next one out."""
    server = ShardServer("a:1", [], LIMITS, finish_s=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(server, "_make_job", failing(error))
        for answer in joining(server):
            assert isinstance(answer, Refused)
            assert expected in answer.reason
    assert [type(each) for each in joining(server)] == [Welcome, Welcome]
    assert Pending not in [type(each) for each in joining(server)]
    server.stop()
    server.serve()


def test_a_job_that_fails_late_gives_back_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory, and its trace. No rank was told before that it may begin."""
    server = ShardServer("a:1", [], LIMITS, finish_s=0.0)
    before = descriptors()

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no work space")

    with monkeypatch.context() as patch:
        patch.setattr(runtime_job, "ShardMachine", fail)
        for _ in range(3):
            for answer in joining(server):
                assert isinstance(answer, Refused)
                assert "no memory for this job: no work space" in answer.reason
    assert descriptors() == before
    assert [type(each) for each in joining(server)] == [Welcome, Welcome]
    server.stop()
    server.serve()


def test_a_trace_for_which_there_is_no_room(tmp_path: Path) -> None:
    traces = ShardTraces(Trace(folder=str(tmp_path), events=2**50))
    server = ShardServer("a:1", [], LIMITS, finish_s=0.0, traces=traces)
    before = descriptors()
    for answer in joining(server):
        assert isinstance(answer, Refused)
        assert "no memory for this job: Unable to allocate" in answer.reason
    assert descriptors() == before
    assert not traces.selector.recorders
    server.stop()
    server.serve()
