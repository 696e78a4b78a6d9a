"""Mutual proof of a shared secret, before a worker says who it is: two pure machines.

    worker      Greeting   its nonce w, and the name of its team
    aggregator  Challenge  its nonce a
    worker      Proof      HMAC-SHA256(secret, purpose, "worker", w, a, team)
    aggregator  Proof      HMAC-SHA256(secret, purpose, "aggregator", w, a, team)
    worker      Hello      from here on as without a secret

A proof is bound to a role and to a fresh nonce of either side: it can be neither sent back nor sent again. The worker
proves itself first. So a stranger who connects gets nothing on which to try guesses of the secret. Memory and RDMA keys
change hands with the Hello and its answer, so never before both proofs.

The team says which secrets the aggregator tries. The aggregator's own proof uses the secret that the worker has proved.
A team that does not exist is refused after the proof, in the same words and the same time as a wrong proof.
"""

from __future__ import annotations

import msgspec

from omnireduce.core.wire.control import (
    PROTOCOL_VERSION,
    Challenge,
    ControlMessage,
    Greeting,
    Hello,
    Proof,
    other_version,
)
from omnireduce.core.wire.safe_text import SHOWN, listed
from omnireduce.errors import ProtocolError
from omnireduce.support.config.schema import SECRET_VARIABLE
from omnireduce.support.secret import Secret
from omnireduce.support.teams import ANYBODY, Teams

GIVE_SECRET = f"security.secret_file or the variable {SECRET_VARIABLE}"
WANTS_PROOF = f"the aggregator wants proof of a shared secret: give the client the same {GIVE_SECRET}"
UNHEARD = "is it stopped or overloaded, or does something else listen there?"


class Gate:
    """Aggregator's side of one connection: lets no Hello pass before the handshake is complete.

    `nonce` is fresh. `objection`: the reason why no worker may say Hello here; empty when only the secret decides.
    `team` is the team whose secret must be proved, or has been; `claimed_team` is the name that the worker gave for it.
    """

    def __init__(self, teams: Teams | None, nonce: bytes, objection: str = "") -> None:
        self._teams, self._nonce, self._objection = teams, nonce, objection
        self._worker_nonce: bytes | None = None  # the worker's nonce
        self._open = teams is None
        self.team, self.claimed_team = ANYBODY, ""

    @property
    def proved(self) -> bool:
        """Whether the worker has proved the secret of `team`."""
        return self._open and self._teams is not None

    def answer(self, message: ControlMessage) -> Challenge | Proof | None:
        """The answer to a message of the handshake. None: the message belongs to the time after the handshake, and is
        allowed now.

        Raises ProtocolError for a message that a worker may not send, or not yet.
        """
        if isinstance(message, Greeting) and self._worker_nonce is None:
            return self._make_challenge(message)
        if self._objection:
            raise ProtocolError(self._objection)
        if isinstance(message, Proof) and self._worker_nonce is not None and not self._open:
            return self._check_proof(message, self._worker_nonce)
        if not self._open:
            raise ProtocolError(WANTS_PROOF)
        if isinstance(message, Hello) and not self.team.may_use(message.job):
            raise ProtocolError(self._foreign_job_text(message.job))
        return None

    def signed(self, hello: Hello) -> Hello:
        """The Hello, with the team that was proved in place of the team that the worker wrote."""
        return msgspec.structs.replace(hello, team=self.team.name)

    def _make_challenge(self, greeting: Greeting) -> Challenge:
        wrong = other_version(greeting.version) or self._objection
        if not wrong and self._teams is None:
            wrong = f"the client has a secret, the aggregator has none: give it the same {GIVE_SECRET}"
        if wrong:
            raise ProtocolError(wrong)
        assert self._teams is not None
        self._worker_nonce, self.claimed_team = greeting.nonce, greeting.team
        self.team = self._teams.of(greeting.team)
        return Challenge(self._nonce)

    def _check_proof(self, message: Proof, worker_nonce: bytes) -> Proof:
        secret = self.team.proved(message.proof, worker_nonce, self._nonce)
        if secret is None:
            team_text = f" of team '{self.claimed_team}', or there is no such team" if self.claimed_team else ""
            hint = "" if self.claimed_team else "; the secret of a team wants security.team on the client"
            raise ProtocolError(
                f"the client has another secret than the aggregator{team_text}: give both the same {GIVE_SECRET}{hint}"
            )
        self._open = True
        return Proof(secret.proof("aggregator", worker_nonce, self._nonce))

    def _foreign_job_text(self, job: str) -> str:
        names = listed([f"'{name}'" for name in self.team.jobs])
        return f"job {job[:SHOWN]!r} does not belong to team '{self.team.name}': set cluster.job to {names}"


class Candidate:
    """Worker's side of one connection. `greeting` is its first message; `nonce` is fresh."""

    def __init__(self, secret: Secret, nonce: bytes) -> None:
        self._secret, self._nonce = secret, nonce
        self._aggregator_nonce: bytes | None = None  # the aggregator's nonce
        self.greeting = Greeting(PROTOCOL_VERSION, nonce, secret.team)

    def answer(self, message: ControlMessage) -> Proof | None:
        """The answer to a message; None once the aggregator has proved itself. Raises ProtocolError."""
        if isinstance(message, Challenge) and self._aggregator_nonce is None:
            self._aggregator_nonce = message.nonce
            return Proof(self._secret.proof("worker", self._nonce, self._aggregator_nonce))
        if not isinstance(message, Proof) or self._aggregator_nonce is None:
            raise ProtocolError(f"answered the greeting with {type(message).__name__}, without proof of the secret")
        if not self._secret.proves(message.proof, "aggregator", self._nonce, self._aggregator_nonce):
            raise ProtocolError(f"does not know the secret that is given here: give both the same {GIVE_SECRET}")
        return None
