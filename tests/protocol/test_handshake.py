"""The proof of the secret, as machines: both sides, and all that a stranger may try."""

from __future__ import annotations

import hashlib
import hmac
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.core.wire.control import (
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
from omnireduce.errors import ProtocolError
from omnireduce.protocol.joining.authentication import Candidate, Gate
from omnireduce.support.config.schema import TeamLimits
from omnireduce.support.secret import Secret
from omnireduce.support.teams import Teams

SECRET, OTHER = Secret(b"what members know"), Secret(b"what others guess")
TEAMS = Teams({"": [SECRET]})
W, A, FRESH = bytes(32), b"a" * 32, b"f" * 32
HELLO = Hello(PROTOCOL_VERSION, "job", 0, 1, 0, 1, 2, 65536, "host", 7, 64)


def test_both_prove_it_and_then_the_worker_may_say_hello() -> None:
    gate, candidate = Gate(TEAMS, A), Candidate(SECRET, W)
    challenge = gate.answer(candidate.greeting)
    assert challenge == Challenge(A)
    mine = candidate.answer(challenge)
    assert isinstance(mine, Proof)
    theirs = gate.answer(mine)
    assert isinstance(theirs, Proof)
    assert candidate.answer(theirs) is None
    assert gate.answer(HELLO) is None


def test_a_proof_is_an_hmac_of_role_and_nonces() -> None:
    """The bytes of the protocol: whoever changes them raises PROTOCOL_VERSION."""
    signed = b"omnireduce handshake 2\0worker\0" + W + A
    assert SECRET.proof("worker", W, A) == hmac.new(b"what members know", signed, hashlib.sha256).digest()


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
    gate.answer(Greeting(PROTOCOL_VERSION, W))
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
        gate.answer(Proof(FALSE_PROOFS[what]))
    with pytest.raises(ProtocolError, match="wants proof of a shared secret"):
        gate.answer(HELLO)


@pytest.mark.parametrize("message", [HELLO, Leave(), Goodbye(), Challenge(A), Proof(SECRET.proof("worker", W, A))])
def test_before_the_greeting_only_the_greeting_may_come(message: ControlMessage) -> None:
    with pytest.raises(
        ProtocolError, match=r"wants proof of a shared secret: give the client the same security\.secret"
    ):
        Gate(TEAMS, A).answer(message)


@pytest.mark.parametrize("message", [HELLO, Leave(), Greeting(PROTOCOL_VERSION, FRESH), Challenge(A)])
def test_before_the_proof_only_the_proof_may_come(message: ControlMessage) -> None:
    with pytest.raises(ProtocolError, match="wants proof of a shared secret"):
        opened().answer(message)


def test_a_gate_is_opened_once() -> None:
    """Further messages of the handshake are left to who deals with a Hello; they are none."""
    gate, proof = opened(), Proof(SECRET.proof("worker", W, A))
    gate.answer(proof)
    assert gate.answer(proof) is None
    assert gate.answer(Greeting(PROTOCOL_VERSION, FRESH)) is None


def test_only_one_of_both_has_a_secret() -> None:
    assert Gate(None, A).answer(HELLO) is None
    assert Gate(None, A).answer(Proof(bytes(32))) is None  # no handshake, so not its business
    with pytest.raises(ProtocolError, match=r"the client has a secret, the aggregator has none: give it the same"):
        opened(None)


def test_an_objection_comes_first() -> None:
    for teams in (None, TEAMS):
        for message in (HELLO, Greeting(PROTOCOL_VERSION, W)):
            with pytest.raises(ProtocolError, match="not you"):
                Gate(teams, A, "not you").answer(message)


@pytest.mark.parametrize("teams", [None, TEAMS])
def test_a_greeting_of_another_version(teams: Teams | None) -> None:
    with pytest.raises(ProtocolError, match=f"protocol version 77, expected {PROTOCOL_VERSION}"):
        Gate(teams, A).answer(Greeting(77, W))


# teams

MINE, THEIRS = Secret(b"what team one knows", "one"), Secret(b"what team two knows", "two")
OLD = Secret(b"what team one knew before", "one")
SEVERAL = Teams(
    {"": [SECRET], "one": [MINE, OLD], "two": [THEIRS]}, {"two": TeamLimits(jobs=("two", "shared.*", "*-of-two"))}
)


def hello_of(job: str) -> Hello:
    return msgspec.structs.replace(HELLO, job=job)


def prove(secret: Secret, teams: Teams = SEVERAL) -> Gate:
    """A gate to which a worker has proved this secret, and it to the worker."""
    gate, candidate = Gate(teams, A), Candidate(secret, W)
    assert candidate.greeting.team == secret.team
    challenge = gate.answer(candidate.greeting)
    assert isinstance(challenge, Challenge)
    proof = candidate.answer(challenge)
    assert isinstance(proof, Proof)
    answer = gate.answer(proof)
    assert answer is not None
    assert candidate.answer(answer) is None
    return gate


@pytest.mark.parametrize("secret", [SECRET, MINE, OLD, THEIRS])
def test_each_team_proves_its_own_secret_and_so_does_the_aggregator(secret: Secret) -> None:
    """The one that the worker has: during a rotation that may be the old one."""
    assert prove(secret).team.name == secret.team


def test_what_a_worker_says_of_its_team_in_a_hello_does_not_count() -> None:
    request = msgspec.structs.replace(HELLO, job="one", team="two")
    gate = prove(MINE)
    assert gate.answer(request) is None
    assert gate.signed(request).team == "one"
    assert Gate(None, A).signed(request).team == ""


ALLOWED = {
    "one": (MINE, ["one", "one.x", "one.two"], ["two", "one2", "onex", "One", "one-x", "x.one", "", "x" * 200]),
    "two": (THEIRS, ["two", "shared.x", "a-of-two"], ["two.x", "shared", "a-of-two2", "one"]),
    "": (SECRET, ["one", "two", "anything"], []),
}


@pytest.mark.parametrize("team", ALLOWED)
def test_a_team_has_job_names_of_its_own(team: str) -> None:
    secret, yes, no = ALLOWED[team]
    gate = prove(secret)
    for job in yes:
        assert gate.answer(hello_of(job)) is None
    for job in no:
        with pytest.raises(
            ProtocolError, match=f"does not belong to team '{team}': set cluster.job to '{team}'"
        ) as caught:
            gate.answer(hello_of(job))
        assert repr(job) in str(caught.value)


def test_a_team_that_does_not_exist_is_refused_like_a_wrong_secret() -> None:
    """In the same words, and with the same work: neither tells a stranger which teams there are."""
    reasons = []
    for team in ("one", "none"):
        gate, candidate = Gate(SEVERAL, A), Candidate(Secret(b"a guess of a stranger", team), W)
        proof = candidate.answer(Challenge(A))
        assert gate.answer(candidate.greeting) == Challenge(A)
        assert isinstance(proof, Proof)
        with pytest.raises(ProtocolError) as caught:
            gate.answer(proof)
        reasons.append(str(caught.value).replace(f"'{team}'", "'…'"))
    assert "has another secret than the aggregator of team '…', or there is no such team: give both" in reasons[0]
    assert reasons[0] == reasons[1]
    work = {name: len(SEVERAL.of(name).secrets) for name in ("", "one", "two", "none", "four")}
    assert len(set(work.values())) == 1
    sizing = {len(secret.team) > 0 for secret in SEVERAL.of("none").secrets}
    assert sizing == {True}  # and what is hashed is as long as for a team that exists


def test_the_secret_of_all_is_no_teams_and_the_other_way_round() -> None:
    for secret, team in ((SECRET, "one"), (MINE, ""), (MINE, "two"), (THEIRS, "one")):
        gate = Gate(SEVERAL, A)
        gate.answer(Greeting(PROTOCOL_VERSION, W, team))
        with pytest.raises(ProtocolError, match="another secret than the aggregator"):
            gate.answer(Proof(secret.proof("worker", W, A)))


def test_a_proof_is_of_one_team_even_if_another_has_the_same_secret() -> None:
    twins = [Secret(b"the same for both", team) for team in ("", "one", "two")]
    assert len({twin.proof("worker", W, A) for twin in twins}) == 3


MESSAGES: list[ControlMessage] = [
    *(Greeting(PROTOCOL_VERSION, nonce, team) for nonce in (W, FRESH) for team in ("", "one", "none")),
    *(Proof(secret.proof("worker", nonce, A)) for secret in (SECRET, MINE, OLD, THEIRS) for nonce in (W, FRESH)),
    *(Proof(secret.proof("aggregator", W, A)) for secret in (SECRET, MINE)),
    *(hello_of(job) for job in ("one", "one.x", "two")),
    *(Challenge(A), Leave(), Goodbye(), Proof(bytes(32))),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.booleans())
def test_whatever_comes_a_hello_needs_the_proof_of_its_team(messages: list[ControlMessage], is_proper: bool) -> None:
    """The model: the first greeting counts; then only the right proof for its nonce and team opens."""
    if is_proper:
        messages = [Greeting(PROTOCOL_VERSION, W, "one"), Proof(OLD.proof("worker", W, A)), *messages]
    gate, greeting, proved = Gate(SEVERAL, A), None, None
    for message in messages:
        expected: object = ProtocolError
        if isinstance(message, Greeting) and greeting is None:
            greeting, expected = message, Challenge(A)
        elif proved is not None:
            wrong = isinstance(message, Hello) and proved.team == "one" and message.job == "two"
            expected = ProtocolError if wrong else None
        elif isinstance(message, Proof) and greeting is not None:
            known = {"": [SECRET], "one": [MINE, OLD]}.get(greeting.team, [])
            fits = [each for each in known if message.proof == each.proof("worker", greeting.nonce, A)]
            if fits:
                proved, expected = fits[0], Proof(fits[0].proof("aggregator", greeting.nonce, A))
        if expected is ProtocolError:
            with pytest.raises(ProtocolError):
                gate.answer(message)
        else:
            assert gate.answer(message) == expected


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
        candidate.answer(message)
    with pytest.raises(ProtocolError, match=expected):
        candidate.answer(messages[-1])
