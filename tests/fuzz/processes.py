"""Targets that are real processes and sockets: a daemon that hears a stranger, a worker that hears an aggregator."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
from cluster_checks import assert_serves
from local_cluster import WAIT_S, Daemon, Ranks, configured, resident_bytes
from messages import SLOT_BYTES, SLOTS, TEAM_SECRET, TEAM_TEXT
from raw_peer import RawPeer

from omnireduce import Communicator, Config, OmniReduceError
from omnireduce.core.wire.control import Challenge, ControlMessage, Greeting, Hello, Proof, Welcome, decode_control
from omnireduce.errors import ProtocolError
from omnireduce.support.config.schema import SECRET_VARIABLE
from omnireduce.transport.framing import FRAME

from .connections import frames
from .machines import kind_of
from .seeds import TENSOR

SECRET_TEXT = "the secret of the fuzzer"
GROWTH_BYTES = 64 << 20  # a shard may grow by so much, however many strangers it has seen
Run = Callable[[bytes], str]


def answered(frame: bytes, *kinds: type[ControlMessage]) -> bool:
    """Whether the other side says something to this frame, or closes."""
    try:
        return isinstance(decode_control(frame[FRAME.size :]), kinds)
    except ProtocolError:
        return False


@contextlib.contextmanager
def _knowing(secret: str) -> Iterator[None]:
    """Workers of this process know the secret, if there is one."""
    if secret:
        os.environ[SECRET_VARIABLE] = secret
    try:
        yield
    finally:
        os.environ.pop(SECRET_VARIABLE, None)


@contextlib.contextmanager
def _teams() -> Iterator[str]:
    """A folder with the one team of the seeds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / TEAM_SECRET.team
        file.touch(0o600)
        file.write_bytes(TEAM_TEXT)
        yield folder


@contextlib.contextmanager
def daemon(*, local: bool, secret: str) -> Iterator[Run]:
    """Each input is a connection. At the end the same process serves others, and has not grown."""
    environ = {SECRET_VARIABLE: secret} if secret else {}
    with _teams() as folder, _knowing(secret):
        settings = [f"security.teams_folder={folder}"] if secret else []
        with Daemon(1, *settings, environ=environ) as result:
            [shard] = result.shard_pids
            assert_serves(result)
            before = resident_bytes(shard)
            yield partial(_disturb, result.addresses[0], local)
            assert_serves(result)
            assert result.shard_pids == [shard]
            assert resident_bytes(shard) - before < GROWTH_BYTES
            assert "internal error" not in result.log


def _disturb(address: str, local: bool, data: bytes) -> str:
    answer = b""
    with RawPeer(address, local=local) as peer:
        for frame in frames(data):
            peer.send(frame)
            if b"Refused" not in answer and answered(frame, Greeting, Proof, Hello):
                with contextlib.suppress(ConnectionResetError):
                    answer += peer.sock.recv(65536)
        with contextlib.suppress(OSError):
            peer.sock.shutdown(socket.SHUT_WR)
        assert peer.is_closed(), "the shard keeps a connection whose other end is closed"
    return "answered" if answer else "dropped"


@contextlib.contextmanager
def worker(*, secret: str) -> Iterator[Run]:
    """Each input is what a false aggregator says to a worker that joins and reduces a tensor."""
    with socket.create_server(("127.0.0.1", 0)) as server, _knowing(secret):
        server.settimeout(WAIT_S)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        slots = (f"protocol.slots={SLOTS}", f"protocol.slot_bytes={SLOT_BYTES}")
        limit_s = 1 if secret else 20  # a worker that has to prove a secret connects again until its time is over
        config = configured([address], "transport.kind=tcp", f"cluster.join_timeout_s={limit_s}", *slots)
        yield partial(_mislead, server, config)


def _mislead(server: socket.socket, config: Config, data: bytes) -> str:
    ranks = Ranks(1, lambda _: _reduce(config))
    with server.accept()[0] as sock, contextlib.suppress(OSError):  # the worker has closed
        sock.settimeout(WAIT_S)
        sock.recv(65536)
        for frame in frames(data):
            sock.sendall(frame)
            if answered(frame, Challenge, Proof, Welcome):
                sock.recv(65536)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    [outcome] = ranks.results()
    return str(outcome)


def _reduce(config: Config) -> str:
    try:
        with Communicator(config, rank=0, size=1) as comm:
            comm.allreduce(np.ones(TENSOR.shape, np.float32), block_size=TENSOR.block_size)
    except OmniReduceError as error:
        return kind_of(error)
    return "finished"


TARGETS: dict[str, Callable[[], AbstractContextManager[Run]]] = {
    "daemon": partial(daemon, local=False, secret=""),
    "daemon-unix": partial(daemon, local=True, secret=""),
    "daemon-secret": partial(daemon, local=False, secret=SECRET_TEXT),
    "worker": partial(worker, secret=""),
    "worker-secret": partial(worker, secret=SECRET_TEXT),
}
