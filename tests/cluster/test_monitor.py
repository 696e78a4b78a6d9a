"""The pages' server by itself: one deadline for a request, room for the newest, one round of asking for all."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from local_cluster import WAIT_S, configured, descriptors_below, eventually
from test_metrics import get

from omnireduce.aggregator.heartbeats import Heartbeat
from omnireduce.aggregator.http_monitor import AT_ONCE, CONNECTIONS, Monitor, _Server, log, open_http
from omnireduce.runtime.aggregator_client import MONITOR
from omnireduce.support.addresses import parse_address
from omnireduce.support.logs import LINES_PER_SECOND, LimitedHandler, tagged
from omnireduce.transport.tcp import listen_tcp
from omnireduce.transport.unix_sockets import listen_local

ALIVE = (200, "alive\n")


@dataclass(frozen=True)
class Pages:
    monitor: Monitor
    server: _Server
    address: str

    def get(self, page: str) -> tuple[int, str]:
        return get(f"http://{self.address}/{page}")

    def connect(self) -> socket.socket:
        return socket.create_connection(parse_address(self.address), WAIT_S)


@contextlib.contextmanager
def serving(limit_s: float, *shards: str, watchdog_s: float = 30.0) -> Iterator[Pages]:
    """Pages about these shards, each request within this time."""
    config = configured(["127.0.0.1:1"], "metrics.timeout_s=60", f"aggregator.watchdog_s={watchdog_s}")
    monitor = Monitor(config, shards, shards, [Heartbeat() for _ in shards])
    listener, address = open_http("127.0.0.1:0")
    server = _Server(listener, monitor, limit_s)
    stop, stopped = os.pipe()
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()
    try:
        yield Pages(monitor, server, address)
    finally:
        os.close(stopped)
        thread.join(WAIT_S)
        os.close(stop)
        listener.close()


def test_the_page_of_health_names_a_shard_that_takes_no_turn() -> None:
    with serving(60.0, "127.0.0.1:1", watchdog_s=0.2) as pages:
        assert pages.get("healthz") == ALIVE  # it does not serve yet
        [pulse] = pages.monitor._heartbeats
        pulse.beat()
        assert pages.get("healthz") == ALIVE
        assert eventually(lambda: pages.get("healthz") == (503, "127.0.0.1:1: no turn for 0 s\n"))
        pulse.beat()
        assert pages.get("healthz") == ALIVE
        assert eventually(lambda: pages.get("healthz")[0] == 503)
        pulse.rest()
        assert pages.get("healthz") == ALIVE


def test_a_request_that_breaks_a_page_is_one_event_of_the_log(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(60.0) as pages, pages.connect() as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nAccept: text/plain;version=x\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
        assert b" 500 Internal Server Error" in answer
        assert b"the log of the aggregator says why" in answer
        assert pages.get("healthz") == ALIVE
    assert [record.event for record in caplog.records if record.levelname != "DEBUG"] == ["page_failed"]  # type: ignore[attr-defined]
    assert capfd.readouterr().err == ""


def test_without_descriptors_the_server_looks_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    with serving(60.0) as pages:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.socket()) for _ in range(2)]
            with descriptors_below(0):
                for client in clients:
                    client.connect(parse_address(pages.address))
                assert eventually(lambda: pages.server._listen_again_at is not None)
                assert pages.server.socket not in pages.server._selector.get_map()
            clients[1].settimeout(WAIT_S)
            clients[1].sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert clients[1].recv(4096).startswith(b"HTTP/1.0 200 OK")
        assert pages.get("healthz") == ALIVE
    assert caplog.text.count("cannot accept a connection: [Errno 24] Too many open files") == 1


def test_what_the_log_left_out_is_told_though_nobody_asks() -> None:
    stream, root = io.StringIO(), logging.getLogger()
    handler = LimitedHandler(stream)
    root.addHandler(handler)
    try:
        with serving(60.0):
            for _ in range(3 * LINES_PER_SECOND):
                log.warning("refused", extra=tagged("metrics_refused"))
            assert eventually(lambda: "lines were too many for the log" in stream.getvalue())
    finally:
        root.removeHandler(handler)


def test_a_client_that_sends_a_byte_now_and_then_has_one_deadline_for_all() -> None:
    with serving(0.5) as pages, pages.connect() as client:
        client.settimeout(0.1)
        data = b""
        with contextlib.suppress(ConnectionError):
            for byte in b"GET /healthz HTTP/1.1\r\n" + b"A" * 1000:
                client.send(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    data += client.recv(1)
                    break
        assert data == b""
        assert not pages.server._deadlines
        assert pages.get("healthz") == ALIVE


def test_of_too_many_clients_the_oldest_makes_room() -> None:
    with serving(600.0) as pages, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(pages.connect()) for _ in range(CONNECTIONS)]
        for _ in range(3):
            assert pages.get("healthz") == ALIVE
        assert silent[0].recv(1) == b""
        silent[-1].sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert silent[-1].recv(100).startswith(b"HTTP/1.0 200 OK")


def test_a_flood_of_silent_clients_takes_no_place_of_those_who_ask() -> None:
    """A client that has begun to ask outlives any number of them; they have no threads."""
    with serving(600.0) as pages, contextlib.ExitStack() as stack:
        slow = stack.enter_context(pages.connect())
        slow.sendall(b"GET /healthz HTTP/1.0\r\n")
        threads = threading.active_count()
        for _ in range(3 * CONNECTIONS):
            stack.enter_context(pages.connect())
        assert pages.get("healthz") == ALIVE
        assert threading.active_count() <= threads + 2  # one for the slow client, one for the last page
        assert len(pages.server._silent) <= CONNECTIONS
        slow.sendall(b"\r\n")
        assert slow.recv(100).startswith(b"HTTP/1.0 200 OK")


def test_all_who_wait_for_a_shard_share_one_round_of_asking() -> None:
    """It says nothing. Those who wait for it have a bound; those who ask for the daemon's health have none."""
    with listen_tcp("127.0.0.1", 0) as holder, contextlib.ExitStack() as stack:
        port = holder.getsockname()[1]
        shard = stack.enter_context(listen_local("127.0.0.1", port, purpose=MONITOR))
        pages = stack.enter_context(serving(600.0, f"127.0.0.1:{port}"))
        waiting = [stack.enter_context(pages.connect()) for _ in range(AT_ONCE)]
        for client in waiting:
            client.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        assert eventually(lambda: pages.monitor._answers_to_come is not None)
        under_way = pages.monitor._answers_to_come
        assert under_way is not None
        assert eventually(lambda: len(under_way._condition._waiters) == AT_ONCE - 1)  # type: ignore[attr-defined]
        assert pages.get("readyz") == (503, f"{AT_ONCE} requests wait for the shards already\n")
        assert pages.get("healthz") == ALIVE
        shard.setblocking(True)
        shard.settimeout(WAIT_S)
        shard.accept()[0].close()
        for client in waiting:
            assert client.recv(100).startswith(b"HTTP/1.0 503 Service Unavailable")
        shard.setblocking(False)
        with pytest.raises(BlockingIOError):
            shard.accept()


def test_a_request_for_which_no_thread_can_start_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving(600.0) as pages:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pages.connect() as client:
                client.sendall(b"G")
                assert client.recv(1) == b""
        assert not pages.server._deadlines
        assert pages.get("healthz") == ALIVE
