"""Bugs of the admission to jobs."""

from __future__ import annotations

from .base import Mutation

_ADMISSION = "omnireduce.protocol.joining.admission"
_CHECKS = "omnireduce.protocol.joining.checks"
_PENDING_JOB = "omnireduce.protocol.joining.pending_job"
_DOOMED = "omnireduce.protocol.joining.failed_launches"
_INTAKE = "omnireduce.protocol.joining.intake"
_LIMITS = "omnireduce.protocol.joining.limits"
_ROOM = "omnireduce.protocol.joining.admission"

MUTATIONS = (
    Mutation(
        "a rank joins a running job twice",
        "omnireduce.protocol.joining.admission",
        "a second process takes part as a rank that is there",
        '            return rank_taken_text(self.ranks[hello.rank]) if hello.rank in self.ranks else ""\n',
        '            return ""\n',
    ),
    Mutation(
        "a rank joins a pending_job job twice",
        _ADMISSION,
        "the second process takes the place of the first, which waits for ever",
        "        if hello.rank in pending_job.waiting_ranks and hello.rank not in displaced:\n",
        "        if hello.rank < 0:\n",
    ),
    Mutation(
        "world sizes are not compared",
        _CHECKS,
        "ranks of jobs of different size get together",
        '    "world_size": "start all',
        '    "version": "start all',
    ),
    Mutation(
        "orders of shards are not compared",
        _CHECKS,
        "two ranks send the same blocks to different shards",
        '    "shard": _SAME_LIST,\n',
        "",
        within=2000,
    ),
    Mutation(
        "settings are not compared",
        _CHECKS,
        "ranks deal blocks to shards in different ways, or have slots of other sizes",
        'for name in ("urgent_bytes", "slots", "slot_bytes", "stripe_blocks", "state_bytes")',
        "for name in ()",
        within=2000,
    ),
    Mutation(
        "hellos are not checked",
        _ADMISSION,
        "who says what cannot be is admitted",
        " or malformed(hello) or self._limits.exceeded_alone(",
        " or self._limits.exceeded_alone(",
    ),
    Mutation(
        "versions are not checked",
        _ADMISSION,
        "a worker of another version is admitted",
        "temporary = other_version(hello.version) or malformed",
        "temporary = malformed",
        within=2000,
    ),
    Mutation(
        "a pending job waits for ever",
        _ADMISSION,
        "those whose peers never come are kept",
        "not pending_job.is_held_back and now >= self._ends_at(pending_job):\n",
        "not pending_job.is_held_back and now >= self._ends_at(pending_job) + 1e9:\n",
    ),
    Mutation(
        "a launch that cannot start is waited for",
        _ADMISSION,
        "ranks wait their whole time for one that was refused for good",
        "        if fails_launch(pending_job, hello, wrong, self._limits.exceeded_alone(hello)):\n",
        "        if False:\n",
        test="tests/simulator/test_scenarios.py::"
        "test_nobody_waits_for_a_rank_of_the_same_launch_that_was_refused_for_good",
    ),
    Mutation(
        "anybody ends a pending_job",
        _DOOMED,
        "a rank of another job of this name, or one that is started again by hand, ends the job",
        "    if is_elastic or not (hello.launch or is_group) or not is_missing:\n",
        "    if is_elastic or not is_missing:\n",
        test="tests/protocol/test_failed_launches.py::test_without_a_launch_a_rank_may_come_again_with_other_settings",
    ),
    Mutation(
        "a rank that went still counts",
        _PENDING_JOB,
        "a job begins with a rank that is gone",
        "        waiting_rank = self.waiting_ranks.pop(rank)\n",
        "        waiting_rank = self.waiting_ranks[rank]\n",
    ),
    Mutation(
        "a job of nobody is kept",
        _ADMISSION,
        "what the first rank said binds those who come after it went",
        "            if not pending_job.waiting_ranks:\n                self._close(formation_key)\n",
        "            if not pending_job.waiting_ranks:\n                pass\n",
        within=2000,
    ),
    Mutation(
        "who left is still there",
        _ADMISSION,
        "a rank cannot join again while others still leave",
        "            self._running[generation].ranks.pop(rank, None)\n",
        "            self._running[generation].ranks.get(rank)\n",
    ),
    Mutation(
        "a job that ended is still there",
        _ADMISSION,
        "its ranks can never join again",
        "job = self._running.pop(generation, None)\n",
        "job = self._running.get(generation)\n",
    ),
    Mutation(
        "too many jobs",
        _ROOM,
        "a shard serves more jobs than it may",
        "jobs = gather + [job.spec for number, job in self._running.items() if number != leaving]",
        "jobs = gather",
    ),
    Mutation(
        "jobs of any size",
        _LIMITS,
        "a job may ask for more memory than it may have",
        "        if needed_bytes > self.max_job_bytes:\n",
        "        if needed_bytes < 0:\n",
        within=2000,
    ),
    Mutation(
        "generations have one number",
        _ADMISSION,
        "two jobs take each other's place",
        "self._next_generation, self._next_generation + 1\n",
        "self._next_generation, self._next_generation\n",
    ),
    Mutation(
        "ranks in the order of their arrival",
        _PENDING_JOB,
        "a rank is taken for another",
        "for rank in sorted(order[: self.spec.world_size])]",
        "for rank in list(self.waiting_ranks)[: self.spec.world_size]]",
    ),
    Mutation(
        "one that waits is left out",
        _PENDING_JOB,
        "a survivor that came in time waits until it has no time left",
        "key=lambda rank: (-self.waiting_ranks[rank].claim, rank))\n",
        "key=lambda rank: (-self.waiting_ranks[rank].claim, rank))\n"
        "        order = order[: len(order) - (len(order) > self.spec.min_ranks > 0)]\n",
        fault="crash",
    ),
    Mutation(
        "a shard that stops admits",
        _INTAKE,
        "a shard that stops takes new jobs",
        '        if self.state == "closed":\n',
        "        if False:\n",
        within=2000,
    ),
    Mutation(
        "a shard that stops forgets who waits",
        _ADMISSION,
        "those who wait for their peers are not told that the shard stops",
        "            yield from self._disband(formation_key, SHUTTING_DOWN, temporary=True)\n",
        "            self._close(formation_key)\n",
        within=2000,
    ),
    Mutation(
        "formations meet",
        _PENDING_JOB,
        "who gave up one attempt spoils the next",
        "        return cls(hello.job, hello.launch, hello.formation)\n",
        "        return cls(hello.job, hello.launch, 0)\n",
        test="tests/protocol/test_elastic_survivors.py::test_other_shards_gather_by_formation",
    ),
    Mutation(
        "launches meet",
        _PENDING_JOB,
        "two launches of one name sum each other's tensors",
        "        return cls(hello.job, hello.launch, hello.formation)\n",
        '        return cls(hello.job, "", hello.formation)\n',
        within=2000,
    ),
    Mutation(
        "survivors are believed",
        _ADMISSION,
        "a stranger ends a job that is well",
        "        is_member = has_ticket and hello.survived == self._running[generation].formation\n",
        "        is_member = True\n",
        within=4000,
    ),
    Mutation(
        "survivors are unknown",
        _ADMISSION,
        "a rank that is stopped holds the others up for ever",
        "        is_member = has_ticket and hello.survived == self._running[generation].formation\n",
        "        is_member = False\n",
        fault="link loss",
    ),
    Mutation(
        "survivors wait for all",
        _PENDING_JOB,
        "a job does not go on without a rank that died",
        "        ready = (self.has_survivors and enough) or (self.is_full and not self.is_held_back)\n",
        "        ready = self.is_full and not self.is_held_back\n",
        fault="crash",
    ),
    Mutation(
        "newcomers end a job",
        _PENDING_JOB,
        "a worker that is started again ends the job that is well",
        "        return self._claims[Claim.SURVIVOR] + self._claims[Claim.CLAIMANT] > 0\n",
        "        return True\n",
        within=2000,
    ),
    Mutation(
        "survivors stay survivors",
        _PENDING_JOB,
        "those for whom a smaller job has no place end it again and again",
        "        self._make_newcomers()\n        self.uninformed.clear()\n",
        "        self.uninformed.clear()\n",
        test="tests/protocol/test_elastic_admission.py::test_survivors_who_find_no_place_are_newcomers_to_the_others",
    ),
    Mutation(
        "who makes way may not come again",
        _ADMISSION,
        "a worker that was in the job gives up, because a shard could not know it",
        "Refused(wrong, temporary=others_claim is Claim.CLAIMANT)",
        "Refused(wrong)",
        test="tests/protocol/test_elastic_survivors.py::"
        "test_who_makes_way_for_a_survivor_and_says_that_it_was_in_the_job_may_come_again",
    ),
    Mutation(
        "survivors come before the checks",
        _ADMISSION,
        "a survivor that cannot join puts others out",
        "            wrong, temporary = self._objection(hello, formation_key, claim, terms, displaced)\n",
        "            yield from self._displace_ranks(hello, formation_key, claim, displaced, now)\n"
        "            displaced = {}\n"
        "            wrong, temporary = self._objection(hello, formation_key, claim, terms, displaced)\n",
        test="tests/protocol/test_elastic_survivors.py::"
        "test_a_survivor_that_disagrees_with_another_one_puts_nobody_out",
    ),
    Mutation(
        "any job makes room for a formation",
        _CHECKS,
        "an elastic job goes beyond the limits in the room of somebody else's",
        "    return hello.team, hello.job, hello.launch, hello.min_ranks > 0, hello.formation > 0\n",
        '    return "", hello.job, hello.launch, hello.min_ranks > 0, True\n',
        test="tests/protocol/test_elastic_survivors.py::test_nobody_takes_the_room_of_a_job_that_is_not_his",
    ),
    Mutation(
        "who comes and goes is news",
        "omnireduce.protocol.joining.admission",
        "a stranger makes a message to every rank of a job with each of his hellos",
        "min((self._announced[generation][1] + NEWS_S for generation in self._deserted), default=None)",
        "0.0 if self._deserted else None",
        test="tests/protocol/test_elastic_admission.py::test_a_newcomer_that_gives_up_is_taken_back",
    ),
    Mutation(
        "newcomers who have gone still wait",
        "omnireduce.protocol.joining.admission",
        "a job is formed anew for nobody",
        "            self._deserted.add(generation)\n",
        "            pass\n",
        test="tests/protocol/test_elastic_admission.py::test_a_newcomer_that_gives_up_is_taken_back",
    ),
)
