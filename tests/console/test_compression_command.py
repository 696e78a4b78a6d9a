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

from omnireduce.console.commands import main

WRONG = """
import random
import sys
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

class Guarded(Compressor):
    # the exercise: all above the threshold, but no fewer than a share of all
    def __init__(self, threshold, compress_ratio):
        super().__init__()
        self.threshold, self.compress_ratio = threshold, compress_ratio
    def magnitudes(self, flat):
        return np.where(np.isnan(flat), np.inf, np.abs(flat))
    def above(self, flat):
        return np.flatnonzero(self.magnitudes(flat) > self.threshold)
    def few(self, flat):
        return np.argsort(-self.magnitudes(flat), kind="stable")
    def compress(self, tensor, name):
        flat = tensor.reshape(-1)
        k, places = max(1, int(flat.size * self.compress_ratio)), self.above(flat)
        places = places if places.size >= k else self.few(flat)[:k]
        return [flat[places], places], tensor.shape
    def decompress(self, tensors, ctx):
        found = np.zeros(ctx, tensors[0].dtype)
        found.reshape(-1)[tensors[1]] = tensors[0]
        return found

class Smallest(Guarded):
    def few(self, flat):
        return np.argsort(self.magnitudes(flat), kind="stable")

class First(Guarded):
    def above(self, flat):
        return np.arange(0)
    def few(self, flat):
        return np.arange(flat.size)

class NoThreshold(Guarded):
    def above(self, flat):
        return np.arange(0)

class NoMagnitude(Guarded):
    def magnitudes(self, flat):
        return np.where(np.isnan(flat), np.inf, flat)

class NoNaN(Guarded):
    def magnitudes(self, flat):
        return np.where(np.isnan(flat), 0, np.abs(flat))

class LargestOfAll(Guarded):
    def above(self, flat):
        return np.flatnonzero(self.magnitudes(flat) > min(self.threshold, flat.max(initial=0)))

class Halved(Guarded):
    def decompress(self, tensors, ctx):
        return super().decompress(tensors, ctx) * np.float32(0.5)

class AtRandom(Guarded):
    selects = "some"
    def above(self, flat):
        return np.arange(0)
    def few(self, flat):
        return np.random.default_rng(1).permutation(flat.size)

class Means(Guarded):
    selects = "none"
    def decompress(self, tensors, ctx):
        return super().decompress([np.full_like(tensors[0], 2), tensors[1]], ctx)

class Untold(Guarded):
    selects = "most"

class Ends(Half):
    def __init__(self, place, how):
        super().__init__()
        self.place, self.how = place, how
        self.at("init")
    def at(self, place):
        if place == self.place:
            raise {"exit": SystemExit(0), "generator": GeneratorExit(), "base": BaseException("all")}[self.how]
    def compress(self, tensor, name):
        self.at("compress")
        return super().compress(tensor, name)
    def decompress(self, tensors, ctx):
        self.at("decompress")
        return super().decompress(tensors, ctx)

class Late(Half):
    def compress(self, tensor, name):
        if not tensor.any():
            raise SystemExit(0)
        return super().compress(tensor, name)

class Unasked(Half):
    compress_ratio = property(lambda self: 1 / 0)

class Mute(Half):
    def compress(self, tensor, name):
        sys.stdout.close()
        return super().compress(tensor, name)

class Named(Half):
    compress_ratio = None
    def compress(self, tensor, name):
        return [{"all": tensor}], None
    def decompress(self, tensors, ctx):
        return tensors[0]["all"]

class Unsent(Named):
    def compress(self, tensor, name):
        return [{"all": tensor, "beside": object()}], None
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
    for threshold, status, last in (("0.1", 0, "Test passed!"), ("no", 2, "")):
        result = subprocess.run(
            [*command, f"threshold={threshold}", "compress_ratio=0.01"],
            cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=2 * WAIT_S,
        )  # fmt: skip
        assert (result.returncode, result.stdout.rpartition("\n")[0].rpartition("\n")[2]) == (status, last), (
            result.stderr
        )


CHOICE = ["elements are as they were", "the largest are sent", "how many are sent"]
GUARD = ("compress_ratio=0.01", "threshold=")


@pytest.mark.parametrize(
    ("arguments", "unchecked"),
    [
        (("omnireduce.compression.grace:GuardedThresholdCompressor", "threshold=1e9", "compress_ratio=0.01"), []),
        (("omnireduce.compression.grace:RandomKCompressor",), CHOICE[1:2]),
        (("omnireduce.compression.grace:QSGDCompressor",), CHOICE),
        (("omnireduce.compression:BlockTopK", "ratio=0.1", "block_size=8"), CHOICE[1:]),
        (("omnireduce.compression:TopK",), []),
        (("omnireduce.compression:Threshold", "threshold=0.5"), []),
        (("omnireduce.compression:GuardedThreshold", "threshold=1e-9"), []),
        (("omnireduce.compression:DgcSampling", "ratio=0.3"), CHOICE[2:]),
        (("omnireduce.compression:Adaptive",), CHOICE[2:]),
        (("omnireduce.compression:RandomK", "ratio=0.1"), CHOICE[1:2]),
    ],
)
def test_ours_pass(run: Callable[..., Result], arguments: tuple[str, ...], unchecked: list[str]) -> None:
    """And it says what was looked at."""
    result = run(*arguments)
    always = ["shapes and types", "the gradient stays", "a second run sends the same"]
    checked = [*always, "generators stay", *(each for each in CHOICE if each not in unchecked)]
    lines = [f"Checked: {', '.join(checked)}", *([f"Not checked: {', '.join(unchecked)}"] if unchecked else [])]
    assert (result.exit_code, result.stdout, result.stderr) == (0, "\n".join([*lines, "Test passed!\n"]), "")


@pytest.mark.parametrize("threshold", ["0.1", "1e9", "1e-9"])
@pytest.mark.parametrize("name", ["Guarded", "AtRandom", "Means"])
def test_what_keeps_to_what_it_says_passes(run: Callable[..., Result], name: str, threshold: str) -> None:
    ratio = "compress_ratio=1" if name == "AtRandom" else GUARD[0]  # all are sent, also those above the threshold
    result = run(f"wrong:{name}", ratio, GUARD[1] + threshold)
    assert result.stdout.splitlines()[-1] == "Test passed!", result.stdout


@pytest.mark.parametrize("threshold", ["0.1", "1e9", "1e-9"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Smallest", "one above the threshold, NumPy: expected the largest magnitudes, got element"),
        ("First", "half above the threshold, NumPy: expected the largest magnitudes, got element"),
        ("NoThreshold", "half above the threshold, NumPy: expected 500 elements, got 10"),
        ("NoMagnitude", "half above the threshold, NumPy: expected 500 elements, got"),
        ("NoNaN", "with NaN, NumPy: expected the largest magnitudes, got element"),
        ("LargestOfAll", "all below the threshold, and negative, NumPy: expected 10 elements, got 1000"),
        ("Halved", "random of shape (1000,), NumPy: expected element"),
    ],
)
def test_what_misses_the_exercise_fails(run: Callable[..., Result], name: str, expected: str, threshold: str) -> None:
    result = run(f"wrong:{name}", GUARD[0], GUARD[1] + threshold)
    assert result.exit_code == 1
    assert any(line.startswith(expected) for line in result.stdout.splitlines()), result.stdout


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Half", "random of shape (1000,), NumPy: expected 500 elements, got "),
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
    result = run(f"wrong:{name}")
    out = result.stdout.splitlines()
    assert result.exit_code == 1
    assert any(line.startswith(expected) for line in out), out
    assert re.fullmatch(r"\d+ failed", out[-1])
    assert "Test passed!" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("wrong",), "wrong: expected MODULE:CLASS, such as my_module:MyClass"),
        (("nowhere:Class",), "nowhere:Class cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"),
        (("wrong:Nothing",), "wrong:Nothing cannot be loaded: AttributeError"),
        (("wrong:Mean",), "wrong:Mean is <class 'wrong.Mean'>; expected a class that derives from omnireduce.compr"),
        (("wrong:np",), "wrong:np is <module 'numpy'"),
        (("wrong:Half", "share=3"), "wrong:Half(share=3) cannot be made: TypeError"),
        (("wrong:Half", "share"), "share: expected KEY=VALUE, an argument of the class"),
        (("omnireduce.compression:TopK", "ratio=much"), "omnireduce.compression:TopK(ratio='much') cannot be made"),
        (("wrong:Untold", "threshold=1", "compress_ratio=0.5"), "selects is 'most'; expected largest, about"),
        (("wrong:Odd",), "random of shape (1000,): expected a compressed gradient; compress: expected (list of tens"),
        (("wrong:Unasked",), "the claim of the compressor cannot be read: ZeroDivisionError: division by zero"),
        (("wrong:Unsent",), "random of shape (1000,): expected a compressed gradient; "),
        (("wrong:Backwards",), "random of shape (1000,): expected a compressed gradient; expected ascending places"),
    ],
)
def test_what_cannot_be_tried_is_one_line(run: Callable[..., Result], arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"Error: {message}")


@pytest.mark.parametrize("name", ["init", "compress", "decompress"])
@pytest.mark.parametrize(
    ("how", "message"), [("exit", "SystemExit: 0"), ("generator", "GeneratorExit"), ("base", "BaseExc")]
)
def test_what_ends_the_process_is_one_line(run: Callable[..., Result], name: str, how: str, message: str) -> None:
    result = run("wrong:Ends", f"place={name}", f"how={how}")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr


def test_a_module_that_ends_the_process(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("raise SystemExit(0)")
    result = run("wrong:Any")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "Error: wrong:Any cannot be loaded: SystemExit: 0\n"


def test_a_gradient_that_ends_the_process_fails(run: Callable[..., Result]) -> None:
    result = run("wrong:Late")
    assert result.exit_code == 1
    assert "all zero, NumPy: expected a compressed gradient, got SystemExit: 0" in result.stdout.splitlines()


def test_a_compressor_that_closes_standard_output(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    result = subprocess.run(
        [sys.executable, "-m", "omnireduce", "compression", "test", "wrong:Mute"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        timeout=2 * WAIT_S,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "Error: wrong:Mute has closed standard output: what came of it cannot be printed\n"


def test_a_dict_travels(run: Callable[..., Result]) -> None:
    assert run("wrong:Named").stdout.splitlines()[-1] == "Test passed!"


def test_a_value_that_cannot_be_a_key_is_a_text(run: Callable[..., Result]) -> None:
    result = run("wrong:Half", "a={[]:1}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: wrong:Half(a='{[]:1}') cannot be made: TypeError")
