"""The channels of a rank, as its calls see them."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from omnireduce.runtime.member.calls import CallContext
from omnireduce.runtime.member.engine import Engine
from omnireduce.runtime.member.numbers import whole


class CallChannel(NamedTuple):
    """One channel of a rank: what its calls need to know, and the engine that drives them."""

    place: CallContext
    engine: Engine


class RankChannels(NamedTuple):
    """A rank in one generation of a job. Tensors of up to `urgent_bytes` go the `urgent` way, which is the ordinary one
    where there is no other.

    All is replaced together, so that no call is made for one generation and started in another.
    """

    ordinary: CallChannel
    urgent: CallChannel
    urgent_bytes: int

    @property
    def owner(self) -> threading.Thread:
        """The thread whose collectives need no name."""
        return self.ordinary.place.owner

    def owned_by(self, thread: threading.Thread) -> RankChannels:
        """The same, if this thread is the owner."""
        ways = [
            channel._replace(place=channel.place._replace(owner=thread)) for channel in (self.ordinary, self.urgent)
        ]
        return self._replace(ordinary=ways[0], urgent=ways[1])

    def way(self, x: object, priority: object, block_size: object) -> CallChannel:
        """The channel for `x`: as `priority` says; None: urgent for a small array. Blocks larger than usual take the
        ordinary channel, because slots of the urgent one may be too small. Raises UsageError for a priority that is no
        number."""
        if isinstance(block_size, int) and block_size > self.ordinary.place.block_size:
            return self.ordinary
        if priority is not None:
            return self.urgent if whole(priority, "priority") > 0 else self.ordinary
        return self.urgent if isinstance(x, np.ndarray) and x.nbytes <= self.urgent_bytes else self.ordinary
