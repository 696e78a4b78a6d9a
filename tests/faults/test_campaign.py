"""A few rounds of real faults and a short soak; `make faults` plays hundreds. And: that both can fail."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .campaign import Campaign
from .plan import FAULTS, draw_plan
from .site import GROWTH_BYTES, Held
from .soak import flatness, soak

ROOT = Path(__file__).resolve().parent.parent.parent
ROUNDS, JOBS = 15, 60
FIRST = 1 if "CI" in os.environ else random.SystemRandom().randrange(1_000_000, 1_000_000_000)


def test_rounds_of_faults() -> None:
    lines: list[str] = []
    campaign = Campaign(lines.append)
    campaign.run(range(FIRST, FIRST + ROUNDS))
    assert not campaign.failed, "\n".join(lines)
    assert campaign.counts.total() == ROUNDS


def test_a_soak() -> None:
    lines: list[str] = []
    assert soak(JOBS, lines.append), "\n".join(lines)


def test_a_seed_stands_for_one_plan() -> None:
    plans = [draw_plan(seed) for seed in range(500)]
    assert {plan.fault for plan in plans} == set(FAULTS)
    assert plans == [draw_plan(seed) for seed in range(500)]
    assert len({str(plan) for plan in plans}) == 500


def faults(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults", *options]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_failure_prints_the_command_that_replays_it() -> None:
    """Nobody is so fast as to raise within a hundredth of a millisecond."""
    seed = next(seed for seed in range(100) if draw_plan(seed).fault == "kill worker" and not draw_plan(seed).joining)
    result = faults("--rounds", "1", "--seed", str(seed), SLOWNESS="1e-5")
    assert result.returncode == 1, result.stdout
    assert "s after the fault, expected" in result.stdout
    [command] = [line.partition("replay: ")[2] for line in result.stdout.splitlines() if "replay: " in line]
    again = faults(*shlex.split(command)[3:])
    assert again.returncode == 0, again.stdout
    assert "1 rounds, 0 failed" in again.stdout


MIB = 1 << 20


@pytest.mark.parametrize(
    ("history", "flat"),
    [
        ([Held(9, 60 * MIB + i) for i in range(20)], True),
        ([Held(9, 60 * MIB if i < 5 else 90 * MIB) for i in range(20)], True),  # warming up
        ([Held(9, (60 + i) * MIB) for i in range(20)], False),
        ([Held(9 + i // 15, 60 * MIB) for i in range(20)], False),
    ],
    ids=["flat", "warm", "memory", "descriptors"],
)
def test_growth_is_seen(history: list[Held], flat: bool) -> None:
    assert flatness("shard 0", history)[0] == flat


def test_what_a_shard_keeps_is_seen() -> None:
    base = Held(20, 60 * MIB)
    assert Held(19, 61 * MIB).within(base)
    assert not Held(21, 60 * MIB).within(base)
    assert not Held(20, 61 * MIB + GROWTH_BYTES).within(base)
