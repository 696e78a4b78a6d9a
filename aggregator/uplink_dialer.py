"""Connections of a relay to its upstream. Separate threads make them, because they may take long."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from omnireduce.errors import OmniReduceError
from omnireduce.runtime.aggregator_client import connect_once
from omnireduce.runtime.shard.relay_admission import Connected
from omnireduce.support.config import Config
from omnireduce.transport.base import Link
from omnireduce.transport.kinds import NETWORK
from omnireduce.transport.tls import worker_context

AT_ONCE = 4  # attempts to connect at the same time
CONNECT_S = 3.0  # the longest attempt to connect


class DialerPool:
    """A pool of threads that connect by TCP. The shard calls `hand_over_outcomes` in its own thread when `fileno` is
    readable."""

    def __init__(self, config: Config) -> None:
        self._config = replace(config, transport=replace(config.transport, kind=NETWORK.name))
        self._executor = ThreadPoolExecutor(AT_ONCE, "uplink")  # threads come when there is something to do
        self._outcomes: deque[tuple[Connected, Link | str]] = deque()
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """A descriptor that is readable when an attempt is over."""
        return self._wake_descriptor

    def connect(self, address: str, timeout_s: float, done: Connected) -> Callable[[], object]:
        """Try once to connect to an aggregator; `done` gets the link, or the reason why there is none. The result
        is a function that cancels an attempt that has not begun."""
        return self._executor.submit(self._run, address, min(timeout_s, CONNECT_S), done).cancel

    def close(self) -> None:
        """Begin no further attempts; attempts under way end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, address: str, timeout_s: float, done: Connected) -> None:
        outcome: Link | str
        try:
            deadline = time.monotonic() + timeout_s
            outcome = connect_once(
                address, self._config, lambda: worker_context(self._config.security), deadline, lambda reason: None
            )
        except OSError as error:
            outcome = error.strerror or str(error)
        except OmniReduceError as error:
            outcome = str(error)
        except Exception as error:  # a bug: the worker must not wait for ever
            outcome = f"internal error: {error!r}"
        self._outcomes.append((done, outcome))
        os.eventfd_write(self._wake_descriptor, 1)

    def hand_over_outcomes(self) -> None:
        """Hand over the outcomes of finished attempts."""
        os.eventfd_read(self._wake_descriptor)
        while self._outcomes:
            done, outcome = self._outcomes.popleft()
            done(outcome)
