"""`replay`: files of layers, training by their timing, and the recording of a model of torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from local_cluster import MPIRUN, WAIT_S, Daemon, Ranks, configured, unique_job

from omnireduce.errors import UsageError
from omnireduce.switchml import Context
from omnireduce.worker.cli import main
from omnireduce.worker.switchml.benchmark import print_nothing
from omnireduce.worker.switchml.recording import HEADER, Layer, read_layers, write_layers
from omnireduce.worker.switchml.replay import Device, Replay, Training, _iterate

NUMBER = r"#[\d.e+-]+#"
LAYERS = [Layer(0, 1000, 2000, 3000), Layer(1, 20, 0, 1000), Layer(2, 300, 1000, 0)]
ASKED = Replay(num_iters=2, num_warmup_iters=1, verify=True, err=1.0, random=True, seed=5, overlap="iterations")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.csv"
    write_layers(LAYERS, path)
    assert path.read_text().splitlines()[0] == HEADER
    assert read_layers(path) == LAYERS
    path.write_text("7, 5, 6, 7\n\n8,1,0,0\n")
    assert read_layers(path) == [Layer(7, 5, 6, 7), Layer(8, 1, 0, 0)]
    path.write_text(f"{HEADER}\n7, 5, 6, 7\n", "utf-8-sig")  # as spreadsheets write it
    assert read_layers(path) == [Layer(7, 5, 6, 7)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model.csv: has no layers, expected lines of layer_index, numel, forward_pass_ns, backward_pass_ns"),
        ("0, 5, 6\n", "model.csv:1: got 3 values, expected 4: layer_index, numel"),
        (f"{HEADER}\n0, 0, 1, 1\n", "model.csv:2: numel: got '0', expected a whole number from 1 to 2^40"),
        ("0, 1, 1, -1\n", "model.csv:1: backward_pass_ns: got '-1', expected a whole number from 0"),
        ("0, 1, 1e3, 1\n", "model.csv:1: forward_pass_ns: got '1e3', expected a whole number from 0"),
        ("index, numel, forward, backward\n", "model.csv:1: layer_index: got 'index', expected a whole number"),
        ("0, 1, 1, 1\n2, 1, 1, 1\n", "model.csv:2: layer_index: got 2, expected 1: one after the other"),
        (None, "model.csv: no such file"),
        ("".join(f"{at}, 1, 0, 0\n" for at in range(10_002)), "model.csv:10001: more than 10000 layers"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "model.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_layers(path)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def worker(*arguments: str, cwd: Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """On an aggregator of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNIREDUCE_")}
    launcher = [] if ranks == 1 else [str(MPIRUN), "-n", str(ranks)]
    command = [*launcher, sys.executable, "-m", "omnireduce", "replay", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=4 * WAIT_S, check=False
    )


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
@pytest.mark.parametrize("options", [["--random", "1"], ["--overlap", "backward"], ["--overlap", "none"]])
def test_two_ranks_train_by_the_file(tmp_path: Path, options: list[str]) -> None:
    write_layers(LAYERS, tmp_path / "model.csv")
    result = worker(
        "--num-iters", "3", "--json", "found.json", *options, "--verify", "model.csv", cwd=tmp_path, ranks=2
    )
    assert result.returncode == 0, result.stderr
    patterns = [
        r"Signal handler thread started\. .*", r"Running 5 warmup iterations\.", r"Warmup finished\.",
        r"Running 3 iterations\.",
        *(rf"Iteration #{number}# finished\. Duration: {NUMBER} ns Rate: {NUMBER} iter/s\." for number in range(3)),
        r"All iterations finished\.", "Verifying final results", r"Data verified successfully\.", "",
        *(rf"{name} [\d.e+]+ iter/s" for name in ("Min", "Max", "Median", "Mean", "Std dev")),
        r"Cleaning up\.", "Signal handler thread is exiting",
    ]  # fmt: skip
    lines = result.stdout.splitlines()
    assert len(lines) == len(patterns), result.stdout
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines, strict=True)), result.stdout
    report = json.loads((tmp_path / "found.json").read_text())
    assert (report["world_size"], report["wrong"], len(report["ns"])) == (2, 0, 3)
    assert report["rate"]["max"] == pytest.approx(1e9 / min(report["ns"]))


