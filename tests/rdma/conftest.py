"""These tests need RDMA devices; `make test-rdma` runs them in a guest that has some."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
DEVICES = Path("/sys/class/infiniband")
collect_ignore = [] if find_spec("pyverbs") else ["test_failures.py"]  # imports it; test_guest.py says what is missing
HOW = "`make test-rdma` runs these tests in a guest that has both"


def missing() -> str | None:
    """Return what these tests lack here, None if nothing. Where RDMA is promised, they fail rather than skip."""
    if "GUEST_NODE" in os.environ:
        return None
    if find_spec("pyverbs") is None:
        return f"no pyverbs here; {HOW}"
    if not DEVICES.is_dir() or not any(DEVICES.iterdir()):
        return f"no RDMA device here; {HOW}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    if reason is not None:
        for item in items:
            if HERE in item.path.parents:  # the hook sees the tests of all folders
                item.add_marker(pytest.mark.skip(reason=reason))
