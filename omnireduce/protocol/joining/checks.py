"""Checks of a Hello, by itself and against the Hello of another worker of the same job."""

from __future__ import annotations

import re
from collections.abc import Iterable

from omnireduce.core.names import JOB_ALLOWED, JOB_PATTERN
from omnireduce.core.wire.control import Hello
from omnireduce.core.wire.safe_text import SHOWN
from omnireduce.protocol.joining.pending_job import Claim, PendingJob, member_name

HOST_CHARACTERS = 255
MAX_SLOTS = 64
MAX_SHARDS = 4096
MAX_STRIPE_BLOCKS, MAX_WHOLE_BYTES = 1 << 20, 1 << 30
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.1, 86400
MAX_SETTLE_S = 3600
MIN_SLOT_BYTES, MAX_SLOT_BYTES, PAGE = 65536, 64 << 20, 4096

_SAME_LIST = "list cluster.aggregators in the same order on every worker"
ADVICE = {  # by field: advice to ranks whose hellos disagree about it
    "min_ranks": "give every worker the same elastic.enabled and elastic.min_ranks",
    "last_call_s": "give every worker the same elastic.last_call_s",
    "world_size": "start all ranks of a job with the same size, and different jobs under different names (cluster.job)",
    "shards": _SAME_LIST,
    "shard": _SAME_LIST,
    **{
        name: f"give every worker the same protocol.{name}"
        for name in ("urgent_bytes", "slots", "slot_bytes", "stripe_blocks", "state_bytes")
    },
}


# the fields of a hello that stay the same when a job is formed anew
SHAPE = ("shards", "shard", "slots", "slot_bytes", "stripe_blocks", "state_bytes")


def difference(reference: Hello, hello: Hello, names: Iterable[str] = tuple(ADVICE)) -> str:
    """The first difference between two hellos to the same job, as a text; empty if they agree. `reference`: the hello
    of another worker."""
    for name in names:
        ours, theirs = getattr(reference, name), getattr(hello, name)
        if ours != theirs:
            difference_text = f"{name} {theirs} differs from {ours} of {member_name(reference)} in job '{hello.job}'"
            return f"{difference_text}: {ADVICE[name]}"
    return ""


def other_team_text(reference: Hello, hello: Hello) -> str:
    """The text for a worker that wants to join a job of another team; empty when it is of the same team.

    The text tells nothing about the other workers.
    """
    if reference.team == hello.team:
        return ""
    owner_text = f"to team '{hello.team}'" if hello.team else "to workers without a team"
    advice = "choose another cluster.job, or give all workers of the job the same security.team"
    return f"the job '{hello.job}' that is here does not belong {owner_text}: {advice}"


def ranks_to_displace(pending_job: PendingJob, survivor: Hello) -> dict[int, str]:
    """The ranks that a survivor replaces, because they disagree with it or gave its rank; each with the reason."""
    wrong = dict[int, str]()
    for rank, (_, other, claim) in pending_job.waiting_ranks.items():
        if claim is not Claim.SURVIVOR:
            differs = "" if pending_job.has_proven_survivor else difference(survivor, other)
            wrong[rank] = rank_taken_text(survivor) if rank == survivor.rank else differs
    return {rank: text for rank, text in wrong.items() if text}


def rank_taken_text(other: Hello) -> str:
    return f"{member_name(other)} is already in job '{other.job}'; choose another cluster.job"


def job_family(hello: Hello) -> tuple[str, str, str, bool, bool]:
    """A key that all generations of one elastic job have in common. A hello to the first shard has no formation, so
    its key differs from the key on other shards."""
    return hello.team, hello.job, hello.launch, hello.min_ranks > 0, hello.formation > 0


def memory_bytes(hello: Hello) -> int:
    """Bytes of memory of the job on this shard: receive slots for every rank, the results, and states of programs."""
    return (hello.world_size + 1) * hello.slots * hello.slot_bytes + hello.state_bytes


def total_demand(jobs: Iterable[Hello]) -> tuple[int, int]:
    """The ranks and the bytes of memory of these jobs together."""
    demands = [(job.world_size, memory_bytes(job)) for job in jobs]
    return sum(ranks for ranks, _ in demands), sum(nbytes for _, nbytes in demands)


