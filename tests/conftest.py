"""A daemon of three shards for all tests, the tiers of tests, the guard of unit tests, and settings of hypothesis."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from local_cluster import Daemon
from tiers import TESTS, TIERS, left_out, tier_of_test
from transports import carriers

from omnireduce.support.config.schema import SECRET_VARIABLE

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
os.environ.pop(SECRET_VARIABLE, None)  # a developer's own secret does not count
STARTS = {"nursery.fork", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}  # audit events
CONNECTS = {"socket.connect", "socket.sendto"}
_unit_test_runs = False


def _keep_unit_tests_pure(event: str, _arguments: tuple[object, ...]) -> None:
    """Audit hook: fail a unit test that starts a process or connects a socket."""
    if _unit_test_runs and (event in STARTS or event in CONNECTS):
        pytest.fail(f"{event} in a unit test: give it a later tier (tiers.py), or let it start and connect nothing")


sys.addaudithook(_keep_unit_tests_pure)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of tiers that `-m` leaves out are not imported, which takes long where they load a framework."""
    return True if left_out(collection_path, config.option.markexpr) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test gets its tier. Later tiers come first: else one of their files runs alone at the end."""
    for item in items:
        marked = {mark.name for mark in item.iter_markers() if mark.name in TIERS}
        try:
            tier = tier_of_test(item.path.relative_to(TESTS).as_posix(), marked)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        if not marked:
            item.add_marker(tier)
        item.user_properties.append(("tier", tier))  # reports have it
    items.sort(key=lambda item: -TIERS.index(dict(item.user_properties)["tier"]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Watch a unit test and the setup of its fixtures."""
    global _unit_test_runs
    _unit_test_runs = dict(item.user_properties)["tier"] == "unit"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Stop watching: fixtures of the whole session end with the last test, whatever its tier."""
    global _unit_test_runs
    _unit_test_runs = False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds of each tier: of setup, call and teardown of its tests, several of which run at the same time."""
    seconds, tests = Counter[str](), dict[str, set[str]]()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            tier = dict(report.user_properties).get("tier")  # none if the process of the tests has crashed
            if tier is not None:
                seconds[tier] += report.duration
                tests.setdefault(tier, set()).add(report.nodeid)
    for tier in (tier for tier in TIERS if tier in tests):
        terminalreporter.write_line(f"tier {tier:<12} {len(tests[tier]):6} tests {seconds[tier]:6.0f} s of tests")


@pytest.fixture(autouse=True)
def _configured_transports_carry(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test whose configuration names a transport, and whose tensors another transport moved."""
    yield
    idle = carriers.take()
    assert not idle or request.node.get_closest_marker("refuses_transport"), f"meant, and idle: {', '.join(idle)}"


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    with Daemon(3) as started:
        yield started
