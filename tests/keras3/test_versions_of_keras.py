"""The versions of Keras and its backends that the tests are for."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from local_cluster import ROOT


def test_the_page_names_the_versions_that_are_tested() -> None:
    pytest.importorskip("torch", reason="no torch here; `make torch` installs it")
    for name in ("keras", "jax"):
        pytest.importorskip(name, reason=f"no {name} here; `make keras` installs it")
    page, makefile = (ROOT / "docs/keras.md").read_text(), (ROOT / "Makefile").read_text()
    assert f"Tested with Keras {version('keras')}" in page
    for name in ("keras", "jax"):
        assert f"{name}=={version(name)}" in makefile
    assert f"jax {version('jax')}" in page
