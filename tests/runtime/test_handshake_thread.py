"""Slow handshakes run in a second thread: meanwhile the shard goes on, and nobody looks at that connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from local_cluster import WAIT_S
from test_crowds import REQUEST, Crowd, heard, say
from test_scheduler import BLOCK, SoleRank

from omnireduce.core.status_messages import Status
from omnireduce.core.wire.control import Refused
from omnireduce.transport.base import Event
from omnireduce.transport.framing import DATA
from omnireduce.transport.shm import ShmLink


class SlowLink(ShmLink):
    """Its first message is read when a task is done, which waits until it may go on."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        super().__init__(sock, peer)
        self.may_go_on, self.done = threading.Event(), False
        self.begun = False

    @property
    def task(self) -> Callable[[], None] | None:
        return self._wait if self.begun and not self.done else None

    def _wait(self) -> None:
        assert self.may_go_on.wait(WAIT_S)
        self.done = True

    def poll(self) -> Sequence[Event]:
        self.begun = True
        return super().poll() if self.done else ()


class Slow:
    """A newcomer with such a link, who has asked something."""

    def __init__(self, crowd: Crowd) -> None:
        ours, self.peer = socket.socketpair()
        self.peer.setblocking(False)
        crowd.peers.append(self.peer)
        self.link = SlowLink(ours, "slow")
        crowd.server.adopt(self.link)
        say(self.peer, REQUEST)
        crowd.turn()
        assert self.link.begun


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    result = Crowd()
    yield result
    result.close()


def test_a_long_task_of_one_stops_no_other(crowd: Crowd) -> None:
    slow, rank = Slow(crowd), SoleRank(crowd, "job")
    rank.submit(np.ones(BLOCK, np.float32))
    crowd.turn()
    crowd.turn()
    assert DATA in rank.frames()
    assert crowd.server._selector.select(0.0) == []  # its input ends no wait
    assert crowd.server._wait_limit_s(60.0) > 0.0
    slow.link.may_go_on.set()
    crowd.server.turn(WAIT_S)  # the end of the task ends the wait
    crowd.turn()
    assert [type(each) for each in heard(slow.peer)] == [Status]


def test_tasks_are_done_one_after_another(crowd: Crowd) -> None:
    first, second = Slow(crowd), Slow(crowd)
    second.link.may_go_on.set()
    assert not second.link.done
    first.link.may_go_on.set()
    messages: list[object] = []
    while len(messages) < 2:
        crowd.server.turn(WAIT_S)
        messages += [type(each) for slow in (first, second) for each in heard(slow.peer)]
    assert messages == [Status, Status]


def test_who_is_dropped_meanwhile_is_forgotten(crowd: Crowd) -> None:
    slow = Slow(crowd)
    crowd.now += 100.0  # more than there is to say hello, and to leave
    crowd.turn()
    assert [type(each) for each in heard(slow.peer)] == [Refused]
    crowd.now += 100.0
    crowd.turn()
    assert len(crowd.server._connections) == 0
    slow.link.may_go_on.set()
    crowd.server.turn(WAIT_S)
    assert len(crowd.server._connections) == 0


def test_who_leaves_has_no_task_done_any_more(crowd: Crowd) -> None:
    """Input of a leaving connection would end each wait at once, and the shard would spin."""
    ours, peer = socket.socketpair()
    crowd.peers.append(peer)
    link = SlowLink(ours, "slow")
    crowd.server.adopt(link)
    crowd.now += 100.0  # more than there is to say hello
    crowd.turn()
    say(peer, REQUEST)
    crowd.turn()
    assert link.begun
    ready, kept = crowd.server._selector.select(0.0), len(crowd.server._connections)
    crowd.now += 100.0
    crowd.turn()
    assert (ready, kept) == ([], 0)
    assert crowd.server._handshake_thread._executor is None


@pytest.mark.slow
def test_a_shard_that_stops_waits_for_one_task_only(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, waiting, close = Slow(crowd), Slow(crowd), crowd.server._handshake_thread.close

    def release_and_close() -> None:
        under_way.link.may_go_on.set()
        close()

    monkeypatch.setattr(crowd.server._handshake_thread, "close", release_and_close)
    crowd.server.stop()
    crowd.server.serve()
    assert under_way.link.done
    assert not waiting.link.done
