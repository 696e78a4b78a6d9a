"""The table of transports: what the configuration and the conformance suite must know of it, and what it allows."""

from __future__ import annotations

from typing import get_args

import pytest

from omnireduce.support.config.schema import Kind
from omnireduce.transport.kinds import TABLE, Transport, allowed_by, is_required
from omnireduce.transport.rdma_offer import AUTO, RDMA

from .pairs import PAIRS

ADD = "'A transport' in CONTRIBUTING.md"


def test_the_configuration_and_the_conformance_suite_know_each_kind() -> None:
    names = {transport.name for transport in TABLE}
    assert set(get_args(Kind)) == {AUTO, RDMA, *names}, f"{ADD} says where its name stands"
    assert names <= {pair.name for pair in PAIRS}, f"{ADD} says how it gets into the conformance suite"


@pytest.mark.parametrize(("kind", "allowed"), [("shm", "shm"), ("tcp", "tcp"), (RDMA, "tcp")])
def test_what_a_kind_allows(kind: str, allowed: str) -> None:
    """A connection for RDMA is made by TCP."""
    assert [transport.name for transport in allowed_by(kind)] == allowed.split()
    assert all(is_required(transport, kind) for transport in allowed_by(kind))
    assert allowed_by(AUTO) == list(TABLE)


@pytest.mark.parametrize("transport", TABLE, ids=lambda transport: transport.name)
def test_each_kind_works_here(transport: Transport) -> None:
    assert transport.probe().startswith("available")
