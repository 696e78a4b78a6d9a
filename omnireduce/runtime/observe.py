"""How to ask aggregators for their status: every wait has a bound, and every failure is an answer too."""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from omnireduce.config import Config
from omnireduce.errors import OmniReduceError, ProtocolError, RefusedError, TransportError
from omnireduce.logs import BoundLog
from omnireduce.runtime.prove import prove
from omnireduce.runtime.rendezvous import connect_once
from omnireduce.secret import load_secret
from omnireduce.status import JobStatus, Status, StatusRequest
from omnireduce.transport.base import Control, Link, Lost
from omnireduce.transport.stream import StreamLink
from omnireduce.transport.tls import worker_context
from omnireduce.wire import PROTOCOL_VERSION, ControlMessage, Refused, decode_control, encode_control, shown

AT_ONCE = 64  # aggregators that are asked at the same time


def ask(address: str, config: Config, timeout_s: float) -> Status:
    """The status of the aggregator shard at `address`, with all its jobs.

    Raises ConfigError when the secret cannot be used, TransportError when it does not answer within `timeout_s`, or not
    as it should, RefusedError when it refuses.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(reach(address, config, deadline)) as link:
        return question(link, deadline)


def ask_all(addresses: Sequence[str], config: Config, timeout_s: float) -> list[Status | OmniReduceError]:
    """What `ask` returns or raises for each address, all asked at once."""

    def outcome(address: str) -> Status | OmniReduceError:
        try:
            return ask(address, config, timeout_s)
        except OmniReduceError as error:
            return error

    if not addresses:
        return []
    with ThreadPoolExecutor(min(len(addresses), AT_ONCE)) as pool:
        return list(pool.map(outcome, addresses))


def reach(address: str, config: Config, deadline: float) -> StreamLink:
    """Connect to an aggregator as a worker would, up to its Hello.

    Raises ConfigError when the secret cannot be used, TransportError or RefusedError.
    """
    secret = load_secret(config.security)
    tls = worker_context(config.security) if config.security.tls_ca else None  # a daemon itself asks by shared memory
    try:
        link = connect_once(address, config, tls, deadline, BoundLog(logging.getLogger("omnireduce")))
    except OSError as error:
        raise TransportError(
            f"cannot reach aggregator {address} by {config.transport.kind}: {error.strerror or error}; "
            "is `python -m aggregator` running there, and is its port open to this host?"
        ) from error
    if secret is not None:
        try:
            prove([link], secret, deadline)
        except BaseException:
            link.close()
            raise
    return link


def question(link: Link, deadline: float) -> Status:
    """Ask the aggregator at the other end. Raises TransportError or RefusedError."""
    started, jobs, after = time.monotonic(), list[JobStatus](), ("", 0)
    while True:
        link.send_control(encode_control(StatusRequest(PROTOCOL_VERSION, after)))
        page = _answer(link, deadline, deadline - started)
        if not isinstance(page, Status):
            raise TransportError(f"aggregator {link.peer} answered the status request with {type(page).__name__}")
        jobs += page.jobs
        if not page.more:
            break
        if not page.jobs or page.jobs[-1].key <= after:
            raise TransportError(f"aggregator {link.peer} lists its jobs out of order")
        after = page.jobs[-1].key
    page.jobs[:] = jobs
    return page


def _answer(link: Link, deadline: float, timeout_s: float) -> ControlMessage:
    """The next control message. Raises TransportError or RefusedError."""
    readable = select.poll()
    readable.register(link, select.POLLIN)
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not readable.poll(left_s * 1000):
            raise TransportError(
                f"aggregator {link.peer} takes the connection, but does not answer within {timeout_s:.2g} s; "
                "is it stopped or overloaded?"
            )
        for event in link.poll():
            if isinstance(event, Lost):
                raise TransportError(f"aggregator {link.peer}: {event.reason} instead of an answer")
            try:
                message = decode_control(event.body) if isinstance(event, Control) else None
            except ProtocolError as error:
                raise TransportError(f"aggregator {link.peer}: {error}") from error
            if isinstance(message, Refused):
                raise RefusedError(f"aggregator {link.peer} refused: {shown(message.reason)}")
            if message is None:
                raise TransportError(f"aggregator {link.peer} sent blocks instead of an answer")
            return message