def test_an_iteration_begins_before_the_sums_of_the_last_one_are_there(daemon: Daemon) -> None:
    """The other rank submits only the gradients of the last layers: this one ends its backward pass all the same, but
    not its next forward pass."""
    config = configured(daemon.addresses, f"cluster.job={unique_job('replay')}")
    contexts = Ranks(2, lambda rank: Context().start(config, rank=rank, size=2)).results()
    training = Training(contexts[0], LAYERS, ASKED)
    assert training.iterate() >= 2000 + 3000 + 1000 + 1000
    other = [np.zeros(layer.numel, np.float32) for layer in reversed(LAYERS)]
    for each in other[:2]:
        contexts[1].allreduce_async(each)
    contexts[1].wait_for_all_jobs(WAIT_S)
    second = Ranks(1, lambda _: training.iterate())
    [before] = [job for job in training._jobs[:1] if job is not None]
    with pytest.raises(TimeoutError):
        before.wait(0.001)
    contexts[1].allreduce_async(other[2])
    before.wait(WAIT_S)
    second.results()
    for each in other:
        contexts[1].allreduce_async(each)
    training.finish()
    assert training.wrong().count > 0  # the other rank's gradients were not what is expected
    for context in contexts:
        context.stop()


@pytest.mark.parametrize("overlap", ["backward", "none"])
def test_an_iteration_may_end_with_its_sums(daemon: Daemon, overlap: str) -> None:
    config = configured(daemon.addresses, f"cluster.job={unique_job('replay')}")
    replay = Replay(num_iters=1, num_warmup_iters=0, verify=True, err=0.0, random=False, seed=0, overlap=overlap)

    def run(rank: int) -> list[int]:
        with Context().start(config, rank=rank, size=2) as context:
            training = Training(context, LAYERS, replay)
            training.iterate()
            assert all(job is not None and job.over for job in training._jobs)
            right = training.wrong().count
            training.use_new_sums()
            return [right, training.wrong().count]

    assert Ranks(2, run).results() == [[0, 1320]] * 2


class Losing(Training):
    """Does not submit the gradient of layer 1 in the last iteration: its sum is never written."""

    def _submit(self, number: int) -> None:
        self.submitted = getattr(self, "submitted", 0) + 1
        if self.submitted != (ASKED.num_warmup_iters + ASKED.num_iters) * len(LAYERS) - 1:
            super()._submit(number)


@pytest.mark.parametrize(("kind", "wrong"), [(Training, 0), (Losing, LAYERS[1].numel)])
def test_the_check_sees_what_the_last_iteration_has_not_summed(
    daemon: Daemon, kind: type[Training], wrong: int
) -> None:
    """Though those before, while whose sums it begins, have summed the same."""
    config = configured(daemon.addresses, f"cluster.job={unique_job('replay')}")

    def run(rank: int) -> int:
        with Context().start(config, rank=rank, size=2) as context:
            training = kind(context, LAYERS, ASKED)
            _iterate(training, ASKED, print_nothing)
            return training.wrong().count

    assert Ranks(2, run).results() == [wrong] * 2


def test_a_device_computes_for_as_long_as_it_is_told() -> None:
    begin = time.perf_counter_ns()
    device = Device()
    for _ in range(20):
        device.compute(100_000)
    assert time.perf_counter_ns() - begin >= 20 * 100_000


