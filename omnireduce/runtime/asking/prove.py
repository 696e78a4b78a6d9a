"""The worker's side of the handshake over a real link, for a client that only asks an aggregator something: each proves
the secret to the other.
"""

from __future__ import annotations

import secrets
import select
import time

from omnireduce.errors import ProtocolError, RefusedError, TransportError
from omnireduce.protocol.joining.authentication import UNHEARD, Candidate
from omnireduce.runtime.asking.connecting import why_lost
from omnireduce.secret import NONCE_BYTES, Secret
from omnireduce.transport.base import Control, Event, Lost
from omnireduce.transport.stream import StreamLink
from omnireduce.wire.control import ControlMessage, Refused, decode_control, encode_control
from omnireduce.wire.safe_text import shown


def prove(link: StreamLink, secret: Secret, deadline: float) -> None:
    """Return when each end has proved to the other that it knows `secret`.

    Raises RefusedError when the aggregator wants another secret or does not answer in time, TransportError when it does
    not prove itself.
    """
    started, candidate = time.monotonic(), Candidate(secret, secrets.token_bytes(NONCE_BYTES))
    link.send_control(encode_control(candidate.greeting))
    readable = select.poll()
    readable.register(link, select.POLLIN)
    while not _advance(link, candidate):
        now = time.monotonic()
        if now >= deadline:
            raise RefusedError(
                f"no proof of the secret came from aggregator {link.peer} within {now - started:.2g} s; {UNHEARD}"
            )
        readable.poll((deadline - now) * 1000)


def _advance(link: StreamLink, candidate: Candidate) -> bool:
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


def read_message(link: StreamLink, event: Event) -> ControlMessage:
    """The control message of an event on the link to an aggregator.

    Raises TransportError when the link is over or the message malformed, RefusedError when it is a refusal.
    """
    if isinstance(event, Lost):
        if event.violation or event.refused:
            raise TransportError(f"aggregator {link.peer}: {event.reason}")
        raise TransportError(f"aggregator {link.peer}: {event.reason} before it answered{why_lost(link)}")
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
