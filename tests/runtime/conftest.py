"""Fixtures for the tests of the public API."""

from __future__ import annotations

import pytest
from local_cluster import Daemon, configured
from transports import WAYS, over

from omnireduce.config import Config


@pytest.fixture(params=WAYS)
def config(daemon: Daemon, request: pytest.FixtureRequest) -> Config:
    """Three shards, over each transport."""
    return configured(daemon.addresses, *over(request.param))


@pytest.fixture
def local(daemon: Daemon) -> Config:
    """Three shards, over whatever `auto` takes on one host."""
    return configured(daemon.addresses)
