"""The examples of training as a benchmark: what is run, what is made of it, and what is said where it cannot run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.contest.outcomes import Outcome
from benchmarks.frameworks import dispatch, training
from benchmarks.frameworks.training import MODELS, Runs, Training, outcome_of


def found(case: Training, **ms: float) -> Outcome:
    """Outcome of a case in which each entrant takes `ms` milliseconds per step, and all models are equally good."""
    runs = {label: Runs([ms[label.replace(" ", "_")]] * 3, [0.5] * 3) for label in case.labels}
    return outcome_of(case, runs)


def test_who_is_compared_with_whom() -> None:
    plain = found(Training("embedding", 2), omnireduce=5.0, gloo=9.0, omnireduce_dense=50.0, gloo_dense=55.0)
    assert [(verdict.case.partition(": ")[2], verdict.ratio, verdict.met) for verdict in plain.verdicts] == [
        ("against dense", 11.0, True), ("both dense", 1.1, False),
    ]  # fmt: skip
    shaped = Training("embedding", 4, "1gbit")
    ms = {"omnireduce": 5.0, "gloo": 6.0, "omnireduce_dense": 50.0, "gloo_dense": 110.0}
    assert [(verdict.ratio, verdict.met) for verdict in found(shaped, **ms).verdicts] == [
        (22, True),
        (2.2, True),
        (1.2, False),
    ]
    assert found(replace(shaped, ranks=2), **ms).verdicts == []
    digits = Training("digits", 2)
    assert found(digits, omnireduce=10.4, gloo=10.0).verdicts[0].met
    assert not found(digits, omnireduce=10.6, gloo=10.0).verdicts[0].met
    assert not found(Training("digits", 4, "1gbit"), omnireduce=10.4, gloo=10.0).verdicts[0].met


def test_a_model_that_is_not_as_good_is_wrong() -> None:
    case = Training("digits", 2)
    runs = {"omnireduce": Runs([5.0], [90.0]), "gloo": Runs([6.0], [96.0])}
    assert [row["wrong"] for row in outcome_of(case, runs).rows] == [1, 0]


def test_without_gloo_there_is_no_verdict() -> None:
    outcome = outcome_of(Training("digits", 2), {"omnireduce": Runs([5.0], [90.0]), "gloo": Runs()})
    assert [row["entrant"] for row in outcome.rows] == ["omnireduce"]
    assert [(verdict.peer, verdict.met) for verdict in outcome.verdicts] == [("without gloo", None)]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--only", "nothing"], 2, "no training's name contains 'nothing'"),
        (["--links", "2gbit"], 2, "'2gbit' is not one of"),
        (["--turns", "0"], 2, "0 is not in the range"),
    ],
)
def test_wrong_input(options: list[str], status: int, message: str) -> None:
    result = CliRunner().invoke(main, ["training", *options])
    assert (result.exit_code, message in result.output) == (status, True), result.output


needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="no torch here; `make torch` installs it")


@needs_torch
def test_all_reduce_of_torch_against_gloo() -> None:
    result = CliRunner().invoke(main, ["all-reduce", "--only", "4 KiB"])
    assert result.exit_code == 0, result.output
    (row,) = (line for line in result.output.splitlines() if "4 KiB" in line)
    *numbers, ours_by, theirs_by = row.split()[-5:]
    ours, theirs, ratio = (float(number.rstrip("x")) for number in numbers)
    assert theirs / ours == pytest.approx(ratio, rel=0.05)
    assert (ours_by, theirs_by) == ("memory", "tcp")


def test_an_all_reduce_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(main, ["all-reduce", "--only", "5 KiB"])
    assert result.exit_code == 2
    assert "no case's name contains '5 KiB'; there are 100 MiB, density 1" in result.output


@needs_torch
def test_what_torch_adds_to_a_call() -> None:
    result = CliRunner().invoke(main, ["dispatch", "--turns", "1"])
    assert result.exit_code == 0, result.output
    carriers = dict.fromkeys((dispatch.SYNC, dispatch.ASYNC), "memory") | dict.fromkeys(
        (dispatch.SMALL, dispatch.LARGE), "tcp"
    )
    for way, expected in carriers.items():
        (line,) = (each for each in result.output.splitlines() if each.strip().startswith(way))
        *numbers, carrier = line.removeprefix(f" {way}").split()
        assert carrier == expected
        ours, theirs, more = map(int, numbers)
        assert min(ours, theirs) > 0
        assert abs(theirs - ours - more) <= 1
    assert "<= 60 us" in result.output
    assert "<= 300 us" in result.output


def test_one_run_of_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Omnireduce alone, with few steps: what gloo does is not ours to test."""
    for package in ("torch", "sklearn"):
        if find_spec(package) is None:
            pytest.skip(f"no {package} here; `make torch` installs it")
    monkeypatch.setattr(training, "python_of", lambda name: Path(sys.executable))
    monkeypatch.setitem(training.MODELS, "digits", MODELS["digits"]._replace(variants={"": ("--steps", "3")}))
    monkeypatch.setattr(training, "GLOO", "omnireduce")
    options = ["--links", "this host", "--ranks", "2", "--only", "digits", "--turns", "1", "--results", str(tmp_path)]
    result = CliRunner().invoke(main, ["training", *options])
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "training.json").read_text())
    assert (row["case"], row["entrant"], row["rounds"]) == ("training, digits, 2 ranks, this host", "omnireduce", 1)
    assert row["steps_per_s"] > 0


def test_what_a_run_says_when_it_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(training, "_output", lambda *_: "Traceback: it fell")
    monkeypatch.setattr(training, "python_of", lambda name: Path(sys.executable))
    (outcome,) = training.run_trainings([Training("digits", 2)], 1)
    assert (outcome.rows, [verdict.peer for verdict in outcome.verdicts]) == ([], ["without omnireduce, gloo"])
    assert "did not say how fast it was: Traceback: it fell" in capsys.readouterr().err
