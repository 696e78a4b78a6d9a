"""Aggregator of a single job: rank 0 starts it if no aggregator is configured, and it ends with that rank.

It is one process: a shard without a supervisor. A restart would be useless, because the shard's job would have ended.
The aggregator and the job end when rank 0 leaves or dies. Their messages to each other are in
omnireduce/runtime/embedded_messages.py.
"""

from __future__ import annotations

import secrets
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from omnireduce.aggregator.heartbeats import CHECK_S
from omnireduce.aggregator.ignored_signals import ignore
from omnireduce.aggregator.shard import begin_shard, make_server, open_listeners
from omnireduce.errors import OmniReduceError
from omnireduce.kernels.warm import warm_up_aggregator
from omnireduce.runtime.embedded_messages import (
    MAX_MESSAGE_BYTES,
    MAX_REASON_CHARACTERS,
    SECRET_BYTES,
    Compiling,
    EmbeddingFailed,
    Order,
    Ready,
    decode_order,
    encode,
)
from omnireduce.runtime.shard.access import Access
from omnireduce.support.addresses import parse_address
from omnireduce.support.cli import lose_unwritable_logs
from omnireduce.support.logs import report_left_out
from omnireduce.support.secret import Secret
from omnireduce.support.teams import Teams


def main() -> None:
    """Serve the job of the rank at the other end of standard input, until that rank has left or is gone."""
    # Signals for the ranks of the process group also come here. The ranks need the aggregator while they handle them.
    ignore((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    lose_unwritable_logs()
    with socket.socket(fileno=sys.stdin.fileno()) as rank:
        data, descriptors, _, _ = socket.recv_fds(rank, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if data:
            _serve(rank, decode_order(data), [rank.fileno(), *descriptors])


def _serve(rank: socket.socket, order: Order, lifelines: Sequence[int]) -> None:
    config = order.config

    def report_progress(done_s: float, total_s: float) -> None:
        if select.select(lifelines, [], [], 0)[0]:
            raise ConnectionResetError
        rank.send(encode(Compiling(done_s, total_s)))

    try:
        listeners = open_listeners(*parse_address(config.aggregator.listen), config.transport.kind)
        begin_shard(config, listeners.name)
        if order.sums:
            warm_up_aggregator(report_progress)
        secret = secrets.token_bytes(SECRET_BYTES)
        server = make_server(listeners, config, Access(Teams({"": [Secret(secret)]})))
        rank.send(encode(Ready(listeners.address, secret)))
    except ConnectionError:  # the rank is gone, or has left
        return
    except OmniReduceError as error:
        with suppress(ConnectionError):
            rank.send(encode(EmbeddingFailed(str(error)[:MAX_REASON_CHARACTERS])))
        return
    for lifeline in lifelines:
        server.stop_after_jobs_when_readable(lifeline)  # the other ranks may leave later
    server.serve(report_left_out, CHECK_S)
