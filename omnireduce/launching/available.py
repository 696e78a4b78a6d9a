"""`omnireduce run --check-build`: what is available here."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from omnireduce.version import __version__

_FRAMEWORKS = (("NumPy", "numpy"), ("PyTorch", "torch"), ("Keras", "keras"), ("Ray", "ray"))
_LAUNCHERS = (("ssh", "ssh"), ("mpirun", "mpirun"), ("srun", "srun"), ("torchrun", "torchrun"))
_INFINIBAND = Path("/sys/class/infiniband")


def report_available() -> str:
    """The text, in the form that users of horovodrun know."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    launchers = [
        ("this program", True),
        *((name, shutil.which(word, path=path) is not None) for name, word in _LAUNCHERS),
    ]
    devices = _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())
    sections = (
        ("Available Frameworks", [(name, _is_there(module)) for name, module in _FRAMEWORKS]),
        ("Available Controllers", launchers),
        (
            "Available Tensor Operations",
            [("shared memory", Path("/dev/shm").is_dir()), ("TCP", True), ("RDMA", _is_there("pyverbs") and devices)],
        ),
    )
    text = f"omnireduce v{__version__}:\n"
    for title, entries in sections:
        text += f"\n{title}:\n" + "".join(f"    [{'X' if there else ' '}] {name}\n" for name, there in entries)
    return text


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
