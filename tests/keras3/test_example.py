"""The example of warm-up: the same script ends near chance without, and learns with it."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
from launched import needs_mpirun, printed
from local_cluster import ROOT, Daemon


def learned(daemon: Daemon, warmup_epochs: int) -> tuple[float, str]:
    """How many percent of the digits eight ranks read right then, and all that they print."""
    said = printed(daemon, "torch", str(ROOT / "examples/keras_warmup.py"), f"--warmup_epochs={warmup_epochs}", size=8)
    *_, result, last = said.splitlines()
    assert re.fullmatch(r"Hvd Procs 8 Total time: [\d.]+ second", last)
    found = re.fullmatch(r"([\d.]+)% of digits read right", result)
    assert found, said
    return float(found[1]), said


@needs_mpirun
def test_eight_ranks_learn_only_with_a_warm_up(daemon: Daemon) -> None:
    """Measured: 7.4 % without, 87.9 % with it. One of ten is chance."""
    if find_spec("sklearn") is None:
        pytest.skip("no sklearn here; `make torch` installs it")
    without, said = learned(daemon, 0)
    assert without < 20, said
    with_it, said = learned(daemon, 3)
    assert with_it > 60, said
    rates = re.findall(r"learning_rate: ([\d.]+)", said)
    assert rates == ["0.0667", "0.1133", *["0.1600"] * 10]  # 0.16 / 8 * (epoch * 7 / 3 + 1)
    assert said.count("\nEpoch 3: finished gradual learning rate warmup to 0.16.\n") == 1
