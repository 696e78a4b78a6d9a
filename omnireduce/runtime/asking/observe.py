"""Status and administrative requests to aggregators: every wait is bounded, and a failure is an answer, too."""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

from omnireduce.addresses import parse_address
from omnireduce.administration import AdminAnswer, AdminRequest
from omnireduce.config import Config
from omnireduce.errors import OmniReduceError, TransportError
from omnireduce.logs import tagged
from omnireduce.protocol.joining.authentication import UNHEARD
from omnireduce.protocol.joining.rank import unreachable
from omnireduce.runtime.asking.connecting import connect_once
from omnireduce.runtime.asking.prove import prove, read_message
from omnireduce.secret import Secret
from omnireduce.status import FIRST_KEY, JobStatus, Status, StatusRequest
from omnireduce.transport.shm import connect_shm
from omnireduce.transport.stream import StreamLink
from omnireduce.transport.tls_files import worker_context
from omnireduce.wire.control import PROTOCOL_VERSION, ControlMessage, Hello, encode_control

log = logging.getLogger("omnireduce")
AT_ONCE = 64  # aggregators that are asked at the same time
MONITOR = "-monitor"  # purpose of the Unix sockets at which shards listen for the daemon's own monitor


def ask(address: str, config: Config, timeout_s: float, *, secret: Secret | None = None, purpose: str = "") -> Status:
    """The status of the aggregator shard at `address`, with all its jobs. With `purpose` MONITOR it is asked at the
    socket for the daemon's own monitor.

    Raises TransportError when it does not answer within `timeout_s`, or not as it should, RefusedError when it refuses,
    ConfigError when it can be reached by TCP only and a certificate cannot be used.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(reach(address, config, secret, deadline, purpose=purpose)) as link:
        return question(link, deadline)


def ask_all(
    addresses: Sequence[str], config: Config, timeout_s: float, *, secret: Secret | None = None, purpose: str = ""
) -> list[Status | OmniReduceError]:
    """For each address the status from `ask`, or the error that it raises; all are asked at once."""

    def outcome(address: str) -> Status | OmniReduceError:
        try:
            return ask(address, config, timeout_s, secret=secret, purpose=purpose)
        except OmniReduceError as error:
            return error

    if not addresses:
        return []
    with ThreadPoolExecutor(min(len(addresses), AT_ONCE)) as pool:
        return list(pool.map(outcome, addresses))


def reach(address: str, config: Config, secret: Secret | None, deadline: float, *, purpose: str = "") -> StreamLink:
    """Connect to an aggregator as a worker would, up to its Hello: both have then proved `secret`, if there is one.

    Raises what `ask` raises.
    """
    try:
        if purpose:
            link: StreamLink = connect_shm(*parse_address(address), deadline - time.monotonic(), purpose=purpose)
        else:
            make_tls, say = partial(worker_context, config.security), partial(_say_once, address)
            link = connect_once(address, config, make_tls, deadline, say)
    except OSError as error:
        raise unreachable(address, config.transport.kind, error.strerror or str(error)) from error
    try:
        if secret is not None:
            prove(link, secret, deadline)
    except BaseException:
        link.close()
        raise
    return link


@cache
def _say_once(address: str, reason: str) -> None:
    """Log the warning once for an address and a reason, however often the caller asks."""
    log.warning("going on by tcp: %s", reason, extra=tagged("no_shm", aggregator=address))


def question(link: StreamLink, deadline: float) -> Status:
    """Ask the aggregator at the other end. Raises TransportError or RefusedError."""
    started, jobs, after = time.monotonic(), list[JobStatus](), FIRST_KEY
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


def request(address: str, config: Config, timeout_s: float, wanted: AdminRequest, secret: Secret | None) -> int:
    """Ask the daemon of the aggregator shard at `address` for something; return how many jobs that concerns there.

    Raises what `ask` raises.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(reach(address, config, secret, deadline)) as link:
        link.send_control(encode_control(wanted))
        answer = _answer(link, deadline, timeout_s)
        if not isinstance(answer, AdminAnswer):
            raise TransportError(f"aggregator {link.peer} answered the request with {type(answer).__name__}")
        return answer.jobs


def refuse(address: str, config: Config, timeout_s: float, hello: Hello, secret: Secret | None) -> None:
    """Say a hello that refuses to come to the shard at `address`. Raises RefusedError, with the shard's answer, when
    the shard has heard it; otherwise what `ask` raises."""
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(reach(address, config, secret, deadline)) as link:
        link.send_control(encode_control(hello))
        _answer(link, deadline, timeout_s)


def _answer(link: StreamLink, deadline: float, timeout_s: float) -> ControlMessage:
    """The next control message. Raises TransportError or RefusedError."""
    readable = select.poll()
    readable.register(link, select.POLLIN)
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not readable.poll(left_s * 1000):
            raise TransportError(
                f"aggregator {link.peer} takes the connection, but does not answer within {timeout_s:.2g} s; {UNHEARD}"
            )
        for event in link.poll():
            return read_message(link, event)
