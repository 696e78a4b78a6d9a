"""`python -m benchmarks profile`, as users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.contest.cases import MEMORY, TRANSPORTS


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_table_and_a_timeline(tmp_path: Path, transport: str) -> None:
    options = ["--transport", transport, "--shards", "2", "--size", "16 MiB", "--density", "0.1", "--rounds", "4"]
    result = CliRunner().invoke(main, ["profile", *options, "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"{transport}, 2 ranks, 2 shards, 16 MiB, density 0.1; 4 collectives of 16.78M bytes" in result.output
    rows = [line.split()[:2] for line in result.output.splitlines() if line.startswith(("rank", "shard"))]
    assert rows == [["rank", "0"], ["rank", "1"], ["shard", "0"], ["shard", "1"], ["rank", "0,"], ["rank", "1,"]]
    assert result.output.count("scan only") == 2
    assert "full" not in result.output
    events = json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    lanes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert lanes == {1: "rank 0", 2: "rank 1", 3: "shard 0", 4: "shard 1"}
    sizes = [event["args"]["bytes"] for event in events if event["name"] == "collective" and event["pid"] == 1]
    assert sizes.count(1 << 24) == 4  # the warm-up is left out; barriers are there
    work, who = ("combine", {1, 2}) if transport == MEMORY else ("merge", {3, 4})  # in memory, or by the shards
    assert {event["pid"] for event in events if event["name"] == work} == who


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, ["profile", "--results", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert result.output == f"Error: {tmp_path / 'file'}: cannot be made a folder: File exists\n"
