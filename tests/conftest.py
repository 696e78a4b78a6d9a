"""What all tests share: a daemon of three shards, and how hypothesis runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
from local_cluster import Daemon
from transports import carriers

from omnireduce.support.config.schema import SECRET_VARIABLE

LONG = {"pytorch", "siege", "faults", "deploy", "bench"}
settings.register_profile(
    "tests",
    deadline=None,  # machines that run tests are busy
    print_blob=True,
    derandomize="CI" in os.environ,
    max_examples=20 if os.environ.get("NUMBA_DISABLE_JIT") == "1" else 60,  # plain Python kernels are slow
)
settings.load_profile("tests")
# A shell may have made them ignored for what it starts in the background, and nohup; children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.pop(SECRET_VARIABLE, None)  # what a developer has set does not count


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few tests that take long come first: else one of them runs alone at the end."""
    items.sort(key=lambda item: item.path.parent.name not in LONG)


@pytest.fixture(autouse=True)
def _what_is_meant_carries(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test whose configuration names a transport moves tensors by that one, if it moves any."""
    yield
    idle = carriers.take()
    assert not idle or request.node.get_closest_marker("refuses_transport"), f"meant, and idle: {', '.join(idle)}"


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    with Daemon(3) as found:
        yield found
