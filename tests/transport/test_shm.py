"""Shared memory: descriptors passed with a welcome, regions that cannot shrink, results written once for all."""

from __future__ import annotations

import array
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
from local_cluster import ROOT

from omnireduce.errors import TransportError
from omnireduce.transport import slot_memory
from omnireduce.transport.base import Control, Event, Lost, Received
from omnireduce.transport.shm import ShmLink, connect_shm
from omnireduce.transport.slot_memory import Region, map_slots, private_slots, touch
from omnireduce.transport.unix_sockets import listen_local

from .pairs import SHM_PORT, SLOT_BYTES, SLOTS, ShmPair, accept
from .test_lifetime import descriptors


@pytest.fixture
def joined() -> Iterator[tuple[ShmLink, ShmLink]]:
    """The aggregator's and the worker's end, without memory."""
    with listen_local("127.0.0.1", SHM_PORT) as listener:
        worker = connect_shm("127.0.0.1", SHM_PORT, 10)
        aggregator = ShmLink(accept(listener), "worker")
    yield aggregator, worker
    aggregator.close()
    worker.close()


WHO = """
import os, socket
from omnireduce.transport.unix_sockets import peer_of
peer = peer_of(socket.socket(fileno=0))
print(peer.user == os.geteuid(), peer.is_trusted)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("inside", "peer", "output"), [(7, 0, "True True"), (7, 1234, "False False"), (65534, 1234, "True False")]
)
def test_a_user_whom_a_namespace_does_not_know_is_a_stranger(inside: int, peer: int, output: str) -> None:
    """The kernel gives all of them one number, 65534, which may be that of the process inside. It knows root alone."""
    os.seteuid(peer)
    try:
        ours, theirs = socket.socketpair()
    finally:
        os.seteuid(0)
    with ours, theirs:
        command = ["unshare", "--user", f"--map-user={inside}", sys.executable, "-c", WHO]
        result = subprocess.run(command, cwd=ROOT, stdin=theirs, capture_output=True, text=True, check=False)
    if "unshare" in result.stderr:
        pytest.skip(f"no user namespaces here: {result.stderr.strip()}")
    assert (result.stdout.strip(), result.stderr) == (output, "")


def read(link: ShmLink) -> None:
    assert select.select([link], [], [], 10)[0]
    link.poll()


def test_memory_comes_with_the_welcome_in_its_place(joined: tuple[ShmLink, ShmLink]) -> None:
    aggregator, worker = joined
    up, down = Region(2 * SLOTS, SLOT_BYTES), Region(SLOTS, SLOT_BYTES)
    aggregator.send_control(b"pending")
    aggregator.send_welcome(b"welcome", up, down)
    aggregator.send_control(b"after")
    events = list[Event]()
    while len(events) < 3:
        assert select.select([worker], [], [], 10)[0]
        events += worker.poll()
    assert events == [Control(b"pending"), Control(b"welcome"), Control(b"after")]
    worker.take_slots(1, SLOTS, SLOT_BYTES)
    worker.send_slots[0, 0] = 7
    assert up.slots[SLOTS, 0] == 7
    down.slots[SLOTS - 1, 5] = 9
    assert worker.receive_slots[SLOTS - 1, 5] == 9
    up.close()
    down.close()


def test_a_welcome_without_memory_is_an_error(joined: tuple[ShmLink, ShmLink]) -> None:
    aggregator, worker = joined
    aggregator.send_control(b"welcome")
    read(worker)
    with pytest.raises(TransportError, match="no shared memory"):
        worker.take_slots(0, SLOTS, SLOT_BYTES)


def test_memory_that_is_too_small_is_an_error(joined: tuple[ShmLink, ShmLink]) -> None:
    aggregator, worker = joined
    up, down = Region(SLOTS, SLOT_BYTES), Region(SLOTS, SLOT_BYTES)
    before = descriptors()
    aggregator.send_welcome(b"welcome", up, down)
    read(worker)
    with pytest.raises(TransportError, match="smaller than 8 slots"):
        worker.take_slots(1, SLOTS, SLOT_BYTES)
    assert descriptors() == before
    up.close()
    down.close()


def test_a_descriptor_that_cannot_be_mapped_is_an_error() -> None:
    pipe = os.pipe()
    with pytest.raises(TransportError):
        map_slots(pipe[0], 0, SLOTS, SLOT_BYTES)
    for end in pipe:
        os.close(end)


def test_memory_that_the_peer_could_shrink_is_an_error() -> None:
    """A file of the right size without the seal, and one that has no seals at all."""
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        for descriptor in (unsealed, file.fileno()):
            os.ftruncate(descriptor, SLOTS * SLOT_BYTES)
            with pytest.raises(TransportError, match=r"could shrink|cannot map"):
                map_slots(descriptor, 0, SLOTS, SLOT_BYTES)
    os.close(unsealed)


def test_a_worker_keeps_no_more_descriptors_than_it_needs(joined: tuple[ShmLink, ShmLink]) -> None:
    """However many an aggregator sends, byte by byte."""
    aggregator, worker = joined
    before = descriptors()
    null = os.open(os.devnull, os.O_RDONLY)
    for _ in range(20):
        socket.send_fds(aggregator._sock, [b"\x03\0\0\0\0\0\0\0"], [null, null])
        read(worker)
    os.close(null)
    assert descriptors() == before + 2


def test_descriptors_that_nobody_asked_for_are_dropped(joined: tuple[ShmLink, ShmLink]) -> None:
    """A worker that sends descriptors must not fill the aggregator's table."""
    aggregator, worker = joined
    before = descriptors()
    null = os.open(os.devnull, os.O_RDONLY)
    for _ in range(20):
        socket.send_fds(worker._sock, [b"\x03\0\0\0\0\0\0\0"], [null, null])
        read(aggregator)
    os.close(null)
    assert descriptors() == before


