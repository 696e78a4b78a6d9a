"""Short attacks of a few kinds; `make attacks` plays all. And: a deliberate bug in the daemon is seen."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from simulator.mutate import mutated, source_of

from .attacker import Tally
from .buggy_daemon import BUGS
from .campaign import attack, attackers
from .kinds import BY_NAME, KINDS
from .testbed import Options
from .verdict import MOST_GROWTH_BYTES, MOST_LOG_BYTES, MOST_RATIO, Figures, table

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 2.0  # duration of an attack
SEED = 1 if "CI" in os.environ else random.SystemRandom().randrange(1_000_000_000)
SHORT = ("extreme hellos", "page requests")


@pytest.mark.parametrize("kind", SHORT)
def test_a_short_attack(kind: str) -> None:
    """Bounds that no machine is too slow for: memory, log, right sums, jobs that go on, health that is answered."""
    figures = attack(BY_NAME[kind], "stranger", Options(seed=SEED), SECONDS)
    assert not figures.faults(judge_time=False), (SEED, figures.faults(judge_time=False), str(figures.tally))


@pytest.mark.parametrize(
    ("bug", "kind", "fault"),
    [
        ("nothing limits the log", "refused hellos", "log"),
        ("messages are kept", "extreme hellos", "memory"),
        ("a turn stalls", "extreme hellos", "latency"),
        ("sums are maxima", "silent connections", "elements are wrong"),
    ],
)
def test_an_attack_shows_a_deliberate_bug(bug: str, kind: str, fault: str) -> None:
    """On a busy machine the attack may have to last longer: how much the daemon logs and keeps depends on the number of
    steps. So this attacker does not yield the processor."""
    prefix = (sys.executable, str(Path(__file__).with_name("buggy_daemon.py")), bug)
    for seconds in (SECONDS, 4 * SECONDS, 16 * SECONDS):
        figures = attack(BY_NAME[kind], "stranger", Options(seed=SEED, prefix=prefix, nice=0), seconds)
        faults = figures.faults(judge_time=True)
        if any(fault in text for text in faults):
            return
    pytest.fail(f"{faults}, {figures.tally}")


def test_every_bug_fits_the_product() -> None:
    for bug in BUGS.values():
        assert mutated(bug, source_of(bug)) != source_of(bug)


def figures_of(**changed: object) -> Figures:
    """Measurements that hold, except those in `changed`."""
    usual = {"alone": [[0.001]] * 3, "beside": [[0.001]] * 3, "attack_s": 60.0}
    figures = Figures("kind", "hit", tally=Tally(), **(usual | changed))  # type: ignore[arg-type]
    figures.tally.words["hit"] += 1
    return figures


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        ({}, []),
        ({"growth_bytes": MOST_GROWTH_BYTES}, []),
        ({"growth_bytes": MOST_GROWTH_BYTES + 1}, ["memory"]),
        ({"growth_bytes": 2 * MOST_GROWTH_BYTES, "own_bytes": MOST_GROWTH_BYTES}, []),
        ({"log_bytes": MOST_LOG_BYTES}, []),
        ({"log_bytes": MOST_LOG_BYTES + 1}, ["log"]),
        ({"beside": [[0.001], [0.001], [9.0]]}, []),  # one phase of a busy machine does not decide
        ({"beside": [[0.001], [0.001 * MOST_RATIO * 1.1], [9.0]]}, ["latency"]),
        ({"beside": [[0.004]] * 3, "here": [[0.004]] * 3, "elsewhere": [[0.003]] * 3}, []),  # the machine is busy
        ({"beside": [[0.004]] * 3, "here": [[0.004]] * 3, "elsewhere": [[0.002]] * 3}, ["latency"]),
        ({"beside": [[]] * 3, "here": [[]] * 3, "elsewhere": [[]] * 3}, ["latency"]),
        ({"beside": [[], [], []]}, ["latency"]),
        ({"beside": [], "alone": []}, ["latency"]),
        ({"troubles": ["the shard died", "the shard died"]}, ["the shard died"]),
        ({"shows": "miss"}, ["nothing was attacked: no 'miss'"]),
    ],
)
def test_verdicts(changed: dict[str, object], faults: list[str]) -> None:
    figures = figures_of(**changed) if "shows" not in changed else Figures("kind", "miss", alone=[[1]], beside=[[1]])
    assert figures.faults(judge_time=True) == faults
    assert figures.faults(judge_time=False) == [fault for fault in faults if fault != "latency"]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table([figures], judge_time=True))
    assert (faults[0] if faults else "holds") in captured.get()


def test_who_attacks() -> None:
    hello, tls = BY_NAME["random hellos"], BY_NAME["key updates"]
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert not any("," in kind.name for kind in KINDS)  # `--kinds` splits there
    assert list(attackers(hello, Options())) == ["stranger"]
    assert list(attackers(hello, Options(secret=True))) == ["stranger", "member"]
    assert list(attackers(tls, Options())) == []
    assert list(attackers(tls, Options(tls=True))) == ["stranger"]


def test_a_kind_that_does_not_exist() -> None:
    command = [sys.executable, "-m", "tests.attacks", "--kinds", "nonsense"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert "nonsense; expected some of: huge worlds" in result.stderr
