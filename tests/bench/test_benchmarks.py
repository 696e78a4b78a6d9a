"""The benchmark against others: its verdicts, its files, and a small run of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.cases import Case, all_cases, target_cases
from benchmarks.contest import OURS, SCAN, Measured, Result
from benchmarks.report import Results, rows_of
from benchmarks.targets import verdicts


def measured(case: Case, **ms: float) -> Measured:
    labels = {"ours": OURS, "scan": SCAN, "mpich": "mpich in place", "gloo": "gloo", "agsparse": "AGsparse"}
    dense = {"ours", "scan", "mpich", "gloo"}
    results = {labels[key]: Result(labels[key], key in dense, [value] * 3, [0.1] * 3) for key, value in ms.items()}
    return Measured(case, case.density, case.density, results)


def test_the_best_dense_peer_is_what_counts() -> None:
    lines = verdicts([measured(Case("shm", 2, "100 MiB", 0.1), ours=10.0, scan=1.0, mpich=50.0, gloo=49.0)])
    assert [(each.peer, each.ratio, each.met) for each in lines] == [("gloo", 4.9, False)]


def test_the_scan_is_a_bound() -> None:
    lines = verdicts([measured(Case("shm", 2, "100 MiB", 0.01), ours=6.0, scan=4.0, mpich=60.0, gloo=99.0)])
    assert [(each.peer, each.ratio, each.met) for each in lines] == [("mpich in place", 10.0, True), (SCAN, 1.5, True)]


def test_small_tensors_have_a_limit_as_well() -> None:
    lines = verdicts([measured(Case("shm", 2, "4 KiB", 1.0), ours=0.2, gloo=0.3)])
    assert [(each.peer, each.met) for each in lines] == [("gloo", True), ("limit", False)]


def test_rows_are_compared_with_those_that_ran() -> None:
    lines = verdicts([measured(Case("shm", 4, "100 MiB", 0.01, kind="rows"), ours=1.0, agsparse=3.9)])
    assert [(each.peer, each.met) for each in lines] == [("AGsparse", False)]


def test_cases_differ() -> None:
    for cases in (target_cases(), all_cases()):
        assert len({case.name for case in cases}) == len(cases)


def test_files_are_complete_after_every_case(tmp_path: Path) -> None:
    found = Results(tmp_path / "new")
    for density in (0.1, 0.01):
        one = measured(Case("shm", 2, "1 MiB", density), ours=1.0, mpich=2.0)
        found.add(rows_of(one), verdicts([one]))
        rows = json.loads((tmp_path / "new" / "rows.json").read_text())
        assert [row["entrant"] for row in rows[-2:]] == [OURS, "mpich in place"]
        summary = json.loads((tmp_path / "new" / "summary.json").read_text())
        assert set(summary[-1]) == {"case", "value", "unit", "peer", "peer_value", "ratio", "target", "met"}
    assert len(summary) == 2


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpirun").exists() or importlib.util.find_spec("mpi4py") is None,
    reason="no MPI in this environment; the extra `mpi` brings one",
)
def test_a_small_run(tmp_path: Path) -> None:
    options = ["--quick", "--only", "shm, 2 ranks, 64 KiB", "--rounds", "3", "--peers", "mpich"]
    done = CliRunner().invoke(main, ["run", *options, "--results", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["entrant"] for row in rows} == {OURS, SCAN, "mpich in place", "mpich out of place"}
    assert all(row["rounds"] == 3 and row["wrong"] == 0 and row["ms"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--only", "nonsense"], "no case's name contains 'nonsense'"), (["--peers", "nccl"], "--peers: got nccl")],
)
def test_wrong_options_are_told(options: list[str], expected: str) -> None:
    done = CliRunner().invoke(main, ["run", *options])
    assert done.exit_code == 2
    assert expected in done.output
