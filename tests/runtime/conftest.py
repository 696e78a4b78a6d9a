"""Fixtures for the tests of the public API."""

from __future__ import annotations

import pytest
from local_cluster import Daemon, configured
from transports import KINDS, TRANSPORTS, over

from omnireduce.support.config import Config


@pytest.fixture(params=TRANSPORTS)
def config(daemon: Daemon, request: pytest.FixtureRequest) -> Config:
    """Three shards, over each transport."""
    return configured(daemon.addresses, *over(request.param))


@pytest.fixture(params=KINDS)
def by_shards(daemon: Daemon, request: pytest.FixtureRequest) -> Config:
    """The same for jobs that exchange nothing in memory: those of one rank, and those that keep state on the shards."""
    return configured(daemon.addresses, *over(request.param))


@pytest.fixture
def local(daemon: Daemon) -> Config:
    """Three shards, over whatever `auto` takes on one host."""
    return configured(daemon.addresses)
