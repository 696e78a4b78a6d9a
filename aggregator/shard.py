"""Process of a shard: its listening sockets, made before the process starts, and its main function."""

from __future__ import annotations

import logging
import os
import signal
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from omnireduce.aggregator.access import make_access
from omnireduce.aggregator.children import ChannelEnd, ClientOrder, RemainingJobs, process_count
from omnireduce.aggregator.heartbeats import Heartbeat, check_interval_s
from omnireduce.aggregator.ignored_signals import ignore
from omnireduce.aggregator.reload_on_hangup import reload_on_hangup
from omnireduce.aggregator.uplink_dialer import DialerPool
from omnireduce.core.admin_messages import Order
from omnireduce.errors import ConfigError, ProtocolError, TransportError, UsageError
from omnireduce.kernels.codecs.table import Codecs, with_own
from omnireduce.protocol.joining.limits import Limits
from omnireduce.runtime.file_descriptors import allow_all_descriptors
from omnireduce.runtime.shard.access import Access
from omnireduce.runtime.shard.listening import Listener
from omnireduce.runtime.shard.relay_admission import Upstream
from omnireduce.runtime.shard.server import ShardServer
from omnireduce.runtime.shard.traced import ShardTraces
from omnireduce.runtime.tracing.trace import trace_folder, with_folder
from omnireduce.support.addresses import Address, is_wildcard, listen_error_text
from omnireduce.support.config import Aggregator, Config
from omnireduce.support.logs import report_left_out, start_logs, tagged
from omnireduce.transport.base import Link
from omnireduce.transport.kinds import (
    NETWORK,
    MakeTls,
    Transport,
    UnavailableError,
    accept_own_link,
    allowed_by,
    is_required,
    listen_for_own_daemon,
)
from omnireduce.transport.rdma_offer import rdma_of

log = logging.getLogger("omnireduce.aggregator")


@dataclass(frozen=True)
class Listeners:
    """The listening sockets of one shard. The supervisor keeps them, so that a restarted shard takes over at once."""

    address: str
    name: str  # the name of the shard in errors: a wildcard address would name no host
    sockets: list[tuple[Transport, socket.socket]]
    monitor: socket.socket | None
    missing: list[str]  # why workers go by other transports than they could


def open_listeners(host: str, port: int, kind: str, monitor: str = "") -> Listeners:
    """Listen for the transports that `kind` (transport.kind) allows, and for the monitor, if there is one: at a socket
    for the purpose `monitor`, which no other process knows beforehand.

    Port 0 takes a free port. Raises TransportError.
    """
    address = Address(host, port)
    missing = []
    with ExitStack() as undo:
        try:
            # Its port is taken even if workers may not use it: that keeps two daemons from using one address.
            network = undo.enter_context(NETWORK.listen(address))
            address = Address(host, network.getsockname()[1])
            sockets = [(NETWORK, network)]
            for transport in [transport for transport in allowed_by(kind) if transport is not NETWORK]:
                try:
                    sockets.append((transport, undo.enter_context(transport.listen(address))))
                except UnavailableError as error:
                    if is_required(transport, kind):
                        raise TransportError(str(error)) from None
                    missing.append(str(error))
            monitor_socket = listen_for_own_daemon(address, monitor) if monitor else None
        except TransportError as error:
            raise TransportError(f"aggregator.listen: cannot listen on {address}: {error}") from None
        except OSError as error:
            reason = listen_error_text(error, address)
            raise TransportError(f"aggregator.listen: cannot listen on {address}: {reason}") from error
        undo.pop_all()
    name = socket.gethostname() if is_wildcard(host) else host
    return Listeners(str(address), str(Address(name, address.port)), sockets, monitor_socket, missing)


def _run_as_batch() -> None:
    """Make this process a batch task. Otherwise a shard that wakes for a message would push a worker off its core in
    the middle of a kernel, and the worker would wait for its core."""
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:  # a sandbox may forbid it; without it all works, only slower
        log.info("not a batch task: %s", error.strerror, extra=tagged("no_batch_task"))


