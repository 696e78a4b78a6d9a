"""Checks that all ranks have begun the same collective. Ranks may also all have refused their call.

A rank that refuses a call takes part with a refusal in place of the collective. If all ranks refuse, the refusal is a
collective like any other: it ends when all have begun it. The reasons of the ranks may differ.
"""

from __future__ import annotations

from typing import NamedTuple

from omnireduce.core.descriptor import Descriptor, distinguish
from omnireduce.core.wire.control import Cause
from omnireduce.errors import ProtocolError


class BegunCall(NamedTuple):
    """The call that `rank` has begun as collective `number`. Errors call the rank by its `name`."""

    rank: int
    name: str
    number: int
    descriptor: Descriptor


class MismatchError(ProtocolError):
    """Two ranks have begun different collectives in the same place: the `cause` of the job's end."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.reason)
        self.cause = cause


def check_different_calls(call: BegunCall, other_call: BegunCall) -> None:
    """Raises MismatchError for two ranks that have begun different calls, unless both have refused theirs."""
    first, second = sorted((call, other_call))
    if first.number == second.number and first.descriptor.refused and second.descriptor.refused:
        return
    for refusing, calling in ((first, second), (second, first)):
        if refusing.descriptor.refused and refusing.number <= calling.number:
            raise MismatchError(_refusal_cause(refusing, calling))
    words = distinguish(first.descriptor, second.descriptor)
    number_text = "" if first.number == second.number else " as number {}"
    calls_text = "; ".join(
        f"rank {begun.rank} called {text}{number_text.format(begun.number)}"
        for begun, text in zip((first, second), words, strict=True)
    )
    reason = f"submitted different collectives: collective {call.number}: {calls_text}"
    raise MismatchError(Cause(f"ranks {first.rank} and {second.rank}", reason, mismatch=True))


def _refusal_cause(refusing: BegunCall, calling: BegunCall) -> Cause:
    """The cause of the job's end if one rank refuses its call and another rank does not. The other rank may be at a
    later collective, because this shard had no part in its call."""
    call_text = f", which rank {calling.rank} called"
    if refusing.number == calling.number:
        call_text += f" as {calling.descriptor}"
    reason = f"refused collective {refusing.number}{call_text}: {refusing.descriptor.refused}"
    return Cause(refusing.name, reason, mismatch=True)
