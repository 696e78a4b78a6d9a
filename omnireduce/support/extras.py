"""Packages that only some parts of omnireduce need: checks, and advice how to install them.

The advice names the packages themselves, as omnireduce's own metadata list them for each extra. So it fits if
omnireduce was installed from a checkout, from a wheel, or not at all.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

_EXTRA = re.compile(r"(?P<package>[^;]+);.*\bextra == ['\"](?P<extra>[\w-]+)['\"]")
_PACKAGES = {"yaml": "pyyaml"}  # by module, the packages with another name


def install(module: str, extra: str = "") -> str:
    """The command that installs `module`, and the other packages of `extra`, into this environment."""
    try:
        matches = [_EXTRA.match(requirement) for requirement in requires("omnireduce") or ()]
    except PackageNotFoundError:
        matches = []
    packages = [match["package"].strip() for match in matches if match is not None and match["extra"] == extra]
    return f"pip install {shlex.join(packages or [_PACKAGES.get(module, module)])}"


def need(module: str, feature: str, extra: str = "", *, install_advice: str = "") -> None:
    """Raise ModuleNotFoundError unless `module` is installed here. The error says that `feature` needs it, and how to
    get it: by `install_advice`, or by the command of `install`."""
    if sys.modules.get(module) is None and (module in sys.modules or find_spec(module) is None):
        advice = install_advice or install(module, extra)
        raise ModuleNotFoundError(f"{feature} needs {module}, which is not installed here: {advice}", name=module)
