"""Bugs of the admission to jobs."""

from __future__ import annotations

from .base import Mutation

_MEMBERSHIP = "omnireduce.protocol.membership"
_CHECKS = "omnireduce.protocol.hello_checks"
_GATHERING = "omnireduce.protocol.gathering"

MUTATIONS = (
    Mutation(
        "a rank joins a running job twice",
        _MEMBERSHIP,
        "a second process takes part as a rank that is there",
        '        return taken(running.ranks[hello.rank]) if hello.rank in running.ranks else ""\n',
        '        return ""\n',
    ),
    Mutation(
        "a rank joins a gathering job twice",
        _MEMBERSHIP,
        "the second process takes the place of the first, which waits for ever",
        "        if hello.rank in gathering.members:\n",
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
        'for name in ("slots", "slot_bytes", "stripe_blocks", "whole_bytes")',
        "for name in ()",
        within=2000,
    ),
    Mutation(
        "hellos are not checked",
        _MEMBERSHIP,
        "who says what cannot be is admitted",
        " or malformed(hello) or self._over_limit",
        " or self._over_limit",
    ),
    Mutation(
        "versions are not checked",
        _MEMBERSHIP,
        "a worker of another version is admitted",
        "            other_version(hello.version) or malformed",
        "            malformed",
        within=2000,
    ),
    Mutation(
        "gathering takes for ever",
        _MEMBERSHIP,
        "those whose peers never come are kept",
        "not gathering.held and now - gathering.since >= limit_s:\n",
        "not gathering.held and now - gathering.since >= limit_s + 1e9:\n",
    ),
    Mutation(
        "a rank that went still counts",
        _GATHERING,
        "a job begins with a rank that is gone",
        "        _, hello = self.members.pop(rank)\n",
        "        _, hello = self.members[rank]\n",
    ),
    Mutation(
        "a job of nobody is kept",
        _MEMBERSHIP,
        "what the first rank said binds those who come after it went",
        "            if not gathering.members:\n                del self._gathering[place]\n",
        "            if not gathering.members:\n                pass\n",
        within=2000,
    ),
    Mutation(
        "who left is still there",
        _MEMBERSHIP,
        "a rank cannot join again while others still leave",
        "            self._running[generation].ranks.pop(rank, None)\n",
        "            self._running[generation].ranks.get(rank)\n",
    ),
    Mutation(
        "a job that ended is still there",
        _MEMBERSHIP,
        "its ranks can never join again",
        "over = self._running.pop(generation, None)\n",
        "over = self._running.get(generation)\n",
    ),
    Mutation(
        "too many jobs",
        _MEMBERSHIP,
        "a shard serves more jobs than it may",
        "len(self._gathering) + running >= limits.max_jobs:",
        "len(self._gathering) >= limits.max_jobs:",
    ),
    Mutation(
        "jobs of any size",
        _MEMBERSHIP,
        "a job may ask for more memory than it may have",
        "        if need > limits.max_job_bytes:\n",
        "        if need < 0:\n",
        within=2000,
    ),
    Mutation(
        "generations have one number",
        _MEMBERSHIP,
        "two jobs take each other's place",
        "self._next_generation, self._next_generation + 1\n",
        "self._next_generation, self._next_generation\n",
    ),
    Mutation(
        "ranks in the order of their arrival",
        _GATHERING,
        "a rank is taken for another",
        "for rank in sorted(order[: self.spec.world_size])]",
        "for rank in list(self.members)[: self.spec.world_size]]",
    ),
    Mutation(
        "a draining shard admits",
        _MEMBERSHIP,
        "a shard that stops takes new jobs",
        "        if self.draining:\n",
        "        if self.draining and not self._limits:\n",
        within=2000,
    ),
    Mutation(
        "a draining shard forgets who waits",
        _MEMBERSHIP,
        "those who wait for their peers are not told that the shard stops",
        '                yield Answer(key, Refused("the aggregator is shutting down", temporary=True))\n',
        "                yield from ()\n",
        within=2000,
    ),
)
