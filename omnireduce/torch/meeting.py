"""Rendezvous of the ranks of a process group, in a store of torch that may be older than they are.

torchrun keeps a store when it restarts ranks. So does a process that destroys its group and makes another one. What
earlier ranks have written is still there, and no count of a launcher tells old from new on all hosts.

Each rank draws a unique number and writes it. Rank 0 writes the key of the group under the number of each rank. So a
rank that finds the key is alive, and answers. A restarted rank writes another number than before; rank 0 looks again
until all have answered. Then it writes what all ranks have said under the key.
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
from omnireduce.protocol.deadlines import Reminders

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1  # between two looks into the store
LISTED = 8  # ranks in a message
FEW = 64  # ranks
_log = logging.getLogger("omnireduce")


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """The entry of a rank: a number that no other rank has, and `said`, a text for all others."""

    number: str
    said: str


class Met(NamedTuple):
    """All ranks are here. `key`: not used in the store before. `said`: the text of each rank."""

    key: str
    said: list[str]


_arrival = msgspec.json.Decoder(Arrival)
_arrivals = msgspec.json.Decoder(list[Arrival])


def meet(store: dist.Store, rank: int, size: int, said: str, timeout: timedelta) -> Met:
    """Return when all ranks have called it with this store. Raises DistStoreError, a RuntimeError, if they have not
    after `timeout`, and any error of the store."""
    own = Arrival(secrets.token_hex(8), said)
    store.set(f"rank {rank}", msgspec.json.encode(own))
    waiting = _Waiting(store, rank, size, timeout)
    key = _call_up(waiting, own) if rank == 0 else _answer(waiting, own)
    return Met(key, [arrival.said for arrival in _arrivals.decode(store.get(key))])


def _call_up(waiting: _Waiting, own: Arrival) -> str:
    store, ranks, key = waiting.store, range(waiting.size), own.number
    waiting.wait([f"rank {rank}" for rank in ranks])
    known = list[Arrival]()
    while True:
        arrivals = [_arrival.decode(store.get(f"rank {rank}")) for rank in ranks]
        for arrival in arrivals[1:]:
            if arrival not in known:
                store.set(arrival.number, key)
        known = arrivals
        if waiting.pause([f"{key} {rank}" for rank in ranks[1:]]):
            break
    store.set(key, msgspec.json.encode(known))
    return key


def _answer(waiting: _Waiting, own: Arrival) -> str:
    store = waiting.store
    waiting.wait([own.number])
    key: str = store.get(own.number).decode()
    store.set(f"{key} {waiting.rank}", "")
    waiting.wait([key])
    return key


class _Waiting:
    """Waits for keys that other ranks put into a store, for `timeout` in total. After 1, 2, 4, ... seconds it logs who
    is missing."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._timeout_s, begun = timeout.total_seconds(), time.monotonic()
        self._deadline, self._reminders, self._pause_s = begun + self._timeout_s, Reminders(begun), SHORTEST_PAUSE_S

    def wait(self, keys: Sequence[str]) -> None:
        """Return when the store has all these keys."""
        while not self.pause(keys):
            pass

    def pause(self, keys: Sequence[str]) -> bool:
        """Return whether the store has these keys. If it has not, pause first, longer each time."""
        if self.store.check(list(keys)):  # not its `wait`: that of torch writes two lines when its time is over
            self._pause_s = SHORTEST_PAUSE_S
            return True
        now = time.monotonic()
        if now > self._deadline:
            raise dist.DistStoreError(
                f"omnireduce: {self._missing(keys)} did not join a process group of {self.size} ranks within "
                f"{self._timeout_s:g} s (its timeout); start all ranks, each with a rank of its own"
            )
        if waited_s := self._reminders.due(now):
            what = f"waiting for {self._missing(keys)} to join a process group of {self.size} ranks"
            _log.warning("%s since %.0f s", what, waited_s, extra=tagged("waiting_for_ranks", rank=self.rank))
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return False

    def _missing(self, keys: Sequence[str]) -> str:
        """The ranks that this rank waits for, in words. Among many ranks, only rank 0 looks who is missing."""
        if self.rank and self.size > FEW:
            return "other ranks"
        answers = list(enumerate(keys, 1)) if self.rank == 0 and len(keys) < self.size else []
        here = {rank: f"rank {rank}" for rank in range(self.size)} | dict(answers)
        missing = [rank for rank, key in here.items() if not self.store.check([key])] or [0]
        return f"rank {', '.join(map(str, missing[:LISTED]))}{' …' if len(missing) > LISTED else ''}"
