"""What machines ask of their driver. Peers are numbers: shards for a worker, ranks for an aggregator."""

from __future__ import annotations

from typing import NamedTuple

from omnireduce.wire import Cause, ControlMessage

ALL = -1


class Send(NamedTuple):
    """Send `nbytes` of send slot `slot` to `peer`, or to ALL."""

    peer: int
    slot: int
    nbytes: int


class Return(NamedTuple):
    """Return the credit of receive slot `slot` to `peer`."""

    peer: int
    slot: int


class Tell(NamedTuple):
    """Send a control message to `peer`, or to ALL."""

    peer: int
    message: ControlMessage


class Finish(NamedTuple):
    """Collective `collective` is complete; its output may be read."""

    collective: int


class End(NamedTuple):
    """The machine is done, cleanly or because of `cause`. No further effects follow."""

    cause: Cause | None


class Warn(NamedTuple):
    """Tell the user about something that is slow, not wrong."""

    text: str


Effect = Send | Return | Tell | Finish | End | Warn
