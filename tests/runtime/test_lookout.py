"""What a waiting rank hears of: only the shards that have something to say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from local_cluster import WAIT_S

from omnireduce.runtime.member.lookout import Lookout
from omnireduce.transport.base import Control
from omnireduce.transport.shm import ShmLink

SHARDS = 3


@pytest.fixture
def ends() -> Iterator[tuple[list[ShmLink], list[ShmLink]]]:
    """Those of a rank, and those of its shards."""
    pairs = [socket.socketpair() for _ in range(SHARDS)]
    found = tuple([ShmLink(pair[side], f"end {number}") for number, pair in enumerate(pairs)] for side in (0, 1))
    yield found
    for link in (*found[0], *found[1]):
        link.close()


@pytest.fixture
def lookout(ends: tuple[list[ShmLink], list[ShmLink]]) -> Iterator[Lookout]:
    found = Lookout(ends[0], None, [])
    found.watch_all()
    yield found
    found.close()


def look_out(lookout: Lookout) -> list[int]:
    lookout.look_out(0.0, WAIT_S * 1000, threading.RLock())
    return lookout.news()


def test_those_who_said_something_are_named(lookout: Lookout, ends: tuple[list[ShmLink], list[ShmLink]]) -> None:
    ours, theirs = ends
    theirs[1].send_control(b"news")
    assert look_out(lookout) == [1]
    theirs[2].send_control(b"more")
    assert look_out(lookout) == [1, 2]  # the first one was not read
    assert [ours[shard].poll() for shard in (1, 2)] == [[Control(b"news")], [Control(b"more")]]
    lookout.glance()
    assert lookout.news() == []


def test_one_that_is_gone_has_news(lookout: Lookout, ends: tuple[list[ShmLink], list[ShmLink]]) -> None:
    ends[1][0].close()
    assert look_out(lookout) == [0]


def test_who_is_woken_has_heard_of_nobody(lookout: Lookout) -> None:
    lookout.wake()
    assert look_out(lookout) == []
