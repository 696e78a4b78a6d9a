"""Client of an aggregator: connection, status and administrative requests. Every wait is bounded."""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

from omnireduce.core.admin_messages import AdminAnswer, AdminRequest
from omnireduce.core.status_messages import FIRST_KEY, JobStatus, Status, StatusRequest
from omnireduce.core.wire.control import (
    NONCE_BYTES,
    PROTOCOL_VERSION,
    ControlMessage,
    Hello,
    Refused,
    decode_control,
    encode_control,
)
from omnireduce.core.wire.safe_text import shown
from omnireduce.errors import OmniReduceError, ProtocolError, RefusedError, TransportError
from omnireduce.protocol.joining.authentication import UNHEARD, Candidate
from omnireduce.protocol.joining.worker_joining import unreachable
from omnireduce.support.addresses import parse_address
from omnireduce.support.config import Config
from omnireduce.support.logs import tagged
from omnireduce.support.secret import Secret
from omnireduce.transport.base import Control, Event, Lost
from omnireduce.transport.framing import StreamLink
from omnireduce.transport.kinds import ConnectAttempt, MakeTls, connect_by_any, connect_to_own_daemon
from omnireduce.transport.tls import worker_context


def connect_once(
    address: str, config: Config, make_tls: MakeTls, deadline: float, say: Callable[[str], None]
) -> StreamLink:
    """Connect to an aggregator; only control messages can flow yet. Calls `make_tls` before it connects by TCP. Calls
    `say`, with the reason, when shared memory is there but belongs to another user.

    Raises OSError when the aggregator cannot be reached; TransportError when only shared memory may be used and it
    belongs to another user, or when TLS fails; and what `make_tls` raises.
    """
    timeout_s = max(0.1, deadline - time.monotonic())
    return connect_by_any(ConnectAttempt(parse_address(address), timeout_s, config, make_tls), say)


def loss_hint(link: StreamLink) -> str:
    """The likely reason if an aggregator hangs up before it has admitted this worker."""
    return f"; does its transport.kind allow {link.kind}{link.loss_question}?"


def prove(link: StreamLink, secret: Secret, deadline: float) -> None:
    """Return when each end has proved to the other that it knows `secret`.

    Raises RefusedError when the aggregator wants another secret or does not answer in time, TransportError when it does
    not prove itself.
    """
    started, candidate = time.monotonic(), Candidate(secret, secrets.token_bytes(NONCE_BYTES))
    link.send_control(encode_control(candidate.greeting))
    readable = select.poll()
    readable.register(link, select.POLLIN)
    while not _handle_messages(link, candidate):
        now = time.monotonic()
        if now >= deadline:
            raise RefusedError(
                f"no proof of the secret came from aggregator {link.peer} within {now - started:.2g} s; {UNHEARD}"
            )
        readable.poll((deadline - now) * 1000)


def _handle_messages(link: StreamLink, candidate: Candidate) -> bool:
    """Handle the messages of the aggregator; return whether it has proved itself."""
    proven = False
    for event in link.poll():
        message = read_message(link, event)
        if proven:
            raise TransportError(f"aggregator {link.peer} said {type(message).__name__} before the hello")
        try:
            answer = candidate.answer(message)
        except ProtocolError as error:
            raise TransportError(f"aggregator {link.peer} {error}") from None
        proven = answer is None
        if answer is not None:
            link.send_control(encode_control(answer))
    return proven


def read_message(link: StreamLink, event: Event) -> ControlMessage:
    """The control message of an event on the link to an aggregator.

    Raises TransportError when the link is over or the message malformed, RefusedError when it is a refusal.
    """
    if isinstance(event, Lost):
        if event.violation or event.refused:
            raise TransportError(f"aggregator {link.peer}: {event.reason}")
        raise TransportError(f"aggregator {link.peer}: {event.reason} before it answered{loss_hint(link)}")
    if not isinstance(event, Control):
        raise TransportError(f"aggregator {link.peer} sent blocks instead of an answer")
    try:
        message = decode_control(event.body)
    except ProtocolError as error:
        raise TransportError(f"aggregator {link.peer}: {error}") from error
    if isinstance(message, Refused):
        refusal = f"aggregator {link.peer} refused: {shown(message.reason)}"
        raise RefusedError(refusal, temporary=message.temporary)
    return message


log = logging.getLogger("omnireduce")
AT_ONCE = 64  # aggregators that are asked at the same time
MONITOR = "-monitor"  # purpose of the Unix sockets at which shards listen for the daemon's own monitor


def ask(address: str, config: Config, timeout_s: float, *, secret: Secret | None = None, purpose: str = "") -> Status:
    """The status of the aggregator shard at `address`, with all its jobs. With `purpose` MONITOR it is asked at the
    socket for the daemon's own monitor.

    Raises TransportError when it does not answer within `timeout_s`, or gives an invalid answer; RefusedError when it
    refuses; ConfigError when it can be reached by TCP only and a certificate cannot be used.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(reach(address, config, secret, deadline, purpose=purpose)) as link:
        return read_status(link, deadline)


def ask_all(
    addresses: Sequence[str], config: Config, timeout_s: float, *, secret: Secret | None = None, purpose: str = ""
) -> list[Status | OmniReduceError]:
    """The status of each address, or the error that `ask` raises for it; all are asked at once."""

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
    """Connect to an aggregator as a worker would, up to the Hello. If there is a secret, both have proved it then.

    Raises what `ask` raises.
    """
    try:
        if purpose:
            link = connect_to_own_daemon(parse_address(address), deadline - time.monotonic(), purpose)
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
    """Log the warning once for an address and a reason."""
    log.warning("going on by tcp: %s", reason, extra=tagged("no_shm", aggregator=address))


def read_status(link: StreamLink, deadline: float) -> Status:
    """Ask the aggregator at the other end. Raises TransportError or RefusedError."""
    started, jobs, after = time.monotonic(), list[JobStatus](), FIRST_KEY
    while True:
        link.send_control(encode_control(StatusRequest(PROTOCOL_VERSION, after)))
        page = _read_answer(link, deadline, deadline - started)
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


def request(address: str, config: Config, timeout_s: float, admin_request: AdminRequest, secret: Secret | None) -> int:
    """Send an administrative request to the daemon of the shard at `address`; return the number of jobs concerned.

    Raises what `ask` raises.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(reach(address, config, secret, deadline)) as link:
        link.send_control(encode_control(admin_request))
        answer = _read_answer(link, deadline, timeout_s)
        if not isinstance(answer, AdminAnswer):
            raise TransportError(f"aggregator {link.peer} answered the request with {type(answer).__name__}")
        return answer.jobs


def refuse(address: str, config: Config, timeout_s: float, hello: Hello, secret: Secret | None) -> None:
    """Send a hello that refuses to join a group to the shard at `address`. Raises RefusedError, with the shard's
    answer, when the shard has heard it. Otherwise it raises the errors of `ask`."""
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(reach(address, config, secret, deadline)) as link:
        link.send_control(encode_control(hello))
        _read_answer(link, deadline, timeout_s)


def _read_answer(link: StreamLink, deadline: float, timeout_s: float) -> ControlMessage:
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
