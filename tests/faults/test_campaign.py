"""A few rounds of real faults, and a short soak; `make faults` plays hundreds."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from .campaign import Campaign
from .plan import FAULTS, draw_plan
from .soak import soak

ROOT = Path(__file__).resolve().parent.parent.parent
ROUNDS = 16
FIRST = 1 if "CI" in os.environ else random.SystemRandom().randrange(1_000_000, 1_000_000_000)


def test_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    campaign = Campaign(lines.append)
    campaign.run(range(FIRST, FIRST + ROUNDS))
    assert not campaign.failed, "\n".join(lines)
    assert campaign.counts.total() == ROUNDS


def test_every_fault_is_drawn_and_a_seed_stands_for_one_plan() -> None:
    plans = [draw_plan(seed) for seed in range(500)]
    assert {plan.fault for plan in plans} == set(FAULTS)
    assert plans == [draw_plan(seed) for seed in range(500)]


def test_a_soak() -> None:
    lines: list[str] = []
    assert soak(60, lines.append), "\n".join(lines)
