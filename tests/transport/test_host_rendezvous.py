"""Ranks of one host meet, and get each other's memory: to read, all but their own."""

from __future__ import annotations

import errno
import faulthandler
import multiprocessing
import os
import secrets
import select
import signal
import socket
from multiprocessing.connection import Connection

import pytest

from omnireduce.errors import TransportError
from omnireduce.support.os_error_origin import raised_by_signal_handler
from omnireduce.transport import host_rendezvous
from omnireduce.transport.host_rendezvous import RETRY_S, HostGroup, HostRendezvous
from omnireduce.transport.slot_memory import Regions

BYTES, WAIT_S = 8192, 20.0
FORK = multiprocessing.get_context("fork")


def meet(token: bytes, ranks: int, me: int) -> HostGroup:
    meeting = HostRendezvous(token, ranks, me, BYTES)
    for _ in range(int(WAIT_S / RETRY_S)):
        if meeting.turn():
            assert meeting.group is not None
            return meeting.group
        select.select([meeting.fileno()], [], [], RETRY_S if meeting.must_retry_soon else WAIT_S)
    raise AssertionError("the others did not come")


def run_rank(token: bytes, ranks: int, me: int, parent: Connection) -> None:
    group = meet(token, ranks, me)
    group.regions[me, 0] = me + 1
    parent.send(group.pids)
    parent.recv()  # until all have written
    os.eventfd_write(group.eventfds[0], 1)
    parent.send(group.regions[:, 0].tolist())
    parent.recv()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_reads_the_memory_of_all(ranks: int) -> None:
    token, pipes, children = secrets.token_bytes(16), [], []
    for me in reversed(range(1, ranks)):  # the first one comes last
        ours, theirs = FORK.Pipe()
        children.append(FORK.Process(target=run_rank, args=(token, ranks, me, theirs)))
        children[-1].start()
        pipes.append(ours)
    group = meet(token, ranks, 0)
    group.regions[0, 0] = 1
    for pipe in pipes:
        assert pipe.poll(WAIT_S)
        assert pipe.recv() == group.pids
    for pipe in pipes:
        pipe.send("go")
    for pipe in pipes:
        assert pipe.poll(WAIT_S)
        assert pipe.recv() == [rank + 1 for rank in range(ranks)]
        pipe.send("end")
    assert group.regions[:, 0].tolist() == [rank + 1 for rank in range(ranks)]
    assert ranks == 1 or os.eventfd_read(group.eventfds[0]) == ranks - 1
    assert group.pids == [os.getpid(), *(child.pid for child in reversed(children))]
    for child in children:
        child.join(WAIT_S)
        assert child.exitcode == 0
    group.close()


def test_a_rank_cannot_write_the_memory_of_another() -> None:
    mine, theirs = Regions(2, 0, BYTES), Regions(2, 1, BYTES)
    mine.add([mine.fd, theirs.fd])

    def write() -> None:
        faulthandler.disable()  # it would report an expected fault
        mine.array[1, 0] = 1

    child = FORK.Process(target=write)
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == -signal.SIGSEGV
    with pytest.raises(OSError, match="Operation not permitted"):
        os.write(theirs.fd, b"1")
    pipe = os.pipe()
    with pytest.raises(TransportError, match="cannot map"):
        mine.add([mine.fd, pipe[0]])
    for fd in pipe:
        os.close(fd)
    mine.close()
    theirs.close()


def test_memory_that_could_shrink_is_refused() -> None:
    mine, fd = Regions(2, 0, BYTES), os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, BYTES)
    with pytest.raises(TransportError, match="something else than sealed memory of 8192 bytes"):
        mine.add([mine.fd, fd])
    os.close(fd)
    mine.close()


def test_who_sends_nonsense_is_left_out() -> None:
    token = secrets.token_bytes(16)
    first = HostRendezvous(token, 2, 0, BYTES)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(f"\0omnireduce-host/{token.hex()}")
    first.turn()
    stranger.send(b"nonsense")
    first.turn()
    second = HostRendezvous(token, 2, 1, BYTES)
    for _ in range(4):
        second.turn()
        first.turn()
    assert first.group is not None
    assert second.group is not None
    stranger.close()
    first.group.close()
    second.group.close()


@pytest.mark.parametrize("what", ["a pipe", "an eventfd that blocks"])
def test_a_bell_that_could_keep_others_waiting_is_refused(what: str) -> None:
    token = secrets.token_bytes(16)
    first, second = HostRendezvous(token, 2, 0, BYTES), HostRendezvous(token, 2, 1, BYTES)
    os.close(second._eventfds[1])
    second._eventfds[1] = os.eventfd(0) if what == "an eventfd that blocks" else os.pipe2(os.O_NONBLOCK)[1]

    def go_on() -> None:
        for _ in range(8):
            second.turn()
            first.turn()

    with pytest.raises(TransportError, match="local rank 1 sent no eventfd"):
        go_on()
    first.close()
    second.close()


def test_what_cannot_be_made_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(host_rendezvous.selectors, "EpollSelector", no_more)
    with pytest.raises(OSError, match="Too many open files"):
        HostRendezvous(secrets.token_bytes(16), 2, 0, BYTES)
    assert os.listdir("/proc/self/fd") == before


def test_what_the_system_refuses_is_no_error_of_a_signal_handler() -> None:
    with pytest.raises(OSError, match="Invalid argument") as caught:
        HostRendezvous(secrets.token_bytes(16), 2, 0, -BYTES)
    assert not raised_by_signal_handler(caught.value)
