"""The worker's side of the handshake, on real links: prove the secret to every aggregator, and have it proved."""

from __future__ import annotations

import secrets
import selectors
import time
from collections.abc import Sequence

from omnireduce.errors import ProtocolError, RefusedError, TransportError
from omnireduce.protocol.handshake import Candidate
from omnireduce.secret import NONCE_BYTES, Secret
from omnireduce.transport.base import Control, Event, Link, Lost
from omnireduce.transport.tcp import TcpLink
from omnireduce.wire import ControlMessage, Refused, decode_control, encode_control, shown


def prove(links: Sequence[Link], secret: Secret, deadline: float) -> None:
    """Return when worker and aggregator know of each other, on all links, that they know `secret`.

    Raises RefusedError when an aggregator wants another secret or does not answer in time, TransportError when it does
    not prove itself.
    """
    waiting, started = dict[Link, Candidate](), time.monotonic()
    with selectors.DefaultSelector() as selector:
        for link in links:
            waiting[link] = Candidate(secret, secrets.token_bytes(NONCE_BYTES))
            link.send_control(encode_control(waiting[link].greeting))
            selector.register(link, selectors.EVENT_READ, link)
        while waiting:
            now = time.monotonic()
            if now >= deadline:
                names = ", ".join(sorted(link.peer for link in waiting))
                raise RefusedError(
                    f"no proof of the secret came from aggregator {names} within {now - started:.2g} s; "
                    "is it stopped or overloaded?"
                )
            ready = selector.select(deadline - now)
            for key, _ in ready:
                if _advance(key.data, waiting[key.data]):
                    del waiting[key.data]
                    selector.unregister(key.data)


def _advance(link: Link, candidate: Candidate) -> bool:
    """Deal with what the aggregator said; return whether it has proved itself."""
    proven = False
    for event in link.poll():
        message = read_message(link, event)
        if proven:
            raise TransportError(f"aggregator {link.peer} said {type(message).__name__} before the hello")
        try:
            answer = candidate.told(message)
        except ProtocolError as error:
            raise TransportError(f"aggregator {link.peer} {error}") from None
        proven = answer is None
        if answer is not None:
            link.send_control(encode_control(answer))
    return proven


def read_message(link: Link, event: Event) -> ControlMessage:
    """A message of an aggregator to who wants to join.

    Raises TransportError when the link is over or the message malformed, RefusedError when it is a refusal.
    """
    if isinstance(event, Lost):
        raise TransportError(
            f"aggregator {link.peer}: {event.reason} before this worker was admitted; "
            f"does its transport.kind allow {link.kind}{_or_tls(link)}?"
        )
    if not isinstance(event, Control):
        raise TransportError(f"aggregator {link.peer} sent blocks before this worker was admitted")
    try:
        message = decode_control(event.body)
    except ProtocolError as error:
        raise TransportError(f"aggregator {link.peer}: {error}") from error
    if isinstance(message, Refused):
        refusal = f"aggregator {link.peer} refused: {shown(message.reason)}"
        raise RefusedError(refusal, temporary=message.temporary)
    return message


def _or_tls(link: Link) -> str:
    return ", and does it want TLS (security.tls_ca here)" if type(link) is TcpLink else ""
