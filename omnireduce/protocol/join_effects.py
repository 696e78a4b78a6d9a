"""Effects of the join protocol, which its driver carries out: connect, notify, hang up, meet the ranks of the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from omnireduce.errors import OmniReduceError
from omnireduce.protocol.effects import Tell
from omnireduce.protocol.hosts import LocalRanks
from omnireduce.wire.control import RankAssignment, Welcome


class Connect(NamedTuple):
    """Connect to aggregator `shard`, at the latest at time `by`. Then call `connected` or `unreachable`."""

    shard: int
    by: float


class HangUp(NamedTuple):
    """Close the connections to aggregator `first` and those that were made after it."""

    first: int = 0


class Notice(NamedTuple):
    """Tell the user about something that takes long. `event` names it; `shard` is the aggregator, or -1 for none."""

    event: str
    text: str
    shard: int = -1


class Joined(NamedTuple):
    """Every aggregator has welcomed this worker. It is rank `rank` of `size` now, unless HangUp follows.

    `generation`: the first aggregator's number. `seat` proves later that this worker was in this generation. Tensors of
    up to `whole_bytes` go to the first aggregator as a whole. `neighbours`: the ranks that share memory with it.
    """

    welcomes: list[Welcome]
    rank: int
    size: int
    generation: int
    whole_bytes: int
    seat: RankAssignment | None
    neighbours: LocalRanks


class Meet(NamedTuple):
    """Meet the other ranks of this host at the place that `token` names. This worker is number `rank` of `size` there.
    The job has so many `hosts`."""

    token: bytes
    rank: int
    size: int
    hosts: int


class JoinFailed(NamedTuple):
    """This worker cannot join; all connections are closed."""

    error: OmniReduceError


JoinAction = Connect | Tell | HangUp | Notice | Meet | Joined
JoinEffect = JoinAction | JoinFailed


def perform(effects: Iterator[JoinEffect], do: Callable[[JoinAction], Iterator[JoinEffect] | None]) -> None:
    """Carry out effects in order by `do`, then the effects that each call of `do` has returned.

    Raises the error of Failed.
    """
    queue = deque([effects])
    while queue:
        for effect in queue.popleft():
            if isinstance(effect, JoinFailed):
                raise effect.error
            outcome = do(effect)
            if outcome is not None:
                queue.append(outcome)
