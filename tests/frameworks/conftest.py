"""Reports of the ranks of a test's `WORKER`, by way."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_cluster import Daemon
from ranks_of import SIZE, Told, reports_in, run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which ranks write values."""
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module")
def ranks(daemon: Daemon, folder: Path, request: pytest.FixtureRequest) -> Told:
    """Of `SIZE` ranks."""
    return reports_in(run_ranks(daemon, SIZE, request.module.WORKER, str(folder)))


@pytest.fixture(scope="module")
def alone(daemon: Daemon, folder: Path, request: pytest.FixtureRequest) -> Told:
    """Report of a single process that trains on the batches of all ranks."""
    return reports_in(run_ranks(daemon, 0, request.module.WORKER, str(folder)))
