"""The benchmark against others, with real processes: runs of few rounds, competitors that die, bounds, memory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from local_cluster import children

from benchmarks.__main__ import main
from benchmarks.contest.cases import Case
from benchmarks.contest.compare import AFTER, BEFORE, CaseComparison, compare, compare_in_turns
from benchmarks.contest.contest import BOUND, OURS, OWN_METHODS, SCAN, WARM_UP, Contest, Entrant
from benchmarks.contest.loopback import MESSAGE_BYTES, Carrier
from benchmarks.contest.memory import measure
from benchmarks.contest.outcomes import Outcome
from benchmarks.contest.sweep import sweep
from benchmarks.harness.carriers import NO_SOCKET
from benchmarks.harness.environments import HERE, Tree
from benchmarks.harness.group import Group, PeerError, Servers, daemon, echo_servers
from benchmarks.parts import urgent
from benchmarks.peak_memory import memory_mib
from omnireduce.core.dtypes import Array

needs_mpi = pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpirun").exists() or importlib.util.find_spec("mpi4py") is None,
    reason="no MPI in this environment; the extra `mpi` brings one",
)
SMALL = [Case("shm", 2, size, 1.0, rounds=1) for size in ("4 KiB", "64 KiB", "1 MiB")]
MPICH = {"mpich in place", "mpich out of place"}


@needs_mpi
def test_a_small_run(tmp_path: Path) -> None:
    options = ["--quick", "--only", "memory, 2 ranks, 16 MiB, density 1,", "--rounds", "3", "--peers", "mpich"]
    result = CliRunner().invoke(main, ["run", *options, "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["entrant"] for row in rows} == {OURS, SCAN, *MPICH}
    assert {row["entrant"]: row["carried_by"] for row in rows} == {OURS: "memory", SCAN: None} | dict.fromkeys(
        MPICH, NO_SOCKET
    )
    assert all(row["rounds"] == 3 and row["wrong"] == 0 and row["ms"] > 0 for row in rows)


@needs_mpi
def test_an_all_gather_of_what_is_not_zero_sums_correctly_from_buffers_that_it_keeps() -> None:
    """The results of both rounds of warm-up are checked; the case in between needs other sizes."""
    rows = [Case("shm", 2, size, 0.5, kind="rows", rounds=1) for size in ("1 MiB", "64 KiB", "1 MiB")]
    assert [entrants(outcome) for outcome in sweep(rows, ["mpich"])] == [{OURS, "AGsparse"}] * 3
    elements = [Case("shm", 2, size, 0.01, rounds=1) for size in ("1 MiB", "64 KiB", "1 MiB")]
    assert [entrants(outcome) for outcome in sweep(elements, ["mpich"])] == [{OURS, "AGsparse", *MPICH}] * 3


def test_a_checkout_and_itself_in_turns() -> None:
    cases = [Case("shm", 2, "4 KiB", 1.0, rounds=1), Case("shm", 2, "4 KiB", 1.0, kind="memory", rounds=1)]
    speed, worker, shard = compare(cases, HERE, starts=1)
    assert speed.middle is not None
    assert speed.middle[0] <= speed.middle[1]
    assert (speed.name, speed.unit, worker.unit, shard.unit) == (cases[0].name, "ms", "MiB", "MiB")
    assert [each.carried_by for each in (speed, worker, shard)] == ["shm"] * 3
    assert all(min(each.before, each.after, each.ratio) > 0 for each in (speed, worker, shard))


class Wrong(Group):
    """Ranks whose results are wrong from the first timed round on, where anybody looks."""

    def __init__(self) -> None:
        self.carried_last = Counter()

    def tell(self, **order: object) -> list[dict[str, Any]]:
        if order["do"] == "case":
            return [{"density": 1.0, "union_density": 1.0, "others_density": 1.0}]
        wrong = 3 if order["check"] and order["number"] == WARM_UP else 0
        return [{"seconds": 1e-3, "cpu": 0.0, "wire_bytes": [1, 1, 1], "peak_mib": 0.0, "wrong": wrong}]


def test_what_is_compared_is_checked_in_every_round() -> None:
    contest = Contest([Entrant(replace(OWN_METHODS[0], label=name), Wrong()) for name in (BEFORE, AFTER)])
    with pytest.raises(PeerError, match="before gave 3 wrong elements: shm, 2 ranks, 4 KiB"):
        list(compare_in_turns(lambda _: contextlib.nullcontext(contest), HERE, SMALL[:1]))


def test_a_case_that_takes_more_than_it_may_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = [CaseComparison(name, "ms", 1.0, ratio, ratio) for name, ratio in (("a", 1.04), ("b", 1.06))]
    monkeypatch.setattr("benchmarks.__main__.checkout", lambda root: HERE)
    monkeypatch.setattr("benchmarks.__main__.compare_cases", lambda cases, older, starts: iter(comparisons))
    result = CliRunner().invoke(main, ["compare", "."])
    assert result.exit_code == 3
    assert result.output.endswith("1 take more than 1.05 times what they took: b\n")
    assert CliRunner().invoke(main, ["compare", ".", "--most", "1.1"]).exit_code == 0


def test_what_an_older_checkout_cannot_measure_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "rank.py").write_text("def round(kind, method, number, check): ...\n")
    chosen: list[Case] = []
    monkeypatch.setattr("benchmarks.__main__.checkout", lambda root: Tree(root, Path("python")))
    monkeypatch.setattr("benchmarks.__main__.compare_cases", lambda cases, older, starts: chosen.extend(cases) or [])
    assert HERE.repeats
    result = CliRunner().invoke(main, ["compare", str(tmp_path), "--only", "memory, 2 ranks, 1 MiB, density 1"])
    assert result.exit_code == 0, result.output
    assert [case.repeats for case in chosen] == [1]
    assert f"left out, because {tmp_path} cannot measure it: memory, 2 ranks, 1 MiB, density 1," in result.output


def test_who_compares_with_no_checkout_hears_what_is_expected(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["compare", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path}: expected a checkout of omnireduce; run `make .venv/.ready` in it first" in result.output


def entrants(found: Outcome) -> set[str]:
    assert all(row["wrong"] == 0 for row in found.rows)
    return {row["entrant"] for row in found.rows} - {SCAN}


def kill_children(chosen: Callable[[str], bool]) -> None:
    """Kill the child processes whose command line is chosen."""
    for pid in children(os.getpid()):
        if chosen(Path(f"/proc/{pid}/cmdline").read_text()):
            os.kill(pid, signal.SIGKILL)


@needs_mpi
def test_a_competitor_that_dies_is_missing_in_one_case_only(capfd: pytest.CaptureFixture[str]) -> None:
    running = sweep(SMALL, ["mpich"])
    assert entrants(next(running)) == {OURS, *MPICH}
    kill_children(lambda command: "mpirun" in command)
    assert entrants(next(running)) == {OURS}
    assert entrants(next(running)) == {OURS, *MPICH}
    assert list(running) == []
    assert f"bench: {SMALL[1].name}, again without mpich: mpich failed: " in capfd.readouterr().err


def test_a_case_in_which_the_service_dies_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    running = sweep(SMALL, [])
    assert next(running).case == SMALL[0]
    kill_children(lambda command: "benchmarks.rank" in command)
    assert [each.case for each in running] == SMALL[2:]
    assert f"bench: LEFT OUT: {SMALL[1].name}: service failed: " in capfd.readouterr().err


def test_an_aggregator_that_does_not_start_is_an_error() -> None:
    expected = r"the aggregator did not get ready: .*transport\.kind"
    with pytest.raises(PeerError, match=expected), daemon(1, "transport.kind=pigeon"):
        pass


def test_a_server_that_is_gone_fails_as_a_competitor_does() -> None:
    with subprocess.Popen(["true"]) as process:
        servers = Servers("the aggregator", [], [os.getpid(), process.pid], 0.0)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(PeerError, match="the aggregator failed: one of its processes is gone"):
            servers.read(lambda pid: memory_mib("VmHWM", pid))  # nobody has waited for it yet
    with pytest.raises(PeerError, match="the aggregator failed: one of its processes is gone"):
        servers.cpu_seconds()


def test_skewed_data_and_the_bytes_of_each_shard() -> None:
    (result,) = sweep([Case("tcp", 2, "1 MiB", 0.1, kind="skew", rounds=1)], ["mpich"])
    (row,) = result.rows
    assert len(row["shard_bytes"]) == 4
    assert sum(row["shard_bytes"]) == pytest.approx(2 * (row["wire_up_bytes"] + row["wire_down_bytes"]), abs=2)
    (line,) = result.verdicts
    assert line.value == max(row["shard_bytes"]) / 1e6 > line.peer_value  # few blocks: they cannot be even


def test_the_bound_over_tcp_is_measured_for_what_is_dense() -> None:
    dense, sparse = sweep([Case("tcp", 2, "1 MiB", density, rounds=1) for density in (1.0, 0.1)], [])
    assert entrants(dense) == {OURS, BOUND}
    assert entrants(sparse) == {OURS}
    assert all(row["ms"] > 0 and row["cpu_s_per_gb"] > 0 for row in dense.rows)


@pytest.mark.parametrize("nbytes", [1, 3, 3 * MESSAGE_BYTES + 5, 9_999_999])
def test_plain_sockets_carry_every_byte_up_and_down(nbytes: int) -> None:
    tensor = np.random.default_rng(1).integers(256, size=nbytes, dtype=np.uint8)
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(echo_servers(2))
        first, second = (stack.enter_context(contextlib.closing(Carrier(servers.addresses))) for _ in range(2))
        for carrier in (first, second, first):
            result: Array = np.zeros_like(tensor)
            carrier.carry(tensor, result)
            assert np.array_equal(result, tensor)
        second.carry(result, result)
        assert np.array_equal(result, tensor)


def test_an_echo_server_that_is_gone_is_an_error() -> None:
    with echo_servers(1) as servers:
        carrier = Carrier(servers.addresses)
    with contextlib.closing(carrier), pytest.raises(ConnectionError):
        carrier.carry(np.zeros(8), np.zeros(8))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_memory_of_workers_and_shards(transport: str) -> None:
    """A worker maps its slots, 3 of 1.5 MiB each way for two shards, and loads its kernels. All of it counts."""
    result = measure(Case(transport, 2, "1 MiB", 1.0, kind="memory"))
    assert result.wrong == 0
    assert result.slots == 3 * 3 * 1.5
    assert 2 * 2 * 3 * 1.5 < result.joined <= result.worker
    assert 0 < result.shard < result.resident - result.slots


def test_a_small_tensor_beside_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urgent, "TRANSPORT_SETTINGS", {"shm": urgent.TRANSPORT_SETTINGS["shm"]})
    result = CliRunner().invoke(main, ["urgent", "--turns", "2"])
    assert result.exit_code in (0, 3), result.output  # a test does not judge the time
    rows = [line.split() for line in result.output.splitlines() if line.strip().startswith(tuple(urgent.URGENT_BYTES))]
    assert [row[-2:] for row in rows] == [["shm", "0"]] * 2  # transport, and number of wrong elements
    assert all(float(number) > 0 for row in rows for number in row[-6:-2])


ROW = {
    "entrant": OURS, "kind": "dense", "layout": "dedicated", "ranks": 2, "bytes": 104857600, "density": 1.0,
    "overlap": "random", "link_bytes_per_s": 119.6e6, "ms": 890.0, "cpu_s_per_gb": 5.0,
}  # fmt: skip


@pytest.mark.parametrize(("ms", "status", "word"), [(890.0, 0, "met"), (500.0, 3, "MISSED")])
def test_predictions_are_compared_with_what_was_measured(tmp_path: Path, ms: float, status: int, word: str) -> None:
    others = [ROW | {"entrant": "gloo"}, ROW | {"kind": "rows"}]
    (tmp_path / "testbed.json").write_text(json.dumps([*others, ROW | {"ms": ms}]))
    result = CliRunner().invoke(main, ["plan", "--results", str(tmp_path)])
    assert result.exit_code == status, result.output
    assert word in result.output
    assert result.output.count("dedicated, 2 ranks") == 2  # one row, and its verdict


@pytest.mark.parametrize("text", [None, "{", '[{"entrant": "omnireduce", "kind": "dense"}]'])
def test_rows_that_cannot_be_read_are_an_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "testbed.json").write_text(text)
    result = CliRunner().invoke(main, ["plan", "--results", str(tmp_path)])
    assert result.exit_code == 2
    assert "`shaped` writes it" in result.output
