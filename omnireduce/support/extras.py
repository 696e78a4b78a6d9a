"""Packages that only some parts of omnireduce need: whether they are here, and how to install them.

The advice names the packages themselves, as omnireduce's own metadata list them for each extra. So it fits however
omnireduce was installed: from a checkout, from a wheel, or not at all.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

_EXTRA = re.compile(r"(?P<package>[^;]+);.*\bextra == ['\"](?P<extra>[\w-]+)['\"]")
_PACKAGES = {"yaml": "pyyaml"}  # that are called otherwise than their module


def install(module: str, extra: str = "") -> str:
    """The command that installs `module` and what else `extra` needs, for whoever has installed omnireduce here."""
    try:
        listed = [_EXTRA.match(requirement) for requirement in requires("omnireduce") or ()]
    except PackageNotFoundError:
        listed = []
    packages = [match["package"].strip() for match in listed if match is not None and match["extra"] == extra]
    return f"pip install {shlex.join(packages or [_PACKAGES.get(module, module)])}"


def need(module: str, what: str, extra: str = "", *, how: str = "") -> None:
    """Raise ModuleNotFoundError unless `module` is installed here. The error says that `what` needs it, and how to get
    it: by `how`, or as `install` says."""
    if sys.modules.get(module) is None and (module in sys.modules or find_spec(module) is None):
        advice = how or install(module, extra)
        raise ModuleNotFoundError(f"{what} needs {module}, which is not installed here: {advice}", name=module)