def test_surplus_descriptors_go_with_the_link(joined: tuple[ShmLink, ShmLink]) -> None:
    aggregator, worker = joined
    before = descriptors()
    null = os.open(os.devnull, os.O_RDONLY)
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 6))]
    aggregator._sock.sendmsg([b"\x03\0\0\0\0\0\0\0"], control)
    os.close(null)
    read(worker)
    worker.close()
    assert descriptors() == before - 1


def test_a_peer_that_does_not_read_its_answers_is_hung_up_on(joined: tuple[ShmLink, ShmLink]) -> None:
    aggregator, worker = joined
    while not aggregator.wants_write:
        aggregator.send_control(b"pending" * 5000)
    region = Region(SLOTS, SLOT_BYTES)
    aggregator.send_welcome(b"welcome", region, region)
    assert select.select([aggregator], [], [], 10)[0]
    (event,) = aggregator.poll()
    assert isinstance(event, Lost)
    events = list[Event]()
    while not worker.over:
        assert select.select([worker], [], [], 10)[0]
        events += worker.poll()
    assert Control(b"welcome") not in events
    assert isinstance(events[-1], Lost)
    region.close()


def test_a_region_keeps_its_size() -> None:
    region = Region(SLOTS, SLOT_BYTES)
    for size in (0, SLOT_BYTES, 2 * SLOTS * SLOT_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    assert os.fstat(region.fd).st_size == SLOTS * SLOT_BYTES
    region.close()
    region.close()


def test_memory_gets_its_pages_when_it_is_touched() -> None:
    """A shard touches none: or all its jobs would wait while the system finds memory for one."""
    region = Region(SLOTS, 4 << 20)
    assert os.fstat(region.fd).st_blocks == 0
    mapped = map_slots(region.fd, 1, 2, 4 << 20)
    assert os.fstat(region.fd).st_blocks == 0
    touch(mapped)
    assert os.fstat(region.fd).st_blocks * 512 == mapped.nbytes
    region.close()


def test_memory_that_cannot_be_touched_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region(SLOTS, SLOT_BYTES)
    touch(np.zeros((SLOTS, SLOT_BYTES), np.uint8))
    monkeypatch.setattr(slot_memory, "TOUCHED_BYTES", region.slots.nbytes - 1)
    touch(region.slots)
    monkeypatch.undo()
    monkeypatch.setattr(slot_memory, "MADV_POPULATE_WRITE", 10_000)  # as on a system that does not know it
    touch(region.slots)
    assert os.fstat(region.fd).st_blocks == 0
    region.close()


def test_slots_outlive_the_file_they_were_mapped_from() -> None:
    region = Region(SLOTS, SLOT_BYTES)
    mapped = map_slots(region.fd, 1, 2, SLOT_BYTES)
    region.slots[1, 3] = 42
    region.close()
    assert mapped.shape == (2, SLOT_BYTES)
    assert mapped[0, 3] == 42


def test_private_slots_are_zero_and_writable() -> None:
    slots = private_slots(SLOTS, SLOT_BYTES)
    assert slots.shape == (SLOTS, SLOT_BYTES)
    assert not slots.any()
    slots[:] = 1


def test_one_write_serves_two_ranks() -> None:
    """The second rank's link gets the same result region."""
    first = ShmPair()
    with listen_local("127.0.0.1", SHM_PORT) as listener:
        worker = connect_shm("127.0.0.1", SHM_PORT, 10)
        second = ShmLink(accept(listener), "rank 1")
    up = Region(SLOTS, SLOT_BYTES)
    second.attach(first.down.slots, up.slots)
    second.send_welcome(b"welcome", up, first.down)
    read(worker)
    worker.take_slots(0, SLOTS, SLOT_BYTES)
    first.down.slots[2, :1000] = np.arange(1000) % 251
    for link in (first.left, second):
        link.send(2, 1000)
        link.flush()
    for link in (first.right, worker):
        assert select.select([link], [], [], 10)[0]
        assert link.poll() == [Received(2, 1000)]
        assert np.array_equal(link.receive_slots[2, :1000], np.arange(1000) % 251)
    for link in (worker, second):
        link.close()
    up.close()
    first.close()


def test_an_address_can_be_taken_once_and_is_free_after_close() -> None:
    with listen_local("127.0.0.1", SHM_PORT), pytest.raises(OSError, match="in use"):
        listen_local("127.0.0.1", SHM_PORT)
    listen_local("127.0.0.1", SHM_PORT).close()


def test_another_host_has_no_shared_memory() -> None:
    with pytest.raises(ConnectionError, match="not this host"):
        connect_shm("192.0.2.1", SHM_PORT, 10)  # an address reserved for documentation


def test_a_host_that_does_not_resolve_has_no_shared_memory() -> None:
    with pytest.raises(OSError, match="not this host"):
        connect_shm("nowhere.invalid", SHM_PORT, 10)


def test_nobody_listens() -> None:
    with pytest.raises(ConnectionRefusedError, match=f"listens on 127.0.0.1:{SHM_PORT}"):
        connect_shm("127.0.0.1", SHM_PORT, 10)


@pytest.mark.parametrize("anywhere", ["0.0.0.0", "::"])
def test_an_aggregator_that_listens_everywhere_is_found_under_every_name(anywhere: str) -> None:
    with listen_local(anywhere, SHM_PORT) as listener:
        for host in ("127.0.0.1", "localhost"):
            link = connect_shm(host, SHM_PORT, 10)
            accept(listener).close()
            link.close()


def test_a_name_and_its_number_are_one_address() -> None:
    with listen_local("127.0.0.1", SHM_PORT) as listener:
        link = connect_shm("localhost", SHM_PORT, 10)
        assert link.peer == f"localhost:{SHM_PORT}"
        accept(listener).close()
        link.close()
