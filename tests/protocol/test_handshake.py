"""The proof of the secret, as machines: both sides, and all that a stranger may try."""

from __future__ import annotations

import hashlib
import hmac
import itertools

import pytest

from omnireduce.errors import ProtocolError
from omnireduce.protocol.handshake import Candidate, Gate
from omnireduce.secret import Secret
from omnireduce.teams import Teams
from omnireduce.wire import (
    PROTOCOL_VERSION,
    Challenge,
    ControlMessage,
    Goodbye,
    Greeting,
    Hello,
    Leave,
    Pending,
    Proof,
    Welcome,
)

SECRET, OTHER = Secret(b"what members know"), Secret(b"what others guess")
TEAMS = Teams({"": [SECRET]})
W, A, FRESH = bytes(32), b"a" * 32, b"f" * 32
HELLO = Hello(PROTOCOL_VERSION, "job", 0, 1, 0, 1, 2, 65536, "host", 7, 64)


def test_both_prove_it_and_then_the_worker_may_say_hello() -> None:
    gate, candidate = Gate(TEAMS, A), Candidate(SECRET, W)
    challenge = gate.told(candidate.greeting)
    assert challenge == Challenge(A)
    mine = candidate.told(challenge)
    assert isinstance(mine, Proof)
    theirs = gate.told(mine)
    assert isinstance(theirs, Proof)
    assert candidate.told(theirs) is None
    assert gate.told(HELLO) is None


def test_a_proof_is_an_hmac_of_role_and_nonces() -> None:
    """The bytes of the protocol: whoever changes them raises PROTOCOL_VERSION."""
    said = b"omnireduce handshake 2\0worker\0" + W + A
    assert SECRET.proof("worker", W, A) == hmac.new(b"what members know", said, hashlib.sha256).digest()


def test_no_two_proofs_are_alike() -> None:
    roles, nonces = ("worker", "aggregator"), (W, A, FRESH)
    proofs = [
        secret.proof(role, one, two)  # type: ignore[arg-type]
        for secret, role, one, two in itertools.product((SECRET, OTHER), roles, nonces, nonces)
    ]
    assert len(set(proofs)) == len(proofs)


def opened(teams: Teams | None = TEAMS) -> Gate:
    """A gate that waits for the worker's proof."""
    gate = Gate(teams, A)
    gate.told(Greeting(PROTOCOL_VERSION, W))
    return gate


FALSE_PROOFS = {
    "of another secret": OTHER.proof("worker", W, A),
    "of an earlier connection": SECRET.proof("worker", W, FRESH),
    "of the other role": SECRET.proof("aggregator", W, A),
    "with the nonces exchanged": SECRET.proof("worker", A, W),
    "of nothing": bytes(32),
}


@pytest.mark.parametrize("what", FALSE_PROOFS)
def test_a_worker_with_a_false_proof_stays_out(what: str) -> None:
    gate = opened()
    with pytest.raises(ProtocolError, match="another secret than the aggregator"):
        gate.told(Proof(FALSE_PROOFS[what]))
    with pytest.raises(ProtocolError, match="wants proof of a shared secret"):
        gate.told(HELLO)


@pytest.mark.parametrize("message", [HELLO, Leave(), Goodbye(), Challenge(A), Proof(SECRET.proof("worker", W, A))])
def test_before_the_greeting_only_the_greeting_may_come(message: ControlMessage) -> None:
    with pytest.raises(
        ProtocolError, match=r"wants proof of a shared secret: give the worker the same security\.secret"
    ):
        Gate(TEAMS, A).told(message)


@pytest.mark.parametrize("message", [HELLO, Leave(), Greeting(PROTOCOL_VERSION, FRESH), Challenge(A)])
def test_before_the_proof_only_the_proof_may_come(message: ControlMessage) -> None:
    with pytest.raises(ProtocolError, match="wants proof of a shared secret"):
        opened().told(message)


def test_a_gate_is_opened_once() -> None:
    """Further messages of the handshake are left to who deals with a Hello; they are none."""
    gate, proof = opened(), Proof(SECRET.proof("worker", W, A))
    gate.told(proof)
    assert gate.told(proof) is None
    assert gate.told(Greeting(PROTOCOL_VERSION, FRESH)) is None


def test_only_one_of_both_has_a_secret() -> None:
    assert Gate(None, A).told(HELLO) is None
    assert Gate(None, A).told(Proof(bytes(32))) is None  # no handshake, so not its business
    with pytest.raises(ProtocolError, match=r"the worker has a secret, the aggregator has none: give it the same"):
        opened(None)


def test_an_objection_comes_first() -> None:
    for teams in (None, TEAMS):
        for message in (HELLO, Greeting(PROTOCOL_VERSION, W)):
            with pytest.raises(ProtocolError, match="not you"):
                Gate(teams, A, "not you").told(message)


@pytest.mark.parametrize("teams", [None, TEAMS])
def test_a_greeting_of_another_version(teams: Teams | None) -> None:
    with pytest.raises(ProtocolError, match=f"protocol version 77, expected {PROTOCOL_VERSION}"):
        Gate(teams, A).told(Greeting(77, W))


FALSE_ANSWERS: dict[str, tuple[list[ControlMessage], str]] = {
    "a welcome": ([Welcome(1)], "answered the greeting with Welcome, without proof"),
    "a welcome after the challenge": ([Challenge(A), Welcome(1)], "answered the greeting with Welcome"),
    "pending": ([Pending([1], 1)], "answered the greeting with Pending"),
    "a proof without a challenge": ([Proof(SECRET.proof("aggregator", W, A))], "answered the greeting with Proof"),
    "two challenges": ([Challenge(A), Challenge(FRESH)], "answered the greeting with Challenge"),
    "the worker's own proof": ([Challenge(A), Proof(SECRET.proof("worker", W, A))], "does not know the secret"),
    "an earlier proof": ([Challenge(A), Proof(SECRET.proof("aggregator", FRESH, A))], "does not know the secret"),
    "another secret": ([Challenge(A), Proof(OTHER.proof("aggregator", W, A))], "does not know the secret"),
}


@pytest.mark.parametrize("what", FALSE_ANSWERS)
def test_a_worker_does_not_believe_a_false_aggregator(what: str) -> None:
    messages, expected = FALSE_ANSWERS[what]
    candidate = Candidate(SECRET, W)
    for message in messages[:-1]:
        candidate.told(message)
    with pytest.raises(ProtocolError, match=expected):
        candidate.told(messages[-1])
