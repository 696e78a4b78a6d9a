"""Worker side: the request to join at one aggregator, on one connection. A pure state machine.

worker, or a relay for it   Greeting and Proof, where there is a secret; then Hello
aggregator                  Pending, Waiting and Newcomers, again and again; in the end Welcome, Refused or Aborted
"""

from __future__ import annotations

from omnireduce.core.wire.control import (
    Aborted,
    ControlMessage,
    Greeting,
    Hello,
    Newcomers,
    Pending,
    Proof,
    Refused,
    Waiting,
    Welcome,
)
from omnireduce.errors import ProtocolError
from omnireduce.protocol.joining.authentication import Candidate
from omnireduce.support.secret import Secret


class JoinRequest:
    """Says `hello` to an aggregator that has proved that it knows `secret`; None: at once. `nonce` is fresh.

    `pending` is the last thing that the aggregator said of ranks that are missing, `welcome` its Welcome.
    """

    def __init__(self, hello: Hello, secret: Secret | None, nonce: bytes) -> None:
        self._hello = hello
        self._candidate = None if secret is None else Candidate(secret, nonce)
        self.pending: Pending | None = None
        self.welcome: Welcome | None = None

    @property
    def has_said_hello(self) -> bool:
        """The aggregator may count on this worker."""
        return self._candidate is None

    @property
    def first(self) -> Greeting | Hello:
        """The first message to say."""
        return self._hello if self._candidate is None else self._candidate.greeting

    def answer(self, message: ControlMessage) -> Proof | Hello | None:
        """The aggregator said something. Returns what to say to it; None: the message is no part of the handshake, and
        is for the caller. Raises ProtocolError for a message that an aggregator may not send, or not yet."""
        if self._candidate is not None and not isinstance(message, Refused):
            proof = self._candidate.answer(message)
            if proof is not None:
                return proof
            self._candidate = None
            return self._hello
        if isinstance(message, Pending):
            self.pending = message
        elif isinstance(message, Welcome) and self.welcome is None:
            self.welcome = message
        elif not isinstance(message, Refused | Aborted | Waiting | Newcomers):
            raise ProtocolError(f"answered the hello with {type(message).__name__}")
        return None
