"""These tests need torch, which `make torch` installs. Without it one test says so, and the others are left out."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from local_cluster import Daemon

HAS_TORCH = find_spec("torch") is not None
collect_ignore_glob = [] if HAS_TORCH else ["test_[!v]*.py"]  # they import it; test_versions.py says what is missing
if HAS_TORCH:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def aggregators(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """Process groups of this test find these."""
    monkeypatch.setenv("OMNIREDUCE_CLUSTER_AGGREGATORS", ",".join(daemon.addresses))
    return daemon
