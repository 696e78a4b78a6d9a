"""The fixture that runs a test once for each transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transports import RDMA

from .pairs import PAIRS, Pair, StreamPair

kinds = list(PAIRS)
if RDMA:
    from .rdma_pair import RdmaPair

    kinds.append(RdmaPair)


def _open(kind: type[Pair]) -> Iterator[Pair]:
    result = kind()
    yield result
    result.close()


@pytest.fixture(params=kinds, ids=lambda kind: kind.name)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from _open(request.param)


@pytest.fixture(params=[kind for kind in PAIRS if issubclass(kind, StreamPair)], ids=lambda kind: kind.name)
def streams(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Only those that frame a byte stream."""
    yield from _open(request.param)
