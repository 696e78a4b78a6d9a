"""`omnireduce compression test`: what passes, what it says of what does not, and how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from local_cluster import ROOT, WAIT_S

from omnireduce.console.program import main

WRONG = """
import random
import numpy as np
from omnireduce.compression import Selector
from omnireduce.compression.grace import Compressor

class Half(Compressor):
    compress_ratio = 0.5
    def compress(self, tensor, name):
        return [tensor[tensor > 0.1], np.flatnonzero(tensor > 0.1)], tensor.shape
    def decompress(self, tensors, ctx):
        found = np.zeros(ctx, tensors[0].dtype)
        found.reshape(-1)[tensors[1]] = tensors[0]
        return found

class Shifted(Half):
    def decompress(self, tensors, ctx):
        return np.roll(super().decompress(tensors, ctx), 1)

class Wild(Half):
    def compress(self, tensor, name):
        tensor[:] = random.random()
        return [tensor], None
    def decompress(self, tensors, ctx):
        return tensors[0].reshape(-1).astype(np.float64)

class Loud(Half):
    def compress(self, tensor, name):
        if not tensor.any():
            raise ArithmeticError("all is zero")
        return [tensor], None
    def decompress(self, tensors, ctx):
        return tensors[0] * np.float32(np.inf)

class Backwards(Selector):
    def choose(self, x, name, step):
        return np.arange(x.size)[::-1]

class Odd(Half):
    def compress(self, tensor, name):
        return tensor

class Mean:
    pass
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """The command in a folder with the module `wrong`, in this process: torch is loaded once."""
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield lambda *arguments: CliRunner().invoke(main, ["compression", "test", *arguments])
    sys.modules.pop("wrong", None)


def test_the_one_of_the_document_passes(tmp_path: Path) -> None:
    """As a process of its own, in a folder that nothing names."""
    blocks = re.findall(r"^```python\n(# my_module.py\n.*?)^```$", (ROOT / "docs/grace.md").read_text(), re.M | re.S)
    (tmp_path / "my_module.py").write_text(blocks[0])
    command = [sys.executable, "-m", "omnireduce", "compression", "test", "my_module:GuardedThreshold"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    for threshold, status, last in (("0.1", 0, "Test passed!"), ("no", 1, "")):
        done = subprocess.run(
            [*command, f"threshold={threshold}", "compress_ratio=0.01"],
            cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=2 * WAIT_S,
        )  # fmt: skip
        assert (done.returncode, done.stdout.rpartition("\n")[0]) == (status, last), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("omnireduce.compression.grace:GuardedThresholdCompressor", "threshold=1e9", "compress_ratio=0.01"),
        ("omnireduce.compression:BlockTopK", "ratio=0.1", "block_size=8"),
        ("omnireduce.compression:TopK",),
    ],
)
def test_ours_pass(run: Callable[..., Result], arguments: tuple[str, ...]) -> None:
    found = run(*arguments)
    assert (found.exit_code, found.stdout, found.stderr) == (0, "Test passed!\n", "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Half", "random of shape (1000,), NumPy: expected 500 to 1000 elements, got "),
        ("Half", "all negative, NumPy: expected something to be sent, got zeros only"),
        ("Shifted", "random of shape (1000,), NumPy: expected element 0 to be"),
        ("Wild", "random of shape (1000,), NumPy: expected the gradient as it was; compress has changed it"),
        ("Wild", "random of shape (1000,), NumPy: expected ndarray of float32 (1000,), got ndarray of float64 (1000,)"),
        ("Wild", "all gradients: expected the generator of random as it was; it was seeded, or drawn from"),
        ("Loud", "all zero, NumPy: expected a compressed gradient, got ArithmeticError: all is zero"),
        ("Loud", "one element, NumPy: expected finite numbers, got inf"),
    ],
)
def test_what_fails_is_said(run: Callable[..., Result], name: str, expected: str) -> None:
    found = run(f"wrong:{name}")
    out = found.stdout.splitlines()
    assert found.exit_code == 1
    assert any(line.startswith(expected) for line in out), out
    assert re.fullmatch(r"\d+ failed", out[-1])
    assert "Test passed!" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("wrong",), "wrong: expected MODULE:CLASS, such as my_module:MyCompressor"),
        (("nowhere:Class",), "nowhere:Class cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"),
        (("wrong:Nothing",), "wrong:Nothing cannot be loaded: AttributeError"),
        (("wrong:Mean",), "wrong:Mean is a <class 'wrong.Mean'>; expected a class that derives from omnireduce.compr"),
        (("wrong:np",), "wrong:np is a <module 'numpy'"),
        (("wrong:Half", "share=3"), "wrong:Half(share=3) cannot be made: TypeError"),
        (("wrong:Half", "share"), "share: expected KEY=VALUE, an argument of the class"),
        (("omnireduce.compression:TopK", "ratio=much"), "omnireduce.compression:TopK(ratio='much') cannot be made"),
        (("wrong:Odd",), "random of shape (1000,): expected a compressed gradient; compress: expected (list of tens"),
        (("wrong:Backwards",), "random of shape (1000,): expected a compressed gradient; expected ascending places"),
    ],
)
def test_what_cannot_be_tried_is_one_line(run: Callable[..., Result], arguments: tuple[str, ...], said: str) -> None:
    found = run(*arguments)
    assert (found.exit_code, found.stdout, found.stderr.count("\n")) == (1, "", 1)
    assert found.stderr.startswith(f"Error: {said}")
