"""Verbs links alone: they keep the order of two connections, even if one of them loses something."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from omnireduce.errors import TransportError
from omnireduce.transport.base import Control, Lost, Received
from omnireduce.transport.verbs.link import MAX_HELD_CONTROLS, Failure

from .pairs import VerbsPair, Wire


@pytest.fixture
def pair() -> Iterator[VerbsPair]:
    result = VerbsPair()
    yield result
    result.close()


def wire(pair: VerbsPair) -> Wire:
    """The left end's queue."""
    queue = pair.queues[0]
    assert isinstance(queue, Wire)
    return queue


def test_a_control_message_waits_for_the_write_that_was_sent_before(pair: VerbsPair) -> None:
    left = wire(pair)
    pair.right.send(0, 8)
    (held,), left.news = left.news, []
    pair.right.send_control(b"after it")
    pair.wait([pair.left], 10)
    assert pair.left.poll() == []
    left.arrive(held)
    assert pair.left.poll() == [Received(0, 8), Control(b"after it")]


def test_a_write_waits_for_the_control_message_that_was_sent_before(pair: VerbsPair) -> None:
    body = b"z" * 60_000
    for _ in range(200):  # more than the connection takes at once
        pair.right.send_control(body)
    pair.right.send(0, 8)
    assert pair.left.poll()[-1] == Control(body)
    rest = pair.collect(pair.left, 1)
    while rest[-1] != Received(0, 8):
        rest += pair.collect(pair.left, 1)
    assert set(rest[:-1]) == {Control(body)}


def test_a_lost_write_does_not_hide_the_end(pair: VerbsPair) -> None:
    """The peer wrote, said why it goes and died; its write never came."""
    left = wire(pair)
    pair.right.send(0, 8)
    left.news.clear()
    pair.right.send_control(b"because")
    pair.right.close()
    messages, lost = pair.collect(pair.left, 2)
    assert messages == Control(b"because")
    assert isinstance(lost, Lost)
    assert pair.left.over


def test_who_releases_rdma_may_still_say_why(pair: VerbsPair) -> None:
    """As an aggregator does that has no descriptors for the other ranks: its job does not begin."""
    descriptor, control = pair.left.fileno(), pair.left._control
    pair.left.release()
    pair.left.release()
    assert pair.left.over
    assert not wire(pair).open
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    control.send_control(b"the reason")
    control.flush()
    assert pair.collect(pair.right, 1) == [Control(b"the reason")]
    control.close()


def test_control_messages_that_wait_are_few(pair: VerbsPair) -> None:
    """A peer that announces a write and never makes it can neither fill the memory nor hide its own end."""
    left = wire(pair)
    pair.right.send(0, 8)
    left.news.clear()
    for _ in range(3 * MAX_HELD_CONTROLS):
        pair.right.send_control(b"x")
    pair.wait([pair.left], 10)
    for _ in range(10):
        assert pair.left.poll() == []
    assert len(pair.left._held_controls) <= 4 * MAX_HELD_CONTROLS
    pair.right.close()
    pair.left.send_control(b"to nobody")  # the answer is a reset
    pair.repeat(lambda: bool(pair.left.poll()) or pair.left.over, pair.left)
    assert pair.left.over


def test_more_writes_than_credits_are_a_violation(pair: VerbsPair) -> None:
    left = wire(pair)
    for _ in range(100):
        left.peer.announce(5)  # says that it comes after control messages that never come
    (lost,) = pair.collect(pair.left, 1)
    assert isinstance(lost, Lost)
    assert lost.violation


def test_a_failed_queue_ends_the_link_after_what_had_arrived(pair: VerbsPair) -> None:
    pair.right.send(1, 8)
    wire(pair).arrive(Failure("RDMA failed: Transport retry counter exceeded"))
    received, lost = pair.collect(pair.left, 2)
    assert received == Received(1, 8)
    assert lost == Lost("RDMA failed: Transport retry counter exceeded")
    pair.left.send(0, 8)
    pair.left.send_control(b"nobody")
    assert pair.left.poll() == []


@pytest.mark.parametrize("what", ["send", "return_credit"])
def test_a_device_that_takes_no_write_ends_the_link(
    pair: VerbsPair, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor tells of it, although nothing arrives."""
    pair.right.send(2, 8)
    assert pair.collect(pair.left, 1) == [Received(2, 8)]

    def refuse(*_: object) -> None:
        raise TransportError("RDMA failed: the device takes no write: ENOMEM")

    monkeypatch.setattr(wire(pair), "write", refuse)
    monkeypatch.setattr(wire(pair), "announce", refuse)
    if what == "send":
        pair.left.send(0, 8)
    else:
        pair.left.return_credit(2)
    pair.wait([pair.left], 10)
    assert pair.left.poll() == [Lost("RDMA failed: the device takes no write: ENOMEM")]
    assert pair.left.over


IMPORTS = """
import sys, threading
sys.modules["pyverbs"] = None  # as if it were not installed
from omnireduce.errors import TransportError
from omnireduce.transport.verbs import import_rdma
wrong = []

def run(start):
    start.wait()
    try:
        import_rdma()
        wrong.append("imported")
    except TransportError:
        pass
    except BaseException as error:
        wrong.append(error)

for _ in range(50):
    start = threading.Barrier(3)
    threads = [threading.Thread(target=run, args=(start,)) for _ in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
sys.exit(str(wrong) if wrong else 0)
"""


def test_threads_that_miss_pyverbs_at_the_same_time_all_say_so() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
