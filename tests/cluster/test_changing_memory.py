"""Shared memory that its other owner rewrites all the while, between a check and a use most of all."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from cluster_checks import assert_serves
from harness import Guarded
from local_cluster import WAIT_S, Daemon, Ranks, configured, unique_job
from raw_peer import DATA, DEFAULTS, RawPeer
from test_rule_breakers import message

from omnireduce import AbortedError, Communicator
from omnireduce.core.dtypes import Array
from omnireduce.core.wire.control import Welcome, encode_control
from omnireduce.transport.framing import FRAME
from omnireduce.transport.shm import ShmLink
from omnireduce.transport.slot_memory import Region, map_slots
from omnireduce.transport.unix_sockets import listen_local

ROUNDS = 20
ELEMENTS = 10_000  # in 40 blocks, as the messages of test_rule_breakers say
SLOTS, SLOT_BYTES = DEFAULTS.slots, DEFAULTS.slot_bytes
PROPER, RUNS = message([3, 5, 39]), message([3, 4, 5], runs=[(3, 3)])
STEPS = message([3, 5, 39], steps=bytes([3, 2, 34]))
START = len(PROPER) - len(message([])) + 64 - 3 * 8  # start of the list, behind the header and three blocks


@contextmanager
def rewriting(slot: Array, proper: bytes) -> Iterator[None]:
    """Change indices, counts and frontiers of the message in `slot` back and forth, in a thread."""
    stop, whole = threading.Event(), np.frombuffer(proper, np.uint8)
    slot[: whole.size] = whole
    words = slot[: (whole.size // 8) * 8].view(np.uint64)
    true = words.copy()
    values = [0, 2**63, 2**62, 2**48 - 1, 41, 2**32 - 1]
    places = [1, 2, 3, 4, START // 8, START // 8 + 1, *([START // 8 + 2] if len(proper) == len(PROPER) else [])]

    def write() -> None:
        for position, value in itertools.cycle(itertools.product(places, values)):
            words[position] = value
            words[position] = true[position]
            if stop.is_set():
                return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def welcomed(peer: RawPeer) -> list[int]:
    """Wait for the Welcome over the Unix socket; return the descriptors that come with it."""
    while True:
        result = socket.recv_fds(peer.sock, 65536, 2)[1]
        if result:
            return result


@pytest.mark.slow
@pytest.mark.parametrize("proper", [PROPER, RUNS, STEPS], ids=["indices", "runs", "steps"])
def test_a_worker_that_rewrites_its_messages(daemon: Daemon, proper: bytes) -> None:
    """It is named, or its numbers are what they are; the shard goes on as before."""
    shards, config = daemon.shard_pids, configured(daemon.addresses[:1])
    kinds = set()
    for _ in range(ROUNDS):
        job = unique_job()

        def honest(_: int, job: str = job) -> str:
            with Communicator(config, rank=0, size=2, job=job) as comm:
                comm.allreduce(np.ones(ELEMENTS, np.float32))
            return "a result"

        with RawPeer(daemon.addresses[0], local=True) as peer:
            ranks = Ranks(1, honest)
            peer.hello(job, 1, 2)
            up, down = welcomed(peer)
            slot = map_slots(up, SLOTS, SLOTS, SLOT_BYTES)[0]
            with rewriting(slot, proper):
                peer.frame(DATA, 0, len(proper))
                [outcome] = ranks.outcomes()
            os.close(up)
            os.close(down)
        if isinstance(outcome, AbortedError):
            assert outcome.culprit == "rank 1 (host test, pid 1)"
        kinds.add(outcome if isinstance(outcome, str) else type(outcome).__name__)
    assert kinds <= {"a result", "AbortedError"}
    assert daemon.shard_pids == shards
    assert_serves(daemon)


def test_an_aggregator_that_rewrites_its_results() -> None:
    """Nothing outside the tensor is written, whatever the result says meanwhile."""
    result = message([3, 5, 39], extra=b"")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with listen_local("127.0.0.1", port) as listener:
            listener.setblocking(True)
            listener.settimeout(WAIT_S)
            for _ in range(ROUNDS):
                guard = Guarded((ELEMENTS,), np.float32)
                ranks = Ranks(1, lambda _, guard=guard: reduce_one(port, guard))
                mislead(listener.accept()[0], result, ranks)
                guard.check()
                written = set((np.flatnonzero(guard.array != 1) // 256).tolist())
                assert written <= {3, 5, 39, 0}  # its own; and 0, the one lie that may stand in the place of 3


def reduce_one(port: int, guard: Guarded) -> None:
    config = configured([f"127.0.0.1:{port}"], "transport.kind=shm", "cluster.join_timeout_s=20")
    with Communicator(config, rank=0, size=1) as comm:
        guard.array[:] = 1
        comm.allreduce(guard.array)


def mislead(sock: socket.socket, result: bytes, ranks: Ranks) -> None:
    """Welcome the worker, send it the result while that changes, and wait for what it makes of it."""
    up, down = Region(SLOTS, SLOT_BYTES), Region(SLOTS, SLOT_BYTES)
    sock.settimeout(WAIT_S)
    assert sock.recv(65536)
    link = ShmLink(sock, "worker")
    link.attach(down.slots, up.slots)
    link.send_welcome(encode_control(Welcome(1)), up, down)
    with rewriting(down.slots[0], result):
        sock.setblocking(True)
        sock.settimeout(WAIT_S)
        sock.recv(FRAME.size, socket.MSG_WAITALL)
        link.send(0, len(result))
        sock.setblocking(False)
        link.flush()
        sock.settimeout(WAIT_S)
        while (data := sock.recv(65536)) and b"Leave" not in data:  # it is done with the result, or gives up
            pass
    link.close()
    [outcome] = ranks.outcomes()
    if outcome is not None:
        assert isinstance(outcome, AbortedError)
        assert "aggregator" in outcome.culprit
    up.close()
    down.close()
