"""`omnireduce plan`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from omnireduce.console.commands import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_it_prints_a_table_and_the_configuration() -> None:
    result = run("--elements", "1000000", "--ranks", "4", "--hosts", "2", "--shards", "1,2")
    assert result.exit_code == 0, result.output
    assert "4 ranks, 2 hosts of 8 processors, links of 10 Gbit/s and 50 us" in result.output
    rows = [line.split() for line in result.output.splitlines() if line.split()[:1] in (["1"], ["2"])]
    assert len(rows) == 8
    assert [float(row[-4]) for row in rows] == sorted(float(row[-4]) for row in rows)
    assert "[cluster]\naggregators = [" in result.output


def test_saved_gradients(tmp_path: Path) -> None:
    files = []
    for rank in range(2):
        x = np.zeros((1000, 256), np.float32)
        x[rank * 100 : rank * 100 + 200] = 1
        files.append(str(tmp_path / f"g{rank}.npz"))
        np.savez(files[-1], table=x, bias=np.zeros(10, np.float32))
    result = run(*files, "--ranks", "2", "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["density"] == pytest.approx(200 / 1001)
    assert report["union_density"] == pytest.approx(300 / 1001)
    assert sum(plan["best"] for plan in report["plans"]) == 1


def test_no_plan_is_faster_than_a_ring_for_dense_tensors_on_many_hosts() -> None:
    result = run("--elements", "1000000", "--density", "1", "--ranks", "16", "--shards", "1")
    assert "no plan here is faster" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shards", "0"], "--shards '0': expected numbers from 1 to 4096"),
        (["--shards", "x"], "--shards 'x': expected numbers"),
        (["--shards", "9" * 5000], f"--shards '{'9' * 80}': expected numbers"),
        (["--dtype", "text"], "--dtype text: expected one of float16"),
        (["--overlap", "some"], "overlap 'some': expected one of random"),
        (["--ranks", "3", "--hosts", "2"], "3 ranks on 2 hosts: expected as many"),
        (["--block-size", "12"], "--block-size 12: expected a multiple of 8"),
        (["--hosts", "1"], "1 host: its ranks exchange tensors in memory"),
        (["--overlap", "none", "--density", "0.5"], "8 ranks cannot have different blocks"),
    ],
)
def test_wrong_input_is_named(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith("Error: ")
    assert message in result.output


def test_a_file_that_cannot_be_read_is_named() -> None:
    result = run("/nowhere.npy")
    assert result.exit_code == 2
    assert "/nowhere.npy: No such file" in result.output


@pytest.mark.parametrize("name", ["latency-us", "link-gbps", "cores", "rack-gbps", "speed", "density"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_are_finite(name: str, value: str) -> None:
    result = run(f"--{name}", value)
    assert result.exit_code == 2
    assert f"Invalid value for '--{name}': {value} is not" in result.output


def test_files_must_fit_the_ranks_and_each_other(tmp_path: Path) -> None:
    for name, array in (("a", np.ones(100, np.float32)), ("b", np.ones(1000, np.float32)), ("c", np.ones(9, np.bool_))):
        np.save(tmp_path / f"{name}.npy", array)
    a, b, c = (str(tmp_path / f"{name}.npy") for name in "abc")
    assert "1 files for 2 ranks" in run(a, "--ranks", "2").output
    assert "holds other tensors than" in run(a, b, "--ranks", "2").output
    assert "cannot reduce arrays of bool" in run(c, c, "--ranks", "2").output
    np.savez(tmp_path / "d.npz", x=np.ones(3, np.float32), y=np.ones(3, np.float64))
    assert "elements of 4 and 8 bytes" in run(str(tmp_path / "d.npz"), a, "--ranks", "2").output
