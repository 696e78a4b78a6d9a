"""`omnireduce tune` as users run it: real ranks and aggregators, tiny samples."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from local_cluster import READY_S, ROOT, Process, children, gone_within

from omnireduce.__main__ import main
from omnireduce.console.tune.report import HEADER
from omnireduce.support.config import load_config

pytest.importorskip("optuna", reason="no optuna here; the extra `tune` brings it")

PROGRAM = [sys.executable, "-m", "omnireduce", "tune"]
SMALL = ("--elements", "20_000", "--arrays", "5", "--rounds", "3")
BY_MESSAGES = ("--set", "transport.host_exchange=off")


def environ() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("OMNIREDUCE_", "HOROVOD_"))}
    return kept | {"PYTHONPATH": str(ROOT)}


def tune(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`omnireduce tune` with these words, to its end."""
    return subprocess.run(
        [*PROGRAM, *words], env=environ(), cwd=cwd, capture_output=True, text=True, check=False,
        timeout=2 * READY_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def rows_of(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_log_and_a_file_for_config(tmp_path: Path) -> None:
    """By messages, with two shards, and with a file that says something else: all but what is held may change."""
    (tmp_path / "base.toml").write_text("[protocol]\nslots = 4\ntcp_message_bytes = 262144\n")
    result = tune(
        *SMALL, *BY_MESSAGES, "--shards", "2", "--any-order", "--samples", "5", "--log", "tune.csv",
        "--write", "tuned.toml", "--config", "base.toml", "--hold", "protocol.slots",
        "--hold", "protocol.block_size=64", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "tune.csv").read_text().splitlines()[0] == ",".join(HEADER)
    rows = rows_of(tmp_path / "tune.csv")
    assert [row["sample"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert {row["state"] for row in rows} <= {"complete", "pruned"}
    assert {row["protocol.slots"] for row in rows} == {"4"}
    assert {row["protocol.block_size"] for row in rows} == {"64"}
    for key in ("protocol.scan_span", "queue.fusion_bytes", "transport.threads", "protocol.slot_bytes"):
        assert len({row[key] for row in rows}) > 1
    for row in rows:
        assert float(row["score"]) > 0
        assert float(row["default_score"]) > 0
        assert float(row["ratio"]) > 0
    assert rows[0]["protocol.slot_bytes"] == str(load_config(environ={}).protocol.slot_bytes)
    tuned = load_config(tmp_path / "tuned.toml", environ={})
    assert (tuned.protocol.slots, tuned.protocol.block_size, tuned.protocol.tcp_message_bytes) == (4, 64, 262144)
    assert tuned.transport.host_exchange == "off"
    assert tuned.cluster == load_config(environ={}).cluster
    for text in ("parameter", "default", "best", "protocol.slots", "held", "written: tuned.toml"):
        assert text in result.stdout
    used = subprocess.run(
        [*PROGRAM[:-1], "config", "--config", "tuned.toml"], env=environ(), cwd=tmp_path, capture_output=True,
        text=True, check=False, timeout=READY_S,
    )  # fmt: skip
    assert (used.returncode, used.stderr) == (0, "")
    assert "block_size = 64" in used.stdout


def test_arrays_of_files_and_what_has_no_effect(tmp_path: Path) -> None:
    """Ranks of one host sum in memory: what is about messages stays as it is. There are six points, and no more."""
    rng = np.random.default_rng(1)
    for rank in range(2):
        np.savez(tmp_path / f"g-{rank}.npz", a=rng.standard_normal(3000), b=np.zeros((20, 5), np.float32))
    words = ("--input", "g-{rank}.npz", "--rounds", "3", "--samples", "20", "--hold", "protocol.block_size")
    result = tune(*words, "--log", "tune.csv", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "a step of 2 arrays" in result.stdout
    assert re.search(r"^(no sample|[\d.]+ times).*, carried by memory$", result.stdout, re.MULTILINE)
    assert "every point was measured" in result.stdout
    rows = rows_of(tmp_path / "tune.csv")
    varies = {key for key in HEADER[2:-3] if len({row[key] for row in rows}) > 1}
    assert varies == {"queue.fusion_bytes"}
    assert len({row["queue.fusion_bytes"] for row in rows}) == len(rows) == 7


def test_a_grid_to_compare_with(tmp_path: Path) -> None:
    held = [f"--hold={key}" for key in HEADER[2:-3] if key != "queue.fusion_bytes"]
    result = tune(*SMALL, "--samples", "2", "--grid", "--log", "tune.csv", *held, cwd=tmp_path)
    assert result.returncode in (0, 1), result.stderr  # a busy machine decides, and says which rank it waits for
    assert not re.search("^Error|^Traceback", result.stderr, re.MULTILINE), result.stderr
    assert "best of 4 of the grid" in result.stdout
    assert "the search reaches" in result.stdout
    rows = rows_of(tmp_path / "tune.csv")
    grid = rows[-4:]
    assert [row["queue.fusion_bytes"] for row in grid] == ["0", "262144", "1048576", "16777216"]
    assert {row["state"] for row in grid} == {"complete"}


def test_what_an_aggregator_would_not_admit_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[aggregator]\nmax_job_bytes = 14155776\n")  # 3 x 3 x 1.5 MiB
    held = [f"--hold={key}" for key in HEADER[2:-3] if key != "protocol.slots"]
    words = (*SMALL, *BY_MESSAGES, "--config", "base.toml", "--samples", "9", "--log", "tune.csv")
    result = tune(*words, *held, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    results = {row["protocol.slots"]: (row["state"], row["ratio"] != "") for row in rows_of(tmp_path / "tune.csv")}
    assert {slots for slots, how in results.items() if how == ("impossible", False)} == {"4", "6", "8"}
    assert results["3"] == ("complete", True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hold", "protocol.blocksize=8"], "--hold: got 'protocol.blocksize=8', expected section.key"),
        (["--hold", "cluster.job"], "--hold: got 'cluster.job'"),
        (["--hold", "protocol.block_size=9"], "protocol.block_size: got 9, expected"),
        ([f"--hold={key}" for key in HEADER[2:-3]], "every parameter is held"),
        (["--input", "nowhere-{rank}.npy"], "nowhere-0.npy"),
        (["--input", "same.npy"], "expected the file of every rank"),
        (["--elements", "3"], "--elements: got 3, expected at least 24"),
        (["--log", "no/folder/tune.csv"], "there is no folder"),
        (["--write", "."], "is a directory"),
        (["-np", "4000"], "-np 4000: expected at most "),
        (["--config", "nowhere.toml"], "nowhere.toml: no such file"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["tune", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_where_nothing_is_free(tmp_path: Path) -> None:
    result = tune(*SMALL, "--hold", "protocol.block_size", "--hold", "queue.fusion_bytes", cwd=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("Error: nothing is free: ")
    assert "protocol.slots: ranks sum in memory that they share" in result.stderr


def test_a_signal_ends_all_of_it() -> None:
    with Process(*PROGRAM, *SMALL, "--samples", "1000", "--rounds", "1000", environ=environ()) as process:
        assert "2 ranks" in process.line(READY_S)
        family = children(process.pid)
        assert family
        process.signal(15)
        assert process.wait() == 128 + 15
        assert all(gone_within(pid, READY_S) for pid in family)
