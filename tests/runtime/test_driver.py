"""The links that a turn of the driver reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from benchmarks.harness.inproc import InprocLink, pair
from omnireduce.protocol.collective.effects import Effect
from omnireduce.runtime.driver import Driver, Machine
from omnireduce.transport.base import Event

LINKS = 3


class Idle:
    """A machine that has nothing to do until its deadline."""

    ended = None
    deadline: float | None = 10.0

    def advance(self, now: float) -> Iterator[Effect]:
        return iter(())

    def timer(self, now: float) -> Iterator[Effect]:
        self.deadline = None
        return iter(())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the peers that are read, in order."""
    results: list[str] = []

    def poll(link: InprocLink) -> Sequence[Event]:
        results.append(link.peer)
        return []

    monkeypatch.setattr(InprocLink, "poll", poll)
    return results


def test_a_turn_reads_all_links_now_and_then_and_when_it_is_late(read: list[str]) -> None:
    now = 0.0
    links = [pair(str(number), "me")[0] for number in range(LINKS)]
    driver = Driver(cast(Machine, Idle()), links, lambda: now)
    driver.read_all_s = 3.0
    every = [str(number) for number in range(LINKS)]
    for time_s, peers, expected in (
        (0.0, None, every), (1.0, [1], ["1"]), (2.9, [], []), (3.0, [2], every), (4.0, [], []), (6.0, [], every),
        (8.0, [0], ["0"]), (8.9, None, every), (10.0, [1], every), (11.0, [1], ["1"]),
    ):  # fmt: skip
        now = time_s
        read.clear()
        driver.turn(peers)
        assert read == expected, time_s
