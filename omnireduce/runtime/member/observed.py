"""Observer of a channel's collectives, for profile and timeline. An engine has it only if one is wanted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from omnireduce.descriptor import PACKED, Descriptor
from omnireduce.protocol.collective.operands import Operand
from omnireduce.runtime.member.calls import Call
from omnireduce.runtime.member.handle import Started
from omnireduce.runtime.member.traced import TracedOperand
from omnireduce.runtime.tracing.profile import Profile, Tally
from omnireduce.runtime.tracing.timeline import Timeline
from omnireduce.runtime.tracing.trace import Recorder, now

_numbers = itertools.count(1)


class Moved(NamedTuple):
    """Counters of a channel: bytes that it has sent, and non-zero blocks that its rank brought to exchanges in memory
    (None: nobody counts those)."""

    sent_bytes: int
    own_blocks: int | None


class Observer:
    """Watches collectives from start to end. `profile`, `timeline` and `recorder` may change. If the channel is not
    traced already, `recorder` records the collectives' own work."""

    def __init__(self, moved: Callable[[], Moved], profile: Profile | None) -> None:
        self.profile, self._moved = profile, moved
        self.timeline: Timeline | None = None
        self.recorder: Recorder | None = None
        self._before = moved()

    def watch(self, calls: Sequence[Call[Any]], handles: Sequence[Started[Any]]) -> tuple[Call[Any], ...]:
        """The calls as they are to be started."""
        return tuple(self._watched(*pair) for pair in zip(calls, handles, strict=True))

    def _watched(self, call: Call[Any], handle: Started[Any]) -> Call[Any]:
        called, operand = call.descriptor, call.operand
        if self.recorder is not None and not isinstance(operand, TracedOperand):
            is_tensor = called.reduces and not called.has_rows
            operand = TracedOperand(operand, self.recorder, is_tensor=is_tensor)
        number, start, timeline, profile = next(_numbers), now(), self.timeline, self.profile
        if profile is not None:
            profile.begin(start)
        if timeline is not None:
            what = {"dtype": called.dtype, "shape": called.shape}
            timeline.started(number, called.kind, called.name, what)

        def over(*, failed: bool) -> None:
            end, (sent, blocks) = now(), self._since_last()
            nbytes = _bytes_of(called, operand)
            if profile is not None:
                profile.end(called.kind, Tally(1, nbytes, end - start, sent, failed), end)
            if timeline is not None:
                details = _details(called, operand, nbytes, blocks) | {"sent_bytes": sent}
                timeline.done(number, details | ({"failed": True} if failed else {}))

        handle.on_over = over
        return call if operand is call.operand else call._replace(operand=operand)

    def _since_last(self) -> tuple[int, int | None]:
        """The bytes and blocks that were moved since the last collective was over."""
        before, self._before = self._before, self._moved()
        sent, blocks = self._before
        return sent - before[0], None if blocks is None or before[1] is None else blocks - before[1]


def _bytes_of(called: Descriptor, operand: Operand) -> int:
    """The bytes that the caller passed: those of its array, or of its rows."""
    if called.has_rows or called.kind in PACKED:
        return operand.nbytes
    return math.prod(called.shape) * (called.item_bytes or called.element.dtype.itemsize)


def _details(called: Descriptor, operand: Operand, nbytes: int, own: int | None) -> dict[str, Any]:
    details: dict[str, Any] = {"dtype": called.dtype, "shape": called.shape, "bytes": nbytes}
    if not called.reduces:
        return details
    details["op"] = called.op
    if not called.has_rows:
        details["blocks"] = called.layout.blocks
    if isinstance(operand, TracedOperand) and operand.own + operand.union:
        return details | {"nonzero_blocks": operand.own, "union_blocks": operand.union}
    return details if own is None else details | {"nonzero_blocks": own}