def _make_listeners(listeners: Listeners, config: Config, tls: MakeTls) -> list[Listener]:
    """The shard's listeners. `tls` is called for each connection, because a SIGHUP may have replaced its result."""

    kind = config.transport.kind

    def make_link(transport: Transport, sock: socket.socket) -> Link:
        if transport not in allowed_by(kind):
            raise ConnectionRefusedError(f"transport.kind is {kind}")
        return transport.accept_link(sock, config, tls)

    made_listeners = [Listener(sock, partial(make_link, transport)) for transport, sock in listeners.sockets]
    if listeners.monitor is not None:
        made_listeners.append(Listener(listeners.monitor, accept_own_link, of_monitor=True))
    return made_listeners


def _limits(settings: Aggregator) -> Limits:
    return Limits(
        max_jobs=settings.max_jobs,
        max_world_size=settings.max_world_size,
        max_job_bytes=settings.max_job_bytes,
        join_timeout_s=settings.join_timeout_s,
        max_ranks=settings.max_ranks,
        max_bytes=settings.max_bytes,
    )


def begin_shard(config: Config, name: str) -> None:
    """Set up logs, scheduling and limits of a shard's process."""
    start_logs(config.log, process_count(config), shard=name)
    _run_as_batch()
    allow_all_descriptors()  # every rank of every job needs one


def own_codecs(config: Config) -> Codecs:
    """The codecs that jobs may use. Raises ConfigError."""
    try:
        return with_own(config.aggregator.codecs)
    except UsageError as error:
        raise ConfigError(f"aggregator.codecs: {error}") from error


def make_server(listeners: Listeners, config: Config, access: Access) -> ShardServer:
    """Make the server of the shard that runs in this process."""
    settings = config.aggregator
    for reason in listeners.missing:
        text = "%s: they go by TCP. For shared memory end that process, and start the aggregator again"
        log.warning(text, reason, extra=tagged("no_shm"))
    dialers = DialerPool(config) if settings.upstream else None
    server = ShardServer(
        listeners.name,
        _make_listeners(listeners, config, lambda: server.access.tls),
        _limits(settings),
        finish_s=settings.finish_s,
        hello_timeout_s=settings.hello_timeout_s,
        access=access,
        upstream=None if dialers is None else Upstream(settings.upstream, dialers.connect, dialers.close),
        verbs=rdma_of(config),
        straggler_s=settings.straggler_s,
        traces=ShardTraces(with_folder(config.trace)) if trace_folder(config.trace) else None,
        codecs=own_codecs(config),
        shards=settings.shards,
    )
    if dialers is not None:
        server.call_when_readable(dialers.fileno(), dialers.hand_over_outcomes)
    return server


def run_shard(listeners: Listeners, config: Config, access: Access, heartbeat: Heartbeat, channel: ChannelEnd) -> None:
    """Serve until `channel` is closed by the supervisor, or by the kernel because the supervisor died.

    `heartbeat` beats with every turn.
    """
    ignore((signal.SIGTERM, signal.SIGINT))  # the supervisor gets them too, and closes the channel
    begin_shard(config, listeners.name)
    server = make_server(listeners, config, access)
    supervisor = _SupervisorChannel(server, channel)

    def reload() -> None:
        server.access = make_access(config)

    def after_turn() -> None:
        heartbeat.beat()
        supervisor.report_jobs()
        report_left_out()

    reload_on_hangup(reload)
    server.serve(after_turn, check_interval_s(config.aggregator.watchdog_s))
    heartbeat.rest()


class _SupervisorChannel:
    """The shard's end of the channel to the supervisor."""

    def __init__(self, server: ShardServer, channel: ChannelEnd) -> None:
        self._server, self._channel = server, channel
        self._reported_jobs: int | None = None  # the number of jobs reported last; None: nothing was reported
        server.call_when_readable(channel.fileno(), self._read_orders)
        server.administration.pass_on = self._send_order

    def _read_orders(self) -> None:
        for message in self._channel.receive():
            if isinstance(message, Order):
                self._server.administration.obey(message)
        if self._channel.is_closed:
            self._server.ignore_when_readable(self._channel.fileno())
            self._server.stop()

    def _send_order(self, order: Order) -> None:
        if not self._channel.send(ClientOrder(order)):
            raise ProtocolError("the supervisor of the aggregator is busy: ask again")

    def report_jobs(self) -> None:
        """While the shard drains, report the number of its jobs, if it has changed."""
        administration = self._server.administration
        jobs = administration.remaining_jobs if administration.draining else None
        if jobs != self._reported_jobs and (jobs is None or self._channel.send(RemainingJobs(jobs))):
            self._reported_jobs = jobs
