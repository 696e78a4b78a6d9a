"""Fixtures for the tests of real faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.harness.testbed import Host, TestbedError
from benchmarks.harness.testbed import testbed as new_testbed  # or pytest takes it for a test

RATE = "1gbit"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Network namespaces; where there can be none, the tests are skipped with the reason."""
    try:
        with new_testbed(5, RATE) as found:
            yield found
    except TestbedError as error:
        pytest.skip(f"no network namespaces: {error}")
