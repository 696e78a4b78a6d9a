"""Monitor: metrics and health over HTTP, in a separate process. Shards only serve jobs, and the supervisor has no
threads.

The monitor sends status requests to the shards, over Unix sockets that only the monitor uses. So it does not matter
which transports workers may use, and whether they use TLS. The monitor proves no secret: the kernel tells the shards
whose process it is. The monitor lives as long as the supervisor does.

Each connection has one deadline for everything, TLS included. It gets a thread once the client has said something. When
too many connections are silent, the oldest of them is closed. The same holds for connections that have said something.
So neither kind can keep a client from a health check.
"""

from __future__ import annotations

import io
import logging
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from socketserver import ThreadingMixIn
from typing import Any, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from omnireduce.aggregator.children import ChannelEnd, process_count
from omnireduce.aggregator.heartbeats import CHECK_S, Heartbeat
from omnireduce.aggregator.ignored_signals import ignore
from omnireduce.aggregator.live.page import ASSETS, LivePage, asset, headers_of
from omnireduce.aggregator.metrics import ShardCollector
from omnireduce.aggregator.page_access import CHALLENGES, OPEN_PAGES, PageAccess, make_pages
from omnireduce.aggregator.reload_on_hangup import reload_on_hangup
from omnireduce.core.status_messages import Status
from omnireduce.core.wire.safe_text import SHOWN, shown
from omnireduce.errors import TransportError
from omnireduce.runtime.aggregator_client import MONITOR, ask_all
from omnireduce.runtime.file_descriptors import NO_ROOM, PAUSE_S, allow_all_descriptors
from omnireduce.support.addresses import (
    BACKLOG,
    Address,
    address_from_this_host,
    listen,
    listen_error_text,
    parse_address,
    parse_listen,
)
from omnireduce.support.config import Config
from omnireduce.support.job_summary import Answers
from omnireduce.support.logs import report_left_out, start_logs, tagged

log = logging.getLogger("omnireduce.aggregator")
CONNECTIONS = 128  # silent connections at once, and as many others
AT_ONCE = 64  # requests that may wait for the shards; connections accepted in one turn
CLIENT_S = 3.0  # the longest time of a request, beside the time that the shards have for their answer
GUARDED = ("/", "/metrics")  # pages that show jobs
NOT_THIS_HOST = (
    "these pages are for this host alone, which is not called '{host}': ask for localhost, or give metrics.token_file"
)

_Start = Callable[[str, list[tuple[str, str]]], object]
_App = Callable[[dict[str, Any], _Start], Iterable[bytes]]


