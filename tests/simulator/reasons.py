"""The errors that may come of each fault. Nobody expects an error that stands in no row."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from omnireduce.errors import AbortedError, CollectiveTimeoutError, OmniReduceError, RefusedError, TransportError

BY_ITSELF = frozenset(  # ends no job
    {"worker stall", "shard stall", "slow reader", "slow shard", "stranger", "foreign survivor", "second launch"}
)
TIME = "time"  # stalls, jumps and slow readers that together take longer than something may take
DOWN = "down"  # nobody listens for longer than a worker may take to join
SILENCE = "silence"  # nobody notices that a connection is lost for nearly as long as a collective may take
UNREACHED = "cannot reach"
NOT_ADMITTED = "before this worker was admitted"
DIFFERENT = "submitted different collectives"
NOT_LEFT = "had not left when the others"
CROWD = "crowd"  # not all jobs are allowed at once
ANY = "any"  # any fault that ends a job

_ABSENT = ("foreign survivor", "other secret", "late", "duplicate", "world size", "misconfigured", CROWD, TIME, ANY)

ABORTED: Mapping[str, tuple[str, ...]] = {  # by patterns
    r"^aggregator .*: connection closed": ("shard crash", "garbage", "tampering", "lying shard", TIME),
    r"^rank .*: connection closed": (*_ABSENT, "shard stall", "shard freeze", "slow shard"),
    r"connection broken": ("host death", "link loss"),
    r"shutting down": ("drain",),
    r"had shut down when": ("early leave",),
    r"shut down with": ("early leave",),
    "refused collective": ("refusal", "mismatch", "tampering"),
    DIFFERENT: ("mismatch", "tampering"),  # a false number: a rank seems to have skipped some
    NOT_LEFT: (
        "freeze",
        "link loss",
        "worker stall",
        "shard stall",
        "shard freeze",
        "slow reader",
        "slow shard",
        TIME,
    ),
    r"protocol error": ("garbage", "tampering", "lying shard"),
}
TIMED_OUT: Mapping[str, tuple[str, ...]] = {"not complete after": ("freeze", "shard freeze", SILENCE, TIME)}
REFUSED: Mapping[str, tuple[str, ...]] = {
    # a shard that stands still has not heard the last goodbye when a rank comes back
    "is already in job": ("duplicate", "foreign survivor", "shard stall", "shard freeze", "slow shard", ANY),
    "differs from": ("world size", "misconfigured", "foreign survivor"),
    "an elastic job of": ("world size",),  # it has fewer ranks than the minimum that it gives
    "is elastic: give every worker": ("foreign survivor",),  # it comes first, and there is no secret
    "protocol version": ("misconfigured",),
    "expected": ("misconfigured", "garbage"),
    "does not exist": ("misconfigured",),
    # a shard that stands still counts attempts that were given up
    "aggregator.max_": ("misconfigured", CROWD, "stranger", "shard freeze"),
    "malformed control message": ("garbage",),
    "the aggregator is shutting down": ("drain",),
    "the aggregator is draining": ("drain",),
    "still waiting for": _ABSENT,
    "no Hello within": ("freeze", "shard freeze", TIME),
    "the same security.secret_file": ("other secret",),
    # an attempt late in the time to join has little left of it
    "no proof of the secret came": (
        "shard stall",
        "shard freeze",
        "slow shard",
        "clock jump",
        "worker stall",
        DOWN,
        TIME,
    ),
    "have no place": (ANY,),
    "has no place for more": (ANY, "foreign survivor"),
    "was still waiting for": _ABSENT,
    # errors of a relay
    "before it had admitted this worker": ("shard crash", "drain", "link loss", "garbage", TIME),
    "could not be reached": (DOWN, "shard freeze", "slow shard", "link loss", TIME),
}
UNREACHABLE: Mapping[str, tuple[str, ...]] = {
    NOT_ADMITTED: ("shard crash", "drain", "link loss", "garbage", TIME),
    UNREACHED: (DOWN, "shard freeze", "slow shard", "link loss", TIME),
}


def plausible(error: OmniReduceError, struck: Collection[str]) -> bool:
    """Whether one of the faults that `struck` (kinds, TIME or CROWD) explains the kind of `error` and its reason."""
    tables = {
        CollectiveTimeoutError: TIMED_OUT, AbortedError: ABORTED, RefusedError: REFUSED, TransportError: UNREACHABLE,
    }  # fmt: skip
    causes = set(struck) | ({ANY} if set(struck) - BY_ITSELF else set())
    rows = tables.get(type(error), {}).items()
    return any(re.search(pattern, str(error)) and causes.intersection(kinds) for pattern, kinds in rows)