MODELS = """
import time

import torch
from torch import nn

def plain():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), torch.ones(4, 8)

def shared():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    return nn.Sequential(first, second), (torch.ones(2, 4),), lambda output: (output ** 2).mean()

def attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return layer, {"src": torch.ones(2, 3, 8)}, torch.sum

SPIN_NS = 5_000_000

class Spin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        spin()
        return gradient

def spin():
    end = time.perf_counter_ns() + SPIN_NS
    while time.perf_counter_ns() < end:
        pass

class Slow(nn.Linear):
    def forward(self, x):
        spin()
        return super().forward(x)

class Heads(nn.Module):
    "Three layers, of which only the middle one gets a gradient; the input gets one after it."

    def __init__(self):
        super().__init__()
        self.first, self.used, self.last = Slow(4, 4), nn.Linear(4, 2), Slow(4, 4)

    def forward(self, x):
        self.first(x)
        found = self.used(Spin.apply(x))
        self.last(x)
        return found

def heads():
    return Heads(), torch.ones(2, 4, requires_grad=True)

def unused():
    return nn.Linear(3, 3).requires_grad_(False), torch.ones(1, 3, requires_grad=True)

def leaves():
    raise SystemExit(0)

def no_model():
    return 3

def broken():
    return nn.Linear(3, 3), torch.ones(1, 4)

def no_loss():
    return nn.LSTM(3, 3), torch.ones(1, 4, 3)
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """`replay --record` of a function of MODELS, in the folder of the test."""
    pytest.importorskip("torch", reason="no torch here; `make torch` installs it")
    (tmp_path / "recorded_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    options = ["--output", "model.csv", "--num-iters", "3", "--num-warmup-iters", "1"]

    def run(name: str) -> Result:
        monkeypatch.delitem(sys.modules, "recorded_models", raising=False)
        return CliRunner().invoke(main, ["replay", "--record", f"recorded_models:{name}", *options])

    return run


@pytest.mark.parametrize(
    ("name", "numels"),
    [("plain", [8 * 16 + 16, 16 * 2 + 2]), ("shared", [16, 4]), ("attention", None)],
)
def test_a_model_of_torch_is_recorded(record: Callable[[str], Result], name: str, numels: list[int] | None) -> None:
    result = record(name)
    assert result.exit_code == 0, result.stderr
    layers = read_layers("model.csv")
    assert numels is None or [layer.numel for layer in layers] == numels
    total = sum(layer.numel for layer in layers)
    assert name != "attention" or total == 3 * 8 * 8 + 3 * 8 + 8 * 8 + 8 + 2 * 8 * 16 + 16 + 8 + 4 * 8
    assert re.fullmatch(
        rf"model\.csv: {len(layers)} layers, {total} parameters, forward [\d.]+ ms, backward [\d.]+ ms\n", result.stdout
    )
    assert all(layer.backward_pass_ns > 0 for layer in layers)
    assert layers[-1].forward_pass_ns > 0


def test_all_layers_together_take_as_long_as_the_model(record: Callable[[str], Result]) -> None:
    """Two layers without a gradient take 5 ms each, one before and one after the only one that has one. Behind that the
    backward pass goes on for 5 ms."""
    result = record("heads")
    assert result.exit_code == 0, result.stderr
    [layer] = read_layers("model.csv")
    assert layer.numel == 4 * 2 + 2
    assert layer.forward_pass_ns >= 2 * 5_000_000
    assert layer.backward_pass_ns >= 5_000_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unused", "no parameter of the model got a gradient"),
        ("leaves", "recorded_models:leaves: SystemExit: 0"),
        ("no_model", "it returned an int, expected (model, input) or (model, input, loss)"),
        ("broken", "the model cannot be trained: RuntimeError: "),
        ("no_loss", "the output is a tuple, no tensor: return a loss, too"),
        ("none", "recorded_models:none cannot be loaded: AttributeError: module 'recorded_models' has no attribute"),
    ],
)
def test_a_model_that_cannot_be_recorded(record: Callable[[str], Result], name: str, message: str) -> None:
    result = record(name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("model.csv").exists()


def test_without_torch_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not here')\n")
    code = "import sys; sys.path.insert(0, '.'); from omnireduce.worker.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "replay", "--record", "a:b", "--output", "model.csv"],
        cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr == "Error: torch is not installed here; `make torch`, or pip install 'torch>=2.11'\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "expected MODEL.CSV, or --record MODULE:FUNCTION --output MODEL.CSV"),
        (["model.csv", "--output", "x.csv"], 2, "expected MODEL.CSV, or --record"),
        (["--record", "a:b"], 2, "expected MODEL.CSV, or --record"),
        (["model.csv", "--device", "gpu"], 2, "--device gpu: these tensors are in the memory of the host"),
        (["none.csv"], 2, "none.csv: no such file, expected a CSV file"),
        (["--verify", "none.csv"], 2, "none.csv: no such file, expected a CSV file"),
        (["--random", "0", "--verify", "1", "none.csv"], 2, "none.csv: no such file, expected a CSV file"),
        (["none.csv", "--verify", "2"], 2, "unexpected extra argument (2)"),
        (["none.csv", "--verify=2"], 2, "'--verify': '2' is not a valid boolean"),
        (["--record", "a:b", "--output", "none/x.csv"], 2, "none/x.csv: there is no folder none"),
    ],
)
def test_wrong_options_of_replay(arguments: list[str], status: int, message: str) -> None:
    result = CliRunner().invoke(main, ["replay", *arguments])
    assert result.exit_code == status
    assert message in result.stderr
