"""The seven steps on more and more ranks, and what becomes of eight without a warm-up."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

import pytest
from launched import output_of
from local_cluster import ROOT, WAIT_S, Daemon

PROGRAM = [sys.executable, str(ROOT / "examples/keras_warmup.py")]
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="no sklearn here; `make torch` installs it")


def read_right(text: str) -> list[float]:
    """Percent of the digits that ranks have read right, for each launch."""
    return [float(match) for match in re.findall(r"([\d.]+)% of digits read right", text)]


def test_more_ranks_learn_as_well_with_a_warm_up(daemon: Daemon) -> None:
    """Measured for 1 and 8 ranks: 98.0 and 82.5 %."""
    command = [sys.executable, str(ROOT / "examples/scaling.py"), "--np", "1,8", *PROGRAM]
    text = output_of(command, daemon, "torch", 16 * WAIT_S)
    right = read_right(text)
    assert len(right) == 2, text
    assert min(right) > 60, text
    assert re.findall(r"Hvd Procs (\d) Total time: [\d.]+ second", text) == ["1", "8"]
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["ranks", "1", "8"]
    of_eight = text[text.index("Hvd Procs 1") :]
    rates = re.findall(r"learning_rate: ([\d.]+)", of_eight)
    assert rates == ["0.0667", "0.1133", *["0.1600"] * 10]  # 0.16 / 8 * (epoch * 7 / 3 + 1)
    assert of_eight.count("Epoch 3: finished gradual learning rate warmup to 0.16.\n") == 1


def test_eight_ranks_do_not_learn_without_a_warm_up(daemon: Daemon) -> None:
    """Measured: 7.4 %. One of ten is chance."""
    start = [sys.executable, "-m", "omnireduce", "run", "-np", "8"]
    text = output_of([*start, *PROGRAM, "--warmup_epochs=0"], daemon, "torch")
    [right] = read_right(text)
    assert right < 20, text
