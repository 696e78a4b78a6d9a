"""Ranks that meet in a store, and those that have died there before them, wherever they were."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import WAIT_S, Ranks

from omnireduce.protocol import wait_notices
from omnireduce.torch.backend import rendezvous
from omnireduce.torch.backend.rendezvous import MAX_LISTED, Rendezvous, await_all_ranks

WAIT = timedelta(seconds=WAIT_S)
SHORT = timedelta(seconds=0.2)


class KilledError(Exception):
    """The end of a rank in the middle of a rendezvous."""


class Mortal:
    """A store for a rank that dies when it has asked the store `steps` times."""

    def __init__(self, store: dist.Store, steps: int) -> None:
        self._store, self._left = store, steps

    def __getattr__(self, name: str) -> Any:
        self._left -= 1
        if self._left < 0:
            raise KilledError
        return getattr(self._store, name)


def start(store: dist.Store, size: int, what: str) -> list[Rendezvous]:
    return Ranks(size, lambda rank: await_all_ranks(store, rank, size, f"{what} {rank}", WAIT)).results()


def check(found: list[Rendezvous], what: str, size: int) -> str:
    """All know the same; return the key."""
    assert found == [Rendezvous(found[0].key, [f"{what} {rank}" for rank in range(size)])] * size
    return found[0].key


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_meet_again_and_again_in_one_store(size: int) -> None:
    store = dist.HashStore()
    keys = [check(start(store, size, what), what, size) for what in ("a", "b", "c")]
    assert len(set(keys)) == 3


@given(st.integers(1, 4).flatmap(lambda size: st.tuples(*[st.none() | st.integers(0, 12)] * size)))
def test_those_who_died_before_are_not_met(steps: tuple[int | None, ...]) -> None:
    """Each rank of the first start dies after so many steps (None: it never came)."""
    store, size = dist.HashStore(), len(steps)

    def die(rank: int) -> None:
        left = steps[rank]
        if left is not None:
            await_all_ranks(Mortal(store, left), rank, size, f"dead {rank}", SHORT)  # type: ignore[arg-type]

    Ranks(size, die).outcomes()
    check(start(store, size, "alive"), "alive", size)


class Noticed:
    """A store that tells when something is put under `key`, and puts nothing under `late` before that was told."""

    def __init__(self, store: dist.Store, key: str, late: str, told: threading.Event) -> None:
        self._store, self._key, self._late, self._told = store, key, late, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: Any) -> None:
        if key == self._late:
            assert self._told.wait(WAIT_S)
        self._store.set(key, value)
        if key == self._key:
            self._told.set()


def test_rank_0_looks_again_where_it_has_found_an_older_rank() -> None:
    """Rank 1 comes only when rank 0 has put the key under the number of the one before it."""
    store = dist.HashStore()
    check(start(store, 2, "dead"), "dead", 2)
    older = rendezvous._entry_decoder.decode(store.get("rank 1")).number
    noticed: Any = Noticed(store, older, "rank 1", threading.Event())
    check(start(noticed, 2, "alive"), "alive", 2)


def test_who_is_missing_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank 0, before and after it has called up a rank that has died, and by another one."""
    monkeypatch.setattr(wait_notices, "FIRST_S", 0.02)
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match=r"rank 1, 2 did not join a process group of 3 ranks within 0.2 s"):
        await_all_ranks(store, 0, 3, "", SHORT)
    for rank in (2, 1):
        with pytest.raises(RuntimeError, match=f"rank {1 if rank == 2 else 0} did not join"):
            await_all_ranks(store, rank, 3, "", SHORT)
    with pytest.raises(RuntimeError, match="rank 1, 2 did not join"):
        await_all_ranks(store, 0, 3, "", SHORT)
    messages = [record.getMessage().rpartition(" since ")[0] for record in caplog.records]
    assert messages[0] == "waiting for rank 1, 2 to join a process group of 3 ranks"
    assert "waiting for rank 0 to join a process group of 3 ranks" in messages


def test_many_missing_ranks_are_not_all_listed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among many, rank 0 looks who they are."""
    monkeypatch.setattr(wait_notices, "FIRST_S", 0.02)
    for rank in (0, 5):
        with pytest.raises(RuntimeError, match="did not join"):
            await_all_ranks(dist.HashStore(), rank, 1000, "", SHORT)
    assert f"waiting for rank {', '.join(map(str, range(1, MAX_LISTED + 1)))} … to join" in caplog.text
    assert "waiting for other ranks to join a process group of 1000 ranks" in caplog.text


def test_ranks_that_are_all_here_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    check(start(dist.HashStore(), 4, "here"), "here", 4)
    assert not caplog.records
