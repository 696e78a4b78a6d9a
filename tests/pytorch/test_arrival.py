"""Ranks that wait for others of a process group say for whom."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from local_cluster import WAIT_S, Ranks

from omnireduce.protocol import reminders
from omnireduce.torch.arrival import LISTED, await_ranks


def test_who_is_missing_is_named_and_who_comes_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reminders, "FIRST_S", 0.02)
    store = dist.HashStore()
    await_ranks(store, 0, 3, timedelta(seconds=0.2))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) >= 2
    assert {text.rpartition(" since ")[0] for text in said} == {
        "waiting for rank 1, 2 to join a process group of 3 ranks"
    }
    Ranks(2, lambda rank: await_ranks(store, rank + 1, 3, timedelta(seconds=WAIT_S))).results()
    assert "waiting for rank 1 " not in caplog.text


def test_many_missing_ranks_are_not_all_listed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Among many, rank 0 looks who they are."""
    monkeypatch.setattr(reminders, "FIRST_S", 0.02)
    store = dist.HashStore()
    for rank in (0, 5):
        await_ranks(store, rank, 1000, timedelta(seconds=0.1))
    assert f"waiting for rank {', '.join(map(str, range(1, LISTED + 1)))} … to join" in caplog.text
    assert "waiting for 998 ranks to join a process group of 1000 ranks" in caplog.text


def test_ranks_that_are_all_here_say_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(reminders, "FIRST_S", 1000.0)
    store = dist.HashStore()
    Ranks(4, lambda rank: await_ranks(store, rank, 4, timedelta(seconds=WAIT_S))).results()
    assert not caplog.records
