"""Effects: the actions that the machines of rank and shard want to be done, and the causes of their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from omnireduce.core.dtypes import Array
from omnireduce.core.wire.control import Cause, ControlMessage
from omnireduce.core.wire.safe_text import shown
from omnireduce.errors import AbortedError, CollectiveTimeoutError, OmniReduceError

ALL = -1
AbortKind = Literal[
    "timeout", "lost", "violation", "mismatch", "worker", "relayed", "left", "ended", "shutdown", "internal"
]  # fmt: skip
ABORT_KINDS: tuple[str, ...] = get_args(AbortKind)


class Send(NamedTuple):
    """Send `nbytes` of send slot `slot` to each of `peers`. A peer in `peer_messages` gets the message given there
    (uint8).

    The slot and the messages in `peer_messages` do not change until the peers have returned the credit of the slot.
    """

    peers: Sequence[int]
    slot: int
    nbytes: int
    peer_messages: Mapping[int, Array] = MappingProxyType({})


class ReturnCredit(NamedTuple):
    """Return the credit of receive slot `slot` to `peer`."""

    peer: int
    slot: int


class SendControl(NamedTuple):
    """Send a control message to `peer`, or to ALL."""

    peer: int
    message: ControlMessage


class Wake(NamedTuple):
    """Wake `rank` of this host, which sleeps until another rank has moved."""

    rank: int


class Finish(NamedTuple):
    """Collective `collective` is complete; its output may be read."""

    collective: int


class End(NamedTuple):
    """The machine is done, cleanly or because of `cause`. No further effects follow.

    An aggregator sorts causes by `kind`. `rank` is the rank to blame, if only one is. A "relayed" cause comes from a
    rank, but is not about it: the rank learnt it from another shard, or blames one.
    """

    cause: Cause | None
    kind: AbortKind | None = None
    rank: int | None = None


class Warn(NamedTuple):
    """Tell the user about something that is slow, not wrong. `still_s`: the seconds that this process itself stood
    still; 0 if it did not."""

    text: str
    still_s: float = 0.0


Effect = Send | ReturnCredit | SendControl | Wake | Finish | End | Warn


def kind_of(cause: Cause, *, blames_itself: bool) -> AbortKind:
    """The kind of the cause that a rank gives when it leaves. `blames_itself`: the rank blames itself."""
    if cause.timeout:
        return "timeout"
    return "mismatch" if cause.mismatch else "worker" if blames_itself else "relayed"


def error_of(cause: Cause) -> OmniReduceError:
    """The exception for the end of a job."""
    kind = CollectiveTimeoutError if cause.timeout else AbortedError
    return kind(shown(cause.culprit), shown(cause.reason))
