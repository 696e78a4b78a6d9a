"""A waiting rank wakes only for the shards that have something to say."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import cast

import pytest
from local_cluster import WAIT_S

from omnireduce.protocol.host.exchange import HostExchange
from omnireduce.runtime.rank.poller import Poller
from omnireduce.transport.base import Control
from omnireduce.transport.shm import ShmLink

SHARDS = 3


@pytest.fixture
def ends() -> Iterator[tuple[list[ShmLink], list[ShmLink]]]:
    """Links of a rank, and the other ends at its shards."""
    pairs = [socket.socketpair() for _ in range(SHARDS)]
    results = tuple([ShmLink(pair[side], f"end {number}") for number, pair in enumerate(pairs)] for side in (0, 1))
    yield results
    for link in (*results[0], *results[1]):
        link.close()


@pytest.fixture
def poller(ends: tuple[list[ShmLink], list[ShmLink]]) -> Iterator[Poller]:
    result = Poller(ends[0], None, [])
    result.watch_all()
    yield result
    result.close()


def wait(poller: Poller) -> list[int]:
    poller.wait(0.0, WAIT_S * 1000, threading.RLock())
    return poller.news()


def test_those_who_said_something_are_named(poller: Poller, ends: tuple[list[ShmLink], list[ShmLink]]) -> None:
    ours, theirs = ends
    theirs[1].send_control(b"news")
    assert wait(poller) == [1]
    theirs[2].send_control(b"more")
    assert wait(poller) == [1, 2]  # the first one was not read
    assert [ours[shard].poll() for shard in (1, 2)] == [[Control(b"news")], [Control(b"more")]]
    poller.check()
    assert poller.news() == []


class Host:
    """The exchange inside a host as a poller sees it; its steps can always go on."""

    me, can_go_on = 0, True

    def await_step(self) -> bool:
        return True

    def fall_asleep(self) -> bool:
        return False


@pytest.mark.parametrize("spin_s", [0.0, WAIT_S])
def test_progress_inside_the_host_does_not_hide_a_shard(
    ends: tuple[list[ShmLink], list[ShmLink]], spin_s: float
) -> None:
    busy = Poller(ends[0], cast(HostExchange, Host()), [os.eventfd(0, os.EFD_NONBLOCK)])
    busy.watch_all()
    ends[1][2].send_control(b"news")
    busy.wait(time.monotonic() + spin_s, WAIT_S * 1000, threading.RLock())
    assert busy.news() == [2]
    busy.close()


def test_one_that_is_gone_has_news(poller: Poller, ends: tuple[list[ShmLink], list[ShmLink]]) -> None:
    ends[1][0].close()
    assert wait(poller) == [0]


def test_who_is_woken_has_heard_of_nobody(poller: Poller) -> None:
    poller.wake()
    assert wait(poller) == []
