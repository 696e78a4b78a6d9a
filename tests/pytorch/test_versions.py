"""The versions of torch that the tests are for."""

from __future__ import annotations

import pytest
from local_cluster import ROOT


def test_the_page_names_the_version_that_is_tested() -> None:
    torch = pytest.importorskip("torch", reason="no torch here; `make torch` installs it")
    version = torch.__version__.partition("+")[0]
    assert f"Tested with torch {version} " in (ROOT / "docs/pytorch.md").read_text()
    assert f"torch=={version} " in (ROOT / "Makefile").read_text()
