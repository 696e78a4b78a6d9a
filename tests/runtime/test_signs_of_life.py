"""Blame for a collective that takes too long: an aggregator that sends anything does not hang."""

from __future__ import annotations

import contextlib
import socket

import numpy as np
import pytest
from local_cluster import WAIT_S, Ranks, configured
from raw_peer import framed

from omnireduce import CollectiveTimeoutError, Communicator
from omnireduce.core.wire.control import Welcome
from omnireduce.transport.framing import DATA, FRAME

TIMEOUT_S = 1.0


def serve(server: socket.socket, dribbles: bool) -> None:
    """Welcome a worker, take its tensor, and then say nothing until it leaves, or begin a message that never ends."""
    with server.accept()[0] as connection, contextlib.suppress(ConnectionError):
        connection.recv(65536)
        connection.sendall(framed(Welcome(1)))
        connection.recv(65536)
        if dribbles:
            connection.sendall(FRAME.pack(DATA, 0, 60_000))
        connection.settimeout(TIMEOUT_S / 20)
        gone = False
        while not gone:
            try:
                gone = not connection.recv(65536)
            except TimeoutError:
                if dribbles:
                    connection.sendall(bytes(10))


@pytest.mark.parametrize(("dribbles", "culprit"), [(True, "rank 0 ("), (False, "aggregator 127.0.0.1:")])
def test_a_part_of_a_message_is_a_sign_of_life(dribbles: bool, culprit: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        config = configured([address], "transport.kind=tcp", f"cluster.timeout_s={TIMEOUT_S}")

        def run(part: int) -> None:
            if part == 1:
                serve(server, dribbles)
                return
            with Communicator(config, rank=0, size=1) as comm:
                comm.allreduce(np.ones(1000))

        error, _ = Ranks(2, run).outcomes()
    assert isinstance(error, CollectiveTimeoutError)
    assert error.culprit.startswith(culprit)
