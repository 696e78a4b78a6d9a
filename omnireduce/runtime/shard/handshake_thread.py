"""A second thread of a shard, for TLS handshakes, which would keep the first thread busy for long."""

from __future__ import annotations

import os
import selectors
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from omnireduce.runtime.shard.connections import Connection, Connections
from omnireduce.runtime.shard.scheduler import Scheduler
from omnireduce.transport.base import Link


class HandshakeThread:
    """Does the tasks of links, in the order in which they came. A connection is not served until its task is done; then
    it has its turn.

    The thread exists from the first task on.
    """

    def __init__(self, selector: selectors.BaseSelector, connections: Connections, scheduler: Scheduler) -> None:
        self._selector, self._connections, self._scheduler = selector, connections, scheduler
        self._executor: ThreadPoolExecutor | None = None
        self._done: deque[Connection] = deque()
        self._wake = -1

    def start_task(self, connection: Connection) -> None:
        """Do the task of the connection's link, if there is one."""
        link = connection.link
        if link.task is None:
            return
        self._connections.pause(connection)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "aside")
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._selector.register(self._wake, selectors.EVENT_READ, self._resume_connections)
        self._executor.submit(self._run, connection, link, link.task)

    def _run(self, connection: Connection, link: Link, task: Callable[[], None]) -> None:
        if not link.over:  # the peer may have gone, or its time may be over
            task()
        self._done.append(connection)
        os.eventfd_write(self._wake, 1)

    def _resume_connections(self) -> None:
        os.eventfd_read(self._wake)
        while self._done:
            connection = self._done.popleft()
            self._connections.resume(connection)
            self._scheduler.ready(connection, selectors.EVENT_READ)

    def close(self) -> None:
        """Wait for the task under way, and drop the others."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None
            os.close(self._wake)
