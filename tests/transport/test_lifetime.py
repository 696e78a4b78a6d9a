"""Processes that die, and what links leave behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omnireduce.transport.base import Control, Lost

from .pairs import SHM_PORT, SLOT_BYTES, SLOTS, Pair, ShmPair, StreamPair, TcpPair

SHARED_FOLDERS = ("/dev/shm", "/run/shm", "/tmp")


@contextmanager
def child(pair: StreamPair) -> Iterator[int]:
    """A process that holds the right end of `pair` and does nothing; its end is closed here. Yields its pid."""
    pid = os.fork()
    if pid == 0:
        pair.left._sock.close()
        while True:
            signal.pause()
    try:
        pair.right.close()
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_process_that_is_killed_is_lost(streams: StreamPair) -> None:
    with child(streams) as pid:
        streams.left.send(0, SLOT_BYTES)
        streams.left.flush()
        assert streams.left.poll() == []
        os.kill(pid, signal.SIGKILL)
        (event,) = streams.collect(streams.left, 1)
    assert isinstance(event, Lost)
    assert not event.violation


def test_the_last_words_of_a_killed_process_are_heard(streams: StreamPair) -> None:
    streams.right.send_control(b"last words")
    with child(streams) as pid:
        os.kill(pid, signal.SIGKILL)
        control, lost = streams.collect(streams.left, 2)
    assert control == Control(b"last words")
    assert isinstance(lost, Lost)


def test_a_process_that_is_killed_while_it_clogs_is_lost(streams: StreamPair) -> None:
    with child(streams) as pid:
        while not streams.left.wants_write:
            streams.left.send_control(b"x" * 60000)
        os.kill(pid, signal.SIGKILL)
        (event,) = streams.collect(streams.left, 1)
        assert isinstance(event, Lost)
        streams.left.flush()
        assert not streams.left.wants_write


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def regions() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:omnireduce")


def use(kind: type[Pair]) -> None:
    pair = kind()
    for slot in range(SLOTS):
        pair.left.send(slot, 100)
    pair.collect(pair.right, SLOTS)
    pair.close()
    pair.close()


@pytest.mark.parametrize("kind", [ShmPair, TcpPair], ids=lambda kind: kind.name)
def test_a_closed_link_leaves_no_descriptor_and_no_memory(kind: type[Pair]) -> None:
    gc.collect()
    before = descriptors(), regions()
    for _ in range(5):
        use(kind)
    assert (descriptors(), regions()) == before


@pytest.mark.parametrize("kind", [ShmPair, TcpPair], ids=lambda kind: kind.name)
def test_links_leave_nothing_in_the_file_system(kind: type[Pair]) -> None:
    def files() -> set[str]:
        return {
            f"{folder}/{name}"
            for folder in SHARED_FOLDERS
            if os.path.isdir(folder)
            for name in os.listdir(folder)
            if "omnireduce" in name
        }

    before = files()
    pair = kind()
    assert files() == before
    pair.close()
    assert f"omnireduce/127.0.0.1:{SHM_PORT}" not in Path("/proc/net/unix").read_text()
