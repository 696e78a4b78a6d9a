"""The Needle to test with: the checkout in the folder OMNIREDUCE_NEEDLE, which builds its backend for the
processor with its own make, or a small stand-in."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from local_cluster import ROOT, WAIT_S

STAND_IN = ROOT / "tests/frameworks/stand_in"


@cache
def needle_folder() -> Path:
    """Folder for PYTHONPATH that has the package `needle`."""
    checkout = os.environ.get("OMNIREDUCE_NEEDLE")
    if not checkout:
        return STAND_IN
    result = subprocess.run(
        ["make"], cwd=checkout, capture_output=True, text=True, timeout=20 * WAIT_S, check=False
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return Path(checkout) / "python"
