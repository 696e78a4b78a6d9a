"""The tables of tiers fit the tree, each test gets one tier, and what is left out is known from the place of a file."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from local_cluster import ROOT, WAIT_S
from nursery import Forked
from tiers import CHOICES, SLOW, TESTS, TIERS, UNIT, left_out, tier_of_file, tier_of_test


def test_every_entry_is_a_file_or_folder_of_tests_and_stands_once() -> None:
    assert not UNIT & SLOW
    for name in UNIT | SLOW:
        path = TESTS / name
        assert path.is_file() or any(path.rglob("test_*.py")), f"{name}: there is no such file or folder of tests"
        folder = tier_of_file(str(Path(name).parent))
        assert tier_of_file(name) != folder, f"{name}: its folder is {folder}, too"


def test_a_file_has_the_tier_of_its_entry_or_of_its_folder() -> None:
    assert tier_of_file("protocol/test_windows.py") == "unit"
    assert tier_of_file("kernels/test_merge_kernels.py") == "unit"
    assert tier_of_file("runtime/test_allreduce.py") == "integration"
    assert tier_of_file("keras3/test_fit.py") == "slow"


def test_a_marker_moves_a_test_to_a_later_tier() -> None:
    assert tier_of_test("protocol/test_windows.py", set()) == "unit"
    assert tier_of_test("protocol/test_windows.py", {"slow"}) == "slow"
    assert tier_of_test("runtime/test_allreduce.py", {"slow"}) == "slow"


@pytest.mark.parametrize(
    ("path", "markers", "message"),
    [
        ("runtime/test_allreduce.py", {"unit"}, "marked unit, and its file is integration; expected a later tier"),
        ("keras3/test_fit.py", {"slow"}, "marked slow, and its file is slow; expected a later tier"),
        ("protocol/test_windows.py", {"slow", "integration"}, "marked integration and slow; expected one tier"),
    ],
)
def test_other_markers_are_refused(path: str, markers: set[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tier_of_test(path, markers)


def test_files_are_left_out_unread_where_none_of_their_tests_can_be_chosen() -> None:
    assert left_out(TESTS / "keras3", "not slow")
    assert left_out(TESTS / "keras3/test_fit.py", "unit")
    assert left_out(TESTS / "runtime/test_allreduce.py", "unit")
    assert not left_out(TESTS / "kernels", "unit")
    assert not left_out(TESTS / "kernels", "not slow")
    assert not left_out(TESTS / "keras3", "")
    assert not left_out(TESTS / "conftest.py", "unit")


def connect(address: tuple[str, int]) -> None:
    with socket.socket() as sock:
        sock.connect(address)


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run(["true"], check=True),
        os.fork,
        lambda: Forked(["-c", "pass"], {}, stderr=2),
        lambda: connect(("127.0.0.1", 9)),
    ],
    ids=["subprocess", "fork", "nursery", "connection"],
)
def test_a_unit_test_that_starts_a_process_or_connects_fails(start: Callable[[], object]) -> None:
    """This test is a unit test itself."""
    with pytest.raises(pytest.fail.Exception, match="in a unit test: give it a later tier"):
        start()


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_pytest_chooses_by_tier(choice: str) -> None:
    """Collect a folder that has files of all tiers, and a file with a test that is marked."""
    paths = ["tests/kernels", "tests/test_tidy.py", "tests/data_parallel/test_overdue_names.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "-m", choice, *paths]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=2 * WAIT_S)
    names = {line.partition("[")[0] for line in result.stdout.splitlines() if "::" in line}
    expected = {
        "unit": "tests/kernels/test_merge_kernels.py",
        "integration": "tests/data_parallel/test_overdue_names.py",
        "slow": "tests/kernels/test_cache.py",
    }
    files = {name.partition("::")[0] for name in names}
    assert {tier for tier in TIERS if expected[tier] in files} == set(TIERS).difference(CHOICES[choice])
    assert "tests/test_tidy.py::test_modules" in names
    assert ("tests/test_tidy.py::test_an_import_loads_no_more_than_it_needs" in names) == (choice != "unit")