class Monitor:
    """Makes the pages about the shards at `addresses`. `names` and `heartbeats` have the same order.

    `access` says who may read the pages. The monitor asks at the shards' sockets for `purpose`.
    """

    def __init__(
        self,
        config: Config,
        names: Sequence[str],
        addresses: Sequence[str],
        heartbeats: Sequence[Heartbeat],
        access: PageAccess = OPEN_PAGES,
        purpose: str = MONITOR,
    ) -> None:
        self.access, self._purpose = access, purpose
        self._names, self._addresses = (
            names,
            [str(address_from_this_host(parse_address(address))) for address in addresses],
        )
        self._config, self._heartbeats = config, heartbeats
        self._waiting_requests = threading.Semaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._answers_to_come: Future[Answers] | None = None  # None: no request to the shards is under way
        registry = CollectorRegistry()
        registry.register(ShardCollector(self._ask))
        self._metrics: _App = make_wsgi_app(registry)
        self._live = LivePage()

    def __call__(self, environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        """Answer one request, as WSGI wants it."""
        pages: dict[str, _App] = {"/": self._show_live_page, "/metrics": self._metrics, "/readyz": self._show_readiness}
        path, host = environ["PATH_INFO"], environ.get("HTTP_HOST", "")
        if not self.access.answers_for(host):
            return _page(start, "403 Forbidden", NOT_THIS_HOST.format(host=shown(host[:SHOWN])))
        if path == "/healthz":
            return self._show_health(start)
        if path in ASSETS:
            name, kind = ASSETS[path]
            return _answer(start, "200 OK", headers_of(kind), asset(name))
        if path not in pages:
            return _page(start, "404 Not Found", "try /, /metrics, /healthz or /readyz")
        if path in GUARDED and not self.access.admits(environ.get("HTTP_AUTHORIZATION", "")):
            log.warning("refused %s", path, extra=tagged("metrics_refused", peer=environ.get("REMOTE_ADDR"), page=path))
            text = (
                "this page needs a token from metrics.token_file: send `Authorization: Bearer TOKEN`, or the token as"
                " the password"
            )
            return _page(
                start, "401 Unauthorized", text, *(("WWW-Authenticate", challenge) for challenge in CHALLENGES)
            )
        if not self._waiting_requests.acquire(blocking=False):
            return _page(start, "503 Service Unavailable", f"{AT_ONCE} requests wait for the shards already")
        try:
            return pages[path](environ, start)
        except Exception as error:  # an unsuitable header of the request, or a bug
            failed = tagged("page_failed", peer=environ.get("REMOTE_ADDR"), page=path)
            log.warning("cannot answer for %s: %r", path, error, extra=failed, exc_info=True)
            text = "this request cannot be answered; the log of the aggregator says why"
            return _page(start, "500 Internal Server Error", text)
        finally:
            self._waiting_requests.release()

    def _show_live_page(self, environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        return _answer(start, "200 OK", headers_of("text/html"), self._live.make(self._ask()))

    def _show_health(self, start: _Start) -> Iterable[bytes]:
        now, limit_s = time.monotonic(), self._config.aggregator.watchdog_s
        silent_s = {
            name: now - heartbeat.last
            for name, heartbeat in zip(self._names, self._heartbeats, strict=True)
            if heartbeat.last
        }
        hanging = [
            f"{name}: no turn for {seconds:.0f} s" for name, seconds in silent_s.items() if 0 < limit_s < seconds
        ]
        return _page(start, "503 Service Unavailable" if hanging else "200 OK", "\n".join(hanging) or "alive")

    def _show_readiness(self, environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        answers = self._ask().items()
        not_ready = [f"{name}: {answer}" for name, answer in answers if not isinstance(answer, Status)]
        not_ready += [
            f"{name}: draining, takes no new jobs" for name, answer in answers if getattr(answer, "draining", False)
        ]
        return _page(start, "503 Service Unavailable" if not_ready else "200 OK", "\n".join(not_ready) or "ready")

    def _ask(self) -> Answers:
        """Ask the shards and return their answers. Requests that come meanwhile share these answers."""
        with self._lock:
            earlier, own = self._answers_to_come, Future[Answers]()
            if earlier is None:
                self._answers_to_come = own
        if earlier is not None:
            return earlier.result()
        try:
            timeout_s = self._config.metrics.timeout_s
            answers = ask_all(self._addresses, self._config, timeout_s, purpose=self._purpose)
            own.set_result(dict(zip(self._names, answers, strict=True)))
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            self._answers_to_come = None
        self._live.add_samples(own.result())
        return own.result()


def _page(start: _Start, status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    return _answer(start, status, [("Content-Type", "text/plain; charset=utf-8"), *headers], f"{text}\n")


def _answer(start: _Start, status: str, headers: Sequence[tuple[str, str]], text: str) -> Iterable[bytes]:
    start(status, list(headers))
    return [text.encode()]


class _Server(ThreadingMixIn, WSGIServer):
    """Serves `monitor` on a socket that listens already; each request may take `limit_s`."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, monitor: Monitor, limit_s: float) -> None:
        address = listener.getsockname()
        super().__init__(address, _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = address[:2]
        self.setup_environ()
        self.set_app(monitor)
        self._monitor, self._limit_s = monitor, limit_s
        self._deadlines: dict[socket.socket, float] = {}  # the deadlines of all connections, the oldest first
        self._lock = threading.Lock()  # while a thread shuts a socket down, no other thread closes it
        self._silent: dict[socket.socket, Any] = {}  # addresses of clients that have said nothing and have no thread
        self._selector = selectors.DefaultSelector()
        self._listen_again_at: float | None = None  # when to listen again; None: it listens

    def serve(self, stop_pipe: int) -> None:
        """Serve until `stop_pipe` is closed."""
        with self._selector as selector:
            selector.register(self.socket, selectors.EVENT_READ, self._accept)
            selector.register(stop_pipe, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(self._wait_s()):
                    if key.data is None:
                        self._close_overdue(float("inf"))
                        return
                    key.data()
                self._close_overdue(time.monotonic())
                self._resume(time.monotonic())
                report_left_out()

    def _wait_s(self) -> float:
        with self._lock:
            deadlines = list(islice(self._deadlines.values(), 1))
        deadlines += [] if self._listen_again_at is None else [self._listen_again_at]
        return max(0.0, min([CHECK_S, *(deadline - time.monotonic() for deadline in deadlines)]))

    def _resume(self, now: float) -> None:
        """Listen again, if it is time."""
        if self._listen_again_at is not None and now >= self._listen_again_at:
            self._listen_again_at = None
            self._selector.register(self.socket, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        """Accept waiting connections. Each gets a thread only when its client says something."""
        for _ in range(AT_ONCE):
            try:
                request, address = self.get_request()
            except OSError as error:  # mostly: no further connection waits
                if error.errno in NO_ROOM:  # the next connection would keep the socket readable
                    log.error("cannot accept a connection: %s", error, extra=tagged("accept_failed"))
                    self._listen_again_at = time.monotonic() + PAUSE_S
                    self._selector.unregister(self.socket)
                return
            self._silent[request] = address
            with self._lock:
                self._deadlines[request] = time.monotonic() + self._limit_s
            self._selector.register(request, selectors.EVENT_READ, partial(self._start_thread, request))

    def _start_thread(self, request: socket.socket) -> None:
        self._selector.unregister(request)
        address = self._silent.pop(request)
        try:
            self.process_request(request, address)
        except Exception:  # no thread can be started
            self.handle_error(request, address)
            self.shutdown_request(request)

    def _close_overdue(self, now: float) -> None:
        """Close connections whose time is over. If too many are silent, or too many are not, close the oldest."""
        with self._lock:
            speaking = [request for request in self._deadlines if request not in self._silent]
            overdue = {request for request, deadline in self._deadlines.items() if deadline <= now}
            for connections in (list(self._silent), speaking):
                overdue |= set(connections[: max(0, len(connections) - CONNECTIONS)])
            for request in overdue:
                del self._deadlines[request]
                if request in self._silent:
                    del self._silent[request]
                    self._selector.unregister(request)
                    request.close()
                    continue
                with suppress(OSError):  # the client may have gone; otherwise its thread finds the connection closed
                    # Not the method of SSLSocket: afterwards the thread would go on without TLS.
                    socket.socket.shutdown(request, socket.SHUT_RDWR)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept the next connection. With TLS its thread shakes hands, when it first reads. Raises OSError."""
        request, address = super().get_request()
        tls = self._monitor.access.tls  # read anew each time: a SIGHUP may have replaced it
        if tls is None:
            return request, address
        try:
            return tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False), address
        except OSError:  # the client has gone already
            request.close()
            raise

    def shutdown_request(self, request: Any) -> None:
        """Close the connection of a request that is over."""
        with self._lock:
            self._deadlines.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error at level debug only: most likely the client went away, which is no error of the daemon."""
        log.debug("a request for metrics failed", exc_info=True, extra=tagged("metrics_failed"))


class _Handler(WSGIRequestHandler):
    def get_stderr(self) -> TextIO:
        """A file that drops the messages of the base class. The log, which has limits, has all that matters."""
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class calls it so
        log.debug(format, *args, extra=tagged("metrics_request", peer=self.client_address[0]))


def open_http(address: str) -> tuple[socket.socket, str]:
    """Listen for HTTP at HOST:PORT; return the socket and the address, with the port that port 0 took.

    Raises TransportError.
    """
    listen_address = parse_listen(address)
    try:
        listener = listen(*listen_address, BACKLOG)
    except OSError as error:
        raise TransportError(
            f"metrics.listen: cannot listen on {listen_address}: {listen_error_text(error, listen_address)}"
        ) from error
    return listener, str(Address(listen_address.host, listener.getsockname()[1]))


def run_monitor(
    listener: socket.socket,
    config: Config,
    access: PageAccess,
    *,
    purpose: str,
    names: Sequence[str],
    addresses: Sequence[str],
    heartbeats: Sequence[Heartbeat],
    channel: ChannelEnd,
) -> None:
    """Serve until `channel` is closed by the supervisor, or by the kernel because the supervisor died. `access` says
    who may read the pages."""
    ignore((signal.SIGTERM, signal.SIGINT))  # the supervisor gets them too, and closes the channel
    start_logs(config.log, process_count(config))
    allow_all_descriptors()
    monitor = Monitor(config, names, addresses, heartbeats, access=access, purpose=purpose)

    def reload() -> None:
        monitor.access = make_pages(config.metrics)

    reload_on_hangup(reload)
    _Server(listener, monitor, CLIENT_S + config.metrics.timeout_s).serve(channel.fileno())
