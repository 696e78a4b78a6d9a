"""The ranks of a process group come, and who waits says for whom. Gloo, which connects them, would wait in silence."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch.distributed as dist

from omnireduce.logs import tagged
from omnireduce.protocol.reminders import Reminders

HERE = "omnireduce/here"
ALL = f"{HERE}/all"
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1  # between two looks into the store
LISTED = 8  # ranks in a message
FEW = 64  # ranks: of more, only rank 0 looks who is missing
log = logging.getLogger("omnireduce")


def await_ranks(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Return when all `size` ranks have called this with the same store, or after `timeout`: who goes on then says
    what is wrong. After 1, 2, 4, ... seconds it says who is missing. Raises what the store raises."""
    store.set(f"{HERE}/{rank}", "")
    if store.add(HERE, 1) >= size:
        store.set(ALL, "")
        return
    now, pause_s = time.monotonic(), SHORTEST_PAUSE_S
    deadline, reminders = now + timeout.total_seconds(), Reminders(now)
    while not store.check([ALL]) and (now := time.monotonic()) < deadline:
        if waited_s := reminders.due(now):
            what = f"waiting for {_missing(store, rank, size)} to join a process group of {size} ranks"
            log.warning("%s since %.0f s", what, waited_s, extra=tagged("waiting_for_ranks", rank=rank))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _missing(store: dist.Store, rank: int, size: int) -> str:
    if rank and size > FEW:
        return f"{max(1, size - store.add(HERE, 0))} ranks"
    missing = list[str]()
    for other in range(size):
        if not store.check([f"{HERE}/{other}"]):
            missing.append(str(other))
            if len(missing) > LISTED:
                break
    return f"rank {', '.join(missing[:LISTED])}{' …' if len(missing) > LISTED else ''}"
