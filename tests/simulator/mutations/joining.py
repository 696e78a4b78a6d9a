"""Bugs of the way into a job, on the worker's side and at the shard's gate."""

from __future__ import annotations

from .base import Mutation

_JOINING = "omnireduce.protocol.joining.worker_joining"
_HANDSHAKE = "omnireduce.protocol.joining.authentication"
_TEAMS = "omnireduce.support.teams"

MUTATIONS = (
    Mutation(
        "bad news while joining is nonsense",
        _JOINING,
        "a rank that still joins does not learn who failed",
        "        elif isinstance(message, Aborted):\n"
        "            yield from self.failed(error_of(message.cause), now, message.cause)\n",
        "",
        within=2000,
    ),
    Mutation(
        "bad news behind the last welcome is lost",
        _JOINING,
        "a rank believes in a job that is over",
        "            return  # the message belongs to an attempt that has ended\n        address",
        "            return  # the message belongs to an attempt that has ended\n"
        "        if self._has_joined:\n            return\n"
        "        address",
        within=6000,
    ),
    Mutation(
        "an aggregator that is down is not tried again",
        _JOINING,
        "a worker waits until its time is over for one that is up again",
        "        self._retry_at = min(now + RETRY_S, self._attempt_deadline)\n",
        "        self._retry_at = self._attempt_deadline\n",
        within=2000,
    ),
    Mutation(
        "joining has no end",
        _JOINING,
        "a worker whose peers never come waits for ever",
        "        elif now >= self._attempt_deadline:\n",
        "        elif now >= self._attempt_deadline + 1e9:\n",
    ),
    Mutation(
        "every failure is final",
        _JOINING,
        "an elastic worker gives up when an attempt fails",
        "        if self._is_final(error) or now + self._pause_s >= self._join_deadline:\n",
        "        if True:\n",
        test="tests/protocol/test_joining.py::"
        "test_who_has_a_seat_and_does_not_come_along_tries_again_with_its_new_ticket",
    ),
    Mutation(
        "no failure is final",
        _JOINING,
        "a worker that is refused for good asks again and again",
        "        if not self._is_elastic or (isinstance(error, RefusedError) and not error.temporary):\n",
        "        if False:\n",
        test="tests/protocol/test_joining.py::test_what_is_final",
    ),
    Mutation(
        "connections of a failed attempt stay",
        _JOINING,
        "a worker is in its own way at the next attempt",
        "        yield HangUp()\n        self._connections.clear()\n",
        "        self._connections.clear()\n",
        within=4000,
    ),
    Mutation(
        "the assignment is forgotten",
        _JOINING,
        "workers go to the other shards with the ranks that they were launched with",
        "            hello, rank=assignment.rank, world_size=assignment.world_size, formation=assignment.formation,\n",
        "            hello, formation=assignment.formation,\n",
        test="tests/protocol/test_joining.py::test_a_seat_is_taken_to_the_other_aggregators",
    ),
    Mutation(
        "the gate is open",
        _HANDSHAKE,
        "who knows no secret joins",
        "        if not self._open:\n            raise ProtocolError(",
        "        if False:\n            raise ProtocolError(",
        within=2000,
    ),
    Mutation(
        "any proof is right",
        _TEAMS,
        "who knows another secret joins",
        '            if secret.proves(proof, "worker", worker_nonce, aggregator_nonce):\n',
        "            if proof:\n",
        within=2000,
    ),
    Mutation(
        "a proof that is late is final",
        _JOINING,
        "a survivor gives up because an aggregator stood still, though it has time left",
        ' {period}", temporary=True\n',
        ' {period}", temporary=False\n',
        test="tests/protocol/test_joining.py::test_a_survivor_waits_for_the_proof_of_an_aggregator_that_was_stopped",
    ),
    Mutation(
        "a shard that stood still is not waited for",
        "omnireduce.runtime.shard.pending_connections",
        "a survivor gives up because an aggregator stood still, though it has time left",
        'no Hello within {unidentified.limit_s:g} s", temporary=True)',
        'no Hello within {unidentified.limit_s:g} s")',
        test="tests/simulator/test_scenarios.py::test_who_says_no_hello_in_time_may_come_again",
    ),
    Mutation(
        "a connection that is lost before the hello ends it all",
        _JOINING,
        "a worker gives up because of one lost connection, though it has time left",
        "        if not connection.request.has_said_hello and not for_good:\n",
        "        if False:\n",
        test="tests/protocol/test_joining.py::test_a_connection_that_is_lost_before_the_hello_is_made_again",
    ),
    Mutation(
        "a connection that was lost stays",
        _JOINING,
        "what the next connection says is taken for what another one says",
        "            yield HangUp(shard)\n            del",
        "            del",
        test="tests/protocol/test_joining.py::test_a_connection_that_is_lost_before_the_hello_is_made_again",
    ),
    Mutation(
        "who cannot begin hangs up without a word",
        _JOINING,
        "a rank that lost one aggregator while it joined is blamed by the others, not that aggregator",
        "                yield SendControl(shard, leave)\n",
        "                pass\n",
        test="tests/protocol/test_joining.py::test_an_aggregator_that_begins_the_job_hears_which_other_one_was_lost",
    ),
)
