"""Fixtures for the tests of the public API."""

from __future__ import annotations

import pytest
from local_cluster import Daemon, configured
from transports import KINDS

from omnireduce.config import Config


@pytest.fixture(params=KINDS)
def config(daemon: Daemon, request: pytest.FixtureRequest) -> Config:
    """Three shards, over each transport."""
    return configured(daemon.addresses, f"transport.kind={request.param}")


@pytest.fixture
def local(daemon: Daemon) -> Config:
    """Three shards, over whatever `auto` takes on one host."""
    return configured(daemon.addresses)