def malformed(hello: Hello) -> str:
    if not re.match(JOB_PATTERN, hello.job):
        return f"job {hello.job[:SHOWN]!r}; expected {JOB_ALLOWED}"
    if hello.launch and not re.match(JOB_PATTERN, hello.launch):
        return f"launch {hello.launch[:SHOWN]!r}; expected nothing, or {JOB_ALLOWED}"
    if len(hello.host) > HOST_CHARACTERS or not hello.host.isprintable():
        return f"host {hello.host[:SHOWN]!r}; expected at most {HOST_CHARACTERS} characters that can be printed"
    if not "".join(hello.relays).isprintable() or "" in hello.relays or bool(hello.relays) != bool(hello.relay):
        return f"relays {str(hello.relays)[:SHOWN]}; expected addresses of characters that can be printed, and a key"
    may_be_beyond = hello.min_ranks or hello.refuses  # a refusal gives the rank in the parent job
    if hello.world_size < 1 or hello.rank < 0 or (hello.rank >= hello.world_size and not may_be_beyond):
        return f"rank {hello.rank} of {hello.world_size} does not exist"
    if not 2 <= hello.slots <= MAX_SLOTS:
        return f"{hello.slots} slots; expected 2 to {MAX_SLOTS}"
    if not MIN_SLOT_BYTES <= hello.slot_bytes <= MAX_SLOT_BYTES or hello.slot_bytes % PAGE:
        expected = f"a multiple of {PAGE} from {MIN_SLOT_BYTES} to {MAX_SLOT_BYTES}"
        return f"slots of {hello.slot_bytes} bytes; expected {expected}"
    if hello.verbs is not None and hello.verbs.address + hello.slots * hello.slot_bytes > 1 << 64:
        return f"slots from address {hello.verbs.address} on; expected an end below 2**64"
    if not MIN_TIMEOUT_S <= hello.timeout_s <= MAX_TIMEOUT_S:
        return f"a time-out of {hello.timeout_s:g} s; expected {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S}"
    return _malformed_shards(hello) or _malformed_elastic(hello) or _malformed_refusal(hello)


def _malformed_refusal(hello: Hello) -> str:
    if not hello.refuses.isprintable():
        return f"a refusal because of {hello.refuses[:SHOWN]!r}; expected characters that can be printed"
    is_first = hello.shard == hello.formation == hello.min_ranks == 0
    if hello.refuses and (hello.parent_rank != hello.rank or hello.compiling or not is_first):
        return (
            "a refusal of a job that is no group; expected the refusal of a group, on shard 0, with the parent's rank"
        )
    return ""


def _malformed_shards(hello: Hello) -> str:
    if not 0 <= hello.shard < hello.shards:
        return f"shard {hello.shard} of {hello.shards} does not exist"
    if hello.shards > MAX_SHARDS:
        return f"{hello.shards} shards; expected at most {MAX_SHARDS}"
    if not 1 <= hello.stripe_blocks <= MAX_STRIPE_BLOCKS:
        return f"stripes of {hello.stripe_blocks} blocks; expected 1 to {MAX_STRIPE_BLOCKS}"
    if not 0 <= hello.whole_bytes <= MAX_WHOLE_BYTES:
        return f"whole tensors of up to {hello.whole_bytes} bytes; expected 0 to {MAX_WHOLE_BYTES}"
    return ""


def _malformed_elastic(hello: Hello) -> str:
    if not 0 <= hello.min_ranks <= hello.world_size:
        return f"an elastic job of {hello.min_ranks} to {hello.world_size} workers"
    if hello.survived and not hello.min_ranks:
        return f"a survivor of formation {hello.survived} in a job that is not elastic"
    if hello.min_ranks and hello.shard:
        return f"an elastic hello on shard {hello.shard}; expected shard 0"
    if hello.formation < 0 or (hello.formation and not hello.shard):
        return f"formation {hello.formation} on shard {hello.shard}; expected none on shard 0, a number on the others"
    if not 0 <= hello.last_call_s <= MAX_SETTLE_S:
        return f"a job that settles after {hello.last_call_s:g} s; expected 0 to {MAX_SETTLE_S}"
    return ""
