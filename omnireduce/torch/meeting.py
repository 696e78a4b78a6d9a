"""How the ranks of a process group find each other in a store of torch that may be older than they are.

torchrun keeps a store when it starts ranks anew. So does a process that destroys its group and makes another one. What
ranks before them have said is still there, and nothing that a launcher counts tells the two apart on all hosts.

Each rank draws a number that nobody else has, and says it. Rank 0 puts the key of the group under the number of each
rank. So who finds the key is alive, and answers. A rank that has been started anew says another number than before;
rank 0 looks again until all have answered. Then it puts what all have said under the key.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from omnireduce.logs import tagged

PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1
FIRST_WORD_S = 1.0  # then after twice, four times, ... as long
_log = logging.getLogger("omnireduce")


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of itself: a number that no other has, and `said`, for all others."""

    number: str
    said: str


class Met(NamedTuple):
    """All ranks are here. `key`: what nobody before has used in the store. `said`: what each of them has said."""

    key: str
    said: list[str]


_arrival = msgspec.json.Decoder(Arrival)
_arrivals = msgspec.json.Decoder(list[Arrival])


def meet(store: dist.Store, rank: int, size: int, said: str, timeout: timedelta) -> Met:
    """Return when all ranks have called it with this store. Raises DistStoreError, a RuntimeError, where they have not
    after `timeout`, and what the store raises."""
    own = Arrival(secrets.token_hex(8), said)
    store.set(f"rank {rank}", msgspec.json.encode(own))
    waiting = _Waiting(store, timeout)
    key = _call_up(waiting, own, size) if rank == 0 else _answer(waiting, own, rank)
    return Met(key, [each.said for each in _arrivals.decode(store.get(key))])


def _call_up(waiting: _Waiting, own: Arrival, size: int) -> str:
    store, ranks, key = waiting.store, range(size), own.number
    waiting.wait({f"rank {rank}": rank for rank in ranks})
    known = list[Arrival]()
    while True:
        arrivals = [_arrival.decode(store.get(f"rank {rank}")) for rank in ranks]
        for each in arrivals[1:]:
            if each not in known:
                store.set(each.number, key)
        known = arrivals
        if waiting.pause({f"{key} {rank}": rank for rank in ranks if rank}):
            break
    store.set(key, msgspec.json.encode(known))
    return key


def _answer(waiting: _Waiting, own: Arrival, rank: int) -> str:
    store = waiting.store
    waiting.wait({own.number: 0})
    key: str = store.get(own.number).decode()
    store.set(f"{key} {rank}", "")
    waiting.wait({key: 0})
    return key


class _Waiting:
    """Waits for what other ranks put into a store, `timeout` in all, and says now and then which ranks are missing."""

    def __init__(self, store: dist.Store, timeout: timedelta) -> None:
        self.store, self._timeout = store, timeout
        self._begun = time.monotonic()
        self._said_s, self._pause_s = FIRST_WORD_S, PAUSE_S

    def wait(self, ranks: dict[str, int]) -> None:
        """Return when the store has all these keys, each from a rank."""
        while not self.pause(ranks):
            pass

    def pause(self, ranks: dict[str, int]) -> bool:
        """Return whether the store has these keys; if not, after a pause, a little longer each time."""
        if self.store.check(list(ranks)):  # not its `wait`: that of torch writes two lines when its time is over
            self._pause_s = PAUSE_S
            return True
        self._look_at_clock(ranks)
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return False

    def _look_at_clock(self, ranks: dict[str, int]) -> None:
        waited_s = time.monotonic() - self._begun
        is_over = waited_s > self._timeout.total_seconds()
        if not is_over and waited_s < self._said_s:
            return
        self._said_s *= 2
        missing = _listed([rank for key, rank in ranks.items() if not self.store.check([key])])
        if is_over:
            raise dist.DistStoreError(
                f"omnireduce: {missing} not come to the process group after {self._timeout.total_seconds():g} s (its "
                "timeout); start all ranks, each with a rank of its own"
            )
        _log.warning("waiting for the process group: %s not come yet", missing, extra=tagged("group_incomplete"))


def _listed(ranks: Sequence[int]) -> str:
    """Such as "rank 3 has"."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"
