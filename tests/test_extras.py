"""Packages that only some parts need: what is said where one is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
from local_cluster import ROOT, WAIT_S

from omnireduce.support import extras
from omnireduce.support.extras import install, need

FRONTS = {  # an import that fails without the module, and the begin of the advice
    "torch": ("import omnireduce.torch", "pip install "),
    "keras": ("import omnireduce.keras", "pip install "),
    "jax": ("import omnireduce.jax", "pip install jax"),
    "ray": ("import omnireduce.ray", "pip install "),
    "needle": ("import omnireduce.needle; omnireduce.needle.init()", "put its folder `python` on PYTHONPATH"),
}


def listed(name: str) -> list[str]:
    return [
        "numba>=0.60",
        'optuna>=4; extra == "tune"',
        "a<2 ; python_version > '3' and extra == 'two'",
        "b; extra == 'two'",
    ]


def test_the_packages_of_an_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "requires", listed)
    assert install("optuna", "tune") == "pip install 'optuna>=4'"
    assert install("a", "two") == "pip install 'a<2' b"
    assert install("jax") == "pip install jax"
    assert install("yaml", "none") == "pip install pyyaml"


def test_where_omnireduce_itself_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", nothing)
    assert install("optuna", "tune") == "pip install optuna"


def test_what_is_here_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    need("numpy", "this test")
    need("string", "this test")
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(
        ModuleNotFoundError, match="this test needs numpy, which is not installed here: pip install"
    ) as it:
        need("numpy", "this test")
    assert it.value.name == "numpy"


@pytest.mark.parametrize("module", FRONTS)
def test_a_front_without_its_package_says_how_to_get_it(module: str) -> None:
    statement, advice = FRONTS[module]
    code = f"import sys; sys.modules[{module!r}] = None\n{statement}"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert result.returncode == 1
    message = f"ModuleNotFoundError: omnireduce.{module} needs {module}, which is not installed here: {advice}"
    assert result.stderr.splitlines()[-1].startswith(message)
