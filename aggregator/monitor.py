"""Metrics and health by HTTP, in a process of its own: the shards serve jobs only, the supervisor has no threads.

The monitor asks the shards as anybody could, by a status request, but at Unix sockets of their own: whatever
transports workers may use, and with TLS or without. Each request to it waits for them for a bounded time. It lives as
long as the supervisor does.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from aggregator.metrics import Answers, ShardCollector
from omnireduce.config import Config, parse_address
from omnireduce.errors import TransportError
from omnireduce.logs import start_logs, tagged
from omnireduce.runtime.observe import MONITOR, ask_all
from omnireduce.status import Status
from omnireduce.transport.tcp import listen_tcp

log = logging.getLogger("omnireduce.aggregator")
AT_ONCE = 64  # requests; more are hung up on
READ_S = 3.0  # how long a client may take to say what it wants, and to take the answer
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}

_Start = Callable[[str, list[tuple[str, str]]], object]
_App = Callable[[dict[str, Any], _Start], Iterable[bytes]]


class Monitor:
    """What the pages say of the shards at `addresses`, which are called `names`."""

    def __init__(self, config: Config, names: Sequence[str], addresses: Sequence[str]) -> None:
        self._names, self._addresses = names, [_reachable(address) for address in addresses]
        self._config = config
        registry = CollectorRegistry()
        registry.register(ShardCollector(self._ask))
        self._metrics: _App = make_wsgi_app(registry)

    def __call__(self, environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        """One request, as WSGI has it."""
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return self._metrics(environ, start)
        if path == "/healthz":
            return _page(start, "200 OK", "alive")
        if path == "/readyz":
            wrong = [f"{name}: {each}" for name, each in self._ask().items() if not isinstance(each, Status)]
            return _page(start, "503 Service Unavailable" if wrong else "200 OK", "\n".join(wrong) or "ready")
        return _page(start, "404 Not Found", "try /metrics, /healthz or /readyz")

    def _ask(self) -> Answers:
        found = ask_all(self._addresses, self._config, self._config.metrics.timeout_s, purpose=MONITOR)
        return dict(zip(self._names, found, strict=True))


def _reachable(address: str) -> str:
    host, port = parse_address(address)
    host = LOOPBACK.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _page(start: _Start, status: str, text: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


class _Server(ThreadingMixIn, WSGIServer):
    """Serves on a socket that listens already, some requests at once."""

    daemon_threads = True
    timeout = 1.0  # for a connection that was there when `run_monitor` looked

    def __init__(self, listener: socket.socket, app: Monitor) -> None:
        address = listener.getsockname()
        super().__init__(address, _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = address[:2]
        self.setup_environ()
        self.set_app(app)
        self._room = threading.BoundedSemaphore(AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for the request, if there is room for one."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nobody's trouble."""
        log.debug("a request for metrics failed", exc_info=True, extra=tagged("metrics_failed"))


class _Handler(WSGIRequestHandler):
    timeout = READ_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class calls it so
        log.debug(format, *args, extra=tagged("metrics_request", peer=self.client_address[0]))


def open_http(address: str) -> tuple[socket.socket, str]:
    """Listen for HTTP at HOST:PORT; return the socket and the address, with the port that port 0 took.

    Raises TransportError.
    """
    host, port = parse_address(address)
    shown = f"[{host}]" if ":" in host else host
    try:
        listener = listen_tcp(host, port)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {address} for metrics: {error.strerror or error}; "
            'choose another metrics.listen, or "" for none'
        ) from error
    return listener, f"{shown}:{listener.getsockname()[1]}"


def run_monitor(
    listener: socket.socket, config: Config, names: Sequence[str], addresses: Sequence[str], stop_pipe: int
) -> None:
    """Serve until `stop_pipe` is closed by the supervisor, or by the kernel because the supervisor died."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    start_logs(config.log)
    server = _Server(listener, Monitor(config, names, addresses))
    while stop_pipe not in wait([listener, stop_pipe]):
        server.handle_request()
