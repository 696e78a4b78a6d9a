"""The seven steps on one rank and on four."""

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
    command = [sys.executable, str(ROOT / "examples/scaling.py"), "--np", "1,4", *PROGRAM]
    text = output_of(command, daemon, "torch", 16 * WAIT_S)
    right = read_right(text)
    assert len(right) == 2, text
    assert min(right) > 60, text
    assert re.findall(r"Hvd Procs (\d) Total time: [\d.]+ second", text) == ["1", "4"]
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["ranks", "1", "4"]
    of_four = text[text.index("Hvd Procs 1") :]
    rates = re.findall(r"learning_rate: ([\d.]+)", of_four)
    assert rates == ["0.0400", "0.0600", *["0.0800"] * 10]  # 0.08 / 4 * (epoch * 3 / 3 + 1)
    assert of_four.count("Epoch 3: finished gradual learning rate warmup to 0.08.\n") == 1
