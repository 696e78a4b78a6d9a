"""Mutual proof of a shared secret, before a worker says who it is: two pure machines.

    worker      Greeting   its nonce w
    aggregator  Challenge  its nonce a
    worker      Proof      HMAC-SHA256(secret, purpose, "worker", w, a)
    aggregator  Proof      HMAC-SHA256(secret, purpose, "aggregator", w, a)
    worker      Hello      from here on as without a secret

A proof is bound to a role and to a fresh nonce of either side: it can be neither sent back nor sent again. The worker
proves itself first: whoever connects gets nothing to try guesses of the secret on. Memory and RDMA keys change hands
with the Hello and its answer, so never before both proofs.
"""

from __future__ import annotations

from omnireduce.errors import ProtocolError
from omnireduce.secret import SECRET_VARIABLE, Secret
from omnireduce.wire import PROTOCOL_VERSION, Challenge, ControlMessage, Greeting, Proof, other_version

GIVE = f"security.secret_file or the variable {SECRET_VARIABLE}"


class Gate:
    """Aggregator's side of one connection: says which messages are of a worker that may say Hello.

    `nonce` is fresh. `objection`: why nobody may say Hello here; empty when that depends on the secret alone.
    """

    def __init__(self, secret: Secret | None, nonce: bytes, objection: str = "") -> None:
        self._secret, self._nonce, self._objection = secret, nonce, objection
        self._theirs: bytes | None = None  # the worker's nonce
        self._open = secret is None

    def told(self, message: ControlMessage) -> Challenge | Proof | None:
        """The answer to a message; None for one that is no part of the handshake and may be dealt with.

        Raises ProtocolError for all that a worker may not say yet.
        """
        if isinstance(message, Greeting) and self._theirs is None:
            return self._challenge(message)
        if self._objection:
            raise ProtocolError(self._objection)
        if isinstance(message, Proof) and self._secret is not None and self._theirs is not None and not self._open:
            if not self._secret.proves(message.proof, "worker", self._theirs, self._nonce):
                raise ProtocolError(f"the worker has another secret than the aggregator: give both the same {GIVE}")
            self._open = True
            return Proof(self._secret.proof("aggregator", self._theirs, self._nonce))
        if not self._open:
            raise ProtocolError(f"the aggregator wants proof of a shared secret: give the worker the same {GIVE}")
        return None

    def _challenge(self, greeting: Greeting) -> Challenge:
        wrong = other_version(greeting.version) or self._objection
        if not wrong and self._secret is None:
            wrong = f"the worker has a secret, the aggregator has none: give it the same {GIVE}"
        if wrong:
            raise ProtocolError(wrong)
        self._theirs = greeting.nonce
        return Challenge(self._nonce)


class Candidate:
    """Worker's side of one connection. `greeting` is what to say first; `nonce` is fresh."""

    def __init__(self, secret: Secret, nonce: bytes) -> None:
        self._secret, self._nonce = secret, nonce
        self._theirs: bytes | None = None  # the aggregator's nonce
        self.greeting = Greeting(PROTOCOL_VERSION, nonce)

    def told(self, message: ControlMessage) -> Proof | None:
        """The answer to a message; None once the aggregator has proved itself. Raises ProtocolError."""
        if isinstance(message, Challenge) and self._theirs is None:
            self._theirs = message.nonce
            return Proof(self._secret.proof("worker", self._nonce, self._theirs))
        if not isinstance(message, Proof) or self._theirs is None:
            raise ProtocolError(f"answered the greeting with {type(message).__name__}, without proof of the secret")
        if not self._secret.proves(message.proof, "aggregator", self._nonce, self._theirs):
            raise ProtocolError(f"does not know the secret of this worker: give both the same {GIVE}")
        return None
