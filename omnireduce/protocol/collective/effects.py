"""A collective, as the parts of a worker's machine know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import Array
from omnireduce.core.wire.control import Cause, ControlMessage
from omnireduce.core.wire.safe_text import shown
from omnireduce.errors import AbortedError, CollectiveTimeoutError, OmniReduceError
from omnireduce.kernels.codecs.base import Codec
from omnireduce.kernels.codecs.draws import stream_key
from omnireduce.protocol.collective.operands import HostSum, Operand, RowBlocks
from omnireduce.protocol.collective.rows import RowSum

ALL = -1
AbortKind = Literal[
    "timeout", "lost", "violation", "mismatch", "worker", "relayed", "left", "ended", "shutdown", "internal"
]  # fmt: skip
ABORT_KINDS: tuple[str, ...] = get_args(AbortKind)


class Send(NamedTuple):
    """Send `nbytes` of send slot `slot` to each of `peers`. A peer in `instead` gets the message given there (uint8).

    Such a message, too, stays as it is until the peer has returned the credit of the slot.
    """

    peers: Sequence[int]
    slot: int
    nbytes: int
    instead: Mapping[int, Array] = MappingProxyType({})


class Return(NamedTuple):
    """Return the credit of receive slot `slot` to `peer`."""

    peer: int
    slot: int


class Tell(NamedTuple):
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
    worker, but is not about it: the worker learnt it from another shard, or blames one.
    """

    cause: Cause | None
    kind: AbortKind | None = None
    rank: int | None = None


class Warn(NamedTuple):
    """Tell the user about something that is slow, not wrong. `still_s`: for how long this process itself stood still; 0
    if it did not."""

    text: str
    still_s: float = 0.0


Effect = Send | Return | Tell | Wake | Finish | End | Warn


def kind_of(cause: Cause, *, own: bool) -> AbortKind:
    """How an aggregator sorts the cause with which a worker leaves. `own`: it blames itself."""
    if cause.timeout:
        return "timeout"
    return "mismatch" if cause.mismatch else "worker" if own else "relayed"


def error_of(cause: Cause) -> OmniReduceError:
    """The exception for the end of a job."""
    kind = CollectiveTimeoutError if cause.timeout else AbortedError
    return kind(shown(cause.culprit), shown(cause.reason))


def sum_of_host(operand: Operand) -> HostSum | RowSum:
    """The operand that shards get from a host, one of whose ranks has this operand."""
    return RowSum(operand) if isinstance(operand.blocks, RowBlocks) else HostSum(operand)


@dataclass(slots=True, eq=False)
class Collective:
    """One collective under way on this worker. `sender`: the worker's number at the shards. `host_sum`: what shards get
    from a host of several ranks, in place of one rank's operand. `codec`: of its blocks; `key`: of its random
    numbers."""

    number: int
    descriptor: Descriptor
    operand: Operand
    sender: int
    parts_left: int = 0  # shards, and exchanges in the host, from which results are still to come
    host_sum: HostSum | RowSum | None = None
    codec: Codec | None = None
    sent: Operand = field(init=False)  # what goes to the shards
    key: int = 0

    def __post_init__(self) -> None:
        self.sent = self.operand if self.host_sum is None else self.host_sum

    def use(self, codec: Codec) -> None:
        """Let the blocks travel as `codec` says."""
        self.codec, self.key = codec, stream_key(self.descriptor.seed, self.number, self.sender)

    def __str__(self) -> str:
        return f"collective {self.number} ({self.descriptor})"
