"""Bugs of relays, and of the aggregators above them."""

from __future__ import annotations

from .base import Mutation

_OF_RELAYS = 3 * 10**12  # seeds, as `draw` draws them
_RELAY = "omnireduce.protocol.relay"
_ADMISSION = "omnireduce.runtime.shard.relay_admission"
_HOSTS = "omnireduce.protocol.host.local_ranks"
_SENDERS = "omnireduce.protocol.shard"
_TESTS = "tests/runtime/test_relaying.py::"
_MACHINE_TESTS = "tests/protocol/test_relay.py::"

MUTATIONS = (
    Mutation(
        "a relay divides a mean",
        _RELAY,
        "a mean is divided on each level",
        "divisor=1, **options)",
        "**options)",
        first=_OF_RELAYS,
    ),
    Mutation(
        "results above relays are marked",
        _SENDERS,
        "ranks take a block of theirs for the sum of their relay",
        "readers is None",
        "True",
        first=_OF_RELAYS,
    ),
    Mutation(
        "a relay gives credit at the first reader",
        _RELAY,
        "a result is overwritten that other members still read",
        "        elif self._down_slots.release(peer, slot):\n",
        "        elif self._down_slots.release(peer, slot) or self._down_slots._readers[slot]:\n",
        first=_OF_RELAYS,
    ),
    Mutation(
        "a relay announces each of its messages",
        _RELAY,
        "the upstream takes a second message for another collective",
        'self._awaited[-1].sent, self._extra = current.sealed, b""',
        "self._awaited[-1].sent = current.sealed",
        first=_OF_RELAYS,
    ),
    Mutation(
        "a relay sums everything",
        _RELAY,
        "a sum of float16 is rounded on each level, and may be infinite",
        "not self._descriptor.summed_by_host",
        "False",
        first=_OF_RELAYS,
    ),
    Mutation(
        "a passed message is given back at once",
        _RELAY,
        "a member overwrites what is still on its way up",
        "            yield Send((self._member_count + rank,), slot, nbytes)\n",
        "            yield from (Send((self._member_count + rank,), slot, nbytes), ReturnCredit(rank, slot))\n",
        first=_OF_RELAYS,
    ),
    Mutation(
        "a relay keeps a death to itself",
        _RELAY,
        "ranks behind other relays hear late, or wrongly, who is gone",
        "                for member in range(self._member_count)\n                if member not in self._departed\n",
        "                for member in ()\n",
        first=_OF_RELAYS,
    ),
    Mutation(
        "a relay waits for the first reader only",
        _RELAY,
        "who does not read its results is not named",
        "        if not self._down_slots.free:  # members have not read the last results\n",
        "        if False:\n",
        test="tests/protocol/test_relay.py::test_a_relay_below_says_who_has_not_read",
    ),
    Mutation(
        "a relay does not hear relays below",
        _RELAY,
        "the first rank of a relay below is blamed for a rank behind it",
        "self._awaited_by(member) or [member]",
        "[member]",
        test=_MACHINE_TESTS + "test_a_relay_below_says_whom_it_waits_for",
    ),
    Mutation(
        "who has left and breaks a rule is waited for",
        _RELAY,
        "a shard turns and turns for a connection that is over",
        "            yield from self._confirm(peer)\n        else:\n            yield from super().violated",
        "            pass\n        else:\n            yield from super().violated",
        first=_OF_RELAYS + 10372,
    ),
    Mutation(
        "a relay begins with whoever is there",
        _ADMISSION,
        "a relay sends a sum that lacks a rank",
        "        if self._welcome[uplink.formation_key, welcome.generation] < welcome.relayed:\n            return\n",
        "",
        first=_OF_RELAYS,
    ),
    Mutation(
        "a host may be behind two relays",
        _ADMISSION,
        "a relay waits for the delegate of a host that comes through another one",
        "hello.memory.encode(), key=self._key, digest_size=16",
        "hello.memory.encode(), digest_size=16",
        first=_OF_RELAYS,
    ),
    Mutation(
        "a welcome is counted for ever",
        _ADMISSION,
        "a job begins without a rank that has gone",
        "            self._welcome[key_and_generation] -= 1\n",
        "            pass\n",
        first=_OF_RELAYS,
    ),
    Mutation(
        "a worker that goes keeps its uplink",
        _ADMISSION,
        "the upstream counts on a worker that is gone",
        "            self._hang_up(uplink, cause or",
        "            (uplink, cause or",
        first=_OF_RELAYS,
    ),
    Mutation(
        "a relay is told twice",
        _HOSTS,
        "every rank of a relay gets results that go to all of its members",
        "        if not member.relay or first.setdefault(member.relay, index) == index\n",
        "",
        first=_OF_RELAYS,
    ),
    Mutation(
        "relays may be a circle",
        _ADMISSION,
        "a hello goes round until there is no descriptor left",
        "len(hello.relays) >= MAX_RELAYS",
        "False",
        test=_TESTS + "test_a_circle_of_relays_has_an_end",
    ),
)
